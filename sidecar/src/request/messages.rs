//! Chat-like prompts as text: tools, then each message with its role and parts.

use kvlane::{BlockHashes, SaltContext, chat};
use serde_json::value::RawValue;

use super::fields::Fields;

/// Hashes the messages of chat, the input of responses, or the messages of the messages API.
pub(super) fn hashes(
    fields: &Fields<'_>,
    raw: &RawValue,
    salt: &SaltContext<'_>,
) -> Option<BlockHashes> {
    let leading: Vec<(&str, &str)> = [fields.system, fields.instructions]
        .into_iter()
        .flatten()
        .map(|value| ("system", value.get()))
        .collect();
    let tools = fields.tools.map(RawValue::get);
    chat::hashes(&leading, raw.get(), tools, salt).ok()
}

/// Tells whether some message has a part that is not text.
pub(super) fn have_media(raw: &RawValue) -> bool {
    chat::has_media(raw.get())
}
