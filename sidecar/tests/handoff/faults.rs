//! The rows of `docs/handoff.md` on what a client gets, one by one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use kvlane::Role;
use kvlane_sidecar::engine::EngineConfig;
use kvlane_sidecar::handoff::{Connector, FallbackReason};
use parking_lot::Mutex;

use crate::gate::{Act, Hook, always, first};
use crate::served::{COMPLETIONS, alone, completion, read};
use crate::world::{Plan, Reply, World, engine};
use crate::{answers_quickly, eventually};

/// Asks for both shapes; the answers must be those of one worker.
async fn served_all_the_same(plan: impl Fn() -> Plan, reason: FallbackReason) {
    let expected = alone(COMPLETIONS, &completion(1, false)).await;
    for stream in [false, true] {
        let world = World::start(plan()).await;
        let reply = world.ask(COMPLETIONS, &completion(1, stream)).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        let (words, usage) = read(&reply.text);
        assert_eq!(words, expected);
        // It computed everything itself, and says so.
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
        world.is_clean().await;
        assert_eq!(world.metrics.fallbacks(reason), 1);
        assert_eq!(world.metrics.ended("local"), 1);
        assert_eq!(world.decode.transfers().fetched, 0);
    }
}

fn is_bad_gateway(reply: &Reply) {
    assert_eq!(reply.status, 502, "{}", reply.text);
    assert_eq!(reply.json()["error"]["code"], "bad_gateway");
}

#[tokio::test]
async fn a_prefill_that_fails_falls_back() {
    for act in [
        Act::Status(500, "{}"),
        Act::Status(503, "{}"),
        Act::Status(429, "{}"),
        Act::Cut,
        Act::CutAfter(0),
    ] {
        let plan = || Plan {
            prefill_hook: always(act.clone()),
            ..Plan::default()
        };
        served_all_the_same(plan, FallbackReason::PrefillFailed).await;
    }
}

#[tokio::test]
async fn a_prefill_that_fails_is_502_where_nothing_falls_back() {
    let world = World::start(Plan {
        prefill_hook: always(Act::Status(500, "{}")),
        may_fall_back: Some(false),
        ..Plan::default()
    })
    .await;
    is_bad_gateway(&world.ask(COMPLETIONS, &completion(1, true)).await);
    world.is_clean().await;
    assert_eq!(world.prefill_gate.requests(), 1);
    assert_eq!(world.decode_gate.requests(), 0);
}

#[tokio::test]
async fn what_never_reached_a_worker_is_not_noted_there() {
    let expected = alone(COMPLETIONS, &completion(1, false)).await;
    for connector in Connector::ALL {
        let world = World::start(Plan {
            connector,
            ..Plan::default()
        })
        .await;
        world.prefill_gate.close().await;
        let reply = world.ask(COMPLETIONS, &completion(1, false)).await;
        world.is_clean().await;
        if connector.decoder_serves_alone() {
            assert_eq!(
                (reply.status.as_u16(), read(&reply.text).0),
                (200, expected.clone())
            );
        } else {
            is_bad_gateway(&reply);
        }
        // The prompt is where it was served, or on its way there when the other leg failed.
        let noted = ["p", "d"].map(|id| world.noted_blocks(id));
        assert_eq!(noted, [0, 4], "{connector:?}");
    }
}

#[tokio::test]
async fn what_was_not_sent_to_the_decode_worker_is_not_noted_there() {
    // It cannot be reached.
    let world = World::start(Plan::default()).await;
    world.decode_gate.close().await;
    is_bad_gateway(&world.ask(COMPLETIONS, &completion(1, false)).await);
    world.is_clean().await;
    let noted = ["p", "d"].map(|id| world.noted_blocks(id));
    assert_eq!(noted, [4, 0]);
    // Its leg waits for a prefill that is refused.
    let world = World::start(Plan {
        prefill_hook: always(Act::Status(400, "{}")),
        ..Plan::default()
    })
    .await;
    assert_eq!(
        world.ask(COMPLETIONS, &completion(1, false)).await.status,
        400
    );
    world.is_clean().await;
    assert_eq!(world.noted_blocks("d"), 0);
    // The client leaves while the prefill runs.
    let world = World::start(Plan {
        prefill_hook: always(Act::Hang),
        ..Plan::default()
    })
    .await;
    let body = completion(1, true);
    let asking = world.ask(COMPLETIONS, &body);
    let left = tokio::time::timeout(Duration::from_millis(200), asking).await;
    assert!(left.is_err());
    world.is_clean().await;
    let noted = ["p", "d"].map(|id| world.noted_blocks(id));
    assert_eq!(noted, [4, 0]);
}

