//! The distinct blocks that booked requests occupy, over all targets.
//!
//! Prompts form a tree by prefix, so a new prompt adds to its target the blocks beyond the longest prefix that it shares
//! with any active one there, and a leaving prompt takes along what it shares with none. One walk down the tree says that
//! for every target at once. Prompts that begin alike share a tree under a lock of its own; others do not meet.

use std::sync::Arc;

use super::tree::{Booking, NONE, Tree};
use crate::block::LocalBlockHash;
use crate::ids::{LeaseId, Slot};
use crate::sync::{RwLock, Shards};

/// Trees of booked prompts, by first block.
#[derive(Debug, Default)]
pub(crate) struct ActiveIndex {
    shards: Shards<RwLock<Tree>>,
}

/// A request as it is booked on a slot.
#[derive(Debug)]
pub(crate) struct Booked {
    prompt: Arc<[LocalBlockHash]>,
    booking: Booking,
    leaf: u32,
    /// Blocks that no other request can share: the incomplete tail, output, and every further prompt of a batch.
    pub(crate) own_blocks: usize,
    /// Blocks still to be prefilled.
    pub(crate) prefill_blocks: f64,
}

/// What the active requests of every slot share with a prompt.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Leading blocks by slot.
    pub(crate) blocks: Vec<u32>,
    /// Prefill by slot that a prompt waits for anyway because it is of its own prefix: a sibling of a request in prefill finds
    /// that work done, so it must not count against the target again. Zero but for the slots that are listed.
    prefill: Vec<f64>,
    pub(crate) prefill_slots: Vec<u32>,
}

impl Shared {
    pub(crate) fn reset(&mut self, slots: usize) {
        self.blocks.clear();
        self.blocks.resize(slots, 0);
        for slot in self.prefill_slots.drain(..) {
            self.prefill[slot as usize] = 0.0;
        }
        self.prefill.resize(slots, 0.0);
    }

    pub(crate) fn prefill(&self, slot: u32) -> f64 {
        self.prefill.get(slot as usize).copied().unwrap_or(0.0)
    }

    fn add_prefill(&mut self, slot: u32, blocks: f64) {
        if let Some(sum) = self.prefill.get_mut(slot as usize) {
            if *sum == 0.0 {
                self.prefill_slots.push(slot);
            }
            *sum += blocks;
        }
    }
}

impl ActiveIndex {
    /// Looks up what the active requests of the first `slots` slots share with a prompt.
    pub(crate) fn look_up(&self, prompt: &[LocalBlockHash], slots: usize, shared: &mut Shared) {
        shared.reset(slots);
        let Some(shard) = self.shard(prompt) else {
            return;
        };
        let Shared { blocks, .. } = shared;
        let mut blocks = std::mem::take(blocks);
        shard.read().look_up(
            prompt,
            |slot, depth| {
                if let Some(blocks) = blocks.get_mut(slot as usize) {
                    *blocks = u32::try_from(depth).unwrap_or(u32::MAX);
                }
            },
            |slot, blocks| shared.add_prefill(slot, blocks),
        );
        shared.blocks = blocks;
    }

    /// Books a prompt on a slot. Returns the booking and the blocks that the slot gained by it.
    ///
    /// `own_blocks` is at least 1: the block that the first output token goes to is nobody else's.
    pub(crate) fn book(
        &self,
        prompt: &Arc<[LocalBlockHash]>,
        slot: Slot,
        lease: LeaseId,
        own_blocks: usize,
        prefill_blocks: f64,
    ) -> (Booked, usize) {
        let booking = Booking {
            slot: slot.0,
            lease,
            // A booking prefills the last part of its prompt; the blocks before were cached.
            cached: (prompt.len() as f64 - prefill_blocks).max(0.0),
        };
        let own_blocks = own_blocks.max(1);
        let (leaf, new_blocks) = match self.shard(prompt) {
            Some(shard) => shard.write().add(prompt, booking),
            None => (NONE, 0),
        };
        let booked = Booked {
            prompt: Arc::clone(prompt),
            booking,
            leaf,
            own_blocks,
            prefill_blocks,
        };
        (booked, new_blocks + own_blocks)
    }

