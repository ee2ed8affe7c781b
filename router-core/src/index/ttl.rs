//! Approximate entries: what we sent where, believed until a deadline.
//!
//! # Model
//! Per slot the index holds a set of blocks closed under prefixes: a block is held only together with every block before it.
//! Each held block has a *deadline* and a *recency*. Recording a prompt touches its whole prefix, so along any prompt both
//! never rise, and whatever leaves (expiry, eviction, undo) leaves from the tail. That is also what an engine does: it frees
//! the blocks of a finished request tail first and evicts the least recently used.
//!
//! # Structure
//! Prompts are dealt to shards by their first block; a shard has one radix tree for all slots, under a lock of its own, so that
//! prompts that begin differently do not wait for each other. Blocks lie in the edges, once, whoever holds them. A slot's share of a
//! node is a staircase: usually one stair, more when prompts of different length or TTL met there. The blocks that one
//! placement was the last to touch form one contiguous *run* of its prompt; runs of a slot are linked by recency and each
//! has one timer. A placement therefore costs bookkeeping per run and per node, and 8 bytes per block: 7 bytes per held block
//! for conversations of 256 blocks whose turns migrate now and then, 25 for unrelated prompts with 16 blocks of their own,
//! 290 where each has just one.
//!
//! # Expiry
//! Lookups compare deadlines, so an expired block is never credited. It leaves memory at the next
//! [`record`](TtlIndex::record) of a prompt of its shard to its slot, when its slot is over its capacity, or at the next
//! [`expire`](TtlIndex::expire), whichever comes first. Call `expire` once a second or so; it costs one comparison per
//! slot and shard, plus the work of what is due.
//!
//! # Consistency
//! A lookup that races a placement sees all of it or nothing. What a slot's capacity evicts leaves after the placement that
//! needed the room is there: a lookup between the two sees both.

mod bound;
mod slab;
mod state;
mod timers;
mod tree;

#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Instant;

use serde::Serialize;

use self::bound::Bound;
use self::slab::NONE;
use self::state::State;
use crate::block::LocalBlockHash;
use crate::ids::Slot;
use crate::sync::{Dense, OnceLock, RwLock, Shards};

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
    shards: Shards<RwLock<State>>,
    bounds: Dense<Bound>,
    start: OnceLock<Instant>,
}

/// Nanoseconds since the first call with a time, which compare faster than instants and take half their room. Times before
/// it count as that one.
type Moment = u64;

