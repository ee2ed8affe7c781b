//! A small world of operations on an index, applied to the radix tree and to the reference model side by side.
//!
//! Everything is small on purpose (three different blocks, short paths, few slots), so that random operations meet each
//! other: duplicates, forks inside a unit, holes, orphans whose parent comes later, keys announced at two places.

use std::time::{Duration, Instant};

use kvlane::index::{
    EngineHash, EngineKey, NaiveIndex, OrphanLimits, Overlap, Overlaps, PrefixIndex, RadixIndex,
    RemoveOutcome, StoreOutcome, StoredRun, Tier,
};
use kvlane::{LocalBlockHash, Slot};

/// Slots that an operation for everyone reaches: enough for dense holders.
pub(crate) const SLOTS: u8 = 12;

/// A prompt, one small number a block.
pub(crate) type Path = Vec<u8>;

/// One step of a scenario.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// Announces the blocks of `path` after the first `known` ones, whose last is the parent.
    Store {
        to: To,
        path: Path,
        known: usize,
        unit: usize,
        tier: Tier,
        keys: Keys,
        parent_keys: Keys,
        /// Gives the key at this index the name of another path's end.
        wrong: Option<(usize, Path)>,
    },
    /// Removes the keys of `path` that end after so many blocks.
    Remove {
        to: To,
        path: Path,
        ends: Vec<usize>,
        tier: Tier,
        keys: Keys,
    },
    /// Adds residency without tokens.
    Touch {
        to: To,
        path: Path,
        ends: Vec<usize>,
        tier: Tier,
        keys: Keys,
    },
    /// Clears the tiers whose bits are set.
    Clear {
        to: To,
        tiers: u8,
    },
    Demote {
        to: To,
    },
    DropDemoted {
        to: To,
    },
    /// Lets time pass.
    Wait {
        seconds: u8,
    },
}

/// Who takes part in an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum To {
    Slot(u8),
    Everyone,
}

/// How keys are named: each kind is a space of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Keys {
    Int,
    /// Other integers for the same places.
    Alias,
    /// Cache group 1 with the integers of group 0.
    Group,
    Bytes,
}

/// Reads a scenario from bytes and runs it; any bytes are one.
///
/// # Panics
/// When the two indexes differ, or the tree's invariants do not hold.
pub(crate) fn check_bytes(bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    let max_run_blocks = bytes.one_of(&[0x7FFF, 1, 3]);
    let probes = [(); 3].map(|()| bytes.path());
    let ops = std::iter::from_fn(|| bytes.op()).take(MAX_OPS);
    let ops: Vec<Op> = ops.collect();
    World::new(max_run_blocks, &probes).run(&ops);
}

/// Operations of one scenario from bytes; more find nothing more and take long.
const MAX_OPS: usize = 64;

/// Bytes that are read as choices; zeros follow the last.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        first
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.byte()) % choices.len()]
    }

    /// One byte for the length, two with a bit for each block.
    fn path(&mut self) -> Path {
        let blocks = 1 + self.byte() % 10;
        let bits = u16::from_le_bytes([self.byte(), self.byte()]);
        (0..blocks)
            .map(|block| u8::from(bits >> block & 1 == 1))
            .collect()
    }

    fn ends(&mut self) -> Vec<usize> {
        let bits = u16::from_le_bytes([self.byte(), self.byte()]);
        let ends = (1..=10).filter(|end| bits >> end & 1 == 1);
        if bits & 1 == 1 {
            ends.rev().collect()
        } else {
            ends.collect()
        }
    }

    fn op(&mut self) -> Option<Op> {
        if self.0.is_empty() {
            return None;
        }
        const KEYS: [Keys; 4] = [Keys::Int, Keys::Alias, Keys::Group, Keys::Bytes];
        let kind = self.byte();
        let to = match self.byte() % 16 {
            15 => To::Everyone,
            slot => To::Slot(slot % 3),
        };
        Some(match kind % 10 {
            0..=3 => Op::Store {
                to,
                path: self.path(),
                known: self.one_of(&[0, 0, 1, 2, 3, 5]),
                unit: self.one_of(&[1, 1, 2, 4]),
                tier: self.one_of(&Tier::ALL),
                keys: self.one_of(&KEYS),
                parent_keys: self.one_of(&KEYS),
                wrong: self
                    .one_of(&[None, None, None, Some(()), None])
                    .map(|()| (usize::from(self.byte() % 4), self.path())),
            },
            4 | 5 => Op::Remove {
                to,
                path: self.path(),
                ends: self.ends(),
                tier: self.one_of(&Tier::ALL),
                keys: self.one_of(&KEYS),
            },
            6 => Op::Touch {
                to,
                path: self.path(),
                ends: self.ends(),
                tier: self.one_of(&Tier::ALL),
                keys: self.one_of(&KEYS),
            },
            7 => Op::Clear {
                to,
                tiers: self.byte(),
            },
            8 if self.byte().is_multiple_of(2) => Op::Demote { to },
            8 => Op::DropDemoted { to },
            _ => Op::Wait {
                seconds: self.byte() % 8,
            },
        })
    }
}

