//! What the contract promises, claim by claim, for the radix tree and the reference model alike.
//!
//! `t(a, n)` are the tokens a, a + 1, ... (n of them); blocks have 4 tokens unless a test says otherwise.

use std::time::{Duration, Instant};

use super::*;
use crate::block::{BlockSize, SaltContext, block_hashes};

const W1: Slot = Slot(0);
const W2: Slot = Slot(1);
const W3: Slot = Slot(2);

/// An index with a clock that stands still unless a test moves it.
struct Fixture<'a> {
    index: &'a dyn PrefixIndex,
    now: Instant,
    block_size: u32,
    unit: usize,
    tier: Tier,
}

/// Runs a claim against both implementations, the radix tree also with runs of at most 2 blocks, and checks that nothing
/// is left once every slot is cleared.
fn on_every_index(claim: impl Fn(&mut Fixture<'_>)) {
    let limits = OrphanLimits {
        max_keys: 6,
        max_age: Duration::from_secs(10),
    };
    let radix = RadixIndex::new(limits);
    let short = RadixIndex::with_max_run_blocks(limits, 2);
    let naive = NaiveIndex::new(limits);
    let indexes: [&dyn PrefixIndex; 3] = [&naive, &radix, &short];
    for index in indexes {
        #[expect(clippy::disallowed_methods, reason = "a test has a clock")]
        let now = Instant::now();
        claim(&mut Fixture {
            index,
            now,
            block_size: 4,
            unit: 1,
            tier: Tier::Device,
        });
        radix.assert_invariants();
        short.assert_invariants();
        for slot in [W1, W2, W3] {
            index.clear(slot, &Tier::ALL);
            assert_eq!(index.slot_blocks(slot), TierBlocks::default());
        }
        assert_eq!(index.stats(), IndexStats::default());
    }
}

impl Fixture<'_> {
    fn hashes(&self, tokens: &[u32]) -> Vec<LocalBlockHash> {
        let size = BlockSize::new(self.block_size).unwrap();
        block_hashes(tokens, size, &SaltContext::default()).local
    }

    fn store(&self, slot: Slot, parent: Option<u64>, keys: &[u64], tokens: &[u32]) -> StoreOutcome {
        let parent = parent.map(int);
        self.store_keys(slot, parent.as_ref(), &ints(keys), tokens)
    }

    fn store_keys(
        &self,
        slot: Slot,
        parent: Option<&EngineKey>,
        keys: &[EngineKey],
        tokens: &[u32],
    ) -> StoreOutcome {
        let run = StoredRun {
            parent,
            keys,
            local_hashes: &self.hashes(tokens),
            blocks_per_key: self.unit,
            tier: self.tier,
        };
        self.index.store(slot, &run, self.now)
    }

    fn remove(&self, slot: Slot, keys: &[u64]) -> RemoveOutcome {
        self.index.remove(slot, &ints(keys), self.tier)
    }

    fn overlap(&self, slot: Slot, tokens: &[u32]) -> Overlap {
        let mut overlaps = Overlaps::new();
        self.index.overlap(&self.hashes(tokens), &mut overlaps);
        overlaps.get(slot)
    }

    /// Leading blocks in any tier.
    fn blocks(&self, slot: Slot, tokens: &[u32]) -> u32 {
        self.overlap(slot, tokens).blocks()
    }
}

fn t(first: u32, count: u32) -> Vec<u32> {
    (first..first + count).collect()
}

fn int(hash: u64) -> EngineKey {
    EngineKey {
        group: 0,
        hash: EngineHash::Int(hash),
    }
}

fn ints(hashes: &[u64]) -> Vec<EngineKey> {
    hashes.iter().map(|&hash| int(hash)).collect()
}

const fn placed(keys: usize) -> StoreOutcome {
    StoreOutcome {
        placed: keys,
        repeated: 0,
        orphaned: 0,
        attached: 0,
        refused: 0,
        dropped: 0,
    }
}

fn refused(keys: usize) -> StoreOutcome {
    StoreOutcome {
        refused: keys,
        ..placed(0)
    }
}

fn orphaned(keys: usize) -> StoreOutcome {
    StoreOutcome {
        orphaned: keys,
        ..placed(0)
    }
}

