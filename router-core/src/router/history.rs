//! The last decisions.

use std::sync::Arc;

use crate::ids::LeaseId;
use crate::sync::{Mutex, Padded};

use super::request::{Decision, DecisionRecord};

/// Decisions kept for explanation, at most and at least.
const MOST: usize = 256;
const LEAST: usize = 8;
/// Slots that all of them may tell of together: 1.2 MB of columns, so that what a decision writes is in a cache still when
/// it is written anew, and memory does not grow with the number of workers.
const SLOTS: usize = 32_768;

/// A ring of the last decisions by number; each place has a lock of its own, so that decisions do not wait for each other.
#[derive(Debug)]
pub(super) struct History {
    places: Box<[Padded<Mutex<Option<DecisionRecord>>>]>,
}

impl Default for History {
    fn default() -> Self {
        Self {
            places: (0..MOST).map(|_| Padded::default()).collect(),
        }
    }
}

impl History {
    /// Adds a decision and returns the one that it replaces. One that comes late stays out.
    pub(super) fn add(&self, record: DecisionRecord) -> Option<DecisionRecord> {
        let kept = kept(record.decision.slots()) as u64;
        let place = usize::try_from(record.lease.0 % kept).unwrap_or(0);
        let mut place = self.places[place].0.lock();
        if place.as_ref().is_some_and(|kept| kept.lease > record.lease) {
            return Some(record);
        }
        place.replace(record)
    }

    /// Returns the decision of one booking if it is among the last.
    pub(super) fn of(&self, lease: LeaseId) -> Option<Arc<Decision>> {
        self.places.iter().find_map(|place| {
            let place = place.0.lock();
            let record = place.as_ref().filter(|record| record.lease == lease)?;
            Some(Arc::clone(&record.decision))
        })
    }

    /// Returns the last decisions, newest first.
    pub(super) fn latest(&self, limit: usize) -> Vec<DecisionRecord> {
        let places = self.places.iter();
        let mut records: Vec<DecisionRecord> =
            places.filter_map(|place| place.0.lock().clone()).collect();
        records.sort_unstable_by_key(|record| std::cmp::Reverse(record.lease));
        records.truncate(limit);
        records
    }

    /// Forgets what there is no room for when a decision tells of `slots` slots.
    pub(super) fn bound(&self, slots: usize) {
        for place in &self.places[kept(slots)..] {
            *place.0.lock() = None;
        }
    }

    /// Returns the memory of a decision that nobody else has.
    pub(super) fn recycle(record: DecisionRecord) -> Option<crate::policy::price::Columns> {
        Some(Arc::into_inner(record.decision)?.into_columns())
    }
}

/// Returns how many decisions over `slots` slots are kept: a power of two, so that a place stays the same decision's as
/// long as the number does.
fn kept(slots: usize) -> usize {
    let room = (SLOTS / slots.max(1)).clamp(LEAST, MOST);
    1 << room.ilog2()
}

#[cfg(test)]
mod tests {
    use super::kept;

    #[test]
    fn more_workers_leave_room_for_fewer_decisions() {
        let slots = [0, 1, 64, 128, 129, 1_024, 1_025, 65_536];
        let expected = [256, 256, 256, 256, 128, 32, 16, 8];
        assert_eq!(slots.map(kept), expected);
    }
}
