//! The KV pool: finite blocks, prefix caching, and eviction in vLLM's order.
//!
//! A block is in use (its reference count is above zero) or free. Free blocks stand in a queue and keep their content
//! until they are taken again, from the front; a request gives its blocks back last block first. So the least recently
//! used prompt goes first, and of one prompt its tail. Two blocks may hold the same content under one hash: each was
//! announced when it was filled, and each is announced again when it goes.

use hashbrown::HashMap;

/// The engine's own identifier of a block's content and prefix.
pub(super) type BlockHash = u64;

/// Index of a block in the pool.
pub(super) type BlockId = u32;

/// One change of the cache, in the order of happening.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CacheEvent {
    /// Blocks of one request were filled.
    Stored(StoredBlocks),
    /// A block was taken for other content.
    Removed(BlockHash),
    /// The cache was reset.
    Cleared,
}

/// Blocks of one request that were filled in one step, each the parent of the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct StoredBlocks {
    pub(super) hashes: Vec<BlockHash>,
    /// Hash of the block before the first; `None` begins a prompt.
    pub(super) parent: Option<BlockHash>,
    pub(super) tokens: Vec<u32>,
    /// Salt of the prompt when the first of these blocks begins it.
    pub(super) salt: Option<String>,
}

/// A pool of KV blocks.
#[derive(Debug)]
pub(super) struct BlockPool {
    blocks: Vec<Block>,
    /// Filled blocks by hash, oldest copy first.
    cached: HashMap<BlockHash, Vec<BlockId>>,
    free_blocks: usize,
    cached_blocks: usize,
    events: Vec<CacheEvent>,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    references: u32,
    hash: Option<BlockHash>,
    /// Neighbours in the free queue; meaningless while in use.
    previous: BlockId,
    next: BlockId,
}

/// Block 0 never holds tokens (vLLM keeps it as the null block); here it is the anchor of the circular free queue.
const ANCHOR: BlockId = 0;

impl BlockPool {
    /// Creates a pool of `blocks` blocks of which the first is reserved.
    pub(super) fn new(blocks: u32) -> Self {
        let block = |id: BlockId| Block {
            references: 0,
            hash: None,
            previous: id.checked_sub(1).unwrap_or(blocks - 1),
            next: (id + 1) % blocks,
        };
        Self {
            blocks: (0..blocks).map(block).collect(),
            cached: HashMap::new(),
            free_blocks: blocks as usize - 1,
            cached_blocks: 0,
            events: Vec::new(),
        }
    }

    /// Returns the longest run of leading `hashes` that is cached, as blocks.
    pub(super) fn lookup(&self, hashes: &[BlockHash]) -> Vec<BlockId> {
        hashes
            .iter()
            .map_while(|hash| self.cached.get(hash).map(|copies| copies[0]))
            .collect()
    }

    /// Counts those of `blocks` that stand in the free queue: using them takes as much room as a new block.
    pub(super) fn free_among(&self, blocks: &[BlockId]) -> usize {
        blocks
            .iter()
            .filter(|&&id| self.block(id).references == 0)
            .count()
    }

    /// Takes a reference on each cached block, so that none can be evicted.
    pub(super) fn touch(&mut self, blocks: &[BlockId]) {
        for &id in blocks {
            if self.block(id).references == 0 {
                self.unlink(id);
            }
            self.block_mut(id).references += 1;
        }
    }

    /// Takes `count` blocks from the front of the free queue, evicting what they held; `None` when fewer are free.
    pub(super) fn allocate(&mut self, count: usize) -> Option<Vec<BlockId>> {
        if count > self.free_blocks {
            return None;
        }
        let mut taken = Vec::with_capacity(count);
        for _ in 0..count {
            let id = self.block(ANCHOR).next;
            self.unlink(id);
            self.evict(id);
            self.block_mut(id).references = 1;
            taken.push(id);
        }
        Some(taken)
    }

    /// Records that `blocks` now hold the content that `stored` describes.
    pub(super) fn fill(&mut self, blocks: &[BlockId], stored: StoredBlocks) {
        for (&id, &hash) in blocks.iter().zip(&stored.hashes) {
            self.block_mut(id).hash = Some(hash);
            self.cached.entry(hash).or_default().push(id);
        }
        self.cached_blocks += stored.hashes.len();
        self.events.push(CacheEvent::Stored(stored));
    }

