//! Clocks, and percentiles of what they measure.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Returns the CPU time that the calling thread has used.
#[must_use]
pub fn thread_cpu() -> Duration {
    read(ClockId::ThreadCPUTime)
}

/// Returns the CPU time that all threads of the process have used.
#[must_use]
pub fn process_cpu() -> Duration {
    read(ClockId::ProcessCPUTime)
}

fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// Samples of one latency.
#[derive(Clone, Debug, Default)]
pub struct Latencies {
    nanos: Vec<u32>,
}

impl Latencies {
    /// Creates an empty collection with room for `capacity` samples.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        Self {
            nanos: Vec::with_capacity(capacity),
        }
    }

    /// Adds a sample; one above four seconds counts as four seconds.
    pub fn add(&mut self, sample: Duration) {
        self.nanos
            .push(u32::try_from(sample.as_nanos()).unwrap_or(u32::MAX));
    }

    /// Adds the samples of another collection.
    pub fn append(&mut self, other: Self) {
        self.nanos.extend(other.nanos);
    }

    /// Returns the number of samples.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nanos.len()
    }

    /// Tells whether there is no sample.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nanos.is_empty()
    }

    /// Returns the smallest samples, in microseconds, that at least these shares of all do not exceed; zeros without a
    /// sample.
    #[must_use]
    pub fn percentiles<const N: usize>(&mut self, shares: [f64; N]) -> [f64; N] {
        self.nanos.sort_unstable();
        shares.map(|share| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "sample counts are far below 2^52"
            )]
            let rank = (share * self.nanos.len() as f64).ceil() as usize;
            let sample = self.nanos.get(rank.max(1) - 1).copied().unwrap_or(0);
            f64::from(sample) / 1e3
        })
    }
}

/// Returns the middle value, or the mean of the two middle ones; zero without a value.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_by_rank() {
        let mut latencies = Latencies::default();
        for micros in (1..=200).rev() {
            latencies.add(Duration::from_micros(micros));
        }
        // Ranks 100, 198 and 200 of 200.
        let shown = format!("{:?}", latencies.percentiles([0.5, 0.99, 0.999]));
        assert_eq!(shown, "[100.0, 198.0, 200.0]");
        let shown = format!("{:?}", Latencies::default().percentiles([0.5]));
        assert_eq!(shown, "[0.0]");
    }

    #[test]
    fn median_is_between_the_middle_values() {
        assert_eq!(median(&[5.0, 1.0, 3.0]).to_bits(), 3.0_f64.to_bits());
        assert_eq!(median(&[4.0, 1.0, 2.0, 9.0]).to_bits(), 3.0_f64.to_bits());
    }

    #[test]
    fn cpu_time_passes_with_work() {
        let (thread, process) = (thread_cpu(), process_cpu());
        let mut sum = 0_u64;
        while thread_cpu() == thread {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(process_cpu() > process);
    }
}
