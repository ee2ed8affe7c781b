//! A KV pool in real memory: blocks at the places of their numbers, registered with NIXL for others to read.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use xxhash_rust::xxh3::xxh3_64;

use super::Place;
use super::content::Content;
use super::ledger::Moving;
use super::wire::Placement;
use crate::engine::kv::BlockId;
use crate::nixl::Memory;

/// Blocks that others fetch.
#[derive(Debug)]
pub(super) struct Pool {
    memory: Arc<Memory>,
    metadata: Vec<u8>,
    stride: usize,
    bytes_per_token: usize,
    /// What was last written to each block.
    written: Mutex<Vec<Option<Written>>>,
}

/// A block's content and the checksum of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Written {
    digest: u64,
    checksum: u64,
}

/// Bytes of one block in the list that goes to a fetcher: its number and its checksum.
pub(super) const LISTED: usize = 4 + 8;

impl Pool {
    pub(super) fn new(
        memory: Arc<Memory>,
        metadata: Vec<u8>,
        stride: usize,
        bytes_per_token: usize,
    ) -> Self {
        let blocks = memory.len() / stride;
        Self {
            memory,
            metadata,
            stride,
            bytes_per_token,
            written: Mutex::new(vec![None; blocks]),
        }
    }
}

impl Place for Pool {
    fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    fn placement(&self) -> Placement {
        Placement {
            address: self.memory.address(),
            stride: self.stride as u64,
        }
    }

    /// Writes a prompt's bytes to its blocks, those that do not hold them already: where an engine found a prefix in its
    /// cache, its blocks are as they were written for whoever came before.
    fn fill(&self, moving: &Moving) -> Result<(), String> {
        let mut bytes = Vec::new();
        for (index, block) in moving.blocks().iter().enumerate() {
            let digest = moving.content.block_digest(index);
            let place = *block as usize;
            let known = self.written.lock().get(place).copied().flatten();
            if known.is_some_and(|written| written.digest == digest) {
                continue;
            }
            moving
                .content
                .write_block(index, self.bytes_per_token, &mut bytes);
            self.memory.write(place * self.stride, &bytes)?;
            let written = Written {
                digest,
                checksum: xxh3_64(&bytes),
            };
            if let Some(slot) = self.written.lock().get_mut(place) {
                *slot = Some(written);
            }
        }
        Ok(())
    }

    fn list(&self, moving: &Moving) -> Option<Vec<u8>> {
        let written = self.written.lock();
        let blocks = moving.blocks();
        let mut list = Vec::with_capacity(blocks.len() * LISTED);
        for (index, block) in blocks.iter().enumerate() {
            let digest = moving.content.block_digest(index);
            let written = written.get(*block as usize).copied().flatten()?;
            if written.digest != digest {
                return None;
            }
            list.extend_from_slice(&block.to_le_bytes());
            list.extend_from_slice(&written.checksum.to_le_bytes());
        }
        (blocks.len() == moving.content.blocks()).then_some(list)
    }
}

/// Reads a list that [`Pool::list`] wrote.
pub(super) fn read_list(bytes: &[u8]) -> Option<Vec<(BlockId, u64)>> {
    let (entries, rest) = bytes.as_chunks::<LISTED>();
    if !rest.is_empty() {
        return None;
    }
    let entry = |entry: &[u8; LISTED]| {
        let (block, checksum) = entry.split_first_chunk::<4>()?;
        let checksum = checksum.first_chunk::<8>()?;
        Some((
            BlockId::from_le_bytes(*block),
            u64::from_le_bytes(*checksum),
        ))
    };
    entries.iter().map(entry).collect()
}

/// Blocks that fetched ones land in, until they are checked.
#[derive(Debug)]
pub(super) struct Landing {
    memory: Arc<Memory>,
    stride: usize,
    free: Arc<Mutex<Vec<u32>>>,
    room: Arc<Semaphore>,
    blocks: u32,
}

/// Landing blocks of one fetch; free again when dropped.
#[derive(Debug)]
pub(super) struct Landed {
    memory: Arc<Memory>,
    stride: usize,
    free: Arc<Mutex<Vec<u32>>>,
    blocks: Vec<u32>,
    _room: OwnedSemaphorePermit,
}

impl Landing {
    pub(super) fn new(memory: Arc<Memory>, stride: usize) -> Self {
        let blocks = u32::try_from(memory.len() / stride).unwrap_or(u32::MAX);
        Self {
            memory,
            stride,
            // Taken from the end: those that were used last are in caches and have pages.
            free: Arc::new(Mutex::new((0..blocks).rev().collect())),
            room: Arc::new(Semaphore::new(blocks as usize)),
            blocks,
        }
    }

    pub(super) const fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Waits for as many blocks; none when there never are.
    pub(super) async fn take(&self, blocks: usize) -> Option<Landed> {
        let count = u32::try_from(blocks)
            .ok()
            .filter(|count| *count <= self.blocks)?;
        let room = Arc::clone(&self.room)
            .acquire_many_owned(count)
            .await
            .ok()?;
        let mut free = self.free.lock();
        let from = free.len().checked_sub(blocks)?;
        let blocks = free.split_off(from);
        drop(free);
        Some(Landed {
            memory: Arc::clone(&self.memory),
            stride: self.stride,
            free: Arc::clone(&self.free),
            blocks,
            _room: room,
        })
    }
}

impl Landed {
    /// Returns where each block lies, in the order of the prompt.
    pub(super) fn offsets(&self) -> impl Iterator<Item = usize> + '_ {
        self.blocks
            .iter()
            .map(|block| *block as usize * self.stride)
    }

    /// Tells whether what arrived has these checksums and is this content.
    pub(super) fn is(&self, content: &Content, checksums: &[u64], bytes_per_token: usize) -> bool {
        let (mut arrived, mut expected) = (Vec::new(), Vec::new());
        self.offsets()
            .zip(checksums)
            .enumerate()
            .all(|(index, (offset, checksum))| {
                content.write_block(index, bytes_per_token, &mut expected);
                arrived.resize(expected.len(), 0);
                self.memory.read(offset, &mut arrived).is_ok()
                    && xxh3_64(&arrived) == *checksum
                    && arrived == expected
            })
    }
}

impl Drop for Landed {
    fn drop(&mut self) {
        self.free.lock().append(&mut self.blocks);
    }
}
