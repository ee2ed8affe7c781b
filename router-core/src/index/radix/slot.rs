//! The reverse side of one slot: where each engine key lies, and how often it was announced.

use hashbrown::HashMap;

use super::chunks::{ChunkId, Place};
use super::pending::Pending;
use super::record::{Code, Record, Residency, Verdict};
use super::table::{Found, KeyHash, KeyTable, Passed};
use super::tree::shrink;
use crate::index::{EngineHash, EngineKey, Tier, TierBlocks};

/// Everything of one slot that is not in the tree.
///
/// Keys come from the slot's own engine, never from a prompt's sender; the maps hash with a seed of their own all the same.
#[derive(Debug, Default)]
pub(super) struct SlotState {
    /// Integer keys of group 0: the compact common case.
    ints: KeyTable,
    others: HashMap<EngineKey, Known>,
    /// Records that have no code, of either map.
    aside: HashMap<EngineKey, Record>,
    /// Further keys, beyond the first, that hold the same unit in the same tier.
    shared: HashMap<Unit, u32>,
    blocks: TierBlocks,
    pub(super) pending: Pending,
    spare_steps: Vec<Step>,
}

/// What a map says of a key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) place: Place,
    pub(super) code: Code,
}

impl Known {
    const fn of(found: Found) -> Self {
        Self {
            place: found.place,
            code: found.code,
        }
    }
}

/// A unit in a tier, whichever keys name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Unit {
    pub(super) at: Place,
    pub(super) tier: Tier,
    pub(super) blocks: u32,
}

/// One key of a store on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    hash: KeyHash,
    /// One line did not tell what is known of the key.
    passed: bool,
    /// What was known of the key before.
    pub(super) known: Option<Known>,
    /// Last block of its unit.
    pub(super) at: Place,
    pub(super) verdict: Verdict,
    /// Another key held the unit already.
    pub(super) was_held: bool,
}

/// How a store announces its keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Announced {
    pub(super) tier: Tier,
    /// Blocks a key.
    pub(super) unit: u32,
    pub(super) confirmed: bool,
    /// The code of a key that is announced so for the first time.
    pub(super) code: Code,
}

impl Announced {
    pub(super) fn new(tier: Tier, unit: usize, confirmed: bool) -> Self {
        let unit = u32::try_from(unit).unwrap_or(u32::MAX);
        Self {
            tier,
            unit,
            confirmed,
            code: Code::once(tier, unit, confirmed),
        }
    }

    const fn unit_at(&self, at: Place) -> Unit {
        Unit {
            at,
            tier: self.tier,
            blocks: self.unit,
        }
    }
}

impl SlotState {
    /// Notes how many keys the slot's engine can hold; 0 is unknown.
    pub(super) const fn expect_keys(&mut self, keys: usize) {
        self.ints.expect(keys);
    }

    /// Begins a store: prepares a step for each key and asks for what [`look_up`](Self::look_up) reads.
    pub(super) fn steps(&mut self, keys: &[EngineKey]) -> Vec<Step> {
        let mut steps = std::mem::take(&mut self.spare_steps);
        steps.extend(keys.iter().map(|key| {
            let hash = int(key).map_or_else(KeyHash::default, |hash| self.ints.hash(hash));
            self.ints.prefetch(hash);
            Step {
                hash,
                passed: false,
                known: None,
                at: Place::NONE,
                verdict: Verdict::Place,
                was_held: false,
            }
        }));
        steps
    }

    /// Notes what is known of each key.
    pub(super) fn look_up(&self, keys: &[EngineKey], steps: &mut [Step]) {
        let mut unsettled = false;
        for (key, step) in keys.iter().zip(&mut *steps) {
            step.known = match int(key) {
                Some(hash) => match self.ints.find_at_home(hash, step.hash) {
                    Ok(found) => found.map(Known::of),
                    Err(Passed) => {
                        step.passed = true;
                        unsettled = true;
                        None
                    }
                },
                None => self.others.get(key).copied(),
            };
        }
        if !unsettled {
            return;
        }
        for (key, step) in keys.iter().zip(steps).filter(|(_, step)| step.passed) {
            let found = int(key).and_then(|hash| self.ints.find(hash, step.hash));
            step.known = found.map(Known::of);
        }
    }

    /// Takes the memory of steps back for the next store, unless it is much.
    pub(super) fn finish(&mut self, mut steps: Vec<Step>) {
        if steps.capacity() <= SPARE_STEPS {
            steps.clear();
            self.spare_steps = steps;
        }
    }

