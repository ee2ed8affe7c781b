//! Matching without a tokenizer: chained hashes over chunks of text.
//!
//! A prompt's bytes are cut into chunks of [`CHUNK_BYTES`], which play the part of blocks: [`SequenceHash`]es chain them, and
//! an approximate index ([`TtlIndex`](crate::index::TtlIndex)) learns from our own placements which worker has seen which.
//! The hashes use [`TEXT_SEED`](crate::block::TEXT_SEED), so text and token prompts never meet.
//!
//! # Where chunks end
//! At multiples of [`CHUNK_BYTES`], counted from the beginning of the current message, and at the end of each message. The
//! last chunk of a message may be shorter and is complete, since the message has ended; so an edited turn never moves the
//! boundaries of another one, and a conversation that grows keeps every chunk it had. A plain completion prompt is one
//! message without an end: its incomplete last chunk has no hash. Cuts are made at byte positions; a character that
//! straddles one does no harm, because only bytes are hashed.
//!
//! # Bytes of a message
//! A message is a sequence of [fields](TextField), each the byte `0xFF`, its [tag](TextField), and its content in which
//! every `0xFF` is followed by a 0; the message ends with `0xFF 0xFE`. UTF-8 has no byte `0xFF`, so this costs nothing for
//! text, nothing can be forged by content, and `"ab"` then `"c"` is never `"a"` then `"bc"`. No length comes before a
//! content: two messages that begin alike share their leading chunks, as they do in the engine.
//!
//! Salt is mixed into the first chunk, as with tokens: adapter name, cache salt, and every media digest. The engine knows
//! where in the prompt an item lies and we do not, so different items share no chunk at all; chat prompts rather pass theirs as
//! [`ContentPart::Other`], in place.

use xxhash_rust::xxh3::xxh3_128;

use crate::block::{BlockHashes, LocalBlockHash, SaltContext, SaltParts, SequenceHash};

/// Bytes per chunk: about one block of 16 tokens.
///
/// # Source
/// An estimate: English has about four characters per token ("What are tokens and how to count them?", OpenAI help centre,
/// article 4936856). Other languages and code have fewer, so a chunk is then more than a block; only the ratio between cached and uncached
/// chunks of one prompt decides where it goes.
pub const CHUNK_BYTES: usize = 64;

/// Tokens that a full chunk is taken for until engines report their counts: 64 bytes at about four bytes a token.
pub const TOKENS_PER_CHUNK: usize = 16;

/// Hashes the complete chunks of a plain completion prompt.
///
/// Cost: about 10 ns a chunk.
///
/// # Examples
/// ```
/// use kvlane::SaltContext;
/// use kvlane::text::text_hashes;
///
/// let salt = SaltContext::default();
/// let short = text_hashes(&"a".repeat(130), &salt);
/// let long = text_hashes(&"a".repeat(200), &salt);
/// assert_eq!((short.sequence.len(), long.sequence.len()), (2, 3)); // 130 = 2 × 64 + 2, 200 = 3 × 64 + 8
/// assert_eq!(short.sequence, long.sequence[..2]);
/// ```
#[must_use]
pub fn text_hashes(text: &str, salt: &SaltContext<'_>) -> BlockHashes {
    let mut hasher = TextHasher::new(salt);
    hasher.feed(text.as_bytes());
    hasher.finish_open()
}