const fn removed(removed: usize, unknown: usize) -> RemoveOutcome {
    RemoveOutcome { removed, unknown }
}

// What users reported (numbers as in the collection of cases).

/// Case 1.
#[test]
fn a_cleared_slot_is_never_named_again_until_it_stores_again() {
    on_every_index(|f| {
        assert_eq!(f.store(W1, None, &[1, 2, 3], &t(0, 12)), placed(3));
        f.store(W1, Some(9), &[10], &t(90, 4));
        f.index.clear(W1, &Tier::ALL);
        assert_eq!(f.index.stats(), IndexStats::default());
        assert_eq!(f.blocks(W1, &t(0, 12)), 0);
        // The old life's keys mean nothing: neither as a parent nor to a removal.
        assert_eq!(f.store(W1, Some(3), &[4], &t(12, 4)), orphaned(1));
        assert_eq!(f.remove(W1, &[1]), removed(0, 1));
        assert_eq!(f.blocks(W1, &t(0, 16)), 0);
        assert_eq!(f.store(W1, None, &[1], &t(0, 4)), placed(1));
        assert_eq!(f.blocks(W1, &t(0, 16)), 1);
    });
}

/// Case 2.
#[test]
fn a_clear_takes_effect_between_its_neighbours() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2], &t(0, 8));
        f.store(W2, None, &[1, 2], &t(0, 8));
        f.index.clear(W1, &[Tier::Device]);
        assert_eq!((f.blocks(W1, &t(0, 8)), f.blocks(W2, &t(0, 8))), (0, 2));
        f.store(W1, None, &[1], &t(0, 4));
        f.index.clear(W1, &[Tier::Device]);
        f.store(W1, None, &[3], &t(40, 4));
        assert_eq!((f.blocks(W1, &t(0, 8)), f.blocks(W1, &t(40, 4))), (0, 1));
        assert_eq!(f.index.slot_blocks(W1).device, 1);
    });
}

/// Case 4.
#[test]
fn repeated_stores_do_not_inflate_a_slot() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2, 3], &t(0, 12));
        for _ in 0..4 {
            let repeated = StoreOutcome {
                repeated: 3,
                ..placed(0)
            };
            assert_eq!(f.store(W1, None, &[1, 2, 3], &t(0, 12)), repeated);
        }
        f.store(W2, None, &[1, 2, 3], &t(0, 12));
        assert_eq!(f.index.slot_blocks(W1), f.index.slot_blocks(W2));
        assert_eq!(f.index.slot_blocks(W1).device, 3);
    });
}

/// Case 5.
#[test]
fn a_hole_stops_the_credit_and_storing_it_again_restores_the_run() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2, 3, 4], &t(0, 16));
        assert_eq!(f.remove(W1, &[2]), removed(1, 0));
        assert_eq!(f.blocks(W1, &t(0, 16)), 1);
        assert_eq!(f.index.slot_blocks(W1).device, 3);
        assert_eq!(f.store(W1, Some(1), &[2], &t(4, 4)), placed(1));
        assert_eq!(f.blocks(W1, &t(0, 16)), 4);
        f.remove(W1, &[2]);
        assert_eq!(f.remove(W1, &[4, 3, 1]), removed(3, 0));
        assert_eq!(f.remove(W1, &[3]), removed(0, 1));
        assert_eq!(f.blocks(W1, &t(0, 16)), 0);
        assert_eq!(f.index.stats(), IndexStats::default());
    });
}

/// Case 7.
#[test]
fn engine_keys_mean_something_inside_one_slot_only() {
    on_every_index(|f| {
        let bytes = [3_u8, 4].map(|byte| EngineKey {
            group: 0,
            hash: EngineHash::Bytes([byte; 32].into()),
        });
        f.store(W1, None, &[1, 2], &t(0, 8));
        f.store(W2, None, &[900, 901], &t(0, 8));
        f.store_keys(W3, None, &bytes, &t(0, 8));
        for slot in [W1, W2, W3] {
            assert_eq!(f.blocks(slot, &t(0, 8)), 2);
        }
        f.store(W1, None, &[77], &t(600, 4));
        f.store(W2, None, &[77], &t(500, 4));
        f.store(W2, Some(77), &[78], &t(504, 4));
        assert_eq!((f.blocks(W1, &t(500, 8)), f.blocks(W2, &t(500, 8))), (0, 2));
        let mixed = [t(600, 4), t(504, 4)].concat();
        assert_eq!((f.blocks(W1, &mixed), f.blocks(W2, &mixed)), (1, 0));
        assert_eq!(f.index.remove(W3, &bytes, Tier::Device), removed(2, 0));
        assert_eq!(f.blocks(W3, &t(0, 8)), 0);
    });
}

