//! One part of the measurements of one subject, in a process of its own.

mod approximate;
mod heap;
mod select;
mod speed;

use serde_json::{Map, Value};

use crate::probes;
#[cfg(feature = "peers")]
use crate::subject::{Chain, Crtc, Positional, RadixTree};
use crate::subject::{Naive, Name, Ours};
use crate::workload::Shape;

/// Measured values by name; the unit is the last word of the name.
pub type Cells = Map<String, Value>;

/// What one process measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Lookups, stores, removals and clears.
    Speed,
    /// Stores into tables sized by the KV capacity.
    SizedStores,
    /// Live heap; needs the counting binary.
    Heap,
    /// Answers against the reference model.
    Probes,
    /// Cost of recording placements with a TTL.
    Approximate,
    /// Live heap of placements with a TTL; needs the counting binary.
    ApproximateHeap,
    /// The whole decision.
    Select,
}

impl Part {
    /// Returns the text used on the command line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Speed => "speed",
            Self::SizedStores => "sized-stores",
            Self::Heap => "heap",
            Self::Probes => "probes",
            Self::Approximate => "approximate",
            Self::ApproximateHeap => "approximate-heap",
            Self::Select => "select",
        }
    }

    /// Tells whether the part needs the binary whose allocator counts.
    #[must_use]
    pub const fn counts_heap(self) -> bool {
        matches!(self, Self::Heap | Self::ApproximateHeap)
    }

    /// Tells whether it can be measured of a subject.
    #[must_use]
    pub const fn applies_to(self, subject: Name) -> bool {
        match self {
            Self::Speed | Self::Heap => true,
            Self::Probes => !matches!(subject, Name::Naive),
            Self::Approximate | Self::ApproximateHeap => {
                matches!(subject, Name::Ours | Name::Crtc)
            }
            Self::SizedStores | Self::Select => matches!(subject, Name::Ours),
        }
    }
}

/// Sizes of a run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Workload W.
    pub w: Shape,
    /// W with a long shared prompt.
    pub hot_prefix: Shape,
    /// W on many workers.
    pub many_workers: Shape,
    /// Long conversations.
    pub deep: Shape,
    /// W for the churn.
    pub churn: Shape,
    /// W for placements with a TTL.
    pub approximate: Shape,
    /// Fill sizes between half of W and W.
    pub fills: u32,
    /// Lookups for each percentile.
    pub lookups: u32,
    /// Random operations of the probes.
    pub operations: u32,
    /// Seconds of each select cell.
    pub select_seconds: f64,
}

impl Plan {
    /// Returns the sizes of a quick or a full run of a subject. The reference model copes with a hundredth of W only, and
    /// Positional takes minutes for more than a quarter.
    #[must_use]
    pub const fn new(is_quick: bool, subject: Name) -> Self {
        let full = match subject {
            Name::Naive => 100,
            Name::Positional => 2_500,
            _ => 10_000,
        };
        let quick = if full < 2_500 { full } else { 2_500 };
        Self {
            w: Shape::W.conversations(full),
            hot_prefix: Shape::HOT_PREFIX.conversations(full),
            many_workers: Shape::MANY_WORKERS.conversations(full),
            deep: Shape::DEEP.conversations(if is_quick { 60 } else { 200 }),
            churn: Shape::W.conversations(if is_quick { quick } else { full }),
            approximate: Shape::W.conversations(2_500),
            fills: if is_quick { 4 } else { 7 },
            lookups: match subject {
                Name::Naive => 200,
                _ if is_quick => 10_000,
                _ => 30_000,
            },
            operations: if is_quick { 100_000 } else { 1_000_000 },
            select_seconds: if is_quick { 1.0 } else { 3.0 },
        }
    }
}

/// Measures a part of a subject.
///
/// # Errors
/// A subject or part that this binary cannot measure.
pub fn measure(part: Part, subject: Name, is_quick: bool) -> Result<Cells, String> {
    let plan = Plan::new(is_quick, subject);
    if !part.applies_to(subject) {
        return Err(format!("{} is not measured of {subject}", part.as_str()));
    }
    if part.counts_heap() && crate::heap::live_bytes() == 0 {
        return Err(format!("{} needs the binary that counts", part.as_str()));
    }
    match subject {
        Name::Ours => Ok(match part {
            Part::Speed => speed::measure_shared::<Ours>(&plan),
            Part::SizedStores => speed::measure_sized::<Ours>(&plan),
            Part::Heap => heap::measure::<Ours>(&plan),
            Part::Probes => probes::measure::<Ours>(&plan),
            Part::Approximate => approximate::ours(&plan),
            Part::ApproximateHeap => approximate::ours_heap(&plan),
            Part::Select => select::measure(&plan),
        }),
        Name::Naive => Ok(match part {
            Part::Heap => heap::measure::<Naive>(&plan),
            _ => speed::measure_small::<Naive>(&plan),
        }),
        #[cfg(feature = "peers")]
        Name::Crtc => Ok(match part {
            Part::Heap => heap::measure::<Crtc>(&plan),
            Part::Probes => probes::measure::<Crtc>(&plan),
            Part::Approximate => approximate::crtc(&plan),
            Part::ApproximateHeap => approximate::crtc_heap(&plan),
            Part::Speed | Part::SizedStores | Part::Select => speed::measure_shared::<Crtc>(&plan),
        }),
        #[cfg(feature = "peers")]
        Name::Chain => Ok(match part {
            Part::Heap => heap::measure::<Chain>(&plan),
            Part::Probes => probes::measure::<Chain>(&plan),
            _ => speed::measure_shared::<Chain>(&plan),
        }),
        #[cfg(feature = "peers")]
        Name::Radix => Ok(match part {
            Part::Heap => heap::measure::<RadixTree>(&plan),
            Part::Probes => probes::measure::<RadixTree>(&plan),
            _ => speed::measure_alone::<RadixTree>(&plan),
        }),
        #[cfg(feature = "peers")]
        Name::Positional => Ok(match part {
            Part::Heap => heap::measure::<Positional>(&plan),
            Part::Probes => probes::measure::<Positional>(&plan),
            _ => speed::measure_shared::<Positional>(&plan),
        }),
        #[cfg(not(feature = "peers"))]
        _ => Err(format!("{subject} is a peer, and peers are not built in")),
    }
}

fn put(cells: &mut Cells, name: impl Into<String>, value: f64) {
    cells.insert(name.into(), value.into());
}

/// Converts a count for arithmetic; counts here stay far below 2^52.
#[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
pub(crate) const fn float(count: u64) -> f64 {
    count as f64
}
