//! Claims about the router as a whole; `t(a, n)` is the run of tokens a, a + 1, … (n of them), blocks are 4 tokens.

mod budget;
mod events;
mod load;
mod placements;
mod threads;
mod trust;

use std::time::{Duration, Instant};

use crate::block::{BlockSize, SaltContext};
use crate::config::RouterConfig;
use crate::event::encode::encode_batch;
use crate::event::{BlockRemoved, BlockStored, EventBatch, KvEvent};
use crate::index::{EngineHash, Overlap};
use crate::prompt::Prompt;
use crate::router::{Outcome, RequestGuard, Router, SelectRequest};
use crate::worker::WorkerSpec;

/// A router on a clock of its own.
struct Bench {
    router: Router,
    start: Instant,
}

impl Bench {
    /// Workers of the given names; blocks of 4 tokens, own placements off unless `configure` says otherwise.
    fn new(workers: &[&str], configure: impl FnOnce(&mut RouterConfig)) -> Self {
        let mut config = RouterConfig {
            block_size: BlockSize::new(4).unwrap(),
            prediction_ttl_seconds: 0.0,
            seed: Some(7),
            ..RouterConfig::default()
        };
        configure(&mut config);
        let bench = Self {
            router: Router::new(config).unwrap(),
            start: start(),
        };
        for worker in workers {
            bench.add(worker);
        }
        bench
    }

    fn add(&self, worker: &str) {
        self.router
            .add_worker(WorkerSpec::new(worker).unwrap(), self.start)
            .unwrap();
    }

    fn at(&self, seconds: f64) -> Instant {
        self.start + Duration::from_secs_f64(seconds)
    }

    fn prompt(&self, tokens: &[u32]) -> Prompt {
        self.router.prompt(tokens, &SaltContext::default())
    }

    /// Ingests events on rank 0.
    fn ingest(
        &self,
        worker: &str,
        sequence: Option<u64>,
        events: Vec<KvEvent>,
    ) -> crate::IngestReport {
        self.ingest_rank(worker, 0, sequence, events)
    }

    fn ingest_rank(
        &self,
        worker: &str,
        dp_rank: u32,
        sequence: Option<u64>,
        events: Vec<KvEvent>,
    ) -> crate::IngestReport {
        self.router
            .ingest(worker, dp_rank, sequence, &payload(events), self.start)
            .unwrap()
    }

    /// Leading blocks by worker, with rank 0 only.
    fn overlap(&self, tokens: &[u32]) -> Vec<(String, u32)> {
        self.overlap_of(&self.prompt(tokens), 0.0)
    }

    fn overlap_of(&self, prompt: &Prompt, seconds: f64) -> Vec<(String, u32)> {
        self.router
            .overlap(prompt, self.at(seconds))
            .into_iter()
            .map(|(target, overlap)| (target.worker.to_string(), overlap.blocks()))
            .collect()
    }

    fn tiers(&self, worker: &str, tokens: &[u32]) -> Overlap {
        self.router
            .overlap(&self.prompt(tokens), self.start)
            .into_iter()
            .find(|(target, _)| target.worker.as_str() == worker)
            .map(|(_, overlap)| overlap)
            .unwrap_or_default()
    }

    fn select(&self, tokens: &[u32]) -> RequestGuard {
        self.select_at(tokens, 0.0)
    }

    fn select_at(&self, tokens: &[u32], seconds: f64) -> RequestGuard {
        let prompt = self.prompt(tokens);
        self.router
            .select(&SelectRequest::new(&prompt), self.at(seconds))
            .unwrap()
            .unwrap()
    }

    fn release(&self, guard: RequestGuard) {
        guard.release(&Outcome::ok(), self.start);
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a test needs some instant to start from"
)]
fn start() -> Instant {
    Instant::now()
}

fn t(first: u32, count: u32) -> Vec<u32> {
    (first..first + count).collect()
}

fn ints(hashes: &[u64]) -> Vec<EngineHash> {
    hashes.iter().map(|hash| EngineHash::Int(*hash)).collect()
}

/// A store of whole blocks of 4 under integer hashes.
fn store(hashes: &[u64], parent: Option<u64>, tokens: Vec<u32>) -> KvEvent {
    KvEvent::Stored(BlockStored {
        block_hashes: ints(hashes),
        parent_hash: parent.map(EngineHash::Int),
        token_ids: tokens,
        block_size: 4,
        ..BlockStored::default()
    })
}

fn remove(hashes: &[u64]) -> KvEvent {
    KvEvent::Removed(BlockRemoved {
        block_hashes: ints(hashes),
        ..BlockRemoved::default()
    })
}

fn payload(events: Vec<KvEvent>) -> Vec<u8> {
    encode_batch(&EventBatch {
        ts: 1.0,
        events,
        ..EventBatch::default()
    })
}
