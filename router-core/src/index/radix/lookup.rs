//! Looking a prompt up for every slot at once.

use super::holders::{Holders, Mark};
use super::node::{Point, Run, RunId};
use super::tree::{Tree, View};
use crate::block::LocalBlockHash;
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
    /// Best tier of each block for one slot.
    best: Vec<Option<Tier>>,
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
    /// The array of depths (unbroken leading blocks, counting units of one block) is the set of slots still in the race: at each run, a holder whose depth equals the blocks
    /// before the run advances by what it holds of the matched part. Slots that hold units of several blocks are looked
    /// at again at the end, since a unit counts by its last block, which may lie in a later run.
    pub(super) fn overlap(&self, query: &[LocalBlockHash], overlaps: &mut Overlaps) {
        overlaps.reset(self.slots());
        let Overlaps {
            device, scratch, ..
        } = overlaps;
        scratch.begin();
        self.walk(query, device, scratch);
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
            let answer = self.overlap_coarse(slot, &scratch.path, &mut scratch.best);
            *overlaps.at(Slot(slot.into())) = answer;
        }
        overlaps.scratch = scratch;
    }

    fn walk(&self, query: &[LocalBlockHash], depth: &mut [u32], scratch: &mut Scratch) {
        let mut at = Point::ROOT;
        let mut before = 0_u32;
        let mut rest = query;
        while let Some(&next) = rest.first()
            && let Some(id) = self.child(at, next)
            && let Some(run) = self.run(id)
        {
            let matched = run.matched(0, rest);
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
            rest = &rest[usize::from(matched)..];
            at = Point {
                run: id,
                blocks: matched,
            };
        }
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

    /// Answers for one slot, block by block.
    fn overlap_coarse(&self, slot: u16, path: &[Visit], best: &mut Vec<Option<Tier>>) -> Overlap {
        best.clear();
        for visit in path {
            best.resize(best.len() + usize::from(visit.matched), None);
            let before = visit.before as usize;
            match self.view(slot, visit.run) {
                View::Nothing => {}
                View::Prefix(cutoff) => {
                    let blocks = usize::from(cutoff.min(visit.matched));
                    best[before..before + blocks].fill(Some(Tier::Device));
                }
                View::Detail(detail) => {
                    for layer in detail.layers() {
                        for offset in layer.ends(visit.matched) {
                            let end = before + usize::from(offset) + 1;
                            let begin = end.saturating_sub(layer.unit as usize);
                            for block in &mut best[begin..end] {
                                *block =
                                    Some(block.map_or(layer.tier, |known| known.min(layer.tier)));
                            }
                        }
                    }
                }
            }
        }
        let mut overlap = Overlap::default();
        for tier in best.iter().map_while(|tier| *tier) {
            overlap.add(tier, 1);
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
