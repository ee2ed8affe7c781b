//! Requests booked on one target and the distinct blocks that they occupy.
//!
//! Prompts form a tree by prefix, so a new prompt adds its blocks beyond the longest prefix that it shares with any
//! active one, and a leaving prompt takes along what it shares with none. The longest shared prefix is found among the
//! prompts with the same first block by bisection: sequence hashes are equal up to the fork and differ after it.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::block::{LocalBlockHash, common_prefix};
use crate::ids::LeaseId;

/// What a booking occupies.
#[derive(Clone, Debug)]
pub(crate) struct BookedRequest {
    sequence: Arc<[LocalBlockHash]>,
    /// Blocks that no other request can share: the incomplete tail, output, and every further prompt of a batch.
    own_blocks: usize,
}

impl BookedRequest {
    /// `own_blocks` is at least 1: the block that the first output token goes to is nobody else's.
    pub(crate) fn new(sequence: Arc<[LocalBlockHash]>, own_blocks: usize) -> Self {
        Self {
            sequence,
            own_blocks: own_blocks.max(1),
        }
    }

    pub(crate) const fn sequence(&self) -> &Arc<[LocalBlockHash]> {
        &self.sequence
    }
}

#[derive(Debug)]
struct Booking {
    request: BookedRequest,
    output_blocks: usize,
    prefill_blocks: f64,
}

/// Booked load of one target.
#[derive(Debug, Default)]
pub(crate) struct ActiveLoad {
    bookings: HashMap<LeaseId, Booking>,
    /// Bookings by the sequence hash of their first block.
    by_first: HashMap<LocalBlockHash, Vec<LeaseId>>,
    blocks: usize,
    prefill_blocks: f64,
}

impl ActiveLoad {
    /// Books a request with the blocks that it must prefill.
    pub(crate) fn book(&mut self, lease: LeaseId, request: &BookedRequest, prefill_blocks: f64) {
        self.blocks += self.new_blocks(request);
        self.prefill_blocks += prefill_blocks;
        if let Some(first) = request.sequence.first() {
            self.by_first.entry(*first).or_default().push(lease);
        }
        self.bookings.insert(
            lease,
            Booking {
                request: request.clone(),
                output_blocks: 0,
                prefill_blocks,
            },
        );
    }

    /// Takes the prefill of a request off.
    pub(crate) fn prefill_done(&mut self, lease: LeaseId) {
        if let Some(booking) = self.bookings.get_mut(&lease) {
            self.prefill_blocks -= std::mem::take(&mut booking.prefill_blocks);
        }
        self.settle();
    }

    /// Sets the blocks that a request's output occupies beyond its first.
    pub(crate) fn set_output_blocks(&mut self, lease: LeaseId, blocks: usize) {
        if let Some(booking) = self.bookings.get_mut(&lease) {
            self.blocks = self.blocks - booking.output_blocks + blocks;
            booking.output_blocks = blocks;
        }
    }

    /// Releases a request and returns the blocks that it gave back; a lease that is not booked here is left alone.
    pub(crate) fn release(&mut self, lease: LeaseId) -> Option<usize> {
        let booking = self.bookings.remove(&lease)?;
        if let Some(first) = booking.request.sequence.first()
            && let Some(group) = self.by_first.get_mut(first)
        {
            group.retain(|member| *member != lease);
            if group.is_empty() {
                self.by_first.remove(first);
            }
        }
        // What it shares with the remaining ones stays.
        let blocks = self.new_blocks(&booking.request) + booking.output_blocks;
        self.blocks -= blocks;
        self.prefill_blocks -= booking.prefill_blocks;
        self.settle();
        Some(blocks)
    }

    /// Returns the blocks that booking `request` would add.
    pub(crate) fn new_blocks(&self, request: &BookedRequest) -> usize {
        request.sequence.len() - self.shared_blocks(&request.sequence) + request.own_blocks
    }

    /// Returns the booked prefill that `request` waits for anyway because it is of its own prefix: a sibling of a request in
    /// prefill finds that work done, so it must not count against the target again.
    pub(crate) fn shared_prefill(&self, request: &BookedRequest) -> f64 {
        let Some(group) = request
            .sequence
            .first()
            .and_then(|first| self.by_first.get(first))
        else {
            return 0.0;
        };
        let shared: f64 = group
            .iter()
            .filter_map(|lease| self.bookings.get(lease))
            .filter(|booking| booking.prefill_blocks > 0.0)
            .map(|booking| {
                let other = &booking.request.sequence;
                let limit = request.sequence.len().min(other.len());
                let common = common_prefix(&request.sequence[..limit], &other[..limit]);
                // A booking prefills the last part of its prompt; the blocks before were cached.
                let cached = (other.len() as f64 - booking.prefill_blocks).max(0.0);
                (common as f64 - cached).max(0.0)
            })
            .sum();
        shared.min(self.prefill_blocks)
    }

