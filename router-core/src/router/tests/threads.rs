//! Bookings from many threads at once.

use std::collections::HashSet;
use std::thread;

use fastrand::Rng;

use super::*;
use crate::ids::LeaseId;
use crate::sync::Mutex;

const THREADS: u64 = 4;
const ROUNDS: u32 = 3;
const STEPS: u32 = 400;

/// Selects under names that others select under, too, while a worker comes and goes.
#[test]
fn retries_that_race_a_removal_do_not_wait_for_each_other() {
    let bench = Bench::new(&["w1"], |_| {});
    thread::scope(|scope| {
        for thread in 0..3_u32 {
            let bench = &bench;
            scope.spawn(move || {
                for step in 0..2_000_u32 {
                    let prompt = bench.prompt(&t(thread, 8));
                    let mut request = SelectRequest::new(&prompt);
                    request.request_id = Some(["a", "b"][step as usize % 2]);
                    let guard = bench.router.select(&request, bench.start).unwrap();
                    // Left to whoever selects under the name next.
                    if let Some(guard) = guard {
                        let _ = guard.detach(bench.start);
                    }
                }
            });
        }
        for _ in 0..200 {
            bench.router.remove_worker("w1").unwrap();
            bench.add("w1");
        }
    });
    assert!(bench.router.stats().active_leases <= 2);
}

#[test]
fn of_calls_that_book_one_request_id_at_once_one_wins() {
    let bench = Bench::new(&["w1"], |config| config.prediction_ttl_seconds = 2.0);
    for round in 0..200 {
        let id = format!("request-{round}");
        let prompt = bench.prompt(&t(10 * round, 8));
        let mut request = SelectRequest::new(&prompt);
        request.request_id = Some(&id);
        let won: Vec<RequestGuard> = thread::scope(|scope| {
            let book = || bench.router.book("w1", None, &request, bench.start).ok();
            let calls: Vec<_> = (0..3).map(|_| scope.spawn(book)).collect();
            let calls = calls.into_iter();
            calls.filter_map(|call| call.join().unwrap()).collect()
        });
        assert_eq!(won.len(), 1);
        assert_eq!(bench.router.lease_of(&id), Some(won[0].id()));
        assert_eq!(booked(&bench).0, 1);
    }
    assert!(bench.router.inner.active.is_empty());
}

/// A prompt of a few that share prefixes, some of them below a block.
fn some_prompt(bench: &Bench, rng: &mut Rng) -> Prompt {
    let shared = t(0, rng.u32(0..24));
    let own = t(1_000 * rng.u32(1..4), rng.u32(0..24));
    bench.prompt(&[shared, own].concat())
}

/// Decides, goes on and ends at random; returns what is still open, and notes every lease id.
fn work(bench: &Bench, seed: u64, ids: &Mutex<Vec<LeaseId>>) -> Vec<RequestGuard> {
    let (mut rng, mut open) = (Rng::with_seed(seed), Vec::new());
    for step in 0..STEPS {
        let now = bench.at(f64::from(step) / 100.0);
        let prompt = some_prompt(bench, &mut rng);
        let mut request = SelectRequest::new(&prompt);
        request.session = Some(["a", "b"][rng.usize(0..2)]);
        request.expected_output_tokens = Some(rng.u32(0..20));
        if let Some(guard) = bench.router.select(&request, now).unwrap() {
            ids.lock().push(guard.id());
            open.push(guard);
        }
        for guard in &open {
            match rng.u8(0..8) {
                0 => guard.prefill_done(now),
                1 => guard.output_tokens(rng.u32(0..40), now),
                _ => {}
            }
        }
        while open.len() > 8 {
            let guard = open.swap_remove(rng.usize(0..open.len()));
            match rng.u8(0..3) {
                0 => drop(guard),
                1 => guard.release(&Outcome::not_dispatched(), now),
                _ => guard.release(&Outcome::ok().reported(Some(0), None), now),
            }
        }
    }
    open
}

