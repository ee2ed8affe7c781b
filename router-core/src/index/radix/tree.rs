//! The tree: runs, the table of children, and what keeps both no larger than what is held.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};

use super::detail::Detail;
use super::holders::Mark;
use super::node::{Location, Point, ROOT, Run, RunId, as_offset};
use crate::block::LocalBlockHash;
use crate::index::Tier;

/// All runs, and for each the slots that hold it.
#[derive(Debug)]
pub(super) struct Tree {
    runs: Vec<Option<Run>>,
    /// Ids below `runs.len()` that are free; others are stale and skipped. Lowest first, so that the slab can shrink.
    free: BinaryHeap<Reverse<RunId>>,
    /// Run ids by where they leave their parent and their first block; compared in full in the run itself.
    children: HashTable<RunId>,
    hasher: DefaultHashBuilder,
    /// What is held by slots whose mark in a run is detailed.
    details: HashMap<(RunId, u16), Detail>,
    /// Details with a unit longer than one block.
    coarse: usize,
    blocks: usize,
    /// Slots in use: one more than the highest that ever held something.
    slots: usize,
    max_run_blocks: u16,
}

/// Blocks of one run that a path passes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) run: RunId,
    pub(super) offset: u16,
    pub(super) blocks: u16,
}

/// Residency of units that end at consecutive offsets of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) run: RunId,
    pub(super) from: u16,
    pub(super) to: u16,
    pub(super) tier: Tier,
    pub(super) unit: u32,
}

/// What one slot holds of one run.
#[derive(Clone, Copy, Debug)]
pub(super) enum View<'a> {
    Nothing,
    Prefix(u16),
    Detail(&'a Detail),
}

impl Tree {
    pub(super) fn new(max_run_blocks: u16) -> Self {
        Self {
            runs: Vec::new(),
            free: BinaryHeap::new(),
            children: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
            details: HashMap::new(),
            coarse: 0,
            blocks: 0,
            slots: 0,
            max_run_blocks,
        }
    }

    pub(super) const fn blocks(&self) -> usize {
        self.blocks
    }

    pub(super) fn nodes(&self) -> usize {
        self.children.len()
    }

    pub(super) const fn slots(&self) -> usize {
        self.slots
    }

    pub(super) const fn coarse(&self) -> usize {
        self.coarse
    }

    pub(super) fn run(&self, id: RunId) -> Option<&Run> {
        self.runs.get(id as usize)?.as_ref()
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = (RunId, &Run)> {
        (0..)
            .zip(&self.runs)
            .filter_map(|(id, run)| Some((id, run.as_ref()?)))
    }

    pub(super) const fn details(&self) -> &HashMap<(RunId, u16), Detail> {
        &self.details
    }

    pub(super) fn child(&self, origin: Point, first: LocalBlockHash) -> Option<RunId> {
        let hash = child_hash(&self.hasher, origin, first);
        self.children
            .find(hash, |&id| self.is_child(id, origin, first))
            .copied()
    }

    /// Finds the blocks of `hashes` after `point`, creating those that do not exist, and returns where they lie.
    pub(super) fn extend(&mut self, point: Point, hashes: &[LocalBlockHash]) -> Vec<Segment> {
        let mut segments = Vec::new();
        let mut at = point;
        let mut rest = hashes;
        while let Some(&next) = rest.first() {
            let known = self
                .run(at.run)
                .map_or(0, |run| run.matched(at.blocks, rest));
            let blocks = if known > 0 {
                known
            } else if let Some(child) = self.child(at, next) {
                at = Point {
                    run: child,
                    blocks: 0,
                };
                continue;
            } else if let Some(appended) = self.append(at, rest) {
                appended
            } else {
                at = Point {
                    run: self.create(at, rest),
                    blocks: 0,
                };
                continue;
            };
            push_segment(&mut segments, at, blocks);
            at.blocks += blocks;
            rest = &rest[usize::from(blocks)..];
        }
        segments
    }

    pub(super) fn view(&self, slot: u16, run: RunId) -> View<'_> {
        let mark = self.run(run).and_then(|run| run.holders.mark(slot));
        match mark {
            None => View::Nothing,
            Some(mark) if mark.is_detailed() => self
                .details
                .get(&(run, slot))
                .map_or(View::Nothing, View::Detail),
            Some(mark) => View::Prefix(mark.cutoff()),
        }
    }

    /// Makes `slot` hold a span.
    pub(super) fn hold(&mut self, slot: u16, span: Span) {
        self.slots = self.slots.max(usize::from(slot) + 1);
        let slots = self.slots;
        let Some(run) = self.run_mut(span.run) else {
            return;
        };
        let plain = match run.holders.mark(slot) {
            None => (span.from == 0).then_some(0),
            Some(mark) if !mark.is_detailed() => Some(mark.cutoff()),
            Some(_) => None,
        };
        match plain {
            Some(cutoff) if span.is_plain() && span.from <= cutoff => {
                let mark = Mark::plain(cutoff.max(span.to));
                run.holders.set(slot, Some(mark), slots);
            }
            _ => self.edit(slot, span.run, |detail| {
                detail.set(span.tier, span.unit, span.from, span.to);
            }),
        }
    }

