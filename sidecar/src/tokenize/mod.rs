//! From text and chats to the engine's token ids, with the model's own tokenizer and chat template.
//!
//! An index fed by KV events knows token ids, so a chat must be rendered and tokenized exactly as the engine does it:
//! one differing byte in front makes every block miss. Rendering follows vLLM and transformers; what cannot be
//! followed (images, request-supplied templates, models with an encoder of their own) is a
//! [`TokenizeError::Unsupported`], never a guess.
//!
//! [`ModelTokenizer`] is immutable and shared between threads; its calls are CPU work of some milliseconds for a long
//! prompt and belong off the event loop.

mod error;
mod files;
mod messages;
mod python;
mod scan;
mod template;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde_json::{Map, Value, json};
use tokenizers::{AddedToken, Tokenizer};

pub use self::error::TokenizeError;
use self::files::{AddedTokenEntry, ModelFiles};
use self::template::{ChatTemplate, Clock};

/// The tokenizer and chat templates of one model folder.
pub struct ModelTokenizer {
    tokenizer: Tokenizer,
    special_tokens: BTreeMap<String, String>,
    templates: BTreeMap<String, ChatTemplate>,
    processor_template: Option<ChatTemplate>,
    /// Templates that could not be compiled, by name, with the reason; an error only for the request that needs one.
    broken_templates: BTreeMap<String, String>,
    foreign_chat_format: Option<String>,
}

impl ModelTokenizer {
    /// Loads a model folder as it lies beside an engine's weights.
    ///
    /// Reads `tokenizer.json` (required), `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`,
    /// `additional_chat_templates/`, `chat_template.json` and `config.json`. `add_bos_token` is not looked at: with a
    /// `tokenizer.json`, transformers takes its post-processor as it is. Takes about a second for a large vocabulary.
    ///
    /// # Errors
    /// [`TokenizeError::Load`] names the file. A template that does not compile is no error here; it fails with its
    /// reason when a chat needs it (see [`template_error`](Self::template_error)).
    pub fn load(folder: &Path) -> Result<Self, TokenizeError> {
        Self::load_with_clock(folder, template::local_time)
    }

    fn load_with_clock(folder: &Path, clock: Clock) -> Result<Self, TokenizeError> {
        let files = ModelFiles::read(folder)?;
        let mut tokenizer = load_tokenizer(folder)?;
        add_missing_tokens(&mut tokenizer, &files)
            .map_err(|reason| TokenizeError::load(&folder.join("tokenizer_config.json"), reason))?;
        let mut templates = BTreeMap::new();
        let mut broken_templates = BTreeMap::new();
        for (name, source) in &files.templates {
            match ChatTemplate::compile(source, clock) {
                Ok(template) => {
                    templates.insert(name.clone(), template);
                }
                Err(reason) => {
                    broken_templates.insert(name.clone(), reason);
                }
            }
        }
        let processor_template = match &files.processor_template {
            Some(source) => match ChatTemplate::compile(source, clock) {
                Ok(template) => Some(template),
                Err(reason) => {
                    broken_templates.insert("processor".to_owned(), reason);
                    None
                }
            },
            None => None,
        };
        Ok(Self {
            tokenizer,
            special_tokens: files.special_tokens,
            templates,
            processor_template,
            broken_templates,
            foreign_chat_format: files.foreign_chat_format,
        })
    }

    /// Tells why chats cannot be tokenized with this folder at all, if so; worth one log line at the start.
    #[must_use]
    pub fn template_error(&self) -> Option<String> {
        if let Some(format) = &self.foreign_chat_format {
            return Some(TokenizeError::Unsupported(format.clone()).to_string());
        }
        self.template_for(false)
            .err()
            .map(|error| error.to_string())
    }

    /// Tokenizes a text prompt as `/v1/completions` does, special tokens of the post-processor added.
    ///
    /// # Errors
    /// [`TokenizeError::Encode`].
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, TokenizeError> {
        self.encode(text, true)
    }

