//! Approximate entries: what we sent where, believed until a deadline.
//!
//! # Model
//! Per slot the index holds a set of blocks closed under prefixes: a block is held only together with every block before it.
//! Each held block has a *deadline* and a *recency*. Recording a prompt touches its whole prefix, so along any prompt both
//! never rise, and whatever leaves (expiry, eviction, undo) leaves from the tail. That is also what an engine does: it frees
//! the blocks of a finished request tail first and evicts the least recently used.
//!
//! # Structure
//! One radix tree over local hashes for all slots. Blocks lie in the edges, once, whoever holds them. A slot's share of a
//! node is a staircase: usually one stair, more when prompts of different length or TTL met there. The blocks that one
//! placement was the last to touch form one contiguous *run* of its prompt; runs of a slot are linked by recency and each
//! has one timer. A placement therefore costs bookkeeping per run and per node, and 8 bytes per block: 7 bytes per held block
//! for conversations of 256 blocks whose turns migrate now and then, 25 for unrelated prompts with 16 blocks of their own,
//! 290 where each has just one.
//!
//! # Expiry
//! Lookups compare deadlines, so an expired block is never credited. It leaves memory at the next
//! [`record`](TtlIndex::record) to its slot or at the next [`expire`](TtlIndex::expire), whichever comes first: memory holds
//! at most what expired since then. Call `expire` once a second or so; it costs one comparison per slot, plus the work of
//! what is due.
//!
//! # Consistency
//! Every operation is atomic. A lookup that races a placement sees all of it or nothing.

mod slab;
mod tree;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::time::Instant;

use serde::Serialize;

use self::slab::{NONE, Slab};
use self::tree::{Tree, Walk};
use crate::block::LocalBlockHash;
use crate::ids::Slot;
use crate::sync::RwLock;

/// An index of placements with deadlines, over slots. See the [module](self) for how it works.
///
/// # Examples
/// ```
/// use std::time::{Duration, Instant};
/// use kvlane::index::TtlIndex;
/// use kvlane::{BlockSize, SaltContext, Slot, block_hashes};
///
/// # #[expect(clippy::disallowed_methods, reason = "a caller has a clock")]
/// let now = Instant::now();
/// let prompt = block_hashes(&[1, 2, 3, 4, 5, 6, 7, 8], BlockSize::new(4)?, &SaltContext::default());
/// let index = TtlIndex::new();
/// index.record(Slot(1), &prompt.local, now + Duration::from_secs(120), now);
///
/// let mut depths = Vec::new();
/// index.overlap(&prompt.local, now, &mut depths);
/// assert_eq!(depths, [0, 2]); // two blocks on slot 1
/// index.overlap(&prompt.local, now + Duration::from_secs(120), &mut depths);
/// assert_eq!(depths, [0, 0]); // no longer believed
/// # Ok::<(), kvlane::Error>(())
/// ```
#[derive(Default)]
pub struct TtlIndex {
    state: RwLock<State>,
}

/// What one [`TtlIndex::record`] did; hand it to [`TtlIndex::undo`] when the dispatch failed.
#[derive(Debug)]
pub struct Placement {
    run: u32,
    stamp: u64,
    held_blocks: u32,
    end_blocks: u32,
}

/// Size of a [`TtlIndex`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TtlStats {
    /// Blocks in memory, counted once per slot that holds them.
    pub held_blocks: usize,
    /// Blocks in memory, counted once.
    pub blocks: usize,
    /// Nodes of the tree.
    pub nodes: usize,
    /// Placements that were the last to touch some block.
    pub placements: usize,
}

impl TtlIndex {
    /// Creates an empty index without capacity bounds.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Records that the blocks of a prompt are on `slot`, to be believed until `deadline`.
    ///
    /// Blocks that the slot holds already keep the later of both deadlines, and become the most recently used. Expired
    /// blocks of the slot leave first; then a bounded slot evicts, least recently used prompt first and from its tail. A
    /// prompt longer than the slot's capacity is recorded up to it. A `deadline` that is not after `now` records nothing.
    ///
    /// Cost: a step per node on the prompt's way, the copy of blocks that are new, and time in proportion to what leaves.
    pub fn record(
        &self,
        slot: Slot,
        local_hashes: &[LocalBlockHash],
        deadline: Instant,
        now: Instant,
    ) -> Placement {
        if deadline <= now || local_hashes.is_empty() {
            return Placement::NOTHING;
        }
        self.state.write().record(slot, local_hashes, deadline, now)
    }

