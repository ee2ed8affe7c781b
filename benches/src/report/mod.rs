//! Results of a run: medians over rounds, the summary, and the table.

mod goals;
mod markdown;
mod readme;

use std::collections::BTreeMap;
use std::fs;

use serde::{Deserialize, Serialize};

use crate::clock::median;
use crate::measure::Cells;
use crate::subject::Name;

/// Everything that a run found out; `summary` comes last.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    machine: Machine,
    quick: bool,
    rounds: u32,
    seconds: f64,
    subjects: BTreeMap<String, BTreeMap<String, Cell>>,
    summary: Summary,
}

/// Where and of what a run was.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    cpu: String,
    cores: usize,
    memory_bytes: u64,
    kernel: String,
    load_average: f64,
    toolchain: String,
    commit: String,
}

/// One measured value.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Cell {
    median: f64,
    least: f64,
    most: f64,
    rounds: Vec<f64>,
}

/// The values that goals are about; absent where a subject was not measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Summary {
    overlap_256_us: Option<f64>,
    overlap_256_ratio_best_peer: Option<f64>,
    overlap_1024_workers_us: Option<f64>,
    store_ratio_crtc: Option<f64>,
    store_ratio_chain: Option<f64>,
    bytes_per_held_block: Option<f64>,
    approximate_bytes_per_block: Option<f64>,
    churn_ratio: Option<f64>,
    after_remove_all_ratio: Option<f64>,
    wrong_answers: Option<f64>,
    select_4096_us: Option<f64>,
}

impl Report {
    /// Creates a report without results.
    #[must_use]
    pub fn new(machine: Machine, quick: bool, rounds: u32) -> Self {
        Self {
            machine,
            quick,
            rounds,
            seconds: 0.0,
            subjects: BTreeMap::new(),
            summary: Summary::default(),
        }
    }

    /// Adds what one process measured.
    pub fn add(&mut self, subject: Name, cells: &Cells) {
        let known = self.subjects.entry(subject.to_string()).or_default();
        for (name, value) in cells {
            if let Some(value) = value.as_f64() {
                known.entry(name.clone()).or_default().rounds.push(value);
            }
        }
    }

    /// Takes medians and sums up.
    pub fn finish(&mut self, seconds: f64) {
        self.seconds = seconds;
        let subjects = self.subjects.values_mut();
        for cell in subjects.flat_map(BTreeMap::values_mut) {
            cell.median = median(&cell.rounds);
            cell.least = cell.rounds.iter().copied().fold(f64::INFINITY, f64::min);
            let most = cell
                .rounds
                .iter()
                .copied()
                .fold(f64::NEG_INFINITY, f64::max);
            cell.most = most;
        }
        self.summary = self.sum_up();
    }

    fn sum_up(&self) -> Summary {
        let ours = |cell| self.value(Name::Ours, cell);
        let store_ratio = |peer| {
            let cell = "store_mblocks_per_cpu_s";
            Some(ours(cell)? / self.value(peer, cell)?)
        };
        let best_peer = self.best_peer("overlap_256_p50_us", Better::Low);
        Summary {
            overlap_256_us: ours("overlap_256_p50_us"),
            overlap_256_ratio_best_peer: ours("overlap_256_p50_us")
                .zip(best_peer)
                .map(|(ours, (_, peer))| ours / peer),
            overlap_1024_workers_us: ours("overlap_1024_workers_p50_us"),
            store_ratio_crtc: store_ratio(Name::Crtc),
            store_ratio_chain: store_ratio(Name::Chain),
            bytes_per_held_block: ours("bytes_per_held_block"),
            approximate_bytes_per_block: ours("approximate_bytes_per_block"),
            churn_ratio: ours("churn_ratio"),
            after_remove_all_ratio: ours("after_remove_all_ratio"),
            wrong_answers: ours("wrong_answers"),
            select_4096_us: ours("select_4096_p50_us"),
        }
    }

    fn value(&self, subject: Name, cell: &str) -> Option<f64> {
        let cell = self.subjects.get(subject.as_str())?.get(cell)?;
        Some(cell.median)
    }