    /// Tokenizes a text, with or without the post-processor's special tokens.
    ///
    /// # Errors
    /// [`TokenizeError::Encode`].
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizeError> {
        self.tokenizer
            .encode_fast(text, add_special_tokens)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| TokenizeError::Encode(error.to_string()))
    }

    /// Tokenizes one text prompt of a `/v1/completions` body by that body's `add_special_tokens` and truncation.
    ///
    /// # Errors
    /// [`TokenizeError::Invalid`], [`TokenizeError::Unsupported`] and [`TokenizeError::Encode`].
    pub fn encode_prompt(&self, body: &Value, prompt: &str) -> Result<Vec<u32>, TokenizeError> {
        self.encode_by(body_object(body)?, prompt, true)
    }

    /// Renders and tokenizes the body of a `/v1/chat/completions` request.
    ///
    /// # Errors
    /// As [`render_chat`](Self::render_chat), and [`TokenizeError::Encode`].
    pub fn encode_chat(&self, body: &Value) -> Result<Vec<u32>, TokenizeError> {
        let rendered = self.render_chat(body)?;
        self.encode_by(body_object(body)?, &rendered, false)
    }

    /// Tokenizes a text as the body asks; `special_by_default` is what an absent `add_special_tokens` means.
    fn encode_by(
        &self,
        body: &Map<String, Value>,
        text: &str,
        special_by_default: bool,
    ) -> Result<Vec<u32>, TokenizeError> {
        let add_special_tokens = flag(body, "add_special_tokens", special_by_default)?;
        let truncation = Truncation::of(body, add_special_tokens)?;
        let mut ids = self.encode(text, add_special_tokens)?;
        if let Some(truncation) = truncation {
            truncation.apply(&mut ids);
        }
        Ok(ids)
    }

    /// Renders the body of a `/v1/chat/completions` request to the text that the engine tokenizes.
    ///
    /// # Errors
    /// [`TokenizeError::Invalid`] for a body that the engine refuses as well, [`TokenizeError::Render`] when the
    /// template fails, [`TokenizeError::Unsupported`] for what only the engine can render.
    pub fn render_chat(&self, body: &Value) -> Result<String, TokenizeError> {
        let body = body_object(body)?;
        self.refuse_unsupported(body)?;
        let tools = messages::tools(body)?;
        let kwargs = template_kwargs(body, tools)?;
        let with_tools = kwargs.contains_key("tools");
        let template = self.template_for(with_tools)?;
        let developer = template.mentions("\"developer\"") || template.mentions("'developer'");
        let mut messages = messages::conversation(body, template.content_format(), developer)?;
        let continued = continued_text(body, template, &mut messages)?;
        let rendered = template.render(self.variables(messages, kwargs))?;
        match continued {
            Some(text) => cut_after(&rendered, &text),
            None => Ok(rendered),
        }
    }

    fn refuse_unsupported(&self, body: &Map<String, Value>) -> Result<(), TokenizeError> {
        let unsupported = |what: &str| Err(TokenizeError::Unsupported(what.to_owned()));
        if let Some(format) = &self.foreign_chat_format {
            return unsupported(format);
        }
        let set = |object: &Map<String, Value>, key: &str| {
            object.get(key).is_some_and(|value| !value.is_null())
        };
        if set(body, "chat_template") {
            return unsupported("chats that bring their own `chat_template`");
        }
        if let Some(Value::Object(kwargs)) = body.get("chat_template_kwargs") {
            for key in ["chat_template", "tokenize"] {
                if set(kwargs, key) {
                    return unsupported(&format!("chats with `chat_template_kwargs.{key}`"));
                }
            }
        }
        Ok(())
    }

    /// Chooses the template: the processor's without tools, `tool_use` with tools, else the default.
    fn template_for(&self, with_tools: bool) -> Result<&ChatTemplate, TokenizeError> {
        if let Some(template) = self.processor_template.as_ref().filter(|_| !with_tools) {
            return Ok(template);
        }
        let knows = |name: &str| {
            self.templates.contains_key(name) || self.broken_templates.contains_key(name)
        };
        let name = if with_tools && knows("tool_use") {
            "tool_use"
        } else {
            "default"
        };
        if let Some(template) = self.templates.get(name) {
            return Ok(template);
        }
        match self.broken_templates.get(name) {
            Some(reason) => Err(TokenizeError::Render(format!(
                "the template {name:?} does not compile: {reason}"
            ))),
            None => Err(TokenizeError::Unsupported(
                "chats of a model without a chat template".to_owned(),
            )),
        }
    }

    /// Everything the template sees.
    fn variables(&self, messages: Vec<Value>, kwargs: Map<String, Value>) -> Map<String, Value> {
        let mut variables = Map::new();
        for (name, token) in &self.special_tokens {
            variables.insert(name.clone(), json!(token));
        }
        variables.insert("tools".to_owned(), Value::Null);
        variables.insert("documents".to_owned(), Value::Null);
        variables.extend(kwargs);
        variables.insert("messages".to_owned(), Value::Array(messages));
        variables
    }
}