    /// Takes a placement back, because the prompt never reached the slot.
    ///
    /// Removes the blocks that the placement created and that no later placement touched; what others had put there, or
    /// have counted on since, stays. Deadlines and recency that it raised stay raised, and what it evicted stays away.
    /// Does nothing when the blocks have left meanwhile.
    ///
    /// # Examples
    /// ```
    /// use std::time::{Duration, Instant};
    /// use kvlane::index::TtlIndex;
    /// use kvlane::{LocalBlockHash, Slot};
    ///
    /// # #[expect(clippy::disallowed_methods, reason = "a caller has a clock")]
    /// let now = Instant::now();
    /// let (until, prompt) = (now + Duration::from_secs(120), [LocalBlockHash(1), LocalBlockHash(2), LocalBlockHash(3)]);
    /// let index = TtlIndex::new();
    /// index.record(Slot(0), &prompt[..1], until, now);
    /// let failed = index.record(Slot(0), &prompt, until, now);
    /// assert_eq!(failed.created_blocks(), 2);
    /// index.undo(failed);
    /// assert_eq!(index.blocks(Slot(0)), 1);
    /// ```
    #[expect(
        clippy::needless_pass_by_value,
        reason = "a placement is taken back once"
    )]
    pub fn undo(&self, placement: Placement) {
        if placement.created_blocks() > 0 {
            self.state.write().undo(&placement);
        }
    }

    /// Looks up a prompt: `depths[slot]` becomes the number of its leading blocks that the slot is believed to hold at `now`.
    ///
    /// `depths` is cleared first; slots beyond its end hold nothing. Cost: a step per node on the prompt's way as far as any
    /// slot holds it, and per holder of each; a slot that holds none of the prompt costs four zero bytes. 0.5 µs for 256
    /// blocks among 10,000 conversations on 64 slots.
    pub fn overlap(&self, local_hashes: &[LocalBlockHash], now: Instant, depths: &mut Vec<u32>) {
        let state = self.state.read();
        depths.clear();
        depths.resize(state.slots.len(), 0);
        state.tree.overlap(local_hashes, now, depths);
    }

    /// Bounds the blocks of a slot, or lifts the bound; evicts at once what is over it. A bound of 0 keeps nothing.
    ///
    /// Blocks that expired but have not left memory count until they do: call [`expire`](Self::expire) first where it matters.
    pub fn set_capacity(&self, slot: Slot, capacity_blocks: Option<usize>) {
        let mut state = self.state.write();
        state.slot_mut(slot).capacity = capacity_blocks;
        state.evict(slot.0);
        state.drop_vacant_slots();
    }

    /// Returns the blocks of `slot` in memory, expired ones that have not left included.
    #[must_use]
    pub fn blocks(&self, slot: Slot) -> usize {
        let state = self.state.read();
        state.slots.get(slot.index()).map_or(0, |slot| slot.blocks)
    }

    /// Drops everything of `slot`, returning its memory; the capacity bound stays.
    pub fn clear(&self, slot: Slot) {
        let mut state = self.state.write();
        while let Some(run) = state.oldest(slot.0) {
            let all = state.runs[run].blocks;
            state.release(run, all);
        }
        state.drop_vacant_slots();
    }

    /// Drops every block whose deadline is not after `now`.
    ///
    /// Slots are taken one after the other, so that others wait for the expired blocks of one slot at most.
    pub fn expire(&self, now: Instant) {
        let slots = self.state.read().slots.len();
        for slot in (0..slots).filter_map(|slot| u32::try_from(slot).ok()) {
            if self.state.read().is_due(slot, now) {
                self.state.write().expire(slot, now);
            }
        }
        self.state.write().drop_vacant_slots();
    }

    /// Returns the size of the index.
    #[must_use]
    pub fn stats(&self) -> TtlStats {
        let state = self.state.read();
        TtlStats {
            held_blocks: state.slots.iter().map(|slot| slot.blocks).sum(),
            blocks: state.tree.blocks(),
            nodes: state.tree.nodes(),
            placements: state.runs.len(),
        }
    }
}

impl fmt::Debug for TtlIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TtlIndex")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Placement {
    const NOTHING: Self = Self {
        run: NONE,
        stamp: 0,
        held_blocks: 0,
        end_blocks: 0,
    };

    /// Returns how many blocks of the prompt the slot was not believed to hold before.
    #[must_use]
    pub const fn created_blocks(&self) -> u32 {
        self.end_blocks - self.held_blocks
    }
}

/// The blocks that one placement was the last to touch: depths `end - blocks .. end` of its prompt.
#[derive(Debug)]
struct Run {
    /// Distinguishes this run from others that had its number before or will have it.
    stamp: u64,
    /// When its timer goes off: the deadline of its last block, or an earlier time when it lost blocks since.
    timer: Instant,
    slot: u32,
    /// Node that its last block lies in.
    tail: u32,
    end: u32,
    blocks: u32,
    /// Neighbours in the slot's order of recency.
    older: u32,
    newer: u32,
}