#[tokio::test]
async fn a_refused_request_is_the_clients_own_affair() {
    let refusal = r#"{"error":{"message":"too long"}}"#;
    for (prefill_hook, decode_hook) in [
        (always(Act::Status(400, refusal)), always(Act::Pass)),
        (always(Act::Pass), always(Act::Status(400, refusal))),
    ] {
        let world = World::start(Plan {
            prefill_hook,
            decode_hook,
            ..Plan::default()
        })
        .await;
        let reply = world.ask(COMPLETIONS, &completion(1, false)).await;
        assert_eq!((reply.status.as_u16(), reply.text.as_str()), (400, refusal));
        assert_eq!(world.metrics.fallbacks(FallbackReason::PrefillFailed), 0);
        world.is_clean().await;
        assert_eq!(world.metrics.ended("refused"), 1);
    }
}

#[tokio::test]
async fn a_prefill_without_parameters_falls_back() {
    let plan = || Plan {
        prefill: EngineConfig {
            transfer: None,
            ..engine(Role::Prefill)
        },
        ..Plan::default()
    };
    served_all_the_same(plan, FallbackReason::NothingHandedOver).await;
    let plan = || Plan {
        prefill_hook: always(Act::Status(200, "no json")),
        ..Plan::default()
    };
    served_all_the_same(plan, FallbackReason::NothingHandedOver).await;
}

#[tokio::test]
async fn what_is_too_old_is_not_sent() {
    let plan = || Plan {
        believed: Duration::ZERO,
        ..Plan::default()
    };
    served_all_the_same(plan, FallbackReason::Expired).await;
}

#[tokio::test]
async fn a_client_that_leaves_during_the_prefill_stops_it() {
    // A prompt of 50 tokens takes 2 seconds.
    let world = World::start(Plan {
        prefill: EngineConfig {
            speed: 1.0,
            prefill_tokens_per_second: 25.0,
            ..engine(Role::Prefill)
        },
        ..Plan::default()
    })
    .await;
    world
        .leave(&completion(1, true), || world.prefill_gate.requests() == 1)
        .await;
    eventually("stopped", || world.metrics.open() == 0).await;
    world.is_clean().await;
    assert_eq!(world.decode_gate.requests(), 0);
    assert_eq!(world.metrics.ended("left"), 1);
}

