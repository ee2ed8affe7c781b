//! What a router holds.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use crate::config::{IndexMode, RouterConfig};
use crate::event::SkipCounts;
use crate::event::gap::SequenceTracker;
use crate::ids::{Role, Slot, WorkerRank};
use crate::index::{OrphanLimits, PrefixIndex, RadixIndex, Tier, TtlIndex};
use crate::load::TargetLoad;
use crate::load::active::ActiveIndex;
use crate::load::row::{Row, flag};
use crate::prompt::PromptKind;
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Dense, Mutex, Striped};
use crate::text::TOKENS_PER_CHUNK;
use crate::trust::{Trust, TrustChange, TrustLimits};
use crate::worker::WorkerSpec;

use super::clock::Clock;
use super::history::History;
use super::lease::Leases;
use super::sessions::Sessions;
use super::table::{Registry, View};

/// Trust changes kept until somebody asks.
const CHANGES_KEPT: usize = 1_024;

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) config: RouterConfig,
    pub(super) index: RadixIndex,
    pub(super) token_placements: TtlIndex,
    pub(super) text_placements: TtlIndex,
    /// What decisions read of each slot.
    pub(super) rows: Dense<Row>,
    pub(super) active: ActiveIndex,
    pub(super) workers: Striped<View>,
    pub(super) registry: Mutex<Registry>,
    /// Apart from the registry, since a booking may end while a change of workers waits for the call that ends it.
    pub(super) free_slots: Mutex<Vec<Slot>>,
    pub(super) leases: Leases,
    pub(super) sessions: Sessions,
    pub(super) history: History,
    pub(super) changes: Mutex<VecDeque<TrustChange>>,
    pub(super) counts: Counts,
    /// Held by whoever makes room.
    pub(super) budget: Mutex<()>,
    pub(super) closed: AtomicBool,
    pub(super) clock: Clock,
    /// Seed of tie-breaking and sampling; each decision draws from it with its own number.
    pub(super) seed: u64,
    /// Tokens per text chunk as engines report them, in thousandths.
    pub(super) chunk_millitokens: AtomicU64,
}

#[derive(Debug)]
pub(super) struct Counts {
    /// The number of the next decision: the one thing that all of them write.
    pub(super) next: AtomicU64,
    pub(super) no_worker: AtomicU64,
    pub(super) expired_leases: AtomicU64,
    pub(super) forgotten_blocks: AtomicU64,
}

/// One life of one worker.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) spec: WorkerSpec,
    pub(super) duty: Mutex<Duty>,
    pub(super) draining: AtomicBool,
    pub(super) available: AtomicBool,
    pub(super) targets: Vec<Arc<Target>>,
    /// KV capacity of one rank in blocks; 0 when unknown.
    pub(super) capacity: AtomicUsize,
}

/// What may be changed of a worker without a new life of it.
#[derive(Debug)]
pub(super) struct Duty {
    pub(super) role: Role,
    pub(super) labels: BTreeMap<String, String>,
}

/// One rank of one worker's life.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) id: WorkerRank,
    pub(super) slot: Slot,
    pub(super) life: u64,
    load: Mutex<TargetLoad>,
    pub(super) stream: Mutex<Stream>,
}

impl Target {
    pub(super) fn new(id: WorkerRank, slot: Slot, life: u64, trust: Trust) -> Self {
        Self {
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
        let index = RadixIndex::new(OrphanLimits {
            max_keys: config.max_orphan_blocks,
            max_age: config.ttl(),
        });
        Self {
            index: match config.max_index_bytes {
                None => index,
                Some(_) => index.dating_uses(),
            },
            token_placements: TtlIndex::new(),
            text_placements: TtlIndex::new(),
            rows: Dense::new(),
            active: ActiveIndex::default(),
            workers: Striped::new(View::default),
            registry: Mutex::default(),
            free_slots: Mutex::default(),
            leases: Leases::default(),
            sessions: Sessions::default(),
            history: History::default(),
            changes: Mutex::default(),
            counts: Counts {
                next: AtomicU64::new(1),
                no_worker: AtomicU64::new(0),
                expired_leases: AtomicU64::new(0),
                forgotten_blocks: AtomicU64::new(0),
            },
            budget: Mutex::default(),
            closed: AtomicBool::new(false),
            clock: Clock::default(),
            seed: config.seed.unwrap_or_else(|| fastrand::u64(..)),
            chunk_millitokens: AtomicU64::new(TOKENS_PER_CHUNK as u64 * 1_000),
            config,
        }
    }

    /// Returns what decisions read of a registered slot.
    pub(super) fn row(&self, slot: Slot) -> &Row {
        self.rows
            .at(slot.index())
            .expect("slots are given out below the bound of dense arrays")
    }

    /// Changes the load of a target, and shows it to decisions.
    pub(super) fn with_load<T>(
        &self,
        target: &Target,
        change: impl FnOnce(&mut TargetLoad) -> T,
    ) -> T {
        let mut load = target.load.lock();
        let result = change(&mut load);
        load.publish(self.row(target.slot));
        result
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
        self.row(target.slot)
            .set_belief(to, stream.trust.fidelity());
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
        self.row(target.slot).set_resident_blocks(held.device);
    }

    /// Drops everything that is known or believed of a target.
    pub(super) fn forget(&self, target: &Target) {
        self.index.clear(target.slot, &Tier::ALL);
        self.token_placements.clear(target.slot);
        self.text_placements.clear(target.slot);
        self.note_resident(target);
    }

    /// Tells the indexes how much a target can hold, which changes seldom.
    pub(super) fn expect_blocks(&self, slot: Slot, capacity_blocks: Option<usize>) {
        // A table of its full size at once may be more than the budget has.
        if self.config.max_index_bytes.is_none() {
            self.index.expect_keys(slot, capacity_blocks.unwrap_or(0));
        }
        self.bound_placements(slot, capacity_blocks);
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

impl Worker {
    /// The flags that a decision looks at, without trust and rank.
    pub(super) fn flags(&self) -> u32 {
        flag::PRESENT | flag::of_role(self.duty.lock().role)
    }

    pub(super) fn capacity_blocks(&self) -> Option<usize> {
        match self.capacity.load(Ordering::Relaxed) {
            0 => None,
            blocks => Some(blocks),
        }
    }
}
