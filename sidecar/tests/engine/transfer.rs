//! Handoffs between two engines: KV that moves, and parameters that are refused.

use std::net::SocketAddr;
use std::time::Duration;

use kvlane::Role;
use kvlane_sidecar::engine::{EngineConfig, EngineHandle, Refusal, TransferConfig};
use serde_json::{Value, json};

use crate::client::{Answer, cached_tokens, get, post, send};
use crate::{eventually, fast, start};

const PATH: &str = "/v1/completions";

fn engine(role: Role, lease: Duration) -> EngineConfig {
    let listen = SocketAddr::from(([127, 0, 0, 1], 0));
    EngineConfig {
        role,
        transfer: Some(TransferConfig {
            lease,
            ..TransferConfig::new(listen)
        }),
        ..fast()
    }
}

async fn pair(lease: Duration) -> (EngineHandle, EngineHandle) {
    (
        start(engine(Role::Prefill, lease)).await,
        start(engine(Role::Decode, lease)).await,
    )
}

const LONG: Duration = Duration::from_secs(60);

fn prompt(first: u32) -> Value {
    json!((first..first + 50).collect::<Vec<u32>>())
}

async fn prefill(engine: &EngineHandle, prompt: &Value) -> Value {
    let body = json!({"prompt": prompt, "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false}});
    let answer = post(engine, PATH, &body).await.json();
    answer["kv_transfer_params"].clone()
}

async fn decode(engine: &EngineHandle, prompt: &Value, parameters: &Value) -> Answer {
    let body = json!({"prompt": prompt, "max_tokens": 5, "kv_transfer_params": parameters});
    post(engine, PATH, &body).await
}

#[tokio::test]
async fn a_handed_over_prompt_is_answered_as_by_one_engine() {
    let (p, d) = pair(LONG).await;
    let alone = start(fast()).await;
    let chat =
        json!({"messages": [{"role": "user", "content": "word ".repeat(60)}], "max_tokens": 5});
    let completion = json!({"prompt": prompt(7), "max_tokens": 5});
    for (path, body) in [("/v1/chat/completions", chat), (PATH, completion)] {
        let expected = post(&alone, path, &body).await.json();
        for stream in [false, true] {
            let mut leg = body.clone();
            leg["max_tokens"] = json!(1);
            leg["kv_transfer_params"] =
                json!({"do_remote_decode": true, "do_remote_prefill": false});
            let parameters = post(&p, path, &leg).await.json()["kv_transfer_params"].take();
            assert_eq!(parameters["do_remote_prefill"], true, "{parameters}");
            let tokens = parameters["remote_num_tokens"].as_u64().unwrap();
            let blocks = parameters["remote_block_ids"][0].as_array().unwrap().len();
            assert_eq!(blocks as u64, tokens.div_ceil(16));
            assert_eq!((p.transfers().held, p.stats().used_blocks), (1, blocks));

            let mut leg = body.clone();
            leg["kv_transfer_params"] = parameters;
            leg["stream"] = json!(stream);
            let answer = post(&d, path, &leg).await;
            assert_eq!(answer.status, 200, "{}", answer.text);
            if stream {
                assert!(answer.text.ends_with("data: [DONE]\n\n"));
            } else {
                let answer = answer.json();
                let text = |answer: &Value| {
                    let choice = &answer["choices"][0];
                    format!("{}{}", choice["text"], choice["message"]["content"])
                };
                assert_eq!(text(&answer), text(&expected));
                // All but the last token, whose output is needed.
                assert_eq!(cached_tokens(&answer), tokens - 1);
                assert_eq!(answer["usage"]["prompt_tokens"], tokens);
            }
            eventually("freed", || p.stats().used_blocks == 0).await;
        }
    }
    assert_eq!(p.transfers().handed_over, 4);
    assert_eq!((p.transfers().collected, d.transfers().fetched), (4, 4));
    eventually("freed", || d.stats().used_blocks == 0).await;
    for reason in Refusal::ALL {
        assert_eq!(d.transfers().refused(reason), 0, "{reason}");
    }
}

#[tokio::test]
async fn parameters_are_good_for_one_use_by_their_own_prompt() {
    let (p, d) = pair(LONG).await;
    let parameters = prefill(&p, &prompt(1)).await;
    let cases = [
        ("remote_request_id", json!("cmpl-1-0-2"), Refusal::Unknown),
        ("remote_engine_id", json!("before"), Refusal::OtherEngine),
        ("remote_port", json!(1), Refusal::Unreachable),
        ("remote_host", Value::Null, Refusal::Incomplete),
    ];
    for (name, value, reason) in cases {
        let mut wrong = parameters.clone();
        wrong[name] = value;
        let answer = decode(&d, &prompt(1), &wrong).await;
        assert_eq!(answer.status, 500);
        assert!(answer.text.contains(reason.as_str()), "{}", answer.text);
        assert_eq!(d.transfers().refused(reason), 1);
    }
    assert_eq!(decode(&d, &prompt(2), &parameters).await.status, 500);
    assert_eq!(d.transfers().refused(Refusal::Foreign), 1);
    assert_eq!(decode(&d, &prompt(1), &parameters).await.status, 200);
    assert_eq!(decode(&d, &prompt(1), &parameters).await.status, 500);
    assert_eq!(d.transfers().refused(Refusal::Used), 1);
    let page = get(&d, "/metrics").await.text;
    let line = r#"kvlane_engine_refused_fetches_total{reason="used"} 1"#;
    assert!(page.contains(line), "{page}");
}

#[tokio::test]
async fn what_nobody_fetches_is_freed_with_its_lease() {
    let (p, d) = pair(Duration::from_millis(50)).await;
    let parameters = prefill(&p, &prompt(1)).await;
    assert_eq!(p.transfers().handed_over, 1);
    eventually("the lease ends", || p.stats().used_blocks == 0).await;
    assert_eq!((p.transfers().held, p.transfers().expired), (0, 1));
    assert_eq!(decode(&d, &prompt(1), &parameters).await.status, 500);
    assert_eq!(d.transfers().refused(Refusal::Expired), 1);
}

#[tokio::test]
async fn a_full_engine_waits_for_a_lease_and_goes_on() {
    // 5 blocks of 16 tokens: a prompt of 50 tokens needs 4.
    let p = start(EngineConfig {
        kv_blocks: 6,
        ..engine(Role::Prefill, Duration::from_millis(200))
    })
    .await;
    assert_ne!(prefill(&p, &prompt(1)).await, Value::Null);
    assert_ne!(prefill(&p, &prompt(100)).await, Value::Null);
    assert_eq!(p.transfers().expired, 1);
}

#[tokio::test]
async fn a_prefill_whose_client_leaves_holds_nothing() {
    // 50 tokens at 100 a second take half a second.
    let p = start(EngineConfig {
        speed: 1.0,
        prefill_tokens_per_second: 100.0,
        ..engine(Role::Prefill, LONG)
    })
    .await;
    let body = json!({"prompt": prompt(1), "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": true}})
    .to_string();
    let leaving = send(
        &p,
        "POST",
        PATH,
        &[("content-type", "application/json")],
        &body,
    );
    let runs = eventually("it runs", || p.stats().running_requests == 1);
    tokio::select! {
        _ = leaving => panic!("it was answered"),
        () = runs => {}
    }
    eventually("aborted", || {
        p.stats().aborted_requests + p.stats().finished_requests == 1
    })
    .await;
    eventually("freed", || p.stats().used_blocks == 0).await;
    assert_eq!(p.transfers().held, 0);
}

#[tokio::test]
async fn an_engine_without_connector_ignores_the_field() {
    let engine = start(fast()).await;
    assert_eq!(prefill(&engine, &prompt(1)).await, Value::Null);
    let parameters = json!({"do_remote_prefill": true, "remote_host": null});
    assert_eq!(decode(&engine, &prompt(1), &parameters).await.status, 200);
}
