//! Placements with a TTL: each turn of each conversation is recorded where it went.

use std::time::{Duration, Instant};

use kvlane::index::TtlIndex;
use kvlane::{LocalBlockHash, Slot};

use super::{Cells, Plan, float, put};
use crate::clock::thread_cpu;
use crate::heap::live_bytes;
use crate::workload::{Placement, Shape, Workload};

/// How long a placement is believed.
const TTL: Duration = Duration::from_secs(120);

/// Time of recording and of expiry in kvlane's index.
pub(super) fn ours(plan: &Plan) -> Cells {
    let mut cells = Cells::new();
    let recorded = record(plan.approximate);
    put_costs(&mut cells, &recorded);
    let held = recorded.index.stats().held_blocks;
    let start = thread_cpu();
    recorded.index.expire(recorded.now + TTL);
    let cpu = thread_cpu() - start;
    assert_eq!(recorded.index.stats().held_blocks, 0);
    let expire_ns = cpu.as_secs_f64() * 1e9 / float(held as u64);
    put(&mut cells, "approximate_expire_ns", expire_ns);
    cells
}

/// Live heap of kvlane's index.
pub(super) fn ours_heap(plan: &Plan) -> Cells {
    let mut cells = Cells::new();
    let recorded = record(plan.approximate);
    let held = recorded.index.stats().held_blocks;
    put(&mut cells, "approximate_held_blocks", float(held as u64));
    let before = live_bytes();
    drop(recorded.index);
    let bytes = float((before - live_bytes()) as u64);
    let bytes_per_block = bytes / float(held as u64);
    put(&mut cells, "approximate_bytes_per_block", bytes_per_block);
    cells
}

struct Recorded {
    index: TtlIndex,
    now: Instant,
    placements: u64,
    blocks: u64,
    cpu: Duration,
}

/// Records the whole workload under a capacity that the fullest workers reach.
fn record(shape: Shape) -> Recorded {
    let mut workload = Workload::new(shape);
    workload.fill(drop);
    let capacity = usize::try_from(workload.held_blocks() / u64::from(shape.workers)).ok();
    let index = TtlIndex::new();
    for worker in 0..shape.workers {
        index.set_capacity(Slot(worker), capacity);
    }
    let mut recorded = Recorded {
        index,
        now: Instant::now(),
        placements: 0,
        blocks: 0,
        cpu: Duration::ZERO,
    };
    Workload::new(shape).place_all(|placement| {
        let locals: Vec<_> = locals(&shape, &placement).map(LocalBlockHash).collect();
        recorded.now += Duration::from_micros(100);
        let (now, slot) = (recorded.now, Slot(placement.worker));
        let start = thread_cpu();
        let created = recorded.index.record(slot, &locals, now + TTL, now);
        recorded.cpu += thread_cpu() - start;
        recorded.placements += 1;
        recorded.blocks += u64::from(created.created_blocks());
    });
    recorded
}

fn locals(shape: &Shape, placement: &Placement) -> impl Iterator<Item = u64> {
    let number = placement.conversation;
    (0..placement.end).map(move |position| shape.local(number, position))
}

fn put_costs(cells: &mut Cells, recorded: &Recorded) {
    let nanos = recorded.cpu.as_secs_f64() * 1e9;
    let micros = nanos / 1e3 / float(recorded.placements);
    put(cells, "approximate_record_us", micros);
    let per_new_block = nanos / float(recorded.blocks);
    put(cells, "approximate_record_ns_per_new_block", per_new_block);
}

/// Time of recording in CRTC with its TTL, on all threads.
#[cfg(feature = "peers")]
pub(super) fn crtc(plan: &Plan) -> Cells {
    use crate::clock::process_cpu;
    let (mut cells, mut recorded) = (Cells::new(), CrtcRecorded::default());
    drop(recorded.run(plan.approximate, |record| {
        let start = process_cpu();
        record();
        process_cpu() - start
    }));
    let nanos = recorded.cpu.as_secs_f64() * 1e9;
    let micros = nanos / 1e3 / float(recorded.placements);
    put(&mut cells, "approximate_record_us", micros);
    let per_new_block = nanos / float(recorded.blocks);
    put(
        &mut cells,
        "approximate_record_ns_per_new_block",
        per_new_block,
    );
    cells
}

/// Live heap of CRTC with its TTL, which has no capacity bound.
#[cfg(feature = "peers")]
pub(super) fn crtc_heap(plan: &Plan) -> Cells {
    let (mut cells, mut recorded) = (Cells::new(), CrtcRecorded::default());
    let index = recorded.run(plan.approximate, |record| {
        record();
        Duration::ZERO
    });
    put(
        &mut cells,
        "approximate_held_blocks",
        float(recorded.blocks),
    );
    let before = live_bytes();
    drop(index);
    let bytes = float((before - live_bytes()) as u64);
    let bytes_per_block = bytes / float(recorded.blocks);
    put(&mut cells, "approximate_bytes_per_block", bytes_per_block);
    cells
}

#[cfg(feature = "peers")]
#[derive(Default)]
struct CrtcRecorded {
    placements: u64,
    blocks: u64,
    cpu: Duration,
}

#[cfg(feature = "peers")]
impl CrtcRecorded {
    fn run(
        &mut self,
        shape: Shape,
        mut time: impl FnMut(&mut dyn FnMut()) -> Duration,
    ) -> crate::subject::CrtcTtl {
        use dynamo_kv_router::protocols::LocalBlockHash as Local;
        let index = crate::subject::CrtcTtl::new(shape.tokens_per_block);
        Workload::new(shape).place_all(|placement| {
            let locals: Vec<_> = locals(&shape, &placement).map(Local).collect();
            let keys = shape.keys(placement.conversation, placement.end);
            self.cpu += time(&mut || index.record(placement.worker, &locals, &keys));
            self.placements += 1;
            self.blocks += u64::from(placement.end - placement.held.min(placement.end));
        });
        index
    }
}
