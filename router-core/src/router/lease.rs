//! Bookings: guards, deadlines, and what their end teaches.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use crate::ids::{LeaseId, WorkerRank};
use crate::index::Placement;
use crate::load::active::Booked;
use crate::prompt::PromptKind;
use crate::sync::atomic::Ordering;
use crate::sync::{Mutex, Shards};
use crate::trust::audit::Observation;

use super::request::Decision;
use super::state::{Inner, Target};
use super::{Handle, Router};

/// How a request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// The worker answered it.
    pub ok: bool,
    /// It reached the worker; when not, the note of where its prompt went is taken back.
    pub dispatched: bool,
    /// Prompt tokens that the engine reported as cached (`usage.prompt_tokens_details.cached_tokens`).
    pub cached_tokens: Option<u32>,
    /// Prompt tokens that the engine counted (`usage.prompt_tokens`).
    pub prompt_tokens: Option<u32>,
}

impl Outcome {
    /// The worker answered.
    #[must_use]
    pub const fn ok() -> Self {
        Self {
            ok: true,
            dispatched: true,
            cached_tokens: None,
            prompt_tokens: None,
        }
    }

    /// The worker got the request and did not answer it properly.
    #[must_use]
    pub const fn failed() -> Self {
        Self {
            ok: false,
            dispatched: true,
            cached_tokens: None,
            prompt_tokens: None,
        }
    }

    /// The request never reached the worker.
    #[must_use]
    pub const fn not_dispatched() -> Self {
        Self {
            ok: false,
            dispatched: false,
            cached_tokens: None,
            prompt_tokens: None,
        }
    }

    /// Adds what the engine reported.
    #[must_use]
    pub const fn reported(
        mut self,
        cached_tokens: Option<u32>,
        prompt_tokens: Option<u32>,
    ) -> Self {
        self.cached_tokens = cached_tokens;
        self.prompt_tokens = prompt_tokens;
        self
    }
}

/// A booked request. Dropping it releases the booking; [`detach`](Self::detach) leaves it to its lease deadline.
///
/// While the guard lives the booking does not expire, however long the stream is silent.
pub struct RequestGuard {
    router: Arc<Handle>,
    id: LeaseId,
    decision: Arc<Decision>,
    armed: bool,
}

impl RequestGuard {
    pub(super) const fn new(router: Arc<Handle>, id: LeaseId, decision: Arc<Decision>) -> Self {
        Self {
            router,
            id,
            decision,
            armed: true,
        }
    }

    /// Returns the booking's name.
    #[must_use]
    pub const fn id(&self) -> LeaseId {
        self.id
    }

    /// Returns the target.
    #[must_use]
    pub fn target(&self) -> &WorkerRank {
        &self.decision.target
    }

    /// Returns the chosen worker.
    #[must_use]
    pub fn worker(&self) -> &str {
        self.decision.target.worker.as_str()
    }

    /// Returns the chosen rank.
    #[must_use]
    pub fn dp_rank(&self) -> u32 {
        self.decision.target.dp_rank
    }

    /// Returns the decision with every candidate and cost term.
    #[must_use]
    pub const fn decision(&self) -> &Arc<Decision> {
        &self.decision
    }

    /// Says that the first token came: the prompt no longer waits for prefill.
    pub fn prefill_done(&self, now: Instant) {
        self.router.inner.prefill_done(self.id, now);
    }

    /// Says how many tokens were produced so far.
    pub fn output_tokens(&self, total: u32, now: Instant) {
        self.router.inner.output_tokens(self.id, total, now);
    }

    /// Releases the booking and learns from how it ended.
    pub fn release(mut self, outcome: &Outcome, now: Instant) {
        self.armed = false;
        self.router.inner.release(self.id, Some(outcome), now);
    }

    /// Leaves the booking to [`Router::finish`] or its lease deadline, counted from `now`.
    #[must_use]
    pub fn detach(mut self, now: Instant) -> LeaseId {
        self.armed = false;
        self.router.inner.leases.with(self.id, |lease| {
            lease.held = false;
            lease.deadline = now + lease.ttl;
        });
        self.id
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        if self.armed {
            self.router.inner.drop_lease(self.id);
        }
    }
}

impl fmt::Debug for RequestGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestGuard")
            .field("id", &self.id)
            .field("target", self.target())
            .finish_non_exhaustive()
    }
}