/// Case 8: blocks of 16 tokens, one host key for 64.
#[test]
fn a_coarse_unit_is_credited_whole_or_not_at_all() {
    on_every_index(|f| {
        (f.block_size, f.unit, f.tier) = (16, 4, Tier::Host);
        assert_eq!(f.store(W1, None, &[1], &t(0, 64)), placed(1));
        let first_40 = [t(0, 40), t(1_000, 24)].concat();
        assert_eq!(f.overlap(W1, &first_40), Overlap::default());
        assert_eq!(f.overlap(W1, &t(0, 48)), Overlap::default());
        let whole = Overlap {
            host: 4,
            ..Overlap::default()
        };
        assert_eq!(f.overlap(W1, &t(0, 64)), whole);
        assert_eq!(f.index.slot_blocks(W1).host, 4);
    });
}

/// Case 12.
#[test]
fn ranks_are_apart() {
    on_every_index(|f| {
        let (rank_0, rank_1) = (W1, W2);
        f.store(rank_0, None, &[1, 2], &t(0, 8));
        f.store(rank_1, None, &[1, 2], &t(50, 8));
        assert_eq!(
            (f.blocks(rank_0, &t(0, 8)), f.blocks(rank_1, &t(0, 8))),
            (2, 0)
        );
        f.index.clear(rank_1, &Tier::ALL);
        assert_eq!(
            (f.blocks(rank_0, &t(0, 8)), f.blocks(rank_1, &t(50, 8))),
            (2, 0)
        );
        f.index.clear(rank_0, &Tier::ALL);
        assert_eq!(f.blocks(rank_0, &t(0, 8)), 0);
    });
}

// Places and counts.

#[test]
fn a_block_stored_twice_is_gone_after_two_removals() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2], &t(0, 8));
        f.store(W1, None, &[1, 2], &t(0, 8));
        assert_eq!(f.remove(W1, &[2, 1]), removed(2, 0));
        assert_eq!(f.blocks(W1, &t(0, 8)), 2);
        assert_eq!(f.remove(W1, &[2, 1]), removed(2, 0));
        assert_eq!(f.blocks(W1, &t(0, 8)), 0);
        assert_eq!(f.remove(W1, &[2, 1]), removed(0, 2));
    });
}

#[test]
fn a_run_that_is_partly_known_counts_the_known_and_places_the_new() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2], &t(0, 8));
        let outcome = StoreOutcome {
            placed: 1,
            repeated: 2,
            ..placed(0)
        };
        assert_eq!(f.store(W1, None, &[1, 2, 3], &t(0, 12)), outcome);
        assert_eq!(f.blocks(W1, &t(0, 12)), 3);
    });
}

#[test]
fn a_key_announced_at_another_place_is_refused_and_changes_nothing() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2], &t(0, 8));
        let before = f.index.stats();
        assert_eq!(f.store(W1, None, &[2], &t(80, 4)), refused(1));
        assert_eq!(f.index.stats(), before);
        assert_eq!(f.blocks(W1, &t(80, 4)), 0);
        assert_eq!(f.blocks(W1, &t(0, 8)), 2);
        // One removal is enough: the refused announcement did not count.
        f.remove(W1, &[2]);
        assert_eq!(f.blocks(W1, &t(0, 8)), 1);
    });
}

#[test]
fn a_run_around_a_refused_key_is_placed_with_a_hole() {
    on_every_index(|f| {
        f.store(W1, None, &[2], &t(80, 4));
        let outcome = StoreOutcome {
            placed: 2,
            refused: 1,
            ..placed(0)
        };
        assert_eq!(f.store(W1, None, &[1, 2, 3], &t(0, 12)), outcome);
        assert_eq!(f.blocks(W1, &t(0, 12)), 1);
        assert_eq!(f.index.slot_blocks(W1).device, 3);
    });
}

