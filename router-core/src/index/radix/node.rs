//! A run: a stretch of consecutive blocks, who holds how much of it, and where other runs leave it.

use super::chunks::{CHUNK_BLOCKS, ChunkId, Chunks, Owner, Place};
use super::holders::Holders;
use crate::block::SequenceHash;
use crate::sync::atomic::{AtomicU32, Ordering};

/// Index of a run in the tree's slab; reused after the run is gone.
pub(super) type RunId = u32;

/// Stands for the empty prefix, which no run represents.
pub(super) const ROOT: RunId = RunId::MAX;

/// Longest run; a path continues in a child beyond it, so that offsets fit 15 bits.
pub(super) const MAX_RUN_BLOCKS: u16 = 0x7FFF;

/// A block of the tree: a run and the block's offset inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Location {
    pub(super) run: RunId,
    pub(super) offset: u16,
}

/// A gap between blocks: after `blocks` blocks of `run`, or before everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) run: RunId,
    pub(super) blocks: u16,
}

impl Point {
    pub(super) const ROOT: Self = Self {
        run: ROOT,
        blocks: 0,
    };
}

impl Location {
    /// Returns the block of the same chunk at offset `to` in it, where this one is at offset `from`.
    pub(super) fn moved(self, from: usize, to: usize) -> Self {
        Self {
            run: self.run,
            offset: as_offset(usize::from(self.offset) + to - from),
        }
    }

    /// Returns the point just after this block.
    pub(super) const fn next(self) -> Point {
        Point {
            run: self.run,
            blocks: self.offset + 1,
        }
    }
}

/// Consecutive blocks of one path.
///
/// A run is never split: a path that leaves it begins a child at whatever offset. Its blocks therefore keep their
/// [`Place`] for life, and the tail that nobody needs is cut off at once.
#[derive(Debug)]
pub(super) struct Run {
    /// Where the run leaves its parent.
    pub(super) origin: Point,
    /// Blocks of the path before the run.
    pub(super) depth: u32,
    len: u16,
    /// After how many blocks most children leave, 0 without children: where a prompt that leaves is looked for first.
    hint: u16,
    /// Hash of the first block, so that finding a child touches the run alone.
    first: SequenceHash,
    /// Hash of the last block, so that matching all of the run does too.
    last: SequenceHash,
    pub(super) holders: Holders,
    chunks: Vec<ChunkId>,
    /// How many children leave after so many blocks; sorted by the number of blocks, each at least 1.
    forks: Vec<(u16, u32)>,
    /// When a store or a lookup last came by, by the tree's clock; kept where memory is bounded.
    used: AtomicU32,
}

impl Run {
    /// Creates a run without blocks, which [`append`](Self::append) must follow.
    pub(super) fn new(origin: Point, depth: u32) -> Self {
        Self {
            origin,
            depth,
            len: 0,
            hint: 0,
            first: SequenceHash(0),
            last: SequenceHash(0),
            holders: Holders::default(),
            chunks: Vec::new(),
            forks: Vec::new(),
            used: AtomicU32::new(0),
        }
    }

    pub(super) fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    /// Notes a use; writes only when that is news, since readers share the line.
    pub(super) fn note_use(&self, now: u32) {
        if self.used() != now {
            self.used.store(now, Ordering::Relaxed);
        }
    }

    pub(super) const fn len(&self) -> u16 {
        self.len
    }

    pub(super) const fn first(&self) -> SequenceHash {
        self.first
    }

    pub(super) const fn hint(&self) -> u16 {
        self.hint
    }

