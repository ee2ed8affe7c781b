//! From an OpenAI chat body to the variables of a template, by the rules of vLLM's chat endpoint.
//!
//! # Source
//! vLLM 0.32 `renderers/chat_utils.py` (`_parse_chat_message_content`, `_postprocess_messages`), `renderers/hf.py`
//! (`safe_apply_chat_template`) and the models of `entrypoints/openai/chat_completion/protocol.py`.

use serde_json::{Map, Value, json};

use super::error::TokenizeError;
use super::scan::ContentFormat;

/// Keys of content parts that vLLM knows; the others are handed on to templates that want parts.
const KNOWN_PART_KEYS: [&str; 18] = [
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];

/// First words of a system text that changes with every request of one client, which the engine removes.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// Turns the body's messages into those that the template sees.
pub(super) fn conversation(
    body: &Map<String, Value>,
    format: ContentFormat,
    knows_developer: bool,
) -> Result<Vec<Value>, TokenizeError> {
    let Some(Value::Array(messages)) = body.get("messages") else {
        return Err(invalid("`messages` is not a list"));
    };
    let mut conversation = messages
        .iter()
        .enumerate()
        .map(|(index, message)| {
            parse_message(message, format).map_err(|error| at_message(index, error))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let has_developer = conversation
        .iter()
        .any(|message| role(message) == "developer");
    if has_developer && !knows_developer {
        developer_to_system(&mut conversation);
        merge_system(&mut conversation);
    }
    Ok(conversation.into_iter().map(Value::Object).collect())
}

/// Turns the body's tools into what pydantic dumps: fixed keys in a fixed order, `null` for an absent description.
pub(super) fn tools(body: &Map<String, Value>) -> Result<Option<Value>, TokenizeError> {
    let tools = match body.get("tools") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(tools)) if !tools.is_empty() => tools,
        Some(_) => return Err(invalid("`tools` is not a list of at least one tool")),
    };
    tools
        .iter()
        .map(parse_tool)
        .collect::<Result<_, _>>()
        .map(Value::Array)
        .map(Some)
}

fn parse_tool(tool: &Value) -> Result<Value, TokenizeError> {
    let Some(function) = tool.get("function").and_then(Value::as_object) else {
        return Err(invalid("a tool lacks `function`"));
    };
    if !function.get("name").is_some_and(Value::is_string) {
        return Err(invalid("a tool's function lacks `name`"));
    }
    let own = |key: &str| function.get(key).cloned().unwrap_or(Value::Null);
    let deferred = tool.get("defer_loading").filter(|value| !value.is_null());
    let mut parsed = Map::new();
    for key in ["name", "description", "parameters"] {
        parsed.insert(key.to_owned(), own(key));
    }
    let optional = [
        ("strict", own("strict")),
        (
            "defer_loading",
            match (own("defer_loading"), deferred) {
                (Value::Null, Some(outer)) => outer.clone(),
                (inner, _) => inner,
            },
        ),
    ];
    for (key, value) in optional {
        if !value.is_null() {
            parsed.insert(key.to_owned(), value);
        }
    }
    let mut out = Map::new();
    out.insert("type".to_owned(), json!("function"));
    out.insert("function".to_owned(), Value::Object(parsed));
    if let Some(deferred) = deferred {
        out.insert("defer_loading".to_owned(), deferred.clone());
    }
    Ok(Value::Object(out))
}

fn parse_message(
    message: &Value,
    format: ContentFormat,
) -> Result<Map<String, Value>, TokenizeError> {
    let Some(message) = message.as_object() else {
        return Err(invalid("it is not an object"));
    };
    let Some(role) = message.get("role").and_then(Value::as_str) else {
        return Err(invalid("it lacks `role`"));
    };
    let mut parsed = Map::new();
    parsed.insert("role".to_owned(), json!(role));
    parsed.insert("content".to_owned(), content(message, role, format)?);
    match role {
        "assistant" => {
            if let Some(calls) = tool_calls(message)? {
                parsed.insert("tool_calls".to_owned(), calls);
            }
            let reasoning = ["reasoning", "reasoning_content"]
                .into_iter()
                .filter_map(|key| message.get(key))
                .find(|value| !value.is_null());
            if let Some(reasoning) = reasoning {
                parsed.insert("reasoning".to_owned(), reasoning.clone());
                parsed.insert("reasoning_content".to_owned(), reasoning.clone());
            }
        }
        "tool" => {
            if let Some(id) = message.get("tool_call_id") {
                parsed.insert("tool_call_id".to_owned(), id.clone());
            }
        }
        _ => {}
    }
    for key in ["name", "task"] {
        if let Some(value @ Value::String(_)) = message.get(key) {
            parsed.insert(key.to_owned(), value.clone());
        }
    }
    if role == "developer" {
        let tools = message.get("tools").cloned().unwrap_or(Value::Null);
        parsed.insert("tools".to_owned(), tools);
    }
    Ok(parsed)
}