    /// Gives back the blocks of one request, given first to last; the last one is the next to be evicted.
    pub(super) fn release(&mut self, blocks: &[BlockId]) {
        for &id in blocks.iter().rev() {
            let block = self.block_mut(id);
            block.references -= 1;
            if block.references == 0 {
                self.push_back(id);
            }
        }
    }

    /// Forgets all content when no block is in use; tells whether it did.
    pub(super) fn reset(&mut self) -> bool {
        if self.used_blocks() != 0 {
            return false;
        }
        self.cached.clear();
        self.cached_blocks = 0;
        for block in &mut self.blocks {
            block.hash = None;
        }
        self.events.push(CacheEvent::Cleared);
        true
    }

    /// Takes the events since the last call.
    pub(super) fn take_events(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }

    /// Returns the number of free blocks, cached content included.
    pub(super) const fn free_blocks(&self) -> usize {
        self.free_blocks
    }

    /// Returns the number of blocks that requests hold.
    pub(super) const fn used_blocks(&self) -> usize {
        self.usable_blocks() - self.free_blocks
    }

    /// Returns the number of blocks that can hold tokens.
    pub(super) const fn usable_blocks(&self) -> usize {
        self.blocks.len() - 1
    }

    /// Returns the number of blocks with cached content, copies counted.
    pub(super) const fn cached_blocks(&self) -> usize {
        self.cached_blocks
    }

    fn evict(&mut self, id: BlockId) {
        let Some(hash) = self.block_mut(id).hash.take() else {
            return;
        };
        if let Some(copies) = self.cached.get_mut(&hash) {
            copies.retain(|&copy| copy != id);
            if copies.is_empty() {
                self.cached.remove(&hash);
            }
        }
        self.cached_blocks -= 1;
        self.events.push(CacheEvent::Removed(hash));
    }

    fn unlink(&mut self, id: BlockId) {
        let Block { previous, next, .. } = *self.block(id);
        self.block_mut(previous).next = next;
        self.block_mut(next).previous = previous;
        self.free_blocks -= 1;
    }

    fn push_back(&mut self, id: BlockId) {
        let last = self.block(ANCHOR).previous;
        self.block_mut(last).next = id;
        self.block_mut(ANCHOR).previous = id;
        let block = self.block_mut(id);
        block.previous = last;
        block.next = ANCHOR;
        self.free_blocks += 1;
    }

    fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id as usize]
    }

    fn block_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[id as usize]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stored(hashes: &[BlockHash]) -> StoredBlocks {
        StoredBlocks {
            hashes: hashes.to_vec(),
            ..StoredBlocks::default()
        }
    }

    fn hold(pool: &mut BlockPool, hashes: &[BlockHash]) -> Vec<BlockId> {
        let hits = pool.lookup(hashes);
        pool.touch(&hits);
        let mut blocks = hits.clone();
        let new = pool.allocate(hashes.len() - hits.len()).unwrap();
        pool.fill(&new, stored(&hashes[hits.len()..]));
        blocks.extend(new);
        blocks
    }

    #[test]
    fn eviction_takes_the_oldest_prompt_from_its_tail() {
        let mut pool = BlockPool::new(7); // 6 usable
        let first = hold(&mut pool, &[1, 2, 3]);
        let second = hold(&mut pool, &[11, 12, 13]);
        pool.release(&first);
        pool.release(&second);
        pool.take_events();
        let third = pool.allocate(4).unwrap();
        assert_eq!(
            pool.take_events(),
            [3, 2, 1, 13].map(CacheEvent::Removed),
            "one event a block, tail first, older prompt first"
        );
        assert_eq!(pool.lookup(&[11, 12, 13]).len(), 2);
        pool.release(&third);
    }

    #[test]
    fn a_hit_moves_the_prompt_to_the_end_of_the_queue() {
        let mut pool = BlockPool::new(5); // 4 usable
        let first = hold(&mut pool, &[1, 2]);
        pool.release(&first);
        let second = hold(&mut pool, &[11, 12]);
        pool.release(&second);
        let again = hold(&mut pool, &[1, 2]);
        assert_eq!(again, first);
        pool.release(&again);
        pool.take_events();
        pool.allocate(2).unwrap();
        assert_eq!(pool.take_events(), [12, 11].map(CacheEvent::Removed));
    }

    #[test]
    fn two_copies_are_announced_and_removed_twice() {
        let mut pool = BlockPool::new(3); // 2 usable
        for _ in 0..2 {
            let block = pool.allocate(1).unwrap();
            pool.fill(&block, stored(&[7]));
        }
        assert_eq!(pool.cached_blocks(), 2);
        assert_eq!(
            pool.take_events(),
            [stored(&[7]), stored(&[7])].map(CacheEvent::Stored)
        );
        let first = pool.lookup(&[7])[0];
        pool.release(&[first]);
        pool.allocate(1).unwrap();
        assert_eq!(pool.take_events(), [CacheEvent::Removed(7)]);
        assert_eq!(pool.lookup(&[7]).len(), 1, "the other copy remains");
    }

    #[test]
    fn reset_waits_until_nothing_is_in_use() {
        let mut pool = BlockPool::new(4);
        let blocks = hold(&mut pool, &[1]);
        assert!(!pool.reset());
        pool.release(&blocks);
        pool.take_events();
        assert!(pool.reset());
        assert_eq!(pool.take_events(), [CacheEvent::Cleared]);
        assert!(pool.lookup(&[1]).is_empty());
    }

    #[derive(Clone, Debug)]
    enum Op {
        Hold { family: u64, length: u64 },
        Release(usize),
        Reset,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            6 => (0..5u64, 1..7u64).prop_map(|(family, length)| Op::Hold { family, length }),
            5 => any::<usize>().prop_map(Op::Release),
            1 => Just(Op::Reset),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn events_replayed_into_a_model_equal_the_cache(ops in prop::collection::vec(op(), 1..120)) {
            let mut pool = BlockPool::new(13);
            let mut held: Vec<Vec<BlockId>> = Vec::new();
            let mut model: HashMap<BlockHash, usize> = HashMap::new();
            for op in ops {
                match op {
                    Op::Hold { family, length } => {
                        let hashes: Vec<u64> = (0..length).map(|i| family * 100 + i).collect();
                        let hits = pool.lookup(&hashes);
                        let needed = hashes.len() - hits.len() + pool.free_among(&hits);
                        if needed <= pool.free_blocks() {
                            held.push(hold(&mut pool, &hashes));
                        } else {
                            prop_assert!(pool.allocate(pool.free_blocks() + 1).is_none());
                        }
                    }
                    Op::Release(which) if !held.is_empty() => {
                        let blocks = held.swap_remove(which % held.len());
                        pool.release(&blocks);
                    }
                    Op::Release(_) => {}
                    Op::Reset => prop_assert_eq!(pool.reset(), held.is_empty()),
                }
                for event in pool.take_events() {
                    match event {
                        CacheEvent::Stored(stored) => {
                            for hash in stored.hashes {
                                *model.entry(hash).or_default() += 1;
                            }
                        }
                        CacheEvent::Removed(hash) => {
                            let count = model.get_mut(&hash).unwrap();
                            *count -= 1;
                            if *count == 0 {
                                model.remove(&hash);
                            }
                        }
                        CacheEvent::Cleared => model.clear(),
                    }
                }
                let cached: HashMap<BlockHash, usize> =
                    pool.cached.iter().map(|(&hash, copies)| (hash, copies.len())).collect();
                prop_assert_eq!(&cached, &model);
                prop_assert_eq!(pool.cached_blocks(), model.values().sum::<usize>());
                let in_use: std::collections::HashSet<BlockId> = held.iter().flatten().copied().collect();
                prop_assert_eq!(pool.used_blocks(), in_use.len());
                prop_assert_eq!(queue_length(&pool), pool.free_blocks());
            }
        }
    }

    fn queue_length(pool: &BlockPool) -> usize {
        let mut length = 0;
        let mut id = pool.block(ANCHOR).next;
        while id != ANCHOR {
            length += 1;
            id = pool.block(id).next;
        }
        length
    }
}
