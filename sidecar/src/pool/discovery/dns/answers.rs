//! What follows from answers and from their absence.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// A worker that a record tells of.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// Its name.
    pub(super) id: String,
    pub(super) address: IpAddr,
    pub(super) port: u16,
    /// What tells its lives apart.
    pub(super) instance: String,
}

/// What one question brought.
#[derive(Clone, Debug)]
pub(super) enum Outcome {
    /// An answer, empty when there are no such records.
    Found(BTreeSet<Place>),
    /// No answer.
    Failed(String),
}

/// The last answer to each question of a name.
#[derive(Debug)]
pub(super) struct Answers {
    grace: Duration,
    last: Vec<BTreeSet<Place>>,
    /// Since when the name has had no record at all.
    empty_since: Option<Instant>,
}

impl Answers {
    /// Creates one that keeps its last places for `grace` after the name has none any more.
    pub(super) const fn new(grace: Duration) -> Self {
        Self {
            grace,
            last: Vec::new(),
            empty_since: None,
        }
    }

    /// Takes in what all questions of one round brought. Returns the places to publish, and what is wrong.
    pub(super) fn take(
        &mut self,
        outcomes: Vec<Outcome>,
        now: Instant,
    ) -> (BTreeSet<Place>, Option<String>) {
        self.last.resize_with(outcomes.len(), BTreeSet::new);
        let is_empty =
            |outcome: &Outcome| matches!(outcome, Outcome::Found(places) if places.is_empty());
        let mut problem = None;
        if outcomes.iter().all(is_empty) {
            // Whoever changes records by removing and adding leaves a moment without any.
            let since = *self.empty_since.get_or_insert(now);
            problem = Some("the name has no record");
            if now.saturating_duration_since(since) >= self.grace {
                self.last.iter_mut().for_each(BTreeSet::clear);
            }
        } else {
            self.empty_since = None;
        }
        let mut problem = problem.map(str::to_owned);
        for (last, outcome) in self.last.iter_mut().zip(outcomes) {
            match outcome {
                Outcome::Found(places) if self.empty_since.is_none() => *last = places,
                Outcome::Found(_) => {}
                Outcome::Failed(why) => problem = Some(why),
            }
        }
        (self.last.iter().flatten().cloned().collect(), problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(addresses: &[&str]) -> Outcome {
        let place = |address: &&str| Place {
            id: (*address).to_owned(),
            address: address.parse().unwrap(),
            port: 1,
            instance: String::new(),
        };
        Outcome::Found(addresses.iter().map(place).collect())
    }

    fn failed() -> Outcome {
        Outcome::Failed("timed out".to_owned())
    }

    fn names((places, problem): (BTreeSet<Place>, Option<String>)) -> (Vec<String>, bool) {
        let names = places.into_iter().map(|place| place.id).collect();
        (names, problem.is_some())
    }

    #[test]
    fn a_question_that_fails_keeps_its_own_answer_alone() {
        let mut answers = Answers::new(Duration::from_secs(30));
        let now = Instant::now();
        let mut take = |v4, v6| names(answers.take(vec![v4, v6], now));
        let both = (vec!["10.0.0.1".to_owned(), "fd00::1".to_owned()], false);
        assert_eq!(take(found(&["10.0.0.1"]), found(&["fd00::1"])), both);
        let (names, fails) = take(found(&["10.0.0.2"]), failed());
        assert_eq!(
            (names, fails),
            (vec!["10.0.0.2".into(), "fd00::1".into()], true)
        );
        let (names, fails) = take(found(&["10.0.0.2"]), found(&[]));
        assert_eq!((names, fails), (vec!["10.0.0.2".into()], false));
        let (names, fails) = take(failed(), failed());
        assert_eq!((names, fails), (vec!["10.0.0.2".into()], true));
        // Half an answer is no absence.
        let (names, _) = take(failed(), found(&[]));
        assert_eq!(names, ["10.0.0.2"]);
    }

    #[test]
    fn a_name_without_records_loses_its_workers_after_the_grace() {
        let mut answers = Answers::new(Duration::from_secs(30));
        let start = Instant::now();
        let mut take = |outcome, seconds| {
            names(answers.take(vec![outcome], start + Duration::from_secs(seconds)))
        };
        assert_eq!(take(found(&[]), 0), (vec![], true));
        assert_eq!(
            take(found(&["10.0.0.1"]), 100),
            (vec!["10.0.0.1".into()], false)
        );
        assert_eq!(take(found(&[]), 110), (vec!["10.0.0.1".into()], true));
        assert_eq!(take(failed(), 120), (vec!["10.0.0.1".into()], true));
        // A failure between says nothing, so the grace begins anew.
        assert_eq!(take(found(&[]), 141), (vec!["10.0.0.1".into()], true));
        assert_eq!(take(found(&[]), 170), (vec!["10.0.0.1".into()], true));
        assert_eq!(take(found(&[]), 171), (vec![], true));
        assert_eq!(
            take(found(&["10.0.0.1"]), 172),
            (vec!["10.0.0.1".into()], false)
        );
    }
}
