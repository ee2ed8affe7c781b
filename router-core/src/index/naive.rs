//! The reference model: plain maps, one lock, no cleverness.
//!
//! Every rule of the [contract](super) is written here once in its most direct form; [`RadixIndex`](super::RadixIndex) is
//! tested against it after every event. It is slow and large: use it in tests only.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Instant;

use super::{
    EngineKey, IndexStats, MAX_SLOTS, OrphanLimits, Overlaps, PrefixIndex, RemoveOutcome,
    StoreOutcome, StoredRun, Tier, TierBlocks,
};
use crate::block::{LocalBlockHash, SequenceHash};
use crate::ids::Slot;
use crate::sync::Mutex;

/// Reference model of a [`PrefixIndex`], for tests.
#[derive(Debug)]
pub struct NaiveIndex {
    limits: OrphanLimits,
    slots: Mutex<BTreeMap<Slot, SlotModel>>,
}

impl NaiveIndex {
    /// Creates an empty index whose slots keep pending what `limits` allow.
    #[must_use]
    pub fn new(limits: OrphanLimits) -> Self {
        Self {
            limits,
            slots: Mutex::default(),
        }
    }
}

impl PrefixIndex for NaiveIndex {
    fn store(&self, slot: Slot, run: &StoredRun<'_>, now: Instant) -> StoreOutcome {
        let mut outcome = StoreOutcome::default();
        if slot.index() >= MAX_SLOTS || !run.is_well_formed() {
            outcome.refused = run.keys.len();
            return outcome;
        }
        if run.keys.is_empty() {
            return outcome;
        }
        let mut slots = self.slots.lock();
        let model = slots.entry(slot).or_default();
        model.expire(now, self.limits, &mut outcome);
        let stored = Stored {
            parent: run.parent.cloned(),
            keys: run.keys.to_vec(),
            dead: vec![false; run.keys.len()],
            local_hashes: run.local_hashes.to_vec(),
            unit: run.blocks_per_key,
            tier: run.tier,
            confirmed: true,
            since: now,
        };
        if model.is_placeable(&stored) {
            for applied in model.apply(&stored) {
                match applied {
                    Applied::Placed => outcome.placed += 1,
                    Applied::Repeated | Applied::Ignored => outcome.repeated += 1,
                    Applied::Refused => outcome.refused += 1,
                }
            }
            model.attach(&mut outcome);
        } else {
            model.keep_pending(stored, self.limits, &mut outcome);
        }
        outcome
    }

    fn touch(&self, slot: Slot, keys: &[EngineKey], tier: Tier) -> StoreOutcome {
        let mut outcome = StoreOutcome::default();
        let mut slots = self.slots.lock();
        for key in keys {
            let entry = slots
                .get_mut(&slot)
                .and_then(|model| model.held.get_mut(key));
            let Some(entry) = entry else {
                outcome.refused += 1;
                continue;
            };
            match entry.tiers.get_mut(&tier) {
                Some(held) => {
                    held.add(true);
                    outcome.repeated += 1;
                }
                None => {
                    let unit = entry.tiers.values().next().map_or(1, |best| best.unit);
                    entry.tiers.insert(tier, Held::new(unit, true));
                    outcome.placed += 1;
                }
            }
        }
        outcome
    }

    fn remove(&self, slot: Slot, keys: &[EngineKey], tier: Tier) -> RemoveOutcome {
        let mut outcome = RemoveOutcome::default();
        let mut slots = self.slots.lock();
        for key in keys {
            let model = slots.get_mut(&slot);
            if model.is_some_and(|model| model.remove(key, tier) || model.remove_pending(key, tier))
            {
                outcome.removed += 1;
            } else {
                outcome.unknown += 1;
            }
        }
        outcome
    }

    fn clear(&self, slot: Slot, tiers: &[Tier]) {
        if let Some(model) = self.slots.lock().get_mut(&slot) {
            model.drop_residency(|tier, _| tiers.contains(&tier));
            model.pending.retain(|stored| !tiers.contains(&stored.tier));
        }
    }

    fn demote(&self, slot: Slot) {
        if let Some(model) = self.slots.lock().get_mut(&slot) {
            for held in model
                .held
                .values_mut()
                .flat_map(|entry| entry.tiers.values_mut())
            {
                held.confirmed = false;
            }
            for stored in &mut model.pending {
                stored.confirmed = false;
            }
        }
    }

    fn drop_demoted(&self, slot: Slot) -> usize {
        self.slots.lock().get_mut(&slot).map_or(0, |model| {
            model.pending.retain(|stored| stored.confirmed);
            model.drop_residency(|_, held| !held.confirmed)
        })
    }

