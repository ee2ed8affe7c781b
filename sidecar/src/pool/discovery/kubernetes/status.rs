//! Where a source publishes, and what it says of itself.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;

use super::assemble::Listing;
use crate::pool::roster::Roster;
use crate::sparing::warn_sparingly;

/// What a source says of itself. Clones are one status.
#[derive(Clone, Debug, Default)]
pub struct Status(Arc<Mutex<Snapshot>>);

/// A source's status at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// A list has been complete.
    pub synced: bool,
    /// Workers that the source lists.
    pub workers: usize,
    /// Objects that have no address yet.
    pub waiting: usize,
    /// What is wrong with single objects: why they are skipped, or what of them is not believed.
    pub problems: BTreeMap<String, String>,
    /// Why the API server cannot be asked, by kind of object; the last list stays.
    pub last_error: BTreeMap<String, String>,
    /// Lists that were begun.
    pub lists: u64,
    /// Requests and watches that failed.
    pub failures: u64,
}

impl Status {
    /// Returns the status as it is now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.0.lock().clone()
    }
}

impl Snapshot {
    /// Returns the errors in one line.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        let texts: Vec<&str> = self.last_error.values().map(String::as_str).collect();
        (!texts.is_empty()).then(|| texts.join("; "))
    }
}

/// Is told of a source's status whenever its errors or problems change.
pub type OnChange = Box<dyn Fn(&Snapshot) + Send + Sync>;

/// Where a source publishes.
pub struct Outlet {
    roster: Roster,
    status: Status,
    on_change: OnChange,
}

impl Outlet {
    /// Publishes to `roster`; `on_change` is told when errors or problems change.
    #[must_use]
    pub fn new(roster: Roster, on_change: OnChange) -> Self {
        Self {
            roster,
            status: Status::default(),
            on_change,
        }
    }

    /// Returns what the source says of itself.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status.clone()
    }

    /// Publishes a whole list.
    pub(super) fn publish(&self, listing: Listing) {
        self.change(|status| {
            for (object, problem) in &listing.problems {
                if status.problems.get(object) != Some(problem) {
                    warn_sparingly!(object, problem, "an object of the cluster is not all right");
                }
            }
            status.synced = true;
            status.workers = listing.workers.len();
            status.waiting = listing.waiting;
            status.problems = listing.problems;
        });
        self.roster.publish(listing.workers);
    }

    /// Says why objects of one kind cannot be asked for.
    pub(super) fn failed(&self, kind: &str, problem: &impl fmt::Display) {
        self.status.0.lock().failures += 1;
        self.wrong(kind, problem.to_string());
    }

    /// Says why there can be no workers, though the API server answers.
    pub(super) fn wrong(&self, kind: &str, problem: String) {
        self.change(|status| {
            status.last_error.insert(kind.to_owned(), problem);
        });
    }

    /// Says that objects of one kind can be asked for.
    pub(super) fn succeeded(&self, kind: &str) {
        self.change(|status| {
            status.last_error.remove(kind);
        });
    }

    pub(super) fn listing(&self) {
        self.status.0.lock().lists += 1;
    }

    fn change(&self, change: impl FnOnce(&mut Snapshot)) {
        let after = {
            let mut status = self.status.0.lock();
            let before = status.clone();
            change(&mut status);
            let is_same =
                before.last_error == status.last_error && before.problems == status.problems;
            (!is_same).then(|| status.clone())
        };
        if let Some(after) = after {
            (self.on_change)(&after);
        }
    }
}

impl fmt::Debug for Outlet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outlet")
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}
