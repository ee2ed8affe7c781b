//! One cache line of a [`KeyTable`](super::table::KeyTable): five keys, each with its place and state.
//!
//! Eight plain words, all zero when empty, so that a new table is memory which the system hands out zeroed and which is first
//! touched where a key arrives.

use super::chunks::Place;
use super::record::Code;

/// Words 0-4: keys. Words 5-7: six halves, of which five are the inverted places and the last is the meta word: bits 0-24 a
/// [`Code`] for each key, bits 25-31 the number of keys that passed by, which at 127 is no longer counted.
pub(super) type Line = [u64; LINE_WORDS];

/// Keys a line: what 64 bytes hold with 8 bytes of key, 4 of place and 5 bits of state each.
pub(super) const WIDTH: usize = 5;

/// Words of a line.
pub(super) const LINE_WORDS: usize = 8;

/// Compares all keys at once, without branches. A free place has key 0, which is a key like any other.
pub(super) fn find(line: &Line, key: u64) -> Option<usize> {
    let mut hits = 0_u32;
    for index in 0..WIDTH {
        hits |= u32::from(line[index] == key) << index;
    }
    if hits == 0 {
        return None;
    }
    (0..WIDTH).find(|&index| hits >> index & 1 == 1 && place(line, index) != Place::NONE)
}

/// Enters a key at the first free index; `false` when there is none.
pub(super) fn insert(line: &mut Line, key: u64, place: Place, code: Code) -> bool {
    let index = free(line);
    if index == WIDTH {
        return false;
    }
    line[index] = key;
    set(line, index, place, code);
    true
}

pub(super) fn remove(line: &mut Line, index: usize) {
    line[index] = 0;
    set(line, index, Place::NONE, Code::default());
}

pub(super) const fn place(line: &Line, index: usize) -> Place {
    Place::from_inverted(half(line, index))
}

pub(super) const fn code(line: &Line, index: usize) -> Code {
    Code::from_bits(half(line, META) >> code_shift(index))
}

/// Changes the place and the state of the key at an index.
pub(super) const fn set(line: &mut Line, index: usize, place: Place, code: Code) {
    set_half(line, index, place.inverted());
    set_code(line, index, code);
}

pub(super) const fn set_code(line: &mut Line, index: usize, code: Code) {
    let shift = code_shift(index);
    let meta = (half(line, META) & !(Code::MASK << shift)) | (code.bits() << shift);
    set_half(line, META, meta);
}

/// Returns how many keys passed by because the line was full.
pub(super) const fn passed(line: &Line) -> u32 {
    half(line, META) >> PASSED_SHIFT
}

pub(super) const fn pass(line: &mut Line, by: i32) {
    if passed(line) < PASSED_MAX {
        let passed = passed(line).saturating_add_signed(by);
        let codes = half(line, META) & ((1 << PASSED_SHIFT) - 1);
        set_half(line, META, codes | (passed << PASSED_SHIFT));
    }
}

pub(super) fn iter(line: &Line) -> impl Iterator<Item = (u64, Place, Code)> {
    (0..WIDTH)
        .filter(|&index| place(line, index) != Place::NONE)
        .map(|index| (line[index], place(line, index), code(line, index)))
}

/// Returns the first free index, [`WIDTH`] when there is none; without branches, since it may be any.
fn free(line: &Line) -> usize {
    let mut free = 1_u32 << WIDTH;
    for index in 0..WIDTH {
        free |= u32::from(half(line, index) == 0) << index;
    }
    free.trailing_zeros() as usize
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the upper half is meant to go"
)]
const fn half(line: &Line, index: usize) -> u32 {
    (line[WIDTH + index / 2] >> (32 * (index % 2))) as u32
}

const fn set_half(line: &mut Line, index: usize, value: u32) {
    let shift = 32 * (index % 2);
    let word = &mut line[WIDTH + index / 2];
    *word = (*word & !((u32::MAX as u64) << shift)) | ((value as u64) << shift);
}

/// Returns where the code of a key lies in the meta word.
#[expect(clippy::cast_possible_truncation, reason = "an index is below WIDTH")]
const fn code_shift(index: usize) -> u32 {
    Code::BITS * index as u32
}

/// The half that is the meta word.
const META: usize = WIDTH;

const PASSED_SHIFT: u32 = 25;
const PASSED_MAX: u32 = 127;
