//! What the router answers, as plain Python objects.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::clock::Clock;

/// Leading blocks of a prompt that a target holds, each counted once at its best tier.
#[pyclass(frozen, get_all, eq, hash, module = "kvlane")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Overlap {
    device: u32,
    host: u32,
    disk: u32,
    external: u32,
}

#[pymethods]
impl Overlap {
    #[new]
    #[pyo3(signature = (device = 0, host = 0, disk = 0, external = 0))]
    const fn new(device: u32, host: u32, disk: u32, external: u32) -> Self {
        Self {
            device,
            host,
            disk,
            external,
        }
    }

    /// Blocks in any tier.
    #[getter]
    const fn blocks(&self) -> u32 {
        self.device
            .saturating_add(self.host)
            .saturating_add(self.disk)
            .saturating_add(self.external)
    }

    fn __repr__(&self) -> String {
        format!(
            "Overlap(device={}, host={}, disk={}, external={})",
            self.device, self.host, self.disk, self.external
        )
    }
}

impl From<kvlane::Overlap> for Overlap {
    fn from(overlap: kvlane::Overlap) -> Self {
        Self::new(overlap.device, overlap.host, overlap.disk, overlap.external)
    }
}

/// A cost with its terms, all in blocks; lower is better.
#[pyclass(frozen, get_all, module = "kvlane")]
#[derive(Clone, Copy)]
pub(crate) struct CostBreakdown {
    total: f64,
    uncached_prefill_blocks: f64,
    booked_prefill_blocks: f64,
    decode_blocks: f64,
    active_requests: f64,
    prefill_weight: f64,
    request_weight: f64,
    preference: f64,
}

#[pymethods]
impl CostBreakdown {
    fn __repr__(&self) -> String {
        format!(
            "CostBreakdown(total={}, uncached_prefill_blocks={}, booked_prefill_blocks={}, decode_blocks={}, \
             active_requests={}, prefill_weight={}, request_weight={}, preference={})",
            self.total,
            self.uncached_prefill_blocks,
            self.booked_prefill_blocks,
            self.decode_blocks,
            self.active_requests,
            self.prefill_weight,
            self.request_weight,
            self.preference
        )
    }
}

/// One target and what placing a request there would cost.
#[pyclass(frozen, get_all, module = "kvlane")]
#[derive(Clone)]
pub(crate) struct Candidate {
    worker: String,
    dp_rank: u32,
    overlap: Overlap,
    predicted_blocks: u32,
    fidelity: f64,
    trust: &'static str,
    cost: CostBreakdown,
}

#[pymethods]
impl Candidate {
    fn __repr__(&self) -> String {
        format!(
            "Candidate(worker={:?}, dp_rank={}, overlap={}, predicted_blocks={}, fidelity={}, trust={:?}, cost={})",
            self.worker,
            self.dp_rank,
            self.overlap.__repr__(),
            self.predicted_blocks,
            self.fidelity,
            self.trust,
            self.cost.__repr__()
        )
    }
}

impl From<&kvlane::Candidate> for Candidate {
    fn from(candidate: &kvlane::Candidate) -> Self {
        let cost = &candidate.cost;
        Self {
            worker: candidate.target.worker.to_string(),
            dp_rank: candidate.target.dp_rank,
            overlap: candidate.overlap.into(),
            predicted_blocks: candidate.predicted_blocks,
            fidelity: candidate.fidelity,
            trust: candidate.trust.name(),
            cost: CostBreakdown {
                total: cost.total,
                uncached_prefill_blocks: cost.uncached_prefill_blocks,
                booked_prefill_blocks: cost.booked_prefill_blocks,
                decode_blocks: cost.decode_blocks,
                active_requests: cost.active_requests,
                prefill_weight: cost.prefill_weight,
                request_weight: cost.request_weight,
                preference: cost.preference,
            },
        }
    }
}

/// What was done with one batch of events.
#[pyclass(frozen, get_all, eq, module = "kvlane")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct IngestReport {
    applied: u64,
    skipped: BTreeMap<&'static str, u64>,
    gap: bool,
    restarted: bool,
}

