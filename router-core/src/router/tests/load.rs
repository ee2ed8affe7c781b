use crate::config::Overrides;
use crate::error::ErrorKind;
use crate::ids::{Role, WorkerId};
use crate::load::LoadReport;

use super::*;

#[test]
fn equal_idle_workers_share_evenly_in_any_order() {
    for names in [["a", "b", "c", "d"], ["d", "c", "b", "a"]] {
        let bench = Bench::new(&names, |_| {});
        let mut wins = std::collections::BTreeMap::<String, u32>::new();
        for _ in 0..400 {
            let guard = bench.select(&t(0, 40));
            *wins.entry(guard.worker().to_owned()).or_default() += 1;
            bench.release(guard);
        }
        assert_eq!(wins.len(), 4);
        assert!(
            wins.values().all(|won| (60..=140).contains(won)),
            "{wins:?}"
        );
    }
}

#[test]
fn full_caches_share_what_is_new_evenly() {
    let bench = Bench::new(&["w1", "w2"], |_| {});
    for (worker, blocks) in [("w1", 96u32), ("w2", 99)] {
        bench.router.set_kv_capacity(worker, Some(100)).unwrap();
        let hashes: Vec<u64> = (0..blocks.into()).collect();
        bench.ingest(worker, None, vec![store(&hashes, None, t(0, blocks * 4))]);
    }
    let mut wins = 0;
    for n in 0..200 {
        let guard = bench.select(&t(10_000 + n * 10, 8));
        wins += u32::from(guard.worker() == "w1");
        bench.release(guard);
    }
    assert!((65..=135).contains(&wins), "{wins}");
    // One with room for the request goes before both.
    bench.add("w3");
    bench.router.set_kv_capacity("w3", Some(100)).unwrap();
    assert_eq!(bench.select(&t(90_000, 8)).worker(), "w3");
}

#[test]
fn each_pick_is_visible_to_the_next() {
    let names = ["a", "b", "c", "d"];
    let bench = Bench::new(&names, |_| {});
    for name in names {
        bench.ingest(name, None, vec![store(&[1, 2], None, t(0, 8))]);
    }
    let guards: Vec<RequestGuard> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..40)
            .map(|_| scope.spawn(|| bench.select(&t(0, 8))))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let mut wins = std::collections::BTreeMap::<String, u32>::new();
    for guard in &guards {
        *wins.entry(guard.worker().to_owned()).or_default() += 1;
    }
    let (least, most) = (wins.values().min().unwrap(), wins.values().max().unwrap());
    assert!(wins.len() == 4 && most - least <= 2, "{wins:?}");
    drop(guards);
    assert!(
        bench
            .router
            .workers(bench.start)
            .iter()
            .all(|worker| worker.active_blocks == 0)
    );
}

#[test]
fn prompts_shorter_than_a_block_are_spread_by_load() {
    let bench = Bench::new(&["a", "b", "c"], |_| {});
    let mut wins = std::collections::BTreeMap::<String, u32>::new();
    for _ in 0..300 {
        let guard = bench.select(&t(0, 3));
        *wins.entry(guard.worker().to_owned()).or_default() += 1;
        bench.release(guard);
    }
    assert!(
        wins.len() == 3 && wins.values().all(|won| (60..=140).contains(won)),
        "{wins:?}"
    );
    let guard = bench.select(&[]);
    assert_eq!(guard.decision().predicted_cached_tokens, 0);
}

#[test]
fn a_miss_goes_to_the_idle_worker_however_much_it_has_cached() {
    let bench = Bench::new(&["w1", "w2"], |_| {});
    bench.ingest("w1", None, vec![store(&[1, 2], None, t(0, 8))]);
    let hashes: Vec<u64> = (100..600).collect();
    bench.ingest("w2", None, vec![store(&hashes, None, t(10_000, 2_000))]);
    let short = bench.prompt(&t(0, 3));
    let busy: Vec<_> = (0..20)
        .map(|_| {
            bench
                .router
                .book("w1", None, &SelectRequest::new(&short), bench.start)
                .unwrap()
        })
        .collect();
    for n in 0..5 {
        let guard = bench.select(&t(50_000 + n * 100, 16));
        assert_eq!(guard.worker(), "w2");
        bench.release(guard);
    }
    drop(busy);
}