/// The two indexes and the clock.
#[derive(Debug)]
pub(crate) struct World {
    radix: RadixIndex,
    naive: NaiveIndex,
    now: Instant,
    probes: Vec<Path>,
    answers: [Overlaps; 2],
    /// What the scenarios came to in all, so that a test can tell whether they reach everything.
    pub(crate) reached: Reached,
}

/// Sums over all operations and lookups of a world.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reached {
    pub(crate) stored: StoreOutcome,
    pub(crate) removed: RemoveOutcome,
    pub(crate) doubted: usize,
    pub(crate) overlap: Overlap,
}

impl World {
    /// Creates two empty indexes; `probes` are looked up after every operation.
    pub(crate) fn new(max_run_blocks: u16, probes: &[Path]) -> Self {
        let limits = OrphanLimits {
            max_keys: 8,
            max_age: Duration::from_secs(10),
        };
        #[allow(clippy::disallowed_methods, reason = "a test has a clock")]
        let now = Instant::now();
        Self {
            radix: RadixIndex::with_max_run_blocks(limits, max_run_blocks),
            naive: NaiveIndex::new(limits),
            now,
            probes: probes.to_vec(),
            answers: Default::default(),
            reached: Reached::default(),
        }
    }

    /// Applies a scenario, comparing after every operation, and empties both indexes at the end.
    pub(crate) fn run(&mut self, ops: &[Op]) {
        for op in ops {
            self.apply(op);
        }
        for slot in To::Everyone.slots() {
            self.clear(slot, 0b1111);
        }
        self.compare(&[]);
        let stats = self.radix.stats();
        assert!(stats.is_empty(), "{stats:?}");
        assert!(stats.bytes < 16_384, "{stats:?}");
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Store { to, path, .. } => {
                to.slots().for_each(|slot| self.store(slot, op));
                self.compare(path);
            }
            Op::Remove {
                to,
                path,
                ends,
                tier,
                keys,
            } => {
                let keys = keys.at(path, ends);
                for slot in to.slots() {
                    let radix = self.radix.remove(slot, &keys, *tier);
                    assert_eq!(radix, self.naive.remove(slot, &keys, *tier));
                    self.reached.removed.removed += radix.removed;
                    self.reached.removed.unknown += radix.unknown;
                }
                self.compare(path);
            }
            Op::Touch {
                to,
                path,
                ends,
                tier,
                keys,
            } => {
                let keys = keys.at(path, ends);
                for slot in to.slots() {
                    let radix = self.radix.touch(slot, &keys, *tier);
                    assert_eq!(radix, self.naive.touch(slot, &keys, *tier));
                }
                self.compare(path);
            }
            Op::Clear { to, tiers } => {
                to.slots().for_each(|slot| self.clear(slot, *tiers));
                self.compare(&[]);
            }
            Op::Demote { to } => {
                for slot in to.slots() {
                    self.radix.demote(slot);
                    self.naive.demote(slot);
                }
                self.compare(&[]);
            }
            Op::DropDemoted { to } => {
                for slot in to.slots() {
                    let radix = self.radix.drop_demoted(slot);
                    assert_eq!(radix, self.naive.drop_demoted(slot));
                    self.reached.doubted += radix;
                }
                self.compare(&[]);
            }
            Op::Wait { seconds } => self.now += Duration::from_secs((*seconds).into()),
        }
    }

    fn store(&mut self, slot: Slot, op: &Op) {
        let Op::Store {
            path,
            known,
            unit,
            tier,
            keys,
            parent_keys,
            wrong,
            ..
        } = op
        else {
            return;
        };
        let known = (*known).min(path.len());
        let units = (path.len() - known) / unit;
        let ends: Vec<usize> = (1..=units).map(|number| known + number * unit).collect();
        let mut keys = keys.at(path, &ends);
        if let Some((index, other)) = wrong
            && let Some(key) = keys.get_mut(*index)
        {
            *key = Keys::Int.name(other);
        }
        let parent = (known > 0).then(|| parent_keys.name(&path[..known]));
        let run = StoredRun {
            parent: parent.as_ref(),
            keys: &keys,
            local_hashes: &local_hashes(&path[known..known + units * unit]),
            blocks_per_key: *unit,
            tier: *tier,
        };
        let radix = self.radix.store(slot, &run, self.now);
        assert_eq!(radix, self.naive.store(slot, &run, self.now));
        let sum = &mut self.reached.stored;
        sum.placed += radix.placed;
        sum.repeated += radix.repeated;
        sum.orphaned += radix.orphaned;
        sum.attached += radix.attached;
        sum.refused += radix.refused;
        sum.dropped += radix.dropped;
    }

    fn clear(&self, slot: Slot, tiers: u8) {
        let tiers: Vec<Tier> = Tier::ALL
            .into_iter()
            .filter(|tier| tiers >> tier.index() & 1 == 1)
            .collect();
        self.radix.clear(slot, &tiers);
        self.naive.clear(slot, &tiers);
    }

    /// Compares everything that can be seen from outside, and checks the tree from inside.
    fn compare(&mut self, path: &[u8]) {
        self.radix.assert_invariants();
        let (radix, naive) = (self.radix.stats(), self.naive.stats());
        assert_eq!(radix.blocks, naive.blocks, "blocks");
        assert_eq!(radix.orphans, naive.orphans, "orphans");
        for slot in To::Everyone.slots() {
            let radix = self.radix.slot_blocks(slot);
            assert_eq!(radix, self.naive.slot_blocks(slot), "blocks of {slot:?}");
        }
        let [radix, naive] = &mut self.answers;
        let probes = self.probes.iter().map(Vec::as_slice);
        for probe in probes.chain([path]) {
            let query = local_hashes(probe);
            self.radix.overlap(&query, radix);
            self.naive.overlap(&query, naive);
            for slot in To::Everyone.slots() {
                let (radix, naive) = (radix.get(slot), naive.get(slot));
                assert_eq!(radix, naive, "overlap of {slot:?} with {probe:?}");
                self.reached.overlap.device += radix.device;
                self.reached.overlap.host += radix.host;
                self.reached.overlap.external += radix.external;
                self.reached.overlap.disk += radix.disk;
            }
        }
    }
}

