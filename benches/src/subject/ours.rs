//! kvlane's own indexes.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane::index::{
    EngineHash, EngineKey, NaiveIndex, OrphanLimits, Overlaps, PrefixIndex, RadixIndex, StoredRun,
    Tier,
};
use kvlane::{LocalBlockHash, Slot};

use super::{Answer, Name, Reader, Subject, Writer};
use crate::workload::Event;

/// The index that the router uses.
pub type Ours = Prefix<RadixIndex>;
/// The reference model.
pub type Naive = Prefix<NaiveIndex>;

/// An index behind kvlane's own trait.
#[derive(Debug)]
pub struct Prefix<I> {
    index: Arc<I>,
}

/// Which of kvlane's indexes.
pub trait Flavour: PrefixIndex + 'static {
    /// Its name in results.
    const NAME: Name;

    /// Creates it empty.
    fn create(limits: OrphanLimits) -> Self;
}

impl Flavour for RadixIndex {
    const NAME: Name = Name::Ours;

    fn create(limits: OrphanLimits) -> Self {
        Self::new(limits)
    }
}

impl Flavour for NaiveIndex {
    const NAME: Name = Name::Naive;

    fn create(limits: OrphanLimits) -> Self {
        Self::new(limits)
    }
}

impl<I: Flavour> Subject for Prefix<I> {
    const NAME: Name = I::NAME;
    const IS_SIZED: bool = matches!(I::NAME, Name::Ours);
    type Event = PrefixEvent;
    type Prompt = Vec<LocalBlockHash>;
    type Writer = PrefixWriter<I>;
    type Reader = PrefixReader<I>;

    fn new(_workers: u32) -> Self {
        let limits = OrphanLimits {
            max_keys: 65_536,
            max_age: Duration::from_secs(60),
        };
        Self {
            index: Arc::new(I::create(limits)),
        }
    }

    fn writer(&self) -> PrefixWriter<I> {
        PrefixWriter {
            index: self.index.clone(),
            now: Instant::now(),
        }
    }

    fn reader(&self) -> PrefixReader<I> {
        PrefixReader {
            index: self.index.clone(),
            overlaps: Overlaps::new(),
        }
    }

    fn event(event: Event) -> PrefixEvent {
        match event {
            Event::Store {
                worker,
                parent,
                locals,
                keys,
            } => PrefixEvent::Store {
                slot: Slot(worker),
                parent: parent.map(key),
                locals: locals.into_iter().map(LocalBlockHash).collect(),
                keys: keys.into_iter().map(key).collect(),
            },
            Event::Remove { worker, keys } => PrefixEvent::Remove {
                slot: Slot(worker),
                keys: keys.into_iter().map(key).collect(),
            },
            Event::Clear { worker } => PrefixEvent::Clear { slot: Slot(worker) },
        }
    }

    fn prompt(locals: &[u64]) -> Vec<LocalBlockHash> {
        locals.iter().copied().map(LocalBlockHash).collect()
    }

    fn expect(&self, workers: u32, blocks: usize) {
        for worker in 0..workers {
            self.index.expect_keys(Slot(worker), blocks);
        }
    }
}

fn key(hash: u64) -> EngineKey {
    EngineKey {
        group: 0,
        hash: EngineHash::Int(hash),
    }
}

/// An event with kvlane's names.
#[derive(Debug)]
#[expect(missing_docs, reason = "as in the event that it is made from")]
pub enum PrefixEvent {
    Store {
        slot: Slot,
        parent: Option<EngineKey>,
        locals: Vec<LocalBlockHash>,
        keys: Vec<EngineKey>,
    },
    Remove {
        slot: Slot,
        keys: Vec<EngineKey>,
    },
    Clear {
        slot: Slot,
    },
}

/// Writes to one of kvlane's indexes.
#[derive(Debug)]
pub struct PrefixWriter<I> {
    index: Arc<I>,
    now: Instant,
}

impl<I: Flavour> Writer for PrefixWriter<I> {
    type Event = PrefixEvent;

    fn apply(&mut self, event: PrefixEvent) -> Option<PrefixEvent> {
        match &event {
            PrefixEvent::Store {
                slot,
                parent,
                locals,
                keys,
            } => {
                let run = StoredRun {
                    parent: parent.as_ref(),
                    keys,
                    local_hashes: locals,
                    blocks_per_key: 1,
                    tier: Tier::Device,
                };
                black_box(self.index.store(*slot, &run, self.now));
            }
            PrefixEvent::Remove { slot, keys } => {
                black_box(self.index.remove(*slot, keys, Tier::Device));
            }
            PrefixEvent::Clear { slot } => self.index.clear(*slot, &Tier::ALL),
        }
        Some(event)
    }

    fn remove_worker(&mut self, worker: u32) {
        self.index.clear(Slot(worker), &Tier::ALL);
    }
}

/// Looks up in one of kvlane's indexes.
#[derive(Debug)]
pub struct PrefixReader<I> {
    index: Arc<I>,
    overlaps: Overlaps,
}

impl<I: Flavour> Reader for PrefixReader<I> {
    type Prompt = Vec<LocalBlockHash>;

    fn look_up(&mut self, prompt: &mut Vec<LocalBlockHash>) {
        self.index.overlap(prompt, &mut self.overlaps);
        black_box(&self.overlaps);
    }

    fn answer(&mut self, prompt: &mut Vec<LocalBlockHash>) -> Answer {
        self.look_up(prompt);
        let workers = (0..).take(self.overlaps.slots());
        workers
            .map(|worker| (worker, self.overlaps.get(Slot(worker)).blocks()))
            .filter(|&(_, blocks)| blocks > 0)
            .collect()
    }
}
