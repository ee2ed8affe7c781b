//! Chat prompts as JSON, for callers that have a request's body or a language's objects rather than
//! [`ChatMessage`]s: matching without a tokenizer, see [`text`](crate::text).
//!
//! What is hashed is the JSON as it was written: role and text parts by their content, any other part by a digest of its
//! JSON, other fields of a message (tool calls, a name) by key in alphabetical order, `null` being absent. A content given as
//! a string and as a list of one text part hash alike.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::value::RawValue;

use crate::block::{BlockHashes, SaltContext};
use crate::error::{Error, Result};
use crate::text::{ChatMessage, ContentPart, chat_hashes};

/// Hashes a chat prompt: tools, the `leading` messages of (role, content), then `messages`.
///
/// `messages` is a JSON list of messages, or a string that stands for one message of the user. `tools` is JSON of any shape,
/// taken as it is written, so the same tools must be written the same way. `leading` is for fields that a template renders
/// before the messages, such as `system`.
///
/// # Errors
/// [`ErrorKind::InvalidRequest`](crate::ErrorKind::InvalidRequest) when `messages` is neither a list nor a string, or it or a
/// leading content is not JSON.
///
/// # Examples
/// ```
/// use kvlane::{SaltContext, chat};
///
/// let salt = SaltContext::default();
/// let text = "word ".repeat(40);
/// let plain = format!(r#"[{{"role": "user", "content": "{text}"}}]"#);
/// let parts = format!(r#"[{{"role": "user", "content": [{{"type": "text", "text": "{text}"}}]}}]"#);
/// let hashes = chat::hashes(&[], &plain, None, &salt)?;
/// assert_eq!(hashes.local.len(), 4); // 2 + 4 of the role, 2 + 200 of the text, 2 for the end: 3 × 64 + 18
/// assert_eq!(hashes, chat::hashes(&[], &parts, None, &salt)?);
/// # Ok::<(), kvlane::Error>(())
/// ```
pub fn hashes(
    leading: &[(&str, &str)],
    messages: &str,
    tools: Option<&str>,
    salt: &SaltContext<'_>,
) -> Result<BlockHashes> {
    let mut read = Vec::new();
    for (role, content) in leading {
        read.push(Message {
            role: Cow::Borrowed(role),
            parts: parts(json("content", content)?),
            extra: Vec::new(),
        });
    }
    if messages.trim_start().starts_with('"') {
        read.push(Message {
            role: Cow::Borrowed("user"),
            parts: parts(json("messages", messages)?),
            extra: Vec::new(),
        });
    } else {
        let items: Vec<&RawValue> = serde_json::from_str(messages)
            .map_err(|error| refused("messages", "a list of messages or a string", error))?;
        read.extend(items.into_iter().map(message));
    }
    let borrowed: Vec<ChatMessage<'_>> = read.iter().map(Message::borrow).collect();
    let tools = tools
        .map(|tools| tools.trim().as_bytes())
        .filter(|tools| *tools != b"null");
    Ok(chat_hashes(tools, &borrowed, salt))
}

/// Tells whether some message has a part that is not text. JSON that is no list has none.
#[must_use]
pub fn has_media(messages: &str) -> bool {
    let items: Vec<&RawValue> = serde_json::from_str(messages).unwrap_or_default();
    items.into_iter().any(|item| {
        let parts = message(item).parts;
        parts.iter().any(|part| matches!(part, Part::Other(_)))
    })
}

struct Message<'a> {
    role: Cow<'a, str>,
    parts: Vec<Part<'a>>,
    /// Everything else of the message, as it was written, by key.
    extra: Vec<u8>,
}

enum Part<'a> {
    Text(Cow<'a, str>),
    Other(&'a [u8]),
}

impl Message<'_> {
    fn borrow(&self) -> ChatMessage<'_> {
        ChatMessage {
            role: &self.role,
            parts: self.parts.iter().map(Part::borrow).collect(),
            extra: Some(&self.extra),
        }
    }
}

impl Part<'_> {
    fn borrow(&self) -> ContentPart<'_> {
        match self {
            Self::Text(text) => ContentPart::Text(text),
            Self::Other(bytes) => ContentPart::Other(bytes),
        }
    }
}

