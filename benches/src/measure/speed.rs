//! Time of lookups, stores, removals and clears.

use std::ops::Range;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::{Cells, Plan, float, put};
use crate::clock::{Latencies, median, process_cpu, thread_cpu};
use crate::subject::{Reader, Subject, Writer};
use crate::workload::{Event, Shape, Workload};

/// Events that are converted at a time, so that they are applied from a warm cache as in a router that just decoded them.
const EVENTS_PER_BATCH: usize = 256;
/// Events between two drains of a subject that applies them elsewhere, while lookups are measured beside it.
const EVENTS_IN_FLIGHT: usize = 64;
/// Prompts that are looked up between two readings of the CPU clock.
const PROMPTS_PER_BATCH: u32 = 64;

/// Measures a subject whose readers and writers may be on different threads.
pub(super) fn measure_shared<S: Subject>(plan: &Plan) -> Cells
where
    S::Reader: Send,
    S::Writer: Send,
{
    let mut cells = measure_w::<S>(plan, Some(beside_writer::<S>));
    two_writers::<S>(plan, &mut cells);
    measure_shapes::<S>(plan, &mut cells);
    cells
}

/// Measures a subject that lives on one thread.
#[cfg(feature = "peers")]
pub(super) fn measure_alone<S: Subject>(plan: &Plan) -> Cells {
    let mut cells = measure_w::<S>(plan, None);
    measure_shapes::<S>(plan, &mut cells);
    cells
}

/// Measures the small W of a subject that copes with no more.
pub(super) fn measure_small<S: Subject>(plan: &Plan) -> Cells {
    measure_w::<S>(plan, None)
}

type BesideWriter<S> = fn(&mut Filled<S>, &mut Cells);

/// An index that holds a workload.
struct Filled<S: Subject> {
    subject: S,
    writer: S::Writer,
    workload: Workload,
    /// CPU time of filling it.
    cpu: Duration,
}

impl<S: Subject> Filled<S> {
    fn new(shape: Shape) -> Self {
        Self::fill(S::new(shape.workers), shape)
    }

    /// Fills an index that was told how many blocks a worker holds.
    fn sized(shape: Shape, blocks: usize) -> Self {
        let subject = S::new(shape.workers);
        subject.expect(shape.workers, blocks);
        Self::fill(subject, shape)
    }

    fn fill(subject: S, shape: Shape) -> Self {
        let mut applier = Applier::<S>::new(subject.writer());
        let mut workload = Workload::new(shape);
        workload.fill(|event| applier.add(event));
        let (writer, cpu) = applier.finish();
        Self {
            subject,
            writer,
            workload,
            cpu,
        }
    }

    /// Applies what `generate` publishes, and returns the CPU time a block in nanoseconds.
    fn apply(&mut self, generate: impl FnOnce(&mut Workload, &mut dyn FnMut(Event))) -> f64 {
        let mut blocks = 0;
        let mut events = Vec::new();
        generate(&mut self.workload, &mut |event| {
            blocks += event.blocks() as u64;
            events.push(event);
        });
        let mut cpu = Duration::ZERO;
        let mut events = events.into_iter();
        loop {
            let batch: Vec<_> = events
                .by_ref()
                .take(EVENTS_PER_BATCH)
                .map(S::event)
                .collect();
            if batch.is_empty() {
                break;
            }
            cpu += apply_timed(&mut self.writer, batch);
        }
        cpu.as_secs_f64() * 1e9 / float(blocks.max(1))
    }
}

/// Applies events in batches, and sums the CPU time up.
struct Applier<S: Subject> {
    writer: S::Writer,
    batch: Vec<S::Event>,
    cpu: Duration,
}

impl<S: Subject> Applier<S> {
    fn new(writer: S::Writer) -> Self {
        Self {
            writer,
            batch: Vec::new(),
            cpu: Duration::ZERO,
        }
    }

    fn add(&mut self, event: Event) {
        self.batch.push(S::event(event));
        if self.batch.len() == EVENTS_PER_BATCH {
            self.cpu += apply_timed(&mut self.writer, std::mem::take(&mut self.batch));
        }
    }

