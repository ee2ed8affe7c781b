//! Protocols whose legs run at once, and meet in a room of the prefill engine.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use kvlane::Role;
use kvlane_sidecar::engine::EngineConfig;
use kvlane_sidecar::handoff::Connector;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::Notify;

use crate::eventually;
use crate::gate::{Act, Hook, always};
use crate::served::{CHAT, COMPLETIONS, alone, chat, completion, read};
use crate::world::{Plan, World, engine};

const CONCURRENT: [Connector; 2] = [Connector::Sglang, Connector::Mooncake];

fn with(connector: Connector) -> Plan {
    Plan {
        connector,
        ..Plan::default()
    }
}

fn sglang() -> Plan {
    with(Connector::Sglang)
}

/// Keeps the bodies that pass.
pub(crate) fn keeping(bodies: Arc<Mutex<Vec<Value>>>) -> Hook {
    Arc::new(move |_, body| {
        bodies.lock().push(body);
        Box::pin(async { Act::Pass })
    })
}

#[tokio::test]
async fn both_legs_carry_one_room_and_the_client_gets_the_decoders_answer() {
    let expected = alone(COMPLETIONS, &completion(1, false)).await;
    let (prefill, decode) = (Arc::default(), Arc::default());
    let world = World::start(Plan {
        prefill_hook: keeping(Arc::clone(&prefill)),
        decode_hook: keeping(Arc::clone(&decode)),
        ..sglang()
    })
    .await;
    for stream in [false, true] {
        let reply = world.ask(COMPLETIONS, &completion(1, stream)).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        assert_eq!(read(&reply.text).0, expected);
    }
    world.is_clean().await;
    assert_eq!(world.metrics.ended("split"), 2);
    let (prefill, decode) = (prefill.lock(), decode.lock());
    for (prefill, decode) in prefill.iter().zip(decode.iter()) {
        for name in ["bootstrap_room", "bootstrap_host", "bootstrap_port"] {
            assert_eq!(prefill[name], decode[name]);
        }
        assert!(prefill["bootstrap_room"].is_u64());
    }
    assert_ne!(decode[0]["bootstrap_room"], decode[1]["bootstrap_room"]);
}

#[tokio::test]
async fn the_cache_moves_and_the_answer_is_that_of_one_worker() {
    for connector in CONCURRENT {
        let world = World::start(with(connector)).await;
        for (path, bodies) in [
            (COMPLETIONS, [completion(1, false), completion(1, true)]),
            (CHAT, [chat(false), chat(true)]),
        ] {
            for body in bodies {
                let expected = alone(path, &body).await;
                let reply = world.ask(path, &body).await;
                assert_eq!(reply.status, 200, "{connector:?}: {}", reply.text);
                let (words, usage) = read(&reply.text);
                assert_eq!(words, expected);
                // To the decode engine all but the last token is cached; the prefill engine's own number comes with its
                // answer, which may be too late.
                let prompt = usage["prompt_tokens"].as_u64().unwrap();
                let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
                assert!(
                    cached.is_none_or(|cached| cached == 0 || cached == (prompt - 1) / 16 * 16),
                    "{}",
                    reply.text
                );
            }
        }
        world.is_clean().await;
        assert_eq!(world.metrics.ended("split"), 4);
        assert_eq!(world.decode.transfers().fetched, 4);
        assert_eq!(
            world.prefill(|engine| engine.transfers().collected),
            Some(4)
        );
    }
}

#[tokio::test]
async fn many_at_once_each_meet_in_their_own_room() {
    for connector in CONCURRENT {
        let world = Arc::new(World::start(with(connector)).await);
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..40 {
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
            assert_eq!(texts.entry(prompt).or_insert_with(|| text.clone()), &text);
        }
        let different: std::collections::HashSet<_> = texts.values().collect();
        assert_eq!(different.len(), 20);
        world.is_clean().await;
    }
}

#[tokio::test]
async fn a_decode_engine_waits_for_a_room_that_never_opens() {
    // Nobody tells it of its prefill's end, unless the router does.
    let world = World::start(sglang()).await;
    let mut body = completion(1, false);
    body["bootstrap_host"] = "127.0.0.1".into();
    body["bootstrap_port"] = 1.into();
    body["bootstrap_room"] = 7.into();
    let waiting = crate::serve::post(world.decode.address(), COMPLETIONS, &body);
    let waited = tokio::time::timeout(Duration::from_millis(300), waiting).await;
    assert!(waited.is_err(), "{waited:?}");
    // Without a room it refuses at once.
    let (status, text) =
        crate::serve::post(world.decode.address(), COMPLETIONS, &completion(1, false)).await;
    assert_eq!(status, 400, "{text}");
}

#[tokio::test]
async fn a_decode_that_fails_cancels_the_prefill_that_waits_for_it() {
    let refusal = r#"{"error":{"message":"too long"}}"#;
    for (act, status) in [(Act::Cut, 502), (Act::Status(400, refusal), 400)] {
        let world = World::start(Plan {
            prefill_hook: always(Act::Hang),
            decode_hook: always(act),
            ..sglang()
        })
        .await;
        let reply = world.ask(COMPLETIONS, &completion(1, false)).await;
        assert_eq!(reply.status, status, "{}", reply.text);
        world.is_clean().await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_closes_both_legs() {
    let world = World::start(Plan {
        prefill_hook: always(Act::Hang),
        decode_hook: always(Act::Hang),
        ..sglang()
    })
    .await;
    world
        .leave(&completion(1, true), || {
            world.prefill_gate.requests() == 1 && world.decode_gate.requests() == 1
        })
        .await;
    eventually("over", || world.metrics.open() == 0).await;
    world.is_clean().await;
    assert_eq!(world.metrics.ended("left"), 1);
}

#[tokio::test]
async fn a_decode_that_streams_needs_its_prefill_no_more() {
    // The prefill leg's answer breaks off when its cache is taken and the stream has begun, which is slow.
    let has_begun = Arc::new(Notify::new());
    let world = World::start(Plan {
        prefill_hook: always(Act::CutOn(Arc::clone(&has_begun))),
        decode: EngineConfig {
            speed: 1.0,
            decode_ms: 50.0,
            ..engine(Role::Decode)
        },
        ..sglang()
    })
    .await;
    let mut body = world
        .drive(COMPLETIONS, &completion(1, true))
        .await
        .into_body();
    let mut text = Vec::new();
    while let Some(frame) = body.frame().await {
        has_begun.notify_one();
        text.extend_from_slice(&frame.unwrap().into_data().unwrap());
    }
    assert!(text.ends_with(b"data: [DONE]\n\n"));
    world.is_clean().await;
    assert_eq!(world.metrics.ended("split"), 1);
}