#[test]
fn a_key_twice_in_one_run_is_refused_the_second_time() {
    on_every_index(|f| {
        let outcome = StoreOutcome {
            placed: 2,
            refused: 1,
            ..placed(0)
        };
        assert_eq!(f.store(W1, None, &[1, 2, 1], &t(0, 12)), outcome);
        assert_eq!(f.blocks(W1, &t(0, 12)), 2);
        assert_eq!(f.index.stats().blocks, 2);
        assert_eq!(f.remove(W1, &[2, 1]), removed(2, 0));
        assert_eq!(f.index.stats(), IndexStats::default());
    });
}

#[test]
fn malformed_runs_are_refused_whole() {
    on_every_index(|f| {
        // Its own parent, known or not.
        assert_eq!(f.store(W1, Some(1), &[1, 2], &t(0, 8)), refused(2));
        f.store(W1, None, &[1], &t(0, 4));
        assert_eq!(f.store(W1, Some(1), &[1, 2], &t(4, 8)), refused(2));
        // 2 keys for 3 blocks; a unit of 0 blocks; a slot beyond the range.
        assert_eq!(f.store(W1, None, &[5, 6], &t(0, 12)), refused(2));
        f.unit = 0;
        assert_eq!(f.store(W1, None, &[5], &[]), refused(1));
        f.unit = usize::MAX;
        assert_eq!(f.store(W1, None, &[5, 6], &t(0, 8)), refused(2));
        f.unit = 1;
        assert_eq!(f.store(Slot(65_536), None, &[5], &t(0, 4)), refused(1));
        assert_eq!(f.store(Slot(u32::MAX), None, &[5], &t(0, 4)), refused(1));
        assert_eq!(f.index.stats().blocks, 1);
        assert_eq!(f.remove(Slot(u32::MAX), &[5]), removed(0, 1));
        f.index.clear(Slot(u32::MAX), &Tier::ALL);
    });
}

#[test]
fn an_empty_run_does_nothing() {
    on_every_index(|f| {
        assert_eq!(f.store(W1, None, &[], &[]), placed(0));
        assert_eq!(f.store(W1, Some(3), &[], &[]), placed(0));
        assert_eq!(f.blocks(W1, &[]), 0);
    });
}

#[test]
fn two_keys_may_share_a_place_which_is_held_until_both_are_gone() {
    on_every_index(|f| {
        let other_group = EngineKey {
            group: 1,
            hash: EngineHash::Int(1),
        };
        f.store(W1, None, &[1], &t(0, 4));
        let outcome = f.store_keys(W1, None, std::slice::from_ref(&other_group), &t(0, 4));
        assert_eq!(outcome, placed(1));
        assert_eq!(f.index.slot_blocks(W1).device, 1);
        f.remove(W1, &[1]);
        assert_eq!(f.blocks(W1, &t(0, 4)), 1);
        f.index.remove(W1, &[other_group], Tier::Device);
        assert_eq!(f.blocks(W1, &t(0, 4)), 0);
    });
}

#[test]
fn an_engine_hash_of_zero_is_a_hash_like_any_other() {
    on_every_index(|f| {
        assert_eq!(f.remove(W1, &[0]), removed(0, 1));
        f.store(W1, None, &[0], &t(0, 4));
        f.store(W1, Some(0), &[1], &t(4, 4));
        assert_eq!(f.blocks(W1, &t(0, 8)), 2);
        assert_eq!(f.remove(W1, &[0]), removed(1, 0));
        assert_eq!(f.blocks(W1, &t(0, 8)), 0);
    });
}

#[test]
fn integer_and_byte_hashes_never_meet() {
    on_every_index(|f| {
        let bytes = EngineKey {
            group: 0,
            hash: EngineHash::Bytes(1_u64.to_be_bytes().into()),
        };
        f.store(W1, None, &[1], &t(0, 4));
        let keys = std::slice::from_ref(&bytes);
        assert_eq!(f.store_keys(W1, None, keys, &t(80, 4)), placed(1));
        assert_eq!(f.index.remove(W1, keys, Tier::Device), removed(1, 0));
        assert_eq!(f.blocks(W1, &t(0, 4)), 1);
    });
}