/// Hashes a chat prompt: tools first, then each message.
///
/// `tools` are the canonical bytes of the tool definitions (the same tools must give the same bytes); absent and empty are
/// the same. Their digest leads them, so prompts with different tools share no chunk: where the template puts tools is unknown.
/// Text given as a string is one [`ContentPart::Text`]. Empty text is as good as absent.
///
/// A prompt shorter than one chunk has no hashes, see [`TextHasher::finish`].
///
/// # Examples
/// ```
/// use kvlane::SaltContext;
/// use kvlane::text::{ChatMessage, ContentPart, chat_hashes};
///
/// let salt = SaltContext::default();
/// let system = "You answer in one sentence, and you say so when you do not know.".repeat(2); // 2 × 64 bytes
/// let mut messages = vec![
///     ChatMessage::text("system", &system),
///     ChatMessage::text("user", "Why is the sky blue?"),
/// ];
/// let first = chat_hashes(None, &messages, &salt);
/// // 2 + 6 of the role, 2 + 128 of the text, 2 for the end: three chunks; then 2 + 4 + 2 + 20 + 2: one chunk.
/// assert_eq!(first.sequence.len(), 4);
///
/// messages.push(ChatMessage::text("assistant", "Rayleigh scattering."));
/// messages.push(ChatMessage::text("user", "And at dusk?"));
/// let second = chat_hashes(None, &messages, &salt);
/// assert_eq!(second.sequence[..4], first.sequence);
/// ```
#[must_use]
pub fn chat_hashes(
    tools: Option<&[u8]>,
    messages: &[ChatMessage<'_>],
    salt: &SaltContext<'_>,
) -> BlockHashes {
    let mut hasher = TextHasher::new(salt);
    if let Some(tools) = tools.filter(|tools| !tools.is_empty()) {
        hasher
            .digest(TextField::Tools, tools)
            .field(TextField::Tools, tools)
            .end_message();
    }
    for message in messages {
        message.feed(&mut hasher);
    }
    hasher.finish()
}

/// One message of a chat prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatMessage<'a> {
    /// Who speaks, as the request names it.
    pub role: &'a str,
    /// What is said, in order.
    pub parts: Vec<ContentPart<'a>>,
    /// Canonical bytes of everything else that the template may render: tool calls, a name, reasoning.
    pub extra: Option<&'a [u8]>,
}

/// A piece of a message's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentPart<'a> {
    /// Text.
    Text(&'a str),
    /// Anything else, by its canonical bytes or its identifier; only a digest of it is hashed.
    Other(&'a [u8]),
}

impl<'a> ChatMessage<'a> {
    /// Creates a message whose content is one string.
    #[must_use]
    pub fn text(role: &'a str, content: &'a str) -> Self {
        Self {
            role,
            parts: vec![ContentPart::Text(content)],
            extra: None,
        }
    }

    fn feed(&self, hasher: &mut TextHasher) {
        hasher.field(TextField::Role, self.role.as_bytes());
        for part in &self.parts {
            match part {
                ContentPart::Text("") => {}
                ContentPart::Text(text) => {
                    hasher.field(TextField::Text, text.as_bytes());
                }
                ContentPart::Other(bytes) => {
                    hasher.digest(TextField::Other, bytes);
                }
            }
        }
        if let Some(extra) = self.extra.filter(|extra| !extra.is_empty()) {
            hasher.field(TextField::Extra, extra);
        }
        hasher.end_message();
    }
}

/// What a field of a message says; its number is its tag among the hashed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TextField {
    /// Model name, where one index serves several.
    Model = 1,
    /// Tool definitions.
    Tools = 2,
    /// Role of the speaker.
    Role = 3,
    /// Text.
    Text = 4,
    /// Other content: images, sound, documents.
    Other = 5,
    /// Everything else of a message.
    Extra = 6,
}

/// Hashes a prompt piece by piece, in constant memory besides the hashes.
///
/// [`chat_hashes`] and [`text_hashes`] suffice for the usual prompts; this is for callers with another shape of request.
///
/// # Examples
/// ```
/// use kvlane::SaltContext;
/// use kvlane::text::{ChatMessage, TextField, TextHasher, chat_hashes};
///
/// let (salt, text) = (SaltContext::default(), "word ".repeat(40));
/// let mut hasher = TextHasher::new(&salt);
/// hasher.field(TextField::Role, b"user").field(TextField::Text, text.as_bytes()).end_message();
/// assert_eq!(hasher.finish(), chat_hashes(None, &[ChatMessage::text("user", &text)], &salt));
/// ```
#[derive(Clone, Debug)]
pub struct TextHasher {
    hashes: BlockHashes,
    /// Salt of the first chunk; empty from then on.
    salt: SaltParts,
    chunk: [u8; CHUNK_BYTES],
    filled_bytes: usize,
    total_bytes: usize,
    is_inside_message: bool,
}

