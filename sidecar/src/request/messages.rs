//! Chat-like prompts as text: tools, then each message with its role and parts.

use std::borrow::Cow;
use std::collections::BTreeMap;

use kvlane::text::{ChatMessage, ContentPart, chat_hashes};
use kvlane::{BlockHashes, SaltContext};
use serde_json::value::RawValue;

use super::fields::Fields;
use super::text_of;

/// Hashes the messages of chat, the input of responses, or the messages of the messages API.
///
/// A content given as a string and as a list of one text part hash alike.
pub(super) fn hashes(
    fields: &Fields<'_>,
    raw: &RawValue,
    salt: &SaltContext<'_>,
) -> Option<BlockHashes> {
    let mut messages = Vec::new();
    for (role, value) in [("system", fields.system), ("system", fields.instructions)] {
        if let Some(value) = value {
            messages.push(Message {
                role: Cow::Borrowed(role),
                parts: parts(value),
                extra: Vec::new(),
            });
        }
    }
    if let Some(text) = text_of(raw) {
        messages.push(Message {
            role: Cow::Borrowed("user"),
            parts: vec![Part::Text(text)],
            extra: Vec::new(),
        });
    } else {
        let items: Vec<&RawValue> = serde_json::from_str(raw.get()).ok()?;
        messages.extend(items.into_iter().map(message));
    }
    let borrowed: Vec<ChatMessage<'_>> = messages.iter().map(Message::borrow).collect();
    let tools = fields
        .tools
        .map(|raw| raw.get().as_bytes())
        .filter(|tools| *tools != b"null");
    Some(chat_hashes(tools, &borrowed, salt))
}

/// Tells whether some message has a part that is not text.
pub(super) fn have_media(raw: &RawValue) -> bool {
    let items: Vec<&RawValue> = serde_json::from_str(raw.get()).unwrap_or_default();
    items.into_iter().any(|item| {
        message(item)
            .parts
            .iter()
            .any(|part| matches!(part, Part::Other(_)))
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
