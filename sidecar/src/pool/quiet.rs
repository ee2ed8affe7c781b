//! Keeps the log readable when the same is wrong again and again.

use std::time::{Duration, Instant};

/// What was said lately of a source that fails and recovers, maybe many times a minute.
#[derive(Debug, Default)]
pub(super) struct Lately {
    problem: Option<String>,
    /// The failure that goes on was said.
    is_said: bool,
    said: Vec<(String, Instant)>,
}

/// For how long a problem is not said again when it comes back.
const QUIET: Duration = Duration::from_secs(300);
/// Most problems that are said within that time: texts that differ each time would fill the log as well.
const MOST: usize = 8;

impl Lately {
    /// Takes in a problem; tells whether to say it.
    pub(super) fn failed(&mut self, problem: &str, now: Instant) -> bool {
        if self.problem.as_deref() == Some(problem) {
            return false;
        }
        self.problem = Some(problem.to_owned());
        self.said
            .retain(|(_, since)| now.saturating_duration_since(*since) < QUIET);
        let is_new = self.said.iter().all(|(said, _)| said != problem);
        let is_said = is_new && self.said.len() < MOST;
        if is_said {
            self.said.push((problem.to_owned(), now));
        }
        self.is_said |= is_said;
        is_said
    }

    /// Takes in that there is no problem; tells whether to say that: whoever was told of a problem is told of its end.
    pub(super) fn succeeded(&mut self) -> bool {
        let was_failing = self.problem.take().is_some();
        std::mem::take(&mut self.is_said) && was_failing
    }

    /// Returns what is wrong.
    pub(super) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_flaps_is_said_once_and_again_after_a_while() {
        let (mut lately, start) = (Lately::default(), Instant::now());
        let mut said = 0;
        for second in 0..299 {
            let now = start + Duration::from_secs(second);
            said += usize::from(lately.failed("refused", now));
            assert!(!lately.failed("refused", now));
            assert_eq!(lately.problem(), Some("refused"));
            said += usize::from(lately.succeeded());
            assert_eq!(lately.problem(), None);
        }
        assert_eq!(said, 2, "that it fails, and that it is back");
        assert!(lately.failed("refused", start + QUIET));
        assert!(lately.succeeded() && !lately.succeeded());
    }

    #[test]
    fn of_problems_that_always_differ_few_are_said_and_the_end_of_what_was_said() {
        let (mut lately, now) = (Lately::default(), Instant::now());
        let said = (0..100).filter(|number| lately.failed(&number.to_string(), now));
        assert_eq!(said.count(), MOST);
        assert_eq!(lately.problem(), Some("99"));
        assert!(lately.succeeded());
        assert!(!lately.failed("100", now) && !lately.succeeded());
    }
}