#[test]
fn evicting_the_head_keeps_the_descendants_for_later() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2, 3], &t(0, 12));
        f.remove(W1, &[1]);
        assert_eq!(f.blocks(W1, &t(0, 12)), 0);
        assert_eq!(f.index.slot_blocks(W1).device, 2);
        // The descendants' places are known although nothing before them is held.
        f.store(W1, Some(3), &[4], &t(12, 4));
        f.store(W1, None, &[1], &t(0, 4));
        assert_eq!(f.blocks(W1, &t(0, 16)), 4);
    });
}

#[test]
fn forks_share_their_front_and_part_at_any_block() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2, 3], &t(0, 12));
        f.store(W2, None, &[1, 2], &t(0, 8));
        f.store(W2, Some(1), &[5, 6], &t(60, 8));
        f.store(W2, Some(2), &[7], &t(70, 4));
        let fork_1 = [t(0, 4), t(60, 8)].concat();
        let fork_2 = [t(0, 8), t(70, 4)].concat();
        assert_eq!((f.blocks(W1, &t(0, 12)), f.blocks(W2, &t(0, 12))), (3, 2));
        assert_eq!((f.blocks(W1, &fork_1), f.blocks(W2, &fork_1)), (1, 3));
        assert_eq!((f.blocks(W1, &fork_2), f.blocks(W2, &fork_2)), (2, 3));
        // 3 blocks of the first prompt, 2 of the first fork, 1 of the second.
        assert_eq!(f.index.stats().blocks, 6);
        f.remove(W1, &[3, 2, 1]);
        assert_eq!(f.index.stats().blocks, 5);
        assert_eq!(f.blocks(W2, &fork_1), 3);
    });
}

#[test]
fn many_slots_can_hold_one_run() {
    on_every_index(|f| {
        let slots = || (0..300).map(Slot);
        for slot in slots() {
            let blocks = slot.0 % 3 + 1;
            f.store(slot, None, &[1, 2, 3][..blocks as usize], &t(0, blocks * 4));
        }
        for slot in slots() {
            assert_eq!(f.blocks(slot, &t(0, 12)), slot.0 % 3 + 1);
        }
        assert_eq!(f.index.stats().blocks, 3);
        for slot in slots() {
            f.index.clear(slot, &Tier::ALL);
            assert_eq!(f.blocks(slot, &t(0, 12)), 0);
            let next = Slot(slot.0 + 1);
            let left = if next.0 < 300 { next.0 % 3 + 1 } else { 0 };
            assert_eq!(f.blocks(next, &t(0, 12)), left);
        }
        assert_eq!(f.index.stats(), IndexStats::default());
    });
}

#[test]
fn a_cleared_slot_can_be_used_again_with_other_places_for_its_keys() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2], &t(0, 8));
        f.index.clear(W1, &Tier::ALL);
        assert_eq!(f.store(W1, None, &[2, 1], &t(40, 8)), placed(2));
        assert_eq!(f.blocks(W1, &t(40, 8)), 2);
    });
}

// Orphans.

#[test]
fn an_orphan_is_credited_once_its_parent_arrives() {
    on_every_index(|f| {
        assert_eq!(f.store(W1, Some(2), &[3, 4], &t(8, 8)), orphaned(2));
        assert_eq!(f.blocks(W1, &t(8, 8)), 0);
        assert_eq!(f.index.stats().orphans, 2);
        let outcome = StoreOutcome {
            attached: 2,
            ..placed(2)
        };
        assert_eq!(f.store(W1, None, &[1, 2], &t(0, 8)), outcome);
        assert_eq!(f.blocks(W1, &t(0, 16)), 4);
        assert_eq!(f.index.stats().orphans, 0);
    });
}

#[test]
fn orphans_of_orphans_attach_too() {
    on_every_index(|f| {
        f.store(W1, Some(3), &[4], &t(12, 4));
        f.store(W1, Some(2), &[3], &t(8, 4));
        f.store(W1, Some(1), &[2], &t(4, 4));
        let outcome = StoreOutcome {
            attached: 3,
            ..placed(1)
        };
        assert_eq!(f.store(W1, None, &[1], &t(0, 4)), outcome);
        assert_eq!(f.blocks(W1, &t(0, 16)), 4);
    });
}

