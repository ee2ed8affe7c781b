//! The concurrent index: a radix tree of split-free runs, and one reverse map for each slot.
//!
//! # Structure
//! * A *run* is a stretch of consecutive blocks, kept as sequence hashes in [chunks] of 16 that never move. A store that
//!   continues at a run's end extends it in place, whoever holds the front; a path that leaves a run begins a child at that
//!   offset. Runs are never split, so a block has one [place][chunks::Place] for as long as it exists, and the tables of
//!   all slots stay valid.
//! * A sequence hash stands for the whole prefix: a run is matched by comparing its end, which lies in its header, and a
//!   child is found by the hash of its first block, which proves all before it. Blocks are read to find where a prompt
//!   turns off, and for nothing else.
//! * For each run and slot one [mark] tells how many leading blocks the slot holds. What is no such prefix (holes, lower
//!   tiers, units of several blocks) is told by a [detail] beside it, and becomes a mark again when it can.
//! * A slot's [table] leads from engine keys to places and counts; five integer keys fill a cache line.
//! * The tail of a run that neither a holder nor a child needs is cut off in the same call, and an empty run leaves its
//!   parent, so the index is as large as what is held. Beyond that, [`shrink_to`](RadixIndex::shrink_to) forgets what was
//!   used least recently.
//!
//! # Concurrency
//! One lock for each slot around its table and pending runs, one reader-writer lock around the tree; order slot, then
//! tree. A store asks for the lines of all its keys at once, looks the keys up, takes the tree's lock for the walk and for
//! one change of a mark per run, and enters the keys after it let go, so the tree is held for a fraction of a microsecond
//! and whoever waits for it does so [awake](crate::sync::Brief). A clear takes the lock
//! piece by piece. `tests/loom.rs` tries the orders in which threads may meet.
//!
//! [mark]: holders::Mark
//! [detail]: detail::Detail
//! [table]: table::KeyTable

mod check;
mod chunks;
mod detail;
mod evict;
mod holders;
mod lookup;
mod node;
mod pending;
mod record;
mod slot;
mod table;
mod tree;

use std::collections::BTreeSet;
use std::time::Instant;

use self::chunks::Place;
pub(super) use self::lookup::Scratch;
use self::node::{Location, MAX_RUN_BLOCKS, Point};
use self::record::Verdict;
use self::slot::{Announced, SlotState, Step, Unit};
use self::tree::{Span, Tree};
use super::{
    EngineKey, IndexStats, MAX_SLOTS, OrphanLimits, Overlaps, PrefixIndex, RemoveOutcome,
    StoreOutcome, StoredRun, Tier, TierBlocks,
};
use crate::block::LocalBlockHash;
use crate::ids::Slot;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Brief, Dense, Mutex};

/// A [`PrefixIndex`] for many workers, many prompts and many threads.
///
/// A lookup costs one comparison per matched block and one step per holder of each run it passes, whatever else is
/// stored. A slot costs nothing before its first store; after [`clear`](PrefixIndex::clear) of every tier only an empty
/// shell of a few hundred bytes is left of it.
///
/// # Examples
/// ```
/// use std::time::{Duration, Instant};
/// use kvlane::index::{
///     EngineHash, EngineKey, OrphanLimits, Overlaps, PrefixIndex, RadixIndex, StoredRun, Tier,
/// };
/// use kvlane::{BlockSize, SaltContext, Slot, block_hashes};
///
/// let index = RadixIndex::new(OrphanLimits { max_keys: 1_000, max_age: Duration::from_secs(60) });
/// let size = BlockSize::new(4)?;
/// let stored = block_hashes(&[1, 2, 3, 4, 5, 6, 7, 8], size, &SaltContext::default());
/// let keys = [100, 200].map(|hash| EngineKey { group: 0, hash: EngineHash::Int(hash) });
/// let run = StoredRun {
///     parent: None,
///     keys: &keys,
///     local_hashes: &stored.local,
///     blocks_per_key: 1,
///     tier: Tier::Device,
/// };
/// # #[expect(clippy::disallowed_methods, reason = "a caller has a clock")]
/// index.store(Slot(3), &run, Instant::now());
///
/// let prompt = block_hashes(&[1, 2, 3, 4, 9, 9, 9, 9], size, &SaltContext::default());
/// let mut overlaps = Overlaps::new();
/// index.overlap(&prompt.local, &mut overlaps);
/// assert_eq!(overlaps.get(Slot(3)).device, 1);
/// # Ok::<(), kvlane::Error>(())
/// ```
#[derive(Debug)]
pub struct RadixIndex {
    limits: OrphanLimits,
    tree: Brief<Tree>,
    /// By slot index; `None` until the first store, and again once nothing is left to know.
    slots: Dense<Mutex<Option<Box<SlotState>>>>,
    /// Memory of the slots' states.
    slot_bytes: AtomicUsize,
}

