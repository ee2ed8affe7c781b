//! A run: a stretch of consecutive blocks, who holds how much of it, and where other runs leave it.

use super::holders::Holders;
use crate::block::LocalBlockHash;

/// Index of a run in the tree's slab; reused after the run is gone.
pub(super) type RunId = u32;

/// Stands for the empty prefix, which no run represents.
pub(super) const ROOT: RunId = RunId::MAX;

/// Longest run; a path continues in a child beyond it, so that offsets fit 15 bits.
pub(super) const MAX_RUN_BLOCKS: u16 = 0x7FFF;

/// A block of the tree: a run and the block's offset inside it. Never changes while the block exists.
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
/// [`Location`] for life, and the tail that nobody needs is cut off at once.
#[derive(Debug)]
pub(super) struct Run {
    /// Where the run leaves its parent.
    pub(super) origin: Point,
    /// The first hash again, so that finding a child touches the run alone.
    first: LocalBlockHash,
    hashes: Vec<LocalBlockHash>,
    pub(super) holders: Holders,
    /// How many children leave after so many blocks; sorted by the number of blocks, each at least 1.
    forks: Vec<(u16, u32)>,
}

impl Run {
    /// Creates a run of at least one block.
    pub(super) fn new(origin: Point, hashes: &[LocalBlockHash]) -> Self {
        let mut run = Self {
            origin,
            first: hashes[0],
            hashes: Vec::new(),
            holders: Holders::default(),
            forks: Vec::new(),
        };
        run.append(hashes);
        run
    }

    pub(super) fn len(&self) -> u16 {
        as_offset(self.hashes.len())
    }

    pub(super) const fn first(&self) -> LocalBlockHash {
        self.first
    }

    pub(super) fn hashes(&self) -> &[LocalBlockHash] {
        &self.hashes
    }

    /// Counts the leading blocks of `query` that continue the run after `blocks` blocks.
    pub(super) fn matched(&self, blocks: u16, query: &[LocalBlockHash]) -> u16 {
        let own = &self.hashes[usize::from(blocks)..];
        let whole = own.chunks_exact(STRIDE).zip(query.chunks_exact(STRIDE));
        // Whole strides compare as memory, several blocks an instruction; the last one block by block.
        let same = whole.take_while(|(a, b)| a == b).count() * STRIDE;
        let rest = own[same..].iter().zip(&query[same..]);
        as_offset(same + rest.take_while(|(a, b)| a == b).count())
    }

    /// Appends blocks; room grows by whole steps, an eighth of the length at most, so that little of it is idle.
    pub(super) fn append(&mut self, hashes: &[LocalBlockHash]) {
        let needed = self.hashes.len() + hashes.len();
        if needed > self.hashes.capacity() {
            let room = if self.hashes.is_empty() {
                needed
            } else {
                needed.max(self.hashes.len() + self.hashes.len() / 8) + GROWTH_BLOCKS
            };
            self.hashes.reserve_exact(room - self.hashes.len());
        }
        self.hashes.extend_from_slice(hashes);
    }

    /// Cuts the run to its first `blocks` blocks and gives idle room back.
    pub(super) fn truncate(&mut self, blocks: u16) {
        self.hashes.truncate(usize::from(blocks));
        if self.hashes.capacity() > 2 * self.hashes.len() + GROWTH_BLOCKS {
            self.hashes.shrink_to(self.hashes.len() + GROWTH_BLOCKS);
        }
    }

    pub(super) fn add_fork(&mut self, blocks: u16) {
        match self.forks.binary_search_by_key(&blocks, |fork| fork.0) {
            Ok(at) => self.forks[at].1 += 1,
            Err(at) => self.forks.insert(at, (blocks, 1)),
        }
    }

    pub(super) fn remove_fork(&mut self, blocks: u16) {
        let Ok(at) = self.forks.binary_search_by_key(&blocks, |fork| fork.0) else {
            return;
        };
        self.forks[at].1 -= 1;
        if self.forks[at].1 == 0 {
            self.forks.remove(at);
            if self.forks.is_empty() {
                self.forks = Vec::new();
            }
        }
    }

    /// Returns after how many blocks the last child leaves, 0 without children.
    pub(super) fn last_fork(&self) -> u16 {
        self.forks.last().map_or(0, |fork| fork.0)
    }

    pub(super) fn forks(&self) -> &[(u16, u32)] {
        &self.forks
    }
}

/// Blocks that are compared at once.
const STRIDE: usize = 16;

/// Blocks by which a run's room grows at least.
const GROWTH_BLOCKS: usize = 16;

/// Narrows a number of blocks inside one run.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a run has at most MAX_RUN_BLOCKS blocks"
)]
pub(super) fn as_offset(blocks: usize) -> u16 {
    debug_assert!(blocks <= usize::from(MAX_RUN_BLOCKS));
    blocks as u16
}