/// A message's content in the template's format.
fn content(
    message: &Map<String, Value>,
    role: &str,
    format: ContentFormat,
) -> Result<Value, TokenizeError> {
    let parts = match message.get("content") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::String(text)) => vec![Part::text(text)],
        Some(Value::Array(parts)) => parts
            .iter()
            .map(Part::parse)
            .filter_map(Result::transpose)
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(invalid("`content` is neither text nor a list of parts")),
    };
    let parts: Vec<Part<'_>> = if role == "system" {
        parts
            .into_iter()
            .filter_map(Part::without_billing_header)
            .collect()
    } else {
        parts
    };
    let plain = parts.iter().all(|part| part.kind == "text");
    if format == ContentFormat::Text || (role == "tool" && plain) {
        let texts: Vec<&str> = parts.iter().map(|part| part.text).collect();
        return Ok(Value::String(texts.join("\n")));
    }
    Ok(parts.into_iter().map(Part::into_value).collect())
}

/// A content part that is text.
struct Part<'a> {
    kind: &'static str,
    text: &'a str,
    /// Where the text stood in the body: a plain text or a `text` part, the two that may hold a billing header.
    may_be_header: bool,
    extra: Map<String, Value>,
}

impl<'a> Part<'a> {
    fn text(text: &'a str) -> Self {
        Self {
            kind: "text",
            text,
            may_be_header: true,
            extra: Map::new(),
        }
    }

    /// Reads a part; `None` for one without content, which the engine skips.
    fn parse(part: &'a Value) -> Result<Option<Self>, TokenizeError> {
        let object = match part {
            Value::String(text) => return Ok(Some(Self::text(text))),
            Value::Object(object) => object,
            _ => return Err(invalid("a content part is neither text nor an object")),
        };
        let kind = object.get("type").and_then(Value::as_str);
        let (kind, key) = match kind {
            Some("text" | "input_text" | "output_text") => ("text", "text"),
            Some("refusal") => ("text", "refusal"),
            Some("thinking") => ("text", "thinking"),
            Some("tool_reference") => ("tool_reference", "name"),
            Some(other) => {
                return Err(TokenizeError::Unsupported(format!(
                    "content parts of type {other:?}"
                )));
            }
            None => {
                return Err(TokenizeError::Unsupported(
                    "content parts without `type`".to_owned(),
                ));
            }
        };
        if object.get("uuid").is_some_and(|uuid| !uuid.is_null()) {
            return Err(TokenizeError::Unsupported(
                "content parts with `uuid`".to_owned(),
            ));
        }
        let text = match object.get(key) {
            Some(Value::String(text)) => text,
            None | Some(Value::Null) if matches!(key, "text" | "refusal") => return Ok(None),
            _ => return Err(invalid(&format!("a content part lacks text in `{key}`"))),
        };
        let extra = if kind == "text" {
            object
                .iter()
                .filter(|(key, _)| !KNOWN_PART_KEYS.contains(&key.as_str()))
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect()
        } else {
            Map::new()
        };
        Ok(Some(Self {
            kind,
            text,
            may_be_header: object.get("type").is_some_and(|kind| kind == "text"),
            extra,
        }))
    }

    /// Removes the header's line; `None` when nothing is left.
    fn without_billing_header(mut self) -> Option<Self> {
        if self.may_be_header && self.text.starts_with(BILLING_HEADER) {
            let (_, rest) = self.text.split_once('\n')?;
            if rest.is_empty() {
                return None;
            }
            self.text = rest;
        }
        Some(self)
    }

