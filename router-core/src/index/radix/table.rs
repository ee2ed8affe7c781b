//! The compact table of one slot: 64-bit engine keys to places and states, five to a cache line.
//!
//! A key lies in its home bucket or, when that is full, in the first of the following ones that has room. Each bucket counts
//! the keys that passed it by, so that a search stops where none did; a removal takes its key off those counts, and
//! nothing else has to move. The home is taken from the high bits of the key's hash, so that a table of any size works and
//! a rebuild reads and writes in order.

use super::chunks::Place;
use super::record::Code;
use crate::prefetch::prefetch;

/// A table of keys, each with its place and state.
#[derive(Debug)]
pub(super) struct KeyTable {
    buckets: Vec<Bucket>,
    len: usize,
    /// Keys that the slot's engine can hold, 0 when unknown.
    expected: usize,
    /// Keys were removed in numbers: from now on the table grows by small steps.
    steady: bool,
    seed: u64,
}

/// One cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Bucket {
    keys: [u64; WIDTH],
    places: [Place; WIDTH],
    /// Bits 0-24: a [`Code`] for each key; 25-31: keys that passed by, which at 127 is no longer counted.
    meta: u32,
}

/// Where a key lies in the table, until the next insertion.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    bucket: usize,
    index: usize,
    pub(super) place: Place,
    pub(super) code: Code,
}

/// Keys passed the first line of a search, and the one that is searched may be among them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Passed;

/// Hash of a key in one table.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KeyHash(u64);

impl Default for KeyTable {
    fn default() -> Self {
        Self {
            buckets: Vec::new(),
            len: 0,
            expected: 0,
            steady: false,
            seed: fastrand::u64(..),
        }
    }
}

