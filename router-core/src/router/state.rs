//! What a router holds.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use fastrand::Rng;
use hashbrown::HashMap;

use crate::config::{IndexMode, RouterConfig};
use crate::error::{Error, Result};
use crate::event::SkipCounts;
use crate::event::gap::SequenceTracker;
use crate::ids::{Slot, WorkerId, WorkerRank};
use crate::index::{OrphanLimits, PrefixIndex, RadixIndex, Tier, TtlIndex};
use crate::load::TargetLoad;
use crate::prompt::PromptKind;
use crate::sync::{Mutex, RwLock};
use crate::text::TOKENS_PER_CHUNK;
use crate::trust::{Trust, TrustChange, TrustLimits, TrustState};
use crate::worker::WorkerSpec;

use super::lease::Leases;
use super::request::DecisionRecord;

/// Trust changes kept until somebody asks.
const CHANGES_KEPT: usize = 1_024;

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) config: RouterConfig,
    pub(super) index: RadixIndex,
    pub(super) token_placements: TtlIndex,
    pub(super) text_placements: TtlIndex,
    pub(super) workers: RwLock<Workers>,
    pub(super) booking: Mutex<Booking>,
    pub(super) leases: Mutex<Leases>,
    pub(super) history: Mutex<VecDeque<DecisionRecord>>,
    pub(super) changes: Mutex<VecDeque<TrustChange>>,
    pub(super) counts: Counts,
    pub(super) closed: AtomicBool,
    pub(super) last_tick: Mutex<Option<Instant>>,
    /// Tokens per text chunk as engines report them, in thousandths.
    pub(super) chunk_millitokens: AtomicU64,
}

/// What the critical section of a decision owns.
#[derive(Debug)]
pub(super) struct Booking {
    pub(super) rng: Rng,
    /// Last target of each session and when it was used, by hash of the session's name.
    pub(super) sessions: HashMap<u64, (Slot, u64, Instant)>,
    pub(super) next_lease: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) decisions: AtomicU64,
    pub(super) no_worker: AtomicU64,
    pub(super) expired_leases: AtomicU64,
}

/// Registered workers and the slots of their ranks.
#[derive(Debug, Default)]
pub(super) struct Workers {
    pub(super) by_id: BTreeMap<WorkerId, Arc<Worker>>,
    pub(super) free_slots: Vec<Slot>,
    pub(super) slots: u32,
    pub(super) lives: u64,
}

/// One life of one worker.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) spec: WorkerSpec,
    pub(super) draining: AtomicBool,
    pub(super) available: AtomicBool,
    pub(super) targets: Vec<Arc<Target>>,
    /// KV capacity of one rank in blocks; 0 when unknown.
    pub(super) capacity: AtomicUsize,
}

/// One rank of one worker's life.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) id: WorkerRank,
    pub(super) slot: Slot,
    pub(super) life: u64,
    pub(super) load: Mutex<TargetLoad>,
    pub(super) stream: Mutex<Stream>,
    /// What decisions read of the stream, so that they never wait behind a batch of events.
    pub(super) belief: Belief,
}

impl Target {
    pub(super) fn new(id: WorkerRank, slot: Slot, life: u64, trust: Trust) -> Self {
        Self {
            belief: Belief::new(&trust),
            id,
            slot,
            life,
            load: Mutex::default(),
            stream: Mutex::new(Stream {
                tracker: SequenceTracker::new(),
                trust,
                skipped: SkipCounts::new(),
                batches: 0,
                events: 0,
                gaps: 0,
                removed: false,
            }),
        }
    }
}

/// A target's trust state, fidelity and confirmed device blocks, readable without a lock. A racing reader may see them
/// from different moments.
#[derive(Debug)]
pub(super) struct Belief {
    state: AtomicU8,
    fidelity_bits: AtomicU64,
    resident_blocks: AtomicUsize,
}

impl Belief {
    pub(super) fn new(trust: &Trust) -> Self {
        let belief = Self {
            state: AtomicU8::new(0),
            fidelity_bits: AtomicU64::new(0),
            resident_blocks: AtomicUsize::new(0),
        };
        belief.set(trust);
        belief
    }

    fn set(&self, trust: &Trust) {
        self.state.store(trust.state() as u8, Ordering::Relaxed);
        self.fidelity_bits
            .store(trust.fidelity().to_bits(), Ordering::Relaxed);
    }

    pub(super) fn state(&self) -> TrustState {
        let state = self.state.load(Ordering::Relaxed);
        TrustState::ALL
            .get(state as usize)
            .copied()
            .unwrap_or(TrustState::Unproven)
    }

    pub(super) fn resident_blocks(&self) -> usize {
        self.resident_blocks.load(Ordering::Relaxed)
    }

    pub(super) fn fidelity(&self) -> f64 {
        f64::from_bits(self.fidelity_bits.load(Ordering::Relaxed))
    }
}

