//! What handoffs count.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::handoff::{Answer, FallbackReason, Outcome};

/// Counters of handoffs; clones count together.
#[derive(Clone, Debug)]
pub struct HandoffMetrics {
    open: Gauge,
    ended: Family<[(&'static str, &'static str); 1], Counter>,
    fallbacks: Family<[(&'static str, &'static str); 1], Counter>,
    pub(super) collected: Counter,
    pub(super) left_to_lease: Counter,
    pub(super) prefill_seconds: Histogram,
    pub(super) transfer_seconds: Histogram,
}

impl Default for HandoffMetrics {
    fn default() -> Self {
        // 1 ms to about 9 minutes.
        let seconds = || Histogram::new(exponential_buckets(0.001, 2.0, 20));
        Self {
            open: Gauge::default(),
            ended: Family::default(),
            fallbacks: Family::default(),
            collected: Counter::default(),
            left_to_lease: Counter::default(),
            prefill_seconds: seconds(),
            transfer_seconds: seconds(),
        }
    }
}

impl HandoffMetrics {
    /// Registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let all = Self::default();
        registry.register(
            "handoffs_open",
            "Handoffs that are not over, those included whose prefill worker still holds a cache",
            all.open.clone(),
        );
        registry.register(
            "handoffs",
            "Handoffs by how they ended for the client",
            all.ended.clone(),
        );
        registry.register(
            "handoff_fallbacks",
            "Requests whose decode worker had to process the prompt itself, by reason",
            all.fallbacks.clone(),
        );
        registry.register(
            "handoff_collected",
            "Prefills fetched for nobody, because their client had left",
            all.collected.clone(),
        );
        registry.register(
            "handoff_left_to_lease",
            "Prefills whose client had left, held until their lease ends because the decode worker had no room",
            all.left_to_lease.clone(),
        );
        registry.register(
            "handoff_prefill_seconds",
            "Time from sending a prefill leg to its answer",
            all.prefill_seconds.clone(),
        );
        registry.register(
            "handoff_transfer_seconds",
            "Time from the prefill leg's answer to the first byte of the decode leg's",
            all.transfer_seconds.clone(),
        );
        all
    }

    /// Returns the number of handoffs that are not over.
    #[must_use]
    pub fn open(&self) -> i64 {
        self.open.get()
    }

    /// Returns how many handoffs ended for their client with this name: `split`, `local`, `left`, `refused`,
    /// `bad_gateway`, `broken_stream` or `stopped`.
    #[must_use]
    pub fn ended(&self, name: &'static str) -> u64 {
        self.ended.get_or_create(&[("outcome", name)]).get()
    }

    /// Returns how many requests fell back for a reason.
    #[must_use]
    pub fn fallbacks(&self, reason: FallbackReason) -> u64 {
        let labels = [("reason", reason.as_str())];
        self.fallbacks.get_or_create(&labels).get()
    }

    /// Returns how many prefills were fetched for nobody.
    #[must_use]
    pub fn collected(&self) -> u64 {
        self.collected.get()
    }

    /// Returns how many were left to their lease instead.
    #[must_use]
    pub fn left_to_lease(&self) -> u64 {
        self.left_to_lease.get()
    }

    pub(super) fn begin(&self) -> Open {
        self.open.inc();
        Open {
            metrics: self.clone(),
            outcome: None,
        }
    }

    pub(super) fn fell_back(&self, reason: FallbackReason) {
        let labels = [("reason", reason.as_str())];
        self.fallbacks.get_or_create(&labels).inc();
    }
}

/// One open handoff; dropping it closes it.
#[derive(Debug)]
pub(super) struct Open {
    metrics: HandoffMetrics,
    pub(super) outcome: Option<Outcome>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.metrics.open.dec();
        let name = match self.outcome {
            Some(Outcome::Split) => "split",
            Some(Outcome::Local(_)) => "local",
            Some(Outcome::Left) => "left",
            Some(Outcome::Answered(Answer::PrefillRefusal | Answer::DecodeRefusal)) => "refused",
            Some(Outcome::Answered(Answer::BadGateway)) => "bad_gateway",
            Some(Outcome::Answered(Answer::BrokenStream)) => "broken_stream",
            None => "stopped",
        };
        self.metrics.ended.get_or_create(&[("outcome", name)]).inc();
    }
}