#[test]
fn load_counts_from_the_decision_until_the_release() {
    let bench = Bench::new(&["a", "b", "c"], |_| {});
    let guards: Vec<_> = (0..12).map(|n| bench.select(&t(n * 1_000, 400))).collect();
    let active = |bench: &Bench| -> Vec<usize> {
        bench
            .router
            .workers(bench.start)
            .iter()
            .map(|worker| worker.active_requests)
            .collect()
    };
    assert_eq!(active(&bench), [4, 4, 4]);
    for guard in guards {
        guard.prefill_done(bench.start);
        guard.output_tokens(20, bench.start);
        bench.release(guard);
    }
    assert_eq!(active(&bench), [0, 0, 0]);
    for worker in bench.router.workers(bench.start) {
        assert_eq!(worker.active_blocks, 0);
        assert!(worker.prefill_blocks.abs() < 1e-9);
    }
}

#[test]
fn output_that_was_expected_is_not_counted_twice() {
    let bench = Bench::new(&["w1"], |_| {});
    let prompt = bench.prompt(&[]);
    let mut request = SelectRequest::new(&prompt);
    request.expected_output_tokens = Some(32);
    let guard = bench.router.select(&request, bench.start).unwrap().unwrap();
    let active = || bench.router.workers(bench.start)[0].active_blocks;
    // Blocks of 4 tokens: 32 expected tokens are 8 blocks.
    assert_eq!(active(), 8);
    guard.output_tokens(20, bench.start);
    assert_eq!(active(), 8);
    guard.output_tokens(40, bench.start);
    assert_eq!(active(), 10);
    bench.release(guard);
    assert_eq!(active(), 0);
}

#[test]
fn reported_load_of_others_counts() {
    let bench = Bench::new(&["w1", "w2"], |_| {});
    bench
        .router
        .report_load(
            "w1",
            None,
            LoadReport {
                running: 20,
                waiting: 0,
                kv_usage: 0.5,
            },
            bench.start,
        )
        .unwrap();
    for _ in 0..10 {
        let guard = bench.select(&t(0, 4));
        assert_eq!(guard.worker(), "w2");
        bench.release(guard);
    }
    let bad = LoadReport {
        kv_usage: f64::NAN,
        ..LoadReport::default()
    };
    assert!(
        bench
            .router
            .report_load("w1", None, bad, bench.start)
            .is_err()
    );
    assert!(
        bench
            .router
            .report_load("w9", None, LoadReport::default(), bench.start)
            .is_err()
    );
}

#[test]
fn an_open_stream_does_not_expire_and_a_forgotten_lease_does() {
    let bench = Bench::new(&["w1"], |_| {});
    let open = bench.select(&t(0, 8));
    let prompt = bench.prompt(&t(0, 8));
    let forgotten = bench
        .router
        .select(&SelectRequest::new(&prompt), bench.start)
        .unwrap()
        .unwrap()
        .detach(bench.start);
    bench.router.tick(bench.at(299.0));
    assert_eq!(bench.router.stats().active_leases, 2);
    bench.router.tick(bench.at(300.0));
    assert_eq!(bench.router.stats().active_leases, 1);
    assert_eq!(bench.router.stats().expired_leases, 1);
    assert!(
        !bench
            .router
            .finish(forgotten, &Outcome::ok(), bench.at(301.0)),
        "a late free is a no-op"
    );
    bench.router.tick(bench.at(1_200.0));
    assert_eq!(bench.router.stats().active_leases, 1);
    drop(open);
    assert_eq!(bench.router.stats().active_leases, 0);
}

#[test]
fn activity_extends_a_detached_lease() {
    let bench = Bench::new(&["w1"], |_| {});
    let lease = bench.select(&t(0, 8)).detach(bench.start);
    for step in 1..=40 {
        let now = bench.at(f64::from(step) * 30.0);
        assert!(bench.router.output_tokens(lease, step * 10, now));
        bench.router.tick(now);
    }
    assert_eq!(bench.router.stats().active_leases, 1);
    bench.router.tick(bench.at(40.0 * 30.0 + 300.0));
    assert_eq!(bench.router.stats().active_leases, 0);
}

