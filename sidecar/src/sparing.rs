//! Log lines that others can cause: some of them are enough.
//!
//! A client that sends what no worker accepts, or a worker that fails each request, would otherwise write a line for each. The
//! rest is told by metrics.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Lets the first lines of each second pass, and counts the others.
#[derive(Debug)]
pub(crate) struct Sparing(Mutex<State>);

#[derive(Debug)]
struct State {
    since: Option<Instant>,
    passed: u32,
    left_out: u64,
}

/// Lines that pass in each window.
const MOST: u32 = 5;
const WINDOW: Duration = Duration::from_secs(1);

impl Sparing {
    /// Creates one that has let nothing pass.
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(State {
            since: None,
            passed: 0,
            left_out: 0,
        }))
    }

    /// Asks for a line: `None` when it is to be left out, else how many were since the last that passed.
    pub(crate) fn pass(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        if state
            .since
            .is_none_or(|since| now.saturating_duration_since(since) >= WINDOW)
        {
            state.since = Some(now);
            state.passed = 0;
        }
        if state.passed == MOST {
            state.left_out += 1;
            return None;
        }
        state.passed += 1;
        Some(std::mem::take(&mut state.left_out))
    }
}

/// Writes a warning unless there were many of this place within the last second.
macro_rules! warn_sparingly {
    ($($line:tt)+) => {{
        static LINES: $crate::sparing::Sparing = $crate::sparing::Sparing::new();
        if let Some(left_out) = LINES.pass(std::time::Instant::now()) {
            if left_out > 0 {
                tracing::warn!(lines = left_out, "like lines were left out");
            }
            tracing::warn!($($line)+);
        }
    }};
}
pub(crate) use warn_sparingly;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_becomes_some_lines_and_a_count() {
        let lines = Sparing::new();
        let start = Instant::now();
        let at = |ms| lines.pass(start + Duration::from_millis(ms));
        let passed: Vec<u64> = (0..100).filter_map(at).collect();
        assert_eq!(passed, [0; 5]);
        assert_eq!(at(999), None);
        // 95 of the first hundred, and one.
        assert_eq!(at(1_000), Some(96));
        assert_eq!(at(1_001), Some(0));
        assert_eq!(at(5_000), Some(0));
    }
}
