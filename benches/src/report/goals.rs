//! What the index and the decision are to reach.

use super::{Name, Report};

/// A goal, what was measured, and whether it is enough.
#[derive(Debug)]
pub(super) struct Verdict {
    pub(super) what: &'static str,
    pub(super) goal: String,
    pub(super) measured: String,
    pub(super) is_met: bool,
}

enum Bound {
    AtMost(f64),
    AtLeast(f64),
}
use Bound::{AtLeast, AtMost};

/// Name, bound, unit, value.
type Goal = (
    &'static str,
    Bound,
    &'static str,
    fn(&Report) -> Option<f64>,
);

const GOALS: [Goal; 18] = [
    (
        "256-block hit, 64 workers, ours ÷ better peer",
        AtMost(0.333),
        "",
        |report| report.summary.overlap_256_ratio_best_peer,
    ),
    (
        "256-block hit, 64 workers, p50",
        AtMost(0.7),
        "µs",
        |report| report.summary.overlap_256_us,
    ),
    (
        "256-block hit, 1,024 workers, p50",
        AtMost(1.2),
        "µs",
        |report| report.summary.overlap_1024_workers_us,
    ),
    (
        "256-block hit beside a streaming writer, p99",
        AtMost(1.5),
        "µs",
        |report| report.value(Name::Ours, "beside_writer_p99_us"),
    ),
    (
        "stores per CPU-second, tables sized, ours ÷ CRTC",
        AtLeast(3.0),
        "×",
        |report| report.summary.store_ratio_crtc,
    ),
    (
        "stores per CPU-second, tables sized, ours ÷ chain",
        AtLeast(1.5),
        "×",
        |report| report.summary.store_ratio_chain,
    ),
    (
        "live heap per held block, mean over fill sizes",
        AtMost(30.0),
        "bytes",
        |report| report.summary.bytes_per_held_block,
    ),
    (
        "approximate mode, live heap per block",
        AtMost(20.0),
        "bytes",
        |report| report.summary.approximate_bytes_per_block,
    ),
    (
        "heap after 8 rounds of churn ÷ before",
        AtMost(1.1),
        "×",
        |report| report.summary.churn_ratio,
    ),
    (
        "heap after removing every worker ÷ peak",
        AtMost(0.02),
        "",
        |report| report.summary.after_remove_all_ratio,
    ),
    (
        "clear of a worker of 50,000 blocks",
        AtMost(1.5),
        "ms",
        |report| report.value(Name::Ours, "clear_50k_ms"),
    ),
    ("wrong answers", AtMost(0.0), "", |report| {
        report.summary.wrong_answers
    }),
    (
        "random operations against the model",
        AtLeast(1_000_000.0),
        "",
        |report| report.value(Name::Ours, "random_any_operations"),
    ),
    (
        "select + release, 4,096 tokens, 64 workers, p50",
        AtMost(3.5),
        "µs",
        |report| report.summary.select_4096_us,
    ),
    (
        "select + release, 4,096 tokens, 1,024 workers, p50",
        AtMost(6.0),
        "µs",
        |report| report.value(Name::Ours, "select_4096_1024_workers_p50_us"),
    ),
    (
        "select, 4 threads ÷ 1 thread, 64 workers",
        AtLeast(1.8),
        "×",
        |report| report.value(Name::Ours, "select_4096_four_threads_scaling"),
    ),
    (
        "select, 4 threads ÷ 1 thread, 1,024 workers",
        AtLeast(1.8),
        "×",
        |report| report.value(Name::Ours, "select_4096_1024_workers_four_threads_scaling"),
    ),
    (
        "removal tail first, ours ÷ better peer",
        AtMost(1.0),
        "",
        |report| {
            let cell = "remove_tail_first_ns";
            let (_, peer) = report.best_peer(cell, super::Better::Low)?;
            Some(report.value(Name::Ours, cell)? / peer)
        },
    ),
];

impl Report {
    /// Compares with the goals; a goal without a value is left out.
    pub(super) fn verdicts(&self) -> Vec<Verdict> {
        let verdicts = GOALS.iter().filter_map(|(what, bound, unit, value)| {
            let value = value(self)?;
            let (sign, limit, is_met) = match *bound {
                AtMost(limit) => ("≤", limit, value <= limit),
                AtLeast(limit) => ("≥", limit, value >= limit),
            };
            Some(Verdict {
                what,
                goal: format!("{sign} {limit} {unit}").trim_end().to_owned(),
                measured: super::markdown::short(value),
                is_met,
            })
        });
        verdicts.collect()
    }
}