/// A store whose parent's place is known.
#[derive(Clone, Copy, Debug)]
struct Placeable<'a> {
    /// The block before it; `None` when it begins a prompt.
    parent: Option<Place>,
    keys: &'a [EngineKey],
    local_hashes: &'a [LocalBlockHash],
    announced: Announced,
}

impl RadixIndex {
    /// Creates an empty index whose slots keep pending what `limits` allow.
    #[must_use]
    pub fn new(limits: OrphanLimits) -> Self {
        Self::with_max_run_blocks(limits, MAX_RUN_BLOCKS)
    }

    /// Creates an index whose runs end early, so that tests reach what long paths do.
    #[doc(hidden)]
    #[must_use]
    pub fn with_max_run_blocks(limits: OrphanLimits, max_run_blocks: u16) -> Self {
        Self {
            limits,
            tree: Brief::new(Tree::new(max_run_blocks.clamp(1, MAX_RUN_BLOCKS))),
            slots: Dense::new(),
            slot_bytes: AtomicUsize::new(0),
        }
    }

    /// Dates what is used, so that [`shrink_to`](Self::shrink_to) knows what was used least recently. Costs a write for
    /// each run that a lookup passes for the first time in a while.
    #[must_use]
    pub fn dating_uses(self) -> Self {
        self.tree.write().date_uses();
        self
    }

    /// Acts on the state of a slot; `None` when it has none.
    fn with_state<T>(&self, slot: u16, act: impl FnOnce(&mut SlotState) -> T) -> Option<T> {
        let mut state = self.slots.at(slot.into())?.lock();
        state.is_some().then(|| self.act(&mut state, act))
    }

    /// Acts on the state of a slot, which it gets if it has none.
    fn with_new_state<T>(&self, slot: u16, act: impl FnOnce(&mut SlotState) -> T) -> Option<T> {
        let mut state = self.slots.at(slot.into())?.lock();
        Some(self.act(&mut state, act))
    }

    fn act<T>(
        &self,
        place: &mut Option<Box<SlotState>>,
        act: impl FnOnce(&mut SlotState) -> T,
    ) -> T {
        let bytes =
            |place: &Option<Box<SlotState>>| place.as_ref().map_or(0, |state| state.bytes());
        let before = bytes(place);
        let state = place.get_or_insert_default();
        let result = act(state);
        if state.is_vacant() {
            *place = None;
        }
        let after = bytes(place);
        // One after the other, since a sum of both would wrap.
        self.slot_bytes.fetch_add(after, Ordering::Relaxed);
        self.slot_bytes.fetch_sub(before, Ordering::Relaxed);
        result
    }

    /// Returns the slots that may have a state.
    fn slot_ids(&self) -> impl Iterator<Item = u16> {
        let places = self.slots.pieces().map(<[_]>::len).sum::<usize>();
        (0..=u16::MAX).take(places)
    }

