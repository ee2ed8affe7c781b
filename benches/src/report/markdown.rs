//! The table that people read.

use std::fmt::Write;

use super::Better::{High, Low};
use super::{Better, Name, Report};

/// A cell, what it is called, and which values are better.
type Row = (&'static str, &'static str, Better);

const LOOKUPS: [Row; 22] = [
    ("overlap_256_p50_us", "256-block hit, p50 µs", Low),
    ("overlap_256_p99_us", "— p99", Low),
    ("overlap_256_p999_us", "— p99.9", Low),
    ("overlap_256_cpu_us", "— back to back, mean CPU µs", Low),
    (
        "overlap_256_as_map_p50_us",
        "— by the call that builds a map, p50 µs",
        Low,
    ),
    (
        "system_prompt_then_miss_p50_us",
        "system prompt, then a miss, p50 µs",
        Low,
    ),
    ("miss_p50_us", "miss, p50 µs", Low),
    (
        "overlap_1024_workers_p50_us",
        "256-block hit, 1,024 workers, p50 µs",
        Low,
    ),
    ("overlap_1024_workers_p99_us", "— p99", Low),
    ("overlap_1024_workers_p999_us", "— p99.9", Low),
    (
        "overlap_1024_workers_cpu_us",
        "— back to back, mean CPU µs",
        Low,
    ),
    (
        "overlap_hot_prefix_p50_us",
        "hot prefix of 224 blocks, p50 µs",
        Low,
    ),
    ("overlap_hot_prefix_p99_us", "— p99", Low),
    ("overlap_hot_prefix_p999_us", "— p99.9", Low),
    ("overlap_8192_blocks_p50_us", "8,192 blocks, p50 µs", Low),
    ("overlap_8192_blocks_p99_us", "— p99", Low),
    ("overlap_8192_blocks_p999_us", "— p99.9", Low),
    (
        "beside_writer_p50_us",
        "256-block hit beside a writer, p50 µs",
        Low,
    ),
    ("beside_writer_p99_us", "— p99", Low),
    ("beside_writer_p999_us", "— p99.9", Low),
    (
        "beside_writer_klookups_per_s",
        "— lookups, thousand a second",
        High,
    ),
    (
        "beside_writer_mblocks_per_s",
        "— written beside, million blocks a second",
        High,
    ),
];

const WRITES: [Row; 12] = [
    (
        "store_ns",
        "store, tables sized by KV capacity where that is taken, CPU ns a block",
        Low,
    ),
    (
        "store_mblocks_per_cpu_s",
        "— million blocks a CPU-second",
        High,
    ),
    (
        "store_grown_ns",
        "— tables grown from nothing, CPU ns a block",
        Low,
    ),
    (
        "store_grown_mblocks_per_cpu_s",
        "— million blocks a CPU-second",
        High,
    ),
    (
        "overlap_1024_workers_store_ns",
        "store, 1,024 workers, sized where that is taken, CPU ns a block",
        Low,
    ),
    (
        "overlap_hot_prefix_store_ns",
        "store under a hot prefix, sized likewise, CPU ns a block",
        Low,
    ),
    (
        "overlap_8192_blocks_store_ns",
        "store, 8,192 blocks, sized likewise, CPU ns a block",
        Low,
    ),
    (
        "one_writer_mblocks_per_s",
        "one writer, million blocks a second",
        High,
    ),
    ("two_writers_mblocks_per_s", "two writers", High),
    ("two_writers_scaling", "— two ÷ one", High),
    (
        "remove_tail_first_ns",
        "removal tail first, CPU ns a block",
        Low,
    ),
    (
        "clear_50k_ms",
        "clear of a worker, CPU ms for 50,000 blocks",
        Low,
    ),
];