#[test]
fn a_key_removed_while_pending_does_not_become_resident() {
    on_every_index(|f| {
        f.store(W1, Some(1), &[2, 3], &t(4, 8));
        assert_eq!(f.remove(W1, &[3]), removed(1, 0));
        assert_eq!(f.remove(W1, &[3]), removed(0, 1));
        let outcome = StoreOutcome {
            attached: 1,
            ..placed(1)
        };
        assert_eq!(f.store(W1, None, &[1], &t(0, 4)), outcome);
        assert_eq!(f.blocks(W1, &t(0, 12)), 2);
        assert_eq!(f.remove(W1, &[3]), removed(0, 1));
    });
}

#[test]
fn a_key_pending_twice_and_removed_once_becomes_resident_once() {
    on_every_index(|f| {
        f.store(W1, Some(1), &[2], &t(4, 4));
        f.store(W1, Some(1), &[2], &t(4, 4));
        f.remove(W1, &[2]);
        f.store(W1, None, &[1], &t(0, 4));
        assert_eq!(f.blocks(W1, &t(0, 8)), 2);
        assert_eq!(f.remove(W1, &[2, 2]), removed(1, 1));
    });
}

#[test]
fn a_removed_orphan_still_places_its_children() {
    on_every_index(|f| {
        f.store(W1, Some(1), &[2], &t(4, 4));
        f.store(W1, Some(2), &[3], &t(8, 4));
        f.remove(W1, &[2]);
        f.store(W1, None, &[1], &t(0, 4));
        assert_eq!(f.blocks(W1, &t(0, 12)), 1);
        assert_eq!(f.index.slot_blocks(W1).device, 2);
        f.store(W1, Some(1), &[2], &t(4, 4));
        assert_eq!(f.blocks(W1, &t(0, 12)), 3);
    });
}

#[test]
fn a_removal_of_a_resident_key_leaves_its_pending_announcement() {
    on_every_index(|f| {
        f.store(W1, None, &[5], &t(80, 4));
        f.store(W1, Some(1), &[5], &t(4, 4));
        assert_eq!(f.remove(W1, &[5]), removed(1, 0));
        f.store(W1, None, &[1], &t(0, 4));
        assert_eq!((f.blocks(W1, &t(0, 8)), f.blocks(W1, &t(80, 4))), (2, 0));
    });
}

#[test]
fn an_orphan_whose_key_is_held_elsewhere_is_refused_when_it_attaches() {
    on_every_index(|f| {
        f.store(W1, Some(1), &[5], &t(4, 4));
        f.remove(W1, &[5]);
        f.store(W1, None, &[5], &t(80, 4));
        let outcome = StoreOutcome {
            refused: 1,
            ..placed(1)
        };
        assert_eq!(f.store(W1, None, &[1], &t(0, 4)), outcome);
        // The removal that came while it was pending is spent on it, not on the other place.
        assert_eq!((f.blocks(W1, &t(0, 8)), f.blocks(W1, &t(80, 4))), (1, 1));
    });
}

#[test]
fn the_oldest_orphans_make_room_and_one_larger_than_the_bound_goes_alone() {
    on_every_index(|f| {
        // The bound of the fixture is 6 keys.
        f.store(W1, Some(1), &[2, 3], &t(4, 8));
        f.store(W1, Some(1), &[4, 5], &t(40, 8));
        let outcome = StoreOutcome {
            dropped: 2,
            ..orphaned(3)
        };
        assert_eq!(f.store(W1, Some(1), &[6, 7, 8], &t(60, 12)), outcome);
        assert_eq!(f.index.stats().orphans, 5);
        let outcome = StoreOutcome {
            dropped: 7,
            ..placed(0)
        };
        let keys = [11, 12, 13, 14, 15, 16, 17];
        assert_eq!(f.store(W1, Some(1), &keys, &t(100, 28)), outcome);
        assert_eq!(f.index.stats().orphans, 5);
        f.store(W1, None, &[1], &t(0, 4));
        assert_eq!(f.blocks(W1, &t(0, 12)), 1);
        assert_eq!(f.blocks(W1, &[t(0, 4), t(40, 8)].concat()), 3);
    });
}