impl fmt::Debug for ModelTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelTokenizer")
            .field("special_tokens", &self.special_tokens)
            .field("templates", &self.templates)
            .field("broken_templates", &self.broken_templates)
            .field("foreign_chat_format", &self.foreign_chat_format)
            .finish_non_exhaustive()
    }
}

/// With `continue_final_message`, marks the end of the last message's text and returns that text.
fn continued_text(
    body: &Map<String, Value>,
    template: &ChatTemplate,
    messages: &mut [Value],
) -> Result<Option<String>, TokenizeError> {
    if !flag(body, "continue_final_message", false)? {
        return Ok(None);
    }
    if flag(body, "add_generation_prompt", true)? {
        return Err(TokenizeError::Invalid(
            "`continue_final_message` and `add_generation_prompt` exclude each other".to_owned(),
        ));
    }
    if !template.mentions("content") {
        return Err(TokenizeError::Render(
            "it does not print `content`".to_owned(),
        ));
    }
    let content = messages
        .last_mut()
        .and_then(|message| message.get_mut("content"));
    let text = match content {
        Some(Value::String(text)) => Some(text),
        Some(Value::Array(parts)) => parts
            .iter_mut()
            .rev()
            .filter_map(|part| part.get_mut("text"))
            .find_map(|text| match text {
                Value::String(text) => Some(text),
                _ => None,
            }),
        _ => None,
    };
    let Some(text) = text else {
        return Err(TokenizeError::Invalid(
            "`continue_final_message` is set and the last message has no text".to_owned(),
        ));
    };
    let original = text.clone();
    text.push_str(CONTINUE_TAG);
    Ok(Some(original))
}

/// Put at the end of a message that is to be continued, so that what the template adds after it can be cut.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Cuts a rendering at the tag, and trailing space with it where the template trimmed the message.
fn cut_after(rendered: &str, text: &str) -> Result<String, TokenizeError> {
    let at = rendered
        .rfind(CONTINUE_TAG.trim_end())
        .filter(|_| rendered.contains(text.trim()));
    let Some(at) = at else {
        return Err(TokenizeError::Render(
            "it does not print the last message, which `continue_final_message` needs".to_owned(),
        ));
    };
    let (head, tail) = rendered.split_at(at);
    Ok(if tail.starts_with(CONTINUE_TAG) {
        head
    } else {
        head.trim_end()
    }
    .to_owned())
}

/// The template's keyword arguments: the body's own fields win over `chat_template_kwargs`, and an unset value is
/// left out, which templates can tell from false.
fn template_kwargs(
    body: &Map<String, Value>,
    tools: Option<Value>,
) -> Result<Map<String, Value>, TokenizeError> {
    let given = match body.get("chat_template_kwargs") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(kwargs)) => kwargs.clone(),
        Some(_) => {
            return Err(TokenizeError::Invalid(
                "`chat_template_kwargs` is not an object".to_owned(),
            ));
        }
    };
    if given.contains_key("messages") || given.contains_key("conversation") {
        return Err(TokenizeError::Invalid(
            "`chat_template_kwargs` must not hold messages".to_owned(),
        ));
    }
    let mut kwargs = Map::new();
    if let Some(tools) = tools {
        kwargs.insert("tools".to_owned(), tools);
    }
    let chose_thinking = given.contains_key("enable_thinking");
    kwargs.extend(given.into_iter().filter(|(_, value)| is_set(value)));
    for key in ["documents", "reasoning_effort"] {
        if let Some(value) = body.get(key).filter(|value| is_set(value)) {
            kwargs.insert(key.to_owned(), value.clone());
        }
    }
    if let Some(effort) = body
        .get("reasoning_effort")
        .filter(|effort| !effort.is_null())
        && !chose_thinking
    {
        kwargs.insert("enable_thinking".to_owned(), json!(effort != "none"));
    }
    for (key, default) in [
        ("add_generation_prompt", true),
        ("continue_final_message", false),
    ] {
        kwargs.insert(key.to_owned(), json!(flag(body, key, default)?));
    }
    // Taken by transformers itself, never seen by a template.
    kwargs.shift_remove("continue_final_message");
    Ok(kwargs)
}

