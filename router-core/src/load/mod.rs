//! How busy a target is: what was booked here, combined with what the engine reports.
//!
//! A report covers everything that the engine had when it was made, our own requests among it. So the *foreign* part is
//! what the report holds beyond our bookings at that moment, and the load now is our bookings now plus the foreign part:
//! what was sent since is added, what the report contains already is not counted twice. A report is made after it was asked
//! for and read later still, so what was released in between may be in it and counts as ours, too.

pub mod active;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::ids::LeaseId;

use active::{ActiveLoad, BookedRequest};

/// What an engine reports of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadReport {
    /// Requests in execution (`vllm:num_requests_running`).
    pub running: u32,
    /// Requests in its queue (`vllm:num_requests_waiting`).
    pub waiting: u32,
    /// Share of KV blocks in use by requests, 0 to 1 (`vllm:kv_cache_usage_perc`).
    pub kv_usage: f64,
}

/// The load that a decision sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Load {
    /// Requests booked here and running for others.
    pub active_requests: usize,
    /// Distinct KV blocks that they occupy.
    pub active_blocks: f64,
    /// Blocks still to be prefilled for them.
    pub prefill_blocks: f64,
}

/// Load of one target.
#[derive(Debug, Default)]
pub(crate) struct TargetLoad {
    pub(crate) booked: ActiveLoad,
    foreign_requests: usize,
    foreign_blocks: f64,
    /// Blocks of the latest releases and when they were; without a time where a guard was dropped.
    released: VecDeque<(Option<Instant>, usize)>,
}

/// Engines count a request for about a step after its last token went out.
const REPORT_LAG: Duration = Duration::from_millis(100);
/// Releases kept; more than this between two reports means that the newest tell enough.
const RELEASES_KEPT: usize = 4_096;

impl TargetLoad {
    /// Releases a request; a lease that is not booked here is left alone.
    pub(crate) fn release(&mut self, lease: LeaseId, now: Option<Instant>) {
        if let Some(blocks) = self.booked.release(lease) {
            if self.released.len() == RELEASES_KEPT {
                self.released.pop_front();
            }
            self.released.push_back((now, blocks));
        }
    }

    /// Takes in a report that was asked for at `asked`. `capacity_blocks` turns KV use into blocks when known.
    pub(crate) fn report(
        &mut self,
        report: LoadReport,
        capacity_blocks: Option<usize>,
        asked: Instant,
    ) {
        let since = asked.checked_sub(REPORT_LAG).unwrap_or(asked);
        self.released
            .retain(|(at, _)| at.is_none_or(|at| at >= since));
        let own_requests = self.booked.requests() + self.released.len();
        let released_blocks: usize = self.released.iter().map(|(_, blocks)| blocks).sum();
        let own_blocks = self.booked.blocks() + released_blocks;
        let reported = report.running as usize + report.waiting as usize;
        self.foreign_requests = reported.saturating_sub(own_requests);
        let used = capacity_blocks.map_or(0.0, |blocks| {
            report.kv_usage.clamp(0.0, 1.0) * blocks as f64
        });
        // A request occupies at least one block, also where the capacity is unknown or its prefill has not begun.
        self.foreign_blocks = (used - own_blocks as f64).max(self.foreign_requests as f64);
        self.released.retain(|(at, _)| at.is_some());
    }

    /// Returns the load now.
    pub(crate) fn load(&self) -> Load {
        Load {
            active_requests: self.booked.requests() + self.foreign_requests,
            active_blocks: self.booked.blocks() as f64 + self.foreign_blocks,
            prefill_blocks: self.booked.prefill_blocks(),
        }
    }

    /// Returns the load that a request would find, less the prefill of its own prefix, and the blocks that would be active
    /// after placing it.
    pub(crate) fn before_and_after(&self, request: &BookedRequest) -> (Load, f64) {
        let mut load = self.load();
        load.prefill_blocks -= self.booked.shared_prefill(request);
        (
            load,
            load.active_blocks + self.booked.new_blocks(request) as f64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::LocalBlockHash;

    #[expect(
        clippy::disallowed_methods,
        reason = "a test needs some instant to start from"
    )]
    fn start() -> Instant {
        Instant::now()
    }

    fn request(first: u64, blocks: u64) -> BookedRequest {
        let sequence: Vec<_> = (0..blocks)
            .map(|block| LocalBlockHash(first + block))
            .collect();
        BookedRequest::new(sequence.into(), 1)
    }

    #[test]
    fn what_a_report_contains_is_not_counted_twice() {
        let mut load = TargetLoad::default();
        load.booked.book(LeaseId(1), &request(100, 9), 9.0); // 9 full blocks and one of its own: 10
        // The engine sees our request and one of somebody else's: 2 running, 30 of 100 blocks.
        load.report(
            LoadReport {
                running: 2,
                waiting: 0,
                kv_usage: 0.3,
            },
            Some(100),
            start(),
        );
        let now = load.load();
        assert_eq!(now.active_requests, 2);
        assert!((now.active_blocks - 30.0).abs() < 1e-9);
        // What is sent afterwards is added.
        load.booked.book(LeaseId(2), &request(200, 4), 4.0);
        assert_eq!(load.load().active_requests, 3);
        assert!((load.load().active_blocks - 35.0).abs() < 1e-9);
        // What ends is taken off.
        load.release(LeaseId(1), Some(start()));
        assert!((load.load().active_blocks - 25.0).abs() < 1e-9);
    }

    #[test]
    fn a_report_that_arrives_late_does_not_make_a_released_request_foreign() {
        let t0 = start();
        let at = |milliseconds| t0 + Duration::from_millis(milliseconds);
        let report = LoadReport {
            running: 1,
            waiting: 0,
            kv_usage: 0.1,
        };
        for (released, asked, foreign) in [(1_010, 1_000, 0), (950, 1_000, 0), (800, 1_000, 1)] {
            let mut load = TargetLoad::default();
            load.booked.book(LeaseId(1), &request(100, 9), 9.0);
            load.release(LeaseId(1), Some(at(released)));
            load.report(report, Some(100), at(asked));
            assert_eq!(
                load.load().active_requests,
                foreign,
                "released at {released} ms"
            );
        }
        // A guard that was dropped says no time: it counts for the next report, and for that one alone.
        let mut load = TargetLoad::default();
        load.booked.book(LeaseId(1), &request(100, 9), 9.0);
        load.release(LeaseId(1), None);
        load.report(report, Some(100), at(1_000));
        assert_eq!(load.load().active_requests, 0);
        load.report(report, Some(100), at(2_000));
        assert_eq!(load.load().active_requests, 1);
    }

    #[test]
    fn a_report_without_capacity_counts_a_block_a_request() {
        let mut load = TargetLoad::default();
        load.report(
            LoadReport {
                running: 20,
                waiting: 3,
                kv_usage: 0.9,
            },
            None,
            start(),
        );
        assert!((load.load().active_blocks - 23.0).abs() < 1e-9);
    }
}
