//! What the contract promises, claim by claim, for the radix tree and the reference model alike.
//!
//! `t(a, n)` are the tokens a, a + 1, ... (n of them); blocks have 4 tokens unless a test says otherwise.

mod budget;
mod doubt;
mod orphans;
mod places;
mod reported;
mod tiers;

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
        assert!(index.stats().is_empty());
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
