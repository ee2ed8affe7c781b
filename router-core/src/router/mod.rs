//! The router: workers, their caches as far as known, their load, and the decision.
//!
//! # A decision takes no lock that all decisions take
//! What a decision reads of every target lies in dense rows of atomics; the workers, under a read lock of the thread's own
//! stripe. What it writes is the chosen target's load, its prompt's trees of active and of placed blocks, and its place in the
//! history; each of these has a lock of its own, held for that step alone. So decisions that run at the same time may price
//! the same loads, and those that follow each other see all bookings before them.
//!
//! # Locks, in the order in which they may be taken
//! `registry` (workers join and leave) → `workers` (a stripe for reading, all of them for changing) → a target's `stream`
//! (ingest, trust) → a lease → a target's load → trees. Free slots, names of requests and the places of the history are
//! locked with nothing after them.

mod books;
mod budget;
mod clock;
mod history;
mod ingest;
mod lease;
mod request;
mod scratch;
mod select;
mod sessions;
mod state;
mod table;
mod workers;

#[cfg(test)]
mod tests;

pub use lease::{Outcome, RequestGuard};
pub use request::{Candidate, Decision, DecisionRecord, SelectRequest};

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::block::SaltContext;
use crate::config::RouterConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::event::SkipCounts;
use crate::ids::{LeaseId, WorkerRank};
use crate::index::{IndexStats, Overlap, PrefixIndex, TtlStats};
use crate::prompt::Prompt;
use crate::sync::atomic::Ordering;
use crate::sync::{STRIPES, stripe};
use crate::trust::TrustChange;
use crate::worker::TrustInfo;

use scratch::with_scratch;
use state::Inner;

/// Decides which worker serves a request. `Send + Sync`; share it behind an `Arc` or clone it (clones are one router).
///
/// It has no clock and no thread: every call that depends on time takes `now`, which must not go backwards by more than
/// callers can tolerate in TTLs, and [`tick`](Self::tick) must be called about four times a second (calls to
/// [`select`](Self::select) do it too).
///
/// # Examples
/// ```
/// use std::time::Instant;
/// use kvlane::{Outcome, Router, RouterConfig, SaltContext, SelectRequest, WorkerSpec};
///
/// # #[expect(clippy::disallowed_methods, reason = "a caller has a clock")]
/// let now = Instant::now();
/// let router = Router::new(RouterConfig::default())?;
/// router.add_worker(WorkerSpec::new("w1")?, now)?;
/// router.add_worker(WorkerSpec::new("w2")?, now)?;
///
/// let tokens: Vec<u32> = (0..100).collect();
/// let prompt = router.prompt(&tokens, &SaltContext::default());
/// let first = router.select(&SelectRequest::new(&prompt), now)?.expect("two workers are eligible");
/// let warm = first.worker().to_owned();
/// first.release(&Outcome::ok(), now);
///
/// // The same prefix goes where it went before: no event has come yet, so placements are believed.
/// let again = router.select(&SelectRequest::new(&prompt), now)?.expect("two workers are eligible");
/// assert_eq!(again.worker(), warm);
/// assert_eq!(again.decision().predicted_cached_tokens, 96); // 6 complete blocks of 16
/// # Ok::<(), kvlane::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Router {
    inner: Arc<Inner>,
    handles: Arc<[Arc<Handle>]>,
}

/// What a guard keeps of its router. Each stripe has its own, so that decisions on different threads do not count references
/// on one cache line.
#[derive(Debug)]
#[repr(align(128))]
struct Handle {
    inner: Arc<Inner>,
}

/// Size and history of a router.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RouterStats {
    /// The index of confirmed blocks.
    pub index: IndexStats,
    /// Own placements of token prompts.
    pub token_placements: TtlStats,
    /// Own placements of text prompts.
    pub text_placements: TtlStats,
    /// Registered workers.
    pub workers: usize,
    /// Bookings not yet released.
    pub active_leases: usize,
    /// Decisions since the start.
    pub decisions: u64,
    /// Decisions without an eligible worker.
    pub no_worker: u64,
    /// Bookings that were released because their lease ran out.
    pub expired_leases: u64,
    /// Blocks that were forgotten to keep within `max_index_bytes`.
    pub forgotten_blocks: u64,
    /// What was not applied of all event streams, by reason.
    pub skipped: SkipCounts,
}

impl Router {
    /// Creates a router without workers.
    ///
    /// # Errors
    /// As [`RouterConfig::validate`].
    pub fn new(config: RouterConfig) -> Result<Self> {
        config.validate()?;
        let inner = Arc::new(Inner::new(config));
        let handle = || {
            Arc::new(Handle {
                inner: Arc::clone(&inner),
            })
        };
        Ok(Self {
            handles: (0..STRIPES).map(|_| handle()).collect(),
            inner,
        })
    }

