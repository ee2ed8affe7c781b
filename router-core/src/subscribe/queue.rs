//! Batches kept in memory under the common budget.

use std::collections::VecDeque;

use super::frames::BatchFrame;
use super::options::Budget;

/// One batch in memory.
///
/// Copied out of the ZeroMQ message: a small message would pin the whole receive buffer that it lies in.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) sequence: u64,
    pub(super) payload: Box<[u8]>,
}

/// Batches in the order in which they came. Every byte is accounted to the budget given to each call, always the same one.
#[derive(Debug, Default)]
pub(super) struct BatchQueue {
    batches: VecDeque<Batch>,
    bytes: usize,
}

impl BatchQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    pub(super) fn first_sequence(&self) -> Option<u64> {
        self.batches.front().map(|batch| batch.sequence)
    }

    /// Tells whether another batch may be taken; an empty queue always takes one, so that work goes on.
    pub(super) fn has_room(&self, payload_bytes: usize, budget: &Budget) -> bool {
        self.is_empty() || budget.allows(self.bytes, payload_bytes + OVERHEAD_BYTES)
    }

    /// Keeps a batch; the caller has asked for room.
    pub(super) fn push(&mut self, batch: &BatchFrame<'_>, budget: &mut Budget) {
        self.account(batch.payload.len() + OVERHEAD_BYTES, budget);
        self.batches.push_back(Batch {
            sequence: batch.sequence,
            payload: batch.payload.into(),
        });
    }

    pub(super) fn put_back(&mut self, batch: Batch, budget: &mut Budget) {
        self.account(batch.payload.len() + OVERHEAD_BYTES, budget);
        self.batches.push_front(batch);
    }

    pub(super) fn pop(&mut self, budget: &mut Budget) -> Option<Batch> {
        let batch = self.batches.pop_front()?;
        let cost = batch.payload.len() + OVERHEAD_BYTES;
        self.bytes -= cost;
        budget.give_back(cost);
        if self.batches.is_empty() {
            self.batches = VecDeque::new();
        }
        Some(batch)
    }

    pub(super) fn clear(&mut self, budget: &mut Budget) {
        budget.give_back(self.bytes);
        *self = Self::default();
    }

    fn account(&mut self, cost: usize, budget: &mut Budget) {
        self.bytes += cost;
        budget.take(cost);
    }
}

/// What a kept batch costs beyond its payload: the entry, with the deque's growth, and the allocation.
const OVERHEAD_BYTES: usize = 80;

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(queue: &mut BatchQueue, budget: &mut Budget) -> u64 {
        let payload = &[0; 120];
        for sequence in 0..100 {
            if !queue.has_room(payload.len(), budget) {
                return sequence;
            }
            queue.push(&BatchFrame { sequence, payload }, budget);
        }
        100
    }

    #[test]
    fn a_queue_takes_no_more_than_the_budget_and_gives_all_back() {
        let mut budget = Budget::new(4_000);
        let mut queue = BatchQueue::default();
        // Half of 4,000 bytes, at 120 + 80 a batch.
        assert_eq!(fill(&mut queue, &mut budget), 10);
        assert_eq!(budget.used(), 2_000);
        let first = queue.pop(&mut budget).unwrap();
        queue.put_back(first, &mut budget);
        assert_eq!(queue.first_sequence(), Some(0));
        queue.clear(&mut budget);
        assert_eq!(budget.used(), 0);
        assert!(queue.is_empty() && queue.has_room(1_000_000, &budget));
    }

    #[test]
    fn a_full_budget_leaves_every_stream_its_share() {
        let mut budget = Budget::new(4_000);
        budget.set_streams(2);
        fill(&mut BatchQueue::default(), &mut budget);
        // 4,000 / (4 x 2 streams) = 500 bytes: two batches of 200.
        assert_eq!(fill(&mut BatchQueue::default(), &mut budget), 2);
        assert_eq!(budget.used(), 2_400);
    }
}
