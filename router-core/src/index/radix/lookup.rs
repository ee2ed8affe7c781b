//! Looking a prompt up for every slot at once.

use super::detail::{Layer, for_each_word};
use super::holders::{Holders, Mark};
use super::node::{Point, Run, RunId};
use super::tree::{Tree, View};
use crate::block::{LocalBlockHash, SequenceHash};
use crate::ids::Slot;
use crate::index::{Overlap, Overlaps, Tier};

/// Working memory of lookups, kept in the answer so that it is allocated once.
#[derive(Clone, Debug, Default)]
pub(in crate::index) struct Scratch {
    /// Slots met that hold units of several blocks.
    coarse: Vec<u16>,
    /// Blocks by their best tier that one slot holds in one run, where lower tiers may be among them.
    lower: Vec<(u16, [u32; Tier::ALL.len()])>,
    path: Vec<Visit>,
    cover: Cover,
}

/// The prompt that is looked up, and the sequence hash of as much of it as was asked for last.
#[derive(Debug)]
struct Query<'a> {
    local_hashes: &'a [LocalBlockHash],
    blocks: usize,
    hash: SequenceHash,
}

/// Blocks of the prompt that one slot holds, a bit each, by tier.
#[derive(Clone, Debug, Default)]
struct Cover {
    tiers: [Vec<u64>; Tier::ALL.len()],
}

/// A run on the prompt's path.
#[derive(Clone, Copy, Debug)]
struct Visit {
    run: RunId,
    /// Blocks of the prompt before the run.
    before: u32,
    /// Blocks of the run that the prompt matches.
    matched: u16,
}

impl Tree {
    /// Answers for every slot.
    ///
    /// The array of depths (unbroken leading blocks, counting units of one block) is the set of slots still in the race: at
    /// each run, a holder whose depth equals the blocks before the run advances by what it holds of the matched part. Slots
    /// that hold units of several blocks are looked at again at the end, since a unit counts by its last block, which may lie
    /// in a later run.
    pub(super) fn overlap(&self, query: &[LocalBlockHash], overlaps: &mut Overlaps) {
        overlaps.reset(self.slots());
        let Overlaps {
            device, scratch, ..
        } = overlaps;
        scratch.begin();
        let mut query = Query {
            local_hashes: query,
            blocks: 0,
            hash: SequenceHash::EMPTY,
        };
        self.walk(&mut query, device, scratch);
        if !scratch.lower.is_empty() || !scratch.coarse.is_empty() {
            self.finish(overlaps);
        }
    }

    /// Puts in what is not plainly on the device.
    #[cold]
    fn finish(&self, overlaps: &mut Overlaps) {
        let mut scratch = std::mem::take(&mut overlaps.scratch);
        for &(slot, ref counts) in &scratch.lower {
            let overlap = overlaps.at(Slot(slot.into()));
            for tier in [Tier::Host, Tier::External, Tier::Disk] {
                overlap.add(tier, counts[tier.index()]);
                overlap.device -= counts[tier.index()];
            }
        }
        scratch.coarse.sort_unstable();
        scratch.coarse.dedup();
        for &slot in &scratch.coarse {
            let answer = self.overlap_coarse(slot, &scratch.path, &mut scratch.cover);
            *overlaps.at(Slot(slot.into())) = answer;
        }
        overlaps.scratch = scratch;
    }

    fn walk(&self, query: &mut Query<'_>, depth: &mut [u32], scratch: &mut Scratch) {
        let mut at = Point::ROOT;
        let mut before = 0;
        let mut next = query.at(0).and_then(|first| self.child(at, first));
        while let Some(id) = next
            && let Some(run) = self.run(id)
        {
            let (matched, child) = self.follow(id, run, query, before);
            self.note_use(id);
            let visit = Visit {
                run: id,
                before,
                matched,
            };
            let reached = self.visit(run, visit, depth, scratch);
            if self.coarse() > 0 {
                scratch.path.push(visit);
            } else if !reached {
                break;
            }
            before += u32::from(matched);
            at = Point {
                run: id,
                blocks: matched,
            };
            next = child.or_else(|| self.child(at, query.at(before as usize)?));
        }
    }

    /// Counts the blocks of a run that a query matches which goes on there after `before` blocks, with the child that it
    /// leaves by where that was the way to find out.
    ///
    /// The place where most prompts leave is tried first: a child that is found there proves all before it. What turns off
    /// just there is next; all else is found by the run's end and by bisection.
    fn follow(
        &self,
        id: RunId,
        run: &Run,
        query: &mut Query<'_>,
        before: u32,
    ) -> (u16, Option<RunId>) {
        let begin = before as usize;
        let blocks = run.hint();
        let leaves = begin + usize::from(blocks);
        if blocks > 0
            && blocks < run.len()
            && let Some(next) = query.at(leaves)
        {
            let child = self.child(Point { run: id, blocks }, next);
            if child.is_some() {
                return (blocks, child);
            }
            let is_before = query.at(leaves - 1) == Some(run.hash(blocks - 1, self.chunks()));
            if is_before && run.hash(blocks, self.chunks()) != next {
                return (blocks, None);
            }
        }
        let most = query.local_hashes.len() - begin;
        let matched = run.matched(0, most, self.chunks(), |blocks| query.after(begin + blocks));
        (matched, None)
    }

