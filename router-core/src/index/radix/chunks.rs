//! Where the hashes of runs lie: chunks of 16 that never move, from slabs that are given back when empty.

use std::collections::BTreeSet;

use super::node::RunId;
use crate::block::SequenceHash;

/// A block for as long as it exists: its chunk and its offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Place(u32);

/// Number of a chunk; reused after the chunk is given back.
pub(super) type ChunkId = u32;

/// All chunks of a tree.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    slabs: Vec<Option<Slab>>,
    /// Slabs that have a free chunk. The lowest is used first, so that the upper ones run empty.
    open: BTreeSet<u32>,
    /// Slabs that exist.
    present: usize,
}

/// What owns a chunk: a run, and the chunk's position in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) run: RunId,
    pub(super) position: u32,
}

#[derive(Debug)]
struct Slab {
    hashes: Box<[[SequenceHash; CHUNK_BLOCKS]]>,
    owners: Box<[Owner]>,
    /// A bit for each chunk in use.
    used: [u64; SLAB_CHUNKS / 64],
}

impl Place {
    /// Stands for no block.
    pub(super) const NONE: Self = Self(u32::MAX);

    #[expect(
        clippy::cast_possible_truncation,
        reason = "an offset is below CHUNK_BLOCKS"
    )]
    pub(super) const fn new(chunk: ChunkId, offset: usize) -> Self {
        debug_assert!(offset < CHUNK_BLOCKS);
        Self((chunk << CHUNK_BITS) | offset as u32)
    }

    pub(super) const fn chunk(self) -> ChunkId {
        self.0 >> CHUNK_BITS
    }

    pub(super) const fn offset(self) -> usize {
        self.0 as usize % CHUNK_BLOCKS
    }
}

impl Chunks {
    pub(super) const fn bytes(&self) -> usize {
        self.slabs.capacity() * size_of::<Option<Slab>>() + self.present * SLAB_BYTES
    }

    /// Gives a chunk to a run.
    pub(super) fn allocate(&mut self, owner: Owner) -> ChunkId {
        let number = self
            .open
            .first()
            .copied()
            .unwrap_or_else(|| self.add_slab());
        let Some(slab) = self.slabs[number as usize].as_mut() else {
            unreachable!("an open slab exists");
        };
        let (word, free) = slab.first_free();
        slab.used[word] |= 1 << free;
        let index = word * 64 + free as usize;
        slab.owners[index] = owner;
        if slab.is_full() {
            self.open.remove(&number);
        }
        (number << SLAB_BITS) | chunk_index(index)
    }

    /// Takes a chunk back.
    pub(super) fn free(&mut self, chunk: ChunkId) {
        let (number, index) = split(chunk);
        let Some(slab) = self.slabs[number].as_mut() else {
            debug_assert!(false, "chunk {chunk} was in use");
            return;
        };
        slab.used[index / 64] &= !(1 << (index % 64));
        if slab.used.iter().any(|&word| word != 0) {
            self.open.insert(chunk >> SLAB_BITS);
            return;
        }
        self.slabs[number] = None;
        self.present -= 1;
        self.open.remove(&(chunk >> SLAB_BITS));
        while let Some(None) = self.slabs.last() {
            self.slabs.pop();
        }
        if self.slabs.capacity() > 4 * self.slabs.len() + 64 {
            self.slabs.shrink_to(2 * self.slabs.len());
        }
    }

    pub(super) fn owner(&self, chunk: ChunkId) -> Owner {
        let (number, index) = split(chunk);
        self.slab(number).owners[index]
    }

    pub(super) fn hashes(&self, chunk: ChunkId) -> &[SequenceHash; CHUNK_BLOCKS] {
        let (number, index) = split(chunk);
        &self.slab(number).hashes[index]
    }

    pub(super) fn hashes_mut(&mut self, chunk: ChunkId) -> &mut [SequenceHash; CHUNK_BLOCKS] {
        let (number, index) = split(chunk);
        let Some(slab) = self.slabs[number].as_mut() else {
            unreachable!("chunk {chunk} is in use");
        };
        &mut slab.hashes[index]
    }

    /// Counts the chunks in use, for checks.
    pub(super) fn used(&self) -> usize {
        let slabs = self.slabs.iter().flatten();
        let words = slabs.flat_map(|slab| slab.used);
        words.map(|word| word.count_ones() as usize).sum()
    }

    fn slab(&self, number: usize) -> &Slab {
        let Some(slab) = self.slabs[number].as_ref() else {
            unreachable!("slab {number} is in use");
        };
        slab
    }

    fn add_slab(&mut self) -> u32 {
        let vacant = self.slabs.iter().position(Option::is_none);
        let number = vacant.unwrap_or(self.slabs.len());
        assert!(number < MAX_SLABS, "the tree is full: 2^32 blocks");
        if number == self.slabs.len() {
            self.slabs.push(None);
        }
        self.slabs[number] = Some(Slab::new());
        self.present += 1;
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        self.open.insert(number);
        number
    }
}

impl Slab {
    fn new() -> Self {
        let nobody = Owner {
            run: RunId::MAX,
            position: 0,
        };
        Self {
            hashes: vec![[SequenceHash::EMPTY; CHUNK_BLOCKS]; SLAB_CHUNKS].into(),
            owners: vec![nobody; SLAB_CHUNKS].into(),
            used: [0; SLAB_CHUNKS / 64],
        }
    }

    fn first_free(&self) -> (usize, u32) {
        let words = self.used.iter().enumerate();
        let mut open = words.filter(|(_, word)| **word != u64::MAX);
        open.next()
            .map_or((0, 0), |(at, word)| (at, word.trailing_ones()))
    }

    fn is_full(&self) -> bool {
        self.used.iter().all(|&word| word == u64::MAX)
    }
}

const fn split(chunk: ChunkId) -> (usize, usize) {
    (chunk as usize / SLAB_CHUNKS, chunk as usize % SLAB_CHUNKS)
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "an index is below SLAB_CHUNKS"
)]
const fn chunk_index(index: usize) -> u32 {
    index as u32
}

/// Blocks a chunk: two cache lines, of which a run leaves half idle on average.
pub(super) const CHUNK_BLOCKS: usize = 1 << CHUNK_BITS;

const CHUNK_BITS: u32 = 4;

/// Chunks a slab, 34 KiB: the smaller, the sooner one is empty.
const SLAB_CHUNKS: usize = 1 << SLAB_BITS;

const SLAB_BITS: u32 = 8;

/// Memory that hangs on a slab.
const SLAB_BYTES: usize =
    SLAB_CHUNKS * (size_of::<[SequenceHash; CHUNK_BLOCKS]>() + size_of::<Owner>());

/// Chunk numbers have 28 bits, and the last is left out so that [`Place::NONE`] is none.
const MAX_SLABS: usize = (1 << 28) / SLAB_CHUNKS - 1;
