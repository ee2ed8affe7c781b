//! What users of routers reported; the case numbers are those of the collection that they were retold in.

use super::*;

/// Case 1.
#[test]
fn a_cleared_slot_is_never_named_again_until_it_stores_again() {
    on_every_index(|f| {
        assert_eq!(f.store(W1, None, &[1, 2, 3], &t(0, 12)), placed(3));
        f.store(W1, Some(9), &[10], &t(90, 4));
        f.index.clear(W1, &Tier::ALL);
        assert!(f.index.stats().is_empty());
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
        assert!(f.index.stats().is_empty());
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
