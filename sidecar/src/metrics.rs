//! What the sidecar counts and measures, in Prometheus text. Names begin with `kvlane_`.
//!
//! What happens to requests is counted here as it happens; what the router and the fleet know at any time is read from
//! them when somebody asks (`snapshot`).

mod snapshot;

use std::time::Duration;

use prometheus_client::encoding::prometheus_text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::config::PolicyKind;
use crate::fleet::Fleet;
use crate::handoff::HandoffMetrics;
use crate::pool::manager::PoolReport;
use crate::pool::process::ProcessMetrics;
use crate::pool::rebalance::Balance;
use crate::request::Endpoint;
use kvlane::Router;

/// Labels of one series.
type Labels<const N: usize> = [(&'static str, String); N];

/// Every metric that is counted as it happens.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<Labels<3>, Counter>,
    rejected: Family<Labels<1>, Counter>,
    prompts: Family<Labels<1>, Counter>,
    decisions: Family<Labels<2>, Counter>,
    decision_seconds: Histogram,
    degraded: Gauge,
    /// Those of handoffs.
    pub handoff: HandoffMetrics,
    /// What is counted of local engines.
    pub processes: ProcessMetrics,
    workers: WorkerFamilies,
}

/// Families with one series a worker.
#[derive(Debug, Clone)]
struct WorkerFamilies {
    retries: Family<Labels<2>, Counter>,
    interrupted: Family<Labels<1>, Counter>,
    incomplete: Family<Labels<1>, Counter>,
    cancelled: Family<Labels<1>, Counter>,
    back_pressure: Family<Labels<1>, Counter>,
    health_failures: Family<Labels<1>, Counter>,
    scrape_failures: Family<Labels<1>, Counter>,
    request_seconds: Family<Labels<1>, Histogram, Buckets>,
    ttft_seconds: Family<Labels<1>, Histogram, Buckets>,
    overlap_blocks: Family<Labels<1>, Histogram, Buckets>,
    predicted_cached_tokens: Family<Labels<1>, Histogram, Buckets>,
    reported_cached_tokens: Family<Labels<1>, Histogram, Buckets>,
}

/// The series of one worker, looked up once.
#[derive(Clone, Debug)]
pub struct WorkerMetrics {
    /// Requests that found no connection.
    pub retries_connect: Counter,
    /// Requests whose connection ended before the response.
    pub retries_broken: Counter,
    /// Requests that were waiting when the worker left.
    pub retries_gone: Counter,
    /// Responses that broke off after they began.
    pub interrupted: Counter,
    /// Event streams that ended without their end marker.
    pub incomplete: Counter,
    /// Requests whose client left.
    pub cancelled: Counter,
    /// Answers 429 and 503.
    pub back_pressure: Counter,
    /// Failed health probes.
    pub health_failures: Counter,
    /// Failed readings of the worker's metrics.
    pub scrape_failures: Counter,
    /// Time from the request's arrival to the end of its response.
    pub request_seconds: Histogram,
    /// Time from the request's arrival to the first response byte.
    pub ttft_seconds: Histogram,
    /// Blocks that a decision counted on.
    pub overlap_blocks: Histogram,
    /// Cached prompt tokens that a decision predicted.
    pub predicted_cached_tokens: Histogram,
    /// Cached prompt tokens that the engine reported.
    pub reported_cached_tokens: Histogram,
}

/// Buckets of a histogram family.
#[derive(Clone, Copy, Debug)]
enum Buckets {
    /// 1 ms to about 17 minutes.
    Seconds,
    /// 1 to about 260,000, and 0.
    Counts,
}

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        match self {
            Self::Seconds => Histogram::new(exponential_buckets(0.001, 2.0, 21)),
            Self::Counts => {
                Histogram::new(std::iter::once(0.0).chain(exponential_buckets(1.0, 2.0, 19)))
            }
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Registers every metric.
    #[must_use]
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("kvlane");
        let mut all = Self {
            requests: counter(
                &mut registry,
                "requests",
                "Requests answered, by API, worker and status class",
            ),
            rejected: counter(
                &mut registry,
                "rejected_requests",
                "Requests answered by the sidecar itself, by reason",
            ),
            prompts: counter(
                &mut registry,
                "prompts",
                "Prompts by the way they were understood: tokens, text or load",
            ),
            decisions: counter(
                &mut registry,
                "decisions",
                "Decisions by policy and chosen worker",
            ),
            decision_seconds: Histogram::new(exponential_buckets(0.000_001, 2.0, 20)),
            degraded: Gauge::default(),
            handoff: HandoffMetrics::register(&mut registry),
            processes: ProcessMetrics::register(&mut registry),
            workers: WorkerFamilies::new(&mut registry),
            registry: Registry::default(),
        };
        registry.register(
            "decision_seconds",
            "Time to choose and book a worker",
            all.decision_seconds.clone(),
        );
        registry.register(
            "tokenizer_degraded",
            "1 when a tokenizer or template failed, so that prompts are matched as text",
            all.degraded.clone(),
        );
        all.registry = registry;
        all
    }

    /// Returns the series of one worker.
    #[must_use]
    pub fn worker(&self, id: &str) -> WorkerMetrics {
        self.workers.of(id)
    }

    /// Forgets the series of a removed worker.
    pub fn forget_worker(&self, id: &str) {
        self.workers.forget(id);
        for policy in PolicyKind::ALL {
            self.decisions.remove(&decision_labels(policy.as_str(), id));
        }
        for endpoint in Endpoint::ALL {
            for class in STATUS_CLASSES {
                let labels = request_labels(endpoint.as_str(), id, class);
                self.requests.remove(&labels);
            }
        }
    }

    /// Counts an answered request.
    pub fn count_request(&self, endpoint: &'static str, worker: &str, status: u16) {
        let class = match status / 100 {
            2 => "2xx",
            3 => "3xx",
            4 => "4xx",
            5 => "5xx",
            _ => "other",
        };
        self.requests
            .get_or_create(&request_labels(endpoint, worker, class))
            .inc();
    }

    /// Counts a request that the sidecar answered itself.
    pub fn count_rejected(&self, reason: &'static str) {
        self.rejected
            .get_or_create(&[("reason", reason.to_owned())])
            .inc();
    }

    /// Counts a prompt by how it was understood.
    pub fn count_prompt(&self, mode: &'static str) {
        self.prompts
            .get_or_create(&[("mode", mode.to_owned())])
            .inc();
    }

    /// Counts a decision and its time.
    pub fn count_decision(&self, policy: &'static str, worker: &str, took: Duration) {
        self.decisions
            .get_or_create(&decision_labels(policy, worker))
            .inc();
        self.decision_seconds.observe(took.as_secs_f64());
    }

    /// Says that a tokenizer or template failed.
    pub fn set_degraded(&self) {
        self.degraded.set(1);
    }

    /// Writes everything in Prometheus text format.
    ///
    /// # Errors
    /// None in practice: writing to a string does not fail.
    pub fn encode(
        &self,
        router: &Router,
        fleet: &Fleet,
        pool: PoolReport,
        balance: Balance,
    ) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        prometheus_text::encode(&mut text, &self.registry)?;
        let mut state = Registry::with_prefix("kvlane");
        state.register_collector(Box::new(snapshot::Snapshot::take(
            router, fleet, pool, balance,
        )));
        prometheus_text::encode(&mut text, &state)?;
        Ok(text)
    }
}

