//! How many workers a load needs, now and over time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::config::PlannerConfig;
use super::{Cause, RoleLoad};

/// Workers that would keep a load at its targets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Demand {
    pub(super) workers: f64,
    pub(super) cause: Cause,
}

/// Keeps sums finite; far above every bound.
const MOST: f64 = 1e6;

impl Demand {
    /// Takes the largest of what each signal asks for.
    ///
    /// Work, waiting work and KV use say how many are needed, since they grow in proportion to the load. A missed latency
    /// target says only that one more is, and only where the workers are busy: elsewhere more of them would not help.
    pub(super) fn of(load: &RoleLoad, ready: u32, config: &PlannerConfig) -> Self {
        let sane = |value: f64| {
            if value.is_finite() {
                value.max(0.0)
            } else {
                0.0
            }
        };
        let busy = sane(load.offered_workers) / config.target_utilisation;
        // A queue that grew while workers start is theirs to drain; asking for more than as many again would overshoot.
        let waiting = (sane(load.backlog_seconds) / config.backlog_seconds).min(busy.max(1.0));
        let ready = f64::from(ready);
        let mut demand = Self {
            workers: (busy + waiting).min(MOST),
            cause: if waiting > busy {
                Cause::Backlog
            } else {
                Cause::Load
            },
        };
        demand.raise(
            ready * sane(load.kv_use).min(1.0) / config.target_kv_use,
            Cause::KvUse,
        );
        let is_busy = demand.workers >= ready / 2.0;
        let missed = |measured: Option<f64>, objective: f64| {
            measured.is_some_and(|seconds| seconds > objective * (1.0 + config.tolerance))
        };
        if is_busy && ready > 0.0 {
            // One more than the tolerance lets pass.
            let one_more = ready * (1.0 + config.tolerance) + 0.5;
            if missed(load.ttft_seconds, config.ttft_objective_seconds) {
                demand.raise(one_more, Cause::Ttft);
            }
            if missed(load.itl_seconds, config.itl_objective_seconds) {
                demand.raise(one_more, Cause::Itl);
            }
        }
        demand
    }

    fn raise(&mut self, workers: f64, cause: Cause) {
        if workers > self.workers {
            *self = Self { workers, cause };
        }
    }
}

/// Demands over the latest time.
#[derive(Debug, Default)]
pub(super) struct History {
    samples: VecDeque<(Instant, f64)>,
    /// When the first sample came: a window that reaches further back has not been seen whole.
    since: Option<Instant>,
}

/// Samples kept: a day of one every 21 seconds, an hour of one a second.
const KEPT: usize = 4_096;

impl History {
    pub(super) fn push(&mut self, now: Instant, demand: f64) {
        let now = self.samples.back().map_or(now, |(last, _)| now.max(*last));
        self.since = self.since.or(Some(now));
        if self.samples.len() == KEPT {
            self.samples.pop_front();
        }
        self.samples.push_back((now, demand));
    }

    /// Returns the least demand in the window before `now`; `None` while less than the window has been seen.
    pub(super) fn least(&self, now: Instant, window: Duration) -> Option<f64> {
        self.within(now, window)?.reduce(f64::min)
    }

    /// Returns the greatest, likewise.
    pub(super) fn greatest(&self, now: Instant, window: Duration) -> Option<f64> {
        self.within(now, window)?.reduce(f64::max)
    }

    fn within(&self, now: Instant, window: Duration) -> Option<impl Iterator<Item = f64>> {
        let seen = now.saturating_duration_since(self.since?);
        let recent = move |(at, _): &&(Instant, f64)| now.saturating_duration_since(*at) <= window;
        let samples = self.samples.iter().rev().take_while(recent);
        (seen >= window).then(|| samples.map(|(_, demand)| *demand))
    }
}
