//! How far a worker's events are believed, why, and what the engine says about it.
//!
//! | state | means | own placements are believed for |
//! |---|---|---|
//! | `unproven` | no event yet | the full TTL |
//! | `exact` | every batch since a known start was applied | the short prediction TTL |
//! | `converging` | joined late, or lost batches that could not be replayed | the full TTL |
//! | `approximate` | no usable events: missing, undecodable or contradicted | the full TTL |
//! | `unreachable` | the event stream cannot be reached | the full TTL |
//!
//! [`audit`] compares what was predicted with the cached tokens that the engine reports.

pub mod audit;

use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::ids::WorkerRank;
use audit::{Audit, Finding, Observation};

/// How far the events of one (worker, rank) are believed. See the [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TrustState {
    /// No event yet; treated as approximate.
    Unproven,
    /// Contiguous since a known start.
    Exact,
    /// Joined late, or a gap was not repaired.
    Converging,
    /// No usable events.
    Approximate,
    /// The event stream cannot be reached.
    Unreachable,
}

impl TrustState {
    /// Every state.
    pub const ALL: [Self; 5] = [
        Self::Unproven,
        Self::Exact,
        Self::Converging,
        Self::Approximate,
        Self::Unreachable,
    ];

    /// Returns the stable name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unproven => "unproven",
            Self::Exact => "exact",
            Self::Converging => "converging",
            Self::Approximate => "approximate",
            Self::Unreachable => "unreachable",
        }
    }

    /// Tells whether a router that has just started need not wait for more: events are heard, or it is settled that they
    /// cannot be used.
    #[must_use]
    pub const fn is_settled(self) -> bool {
        matches!(self, Self::Exact | Self::Converging | Self::Approximate)
    }
}

impl fmt::Display for TrustState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One change of state, to be logged once.
#[derive(Clone, Debug)]
pub struct TrustChange {
    /// Whose state.
    pub target: WorkerRank,
    /// The state before.
    pub from: TrustState,
    /// The state now.
    pub to: TrustState,
    /// Why it is not exact.
    pub cause: Option<String>,
    /// When.
    pub at: Instant,
}

/// The limits that the state machine goes by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrustLimits {
    pub(crate) silent_after: Duration,
    pub(crate) silent_requests: u32,
    /// How long unconfirmed knowledge is kept, and so how long converging takes.
    pub(crate) ttl: Duration,
}

/// Undecodable batches in a row after which a stream counts as unusable.
const UNDECODABLE_IN_A_ROW: u32 = 3;

/// State machine of one (worker, rank). Every input says what must happen to the index through its return value.
#[derive(Debug)]
pub(crate) struct Trust {
    state: TrustState,
    cause: Option<String>,
    since: Instant,
    /// What `stream_up` goes back to after an interruption.
    before_outage: Option<(TrustState, Option<String>)>,
    /// Knowledge is complete since a known start, so that an unpredicted hit means a mismatch.
    complete: bool,
    heard: bool,
    first_served: Option<Instant>,
    served_requests: u32,
    undecodable_in_a_row: u32,
    converged_at: Option<Instant>,
    mismatch: Option<Mismatch>,
    audit: Audit,
}

/// Why usable-looking events are not believed; each kind recovers by its own evidence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mismatch {
    /// Events are not asked for: for good.
    Configured,
    BlockSize,
    Audit,
}

