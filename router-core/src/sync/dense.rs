//! Arrays that grow without moving what is in them.

use std::fmt;

use super::OnceLock;

/// An array of values under dense indexes, which grows by doubling and never moves or drops a value, so that it is read
/// and extended without a lock.
pub(crate) struct Dense<T> {
    segments: [OnceLock<Box<[T]>>; SEGMENTS],
}

/// Values of the first segment; each further one is as long as all before it.
const FIRST: usize = 64;
const SEGMENTS: usize = 11;

impl<T: Default> Dense<T> {
    pub(crate) const fn new() -> Self {
        Self {
            segments: [const { OnceLock::new() }; SEGMENTS],
        }
    }

    /// Returns the value at `index`, making it and all before it when they are not there; `None` beyond 65,536 values.
    pub(crate) fn at(&self, index: usize) -> Option<&T> {
        let (segment, offset) = place(index);
        if let Some(values) = self.segments.get(segment)?.get() {
            return values.get(offset);
        }
        // Those before it too: whoever goes through the pieces must not stop short of it.
        for (number, segment) in self.segments[..=segment].iter().enumerate() {
            let length = FIRST << number.saturating_sub(1);
            segment.get_or_init(|| (0..length).map(|_| T::default()).collect());
        }
        self.get(index)
    }

    /// Returns the value at `index` when its segment was made.
    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        let (segment, offset) = place(index);
        self.segments.get(segment)?.get()?.get(offset)
    }

    /// Returns all values that were made, in order, in pieces.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = &[T]> {
        self.segments
            .iter()
            .map_while(|segment| segment.get().map(|values| &**values))
    }
}

/// Returns the segment of an index and its offset in there.
const fn place(index: usize) -> (usize, usize) {
    if index < FIRST {
        return (0, index);
    }
    let doubled = (index / FIRST).ilog2() as usize;
    (doubled + 1, index - (FIRST << doubled))
}

impl<T: Default> Default for Dense<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> fmt::Debug for Dense<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dense").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_has_a_place_of_its_own_in_order() {
        let mut last = 0;
        for index in 0..65_536 {
            let (segment, offset) = place(index);
            let before = if segment == 0 {
                0
            } else {
                FIRST << (segment - 1)
            };
            assert_eq!(before + offset, index);
            assert!(segment < SEGMENTS);
            last = last.max(segment);
        }
        assert_eq!(last, SEGMENTS - 1);
    }

    #[test]
    fn values_stay_where_they_are_while_it_grows() {
        let dense = Dense::<std::sync::atomic::AtomicU32>::new();
        let first: *const _ = dense.at(3).unwrap();
        assert!(dense.get(64).is_none());
        assert!(dense.at(64).is_some() && dense.at(1_000).is_some());
        assert!(std::ptr::eq(first, dense.at(3).unwrap()));
        assert!(dense.at(65_536).is_none());
        // 1,000 lies in the fifth segment, which ends at 64 × 2^4.
        assert_eq!(dense.pieces().map(<[_]>::len).sum::<usize>(), 1_024);
    }
}
