//! When the last tick was, without a lock.

use std::time::{Duration, Instant};

use crate::sync::OnceLock;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Time as the callers tell it, since the first call.
#[derive(Debug, Default)]
pub(super) struct Clock {
    start: OnceLock<Instant>,
    /// Nanoseconds from the start to the last tick, plus 1; 0 before the first.
    ticked: AtomicU64,
}

impl Clock {
    /// Takes the turn to tick when the last was `every` ago or longer: of several callers, one gets it.
    pub(super) fn is_due(&self, now: Instant, every: Duration) -> bool {
        let ticked = self.ticked.load(Ordering::Relaxed);
        let now = self.nanos(now);
        let due = ticked == 0 || now.saturating_sub(ticked) >= nanos(every);
        due && self
            .ticked
            .compare_exchange(ticked, now, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }

    pub(super) fn ticked(&self, now: Instant) {
        self.ticked.store(self.nanos(now), Ordering::Relaxed);
    }

    fn nanos(&self, now: Instant) -> u64 {
        let start = *self.start.get_or_init(|| now);
        nanos(now.saturating_duration_since(start)).saturating_add(1)
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a test has a clock")]
    fn a_tick_is_due_once_in_a_while() {
        let (clock, start, every) = (Clock::default(), Instant::now(), Duration::from_secs(1));
        assert!(clock.is_due(start, every));
        assert!(!clock.is_due(start, every));
        assert!(!clock.is_due(start + every / 2, every));
        assert!(clock.is_due(start + every, every));
        assert!(!clock.is_due(start, every)); // time of another caller, a little behind
        clock.ticked(start + every * 2);
        assert!(!clock.is_due(start + every * 2, every));
    }
}