impl Trust {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            state: TrustState::Unproven,
            cause: Some("no event yet".to_owned()),
            since: now,
            before_outage: None,
            complete: false,
            heard: false,
            first_served: None,
            served_requests: 0,
            undecodable_in_a_row: 0,
            converged_at: None,
            mismatch: None,
            audit: Audit::default(),
        }
    }

    /// A worker whose events are not asked for.
    pub(crate) fn configured_approximate(now: Instant) -> Self {
        let mut trust = Self::new(now);
        trust.mismatch = Some(Mismatch::Configured);
        trust.set(
            TrustState::Approximate,
            Some("the router is configured with index \"approximate\"".to_owned()),
            now,
        );
        trust
    }

    pub(crate) const fn state(&self) -> TrustState {
        self.state
    }

    pub(crate) fn cause(&self) -> Option<&str> {
        self.cause.as_deref()
    }

    pub(crate) const fn since(&self) -> Instant {
        self.since
    }

    pub(crate) const fn fidelity(&self) -> f64 {
        self.audit.fidelity()
    }

    /// A batch of usable events came in order from the very start of the engine's life.
    pub(crate) fn started(&mut self, now: Instant) {
        self.usable();
        self.complete = true;
        self.converged_at = None;
        self.believe(TrustState::Exact, None, now);
    }

    /// The first batch seen was not the engine's first.
    pub(crate) fn joined_late(&mut self, sequence: u64, limits: &TrustLimits, now: Instant) {
        self.usable();
        self.complete = false;
        self.converged_at = Some(now + limits.ttl);
        let cause = format!("joined at batch {sequence}; what was stored before is unknown");
        self.believe(TrustState::Converging, Some(cause), now);
    }

    /// A batch followed the one before, or came without a sequence to check.
    pub(crate) fn continued(&mut self, limits: &TrustLimits, now: Instant) {
        let recovered = self.undecodable_in_a_row > 0;
        self.usable();
        match self.state {
            TrustState::Unproven | TrustState::Unreachable => {
                self.believe(TrustState::Exact, None, now);
            }
            TrustState::Approximate if self.mismatch.is_none() => {
                if recovered {
                    self.converge(limits, now);
                    let cause = "batches were lost to decoding".to_owned();
                    self.believe(TrustState::Converging, Some(cause), now);
                } else {
                    self.believe(TrustState::Exact, None, now);
                }
            }
            _ => {}
        }
    }

    /// Batches were lost for good: the caller demotes what it holds.
    pub(crate) fn lost(&mut self, batches: u64, limits: &TrustLimits, now: Instant) {
        self.usable();
        self.complete = false;
        self.converge(limits, now);
        let cause = format!("{batches} event batches were lost and could not be replayed");
        self.believe(TrustState::Converging, Some(cause), now);
    }

    /// A batch could not be decoded. Returns true when the caller must demote what it holds.
    pub(crate) fn undecodable(&mut self, why: &str, limits: &TrustLimits, now: Instant) -> bool {
        self.undecodable_in_a_row += 1;
        let heard = self.heard;
        if self.undecodable_in_a_row >= UNDECODABLE_IN_A_ROW {
            let cause = format!("event batches cannot be decoded: {why}");
            self.believe(TrustState::Approximate, Some(cause), now);
        } else if heard {
            self.converge(limits, now);
            let cause = format!("an event batch could not be decoded: {why}");
            self.believe(TrustState::Converging, Some(cause), now);
        }
        self.complete = false;
        heard
    }

    /// The engine's block size does not fit the router's.
    pub(crate) fn block_size_refused(&mut self, engine: u32, router: usize, now: Instant) {
        if self.mismatch == Some(Mismatch::Configured) {
            return; // own placements are in the router's blocks, whatever the engine's are
        }
        self.mismatch = Some(Mismatch::BlockSize);
        let cause = format!(
            "engine block size {engine} is not a multiple of the router's block_size {router}"
        );
        self.set(TrustState::Approximate, Some(cause), now);
    }

    /// A store of a fitting block size was applied.
    pub(crate) fn block_size_accepted(&mut self, now: Instant) {
        if self.mismatch == Some(Mismatch::BlockSize) {
            self.mismatch = None;
            self.believe(TrustState::Exact, None, now);
        }
    }

    /// The stream is connected again.
    pub(crate) fn stream_up(&mut self, now: Instant) {
        if self.state == TrustState::Unreachable {
            let (state, cause) = self
                .before_outage
                .take()
                .unwrap_or_else(|| (TrustState::Unproven, Some("no event yet".to_owned())));
            self.set(state, cause, now);
        }
    }

    /// The stream cannot be reached.
    pub(crate) fn stream_down(&mut self, cause: &str, now: Instant) {
        if !self.heard && self.state == TrustState::Approximate {
            return; // a worker that never published is named as such, whatever its socket does
        }
        if self.state != TrustState::Unreachable {
            self.before_outage = Some((self.state, self.cause.clone()));
        }
        self.set(
            TrustState::Unreachable,
            Some(format!("event stream: {cause}")),
            now,
        );
    }

    /// The engine began anew and nothing of it is known yet.
    pub(crate) fn restarted(&mut self, cause: &str, now: Instant) {
        self.heard = false;
        self.complete = false;
        self.first_served = None;
        self.served_requests = 0;
        self.converged_at = None;
        self.believe(TrustState::Unproven, Some(cause.to_owned()), now);
    }

    /// A prompt that must have made the engine store two blocks or more was served.
    pub(crate) fn served(&mut self, limits: &TrustLimits, now: Instant) {
        if self.heard {
            return;
        }
        self.first_served.get_or_insert(now);
        self.served_requests = self.served_requests.saturating_add(1);
        self.check_silence(limits, now);
    }

    /// Time passed. Returns true when the caller must drop what is still demoted.
    pub(crate) fn tick(&mut self, limits: &TrustLimits, now: Instant) -> bool {
        self.check_silence(limits, now);
        if self.converged_at.is_some_and(|at| at <= now) {
            self.converged_at = None;
            if self.state == TrustState::Converging {
                self.set(TrustState::Exact, None, now);
            }
            return true;
        }
        false
    }

    /// Compares a prediction with what the engine reported.
    pub(crate) fn audit(&mut self, seen: &Observation, now: Instant) {
        let judged = self.state == TrustState::Exact && self.complete
            || self.mismatch == Some(Mismatch::Audit);
        match self.audit.observe(seen, judged) {
            Finding::Nothing => {}
            Finding::Mismatch(cause) => {
                if self.state == TrustState::Exact {
                    self.mismatch = Some(Mismatch::Audit);
                    self.set(TrustState::Approximate, Some(cause.to_owned()), now);
                }
            }
            Finding::Agreement => {
                if self.mismatch == Some(Mismatch::Audit) {
                    self.mismatch = None;
                    self.believe(TrustState::Exact, None, now);
                }
            }
        }
    }

    fn check_silence(&mut self, limits: &TrustLimits, now: Instant) {
        if self.heard || !matches!(self.state, TrustState::Unproven | TrustState::Unreachable) {
            return;
        }
        let Some(first) = self.first_served else {
            return;
        };
        let waited = now.saturating_duration_since(first);
        if self.served_requests >= limits.silent_requests || waited >= limits.silent_after {
            let mut cause = format!(
                "no KV event in {:.1} s and {} prompts served; is the engine's event publishing on, and on this endpoint?",
                waited.as_secs_f64(),
                self.served_requests
            );
            if self.state == TrustState::Unreachable
                && let Some(outage) = &self.cause
            {
                cause = format!("{cause} ({outage})");
            }
            self.before_outage = None;
            self.set(TrustState::Approximate, Some(cause), now);
        }
    }

    /// Gives what is held the TTL to be confirmed. Further losses do not prolong it, or a stream that loses batches again and
    /// again would keep its oldest entries for ever.
    fn converge(&mut self, limits: &TrustLimits, now: Instant) {
        self.converged_at.get_or_insert(now + limits.ttl);
    }

    /// Notes that decodable events are arriving.
    const fn usable(&mut self) {
        self.heard = true;
        self.undecodable_in_a_row = 0;
    }

    /// Goes to `state` unless a mismatch forbids believing the events.
    fn believe(&mut self, state: TrustState, cause: Option<String>, now: Instant) {
        self.before_outage = None;
        if self.mismatch.is_none() || state == TrustState::Approximate {
            self.set(state, cause, now);
        }
    }

    fn set(&mut self, state: TrustState, cause: Option<String>, now: Instant) {
        if self.state != state {
            self.since = now;
        }
        self.state = state;
        self.cause = cause;
    }
}

#[cfg(test)]
mod tests;
