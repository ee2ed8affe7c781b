//! How busy a target is: what was booked here, combined with what the engine reports.
//!
//! A report covers everything that the engine had when it was made, our own requests among it. So the *foreign* part is
//! what the report holds beyond our bookings at that moment, and the load now is our bookings now plus the foreign part:
//! what was sent since is added, what the report contains already is not counted twice. A report is made after it was asked
//! for and read later still, so what was released in between may be in it and counts as ours, too.

pub(crate) mod active;
pub(crate) mod row;
mod tree;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde::Serialize;

use row::Row;

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
    requests: usize,
    blocks: usize,
    prefill_blocks: f64,
    foreign_requests: usize,
    foreign_blocks: usize,
    /// Blocks of the latest releases and when they were; without a time where a guard was dropped.
    released: VecDeque<(Option<Instant>, usize)>,
    /// The worker was removed: the slot is free once nothing is booked on it any more.
    retired: bool,
}

/// Engines count a request for about a step after its last token went out.
const REPORT_LAG: Duration = Duration::from_millis(100);
/// Releases kept; more than this between two reports means that the newest tell enough.
const RELEASES_KEPT: usize = 1_024;

impl TargetLoad {
    /// Books a request with the blocks that it adds and the blocks that it must prefill.
    pub(crate) fn book(&mut self, blocks: usize, prefill_blocks: f64) {
        self.requests += 1;
        self.blocks += blocks;
        self.prefill_blocks += prefill_blocks;
    }

    /// Takes the prefill of a request off.
    pub(crate) fn prefill_done(&mut self, prefill_blocks: f64) {
        self.prefill_blocks -= prefill_blocks;
        self.settle();
    }

    /// Replaces the blocks that a request's output occupies.
    pub(crate) const fn set_output_blocks(&mut self, before: usize, after: usize) {
        self.blocks = self.blocks - before + after;
    }

    /// Releases a request with the blocks that it gives back. Returns whether the slot is free by that.
    pub(crate) fn release(
        &mut self,
        blocks: usize,
        prefill_blocks: f64,
        now: Option<Instant>,
    ) -> bool {
        self.requests -= 1;
        self.blocks -= blocks;
        self.prefill_blocks -= prefill_blocks;
        self.settle();
        if self.released.len() == RELEASES_KEPT {
            self.released.pop_front();
        }
        self.released.push_back((now, blocks));
        self.is_vacated()
    }

    /// Notes that the worker was removed. Returns whether the slot is free.
    pub(crate) fn retire(&mut self) -> bool {
        self.retired = true;
        self.is_vacated()
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
        let own_requests = self.requests + self.released.len();
        let released_blocks: usize = self.released.iter().map(|(_, blocks)| blocks).sum();
        let own_blocks = self.blocks + released_blocks;
        let reported = report.running as usize + report.waiting as usize;
        self.foreign_requests = reported.saturating_sub(own_requests);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative; casts saturate"
        )]
        let used = capacity_blocks.map_or(0, |blocks| {
            // Engines count whole blocks and report their share.
            (report.kv_usage.clamp(0.0, 1.0) * blocks as f64).round() as usize
        });
        // A request occupies at least one block, also where the capacity is unknown or its prefill has not begun.
        self.foreign_blocks = used.saturating_sub(own_blocks).max(self.foreign_requests);
        self.released.retain(|(at, _)| at.is_some());
    }

    /// Writes the load to where decisions read it.
    pub(crate) fn publish(&self, row: &Row) {
        row.set_load(
            self.requests + self.foreign_requests,
            self.blocks + self.foreign_blocks,
            self.prefill_blocks,
        );
    }

    pub(crate) const fn requests(&self) -> usize {
        self.requests
    }

    pub(crate) const fn blocks(&self) -> usize {
        self.blocks
    }

    pub(crate) const fn prefill_blocks(&self) -> f64 {
        self.prefill_blocks
    }

    const fn is_vacated(&self) -> bool {
        self.retired && self.requests == 0
    }

    /// Takes away what rounding of sums left when nothing is booked.
    fn settle(&mut self) {
        if self.requests == 0 || self.prefill_blocks < 0.0 {
            self.prefill_blocks = 0.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(
        clippy::disallowed_methods,
        reason = "a test needs some instant to start from"
    )]
    fn start() -> Instant {
        Instant::now()
    }

    /// Requests, blocks and prefill as decisions see them.
    fn seen(load: &TargetLoad) -> (u32, u32, f64) {
        let row = Row::default();
        load.publish(&row);
        let seen = row.seen();
        (seen.requests, seen.blocks, seen.prefill)
    }

    #[test]
    fn what_a_report_contains_is_not_counted_twice() {
        let mut load = TargetLoad::default();
        load.book(10, 9.0);
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
        assert_eq!(seen(&load), (2, 30, 9.0));
        // What is sent afterwards is added.
        load.book(5, 4.0);
        assert_eq!(seen(&load), (3, 35, 13.0));
        // What ends is taken off.
        load.release(10, 9.0, Some(start()));
        assert_eq!(seen(&load), (2, 25, 4.0));
    }

    #[test]
    fn output_and_prefill_follow_the_request() {
        let mut load = TargetLoad::default();
        load.book(1, 0.5);
        load.set_output_blocks(0, 4);
        assert_eq!(seen(&load), (1, 5, 0.5));
        load.prefill_done(0.5);
        assert!(!load.release(5, 0.0, None));
        assert_eq!(seen(&load), (0, 0, 0.0));
    }

    #[test]
    fn a_removed_targets_slot_is_free_after_its_last_release() {
        let mut load = TargetLoad::default();
        load.book(1, 0.0);
        load.book(1, 0.0);
        assert!(!load.retire());
        assert!(!load.release(1, 0.0, None));
        assert!(load.release(1, 0.0, None));
        assert!(TargetLoad::default().retire());
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
            load.book(10, 9.0);
            load.release(10, 9.0, Some(at(released)));
            load.report(report, Some(100), at(asked));
            assert_eq!(seen(&load).0, foreign, "released at {released} ms");
        }
        // A guard that was dropped says no time: it counts for the next report, and for that one alone.
        let mut load = TargetLoad::default();
        load.book(10, 9.0);
        load.release(10, 9.0, None);
        load.report(report, Some(100), at(1_000));
        assert_eq!(seen(&load).0, 0);
        load.report(report, Some(100), at(2_000));
        assert_eq!(seen(&load).0, 1);
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
        assert_eq!(seen(&load).1, 23);
    }
}
