use crate::config::IndexMode;
use crate::event::SkipReason;
use crate::trust::TrustState;

use super::*;

fn state(bench: &Bench, worker: &str, seconds: f64) -> TrustState {
    bench
        .router
        .trust(worker, 0, bench.at(seconds))
        .unwrap()
        .state
}

#[test]
fn a_router_configured_to_be_approximate_goes_by_own_placements_alone() {
    let bench = Bench::new(&["w1"], |config| config.index = IndexMode::Approximate);
    let report = bench.ingest("w1", Some(0), vec![store(&[1], None, t(0, 4))]);
    assert_eq!(
        (
            report.applied,
            report.skipped[&SkipReason::ApproximateIndex]
        ),
        (0, 1)
    );
    assert_eq!(bench.overlap(&t(0, 4)), []);
    bench
        .router
        .note_engine_block_size("w1", 3, bench.start)
        .unwrap();
    bench
        .router
        .restart_stream("w1", 0, "restarted", bench.start)
        .unwrap();
    let trust = bench.router.trust("w1", 0, bench.start).unwrap();
    assert_eq!(trust.state, TrustState::Approximate);
    assert!(trust.cause.unwrap().contains("configured"));
    bench.release(bench.select(&t(0, 8)));
    assert_eq!(
        bench.overlap_of(&bench.prompt(&t(0, 8)), 100.0),
        [("w1".to_owned(), 2)],
        "believed for the TTL of 120 s"
    );
}

#[test]
fn one_named_warning_for_a_silent_worker_and_none_for_an_idle_one() {
    let bench = Bench::new(&["w1", "w2", "w3"], |_| {});
    bench.ingest("w1", Some(0), vec![store(&[1], None, t(0, 4))]);
    let serve = |worker: &str, seconds: f64| {
        let prompt = bench.prompt(&t(0, 100));
        let guard = bench
            .router
            .book(
                worker,
                None,
                &SelectRequest::new(&prompt),
                bench.at(seconds),
            )
            .unwrap();
        guard.release(&Outcome::ok(), bench.at(seconds));
    };
    serve("w2", 0.0);
    serve("w3", 0.0);
    bench.router.tick(bench.at(29.0));
    assert_eq!(state(&bench, "w2", 29.0), TrustState::Unproven);
    bench.router.tick(bench.at(30.0));
    for worker in ["w2", "w3"] {
        assert_eq!(state(&bench, worker, 30.0), TrustState::Approximate);
    }
    let named: Vec<_> = bench
        .router
        .take_trust_changes()
        .into_iter()
        .filter(|change| change.to == TrustState::Approximate)
        .map(|change| (change.target.worker.to_string(), change.cause.is_some()))
        .collect();
    assert_eq!(named, [("w2".to_owned(), true), ("w3".to_owned(), true)]);
    bench.router.tick(bench.at(60.0));
    assert!(bench.router.take_trust_changes().is_empty(), "said once");
    bench.ingest("w3", Some(0), vec![]);
    assert_eq!(state(&bench, "w3", 60.0), TrustState::Exact);
    assert_eq!(state(&bench, "w1", 60.0), TrustState::Exact);
}

#[test]
fn fully_cached_prompts_are_no_evidence_of_silence() {
    let bench = Bench::new(&["w1"], |_| {});
    for _ in 0..100 {
        bench
            .select(&t(0, 100))
            .release(&Outcome::ok().reported(Some(96), Some(100)), bench.start);
    }
    assert_eq!(state(&bench, "w1", 0.0), TrustState::Unproven);
}

#[test]
fn an_engine_that_breaks_promises_loses_credit() {
    let bench = Bench::new(&["w1", "w2"], |_| {});
    bench.ingest(
        "w1",
        Some(0),
        vec![store(&(0..100).collect::<Vec<_>>(), None, t(0, 400))],
    );
    let uncached = |bench: &Bench| {
        let prompt = bench.prompt(&t(0, 400));
        let ranked = bench
            .router
            .rank(&SelectRequest::new(&prompt), bench.start)
            .unwrap();
        ranked
            .iter()
            .find(|candidate| candidate.target.worker.as_str() == "w1")
            .unwrap()
            .cost
            .uncached_prefill_blocks
    };
    assert!(uncached(&bench).abs() < 1e-9);
    let prompt = bench.prompt(&t(0, 400));
    let guard = bench
        .router
        .book("w1", None, &SelectRequest::new(&prompt), bench.start)
        .unwrap();
    guard.release(&Outcome::ok().reported(Some(0), Some(400)), bench.start);
    assert!((uncached(&bench) - 20.0).abs() < 1e-6); // fidelity 0.8 of 100 blocks
    let trust = bench.router.trust("w1", 0, bench.start).unwrap();
    assert!((trust.fidelity - 0.8).abs() < 1e-9);
}