    /// Makes `slot` no longer hold spans, and gives back the blocks that nobody needs any more.
    pub(super) fn unhold(&mut self, slot: u16, spans: &[Span]) {
        for span in spans {
            let slots = self.slots;
            let Some(run) = self.run_mut(span.run) else {
                continue;
            };
            let at_end = span.to == run.len();
            match run.holders.mark(slot) {
                None => {}
                Some(mark)
                    if !mark.is_detailed() && span.is_plain() && span.to >= mark.cutoff() =>
                {
                    let cutoff = span.from.min(mark.cutoff());
                    let mark = (cutoff > 0).then_some(Mark::plain(cutoff));
                    run.holders.set(slot, mark, slots);
                }
                Some(_) => self.edit(slot, span.run, |detail| {
                    detail.unset(span.tier, span.unit, span.from, span.to);
                }),
            }
            // A last block that the slot did not hold is needed by somebody else.
            if at_end {
                self.trim(span.run);
            }
        }
    }

    /// Makes `slot` hold nothing of the given runs.
    pub(super) fn unhold_all(&mut self, slot: u16, runs: impl Iterator<Item = RunId>) {
        let slots = self.slots;
        for id in runs {
            let Some(run) = self.run(id) else { continue };
            let held = run.holders.mark(slot);
            let held = held.map_or(0, |mark| self.held_blocks(id, slot, mark));
            let at_end = held == run.len();
            if let Some(detail) = self.details.remove(&(id, slot)) {
                self.coarse -= usize::from(detail.is_coarse());
            }
            if let Some(run) = self.run_mut(id) {
                run.holders.set(slot, None, slots);
            }
            if at_end {
                self.trim(id);
            }
        }
        shrink(&mut self.details);
    }

    /// Cuts off the blocks at the run's end that no holder and no child needs; an empty run leaves its parent, which is
    /// then looked at too. A run that is gone already is left alone.
    pub(super) fn trim(&mut self, mut id: RunId) {
        while let Some(run) = self.run(id) {
            let needed = self.needed(id, run);
            let cut = run.len() - needed;
            if cut == 0 {
                return;
            }
            self.blocks -= usize::from(cut);
            if needed > 0 {
                if let Some(run) = self.run_mut(id) {
                    run.truncate(needed);
                }
                return;
            }
            id = self.remove(id);
        }
    }

    /// Returns how many leading blocks of a run are needed.
    pub(super) fn needed(&self, id: RunId, run: &Run) -> u16 {
        let mut needed = run.last_fork();
        if needed < run.len() {
            run.holders.for_each(|slot, mark| {
                needed = needed.max(self.held_blocks(id, slot, mark));
            });
        }
        needed
    }

    fn held_blocks(&self, run: RunId, slot: u16, mark: Mark) -> u16 {
        if mark.is_detailed() {
            self.details.get(&(run, slot)).map_or(0, Detail::last_end)
        } else {
            mark.cutoff()
        }
    }

    /// Changes a holding that is, or may become, more than a plain prefix, and returns it to the plain form when it is one.
    fn edit(&mut self, slot: u16, id: RunId, change: impl FnOnce(&mut Detail)) {
        let slots = self.slots;
        let Some(run) = self.runs.get_mut(id as usize).and_then(Option::as_mut) else {
            return;
        };
        let cutoff = run.holders.mark(slot).map_or(0, Mark::cutoff);
        let mut detail = self.details.remove(&(id, slot)).map_or_else(
            || Detail::prefix(cutoff),
            |detail| {
                self.coarse -= usize::from(detail.is_coarse());
                detail
            },
        );
        change(&mut detail);
        let mark = match detail.as_prefix() {
            Some(0) => None,
            Some(cutoff) => Some(Mark::plain(cutoff)),
            None => {
                let mark = Mark::detailed(detail.unit_prefix());
                self.coarse += usize::from(detail.is_coarse());
                self.details.insert((id, slot), detail);
                Some(mark)
            }
        };
        run.holders.set(slot, mark, slots);
        shrink(&mut self.details);
    }

    /// Appends to the run that ends at `at`, returning how many blocks fitted; `None` when it does not end there or is full.
    fn append(&mut self, at: Point, hashes: &[LocalBlockHash]) -> Option<u16> {
        let max = self.max_run_blocks;
        let run = self.run_mut(at.run)?;
        if run.len() != at.blocks || run.len() >= max {
            return None;
        }
        let blocks = hashes.len().min(usize::from(max - run.len()));
        run.append(&hashes[..blocks]);
        self.blocks += blocks;
        Some(as_offset(blocks))
    }

