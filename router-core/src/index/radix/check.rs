//! Checks of everything that must hold between calls, for tests.

use std::collections::{BTreeMap, HashMap};

use super::RadixIndex;
use super::chunks::{CHUNK_BLOCKS, Owner};
use super::holders::{Holders, Mark};
use super::node::{ROOT, Run, RunId};
use super::slot::{SlotState, Unit, units};
use super::tree::{Tree, View};
use crate::index::{Tier, TierBlocks};
use crate::sync::atomic::Ordering;

impl RadixIndex {
    /// Checks the index from inside; no other thread may be writing.
    ///
    /// # Panics
    /// With the broken rule, when there is one.
    #[doc(hidden)]
    pub fn assert_invariants(&self) {
        let tree = self.tree.read();
        let mut expected = 0;
        for (id, run) in tree.runs() {
            check_run(&tree, id, run);
            expected += usize::from(run.len());
        }
        assert_eq!(tree.blocks(), expected, "blocks of the tree");
        assert_eq!(tree.nodes(), tree.runs().count(), "every run has an entry");
        let bytes: usize = tree.runs().map(|(_, run)| run.bytes()).sum();
        assert_eq!(tree.run_bytes(), bytes, "memory that hangs on runs");
        let chunks = tree.runs().map(|(_, run)| run.chunks().len());
        assert_eq!(
            tree.chunks().used(),
            chunks.sum::<usize>(),
            "every chunk has a run"
        );
        check_forks(&tree);
        check_details(&tree);
        let mut held = held_units(&tree);
        let mut bytes = 0;
        for slot in self.slot_ids() {
            self.with_state(slot, |state| {
                bytes += state.bytes();
                check_slot(&tree, slot, state, held.remove(&slot).unwrap_or_default());
            });
        }
        assert_eq!(
            self.slot_bytes.load(Ordering::Relaxed),
            bytes,
            "memory of slots"
        );
        assert!(held.is_empty(), "slots without state hold {held:?}");
    }
}

fn check_run(tree: &Tree, id: RunId, run: &Run) {
    assert!(run.len() > 0, "run {id} is empty");
    check_chunks(tree, id, run);
    assert_eq!(
        tree.child(run.origin, run.first()),
        Some(id),
        "run {id} is found by its parent"
    );
    assert_eq!(
        tree.needed(id, run),
        run.len(),
        "tail of run {id} is needed"
    );
    if run.origin.run != ROOT {
        let parent = tree.run(run.origin.run).expect("a run's parent exists");
        let at = run.origin.blocks;
        assert!(at > 0 && at <= parent.len(), "origin of run {id}");
        let continued = (at < parent.len()).then(|| parent.hash(at, tree.chunks()));
        assert_ne!(continued, Some(run.first()), "run {id} doubles its parent");
        assert_eq!(run.depth, parent.depth + u32::from(at), "depth of run {id}");
    }
    let mut slots = Vec::new();
    let mut details = 0;
    run.holders.for_each(|slot, mark| {
        slots.push(slot);
        details += u32::from(mark.is_detailed());
        assert!(usize::from(slot) < tree.slots(), "slot {slot} is counted");
        check_mark(tree, id, run, slot, mark);
    });
    assert_eq!(run.holders.len(), slots.len(), "holders of run {id}");
    assert!(slots.is_sorted_by(|a, b| a < b), "order of run {id}");
    if let Holders::Dense { detailed, .. } = run.holders {
        assert_eq!(detailed, details, "detailed holders of run {id}");
    }
}

fn check_chunks(tree: &Tree, id: RunId, run: &Run) {
    let needed = usize::from(run.len()).div_ceil(CHUNK_BLOCKS);
    assert_eq!(run.chunks().len(), needed, "chunks of run {id}");
    for (position, &chunk) in (0..).zip(run.chunks()) {
        let owner = Owner { run: id, position };
        assert_eq!(tree.chunks().owner(chunk), owner, "chunk {chunk}");
    }
    let hash = |offset: u16| {
        let place = run.place(offset);
        tree.chunks().hashes(place.chunk())[place.offset()]
    };
    assert_eq!(run.first(), hash(0), "first block of run {id}");
    assert_eq!(run.hash(run.len() - 1, tree.chunks()), hash(run.len() - 1));
    let hinted = run.forks().iter().find(|fork| fork.0 == run.hint());
    assert_eq!(hinted.is_none(), run.forks().is_empty(), "hint of run {id}");
}

