//! The registered workers, as every call reads them and hardly any changes them.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::{Slot, WorkerId, WorkerRank};

use super::state::{Inner, Target, Worker};

/// Registered workers and the targets of their slots.
#[derive(Debug, Default)]
pub(super) struct Workers {
    pub(super) by_id: BTreeMap<WorkerId, Arc<Worker>>,
    pub(super) by_slot: Vec<Option<Arc<Target>>>,
}

/// One stripe's view of the workers.
#[derive(Debug, Default)]
pub(super) struct View {
    workers: Arc<Workers>,
    /// What decisions made under this stripe keep.
    pub(super) names: Arc<Names>,
}

/// Who has which slot. Each stripe has its own, so that decisions on different threads do not count references on one
/// cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Names(Arc<[Option<WorkerRank>]>);

/// What only joining and leaving change.
#[derive(Debug, Default)]
pub(super) struct Registry {
    /// Slots that were given out so far; some of them are free again.
    pub(super) slots: u32,
    pub(super) lives: u64,
    workers: Arc<Workers>,
}

impl Workers {
    pub(super) fn worker(&self, id: &str) -> Result<&Arc<Worker>> {
        self.by_id.get(id).ok_or_else(|| Error::unknown_worker(id))
    }

    pub(super) fn target(&self, id: &str, dp_rank: u32) -> Result<&Arc<Target>> {
        let worker = self.worker(id)?;
        worker.targets.get(dp_rank as usize).ok_or_else(|| {
            Error::invalid(format!(
                "dp_rank {dp_rank} of worker {id:?} is out of range: 0 to {} are accepted",
                worker.targets.len() - 1
            ))
        })
    }

    pub(super) fn targets(&self) -> impl Iterator<Item = &Arc<Target>> {
        self.by_id.values().flat_map(|worker| worker.targets.iter())
    }

    pub(super) fn at(&self, slot: Slot) -> Option<&Arc<Target>> {
        self.by_slot.get(slot.index())?.as_ref()
    }

    fn from(by_id: BTreeMap<WorkerId, Arc<Worker>>) -> Self {
        let targets = || by_id.values().flat_map(|worker| worker.targets.iter());
        let slots = targets().map(|target| target.slot.index() + 1).max();
        let mut by_slot = vec![None; slots.unwrap_or(0)];
        for target in targets() {
            by_slot[target.slot.index()] = Some(Arc::clone(target));
        }
        Self { by_id, by_slot }
    }
}

impl Deref for View {
    type Target = Workers;

    fn deref(&self) -> &Workers {
        &self.workers
    }
}

impl Names {
    pub(super) fn of(&self, slot: Slot) -> Option<&WorkerRank> {
        self.0.get(slot.index())?.as_ref()
    }
}

impl Registry {
    pub(super) fn workers(&self) -> &Workers {
        &self.workers
    }
}

impl Inner {
    pub(super) fn take_slot(&self, registry: &mut Registry) -> Slot {
        self.free_slots.lock().pop().unwrap_or_else(|| {
            registry.slots += 1;
            Slot(registry.slots - 1)
        })
    }

    /// Puts a slot back when nothing of its last life is left.
    pub(super) fn free_slot(&self, slot: Slot) {
        self.free_slots.lock().push(slot);
    }

    /// Changes the registered workers. When this returns, no call that began before is still reading the former ones.
    pub(super) fn change_workers(
        &self,
        registry: &mut Registry,
        change: impl FnOnce(&mut BTreeMap<WorkerId, Arc<Worker>>),
    ) {
        let mut by_id = registry.workers.by_id.clone();
        change(&mut by_id);
        registry.workers = Arc::new(Workers::from(by_id));
        let targets = registry.workers.by_slot.iter();
        let names: Arc<[_]> = targets
            .map(|target| target.as_ref().map(|target| target.id.clone()))
            .collect();
        self.history.bound(registry.workers.by_slot.len());
        self.workers.replace(|| View {
            workers: Arc::clone(&registry.workers),
            names: Arc::new(Names(Arc::clone(&names))),
        });
    }
}
