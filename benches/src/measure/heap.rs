//! Live heap: for each held block, after churn, and after everything has left.

use super::{Cells, Plan, float, put};
use crate::heap::{live_bytes, resident_bytes};
use crate::subject::{Subject, Writer};
use crate::workload::{Event, Shape, Workload};

/// Rounds of churn; each replaces every conversation.
const CHURN_ROUNDS: u32 = 8;
/// Events between two drains of a subject that applies them elsewhere: what waits is not its index.
const EVENTS_IN_FLIGHT: usize = 64;

/// Measures the live heap of a subject.
pub(super) fn measure<S: Subject>(plan: &Plan) -> Cells {
    let mut cells = Cells::new();
    bytes_per_held_block::<S>(plan, &mut cells);
    churn::<S>(plan.churn, &mut cells);
    cells
}

/// An index whose heap is known: nothing else allocates for good.
struct Weighed<S: Subject> {
    subject: S,
    writer: S::Writer,
    workload: Workload,
    base_bytes: usize,
    applied: usize,
}

impl<S: Subject> Weighed<S> {
    fn new(shape: Shape) -> Self {
        let workload = Workload::new(shape);
        let base_bytes = live_bytes();
        let subject = S::new(shape.workers);
        Self {
            writer: subject.writer(),
            subject,
            workload,
            base_bytes,
            applied: 0,
        }
    }

    fn play(&mut self, generate: impl FnOnce(&mut Workload, &mut dyn FnMut(Event))) {
        let (writer, applied) = (&mut self.writer, &mut self.applied);
        generate(&mut self.workload, &mut |event| {
            drop(writer.apply(S::event(event)));
            *applied += 1;
            if *applied % EVENTS_IN_FLIGHT == 0 {
                writer.drain();
            }
        });
        self.writer.drain();
    }

    fn fill(shape: Shape) -> Self {
        let mut weighed = Self::new(shape);
        weighed.play(|workload, publish| workload.fill(publish));
        weighed
    }

    fn bytes(&self) -> f64 {
        float(live_bytes().saturating_sub(self.base_bytes) as u64)
    }

    fn bytes_per_held_block(&self) -> f64 {
        self.bytes() / float(self.workload.held_blocks())
    }
}

/// Fills indexes of several sizes up to W: tables that double make one size say nothing.
fn bytes_per_held_block<S: Subject>(plan: &Plan, cells: &mut Cells) {
    let mut by_size = Vec::new();
    for step in (0..plan.fills).rev() {
        let share = (-f64::from(step) / f64::from(plan.fills - 1)).exp2();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of a small number"
        )]
        let conversations = (f64::from(plan.w.conversations) * share).round() as u32;
        let resident = resident_bytes();
        let weighed = Weighed::<S>::fill(plan.w.conversations(conversations));
        by_size.push(weighed.bytes_per_held_block());
        if step + 1 == plan.fills {
            // Later fills reuse the pages of earlier ones, so the first tells what it costs the process.
            let grown = resident_bytes().saturating_sub(resident) as u64;
            let held = float(weighed.workload.held_blocks());
            put(cells, "resident_bytes_per_held_block", float(grown) / held);
        }
    }
    let mean = by_size.iter().sum::<f64>() / f64::from(plan.fills);
    put(cells, "bytes_per_held_block", mean);
    let least = by_size.iter().copied().fold(f64::INFINITY, f64::min);
    put(cells, "bytes_per_held_block_least", least);
    let most = by_size.iter().copied().fold(0.0, f64::max);
    put(cells, "bytes_per_held_block_most", most);
    let last = by_size.last().copied().unwrap_or(0.0);
    put(cells, "bytes_per_held_block_at_w", last);
}

/// Replaces all conversations again and again, then removes every worker.
fn churn<S: Subject>(shape: Shape, cells: &mut Cells) {
    let mut weighed = Weighed::<S>::fill(shape);
    let (before, mut peak) = (weighed.bytes_per_held_block(), weighed.bytes());
    for _ in 0..CHURN_ROUNDS {
        weighed.play(|workload, publish| workload.churn(0..shape.conversations, publish));
        peak = peak.max(weighed.bytes());
    }
    let after = weighed.bytes_per_held_block();
    put(cells, "churn_ratio", after / before);
    weighed.subject.maintain();
    let after = weighed.bytes_per_held_block();
    put(cells, "churn_ratio_after_maintenance", after / before);
    for worker in 0..shape.workers {
        weighed.writer.remove_worker(worker);
    }
    weighed.writer.drain();
    put(cells, "after_remove_all_ratio", weighed.bytes() / peak);
    weighed.subject.maintain();
    let left = weighed.bytes() / peak;
    put(cells, "after_remove_all_ratio_after_maintenance", left);
}
