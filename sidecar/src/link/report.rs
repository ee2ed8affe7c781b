//! What was measured, for people, programs and `kvlane serve`.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::args::Piece;
use super::fit::{Fit, fit};

/// One way of moving, and how long it took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    /// Of one stream.
    pub(super) bytes: usize,
    pub(super) piece: Piece,
    pub(super) streams: usize,
    /// Until the last stream was over, the median over rounds.
    pub(super) seconds: f64,
}

impl Cell {
    fn bytes_per_second(&self) -> f64 {
        (self.bytes * self.streams) as f64 / self.seconds
    }
}

/// All cells.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) peer: String,
    pub(super) transport: &'static str,
    pub(super) memory: String,
    pub(super) cells: Vec<Cell>,
}

impl Measured {
    /// Returns what the planner needs: of one stream in the last layout, which is the most scattered one.
    pub(super) fn fit(&self) -> Option<Fit> {
        let last = self.cells.iter().rfind(|cell| cell.streams == 1)?.piece;
        let points: Vec<(f64, f64)> = self
            .cells
            .iter()
            .filter(|cell| cell.streams == 1 && cell.piece == last)
            .map(|cell| (cell.bytes as f64, cell.seconds))
            .collect();
        fit(&points)
    }

    pub(super) fn table(&self) -> String {
        let mut text = format!(
            "{} over {}, {}.\n\n| size | layout | streams | median | all streams | one stream |\n|---:|---|---:|---:|---:|---:|\n",
            self.peer, self.transport, self.memory
        );
        for cell in &self.cells {
            let all = cell.bytes_per_second();
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} |",
                bytes(cell.bytes),
                layout(cell.piece),
                cell.streams,
                time(cell.seconds),
                speed(all),
                speed(all / cell.streams as f64)
            );
        }
        if let Some(fit) = self.fit() {
            let _ = write!(
                text,
                "\nhandoff:\n  {}  {}",
                speed_line(&fit),
                fixed_line(&fit)
            );
        }
        text
    }

    pub(super) fn json(&self) -> Value {
        let cells: Vec<Value> = self
            .cells
            .iter()
            .map(|cell| {
                json!({
                    "bytes": cell.bytes, "piece_bytes": cell.piece.of(cell.bytes), "streams": cell.streams,
                    "median_seconds": cell.seconds, "bytes_per_second": cell.bytes_per_second(),
                })
            })
            .collect();
        let fit = self.fit();
        json!({
            "peer": self.peer, "transport": self.transport, "memory": self.memory, "cells": cells,
            "link_bytes_per_second": fit.map(|fit| fit.bytes_per_second),
            "link_fixed_seconds": fit.map(|fit| fit.fixed_seconds),
        })
    }

    /// Returns what `kvlane serve` reads as `handoff.link_file`.
    pub(super) fn file(&self) -> String {
        let lines = self.fit().map(|fit| speed_line(&fit) + &fixed_line(&fit));
        format!(
            "# kvlane link {} over {}, {}\n{}",
            self.peer,
            self.transport,
            self.memory,
            lines.unwrap_or_default()
        )
    }
}

fn speed_line(fit: &Fit) -> String {
    format!("link_bytes_per_second: {:.0}\n", fit.bytes_per_second)
}

fn fixed_line(fit: &Fit) -> String {
    format!("link_fixed_seconds: {:.6}\n", fit.fixed_seconds)
}

fn layout(piece: Piece) -> String {
    match piece {
        Piece::Whole => "whole".to_owned(),
        Piece::Blocks(size) => format!("blocks of {}", bytes(size.bytes())),
    }
}

fn bytes(bytes: usize) -> String {
    for (unit, size) in [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)] {
        if bytes >= size {
            return format!("{} {unit}", digits(bytes as f64 / size as f64));
        }
    }
    format!("{bytes} B")
}

fn time(seconds: f64) -> String {
    if seconds >= 1.0 {
        format!("{} s", digits(seconds))
    } else if seconds >= 1e-3 {
        format!("{} ms", digits(seconds * 1e3))
    } else {
        format!("{} µs", digits(seconds * 1e6))
    }
}

fn speed(bytes_per_second: f64) -> String {
    if bytes_per_second >= 1e9 {
        format!("{} GB/s", digits(bytes_per_second / 1e9))
    } else {
        format!("{} MB/s", digits(bytes_per_second / 1e6))
    }
}

/// Returns three digits, without a fraction of zero.
fn digits(value: f64) -> String {
    let decimals = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    let text = format!("{value:.decimals$}");
    if text.contains('.') {
        return text.trim_end_matches('0').trim_end_matches('.').to_owned();
    }
    text
}
