//! kvlane decides which LLM worker already holds the KV cache of a prompt's prefix, and proves that it did.

pub mod block;
mod error;
pub mod event;
mod ids;
pub mod index;
pub(crate) mod sync;
pub mod text;

pub use block::{BlockHashes, BlockSize, LocalBlockHash, MediaSpan, SaltContext, SequenceHash, block_hashes};
pub use error::{Error, ErrorKind, Result};
pub use ids::{LeaseId, Role, Slot, WorkerId, WorkerRank};