    fn overlap(&self, local_hashes: &[LocalBlockHash], overlaps: &mut Overlaps) {
        let query = SequenceHash::chain(local_hashes);
        let slots = self.slots.lock();
        overlaps.reset(slots.keys().last().map_or(0, |slot| slot.index() + 1));
        for (&slot, model) in slots.iter() {
            for tier in model.best_tiers(&query).into_iter().map_while(|tier| tier) {
                overlaps.at(slot).add(tier, 1);
            }
        }
    }

    fn slot_blocks(&self, slot: Slot) -> TierBlocks {
        let slots = self.slots.lock();
        let mut units = HashSet::new();
        for entry in slots
            .get(&slot)
            .iter()
            .flat_map(|model| model.held.values())
        {
            for (&tier, held) in &entry.tiers {
                units.insert((tier, entry.end(), held.unit));
            }
        }
        let mut blocks = TierBlocks::default();
        for (tier, _, unit) in units {
            blocks.add(tier, unit);
        }
        blocks
    }

    fn stats(&self) -> IndexStats {
        let slots = self.slots.lock();
        let positions: HashSet<SequenceHash> = slots
            .values()
            .flat_map(|model| model.held.values())
            .flat_map(|entry| entry.path.iter().copied())
            .collect();
        IndexStats {
            blocks: positions.len(),
            nodes: positions.len(),
            orphans: slots
                .values()
                .flat_map(|model| &model.pending)
                .map(|stored| stored.keys.len())
                .sum(),
            bytes: 0,
        }
    }
}

/// Everything of one slot.
#[derive(Debug, Default)]
struct SlotModel {
    held: HashMap<EngineKey, Entry>,
    /// Oldest first.
    pending: Vec<Stored>,
}

/// One key that is held in at least one tier.
#[derive(Debug)]
struct Entry {
    /// Sequence hashes from the root to the last block of the unit.
    path: Vec<SequenceHash>,
    /// Best tier first.
    tiers: BTreeMap<Tier, Held>,
}

/// Residency of one key in one tier.
#[derive(Debug)]
struct Held {
    unit: usize,
    count: u32,
    confirmed: bool,
}

/// A store as it was announced.
#[derive(Clone, Debug)]
struct Stored {
    parent: Option<EngineKey>,
    keys: Vec<EngineKey>,
    /// Keys that were removed while pending.
    dead: Vec<bool>,
    local_hashes: Vec<LocalBlockHash>,
    unit: usize,
    tier: Tier,
    confirmed: bool,
    since: Instant,
}

/// What became of one key of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Applied {
    Placed,
    Repeated,
    /// Announced before a loss of events and confirmed since: nothing to add.
    Ignored,
    Refused,
}

impl Entry {
    fn end(&self) -> SequenceHash {
        *self.path.last().expect("a unit has at least one block")
    }
}

impl Held {
    const fn new(unit: usize, confirmed: bool) -> Self {
        Self {
            unit,
            count: 1,
            confirmed,
        }
    }

    fn add(&mut self, confirmed: bool) -> Applied {
        match (self.confirmed, confirmed) {
            (true, false) => return Applied::Ignored,
            (false, true) => *self = Self::new(self.unit, true),
            (true, true) | (false, false) => self.count = self.count.saturating_add(1),
        }
        Applied::Repeated
    }
}

impl SlotModel {
    fn is_placeable(&self, stored: &Stored) -> bool {
        stored
            .parent
            .as_ref()
            .is_none_or(|parent| self.held.contains_key(parent))
    }

    /// Applies a store whose parent is known, key by key.
    fn apply(&mut self, stored: &Stored) -> Vec<Applied> {
        let mut path = match &stored.parent {
            None => Vec::new(),
            Some(parent) => self.held[parent].path.clone(),
        };
        let blocks = stored.local_hashes.chunks(stored.unit);
        let mut applied = Vec::new();
        for (key, blocks) in stored.keys.iter().zip(blocks) {
            for &local in blocks {
                let before = path.last().copied().unwrap_or(SequenceHash::EMPTY);
                path.push(before.child(local, path.len()));
            }
            applied.push(self.apply_key(key, &path, stored));
        }
        applied
    }

