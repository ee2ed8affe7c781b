//! Forgetting what was used least recently, where memory is bounded.
//!
//! To forget a block is always safe: it is credited to nobody, its later removal is unknown, and what is stored on top of
//! it waits as an orphan.

use std::cmp::Reverse;

use super::RadixIndex;
use super::chunks::{CHUNK_BLOCKS, ChunkId};
use super::node::{Run, RunId};
use super::slot::SlotState;
use super::tree::Tree;
use crate::sync::atomic::Ordering;

/// Chunks of the runs that are to go.
#[derive(Debug, Default)]
struct Victims(Vec<u64>);

/// What a run's turn to go depends on.
#[derive(Clone, Copy, Debug)]
struct Use {
    used: u32,
    depth: u32,
    parent: RunId,
}

impl RadixIndex {
    /// Forgets the least recently used blocks until about `bytes` are left, and returns how many keys went.
    ///
    /// Pending runs go first, oldest first, since they are credited to nobody, and the idle room of tables. Then runs go by
    /// when a store or a lookup last came by, to the accuracy of 64 stores; a run never goes before its children. Cost: a
    /// pass over all runs and all keys of every slot, so bound well below what is kept; tables are cut to what they then
    /// hold.
    pub fn shrink_to(&self, bytes: usize) -> usize {
        let mut gone = self.drop_pending(bytes);
        self.drop_idle_room(bytes);
        for _ in 0..MAX_ROUNDS {
            let excess = self.bytes().saturating_sub(bytes);
            if excess == 0 {
                break;
            }
            let victims = self.victims(excess);
            if victims.0.is_empty() {
                break;
            }
            gone += self.forget(&victims);
        }
        gone
    }

    /// Returns the memory of the index in bytes: exact for blocks and for integer keys, estimated for what is rare.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.slot_bytes.load(Ordering::Relaxed) + self.tree.read().bytes()
    }

    fn drop_pending(&self, bytes: usize) -> usize {
        let mut gone = 0;
        for slot in self.slot_ids() {
            if self.bytes() <= bytes {
                break;
            }
            self.with_state(slot, |state| {
                let half = state.pending.keys() / 2;
                gone += state.pending.shrink_to(half);
            });
        }
        gone
    }

    /// Cuts tables to what they hold: room for growth goes before anything that is known, and what a key takes is then
    /// what [`Tree::cost`] estimates.
    fn drop_idle_room(&self, bytes: usize) {
        for slot in self.slot_ids() {
            if self.bytes() <= bytes {
                break;
            }
            self.with_state(slot, SlotState::fit);
        }
    }

    fn forget(&self, victims: &Victims) -> usize {
        let mut gone = 0;
        for slot in self.slot_ids() {
            self.with_state(slot, |state| {
                let mut released = Vec::new();
                let goes = |place: super::Place| victims.contains(place.chunk());
                gone += state.drop_residency(|place, _, _| goes(place), &mut released);
                if !released.is_empty() {
                    released.sort_unstable();
                    self.give_up(slot, state, released);
                    state.fit();
                }
            });
        }
        gone
    }
}

impl RadixIndex {
    /// Chooses runs whose memory makes up for `excess` bytes. Reads the tree piece by piece, so that neither stores nor the
    /// lookups behind them wait for all of it; what is used meanwhile stays.
    fn victims(&self, excess: usize) -> Victims {
        let mut uses = self.uses();
        pass_up(&mut uses);
        let mut runs: Vec<_> = (0_u32..)
            .zip(uses)
            .filter_map(|(id, run)| run.map(|run| (run.used, Reverse(run.depth), id)))
            .collect();
        runs.sort_unstable();
        let mut victims = Victims::default();
        let mut bytes = 0;
        for runs in runs.chunks(RUNS_READ_AT_ONCE) {
            let tree = self.tree.read();
            for &(used, _, id) in runs {
                if bytes >= excess {
                    return victims;
                }
                if let Some(run) = tree.run(id).filter(|run| run.used() <= used) {
                    bytes += tree.cost(id, run);
                    victims.add(run.chunks());
                }
            }
        }
        victims
    }

    /// Returns for each run id when the run was last used.
    fn uses(&self) -> Vec<Option<Use>> {
        let mut uses = Vec::new();
        loop {
            let tree = self.tree.read();
            let ids = tree.ids().skip(uses.len()).take(RUNS_READ_AT_ONCE);
            let before = uses.len();
            uses.extend(ids.map(|id| {
                tree.run(id).map(|run| Use {
                    used: run.used(),
                    depth: run.depth,
                    parent: run.origin.run,
                })
            }));
            if uses.len() == before {
                return uses;
            }
        }
    }
}

/// Makes each run as young as the youngest below it.
fn pass_up(uses: &mut [Option<Use>]) {
    for id in 0..uses.len() {
        let Some(Use { used, parent, .. }) = uses[id] else {
            continue;
        };
        let mut next = parent;
        // Once an ancestor is as young, so are all above it.
        while let Some(Some(above)) = uses.get_mut(next as usize)
            && above.used < used
        {
            above.used = used;
            next = above.parent;
        }
    }
}

impl Tree {
    /// Estimates the memory that a run takes with the keys of all who hold it.
    fn cost(&self, id: RunId, run: &Run) -> usize {
        let mut keys = 0;
        run.holders.for_each(|slot, mark| {
            keys += usize::from(self.held_blocks(id, slot, mark));
        });
        let chunks = run.chunks().len() * CHUNK_BLOCKS * size_of::<u64>();
        size_of::<Run>() + run.bytes() + chunks + keys * KEY_BYTES
    }
}

impl Victims {
    fn add(&mut self, chunks: &[ChunkId]) {
        for &chunk in chunks {
            let word = chunk as usize / 64;
            if self.0.len() <= word {
                self.0.resize(word + 1, 0);
            }
            self.0[word] |= 1 << (chunk % 64);
        }
    }

    fn contains(&self, chunk: ChunkId) -> bool {
        let word = self.0.get(chunk as usize / 64);
        word.is_some_and(|word| word >> (chunk % 64) & 1 == 1)
    }
}

/// Stores between two steps of the clock that uses are dated by: coarse, so that lookups seldom write.
pub(super) const STORES_A_TICK: u32 = 64;

/// What a key takes in a table that is neither full nor empty.
const KEY_BYTES: usize = 15;

/// Runs that are read under one lock.
const RUNS_READ_AT_ONCE: usize = 4_096;

/// Estimates are corrected by looking again, this often at most.
const MAX_ROUNDS: u32 = 8;
