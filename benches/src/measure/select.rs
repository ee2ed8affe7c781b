//! The whole decision: hash 4,096 tokens, look up, cost, choose, book, release.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use kvlane::event::encode::encode_batch;
use kvlane::event::{BlockStored, EventBatch, KvEvent};
use kvlane::index::EngineHash;
use kvlane::{Outcome, RequestGuard, Router, RouterConfig, SaltContext, SelectRequest, WorkerSpec};

use super::{Cells, Plan, float, put};
use crate::clock::Latencies;
use crate::workload::{Event, Shape, Workload, mix};

/// Conversations whose blocks the workers hold.
const CONVERSATIONS: u32 = 1_000;
/// Requests booked at a time by one thread, so that decisions see load.
const IN_FLIGHT: usize = 64;

/// Measures the decision at 64 and at 1,024 workers.
pub(super) fn measure(plan: &Plan) -> Cells {
    let mut cells = Cells::new();
    for (name, shape) in [
        ("select_4096", Shape::W),
        ("select_4096_1024_workers", Shape::MANY_WORKERS),
    ] {
        let world = World::new(shape.conversations(CONVERSATIONS));
        let seconds = Duration::from_secs_f64(plan.select_seconds);
        let (mut latencies, one) = world.run(1, seconds);
        for (part, latencies) in ["", "_hash", "_choose", "_release"]
            .iter()
            .zip(&mut latencies)
        {
            let [p50, p99, p999] = latencies.percentiles([0.5, 0.99, 0.999]);
            put(&mut cells, format!("{name}{part}_p50_us"), p50);
            if part.is_empty() {
                put(&mut cells, format!("{name}_p99_us"), p99);
                put(&mut cells, format!("{name}_p999_us"), p999);
            }
        }
        let (_, four) = world.run(4, seconds);
        put(&mut cells, format!("{name}_kops_per_s"), one / 1e3);
        put(
            &mut cells,
            format!("{name}_four_threads_kops_per_s"),
            four / 1e3,
        );
        put(
            &mut cells,
            format!("{name}_four_threads_scaling"),
            four / one,
        );
    }
    cells
}

struct World {
    router: Router,
    prompts: Vec<Vec<u32>>,
}

impl World {
    /// Registers workers and lets their engines publish the workload as bytes.
    fn new(shape: Shape) -> Self {
        let router = Router::new(RouterConfig::default()).expect("the defaults are valid");
        for worker in 0..shape.workers {
            let spec = WorkerSpec::new(&name(worker)).expect("the name is short");
            router
                .add_worker(spec, Instant::now())
                .expect("each name is used once");
        }
        let mut sequences = vec![0_u64; shape.workers as usize];
        let mut workload = Workload::new(shape);
        let mut applied = 0;
        workload.place_all(|placement| {
            let Some(event) = placement.event(&shape) else {
                return;
            };
            let blocks = placement.held..placement.end;
            let payload = encode(&shape, placement.conversation, blocks, event);
            let sequence = &mut sequences[placement.worker as usize];
            let report = router
                .ingest(
                    &name(placement.worker),
                    0,
                    Some(*sequence),
                    &payload,
                    Instant::now(),
                )
                .expect("the worker is known and its payload well formed");
            *sequence += 1;
            applied += report.applied;
        });
        assert!(
            applied > u64::from(shape.conversations),
            "events are applied"
        );
        let prompts = (0..shape.conversations).map(|number| {
            let blocks = 0..shape.blocks;
            blocks
                .flat_map(|position| tokens(&shape, number, position))
                .collect()
        });
        Self {
            prompts: prompts.collect(),
            router,
        }
    }

    /// Decides on `threads` threads for a while. Returns the latencies of the first thread (all, hashing, choosing,
    /// releasing) and the decisions a second of all.
    fn run(&self, threads: u64, duration: Duration) -> ([Latencies; 4], f64) {
        let barrier = Barrier::new(usize::try_from(threads).unwrap_or(1));
        let mut results: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..threads)
                .map(|seed| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        barrier.wait();
                        self.decide(seed, duration)
                    })
                })
                .collect();
            let threads = threads.into_iter();
            threads
                .map(|thread| thread.join().expect("a decision does not panic"))
                .collect()
        });
        let rate = results.iter().map(|(_, rate)| rate).sum();
        (results.swap_remove(0).0, rate)
    }

    fn decide(&self, seed: u64, duration: Duration) -> ([Latencies; 4], f64) {
        let mut rng = Rng::with_seed(seed);
        let mut latencies = [(); 4].map(|()| Latencies::default());
        let mut booked: Vec<Option<RequestGuard>> = (0..IN_FLIGHT).map(|_| None).collect();
        let mut tokens = Vec::new();
        let begin = Instant::now();
        let mut decisions = 0_u64;
        while begin.elapsed() < duration {
            let prompt = &self.prompts[rng.usize(..self.prompts.len())];
            // Tokens are warm: they have just been made.
            tokens.clone_from(prompt);
            let place = rng.usize(..IN_FLIGHT);
            let start = Instant::now();
            let prompt = self.router.prompt(&tokens, &SaltContext::default());
            let hashed = Instant::now();
            let guard = self
                .router
                .select(&SelectRequest::new(&prompt), start)
                .expect("the router is open");
            let chosen = Instant::now();
            let earlier = std::mem::replace(&mut booked[place], guard);
            if let Some(earlier) = earlier {
                earlier.release(&Outcome::ok(), chosen);
            }
            let end = Instant::now();
            for (latencies, sample) in latencies.iter_mut().zip([
                end - start,
                hashed - start,
                chosen - hashed,
                end - chosen,
            ]) {
                latencies.add(sample);
            }
            decisions += 1;
        }
        let rate = float(decisions) / begin.elapsed().as_secs_f64();
        (latencies, rate)
    }
}

fn name(worker: u32) -> String {
    format!("worker-{worker}")
}

fn tokens(shape: &Shape, conversation: u32, position: u32) -> impl Iterator<Item = u32> {
    let block = shape.local(conversation, position);
    (0..shape.tokens_per_block).map(move |index| (mix(block ^ u64::from(index)) % 150_000) as u32)
}

/// Encodes a store as vLLM does, with the tokens of its blocks.
fn encode(shape: &Shape, conversation: u32, blocks: std::ops::Range<u32>, event: Event) -> Vec<u8> {
    let Event::Store { parent, keys, .. } = event else {
        return Vec::new();
    };
    let stored = BlockStored {
        block_hashes: keys.into_iter().map(EngineHash::Int).collect(),
        parent_hash: parent.map(EngineHash::Int),
        token_ids: blocks
            .flat_map(|position| tokens(shape, conversation, position))
            .collect(),
        block_size: shape.tokens_per_block,
        ..BlockStored::default()
    };
    encode_batch(&EventBatch {
        events: vec![KvEvent::Stored(stored)],
        ..EventBatch::default()
    })
}