/// A booking as the router keeps it.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) target: Arc<Target>,
    pub(super) booked: Booked,
    pub(super) kind: PromptKind,
    pub(super) prompt_tokens: usize,
    pub(super) request_blocks: u32,
    /// Output that is booked from the start.
    pub(super) expected_output_tokens: u32,
    /// Blocks of output beyond that.
    pub(super) output_blocks: usize,
    pub(super) predicted_tokens: u32,
    pub(super) confirmed_tokens: u32,
    pub(super) ttl: Duration,
    pub(super) deadline: Instant,
    /// A guard lives: an open stream, which does not expire.
    pub(super) held: bool,
    pub(super) in_prefill: bool,
    pub(super) placement: Option<Placement>,
    pub(super) request_id: Option<Arc<str>>,
}

/// Every booking by id, and by the caller's name of the request; in shards, so that bookings do not wait for each other.
///
/// A lease is locked before its target's load and after its target's stream, never the other way round.
#[derive(Debug, Default)]
pub(super) struct Leases {
    by_id: Shards<Mutex<HashMap<LeaseId, Lease>>>,
    by_request: Shards<Mutex<HashMap<Arc<str>, LeaseId>>>,
}

impl Leases {
    pub(super) fn len(&self) -> usize {
        self.by_id.iter().map(|shard| shard.lock().len()).sum()
    }

    pub(super) fn insert(&self, id: LeaseId, lease: Lease) {
        self.shard(id).lock().insert(id, lease);
    }

    /// Names a live booking. Returns the booking that had the name; `or_keep` leaves the name with that one.
    pub(super) fn name(&self, request: &Arc<str>, id: LeaseId, or_keep: bool) -> Option<LeaseId> {
        let mut names = self.names(request).lock();
        let earlier = names.get(request).copied();
        if earlier.is_none() || !or_keep {
            names.insert(Arc::clone(request), id);
        }
        earlier
    }

    pub(super) fn of_request(&self, request: &str) -> Option<LeaseId> {
        self.names(request).lock().get(request).copied()
    }

    /// Runs `act` on a live booking.
    pub(super) fn with<T>(&self, id: LeaseId, act: impl FnOnce(&mut Lease) -> T) -> Option<T> {
        self.shard(id).lock().get_mut(&id).map(act)
    }

    pub(super) fn take(&self, id: LeaseId) -> Option<Lease> {
        let lease = self.shard(id).lock().remove(&id)?;
        if let Some(request) = &lease.request_id {
            let mut names = self.names(request).lock();
            if names.get(request) == Some(&id) {
                names.remove(request);
            }
        }
        Some(lease)
    }

    /// Collects what `of` returns of live bookings.
    pub(super) fn collect<T>(&self, of: impl Fn(LeaseId, &Lease) -> Option<T>) -> Vec<T> {
        let mut found = Vec::new();
        for shard in self.by_id.iter() {
            let shard = shard.lock();
            found.extend(shard.iter().filter_map(|(id, lease)| of(*id, lease)));
        }
        found
    }

    fn shard(&self, id: LeaseId) -> &Mutex<HashMap<LeaseId, Lease>> {
        self.by_id.of(id.0)
    }

    fn names(&self, request: &str) -> &Mutex<HashMap<Arc<str>, LeaseId>> {
        self.by_request
            .of(xxhash_rust::xxh3::xxh3_64(request.as_bytes()))
    }
}

impl Router {
    /// Releases a booking by its id and learns from how it ended. False when it is not known (any more): a no-op.
    pub fn finish(&self, id: LeaseId, outcome: &Outcome, now: Instant) -> bool {
        self.inner.release(id, Some(outcome), now)
    }

    /// Returns the live booking of a request id.
    #[must_use]
    pub fn lease_of(&self, request_id: &str) -> Option<LeaseId> {
        self.inner.leases.of_request(request_id)
    }

    /// Tells whether a booking lives: it was not released, and its lease has not run out.
    #[must_use]
    pub fn is_booked(&self, id: LeaseId) -> bool {
        self.inner.leases.with(id, |_| ()).is_some()
    }

    /// Says that the first token of a booking came. False when it is not known.
    pub fn prefill_done(&self, id: LeaseId, now: Instant) -> bool {
        self.inner.prefill_done(id, now)
    }

    /// Says how many tokens a booking has produced so far; also extends its lease. False when it is not known.
    pub fn output_tokens(&self, id: LeaseId, total: u32, now: Instant) -> bool {
        self.inner.output_tokens(id, total, now)
    }
}