/// Values of the label `status`.
const STATUS_CLASSES: [&str; 5] = ["2xx", "3xx", "4xx", "5xx", "other"];

fn request_labels(endpoint: &str, worker: &str, class: &str) -> Labels<3> {
    [
        ("endpoint", endpoint.to_owned()),
        ("worker", worker.to_owned()),
        ("status", class.to_owned()),
    ]
}

fn decision_labels(policy: &str, worker: &str) -> Labels<2> {
    [("policy", policy.to_owned()), ("worker", worker.to_owned())]
}

impl WorkerFamilies {
    fn new(registry: &mut Registry) -> Self {
        Self {
            retries: counter(
                registry,
                "retries",
                "Attempts given up before the first response byte, by worker and reason",
            ),
            interrupted: counter(
                registry,
                "interrupted_responses",
                "Responses that broke off after their first byte",
            ),
            incomplete: counter(
                registry,
                "incomplete_streams",
                "Event streams that ended without their end marker",
            ),
            cancelled: counter(registry, "cancelled_requests", "Requests whose client left"),
            back_pressure: counter(registry, "back_pressure", "Answers 429 and 503"),
            health_failures: counter(registry, "health_failures", "Failed health probes"),
            scrape_failures: counter(
                registry,
                "scrape_failures",
                "Failed readings of a worker's metrics",
            ),
            request_seconds: histogram(
                registry,
                "request_seconds",
                "Time from a request's arrival to the end of its response",
                Buckets::Seconds,
            ),
            ttft_seconds: histogram(
                registry,
                "ttft_seconds",
                "Time from a request's arrival to its first response byte",
                Buckets::Seconds,
            ),
            overlap_blocks: histogram(
                registry,
                "overlap_blocks",
                "Leading blocks that a decision counted on",
                Buckets::Counts,
            ),
            predicted_cached_tokens: histogram(
                registry,
                "predicted_cached_tokens",
                "Cached prompt tokens predicted, of requests whose engine reported some",
                Buckets::Counts,
            ),
            reported_cached_tokens: histogram(
                registry,
                "reported_cached_tokens",
                "Cached prompt tokens that the engine reported",
                Buckets::Counts,
            ),
        }
    }

