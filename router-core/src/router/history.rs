//! The last decisions.

use std::sync::Arc;

use crate::sync::{Mutex, Padded};

use super::request::DecisionRecord;

/// Decisions kept for explanation.
const KEPT: usize = 256;

/// A ring of the last decisions by number; each place has a lock of its own, so that decisions do not wait for each other.
#[derive(Debug)]
pub(super) struct History {
    places: Box<[Padded<Mutex<Option<DecisionRecord>>>]>,
}

impl Default for History {
    fn default() -> Self {
        Self {
            places: (0..KEPT).map(|_| Padded::default()).collect(),
        }
    }
}

impl History {
    /// Adds a decision and returns the one that it replaces. One that comes late stays out.
    pub(super) fn add(&self, record: DecisionRecord) -> Option<DecisionRecord> {
        let place = record.lease.0 % self.places.len() as u64;
        let mut place = self.places[usize::try_from(place).unwrap_or(0)].0.lock();
        if place.as_ref().is_some_and(|kept| kept.lease > record.lease) {
            return Some(record);
        }
        place.replace(record)
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

    /// Returns the memory of a decision that nobody else has.
    pub(super) fn recycle(record: DecisionRecord) -> Option<crate::policy::price::Columns> {
        Some(Arc::into_inner(record.decision)?.into_columns())
    }
}
