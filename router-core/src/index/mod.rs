//! The prefix index: which leading blocks of a prompt does each target hold, and in which tier.
//!
//! # Contract
//! A *slot* is one life of one (worker, dp rank). An engine names its blocks by opaque [`EngineKey`]s that mean something
//! inside one slot only; the index finds the place of a block by its parent's key and stores it under the path of
//! [`LocalBlockHash`]es from the root. A key covers one *unit* of one or more consecutive index blocks (an engine block that is
//! a multiple of the index block size); a unit is credited whole or not at all.
//!
//! * **Credit** is the unbroken run of held blocks from the root, each block counted once, at its best tier
//!   (device, host, external, disk order is fixed by [`Tier::ALL`], best first).
//! * **Counts**: residency is counted per (slot, tier, key): a block stored twice is gone after two removals. A store of a
//!   key at another place than before is refused, as is a removal of a key that is not held (both are reported, not errors).
//!   A key whose counts are 0 in every tier is forgotten: a child that names it as parent later is an orphan. The unit is
//!   remembered per tier, since offloading engines name a coarse host block by the key of its last device block; another
//!   unit in the same tier is refused. Keys of different groups may share a place, which is held while any of them is.
//! * **Holes**: removing a block keeps its resident descendants; storing it again restores the whole run.
//! * **Orphans**: a store whose parent key is unknown in its slot is kept pending (bounded in blocks and age), is never
//!   credited, takes removals of its keys, and is attached, oldest first and recursively, when its parent is stored.
//!   Removals that came meanwhile take effect after everything that can attach has attached. An orphan run of more keys
//!   than the bound is dropped alone.
//! * **Doubt**: after [`demote`](PrefixIndex::demote) entries are guesses. A store of the key replaces the guess, at its old
//!   place or another; a pending run from before the doubt never raises the count of what was confirmed since.
//! * **Consistency**: a lookup that races a writer may miss a block that is being stored and never credits a slot with a
//!   block that no store put there. Writers of different slots may run at the same time.

mod naive;
mod radix;
#[cfg(test)]
mod tests;
pub mod ttl;

pub use naive::NaiveIndex;
pub use radix::RadixIndex;
pub use ttl::{Placement, TtlIndex, TtlStats};

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::block::LocalBlockHash;
use crate::ids::Slot;

/// Where a block lies on its worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// Accelerator memory: usable at once.
    #[default]
    Device,
    /// Memory of the worker's host.
    Host,
    /// Storage that other workers reach too.
    External,
    /// Local disk or a tier that the router does not know.
    Disk,
}

/// Slots that an index accepts: a store for a slot at or above this number is refused.
pub const MAX_SLOTS: usize = 1 << 16;

impl Tier {
    /// Every tier, best first.
    pub const ALL: [Self; 4] = [Self::Device, Self::Host, Self::External, Self::Disk];

    /// Returns the tier's position in [`ALL`](Self::ALL).
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// An engine's own identifier of a block: opaque, local to one slot, never compared with our hashes.
///
/// Integers are normalised to 64 bits by two's complement; byte strings are a separate space.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EngineHash {
    /// A 64-bit integer.
    Int(u64),
    /// A byte string (32 or 16 bytes in practice).
    Bytes(Box<[u8]>),
}

/// An engine hash within its cache group (0 for models with one group).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineKey {
    /// Cache group index of hybrid models.
    pub group: u32,
    /// The engine's identifier.
    pub hash: EngineHash,
}

/// A run of units stored by one event, each the parent of the next.
#[derive(Clone, Copy, Debug)]
pub struct StoredRun<'a> {
    /// Key of the unit before the first one; `None` when the run begins a prompt.
    pub parent: Option<&'a EngineKey>,
    /// Keys of the units, first to last.
    pub keys: &'a [EngineKey],
    /// Local hashes of all index blocks; `keys.len() * blocks_per_key` of them.
    pub local_hashes: &'a [LocalBlockHash],
    /// Index blocks that each key covers; at least 1.
    pub blocks_per_key: usize,
    /// Tier that the run was stored in.
    pub tier: Tier,
}