    fn finish(mut self) -> (S::Writer, Duration) {
        self.cpu += apply_timed(&mut self.writer, self.batch);
        (self.writer, self.cpu)
    }
}

/// Applies events to completion, and returns the CPU time of whoever applied them.
fn apply_timed<W: Writer>(writer: &mut W, events: Vec<W::Event>) -> Duration {
    let mut spent = Vec::with_capacity(events.len());
    let (process, thread) = (process_cpu(), thread_cpu());
    for event in events {
        spent.extend(writer.apply(event));
    }
    if W::IS_ASYNC {
        writer.drain();
        let own = thread_cpu() - thread;
        return (process_cpu() - process).saturating_sub(own);
    }
    thread_cpu() - thread
}

fn measure_w<S: Subject>(plan: &Plan, beside_writer: Option<BesideWriter<S>>) -> Cells {
    let mut cells = Cells::new();
    let mut filled = Filled::<S>::new(plan.w);
    let shape = plan.w;
    let held = filled.workload.held_blocks();
    put(
        &mut cells,
        "w_conversations",
        f64::from(shape.conversations),
    );
    put(&mut cells, "w_held_blocks", float(held));
    let grown_ns = filled.cpu.as_secs_f64() * 1e9 / float(held);
    let mut rng = Rng::with_seed(shape.seed);
    let any = 0..shape.conversations;
    let mut reader = filled.subject.reader();
    let lookups = plan.lookups;
    look_up::<S>(&mut cells, "overlap_256", &mut reader, lookups, || {
        shape.prompt(rng.u32(any.clone()))
    });
    look_up::<S>(
        &mut cells,
        "system_prompt_then_miss",
        &mut reader,
        lookups,
        || shape.stranger(rng.u32(any.clone()), shape.shared_blocks),
    );
    look_up::<S>(&mut cells, "miss", &mut reader, lookups, || {
        shape.stranger(rng.u32(any.clone()), 0)
    });
    look_up_as_map::<S>(&mut cells, &mut reader, lookups, || {
        shape.prompt(rng.u32(any.clone()))
    });
    drop(reader);
    if let Some(beside_writer) = beside_writer {
        beside_writer(&mut filled, &mut cells);
    }
    clear(&mut filled, &mut cells);
    let places = quarter(&shape, 0);
    let remove_ns = filled.apply(|workload, publish| {
        for place in places {
            workload.evict(place, &mut *publish);
        }
    });
    put(&mut cells, "remove_tail_first_ns", remove_ns);
    put_stores(&mut cells, "store_grown", grown_ns);
    if !S::IS_SIZED {
        put_stores(&mut cells, "store", grown_ns);
    }
    cells
}

/// Measures stores into tables of the size that the workers' KV capacity asks for, in the order of the other fills: in a
/// process of its own, since a second fill finds the heap warm, which saves a twentieth.
pub(super) fn measure_sized<S: Subject>(plan: &Plan) -> Cells {
    let mut cells = Cells::new();
    put_stores(&mut cells, "store", sized_store_ns::<S>(plan.w));
    for (name, shape, _) in shapes(plan) {
        let store_ns = sized_store_ns::<S>(shape);
        put(&mut cells, format!("{name}_store_ns"), store_ns);
    }
    cells
}

fn put_stores(cells: &mut Cells, name: &str, nanos: f64) {
    put(cells, format!("{name}_ns"), nanos);
    put(cells, format!("{name}_mblocks_per_cpu_s"), 1e3 / nanos);
}

/// Engines of one size, of which the workload fills the fullest to 95 %: none can hold more than its capacity.
fn sized_store_ns<S: Subject>(shape: Shape) -> f64 {
    let mut workload = Workload::new(shape);
    workload.fill(drop);
    let held = workload.held_blocks();
    let blocks = workload.held_by_fullest() * 20 / 19;
    drop(workload);
    let sized = Filled::<S>::sized(shape, usize::try_from(blocks).unwrap_or(usize::MAX));
    sized.cpu.as_secs_f64() * 1e9 / float(held)
}

