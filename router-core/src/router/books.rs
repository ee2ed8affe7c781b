//! What time does: leases run out, silence becomes a verdict, approximate entries expire.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::index::{PrefixIndex, Tier};
use crate::prompt::PromptKind;
use crate::sync::atomic::Ordering;
use crate::trust::TrustState;

use super::Router;
use super::lease::Lease;
use super::state::{Inner, Target};

/// Calls closer together than this share one tick.
const TICK_EVERY: Duration = Duration::from_millis(250);

impl Router {
    /// Lets time pass: releases bookings whose lease ran out, drops expired entries, and moves trust states. Call it about
    /// four times a second; more often costs little.
    pub fn tick(&self, now: Instant) {
        self.inner.clock.ticked(now);
        self.inner.tick(now);
    }

    /// Ticks when the last tick is a while ago.
    pub(super) fn tick_if_due(&self, now: Instant) {
        if self.inner.clock.is_due(now, TICK_EVERY) {
            self.inner.tick(now);
        }
    }
}

impl Inner {
    fn tick(&self, now: Instant) {
        self.release_expired(now);
        let workers = self.workers.read();
        for target in workers.targets() {
            self.tick_stream(target, now);
        }
        self.refresh_prefills(now);
        self.token_placements.expire(now);
        self.text_placements.expire(now);
        for worker in workers.by_id.values() {
            let capacity = worker.capacity_blocks();
            // The bound of text placements follows the learned chunk size.
            if capacity.is_some() {
                for target in &worker.targets {
                    self.bound_placements(target.slot, capacity);
                }
            }
        }
        self.sessions.forget(now, self.config.ttl());
        drop(workers);
        self.keep_budget();
    }

    fn release_expired(&self, now: Instant) {
        let is_expired = |lease: &Lease| !lease.held && lease.deadline <= now;
        let expired = self
            .leases
            .collect(|id, lease| is_expired(lease).then_some(id));
        for id in expired {
            if self.release(id, None, now) {
                self.counts.expired_leases.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

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
        let pending = self
            .leases
            .collect(|id, lease| is_pending(lease).then(|| (id, Arc::clone(&lease.target))));
        for (id, target) in pending {
            let stream = target.stream.lock();
            if stream.removed {
                continue;
            }
            let Some(ttl) = self.placement_ttl(PromptKind::Tokens, stream.trust.state()) else {
                continue;
            };
            // One that has ended meanwhile leaves nothing, and what is renewed is taken back as the first note would be.
            self.leases.with(id, |lease| {
                if is_pending(lease)
                    && let Some(placement) = lease.placement.take()
                {
                    let prompt = lease.booked.prompt();
                    let renewed =
                        self.token_placements
                            .renew(placement, target.slot, prompt, now + ttl, now);
                    lease.placement = Some(renewed);
                }
            });
        }
    }
}

/// Tells whether the engine has still to announce what is noted of a booking.
fn is_pending(lease: &Lease) -> bool {
    lease.in_prefill && lease.placement.is_some() && lease.kind == PromptKind::Tokens
}
