//! From what each object says to one list of workers: no name twice, no address twice.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use kvlane::WorkerId;

use super::reflect::{Key, Seen};
use super::rules::{Found, Reading};
use crate::pool::roster::{Phase, Sighting};

/// What a source has to say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Listing {
    /// Its workers.
    pub(super) workers: Vec<Sighting>,
    /// What is wrong, by object.
    pub(super) problems: BTreeMap<String, String>,
    /// Objects that have no address yet.
    pub(super) waiting: usize,
}

#[derive(Clone, Copy)]
struct Candidate<'a> {
    found: &'a Found,
    version: Option<u128>,
}

impl Candidate<'_> {
    /// Orders two that tell of one name: a dual-stack worker keeps one of its addresses, and of two slices between which an
    /// endpoint moves the newer is right.
    fn precedence(&self) -> impl Ord {
        (self.found.is_ipv4, self.version, self.liveliness())
    }

    /// Orders two at one address: it was given to the younger after the older had left it.
    fn claim(&self) -> impl Ord {
        (self.liveliness(), self.found.created, self.version)
    }

    fn liveliness(&self) -> u8 {
        match self.found.sighting.phase {
            Phase::Leaving => 0,
            Phase::Starting => 1,
            Phase::Serving => 2,
        }
    }
}

/// Puts together what all objects say.
pub(super) fn assemble(objects: &BTreeMap<Key, Seen<Reading>>) -> Listing {
    let mut listing = Listing::default();
    let mut by_id: BTreeMap<&WorkerId, Candidate<'_>> = BTreeMap::new();
    for (key, object) in objects {
        let reading = &object.value;
        listing.waiting += usize::from(reading.is_waiting);
        if !reading.problems.is_empty() {
            let text = reading.problems.join("; ");
            listing.problems.insert(key.to_string(), text);
        }
        for found in &reading.workers {
            let candidate = Candidate {
                found,
                version: object.version.number(),
            };
            match by_id.entry(&found.sighting.worker.id) {
                Entry::Vacant(entry) => {
                    entry.insert(candidate);
                }
                Entry::Occupied(mut entry) => {
                    if entry.get().precedence() < candidate.precedence() {
                        entry.insert(candidate);
                    }
                }
            }
        }
    }
    listing.workers = one_each_address(by_id, &mut listing.problems);
    listing
}

fn one_each_address(
    by_id: BTreeMap<&WorkerId, Candidate<'_>>,
    problems: &mut BTreeMap<String, String>,
) -> Vec<Sighting> {
    let mut by_address: BTreeMap<String, (&WorkerId, Candidate<'_>)> = BTreeMap::new();
    for (id, candidate) in by_id {
        let address = candidate.found.sighting.worker.url.to_string();
        let next = (id, candidate);
        match by_address.entry(address) {
            Entry::Vacant(entry) => {
                entry.insert(next);
            }
            Entry::Occupied(mut entry) => {
                let last = *entry.get();
                let (winner, loser) = if last.1.claim() < candidate.claim() {
                    (next, last)
                } else {
                    (last, next)
                };
                let text = format!("skipped: {} is {}'s now", entry.key(), winner.0);
                problems.insert(loser.0.to_string(), text);
                entry.insert(winner);
            }
        }
    }
    let workers = by_address.into_values();
    workers
        .map(|(_, candidate)| candidate.found.sighting.clone())
        .collect()
}
