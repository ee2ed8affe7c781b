//! The arguments that describe a prompt, alike in every call.

use kvlane::{BlockHashes, BlockSize, Prompt, SaltContext, block_hashes};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::convert::{Media, Tokens, text, to_json};
use crate::error::{invalid, to_py};

/// Above this many tokens, or as many times [`BYTES_PER_TOKEN`] bytes, the interpreter is released: what is left to do then
/// takes longer than giving it back and waiting for it.
const LONG_TOKENS: usize = 8_192;
const BYTES_PER_TOKEN: usize = 4;

/// A prompt as it was given.
enum Content<'a> {
    Tokens(Tokens),
    Text(&'a str),
    Messages { json: String, tools: Option<String> },
}

/// A prompt with its salt.
pub(crate) struct PromptArguments<'a> {
    content: Content<'a>,
    lora: Option<&'a str>,
    salt: Option<&'a str>,
    media: Media,
}

impl<'a> PromptArguments<'a> {
    pub(crate) fn new(
        tokens: Option<Tokens>,
        plain: Option<&'a Bound<'_, PyString>>,
        messages: Option<&Bound<'_, PyAny>>,
        tools: Option<&Bound<'_, PyAny>>,
        lora: Option<&'a str>,
        salt: Option<&'a str>,
        media: Option<Media>,
    ) -> PyResult<Self> {
        if tools.is_some() && messages.is_none() {
            return Err(invalid("tools are accepted with messages only".to_owned()));
        }
        let content = match (tokens, plain, messages) {
            (Some(tokens), None, None) => Content::Tokens(tokens),
            (None, Some(plain), None) => Content::Text(text("text", plain)?),
            (None, None, Some(messages)) => Content::Messages {
                json: to_json(messages, "messages", invalid)?,
                tools: tools
                    .map(|tools| to_json(tools, "tools", invalid))
                    .transpose()?,
            },
            _ => {
                return Err(invalid(
                    "a prompt is one of tokens, text and messages; give exactly one".to_owned(),
                ));
            }
        };
        Ok(Self {
            content,
            lora,
            salt,
            media: media.unwrap_or_default(),
        })
    }

    /// Hashes the prompt and hands it on, without the interpreter when it is long.
    pub(crate) fn with_prompt<T: Send>(
        self,
        py: Python<'_>,
        block_size: BlockSize,
        then: impl FnOnce(&Prompt) -> kvlane::Result<T> + Send,
    ) -> PyResult<T> {
        self.run(py, |arguments| then(&arguments.prompt(block_size)?))
    }

    /// Hashes the prompt alone.
    pub(crate) fn hashes(self, py: Python<'_>, block_size: BlockSize) -> PyResult<BlockHashes> {
        self.run(py, |arguments| arguments.hash(block_size))
    }

    fn run<T: Send>(
        self,
        py: Python<'_>,
        work: impl FnOnce(Self) -> kvlane::Result<T> + Send,
    ) -> PyResult<T> {
        let is_long = match &self.content {
            Content::Tokens(tokens) => tokens.len() > LONG_TOKENS,
            Content::Text(text) => text.len() > LONG_TOKENS * BYTES_PER_TOKEN,
            Content::Messages { json, .. } => json.len() > LONG_TOKENS * BYTES_PER_TOKEN,
        };
        let result = if is_long {
            py.detach(|| work(self))
        } else {
            work(self)
        };
        result.map_err(to_py)
    }

    fn prompt(self, block_size: BlockSize) -> kvlane::Result<Prompt> {
        if let Content::Tokens(tokens) = self.content {
            let salt = salt_context(self.lora, self.salt, &self.media);
            return Ok(Prompt::from_tokens(
                &tokens.into_checked()?,
                block_size,
                &salt,
            ));
        }
        self.hash(block_size).map(Prompt::from_text)
    }

    fn hash(self, block_size: BlockSize) -> kvlane::Result<BlockHashes> {
        let salt = salt_context(self.lora, self.salt, &self.media);
        match self.content {
            Content::Tokens(tokens) => Ok(block_hashes(&tokens.into_checked()?, block_size, &salt)),
            Content::Text(text) => Ok(kvlane::text::text_hashes(text, &salt)),
            Content::Messages { json, tools } => {
                kvlane::chat::hashes(&[], &json, tools.as_deref(), &salt)
            }
        }
    }
}

fn salt_context<'a>(
    lora: Option<&'a str>,
    salt: Option<&'a str>,
    media: &'a Media,
) -> SaltContext<'a> {
    SaltContext {
        lora,
        salt,
        media: &media.0,
    }
}