    /// Asks for what finding or taking keys reads.
    pub(super) fn prefetch<'a>(&self, keys: impl IntoIterator<Item = &'a EngineKey>) {
        for hash in keys.into_iter().filter_map(int) {
            self.ints.prefetch(self.ints.hash(hash));
        }
    }

    fn known(&self, key: &EngineKey) -> Option<Known> {
        match int(key) {
            Some(hash) => self.ints.find(hash, self.ints.hash(hash)).map(Known::of),
            None => self.others.get(key).copied(),
        }
    }

    pub(super) fn record(&self, key: &EngineKey) -> Option<Record> {
        self.known(key).map(|known| self.unpack(key, known))
    }

    fn unpack(&self, key: &EngineKey, known: Known) -> Record {
        if known.code.is_aside() {
            let aside = self.aside.get(key).copied();
            aside.unwrap_or_else(|| Record::new(known.place))
        } else {
            known.code.unpack(known.place)
        }
    }

    /// Judges a step of a store of `key` whose place was found.
    pub(super) fn judge(&self, key: &EngineKey, step: &Step, announced: &Announced) -> Verdict {
        let record = step.known.map(|known| self.unpack(key, known));
        Verdict::of(record.as_ref(), step.at, announced)
    }

    pub(super) fn place(&self, key: &EngineKey) -> Option<Place> {
        self.known(key).map(|known| known.place)
    }

    pub(super) const fn blocks(&self) -> TierBlocks {
        self.blocks
    }

    /// Tells whether no key is held in any other tier.
    pub(super) fn holds_nothing_beyond(&self, tiers: &[Tier]) -> bool {
        let mut others = Tier::ALL.into_iter().filter(|tier| !tiers.contains(tier));
        others.all(|tier| self.blocks.of(tier) == 0)
    }

    /// Returns the memory of the maps, in bytes; estimated for all but the compact one.
    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.ints.bytes()
            + self.others.allocation_size()
            + self.aside.allocation_size()
            + self.shared.allocation_size()
            + self.pending.bytes()
    }

    /// Tells whether there is nothing to know of the slot.
    pub(super) fn is_vacant(&self) -> bool {
        self.ints.is_empty()
            && self.ints.expected() == 0
            && self.others.is_empty()
            && self.pending.is_empty()
    }

    /// Makes room for more keys of the kind of `like`.
    pub(super) fn reserve(&mut self, like: Option<&EngineKey>, keys: usize) {
        match like {
            Some(key) if int(key).is_some() => self.ints.reserve(keys),
            Some(_) => self.others.reserve(keys),
            None => {}
        }
    }

    /// Stores a record, or forgets the key when nothing holds it.
    pub(super) fn put(&mut self, key: &EngineKey, record: &Record) {
        let known = Known {
            place: record.at,
            code: Code::of(record),
        };
        let old = self.put_known(key, record.is_held().then_some(known));
        if record.is_held() && known.code.is_aside() {
            self.aside.insert(key.clone(), *record);
        } else if old.is_some_and(Code::is_aside) {
            self.aside.remove(key);
        }
    }

    /// Enters, changes or removes a key in its map, returning the code that it had.
    fn put_known(&mut self, key: &EngineKey, known: Option<Known>) -> Option<Code> {
        let Some(hash) = int(key) else {
            let old = match known {
                None => self.others.remove(key),
                Some(known) => match self.others.get_mut(key) {
                    Some(place) => Some(std::mem::replace(place, known)),
                    None => self.others.insert(key.clone(), known),
                },
            };
            return old.map(|old| old.code);
        };
        let key = hash;
        let hash = self.ints.hash(key);
        let found = self.ints.find(key, hash);
        match (found, known) {
            (Some(found), Some(known)) => self.ints.replace(found, known.place, known.code),
            (Some(found), None) => self.ints.remove(hash, found),
            (None, Some(known)) => {
                self.ints.reserve(1);
                self.ints.insert(key, hash, known.place, known.code);
            }
            (None, None) => {}
        }
        found.map(|found| found.code)
    }

    /// Enters a key that a store names for the first time, telling whether it was unknown: the short form of
    /// [`apply`](Self::apply) for the common case. Units that nobody held are left to
    /// [`count_entered`](Self::count_entered).
    pub(super) fn enter(&mut self, key: &EngineKey, step: &Step, announced: &Announced) -> bool {
        let Some(hash) = int(key).filter(|_| !announced.code.is_aside()) else {
            return false;
        };
        self.ints.reserve(1);
        if !self.ints.insert(hash, step.hash, step.at, announced.code) {
            return false;
        }
        if step.was_held {
            self.acquire(announced.unit_at(step.at), true);
        }
        true
    }

    /// Counts units that were entered and that no other key held.
    pub(super) const fn count_entered(&mut self, announced: &Announced, units: usize) {
        let blocks = units * announced.unit as usize;
        self.blocks.add(announced.tier, blocks);
    }

    /// Carries out a store of `key` as [`Verdict::of`] judges it now, and returns that verdict; `step` is what the tree
    /// was changed for. They differ only when the same store names one key twice: the second place was then held in vain.
    /// What gives way is added to `released`.
    pub(super) fn apply(
        &mut self,
        key: &EngineKey,
        step: &Step,
        announced: &Announced,
        released: &mut Vec<Unit>,
    ) -> Verdict {
        let Announced {
            tier,
            unit,
            confirmed,
            ..
        } = *announced;
        let known = self.record(key);
        let verdict = Verdict::of(known.as_ref(), step.at, announced);
        let mut record = known.unwrap_or_else(|| Record::new(step.at));
        let new = announced.unit_at(step.at);
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
        if tier == Tier::Device
            && let Some(hash) = int(key)
        {
            let (key, hash) = (hash, self.ints.hash(hash));
            let found = self.ints.find(key, hash)?;
            if found.code.is_plain() {
                self.ints.remove(hash, found);
                released.push(Unit {
                    at: found.place,
                    tier,
                    blocks: 1,
                });
                return Some(());
            }
        }
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
        goes: impl Fn(Place, Tier, Residency) -> bool,
        released: &mut Vec<Unit>,
    ) -> usize {
        let mut changed = Vec::new();
        let others = self.others.iter().map(|(key, &known)| (key.clone(), known));
        for (key, known) in self.int_keys().chain(others) {
            let mut record = self.unpack(&key, known);
            let before = released.len();
            for (tier, residency) in record
                .held()
                .filter(|&(tier, held)| goes(known.place, tier, held))
            {
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
        self.ints.change_codes(Code::doubted);
        for known in self.others.values_mut() {
            known.code = known.code.doubted();
        }
        self.pending.doubt();
    }

    /// Gives up units, keeping in `released` those that no key holds any more.
    pub(super) fn release(&mut self, released: &mut Vec<Unit>) {
        released.retain(|unit| {
            let Some(further) = self.shared.get_mut(unit) else {
                self.blocks.take(unit.tier, unit.blocks as usize);
                return true;
            };
            *further -= 1;
            if *further == 0 {
                self.shared.remove(unit);
            }
            false
        });
        self.ints.shrink();
        shrink(&mut self.others);
        shrink(&mut self.aside);
        shrink(&mut self.shared);
    }

    /// Gives all idle room back.
    pub(super) fn fit(&mut self) {
        self.ints.fit();
        self.others.shrink_to_fit();
        self.aside.shrink_to_fit();
        self.shared.shrink_to_fit();
    }

    /// Forgets everything but what is expected, returning the chunks that the slot held something of.
    pub(super) fn drain(&mut self) -> Vec<ChunkId> {
        let old = std::mem::take(self);
        self.ints.expect(old.ints.expected());
        let ints = old.ints.iter().map(|(_, place, _)| place);
        let others = old.others.values().map(|known| known.place);
        let mut chunks: Vec<ChunkId> = ints.chain(others).map(Place::chunk).collect();
        chunks.sort_unstable();
        chunks.dedup();
        chunks
    }

    /// Visits every key with its record, for checks.
    pub(super) fn for_each(&self, mut visit: impl FnMut(&EngineKey, &Record)) {
        let others = self.others.iter().map(|(key, &known)| (key.clone(), known));
        for (key, known) in self.int_keys().chain(others) {
            visit(&key, &self.unpack(&key, known));
        }
    }

    fn int_keys(&self) -> impl Iterator<Item = (EngineKey, Known)> {
        self.ints.iter().map(|(hash, place, code)| {
            let hash = EngineHash::Int(hash);
            (EngineKey { group: 0, hash }, Known { place, code })
        })
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

/// Returns the number of a key that the compact table takes.
const fn int(key: &EngineKey) -> Option<u64> {
    match key {
        EngineKey {
            group: 0,
            hash: EngineHash::Int(hash),
        } => Some(*hash),
        _ => None,
    }
}

/// Longest memory of steps that is kept between stores: 8 KiB.
const SPARE_STEPS: usize = 256;