    fn into_value(self) -> Value {
        if self.kind == "tool_reference" {
            return json!({"type": self.kind, "name": self.text});
        }
        let mut object = Map::new();
        object.insert("type".to_owned(), json!(self.kind));
        object.insert("text".to_owned(), json!(self.text));
        object.extend(self.extra);
        Value::Object(object)
    }
}

/// An assistant's tool calls with their arguments as objects; `None` when there are none.
fn tool_calls(message: &Map<String, Value>) -> Result<Option<Value>, TokenizeError> {
    let calls = match message.get("tool_calls") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(calls)) => calls,
        Some(_) => return Err(invalid("`tool_calls` is not a list")),
    };
    if calls.is_empty() {
        return Ok(None);
    }
    calls
        .iter()
        .map(tool_call)
        .collect::<Result<_, _>>()
        .map(Value::Array)
        .map(Some)
}

/// One tool call, its keys in the order of the OpenAI types: `id`, `function` (`arguments`, `name`), `type`, others.
fn tool_call(call: &Value) -> Result<Value, TokenizeError> {
    let (Some(call), Some(function)) = (
        call.as_object(),
        call.get("function").and_then(Value::as_object),
    ) else {
        return Err(invalid("an entry of `tool_calls` lacks `function`"));
    };
    if call.get("type").is_some_and(|kind| kind != "function") {
        return Err(invalid(
            "an entry of `tool_calls` has another type than \"function\"",
        ));
    }
    let mut function = reordered(function, &["arguments", "name"]);
    let arguments = object_of(function.get("arguments"));
    function.insert("arguments".to_owned(), arguments);
    let mut call = reordered(call, &["id", "function", "type"]);
    call.insert("function".to_owned(), Value::Object(function));
    Ok(Value::Object(call))
}

/// Arguments as an object; whatever is no object, or text of none, becomes an empty one.
fn object_of(arguments: Option<&Value>) -> Value {
    let parsed = match arguments {
        Some(Value::String(text)) => serde_json::from_str(text).unwrap_or(Value::Null),
        Some(other) => other.clone(),
        None => Value::Null,
    };
    if parsed.is_object() {
        parsed
    } else {
        json!({})
    }
}

/// The entries of `first` in that order, then the others in theirs.
fn reordered(object: &Map<String, Value>, first: &[&str]) -> Map<String, Value> {
    let front = first.iter().filter_map(|key| object.get_key_value(*key));
    let back = object
        .iter()
        .filter(|(key, _)| !first.contains(&key.as_str()));
    front
        .chain(back)
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

fn developer_to_system(conversation: &mut [Map<String, Value>]) {
    for message in conversation {
        if role(message) == "developer" {
            message.insert("role".to_owned(), json!("system"));
            message.shift_remove("tools");
        }
    }
}

/// Merges all system messages into one at the front, unless there is only one and it is there already.
fn merge_system(conversation: &mut Vec<Map<String, Value>>) {
    let is_system = |message: &Map<String, Value>| role(message) == "system";
    let scattered = conversation
        .iter()
        .enumerate()
        .any(|(index, message)| index > 0 && is_system(message));
    if !scattered {
        return;
    }
    let mut texts = Vec::new();
    for message in conversation.iter().filter(|message| is_system(message)) {
        let text = match message.get("content") {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(parts)) => {
                let texts: Vec<&str> = parts
                    .iter()
                    .filter_map(|part| part.get("text")?.as_str())
                    .collect();
                texts.join("\n")
            }
            _ => String::new(),
        };
        if !text.is_empty() {
            texts.push(text);
        }
    }
    conversation.retain(|message| !is_system(message));
    let mut merged = Map::new();
    merged.insert("role".to_owned(), json!("system"));
    merged.insert("content".to_owned(), json!(texts.join("\n\n")));
    conversation.insert(0, merged);
}

fn role(message: &Map<String, Value>) -> &str {
    message
        .get("role")
        .and_then(Value::as_str)
        .unwrap_or_default()
}

fn invalid(reason: &str) -> TokenizeError {
    TokenizeError::Invalid(reason.to_owned())
}

fn at_message(index: usize, error: TokenizeError) -> TokenizeError {
    match error {
        TokenizeError::Invalid(reason) => {
            TokenizeError::Invalid(format!("messages[{index}]: {reason}"))
        }
        other => other,
    }
}