    /// Returns the best peer of a cell. The reference model is none: it is measured at another size.
    fn best_peer(&self, cell: &str, better: Better) -> Option<(Name, f64)> {
        let peers = Name::ALL.into_iter();
        let values = peers
            .filter(|name| !matches!(name, Name::Ours | Name::Naive))
            .filter_map(|name| Some((name, self.value(name, cell)?)));
        values.reduce(|best, next| {
            if better.is_better(next.1, best.1) {
                next
            } else {
                best
            }
        })
    }
}

/// Which values are better.
#[derive(Clone, Copy, Debug)]
enum Better {
    Low,
    High,
}

impl Better {
    fn is_better(self, value: f64, than: f64) -> bool {
        match self {
            Self::Low => value < than,
            Self::High => value > than,
        }
    }
}

impl Machine {
    /// Reads what the kernel tells of this machine.
    #[must_use]
    pub fn read(toolchain: &str, commit: &str) -> Self {
        let field = |path: &str, name: &str| {
            let text = fs::read_to_string(path).unwrap_or_default();
            let line = text.lines().find(|line| line.starts_with(name));
            let value = line.and_then(|line| line.split_once(':'));
            value.map_or_else(String::new, |(_, value)| value.trim().to_owned())
        };
        let memory = field("/proc/meminfo", "MemTotal");
        let kibibytes = memory.split(' ').next().and_then(|text| text.parse().ok());
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        Self {
            cpu: field("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kibibytes.unwrap_or(0_u64) * 1_024,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .to_owned(),
            load_average: load
                .split(' ')
                .next()
                .and_then(|text| text.parse().ok())
                .unwrap_or(0.0),
            toolchain: toolchain.to_owned(),
            commit: commit.to_owned(),
        }
    }
}

/// Makes cells from names and values.
#[cfg(test)]
fn cells(values: &[(&str, f64)]) -> Cells {
    let values = values.iter();
    values
        .map(|&(name, value)| (name.to_owned(), value.into()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn report() -> Report {
        let mut report = Report::new(Machine::read("rustc 1", "abc"), true, 3);
        for (ours, crtc) in [(1.0, 8.0), (3.0, 6.0), (2.0, 7.0)] {
            report.add(Name::Ours, &cells(&[("overlap_256_p50_us", ours)]));
            report.add(Name::Crtc, &cells(&[("overlap_256_p50_us", crtc)]));
        }
        report.add(Name::Chain, &cells(&[("overlap_256_p50_us", 5.0)]));
        report.add(Name::Naive, &cells(&[("overlap_256_p50_us", 0.1)]));
        report.add(Name::Ours, &cells(&[("store_mblocks_per_cpu_s", 12.0)]));
        report.add(Name::Chain, &cells(&[("store_mblocks_per_cpu_s", 8.0)]));
        report.finish(10.0);
        report
    }

    #[test]
    fn summary_compares_medians_with_the_best_peer() {
        let summary = report().summary;
        // Medians: ours 2 of (1, 3, 2), chain 5, CRTC 7.
        assert_eq!(summary.overlap_256_us, Some(2.0));
        assert_eq!(summary.overlap_256_ratio_best_peer, Some(0.4));
        assert_eq!(summary.store_ratio_chain, Some(1.5));
        assert_eq!(summary.store_ratio_crtc, None);
    }

    #[test]
    fn json_ends_with_the_summary_of_these_names() {
        let json = serde_json::to_value(report()).unwrap();
        let report = json.as_object().unwrap();
        assert_eq!(report.keys().next_back().unwrap(), "summary");
        let summary: Vec<&str> = report["summary"]
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        assert_eq!(
            summary,
            [
                "overlap_256_us",
                "overlap_256_ratio_best_peer",
                "overlap_1024_workers_us",
                "store_ratio_crtc",
                "store_ratio_chain",
                "bytes_per_held_block",
                "approximate_bytes_per_block",
                "churn_ratio",
                "after_remove_all_ratio",
                "wrong_answers",
                "select_4096_us"
            ]
        );
    }

    #[test]
    fn table_is_made_from_the_json() {
        let report = report();
        let json = serde_json::to_string(&report).unwrap();
        let again: Report = serde_json::from_str(&json).unwrap();
        assert_eq!(again.markdown(), report.markdown());
    }
}