    fn of(&self, id: &str) -> WorkerMetrics {
        let one = [("worker", id.to_owned())];
        let retry = |reason: &str| {
            let labels = [("worker", id.to_owned()), ("reason", reason.to_owned())];
            self.retries.get_or_create_owned(&labels)
        };
        WorkerMetrics {
            retries_connect: retry("connect"),
            retries_broken: retry("broken"),
            retries_gone: retry("gone"),
            interrupted: self.interrupted.get_or_create_owned(&one),
            incomplete: self.incomplete.get_or_create_owned(&one),
            cancelled: self.cancelled.get_or_create_owned(&one),
            back_pressure: self.back_pressure.get_or_create_owned(&one),
            health_failures: self.health_failures.get_or_create_owned(&one),
            scrape_failures: self.scrape_failures.get_or_create_owned(&one),
            request_seconds: self.request_seconds.get_or_create_owned(&one),
            ttft_seconds: self.ttft_seconds.get_or_create_owned(&one),
            overlap_blocks: self.overlap_blocks.get_or_create_owned(&one),
            predicted_cached_tokens: self.predicted_cached_tokens.get_or_create_owned(&one),
            reported_cached_tokens: self.reported_cached_tokens.get_or_create_owned(&one),
        }
    }

    fn forget(&self, id: &str) {
        let one = [("worker", id.to_owned())];
        for reason in ["connect", "broken", "gone"] {
            self.retries
                .remove(&[("worker", id.to_owned()), ("reason", reason.to_owned())]);
        }
        for family in [
            &self.interrupted,
            &self.incomplete,
            &self.cancelled,
            &self.back_pressure,
            &self.health_failures,
            &self.scrape_failures,
        ] {
            family.remove(&one);
        }
        for family in [
            &self.request_seconds,
            &self.ttft_seconds,
            &self.overlap_blocks,
            &self.predicted_cached_tokens,
            &self.reported_cached_tokens,
        ] {
            family.remove(&one);
        }
    }
}

fn counter<const N: usize>(
    registry: &mut Registry,
    name: &str,
    help: &str,
) -> Family<Labels<N>, Counter> {
    let family = Family::default();
    registry.register(name, help, Family::clone(&family));
    family
}

fn histogram(
    registry: &mut Registry,
    name: &str,
    help: &str,
    buckets: Buckets,
) -> Family<Labels<1>, Histogram, Buckets> {
    let family = Family::new_with_constructor(buckets);
    registry.register(name, help, family.clone());
    family
}