    /// Creates a child with as many of `hashes` as one run takes.
    fn create(&mut self, origin: Point, hashes: &[LocalBlockHash]) -> RunId {
        let blocks = hashes.len().min(usize::from(self.max_run_blocks));
        let run = Run::new(origin, &hashes[..blocks]);
        let hash = child_hash(&self.hasher, origin, run.first());
        let id = self.allocate(run);
        let Self { runs, hasher, .. } = self;
        let rehash = |&id: &RunId| run_hash(hasher, runs, id);
        self.children.insert_unique(hash, id, rehash);
        if let Some(parent) = self.run_mut(origin.run) {
            parent.add_fork(origin.blocks);
        }
        self.blocks += blocks;
        id
    }

    fn allocate(&mut self, run: Run) -> RunId {
        while let Some(Reverse(id)) = self.free.pop() {
            if let Some(place) = self.runs.get_mut(id as usize) {
                *place = Some(run);
                return id;
            }
        }
        let id = RunId::try_from(self.runs.len()).unwrap_or(ROOT);
        assert!(id != ROOT, "the tree is full: 2^32 - 1 runs");
        self.runs.push(Some(run));
        id
    }

    /// Removes an empty run, returning its parent when the removed fork was the last at the parent's end, else [`ROOT`].
    fn remove(&mut self, id: RunId) -> RunId {
        let Some(run) = self.runs[id as usize].as_ref() else {
            return ROOT;
        };
        let origin = run.origin;
        let hash = child_hash(&self.hasher, origin, run.first());
        if let Ok(entry) = self.children.find_entry(hash, |&child| child == id) {
            entry.remove();
        }
        self.runs[id as usize] = None;
        self.free.push(Reverse(id));
        self.shrink_runs();
        let Some(parent) = self.run_mut(origin.run) else {
            return ROOT;
        };
        parent.remove_fork(origin.blocks);
        if parent.len() == origin.blocks {
            origin.run
        } else {
            ROOT
        }
    }

    fn shrink_runs(&mut self) {
        while let Some(None) = self.runs.last() {
            self.runs.pop();
        }
        if self.runs.capacity() > 4 * self.runs.len() + SLACK {
            self.runs.shrink_to(2 * self.runs.len());
            let live = self.runs.len();
            self.free.retain(|id| (id.0 as usize) < live);
            self.free.shrink_to_fit();
        }
        let Self {
            runs,
            hasher,
            children,
            ..
        } = self;
        if children.capacity() > 4 * children.len() + SLACK {
            children.shrink_to(2 * children.len(), |&id| run_hash(hasher, runs, id));
        }
    }

    fn run_mut(&mut self, id: RunId) -> Option<&mut Run> {
        self.runs.get_mut(id as usize)?.as_mut()
    }

    fn is_child(&self, id: RunId, origin: Point, first: LocalBlockHash) -> bool {
        self.run(id)
            .is_some_and(|run| run.origin == origin && run.first() == first)
    }
}

impl Span {
    /// Tells whether the span is of the common kind that needs no detail.
    fn is_plain(&self) -> bool {
        self.tier == Tier::Device && self.unit == 1
    }

    /// Takes in the unit that ends at `offset` when it lies beside the span, so that one change does for both.
    pub(super) fn grow(&mut self, other: Self) -> bool {
        let same = self.run == other.run && self.tier == other.tier && self.unit == other.unit;
        if same && other.from == self.to {
            self.to = other.to;
        } else if same && other.to == self.from {
            self.from = other.from;
        } else {
            return false;
        }
        true
    }

    pub(super) fn one(at: Location, tier: Tier, unit: u32) -> Self {
        Self {
            run: at.run,
            from: at.offset,
            to: at.offset + 1,
            tier,
            unit,
        }
    }
}

impl View<'_> {
    /// Tells whether a unit of `unit` blocks that ends at `offset` is held in `tier`.
    pub(super) fn holds(&self, tier: Tier, unit: u32, offset: u16) -> bool {
        match self {
            Self::Nothing => false,
            Self::Prefix(cutoff) => tier == Tier::Device && unit == 1 && offset < *cutoff,
            Self::Detail(detail) => detail.holds(tier, unit, offset),
        }
    }
}

fn push_segment(segments: &mut Vec<Segment>, at: Point, blocks: u16) {
    match segments.last_mut() {
        Some(last) if last.run == at.run => last.blocks += blocks,
        _ => segments.push(Segment {
            run: at.run,
            offset: at.blocks,
            blocks,
        }),
    }
}

fn child_hash(hasher: &DefaultHashBuilder, origin: Point, first: LocalBlockHash) -> u64 {
    hasher.hash_one((origin.run, origin.blocks, first.0))
}

fn run_hash(hasher: &DefaultHashBuilder, runs: &[Option<Run>], id: RunId) -> u64 {
    runs[id as usize]
        .as_ref()
        .map_or(0, |run| child_hash(hasher, run.origin, run.first()))
}

/// Gives room back once a map is mostly empty.
pub(super) fn shrink<K: Eq + std::hash::Hash, V>(map: &mut HashMap<K, V>) {
    if map.capacity() > 4 * map.len() + SLACK {
        map.shrink_to(2 * map.len());
    }
}

/// Idle places that are not worth giving back.
const SLACK: usize = 32;
