//! Watches the sequence of one stream: contiguous, duplicate, gap or restart.
//!
//! Engines number batches from 0 by process start and have no incarnation field, so the last payloads are remembered by
//! fingerprint: the same number with the same payload is a duplicate (a redelivery), with another payload another life.

use std::collections::VecDeque;

use xxhash_rust::xxh3::xxh3_64;

/// What the position of a batch in its stream means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The first batch of a stream that begins at its start.
    Start,
    /// The first batch of a stream that began earlier.
    Late,
    /// Follows the batch before.
    Next,
    /// Was seen before.
    Duplicate,
    /// Batches in between were lost.
    Gap {
        /// How many.
        lost: u64,
    },
    /// The engine began anew.
    Restart,
}

/// The sequence of one (worker, rank).
#[derive(Debug, Default)]
pub struct SequenceTracker {
    next: Option<u64>,
    last_ts: f64,
    seen: VecDeque<(u64, u64)>,
}

impl SequenceTracker {
    /// Batches that are remembered by fingerprint.
    pub const REMEMBERED: usize = 1_024;

    /// Creates a tracker that has seen nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number that would be contiguous, `None` before the first batch.
    #[must_use]
    pub const fn next(&self) -> Option<u64> {
        self.next
    }

    /// Tells whether this payload came under this number before; `None` when the number is not remembered.
    #[must_use]
    pub fn is_known(&self, sequence: u64, payload: &[u8]) -> Option<bool> {
        let fingerprint = xxh3_64(payload);
        self.seen
            .iter()
            .rev()
            .find(|(seen, _)| *seen == sequence)
            .map(|(_, print)| *print == fingerprint)
    }

    /// Takes note of a batch and says what its position means. `ts` is the engine's clock, `None` when undecodable.
    pub fn observe(&mut self, sequence: u64, payload: &[u8], ts: Option<f64>) -> Verdict {
        let verdict = self.verdict(sequence, payload, ts);
        if verdict == Verdict::Duplicate {
            return verdict;
        }
        if matches!(verdict, Verdict::Restart | Verdict::Start | Verdict::Late) {
            self.seen.clear();
        }
        self.next = Some(sequence.saturating_add(1));
        if let Some(ts) = ts {
            self.last_ts = ts;
        }
        if self.seen.len() == Self::REMEMBERED {
            self.seen.pop_front();
        }
        self.seen.push_back((sequence, xxh3_64(payload)));
        verdict
    }

    fn verdict(&self, sequence: u64, payload: &[u8], ts: Option<f64>) -> Verdict {
        let Some(next) = self.next else {
            return if sequence == 0 {
                Verdict::Start
            } else {
                Verdict::Late
            };
        };
        if sequence == next {
            return Verdict::Next;
        }
        if sequence > next {
            return Verdict::Gap {
                lost: sequence - next,
            };
        }
        match self.is_known(sequence, payload) {
            Some(true) => Verdict::Duplicate,
            Some(false) => Verdict::Restart,
            // Too old to be remembered: within one life the engine's clock rises.
            None if ts.is_some_and(|ts| ts < self.last_ts) => Verdict::Duplicate,
            None => Verdict::Restart,
        }
    }

    /// Forgets everything, as after a restart.
    pub fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_from_its_start_is_contiguous() {
        let mut tracker = SequenceTracker::new();
        assert_eq!(tracker.observe(0, b"a", Some(1.0)), Verdict::Start);
        assert_eq!(tracker.observe(1, b"b", Some(2.0)), Verdict::Next);
        assert_eq!(tracker.next(), Some(2));
    }

    #[test]
    fn the_same_number_and_payload_is_a_duplicate_however_late() {
        let mut tracker = SequenceTracker::new();
        for sequence in 0..10u64 {
            tracker.observe(sequence, &sequence.to_le_bytes(), Some(1.0));
        }
        assert_eq!(
            tracker.observe(9, &9u64.to_le_bytes(), Some(1.0)),
            Verdict::Duplicate
        );
        assert_eq!(
            tracker.observe(3, &3u64.to_le_bytes(), Some(1.0)),
            Verdict::Duplicate
        );
        assert_eq!(tracker.next(), Some(10));
    }

    #[test]
    fn a_lower_number_with_another_payload_is_a_restart() {
        let mut tracker = SequenceTracker::new();
        for sequence in 0..10u64 {
            tracker.observe(sequence, &sequence.to_le_bytes(), Some(1.0));
        }
        assert_eq!(tracker.observe(0, b"new life", Some(5.0)), Verdict::Restart);
        assert_eq!(tracker.next(), Some(1));
        // Payloads of the old life are forgotten.
        assert_eq!(tracker.is_known(3, &3u64.to_le_bytes()), None);
    }

    #[test]
    fn a_jump_is_a_gap_with_its_width() {
        let mut tracker = SequenceTracker::new();
        assert_eq!(tracker.observe(5, b"a", Some(1.0)), Verdict::Late);
        assert_eq!(
            tracker.observe(9, b"b", Some(1.0)),
            Verdict::Gap { lost: 3 }
        );
        assert_eq!(tracker.observe(10, b"c", Some(1.0)), Verdict::Next);
    }

    #[test]
    fn a_forgotten_number_is_judged_by_the_clock() {
        let mut tracker = SequenceTracker::new();
        let many = SequenceTracker::REMEMBERED as u64 + 10;
        for sequence in 0..many {
            tracker.observe(sequence, &sequence.to_le_bytes(), Some(sequence as f64));
        }
        assert_eq!(tracker.observe(2, b"x", Some(2.0)), Verdict::Duplicate);
        assert_eq!(tracker.observe(2, b"x", Some(1e9)), Verdict::Restart);
    }

    #[test]
    fn the_largest_number_does_not_overflow() {
        let mut tracker = SequenceTracker::new();
        assert_eq!(tracker.observe(u64::MAX, b"a", None), Verdict::Late);
        assert_eq!(tracker.next(), Some(u64::MAX));
    }
}
