//! `kvlane serve` in front of a prefill and a decode worker.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use kvlane::Role;
use kvlane_sidecar::config::{Config, WorkerConfig};
use kvlane_sidecar::engine::{Engine, EngineConfig, EngineHandle};
use kvlane_sidecar::serve::{ServeHandle, start};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::served::{COMPLETIONS, completion, read};
use crate::world::engine;

/// Splits wherever a stream would wait: gaps are dear, and the link is quick.
const DEAR_GAPS: &str = "handoff: {kv_bytes_per_token: 64, link_bytes_per_second: 1e12, planner: \
    {itl_objective_seconds: 1e-6, assumed_prefill_tokens_per_second: 1000, transfer_stall_seconds_per_token: 0}}";

struct Served {
    prefill: EngineHandle,
    decode: EngineHandle,
    sidecar: ServeHandle,
}

async fn serve(yaml: &str) -> Served {
    let prefill = Engine::start(engine(Role::Prefill)).await.unwrap();
    let decode = Engine::start(EngineConfig {
        speed: 1.0,
        ..engine(Role::Decode)
    })
    .await
    .unwrap();
    let yaml = format!(
        "listen: '127.0.0.1:0'\nadmin: '127.0.0.1:0'\nhealth_interval_seconds: 0.1\n{yaml}"
    );
    let mut config = Config::from_yaml(&yaml, "test").unwrap();
    for (id, role, url) in [
        ("p", Role::Prefill, prefill.url()),
        ("d", Role::Decode, decode.url()),
    ] {
        let mut worker = WorkerConfig::new(id, &url).unwrap();
        worker.role = role;
        config.workers.push(worker);
    }
    let sidecar = start(config).await.unwrap();
    Served {
        prefill,
        decode,
        sidecar,
    }
}

async fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    body: String,
) -> hyper::Response<Incoming> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "test")
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))
        .unwrap();
    sender.send_request(request).await.unwrap()
}

impl Served {
    async fn post(&self, body: &Value) -> hyper::Response<Incoming> {
        send(
            self.sidecar.proxy_addr,
            "POST",
            COMPLETIONS,
            body.to_string(),
        )
        .await
    }

    async fn ask(&self, body: &Value) -> (u16, String) {
        let response = self.post(body).await;
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(bytes.to_vec()).unwrap())
    }

    /// Begins a stream of tokens 5 ms apart, which lasts as long as its body is there.
    async fn stream(&self) -> Incoming {
        let mut body = completion(9_000, true);
        body["max_tokens"] = json!(4_000);
        let mut stream = self.post(&body).await.into_body();
        stream.frame().await.unwrap().unwrap();
        stream
    }

    async fn admin(&self, path: &str) -> String {
        let response = send(self.sidecar.admin_addr, "GET", path, String::new()).await;
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    async fn report(&self) -> Value {
        let report: Value = serde_json::from_str(&self.admin("/v1/handoff").await).unwrap();
        report["handoff"].clone()
    }

    async fn splits(&self) -> u64 {
        let text = self.admin("/metrics").await;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("kvlane_handoffs_total{outcome=\"split\"} "));
        line.map_or(0, |value| value.parse().unwrap())
    }
}

#[tokio::test]
async fn a_prompt_that_would_stall_a_stream_is_split() {
    let served = serve(DEAR_GAPS).await;
    // Nobody is to be spared yet.
    let (status, text) = served.ask(&completion(1, false)).await;
    assert_eq!((status, served.splits().await), (200, 0), "{text}");
    let expected = read(&text).0;
    let stream = served.stream().await;
    for (number, body) in [completion(1_000, false), completion(2_000, true)]
        .iter()
        .enumerate()
    {
        let (status, text) = served.ask(body).await;
        assert_eq!(status, 200, "{text}");
        assert!(!text.contains("remote_host"));
        assert_ne!(read(&text).0, expected);
        assert_eq!(
            served.decode.transfers().fetched,
            number as u64 + 1,
            "{text}"
        );
    }
    drop(stream);
    assert_eq!(served.splits().await, 2);
    assert_eq!(served.prefill.transfers().collected, 2);
    let report = served.report().await;
    let plan = &report["plans"][0]["plan"];
    assert_eq!(plan["options"][0]["route"], "pair", "{report}");
    assert_ne!(plan["decided_by"], "ttft", "{report}");
    assert_eq!(report["links"][0]["link"], "configured");
    assert_eq!(report["plans"].as_array().unwrap().len(), 4);
}

#[tokio::test]
async fn prompts_on_their_way_do_not_keep_others_from_being_split() {
    let served = Arc::new(serve(DEAR_GAPS).await);
    let stream = served.stream().await;
    let mut tasks = tokio::task::JoinSet::new();
    for number in 1..=8 {
        let served = Arc::clone(&served);
        tasks.spawn(async move { served.ask(&completion(1_000 * number, false)).await });
    }
    while let Some(answer) = tasks.join_next().await {
        let (status, text) = answer.unwrap();
        assert_eq!(status, 200, "{text}");
    }
    drop(stream);
    assert_eq!(served.splits().await, 8);
}

#[tokio::test]
async fn what_cannot_be_split_and_what_was_not_asked_for_is_served_by_one() {
    let served = serve(DEAR_GAPS).await;
    let stream = served.stream().await;
    let mut several = completion(1_000, false);
    several["n"] = json!(2);
    assert_eq!(served.ask(&several).await.0, 200);
    assert_eq!(served.prefill.transfers().handed_over, 0);
    drop(stream);

    let served = serve("").await;
    assert_eq!(served.report().await, Value::Null);
    let stream = served.stream().await;
    assert_eq!(served.ask(&completion(1_000, false)).await.0, 200);
    assert_eq!(served.prefill.transfers().handed_over, 0);
    drop(stream);
}

#[tokio::test]
async fn speeds_are_learned_from_streams_that_one_worker_serves() {
    let served = serve(DEAR_GAPS).await;
    for (number, tokens) in [(1, 64), (2, 1_000), (3, 2_000), (4, 4_000)] {
        let begin: u32 = 10_000 * number;
        let mut body = completion(0, true);
        body["prompt"] = json!((begin..begin + tokens).collect::<Vec<u32>>());
        assert_eq!(served.ask(&body).await.0, 200);
    }
    let report = served.report().await;
    let known = &report["prefill"][0];
    assert_eq!(known["worker"]["worker"], "d", "{report}");
    assert_eq!(known["measurements"], 4);
    // The engine computes 22,646 tokens a second; the machine may be busy.
    let speed = known["tokens_per_second"].as_f64().unwrap();
    assert!((5_000.0..60_000.0).contains(&speed), "{report}");
}

#[tokio::test]
async fn a_prefill_worker_that_is_gone_costs_nobody_an_answer() {
    let served = serve(DEAR_GAPS).await;
    let stream = served.stream().await;
    let Served {
        prefill,
        decode,
        sidecar,
    } = served;
    prefill.shutdown().await;
    let response = send(
        sidecar.proxy_addr,
        "POST",
        COMPLETIONS,
        completion(1_000, false).to_string(),
    )
    .await;
    assert_eq!(response.status(), 200);
    assert_eq!(decode.transfers().fetched, 0);
    drop(stream);
}