    fn handle(&self) -> Arc<Handle> {
        Arc::clone(&self.handles[stripe()])
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &RouterConfig {
        &self.inner.config
    }

    /// Hashes a token prompt with the router's block size.
    #[must_use]
    pub fn prompt(&self, tokens: &[u32], salt: &SaltContext<'_>) -> Prompt {
        Prompt::from_tokens(tokens, self.inner.config.block_size, salt)
    }

    /// Records a placement that was decided elsewhere: the prompt's blocks are believed to be on the worker for `ttl`
    /// (default: the configured TTL), or longer where a longer belief stands already. Rank 0 when `dp_rank` is absent.
    ///
    /// # Errors
    /// Unknown worker or rank; a `ttl` of zero or above ten years; a prompt in blocks of another size.
    pub fn record(
        &self,
        worker: &str,
        dp_rank: Option<u32>,
        prompt: &Prompt,
        ttl: Option<Duration>,
        now: Instant,
    ) -> Result<()> {
        let ttl = ttl.unwrap_or_else(|| self.inner.config.ttl());
        if ttl.is_zero() || ttl > MAX_TTL {
            return Err(Error::invalid(format!(
                "ttl of {} seconds is out of range: above 0 to {} is accepted",
                ttl.as_secs_f64(),
                MAX_TTL.as_secs()
            )));
        }
        self.inner.check_open()?;
        self.inner.check_blocks(prompt)?;
        let workers = self.inner.workers.read();
        let target = workers.target(worker, dp_rank.unwrap_or(0))?;
        self.inner
            .placements(prompt.kind())
            .record(target.slot, prompt.local(), now + ttl, now);
        Ok(())
    }

    /// Returns the leading blocks that each target holds, or is believed to hold by own placements; targets with none are
    /// absent. Placements count as device blocks and are merged with confirmed blocks by maximum.
    #[must_use]
    pub fn overlap(&self, prompt: &Prompt, now: Instant) -> Vec<(WorkerRank, Overlap)> {
        let workers = self.inner.workers.read();
        with_scratch(|scratch| {
            self.inner.look_up_blocks(prompt, now, scratch);
            workers
                .targets()
                .map(|target| (target, scratch.merged(target.slot)))
                .filter(|(_, overlap)| overlap.blocks() > 0)
                .map(|(target, overlap)| (target.id.clone(), overlap))
                .collect()
        })
    }

    /// Returns how far the events of one rank are believed.
    ///
    /// # Errors
    /// Unknown worker or rank.
    pub fn trust(&self, worker: &str, dp_rank: u32, now: Instant) -> Result<TrustInfo> {
        self.tick_if_due(now);
        let workers = self.inner.workers.read();
        let target = workers.target(worker, dp_rank)?;
        let stream = target.stream.lock();
        Ok(TrustInfo {
            state: stream.trust.state(),
            fidelity: stream.trust.fidelity(),
            cause: stream.trust.cause().map(str::to_owned),
            since: stream.trust.since(),
        })
    }

    /// Takes the trust changes since the last call, oldest first; at most the last 1,024 are kept.
    #[must_use]
    pub fn take_trust_changes(&self) -> Vec<TrustChange> {
        self.inner.changes.lock().drain(..).collect()
    }

    /// Returns the last decisions, newest first, at most `limit`. At most 256 are kept: fewer from 129 targets on, as many
    /// as tell of 32,768 targets together, and always 8.
    #[must_use]
    pub fn decisions(&self, limit: usize) -> Vec<DecisionRecord> {
        self.inner.history.latest(limit)
    }

    /// Returns the decision behind a booking if it is one of those that [`decisions`](Self::decisions) knows. A
    /// [`RequestGuard`] has its own for as long as it lives.
    #[must_use]
    pub fn decision(&self, lease: LeaseId) -> Option<Arc<Decision>> {
        self.inner.history.of(lease)
    }

    /// Returns sizes and counts.
    #[must_use]
    pub fn stats(&self) -> RouterStats {
        let workers = self.inner.workers.read();
        let mut skipped = SkipCounts::new();
        for target in workers.targets() {
            for (reason, count) in &target.stream.lock().skipped {
                *skipped.entry(*reason).or_insert(0) += count;
            }
        }
        let counts = &self.inner.counts;
        RouterStats {
            index: self.inner.index.stats(),
            token_placements: self.inner.token_placements.stats(),
            text_placements: self.inner.text_placements.stats(),
            workers: workers.by_id.len(),
            active_leases: self.inner.leases.len(),
            decisions: counts.next.load(Ordering::Relaxed) - 1,
            no_worker: counts.no_worker.load(Ordering::Relaxed),
            expired_leases: counts.expired_leases.load(Ordering::Relaxed),
            forgotten_blocks: counts.forgotten_blocks.load(Ordering::Relaxed),
            skipped,
        }
    }

    /// Tells whether [`close`](Self::close) was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.inner.closed.load(Ordering::Acquire)
    }

    /// Refuses further decisions and events. Bookings can still be released.
    pub fn close(&self) {
        self.inner.closed.store(true, Ordering::Release);
    }
}

/// Longest TTL that a caller may give: ten years.
const MAX_TTL: Duration = Duration::from_secs(315_360_000);

impl Inner {
    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the router is closed"));
        }
        Ok(())
    }
}
