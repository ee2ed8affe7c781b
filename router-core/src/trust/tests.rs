use super::*;

fn limits() -> TrustLimits {
    TrustLimits {
        silent_after: Duration::from_secs(30),
        silent_requests: 16,
        ttl: Duration::from_secs(120),
    }
}

fn at(start: Instant, seconds: f64) -> Instant {
    start + Duration::from_secs_f64(seconds)
}

#[expect(
    clippy::disallowed_methods,
    reason = "a test needs some instant to start from"
)]
fn start() -> Instant {
    Instant::now()
}

#[test]
fn a_worker_that_serves_sixteen_prompts_in_silence_is_approximate_with_a_cause() {
    let t0 = start();
    let mut trust = Trust::new(t0);
    for n in 0..15 {
        trust.served(&limits(), at(t0, f64::from(n) * 0.1));
    }
    assert_eq!(trust.state(), TrustState::Unproven);
    trust.served(&limits(), at(t0, 1.6));
    assert_eq!(trust.state(), TrustState::Approximate);
    assert!(trust.cause().unwrap().contains("no KV event"));
}

#[test]
fn thirty_seconds_after_the_first_prompt_do_the_same_and_an_event_clears_it() {
    let t0 = start();
    let mut trust = Trust::new(t0);
    trust.tick(&limits(), at(t0, 100.0)); // idle: nothing was served
    assert_eq!(trust.state(), TrustState::Unproven);
    trust.served(&limits(), at(t0, 100.0));
    trust.tick(&limits(), at(t0, 129.0));
    assert_eq!(trust.state(), TrustState::Unproven);
    trust.tick(&limits(), at(t0, 130.0));
    assert_eq!(trust.state(), TrustState::Approximate);
    trust.started(at(t0, 140.0));
    assert_eq!(trust.state(), TrustState::Exact);
    assert_eq!(trust.cause(), None);
}

#[test]
fn a_gap_converges_again_after_the_ttl() {
    let t0 = start();
    let mut trust = Trust::new(t0);
    trust.started(t0);
    trust.lost(3, &limits(), at(t0, 1.0));
    assert_eq!(trust.state(), TrustState::Converging);
    assert!(trust.cause().unwrap().contains("3 event batches"));
    assert!(!trust.tick(&limits(), at(t0, 120.9)));
    assert!(
        trust.tick(&limits(), at(t0, 121.0)),
        "the demoted entries are dropped now"
    );
    assert_eq!(trust.state(), TrustState::Exact);
}

#[test]
fn undecodable_batches_lead_to_approximate_and_back() {
    let t0 = start();
    let mut trust = Trust::new(t0);
    trust.started(t0);
    assert!(trust.undecodable("not msgpack", &limits(), t0));
    assert_eq!(trust.state(), TrustState::Converging);
    trust.undecodable("not msgpack", &limits(), t0);
    trust.undecodable("not msgpack", &limits(), t0);
    assert_eq!(trust.state(), TrustState::Approximate);
    trust.continued(&limits(), at(t0, 1.0));
    assert_eq!(trust.state(), TrustState::Converging);
}

#[test]
fn an_outage_goes_back_to_the_state_before() {
    let t0 = start();
    let mut trust = Trust::new(t0);
    trust.started(t0);
    trust.stream_down("connection refused", at(t0, 1.0));
    trust.stream_down("connection refused", at(t0, 2.0));
    assert_eq!(trust.state(), TrustState::Unreachable);
    assert_eq!(trust.since(), at(t0, 1.0));
    trust.stream_up(at(t0, 3.0));
    assert_eq!(trust.state(), TrustState::Exact);
}

#[test]
fn a_silent_worker_is_named_even_when_its_socket_never_connected() {
    let t0 = start();
    let mut trust = Trust::new(t0);
    trust.stream_down("connection refused", t0);
    assert_eq!(trust.state(), TrustState::Unreachable);
    for _ in 0..16 {
        trust.served(&limits(), t0);
    }
    assert_eq!(trust.state(), TrustState::Approximate);
    assert!(trust.cause().unwrap().contains("connection refused"));
    trust.stream_down("connection refused", t0);
    assert_eq!(trust.state(), TrustState::Approximate);
    trust.started(t0);
    assert_eq!(trust.state(), TrustState::Exact);
}

#[test]
fn a_block_size_that_does_not_fit_outlasts_further_batches() {
    let t0 = start();
    let mut trust = Trust::new(t0);
    trust.started(t0);
    trust.block_size_refused(24, 16, t0);
    trust.continued(&limits(), t0);
    assert_eq!(trust.state(), TrustState::Approximate);
    assert!(trust.cause().unwrap().contains("24"));
    trust.block_size_accepted(t0);
    assert_eq!(trust.state(), TrustState::Exact);
}

#[test]
fn hits_that_events_never_matched_name_the_template() {
    let t0 = start();
    let mut trust = Trust::new(t0);
    trust.started(t0);
    let hit = Observation {
        predicted_tokens: 0,
        confirmed_tokens: 0,
        reported_tokens: 320,
        block_tokens: 16,
        exact_tokens: true,
    };
    for _ in 0..4 {
        trust.audit(&hit, t0);
    }
    assert_eq!(trust.state(), TrustState::Approximate);
    assert!(trust.cause().unwrap().contains("template"));
    let agreed = Observation {
        predicted_tokens: 320,
        confirmed_tokens: 320,
        ..hit
    };
    for _ in 0..4 {
        trust.audit(&agreed, t0);
    }
    assert_eq!(trust.state(), TrustState::Exact);
}
