//! Readers beside writers: nothing is credited that was not stored, and what a returned store put there is seen.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvlane::index::{
    EngineHash, EngineKey, OrphanLimits, Overlaps, PrefixIndex, RadixIndex, StoredRun, Tier,
};
use kvlane::{LocalBlockHash, Slot};

const WRITERS: u32 = 4;
const ROUNDS: u64 = if cfg!(miri) { 5 } else { 1_500 };

/// Blocks that all prompts share, and blocks that each has for itself afterwards.
const SHARED: u32 = 20;
const OWN: u32 = 20;

/// Writer `n` announces prompt `n` to slot `n`, on the device for even slots and on the host for odd ones, and removes it
/// again, its tail first. Its phase is odd while everything is resident.
#[test]
fn racing_lookups_credit_what_is_stored_and_nothing_else() {
    let index = RadixIndex::new(OrphanLimits {
        max_keys: 100,
        max_age: Duration::from_secs(60),
    });
    let phases: Vec<AtomicU64> = (0..WRITERS).map(|_| AtomicU64::new(0)).collect();
    let done = AtomicBool::new(false);
    let seen = thread::scope(|scope| {
        let readers = [(); 2].map(|()| scope.spawn(|| read(&index, &phases, &done)));
        let writers = (0..WRITERS).zip(&phases);
        let writers: Vec<_> = writers
            .map(|(slot, phase)| {
                let index = &index;
                scope.spawn(move || write(index, slot, phase))
            })
            .collect();
        for writer in writers {
            writer.join().expect("a writer ends");
        }
        done.store(true, Ordering::Release);
        readers.map(|reader| reader.join().expect("a reader ends"))
    });
    assert!(
        seen.iter().sum::<u64>() > 0,
        "no lookup met a resident prompt"
    );
    index.assert_invariants();
    assert!(index.stats().is_empty());
}

fn write(index: &RadixIndex, slot: u32, phase: &AtomicU64) {
    let prompt = prompt(slot);
    let keys: Vec<EngineKey> = (0..u64::from(SHARED + OWN))
        .map(|block| EngineKey {
            group: 0,
            hash: EngineHash::Int(block),
        })
        .collect();
    #[allow(clippy::disallowed_methods, reason = "a test has a clock")]
    let now = Instant::now();
    let store = |from: usize, to: usize| {
        let run = StoredRun {
            parent: from.checked_sub(1).map(|parent| &keys[parent]),
            keys: &keys[from..to],
            local_hashes: &prompt[from..to],
            blocks_per_key: 1,
            tier: tier(slot),
        };
        index.store(Slot(slot), &run, now)
    };
    for round in 0..ROUNDS {
        // In turns the second half arrives first and waits for its parent, or a block in the middle goes and comes back.
        if round % 2 == 0 {
            assert_eq!(store(25, keys.len()).orphaned, keys.len() - 25);
            assert_eq!(store(0, 25).attached, keys.len() - 25);
        } else {
            assert_eq!(store(0, keys.len()).placed, keys.len());
            index.remove(Slot(slot), &keys[10..11], tier(slot));
            assert_eq!(store(10, 11).placed, 1);
        }
        phase.fetch_add(1, Ordering::AcqRel);
        thread::yield_now();
        phase.fetch_add(1, Ordering::AcqRel);
        if round % 5 == 0 {
            index.clear(Slot(slot), &Tier::ALL);
        } else {
            let tail_first: Vec<EngineKey> = keys.iter().rev().cloned().collect();
            for some in tail_first.chunks(7) {
                let outcome = index.remove(Slot(slot), some, tier(slot));
                assert_eq!(outcome.removed, some.len());
            }
        }
    }
}

/// Returns how many lookups met a prompt that was resident all the while.
fn read(index: &RadixIndex, phases: &[AtomicU64], done: &AtomicBool) -> u64 {
    let prompts: Vec<_> = (0..WRITERS).map(prompt).collect();
    let mut overlaps = Overlaps::new();
    let mut resident = 0;
    while !done.load(Ordering::Acquire) {
        for (asked, prompt) in (0..WRITERS).zip(&prompts) {
            let phase = &phases[asked as usize];
            let before = phase.load(Ordering::Acquire);
            index.overlap(prompt, &mut overlaps);
            let after = phase.load(Ordering::Acquire);
            for slot in 0..WRITERS {
                let overlap = overlaps.get(Slot(slot));
                let stored = if slot == asked { SHARED + OWN } else { SHARED };
                assert!(overlap.blocks() <= stored, "{overlap:?} of slot {slot}");
                let in_other_tier = match tier(slot) {
                    Tier::Device => overlap.host,
                    Tier::Host | Tier::External | Tier::Disk => overlap.device,
                };
                assert_eq!(in_other_tier, 0, "{overlap:?} of slot {slot}");
                assert_eq!(overlap.disk + overlap.external, 0);
            }
            if before == after && before % 2 == 1 {
                let overlap = overlaps.get(Slot(asked));
                assert_eq!(overlap.blocks(), SHARED + OWN, "slot {asked}");
                resident += 1;
            }
        }
        thread::yield_now();
    }
    resident
}

fn tier(slot: u32) -> Tier {
    if slot.is_multiple_of(2) {
        Tier::Device
    } else {
        Tier::Host
    }
}

fn prompt(number: u32) -> Vec<LocalBlockHash> {
    let shared = 0..u64::from(SHARED);
    let first_own = 1_000 * (1 + u64::from(number));
    let own = first_own..first_own + u64::from(OWN);
    shared.chain(own).map(LocalBlockHash).collect()
}
