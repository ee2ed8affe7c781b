//! Models of what threads may do to each other, under a scheduler that tries every order: `scripts/loom.sh`.
//!
//! Each model has two or three threads of a few operations; locks and atomics come through the crate's `sync` module, so
//! that what is checked is the code that runs.
#![cfg(loom)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane::index::{
    EngineHash, EngineKey, OrphanLimits, Overlaps, PrefixIndex, RadixIndex, StoredRun, Tier,
};
use kvlane::{
    BlockSize, LocalBlockHash, Router, RouterConfig, SaltContext, SelectRequest, Slot, WorkerSpec,
};
use loom::thread;

const A: Slot = Slot(0);
const B: Slot = Slot(1);

fn index() -> Arc<RadixIndex> {
    Arc::new(RadixIndex::new(OrphanLimits {
        max_keys: 8,
        max_age: Duration::from_secs(60),
    }))
}

fn keys(blocks: std::ops::Range<u64>) -> Vec<EngineKey> {
    blocks
        .map(|block| EngineKey {
            group: 0,
            hash: EngineHash::Int(block),
        })
        .collect()
}

fn path(blocks: std::ops::Range<u64>) -> Vec<LocalBlockHash> {
    blocks.map(|block| LocalBlockHash(1_000 + block)).collect()
}

#[expect(clippy::disallowed_methods, reason = "a model has a clock")]
fn now() -> Instant {
    Instant::now()
}

/// Stores blocks of the one path that there is, under its blocks' numbers.
fn store(index: &RadixIndex, slot: Slot, blocks: std::ops::Range<u64>) {
    let parent = blocks
        .start
        .checked_sub(1)
        .map(|before| keys(before..before + 1));
    let run = StoredRun {
        parent: parent.as_ref().map(|parent| &parent[0]),
        keys: &keys(blocks.clone()),
        local_hashes: &path(blocks),
        blocks_per_key: 1,
        tier: Tier::Device,
    };
    index.store(slot, &run, now());
}

fn held(index: &RadixIndex, slot: Slot) -> u32 {
    let mut overlaps = Overlaps::new();
    index.overlap(&path(0..4), &mut overlaps);
    overlaps.get(slot).blocks()
}

#[test]
fn a_lookup_sees_a_store_whole_or_not_at_all() {
    // What was seen in any order: a model that schedules nothing would prove nothing.
    let seen = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let note = seen.clone();
    loom::model(move || {
        let index = index();
        let writer = {
            let index = index.clone();
            thread::spawn(move || {
                store(&index, A, 0..2);
                store(&index, A, 2..4);
            })
        };
        let (first, second) = (held(&index, A), held(&index, A));
        assert!([0, 2, 4].contains(&first), "{first}");
        assert!(second >= first, "{first} then {second}");
        note.fetch_or(1 << first, std::sync::atomic::Ordering::Relaxed);
        writer.join().unwrap();
        assert_eq!(held(&index, A), 4);
        index.assert_invariants();
    });
    let seen = seen.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(seen, 1 | 1 << 2 | 1 << 4, "none, half and all");
}

#[test]
fn a_lookup_beside_a_removal_is_never_beyond_what_was_stored() {
    loom::model(|| {
        let index = index();
        store(&index, A, 0..4);
        let writer = {
            let index = index.clone();
            thread::spawn(move || {
                index.remove(A, &keys(2..4), Tier::Device);
            })
        };
        let seen = held(&index, A);
        assert!(seen == 4 || seen == 2, "{seen}");
        writer.join().unwrap();
        assert_eq!(held(&index, A), 2);
        index.assert_invariants();
    });
}

#[test]
fn writers_of_two_slots_share_a_path() {
    loom::model(|| {
        let index = index();
        let writers = [A, B].map(|slot| {
            let index = index.clone();
            thread::spawn(move || {
                store(&index, slot, 0..2);
                if slot == A {
                    index.remove(slot, &keys(1..2), Tier::Device);
                }
            })
        });
        for writer in writers {
            writer.join().unwrap();
        }
        assert_eq!((held(&index, A), held(&index, B)), (1, 2));
        index.assert_invariants();
        index.clear(B, &Tier::ALL);
        assert_eq!((held(&index, A), held(&index, B)), (1, 0));
        assert_eq!(index.stats().blocks, 1);
        index.assert_invariants();
    });
}

#[test]
fn a_clear_beside_a_store_of_another_slot_leaves_that_ones_blocks() {
    loom::model(|| {
        let index = index();
        store(&index, A, 0..3);
        let clearing = {
            let index = index.clone();
            thread::spawn(move || index.clear(A, &Tier::ALL))
        };
        store(&index, B, 0..2);
        clearing.join().unwrap();
        assert_eq!((held(&index, A), held(&index, B)), (0, 2));
        assert_eq!(index.stats().blocks, 2);
        index.assert_invariants();
    });
}

#[test]
fn forgetting_beside_a_store_credits_nothing_that_is_not_there() {
    loom::model(|| {
        let index = index();
        store(&index, A, 0..4);
        let shrinking = {
            let index = index.clone();
            thread::spawn(move || {
                index.shrink_to(0);
            })
        };
        store(&index, B, 0..2);
        shrinking.join().unwrap();
        assert_eq!(held(&index, A), 0);
        assert!(held(&index, B) <= 2);
        index.assert_invariants();
    });
}

#[test]
fn two_decisions_book_both_and_release_both() {
    loom::model(|| {
        let mut config = RouterConfig::default();
        config.block_size = BlockSize::new(1).unwrap();
        config.prediction_ttl_seconds = 0.0;
        config.seed = Some(1);
        // A router is large on a stack while it is made.
        let deciding = thread::Builder::new().stack_size(STACK_WORDS);
        let deciding = deciding.spawn(move || {
            let router = Arc::new(Router::new(config).unwrap());
            router
                .add_worker(WorkerSpec::new("w").unwrap(), now())
                .unwrap();
            let other = {
                let router = router.clone();
                let other = thread::Builder::new().stack_size(STACK_WORDS);
                other.spawn(move || decide(&router)).unwrap()
            };
            decide(&router);
            other.join().unwrap();
            let workers = router.workers(now());
            let booked = (workers[0].active_requests, workers[0].active_blocks);
            assert_eq!(booked, (0, 0));
            assert_eq!(router.stats().active_leases, 0);
        });
        deciding.unwrap().join().unwrap();
    });
}

const STACK_WORDS: usize = 1 << 16;

fn decide(router: &Router) {
    let prompt = router.prompt(&[1, 2], &SaltContext::default());
    let guard = router.select(&SelectRequest::new(&prompt), now()).unwrap();
    drop(guard.expect("there is a worker"));
}
