//! Handoffs that go well.

use http_body_util::BodyExt;
use kvlane::Role;
use kvlane_sidecar::engine::EngineConfig;
use serde_json::{Value, json};

use crate::eventually;
use crate::gate::{Act, always};
use crate::world::{Plan, World, engine};

pub(crate) const COMPLETIONS: &str = "/v1/completions";
pub(crate) const CHAT: &str = "/v1/chat/completions";

pub(crate) fn completion(first: u32, stream: bool) -> Value {
    let prompt: Vec<u32> = (first..first + 50).collect();
    let mut body = json!({"prompt": prompt, "max_tokens": 6, "stream": stream});
    if stream {
        body["stream_options"] = json!({"include_usage": true});
    }
    body
}

pub(crate) fn chat(stream: bool) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "word ".repeat(50)}], "max_tokens": 6,
        "stream": stream});
    if stream {
        body["stream_options"] = json!({"include_usage": true});
    }
    body
}

/// Returns an answer's words and its usage, whichever shape it has.
pub(crate) fn read(text: &str) -> (String, Value) {
    let mut words = String::new();
    let mut usage = Value::Null;
    let mut take = |event: Value| {
        for choice in event["choices"].as_array().into_iter().flatten() {
            for at in ["/text", "/message/content", "/delta/content"] {
                words += choice.pointer(at).and_then(Value::as_str).unwrap_or("");
            }
        }
        if event["usage"].is_object() {
            usage = event["usage"].clone();
        }
    };
    if text.starts_with('{') {
        take(serde_json::from_str(text).unwrap());
    } else {
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        for event in text.trim_end().split("\n\n") {
            let data = event.strip_prefix("data: ").unwrap();
            if data != "[DONE]" {
                take(serde_json::from_str(data).unwrap());
            }
        }
    }
    (words, usage)
}

/// Asks an engine that serves alone.
pub(crate) async fn alone(path: &'static str, body: &Value) -> String {
    let world = World::start(Plan {
        // Without a connector it serves every request itself.
        prefill: EngineConfig {
            transfer: None,
            ..engine(Role::Prefill)
        },
        ..Plan::default()
    })
    .await;
    read(&world.ask(path, body).await.text).0
}

#[tokio::test]
async fn every_shape_is_answered_as_by_one_worker_with_the_prefills_usage() {
    let world = World::start(Plan::default()).await;
    for (path, bodies) in [
        (COMPLETIONS, [completion(1, false), completion(1, true)]),
        (CHAT, [chat(false), chat(true)]),
    ] {
        let expected = alone(path, &bodies[0]).await;
        // The prefill worker computes the prompt once and then has it, whole blocks of it.
        let mut first = true;
        for body in bodies {
            let reply = world.ask(path, &body).await;
            assert_eq!(reply.status, 200, "{}", reply.text);
            let (words, usage) = read(&reply.text);
            assert_eq!(words, expected);
            let prompt = usage["prompt_tokens"].as_u64().unwrap();
            let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
            let held = if first { 0 } else { (prompt - 1) / 16 * 16 };
            assert_eq!(cached, Some(held), "{}", reply.text);
            assert_eq!(usage["completion_tokens"], 6);
            assert!(!reply.text.contains("remote_host"));
            first = false;
        }
    }
    world.is_clean().await;
    assert_eq!(world.metrics.ended("split"), 4);
    assert_eq!(world.decode.transfers().fetched, 4);
    assert_eq!(
        world.prefill(|engine| engine.transfers().collected),
        Some(4)
    );
    // Prefill legs teach the speed of the worker that had them, and of no other.
    let stats = world.planner.stats();
    let speeds = stats.prefill.iter().filter(|known| known.measurements > 0);
    let names: Vec<_> = speeds.map(|known| known.worker.worker.as_str()).collect();
    assert_eq!(names, ["p"], "{stats:?}");
}

