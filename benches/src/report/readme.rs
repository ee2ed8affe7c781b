//! The table of the project's README.

use std::fmt::Write as _;

use super::markdown::short;
use super::{Better, Name, Report};

/// Cell, what it is, and which values are better.
const ROWS: [(&str, &str, Better); 10] = [
    (
        "overlap_256_p50_us",
        "looking up 256 blocks that are held, 64 workers, p50 µs",
        Better::Low,
    ),
    (
        "overlap_1024_workers_p50_us",
        "the same with 1,024 workers, p50 µs",
        Better::Low,
    ),
    (
        "beside_writer_p99_us",
        "the same with 64 workers beside a streaming writer, p99 µs",
        Better::Low,
    ),
    (
        "store_ns",
        "storing a block, in tables sized by KV capacity (kvlane alone takes it), CPU ns",
        Better::Low,
    ),
    (
        "store_grown_ns",
        "storing a block, in tables grown from nothing, CPU ns",
        Better::Low,
    ),
    (
        "remove_tail_first_ns",
        "removing a block, CPU ns",
        Better::Low,
    ),
    (
        "bytes_per_held_block",
        "live heap per held block, bytes",
        Better::Low,
    ),
    (
        "approximate_bytes_per_block",
        "approximate entries with TTL (kvlane's bounded too), bytes a block",
        Better::Low,
    ),
    (
        "churn_ratio",
        "heap after 8 rounds of churn ÷ before",
        Better::Low,
    ),
    (
        "wrong_answers",
        "wrong answers in probes and random operations",
        Better::Low,
    ),
];

const BEGIN: &str = "<!-- made by `make bench` -->\n";
const END: &str = "<!-- end -->";

impl Report {
    /// Puts the table in place of the one between the markers of a README.
    ///
    /// # Errors
    /// When the markers are not there.
    pub fn put_into_readme(&self, readme: &str) -> Result<String, String> {
        let begin = readme.find(BEGIN).map(|at| at + BEGIN.len());
        let (Some(begin), Some(end)) = (begin, readme.find(END)) else {
            return Err(format!("the README has no lines {BEGIN:?} and {END:?}"));
        };
        if end < begin {
            return Err(format!("the README has {END:?} before {BEGIN:?}"));
        }
        Ok(format!(
            "{}{}{}",
            &readme[..begin],
            self.readme_table(),
            &readme[end..]
        ))
    }

    fn readme_table(&self) -> String {
        let mut out = String::from("| | kvlane | best peer |\n|---|---|---|\n");
        for (cell, label, better) in ROWS {
            let Some(ours) = self.value(Name::Ours, cell) else {
                continue;
            };
            let peer = self.best_peer(cell, better).map_or_else(
                || "–".to_owned(),
                |(peer, value)| format!("{} ({})", short(value), peer.title()),
            );
            let _ = writeln!(out, "| {label} | {} | {peer} |", short(ours));
        }
        for (cell, workers) in [
            ("select_4096_p50_us", "64"),
            ("select_4096_1024_workers_p50_us", "1,024"),
        ] {
            if let Some(ours) = self.value(Name::Ours, cell) {
                let ours = short(ours);
                let _ = writeln!(
                    out,
                    "| a decision for 4,096 tokens, {workers} workers, hashing to release, p50 µs | {ours} | – |"
                );
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::report;
    use super::*;

    #[test]
    fn the_table_goes_between_the_markers_again_and_again() {
        let readme = format!("before\n{BEGIN}old\n{END}\nafter\n");
        let once = report().put_into_readme(&readme).unwrap();
        assert!(once.starts_with("before\n"), "{once}");
        assert!(once.ends_with("<!-- end -->\nafter\n"), "{once}");
        assert!(!once.contains("old"), "{once}");
        assert!(once.contains("| 2 | 5 (kv-index chain) |"), "{once}");
        assert_eq!(report().put_into_readme(&once).unwrap(), once);
        assert!(report().put_into_readme("no markers").is_err());
    }
}