impl TextHasher {
    /// Begins a prompt.
    #[must_use]
    pub fn new(salt: &SaltContext<'_>) -> Self {
        Self {
            hashes: BlockHashes::default(),
            salt: salt_parts(salt),
            chunk: [0; CHUNK_BYTES],
            filled_bytes: 0,
            total_bytes: 0,
            is_inside_message: false,
        }
    }

    /// Adds a field to the current message, beginning one when there is none.
    pub fn field(&mut self, field: TextField, content: &[u8]) -> &mut Self {
        self.is_inside_message = true;
        self.feed(&[MARK, field as u8]);
        if !content.contains(&MARK) {
            self.feed(content); // All text: only the search, which is fast, is paid for escaping.
            return self;
        }
        let mut pieces = content.split(|&byte| byte == MARK);
        self.feed(pieces.next().unwrap_or_default());
        for piece in pieces {
            self.feed(&[MARK, ESCAPED]);
            self.feed(piece);
        }
        self
    }

    /// Adds a field that stands for `content` by its digest (16 bytes): content that is not rendered as it is.
    pub fn digest(&mut self, field: TextField, content: &[u8]) -> &mut Self {
        self.field(field, &xxh3_128(content).to_le_bytes())
    }

    /// Ends the current message and its last chunk; without fields since the last end, nothing happens.
    pub fn end_message(&mut self) -> &mut Self {
        if self.is_inside_message {
            self.feed(&[MARK, END]);
            if self.filled_bytes > 0 {
                let chunk = self.chunk;
                self.push(&chunk[..self.filled_bytes]);
                self.filled_bytes = 0;
            }
            self.is_inside_message = false;
        }
        self
    }

    /// Ends the current message, if any, and returns the hashes of all chunks.
    ///
    /// A prompt shorter than one chunk in total has none: an engine keeps complete blocks only, so there is nothing to find
    /// again, and short prompts must not gather on the worker that saw the first of them.
    #[must_use]
    pub fn finish(mut self) -> BlockHashes {
        self.end_message();
        if self.total_bytes < CHUNK_BYTES {
            return BlockHashes::default();
        }
        self.hashes
    }

    /// Returns the hashes of the complete chunks of a prompt that goes on: the begun chunk has none.
    #[must_use]
    pub fn finish_open(self) -> BlockHashes {
        if self.total_bytes < CHUNK_BYTES {
            return BlockHashes::default();
        }
        self.hashes
    }

    fn feed(&mut self, mut bytes: &[u8]) {
        self.total_bytes += bytes.len();
        if self.filled_bytes > 0 {
            let (head, rest) = bytes.split_at(bytes.len().min(CHUNK_BYTES - self.filled_bytes));
            self.keep(head);
            bytes = rest;
            if self.filled_bytes < CHUNK_BYTES {
                return;
            }
            let chunk = self.chunk;
            self.push(&chunk);
            self.filled_bytes = 0;
        }
        let mut chunks = bytes.chunks_exact(CHUNK_BYTES);
        for chunk in &mut chunks {
            self.push(chunk);
        }
        self.keep(chunks.remainder());
    }

    /// Appends bytes that fit into the begun chunk.
    fn keep(&mut self, bytes: &[u8]) {
        let end = self.filled_bytes + bytes.len();
        self.chunk[self.filled_bytes..end].copy_from_slice(bytes);
        self.filled_bytes = end;
    }

    fn push(&mut self, chunk: &[u8]) {
        let local = match chunk.try_into() {
            Ok(full) if self.salt.is_empty() => LocalBlockHash::of_full_chunk(full),
            _ => LocalBlockHash::of_text(chunk, &self.salt),
        };
        let before = self
            .hashes
            .sequence
            .last()
            .copied()
            .unwrap_or(SequenceHash::EMPTY);
        let sequence = before.child(local, self.hashes.local.len());
        self.hashes.local.push(local);
        self.hashes.sequence.push(sequence);
        self.salt = SaltParts::new();
    }
}

