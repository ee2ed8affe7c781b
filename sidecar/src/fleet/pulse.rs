//! How quick a worker's requests were since somebody last asked.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Latencies of one worker, collected by its requests and taken by whoever balances the pool.
#[derive(Debug, Default)]
pub struct Pulse {
    first_tokens: Spread,
    gaps: Spread,
    computed_blocks: AtomicU64,
}

/// What was collected.
#[derive(Clone, Debug, Default)]
pub struct Beat {
    /// Times from a request's arrival to its first response byte.
    pub first_tokens: Counts,
    /// Times between two pieces of an event stream.
    pub gaps: Counts,
    /// Blocks of prompts computed, without those that were cached.
    pub computed_blocks: u64,
}

impl Pulse {
    /// Takes in the time to a first token.
    pub fn first_token(&self, took: Duration) {
        self.first_tokens.add(took);
    }

    /// Takes in the time between two pieces of a stream.
    pub fn gap(&self, took: Duration) {
        self.gaps.add(took);
    }

    /// Takes in that a prompt was computed, of which `blocks` were not cached.
    pub fn computed(&self, blocks: f64) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a number of blocks; `as` saturates"
        )]
        let blocks = blocks.round() as u64;
        self.computed_blocks.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Returns what came since the last call.
    #[must_use]
    pub fn take(&self) -> Beat {
        Beat {
            first_tokens: self.first_tokens.take(),
            gaps: self.gaps.take(),
            computed_blocks: self.computed_blocks.swap(0, Ordering::Relaxed),
        }
    }
}

impl Beat {
    /// Adds what came later, or on another worker.
    pub fn add(&mut self, other: &Self) {
        self.first_tokens.add(&other.first_tokens);
        self.gaps.add(&other.gaps);
        self.computed_blocks += other.computed_blocks;
    }
}

/// Counts of latencies, in steps of a fifth.
#[derive(Debug)]
struct Spread([AtomicU32; STEPS]);

/// A copy of such counts.
#[derive(Clone, Debug)]
pub struct Counts([u32; STEPS]);

/// From 0.1 ms to 23 minutes; what lies beyond is counted at the end.
const STEPS: usize = 91;
const SHORTEST_SECONDS: f64 = 1e-4;
const STEP: f64 = 1.2;

impl Default for Spread {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU32::new(0)))
    }
}

impl Default for Counts {
    fn default() -> Self {
        Self([0; STEPS])
    }
}

impl Spread {
    fn add(&self, took: Duration) {
        let steps = (took.as_secs_f64() / SHORTEST_SECONDS).max(1.0).log(STEP);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and bounded by what follows"
        )]
        let step = (steps.round() as usize).min(STEPS - 1);
        self.0[step].fetch_add(1, Ordering::Relaxed);
    }

    fn take(&self) -> Counts {
        Counts(
            self.0
                .each_ref()
                .map(|count| count.swap(0, Ordering::Relaxed)),
        )
    }
}

impl Counts {
    fn add(&mut self, other: &Self) {
        for (count, more) in self.0.iter_mut().zip(other.0) {
            *count = count.saturating_add(more);
        }
    }

    /// Returns the seconds that nine of ten stay within, to a tenth; `None` without any.
    #[must_use]
    pub fn p90_seconds(&self) -> Option<f64> {
        let total: u64 = self.0.iter().map(|&count| u64::from(count)).sum();
        let mut below = 0;
        (0..)
            .zip(self.0)
            .find(|&(_, count)| {
                below += u64::from(count);
                total > 0 && below * 10 >= total * 9
            })
            .map(|(step, _)| SHORTEST_SECONDS * STEP.powi(step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nine_of_ten_stay_within_the_percentile() {
        let pulse = Pulse::default();
        for millis in 1..=1_000 {
            pulse.first_token(Duration::from_millis(millis));
        }
        let seconds = pulse.take().first_tokens.p90_seconds().unwrap();
        assert!((0.81..=0.99).contains(&seconds), "{seconds}");
    }

    #[test]
    fn what_was_taken_is_not_counted_again() {
        let pulse = Pulse::default();
        pulse.gap(Duration::from_millis(5));
        assert!(pulse.take().gaps.p90_seconds().is_some());
        assert_eq!(pulse.take().gaps.p90_seconds(), None);
    }

    #[test]
    fn any_latency_is_counted() {
        let pulse = Pulse::default();
        for took in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
            pulse.first_token(took);
            assert!(pulse.take().first_tokens.p90_seconds().is_some());
        }
    }

    #[test]
    fn workers_add_up() {
        let (quick, slow) = (Pulse::default(), Pulse::default());
        for _ in 0..50 {
            quick.gap(Duration::from_millis(10));
            slow.gap(Duration::from_millis(100));
        }
        let mut all = quick.take().gaps;
        all.add(&slow.take().gaps);
        let seconds = all.p90_seconds().unwrap();
        assert!((0.09..=0.11).contains(&seconds), "{seconds}");
    }
}
