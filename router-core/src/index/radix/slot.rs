//! The reverse side of one slot: where each engine key lies, and how often it was announced.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use super::node::{Location, RunId};
use super::pending::Pending;
use super::record::{Packed, Record, Residency, Verdict};
use super::tree::{Span, shrink};
use crate::index::{EngineHash, EngineKey, Tier, TierBlocks};

/// Everything of one slot that is not in the tree.
///
/// Keys come from the slot's own engine, never from a prompt's sender; the maps hash with a seed of their own all the same.
#[derive(Debug, Default)]
pub(super) struct SlotState {
    /// Integer keys of group 0: the compact common case.
    ints: HashMap<u64, Packed>,
    others: HashMap<EngineKey, Packed>,
    /// Records that do not fit 8 bytes, of either map.
    aside: HashMap<EngineKey, Record>,
    /// Further keys, beyond the first, that hold the same unit in the same tier.
    shared: HashMap<Unit, u32>,
    blocks: TierBlocks,
    pub(super) pending: Pending,
}

/// A unit in a tier, whichever keys name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Unit {
    pub(super) at: Location,
    pub(super) tier: Tier,
    pub(super) blocks: u32,
}

/// What one key of a store came to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) at: Location,
    pub(super) verdict: Verdict,
    /// Another key held the unit already.
    pub(super) was_held: bool,
}

impl SlotState {
    pub(super) fn packed(&self, key: &EngineKey) -> Option<Packed> {
        match key {
            EngineKey {
                group: 0,
                hash: EngineHash::Int(hash),
            } => self.ints.get(hash).copied(),
            key => self.others.get(key).copied(),
        }
    }

    pub(super) fn record(&self, key: &EngineKey) -> Option<Record> {
        self.packed(key).map(|packed| self.unpack(key, packed))
    }

    pub(super) fn unpack(&self, key: &EngineKey, packed: Packed) -> Record {
        if packed.is_aside() {
            let aside = self.aside.get(key).copied();
            aside.unwrap_or_else(|| packed.unpack())
        } else {
            packed.unpack()
        }
    }

    pub(super) fn location(&self, key: &EngineKey) -> Option<Location> {
        self.packed(key).map(Packed::at)
    }

    pub(super) const fn blocks(&self) -> TierBlocks {
        self.blocks
    }

    /// Makes room for more keys of the kind of `like`.
    pub(super) fn reserve(&mut self, like: Option<&EngineKey>, keys: usize) {
        match like {
            Some(EngineKey {
                group: 0,
                hash: EngineHash::Int(_),
            }) => self.ints.reserve(keys),
            Some(_) => self.others.reserve(keys),
            None => {}
        }
    }

    /// Stores a record, or forgets the key when nothing holds it.
    pub(super) fn put(&mut self, key: &EngineKey, record: &Record) {
        let packed = Packed::pack(record);
        let old = match (key, record.is_held()) {
            (
                EngineKey {
                    group: 0,
                    hash: EngineHash::Int(hash),
                },
                true,
            ) => self.ints.insert(*hash, packed),
            (
                EngineKey {
                    group: 0,
                    hash: EngineHash::Int(hash),
                },
                false,
            ) => self.ints.remove(hash),
            (key, true) => match self.others.get_mut(key) {
                Some(place) => Some(std::mem::replace(place, packed)),
                None => self.others.insert(key.clone(), packed),
            },
            (key, false) => self.others.remove(key),
        };
        if record.is_held() && packed.is_aside() {
            self.aside.insert(key.clone(), *record);
        } else if old.is_some_and(Packed::is_aside) {
            self.aside.remove(key);
        }
    }

    /// Enters a key that a store names for the first time, telling whether it was unknown: the short form of
    /// [`apply`](Self::apply) for the common case, with one search in the map.
    pub(super) fn enter(&mut self, key: &EngineKey, step: &Step, fresh: (Tier, u32, bool)) -> bool {
        let (tier, blocks, confirmed) = fresh;
        let EngineKey {
            group: 0,
            hash: EngineHash::Int(hash),
        } = key
        else {
            return false;
        };
        let mut record = Record::new(step.at);
        record.tiers[tier.index()] = Residency::one(blocks, confirmed);
        let packed = Packed::pack(&record);
        if packed.is_aside() {
            return false;
        }
        let Entry::Vacant(place) = self.ints.entry(*hash) else {
            return false;
        };
        place.insert(packed);
        let at = step.at;
        self.acquire(Unit { at, tier, blocks }, step.was_held);
        true
    }

    /// Carries out a store of `key` as [`Verdict::of`] judges it now, and returns that verdict; `step` is what the tree
    /// was changed for. They differ only when the same store names one key twice: the second place was then held in vain.
    /// What gives way is added to `released`.
    pub(super) fn apply(
        &mut self,
        key: &EngineKey,
        step: &Step,
        fresh: (Tier, u32, bool),
        released: &mut Vec<Unit>,
    ) -> Verdict {
        let (tier, unit, confirmed) = fresh;
        let known = self.record(key);
        let verdict = Verdict::of(known.as_ref(), step.at, tier, unit, confirmed);
        let mut record = known.unwrap_or_else(|| Record::new(step.at));
        let new = Unit {
            at: step.at,
            tier,
            blocks: unit,
        };
        match verdict {
            Verdict::Place => {}
            Verdict::Move => {
                released.extend(units(&record));
                record = Record::new(step.at);
            }
            Verdict::Replace => released.push(Unit {
                blocks: record.tiers[tier.index()].unit,
                ..new
            }),
            Verdict::Repeat => {
                record.tiers[tier.index()].repeat(confirmed);
                self.put(key, &record);
            }
            Verdict::Ignore | Verdict::Refuse => {}
        }
        if verdict.holds() {
            record.tiers[tier.index()] = Residency::one(unit, confirmed);
            self.put(key, &record);
        }
        if step.verdict.holds() {
            self.acquire(new, step.was_held);
            if !verdict.holds() {
                released.push(new);
            }
        }
        verdict
    }

