//! Places of keys, and how often they are held.

use super::*;

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
        let before = f.index.stats().blocks;
        assert_eq!(f.store(W1, None, &[2], &t(80, 4)), refused(1));
        assert_eq!(f.index.stats().blocks, before);
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
        assert!(f.index.stats().is_empty());
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
        assert!(f.index.stats().is_empty());
    });
}

#[test]
fn slots_join_and_leave_a_run_in_any_order() {
    on_every_index(|f| {
        // 37 has no factor in common with 101, so each slot comes once, in scattered order.
        let slots = || (0..101).map(|step| Slot(step * 37 % 101));
        f.store(Slot(400), None, &[8], &t(80, 4));
        for (joined, slot) in (1..).zip(slots()) {
            f.store(slot, None, &[1, 2], &t(0, 8));
            f.remove(slot, &[1 + u64::from(slot.0 % 2)]);
            let with_front = slots().take(joined).filter(|slot| slot.0 % 2 == 1);
            let credited = (0..101).filter(|&slot| f.blocks(Slot(slot), &t(0, 8)) == 1);
            assert_eq!(credited.count(), with_front.count());
        }
        for slot in slots() {
            assert_eq!(f.remove(slot, &[2 - u64::from(slot.0 % 2)]), removed(1, 0));
            assert_eq!(f.blocks(slot, &t(0, 8)), 0);
        }
        f.index.clear(Slot(400), &Tier::ALL);
    });
}

#[test]
fn a_prompt_matches_up_to_the_block_where_it_differs() {
    on_every_index(|f| {
        let keys: Vec<u64> = (0..50).collect();
        f.store(W1, None, &keys, &t(0, 200));
        for same in 0..50 {
            let prompt = [t(0, same * 4), t(9_000, 1), t(same * 4 + 1, 100)].concat();
            assert_eq!(f.blocks(W1, &prompt), same);
        }
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
