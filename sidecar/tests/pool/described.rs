//! A bare URL is enough: the rest is learned from the engine, and contradictions are named.

use kvlane::{BlockSize, Role};
use kvlane_sidecar::config::WorkerConfig;
use kvlane_sidecar::pool::sources::Absence;
use serde_json::json;

use crate::client::post;
use crate::setup::{
    admin, engine, eventually, metrics, sidecar, sighting, source, until_state, worker,
};
use crate::stub::Stub;

fn bare(id: &str, url: &str) -> WorkerConfig {
    WorkerConfig::new(id, url).unwrap()
}

fn ranks(count: usize, born: u32) -> String {
    let rank = |rank| format!("vllm:num_requests_running{{engine=\"{rank}\"}} 0\n");
    let all: String = (0..count).map(rank).collect();
    format!("{all}process_start_time_seconds {born}\n")
}

#[tokio::test]
async fn events_of_a_bare_url_are_followed_until_its_worker_is_exact() {
    let engine = engine(1.0).await;
    let handle = sidecar(|config| config.workers.push(bare("w", &engine.url()))).await;
    until_state(&handle, "w", "ready").await;
    let member = || handle.app().fleet.worker("w").unwrap();
    eventually("described", || member().version().is_some()).await;
    let is_exact = || {
        let info = handle.router.workers(std::time::Instant::now()).remove(0);
        info.trust[0].state == kvlane::TrustState::Exact && info.kv_capacity_blocks.is_some()
    };
    let mut number = 0;
    while !is_exact() {
        assert!(number < 200, "no event was applied");
        let prompt = format!("w{number} w2 w3 ").repeat(30);
        let body = json!({"model": "sim", "prompt": prompt, "max_tokens": 1}).to_string();
        assert_eq!(
            post(handle.proxy_addr, "/v1/completions", &body)
                .await
                .status,
            200
        );
        number += 1;
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let shown = worker(&handle, "w").await;
    assert_eq!(shown["events"].as_str(), engine.events_endpoint());
    assert_eq!(shown["replay"].as_str(), engine.replay_endpoint());
    assert_eq!(shown["engine"]["model"], "sim");
    assert_eq!(shown["engine"]["block_size"], 16);
    assert_eq!(shown["engine"]["kv_blocks"], 926);
    assert_eq!(shown["mismatches"], json!([]));
    assert!(shown["index_blocks"]["device"].as_u64() > Some(0));
    assert!(member().version().is_some());
}

#[tokio::test]
async fn a_contradiction_is_named_everywhere() {
    let engine = engine(1.0).await;
    let handle = sidecar(|config| {
        let mut worker = bare("w", &engine.url());
        worker.block_size = Some(BlockSize::new(32).unwrap());
        worker.role = Role::Decode;
        config.workers.push(worker);
    })
    .await;
    let member = || handle.app().fleet.worker("w").unwrap();
    eventually("a mismatch", || !member().mismatches().is_empty()).await;
    let shown = worker(&handle, "w").await;
    let expected = "block_size is 32 here and 16 in the engine";
    assert_eq!(shown["mismatches"], json!([expected]));
    let text = metrics(&handle).await;
    assert!(
        text.contains("kvlane_worker_mismatches{worker=\"w\"} 1"),
        "{text}"
    );
}

#[tokio::test]
async fn ranks_and_role_are_the_engines_and_an_operators_drain_outlives_the_change() {
    let stub = Stub::start().await;
    let handle = sidecar(|config| config.workers.push(bare("w", &stub.url))).await;
    until_state(&handle, "w", "ready").await;
    admin(&handle, "POST", "/v1/workers/w/drain", "").await;
    let before = worker(&handle, "w").await;
    assert_eq!(before["dp_ranks"], 1);
    stub.say(
        "/server_info",
        &json!({"version": "0.5.23", "disaggregation_mode": "prefill"}),
    );
    stub.say_metrics(&ranks(2, 1));
    let member = || handle.app().fleet.worker("w").unwrap();
    eventually("two ranks", || member().config.dp_ranks == 2).await;
    eventually("probed anew", || member().healthy() == Some(true)).await;
    eventually("its role", || member().role() == Role::Prefill).await;
    let after = worker(&handle, "w").await;
    assert!(after["epoch"].as_u64() > before["epoch"].as_u64());
    assert_eq!(
        (&after["state"], &after["role"]),
        (&"draining".into(), &"prefill".into())
    );
    assert_eq!(
        (&after["source"], &after["mismatches"]),
        (&"config".into(), &json!([]))
    );

    // An operator's role stands, whatever the engine says next.
    admin(&handle, "POST", "/v1/workers/w/role", r#"{"role": "both"}"#).await;
    stub.say(
        "/server_info",
        &json!({"version": "0.5.24", "disaggregation_mode": "decode"}),
    );
    stub.say_metrics(&ranks(2, 2));
    eventually("asked again after a restart", || {
        member().version().as_deref() == Some("0.5.24")
    })
    .await;
    tokio::time::sleep(std::time::Duration::from_millis(600)).await;
    assert_eq!((member().role(), member().config.dp_ranks), (Role::Both, 2));

    // Nor is it forgotten when the worker begins anew.
    stub.say_metrics(&ranks(3, 3));
    eventually("three ranks", || member().config.dp_ranks == 3).await;
    eventually("probed anew", || member().healthy() == Some(true)).await;
    tokio::time::sleep(std::time::Duration::from_millis(600)).await;
    assert_eq!(member().role(), Role::Both);
}

#[tokio::test]
async fn a_question_without_an_answer_takes_nothing_back_and_is_asked_again() {
    let stub = Stub::start().await;
    stub.say("/version", &json!({"version": "1"}));
    stub.say("/server_info", &json!({"disaggregation_mode": "prefill"}));
    let sources = json!({"0": {"endpoint": "tcp://*:9", "replay_endpoint": "tcp://*:10"}});
    stub.say("/kv_event_sources", &sources);
    stub.say_metrics(&ranks(1, 1));
    let handle = sidecar(|config| config.workers.push(bare("w", &stub.url))).await;
    let member = || handle.app().fleet.worker("w").unwrap();
    eventually("its role", || member().role() == Role::Prefill).await;
    // A first birth tells of no restart.
    eventually("its birth", || stub.asked("/metrics").len() > 1).await;
    assert_eq!(worker(&handle, "w").await["events"], "tcp://127.0.0.1:9");

    stub.fall_silent("/server_info");
    stub.fall_silent("/kv_event_sources");
    stub.say("/version", &json!({"version": "2"}));
    let before = stub.asked("/server_info").len();
    stub.say_metrics(&ranks(1, 2));
    eventually("asked after a restart", || {
        member().version().as_deref() == Some("2")
    })
    .await;
    eventually("asked again", || {
        stub.asked("/server_info").len() >= before + 2
    })
    .await;
    let shown = worker(&handle, "w").await;
    assert_eq!(
        (&shown["role"], member().role()),
        (&"prefill".into(), Role::Prefill)
    );
    assert_eq!(shown["events"], "tcp://127.0.0.1:9");
    assert_eq!(
        shown["engine"]["handoff"], "sglang",
        "it is paired as before"
    );

    // An engine that says that it knows no such thing has answered.
    stub.answer("/server_info", None);
    stub.answer("/kv_event_sources", Some(&sources));
    eventually("its role is taken back", || member().role() == Role::Both).await;
    assert_eq!(member().described().handoff, None);
    assert_eq!(worker(&handle, "w").await["events"], "tcp://127.0.0.1:9");
}

#[tokio::test]
async fn another_role_and_labels_of_its_source_reach_whoever_asks() {
    let stub = Stub::start().await;
    stub.say("/server_info", &json!({"disaggregation_mode": "decode"}));
    let handle = sidecar(|config| {
        let settings = json!({"kv_bytes_per_token": 1e5, "link_bytes_per_second": 1e9});
        config.handoff = Some(serde_json::from_value(settings).unwrap());
    })
    .await;
    let pods = source(&handle, "pods", Absence::Ended);
    let publish = |role, host: &str| {
        let mut pod = sighting("w", &stub.url, "1");
        pod.worker.role = role;
        pod.worker.labels.insert("host".into(), host.into());
        pods.publish(vec![pod]);
    };
    publish(Role::Prefill, "a");
    until_state(&handle, "w", "ready").await;
    let member = || handle.app().fleet.worker("w").unwrap();
    eventually("a mismatch", || !member().mismatches().is_empty()).await;

    publish(Role::Decode, "b");
    eventually("its labels", || member().labels()["host"] == "b").await;
    assert_eq!(member().mismatches(), [""; 0]);
    let host = || handle.app().proxy.handoff_report()["workers"][0]["host"].clone();
    eventually("its host in plans", || host() == "b").await;

    // Nor does another life of it know the labels of before.
    stub.say_metrics(&ranks(2, 1));
    eventually("two ranks", || member().config.dp_ranks == 2).await;
    assert_eq!(
        (member().role(), &*member().labels()["host"]),
        (Role::Decode, "b")
    );
    let info = handle.router.workers(std::time::Instant::now()).remove(0);
    assert_eq!((info.role, &*info.labels["host"]), (Role::Decode, "b"));
}

#[tokio::test]
async fn one_of_another_version_than_its_mates_is_named() {
    let stubs = [
        Stub::start().await,
        Stub::start().await,
        Stub::start().await,
    ];
    for (stub, version) in stubs.iter().zip(["0.32.0", "0.32.0", "0.31.0"]) {
        stub.say("/version", &json!({"version": version}));
        stub.say(
            "/v1/models",
            &json!({"data": [{"id": "m", "root": "org/m"}, {"id": "a", "parent": "m"}]}),
        );
    }
    let handle = sidecar(|config| {
        for (index, stub) in stubs.iter().enumerate() {
            config.workers.push(bare(&format!("w{index}"), &stub.url));
        }
    })
    .await;
    eventually("all are described", || {
        let members = handle.app().fleet.members();
        members
            .list()
            .iter()
            .all(|worker| worker.version().is_some() && worker.described().model.is_some())
    })
    .await;
    let odd = worker(&handle, "w2").await;
    assert_eq!(
        odd["mismatches"],
        json!(["version is 0.31.0 here and 0.32.0 in most of its mates"])
    );
    assert_eq!(worker(&handle, "w0").await["mismatches"], json!([]));
    let text = metrics(&handle).await;
    for series in ["{worker=\"w0\"} 0", "{worker=\"w2\"} 1"] {
        assert!(
            text.contains(&format!("kvlane_worker_mismatches{series}")),
            "{text}"
        );
    }
    let member = handle.app().fleet.worker("w2").unwrap();
    assert_eq!(member.described().model.as_deref(), Some("org/m"));
}