#[test]
fn a_template_mismatch_is_named_and_the_worker_routed_approximately() {
    let bench = Bench::new(&["w1", "w2"], |config| config.prediction_ttl_seconds = 0.5);
    for worker in ["w1", "w2"] {
        bench.ingest(worker, Some(0), vec![store(&[1], None, t(9_000, 4))]);
    }
    // The engine caches, but its events never match our tokens; requests are far enough apart for predictions to lapse.
    for n in 0..8 {
        let guard = bench.select_at(&t(0, 400), f64::from(n));
        guard.release(
            &Outcome::ok().reported(Some(396), Some(400)),
            bench.at(f64::from(n)),
        );
    }
    let blamed = ["w1", "w2"]
        .iter()
        .filter(|worker| state(&bench, worker, 8.0) == TrustState::Approximate)
        .count();
    assert!(blamed >= 1);
    let guard = bench.select_at(&t(5_000, 400), 20.0);
    let (warm, known) = (
        guard.worker().to_owned(),
        state(&bench, guard.worker(), 20.0),
    );
    guard.release(&Outcome::ok(), bench.at(20.0));
    if known == TrustState::Approximate {
        assert_eq!(
            bench.overlap_of(&bench.prompt(&t(5_000, 400)), 60.0),
            [(warm, 100)],
            "believed for the full TTL"
        );
    }
}

#[test]
fn a_stream_joined_late_converges() {
    let bench = Bench::new(&["w1"], |config| config.ttl_seconds = 10.0);
    bench.ingest("w1", Some(500), vec![store(&[1], None, t(0, 4))]);
    let trust = bench.router.trust("w1", 0, bench.start).unwrap();
    assert_eq!(trust.state, TrustState::Converging);
    assert!(trust.cause.unwrap().contains("500"));
    bench.router.tick(bench.at(10.0));
    assert_eq!(state(&bench, "w1", 10.0), TrustState::Exact);
    assert_eq!(
        bench.overlap(&t(0, 4)),
        [("w1".to_owned(), 1)],
        "what was announced since stays"
    );
}

#[test]
fn a_restart_behind_our_back_forgets_the_old_life() {
    let bench = Bench::new(&["w1"], |_| {});
    bench.ingest("w1", Some(0), vec![store(&[1], None, t(0, 4))]);
    bench
        .router
        .restart_stream("w1", 0, "engine restarted", bench.start)
        .unwrap();
    assert_eq!(bench.overlap(&t(0, 4)), []);
    assert_eq!(bench.router.next_sequence("w1", 0).unwrap(), None);
    assert_eq!(state(&bench, "w1", 0.0), TrustState::Unproven);
}

#[test]
fn an_outage_longer_than_the_ttl_forgets_what_was_confirmed() {
    let bench = Bench::new(&["w1"], |config| config.ttl_seconds = 10.0);
    bench.ingest("w1", Some(0), vec![store(&[1], None, t(0, 4))]);
    bench
        .router
        .stream_down("w1", 0, "connection refused", bench.at(1.0))
        .unwrap();
    bench.router.tick(bench.at(5.0));
    assert_eq!(bench.overlap(&t(0, 4)), [("w1".to_owned(), 1)]);
    bench.router.tick(bench.at(11.5));
    assert_eq!(bench.overlap(&t(0, 4)), []);
    assert_eq!(bench.router.next_sequence("w1", 0).unwrap(), None);
}

#[test]
fn a_worker_is_ready_when_its_events_are_heard_or_known_not_to_come() {
    let bench = Bench::new(&["w1", "w2"], |config| config.silent_worker_requests = 1);
    let ready = || bench.router.ready_workers(bench.at(0.0));
    assert_eq!(ready(), 0);
    bench.ingest("w1", Some(0), vec![store(&[11], None, t(0, 4))]);
    assert_eq!(ready(), 1);
    bench.router.drain_worker("w1").unwrap();
    assert_eq!(ready(), 0);
    bench.release(bench.select(&t(0, 16))); // served by w2, which stays silent
    assert_eq!(state(&bench, "w2", 0.0), TrustState::Approximate);
    assert_eq!(ready(), 1);
    bench.router.set_available("w2", false).unwrap();
    assert_eq!(ready(), 0);
}
