//! What few measurements do, and what they must not.

use super::*;

fn reasons(plan: &HandoffPlan) -> Vec<Reason> {
    plan.excluded
        .iter()
        .map(|excluded| excluded.reason)
        .collect()
}

/// A decode worker with streams that any prompt stalls, and a link that costs nothing: whatever can be split is.
fn eager(assumed: Option<f64>) -> Lab {
    let mut config = Lab::objectives(1e6, 1e-6);
    config.assumed_prefill_tokens_per_second = assumed;
    config.transfer_stall_seconds_per_token = 0.0;
    let lab = Lab::new(config, 36);
    lab.planner
        .seed_link(&lab.link, 1e15, Duration::ZERO)
        .unwrap();
    lab.running(8, 31)
}

#[test]
fn a_short_prompt_tells_no_speed_and_until_one_is_known_one_worker_serves() {
    let lab = eager(None);
    let is_whole = |lab: &Lab| {
        let plan = lab.plan(8_000);
        (splits(&plan), reasons(&plan)) == (false, vec![Reason::SpeedNotKnown])
    };
    assert!(is_whole(&lab));
    // 20 tokens in 15 ms are not 1,317 tokens a second.
    for _ in 0..20 {
        lab.learn_prefill(20, 15);
    }
    assert!(is_whole(&lab));
    let known = &lab.planner.stats().prefill[0];
    assert_eq!((known.tokens_per_second, known.measurements), (None, 20));
    lab.learn_prefill(1_500, 57);
    let plan = lab.plan(8_000);
    assert_eq!((splits(&plan), reasons(&plan)), (true, vec![]));
    // 1,500 tokens in 57 ms, whatever the others took.
    assert_within(single(&plan).ttft.total_seconds, 0.304, 1e-6);
}

#[test]
fn what_is_configured_of_speeds_is_believed_until_one_is_known() {
    let lab = eager(Some(20_000.0));
    let plan = lab.plan(8_000);
    assert!(splits(&plan) && single(&plan).ttft.assumed_speed);
    assert_within(single(&plan).ttft.total_seconds, 0.4, 1e-6);
    lab.learn_prefill(1_500, 57);
    assert!(!single(&lab.plan(8_000)).ttft.assumed_speed);
    let config = HandoffConfig {
        assumed_prefill_tokens_per_second: Some(0.0),
        ..HandoffConfig::default()
    };
    let error = config.validate().unwrap_err().to_string();
    assert!(
        error.contains("assumed_prefill_tokens_per_second"),
        "{error}"
    );
}

#[test]
fn where_no_worker_serves_alone_an_unknown_speed_splits_all_the_same() {
    let mut lab = eager(None);
    lab.workers[1].serves_alone = false;
    let plan = lab.plan(8_000);
    assert!(splits(&plan) && pair(&plan).ttft.assumed_speed);
}

#[test]
fn two_transfers_overrule_the_seed_of_a_link_and_one_that_is_wrong_does_not() {
    for seeded in [1e9, 1e7] {
        let lab = Lab::new(HandoffConfig::default(), 28);
        lab.learn_prefill(1_500, 57);
        lab.planner
            .seed_link(&lab.link, seeded, Duration::ZERO)
            .unwrap();
        // The first brings the handshake of the pair with it, some 5 s.
        lab.learn_transfer(3_067, 3_382 + 5_000);
        let first = lab.plan(3_000);
        assert!(pair(&first).ttft.seeded_link);
        assert_within(
            pair(&first).ttft.transfer_bytes / pair(&first).ttft.transfer_seconds,
            seeded,
            1e-6,
        );
        lab.learn_transfer(3_067, 3_382);
        lab.learn_transfer(1_500, 1_654);
        let plan = lab.plan(3_000);
        assert!(!pair(&plan).ttft.seeded_link);
        assert_within(pair(&plan).ttft.transfer_seconds, 3.31, 0.01);
        // Nor does one that stalls move anything later.
        lab.learn_transfer(1_000, 1_103);
        lab.learn_transfer(2_000, 60_000);
        let stats = lab.planner.stats();
        assert_within(stats.links[0].bytes_per_second.unwrap(), 104e6, 0.01);
        assert!(stats.links[0].is_measured);
    }
}

#[test]
fn small_prompts_do_not_make_a_fast_link_look_slow() {
    let lab = nvlink(HandoffConfig::default());
    lab.planner.remove_link(&lab.link);
    lab.planner
        .seed_link(&lab.link, 6e9, Duration::ZERO)
        .unwrap();
    // 74 MB take 12 ms at 6 GB/s, and the first token another 20.
    for _ in 0..10 {
        lab.learn_transfer(500, 32);
    }
    let plan = lab.plan(16_000);
    assert_within(pair(&plan).ttft.transfer_seconds, 0.393, 0.01);
    assert!(pair(&plan).ttft.seeded_link);
}
