//! What the proxy reads from a request: which API it is, its prompt, its namespace, and what must not be forwarded.
//!
//! Reading never decides whether a request is valid; the engine does. A body that cannot be read is routed by load. The
//! bytes are forwarded as they came, with one exception: a trusted tenant salt is written into the body, because routing
//! by one salt while the engine caches under another would promise hits that the engine must refuse.

mod fields;
mod guard;
mod messages;
mod parts;
mod salt;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use kvlane::text::text_hashes;
use kvlane::{BlockSize, Prompt, SaltContext, WorkerId};
use serde_json::Value;
use serde_json::value::RawValue;
use tracing::warn;

use crate::fleet::Members;
use crate::metrics::Metrics;
use crate::tokenize::TokenizeError;
use fields::Fields;
pub(crate) use guard::is_handoff;
pub(crate) use parts::has_few_parts;

/// The APIs whose prompts are understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
    /// `/v1/embeddings`
    Embeddings,
    /// `/inference/v1/generate` and `/generate`
    Generate,
    /// Anything else: passed through, placed by load.
    Other,
}

impl Endpoint {
    /// Every API, for metrics with one series each.
    pub const ALL: [Self; 7] = [
        Self::Chat,
        Self::Completions,
        Self::Responses,
        Self::Messages,
        Self::Embeddings,
        Self::Generate,
        Self::Other,
    ];

    /// Tells which API a path belongs to.
    #[must_use]
    pub fn of(path: &str) -> Self {
        match path.strip_suffix('/').unwrap_or(path) {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            "/v1/embeddings" => Self::Embeddings,
            "/inference/v1/generate" | "/generate" => Self::Generate,
            _ => Self::Other,
        }
    }

    /// Returns the name used in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat_completions",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::Embeddings => "embeddings",
            Self::Generate => "generate",
            Self::Other => "other",
        }
    }

    /// Tells whether a complete event stream of this API says that it is complete.
    #[must_use]
    pub const fn has_end_marker(self) -> bool {
        matches!(
            self,
            Self::Chat | Self::Completions | Self::Responses | Self::Messages
        )
    }
}

/// Turns text into the engine's token ids; CPU work without I/O.
pub trait Tokenize: Send + Sync {
    /// Encodes a plain prompt with the special tokens that the engine adds.
    ///
    /// # Errors
    /// Says why it cannot.
    fn encode_text(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizeError>;

    /// Renders the body of a chat request with the model's template and encodes it.
    ///
    /// # Errors
    /// Says why it cannot.
    fn encode_chat(&self, body: &Value) -> Result<Vec<u32>, TokenizeError>;
}

/// What a request's headers say, when they are believed.
#[derive(Clone, Debug, Default)]
pub struct Trusted {
    /// Replaces the body's cache salt.
    pub tenant_salt: Option<String>,
}

/// A request, read.
#[derive(Debug)]
pub struct Reading {
    /// The body to forward: the one received, unless a trusted salt had to be written into it.
    pub body: Bytes,
    /// The prompt; without blocks when it is not understood.
    pub prompt: Prompt,
    /// Blocks of the further prompts of a batch.
    pub extra_blocks: u32,
    /// Output tokens to expect, when the request limits them.
    pub expected_output_tokens: Option<u32>,
    /// Workers that serve the model, when not all do.
    pub only: Option<Vec<WorkerId>>,
    /// A handoff field that the client sent.
    pub handoff_field: Option<String>,
    /// How the prompt was understood.
    pub mode: Mode,
    /// The engine's cached tokens can be held against the prompt.
    pub audited: bool,
    /// The trusted salt could not be written into the body, which an engine may read with the client's own.
    pub lacks_tenant_salt: bool,
}

/// How a prompt was understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// As token ids, comparable with engine events.
    Tokens,
    /// As text, comparable with earlier requests.
    Text,
    /// Not at all: placed by load.
    Load,
}

impl Mode {
    /// Returns the name used in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Text => "text",
            Self::Load => "load",
        }
    }
}

/// Reads requests.
pub struct Reader {
    block_size: BlockSize,
    tokenizer: Option<Arc<dyn Tokenize>>,
    metrics: Arc<Metrics>,
    /// A tokenizer's failure has been logged: it is said once and kept in a gauge.
    complained: AtomicBool,
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader")
            .field("block_size", &self.block_size)
            .field("has_tokenizer", &self.tokenizer.is_some())
            .finish_non_exhaustive()
    }
}