    /// Applies a store in three steps: look the keys up, change the tree, enter the keys. Tells what became of
    /// each key and adds the pending runs that now have a parent to `ready`.
    fn apply(
        &self,
        slot: u16,
        state: &mut SlotState,
        store: &Placeable<'_>,
        mut steps: Vec<Step>,
        ready: &mut BTreeSet<u64>,
        mut tell: impl FnMut(usize, Verdict),
    ) {
        let announced = &store.announced;
        state.look_up(store.keys, &mut steps);
        self.place(slot, state, store, &mut steps);
        let new = steps.iter().filter(|step| step.verdict == Verdict::Place);
        state.reserve(store.keys.first(), new.count());
        let mut released = Vec::new();
        let mut entered = 0;
        for (index, (key, step)) in store.keys.iter().zip(&steps).enumerate() {
            let is_new = step.known.is_none() && state.enter(key, step, announced);
            let verdict = if is_new {
                entered += usize::from(!step.was_held);
                Verdict::Place
            } else {
                state.apply(key, step, announced, &mut released)
            };
            if verdict.holds() && !state.pending.is_empty() {
                state.pending.waiting(key, ready);
            }
            tell(index, verdict);
        }
        state.count_entered(announced, entered);
        state.finish(steps);
        self.give_up(slot, state, released);
    }

    /// Walks and extends the tree along a store, and makes the slot hold the units that are new to it.
    fn place(&self, slot: u16, state: &SlotState, store: &Placeable<'_>, steps: &mut [Step]) {
        let announced = &store.announced;
        let mut spans: Vec<Span> = Vec::new();
        let mut refused = false;
        let mut tree = self.tree.write();
        let start = store
            .parent
            .map_or(Point::ROOT, |parent| tree.locate(parent).next());
        let segments = tree.extend(start, store.local_hashes);
        let fresh = announced.unit == 1 && steps.iter().all(|step| step.known.is_none());
        let mut rest = store.keys.iter().zip(steps);
        let mut before = 0;
        for segment in &segments {
            let view = tree.view(slot, segment.run);
            let Some(run) = tree.run(segment.run) else {
                continue;
            };
            if let Some(held) = view.prefix(announced.tier).filter(|_| fresh) {
                for (offset, (_, step)) in segment.offsets().zip(&mut rest) {
                    step.at = run.place(offset);
                    step.was_held = offset < held;
                }
                spans.extend(segment.after(held, announced.tier));
                continue;
            }
            let ends = segment.unit_ends(before, announced.unit);
            before += usize::from(segment.blocks);
            for (offset, (key, step)) in ends.zip(&mut rest) {
                step.at = run.place(offset);
                step.verdict = state.judge(key, step, announced);
                refused |= step.verdict == Verdict::Refuse;
                if !step.verdict.holds() {
                    continue;
                }
                step.was_held = view.holds(announced.tier, announced.unit, offset);
                let run = segment.run;
                let span = Span::one(Location { run, offset }, announced.tier, announced.unit);
                if !step.was_held && !spans.last_mut().is_some_and(|last| last.grow(span)) {
                    spans.push(span);
                }
            }
        }
        for span in spans {
            tree.hold(slot, span);
        }
        if refused {
            for segment in segments.iter().rev() {
                tree.trim(segment.run);
            }
        }
        tree.take_back(segments);
    }

    /// Attaches pending runs whose parent is known, oldest first; then takes back what was removed while it was pending.
    fn attach(
        &self,
        slot: u16,
        state: &mut SlotState,
        mut ready: BTreeSet<u64>,
        outcome: &mut StoreOutcome,
    ) {
        let mut taken_back = Vec::new();
        while let Some(number) = ready.pop_first() {
            let Some(run) = state.pending.take(number) else {
                continue;
            };
            let Some(parent) = state.place(&run.parent) else {
                continue;
            };
            let store = Placeable {
                parent: Some(parent),
                keys: &run.keys,
                local_hashes: &run.local_hashes,
                announced: Announced::new(run.tier, run.unit, run.confirmed),
            };
            let tell = |index, verdict| {
                let dead = run.dead.contains(&index);
                match verdict {
                    Verdict::Refuse => outcome.refused += 1,
                    Verdict::Ignore => outcome.attached += 1,
                    _ if dead => taken_back.push((run.keys[index].clone(), run.tier)),
                    _ => outcome.attached += 1,
                }
            };
            let steps = state.steps(&run.keys);
            self.apply(slot, state, &store, steps, &mut ready, tell);
        }
        let mut released = Vec::new();
        for (key, tier) in taken_back {
            state.take(&key, tier, &mut released);
        }
        self.give_up(slot, state, released);
    }

