//! kvlane decides which LLM worker already holds the KV cache of a prompt's prefix, and proves that it did.
//!
//! # Concepts
//! * A **worker** is an engine instance; a **target** is one data-parallel rank of it, and what a request is routed to.
//! * A prompt is cut into **blocks** of [`BlockSize`] tokens, hashed by content ([`block`]).
//! * The **index** ([`index`]) knows which target holds which leading blocks: from the engine's own KV events
//!   ([`event`]) and, where those do not prove themselves, from own placements with a TTL and the engine's capacity.
//! * The **cost** ([`policy`]) of a placement is the prefill that is left to do, what is already waiting there, and the
//!   blocks in use. The cheapest target is booked; a [`RequestGuard`] holds the booking.
//! * A **handoff** ([`handoff`]) passes a request from the worker that processes its prompt to the one that decodes;
//!   whether that pays is planned from measured speeds.
//! * **Trust** ([`trust`]) says how far each target's events are believed and why; what engines report as cached is held
//!   against what was predicted.
//!
//! # Consistency
//! A lookup that races an event may miss a block that is being stored, and never credits a target with a block that no
//! event or recorded placement had put there. Removing a worker is a barrier. A decision sees the bookings of every decision
//! that was made before it was asked for; decisions that run at the same time may not see each other's.
//!
//! See [`Router`] for an example.

pub mod block;
#[cfg(feature = "chat")]
pub mod chat;
pub mod config;
mod error;
pub mod event;
pub mod handoff;
mod ids;
pub mod index;
pub mod load;
pub mod policy;
mod prefetch;
mod prompt;
mod router;
#[cfg(feature = "zmq")]
pub mod subscribe;
pub(crate) mod sync;
pub mod text;
pub mod trust;
mod worker;

pub use block::{
    BlockHashes, BlockSize, LocalBlockHash, MediaSpan, PromptHasher, SaltContext, SequenceHash,
    block_hashes,
};
pub use config::{IndexMode, Overrides, RouterConfig};
pub use error::{Error, ErrorKind, Result};
pub use event::{IngestReport, SkipReason};
pub use ids::{LeaseId, Role, Slot, WorkerId, WorkerRank};
pub use index::{Overlap, Tier, TierBlocks};
pub use load::{Load, LoadReport};
pub use policy::CostBreakdown;
pub use prompt::{Prompt, PromptKind};
pub use router::{
    Candidate, Decision, DecisionRecord, Outcome, RequestGuard, Router, RouterStats, SelectRequest,
};
pub use trust::{TrustChange, TrustState};
pub use worker::{RankTrust, TrustInfo, WorkerInfo, WorkerSpec};

/// The examples of the README, as tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