impl Reader {
    /// Creates a reader; without a tokenizer, text is matched as text.
    #[must_use]
    pub fn new(
        block_size: BlockSize,
        tokenizer: Option<Arc<dyn Tokenize>>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            block_size,
            tokenizer,
            metrics,
            complained: AtomicBool::new(false),
        }
    }

    /// Tells whether reading a body of that size is too much work for the event loop.
    ///
    /// In text mode reading takes about 1 µs a KB in a release build (from the CPU time of the whole proxy: 0.055 ms a
    /// request of 7.5 KB, 0.30 ms at 177 KB), so below 64 KB the loop is held for less than a hop to another thread and
    /// back costs when cores are busy. Tokenizing costs more than a hop from the first sentence on.
    #[must_use]
    pub fn is_heavy(&self, endpoint: Endpoint, body_bytes: usize) -> bool {
        const HOP_PAYS_FROM: usize = 64 << 10;
        let tokenizes = self.tokenizer.is_some() && endpoint != Endpoint::Other;
        body_bytes > if tokenizes { 512 } else { HOP_PAYS_FROM }
    }

    /// Reads a request.
    #[must_use]
    pub fn read(
        &self,
        endpoint: Endpoint,
        body: Bytes,
        trusted: &Trusted,
        members: &Members,
    ) -> Reading {
        if !guard::may_hold_object(&body) {
            return self.by_load(body);
        }
        let Ok(fields) = serde_json::from_slice::<Fields<'_>>(&body) else {
            return self.unreadable(endpoint, body, trusted);
        };
        let handoff_field = guard::handoff_field(&fields);
        let model = fields.model.and_then(text_of).unwrap_or_default();
        let entry = members.model(&model);
        let salt_text = match &trusted.tenant_salt {
            Some(salt) => Some(Cow::Borrowed(salt.as_str())),
            None => fields.cache_salt.and_then(text_of),
        };
        let salt = SaltContext {
            lora: entry
                .is_some_and(|entry| entry.is_adapter)
                .then_some(&*model),
            salt: salt_text.as_deref(),
            media: &[],
        };
        let found = self.prompt(endpoint, &fields, &body, &salt);
        let rewritten = trusted
            .tenant_salt
            .as_deref()
            .and_then(|salt| salt::write(&body, &fields, salt));
        Reading {
            prompt: found.prompt,
            extra_blocks: found.extra_blocks,
            expected_output_tokens: fields.max_output_tokens(),
            only: entry.and_then(|entry| entry.only.clone()),
            handoff_field,
            mode: found.mode,
            audited: found.audited && fields.is_audited(),
            body: rewritten.unwrap_or(body),
            lacks_tenant_salt: false,
        }
    }

    /// A body that an engine with another parser may still read: UTF-16, NaN, half of a surrogate pair.
    fn unreadable(&self, endpoint: Endpoint, body: Bytes, trusted: &Trusted) -> Reading {
        let lacks_tenant_salt = trusted.tenant_salt.is_some()
            && (endpoint != Endpoint::Other || guard::mentions(&body, "cache_salt"));
        Reading {
            handoff_field: guard::mentioned_in(&body),
            lacks_tenant_salt,
            ..self.by_load(body)
        }
    }

    fn by_load(&self, body: Bytes) -> Reading {
        let found = self.nothing();
        Reading {
            body,
            prompt: found.prompt,
            extra_blocks: 0,
            expected_output_tokens: None,
            only: None,
            handoff_field: None,
            mode: Mode::Load,
            audited: false,
            lacks_tenant_salt: false,
        }
    }

    fn nothing(&self) -> Found {
        Found {
            prompt: Prompt::from_tokens(&[], self.block_size, &SaltContext::default()),
            extra_blocks: 0,
            mode: Mode::Load,
            audited: false,
        }
    }

    fn prompt(
        &self,
        endpoint: Endpoint,
        fields: &Fields<'_>,
        body: &[u8],
        salt: &SaltContext<'_>,
    ) -> Found {
        let found = match endpoint {
            Endpoint::Chat => fields
                .messages
                .and_then(|raw| self.chat(fields, raw, body, salt)),
            Endpoint::Completions => fields.prompt.and_then(|raw| self.plain(fields, raw, salt)),
            Endpoint::Embeddings => fields
                .input
                .and_then(|raw| self.plain(fields, raw, salt))
                .or_else(|| {
                    fields
                        .messages
                        .and_then(|raw| self.chat(fields, raw, body, salt))
                }),
            Endpoint::Generate => fields
                .token_ids
                .or(fields.input_ids)
                .or(fields.prompt)
                .or(fields.text)
                .and_then(|raw| self.plain(fields, raw, salt)),
            Endpoint::Responses => fields.input.and_then(|raw| self.as_text(fields, raw, salt)),
            Endpoint::Messages => fields
                .messages
                .and_then(|raw| self.as_text(fields, raw, salt)),
            Endpoint::Other => None,
        };
        found.unwrap_or_else(|| self.nothing())
    }

    /// Reads a prompt that is a text, token ids, or a list of either.
    fn plain(&self, fields: &Fields<'_>, raw: &RawValue, salt: &SaltContext<'_>) -> Option<Found> {
        let special = fields.adds_special_tokens();
        if raw.get().starts_with('"') {
            return text_of(raw).map(|text| self.one_text(&text, special, salt));
        }
        if let Ok(tokens) = serde_json::from_str::<Vec<u32>>(raw.get()) {
            return Some(self.one_list(&tokens, salt));
        }
        let batch: Vec<&RawValue> = serde_json::from_str(raw.get()).ok()?;
        let (first, rest) = batch.split_first()?;
        let mut found = match first.get().as_bytes().first()? {
            b'"' => self.one_text(&text_of(first)?, special, salt),
            _ => self.one_list(&serde_json::from_str::<Vec<u32>>(first.get()).ok()?, salt),
        };
        let extra: usize = rest.iter().map(|raw| self.estimated_blocks(raw)).sum();
        found.extra_blocks = u32::try_from(extra).unwrap_or(u32::MAX);
        // Of several prompts an engine reports one.
        found.audited = rest.is_empty();
        Some(found)
    }

    /// Estimates the blocks of a further prompt of a batch without reading it closely.
    fn estimated_blocks(&self, raw: &RawValue) -> usize {
        let text = raw.get();
        let tokens = if text.starts_with('[') {
            text.bytes().filter(|byte| *byte == b',').count() + 1
        } else {
            text.len() / BYTES_PER_TOKEN
        };
        tokens.div_ceil(self.block_size.tokens())
    }

    fn one_list(&self, tokens: &[u32], salt: &SaltContext<'_>) -> Found {
        Found {
            prompt: Prompt::from_tokens(tokens, self.block_size, salt),
            extra_blocks: 0,
            mode: Mode::Tokens,
            audited: true,
        }
    }

    fn one_text(&self, text: &str, special: bool, salt: &SaltContext<'_>) -> Found {
        if let Some(tokenizer) = &self.tokenizer {
            match tokenizer.encode_text(text, special) {
                Ok(tokens) => return self.one_list(&tokens, salt),
                Err(why) => self.not_tokenized("prompt could not be tokenized", &why),
            }
        }
        Found::text(Prompt::from_text(text_hashes(text, salt)))
    }

    fn chat(
        &self,
        fields: &Fields<'_>,
        raw: &RawValue,
        body: &[u8],
        salt: &SaltContext<'_>,
    ) -> Option<Found> {
        // Placeholder tokens of media are the engine's own, so such a prompt is matched as text, digests included.
        if let Some(tokenizer) = &self.tokenizer
            && !messages::have_media(raw)
        {
            match encode_chat(tokenizer.as_ref(), body) {
                Ok(tokens) => return Some(self.one_list(&tokens, salt)),
                Err(why) => {
                    self.not_tokenized("chat could not be rendered as the engine does", &why)
                }
            }
        }
        self.as_text(fields, raw, salt)
    }

    fn as_text(
        &self,
        fields: &Fields<'_>,
        raw: &RawValue,
        salt: &SaltContext<'_>,
    ) -> Option<Found> {
        if raw.get().starts_with('"') && fields.instructions.is_none() {
            return self.plain(fields, raw, salt);
        }
        let hashes = messages::hashes(fields, raw, salt)?;
        Some(Found::text(Prompt::from_text(hashes)))
    }

    /// Says that a prompt has no token ids, unless the request alone is to blame: a malformed one, which the engine
    /// refuses, or one that asks for what only the engine can do, such as its own template, must not raise the gauge and
    /// use up the one line. What a model's folder does not support was said at the start.
    fn not_tokenized(&self, what: &str, why: &TokenizeError) {
        let is_the_requests = matches!(
            why,
            TokenizeError::Invalid(_) | TokenizeError::Unsupported(_)
        );
        if !is_the_requests {
            self.complain(what, &why.to_string());
        }
    }

    /// Says once that a tokenizer or template fails; from then on a gauge says it.
    pub(crate) fn complain(&self, what: &str, why: &str) {
        self.metrics.set_degraded();
        if !self.complained.swap(true, Ordering::Relaxed) {
            warn!(
                cause = why,
                "{what}; such prompts are matched as text (said once)"
            );
        }
    }
}

