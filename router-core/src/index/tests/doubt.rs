//! What is left of entries from before events were lost.

use super::*;

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