#[tokio::test]
async fn an_engine_that_pushes_is_driven_alike() {
    let mut prefill = engine(Role::Prefill);
    if let Some(transfer) = &mut prefill.transfer {
        transfer.push = true;
    }
    let plan = Plan {
        prefill,
        ..Plan::default()
    };
    let world = World::start(plan).await;
    for body in [completion(1, false), completion(1, true)] {
        let expected = alone(COMPLETIONS, &body).await;
        let reply = world.ask(COMPLETIONS, &body).await;
        assert_eq!(read(&reply.text).0, expected);
    }
    world.is_clean().await;
    assert_eq!(world.metrics.ended("split"), 2);
}

#[tokio::test]
async fn what_a_client_sends_of_a_handoff_does_not_reach_an_engine() {
    let world = World::start(Plan::default()).await;
    let mut body = completion(1, false);
    body["kv_transfer_params"] = json!({"do_remote_prefill": true, "remote_engine_id": "x",
        "remote_request_id": "y", "remote_host": "127.0.0.1", "remote_port": 1});
    assert_eq!(world.ask(COMPLETIONS, &body).await.status, 200);
    world.is_clean().await;
    assert_eq!(world.metrics.ended("split"), 1);
}

/// 200 tokens at 50 ms each: pieces must arrive before the end, which is not waited for.
fn slow() -> (EngineConfig, Value) {
    let slow = EngineConfig {
        speed: 1.0,
        decode_ms: 50.0,
        ..engine(Role::Decode)
    };
    let mut request = completion(1, true);
    request["max_tokens"] = json!(200);
    (slow, request)
}

#[tokio::test]
async fn a_stream_takes_more_room_the_longer_it_is() {
    let (slow, request) = slow();
    let decode = EngineConfig {
        decode_ms: 5.0,
        ..slow
    };
    let world = World::start(Plan {
        decode,
        ..Plan::default()
    })
    .await;
    let mut body = world.drive(COMPLETIONS, &request).await.into_body();
    body.frame().await.unwrap().unwrap();
    let first = world.booked_blocks("d");
    for _ in 0..100 {
        body.frame().await.unwrap().unwrap();
    }
    assert!(world.booked_blocks("d") >= first + 4, "from {first}");
    drop(body);
    world.is_clean().await;
}

/// A worker that drains would wait for the end of streams that are no longer its own.
#[tokio::test]
async fn a_prefill_worker_is_free_while_the_stream_goes_on() {
    for act in [Act::Pass, Act::Status(500, "{}"), Act::Status(200, "{}")] {
        let (decode, request) = slow();
        let world = World::start(Plan {
            decode,
            prefill_hook: always(act.clone()),
            ..Plan::default()
        })
        .await;
        let mut body = world.drive(COMPLETIONS, &request).await.into_body();
        body.frame().await.unwrap().unwrap();
        eventually("prefill worker is free", || world.occupied("p") == (0, 0)).await;
        assert_eq!(world.occupied("d"), (1, 1), "{act:?}");
        drop(body);
        world.is_clean().await;
    }
}

#[tokio::test]
async fn streams_pass_as_they_come() {
    let (decode, request) = slow();
    let world = World::start(Plan {
        decode,
        ..Plan::default()
    })
    .await;
    let mut body = world.drive(COMPLETIONS, &request).await.into_body();
    for _ in 0..3 {
        body.frame().await.unwrap().unwrap();
    }
    assert_eq!(
        world.decode.stats().finished_requests,
        0,
        "the first pieces came with the last"
    );
    drop(body);
    world.is_clean().await;
}

#[tokio::test]
async fn many_at_once_are_each_answered_with_their_own_text() {
    let world = std::sync::Arc::new(World::start(Plan::default()).await);
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..60 {
        let world = world.clone();
        tasks.spawn(async move {
            let body = completion(1 + 100 * (number % 20), number % 2 == 0);
            (
                number % 20,
                read(&world.ask(COMPLETIONS, &body).await.text).0,
            )
        });
    }
    let mut texts = std::collections::HashMap::new();
    while let Some(done) = tasks.join_next().await {
        let (prompt, text) = done.unwrap();
        assert!(!text.is_empty());
        assert_eq!(texts.entry(prompt).or_insert_with(|| text.clone()), &text);
    }
    let different: std::collections::HashSet<_> = texts.values().collect();
    assert_eq!(different.len(), 20);
    world.is_clean().await;
    assert_eq!(world.metrics.ended("split"), 60);
}