#[tokio::test]
async fn a_client_that_leaves_between_the_legs_pins_no_longer_than_the_lease() {
    let world = World::start(Plan {
        decode_hook: always(Act::Hang),
        ..Plan::default()
    })
    .await;
    world
        .leave(&completion(1, false), || world.decode_gate.requests() == 1)
        .await;
    eventually("closed", || world.metrics.open() == 0).await;
    // Until the lease ends, which it does in the next check.
    assert_eq!(world.prefill(|engine| engine.transfers().held), Some(1));
    world.is_clean().await;
    assert_eq!(world.prefill(|engine| engine.transfers().expired), Some(1));
    assert_eq!(world.metrics.ended("left"), 1);
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_frees_both() {
    let world = World::start(Plan {
        decode: EngineConfig {
            speed: 1.0,
            decode_ms: 50.0,
            ..engine(Role::Decode)
        },
        ..Plan::default()
    })
    .await;
    let mut request = completion(1, true);
    request["max_tokens"] = serde_json::json!(5_000);
    let mut body = world.drive(COMPLETIONS, &request).await.into_body();
    body.frame().await.unwrap().unwrap();
    drop(body);
    world.is_clean().await;
    assert_eq!(world.decode.stats().aborted_requests, 1);
    assert_eq!(world.metrics.ended("left"), 1);
}

#[tokio::test]
async fn a_decode_that_dies_before_it_fetches_is_502() {
    for stream in [false, true] {
        let world = World::start(Plan {
            decode_hook: always(Act::Cut),
            ..Plan::default()
        })
        .await;
        is_bad_gateway(&world.ask(COMPLETIONS, &completion(1, stream)).await);
        world.is_clean().await;
        assert_eq!(world.prefill(|engine| engine.transfers().expired), Some(1));
        assert_eq!(world.metrics.ended("bad_gateway"), 1);
    }
}

#[tokio::test]
async fn a_decode_worker_that_stays_busy_says_so_itself() {
    for status in [429, 503] {
        let world = World::start(Plan {
            decode_hook: always(Act::Status(status, r#"{"error": "busy"}"#)),
            ..Plan::default()
        })
        .await;
        let reply = world.ask(COMPLETIONS, &completion(1, true)).await;
        assert_eq!(reply.status, status);
        assert_eq!(reply.text, r#"{"error": "busy"}"#);
        world.is_clean().await;
        // With what was handed over, and without.
        assert_eq!(world.decode_gate.requests(), 2);
    }
}

#[tokio::test]
async fn a_stream_that_ends_without_its_marker_is_counted() {
    let event = "data: {\"choices\":[{\"text\":\" a\"}]}\n\n";
    let whole = "data: {\"choices\":[{\"text\":\" a\"}]}\n\ndata: [DONE]\n\n";
    for (events, incomplete) in [(event, 1), (whole, 0)] {
        let world = World::start(Plan {
            decode_hook: always(Act::Events(events)),
            ..Plan::default()
        })
        .await;
        let reply = world.ask(COMPLETIONS, &completion(1, true)).await;
        assert_eq!(reply.text, events);
        assert_eq!(world.incomplete("d"), incomplete);
        world.is_clean().await;
    }
}

#[tokio::test]
async fn a_decode_leg_is_sent_once_whatever_becomes_of_its_connection() {
    let world = World::start(Plan {
        decode_hook: Arc::new(|number, _| {
            let act = if number == 0 { Act::Pass } else { Act::Cut };
            Box::pin(async move { act })
        }),
        ..Plan::default()
    })
    .await;
    // Leaves a kept connection behind, over which a request could be sent again.
    let reply = world.ask(COMPLETIONS, &completion(1, false)).await;
    assert_eq!(reply.status, 200);
    is_bad_gateway(&world.ask(COMPLETIONS, &completion(2, false)).await);
    assert_eq!(world.decode_gate.requests(), 2);
    world.is_clean().await;
}

/// A stream has its 200 before the engine knows whether it can fetch.
#[tokio::test]
async fn a_stream_that_fails_before_its_first_output_is_begun_anew() {
    let text = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n\
        data: {\"error\": {\"message\": \"Internal server error\", \"code\": 500}}\n\ndata: [DONE]\n\n";
    let plan = || Plan {
        decode_hook: first(Act::Events(text)),
        ..Plan::default()
    };
    served_all_the_same(plan, FallbackReason::DecodeFailed).await;
}

#[tokio::test]
async fn a_decode_that_answers_an_error_prefills_itself() {
    let plan = || Plan {
        decode_hook: first(Act::Status(500, "{}")),
        ..Plan::default()
    };
    served_all_the_same(plan, FallbackReason::DecodeFailed).await;
}

#[tokio::test]
async fn a_prefill_worker_that_dies_between_the_legs_costs_its_work_alone() {
    let expected = alone(COMPLETIONS, &completion(1, false)).await;
    for stream in [false, true] {
        // Filled in when the world is there.
        let victim: Arc<Mutex<Option<Arc<World>>>> = Arc::default();
        let kill = victim.clone();
        let hook: Hook = Arc::new(move |number, _| {
            let world = kill.lock().clone();
            Box::pin(async move {
                if number == 0
                    && let Some(engine) = world.and_then(|world| world.take_prefill())
                {
                    engine.shutdown().await;
                }
                Act::Pass
            })
        });
        let world = Arc::new(
            World::start(Plan {
                decode_hook: hook,
                ..Plan::default()
            })
            .await,
        );
        *victim.lock() = Some(world.clone());
        let reply = world.ask(COMPLETIONS, &completion(1, stream)).await;
        victim.lock().take();
        assert_eq!(reply.status, 200, "{}", reply.text);
        assert_eq!(read(&reply.text).0, expected);
        world.is_clean().await;
        assert_eq!(world.metrics.fallbacks(FallbackReason::DecodeFailed), 1);
    }
}

#[tokio::test]
async fn a_stream_that_breaks_says_so_and_a_whole_answer_is_502() {
    let plan = || Plan {
        decode_hook: always(Act::CutAfter(2)),
        ..Plan::default()
    };
    let world = World::start(plan()).await;
    let reply = world.ask(COMPLETIONS, &completion(1, true)).await;
    assert_eq!(reply.status, 200);
    let events: Vec<_> = reply.text.trim_end().split("\n\n").collect();
    assert!(
        events.last().unwrap().contains("bad_gateway"),
        "{}",
        reply.text
    );
    assert!(!reply.text.contains("[DONE]"));
    world.is_clean().await;
    assert_eq!(world.metrics.ended("broken_stream"), 1);

    let world = World::start(Plan {
        decode_hook: always(Act::CutAfter(0)),
        ..Plan::default()
    })
    .await;
    is_bad_gateway(&world.ask(COMPLETIONS, &completion(1, false)).await);
    world.is_clean().await;
}

#[tokio::test]
async fn failures_reach_the_client_within_100_ms() {
    let failing: [fn(Hook) -> Plan; 2] = [
        |hook| Plan {
            prefill_hook: hook,
            may_fall_back: Some(false),
            ..Plan::default()
        },
        |hook| Plan {
            decode_hook: hook,
            ..Plan::default()
        },
    ];
    for plan in failing {
        answers_quickly("a broken leg", async || {
            let failed: Arc<Mutex<Option<Instant>>> = Arc::default();
            let note = failed.clone();
            let hook: Hook = Arc::new(move |_, _| {
                let note = note.clone();
                Box::pin(async move {
                    *note.lock() = Some(Instant::now());
                    Act::Cut
                })
            });
            let world = World::start(plan(hook)).await;
            is_bad_gateway(&world.ask(COMPLETIONS, &completion(1, true)).await);
            let took = failed.lock().unwrap().elapsed();
            world.is_clean().await;
            took
        })
        .await;
    }
}

#[tokio::test]
async fn nothing_wrong_is_ever_sent_whatever_happens() {
    meet_every_fault(Connector::Nixl, 400).await;
}

#[tokio::test]
async fn no_room_is_ever_shared_or_left_whatever_happens() {
    meet_every_fault(Connector::Sglang, 200).await;
    meet_every_fault(Connector::Mooncake, 200).await;
}

/// `cargo test -p kvlane-sidecar --test handoff -- --ignored ten_thousand`
#[tokio::test]
#[ignore = "takes some minutes"]
async fn nothing_wrong_is_ever_sent_in_ten_thousand_requests() {
    for connector in Connector::ALL {
        meet_every_fault(connector, 10_000).await;
    }
}

/// Requests meet every fault in every order, some of whose clients leave; engines must never see what they should not.
async fn meet_every_fault(connector: Connector, total: u32) {
    let random = Arc::new(Mutex::new(fastrand::Rng::with_seed(11)));
    let harm = |random: Arc<Mutex<fastrand::Rng>>| -> Hook {
        Arc::new(move |_, _| {
            let (draw, wait) = {
                let mut random = random.lock();
                (random.u32(..10), random.u64(..8))
            };
            Box::pin(async move {
                tokio::time::sleep(Duration::from_millis(wait)).await;
                match draw {
                    0 => Act::Cut,
                    1 => Act::Status(500, "{}"),
                    2 => Act::CutAfter(1),
                    3 => Act::Status(400, "{}"),
                    _ => Act::Pass,
                }
            })
        })
    };
    let world = Arc::new(
        World::start(Plan {
            connector,
            // Room for all that nobody fetches.
            prefill: EngineConfig {
                kv_blocks: 100_000,
                ..engine(Role::Prefill)
            },
            prefill_hook: harm(random.clone()),
            decode_hook: harm(random.clone()),
            ..Plan::default()
        })
        .await,
    );
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..total {
        let world = world.clone();
        // A third of the clients leaves while something is under way.
        let patience = match number % 3 {
            0 => random.lock().u64(5..60),
            _ => 10_000,
        };
        tasks.spawn(async move {
            let body = completion(1 + number % 7, number % 2 == 0);
            let asking = world.ask(COMPLETIONS, &body);
            let _ = tokio::time::timeout(Duration::from_millis(patience), asking).await;
        });
        if number % 16 == 0 {
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        // Engines, doors and router share a thread: with more at once a leg would be on its way for longer than a lease.
        while tasks.len() >= 96 {
            tasks.join_next().await.unwrap().unwrap();
        }
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    world.is_clean().await;
    let mut names = vec!["split", "left", "refused", "bad_gateway", "broken_stream"];
    if connector.decoder_serves_alone() {
        names.push("local");
    }
    let count = |name: &&'static str| world.metrics.ended(name);
    let ended: Vec<u64> = names.iter().map(count).collect();
    assert_eq!(ended.iter().sum::<u64>(), u64::from(total), "{ended:?}");
    assert!(ended.iter().all(|count| *count > 0), "{ended:?}");
}
