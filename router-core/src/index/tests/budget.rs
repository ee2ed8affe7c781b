//! Forgetting under a bound of memory.

use proptest::prelude::*;

use super::*;
use crate::block::{LocalBlockHash, SequenceHash};

const LIMITS: OrphanLimits = OrphanLimits {
    max_keys: 1_000,
    max_age: Duration::from_secs(60),
};

/// A path of blocks, named by the sequence hash of its end: an engine that never names two blocks alike.
fn store(
    index: &dyn PrefixIndex,
    slot: Slot,
    path: &[LocalBlockHash],
    from: usize,
) -> StoreOutcome {
    let keys: Vec<EngineKey> = SequenceHash::chain(path)
        .iter()
        .map(|hash| int(hash.0))
        .collect();
    let run = StoredRun {
        parent: from.checked_sub(1).map(|before| &keys[before]),
        keys: &keys[from..],
        local_hashes: &path[from..],
        blocks_per_key: 1,
        tier: Tier::Device,
    };
    #[expect(clippy::disallowed_methods, reason = "a test has a clock")]
    index.store(slot, &run, Instant::now())
}

fn int(hash: u64) -> EngineKey {
    EngineKey {
        group: 0,
        hash: EngineHash::Int(hash),
    }
}

fn path(conversation: u64, blocks: u64) -> Vec<LocalBlockHash> {
    (0..blocks)
        .map(|block| LocalBlockHash(fastrand::Rng::with_seed(conversation << 32 | block).u64(..)))
        .collect()
}

fn held(index: &RadixIndex, slot: Slot, path: &[LocalBlockHash]) -> u32 {
    let mut overlaps = Overlaps::new();
    index.overlap(path, &mut overlaps);
    overlaps.get(slot).blocks()
}

#[test]
fn what_was_used_least_recently_goes_first() {
    let index = RadixIndex::new(LIMITS).dating_uses();
    for conversation in 0..200 {
        store(&index, W1, &path(conversation, 64), 0);
    }
    // The first hundred are looked up after the last was stored, so the second hundred are older.
    for conversation in 200..264 {
        store(&index, W2, &path(conversation, 1), 0);
    }
    for conversation in 0..100 {
        assert_eq!(held(&index, W1, &path(conversation, 64)), 64);
    }
    let bytes = index.bytes();
    let gone = index.shrink_to(bytes * 3 / 4);
    assert!(
        index.bytes() <= bytes * 3 / 4,
        "{} of {bytes}",
        index.bytes()
    );
    assert!((64 * 20..64 * 100).contains(&gone), "{gone} keys went");
    for conversation in 0..100 {
        assert_eq!(
            held(&index, W1, &path(conversation, 64)),
            64,
            "{conversation}"
        );
    }
    index.assert_invariants();
}

#[test]
fn a_conversation_goes_from_its_end() {
    let index = RadixIndex::new(LIMITS).dating_uses();
    let prompt = path(1, 64);
    store(&index, W1, &prompt, 0);
    // Another worker turns off in the middle, which makes a second run.
    let mut other = prompt[..32].to_vec();
    other.extend(path(2, 320));
    store(&index, W2, &other, 0);
    index.shrink_to(index.bytes() - 1);
    assert_eq!(
        held(&index, W2, &other),
        32,
        "the fork went, and its front stayed"
    );
    assert_eq!(held(&index, W1, &prompt), 64);
    index.assert_invariants();
}

#[test]
fn orphans_go_before_anything_that_is_credited() {
    let index = RadixIndex::new(LIMITS).dating_uses();
    store(&index, W1, &path(1, 64), 0);
    assert_eq!(store(&index, W1, &path(2, 64), 1).orphaned, 63);
    assert_eq!(store(&index, W1, &path(3, 64), 1).orphaned, 63);
    index.shrink_to(index.bytes() - 1);
    assert_eq!(index.stats().orphans, 63);
    assert_eq!(held(&index, W1, &path(1, 64)), 64);
    index.assert_invariants();
}

#[test]
fn a_slot_far_from_the_first_is_counted_and_forgotten_as_well() {
    let index = RadixIndex::new(LIMITS);
    let far = Slot(1_000);
    store(&index, far, &path(1, 64), 0);
    assert_eq!(store(&index, far, &path(2, 64), 1).orphaned, 63);
    assert_eq!(index.stats().orphans, 63);
    index.assert_invariants();
    index.shrink_to(0);
    assert!(index.stats().is_empty(), "{:?}", index.stats());
    index.assert_invariants();
}

#[test]
fn idle_room_goes_before_keys() {
    let index = RadixIndex::new(LIMITS).dating_uses();
    for conversation in 0..100 {
        store(&index, W1, &path(conversation, 64), 0);
    }
    // The table doubled to room for 8,320 keys, of which it has 6,400.
    let bytes = index.bytes();
    assert_eq!(index.shrink_to(bytes - 1), 0);
    assert!(index.bytes() < bytes, "{} of {bytes}", index.bytes());
    for conversation in 0..100 {
        assert_eq!(held(&index, W1, &path(conversation, 64)), 64);
    }
    index.assert_invariants();
}

proptest! {
    #[test]
    fn what_is_left_is_never_more_than_what_is_held(
        steps in prop::collection::vec((0_u32..3, 0_u64..6, 1_usize..40, 0_u32..8), 1..120),
    ) {
        let index = RadixIndex::new(LIMITS).dating_uses();
        let naive = NaiveIndex::new(LIMITS);
        for (slot, conversation, blocks, action) in steps {
            let slot = Slot(slot);
            let path = path(conversation / 2, 40);
            let path = &path[..blocks];
            match action {
                0..5 => {
                    store(&index, slot, path, blocks / 3);
                    store(&index, slot, path, 0);
                    store(&naive, slot, path, blocks / 3);
                    store(&naive, slot, path, 0);
                }
                5 => {
                    let last = SequenceHash::chain(path)[blocks - 1];
                    index.remove(slot, &[int(last.0)], Tier::Device);
                    naive.remove(slot, &[int(last.0)], Tier::Device);
                }
                6 => {
                    index.clear(slot, &Tier::ALL);
                    naive.clear(slot, &Tier::ALL);
                }
                _ => {
                    let bound = index.bytes() / 2;
                    index.shrink_to(bound);
                    prop_assert!(index.bytes() <= bound.max(EMPTY_BYTES), "{}", index.bytes());
                }
            }
            index.assert_invariants();
            let (mut left, mut all) = (Overlaps::new(), Overlaps::new());
            index.overlap(path, &mut left);
            naive.overlap(path, &mut all);
            for slot in (0..3).map(Slot) {
                prop_assert!(left.get(slot).blocks() <= all.get(slot).blocks());
            }
        }
    }
}

/// What an index may keep that holds nothing: a slab, and the shells of three slots and of a few runs.
const EMPTY_BYTES: usize = 64 * 1_024;
