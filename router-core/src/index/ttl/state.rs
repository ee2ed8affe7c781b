//! One shard: a tree of placed prompts, and each slot's order of recency in it.

use super::slab::{NONE, Slab};
use super::timers::{Timer, Timers};
use super::tree::{Tree, Walk};
use super::{Moment, Placement, TtlStats};
use crate::block::LocalBlockHash;
use crate::ids::Slot;

/// The blocks that one placement was the last to touch: depths `end - blocks .. end` of its prompt.
#[derive(Debug)]
pub(super) struct Run {
    /// Distinguishes this run from others that had its number before or will have it.
    pub(super) stamp: u64,
    /// When its timer goes off: the deadline of its last block, or an earlier time when it lost blocks since.
    pub(super) timer: Moment,
    pub(super) slot: u32,
    /// Node that its last block lies in.
    pub(super) tail: u32,
    pub(super) end: u32,
    pub(super) blocks: u32,
    /// Neighbours in the slot's order of recency.
    pub(super) older: u32,
    pub(super) newer: u32,
}

#[derive(Debug)]
struct SlotState {
    blocks: usize,
    oldest: u32,
    newest: u32,
    runs: usize,
    timers: Timers,
}

impl Default for SlotState {
    fn default() -> Self {
        Self {
            blocks: 0,
            oldest: NONE,
            newest: NONE,
            runs: 0,
            timers: Timers::default(),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    tree: Tree,
    runs: Slab<Run>,
    slots: Vec<SlotState>,
    /// Blocks taken over from older runs by the placement at work: (run, blocks).
    taken: Vec<(u32, u32)>,
    due: Vec<Timer>,
}

impl State {
    pub(super) const fn slots(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn blocks(&self, slot: u32) -> usize {
        self.slots.get(slot as usize).map_or(0, |slot| slot.blocks)
    }

    /// Returns when the least recently used run of a slot was recorded.
    pub(super) fn oldest_stamp(&self, slot: u32) -> Option<u64> {
        self.oldest(slot).map(|run| self.runs[run].stamp)
    }

    pub(super) fn add_to(&self, stats: &mut TtlStats) {
        stats.held_blocks += self.slots.iter().map(|slot| slot.blocks).sum::<usize>();
        stats.blocks += self.tree.blocks();
        stats.nodes += self.tree.nodes();
        stats.placements += self.runs.len();
    }

    pub(super) fn overlap(&self, prompt: &[LocalBlockHash], now: Moment, depths: &mut [u32]) {
        self.tree.overlap(prompt, now, depths);
    }

    /// Records a prompt. Stamps of one slot rise.
    pub(super) fn record(
        &mut self,
        slot: Slot,
        prompt: &[LocalBlockHash],
        deadline: Moment,
        stamp: u64,
    ) -> Placement {
        self.slot_mut(slot);
        let length = prompt.len().min(MAX_DEPTH);
        let run = self.runs.insert(Run {
            stamp,
            timer: deadline,
            slot: slot.0,
            tail: NONE,
            end: 0,
            blocks: 0,
            older: NONE,
            newer: NONE,
        });
        let walk = Walk {
            slot: slot.0,
            run,
            deadline,
        };
        let placed = self
            .tree
            .place(&prompt[..length], &walk, &mut self.runs, &mut self.taken);
        if placed.end == 0 {
            self.runs.remove(run);
            return Placement::NOTHING;
        }
        let entry = &mut self.runs[run];
        (entry.tail, entry.end, entry.blocks) = (placed.tail, placed.end, placed.end);
        entry.timer = placed.tail_deadline;
        self.slots[slot.index()].blocks += (placed.end - placed.held) as usize;
        self.link_newest(run);
        self.settle_taken();
        Placement {
            slot: slot.0,
            run,
            stamp,
            held_blocks: placed.held,
            end_blocks: placed.end,
            ..Placement::NOTHING
        }
    }

    pub(super) fn undo(&mut self, placement: &Placement) {
        if let Some(from) = self.created_from(placement) {
            let created = self.runs[placement.run].end.saturating_sub(from);
            self.release(placement.run, created);
        }
    }

    /// Returns after how many blocks of its prompt those begin that a placement created and no later one touched; `None`
    /// where none is left.
    pub(super) fn created_from(&self, placement: &Placement) -> Option<u32> {
        let run = self.runs.get(placement.run)?;
        let is_same = (run.slot, run.stamp) == (placement.slot, placement.stamp);
        is_same.then(|| placement.held_blocks.max(run.end - run.blocks))
    }

    /// Drops everything of `slot`.
    pub(super) fn clear(&mut self, slot: u32) {
        while let Some(run) = self.oldest(slot) {
            let all = self.runs[run].blocks;
            self.release(run, all);
        }
        if let Some(slot) = self.slots.get_mut(slot as usize) {
            slot.timers = Timers::default();
        }
        self.drop_vacant_slots();
    }

    /// Drops up to `excess` blocks of the least recently used run of a slot, from its tail.
    pub(super) fn evict(&mut self, slot: u32, excess: usize) {
        if let Some(run) = self.oldest(slot) {
            self.release(run, u32::try_from(excess).unwrap_or(u32::MAX));
        }
    }

    /// Returns the state of `slot`, creating it and those before it.
    fn slot_mut(&mut self, slot: Slot) -> &mut SlotState {
        if self.slots.len() <= slot.index() {
            self.slots.resize_with(slot.index() + 1, SlotState::default);
        }
        &mut self.slots[slot.index()]
    }

    /// Forgets slots at the end that hold nothing.
    pub(super) fn drop_vacant_slots(&mut self) {
        while self.slots.last().is_some_and(|last| last.blocks == 0) {
            self.slots.pop();
        }
        if 4 * self.slots.len() < self.slots.capacity() {
            self.slots.shrink_to_fit();
        }
    }

    fn oldest(&self, slot: u32) -> Option<u32> {
        let oldest = self.slots.get(slot as usize)?.oldest;
        (oldest != NONE).then_some(oldest)
    }

    pub(super) fn is_due(&self, slot: u32, now: Moment) -> bool {
        let slot = self.slots.get(slot as usize);
        slot.is_some_and(|slot| slot.timers.is_due(now))
    }

    /// Lists the slots of which something may have expired.
    pub(super) fn due(&self, now: Moment) -> Vec<u32> {
        let slots = (0..).zip(&self.slots);
        let due = slots.filter(|(_, slot)| slot.timers.is_due(now));
        due.map(|(number, _)| number).collect()
    }

    /// Drops the expired blocks of `slot`.
    ///
    /// A timer is never late, since the last block of a run has its earliest deadline; it may be early when the run lost
    /// blocks since it was set, and is then set again. Blocks below expired ones have expired as well and belong to older
    /// runs, so going from the oldest due run to the newest drops tails before what they hang on.
    pub(super) fn expire(&mut self, slot: u32, now: Moment) {
        if !self.is_due(slot, now) {
            return;
        }
        let mut due = std::mem::take(&mut self.due);
        while let Some(timer) = self.slots[slot as usize].timers.take_due(now) {
            if is_set(&self.runs, slot, &timer) {
                due.push(timer);
            }
        }
        due.sort_unstable_by_key(|timer| timer.stamp);
        for timer in due.drain(..) {
            self.expire_run(timer.run, now);
        }
        self.due = due;
    }

    /// Drops the expired tail of a run and sets the timer of what stays.
    fn expire_run(&mut self, run: u32, now: Moment) {
        while let Some(entry) = self.runs.get(run) {
            let slot = entry.slot;
            let tail = self.tree.last_stair(entry.tail, slot, run);
            if tail.deadline > now {
                self.runs[run].timer = tail.deadline;
                self.set_timer(slot, run);
                return;
            }
            self.release(run, tail.blocks);
        }
    }

    /// Drops the last `blocks` blocks of a run, and the run with its last block.
    fn release(&mut self, run: u32, blocks: u32) {
        let mut left = blocks.min(self.runs[run].blocks);
        while left > 0 {
            let entry = &mut self.runs[run];
            let node = entry.tail;
            let cut = self.tree.cut(node, entry.slot, left);
            entry.blocks -= cut.blocks;
            entry.end -= cut.blocks;
            entry.tail = cut.tail;
            left -= cut.blocks;
            self.slots[entry.slot as usize].blocks -= cut.blocks as usize;
            if entry.blocks == 0 {
                self.remove_run(run);
            }
            self.tree.trim(node, &mut self.runs);
        }
    }

    /// Charges older runs with the blocks that a placement took over, and drops those that have none left.
    fn settle_taken(&mut self) {
        let taken = std::mem::take(&mut self.taken);
        for &(run, blocks) in &taken {
            self.runs[run].blocks -= blocks;
            if self.runs[run].blocks == 0 {
                self.remove_run(run);
            }
        }
        self.taken = taken;
        self.taken.clear();
    }

    fn link_newest(&mut self, run: u32) {
        let entry = &mut self.runs[run];
        let (number, slot) = (entry.slot, &mut self.slots[entry.slot as usize]);
        entry.older = slot.newest;
        slot.runs += 1;
        let older = std::mem::replace(&mut slot.newest, run);
        if older == NONE {
            slot.oldest = run;
        } else {
            self.runs[older].newer = run;
        }
        self.set_timer(number, run);
    }

    fn set_timer(&mut self, slot: u32, run: u32) {
        let Self { runs, slots, .. } = self;
        let entry = &runs[run];
        let timer = Timer {
            at: entry.timer,
            stamp: entry.stamp,
            run,
        };
        let state = &mut slots[slot as usize];
        state.timers.set(timer);
        state
            .timers
            .sweep(state.runs, |timer| is_set(runs, slot, timer));
    }

    fn remove_run(&mut self, run: u32) {
        let entry = self.runs.remove(run);
        let Self { runs, slots, .. } = self;
        let slot = &mut slots[entry.slot as usize];
        slot.runs -= 1;
        if slot.runs == 0 {
            slot.timers.forget();
        } else {
            slot.timers
                .sweep(slot.runs, |timer| is_set(runs, entry.slot, timer));
        }
        if entry.older == NONE {
            slot.oldest = entry.newer;
        } else {
            self.runs[entry.older].newer = entry.newer;
        }
        if entry.newer == NONE {
            slot.newest = entry.older;
        } else {
            self.runs[entry.newer].older = entry.older;
        }
    }
}

/// Blocks of one prompt that are recorded at most, so that depths fit 32 bits.
const MAX_DEPTH: usize = u32::MAX as usize - 1;

/// Tells whether a timer is that of a run of `slot`, as it was last set.
fn is_set(runs: &Slab<Run>, slot: u32, timer: &Timer) -> bool {
    runs.get(timer.run)
        .is_some_and(|run| (run.slot, run.stamp, run.timer) == (slot, timer.stamp, timer.at))
}

#[cfg(test)]
impl State {
    /// Checks that runs, slots and the tree agree.
    pub(super) fn check(&self) {
        let in_tree = self.tree.check(&self.runs);
        let mut per_slot: std::collections::BTreeMap<u32, usize> =
            std::collections::BTreeMap::new();
        for (number, run) in self.runs.iter() {
            assert_eq!(in_tree.get(&number), Some(&run.blocks), "run {number}");
            let timer = Timer {
                at: run.timer,
                stamp: run.stamp,
                run: number,
            };
            assert!(self.slots[run.slot as usize].timers.contains(&timer));
            assert!(run.timer <= self.tree.last_stair(run.tail, run.slot, number).deadline);
            *per_slot.entry(run.slot).or_default() += run.blocks as usize;
        }
        for (slot, state) in (0..).zip(&self.slots) {
            assert_eq!(per_slot.get(&slot).copied().unwrap_or(0), state.blocks);
            let mut stamps = Vec::new();
            let mut run = state.oldest;
            while run != NONE {
                stamps.push(self.runs[run].stamp);
                run = self.runs[run].newer;
            }
            assert!(stamps.is_sorted());
            assert_eq!(stamps.len(), state.runs);
            assert!(state.timers.len() <= 2 * state.runs + super::timers::SLACK);
        }
    }

    /// Bytes on the heap that grow with what is held, as the capacities of the containers have it.
    pub(super) fn heap_bytes(&self) -> usize {
        const TIMER: usize = 2 * size_of::<Timer>(); // one of two may mean nothing any more
        const MALLOC: usize = 16;
        self.tree.heap_bytes() + self.runs.len() * (size_of::<Run>() + MALLOC + 8 + TIMER)
    }
}