/// What one [`TtlIndex::record`] did; hand it to [`TtlIndex::undo`] when the dispatch failed.
#[derive(Debug)]
pub struct Placement {
    shard: u64,
    slot: u32,
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

impl TtlStats {
    /// Estimates the memory in bytes, from what an allocation of each kind takes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.blocks * BLOCK_BYTES + self.nodes * NODE_BYTES + self.placements * PLACEMENT_BYTES
    }
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
        self.place(slot, local_hashes, deadline, now, None)
    }

    /// Records a prompt on `slot` again, where its placement stands. Taking back what is returned takes back what the placement created,
    /// too.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the placement that is returned stands for it from now on"
    )]
    pub fn renew(
        &self,
        placement: Placement,
        slot: Slot,
        local_hashes: &[LocalBlockHash],
        deadline: Instant,
        now: Instant,
    ) -> Placement {
        self.place(slot, local_hashes, deadline, now, Some(&placement))
    }

    fn place(
        &self,
        slot: Slot,
        local_hashes: &[LocalBlockHash],
        deadline: Instant,
        now: Instant,
        before: Option<&Placement>,
    ) -> Placement {
        let (Some(first), Some(bound)) = (local_hashes.first(), self.bounds.at(slot.index()))
        else {
            return Placement::NOTHING;
        };
        if deadline <= now {
            return Placement::NOTHING;
        }
        let now = self.moment(now);
        let deadline = self.moment(deadline);
        let shard = shard_of(*first);
        let length = local_hashes.len().min(bound.capacity());
        let placement = self.change(shard, slot, |state| {
            state.expire(slot.0, now);
            let created_from = before.and_then(|before| state.created_from(before));
            // Drawn under the lock: within a shard, what was placed later has the later stamp.
            let stamp = bound.next_stamp();
            let placed = state.record(slot, &local_hashes[..length], deadline, stamp);
            let held_blocks =
                created_from.map_or(placed.held_blocks, |from| from.min(placed.held_blocks));
            Placement {
                shard,
                held_blocks,
                ..placed
            }
        });
        if bound.excess() > 0 {
            self.expire_slot(slot, now);
            self.evict(slot, bound, Bound::excess);
        }
        placement
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
            let slot = Slot(placement.slot);
            self.change(placement.shard, slot, |state| state.undo(&placement));
        }
    }

    /// Looks up a prompt: `depths[slot]` becomes the number of its leading blocks that the slot is believed to hold at `now`.
    ///
    /// `depths` is cleared first; slots beyond its end hold nothing. Cost: a step per node on the prompt's way as far as any
    /// slot holds it, and per holder of each; a slot that holds none of the prompt costs four zero bytes. 0.5 µs for 256
    /// blocks among 10,000 conversations on 64 slots.
    pub fn overlap(&self, local_hashes: &[LocalBlockHash], now: Instant, depths: &mut Vec<u32>) {
        depths.clear();
        if let Some(first) = local_hashes.first() {
            let state = self.shards.of(shard_of(*first)).read();
            depths.resize(state.slots(), 0);
            state.overlap(local_hashes, self.moment(now), depths);
        }
    }

    /// Bounds the blocks of a slot, or lifts the bound; evicts at once what is over it. A bound of 0 keeps nothing.
    ///
    /// Blocks that expired but have not left memory count until they do: call [`expire`](Self::expire) first where it matters.
    pub fn set_capacity(&self, slot: Slot, capacity_blocks: Option<usize>) {
        if let Some(bound) = self.bounds.at(slot.index()) {
            bound.set_capacity(capacity_blocks);
            self.evict(slot, bound, Bound::excess);
        }
    }

    /// Returns the blocks of `slot` in memory, expired ones that have not left included.
    #[must_use]
    pub fn blocks(&self, slot: Slot) -> usize {
        self.bounds.get(slot.index()).map_or(0, Bound::blocks)
    }

    /// Drops everything of `slot`, returning its memory; the capacity bound stays.
    pub fn clear(&self, slot: Slot) {
        for shard in 0..SHARDS {
            self.change(shard, slot, |state| state.clear(slot.0));
        }
    }

    /// Drops every block whose deadline is not after `now`.
    ///
    /// Slots are taken one after the other, so that others wait for the expired blocks of one slot at most.
    pub fn expire(&self, now: Instant) {
        let now = self.moment(now);
        for shard in 0..SHARDS {
            let due = self.shards.of(shard).read().due(now);
            for slot in due {
                self.change(shard, Slot(slot), |state| state.expire(slot, now));
            }
            self.shards.of(shard).write().drop_vacant_slots();
        }
    }

    /// Returns the size of the index.
    #[must_use]
    pub fn stats(&self) -> TtlStats {
        let mut stats = TtlStats::default();
        for shard in self.shards.iter() {
            shard.read().add_to(&mut stats);
        }
        stats
    }

    /// Forgets blocks until the index takes about `bytes`, and returns how many went: of each slot the same share, least
    /// recently used first.
    pub fn shrink_to(&self, bytes: usize) -> usize {
        let stats = self.stats();
        let excess = stats.bytes().saturating_sub(bytes);
        if excess == 0 {
            return 0;
        }
        let slots = self.bounds.pieces().map(<[_]>::len).sum::<usize>();
        let share = excess as f64 / stats.bytes() as f64;
        let mut gone = 0;
        for slot in (0_u32..).map(Slot).take(slots) {
            let held = self.blocks(slot);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a share of a number that fits"
            )]
            let goes = (held as f64 * share).ceil() as usize;
            if let Some(bound) = self.bounds.get(slot.index()) {
                self.evict(slot, bound, |bound| {
                    (bound.blocks() + goes).saturating_sub(held)
                });
            }
            gone += held - self.blocks(slot).min(held);
        }
        gone
    }

    fn moment(&self, at: Instant) -> Moment {
        let start = *self.start.get_or_init(|| at);
        let since = at.saturating_duration_since(start);
        Moment::try_from(since.as_nanos()).unwrap_or(Moment::MAX)
    }

    /// Drops what has expired of one slot, in every shard.
    fn expire_slot(&self, slot: Slot, now: Moment) {
        for shard in 0..SHARDS {
            if self.shards.of(shard).read().is_due(slot.0, now) {
                self.change(shard, slot, |state| state.expire(slot.0, now));
            }
        }
    }

    /// Evicts until nothing is in excess: the least recently used run first, from its tail.
    fn evict(&self, slot: Slot, bound: &Bound, excess: impl Fn(&Bound) -> usize) {
        let _one_at_a_time = bound.evicting();
        loop {
            let excess = excess(bound);
            let (true, Some(shard)) = (excess > 0, bound.oldest_shard()) else {
                return;
            };
            self.change(shard, slot, |state| state.evict(slot.0, excess));
        }
    }

    /// Changes what a shard has of a slot, and keeps the slot's sums.
    fn change<T>(&self, shard: u64, slot: Slot, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.shards.of(shard).write();
        let before = state.blocks(slot.0);
        let result = change(&mut state);
        if let Some(bound) = self.bounds.get(slot.index()) {
            bound.note(
                shard,
                before,
                state.blocks(slot.0),
                state.oldest_stamp(slot.0),
            );
        }
        result
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
        shard: 0,
        slot: 0,
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

/// A block in the edge of its node, with an eighth of idle room.
const BLOCK_BYTES: usize = 9;

/// A node with its entry in the table of heads, its stairs and its share of the allocator's own.
const NODE_BYTES: usize = 220;

/// A run with its timer.
const PLACEMENT_BYTES: usize = 96;

const SHARDS: u64 = crate::sync::STRIPES as u64;

/// Returns the shard of the prompts that begin with a block.
const fn shard_of(first: LocalBlockHash) -> u64 {
    (first.0 >> 8) % SHARDS
}