fn message(raw: &RawValue) -> Message<'_> {
    let Ok(mut object) = serde_json::from_str::<BTreeMap<Cow<'_, str>, &RawValue>>(raw.get())
    else {
        // Not an object: the engine will refuse it; until then it is what it is.
        return Message {
            role: Cow::Borrowed(""),
            parts: vec![Part::Other(raw.get().as_bytes())],
            extra: Vec::new(),
        };
    };
    let role = object.remove("role").and_then(text_of).unwrap_or_default();
    let parts = object.remove("content").map(parts).unwrap_or_default();
    let mut extra = Vec::new();
    for (key, value) in object {
        if value.get() != "null" {
            extra.extend_from_slice(key.as_bytes());
            extra.push(b'=');
            extra.extend_from_slice(value.get().as_bytes());
            extra.push(0);
        }
    }
    Message { role, parts, extra }
}

fn parts(raw: &RawValue) -> Vec<Part<'_>> {
    if let Some(text) = text_of(raw) {
        return vec![Part::Text(text)];
    }
    match serde_json::from_str::<Vec<&RawValue>>(raw.get()) {
        Ok(items) => items.into_iter().map(part).collect(),
        Err(_) if raw.get() == "null" => Vec::new(),
        Err(_) => vec![Part::Other(raw.get().as_bytes())],
    }
}

fn part(raw: &RawValue) -> Part<'_> {
    if let Some(text) = text_of(raw) {
        return Part::Text(text);
    }
    let text = serde_json::from_str::<BTreeMap<Cow<'_, str>, &RawValue>>(raw.get())
        .ok()
        .and_then(|object| {
            let kind = object.get("type").and_then(|raw| text_of(raw))?;
            let is_text = matches!(&*kind, "text" | "input_text" | "output_text");
            is_text.then(|| object.get("text").and_then(|raw| text_of(raw)))?
        });
    text.map_or_else(|| Part::Other(raw.get().as_bytes()), Part::Text)
}

/// Returns the content of a JSON string; borrowed when nothing in it is escaped.
fn text_of(raw: &RawValue) -> Option<Cow<'_, str>> {
    let inner = raw.get().strip_prefix('"')?.strip_suffix('"')?;
    if !inner.contains('\\') {
        return Some(Cow::Borrowed(inner));
    }
    serde_json::from_str(raw.get()).ok().map(Cow::Owned)
}

fn json<'a>(name: &str, text: &'a str) -> Result<&'a RawValue> {
    serde_json::from_str(text).map_err(|error| refused(name, "JSON", error))
}

fn refused(name: &str, accepted: &str, error: serde_json::Error) -> Error {
    Error::invalid(format!("{name} cannot be read: {accepted} is accepted")).with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn of(messages: &str, tools: Option<&str>) -> BlockHashes {
        hashes(&[], messages, tools, &SaltContext::default()).unwrap()
    }

    fn user(fields: &str) -> String {
        format!(
            r#"[{{"role": "user", "content": "{}"{fields}}}]"#,
            "x".repeat(80)
        )
    }

    #[test]
    fn extra_fields_count_in_any_order_and_null_is_absent() {
        assert_eq!(of(&user(r#", "name": null"#), None), of(&user(""), None));
        assert_ne!(of(&user(r#", "name": "a""#), None), of(&user(""), None));
        assert_eq!(
            of(&user(r#", "name": "a", "b": [1]"#), None),
            of(&user(r#", "b": [1], "name": "a""#), None)
        );
    }

    #[test]
    fn a_string_is_a_message_of_the_user() {
        let text = format!(r#""{}""#, "x".repeat(80));
        assert_eq!(of(&text, None), of(&user(""), None));
    }

    #[test]
    fn tools_lead_and_null_tools_are_none() {
        let messages = user("");
        assert_eq!(of(&messages, Some("null")), of(&messages, None));
        let with = of(&messages, Some(r#"[{"type": "function"}]"#));
        assert_ne!(with.sequence[0], of(&messages, None).sequence[0]);
    }

    #[test]
    fn parts_that_are_not_text_are_media() {
        assert!(!has_media(&user("")));
        assert!(has_media(
            r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]"#
        ));
    }

    #[test]
    fn what_is_not_json_is_refused_by_name() {
        let salt = SaltContext::default();
        for (leading, messages, name) in [
            (&[][..], "[", "messages"),
            (&[][..], "{}", "messages"),
            (&[][..], "\"", "messages"),
            (&[("system", "x")][..], "[]", "content"),
        ] {
            let error = hashes(leading, messages, None, &salt).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidRequest);
            assert!(error.to_string().starts_with(name), "{error}");
        }
    }

    /// Depth is skipped over without recursion, so a hostile one is a digest and no overflow of the stack.
    #[test]
    fn deep_nesting_is_a_digest() {
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(hashes(&[], &deep, Some(&deep), &SaltContext::default()).is_ok());
        let inside = format!(r#"[{{"role": "user", "content": {deep}}}]"#);
        assert!(hashes(&[], &inside, None, &SaltContext::default()).is_ok());
    }
}
