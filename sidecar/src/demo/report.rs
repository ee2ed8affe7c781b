//! What the demo prints.

use std::io::Write as _;
use std::time::Duration;

use kvlane::Result;
use serde::Serialize;

use super::args::DemoPolicy;
use super::unexpected;
use super::workload::Workload;

/// What the demo measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// One entry a policy.
    pub policies: Vec<PolicyReport>,
    /// What the router adds to a request, median, milliseconds.
    pub router_overhead_ms_p50: f64,
}

/// What one policy gave.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyReport {
    /// The policy's name.
    pub name: &'static str,
    /// Repeats that found their prefix cached, one count a seed.
    pub hits: Vec<u32>,
    /// Repeats in each run.
    pub repeats: usize,
    /// Mean time to the first token of repeats, in engine time.
    pub ttft_ms_repeat_mean: f64,
    /// Mean time to the first token of first sends, in engine time.
    pub ttft_ms_first_mean: f64,
    #[serde(skip)]
    counts: [u32; 2],
}

impl PolicyReport {
    pub(super) const fn new(policy: DemoPolicy) -> Self {
        Self {
            name: policy.name(),
            hits: Vec::new(),
            repeats: Workload::REPEATS,
            ttft_ms_repeat_mean: 0.0,
            ttft_ms_first_mean: 0.0,
            counts: [0, 0],
        }
    }

    /// Adds one time to a running mean.
    pub(super) fn add_ttft(&mut self, repeat: bool, ttft: Duration) {
        let count = &mut self.counts[usize::from(repeat)];
        *count += 1;
        let mean = if repeat {
            &mut self.ttft_ms_repeat_mean
        } else {
            &mut self.ttft_ms_first_mean
        };
        *mean += (ttft.as_secs_f64() * 1_000.0 - *mean) / f64::from(*count);
    }
}

impl Report {
    pub(super) const fn new(policies: Vec<PolicyReport>, router_overhead_ms_p50: f64) -> Self {
        Self {
            policies,
            router_overhead_ms_p50,
        }
    }

    /// Prints the report on standard output, as a table or as one JSON object.
    pub(super) fn print(&self, json: bool) -> Result<()> {
        let text = if json {
            serde_json::to_string(self).map_err(unexpected)? + "\n"
        } else {
            self.table()
        };
        std::io::stdout()
            .lock()
            .write_all(text.as_bytes())
            .map_err(unexpected)
    }

    fn table(&self) -> String {
        use std::fmt::Write as _;
        let mut table = format!(
            "\n{:<20} {:<18} {:>14} {:>14}\n",
            "policy", "hits of 60 repeats", "TTFT repeat", "TTFT first"
        );
        for policy in &self.policies {
            let hits: Vec<String> = policy
                .hits
                .iter()
                .map(|hits| format!("{hits:>2}"))
                .collect();
            let _ = writeln!(
                table,
                "{:<20} {:<18} {:>11.1} ms {:>11.1} ms",
                policy.name,
                hits.join(", "),
                policy.ttft_ms_repeat_mean,
                policy.ttft_ms_first_mean
            );
        }
        let _ = writeln!(
            table,
            "\nA hit: the engine itself reported all {} tokens in complete blocks of the shared prefix as cached.\n\
             Times are the engines' (0.6B model: 80 ms cold, 15 ms warm). The router itself adds {:.3} ms (median, 7.5 KB chat).",
            Workload::SHARED_BLOCK_TOKENS,
            self.router_overhead_ms_p50
        );
        table
    }
}