impl StoredRun<'_> {
    /// Tells whether the keys and the hashes fit together and the first key is not its own parent.
    #[must_use]
    pub fn is_well_formed(&self) -> bool {
        u32::try_from(self.blocks_per_key).is_ok_and(|unit| unit > 0)
            && self.keys.len().checked_mul(self.blocks_per_key) == Some(self.local_hashes.len())
            && (self.parent.is_none() || self.parent != self.keys.first())
    }
}

/// What a store did, in keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreOutcome {
    /// Keys placed for the first time in this tier.
    pub placed: usize,
    /// Keys that were held in this tier already; their count rose.
    pub repeated: usize,
    /// Keys kept pending because the parent is unknown.
    pub orphaned: usize,
    /// Pending keys that this store attached, without those removed while pending.
    pub attached: usize,
    /// Keys refused: the key is held at another place or with another unit, or the whole run is, because its first key
    /// equals its parent, its hashes are not a whole unit for each key, or the slot is out of range.
    pub refused: usize,
    /// Keys dropped because the orphan bound was reached (oldest first).
    pub dropped: usize,
}

/// What a removal did, in keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoveOutcome {
    /// Keys whose count in the tier fell (gone from the tier when it reached 0), or whose pending announcement died.
    pub removed: usize,
    /// Keys that were not held in the tier.
    pub unknown: usize,
}

/// Leading blocks of one prompt that one target holds, each counted once at its best tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Overlap {
    /// Blocks in accelerator memory.
    pub device: u32,
    /// Blocks in host memory only.
    pub host: u32,
    /// Blocks on local disk only.
    pub disk: u32,
    /// Blocks in shared storage only.
    pub external: u32,
}

impl Overlap {
    /// Returns the number of leading blocks held in any tier.
    #[must_use]
    pub const fn blocks(&self) -> u32 {
        self.device + self.host + self.disk + self.external
    }

    /// Adds `blocks` to the count of `tier`.
    pub const fn add(&mut self, tier: Tier, blocks: u32) {
        match tier {
            Tier::Device => self.device += blocks,
            Tier::Host => self.host += blocks,
            Tier::External => self.external += blocks,
            Tier::Disk => self.disk += blocks,
        }
    }
}

/// Overlap of one prompt with every slot, dense by slot index; reuse it across lookups to avoid allocation.
#[derive(Clone, Debug, Default)]
pub struct Overlaps {
    /// Leading blocks of each slot, all on the device, when `by_slot` is empty.
    device: Vec<u32>,
    /// The whole answer, once a lower tier takes part.
    by_slot: Vec<Overlap>,
    scratch: radix::Scratch,
}

impl Overlaps {
    /// Creates an empty answer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the overlap of `slot`, zero when it holds nothing.
    #[must_use]
    pub fn get(&self, slot: Slot) -> Overlap {
        if self.by_slot.is_empty() {
            Overlap {
                device: self.device.get(slot.index()).copied().unwrap_or(0),
                ..Overlap::default()
            }
        } else {
            self.by_slot.get(slot.index()).copied().unwrap_or_default()
        }
    }

    /// Returns the leading blocks of each slot when all of them are on the device.
    #[must_use]
    pub fn device(&self) -> Option<&[u32]> {
        self.by_slot.is_empty().then_some(&self.device)
    }

    /// Returns how many slots the answer covers; those beyond hold nothing.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.device.len()
    }

    /// Zeroes the answer and makes room for `slots` slots.
    pub fn reset(&mut self, slots: usize) {
        self.device.clear();
        self.device.resize(slots, 0);
        self.by_slot.clear();
    }

    /// Returns the overlap of `slot` for writing.
    ///
    /// # Panics
    /// When `slot` is beyond the size given to [`reset`](Self::reset).
    pub fn at(&mut self, slot: Slot) -> &mut Overlap {
        if self.by_slot.is_empty() {
            let device = self.device.iter();
            self.by_slot.extend(device.map(|&device| Overlap {
                device,
                ..Overlap::default()
            }));
        }
        &mut self.by_slot[slot.index()]
    }
}