#[test]
fn filters_come_before_cost() {
    let bench = Bench::new(&["w1", "w2"], |_| {});
    bench.ingest("w1", None, vec![store(&[1, 2], None, t(0, 8))]);
    let prompt = bench.prompt(&t(0, 8));
    let w2 = [WorkerId::new("w2").unwrap()];
    let mut request = SelectRequest::new(&prompt);
    let select = |request: &SelectRequest<'_>| {
        bench
            .router
            .select(request, bench.start)
            .unwrap()
            .map(|guard| guard.worker().to_owned())
    };
    assert_eq!(select(&request).as_deref(), Some("w1"));
    request.allowed = Some(&w2);
    assert_eq!(select(&request).as_deref(), Some("w2"));
    request.allowed = Some(&[]);
    assert_eq!(select(&request), None);
    request.allowed = None;
    bench.router.drain_worker("w1").unwrap();
    assert_eq!(select(&request).as_deref(), Some("w2"));
    bench.router.set_available("w2", false).unwrap();
    assert_eq!(select(&request), None);
    assert_eq!(bench.router.stats().no_worker, 2);
}

#[test]
fn a_role_changes_without_a_new_life() {
    let bench = Bench::new(&["w1", "w2"], |_| {});
    bench.ingest("w1", None, vec![store(&[1, 2], None, t(0, 8))]);
    let prompt = bench.prompt(&t(0, 8));
    let chosen = |role| {
        let mut request = SelectRequest::new(&prompt);
        request.role = Some(role);
        let booked = bench.router.select(&request, bench.start).unwrap();
        booked.map(|guard| guard.worker().to_owned())
    };
    let held = bench
        .router
        .book("w1", None, &SelectRequest::new(&prompt), bench.start)
        .unwrap();
    bench.router.set_role("w1", Role::Prefill).unwrap();
    assert_eq!(chosen(Role::Prefill).as_deref(), Some("w1"));
    assert_eq!(chosen(Role::Decode).as_deref(), Some("w2"));
    assert_eq!(chosen(Role::Both).as_deref(), Some("w2"));
    bench.router.drain_worker("w2").unwrap();
    assert_eq!(chosen(Role::Decode), None);
    bench.router.set_role("w1", Role::Decode).unwrap();
    assert_eq!(chosen(Role::Decode).as_deref(), Some("w1"));
    bench.router.undrain_worker("w2").unwrap();
    assert_eq!(chosen(Role::Prefill).as_deref(), Some("w2"));
    let labels = [("zone".to_owned(), "a".to_owned())].into();
    bench.router.set_labels("w1", labels).unwrap();
    let info = &bench.router.workers(bench.start)[0];
    assert_eq!((info.role, info.active_requests), (Role::Decode, 1));
    assert_eq!((info.index_blocks.device, &*info.labels["zone"]), (2, "a"));
    held.release(&Outcome::ok(), bench.start);
    let unknown = bench.router.set_role("w9", Role::Both).unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::UnknownWorker);
}

#[test]
fn overrides_change_one_decision() {
    let bench = Bench::new(&["w1", "w2"], |_| {});
    bench.ingest("w1", None, vec![store(&[1, 2], None, t(0, 8))]);
    let busy = bench
        .router
        .book(
            "w1",
            None,
            &SelectRequest::new(&bench.prompt(&[])),
            bench.start,
        )
        .unwrap();
    let prompt = bench.prompt(&t(0, 8));
    let mut request = SelectRequest::new(&prompt);
    // w1: 0 uncached + (1 + 3) active = 4; w2: 2 uncached + 3 active = 5.
    assert_eq!(
        bench
            .router
            .select(&request, bench.start)
            .unwrap()
            .unwrap()
            .worker(),
        "w1"
    );
    request.overrides = Overrides {
        device_hit_credit: Some(0.0),
        ..Overrides::default()
    };
    // w1: 2 + 4 = 6; w2: 2 + 3 = 5.
    assert_eq!(
        bench
            .router
            .select(&request, bench.start)
            .unwrap()
            .unwrap()
            .worker(),
        "w2"
    );
    request.overrides = Overrides {
        temperature: Some(-1.0),
        ..Overrides::default()
    };
    assert!(
        bench
            .router
            .select(&request, bench.start)
            .unwrap_err()
            .to_string()
            .contains("temperature")
    );
    drop(busy);
}

#[test]
fn a_retry_supersedes_its_booking_and_a_second_book_is_refused() {
    let bench = Bench::new(&["w1"], |_| {});
    let prompt = bench.prompt(&t(0, 8));
    let request = SelectRequest {
        request_id: Some("r1"),
        ..SelectRequest::new(&prompt)
    };
    let first = bench.router.select(&request, bench.start).unwrap().unwrap();
    let second = bench.router.select(&request, bench.start).unwrap().unwrap();
    assert_eq!(bench.router.stats().active_leases, 1);
    assert!(
        bench
            .router
            .book("w1", None, &request, bench.start)
            .is_err()
    );
    drop(first);
    assert_eq!(
        bench.router.stats().active_leases,
        1,
        "the old guard does not touch the new booking"
    );
    drop(second);
    bench.release(
        bench
            .router
            .book("w1", None, &request, bench.start)
            .unwrap(),
    );
}