    fn store_run(
        &self,
        slot: u16,
        state: &mut SlotState,
        run: &StoredRun<'_>,
        now: Instant,
    ) -> StoreOutcome {
        let mut outcome = StoreOutcome {
            dropped: state.pending.expire(now, self.limits.max_age),
            ..StoreOutcome::default()
        };
        // First of all, so that what the keys need travels while the parent is looked for.
        state.prefetch(run.parent);
        let steps = state.steps(run.keys);
        let parent = run.parent.map(|parent| (parent, state.place(parent)));
        if let Some((parent, None)) = parent {
            state.finish(steps);
            keep_pending(state, parent, run, now, self.limits, &mut outcome);
            return outcome;
        }
        let store = Placeable {
            parent: parent.and_then(|(_, place)| place),
            keys: run.keys,
            local_hashes: run.local_hashes,
            announced: Announced::new(run.tier, run.blocks_per_key, true),
        };
        let mut ready = BTreeSet::new();
        let tell = |_, verdict| match verdict {
            Verdict::Place | Verdict::Move => outcome.placed += 1,
            Verdict::Repeat | Verdict::Replace | Verdict::Ignore => outcome.repeated += 1,
            Verdict::Refuse => outcome.refused += 1,
        };
        self.apply(slot, state, &store, steps, &mut ready, tell);
        if !ready.is_empty() {
            self.attach(slot, state, ready, &mut outcome);
        }
        outcome
    }

    fn touch_keys(
        &self,
        slot: u16,
        state: &mut SlotState,
        keys: &[EngineKey],
        tier: Tier,
    ) -> StoreOutcome {
        let mut outcome = StoreOutcome::default();
        for key in keys {
            match state.touch(key, tier) {
                None => outcome.refused += 1,
                Some(None) => outcome.repeated += 1,
                Some(Some(unit)) => {
                    outcome.placed += 1;
                    let mut tree = self.tree.write();
                    let at = tree.locate(unit.at);
                    let view = tree.view(slot, at.run);
                    let was_held = view.holds(tier, unit.blocks, at.offset);
                    if !was_held {
                        tree.hold(slot, Span::one(at, tier, unit.blocks));
                    }
                    drop(tree);
                    state.acquire(unit, was_held);
                }
            }
        }
        outcome
    }

    fn remove_keys(
        &self,
        slot: u16,
        state: &mut SlotState,
        keys: &[EngineKey],
        tier: Tier,
    ) -> RemoveOutcome {
        let mut outcome = RemoveOutcome::default();
        state.prefetch(keys);
        let mut released = Vec::with_capacity(keys.len());
        for key in keys {
            let taken = state.take(key, tier, &mut released).is_some();
            if taken || (!state.pending.is_empty() && state.pending.remove(key, tier)) {
                outcome.removed += 1;
            } else {
                outcome.unknown += 1;
            }
        }
        self.give_up(slot, state, released);
        outcome
    }

    fn clear_tiers(&self, slot: u16, state: &mut SlotState, tiers: &[Tier]) {
        state.pending.retain(|run| !tiers.contains(&run.tier));
        // Mostly nothing stays: an engine's own reset spares shared storage, which few have.
        if state.pending.is_empty() && state.holds_nothing_beyond(tiers) {
            let chunks = state.drain();
            let runs = self.tree.read().runs_of(&chunks);
            // Piece by piece, so that lookups get their turn.
            for runs in runs.chunks(RUNS_CLEARED_AT_ONCE) {
                self.tree.write().unhold_runs(slot, runs);
            }
            return;
        }
        let mut released = Vec::new();
        state.drop_residency(|_, tier, _| tiers.contains(&tier), &mut released);
        released.sort_unstable();
        self.give_up(slot, state, released);
    }

    /// Takes units that keys gave up out of the tree, unless another key holds them.
    fn give_up(&self, slot: u16, state: &mut SlotState, mut released: Vec<Unit>) {
        if released.is_empty() {
            return;
        }
        state.release(&mut released);
        // Piece by piece, so that lookups get their turn.
        for units in released.chunks(UNITS_GIVEN_UP_AT_ONCE) {
            self.tree.write().unhold(slot, units);
        }
    }
}

