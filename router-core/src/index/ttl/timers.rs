//! When something of a slot expires.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Moment;

/// Timers of runs; one that was set again, or whose run is gone, stays until it goes off or is swept.
#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<Timer>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Timer {
    pub(super) at: Moment,
    pub(super) stamp: u64,
    pub(super) run: u32,
}

impl Timers {
    /// Sets a timer.
    pub(super) fn set(&mut self, timer: Timer) {
        self.heap.push(Reverse(timer));
    }

    /// Drops the timers that mean nothing when they are more than those that do, by some. `live` is how many runs there
    /// are, and `is_set` tells whether a timer still means something.
    pub(super) fn sweep(&mut self, live: usize, is_set: impl Fn(&Timer) -> bool) {
        if self.heap.len() > 2 * live + SLACK {
            self.heap.retain(|Reverse(timer)| is_set(timer));
        }
    }

    /// Tells whether a timer has gone off, which may mean nothing.
    pub(super) fn is_due(&self, now: Moment) -> bool {
        self.heap
            .peek()
            .is_some_and(|Reverse(first)| first.at <= now)
    }

    /// Takes a timer that has gone off.
    pub(super) fn take_due(&mut self, now: Moment) -> Option<Timer> {
        if !self.is_due(now) {
            return None;
        }
        self.heap.pop().map(|Reverse(first)| first)
    }

    /// Gives memory back when nothing is set any more.
    pub(super) fn forget(&mut self) {
        self.heap.clear();
        if self.heap.capacity() > SLACK {
            self.heap.shrink_to(0);
        }
    }

    #[cfg(test)]
    pub(super) fn contains(&self, timer: &Timer) -> bool {
        self.heap.iter().any(|Reverse(set)| set == timer)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.heap.len()
    }
}

/// Timers beyond twice the live ones that are not worth a sweep.
pub(super) const SLACK: usize = 8;