impl KeyTable {
    pub(super) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) const fn expected(&self) -> usize {
        self.expected
    }

    pub(super) fn bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>()
    }

    /// Takes note of how many keys the slot's engine can hold (0: unknown), which later growth goes by.
    pub(super) const fn expect(&mut self, keys: usize) {
        self.expected = keys;
    }

    /// Returns the hash of a key, which the following calls take so that it is computed once.
    pub(super) const fn hash(&self, key: u64) -> KeyHash {
        KeyHash((key ^ self.seed).wrapping_mul(MULTIPLIER))
    }

    pub(super) fn find(&self, key: u64, hash: KeyHash) -> Option<Found> {
        let mut bucket = self.home(hash)?;
        for _ in 0..self.buckets.len() {
            let line = &self.buckets[bucket];
            if let Some(index) = line.find(key) {
                return Some(Found {
                    bucket,
                    index,
                    place: line.places[index],
                    code: line.code(index),
                });
            }
            if line.passed() == 0 {
                return None;
            }
            bucket = self.after(bucket);
        }
        None
    }

    /// Finds a key in the first line of its search. Where that does not settle it, asks for the next line and returns an error:
    /// then [`find`](Self::find) will find that line near. A line that is full is followed by the next one when its key is
    /// entered, so that is asked for as well.
    pub(super) fn find_at_home(&self, key: u64, hash: KeyHash) -> Result<Option<Found>, Passed> {
        let Some(home) = self.home(hash) else {
            return Ok(None);
        };
        let line = &self.buckets[home];
        if let Some(index) = line.find(key) {
            return Ok(Some(Found {
                bucket: home,
                index,
                place: line.places[index],
                code: line.code(index),
            }));
        }
        if line.free() == WIDTH {
            prefetch(&self.buckets[self.after(home)]);
        }
        if line.passed() > 0 {
            Err(Passed)
        } else {
            Ok(None)
        }
    }

    /// Asks for the first line of a key's search, so that what follows finds it in the cache.
    pub(super) fn prefetch(&self, hash: KeyHash) {
        if let Some(home) = self.home(hash) {
            prefetch(&self.buckets[home]);
        }
    }

    /// Adds a key unless it is there, telling whether it was not. There must be room: see [`reserve`](Self::reserve).
    pub(super) fn insert(&mut self, key: u64, hash: KeyHash, place: Place, code: Code) -> bool {
        let Some(home) = self.home(hash) else {
            debug_assert!(false, "room was reserved");
            return false;
        };
        if self.buckets[home].passed() > 0 && self.find(key, hash).is_some() {
            return false;
        }
        if self.buckets[home].find(key).is_some() {
            return false;
        }
        self.add(key, home, place, code);
        true
    }

    /// Adds a key that is not there.
    fn add(&mut self, key: u64, home: usize, place: Place, code: Code) {
        let mut bucket = home;
        while !self.buckets[bucket].insert(key, place, code) {
            self.buckets[bucket].pass(1);
            bucket = self.after(bucket);
        }
        self.len += 1;
    }

    pub(super) fn replace(&mut self, found: Found, place: Place, code: Code) {
        let line = &mut self.buckets[found.bucket];
        line.places[found.index] = place;
        line.set_code(found.index, code);
    }

    pub(super) fn remove(&mut self, hash: KeyHash, found: Found) {
        let line = &mut self.buckets[found.bucket];
        line.keys[found.index] = 0;
        line.places[found.index] = Place::NONE;
        line.set_code(found.index, Code::default());
        self.len -= 1;
        let Some(mut bucket) = self.home(hash) else {
            return;
        };
        while bucket != found.bucket {
            self.buckets[bucket].pass(-1);
            bucket = self.after(bucket);
        }
    }

    /// Makes room for more keys.
    ///
    /// A table takes its full size at once, unless that is much: then it doubles until an eighth of the expected keys is
    /// there. One that has shrunk, or is beyond what was expected, grows by a fifth.
    pub(super) fn reserve(&mut self, more: usize) {
        let needed = self.len + more;
        let room = room(self.buckets.len());
        if needed <= room {
            return;
        }
        let expected = self.expected;
        let full_from = if expected <= AT_ONCE { 0 } else { expected / 8 };
        let target = if needed <= expected && needed >= full_from {
            expected
        } else if self.steady || (expected > 0 && needed > expected) {
            needed.max(room + room / 5)
        } else {
            needed.max(room * 2)
        };
        self.resize(target);
    }

    /// Gives idle room back once a third of it is enough: later than growth by doubling leaves it, so that a cache which
    /// swings around its capacity keeps its table. A table of the expected size waits until it is empty.
    pub(super) fn shrink(&mut self) {
        let room = room(self.buckets.len());
        let is_expected = room <= self.expected + self.expected / 8;
        if self.len == 0 {
            self.buckets = Vec::new();
        } else if self.len < room / 3 && self.buckets.len() > SMALL && !is_expected {
            self.steady = true;
            self.resize(self.len + self.len / 8);
        }
    }

    /// Gives all idle room back, and forgets what was expected.
    pub(super) fn fit(&mut self) {
        self.expected = 0;
        self.steady = true;
        let keys = self.len + self.len / 8;
        if keys < room(self.buckets.len()) {
            self.resize(keys);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, Place, Code)> {
        self.buckets.iter().flat_map(Bucket::iter)
    }

    /// Changes the state of every key.
    pub(super) fn change_codes(&mut self, change: impl Fn(Code) -> Code) {
        for line in &mut self.buckets {
            for index in 0..WIDTH {
                if line.places[index] != Place::NONE {
                    line.set_code(index, change(line.code(index)));
                }
            }
        }
    }

    fn resize(&mut self, keys: usize) {
        let buckets = (keys * LOAD.1).div_ceil(LOAD.0 * WIDTH).max(1);
        let old = std::mem::replace(&mut self.buckets, vec![Bucket::EMPTY; buckets]);
        self.len = 0;
        for line in &old {
            for (key, place, code) in line.iter() {
                if let Some(home) = self.home(self.hash(key)) {
                    self.add(key, home, place, code);
                }
            }
        }
    }

    /// Returns the bucket that a key belongs in; `None` without buckets.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the high half of the product is below the number of buckets"
    )]
    fn home(&self, hash: KeyHash) -> Option<usize> {
        let home = ((u128::from(hash.0) * self.buckets.len() as u128) >> 64) as usize;
        (home < self.buckets.len()).then_some(home)
    }

    const fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() {
            0
        } else {
            bucket + 1
        }
    }
}