/// Blocks held by one slot, by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TierBlocks {
    /// In accelerator memory.
    pub device: usize,
    /// In host memory.
    pub host: usize,
    /// On local disk.
    pub disk: usize,
    /// In shared storage.
    pub external: usize,
}

impl TierBlocks {
    /// Returns the count of `tier`.
    #[must_use]
    pub const fn of(&self, tier: Tier) -> usize {
        match tier {
            Tier::Device => self.device,
            Tier::Host => self.host,
            Tier::External => self.external,
            Tier::Disk => self.disk,
        }
    }

    /// Adds `blocks` to the count of `tier`.
    pub const fn add(&mut self, tier: Tier, blocks: usize) {
        match tier {
            Tier::Device => self.device += blocks,
            Tier::Host => self.host += blocks,
            Tier::External => self.external += blocks,
            Tier::Disk => self.disk += blocks,
        }
    }

    /// Takes `blocks` from the count of `tier`, down to 0 at most.
    pub const fn take(&mut self, tier: Tier, blocks: usize) {
        let count = match tier {
            Tier::Device => &mut self.device,
            Tier::Host => &mut self.host,
            Tier::External => &mut self.external,
            Tier::Disk => &mut self.disk,
        };
        *count = count.saturating_sub(blocks);
    }
}

/// Size of an index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IndexStats {
    /// Distinct blocks (tree positions) on the path of anything held, whoever holds it.
    pub blocks: usize,
    /// Nodes of the tree.
    pub nodes: usize,
    /// Pending keys whose parent is unknown, over all slots, those removed meanwhile included.
    pub orphans: usize,
    /// Memory in bytes: exact for blocks and for integer keys, estimated for what is rare. 0 where it is not known.
    pub bytes: usize,
}

impl IndexStats {
    /// Tells whether nothing is held or pending; some memory may be left.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.blocks == 0 && self.nodes == 0 && self.orphans == 0
    }
}

/// Bounds of what a slot may keep pending.
#[derive(Clone, Copy, Debug)]
pub struct OrphanLimits {
    /// Pending keys of one slot; 0 keeps none.
    pub max_keys: usize,
    /// Age after which a pending run is dropped.
    pub max_age: Duration,
}

/// An index of resident blocks over slots. See the [module](self) for the contract.
pub trait PrefixIndex: Send + Sync + std::fmt::Debug {
    /// Applies a store. `now` dates pending runs.
    fn store(&self, slot: Slot, run: &StoredRun<'_>, now: Instant) -> StoreOutcome;

    /// Adds residency in `tier` for keys whose place is already known (an event that carries no tokens).
    /// Keys without a known place count as [`StoreOutcome::refused`]. In a new tier the key keeps the unit of its best tier.
    fn touch(&self, slot: Slot, keys: &[EngineKey], tier: Tier) -> StoreOutcome;

    /// Takes one count in `tier` from each key.
    fn remove(&self, slot: Slot, keys: &[EngineKey], tier: Tier) -> RemoveOutcome;

    /// Drops everything of `slot` in the given tiers, pending runs too.
    fn clear(&self, slot: Slot, tiers: &[Tier]);

    /// Marks all present entries of `slot` (pending runs too) as unconfirmed: they stay credited, and a later store of a
    /// key confirms it afresh with a count of one.
    fn demote(&self, slot: Slot);

    /// Drops the entries of `slot` that are still unconfirmed (pending runs too), returning how many resident keys lost
    /// their place in a tier.
    fn drop_demoted(&self, slot: Slot) -> usize;

    /// Looks up a prompt for every slot at once.
    fn overlap(&self, local_hashes: &[LocalBlockHash], overlaps: &mut Overlaps);

    /// Notes how many keys the engine of `slot` can hold (0: unknown), so that tables can be given their size at once.
    fn expect_keys(&self, slot: Slot, keys: usize) {
        let _ = (slot, keys);
    }

    /// Returns the blocks that `slot` holds, by tier: a place counts once, whichever keys name it, with all its unit.
    fn slot_blocks(&self, slot: Slot) -> TierBlocks;

    /// Returns the size of the index.
    fn stats(&self) -> IndexStats;
}
