//! What engines publish about their caches, in one form for every encoding.
//!
//! [`wire`] turns one message payload into an [`EventBatch`], [`encode`] does the reverse for simulated engines, and
//! [`gap`] watches the sequence of one stream. Identity (worker and rank) comes from the subscription, never from a
//! payload.

pub(crate) mod apply;
pub mod encode;
pub mod gap;
pub mod wire;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::index::{EngineHash, Tier};

/// All events of one engine step, in the order in which they happened.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventBatch {
    /// The engine's wall clock, seconds; rises within one life of the engine. Used only to compare batches of one stream.
    pub ts: f64,
    /// The rank that the payload claims; informative only.
    pub dp_rank: Option<i64>,
    /// The events that were understood.
    pub events: Vec<KvEvent>,
    /// The events that were not, by reason.
    pub skipped: SkipCounts,
}

/// One change of an engine's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Blocks became resident.
    Stored(BlockStored),
    /// Blocks went away.
    Removed(BlockRemoved),
    /// Every block of the publishing rank went away.
    Cleared,
}

/// Blocks that became resident: a run in which each block is the parent of the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockStored {
    /// The engine's identifiers, first block to last; never empty.
    pub block_hashes: Vec<EngineHash>,
    /// Identifier of the block before the first; `None` begins a prompt.
    pub parent_hash: Option<EngineHash>,
    /// Tokens of all blocks; empty in a placeholder, else `block_hashes.len() * block_size`.
    pub token_ids: Vec<u32>,
    /// Tokens per engine block; 0 in a placeholder.
    pub block_size: u32,
    /// Adapter name; adapters known by number alone are named `#<worker-local number>` and so match no request.
    pub lora_name: Option<String>,
    /// Cache salt of the prompt when the event carries it as a field of its own.
    pub cache_salt: Option<String>,
    /// What else went into each block's hash; one entry per block, or empty when it was nothing for all of them.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    /// Where the blocks lie.
    pub tier: Tier,
    /// Cache group index.
    pub group: u32,
    /// Kind of the cache group.
    pub kind: GroupKind,
}

/// Blocks that went away from one tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockRemoved {
    /// The engine's identifiers.
    pub block_hashes: Vec<EngineHash>,
    /// Where the blocks lay.
    pub tier: Tier,
    /// Cache group index.
    pub group: u32,
}

/// One value that an engine mixed into a block's hash besides its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// A bare string: adapter name or cache salt, told apart by the event's other fields.
    Text(String),
    /// A media item and the offset of its first token from the block's first token.
    Media {
        /// The engine's identifier of its content.
        digest: Vec<u8>,
        /// May be negative.
        offset: i64,
    },
    /// Anything else, such as a prompt-embedding digest: its msgpack bytes as received.
    Other(Vec<u8>),
}

/// What a cache group stores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GroupKind {
    /// Not said (engines without hybrid caches, and versions before the field).
    #[default]
    Unstated,
    /// Every token of the prompt: full, multi-head latent or sink attention. Prefixes match on these groups alone.
    Full,
    /// Only a window, a state or another part, which a prefix match cannot use.
    Partial,
}

/// Why an event, batch or message was not applied; a small stable set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SkipReason {
    /// The payload is no event batch at all; nothing of it was applied.
    Undecodable,
    /// An event with a tag that is not known.
    UnknownEvent,
    /// An event whose fields have the wrong type or number.
    Malformed,
    /// Hashes, tokens and block size of a store do not add up.
    CountMismatch,
    /// A store without block hashes.
    NoHashes,
    /// Engine block size 0 or above 65,536, or no multiple of the router's.
    BlockSize,
    /// A token id below 0 or above 2³² − 1.
    TokenRange,
    /// A store in a cache group that prefixes cannot match on.
    CacheGroup,
    /// Media in a block that would have to be cut into several of the router's.
    MediaBlockSize,
    /// A store without tokens for a block whose place is not known.
    Placeholder,
    /// A store of a block that is held at another place, or whose parent it is itself.
    Conflict,
    /// A removal of a block that is not held.
    UnknownBlock,
    /// A batch that was applied before.
    DuplicateBatch,
    /// A pending store that was dropped because too many were pending.
    OrphanLimit,
    /// A batch for a router that is configured to go by its own placements alone.
    ApproximateIndex,
}

impl SkipReason {
    /// Every reason.
    pub const ALL: [Self; 15] = [
        Self::Undecodable,
        Self::UnknownEvent,
        Self::Malformed,
        Self::CountMismatch,
        Self::NoHashes,
        Self::BlockSize,
        Self::TokenRange,
        Self::CacheGroup,
        Self::MediaBlockSize,
        Self::Placeholder,
        Self::Conflict,
        Self::UnknownBlock,
        Self::DuplicateBatch,
        Self::OrphanLimit,
        Self::ApproximateIndex,
    ];

    /// Returns the stable code.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Undecodable => "undecodable",
            Self::UnknownEvent => "unknown_event",
            Self::Malformed => "malformed",
            Self::CountMismatch => "count_mismatch",
            Self::NoHashes => "no_hashes",
            Self::BlockSize => "block_size",
            Self::TokenRange => "token_range",
            Self::CacheGroup => "cache_group",
            Self::MediaBlockSize => "media_block_size",
            Self::Placeholder => "placeholder",
            Self::Conflict => "conflict",
            Self::UnknownBlock => "unknown_block",
            Self::DuplicateBatch => "duplicate_batch",
            Self::OrphanLimit => "orphan_limit",
            Self::ApproximateIndex => "approximate_index",
        }
    }
}

/// Counts by reason.
pub type SkipCounts = BTreeMap<SkipReason, u64>;

/// What [`Router::ingest`](crate::Router::ingest) did with one batch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IngestReport {
    /// Events that were applied (a pending store counts: it is kept until its parent comes).
    pub applied: u64,
    /// What was not applied, by reason.
    pub skipped: SkipCounts,
    /// Batches were lost before this one and have not been repaired.
    pub gap: bool,
    /// The sequence went backwards: the engine restarted, and its old entries were cleared first.
    pub restarted: bool,
}