    /// Advances the holders of one run, telling whether any of them holds all of the matched part.
    fn visit(&self, run: &Run, visit: Visit, depth: &mut [u32], scratch: &mut Scratch) -> bool {
        if let Holders::Dense {
            marks, detailed: 0, ..
        } = &run.holders
        {
            return advance_all(depth, marks, visit);
        }
        let mut reached = false;
        let advance = |slot: u16, mark: Mark| {
            let depth = &mut depth[usize::from(slot)];
            let in_race = *depth == visit.before;
            if in_race {
                let blocks = mark.cutoff().min(visit.matched);
                *depth += u32::from(blocks);
                reached |= blocks == visit.matched;
            }
            if mark.is_detailed() {
                let Scratch { coarse, lower, .. } = scratch;
                self.visit_detail(slot, visit, in_race, coarse, lower);
            }
        };
        run.holders.for_each(advance);
        reached
    }

    /// Tells tiers apart for a slot whose holding is more than a plain prefix.
    #[cold]
    fn visit_detail(
        &self,
        slot: u16,
        visit: Visit,
        in_race: bool,
        coarse: &mut Vec<u16>,
        lower: &mut Vec<(u16, [u32; Tier::ALL.len()])>,
    ) {
        let View::Detail(detail) = self.view(slot, visit.run) else {
            return;
        };
        if detail.is_coarse() {
            coarse.push(slot);
        } else if in_race {
            let blocks = detail.unit_prefix().min(visit.matched);
            lower.push((slot, detail.best_tiers(blocks)));
        }
    }

    /// Answers for one slot that holds units of several blocks: covers the blocks of each unit whose end is on the path.
    fn overlap_coarse(&self, slot: u16, path: &[Visit], cover: &mut Cover) -> Overlap {
        let blocks = path.last().map_or(0, Visit::end);
        cover.begin(blocks);
        for visit in path {
            match self.view(slot, visit.run) {
                View::Nothing => {}
                View::Prefix(cutoff) => {
                    let blocks = usize::from(cutoff.min(visit.matched));
                    cover.add(Tier::Device, visit.begin(), visit.begin() + blocks);
                }
                View::Detail(detail) => {
                    for layer in detail.layers() {
                        cover.add_units(layer, *visit);
                    }
                }
            }
        }
        cover.overlap()
    }
}

impl Query<'_> {
    /// Returns the sequence hash of the block at `index`, `None` beyond the end.
    fn at(&mut self, index: usize) -> Option<SequenceHash> {
        (index < self.local_hashes.len()).then(|| self.after(index + 1))
    }

    /// Returns the sequence hash of the first `blocks` blocks, reached from where the last answer was.
    fn after(&mut self, blocks: usize) -> SequenceHash {
        self.hash = if blocks >= self.blocks {
            let between = &self.local_hashes[self.blocks..blocks];
            self.hash.advanced(self.blocks, between)
        } else {
            let between = &self.local_hashes[blocks..self.blocks];
            self.hash.withdrawn(blocks, between)
        };
        self.blocks = blocks;
        self.hash
    }
}

impl Visit {
    const fn begin(&self) -> usize {
        self.before as usize
    }

    fn end(&self) -> usize {
        self.begin() + usize::from(self.matched)
    }
}

impl Cover {
    fn begin(&mut self, blocks: usize) {
        for bits in &mut self.tiers {
            bits.clear();
            bits.resize(blocks.div_ceil(64), 0);
        }
    }

    fn add(&mut self, tier: Tier, from: usize, to: usize) {
        let bits = &mut self.tiers[tier.index()];
        for_each_word(from, to, |word, mask| bits[word] |= mask);
    }

    /// Adds the units of a layer that end in the matched part of a run; units that touch or overlap are added at once, so
    /// that the cost does not grow with their length.
    fn add_units(&mut self, layer: &Layer, visit: Visit) {
        let (mut from, mut to) = (0, 0);
        for offset in layer.ends(visit.matched) {
            let end = visit.begin() + usize::from(offset) + 1;
            let begin = end.saturating_sub(layer.unit as usize);
            if begin > to {
                self.add(layer.tier, from, to);
                from = begin;
            }
            to = end;
            from = from.min(begin);
        }
        self.add(layer.tier, from, to);
    }

    /// Counts the unbroken blocks from the first on, each at its best tier.
    fn overlap(&self) -> Overlap {
        let mut overlap = Overlap::default();
        for word in 0..self.tiers[0].len() {
            let union = self.tiers.iter().fold(0, |union, bits| union | bits[word]);
            let blocks = union.trailing_ones();
            let mut open = u64::MAX.checked_shr(64 - blocks).unwrap_or(0);
            for tier in Tier::ALL {
                let held = open & self.tiers[tier.index()][word];
                overlap.add(tier, held.count_ones());
                open &= !held;
            }
            if blocks < 64 {
                break;
            }
        }
        overlap
    }
}

/// Advances every slot of a run without details; free of branches, so that it compiles to vector instructions.
fn advance_all(depth: &mut [u32], marks: &[u16], visit: Visit) -> bool {
    let mut most = 0;
    for (depth, &mark) in depth.iter_mut().zip(marks) {
        let in_race = u16::from(*depth == visit.before).wrapping_neg();
        let blocks = mark.min(visit.matched) & in_race;
        most = most.max(blocks);
        *depth += u32::from(blocks);
    }
    most == visit.matched
}

impl Scratch {
    fn begin(&mut self) {
        self.coarse.clear();
        self.lower.clear();
        self.path.clear();
    }
}