/// A body's `truncate_prompt_tokens`.
struct Truncation {
    tokens: usize,
    keeps_front: bool,
}

impl Truncation {
    /// Reads it where it is a plain cut: beside special tokens and without a side, the tokenizer would keep those.
    fn of(
        body: &Map<String, Value>,
        add_special_tokens: bool,
    ) -> Result<Option<Self>, TokenizeError> {
        let tokens = match body.get("truncate_prompt_tokens") {
            None | Some(Value::Null) => return Ok(None),
            Some(value) => value.as_i64(),
        };
        let side = body.get("truncation_side").filter(|side| !side.is_null());
        let tokens = tokens.and_then(|tokens| usize::try_from(tokens).ok());
        match tokens {
            Some(tokens @ 1..) if side.is_some() || !add_special_tokens => Ok(Some(Self {
                tokens,
                keeps_front: side.is_some_and(|side| side == "right"),
            })),
            _ => Err(TokenizeError::Unsupported(
                "prompts truncated to the engine's limit or beside special tokens".to_owned(),
            )),
        }
    }

    fn apply(&self, ids: &mut Vec<u32>) {
        let surplus = ids.len().saturating_sub(self.tokens);
        if self.keeps_front {
            ids.truncate(self.tokens);
        } else {
            ids.drain(..surplus);
        }
    }
}

/// Tells a value from those that vLLM treats as unset.
fn is_set(value: &Value) -> bool {
    !value.is_null() && value != "auto"
}

fn body_object(body: &Value) -> Result<&Map<String, Value>, TokenizeError> {
    body.as_object()
        .ok_or_else(|| TokenizeError::Invalid("it is not a JSON object".to_owned()))
}

fn flag(body: &Map<String, Value>, key: &str, default: bool) -> Result<bool, TokenizeError> {
    match body.get(key) {
        None => Ok(default),
        Some(Value::Bool(value)) => Ok(*value),
        Some(other) => Err(TokenizeError::Invalid(format!(
            "`{key}` is {other}, expected true or false"
        ))),
    }
}

fn load_tokenizer(folder: &Path) -> Result<Tokenizer, TokenizeError> {
    let path = folder.join("tokenizer.json");
    let text = files::read_text(&path)?
        .ok_or_else(|| TokenizeError::load(&path, "there is no such file"))?;
    let mut tokenizer: Tokenizer = text
        .parse()
        .map_err(|error| TokenizeError::load(&path, error))?;
    // Settings of training that engines switch off when they tokenize a prompt.
    tokenizer.with_padding(None);
    tokenizer
        .with_truncation(None)
        .map_err(|error| TokenizeError::load(&path, error))?;
    Ok(tokenizer)
}

/// Adds what `tokenizer_config.json` declares and `tokenizer.json` lacks.
fn add_missing_tokens(tokenizer: &mut Tokenizer, files: &ModelFiles) -> Result<(), String> {
    let known: std::collections::HashSet<String> = tokenizer
        .get_added_tokens_decoder()
        .into_values()
        .map(|token| token.content)
        .collect();
    let declared = files.added_tokens.iter().cloned();
    let named = files
        .special_tokens
        .values()
        .map(|content| AddedTokenEntry {
            content: content.clone(),
            special: true,
            normalized: false,
            lstrip: false,
            rstrip: false,
            single_word: false,
        });
    let mut missing: Vec<AddedToken> = Vec::new();
    for entry in declared.chain(named) {
        if known.contains(&entry.content)
            || missing.iter().any(|token| token.content == entry.content)
        {
            continue;
        }
        missing.push(
            AddedToken::from(entry.content, entry.special)
                .normalized(entry.normalized)
                .lstrip(entry.lstrip)
                .rstrip(entry.rstrip)
                .single_word(entry.single_word),
        );
    }
    if missing.is_empty() {
        return Ok(());
    }
    tokenizer
        .add_tokens(missing)
        .map(|_| ())
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests;