    pub(crate) fn requests(&self) -> usize {
        self.bookings.len()
    }

    pub(crate) const fn blocks(&self) -> usize {
        self.blocks
    }

    pub(crate) const fn prefill_blocks(&self) -> f64 {
        self.prefill_blocks
    }

    fn shared_blocks(&self, sequence: &[LocalBlockHash]) -> usize {
        let Some(group) = sequence.first().and_then(|first| self.by_first.get(first)) else {
            return 0;
        };
        let mut best = 0;
        for booking in group.iter().filter_map(|lease| self.bookings.get(lease)) {
            let other = &booking.request.sequence;
            let limit = sequence.len().min(other.len());
            // Cheap refusal: it cannot be longer than the best unless it agrees there.
            if limit <= best || sequence[best] != other[best] {
                continue;
            }
            best = best.max(common_prefix(&sequence[..limit], &other[..limit]));
            if best == sequence.len() {
                break;
            }
        }
        best
    }

    /// Takes away what rounding of sums left when nothing is booked.
    fn settle(&mut self) {
        if self.bookings.is_empty() || self.prefill_blocks < 0.0 {
            self.prefill_blocks = 0.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::block::LocalBlockHash;

    fn chain(tokens: &[u64]) -> Arc<[LocalBlockHash]> {
        tokens.iter().map(|token| LocalBlockHash(*token)).collect()
    }

    #[test]
    fn equal_prompts_share_all_but_their_own_block() {
        let mut load = ActiveLoad::default();
        let request = BookedRequest::new(chain(&[1, 2, 3]), 1);
        load.book(LeaseId(1), &request, 3.0);
        load.book(LeaseId(2), &request, 0.0);
        assert_eq!(load.blocks(), 5); // 3 shared and 2 of their own
        load.release(LeaseId(1));
        assert_eq!(load.blocks(), 4);
        load.release(LeaseId(1)); // again: a no-op
        load.release(LeaseId(2));
        assert_eq!((load.blocks(), load.requests()), (0, 0));
        assert!(load.prefill_blocks().abs() < 1e-12);
    }

    #[test]
    fn a_sibling_does_not_wait_twice_for_its_own_prefix() {
        let mut load = ActiveLoad::default();
        load.book(
            LeaseId(1),
            &BookedRequest::new(chain(&[1, 2, 3, 4, 5]), 1),
            3.0,
        ); // blocks 3 to 5
        load.book(LeaseId(2), &BookedRequest::new(chain(&[9, 9]), 1), 2.0);
        let sibling = BookedRequest::new(chain(&[1, 2, 3, 4, 7]), 1);
        assert!((load.shared_prefill(&sibling) - 2.0).abs() < 1e-12); // blocks 3 and 4
        load.prefill_done(LeaseId(1));
        assert!(load.shared_prefill(&sibling).abs() < 1e-12);
    }

    #[test]
    fn output_and_prefill_follow_the_request() {
        let mut load = ActiveLoad::default();
        load.book(LeaseId(1), &BookedRequest::new(chain(&[]), 1), 0.5);
        load.set_output_blocks(LeaseId(1), 4);
        assert_eq!(load.blocks(), 5);
        load.prefill_done(LeaseId(1));
        assert!(load.prefill_blocks().abs() < 1e-12);
        load.release(LeaseId(1));
        assert_eq!(load.blocks(), 0);
    }

    proptest! {
        /// Blocks equal the number of distinct prefixes plus own blocks, whatever is booked and released.
        #[test]
        fn blocks_are_distinct_prefixes(
            prompts in prop::collection::vec(prop::collection::vec(0..3u64, 0..6), 1..12),
            releases in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let mut load = ActiveLoad::default();
            let mut live: Vec<(LeaseId, Vec<u64>)> = Vec::new();
            for (id, prompt) in prompts.iter().enumerate() {
                let lease = LeaseId(id as u64);
                load.book(lease, &BookedRequest::new(chain(prompt), 1), 1.0);
                live.push((lease, prompt.clone()));
            }
            for release in releases {
                if live.is_empty() { break; }
                let (lease, _) = live.swap_remove(release.index(live.len()));
                load.release(lease);
                let distinct: std::collections::HashSet<&[u64]> = live
                    .iter()
                    .flat_map(|(_, prompt)| (1..=prompt.len()).map(move |end| &prompt[..end]))
                    .collect();
                prop_assert_eq!(load.blocks(), distinct.len() + live.len());
            }
        }
    }
}