/// Further shapes with the names of their cells and their numbers of lookups.
const fn shapes(plan: &Plan) -> [(&'static str, Shape, u32); 3] {
    [
        ("overlap_1024_workers", plan.many_workers, plan.lookups),
        ("overlap_hot_prefix", plan.hot_prefix, plan.lookups),
        ("overlap_8192_blocks", plan.deep, plan.lookups / 10),
    ]
}

fn measure_shapes<S: Subject>(plan: &Plan, cells: &mut Cells) {
    for (name, shape, lookups) in shapes(plan) {
        let filled = Filled::<S>::new(shape);
        let mut rng = Rng::with_seed(shape.seed);
        let mut reader = filled.subject.reader();
        look_up::<S>(cells, name, &mut reader, lookups, || {
            shape.prompt(rng.u32(..shape.conversations))
        });
        if !S::IS_SIZED {
            let blocks = float(filled.workload.held_blocks());
            let store_ns = filled.cpu.as_secs_f64() * 1e9 / blocks;
            put(cells, format!("{name}_store_ns"), store_ns);
        }
    }
}

fn quarter(shape: &Shape, number: u32) -> Range<u32> {
    let size = shape.conversations / 4;
    size * number..size * (number + 1)
}

/// Looks prompts up one by one for percentiles, then in batches for the mean CPU time.
fn look_up<S: Subject>(
    cells: &mut Cells,
    name: &str,
    reader: &mut S::Reader,
    lookups: u32,
    mut prompt: impl FnMut() -> Vec<u64>,
) {
    let mut latencies = Latencies::with_capacity(lookups as usize);
    for _ in 0..lookups {
        latencies.add(one::<S>(reader, &prompt()));
    }
    put_percentiles(cells, name, &mut latencies);
    let batches = (lookups / PROMPTS_PER_BATCH / 4).max(1);
    let mut cpu = Duration::ZERO;
    for _ in 0..batches {
        let mut prompts: Vec<_> = (0..PROMPTS_PER_BATCH)
            .map(|_| S::prompt(&prompt()))
            .collect();
        let start = thread_cpu();
        for prompt in &mut prompts {
            reader.look_up(prompt);
        }
        cpu += thread_cpu() - start;
    }
    let mean = cpu.as_secs_f64() * 1e6 / f64::from(batches * PROMPTS_PER_BATCH);
    put(cells, format!("{name}_cpu_us"), mean);
}

fn look_up_as_map<S: Subject>(
    cells: &mut Cells,
    reader: &mut S::Reader,
    lookups: u32,
    mut prompt: impl FnMut() -> Vec<u64>,
) {
    let mut latencies = Latencies::with_capacity(lookups as usize);
    for _ in 0..lookups {
        let mut prompt = S::prompt(&prompt());
        let start = Instant::now();
        if !reader.look_up_as_map(&mut prompt) {
            return;
        }
        latencies.add(start.elapsed());
    }
    let [p50] = latencies.percentiles([0.5]);
    put(cells, "overlap_256_as_map_p50_us", p50);
}

fn one<S: Subject>(reader: &mut S::Reader, locals: &[u64]) -> Duration {
    let mut prompt = S::prompt(locals);
    let start = Instant::now();
    reader.look_up(&mut prompt);
    start.elapsed()
}

fn put_percentiles(cells: &mut Cells, name: &str, latencies: &mut Latencies) {
    let [p50, p99, p999] = latencies.percentiles([0.5, 0.99, 0.999]);
    put(cells, format!("{name}_p50_us"), p50);
    put(cells, format!("{name}_p99_us"), p99);
    put(cells, format!("{name}_p999_us"), p999);
}

/// Looks up the first half of W while conversations of the third quarter are evicted and replaced at full speed.
fn beside_writer<S: Subject>(filled: &mut Filled<S>, cells: &mut Cells)
where
    S::Reader: Send,
{
    let shape = *filled.workload.shape();
    let mut events = Vec::new();
    let mut blocks = 0;
    let places = quarter(&shape, 2);
    filled.workload.churn(places, |event| {
        blocks += event.blocks() as u64;
        events.push(S::event(event));
    });
    let mut spent = Vec::with_capacity(events.len());
    let mut reader = filled.subject.reader();
    let writer = &mut filled.writer;
    let (barrier, is_over) = (Barrier::new(2), AtomicBool::new(false));
    let (mut latencies, elapsed) = thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut latencies = Latencies::default();
            let mut rng = Rng::with_seed(shape.seed);
            barrier.wait();
            while !is_over.load(Ordering::Relaxed) {
                let locals = shape.prompt(rng.u32(..shape.conversations / 2));
                latencies.add(one::<S>(&mut reader, &locals));
            }
            latencies
        });
        barrier.wait();
        let start = Instant::now();
        for (number, event) in events.into_iter().enumerate() {
            spent.extend(writer.apply(event));
            if number % EVENTS_IN_FLIGHT == 0 {
                writer.drain();
            }
        }
        writer.drain();
        let elapsed = start.elapsed().as_secs_f64();
        is_over.store(true, Ordering::Relaxed);
        let latencies = reading.join().expect("the reader does not panic");
        (latencies, elapsed)
    });
    let lookups = float(latencies.len() as u64);
    put_percentiles(cells, "beside_writer", &mut latencies);
    put(
        cells,
        "beside_writer_klookups_per_s",
        lookups / elapsed / 1e3,
    );
    let rate = float(blocks) / elapsed / 1e6;
    put(cells, "beside_writer_mblocks_per_s", rate);
}

