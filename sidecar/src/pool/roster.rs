//! What a source of workers says exists, as a whole and not as changes.
//!
//! Every source (configuration, watched file, DNS, Kubernetes, admin listener, local processes) publishes its complete list
//! whenever it changes; the manager compares the lists with what it has. An event that was lost, doubled or late can then
//! leave neither a ghost nor a gap behind: the next list says all there is.

use kvlane::WorkerId;
use tokio::sync::watch;

use crate::config::WorkerConfig;

/// One worker as its source sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// Who and where it is. What its source does not know keeps its default and is learned from the engine.
    pub worker: WorkerConfig,
    /// Which life of it this is: a pod's uid with the restart count of its container, a process's id with its start time; empty
    /// where the source cannot tell. Another value under the same name is another worker: nothing of the old one stays.
    pub instance: String,
    /// How far it is.
    pub phase: Phase,
}

/// How far a worker is in the eyes of its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Is being started, or said itself that it is not ready: no requests yet.
    Starting,
    /// May take requests as soon as its engine answers.
    Serving,
    /// Is about to go: no new requests; those it has are finished.
    Leaving,
}

/// Where one source publishes. Dropping it means that the source knows of no worker any more.
#[derive(Debug)]
pub struct Roster {
    sender: watch::Sender<Vec<Sighting>>,
}

/// Where the manager reads one source.
pub type RosterReader = watch::Receiver<Vec<Sighting>>;

impl Roster {
    /// Creates an empty roster and its reader.
    #[must_use]
    pub fn new() -> (Self, RosterReader) {
        let (sender, reader) = watch::channel(Vec::new());
        (Self { sender }, reader)
    }

    /// Publishes all workers of the source; tells whether anything changed.
    pub fn publish(&self, mut sightings: Vec<Sighting>) -> bool {
        sightings.sort_by(|one, other| one.worker.id.cmp(&other.worker.id));
        self.sender.send_if_modified(|current| {
            let changed = *current != sightings;
            *current = sightings;
            changed
        })
    }

    /// Changes one worker's phase, if it is there.
    pub fn set_phase(&self, id: &WorkerId, phase: Phase) {
        self.sender.send_if_modified(|current| {
            let found = current
                .iter_mut()
                .find(|sighting| sighting.worker.id == *id);
            found.is_some_and(|sighting| std::mem::replace(&mut sighting.phase, phase) != phase)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sighting(id: &str, phase: Phase) -> Sighting {
        Sighting {
            worker: WorkerConfig::new(id, "http://127.0.0.1:8000").unwrap(),
            instance: String::new(),
            phase,
        }
    }

    #[test]
    fn an_equal_list_wakes_nobody_in_whatever_order_it_comes() {
        let (roster, mut reader) = Roster::new();
        let (a, b) = (
            sighting("a", Phase::Serving),
            sighting("b", Phase::Starting),
        );
        assert!(roster.publish(vec![b.clone(), a.clone()]));
        assert_eq!(*reader.borrow_and_update(), [a.clone(), b.clone()]);
        assert!(!roster.publish(vec![a, b]));
        assert!(!reader.has_changed().unwrap());
    }

    #[test]
    fn a_phase_changes_alone() {
        let (roster, mut reader) = Roster::new();
        roster.publish(vec![sighting("a", Phase::Starting)]);
        reader.mark_unchanged();
        roster.set_phase(&WorkerId::new("a").unwrap(), Phase::Serving);
        assert!(reader.has_changed().unwrap());
        assert_eq!(reader.borrow_and_update()[0].phase, Phase::Serving);
        roster.set_phase(&WorkerId::new("a").unwrap(), Phase::Serving);
        roster.set_phase(&WorkerId::new("b").unwrap(), Phase::Serving);
        assert!(!reader.has_changed().unwrap());
    }
}