const MEMORY: [Row; 12] = [
    (
        "bytes_per_held_block",
        "live heap, bytes per held block, mean over sizes",
        Low,
    ),
    ("bytes_per_held_block_least", "— least", Low),
    ("bytes_per_held_block_most", "— most", Low),
    ("bytes_per_held_block_at_w", "— at W", Low),
    (
        "resident_bytes_per_held_block",
        "resident set, bytes per held block, at half of W",
        Low,
    ),
    ("churn_ratio", "heap after 8 rounds of churn ÷ before", Low),
    (
        "churn_ratio_after_maintenance",
        "— after the subject's own sweep",
        Low,
    ),
    (
        "after_remove_all_ratio",
        "heap after removing every worker ÷ peak",
        Low,
    ),
    (
        "after_remove_all_ratio_after_maintenance",
        "— after the subject's own sweep",
        Low,
    ),
    (
        "approximate_bytes_per_block",
        "approximate mode with TTL, bytes per block",
        Low,
    ),
    (
        "approximate_record_ns_per_new_block",
        "— recording, CPU ns per new block",
        Low,
    ),
    (
        "approximate_record_us",
        "— recording, CPU µs per placement",
        Low,
    ),
];

const SELECT: [(&str, &str); 14] = [
    ("p50_us", "hash + choose + release, p50 µs"),
    ("p99_us", "— p99"),
    ("p999_us", "— p99.9"),
    (
        "growing_p50_us",
        "the same with an eighth at the end that nobody has seen, p50 µs",
    ),
    ("hash_p50_us", "hash, p50 µs"),
    ("choose_p50_us", "look up, cost, choose, book, p50 µs"),
    (
        "look_up_p50_us",
        "— of it what caches hold (`overlap`), p50 µs",
    ),
    ("release_p50_us", "release, p50 µs"),
    ("kops_per_s", "1 thread, thousand decisions a second"),
    ("four_threads_kops_per_s", "4 threads"),
    ("four_threads_scaling", "— 4 ÷ 1"),
    (
        "four_threads_scaling_of_shared_nothing",
        "— 4 ÷ 1 of work that shares nothing, in turns with it",
    ),
    (
        "cpu_us",
        "1 thread, CPU µs a decision, making its tokens included",
    ),
    ("four_threads_cpu_us", "4 threads"),
];

