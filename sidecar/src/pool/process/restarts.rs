//! When an engine that failed is started again, and when no more.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::config::{RestartSettings, seconds};

/// The failures of one replica.
#[derive(Debug)]
pub(super) struct Restarts {
    settings: RestartSettings,
    /// Within the window.
    failures: VecDeque<Instant>,
    /// Failures since it last served for long.
    in_a_row: u32,
}

/// What follows from a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Start again after this pause.
    After(Duration),
    /// So many failures within the window are enough.
    GiveUp(usize),
}

impl Restarts {
    pub(super) const fn new(settings: RestartSettings) -> Self {
        Self {
            settings,
            failures: VecDeque::new(),
            in_a_row: 0,
        }
    }

    /// Takes in a failure after the engine had served for some time (none if it was never ready); `chance` is a random number
    /// from 0 to 1.
    pub(super) fn failed(&mut self, served: Duration, now: Instant, chance: f64) -> Next {
        let window = seconds(self.settings.window_seconds);
        self.failures.push_back(now);
        while let Some(first) = self.failures.front()
            && now.duration_since(*first) > window
        {
            self.failures.pop_front();
        }
        if self.failures.len() >= self.settings.give_up_failures {
            return Next::GiveUp(self.failures.len());
        }
        if served > Duration::ZERO && served >= seconds(self.settings.max_seconds) {
            self.in_a_row = 0;
        }
        let doubled =
            self.settings.initial_seconds * 2_f64.powi(self.in_a_row.min(60).cast_signed());
        self.in_a_row += 1;
        // Engines that failed together must not fetch their model together for ever.
        let pause = doubled.min(self.settings.max_seconds) * (0.8 + 0.4 * chance);
        Next::After(seconds(pause))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn restarts() -> Restarts {
        let settings = RestartSettings {
            initial_seconds: 1.0,
            max_seconds: 10.0,
            give_up_failures: 7,
            window_seconds: 100.0,
        };
        Restarts::new(settings)
    }

    #[test]
    fn pauses_double_up_to_the_longest_and_then_it_gives_up() {
        let mut restarts = restarts();
        let now = Instant::now();
        let pauses: Vec<_> = (0..7)
            .map(|_| restarts.failed(Duration::ZERO, now, 0.5))
            .collect();
        let after = |seconds: u64| Next::After(Duration::from_secs(seconds));
        assert_eq!(pauses[..6], [1, 2, 4, 8, 10, 10].map(after));
        assert_eq!(pauses[6], Next::GiveUp(7));
    }

    #[test]
    fn chance_spreads_pauses_by_a_fifth() {
        let now = Instant::now();
        assert_eq!(
            restarts().failed(Duration::ZERO, now, 0.0),
            Next::After(Duration::from_millis(800))
        );
        assert_eq!(
            restarts().failed(Duration::ZERO, now, 1.0),
            Next::After(Duration::from_millis(1200))
        );
    }

    #[test]
    fn failures_outside_the_window_and_long_service_are_forgotten() {
        let mut restarts = restarts();
        let mut now = Instant::now();
        for _ in 0..50 {
            // 20 seconds apart in a window of 100: six at a time, one fewer than is enough.
            let next = restarts.failed(Duration::from_secs(9), now, 0.5);
            assert!(matches!(next, Next::After(_)));
            now += Duration::from_secs(20);
        }
        assert_eq!(
            restarts.failed(Duration::from_secs(10), now, 0.5),
            Next::After(Duration::from_secs(1))
        );
    }
}
