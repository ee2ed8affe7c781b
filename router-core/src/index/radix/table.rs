//! The compact table of one slot: 64-bit engine keys to places and states, five to a cache line.
//!
//! A key lies in its home bucket or, when that is full, in the first of the following ones that has room. Each bucket counts
//! the keys that passed it by, so that a search stops where none did; a removal takes its key off those counts, and
//! nothing else has to move. The home is taken from the high bits of the key's hash, so that a table of any size works and
//! a rebuild reads and writes in order.

use super::chunks::Place;
use super::line::{self, LINE_WORDS, Line, WIDTH};
use super::record::Code;
use crate::prefetch::prefetch;

/// A table of keys, each with its place and state.
#[derive(Debug)]
pub(super) struct KeyTable {
    lines: Lines,
    len: usize,
    /// Keys that the slot's engine can hold, 0 when unknown.
    expected: usize,
    /// Keys were removed in numbers: from now on the table grows by small steps.
    steady: bool,
    seed: u64,
}

/// Lines in memory that begins at a cache line.
#[derive(Debug, Default)]
struct Lines {
    words: Vec<u64>,
    /// Words before the first cache line.
    skipped: usize,
}

/// Where a key lies in the table, until the next insertion.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    line: usize,
    index: usize,
    pub(super) place: Place,
    pub(super) code: Code,
}

/// Hash of a key in one table.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KeyHash(u64);