impl Bucket {
    const EMPTY: Self = Self {
        keys: [0; WIDTH],
        places: [Place::NONE; WIDTH],
        meta: 0,
    };

    /// Compares all keys at once, without branches. A free place has key 0, which is a key like any other.
    fn find(&self, key: u64) -> Option<usize> {
        let mut hits = 0_u32;
        for index in 0..WIDTH {
            hits |= u32::from(self.keys[index] == key) << index;
        }
        if hits == 0 {
            return None;
        }
        (0..WIDTH).find(|&index| hits >> index & 1 == 1 && self.places[index] != Place::NONE)
    }

    /// Returns the first free index, [`WIDTH`] when there is none; without branches, since it may be any.
    fn free(&self) -> usize {
        let mut free = 1_u32 << WIDTH;
        for index in 0..WIDTH {
            free |= u32::from(self.places[index] == Place::NONE) << index;
        }
        free.trailing_zeros() as usize
    }

    fn insert(&mut self, key: u64, place: Place, code: Code) -> bool {
        let index = self.free();
        if index == WIDTH {
            return false;
        }
        self.keys[index] = key;
        self.places[index] = place;
        self.set_code(index, code);
        true
    }

    const fn code(&self, index: usize) -> Code {
        Code::from_bits(self.meta >> shift(index))
    }

    const fn set_code(&mut self, index: usize, code: Code) {
        let shift = shift(index);
        self.meta = (self.meta & !(Code::MASK << shift)) | (code.bits() << shift);
    }

    const fn passed(&self) -> u32 {
        self.meta >> PASSED_SHIFT
    }

    const fn pass(&mut self, by: i32) {
        if self.passed() < PASSED_MAX {
            let passed = self.passed().saturating_add_signed(by);
            self.meta = (self.meta & ((1 << PASSED_SHIFT) - 1)) | (passed << PASSED_SHIFT);
        }
    }

    fn iter(&self) -> impl Iterator<Item = (u64, Place, Code)> {
        (0..WIDTH)
            .filter(|&index| self.places[index] != Place::NONE)
            .map(|index| (self.keys[index], self.places[index], self.code(index)))
    }
}

/// Returns how many keys so many buckets take.
const fn room(buckets: usize) -> usize {
    buckets * WIDTH * LOAD.0 / LOAD.1
}

/// Returns where the code of a key lies in a bucket's meta word.
#[expect(clippy::cast_possible_truncation, reason = "an index is below WIDTH")]
const fn shift(index: usize) -> u32 {
    Code::BITS * index as u32
}

/// Keys a bucket: what 64 bytes hold with 8 bytes of key, 4 of place and 5 bits of state each.
const WIDTH: usize = 5;

/// Fullest that a table gets. At 7/8 a search for a new key reads about 1.4 lines.
const LOAD: (usize, usize) = (7, 8);

const PASSED_SHIFT: u32 = 25;
const PASSED_MAX: u32 = 127;

/// Most expected keys for which a table takes its full size with the first of them, 3.8 MB.
const AT_ONCE: usize = 1 << 18;

/// Buckets that are not worth giving back.
const SMALL: usize = 8;

