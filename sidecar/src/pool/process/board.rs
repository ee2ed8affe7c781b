//! The roster of local engines.

use std::collections::BTreeMap;

use kvlane::WorkerId;
use parking_lot::Mutex;

use crate::config::WorkerConfig;
use crate::pool::roster::{Phase, Roster, Sighting};

/// The engines that run, published whole whenever one changes.
#[derive(Debug)]
pub(super) struct Board {
    roster: Roster,
    sightings: Mutex<BTreeMap<WorkerId, Sighting>>,
}

impl Board {
    pub(super) const fn new(roster: Roster) -> Self {
        Self {
            roster,
            sightings: Mutex::new(BTreeMap::new()),
        }
    }

    /// Adds an engine, in place of its earlier life.
    pub(super) fn put(&self, worker: WorkerConfig, instance: String, phase: Phase) {
        let sighting = Sighting {
            worker,
            instance,
            phase,
        };
        self.change(|all| {
            all.insert(sighting.worker.id.clone(), sighting);
        });
    }

    /// Takes an engine away.
    pub(super) fn remove(&self, id: &WorkerId) {
        self.change(|all| {
            all.remove(id);
        });
    }

    /// Changes one engine's phase.
    pub(super) fn set_phase(&self, id: &WorkerId, phase: Phase) {
        self.change(|all| {
            if let Some(sighting) = all.get_mut(id) {
                sighting.phase = phase;
            }
        });
    }

    /// Says that all are about to go.
    pub(super) fn leave(&self) {
        self.change(|all| {
            for sighting in all.values_mut() {
                sighting.phase = Phase::Leaving;
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<WorkerId, Sighting>)) {
        // Published under the lock, or an older list could come after a newer one.
        let mut sightings = self.sightings.lock();
        change(&mut sightings);
        self.roster.publish(sightings.values().cloned().collect());
    }
}