#[pymethods]
impl IngestReport {
    fn __repr__(&self) -> String {
        format!(
            "IngestReport(applied={}, skipped={:?}, gap={}, restarted={})",
            self.applied,
            self.skipped,
            python_bool(self.gap),
            python_bool(self.restarted)
        )
    }
}

impl From<kvlane::IngestReport> for IngestReport {
    fn from(report: kvlane::IngestReport) -> Self {
        let skipped = report.skipped.into_iter();
        Self {
            applied: report.applied,
            skipped: skipped
                .map(|(reason, count)| (reason.code(), count))
                .collect(),
            gap: report.gap,
            restarted: report.restarted,
        }
    }
}

/// How far the events of one rank of a worker are believed.
#[pyclass(frozen, get_all, module = "kvlane")]
#[derive(Clone)]
pub(crate) struct Trust {
    dp_rank: u32,
    state: &'static str,
    fidelity: f64,
    cause: Option<String>,
    since: f64,
}

#[pymethods]
impl Trust {
    fn __repr__(&self) -> String {
        let cause = self
            .cause
            .as_ref()
            .map_or_else(|| "None".to_owned(), |cause| format!("{cause:?}"));
        format!(
            "Trust(dp_rank={}, state={:?}, fidelity={}, cause={cause}, since={:.3})",
            self.dp_rank, self.state, self.fidelity, self.since
        )
    }
}

impl Trust {
    pub(crate) fn new(dp_rank: u32, trust: kvlane::TrustInfo, clock: &Clock, now: Instant) -> Self {
        Self {
            dp_rank,
            state: trust.state.name(),
            fidelity: trust.fidelity,
            cause: trust.cause,
            since: clock.seconds(trust.since, now),
        }
    }

    fn listed(trust: kvlane::RankTrust, clock: &Clock, now: Instant) -> Self {
        let age = Duration::try_from_secs_f64(trust.since_seconds).unwrap_or_default();
        Self {
            dp_rank: trust.dp_rank,
            state: trust.state.name(),
            fidelity: trust.fidelity,
            cause: trust.cause,
            since: clock.seconds(now.checked_sub(age).unwrap_or(now), now),
        }
    }
}

/// What a router knows of one worker; counts are sums over its ranks.
#[pyclass(frozen, get_all, module = "kvlane")]
#[derive(Clone)]
pub(crate) struct WorkerInfo {
    id: String,
    dp_ranks: u32,
    role: &'static str,
    draining: bool,
    available: bool,
    active_requests: usize,
    active_blocks: usize,
    prefill_blocks: f64,
    index_blocks: BTreeMap<&'static str, usize>,
    predicted_blocks: usize,
    kv_capacity_blocks: Option<usize>,
    labels: BTreeMap<String, String>,
    trust: Vec<Trust>,
}

#[pymethods]
impl WorkerInfo {
    fn __repr__(&self) -> String {
        let trust: Vec<_> = self.trust.iter().map(Trust::__repr__).collect();
        format!(
            "WorkerInfo(id={:?}, dp_ranks={}, role={:?}, draining={}, active_requests={}, active_blocks={}, \
             index_blocks={:?}, predicted_blocks={}, trust=[{}])",
            self.id,
            self.dp_ranks,
            self.role,
            python_bool(self.draining),
            self.active_requests,
            self.active_blocks,
            self.index_blocks,
            self.predicted_blocks,
            trust.join(", ")
        )
    }
}

impl WorkerInfo {
    pub(crate) fn new(info: kvlane::WorkerInfo, clock: &Clock, now: Instant) -> Self {
        let index = info.index_blocks;
        Self {
            id: info.id.to_string(),
            dp_ranks: info.dp_ranks,
            role: info.role.name(),
            draining: info.draining,
            available: info.available,
            active_requests: info.active_requests,
            active_blocks: info.active_blocks,
            prefill_blocks: info.prefill_blocks,
            index_blocks: BTreeMap::from([
                ("device", index.device),
                ("host", index.host),
                ("disk", index.disk),
                ("external", index.external),
            ]),
            predicted_blocks: info.predicted_blocks,
            kv_capacity_blocks: info.kv_capacity_blocks,
            labels: info.labels,
            trust: info
                .trust
                .into_iter()
                .map(|trust| Trust::listed(trust, clock, now))
                .collect(),
        }
    }
}

const fn python_bool(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}