fn check_mark(tree: &Tree, id: RunId, run: &Run, slot: u16, mark: Mark) {
    assert!(mark.cutoff() <= run.len(), "cutoff of {slot} in run {id}");
    match tree.view(slot, id) {
        View::Nothing => panic!("mark of {slot} in run {id} says nothing"),
        View::Prefix(cutoff) => assert!(cutoff > 0, "{slot} holds nothing of run {id}"),
        View::Detail(detail) => {
            assert!(mark.is_detailed(), "{slot} has a detail in run {id}");
            assert_eq!(detail.as_prefix(), None, "detail of {slot} in {id} is one");
            assert_eq!(detail.unit_prefix(), mark.cutoff(), "{slot} in run {id}");
            assert!(detail.last_end() <= run.len(), "{slot} ends in run {id}");
        }
    }
}

fn check_forks(tree: &Tree) {
    let mut forks: HashMap<RunId, BTreeMap<u16, u32>> = HashMap::new();
    for (_, run) in tree.runs() {
        let of_parent = forks.entry(run.origin.run).or_default();
        *of_parent.entry(run.origin.blocks).or_default() += 1;
    }
    for (id, run) in tree.runs() {
        let expected = forks.remove(&id).unwrap_or_default();
        let expected: Vec<_> = expected.into_iter().collect();
        assert_eq!(run.forks(), expected, "forks of run {id}");
    }
}

fn check_details(tree: &Tree) {
    let mut coarse = 0;
    for (&(run, slot), detail) in tree.details() {
        let mark = tree.run(run).and_then(|run| run.holders.mark(slot));
        assert!(
            mark.is_some_and(Mark::is_detailed),
            "detail of {slot} in run {run} has a mark"
        );
        coarse += usize::from(detail.is_coarse());
    }
    assert_eq!(tree.coarse(), coarse, "coarse details");
}

/// Collects what the tree says that each slot holds.
fn held_units(tree: &Tree) -> HashMap<u16, BTreeMap<Unit, u32>> {
    let mut held: HashMap<u16, BTreeMap<Unit, u32>> = HashMap::new();
    let mut add = |slot: u16, run: RunId, offset: u16, tier: Tier, blocks: u32| {
        let at = tree.run(run).expect("a holder's run exists").place(offset);
        let unit = Unit { at, tier, blocks };
        held.entry(slot).or_default().insert(unit, 0);
    };
    for (id, run) in tree.runs() {
        run.holders.for_each(|slot, _| match tree.view(slot, id) {
            View::Nothing => {}
            View::Prefix(cutoff) => {
                (0..cutoff).for_each(|offset| add(slot, id, offset, Tier::Device, 1));
            }
            View::Detail(detail) => {
                for layer in detail.layers() {
                    let ends = layer.ends(u16::MAX);
                    ends.for_each(|offset| add(slot, id, offset, layer.tier, layer.unit));
                }
            }
        });
    }
    held
}

fn check_slot(tree: &Tree, slot: u16, state: &SlotState, mut held: BTreeMap<Unit, u32>) {
    let mut aside = 0;
    state.for_each(|key, record| {
        assert!(record.is_held(), "{key:?} of {slot} is held");
        let at = tree.locate(record.at);
        let run = tree.run(at.run).expect("a key's run exists");
        assert!(at.offset < run.len(), "{key:?} of {slot} lies inside");
        aside += usize::from(state.aside().contains_key(key));
        for unit in units(record) {
            let keys = held.get_mut(&unit);
            *keys.unwrap_or_else(|| panic!("tree knows {unit:?} of {key:?}")) += 1;
        }
    });
    assert_eq!(state.aside().len(), aside, "records aside of {slot}");
    let mut blocks = TierBlocks::default();
    let mut shared = 0;
    for (unit, keys) in held {
        assert!(keys > 0, "{unit:?} of {slot} is held by a key");
        blocks.add(unit.tier, unit.blocks as usize);
        let further = state.shared().get(&unit).copied().unwrap_or(0);
        assert_eq!(keys - 1, further, "keys beyond the first of {unit:?}");
        shared += usize::from(further > 0);
    }
    assert_eq!(state.shared().len(), shared, "shared units of {slot}");
    assert_eq!(state.blocks(), blocks, "blocks of {slot}");
    let pending = state
        .pending
        .runs()
        .map(|run| run.keys.len())
        .sum::<usize>();
    assert_eq!(state.pending.keys(), pending, "pending keys of {slot}");
    for run in state.pending.runs() {
        assert_eq!(
            state.place(&run.parent),
            None,
            "a pending run of {slot} waits"
        );
    }
}
