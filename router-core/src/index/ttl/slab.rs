//! Numbered storage that reuses numbers.

use std::ops::{Index, IndexMut};

/// The number of nothing.
pub(super) const NONE: u32 = u32::MAX;

/// Values under numbers that stay the same until removal.
///
/// Values are boxed: a number that is free costs 12 bytes, and nothing once the slab is empty. A few boxes are kept for the
/// values to come.
#[derive(Debug)]
pub(super) struct Slab<T> {
    entries: Vec<Option<Entry<T>>>,
    free: Vec<u32>,
    spare: Vec<Entry<T>>,
}

/// A box that is empty while it is spare.
type Entry<T> = Box<Option<T>>;

/// Boxes kept, and numbers up to which an empty slab keeps its memory.
const KEPT: usize = 16;

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            spare: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    pub(super) const fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(super) fn get(&self, number: u32) -> Option<&T> {
        self.entries.get(number as usize)?.as_deref()?.as_ref()
    }

    pub(super) fn insert(&mut self, value: T) -> u32 {
        let entry = match self.spare.pop() {
            Some(mut spare) => {
                *spare = Some(value);
                spare
            }
            None => Box::new(Some(value)),
        };
        if let Some(number) = self.free.pop() {
            self.entries[number as usize] = Some(entry);
            return number;
        }
        let number = u32::try_from(self.entries.len()).unwrap_or(NONE);
        assert!(number != NONE, "2^32 entries do not fit memory");
        self.entries.push(Some(entry));
        number
    }

    /// Removes a value that is there.
    pub(super) fn remove(&mut self, number: u32) -> T {
        let mut entry = self.entries[number as usize].take().expect(LIVE);
        let value = entry.take().expect(LIVE);
        self.free.push(number);
        if self.spare.len() < KEPT {
            self.spare.push(entry);
        }
        if self.len() == 0 && self.entries.len() > KEPT {
            *self = Self::default();
        }
        value
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0..)
            .zip(&self.entries)
            .filter_map(|(number, entry)| Some((number, entry.as_deref()?.as_ref()?)))
    }
}

impl<T> Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, number: u32) -> &T {
        self.get(number).expect(LIVE)
    }
}

impl<T> IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, number: u32) -> &mut T {
        let entry = self.entries[number as usize].as_deref_mut();
        entry.and_then(Option::as_mut).expect(LIVE)
    }
}

const LIVE: &str = "numbers are dropped together with their values";