/// Clears five workers, and reports the median for 50,000 blocks.
fn clear<S: Subject>(filled: &mut Filled<S>, cells: &mut Cells) {
    let mut times = Vec::new();
    for worker in 0..5 {
        let held = filled.workload.held_by(worker);
        let event = S::event(filled.workload.clear(worker));
        let cpu = apply_timed(&mut filled.writer, vec![event]);
        times.push(cpu.as_secs_f64() * 1e3 * 50_000.0 / float(held.max(1)));
    }
    put(cells, "clear_50k_ms", median(&times));
}

/// Applies the stores of half of W from one thread, and from two of which each has half of the workers.
fn two_writers<S: Subject>(plan: &Plan, cells: &mut Cells)
where
    S::Writer: Send,
{
    let shape = plan.w.conversations(plan.w.conversations / 2);
    let [one, two] = [1, 2].map(|writers: u32| {
        let subject = S::new(shape.workers);
        let mut events: Vec<Vec<S::Event>> = (0..writers).map(|_| Vec::new()).collect();
        let mut workload = Workload::new(shape);
        workload.fill(|event| {
            let lane = event.worker() % writers;
            events[lane as usize].push(S::event(event));
        });
        let lanes: Vec<_> = events
            .into_iter()
            .map(|events| (subject.writer(), events))
            .collect();
        let start = Instant::now();
        // Writers and events outlive the clock: freeing them is not part of the work.
        let finished: Vec<_> = thread::scope(|scope| {
            let lanes = lanes.into_iter();
            let threads: Vec<_> = lanes
                .map(|(writer, events)| scope.spawn(|| write_all(writer, events)))
                .collect();
            let threads = threads.into_iter();
            threads
                .map(|thread| thread.join().expect("a writer does not panic"))
                .collect()
        });
        let ends = finished.iter().map(|&(end, ..)| end - start);
        let elapsed = ends.max().unwrap_or_default();
        float(workload.held_blocks()) / elapsed.as_secs_f64() / 1e6
    });
    put(cells, "one_writer_mblocks_per_s", one);
    put(cells, "two_writers_mblocks_per_s", two);
    put(cells, "two_writers_scaling", two / one);
}

fn write_all<W: Writer>(mut writer: W, events: Vec<W::Event>) -> (Instant, W, Vec<W::Event>) {
    let mut spent = Vec::with_capacity(events.len());
    for event in events {
        spent.extend(writer.apply(event));
    }
    writer.drain();
    (Instant::now(), writer, spent)
}
