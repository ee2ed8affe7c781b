//! How busy a target is: what was booked here, combined with what the engine reports.
//!
//! A report covers everything that the engine had when it was made, our own requests among it. So the *foreign* part is
//! what the report holds beyond our bookings at that moment, and the load now is our bookings now plus the foreign part:
//! what was sent since is added, what the report contains already is not counted twice.

pub mod active;

use serde::Serialize;

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
}

impl TargetLoad {
    /// Takes in a report. `capacity_blocks` turns KV use into blocks when known.
    pub(crate) fn report(&mut self, report: LoadReport, capacity_blocks: Option<usize>) {
        let reported = report.running as usize + report.waiting as usize;
        self.foreign_requests = reported.saturating_sub(self.booked.requests());
        let used = capacity_blocks.map_or(0.0, |blocks| {
            report.kv_usage.clamp(0.0, 1.0) * blocks as f64
        });
        // A request occupies at least one block, also where the capacity is unknown or its prefill has not begun.
        self.foreign_blocks =
            (used - self.booked.blocks() as f64).max(self.foreign_requests as f64);
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
    use crate::block::SequenceHash;
    use crate::ids::LeaseId;

    fn request(first: u64, blocks: u64) -> BookedRequest {
        let sequence: Vec<_> = (0..blocks)
            .map(|block| SequenceHash(first + block))
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
        );
        let now = load.load();
        assert_eq!(now.active_requests, 2);
        assert!((now.active_blocks - 30.0).abs() < 1e-9);
        // What is sent afterwards is added.
        load.booked.book(LeaseId(2), &request(200, 4), 4.0);
        assert_eq!(load.load().active_requests, 3);
        assert!((load.load().active_blocks - 35.0).abs() < 1e-9);
        // What ends is taken off.
        load.booked.release(LeaseId(1));
        assert!((load.load().active_blocks - 25.0).abs() < 1e-9);
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
        );
        assert!((load.load().active_blocks - 23.0).abs() < 1e-9);
    }
}
