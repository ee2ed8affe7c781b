//! The crossover as tables.

use std::fmt::Write as _;

use kvlane::Result;
use kvlane::handoff::DecidedBy;

use super::args::PlanArgs;
use super::study::{LinkPoints, Point, Study};

/// Returns one table for each link, in Markdown.
pub(super) fn tables(study: &Study, args: &PlanArgs) -> Result<String> {
    let mut text = format!(
        "{} KV bytes a token. {} streams decode {} ms apart. Targets: first token {} ms, gap {} ms.\n",
        grouped(study.bytes_per_token()),
        args.streams,
        args.gap_ms,
        args.ttft_objective_ms,
        args.itl_objective_ms
    );
    for link in study.links(args)? {
        table(&link, &mut text);
    }
    Ok(text)
}

fn table(link: &LinkPoints, text: &mut String) {
    let _ = writeln!(
        text,
        "\nLink {}:\n\n\
         | prompt tokens | KV | one worker: first token | gap | two workers: first token | gap | chosen | two pay from |\n\
         |---:|---:|---:|---:|---:|---:|---|---:|",
        link.link
    );
    for point in &link.points {
        let _ = writeln!(
            text,
            "| {} | {} MB | {} ms | {} ms | {} ms | {} ms | {} | {} |",
            grouped(point.tokens as f64),
            grouped(point.kv_bytes / 1e6),
            grouped(point.one_worker.ttft_seconds * 1e3),
            grouped(point.one_worker.gap_seconds * 1e3),
            grouped(point.two_workers.ttft_seconds * 1e3),
            grouped(point.two_workers.gap_seconds * 1e3),
            chosen(point),
            point
                .pays_from_bytes_per_second
                .map_or_else(|| "never".to_owned(), speed),
        );
    }
    let _ = writeln!(text, "\n{}", summary(link));
}

fn chosen(point: &Point) -> String {
    let workers = if point.split { "two" } else { "one" };
    let reason = match point.decided_by {
        DecidedBy::Both => "better in both",
        DecidedBy::Ttft => "first token",
        DecidedBy::Itl => "gaps",
        DecidedBy::Simplicity => "no difference",
        DecidedBy::Only | DecidedBy::Nothing => "no other way",
    };
    format!("{workers} ({reason})")
}

/// Says between which lengths which is chosen.
fn summary(link: &LinkPoints) -> String {
    let (Some(first), Some(last)) = (link.points.first(), link.points.last()) else {
        return String::new();
    };
    let name = |split: bool| if split { "two workers" } else { "one worker" };
    if link.changes_at_tokens.is_empty() {
        return format!(
            "From {} to {} tokens: {}.",
            grouped(first.tokens as f64),
            grouped(last.tokens as f64),
            name(first.split)
        );
    }
    let mut text = String::new();
    let mut split = first.split;
    for (number, at) in link.changes_at_tokens.iter().enumerate() {
        let word = if number == 0 { "Below" } else { "then below" };
        let _ = write!(
            text,
            "{word} {} tokens: {}; ",
            grouped(*at as f64),
            name(split)
        );
        split = !split;
    }
    text + "from there on: " + name(split) + "."
}

/// Returns a throughput with three digits.
pub(super) fn speed(bytes_per_second: f64) -> String {
    let (value, unit) = if bytes_per_second >= 1e9 {
        (bytes_per_second / 1e9, "GB/s")
    } else {
        (bytes_per_second / 1e6, "MB/s")
    };
    let decimals = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.decimals$} {unit}")
}

/// Returns a whole number with commas between thousands.
pub(super) fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