/// Booked requests, blocks and prefill over all workers.
fn booked(bench: &Bench) -> (usize, usize, f64) {
    let workers = bench.router.workers(bench.at(5.0));
    let (requests, blocks) = (
        workers.iter().map(|worker| worker.active_requests),
        workers.iter().map(|worker| worker.active_blocks),
    );
    let prefill = workers.iter().map(|worker| worker.prefill_blocks);
    (requests.sum(), blocks.sum(), prefill.sum())
}

#[test]
fn no_booking_is_lost_and_every_release_gives_back_what_it_took() {
    let bench = Bench::new(&["w1", "w2", "w3"], |config| {
        config.prediction_ttl_seconds = 2.0;
        config.temperature = 1.0;
    });
    let ids = Mutex::new(Vec::new());
    for round in 0..ROUNDS {
        let open = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let (bench, ids, open) = (&bench, &ids, &open);
                scope.spawn(move || {
                    let left = work(bench, u64::from(round) * THREADS + thread, ids);
                    open.lock().extend(left);
                });
            }
        });
        let open = std::mem::take(&mut *open.lock());
        assert!(!open.is_empty());
        let (requests, blocks, _) = booked(&bench);
        assert_eq!(requests, open.len());
        assert_eq!(bench.router.stats().active_leases, open.len());
        assert!(blocks >= open.len(), "each has a block of its own");
        drop(open);
        assert_eq!(booked(&bench), (0, 0, 0.0));
        assert!(bench.router.inner.active.is_empty());
    }
    let ids = std::mem::take(&mut *ids.lock());
    let distinct: HashSet<_> = ids.iter().collect();
    assert_eq!(distinct.len(), ids.len(), "a lease id was used twice");
    let stats = bench.router.stats();
    assert_eq!(
        (stats.decisions, stats.active_leases),
        (ids.len() as u64, 0)
    );
}

#[test]
fn workers_that_come_and_go_leave_nothing_behind() {
    let bench = Bench::new(&["w1", "w2"], |config| config.prediction_ttl_seconds = 2.0);
    let ids = Mutex::new(Vec::new());
    let open: Vec<RequestGuard> = thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (bench, ids) = (&bench, &ids);
                scope.spawn(move || work(bench, 100 + thread, ids))
            })
            .collect();
        for _ in 0..60 {
            bench.router.remove_worker("w2").unwrap();
            bench.add("w2");
            // A worker of a new life begins with nothing that an earlier one had, except what has been sent to it since.
            let list = bench.router.workers(bench.at(5.0));
            assert_eq!(list.len(), 2);
        }
        let left = workers
            .into_iter()
            .flat_map(|worker| worker.join().unwrap());
        left.collect()
    });
    bench.router.remove_worker("w1").unwrap();
    bench.router.remove_worker("w2").unwrap();
    let stats = bench.router.stats();
    assert_eq!(stats.token_placements.held_blocks, 0);
    assert_eq!(stats.active_leases, open.len());
    drop(open);
    assert!(bench.router.inner.active.is_empty());
    // Every slot is free again, once.
    let free = bench.router.inner.free_slots.lock().clone();
    let distinct: HashSet<_> = free.iter().collect();
    assert_eq!(free.len(), distinct.len());
    assert_eq!(
        free.len(),
        bench.router.inner.registry.lock().slots as usize
    );
}

#[test]
fn a_slot_is_given_to_another_worker_after_its_last_booking() {
    let bench = Bench::new(&["w1"], |_| {});
    let guard = bench.select(&t(0, 40));
    bench.router.remove_worker("w1").unwrap();
    bench.add("w2");
    // What is still booked on the removed worker is not shared with the new one: 10 blocks and one of its own.
    let next = bench.select(&t(0, 40));
    assert!((next.decision().cost.decode_blocks - 11.0).abs() < 1e-9);
    assert_eq!(bench.router.inner.registry.lock().slots, 2);
    drop(guard);
    bench.add("w3");
    assert_eq!(bench.router.inner.registry.lock().slots, 2);
}
