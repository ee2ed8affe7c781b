//! Stores whose parent is unknown.

use super::*;

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