/// The event stream of one target.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) tracker: SequenceTracker,
    pub(super) trust: Trust,
    pub(super) skipped: SkipCounts,
    pub(super) batches: u64,
    pub(super) events: u64,
    pub(super) gaps: u64,
    /// The worker was removed: nothing may be applied any more.
    pub(super) removed: bool,
}

impl Inner {
    pub(super) fn new(config: RouterConfig) -> Self {
        let rng = config.seed.map_or_else(Rng::new, Rng::with_seed);
        Self {
            index: RadixIndex::new(OrphanLimits {
                max_keys: config.max_orphan_blocks,
                max_age: config.ttl(),
            }),
            token_placements: TtlIndex::new(),
            text_placements: TtlIndex::new(),
            workers: RwLock::default(),
            booking: Mutex::new(Booking {
                rng,
                sessions: HashMap::new(),
                next_lease: 1,
            }),
            leases: Mutex::default(),
            history: Mutex::default(),
            changes: Mutex::default(),
            counts: Counts::default(),
            closed: AtomicBool::new(false),
            last_tick: Mutex::new(None),
            chunk_millitokens: AtomicU64::new(TOKENS_PER_CHUNK as u64 * 1_000),
            config,
        }
    }

    pub(super) const fn placements(&self, kind: PromptKind) -> &TtlIndex {
        match kind {
            PromptKind::Tokens => &self.token_placements,
            PromptKind::Text => &self.text_placements,
        }
    }

    /// Tokens per text chunk, learned from what engines report.
    pub(super) fn tokens_per_chunk(&self) -> f64 {
        self.chunk_millitokens.load(Ordering::Relaxed) as f64 / 1_000.0
    }

    pub(super) fn limits(&self) -> TrustLimits {
        TrustLimits {
            silent_after: self.config.silent_worker(),
            silent_requests: self.config.silent_worker_requests,
            ttl: self.config.ttl(),
        }
    }

    pub(super) fn new_trust(&self, now: Instant) -> Trust {
        match self.config.index {
            IndexMode::Events => Trust::new(now),
            IndexMode::Approximate => Trust::configured_approximate(now),
        }
    }

    /// Runs `change` on a stream's trust and keeps note of a change of state.
    pub(super) fn with_trust<T>(
        &self,
        target: &Target,
        stream: &mut Stream,
        now: Instant,
        change: impl FnOnce(&mut Trust, &TrustLimits) -> T,
    ) -> T {
        let from = stream.trust.state();
        let result = change(&mut stream.trust, &self.limits());
        let to = stream.trust.state();
        target.belief.set(&stream.trust);
        if from != to {
            let mut changes = self.changes.lock();
            if changes.len() == CHANGES_KEPT {
                changes.pop_front();
            }
            changes.push_back(TrustChange {
                target: target.id.clone(),
                from,
                to,
                cause: stream.trust.cause().map(str::to_owned),
                at: now,
            });
        }
        result
    }

    /// Takes note of what the index holds of a target after a change.
    pub(super) fn note_resident(&self, target: &Target) {
        let held = self.index.slot_blocks(target.slot);
        target
            .belief
            .resident_blocks
            .store(held.device, Ordering::Relaxed);
    }

    /// Drops everything that is known or believed of a target.
    pub(super) fn forget(&self, target: &Target) {
        self.index.clear(target.slot, &Tier::ALL);
        self.token_placements.clear(target.slot);
        self.text_placements.clear(target.slot);
        self.note_resident(target);
    }

    /// Tells both placement indexes how much a target can hold.
    pub(super) fn bound_placements(&self, slot: Slot, capacity_blocks: Option<usize>) {
        self.token_placements.set_capacity(slot, capacity_blocks);
        let chunks = capacity_blocks.map(|blocks| {
            let tokens = blocks as f64 * self.config.block_size.tokens() as f64;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a quotient of positive numbers; casts saturate"
            )]
            let chunks = (tokens / self.tokens_per_chunk()) as usize;
            chunks.max(1)
        });
        self.text_placements.set_capacity(slot, chunks);
    }
}

impl Workers {
    pub(super) fn worker(&self, id: &str) -> Result<&Arc<Worker>> {
        self.by_id.get(id).ok_or_else(|| Error::unknown_worker(id))
    }

    pub(super) fn target(&self, id: &str, dp_rank: u32) -> Result<&Arc<Target>> {
        let worker = self.worker(id)?;
        worker.targets.get(dp_rank as usize).ok_or_else(|| {
            Error::invalid(format!(
                "dp_rank {dp_rank} of worker {id:?} is out of range: 0 to {} are accepted",
                worker.targets.len() - 1
            ))
        })
    }

    pub(super) fn targets(&self) -> impl Iterator<Item = &Arc<Target>> {
        self.by_id.values().flat_map(|worker| worker.targets.iter())
    }
}

impl Worker {
    pub(super) fn capacity_blocks(&self) -> Option<usize> {
        match self.capacity.load(Ordering::Relaxed) {
            0 => None,
            blocks => Some(blocks),
        }
    }
}
