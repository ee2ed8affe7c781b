use crate::config::IndexMode;
use crate::text::text_hashes;

use super::*;

fn approximate(config: &mut RouterConfig) {
    config.index = IndexMode::Approximate;
}

#[test]
fn a_recorded_placement_lives_until_the_later_deadline() {
    let bench = Bench::new(&["w1"], |config| {
        approximate(config);
        config.ttl_seconds = 1.0;
    });
    let prompt = bench.prompt(&t(0, 8));
    let record = |ttl: Option<f64>, at: f64| {
        bench
            .router
            .record(
                "w1",
                None,
                &prompt,
                ttl.map(Duration::from_secs_f64),
                bench.at(at),
            )
            .unwrap();
    };
    record(None, 0.0);
    record(None, 0.9);
    assert_eq!(bench.overlap_of(&prompt, 1.1), [("w1".to_owned(), 2)]);
    assert_eq!(bench.overlap_of(&prompt, 2.1), []);
    record(Some(5.0), 10.0);
    record(Some(1.0), 10.0);
    assert_eq!(bench.overlap_of(&prompt, 13.0), [("w1".to_owned(), 2)]);
    assert!(
        bench
            .router
            .record("w1", None, &prompt, Some(Duration::ZERO), bench.start)
            .is_err()
    );
}

#[test]
fn a_failed_dispatch_leaves_no_entry() {
    let bench = Bench::new(&["w1"], approximate);
    let guard = bench.select(&t(0, 8));
    assert_eq!(bench.overlap(&t(0, 8)), [("w1".to_owned(), 2)]);
    guard.release(&Outcome::not_dispatched(), bench.start);
    assert_eq!(bench.overlap(&t(0, 8)), []);
}

#[test]
fn a_dispatch_that_fails_late_leaves_no_entry() {
    let bench = Bench::new(&["w1"], |config| config.prediction_ttl_seconds = 2.0);
    let prompt = bench.prompt(&t(0, 16));
    bench.release(bench.select(&t(0, 8)));
    let guard = bench.select(&t(0, 16));
    for second in 1..=3 {
        bench.router.tick(bench.at(f64::from(second)));
    }
    guard.release(&Outcome::not_dispatched(), bench.at(3.0));
    assert_eq!(bench.overlap_of(&prompt, 3.0), [("w1".to_owned(), 2)]);
    bench.router.tick(bench.at(4.0));
    assert_eq!(bench.overlap_of(&prompt, 4.0), [("w1".to_owned(), 2)]);
}

#[test]
fn a_dispatch_that_fails_late_leaves_what_a_sibling_placed() {
    let bench = Bench::new(&["w1"], |config| config.prediction_ttl_seconds = 2.0);
    let prompt = bench.prompt(&t(0, 16));
    let failed = bench.select(&t(0, 16));
    let sibling = bench.select(&t(0, 16));
    for second in 1..=3 {
        bench.router.tick(bench.at(f64::from(second)));
    }
    sibling.prefill_done(bench.at(3.0));
    bench.router.tick(bench.at(4.0));
    failed.release(&Outcome::not_dispatched(), bench.at(4.0));
    assert_eq!(bench.overlap_of(&prompt, 4.0), [("w1".to_owned(), 4)]);
}

#[test]
fn siblings_of_a_burst_land_together() {
    let bench = Bench::new(&["w1", "w2"], |config| config.prediction_ttl_seconds = 2.0);
    for worker in ["w1", "w2"] {
        bench.ingest(worker, Some(0), vec![]); // both streams are proven
    }
    let first = bench.select(&t(0, 400));
    let second = bench.select(&t(0, 400));
    assert_eq!(first.worker(), second.worker());
    assert_eq!(second.decision().predicted_blocks, 100);
    let warm = first.worker().to_owned();
    bench.release(first);
    bench.release(second);
    assert_eq!(
        bench.overlap_of(&bench.prompt(&t(0, 400)), 1.9),
        [(warm, 100)]
    );
    assert_eq!(
        bench.overlap_of(&bench.prompt(&t(0, 400)), 2.1),
        [],
        "the engine did not confirm"
    );
}

#[test]
fn a_prompt_still_in_prefill_stays_predicted() {
    let bench = Bench::new(&["w1"], |config| config.prediction_ttl_seconds = 2.0);
    bench.ingest("w1", Some(0), vec![]);
    let long = bench.select(&t(0, 400));
    for quarter in 1..=40 {
        bench.router.tick(bench.at(f64::from(quarter) * 0.25));
    }
    assert_eq!(bench.overlap_of(&bench.prompt(&t(0, 400)), 10.0).len(), 1);
    long.prefill_done(bench.at(10.0));
    bench.router.tick(bench.at(10.25));
    assert_eq!(bench.overlap_of(&bench.prompt(&t(0, 400)), 12.3), []);
}

#[test]
fn a_worker_that_never_publishes_is_routed_approximately_from_its_first_request() {
    let bench = Bench::new(&["w1", "w2"], |config| config.prediction_ttl_seconds = 2.0);
    let first = bench.select(&t(0, 400));
    let warm = first.worker().to_owned();
    bench.release(first);
    for n in 1..=20 {
        let guard = bench.select_at(&t(0, 400), f64::from(n) * 5.0);
        assert_eq!(guard.worker(), warm);
        guard.release(&Outcome::ok(), bench.at(f64::from(n) * 5.0));
    }
}

#[test]
fn placements_are_bounded_by_what_the_engine_can_hold() {
    let bench = Bench::new(&["w1"], approximate);
    bench.router.set_kv_capacity("w1", Some(10)).unwrap();
    for n in 0..4 {
        bench.release(bench.select(&t(n * 100, 16))); // 4 blocks each, 16 in all
    }
    let held: u32 = (0..4)
        .flat_map(|n| bench.overlap(&t(n * 100, 16)))
        .map(|(_, blocks)| blocks)
        .sum();
    assert_eq!(held, 10);
    assert_eq!(
        bench.overlap(&t(0, 16)),
        [],
        "the least recently used went first"
    );
}

#[test]
fn any_capacity_is_accepted() {
    let bench = Bench::new(&["w1"], approximate);
    for blocks in [usize::MAX, 0, 1] {
        bench.router.set_kv_capacity("w1", Some(blocks)).unwrap();
        bench.router.tick(bench.start);
        bench.release(bench.select(&t(0, 8)));
        let held = if blocks == 1 { 1 } else { 2 };
        assert_eq!(bench.overlap(&t(0, 8)), [("w1".to_owned(), held)]);
    }
}

#[test]
fn text_matches_text_and_never_tokens() {
    let bench = Bench::new(&["w1", "w2"], |config| config.prediction_ttl_seconds = 2.0);
    let text = "a system prompt that many requests share, long enough for chunks. ".repeat(20);
    let prompt = |tail: &str| {
        Prompt::from_text(text_hashes(
            &format!("{text}{tail}"),
            &SaltContext::default(),
        ))
    };
    let select = |prompt: &Prompt| {
        bench
            .router
            .select(&SelectRequest::new(prompt), bench.start)
            .unwrap()
            .unwrap()
    };
    let first = select(&prompt("first question"));
    let warm = first.worker().to_owned();
    // What the engine counted teaches how many tokens a chunk has.
    first.release(&Outcome::ok().reported(Some(0), Some(400)), bench.start);
    for n in 0..10 {
        let guard = select(&prompt(&format!("another question {n}")));
        assert_eq!(guard.worker(), warm);
        assert!(guard.decision().predicted_blocks >= 20);
        bench.release(guard);
    }
}
