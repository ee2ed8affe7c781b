//! What a slot may hold and does hold, over all shards.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Mutex, MutexGuard, STRIPES};

/// Sums of one slot, read without a lock. Each shard's part is written under the shard's lock.
#[derive(Debug)]
pub(super) struct Bound {
    /// The largest number where there is no bound.
    capacity: AtomicUsize,
    blocks: AtomicUsize,
    stamps: AtomicU64,
    evicting: Mutex<()>,
    /// Stamp of the least recently used run in each shard, the largest number where there is none.
    oldest: [AtomicU64; STRIPES],
}

impl Default for Bound {
    fn default() -> Self {
        Self {
            capacity: AtomicUsize::new(usize::MAX),
            blocks: AtomicUsize::new(0),
            stamps: AtomicU64::new(0),
            evicting: Mutex::new(()),
            oldest: std::array::from_fn(|_| AtomicU64::new(u64::MAX)),
        }
    }
}

impl Bound {
    /// Returns a number that rises from placement to placement.
    pub(super) fn next_stamp(&self) -> u64 {
        self.stamps.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity.load(Ordering::Relaxed)
    }

    pub(super) fn set_capacity(&self, capacity_blocks: Option<usize>) {
        let capacity = capacity_blocks.unwrap_or(usize::MAX);
        self.capacity.store(capacity, Ordering::Relaxed);
    }

    pub(super) fn blocks(&self) -> usize {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Returns the blocks over the capacity.
    pub(super) fn excess(&self) -> usize {
        self.blocks().saturating_sub(self.capacity())
    }

    /// Keeps others from evicting for the same excess.
    pub(super) fn evicting(&self) -> MutexGuard<'_, ()> {
        self.evicting.lock()
    }

    /// Returns the shard with the least recently used run.
    pub(super) fn oldest_shard(&self) -> Option<u64> {
        let stamps = self
            .oldest
            .iter()
            .map(|oldest| oldest.load(Ordering::Relaxed));
        let (stamp, shard) = stamps.zip(0..).min()?;
        (stamp != u64::MAX).then_some(shard)
    }

    /// Takes in what a change of a shard, whose lock is held, made of the slot there.
    pub(super) fn note(&self, shard: u64, before: usize, after: usize, oldest: Option<u64>) {
        if before != after {
            let gained = after.wrapping_sub(before);
            self.blocks.fetch_add(gained, Ordering::Relaxed);
        }
        let oldest = oldest.unwrap_or(u64::MAX);
        let place = usize::try_from(shard)
            .ok()
            .and_then(|shard| self.oldest.get(shard));
        if let Some(place) = place.filter(|place| place.load(Ordering::Relaxed) != oldest) {
            place.store(oldest, Ordering::Relaxed);
        }
    }
}