    /// Adds residency of a key whose place is known; the unit that it holds newly, if any.
    pub(super) fn touch(&mut self, key: &EngineKey, tier: Tier) -> Option<Option<Unit>> {
        let mut record = self.record(key)?;
        let blocks = record.best_unit();
        let residency = &mut record.tiers[tier.index()];
        let new = if residency.is_held() {
            residency.repeat(true);
            None
        } else {
            *residency = Residency::one(blocks, true);
            Some(Unit {
                at: record.at,
                tier,
                blocks,
            })
        };
        self.put(key, &record);
        Some(new)
    }

    /// Counts a key that holds a unit; `was_held` when another one did already.
    pub(super) fn acquire(&mut self, unit: Unit, was_held: bool) {
        if was_held {
            *self.shared.entry(unit).or_default() += 1;
        } else {
            self.blocks.add(unit.tier, unit.blocks as usize);
        }
    }

    /// Takes one count of `key` in `tier`; `None` when it has none. A unit given up is added to `released`.
    pub(super) fn take(
        &mut self,
        key: &EngineKey,
        tier: Tier,
        released: &mut Vec<Unit>,
    ) -> Option<()> {
        let mut record = self.record(key)?;
        let residency = &mut record.tiers[tier.index()];
        residency.count = residency.count.checked_sub(1)?;
        if residency.count == 0 {
            released.push(Unit {
                at: record.at,
                tier,
                blocks: residency.unit,
            });
            *residency = Residency::default();
        }
        self.put(key, &record);
        Some(())
    }

    /// Drops the residencies that `goes` selects, returning how many keys lost one.
    pub(super) fn drop_residency(
        &mut self,
        goes: impl Fn(Tier, Residency) -> bool,
        released: &mut Vec<Unit>,
    ) -> usize {
        let mut changed = Vec::new();
        let ints = self.ints.iter().map(|(&hash, &packed)| {
            let hash = EngineHash::Int(hash);
            (EngineKey { group: 0, hash }, packed)
        });
        let others = self
            .others
            .iter()
            .map(|(key, &packed)| (key.clone(), packed));
        for (key, packed) in ints.chain(others) {
            let mut record = self.unpack(&key, packed);
            let before = released.len();
            for (tier, residency) in record.held().filter(|&(tier, held)| goes(tier, held)) {
                released.push(Unit {
                    at: record.at,
                    tier,
                    blocks: residency.unit,
                });
            }
            for unit in &released[before..] {
                record.tiers[unit.tier.index()] = Residency::default();
            }
            if released.len() > before {
                changed.push((key, record));
            }
        }
        for (key, record) in &changed {
            self.put(key, record);
        }
        changed.len()
    }

    /// Doubts every residency.
    pub(super) fn doubt(&mut self) {
        let aside = &mut self.aside;
        for record in aside.values_mut() {
            for residency in record.tiers.iter_mut().filter(|held| held.is_held()) {
                residency.doubted = true;
            }
        }
        let all = self.ints.values_mut().chain(self.others.values_mut());
        all.for_each(Packed::doubt);
        self.pending.doubt();
    }

    /// Gives up the units of `released` and returns the spans that no key holds any more, sorted so that few are needed.
    pub(super) fn release(&mut self, released: &[Unit]) -> Vec<Span> {
        let mut spans: Vec<Span> = Vec::new();
        for unit in released {
            if let Some(further) = self.shared.get_mut(unit) {
                *further -= 1;
                if *further == 0 {
                    self.shared.remove(unit);
                }
                continue;
            }
            self.blocks.take(unit.tier, unit.blocks as usize);
            let span = Span::one(unit.at, unit.tier, unit.blocks);
            if !spans.last_mut().is_some_and(|last| last.grow(span)) {
                spans.push(span);
            }
        }
        self.shrink();
        spans
    }

    /// Forgets everything, returning the runs that the slot held something of.
    pub(super) fn drain(&mut self) -> Vec<RunId> {
        let old = std::mem::take(self);
        let all = old.ints.values().chain(old.others.values());
        let mut runs: Vec<RunId> = all.map(|packed| packed.at().run).collect();
        runs.sort_unstable();
        runs.dedup();
        runs
    }

    fn shrink(&mut self) {
        shrink(&mut self.ints);
        shrink(&mut self.others);
        shrink(&mut self.aside);
        shrink(&mut self.shared);
    }

    /// Visits every key with its record, for checks.
    pub(super) fn for_each(&self, mut visit: impl FnMut(&EngineKey, &Record)) {
        for (&hash, &packed) in &self.ints {
            let hash = EngineHash::Int(hash);
            let key = EngineKey { group: 0, hash };
            visit(&key, &self.unpack(&key, packed));
        }
        for (key, &packed) in &self.others {
            visit(key, &self.unpack(key, packed));
        }
    }

    pub(super) const fn aside(&self) -> &HashMap<EngineKey, Record> {
        &self.aside
    }

    pub(super) const fn shared(&self) -> &HashMap<Unit, u32> {
        &self.shared
    }
}

/// Returns the units that a record holds.
pub(super) fn units(record: &Record) -> impl Iterator<Item = Unit> {
    let at = record.at;
    record.held().map(move |(tier, residency)| Unit {
        at,
        tier,
        blocks: residency.unit,
    })
}