    fn apply_key(&mut self, key: &EngineKey, path: &[SequenceHash], stored: &Stored) -> Applied {
        if let Some(entry) = self.held.get(key)
            && entry.path != path
        {
            let guessed = entry.tiers.values().all(|held| !held.confirmed);
            if !guessed || !stored.confirmed {
                return Applied::Refused;
            }
            self.held.remove(key);
        }
        let entry = self.held.entry(key.clone()).or_insert_with(|| Entry {
            path: path.to_vec(),
            tiers: BTreeMap::new(),
        });
        let fresh = Held::new(stored.unit, stored.confirmed);
        match entry.tiers.get_mut(&stored.tier) {
            None => {
                entry.tiers.insert(stored.tier, fresh);
                Applied::Placed
            }
            Some(held) if held.unit == stored.unit => held.add(stored.confirmed),
            Some(held) if !held.confirmed && stored.confirmed => {
                *held = fresh;
                Applied::Repeated
            }
            Some(_) => Applied::Refused,
        }
    }

    /// Attaches pending runs whose parent is known, oldest first, until none is left; then takes back what was removed
    /// while it was pending.
    fn attach(&mut self, outcome: &mut StoreOutcome) {
        let mut taken_back = Vec::new();
        while let Some(oldest) = self
            .pending
            .iter()
            .position(|stored| self.is_placeable(stored))
        {
            let stored = self.pending.remove(oldest);
            let applied = self.apply(&stored);
            for ((key, dead), applied) in stored.keys.iter().zip(&stored.dead).zip(applied) {
                match applied {
                    Applied::Refused => outcome.refused += 1,
                    Applied::Ignored => outcome.attached += 1,
                    Applied::Placed | Applied::Repeated if *dead => {
                        taken_back.push((key.clone(), stored.tier));
                    }
                    Applied::Placed | Applied::Repeated => outcome.attached += 1,
                }
            }
        }
        for (key, tier) in taken_back {
            self.remove(&key, tier);
        }
    }

    fn keep_pending(&mut self, stored: Stored, limits: OrphanLimits, outcome: &mut StoreOutcome) {
        let keys = stored.keys.len();
        if keys > limits.max_keys {
            outcome.dropped += keys;
            return;
        }
        self.pending.push(stored);
        outcome.orphaned = keys;
        while self.pending.iter().map(|run| run.keys.len()).sum::<usize>() > limits.max_keys {
            outcome.dropped += self.pending.remove(0).keys.len();
        }
    }

    fn expire(&mut self, now: Instant, limits: OrphanLimits, outcome: &mut StoreOutcome) {
        while let Some(oldest) = self.pending.first()
            && now.saturating_duration_since(oldest.since) > limits.max_age
        {
            outcome.dropped += self.pending.remove(0).keys.len();
        }
    }

    fn remove(&mut self, key: &EngineKey, tier: Tier) -> bool {
        let Some(entry) = self.held.get_mut(key) else {
            return false;
        };
        let Some(held) = entry.tiers.get_mut(&tier) else {
            return false;
        };
        held.count -= 1;
        if held.count == 0 {
            entry.tiers.remove(&tier);
        }
        if entry.tiers.is_empty() {
            self.held.remove(key);
        }
        true
    }

    /// Marks the oldest pending announcement of `key` as dead.
    fn remove_pending(&mut self, key: &EngineKey, tier: Tier) -> bool {
        for stored in self.pending.iter_mut().filter(|run| run.tier == tier) {
            for (pending, dead) in stored.keys.iter().zip(&mut stored.dead) {
                if pending == key && !*dead {
                    *dead = true;
                    return true;
                }
            }
        }
        false
    }

    /// Drops the residencies that `goes` selects, returning how many keys lost one.
    fn drop_residency(&mut self, goes: impl Fn(Tier, &Held) -> bool) -> usize {
        let mut keys = 0;
        self.held.retain(|_, entry| {
            let before = entry.tiers.len();
            entry.tiers.retain(|&tier, held| !goes(tier, held));
            keys += usize::from(entry.tiers.len() < before);
            !entry.tiers.is_empty()
        });
        keys
    }

    /// Returns for each block of the query the best tier of a unit that covers it and lies on the query whole.
    fn best_tiers(&self, query: &[SequenceHash]) -> Vec<Option<Tier>> {
        let mut best: Vec<Option<Tier>> = vec![None; query.len()];
        for entry in self.held.values() {
            let end = entry.path.len();
            if end > query.len() || query[end - 1] != entry.end() {
                continue;
            }
            for (&tier, held) in &entry.tiers {
                for block in &mut best[end - held.unit..end] {
                    *block = Some(block.map_or(tier, |known| known.min(tier)));
                }
            }
        }
        best
    }
}