impl Default for KeyTable {
    fn default() -> Self {
        Self {
            lines: Lines::default(),
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
        self.lines.words.capacity() * size_of::<u64>()
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
        let lines = self.lines.all();
        let mut at = home(hash, lines.len())?;
        for _ in 0..lines.len() {
            let line = &lines[at];
            if let Some(index) = line::find(line, key) {
                return Some(Found {
                    line: at,
                    index,
                    place: line::place(line, index),
                    code: line::code(line, index),
                });
            }
            if line::passed(line) == 0 {
                return None;
            }
            at = after(at, lines.len());
        }
        None
    }

    /// Asks for the first line of a key's search, so that what follows finds it in the cache.
    pub(super) fn prefetch(&self, hash: KeyHash) {
        let lines = self.lines.all();
        if let Some(home) = home(hash, lines.len()) {
            prefetch(&lines[home]);
        }
    }

    /// Adds a key unless it is there, telling whether it was not. There must be room: see [`reserve`](Self::reserve).
    pub(super) fn insert(&mut self, key: u64, hash: KeyHash, place: Place, code: Code) -> bool {
        let lines = self.lines.all_mut();
        let Some(home) = home(hash, lines.len()) else {
            debug_assert!(false, "room was reserved");
            return false;
        };
        if line::find(&lines[home], key).is_some() {
            return false;
        }
        if line::passed(&lines[home]) > 0 && self.find(key, hash).is_some() {
            return false;
        }
        self.add(key, home, place, code);
        true
    }

    /// Adds a key that is not there.
    fn add(&mut self, key: u64, home: usize, place: Place, code: Code) {
        let lines = self.lines.all_mut();
        let mut at = home;
        while !line::insert(&mut lines[at], key, place, code) {
            line::pass(&mut lines[at], 1);
            at = after(at, lines.len());
        }
        self.len += 1;
    }

    pub(super) fn replace(&mut self, found: Found, place: Place, code: Code) {
        line::set(
            &mut self.lines.all_mut()[found.line],
            found.index,
            place,
            code,
        );
    }

    pub(super) fn remove(&mut self, hash: KeyHash, found: Found) {
        let lines = self.lines.all_mut();
        line::remove(&mut lines[found.line], found.index);
        self.len -= 1;
        let Some(mut at) = home(hash, lines.len()) else {
            return;
        };
        while at != found.line {
            line::pass(&mut lines[at], -1);
            at = after(at, lines.len());
        }
    }

    /// Makes room for more keys.
    ///
    /// A table takes its full size at once, unless that is much: then it doubles until an eighth of the expected keys is
    /// there. One that has shrunk, or is beyond what was expected, grows by a fifth.
    pub(super) fn reserve(&mut self, more: usize) {
        let needed = self.len + more;
        let room = room(self.lines.all().len());
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
        let lines = self.lines.all().len();
        let room = room(lines);
        let is_expected = room <= self.expected + self.expected / 8;
        if self.len == 0 {
            self.lines = Lines::default();
        } else if self.len < room / 3 && lines > SMALL && !is_expected {
            self.steady = true;
            self.resize(self.len + self.len / 8);
        }
    }

    /// Gives all idle room back, and forgets what was expected.
    pub(super) fn fit(&mut self) {
        self.expected = 0;
        self.steady = true;
        let keys = self.len + self.len / 8;
        if keys < room(self.lines.all().len()) {
            self.resize(keys);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, Place, Code)> {
        self.lines.all().iter().flat_map(line::iter)
    }

    /// Changes the state of every key.
    pub(super) fn change_codes(&mut self, change: impl Fn(Code) -> Code) {
        for line in self.lines.all_mut() {
            for index in 0..WIDTH {
                if line::place(line, index) != Place::NONE {
                    line::set_code(line, index, change(line::code(line, index)));
                }
            }
        }
    }

    fn resize(&mut self, keys: usize) {
        let lines = (keys * LOAD.1).div_ceil(LOAD.0 * WIDTH).max(1);
        let old = std::mem::replace(&mut self.lines, Lines::zeroed(lines));
        self.len = 0;
        for (key, place, code) in old.all().iter().flat_map(line::iter) {
            if let Some(home) = home(self.hash(key), lines) {
                self.add(key, home, place, code);
            }
        }
    }
}

impl Lines {
    /// Takes zeroed memory for so many lines.
    fn zeroed(lines: usize) -> Self {
        if lines == 0 {
            return Self::default();
        }
        // Asked for as words: memory of a greater alignment would be zeroed by hand.
        let words = vec![0; (lines + 1) * LINE_WORDS - 1];
        let skipped = words.as_ptr().align_offset(size_of::<Line>());
        // Where alignment cannot be told, lines lie across cache lines and all else stays as it is.
        let skipped = skipped.min(LINE_WORDS - 1);
        Self { words, skipped }
    }

    fn all(&self) -> &[Line] {
        self.words[self.skipped..].as_chunks().0
    }

    fn all_mut(&mut self) -> &mut [Line] {
        self.words[self.skipped..].as_chunks_mut().0
    }
}

/// Returns the line that a key belongs in; `None` without lines.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the high half of the product is below the number of lines"
)]
fn home(hash: KeyHash, lines: usize) -> Option<usize> {
    let home = ((u128::from(hash.0) * lines as u128) >> 64) as usize;
    (home < lines).then_some(home)
}

const fn after(line: usize, lines: usize) -> usize {
    if line + 1 == lines { 0 } else { line + 1 }
}

/// Returns how many keys so many lines take.
const fn room(lines: usize) -> usize {
    lines * WIDTH * LOAD.0 / LOAD.1
}

/// Fullest that a table gets. At 7/8 a search for a new key reads about 1.4 lines.
const LOAD: (usize, usize) = (7, 8);

/// Most expected keys for which a table takes its full size with the first of them, 3.8 MB.
const AT_ONCE: usize = 1 << 18;

/// Lines that are not worth giving back.
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
    fn a_line_is_one_cache_line() {
        assert_eq!(size_of::<Line>(), 64);
        for lines in 1..9 {
            let lines = Lines::zeroed(lines);
            let all = lines.all();
            assert!(
                all.iter()
                    .all(|line| std::ptr::from_ref(line).addr() % 64 == 0)
            );
            assert_eq!(all.len(), (lines.words.len() + 1) / LINE_WORDS - 1);
        }
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

    /// Returns the memory of a table made for so many keys: five a line, at most 7/8 full, and what alignment costs.
    fn bytes_for(keys: usize) -> usize {
        (keys * 8).div_ceil(5 * 7) * 64 + 56
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
