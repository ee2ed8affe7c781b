//! Request bodies, and what they ask of the engine. Unknown fields are ignored, as by vLLM.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::Service;
use super::error::ApiError;
use super::transfer;
use crate::engine::tokenizer::ChatMessage;
use crate::engine::transfer::{Asked, RoomFields};

/// Fields that both generating endpoints share.
#[derive(Debug, Deserialize)]
pub(super) struct Sampling {
    model: Option<String>,
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    n: Option<i64>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    cache_salt: Option<String>,
    kv_transfer_params: Option<Value>,
    bootstrap_host: Option<Value>,
    bootstrap_port: Option<Value>,
    bootstrap_room: Option<Value>,
    /// The engine has no end token, so every answer is as long as asked; the field is checked for its type only.
    #[expect(dead_code, reason = "a wrong type is refused as by vLLM")]
    ignore_eos: Option<bool>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
}

/// Body of `/v1/completions`; `/tokenize` takes the same prompt.
#[derive(Debug, Deserialize)]
pub(super) struct CompletionBody {
    pub(super) prompt: Option<Prompt>,
}

/// Body of `/v1/chat/completions`; `/tokenize` takes the same messages.
#[derive(Debug, Deserialize)]
pub(super) struct ChatBody<'a> {
    messages: Vec<Message>,
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
    add_generation_prompt: Option<bool>,
}

/// One prompt or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Prompt {
    Text(String),
    Tokens(Vec<i64>),
    Several(Vec<OnePrompt>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum OnePrompt {
    Text(String),
    Tokens(Vec<i64>),
}

#[derive(Debug, Deserialize)]
struct Message {
    role: String,
    content: Option<Content>,
    tool_calls: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

/// A checked request, ready for the engine.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) prompts: Vec<Vec<u32>>,
    /// Answers to each prompt.
    pub(super) samples: usize,
    pub(super) max_tokens: usize,
    pub(super) salt: Option<String>,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) continuous_usage: bool,
    pub(super) asked: Asked,
}

/// Reads a body, or says where it is wrong.
pub(super) fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body)
        .map_err(|error| ApiError::bad_request(format!("Invalid request body: {error}"), None))
}

impl Sampling {
    /// Checks the request against what the engine can do.
    pub(super) fn check(self, service: &Service, prompts: Vec<Vec<u32>>) -> Result<Job, ApiError> {
        let samples = bounded("n", self.n.unwrap_or(1), MAX_SEQUENCES)?;
        if prompts.len() * samples > MAX_SEQUENCES {
            let message = format!(
                "{} prompts times n={samples} is over {MAX_SEQUENCES} sequences.",
                prompts.len()
            );
            return Err(ApiError::bad_request(message, Some("prompt")));
        }
        let wanted = self
            .max_completion_tokens
            .or(self.max_tokens)
            .unwrap_or(DEFAULT_MAX_TOKENS);
        let max_tokens = bounded("max_tokens", wanted, usize::MAX)?;
        for prompt in &prompts {
            check_prompt(service, prompt, max_tokens)?;
        }
        let salt = self.cache_salt;
        if salt.as_deref().is_some_and(str::is_empty) {
            let message = "Parameter 'cache_salt' must be a non-empty string if provided.";
            return Err(ApiError::bad_request(message, Some("cache_salt")));
        }
        let stream = self.stream.unwrap_or(false);
        if self.stream_options.is_some() && !stream {
            let message = "Stream options can only be defined when `stream=True`.";
            return Err(ApiError::bad_request(message, Some("stream_options")));
        }
        let whole = !stream && prompts.len() * samples == 1;
        let rooms = RoomFields {
            host: self.bootstrap_host.as_ref(),
            port: self.bootstrap_port.as_ref(),
            room: self.bootstrap_room.as_ref(),
        };
        let asked = transfer::read(self.kv_transfer_params.as_ref(), rooms, service, whole)?;
        let options = self.stream_options.unwrap_or_default();
        let include_usage = options.include_usage.unwrap_or(false);
        Ok(Job {
            prompts,
            samples,
            max_tokens,
            salt,
            stream,
            asked,
            include_usage,
            continuous_usage: include_usage && options.continuous_usage_stats.unwrap_or(false),
        })
    }

    /// Refuses a model that is not served; none named means the one there is.
    pub(super) fn check_model(&self, service: &Service) -> Result<(), ApiError> {
        match &self.model {
            Some(model) if *model != service.model_name => Err(ApiError::unknown_model(model)),
            _ => Ok(()),
        }
    }
}

