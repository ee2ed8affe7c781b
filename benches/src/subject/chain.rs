//! `ChainIndex` of kv-index, with the reverse maps that its callers keep.

use std::collections::HashMap;
use std::fmt;
use std::hint::black_box;
use std::sync::Arc;

use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock};

use super::{Answer, Name, Reader, Subject, Writer};
use crate::workload::Event;

/// `ChainIndex`; worker `n` is the `n`th one that it interned.
pub struct Chain {
    index: Arc<ChainIndex>,
}

impl Subject for Chain {
    const NAME: Name = Name::Chain;
    type Event = ChainEvent;
    type Prompt = Vec<ContentHash>;
    type Writer = ChainWriter;
    type Reader = ChainReader;

    fn new(workers: u32) -> Self {
        let index = ChainIndex::with_max_workers(workers as usize);
        for worker in 0..workers {
            let id = index
                .intern_worker(&worker.to_string())
                .expect("room for as many workers was asked for");
            assert_eq!(id, worker, "workers are numbered in the order of arrival");
        }
        Self {
            index: Arc::new(index),
        }
    }

    fn writer(&self) -> ChainWriter {
        ChainWriter {
            index: self.index.clone(),
            maps: HashMap::new(),
        }
    }

    fn reader(&self) -> ChainReader {
        ChainReader {
            index: self.index.clone(),
            scores: Vec::new(),
        }
    }

    fn event(event: Event) -> ChainEvent {
        match event {
            Event::Store {
                worker,
                parent,
                locals,
                keys,
            } => ChainEvent::Store {
                worker,
                parent: parent.map(SequenceHash),
                blocks: keys
                    .into_iter()
                    .zip(locals)
                    .map(|(key, local)| StoredBlock {
                        seq_hash: SequenceHash(key),
                        content_hash: ContentHash(local),
                    })
                    .collect(),
            },
            Event::Remove { worker, keys } => ChainEvent::Remove {
                worker,
                keys: keys.into_iter().map(SequenceHash).collect(),
            },
            Event::Clear { worker } => ChainEvent::Clear { worker },
        }
    }

    fn prompt(locals: &[u64]) -> Vec<ContentHash> {
        locals.iter().copied().map(ContentHash).collect()
    }
}

/// An event with kv-index's names.
#[derive(Debug)]
#[expect(missing_docs, reason = "as in the event that it is made from")]
pub enum ChainEvent {
    Store {
        worker: u32,
        parent: Option<SequenceHash>,
        blocks: Vec<StoredBlock>,
    },
    Remove {
        worker: u32,
        keys: Vec<SequenceHash>,
    },
    Clear {
        worker: u32,
    },
}

/// Writes, with one reverse map a worker.
pub struct ChainWriter {
    index: Arc<ChainIndex>,
    maps: HashMap<u32, ChainBlockMap>,
}

impl Writer for ChainWriter {
    type Event = ChainEvent;

    fn apply(&mut self, event: ChainEvent) -> Option<ChainEvent> {
        let (ChainEvent::Store { worker, .. }
        | ChainEvent::Remove { worker, .. }
        | ChainEvent::Clear { worker }) = event;
        let map = self.maps.entry(worker).or_default();
        match &event {
            ChainEvent::Store { parent, blocks, .. } => {
                // An unknown parent is refused; the probes count what that comes to.
                let _ = black_box(self.index.apply_stored(worker, blocks, *parent, map));
            }
            ChainEvent::Remove { keys, .. } => self.index.apply_removed(worker, keys, map),
            ChainEvent::Clear { .. } => self.index.apply_cleared(worker, map),
        }
        Some(event)
    }

    fn remove_worker(&mut self, worker: u32) {
        if let Some(map) = self.maps.remove(&worker) {
            self.index.remove_worker(worker, map);
        }
    }
}

/// Looks up by the call that allocates nothing, into a buffer of its own.
pub struct ChainReader {
    index: Arc<ChainIndex>,
    scores: Vec<(u32, u32)>,
}

impl Reader for ChainReader {
    type Prompt = Vec<ContentHash>;

    fn look_up(&mut self, prompt: &mut Vec<ContentHash>) {
        let scores = &mut self.scores;
        scores.clear();
        self.index.score_into(
            prompt,
            |content| content.0,
            false,
            |worker, score| scores.push((worker, score)),
        );
        black_box(scores.as_slice());
    }

    fn look_up_as_map(&mut self, prompt: &mut Vec<ContentHash>) -> bool {
        black_box(self.index.find_matches(prompt, false));
        true
    }

    fn answer(&mut self, prompt: &mut Vec<ContentHash>) -> Answer {
        self.look_up(prompt);
        self.scores
            .iter()
            .copied()
            .filter(|&(_, score)| score > 0)
            .collect()
    }
}

macro_rules! opaque_debug {
    ($($name:ident),*) => {$(
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    )*};
}

opaque_debug!(Chain, ChainWriter, ChainReader);