#[test]
fn orphans_older_than_the_bound_are_dropped_at_the_next_store() {
    on_every_index(|f| {
        f.store(W1, Some(1), &[2], &t(4, 4));
        f.now += Duration::from_secs(4);
        f.store(W1, Some(1), &[3], &t(40, 4));
        // The bound of the fixture is 10 s: the first is 11 s old now, the second 7 s.
        f.now += Duration::from_secs(7);
        let outcome = StoreOutcome {
            attached: 1,
            dropped: 1,
            ..placed(1)
        };
        assert_eq!(f.store(W1, None, &[1], &t(0, 4)), outcome);
        assert_eq!(f.blocks(W1, &t(0, 8)), 1);
        assert_eq!(f.blocks(W1, &[t(0, 4), t(40, 4)].concat()), 2);
    });
}

#[test]
fn a_forgotten_key_is_no_parent() {
    on_every_index(|f| {
        f.store(W1, None, &[1], &t(0, 4));
        f.remove(W1, &[1]);
        assert_eq!(f.store(W1, Some(1), &[2], &t(4, 4)), orphaned(1));
    });
}

// Tiers.

#[test]
fn a_block_counts_once_at_its_best_tier() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2], &t(0, 8));
        f.tier = Tier::Host;
        f.store(W1, None, &[1, 2, 3], &t(0, 12));
        f.tier = Tier::Disk;
        f.store(W1, None, &[1, 2, 3, 4], &t(0, 16));
        let expected = Overlap {
            device: 2,
            host: 1,
            disk: 1,
            external: 0,
        };
        assert_eq!(f.overlap(W1, &t(0, 16)), expected);
        let held = TierBlocks {
            device: 2,
            host: 3,
            disk: 4,
            external: 0,
        };
        assert_eq!(f.index.slot_blocks(W1), held);
    });
}

#[test]
fn a_block_that_moves_to_the_host_keeps_the_run_unbroken_and_its_children_placed() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2, 3], &t(0, 12));
        f.remove(W1, &[2]);
        f.tier = Tier::Host;
        f.store(W1, Some(1), &[2], &t(4, 4));
        let expected = Overlap {
            device: 2,
            host: 1,
            ..Overlap::default()
        };
        assert_eq!(f.overlap(W1, &t(0, 12)), expected);
        f.tier = Tier::Device;
        assert_eq!(f.remove(W1, &[2]), removed(0, 1));
        // The parent is resident in the host tier only: its place is known all the same.
        assert_eq!(f.store(W1, Some(2), &[9], &t(80, 4)), placed(1));
        assert_eq!(f.blocks(W1, &[t(0, 8), t(80, 4)].concat()), 3);
    });
}

#[test]
fn clearing_one_tier_keeps_the_others() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2], &t(0, 8));
        f.tier = Tier::Host;
        f.store(W1, None, &[1], &t(0, 4));
        f.store(W1, Some(7), &[8], &t(80, 4));
        f.index.clear(W1, &[Tier::Device]);
        let expected = Overlap {
            host: 1,
            ..Overlap::default()
        };
        assert_eq!(f.overlap(W1, &t(0, 8)), expected);
        // The pending run is a host one and stays; the clear of the host tier takes it.
        assert_eq!(f.index.stats().orphans, 1);
        f.index.clear(W1, &[Tier::Host]);
        assert_eq!(f.index.stats(), IndexStats::default());
    });
}

#[test]
fn a_touch_adds_residency_to_a_known_place_only() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2], &t(0, 8));
        let outcome = StoreOutcome {
            refused: 1,
            ..placed(2)
        };
        let touched = f.index.touch(W1, &ints(&[1, 2, 9]), Tier::Host);
        assert_eq!(touched, outcome);
        assert_eq!(f.index.touch(W2, &ints(&[1]), Tier::Host), refused(1));
        f.remove(W1, &[2, 1]);
        assert_eq!(f.overlap(W1, &t(0, 8)).host, 2);
        let repeated = StoreOutcome {
            repeated: 1,
            ..placed(0)
        };
        assert_eq!(f.index.touch(W1, &ints(&[1]), Tier::Host), repeated);
        assert_eq!(f.index.remove(W1, &ints(&[1]), Tier::Host), removed(1, 0));
        assert_eq!(f.overlap(W1, &t(0, 8)).host, 2);
    });
}

// Units of several blocks.