/// The fractional part of the golden ratio in 64 bits, as in Fibonacci hashing.
const MULTIPLIER: u64 = 0x9E37_79B9_7F4A_7C15;

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::ops::Range;

    use proptest::prelude::*;

    use super::*;
    use crate::index::radix::chunks::Place;

    fn code(bits: u32) -> Code {
        Code::from_bits(bits)
    }

    #[test]
    fn a_bucket_is_one_cache_line() {
        assert_eq!(size_of::<Bucket>(), 64);
    }

    #[test]
    fn key_zero_is_a_key_like_any_other() {
        let mut table = KeyTable::default();
        assert!(table.find(0, table.hash(0)).is_none());
        table.reserve(1);
        assert!(table.find(0, table.hash(0)).is_none());
        assert!(table.insert(0, table.hash(0), Place::new(7, 3), code(2)));
        assert!(!table.insert(0, table.hash(0), Place::new(7, 3), code(2)));
        let found = table.find(0, table.hash(0)).expect("it was added");
        assert_eq!((found.place, found.code), (Place::new(7, 3), code(2)));
        table.remove(table.hash(0), found);
        assert!(table.find(0, table.hash(0)).is_none());
    }

    fn add(table: &mut KeyTable, keys: Range<u64>) {
        for key in keys {
            table.reserve(1);
            assert!(table.insert(key, table.hash(key), Place::new(0, 0), code(0)));
        }
    }

    fn remove(table: &mut KeyTable, keys: Range<u64>) {
        for key in keys {
            let hash = table.hash(key);
            let found = table.find(key, hash).unwrap();
            table.remove(hash, found);
            table.shrink();
        }
    }

    /// Returns the memory of a table made for so many keys: five a line, at most 7/8 full.
    fn bytes_for(keys: usize) -> usize {
        (keys * 8).div_ceil(5 * 7) * 64
    }

    #[test]
    fn a_table_takes_the_expected_size_at_once_and_keeps_it_until_it_is_empty() {
        let mut table = KeyTable::default();
        table.expect(50_000);
        add(&mut table, 0..1);
        assert_eq!(table.bytes(), bytes_for(50_000));
        add(&mut table, 1..50_000);
        remove(&mut table, 1..50_000);
        assert_eq!(table.bytes(), bytes_for(50_000));
        remove(&mut table, 0..1);
        assert_eq!(table.bytes(), 0);
    }

    #[test]
    fn a_table_of_very_many_expected_keys_waits_for_an_eighth_of_them() {
        let mut table = KeyTable::default();
        table.expect(400_000);
        add(&mut table, 0..30_000);
        assert!(table.bytes() < bytes_for(100_000));
        add(&mut table, 30_000..71_700);
        assert_eq!(table.bytes(), bytes_for(400_000));
        add(&mut table, 71_700..400_000);
        assert_eq!(table.bytes(), bytes_for(400_000));
    }

    #[test]
    fn a_table_that_has_shrunk_does_not_swing_with_its_keys() {
        let mut table = KeyTable::default();
        add(&mut table, 0..50_000);
        remove(&mut table, 16_500..50_000);
        add(&mut table, 16_500..19_000);
        let bytes = table.bytes();
        for _ in 0..3 {
            remove(&mut table, 16_500..19_000);
            assert_eq!(table.bytes(), bytes);
            add(&mut table, 16_500..19_000);
            assert_eq!(table.bytes(), bytes);
        }
    }

    proptest! {
        #[test]
        fn it_answers_as_a_hash_map_does(
            steps in prop::collection::vec((0_u64..300, 0_u32..31, any::<bool>()), 1..2_000),
            expected in 0_usize..400,
        ) {
            let mut table = KeyTable::default();
            let mut model = HashMap::new();
            table.expect(expected);
            for (key, bits, keep) in steps {
                let hash = table.hash(key);
                let found = table.find(key, hash);
                prop_assert_eq!(
                    found.map(|found| (found.place, found.code)),
                    model.get(&key).copied(),
                );
                let value = (Place::new(bits, (key % 16).try_into().unwrap()), code(bits));
                match (found, keep) {
                    (Some(found), true) => table.replace(found, value.0, value.1),
                    (Some(found), false) => table.remove(hash, found),
                    (None, true) => {
                        table.reserve(1);
                        prop_assert!(table.insert(key, hash, value.0, value.1));
                    }
                    (None, false) => table.shrink(),
                }
                if keep {
                    model.insert(key, value);
                } else {
                    model.remove(&key);
                }
                prop_assert_eq!(table.len, model.len());
            }
            let all: HashMap<_, _> = table.iter().map(|(key, place, code)| (key, (place, code))).collect();
            prop_assert_eq!(all, model);
        }
    }
}
