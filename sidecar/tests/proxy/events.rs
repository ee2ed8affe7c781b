//! The proxy in front of simulated engines, with real KV events between them.

use kvlane_sidecar::config::WorkerConfig;
use kvlane_sidecar::engine::{Engine, EngineConfig, EngineHandle};
use kvlane_sidecar::serve::ServeHandle;
use serde_json::{Value, json};

use crate::client::post;
use crate::setup::{admin, eventually, sidecar_to};

async fn engine(silent: bool) -> EngineHandle {
    let mut config = EngineConfig {
        speed: 1000.0,
        ..EngineConfig::ephemeral()
    };
    config.events.as_mut().unwrap().silent = silent;
    Engine::start(config).await.unwrap()
}

async fn in_front_of(engines: &[&EngineHandle]) -> ServeHandle {
    let handle = sidecar_to(&[], |config| {
        config.router.silent_worker_requests = 4;
        for (index, engine) in engines.iter().enumerate() {
            let mut worker = WorkerConfig::new(&format!("w{}", index + 1), &engine.url()).unwrap();
            worker.events = engine.events_endpoint().map(str::to_owned);
            worker.replay = engine.replay_endpoint().map(str::to_owned);
            config.workers.push(worker);
        }
    })
    .await;
    eventually("ready", || async {
        admin(&handle, "GET", "/readyz", "").await.status == 200
    })
    .await;
    handle
}

async fn complete(handle: &ServeHandle, tokens: &[u32]) -> Value {
    let body = json!({"prompt": tokens, "max_tokens": 2});
    let answer = post(handle.proxy_addr, "/v1/completions", &body.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

async fn trust(handle: &ServeHandle, worker: usize) -> Value {
    let list = admin(handle, "GET", "/v1/workers", "").await.json();
    list["workers"][worker]["trust"][0].clone()
}

fn prompt(number: u32, length: u32) -> Vec<u32> {
    (0..length)
        .map(|index| 100 + number * 1000 + index)
        .collect()
}

#[tokio::test]
async fn events_make_a_worker_exact_and_its_blocks_count_until_it_is_removed() {
    let (one, two) = (engine(false).await, engine(false).await);
    let handle = in_front_of(&[&one, &two]).await;
    let tokens = prompt(1, 320);
    complete(&handle, &tokens).await;
    let ask = json!({"tokens": tokens}).to_string();
    let overlap =
        || async { admin(&handle, "POST", "/v1/overlap", &ask).await.json()["overlap"].clone() };
    let exact = || async {
        trust(&handle, 0).await["state"] == "exact" || trust(&handle, 1).await["state"] == "exact"
    };
    eventually("exact", exact).await;
    let usage = complete(&handle, &tokens).await["usage"].clone();
    // The engine computes the last block anew, so 19 of the 20 blocks are cached.
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 304);
    let found = overlap().await;
    assert_eq!(found.as_array().unwrap().len(), 1, "{found}");
    let owner = found[0]["worker"].as_str().unwrap().to_owned();
    assert_eq!(
        admin(&handle, "DELETE", &format!("/v1/workers/{owner}"), "")
            .await
            .status,
        200
    );
    assert_eq!(overlap().await, json!([]));
    drop(handle);
    one.shutdown().await;
    two.shutdown().await;
}

#[tokio::test]
async fn a_silent_worker_becomes_approximate_with_a_cause_and_repeats_still_hit() {
    let one = engine(true).await;
    let handle = in_front_of(&[&one]).await;
    for number in 0..8 {
        complete(&handle, &prompt(number, 64)).await;
    }
    eventually("approximate", || async {
        trust(&handle, 0).await["state"] == "approximate"
    })
    .await;
    let cause = trust(&handle, 0).await["cause"].clone();
    assert!(
        cause.as_str().is_some_and(|cause| cause.contains("event")),
        "{cause}"
    );
    let metrics = admin(&handle, "GET", "/metrics", "").await.text();
    assert!(
        metrics.contains("kvlane_trust_state{worker=\"w1\",dp_rank=\"0\",state=\"approximate\"} 1")
    );
    let body = json!({"tokens": prompt(1, 64)}).to_string();
    let known = admin(&handle, "POST", "/v1/overlap", &body).await.json();
    assert_eq!(
        known["overlap"][0]["worker"], "w1",
        "own placements stand in"
    );
    drop(handle);
    one.shutdown().await;
}