#[derive(Debug)]
struct SlotState {
    capacity: Option<usize>,
    blocks: usize,
    oldest: u32,
    newest: u32,
    timers: BTreeSet<(Instant, u32)>,
}

impl SlotState {
    const VACANT: Self = Self {
        capacity: None,
        blocks: 0,
        oldest: NONE,
        newest: NONE,
        timers: BTreeSet::new(),
    };
}

#[derive(Debug, Default)]
struct State {
    tree: Tree,
    runs: Slab<Run>,
    slots: Vec<SlotState>,
    last_stamp: u64,
    /// Blocks taken over from older runs by the placement at work: (run, blocks).
    taken: Vec<(u32, u32)>,
}

impl State {
    fn record(
        &mut self,
        slot: Slot,
        local_hashes: &[LocalBlockHash],
        deadline: Instant,
        now: Instant,
    ) -> Placement {
        self.expire(slot.0, now);
        let capacity = self.slot_mut(slot).capacity.unwrap_or(usize::MAX);
        let length = local_hashes.len().min(capacity).min(MAX_DEPTH);
        self.last_stamp += 1;
        let stamp = self.last_stamp;
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
        let placed = self.tree.place(
            &local_hashes[..length],
            &walk,
            &mut self.runs,
            &mut self.taken,
        );
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
        self.evict(slot.0);
        Placement {
            run,
            stamp,
            held_blocks: placed.held,
            end_blocks: placed.end,
        }
    }

    fn undo(&mut self, placement: &Placement) {
        let Some(run) = self.runs.get(placement.run) else {
            return;
        };
        if run.stamp == placement.stamp {
            let keep_from = placement.held_blocks.max(run.end - run.blocks);
            let created = run.end.saturating_sub(keep_from);
            self.release(placement.run, created);
        }
    }

    /// Returns the state of `slot`, creating it and those before it.
    fn slot_mut(&mut self, slot: Slot) -> &mut SlotState {
        if self.slots.len() <= slot.index() {
            self.slots
                .resize_with(slot.index() + 1, || SlotState::VACANT);
        }
        &mut self.slots[slot.index()]
    }

    /// Forgets slots at the end that hold nothing and are not bounded.
    fn drop_vacant_slots(&mut self) {
        while let Some(last) = self.slots.last() {
            if last.blocks > 0 || last.capacity.is_some() {
                break;
            }
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

    /// Evicts until the slot keeps its bound: the least recently used run first, from its tail.
    fn evict(&mut self, slot: u32) {
        loop {
            let state = &self.slots[slot as usize];
            let excess = state
                .blocks
                .saturating_sub(state.capacity.unwrap_or(usize::MAX));
            let (true, Some(run)) = (excess > 0, self.oldest(slot)) else {
                return;
            };
            self.release(run, u32::try_from(excess).unwrap_or(u32::MAX));
        }
    }

    fn is_due(&self, slot: u32, now: Instant) -> bool {
        let slot = self.slots.get(slot as usize);
        slot.and_then(|slot| slot.timers.first())
            .is_some_and(|&(timer, _)| timer <= now)
    }

    /// Drops the expired blocks of `slot`.
    ///
    /// A timer is never late, since the last block of a run has its earliest deadline; it may be early when the run lost
    /// blocks since it was set, and is then set again. Blocks below expired ones have expired as well and belong to older
    /// runs, so going from the oldest due run to the newest drops tails before what they hang on.
    fn expire(&mut self, slot: u32, now: Instant) {
        let mut due = Vec::new();
        while self.is_due(slot, now) {
            due.extend(self.slots[slot as usize].timers.pop_first());
        }
        due.sort_unstable_by_key(|&(_, run)| self.runs[run].stamp);
        for (_, run) in due {
            self.expire_run(run, now);
        }
    }

    /// Drops the expired tail of a run and sets the timer of what stays.
    fn expire_run(&mut self, run: u32, now: Instant) {
        while let Some(entry) = self.runs.get(run) {
            let slot = entry.slot;
            let tail = self.tree.last_stair(entry.tail, slot, run);
            if tail.deadline > now {
                self.runs[run].timer = tail.deadline;
                self.slots[slot as usize]
                    .timers
                    .insert((tail.deadline, run));
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
        let slot = &mut self.slots[entry.slot as usize];
        entry.older = slot.newest;
        slot.timers.insert((entry.timer, run));
        let older = std::mem::replace(&mut slot.newest, run);
        if older == NONE {
            slot.oldest = run;
        } else {
            self.runs[older].newer = run;
        }
    }

    fn remove_run(&mut self, run: u32) {
        let entry = self.runs.remove(run);
        let slot = &mut self.slots[entry.slot as usize];
        slot.timers.remove(&(entry.timer, run));
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