impl To {
    fn slots(self) -> impl Iterator<Item = Slot> {
        let slots = match self {
            Self::Slot(slot) => slot..slot + 1,
            Self::Everyone => 0..SLOTS,
        };
        slots.map(|slot| Slot(slot.into()))
    }
}

impl Keys {
    /// Names the block at the end of `path`.
    fn name(self, path: &[u8]) -> EngineKey {
        let number = path
            .iter()
            .fold(1, |number: u64, &block| number << 2 | u64::from(block));
        let (group, hash) = match self {
            Self::Int => (0, EngineHash::Int(number)),
            Self::Alias => (0, EngineHash::Int(number | 1 << 63)),
            Self::Group => (1, EngineHash::Int(number)),
            Self::Bytes => (0, EngineHash::Bytes(number.to_be_bytes().into())),
        };
        EngineKey { group, hash }
    }

    fn at(self, path: &[u8], ends: &[usize]) -> Vec<EngineKey> {
        ends.iter()
            .filter(|&&end| end > 0 && end <= path.len())
            .map(|&end| self.name(&path[..end]))
            .collect()
    }
}

fn local_hashes(path: &[u8]) -> Vec<LocalBlockHash> {
    path.iter()
        .map(|&block| LocalBlockHash(mixed(1 + u64::from(block))))
        .collect()
}

/// Spreads a number over 64 bits, as a hash does: sequence hashes are sums, and those of small numbers would meet.
const fn mixed(number: u64) -> u64 {
    let number = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}
