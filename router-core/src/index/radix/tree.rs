//! The tree: runs, the table of children, and what keeps both no larger than what is held.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};

use super::chunks::{CHUNK_BLOCKS, ChunkId, Chunks, Place};
use super::detail::Detail;
use super::evict::STORES_A_TICK;
use super::holders::Mark;
use super::node::{Location, Point, ROOT, Run, RunId, as_offset};
use super::slot::Unit;
use crate::block::{LocalBlockHash, SequenceHash};
use crate::index::Tier;

/// All runs, and for each the slots that hold it.
#[derive(Debug)]
pub(super) struct Tree {
    runs: Vec<Option<Run>>,
    chunks: Chunks,
    /// Ids below `runs.len()` that are free; others are stale and skipped. Lowest first, so that the slab can shrink.
    free: BinaryHeap<Reverse<RunId>>,
    /// Run ids by the sequence hash of their first block; compared in full in the run itself.
    children: HashTable<RunId>,
    hasher: DefaultHashBuilder,
    /// What is held by slots whose mark in a run is detailed.
    details: HashMap<(RunId, u16), Detail>,
    /// Details with a unit longer than one block.
    coarse: usize,
    blocks: usize,
    /// Memory that hangs on runs: lists of chunks, holders and forks.
    run_bytes: usize,
    /// Slots in use: one more than the highest that ever held something.
    slots: usize,
    max_run_blocks: u16,
    /// Steps every few stores; `None` where nobody asks what was used when.
    clock: Option<Clock>,
    spare_chain: Vec<SequenceHash>,
    spare_segments: Vec<Segment>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Clock {
    now: u32,
    stores: u32,
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
            chunks: Chunks::default(),
            free: BinaryHeap::new(),
            children: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
            details: HashMap::new(),
            coarse: 0,
            blocks: 0,
            run_bytes: 0,
            slots: 0,
            max_run_blocks,
            clock: None,
            spare_chain: Vec::new(),
            spare_segments: Vec::new(),
        }
    }

    pub(super) const fn blocks(&self) -> usize {
        self.blocks
    }

    pub(super) fn nodes(&self) -> usize {
        self.children.len()
    }

    /// Returns the memory in bytes; what hangs on runs is counted, the tables beside them are estimated.
    pub(super) fn bytes(&self) -> usize {
        let runs = self.runs.capacity() * size_of::<Option<Run>>() + self.run_bytes;
        let children = self.children.allocation_size() + self.free.len() * size_of::<RunId>();
        let details = self.details.allocation_size() + self.details.len() * DETAIL_BYTES;
        runs + children + details + self.chunks.bytes()
    }

    pub(super) const fn run_bytes(&self) -> usize {
        self.run_bytes
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

    /// Returns all ids, those of runs that are gone included.
    pub(super) fn ids(&self) -> impl Iterator<Item = RunId> {
        (0..ROOT).take(self.runs.len())
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = (RunId, &Run)> {
        (0..)
            .zip(&self.runs)
            .filter_map(|(id, run)| Some((id, run.as_ref()?)))
    }

    pub(super) const fn details(&self) -> &HashMap<(RunId, u16), Detail> {
        &self.details
    }

    pub(super) const fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    /// Finds the run that leaves at `origin` and begins with the block whose sequence hash is `first`.
    pub(super) fn child(&self, origin: Point, first: SequenceHash) -> Option<RunId> {
        let hash = self.hasher.hash_one(first.0);
        self.children
            .find(hash, |&id| self.is_child(id, origin, first))
            .copied()
    }

    /// Tells where in the tree a block lies.
    pub(super) fn locate(&self, place: Place) -> Location {
        let owner = self.chunks.owner(place.chunk());
        Location {
            run: owner.run,
            offset: as_offset(owner.position as usize * CHUNK_BLOCKS + place.offset()),
        }
    }

    /// Chains `hashes` onto the path that ends at `point`, finds the blocks, creating those that do not exist, and returns
    /// where they lie.
    pub(super) fn extend(&mut self, point: Point, hashes: &[LocalBlockHash]) -> Vec<Segment> {
        self.tick();
        let chain = self.chain(point, hashes);
        let mut segments = std::mem::take(&mut self.spare_segments);
        let mut at = point;
        let mut rest = chain.as_slice();
        while let Some(&next) = rest.first() {
            let known = self.run(at.run).map_or(0, |run| {
                run.matched(at.blocks, rest.len(), &self.chunks, |blocks| {
                    rest[blocks - 1]
                })
            });
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
            self.note_use(at.run);
            push_segment(&mut segments, at, blocks);
            at.blocks += blocks;
            rest = &rest[usize::from(blocks)..];
        }
        if chain.capacity() <= SPARE_BLOCKS {
            self.spare_chain = chain;
        }
        segments
    }

    /// Dates uses from now on.
    pub(super) fn date_uses(&mut self) {
        self.clock.get_or_insert_default();
    }

    /// Notes that a run was used.
    pub(super) fn note_use(&self, id: RunId) {
        if let (Some(clock), Some(run)) = (self.clock, self.run(id)) {
            run.note_use(clock.now);
        }
    }

    fn tick(&mut self) {
        if let Some(clock) = &mut self.clock {
            clock.stores += 1;
            if clock.stores == STORES_A_TICK {
                *clock = Clock {
                    now: clock.now.saturating_add(1),
                    stores: 0,
                };
            }
        }
    }

    /// Takes the memory of segments back for the next store.
    pub(super) fn take_back(&mut self, mut segments: Vec<Segment>) {
        segments.clear();
        self.spare_segments = segments;
    }

    fn chain(&mut self, point: Point, hashes: &[LocalBlockHash]) -> Vec<SequenceHash> {
        let (before, depth) = self.run(point.run).map_or((SequenceHash::EMPTY, 0), |run| {
            let last = run.hash(point.blocks - 1, &self.chunks);
            (last, run.depth as usize + usize::from(point.blocks))
        });
        let mut chain = std::mem::take(&mut self.spare_chain);
        chain.clear();
        before.continue_into(depth, hashes, &mut chain);
        chain
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
        let Some(run) = self.run(span.run) else {
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
                self.set_mark(slot, span.run, Some(mark));
            }
            _ => self.edit(slot, span.run, |detail| {
                detail.set(span.tier, span.unit, span.from, span.to);
            }),
        }
    }

    /// Makes `slot` no longer hold units, and gives back the blocks that nobody needs any more. Neighbours in a row, in
    /// either direction, go as one.
    pub(super) fn unhold(&mut self, slot: u16, units: &[Unit]) {
        let mut span: Option<Span> = None;
        let mut last = (
            Place::NONE,
            Location {
                run: ROOT,
                offset: 0,
            },
        );
        for unit in units {
            // Neighbours mostly share a chunk.
            let at = if unit.at.chunk() == last.0.chunk() {
                last.1.moved(last.0.offset(), unit.at.offset())
            } else {
                self.locate(unit.at)
            };
            last = (unit.at, at);
            let next = Span::one(at, unit.tier, unit.blocks);
            if span.as_mut().is_some_and(|span| span.grow(next)) {
                continue;
            }
            if let Some(span) = span.replace(next) {
                self.unhold_span(slot, span);
            }
        }
        if let Some(span) = span {
            self.unhold_span(slot, span);
        }
    }

    fn unhold_span(&mut self, slot: u16, span: Span) {
        let Some(run) = self.run(span.run) else {
            return;
        };
        let at_end = span.to == run.len();
        match run.holders.mark(slot) {
            None => {}
            Some(mark) if !mark.is_detailed() && span.is_plain() && span.to >= mark.cutoff() => {
                let cutoff = span.from.min(mark.cutoff());
                let mark = (cutoff > 0).then_some(Mark::plain(cutoff));
                self.set_mark(slot, span.run, mark);
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

    /// Returns the runs that the given chunks belong to.
    pub(super) fn runs_of(&self, chunks: &[ChunkId]) -> Vec<RunId> {
        let owner = |&chunk| self.chunks.owner(chunk).run;
        let mut runs: Vec<RunId> = chunks.iter().map(owner).collect();
        runs.sort_unstable();
        runs.dedup();
        runs
    }

    /// Makes `slot` hold nothing of the given runs; one that is gone already is passed over.
    pub(super) fn unhold_runs(&mut self, slot: u16, runs: &[RunId]) {
        for &id in runs {
            let Some(run) = self.run(id) else { continue };
            let held = run.holders.mark(slot);
            let held = held.map_or(0, |mark| self.held_blocks(id, slot, mark));
            let at_end = held == run.len();
            if let Some(detail) = self.details.remove(&(id, slot)) {
                self.coarse -= usize::from(detail.is_coarse());
            }
            self.set_mark(slot, id, None);
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
                self.change(id, |run, chunks| run.truncate(needed, chunks));
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

    pub(super) fn held_blocks(&self, run: RunId, slot: u16, mark: Mark) -> u16 {
        if mark.is_detailed() {
            self.details.get(&(run, slot)).map_or(0, Detail::last_end)
        } else {
            mark.cutoff()
        }
    }

    /// Changes a holding that is, or may become, more than a plain prefix, and returns it to the plain form when it is one.
    fn edit(&mut self, slot: u16, id: RunId, change: impl FnOnce(&mut Detail)) {
        let Some(run) = self.run(id) else {
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
        self.set_mark(slot, id, mark);
        shrink(&mut self.details);
    }

    fn set_mark(&mut self, slot: u16, id: RunId, mark: Option<Mark>) {
        let slots = self.slots;
        self.change(id, |run, _| run.holders.set(slot, mark, slots));
    }

    /// Changes a run, keeping count of the memory that hangs on it.
    fn change<T>(
        &mut self,
        id: RunId,
        change: impl FnOnce(&mut Run, &mut Chunks) -> T,
    ) -> Option<T> {
        let run = self.runs.get_mut(id as usize)?.as_mut()?;
        let before = run.bytes();
        let result = change(run, &mut self.chunks);
        self.run_bytes = self.run_bytes + run.bytes() - before;
        Some(result)
    }

    /// Appends to the run that ends at `at`, returning how many blocks fitted; `None` when it does not end there or is full.
    fn append(&mut self, at: Point, hashes: &[SequenceHash]) -> Option<u16> {
        let max = self.max_run_blocks;
        let run = self.run(at.run)?;
        if run.len() != at.blocks || run.len() >= max {
            return None;
        }
        let blocks = hashes.len().min(usize::from(max - run.len()));
        self.change(at.run, |run, chunks| {
            run.append(at.run, &hashes[..blocks], chunks);
        });
        self.blocks += blocks;
        Some(as_offset(blocks))
    }

    /// Creates a child with as many of `hashes` as one run takes.
    fn create(&mut self, origin: Point, hashes: &[SequenceHash]) -> RunId {
        let blocks = hashes.len().min(usize::from(self.max_run_blocks));
        let depth = self.change(origin.run, |parent, _| {
            parent.add_fork(origin.blocks);
            parent.depth + u32::from(origin.blocks)
        });
        let id = self.allocate(Run::new(origin, depth.unwrap_or(0)));
        self.change(id, |run, chunks| run.append(id, &hashes[..blocks], chunks));
        let Self {
            runs,
            hasher,
            children,
            ..
        } = self;
        let rehash = |&id: &RunId| run_hash(hasher, runs, id);
        children.insert_unique(hasher.hash_one(hashes[0].0), id, rehash);
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
        let Some(mut run) = self.runs[id as usize].take() else {
            return ROOT;
        };
        let origin = run.origin;
        let hash = self.hasher.hash_one(run.first().0);
        if let Ok(entry) = self.children.find_entry(hash, |&child| child == id) {
            entry.remove();
        }
        self.run_bytes -= run.bytes();
        run.truncate(0, &mut self.chunks);
        self.free.push(Reverse(id));
        self.shrink_runs();
        let parent_len = self.change(origin.run, |parent, _| {
            parent.remove_fork(origin.blocks);
            parent.len()
        });
        if parent_len == Some(origin.blocks) {
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

    fn is_child(&self, id: RunId, origin: Point, first: SequenceHash) -> bool {
        self.run(id)
            .is_some_and(|run| run.origin == origin && run.first() == first)
    }
}

impl Segment {
    pub(super) fn offsets(&self) -> impl Iterator<Item = u16> {
        self.offset..self.offset + self.blocks
    }

    /// Returns what lies beyond the first `held` blocks of the run, as a span of single blocks.
    pub(super) fn after(&self, held: u16, tier: Tier) -> Option<Span> {
        let span = Span {
            run: self.run,
            from: held.max(self.offset),
            to: self.offset + self.blocks,
            tier,
            unit: 1,
        };
        (span.from < span.to).then_some(span)
    }

    /// Returns the offsets of the last blocks of units of `unit` blocks, where `before` blocks of the path precede the
    /// segment.
    pub(super) fn unit_ends(&self, before: usize, unit: u32) -> impl Iterator<Item = u16> {
        let unit = unit as usize;
        let end = before + usize::from(self.blocks);
        // The first multiple of the unit above `before` is the end of the first unit that ends in this segment.
        let first = (before / unit + 1) * unit;
        let offset = self.offset;
        (first..=end)
            .step_by(unit)
            .map(move |end| offset + as_offset(end - before - 1))
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
    /// Returns how many leading blocks are held in `tier`, when that is a plain matter.
    pub(super) const fn prefix(&self, tier: Tier) -> Option<u16> {
        match (self, tier) {
            (Self::Nothing, _) => Some(0),
            (Self::Prefix(cutoff), Tier::Device) => Some(*cutoff),
            (Self::Prefix(_) | Self::Detail(_), _) => None,
        }
    }

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

fn run_hash(hasher: &DefaultHashBuilder, runs: &[Option<Run>], id: RunId) -> u64 {
    runs[id as usize]
        .as_ref()
        .map_or(0, |run| hasher.hash_one(run.first().0))
}

/// Gives room back once a map is mostly empty.
pub(super) fn shrink<K: Eq + std::hash::Hash, V>(map: &mut HashMap<K, V>) {
    if map.capacity() > 4 * map.len() + SLACK {
        map.shrink_to(2 * map.len());
    }
}

/// Idle places that are not worth giving back.
const SLACK: usize = 32;

/// Estimated memory of a detail beside its entry: one layer of a few words.
const DETAIL_BYTES: usize = 96;

/// Longest memory of a chain that is kept between stores: 8 KiB.
const SPARE_BLOCKS: usize = 1_024;
