//! Lower tiers, and units of several blocks.

use super::*;

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
        assert!(f.index.stats().is_empty());
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

#[test]
fn long_prompts_are_told_apart_by_tier_and_unit() {
    on_every_index(|f| {
        // 160 blocks on the host, the first 70 of them on the device too.
        let keys: Vec<u64> = (0..160).collect();
        f.store(W1, None, &keys[..70], &t(0, 280));
        f.tier = Tier::Host;
        f.store(W1, None, &keys, &t(0, 640));
        // 40 units of 4 blocks; the one of blocks 80 to 83 goes.
        f.unit = 4;
        f.store(W2, None, &keys[..40], &t(0, 640));
        f.remove(W2, &[20]);
        for asked in [1, 4, 63, 64, 65, 69, 70, 71, 79, 80, 84, 127, 128, 129, 160] {
            let prompt = t(0, asked * 4);
            let expected = Overlap {
                device: asked.min(70),
                host: asked.saturating_sub(70),
                ..Overlap::default()
            };
            assert_eq!(f.overlap(W1, &prompt), expected);
            assert_eq!(f.overlap(W2, &prompt).host, (asked / 4 * 4).min(80));
        }
    });
}
