//! Protocols whose legs run at once. The simulated engines ignore their fields and serve both legs, so this shows what the
//! driver does and not that a cache moves.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use kvlane_sidecar::handoff::{FallbackReason, Sglang};
use parking_lot::Mutex;
use serde_json::Value;

use crate::eventually;
use crate::gate::{Act, Hook, always, first};
use crate::served::{COMPLETIONS, alone, completion, read};
use crate::world::{Plan, World};

fn sglang() -> Plan {
    Plan {
        protocol: Some(Arc::new(Sglang)),
        ..Plan::default()
    }
}

/// Keeps the bodies that pass.
fn keeping(bodies: Arc<Mutex<Vec<Value>>>) -> Hook {
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
async fn a_prefill_that_fails_cancels_the_decode_that_waits_for_it() {
    let expected = alone(COMPLETIONS, &completion(1, false)).await;
    let world = World::start(Plan {
        prefill_hook: always(Act::Status(500, "{}")),
        decode_hook: first(Act::Hang),
        ..sglang()
    })
    .await;
    let reply = world.ask(COMPLETIONS, &completion(1, true)).await;
    assert_eq!(read(&reply.text).0, expected);
    world.is_clean().await;
    assert_eq!(world.decode_gate.requests(), 2);
    assert_eq!(world.metrics.fallbacks(FallbackReason::PrefillFailed), 1);
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
    let body = completion(1, true);
    let asking = world.ask(COMPLETIONS, &body);
    let left = tokio::time::timeout(Duration::from_millis(200), asking).await;
    assert!(left.is_err());
    eventually("over", || world.metrics.open() == 0).await;
    world.is_clean().await;
    assert_eq!(world.metrics.ended("left"), 1);
}

#[tokio::test]
async fn a_decode_that_streams_needs_its_prefill_no_more() {
    // The prefill leg fails long after the stream has begun.
    let late: Hook = Arc::new(|_, _| {
        Box::pin(async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            Act::Cut
        })
    });
    let world = World::start(Plan {
        prefill_hook: late,
        ..sglang()
    })
    .await;
    let mut body = world
        .drive(COMPLETIONS, &completion(1, true))
        .await
        .into_body();
    let mut text = Vec::new();
    while let Some(frame) = body.frame().await {
        text.extend_from_slice(&frame.unwrap().into_data().unwrap());
    }
    assert!(text.ends_with(b"data: [DONE]\n\n"));
    world.is_clean().await;
    assert_eq!(world.metrics.ended("split"), 1);
}