#[test]
fn a_session_breaks_near_ties_and_never_beats_availability() {
    let bench = Bench::new(&["w1", "w2"], |_| {});
    let prompt = bench.prompt(&t(0, 3));
    let request = SelectRequest {
        session: Some("s"),
        ..SelectRequest::new(&prompt)
    };
    let first = bench
        .router
        .select(&request, bench.start)
        .unwrap()
        .unwrap()
        .worker()
        .to_owned();
    for _ in 0..20 {
        let guard = bench.router.select(&request, bench.start).unwrap().unwrap();
        assert_eq!(guard.worker(), first);
        bench.release(guard);
    }
    bench.router.remove_worker(&first).unwrap();
    let other = bench.router.select(&request, bench.start).unwrap().unwrap();
    assert_ne!(other.worker(), first);
}

#[test]
fn a_decision_explains_every_candidate() {
    let bench = Bench::new(&["w1", "w2"], |_| {});
    bench.ingest("w1", None, vec![store(&[1, 2], None, t(0, 8))]);
    let guard = bench.select(&t(0, 10));
    let decision = guard.decision();
    assert_eq!(decision.candidates().len(), 2);
    assert_eq!(
        (decision.request_blocks, decision.predicted_cached_tokens),
        (2, 8)
    );
    let w1 = &decision.candidates()[0].cost;
    // 0 uncached; 2 blocks and one of its own for 2 tail tokens and the first output token.
    assert!((w1.total - 3.0).abs() < 1e-9 && w1.uncached_prefill_blocks.abs() < 1e-9);
    assert!((decision.candidates()[1].cost.total - 5.0).abs() < 1e-9);
    let json = serde_json::to_value(bench.router.decisions(1)).unwrap();
    assert_eq!(json[0]["target"]["worker"], "w1");
    assert_eq!(
        json[0]["candidates"][1]["cost"]["uncached_prefill_blocks"],
        2.0
    );
}

#[test]
fn a_batch_books_all_its_prompts() {
    let bench = Bench::new(&["w1"], |_| {});
    let prompt = bench.prompt(&t(0, 8));
    let request = SelectRequest {
        extra_blocks: 10,
        ..SelectRequest::new(&prompt)
    };
    let guard = bench.router.select(&request, bench.start).unwrap().unwrap();
    let worker = &bench.router.workers(bench.start)[0];
    assert_eq!(worker.active_blocks, 13); // 2 + 10 + 1 for output
    assert!((worker.prefill_blocks - 12.0).abs() < 1e-9);
    drop(guard);
}

#[test]
fn a_closed_router_refuses_and_still_releases() {
    let bench = Bench::new(&["w1"], |_| {});
    let guard = bench.select(&t(0, 8));
    bench.router.close();
    assert!(bench.router.is_closed());
    let prompt = bench.prompt(&t(0, 8));
    let refused = bench
        .router
        .select(&SelectRequest::new(&prompt), bench.start)
        .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Closed);
    bench.release(guard);
    assert_eq!(bench.router.stats().active_leases, 0);
}

#[test]
fn a_prompt_in_blocks_of_another_size_is_refused() {
    let bench = Bench::new(&["w1"], |_| {});
    for size in [2, 16] {
        let size = BlockSize::new(size).unwrap();
        let prompt = Prompt::from_tokens(&t(0, 18), size, &SaltContext::default());
        let request = SelectRequest::new(&prompt);
        let refused = [
            bench.router.select(&request, bench.start).unwrap_err(),
            bench
                .router
                .book("w1", None, &request, bench.start)
                .unwrap_err(),
            bench.router.rank(&request, bench.start).unwrap_err(),
            bench
                .router
                .record("w1", None, &prompt, None, bench.start)
                .unwrap_err(),
        ];
        for error in refused {
            assert_eq!(error.kind(), ErrorKind::InvalidRequest);
            assert!(error.to_string().contains("block_size 4"), "{error}");
        }
    }
    assert_eq!(bench.router.stats().active_leases, 0);
}
