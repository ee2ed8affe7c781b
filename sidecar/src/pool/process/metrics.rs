//! What is counted of local engines.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// Metrics of local engines; clones count together.
#[derive(Clone, Debug)]
pub struct ProcessMetrics {
    states: Family<[(&'static str, String); 2], Gauge>,
    restarts: Family<[(&'static str, String); 1], Counter>,
    ready_seconds: Histogram,
}

impl Default for ProcessMetrics {
    fn default() -> Self {
        Self {
            states: Family::default(),
            restarts: Family::default(),
            // Half a second to about half an hour.
            ready_seconds: Histogram::new(exponential_buckets(0.5, 2.0, 13)),
        }
    }
}

impl ProcessMetrics {
    /// Registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let all = Self::default();
        registry.register(
            "process_state",
            "1 for the state in which a local engine is",
            all.states.clone(),
        );
        registry.register(
            "process_restarts",
            "Starts of a local engine after its first",
            all.restarts.clone(),
        );
        registry.register(
            "process_ready_seconds",
            "Time from the start of a local engine until it was ready",
            all.ready_seconds.clone(),
        );
        all
    }

    /// Takes in that an engine went from one state to another; both are the same at first.
    pub(super) fn entered(&self, process: &str, from: &str, to: &str) {
        for (state, value) in [(from, 0), (to, 1)] {
            let labels = [("process", process.to_owned()), ("state", state.to_owned())];
            self.states.get_or_create(&labels).set(value);
        }
    }

    pub(super) fn restarted(&self, process: &str) {
        let labels = [("process", process.to_owned())];
        self.restarts.get_or_create(&labels).inc();
    }

    pub(super) fn was_ready_after(&self, seconds: f64) {
        self.ready_seconds.observe(seconds);
    }
}
