//! `kvlane serve` in front of a prefill and a decode worker.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use kvlane::Role;
use kvlane_sidecar::config::{Config, WorkerConfig};
use kvlane_sidecar::engine::{Engine, EngineConfig, EngineHandle, KvProtocol};
use kvlane_sidecar::serve::ServeHandle;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::eventually;
use crate::served::{COMPLETIONS, completion, read};
use crate::world::{engine, start_at_free_addresses};

/// Splits wherever a stream would wait: gaps are dear, and the link is quick.
const DEAR_GAPS: &str = "handoff: {kv_bytes_per_token: 64, link_bytes_per_second: 1e12, planner: \
    {itl_objective_seconds: 1e-6, assumed_prefill_tokens_per_second: 1000, transfer_stall_seconds_per_token: 0}}";

struct Served {
    prefill: EngineHandle,
    decode: EngineHandle,
    sidecar: ServeHandle,
}

async fn serve(yaml: &str) -> Served {
    serve_with(KvProtocol::Nixl, yaml, |_| {}).await
}

/// Starts two engines that hand over so, and a sidecar that knows of them what `change` leaves.
async fn serve_with(
    protocol: KvProtocol,
    yaml: &str,
    change: impl Fn(&mut WorkerConfig),
) -> Served {
    let start = |mut config: EngineConfig| async move {
        if let Some(transfer) = &mut config.transfer {
            transfer.protocol = protocol;
        }
        Engine::start(config).await.unwrap()
    };
    // Some start it again where it was.
    let (prefill, _) = start_at_free_addresses(prefill_engine(protocol)).await;
    let decode = start(EngineConfig {
        speed: 1.0,
        ..engine(Role::Decode)
    })
    .await;
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
        worker.bootstrap_port = prefill.bootstrap_address().map(|address| address.port());
        change(&mut worker);
        config.workers.push(worker);
    }
    let splits = config.handoff.is_some();
    let sidecar = kvlane_sidecar::serve::start(config).await.unwrap();
    let served = Served {
        prefill,
        decode,
        sidecar,
    };
    // Ready only when both workers were asked what they are: nothing is handed over before.
    while served.admin("/readyz").await.contains("false") {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    if splits {
        let report = served.report().await;
        assert_eq!(report["workers"].as_array().unwrap().len(), 2, "{report}");
    }
    served
}

fn prefill_engine(protocol: KvProtocol) -> EngineConfig {
    let mut config = engine(Role::Prefill);
    if let Some(transfer) = &mut config.transfer {
        transfer.protocol = protocol;
    }
    config
}

/// Asks for a path and returns the body.
pub(crate) async fn get(address: SocketAddr, path: &str) -> String {
    whole(send(address, "GET", path, String::new()).await)
        .await
        .1
}

/// Sends a body and returns status and answer.
pub(crate) async fn post(address: SocketAddr, path: &str, body: &Value) -> (u16, String) {
    whole(send(address, "POST", path, body.to_string()).await).await
}

async fn whole(response: hyper::Response<Incoming>) -> (u16, String) {
    let status = response.status().as_u16();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(bytes.to_vec()).unwrap())
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
        whole(self.post(body).await).await
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
        get(self.sidecar.admin_addr, path).await
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
    // It hears of the end a moment after the client does.
    eventually("collected", || served.prefill.transfers().collected == 2).await;
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
    // Only the decode leg would be refused, when the prefill worker holds a cache for it already.
    for (name, value) in [
        ("max_tokens", json!(0)),
        ("max_tokens", json!("5")),
        ("max_tokens", json!(14_800)),
        ("stream_options", json!({"include_usage": true})),
    ] {
        let mut body = completion(1_000, false);
        body[name] = value;
        let (status, text) = served.ask(&body).await;
        assert_eq!(status, 400, "{name}: {text}");
    }
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
    let prompts = [64, 1_000, 2_000, 4_000].into_iter().cycle();
    for (number, tokens) in (1_u32..).zip(prompts) {
        let begin = 10_000 * number;
        let mut body = completion(0, true);
        body["prompt"] = json!((begin..begin + tokens).collect::<Vec<u32>>());
        assert_eq!(served.ask(&body).await.0, 200);
        let report = served.report().await;
        let known = &report["prefill"][0];
        assert_eq!(known["worker"]["worker"], "d", "{report}");
        assert_eq!(known["measurements"], number);
        // The engine computes 22,646 tokens a second. A machine that stalls spoils a measurement; those after it mend it.
        let speed = known["tokens_per_second"].as_f64();
        assert_eq!(
            speed.is_some(),
            number > 2,
            "short ones tell none: {report}"
        );
        let speed = speed.unwrap_or(0.0);
        if number >= 4 && (5_000.0..60_000.0).contains(&speed) {
            break;
        }
        assert!(number < 60, "{report}");
    }
    served.sidecar.app().remove_worker("d").unwrap();
    for _ in 0..1_000 {
        let report = served.report().await;
        if report["prefill"].as_array().is_some_and(Vec::is_empty) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!(
        "a worker that is gone is still known: {}",
        served.report().await
    );
}

