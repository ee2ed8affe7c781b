//! What a router is told about a worker, and what it tells back.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;

use crate::block::BlockSize;
use crate::error::{Error, Result};
use crate::event::SkipCounts;
use crate::ids::{Role, WorkerId};
use crate::index::TierBlocks;
use crate::trust::TrustState;

/// A worker to register; everything but the id has a default.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WorkerSpec {
    /// The caller's name of the worker.
    pub id: WorkerId,
    /// Data-parallel ranks that share the worker's address (default 1, up to 1,024). Each is a target of its own.
    pub dp_ranks: u32,
    /// What the worker does (default both).
    pub role: Role,
    /// Blocks of the router's block size that the KV cache of one rank holds, when known: bounds what is believed of it.
    pub kv_capacity_blocks: Option<usize>,
    /// The engine's block size when known; must be a multiple of the router's.
    pub block_size: Option<BlockSize>,
    /// ZeroMQ endpoint of rank 0's event stream; further ranks are on the following ports.
    pub events: Option<String>,
    /// ZeroMQ endpoint of rank 0's replay socket; further ranks are on the following ports.
    pub replay: Option<String>,
    /// Free-form labels, reported back.
    pub labels: BTreeMap<String, String>,
}

impl WorkerSpec {
    /// Most ranks of one worker.
    pub const MAX_DP_RANKS: u32 = 1_024;

    /// Creates a spec with defaults.
    ///
    /// # Errors
    /// As [`WorkerId::new`].
    pub fn new(id: &str) -> Result<Self> {
        Ok(Self {
            id: WorkerId::new(id)?,
            dp_ranks: 1,
            role: Role::Both,
            kv_capacity_blocks: None,
            block_size: None,
            events: None,
            replay: None,
            labels: BTreeMap::new(),
        })
    }

    /// Sets the number of data-parallel ranks.
    #[must_use]
    pub const fn dp_ranks(mut self, ranks: u32) -> Self {
        self.dp_ranks = ranks;
        self
    }

    /// Sets the role.
    #[must_use]
    pub const fn role(mut self, role: Role) -> Self {
        self.role = role;
        self
    }

    /// Sets the KV capacity of one rank, in blocks of the router's block size.
    #[must_use]
    pub const fn kv_capacity_blocks(mut self, blocks: Option<usize>) -> Self {
        self.kv_capacity_blocks = blocks;
        self
    }

    /// Sets the engine's block size.
    #[must_use]
    pub const fn block_size(mut self, size: Option<BlockSize>) -> Self {
        self.block_size = size;
        self
    }

    /// Sets the event endpoint and, optionally, the replay endpoint.
    #[must_use]
    pub fn events(mut self, events: Option<String>, replay: Option<String>) -> Self {
        self.events = events;
        self.replay = replay;
        self
    }

    pub(crate) fn validate(&self) -> Result<()> {
        if self.dp_ranks == 0 || self.dp_ranks > Self::MAX_DP_RANKS {
            return Err(Error::invalid(format!(
                "dp_ranks {} of worker {:?} is out of range: 1 to {} are accepted",
                self.dp_ranks,
                self.id,
                Self::MAX_DP_RANKS
            )));
        }
        if self.kv_capacity_blocks == Some(0) {
            return Err(Error::invalid(format!(
                "kv_capacity_blocks 0 of worker {:?} is out of range: 1 or more blocks, or none when unknown",
                self.id
            )));
        }
        if self.replay.is_some() && self.events.is_none() {
            return Err(Error::invalid(format!(
                "worker {:?} has a replay endpoint and no events endpoint; give both or neither",
                self.id
            )));
        }
        Ok(())
    }
}

/// What a router knows of one worker. Counts are sums over its ranks.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerInfo {
    /// The caller's name.
    pub id: WorkerId,
    /// Its data-parallel ranks.
    pub dp_ranks: u32,
    /// What it does.
    pub role: Role,
    /// It finishes what it has and gets nothing new.
    pub draining: bool,
    /// It may be chosen, as far as its health is known.
    pub available: bool,
    /// Requests booked and not released.
    pub active_requests: usize,
    /// Distinct blocks of those requests.
    pub active_blocks: usize,
    /// Blocks still to be prefilled for those requests.
    pub prefill_blocks: f64,
    /// Blocks that events have confirmed, by tier.
    pub index_blocks: TierBlocks,
    /// Blocks believed from own placements.
    pub predicted_blocks: usize,
    /// KV capacity of one rank in blocks, when known.
    pub kv_capacity_blocks: Option<usize>,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// Trust in each rank's event stream.
    pub trust: Vec<RankTrust>,
}

/// Trust in one rank, as listed.
#[derive(Clone, Debug, Serialize)]
pub struct RankTrust {
    /// The rank.
    pub dp_rank: u32,
    /// How far its events are believed.
    pub state: TrustState,
    /// Share of predicted cached tokens that the engine confirms, 0 to 1.
    pub fidelity: f64,
    /// Why it is not exact.
    pub cause: Option<String>,
    /// Seconds in this state.
    pub since_seconds: f64,
    /// Event batches applied.
    pub batches: u64,
    /// Events applied.
    pub events: u64,
    /// Gaps in the sequence that were not repaired.
    pub gaps: u64,
    /// What was not applied, by reason.
    pub skipped: SkipCounts,
}

/// Trust in one (worker, rank).
#[derive(Clone, Debug, PartialEq)]
pub struct TrustInfo {
    /// How far its events are believed.
    pub state: TrustState,
    /// Share of predicted cached tokens that the engine confirms, 0 to 1.
    pub fidelity: f64,
    /// Why it is not exact.
    pub cause: Option<String>,
    /// When it came into this state.
    pub since: Instant,
}