/// Collects the salt of the first chunk.
fn salt_parts(salt: &SaltContext<'_>) -> SaltParts {
    let mut parts = SaltParts::new();
    parts.push_lora(salt.lora.unwrap_or_default());
    parts.push_salt(salt.salt.unwrap_or_default());
    let mut media: Vec<_> = salt.media.iter().collect();
    media.sort_by(|a, b| (a.offset_tokens, &a.digest).cmp(&(b.offset_tokens, &b.digest)));
    for span in media {
        let offset = i64::try_from(span.offset_tokens).unwrap_or(i64::MAX);
        parts.push_media(offset, &span.digest);
    }
    parts
}

/// Begins a field, an escape or an end; no UTF-8 text has this byte.
const MARK: u8 = 0xFF;
/// After [`MARK`]: the content has a `0xFF` here.
const ESCAPED: u8 = 0;
/// After [`MARK`]: the message ends.
const END: u8 = 0xFE;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::block::{BlockSize, MediaSpan, block_hashes};

    const LONG: &str = "The quick brown fox jumps over the lazy dog, then sleeps until noon.";

    fn chat(messages: &[(&str, &str)]) -> BlockHashes {
        let messages: Vec<_> = messages
            .iter()
            .map(|(role, text)| ChatMessage::text(role, text))
            .collect();
        chat_hashes(None, &messages, &SaltContext::default())
    }

    fn with_parts(parts: &[ContentPart<'_>]) -> BlockHashes {
        let message = ChatMessage {
            role: "user",
            parts: parts.to_vec(),
            extra: None,
        };
        chat_hashes(
            None,
            &[message, ChatMessage::text("user", LONG)],
            &SaltContext::default(),
        )
    }

    #[test]
    fn an_incomplete_chunk_of_a_plain_prompt_has_no_hash() {
        for (bytes, chunks) in [(0, 0), (63, 0), (64, 1), (127, 1), (128, 2)] {
            let hashes = text_hashes(&"x".repeat(bytes), &SaltContext::default());
            assert_eq!(hashes.sequence.len(), chunks, "{bytes} bytes");
            assert_eq!(hashes.local.len(), chunks);
        }
    }

    #[test]
    fn cuts_inside_a_character_are_harmless() {
        // 3 bytes a character: byte 64 lies inside the 22nd. 90 bytes have one complete chunk.
        let text = "語".repeat(30);
        let hashes = text_hashes(&text, &SaltContext::default());
        assert_eq!(
            hashes.local,
            [LocalBlockHash::of_text(
                &text.as_bytes()[..64],
                &SaltParts::new()
            )]
        );
    }

    #[test]
    fn message_borders_count() {
        let (left, right) = (
            chat(&[("user", "ab"), ("user", "c"), ("user", LONG)]),
            chat(&[("user", "a"), ("user", "bc"), ("user", LONG)]),
        );
        assert_eq!(left.sequence.len(), right.sequence.len());
        for (left, right) in left.sequence.iter().zip(&right.sequence) {
            assert_ne!(left, right);
        }
        assert_ne!(
            chat(&[("us", "er"), ("a", LONG)]),
            chat(&[("user", ""), ("a", LONG)])
        );
        assert_ne!(
            with_parts(&[ContentPart::Text("ab")]),
            with_parts(&[ContentPart::Text("a"), ContentPart::Text("b")])
        );
    }

    #[test]
    fn a_string_equals_a_list_of_one_text() {
        let as_list = [ChatMessage {
            role: "user",
            parts: vec![ContentPart::Text(LONG)],
            extra: None,
        }];
        assert_eq!(
            chat(&[("user", LONG)]),
            chat_hashes(None, &as_list, &SaltContext::default())
        );
        assert_eq!(with_parts(&[ContentPart::Text("")]), with_parts(&[]));
    }

    #[test]
    fn an_edited_last_turn_keeps_every_chunk_before_it() {
        // system: 2 + 6 + 2 + 68 + 2 = 80 bytes, two chunks; user: 2 + 4 + 2 + 68 + 2 = 78 bytes, two chunks.
        let first = chat(&[("system", LONG), ("user", LONG)]);
        let edited = chat(&[("system", LONG), ("user", "Something else that is short.")]);
        assert_eq!((first.sequence.len(), edited.sequence.len()), (4, 3));
        assert_eq!(first.sequence[..2], edited.sequence[..2]);
        assert_ne!(first.sequence[2], edited.sequence[2]);
        // Within a message the common beginning is shared as well: nothing before the content depends on its length.
        let extended = chat(&[("system", LONG), ("user", &format!("{LONG} Why?"))]);
        assert_eq!(first.sequence[..3], extended.sequence[..3]);
        assert_ne!(first.sequence[3], extended.sequence[3]);
    }

    #[test]
    fn salts_adapters_media_and_tools_share_no_chunk() {
        let media = [MediaSpan {
            offset_tokens: 3,
            length_tokens: 5,
            digest: vec![7; 32],
        }];
        let plain = SaltContext::default();
        let salts = [
            plain,
            SaltContext {
                salt: Some("a"),
                ..plain
            },
            SaltContext {
                salt: Some("b"),
                ..plain
            },
            SaltContext {
                lora: Some("a"),
                ..plain
            },
            SaltContext {
                lora: Some("a"),
                salt: Some("a"),
                ..plain
            },
            SaltContext {
                media: &media,
                ..plain
            },
        ];
        let text = LONG.repeat(4);
        let messages = [ChatMessage::text("user", &text)];
        let tools = [
            "",
            r#"[{"type":"function","function":{"name":"get_weather_of_a_town_today","x":1}}]"#,
        ];
        let other_tools = tools[1].replace(":1}", ":2}");
        let mut seen = HashSet::new();
        for salt in &salts {
            for tools in [tools[0], tools[1], &other_tools] {
                for hash in chat_hashes(Some(tools.as_bytes()), &messages, salt).sequence {
                    assert!(seen.insert(hash), "{salt:?} {tools}");
                }
            }
            for hash in text_hashes(&text, salt).sequence {
                assert!(seen.insert(hash), "{salt:?}");
            }
        }
        let empty = SaltContext {
            salt: Some(""),
            lora: Some(""),
            ..plain
        };
        assert_eq!(
            chat_hashes(Some(b""), &messages, &empty),
            chat_hashes(None, &messages, &plain)
        );
    }

    #[test]
    fn other_content_and_extra_are_never_silence() {
        let image = |bytes| with_parts(&[ContentPart::Text("look"), ContentPart::Other(bytes)]);
        assert_ne!(image(b"one"), image(b"two"));
        assert_ne!(image(b""), with_parts(&[ContentPart::Text("look")]));
        let mut call = ChatMessage::text("assistant", LONG);
        let without = chat_hashes(None, std::slice::from_ref(&call), &SaltContext::default());
        call.extra = Some(b"{\"tool_calls\":[]}");
        assert_ne!(without, chat_hashes(None, &[call], &SaltContext::default()));
    }

    #[test]
    fn empty_and_tiny_prompts_have_no_hashes() {
        assert_eq!(chat(&[]), BlockHashes::default());
        assert_eq!(chat(&[("user", "")]), BlockHashes::default());
        assert_eq!(chat(&[("user", "hi")]), BlockHashes::default());
        // 2 + 4 + 2 + 54 + 2 = 64.
        assert_eq!(chat(&[("user", &"x".repeat(53))]), BlockHashes::default());
        assert_eq!(chat(&[("user", &"x".repeat(54))]).sequence.len(), 1);
        let mut hasher = TextHasher::new(&SaltContext::default());
        hasher.end_message().end_message();
        assert_eq!(hasher.finish(), BlockHashes::default());
    }

    #[test]
    fn an_open_prompt_leaves_out_its_begun_chunk() {
        let mut open = TextHasher::new(&SaltContext::default());
        open.field(TextField::Text, LONG.as_bytes()); // 70 bytes
        let closed = open.clone().finish();
        let open = open.finish_open();
        assert_eq!((open.sequence.len(), closed.sequence.len()), (1, 2));
        assert_eq!(open.sequence, closed.sequence[..1]);
    }

    #[test]
    fn content_cannot_forge_fields_or_ends() {
        let hash = |fields: &[&[u8]]| {
            let mut hasher = TextHasher::new(&SaltContext::default());
            for field in fields {
                hasher.field(TextField::Other, field);
            }
            hasher.field(TextField::Text, LONG.as_bytes());
            hasher.finish()
        };
        assert_ne!(hash(&[b"a\xFF\x05b"]), hash(&[b"a", b"b"]));
        assert_ne!(hash(&[b"a\xFF\x00"]), hash(&[b"a\xFF"]));
        assert_ne!(hash(&[b"a\xFF\xFE"]), hash(&[b"a"]));
    }

    #[test]
    fn text_and_tokens_never_meet() {
        let bytes = [b'x'; CHUNK_BYTES];
        let tokens = [u32::from_le_bytes(*b"xxxx"); CHUNK_BYTES / 4];
        let of_tokens = block_hashes(
            &tokens,
            BlockSize::new(16).unwrap(),
            &SaltContext::default(),
        );
        let of_text = text_hashes(
            std::str::from_utf8(&bytes).unwrap(),
            &SaltContext::default(),
        );
        assert_eq!((of_tokens.local.len(), of_text.local.len()), (1, 1));
        assert_ne!(of_tokens.local, of_text.local);
    }

    fn conversations() -> impl Strategy<Value = Vec<(String, String)>> {
        prop::collection::vec(("(user|assistant|system)", ".{0,90}"), 0..6)
    }

    fn hashes_of(messages: &[(String, String)]) -> BlockHashes {
        let messages: Vec<_> = messages
            .iter()
            .map(|(role, text)| (&**role, &**text))
            .collect();
        chat(&messages)
    }

    proptest! {
        #[test]
        fn appending_a_turn_keeps_all_chunks(old in conversations(), new in conversations()) {
            let before = hashes_of(&old);
            let after = hashes_of(&[old, new].concat());
            prop_assert_eq!(&after.sequence[..before.sequence.len()], &*before.sequence);
            prop_assert_eq!(SequenceHash::chain(&after.local), after.sequence);
        }

        #[test]
        fn equal_prefixes_give_equal_chains(prefix in ".{0,300}", one in ".{0,80}", two in ".{0,80}") {
            let salt = SaltContext::default();
            let one = text_hashes(&format!("{prefix}{one}"), &salt);
            let two = text_hashes(&format!("{prefix}{two}"), &salt);
            let shared = prefix.len() / CHUNK_BYTES;
            prop_assert_eq!(&one.sequence[..shared], &two.sequence[..shared]);
        }

        #[test]
        fn different_conversations_end_differently(one in conversations(), two in conversations()) {
            let (first, second) = (hashes_of(&one), hashes_of(&two));
            if one != two && !first.sequence.is_empty() {
                prop_assert_ne!(first.sequence.last(), second.sequence.last());
            }
        }

        #[test]
        fn feeding_in_pieces_changes_nothing(text in prop::collection::vec(any::<u8>(), 0..400), cuts in prop::collection::vec(0_usize..400, 0..6)) {
            let mut whole = TextHasher::new(&SaltContext::default());
            let mut pieces = whole.clone();
            whole.feed(&text);
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.sort_unstable();
            let mut start = 0;
            for cut in cuts.into_iter().chain([text.len()]) {
                pieces.feed(&text[start..cut]);
                start = cut;
            }
            let expected: Vec<_> = text.chunks_exact(CHUNK_BYTES).map(|chunk| LocalBlockHash::of_text(chunk, &SaltParts::new())).collect();
            let whole = whole.finish_open();
            prop_assert_eq!(&whole.local, &expected);
            prop_assert_eq!(whole, pieces.finish_open());
        }
    }
}
