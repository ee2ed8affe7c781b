//! What time does: leases run out, silence becomes a verdict, approximate entries expire.

use std::time::{Duration, Instant};

use crate::ids::Slot;
use crate::index::{PrefixIndex, Tier};
use crate::prompt::PromptKind;
use crate::trust::TrustState;

use super::Router;
use super::state::{Inner, Target};

/// Calls closer together than this share one tick.
const TICK_EVERY: Duration = Duration::from_millis(250);

impl Router {
    /// Lets time pass: releases bookings whose lease ran out, drops expired entries, and moves trust states. Call it about
    /// four times a second; more often costs little.
    pub fn tick(&self, now: Instant) {
        *self.inner.last_tick.lock() = Some(now);
        let expired = self.inner.leases.lock().expired(now);
        for id in expired {
            if self.inner.release(id, None, now) {
                self.inner
                    .counts
                    .expired_leases
                    .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
        }
        let workers = self.inner.workers.read();
        let capacities: Vec<(Slot, Option<usize>)> = workers
            .by_id
            .values()
            .flat_map(|worker| {
                let capacity = worker.capacity_blocks();
                worker
                    .targets
                    .iter()
                    .map(move |target| (target.slot, capacity))
            })
            .collect();
        for target in workers.targets() {
            self.inner.tick_stream(target, now);
        }
        self.inner.refresh_prefills(now);
        self.inner.token_placements.expire(now);
        self.inner.text_placements.expire(now);
        for (slot, capacity) in capacities {
            // The bound of text placements follows the learned chunk size.
            if capacity.is_some() {
                self.inner.bound_placements(slot, capacity);
            }
        }
        let ttl = self.inner.config.ttl();
        self.inner
            .booking
            .lock()
            .sessions
            .retain(|_, (_, _, used)| now.saturating_duration_since(*used) <= ttl);
    }

    /// Ticks when the last tick is a while ago.
    pub(super) fn tick_if_due(&self, now: Instant) {
        let due = self
            .inner
            .last_tick
            .lock()
            .is_none_or(|last| now.saturating_duration_since(last) >= TICK_EVERY);
        if due {
            self.tick(now);
        }
    }
}

impl Inner {
    fn tick_stream(&self, target: &Target, now: Instant) {
        let mut stream = target.stream.lock();
        if self.with_trust(target, &mut stream, now, |trust, limits| {
            trust.tick(limits, now)
        }) {
            self.index.drop_demoted(target.slot);
            self.note_resident(target);
        }
        let unheard = now.saturating_duration_since(stream.trust.since());
        if stream.trust.state() == TrustState::Unreachable
            && stream.tracker.next().is_some()
            && unheard > self.config.ttl()
        {
            // What was confirmed is older than anything that is believed. Its stream begins anew when it comes back.
            // Own placements stay: they are what such a worker is routed by.
            self.index.clear(target.slot, &Tier::ALL);
            self.note_resident(target);
            stream.tracker.reset();
        }
    }

    /// Keeps believing that prompts in prefill are where they were sent: the engine announces a block when it is computed,
    /// which for a long or queued prompt is long after the prediction TTL.
    fn refresh_prefills(&self, now: Instant) {
        let leases = self.leases.lock();
        let pending: Vec<_> = leases
            .in_prefill()
            .filter(|lease| lease.kind == PromptKind::Tokens)
            .map(|lease| {
                (
                    std::sync::Arc::clone(&lease.target),
                    std::sync::Arc::clone(lease.booked.sequence()),
                )
            })
            .collect();
        drop(leases);
        for (target, sequence) in pending {
            let stream = target.stream.lock();
            if stream.removed {
                continue;
            }
            if let Some(ttl) = self.placement_ttl(PromptKind::Tokens, stream.trust.state()) {
                self.token_placements
                    .record(target.slot, &sequence, now + ttl, now);
            }
        }
    }
}