#[test]
fn two_tiers_may_have_different_units_and_share_the_key() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2, 3, 4], &t(0, 16));
        f.store(W1, Some(4), &[5], &t(16, 4));
        // An offloading engine names the coarse host block by the key of its last device block.
        (f.unit, f.tier) = (4, Tier::Host);
        assert_eq!(f.store(W1, None, &[4], &t(0, 16)), placed(1));
        (f.unit, f.tier) = (1, Tier::Device);
        f.remove(W1, &[3, 2]);
        let expected = Overlap {
            device: 3,
            host: 2,
            ..Overlap::default()
        };
        assert_eq!(f.overlap(W1, &t(0, 20)), expected);
        // A prompt that leaves inside the host unit has no use of it: blocks 2 and 3 are a hole.
        assert_eq!(f.blocks(W1, &t(0, 12)), 1);
        // The same tier with another unit is refused.
        f.unit = 4;
        assert_eq!(f.store(W1, None, &[4], &t(0, 16)), refused(1));
    });
}

#[test]
fn a_fork_inside_a_unit_credits_neither_side_with_the_other() {
    on_every_index(|f| {
        f.unit = 2;
        let left = [t(0, 4), t(40, 4)].concat();
        let right = [t(0, 4), t(60, 4)].concat();
        f.store(W1, None, &[1], &left);
        f.store(W2, None, &[1], &right);
        assert_eq!((f.blocks(W1, &left), f.blocks(W2, &left)), (2, 0));
        assert_eq!((f.blocks(W1, &right), f.blocks(W2, &right)), (0, 2));
        assert_eq!(f.index.stats().blocks, 3);
        // One slot with both sides holds two units of two blocks.
        f.store(W1, None, &[2], &right);
        assert_eq!(f.index.slot_blocks(W1).device, 4);
        f.remove(W1, &[1]);
        assert_eq!((f.blocks(W1, &left), f.blocks(W1, &right)), (0, 2));
    });
}

#[test]
fn a_unit_may_begin_at_any_block() {
    on_every_index(|f| {
        f.store(W1, None, &[1], &t(0, 4));
        f.unit = 4;
        assert_eq!(f.store(W1, Some(1), &[2], &t(4, 16)), placed(1));
        assert_eq!(f.blocks(W1, &t(0, 20)), 5);
        assert_eq!(f.blocks(W1, &t(0, 16)), 1);
    });
}

// Doubt.

#[test]
fn doubted_entries_are_credited_until_they_are_dropped() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2, 3], &t(0, 12));
        f.store(W1, None, &[1, 2, 3], &t(0, 12));
        f.store(W1, Some(8), &[9], &t(80, 4));
        f.index.demote(W1);
        assert_eq!(f.blocks(W1, &t(0, 12)), 3);
        // Confirmed afresh: one removal is enough, whatever was counted before.
        f.store(W1, None, &[1, 2], &t(0, 8));
        assert_eq!(f.index.drop_demoted(W1), 1);
        assert_eq!(f.index.stats().orphans, 0);
        assert_eq!(f.blocks(W1, &t(0, 12)), 2);
        f.remove(W1, &[2]);
        assert_eq!(f.blocks(W1, &t(0, 12)), 1);
        assert_eq!(f.index.drop_demoted(W1), 0);
    });
}

#[test]
fn a_doubted_place_gives_way_to_a_new_one() {
    on_every_index(|f| {
        f.store(W1, None, &[1, 2], &t(0, 8));
        f.index.demote(W1);
        assert_eq!(f.store(W1, None, &[2], &t(80, 4)), placed(1));
        assert_eq!((f.blocks(W1, &t(0, 8)), f.blocks(W1, &t(80, 4))), (1, 1));
        assert_eq!(f.store(W1, None, &[2], &t(90, 4)), refused(1));
    });
}

#[test]
fn a_doubted_orphan_attaches_as_a_guess() {
    on_every_index(|f| {
        f.store(W1, Some(1), &[2, 3], &t(4, 8));
        f.index.demote(W1);
        f.store(W1, None, &[1, 2], &t(0, 8));
        // The confirmed key 2 was attached to as well, without a second count.
        assert_eq!(f.blocks(W1, &t(0, 12)), 3);
        assert_eq!(f.index.drop_demoted(W1), 1);
        assert_eq!(f.remove(W1, &[2, 2]), removed(1, 1));
    });
}