impl PrefixIndex for RadixIndex {
    fn store(&self, slot: Slot, run: &StoredRun<'_>, now: Instant) -> StoreOutcome {
        let id = slot_id(slot).filter(|_| run.is_well_formed());
        let outcome = match id {
            Some(_) if run.keys.is_empty() => Some(StoreOutcome::default()),
            Some(id) => self.with_new_state(id, |state| self.store_run(id, state, run, now)),
            None => None,
        };
        outcome.unwrap_or_else(|| StoreOutcome {
            refused: run.keys.len(),
            ..StoreOutcome::default()
        })
    }

    fn touch(&self, slot: Slot, keys: &[EngineKey], tier: Tier) -> StoreOutcome {
        let outcome = slot_id(slot)
            .and_then(|id| self.with_state(id, |state| self.touch_keys(id, state, keys, tier)));
        outcome.unwrap_or_else(|| StoreOutcome {
            refused: keys.len(),
            ..StoreOutcome::default()
        })
    }

    fn remove(&self, slot: Slot, keys: &[EngineKey], tier: Tier) -> RemoveOutcome {
        let outcome = slot_id(slot)
            .and_then(|id| self.with_state(id, |state| self.remove_keys(id, state, keys, tier)));
        outcome.unwrap_or_else(|| RemoveOutcome {
            unknown: keys.len(),
            ..RemoveOutcome::default()
        })
    }

    fn clear(&self, slot: Slot, tiers: &[Tier]) {
        let Some(id) = slot_id(slot) else { return };
        self.with_state(id, |state| self.clear_tiers(id, state, tiers));
    }

    fn demote(&self, slot: Slot) {
        if let Some(id) = slot_id(slot) {
            self.with_state(id, SlotState::doubt);
        }
    }

    fn drop_demoted(&self, slot: Slot) -> usize {
        let dropped = slot_id(slot).and_then(|id| {
            self.with_state(id, |state| {
                state.pending.retain(|run| run.confirmed);
                let mut released = Vec::new();
                let keys = state.drop_residency(|_, _, held| held.doubted, &mut released);
                released.sort_unstable();
                self.give_up(id, state, released);
                keys
            })
        });
        dropped.unwrap_or(0)
    }

    fn overlap(&self, local_hashes: &[LocalBlockHash], overlaps: &mut Overlaps) {
        self.tree.read().overlap(local_hashes, overlaps);
    }

    fn expect_keys(&self, slot: Slot, keys: usize) {
        if let Some(id) = slot_id(slot) {
            self.with_new_state(id, |state| state.expect_keys(keys));
        }
    }

    fn slot_blocks(&self, slot: Slot) -> TierBlocks {
        slot_id(slot)
            .and_then(|id| self.with_state(id, |state| state.blocks()))
            .unwrap_or_default()
    }

    fn stats(&self) -> IndexStats {
        let pending = self
            .slot_ids()
            .filter_map(|slot| self.with_state(slot, |state| state.pending.keys()));
        let orphans = pending.sum();
        let bytes = self.bytes();
        let tree = self.tree.read();
        IndexStats {
            blocks: tree.blocks(),
            nodes: tree.nodes(),
            orphans,
            bytes,
        }
    }
}

/// Keeps a run whose parent is unknown.
fn keep_pending(
    state: &mut SlotState,
    parent: &EngineKey,
    run: &StoredRun<'_>,
    now: Instant,
    limits: OrphanLimits,
    outcome: &mut StoreOutcome,
) {
    if run.keys.len() > limits.max_keys {
        outcome.dropped += run.keys.len();
        return;
    }
    state.pending.push(parent, run, now);
    outcome.orphaned = run.keys.len();
    outcome.dropped += state.pending.shrink_to(limits.max_keys);
}

fn slot_id(slot: Slot) -> Option<u16> {
    debug_assert_eq!(MAX_SLOTS - 1, usize::from(u16::MAX));
    u16::try_from(slot.0).ok()
}

/// Units that are taken out of the tree under one lock: more than an engine mostly removes at once.
const UNITS_GIVEN_UP_AT_ONCE: usize = 1_024;

/// Runs that a clear takes out of the tree under one lock.
const RUNS_CLEARED_AT_ONCE: usize = 64;
