//! A value that every call reads and hardly any changes.

use std::fmt;
use std::ops::Deref;

use super::{RwLock, RwLockReadGuard};

/// Copies of what all threads would otherwise write to one cache line. More threads than this share.
pub(crate) const STRIPES: usize = if cfg!(loom) { 2 } else { 16 };

/// Returns the stripe of the calling thread.
pub(crate) fn stripe() -> usize {
    // Deals threads to stripes, whatever the order: nothing for a model checker.
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    thread_local! {
        static MINE: usize = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % STRIPES;
    }
    // A thread that is ending may have no locals any more.
    MINE.try_with(|mine| *mine).unwrap_or(0)
}

/// Keeps a value on cache lines of its own (two of them: processors fetch lines in pairs).
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Padded<T>(pub(crate) T);

/// Values that things are dealt to by number, so that they do not wait for each other.
#[derive(Debug, Default)]
pub(crate) struct Shards<T>([Padded<T>; STRIPES]);

impl<T> Shards<T> {
    /// Returns the value that a number belongs to: hashes, and numbers that follow each other, are dealt evenly.
    pub(crate) fn of(&self, number: u64) -> &T {
        &self.0[usize::try_from(number % STRIPES as u64).unwrap_or(0)].0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|shard| &shard.0)
    }
}

/// A value with a read lock for each stripe: readers on different stripes share no cache line, a writer takes all locks.
///
/// So when [`replace`](Self::replace) returns, nobody reads the value of before, and nobody will.
pub(crate) struct Striped<T> {
    stripes: [Padded<RwLock<T>>; STRIPES],
}

/// A value under a read lock. The thread must not read the same value a second time while it has one.
pub(crate) struct StripedRef<'a, T>(RwLockReadGuard<'a, T>);

impl<T> Striped<T> {
    /// Makes the value of each stripe.
    pub(crate) fn new(mut make: impl FnMut() -> T) -> Self {
        Self {
            stripes: std::array::from_fn(|_| Padded(RwLock::new(make()))),
        }
    }

    /// Reads the value of the calling thread's stripe.
    pub(crate) fn read(&self) -> StripedRef<'_, T> {
        self.read_at(stripe())
    }

    fn read_at(&self, stripe: usize) -> StripedRef<'_, T> {
        StripedRef(self.stripes[stripe].0.read())
    }

    /// Replaces the value of every stripe at once.
    pub(crate) fn replace(&self, mut make: impl FnMut() -> T) {
        // Always in the same order, so that two writers do not wait for each other.
        let locked: Vec<_> = self.stripes.iter().map(|stripe| stripe.0.write()).collect();
        for mut value in locked {
            *value = make();
        }
    }
}

impl<T> Deref for StripedRef<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> fmt::Debug for Striped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Striped").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::thread;

    use super::*;
    use crate::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn after_a_replacement_nobody_reads_what_was_before() {
        let value = Striped::new(|| 0u64);
        let newest = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let at_least = newest.load(Ordering::SeqCst);
                        assert!(*value.read() >= at_least);
                    }
                });
            }
            for next in 1..200 {
                value.replace(|| next);
                newest.store(next, Ordering::SeqCst);
            }
        });
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    use super::*;

    /// Removing a worker: whatever a decision notes of one that it saw registered, nothing is left once removing returns.
    /// Two decisions on stripes of their own beside a removal; all of it takes milliseconds.
    #[test]
    fn nothing_is_noted_after_a_removal() {
        loom::model(|| {
            let is_registered = Arc::new(Striped::new(|| true));
            let noted = Arc::new(AtomicUsize::new(0));
            let decisions: Vec<_> = (0..STRIPES)
                .map(|stripe| {
                    let (workers, noted) = (Arc::clone(&is_registered), Arc::clone(&noted));
                    thread::spawn(move || {
                        let is_registered = workers.read_at(stripe);
                        if *is_registered {
                            noted.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            is_registered.replace(|| false);
            noted.store(0, Ordering::Relaxed);
            for decision in decisions {
                decision.join().expect("a decision does not panic");
            }
            assert_eq!(noted.load(Ordering::Relaxed), 0);
        });
    }
}