/// A rough mean for English; only load estimates use it.
const BYTES_PER_TOKEN: usize = 4;

struct Found {
    prompt: Prompt,
    extra_blocks: u32,
    mode: Mode,
    audited: bool,
}

impl Found {
    const fn text(prompt: Prompt) -> Self {
        Self {
            prompt,
            extra_blocks: 0,
            mode: Mode::Text,
            audited: true,
        }
    }
}

fn encode_chat(tokenizer: &dyn Tokenize, body: &[u8]) -> Result<Vec<u32>, TokenizeError> {
    if !has_few_parts(body) {
        return Err(TokenizeError::Unsupported(
            "a body of so many parts".to_owned(),
        ));
    }
    let body = serde_json::from_slice::<Value>(body)
        .map_err(|error| TokenizeError::Invalid(error.to_string()))?;
    tokenizer.encode_chat(&body)
}

/// Returns a JSON string's text, without copying when it has no escapes.
fn text_of(raw: &RawValue) -> Option<Cow<'_, str>> {
    let inner = raw.get().strip_prefix('"')?.strip_suffix('"')?;
    if memchr::memchr(b'\\', inner.as_bytes()).is_none() {
        return Some(Cow::Borrowed(inner));
    }
    serde_json::from_str(raw.get()).ok().map(Cow::Owned)
}

#[cfg(test)]
mod tests;
