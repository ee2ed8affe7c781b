//! The crossover as a picture: above the curve two workers pay.

use std::fmt::Write as _;

use kvlane::Result;

use super::args::PlanArgs;
use super::study::Study;
use super::table::{grouped, speed};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
/// Left, right, top and bottom of the field.
const FIELD: [f64; 4] = [80.0, 740.0, 50.0, 380.0];
/// Points of the curve.
const POINTS: u32 = 160;

/// A scale that gives each factor the same length.
#[derive(Clone, Copy, Debug)]
struct Scale {
    from: f64,
    to: f64,
    start: f64,
    end: f64,
}

impl Scale {
    fn place(&self, value: f64) -> f64 {
        let share = (value / self.from).ln() / (self.to / self.from).ln();
        self.start + share.clamp(0.0, 1.0) * (self.end - self.start)
    }

    /// Returns the powers of ten within.
    fn decades(&self) -> impl Iterator<Item = f64> {
        let (from, to) = (self.from, self.to);
        (-3..18)
            .map(|power| 10_f64.powi(power))
            .filter(move |value| (from..=to * 1.000_001).contains(value))
    }
}

/// Returns the picture as SVG.
pub(super) fn plot(study: &Study, args: &PlanArgs) -> Result<String> {
    let [left, right, top, bottom] = FIELD;
    let longest = args
        .tokens
        .iter()
        .copied()
        .max()
        .unwrap_or(128_000)
        .max(1_000);
    let tokens = Scale {
        from: 100.0,
        to: longest as f64,
        start: left,
        end: right,
    };
    let speeds = Scale {
        from: 1e7,
        to: 1e12,
        start: bottom,
        end: top,
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
    );
    let title = format!(
        "{} KV bytes a token; {} streams {} ms apart; targets {} ms and {} ms",
        grouped(study.bytes_per_token()),
        args.streams,
        args.gap_ms,
        args.ttft_objective_ms,
        args.itl_objective_ms
    );
    text(
        &mut svg,
        left,
        20.0,
        "start",
        "Two workers pay where the link is faster than the curve",
    );
    text(&mut svg, left, 37.0, "start", &title);
    grid(&mut svg, tokens, speeds);
    curve(&mut svg, study, tokens, speeds)?;
    for link in &args.link {
        let y = speeds.place(link.bytes_per_second);
        line(&mut svg, [left, y, right, y], "#c2410c", "6 4");
        text(&mut svg, right - 4.0, y - 5.0, "end", &link.to_string());
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

fn grid(svg: &mut String, tokens: Scale, speeds: Scale) {
    let [left, right, top, bottom] = FIELD;
    for value in tokens.decades() {
        let x = tokens.place(value);
        line(svg, [x, top, x, bottom], "#d4d4d4", "");
        text(svg, x, bottom + 18.0, "middle", &grouped(value));
    }
    for value in speeds.decades() {
        let y = speeds.place(value);
        line(svg, [left, y, right, y], "#d4d4d4", "");
        text(
            svg,
            left - 6.0,
            y + 4.0,
            "end",
            &speed(value).replace(".00", "").replace(".0", ""),
        );
    }
    text(
        svg,
        f64::midpoint(left, right),
        bottom + 42.0,
        "middle",
        "prompt tokens",
    );
}

/// Draws the curve, in pieces where no link is fast enough for some lengths between, and shades what is above.
fn curve(svg: &mut String, study: &Study, tokens: Scale, speeds: Scale) -> Result<()> {
    let mut piece: Vec<(f64, f64)> = Vec::new();
    for step in 0..=POINTS {
        let share = f64::from(step) / f64::from(POINTS);
        let length = tokens.from * (tokens.to / tokens.from).powf(share);
        let pays = study.pays_from(whole(length))?;
        match pays.filter(|pays| *pays <= speeds.to) {
            Some(pays) => piece.push((tokens.place(length), speeds.place(pays))),
            None => draw(svg, &mut piece),
        }
    }
    draw(svg, &mut piece);
    Ok(())
}

fn draw(svg: &mut String, piece: &mut Vec<(f64, f64)>) {
    let (Some(first), Some(last)) = (piece.first().copied(), piece.last().copied()) else {
        return;
    };
    let points = |piece: &[(f64, f64)]| {
        piece.iter().fold(String::new(), |mut points, (x, y)| {
            let _ = write!(points, "{x:.1},{y:.1} ");
            points
        })
    };
    let outline = points(piece);
    let top = FIELD[2];
    let _ = writeln!(
        svg,
        "<polygon points=\"{:.1},{top:.1} {outline}{:.1},{top:.1}\" fill=\"#2563eb\" fill-opacity=\"0.12\"/>",
        first.0, last.0
    );
    let _ = writeln!(
        svg,
        "<polyline points=\"{outline}\" fill=\"none\" stroke=\"#2563eb\" stroke-width=\"2\"/>"
    );
    piece.clear();
}

fn line(svg: &mut String, [x1, y1, x2, y2]: [f64; 4], colour: &str, dashes: &str) {
    let _ = writeln!(
        svg,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\" stroke-dasharray=\"{dashes}\"/>"
    );
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#262626\">{words}</text>"
    );
}

fn whole(length: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "lengths are between 100 and 10,000,000"
    )]
    let whole = length.round() as u64;
    whole
}