impl Report {
    /// Returns the tables as Markdown.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut out = String::new();
        self.write(&mut out).expect("a string takes everything");
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let machine = &self.machine;
        writeln!(out, "# Results\n")?;
        writeln!(
            out,
            "Written by `make bench`; do not edit. How it is measured: `src/lib.rs`.\n"
        )?;
        writeln!(
            out,
            "{} × {}, {} GiB, Linux {}, load average {} at the start; {}; commit {}; {}run of {} rounds, {} s.",
            machine.cores,
            machine.cpu,
            machine.memory_bytes.div_ceil(1 << 30),
            machine.kernel,
            machine.load_average,
            machine.toolchain,
            machine.commit,
            if self.quick { "quick " } else { "" },
            self.rounds,
            short(self.seconds),
        )?;
        writeln!(
            out,
            "Medians over rounds; **bold** is the best of a row. A load average above the number of cores means that other work ran \
             beside: then compare within a row, and distrust p99.9. The naive model is measured at a hundredth of W and \
             Positional at a quarter, since they take minutes for more: their times are only a hint, and the model takes no part in comparisons.\n"
        )?;
        self.write_goals(out)?;
        self.write_losses(out)?;
        self.write_table(out, "Lookups", &LOOKUPS)?;
        self.write_table(out, "Writes", &WRITES)?;
        self.write_table(out, "Memory", &MEMORY)?;
        self.write_select(out)?;
        self.write_answers(out)
    }

    fn write_goals(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "## Goals\n\n| what | goal | measured | |\n|---|---|---|---|"
        )?;
        for verdict in self.verdicts() {
            let mark = if verdict.is_met {
                "reached"
            } else {
                "**missed**"
            };
            writeln!(
                out,
                "| {} | {} | {} | {mark} |",
                verdict.what, verdict.goal, verdict.measured
            )?;
        }
        writeln!(out)
    }

    fn write_losses(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "## Cells that a peer wins\n")?;
        let mut losses = 0;
        for (cell, label, better) in LOOKUPS.iter().chain(&WRITES).chain(&MEMORY) {
            let Some(ours) = self.value(Name::Ours, cell) else {
                continue;
            };
            if let Some((peer, best)) = self.best_peer(cell, *better)
                && better.is_better(best, ours)
            {
                losses += 1;
                let label = label.trim_start_matches("— ");
                let title = peer.title();
                let (best, ours) = (short(best), short(ours));
                writeln!(out, "- `{cell}` ({label}): {title} {best}, kvlane {ours}")?;
            }
        }
        if losses == 0 {
            writeln!(out, "None.")?;
        }
        writeln!(out)
    }

    fn write_table(&self, out: &mut String, title: &str, rows: &[Row]) -> std::fmt::Result {
        let names = self.measured();
        writeln!(out, "## {title}\n")?;
        let titles: Vec<_> = names.iter().map(|name| name.title()).collect();
        writeln!(out, "| | {} |", titles.join(" | "))?;
        writeln!(out, "|---|{}", "---|".repeat(names.len()))?;
        for (cell, label, better) in rows {
            let best = self
                .best_peer(cell, *better)
                .map(|(_, value)| value)
                .into_iter()
                .chain(self.value(Name::Ours, cell))
                .reduce(|best, next| {
                    if better.is_better(next, best) {
                        next
                    } else {
                        best
                    }
                });
            write!(out, "| {label} |")?;
            for &name in &names {
                match self.value(name, cell) {
                    None => write!(out, " – |")?,
                    Some(value) if name != Name::Naive && Some(value) == best => {
                        write!(out, " **{}** |", short(value))?;
                    }
                    Some(value) => write!(out, " {} |", short(value))?,
                }
            }
            writeln!(out)?;
        }
        writeln!(out)
    }

    fn write_select(&self, out: &mut String) -> std::fmt::Result {
        let value = |prefix: &str, cell: &str| {
            let value = self.value(Name::Ours, &format!("{prefix}_{cell}"));
            value.map_or_else(|| "–".to_owned(), short)
        };
        writeln!(out, "## Decision for 4,096 tokens (kvlane)\n")?;
        writeln!(out, "| | 64 workers | 1,024 workers |\n|---|---|---|")?;
        for (cell, label) in SELECT {
            let [few, many] =
                ["select_4096", "select_4096_1024_workers"].map(|prefix| value(prefix, cell));
            writeln!(out, "| {label} | {few} | {many} |")?;
        }
        writeln!(
            out,
            "\nThe peers' decisions are not measured here: Dynamo's needs its HTTP services built in, kv-index has none.\n"
        )
    }

    fn write_answers(&self, out: &mut String) -> std::fmt::Result {
        let names: Vec<Name> = self.measured();
        let names: Vec<Name> = names
            .into_iter()
            .filter(|&name| name != Name::Naive)
            .collect();
        writeln!(out, "## Wrong answers against the naive model\n")?;
        writeln!(
            out,
            "Lookups that differ for some worker. \"Orderly\" engines announce what they lack and remove what they hold; the others \
             also announce twice, name unknown parents and remove what is not there. vLLM does announce a block twice, and \
             then removes it twice. A difference stays until the worker's cache is cleared, so random operations count the same fault \
             many times: compare with 0, not with each other.\n"
        )?;
        let titles: Vec<_> = names.iter().map(|name| name.title()).collect();
        writeln!(out, "| | {} |", titles.join(" | "))?;
        writeln!(out, "|---|{}", "---|".repeat(names.len()))?;
        let ours = self.subjects.get(Name::Ours.as_str());
        let cells = ours.into_iter().flat_map(|cells| cells.keys());
        let probes = cells.filter(|cell| cell.starts_with("probe_") || cell.starts_with("random_"));
        for cell in probes {
            write!(
                out,
                "| {} |",
                cell.trim_start_matches("probe_").replace('_', " ")
            )?;
            for &name in &names {
                let value = self.value(name, cell);
                write!(out, " {} |", value.map_or_else(|| "–".to_owned(), short))?;
            }
            writeln!(out)?;
        }
        Ok(())
    }

    fn measured(&self) -> Vec<Name> {
        let names = Name::ALL.into_iter();
        names
            .filter(|name| self.subjects.contains_key(name.as_str()))
            .collect()
    }
}

/// Writes a number with three digits that count.
pub(super) fn short(value: f64) -> String {
    let digits = match value.abs() {
        _ if value.fract() == 0.0 => 0,
        size if size < 0.1 => 4,
        size if size < 1.0 => 3,
        size if size < 10.0 => 2,
        size if size < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_that_count() {
        let shown = [0.012_34, 0.1234, 1.234, 12.34, 123.4, 1_000_000.0, 0.0].map(short);
        assert_eq!(
            shown,
            ["0.0123", "0.123", "1.23", "12.3", "123", "1000000", "0"]
        );
    }
}