    /// Notes that a booking's prefill is done. Returns the blocks of prefill that its slot no longer has before it.
    pub(crate) fn prefill_done(&self, booked: &mut Booked) -> f64 {
        if let Some(shard) = self.shard(&booked.prompt)
            && booked.booking.cached < booked.prompt.len() as f64
        {
            shard.write().computed(booked.leaf, booked.booking);
        }
        booked.booking.cached = f64::INFINITY;
        std::mem::take(&mut booked.prefill_blocks)
    }

    /// Releases a booking. Returns the blocks that its slot loses by it.
    pub(crate) fn release(&self, booked: &Booked) -> usize {
        let shared = match self.shard(&booked.prompt) {
            Some(shard) => shard.write().remove(booked.leaf, booked.booking),
            None => 0,
        };
        shared + booked.own_blocks
    }

    fn shard(&self, prompt: &[LocalBlockHash]) -> Option<&RwLock<Tree>> {
        Some(self.shards.of(prompt.first()?.0 >> 8))
    }
}

impl Booked {
    pub(crate) const fn prompt(&self) -> &Arc<[LocalBlockHash]> {
        &self.prompt
    }
}

#[cfg(test)]
impl ActiveIndex {
    /// Tells whether nothing is booked.
    pub(crate) fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.read().is_empty())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn prompt(blocks: &[u64]) -> Arc<[LocalBlockHash]> {
        blocks.iter().map(|block| LocalBlockHash(*block)).collect()
    }

    /// Blocks of one slot by the sums of what the index returns.
    #[derive(Default)]
    struct Slot0 {
        index: ActiveIndex,
        blocks: usize,
    }

    impl Slot0 {
        fn book(&mut self, lease: u64, blocks: &[u64], prefill_blocks: f64) -> Booked {
            let (slot, lease) = (Slot(0), LeaseId(lease));
            let (booked, gained) = self
                .index
                .book(&prompt(blocks), slot, lease, 1, prefill_blocks);
            self.blocks += gained;
            booked
        }

        fn release(&mut self, booked: &Booked) {
            self.blocks -= self.index.release(booked);
        }

        fn shared(&self, blocks: &[u64]) -> (u32, f64) {
            let mut shared = Shared::default();
            self.index.look_up(&prompt(blocks), 1, &mut shared);
            (shared.blocks[0], shared.prefill(0))
        }
    }

    #[test]
    fn equal_prompts_share_all_but_their_own_block() {
        let mut load = Slot0::default();
        let first = load.book(1, &[1, 2, 3], 3.0);
        let second = load.book(2, &[1, 2, 3], 0.0);
        assert_eq!(load.blocks, 5); // 3 shared and 2 of their own
        load.release(&first);
        assert_eq!(load.blocks, 4);
        load.release(&second);
        assert_eq!(load.blocks, 0);
    }

    #[test]
    fn a_sibling_does_not_wait_twice_for_its_own_prefix() {
        let mut load = Slot0::default();
        let mut first = load.book(1, &[1, 2, 3, 4, 5], 3.0); // blocks 3 to 5
        load.book(2, &[9, 9], 2.0);
        let sibling = &[1, 2, 3, 4, 7];
        let (blocks, prefill) = load.shared(sibling);
        assert_eq!(blocks, 4);
        assert!((prefill - 2.0).abs() < 1e-12); // blocks 3 and 4
        assert!((load.index.prefill_done(&mut first) - 3.0).abs() < 1e-12);
        assert!(load.shared(sibling).1.abs() < 1e-12);
        load.release(&first);
        assert_eq!((load.blocks, load.shared(sibling).0), (3, 0));
    }

    #[test]
    fn a_prompt_without_a_block_has_its_own() {
        let mut load = Slot0::default();
        let mut booked = load.book(1, &[], 0.5);
        assert_eq!((load.blocks, load.shared(&[]).0), (1, 0));
        assert!((load.index.prefill_done(&mut booked) - 0.5).abs() < 1e-12);
        load.release(&booked);
        assert_eq!(load.blocks, 0);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Book(Vec<u64>, u32, u8),
        Done(prop::sample::Index),
        Release(prop::sample::Index),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            3 => (prop::collection::vec(0..3u64, 0..7), 0..3u32, 0..8u8)
                .prop_map(|(blocks, slot, prefill)| Op::Book(blocks, slot, prefill)),
            1 => any::<prop::sample::Index>().prop_map(Op::Done),
            2 => any::<prop::sample::Index>().prop_map(Op::Release),
        ]
    }

    /// Bookings one by one.
    type Live = Vec<(Booked, Vec<u64>, u32)>;

    fn check(index: &ActiveIndex, live: &Live, sums: [usize; 3]) -> Result<(), TestCaseError> {
        for shard in index.shards.iter() {
            shard.read().check();
        }
        for slot in 0..3 {
            let of_slot: Vec<_> = live.iter().filter(|(_, _, on)| *on == slot).collect();
            let distinct: HashSet<&[u64]> = of_slot
                .iter()
                .flat_map(|(_, blocks, _)| (1..=blocks.len()).map(move |end| &blocks[..end]))
                .collect();
            prop_assert_eq!(sums[slot as usize], distinct.len() + of_slot.len());
        }
        for asked in [vec![0, 1, 2, 0], vec![1, 1], vec![2, 0, 0, 0, 1, 1]] {
            let mut shared = Shared::default();
            index.look_up(&prompt(&asked), 3, &mut shared);
            for slot in 0..3u32 {
                let of_slot = live.iter().filter(|(_, _, on)| *on == slot);
                let (mut longest, mut prefill) = (0, 0.0);
                for (booked, blocks, _) in of_slot {
                    let common = asked.iter().zip(blocks).take_while(|(a, b)| a == b).count();
                    longest = longest.max(common);
                    let cached = (blocks.len() as f64 - booked.prefill_blocks).max(0.0);
                    prefill += (common as f64 - cached).max(0.0);
                }
                prop_assert_eq!(shared.blocks[slot as usize] as usize, longest);
                prop_assert!((shared.prefill(slot) - prefill).abs() < 1e-9);
            }
        }
        Ok(())
    }

    use proptest::test_runner::TestCaseError;

    proptest! {
        /// Blocks are the distinct prefixes plus own blocks, and shared prefill is that of each booking, whatever comes and goes.
        #[test]
        fn equals_bookings_one_by_one(ops in prop::collection::vec(op(), 1..40)) {
            let index = ActiveIndex::default();
            let (mut live, mut sums): (Live, _) = (Vec::new(), [0; 3]);
            for (lease, op) in (0..).zip(ops) {
                match op {
                    Op::Book(blocks, slot, prefill) => {
                        let prefill = f64::from(prefill) / 2.0;
                        let (booked, gained) =
                            index.book(&prompt(&blocks), Slot(slot), LeaseId(lease), 1, prefill);
                        sums[slot as usize] += gained;
                        live.push((booked, blocks, slot));
                    }
                    Op::Done(at) if !live.is_empty() => {
                        let at = at.index(live.len());
                        index.prefill_done(&mut live[at].0);
                    }
                    Op::Release(at) if !live.is_empty() => {
                        let (booked, _, slot) = live.swap_remove(at.index(live.len()));
                        sums[slot as usize] -= index.release(&booked);
                    }
                    _ => {}
                }
                check(&index, &live, sums)?;
            }
            for (booked, _, slot) in live.drain(..) {
                sums[slot as usize] -= index.release(&booked);
            }
            prop_assert_eq!(sums, [0; 3]);
            prop_assert!(index.is_empty());
        }
    }
}