impl Prompt {
    /// Returns the tokens of every prompt.
    pub(super) fn tokenize(self, service: &Service) -> Result<Vec<Vec<u32>>, ApiError> {
        match self {
            Self::Text(text) => Ok(vec![service.tokenizer.encode(&text)]),
            Self::Tokens(tokens) => Ok(vec![check_tokens(service, &tokens)?]),
            Self::Several(prompts) => {
                if prompts.len() > MAX_SEQUENCES {
                    let message = format!(
                        "{} prompts are over the limit of {MAX_SEQUENCES}.",
                        prompts.len()
                    );
                    return Err(ApiError::bad_request(message, Some("prompt")));
                }
                prompts
                    .into_iter()
                    .map(|prompt| prompt.tokenize(service))
                    .collect()
            }
        }
    }
}

impl OnePrompt {
    fn tokenize(self, service: &Service) -> Result<Vec<u32>, ApiError> {
        match self {
            Self::Text(text) => Ok(service.tokenizer.encode(&text)),
            Self::Tokens(tokens) => check_tokens(service, &tokens),
        }
    }
}

impl ChatBody<'_> {
    /// Returns the tokens of the conversation.
    pub(super) fn tokenize(&self, service: &Service) -> Result<Vec<u32>, ApiError> {
        if self.messages.is_empty() {
            return Err(ApiError::bad_request(
                "messages must not be empty.",
                Some("messages"),
            ));
        }
        let messages: Result<Vec<ChatMessage>, ApiError> = self
            .messages
            .iter()
            .map(|message| message.flatten(service))
            .collect();
        let tools = self
            .tools
            .map(RawValue::get)
            .filter(|tools| *tools != "null");
        Ok(service.tokenizer.encode_chat(
            &messages?,
            tools,
            self.add_generation_prompt.unwrap_or(true),
        ))
    }
}

impl Message {
    fn flatten(&self, service: &Service) -> Result<ChatMessage, ApiError> {
        let mut content = match &self.content {
            None => Cow::Borrowed(""),
            Some(Content::Text(text)) => Cow::Borrowed(text.as_str()),
            Some(Content::Parts(parts)) => {
                let texts: Result<Vec<&str>, ApiError> =
                    parts.iter().map(|part| part.text(service)).collect();
                Cow::Owned(texts?.join("\n"))
            }
        };
        if let Some(calls) = self.tool_calls.as_ref().filter(|calls| !calls.is_null()) {
            content = Cow::Owned(format!("{content} {calls}"));
        }
        Ok(ChatMessage {
            role: self.role.clone(),
            content: content.into_owned(),
        })
    }
}

impl Part {
    fn text(&self, service: &Service) -> Result<&str, ApiError> {
        if matches!(self.kind.as_str(), "text" | "input_text" | "output_text") {
            return Ok(self.text.as_deref().unwrap_or_default());
        }
        let message = format!(
            "{} is not a multimodal model; content of type {:?} is refused.",
            service.model_name, self.kind
        );
        Err(ApiError::bad_request(message, Some("messages")))
    }
}

/// Default of `max_tokens`, as for vLLM's completions; chat has it too, since no end token would stop an answer.
const DEFAULT_MAX_TOKENS: i64 = 16;

/// Sequences that one request may ask for.
const MAX_SEQUENCES: usize = 1024;

fn bounded(name: &'static str, value: i64, most: usize) -> Result<usize, ApiError> {
    match usize::try_from(value) {
        Ok(count) if (1..=most).contains(&count) => Ok(count),
        _ => {
            let upper = if most == usize::MAX {
                String::new()
            } else {
                format!(" and at most {most}")
            };
            Err(ApiError::bad_request(
                format!("{name} must be at least 1{upper}, got {value}."),
                Some(name),
            ))
        }
    }
}

fn check_tokens(service: &Service, tokens: &[i64]) -> Result<Vec<u32>, ApiError> {
    let vocabulary = service.tokenizer.vocabulary();
    let check = |&token: &i64| {
        let id = u32::try_from(token).ok().filter(|id| *id < vocabulary);
        id.ok_or_else(|| {
            ApiError::bad_request(
                format!(
                    "Token id {token} is out of vocabulary (0 to {}).",
                    vocabulary - 1
                ),
                Some("prompt"),
            )
        })
    };
    tokens.iter().map(check).collect()
}

fn check_prompt(service: &Service, prompt: &[u32], max_tokens: usize) -> Result<(), ApiError> {
    if prompt.is_empty() {
        return Err(ApiError::bad_request(
            "The decoder prompt cannot be empty.",
            Some("prompt"),
        ));
    }
    let limit = service.max_model_len;
    if prompt.len().saturating_add(max_tokens) <= limit {
        return Ok(());
    }
    let message = format!(
        "This model's maximum context length is {limit} tokens. However, you requested {max_tokens} output tokens and your \
         prompt contains {} input tokens, for a total of {} tokens. Please reduce the length of the input prompt or the \
         number of requested output tokens.",
        prompt.len(),
        prompt.len().saturating_add(max_tokens)
    );
    Err(ApiError::bad_request(message, Some("input_tokens")))
}