    /// Returns the memory that hangs on the run, without its chunks, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.chunks.capacity() * size_of::<ChunkId>()
            + self.forks.capacity() * size_of::<(u16, u32)>()
            + self.holders.bytes()
    }

    pub(super) fn chunks(&self) -> &[ChunkId] {
        &self.chunks
    }

    pub(super) fn place(&self, offset: u16) -> Place {
        let offset = usize::from(offset);
        Place::new(self.chunks[offset / CHUNK_BLOCKS], offset % CHUNK_BLOCKS)
    }

    /// Returns the sequence hash of the block at `offset`.
    pub(super) fn hash(&self, offset: u16, chunks: &Chunks) -> SequenceHash {
        if offset + 1 == self.len {
            self.last
        } else {
            let at = usize::from(offset);
            chunks.hashes(self.chunks[at / CHUNK_BLOCKS])[at % CHUNK_BLOCKS]
        }
    }

    /// Counts the blocks by which a query goes on with the run from its first `blocks` blocks on, `most` at most.
    ///
    /// `hash` tells the query's sequence hash after so many further blocks, 1 or more. It stands for the whole prefix: equal
    /// ends mean that all before is equal, and a difference is found by bisection.
    pub(super) fn matched(
        &self,
        blocks: u16,
        most: usize,
        chunks: &Chunks,
        mut hash: impl FnMut(usize) -> SequenceHash,
    ) -> u16 {
        let most = usize::from(self.len - blocks).min(most);
        let mut same =
            |count: usize| self.hash(blocks + as_offset(count - 1), chunks) == hash(count);
        if most == 0 || same(most) {
            return as_offset(most);
        }
        let (mut known, mut not) = (0, most);
        while not - known > 1 {
            let middle = usize::midpoint(known, not);
            if same(middle) {
                known = middle;
            } else {
                not = middle;
            }
        }
        as_offset(known)
    }

    /// Appends blocks.
    pub(super) fn append(&mut self, id: RunId, hashes: &[SequenceHash], chunks: &mut Chunks) {
        let mut rest = hashes;
        let [first, ..] = hashes else { return };
        if self.len == 0 {
            self.first = *first;
        }
        while !rest.is_empty() {
            let at = usize::from(self.len) % CHUNK_BLOCKS;
            if at == 0 {
                self.add_chunk(id, chunks);
            }
            let chunk = self.chunks[self.chunks.len() - 1];
            let count = rest.len().min(CHUNK_BLOCKS - at);
            chunks.hashes_mut(chunk)[at..at + count].copy_from_slice(&rest[..count]);
            self.last = rest[count - 1];
            self.len += as_offset(count);
            rest = &rest[count..];
        }
    }

    /// Cuts the run to its first `blocks` blocks and gives idle chunks back.
    pub(super) fn truncate(&mut self, blocks: u16, chunks: &mut Chunks) {
        if blocks > 0 {
            self.last = self.hash(blocks - 1, chunks);
        }
        self.len = blocks;
        let needed = usize::from(blocks).div_ceil(CHUNK_BLOCKS);
        for chunk in self.chunks.drain(needed..) {
            chunks.free(chunk);
        }
        if self.chunks.capacity() > 2 * needed + CHUNKS_STEP {
            self.chunks.shrink_to(needed);
        }
    }

    fn add_chunk(&mut self, id: RunId, chunks: &mut Chunks) {
        if self.chunks.len() == self.chunks.capacity() {
            let step = CHUNKS_STEP.max(self.chunks.len() / 8);
            self.chunks.reserve_exact(step);
        }
        let position = u32::try_from(self.chunks.len()).unwrap_or(u32::MAX);
        self.chunks
            .push(chunks.allocate(Owner { run: id, position }));
    }

    pub(super) fn add_fork(&mut self, blocks: u16) {
        let at = match self.search_fork(blocks) {
            Ok(at) => {
                self.forks[at].1 += 1;
                at
            }
            Err(at) => {
                self.forks.insert(at, (blocks, 1));
                at
            }
        };
        let hinted = self.search_fork(self.hint);
        if hinted.is_err() || hinted.is_ok_and(|hinted| self.forks[hinted].1 <= self.forks[at].1) {
            self.hint = blocks;
        }
    }

    pub(super) fn remove_fork(&mut self, blocks: u16) {
        let Ok(at) = self.search_fork(blocks) else {
            return;
        };
        self.forks[at].1 -= 1;
        if self.forks[at].1 == 0 {
            self.forks.remove(at);
            if self.forks.is_empty() {
                self.forks = Vec::new();
            }
            if self.hint == blocks {
                let most = self.forks.iter().max_by_key(|fork| fork.1);
                self.hint = most.map_or(0, |fork| fork.0);
            }
        }
    }

    fn search_fork(&self, blocks: u16) -> Result<usize, usize> {
        self.forks.binary_search_by_key(&blocks, |fork| fork.0)
    }

    /// Returns after how many blocks the last child leaves, 0 without children.
    pub(super) fn last_fork(&self) -> u16 {
        self.forks.last().map_or(0, |fork| fork.0)
    }

    pub(super) fn forks(&self) -> &[(u16, u32)] {
        &self.forks
    }
}

/// Chunks by which a run's list of them grows at least.
const CHUNKS_STEP: usize = 2;

/// Narrows a number of blocks inside one run.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a run has at most MAX_RUN_BLOCKS blocks"
)]
pub(super) fn as_offset(blocks: usize) -> u16 {
    debug_assert!(blocks <= usize::from(MAX_RUN_BLOCKS));
    blocks as u16
}
