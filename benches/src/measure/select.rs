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
use crate::clock::{Latencies, median, thread_cpu};
use crate::workload::{Event, Shape, Workload, mix};

/// Conversations whose blocks the workers hold.
const CONVERSATIONS: u32 = 1_000;
/// Requests booked at a time by all threads together, so that decisions see load, and the same however many threads there are.
const IN_FLIGHT: usize = 64;

/// Measures the decision at 64 and at 1,024 workers.
pub(super) fn measure(plan: &Plan) -> Cells {
    let mut cells = Cells::new();
    for (name, shape) in [
        ("select_4096", Shape::W),
        ("select_4096_1024_workers", Shape::MANY_WORKERS),
    ] {
        let world = World::new(shape.conversations(CONVERSATIONS));
        put_cells(&mut cells, name, &world, plan);
    }
    cells
}

fn put_cells(cells: &mut Cells, name: &str, world: &World, plan: &Plan) {
    let slice = Duration::from_secs_f64(plan.select_seconds / f64::from(ROUNDS));
    let mut latencies = [(); 5].map(|()| Latencies::default());
    let mut rounds = Rounds::default();
    // One and four threads take turns, and beside them work that shares nothing: what a machine with other work on it gives
    // to four threads more than to one.
    for _ in 0..ROUNDS {
        let mut one = world.run(1, slice);
        world.look_up(&mut one.latencies[4]);
        let four = world.run(4, slice);
        for (all, latencies) in latencies.iter_mut().zip(one.latencies) {
            all.append(latencies);
        }
        rounds.kops.push(one.rate / 1e3);
        rounds.four_kops.push(four.rate / 1e3);
        rounds.scaling.push(four.rate / one.rate);
        rounds.cpu_us.push(one.cpu_us);
        rounds.four_cpu_us.push(four.cpu_us);
        rounds.alone.push(spin(4, slice / 4) / spin(1, slice / 4));
    }
    let mut growing = world.run_with(Prompts::Growing, 1, slice).latencies;
    let [p50] = growing[0].percentiles([0.5]);
    put(cells, format!("{name}_growing_p50_us"), p50);
    let parts = ["", "_hash", "_choose", "_release", "_look_up"];
    for (part, latencies) in parts.iter().zip(&mut latencies) {
        let [p50, p99, p999] = latencies.percentiles([0.5, 0.99, 0.999]);
        put(cells, format!("{name}{part}_p50_us"), p50);
        if part.is_empty() {
            put(cells, format!("{name}_p99_us"), p99);
            put(cells, format!("{name}_p999_us"), p999);
        }
    }
    for (part, values) in [
        ("kops_per_s", rounds.kops),
        ("four_threads_kops_per_s", rounds.four_kops),
        ("four_threads_scaling", rounds.scaling),
        ("four_threads_scaling_of_shared_nothing", rounds.alone),
        ("cpu_us", rounds.cpu_us),
        ("four_threads_cpu_us", rounds.four_cpu_us),
    ] {
        put(cells, format!("{name}_{part}"), median(&values));
    }
}

/// What is decided on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prompts {
    /// Prompts that workers hold as a whole.
    Known,
    /// The same with an eighth at the end that nobody has seen: the next turn of a conversation.
    Growing,
}

/// Turns of one and of four threads.
const ROUNDS: u32 = 5;

#[derive(Default)]
struct Rounds {
    kops: Vec<f64>,
    four_kops: Vec<f64>,
    scaling: Vec<f64>,
    alone: Vec<f64>,
    cpu_us: Vec<f64>,
    four_cpu_us: Vec<f64>,
}

/// What some threads did in a while.
struct Run {
    /// Of the first thread: all, hashing, choosing, releasing, and looking caches up alone.
    latencies: [Latencies; 5],
    /// Decisions a second, of all threads.
    rate: f64,
    /// CPU time of a decision.
    cpu_us: f64,
}

/// Counts what threads that share nothing get done in a second.
fn spin(threads: u64, duration: Duration) -> f64 {
    let work = move || {
        let (begin, mut rounds, mut sum) = (Instant::now(), 0_u64, 1_u64);
        while begin.elapsed() < duration {
            sum = (0..1_000).fold(sum, |sum, number| mix(sum ^ number));
            rounds += 1;
        }
        std::hint::black_box(sum);
        float(rounds) / begin.elapsed().as_secs_f64()
    };
    let threads: Vec<_> = (0..threads).map(|_| thread::spawn(work)).collect();
    let threads = threads.into_iter();
    threads
        .map(|thread| thread.join().expect("counting does not panic"))
        .sum()
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

    /// Decides on `threads` threads for a while.
    fn run(&self, threads: u64, duration: Duration) -> Run {
        self.run_with(Prompts::Known, threads, duration)
    }

    fn run_with(&self, prompts: Prompts, threads: u64, duration: Duration) -> Run {
        let barrier = Barrier::new(usize::try_from(threads).unwrap_or(1));
        let runs: Vec<Run> = thread::scope(|scope| {
            let threads: Vec<_> = (0..threads)
                .map(|seed| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        barrier.wait();
                        let in_flight = IN_FLIGHT / usize::try_from(threads).unwrap_or(1);
                        self.decide(prompts, in_flight, seed, duration)
                    })
                })
                .collect();
            let threads = threads.into_iter();
            threads
                .map(|thread| thread.join().expect("a decision does not panic"))
                .collect()
        });
        let rate = runs.iter().map(|run| run.rate).sum();
        let cpu = runs.iter().map(|run| run.cpu_us).sum::<f64>() / float(threads);
        let mut runs = runs.into_iter();
        let first = runs.next().expect("there is a thread");
        Run {
            rate,
            cpu_us: cpu,
            ..first
        }
    }

    /// Looks caches up alone.
    fn look_up(&self, latencies: &mut Latencies) {
        for prompt in &self.prompts {
            let prompt = self.router.prompt(prompt, &SaltContext::default());
            let start = Instant::now();
            std::hint::black_box(self.router.overlap(&prompt, start));
            latencies.add(start.elapsed());
        }
    }

    fn decide(&self, prompts: Prompts, in_flight: usize, seed: u64, duration: Duration) -> Run {
        let mut rng = Rng::with_seed(seed);
        let mut latencies = [(); 5].map(|()| Latencies::default());
        let mut booked: Vec<Option<RequestGuard>> = (0..in_flight).map(|_| None).collect();
        let mut tokens = Vec::new();
        let (begin, cpu) = (Instant::now(), thread_cpu());
        let mut decisions = 0_u64;
        while begin.elapsed() < duration {
            let prompt = &self.prompts[rng.usize(..self.prompts.len())];
            // Tokens are warm: they have just been made.
            tokens.clone_from(prompt);
            if prompts == Prompts::Growing {
                let known = tokens.len() / 8 * 7;
                tokens[known..].fill_with(|| rng.u32(..));
            }
            let place = rng.usize(..in_flight);
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
            let samples = [end - start, hashed - start, chosen - hashed, end - chosen];
            for (latencies, sample) in latencies.iter_mut().zip(samples) {
                latencies.add(sample);
            }
            decisions += 1;
        }
        let rate = float(decisions) / begin.elapsed().as_secs_f64();
        let cpu_us = (thread_cpu() - cpu).as_secs_f64() * 1e6 / float(decisions);
        Run {
            latencies,
            rate,
            cpu_us,
        }
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
