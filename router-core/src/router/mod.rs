//! The router: workers, their caches as far as known, their load, and the decision.
//!
//! # Locks, in the order in which they may be taken
//! `workers` (read for every call, written when a worker joins or leaves) → `booking` (one short critical section per
//! decision: cost, choice and booking, so that each pick is visible to the next) → a target's `stream` (ingest, trust) →
//! a target's `load` → `leases`. Hashing and index lookups happen before `booking` is taken.

mod books;
mod ingest;
mod lease;
mod request;
mod select;
mod state;
mod workers;

#[cfg(test)]
mod tests;

pub use lease::{Outcome, RequestGuard};
pub use request::{Candidate, Decision, DecisionRecord, SelectRequest};

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::block::SaltContext;
use crate::config::RouterConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::event::SkipCounts;
use crate::ids::{Slot, WorkerRank};
use crate::index::{IndexStats, Overlap, Overlaps, PrefixIndex, TtlStats};
use crate::prompt::{Prompt, PromptKind};
use crate::trust::TrustChange;
use crate::worker::TrustInfo;

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
        Ok(Self {
            inner: Arc::new(Inner::new(config)),
        })
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
    /// Unknown worker or rank; a `ttl` of zero or above ten years.
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
        let known = self.inner.look_up(prompt, now);
        workers
            .targets()
            .map(|target| (target, known.merged(target.slot)))
            .filter(|(_, overlap)| overlap.blocks() > 0)
            .map(|(target, overlap)| (target.id.clone(), overlap))
            .collect()
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

    /// Returns the last decisions, newest first, at most `limit` (256 are kept).
    #[must_use]
    pub fn decisions(&self, limit: usize) -> Vec<DecisionRecord> {
        let history = self.inner.history.lock();
        history.iter().rev().take(limit).cloned().collect()
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
            active_leases: self.inner.leases.lock().len(),
            decisions: counts.decisions.load(Ordering::Relaxed),
            no_worker: counts.no_worker.load(Ordering::Relaxed),
            expired_leases: counts.expired_leases.load(Ordering::Relaxed),
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

    /// Looks a prompt up in everything that is known about caches.
    fn look_up(&self, prompt: &Prompt, now: Instant) -> Known {
        let mut known = Known::default();
        if prompt.kind() == PromptKind::Tokens {
            self.index.overlap(prompt.local(), &mut known.confirmed);
        }
        self.placements(prompt.kind())
            .overlap(prompt.local(), now, &mut known.placed);
        known
    }
}

/// What is known of one prompt on every slot.
#[derive(Debug, Default)]
struct Known {
    confirmed: Overlaps,
    placed: Vec<u32>,
}

impl Known {
    /// Blocks of own placements beyond the confirmed ones.
    fn predicted(&self, slot: Slot) -> u32 {
        let placed = self.placed.get(slot.index()).copied().unwrap_or(0);
        placed.saturating_sub(self.confirmed.get(slot).blocks())
    }

    fn merged(&self, slot: Slot) -> Overlap {
        let mut overlap = self.confirmed.get(slot);
        overlap.device += self.predicted(slot);
        overlap
    }
}