#[tokio::test]
async fn nothing_is_split_before_a_speed_is_known() {
    let unknown = DEAR_GAPS.replace("assumed_prefill_tokens_per_second: 1000,", "");
    let served = serve(&unknown).await;
    let stream = served.stream().await;
    for number in 1..5 {
        let (status, text) = served.ask(&completion(1_000 * number, true)).await;
        assert_eq!((status, served.splits().await), (200, 0), "{text}");
    }
    let decisions: Value = serde_json::from_str(&served.admin("/v1/decisions").await).unwrap();
    let handoff = &decisions["decisions"][0]["handoff"];
    assert_eq!(handoff["not_split"], "speed_not_known", "{decisions}");
    let mut long = completion(0, true);
    long["prompt"] = json!((50_000..51_500).collect::<Vec<u32>>());
    assert_eq!(served.ask(&long).await.0, 200);
    assert_eq!(served.splits().await, 0);
    assert_eq!(served.ask(&completion(9_000, true)).await.0, 200);
    assert_eq!(served.splits().await, 1, "{}", served.report().await);
    drop(stream);
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

#[tokio::test]
async fn workers_are_asked_how_they_hand_over() {
    for protocol in [KvProtocol::Sglang, KvProtocol::Mooncake] {
        let served = serve_with(protocol, DEAR_GAPS, |_| {}).await;
        let stream = served.stream().await;
        let before = served.splits().await;
        for (number, body) in [completion(1_000, false), completion(2_000, true)]
            .iter()
            .enumerate()
        {
            let (status, text) = served.ask(body).await;
            assert_eq!(status, 200, "{protocol:?}: {text}");
            assert!(!read(&text).0.is_empty());
            assert_eq!(served.splits().await, before + number as u64 + 1);
        }
        drop(stream);
        let report = served.report().await;
        let name = format!("{protocol:?}").to_lowercase();
        assert_eq!(report["workers"][0]["told"]["connector"], name, "{report}");
        assert!(
            report["workers"][1]["group"]
                .as_str()
                .unwrap()
                .ends_with(&name)
        );
    }
}

#[tokio::test]
async fn a_decoder_that_cannot_prefill_is_given_nothing_whole() {
    let served = serve_with(KvProtocol::Sglang, DEAR_GAPS, |_| {}).await;
    // Nobody is to be spared, and still it is split: there is no other way.
    let (status, text) = served.ask(&completion(1, false)).await;
    assert_eq!((status, served.splits().await), (200, 1), "{text}");
    let mut several = completion(1_000, false);
    several["n"] = json!(2);
    let (status, text) = served.ask(&several).await;
    assert_eq!(status, 503, "{text}");
    assert_eq!(served.decode.stats().finished_requests, 1);
}

#[tokio::test]
async fn an_engine_that_restarts_is_asked_again() {
    let served = serve_with(KvProtocol::Mooncake, DEAR_GAPS, |_| {}).await;
    let stream = served.stream().await;
    assert_eq!(served.ask(&completion(1_000, false)).await.0, 200);
    let Served {
        prefill,
        decode,
        sidecar,
    } = served;
    let (listen, bootstrap) = (prefill.address(), prefill.bootstrap_address().unwrap());
    prefill.shutdown().await;
    let mut again = EngineConfig {
        listen,
        ..prefill_engine(KvProtocol::Mooncake)
    };
    if let Some(transfer) = &mut again.transfer {
        transfer.bootstrap = bootstrap;
    }
    let prefill = Engine::start(again).await.unwrap();
    let served = Served {
        prefill,
        decode,
        sidecar,
    };
    // Each is answered, by whoever can; once its new id is known the prefill engine takes part again.
    let mut number = 2_000;
    while served.prefill.transfers().collected == 0 {
        number += 100;
        assert!(number < 60_000, "{}", served.report().await);
        assert_eq!(served.ask(&completion(number, false)).await.0, 200);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(stream);
}

#[tokio::test]
async fn workers_of_two_versions_are_no_pair_and_the_plan_says_so() {
    let served = serve_with(KvProtocol::Nixl, DEAR_GAPS, |worker| {
        if worker.role == Role::Decode {
            let version = "0.31.0".to_owned();
            worker.labels.insert("version".to_owned(), version);
        }
    })
    .await;
    let stream = served.stream().await;
    assert_eq!(served.ask(&completion(1_000, false)).await.0, 200);
    assert_eq!(served.splits().await, 0);
    let report = served.report().await;
    let excluded = &report["plans"][0]["plan"]["excluded"][0];
    assert_eq!(excluded["reason"], "other_group", "{report}");
    assert!(
        excluded["groups"][0].as_str().unwrap().contains("0.32.0"),
        "{report}"
    );
    assert!(
        excluded["groups"][1].as_str().unwrap().contains("0.31.0"),
        "{report}"
    );
    drop(stream);
}

#[tokio::test]
async fn a_link_between_hosts_has_its_own_speed() {
    let listed = DEAR_GAPS.replacen(
        "planner:",
        "links: [{from: rack-1, to: '*', bytes_per_second: 5e11}], planner:",
        1,
    );
    let served = serve_with(KvProtocol::Nixl, &listed, |worker| {
        worker.labels.insert("host".to_owned(), "rack-1".to_owned());
    })
    .await;
    let stream = served.stream().await;
    assert_eq!(served.ask(&completion(1_000, false)).await.0, 200);
    let report = served.report().await;
    assert_eq!(
        report["plans"][0]["plan"]["options"][0]["link"], "rack-1→*",
        "{report}"
    );
    assert_eq!(report["links"].as_array().unwrap().len(), 2);
    drop(stream);
}

#[tokio::test]
async fn a_decision_says_what_its_plan_chose_and_why() {
    let served = serve(&format!("{DEAR_GAPS}\ndebug_headers: true")).await;
    let stream = served.stream().await;
    let response = served.post(&completion(1_000, false)).await;
    let headers = response.headers().clone();
    assert_eq!(headers["x-kvlane-prefill-worker"], "p");
    assert_eq!(headers["x-kvlane-worker"], "d");
    whole(response).await;
    let decisions: Value = serde_json::from_str(&served.admin("/v1/decisions").await).unwrap();
    // The newest first: both of the pair, then that of the stream.
    let all = decisions["decisions"].as_array().unwrap();
    for decision in &all[..2] {
        assert_eq!(decision["handoff"]["route"], "pair", "{decision}");
        assert_eq!(decision["handoff"]["link_speed_from"], "seed", "{decision}");
        let why = decision["handoff"]["decided_by"].as_str().unwrap();
        assert!(["itl", "both"].contains(&why), "{decision}");
    }
    assert_eq!(all[2]["handoff"]["route"], "single", "{}", all[2]);
    drop(stream);
}

#[tokio::test]
async fn gaps_between_tokens_are_learned_from_streams_that_pass() {
    let served = serve(DEAR_GAPS).await;
    let mut stream = served.stream().await;
    for number in 1_u32.. {
        for _ in 0..30 {
            stream.frame().await.unwrap().unwrap();
        }
        let mut body = completion(0, true);
        let first = 10_000 * number;
        body["prompt"] = json!((first..first + 1_500).collect::<Vec<u32>>());
        assert_eq!(served.ask(&body).await.0, 200);
        let report = served.report().await;
        let all = report["prefill"].as_array().unwrap();
        let known = all.iter().find(|known| known["worker"]["worker"] == "d");
        // The engine takes 5 ms for each token. A machine that stalls spoils a measurement; those after it mend it.
        let gap = known.and_then(|known| known["gap_seconds"].as_f64());
        let stalls = known.and_then(|known| known["stall_measurements"].as_u64());
        if number >= 4 && gap.is_some_and(|gap| (0.002..0.05).contains(&gap)) && stalls > Some(0) {
            break;
        }
        assert!(number < 40, "{report}");
    }
}