impl Inner {
    fn prefill_done(&self, id: LeaseId, now: Instant) -> bool {
        let done = self.leases.with(id, |lease| {
            lease.deadline = now + lease.ttl;
            if std::mem::take(&mut lease.in_prefill) {
                let Lease { target, booked, .. } = lease;
                self.with_load(target, |load| {
                    load.prefill_done(self.active.prefill_done(booked));
                });
            }
        });
        done.is_some()
    }

    fn output_tokens(&self, id: LeaseId, total: u32, now: Instant) -> bool {
        let block = self.config.block_size.tokens();
        let done = self.leases.with(id, |lease| {
            lease.deadline = now + lease.ttl;
            // The first block of output is booked from the start, and so is what was expected.
            let expected = lease.expected_output_tokens as usize / block;
            let beyond = (total as usize / block).saturating_sub(expected);
            let before = std::mem::replace(&mut lease.output_blocks, beyond);
            if before != beyond {
                self.with_load(&lease.target, |load| {
                    load.set_output_blocks(before, beyond);
                });
            }
        });
        done.is_some()
    }

    /// Releases a booking. Without an outcome it was superseded or ran out, which says nothing about the worker.
    pub(super) fn release(&self, id: LeaseId, outcome: Option<&Outcome>, now: Instant) -> bool {
        let Some(lease) = self.leases.take(id) else {
            return false;
        };
        self.take_off(&lease, Some(now));
        if let Some(outcome) = outcome {
            self.learn(lease, outcome, now);
        }
        true
    }

    /// Releases a booking whose guard was dropped: the client left, or the caller failed.
    fn drop_lease(&self, id: LeaseId) {
        if let Some(lease) = self.leases.take(id) {
            self.take_off(&lease, None);
        }
    }

    /// Takes a booking off its target's load.
    fn take_off(&self, lease: &Lease, now: Option<Instant>) {
        let is_vacated = self.with_load(&lease.target, |load| {
            let blocks = self.active.release(&lease.booked) + lease.output_blocks;
            load.release(blocks, lease.booked.prefill_blocks, now)
        });
        if is_vacated {
            self.free_slot(lease.target.slot);
        }
    }

    fn learn(&self, mut lease: Lease, outcome: &Outcome, now: Instant) {
        if !outcome.dispatched {
            if let Some(placement) = lease.placement.take() {
                self.placements(lease.kind).undo(placement);
            }
            return;
        }
        if !outcome.ok {
            return;
        }
        if let (PromptKind::Text, Some(tokens)) = (lease.kind, outcome.prompt_tokens) {
            self.learn_chunk_size(&lease, tokens);
        }
        let target = Arc::clone(&lease.target);
        let mut stream = target.stream.lock();
        if stream.removed {
            return;
        }
        let block_tokens = self.config.block_size.tokens();
        let stored = outcome
            .cached_tokens
            .map_or(lease.request_blocks as usize, |cached| {
                let tokens = outcome
                    .prompt_tokens
                    .map_or(lease.prompt_tokens, |tokens| tokens as usize);
                tokens.saturating_sub(cached as usize) / block_tokens
            });
        self.with_trust(&target, &mut stream, now, |trust, limits| {
            // A prompt that was cached already makes the engine store nothing, and so publish nothing.
            if stored >= 2 {
                trust.served(limits, now);
            }
            if let Some(reported_tokens) = outcome.cached_tokens {
                let observation = Observation {
                    predicted_tokens: lease.predicted_tokens,
                    confirmed_tokens: lease.confirmed_tokens,
                    reported_tokens,
                    block_tokens: u32::try_from(block_tokens).unwrap_or(u32::MAX),
                    exact_tokens: lease.kind == PromptKind::Tokens,
                };
                trust.audit(&observation, now);
            }
        });
    }

    /// Learns how many tokens a text chunk has, so that a text prompt's share of a cache is estimated right.
    fn learn_chunk_size(&self, lease: &Lease, prompt_tokens: u32) {
        // Short prompts are mostly template.
        if lease.request_blocks < 4 {
            return;
        }
        let seen = f64::from(prompt_tokens) / f64::from(lease.request_blocks);
        let before = self.tokens_per_chunk();
        let after = (before + 0.1 * (seen - before)).clamp(1.0, 64.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "clamped above"
        )]
        self.chunk_millitokens
            .store((after * 1_000.0) as u64, Ordering::Relaxed);
    }
}
