//! Members come, leave, live anew and change, as their sources and operators say.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kvlane::Role;
use kvlane_sidecar::config::WorkerConfig;
use kvlane_sidecar::pool::roster::{Phase, Sighting};
use kvlane_sidecar::pool::sources::Absence;
use serde_json::json;

use crate::client::{Client, post};
use crate::setup::{
    admin, engine, eventually, ids, metrics, sidecar, sighting, source, until_state, worker,
};
use crate::stub::{STREAM, Stub};

const COMPLETIONS: &str = "/v1/completions";

fn completion(number: usize, tokens: usize) -> String {
    let prompt = format!("w{number} w7 ").repeat(40);
    json!({"model": "sim", "prompt": prompt, "max_tokens": tokens, "ignore_eos": true, "stream": true})
        .to_string()
}

#[tokio::test]
async fn one_that_leaves_finishes_its_stream_and_gets_nothing_new() {
    let (slow, other) = (Stub::start().await, engine(1.0).await);
    slow.stream(3);
    slow.go_on(true);
    let handle = sidecar(|_| {}).await;
    let pods = source(&handle, "pods", Absence::Ended);
    let both = |phase| {
        let slow = sighting("slow", &slow.url, "1");
        let other = sighting("other", &other.url(), "1");
        vec![Sighting { phase, ..slow }, other]
    };
    pods.publish(vec![both(Phase::Serving).remove(0)]);
    until_state(&handle, "slow", "ready").await;
    let mut client = Client::connect(handle.proxy_addr).await;
    client.send("GET", STREAM, &[], b"").await;
    client.head().await;
    pods.publish(both(Phase::Leaving));
    until_state(&handle, "other", "ready").await;
    let shown = worker(&handle, "slow").await;
    assert_eq!(shown["state"], "draining");
    assert_eq!(shown["cause"], "its source says that it leaves");
    assert_eq!(shown["draining"], true);
    for number in 1..4 {
        let answer = post(handle.proxy_addr, COMPLETIONS, &completion(number, 1)).await;
        assert_eq!(answer.status, 200);
    }
    assert_eq!(
        handle
            .app()
            .fleet
            .members()
            .find("slow")
            .unwrap()
            .in_flight(),
        1
    );
    slow.go_on(false);
    let mut pieces = Vec::new();
    while pieces
        .last()
        .is_none_or(|piece: &Vec<u8>| !piece.is_empty())
    {
        pieces.push(client.chunk().await.expect("a stream that goes on"));
    }
    assert_eq!(pieces, [&b"."[..], b".", b".", b""]);
    eventually("removed", || ids(&handle) == ["other"]).await;
    assert_eq!(other.stats().finished_requests, 3);
}

#[tokio::test]
async fn another_instance_is_another_life_without_the_olds_cache() {
    let engine = engine(1.0).await;
    let handle = sidecar(|_| {}).await;
    let pods = source(&handle, "pods", Absence::Ended);
    pods.publish(vec![sighting("w", &engine.url(), "uid-1/0")]);
    until_state(&handle, "w", "ready").await;
    let answer = post(handle.proxy_addr, COMPLETIONS, &completion(1, 1)).await;
    assert_eq!(answer.status, 200);
    let before = worker(&handle, "w").await;
    assert!(before["predicted_blocks"].as_u64() > Some(0), "{before}");
    assert_eq!(before["source"], "pods");
    assert_eq!(before["instance"], "uid-1/0");
    pods.publish(vec![sighting("w", &engine.url(), "uid-1/1")]);
    eventually("a new life", || {
        let members = handle.app().fleet.members();
        members.find("w").is_some_and(|w| w.instance() == "uid-1/1")
    })
    .await;
    let after = worker(&handle, "w").await;
    assert!(after["epoch"].as_u64() > before["epoch"].as_u64());
    assert_eq!(after["predicted_blocks"], 0);
    until_state(&handle, "w", "ready").await;
    let text = metrics(&handle).await;
    for series in [
        "kvlane_worker_state{worker=\"w\",state=\"ready\"} 1",
        "kvlane_worker_state{worker=\"w\",state=\"starting\"} 0",
        "kvlane_pool_members{source=\"pods\"} 1",
        "kvlane_pool_conflicts{source=\"pods\"} 0",
        "kvlane_pool_source_failing{source=\"pods\"} 0",
    ] {
        assert!(text.contains(series), "{series} is missing from\n{text}");
    }
}

#[tokio::test]
async fn one_that_starts_gets_no_request() {
    let (starting, other) = (engine(1.0).await, engine(1.0).await);
    let handle = sidecar(|_| {}).await;
    let pods = source(&handle, "pods", Absence::Ended);
    let starts = Sighting {
        phase: Phase::Starting,
        ..sighting("s", &starting.url(), "1")
    };
    pods.publish(vec![starts.clone(), sighting("o", &other.url(), "1")]);
    until_state(&handle, "o", "ready").await;
    until_state(&handle, "s", "starting").await;
    for number in 0..6 {
        post(handle.proxy_addr, COMPLETIONS, &completion(number, 1)).await;
    }
    assert_eq!(starting.stats().finished_requests, 0);
    pods.set_phase(&starts.worker.id, Phase::Serving);
    until_state(&handle, "s", "ready").await;
    for number in 6..12 {
        post(handle.proxy_addr, COMPLETIONS, &completion(number, 1)).await;
    }
    assert!(starting.stats().finished_requests > 0);
}

#[tokio::test]
async fn an_operator_changes_roles_and_drains_and_undoes_both() {
    let (one, two) = (engine(1.0).await, engine(1.0).await);
    let handle = sidecar(|config| {
        for (id, engine) in [("w1", &one), ("w2", &two)] {
            let worker = WorkerConfig::new(id, &engine.url()).unwrap();
            config.workers.push(worker);
        }
    })
    .await;
    until_state(&handle, "w1", "ready").await;
    until_state(&handle, "w2", "ready").await;
    post(handle.proxy_addr, COMPLETIONS, &completion(1, 1)).await;
    let body = r#"{"role": "prefill"}"#;
    let answer = admin(&handle, "POST", "/v1/workers/w1/role", body).await;
    assert_eq!(
        (answer.status, answer.json()["role"].as_str()),
        (200, Some("prefill"))
    );
    assert_eq!(worker(&handle, "w1").await["role"], "prefill");
    let member = handle.app().fleet.worker("w1").unwrap();
    assert_eq!(member.role(), Role::Prefill);
    assert!(!member.is_eligible());
    for body in [
        "",
        r#"["both"]"#,
        r#"{"role": "chef"}"#,
        r#"{"role": "both", "x": 1}"#,
    ] {
        let answer = admin(&handle, "POST", "/v1/workers/w1/role", body).await;
        assert_eq!(answer.status, 400, "{body}");
    }
    let unknown = admin(
        &handle,
        "POST",
        "/v1/workers/w9/role",
        r#"{"role": "both"}"#,
    )
    .await;
    assert_eq!(unknown.status, 404);
    admin(
        &handle,
        "POST",
        "/v1/workers/w1/role",
        r#"{"role": "both"}"#,
    )
    .await;
    assert!(member.is_eligible());
    for (call, state) in [("drain", "draining"), ("undrain", "ready")] {
        let path = format!("/v1/workers/w1/{call}");
        assert_eq!(admin(&handle, "POST", &path, "").await.status, 200);
        let shown = worker(&handle, "w1").await;
        assert_eq!(shown["state"], state);
        assert_eq!(shown["draining"], state == "draining");
    }
    let unknown = admin(&handle, "POST", "/v1/workers/w9/undrain", "").await;
    assert_eq!(unknown.status, 404);
}

#[tokio::test]
async fn a_name_claimed_twice_is_told_everywhere() {
    let (one, two) = (engine(1.0).await, engine(1.0).await);
    let handle = sidecar(|_| {}).await;
    let pods = source(&handle, "pods", Absence::Ended);
    let file = source(&handle, "lists", Absence::Left);
    pods.publish(vec![sighting("w", &one.url(), "1")]);
    until_state(&handle, "w", "ready").await;
    file.publish(vec![sighting("w", &two.url(), "")]);
    eventually("a conflict", || {
        !handle.app().pool.report().conflicts.is_empty()
    })
    .await;
    assert_eq!(worker(&handle, "w").await["url"], one.url());
    let pool = admin(&handle, "GET", "/v1/pool", "").await.json();
    assert_eq!(
        pool["conflicts"],
        json!([{"id": "w", "source": "lists", "owner": "pods"}])
    );
    assert_eq!(pool["members"][0]["state"], "ready");
    let names: Vec<_> = pool["sources"]
        .as_array()
        .unwrap()
        .iter()
        .map(|source| source["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["admin", "config", "pods", "lists"]);
    assert!(
        metrics(&handle)
            .await
            .contains("kvlane_pool_conflicts{source=\"lists\"} 1")
    );
    let add = json!({"id": "w", "url": two.url()}).to_string();
    let taken = admin(&handle, "POST", "/v1/workers", &add).await;
    assert_eq!(taken.status, 409);
    assert!(taken.text().contains("source pods"), "{}", taken.text());
}

#[tokio::test]
async fn a_deleted_worker_stays_away_until_its_source_tells_of_another_life() {
    let engine = engine(1.0).await;
    let handle = sidecar(|_| {}).await;
    let pods = source(&handle, "pods", Absence::Ended);
    pods.publish(vec![sighting("w", &engine.url(), "1")]);
    eventually("there", || ids(&handle) == ["w"]).await;
    let answer = admin(&handle, "DELETE", "/v1/workers/w", "").await;
    assert_eq!((answer.status, ids(&handle).len()), (200, 0));
    pods.publish(vec![
        sighting("w", &engine.url(), "1"),
        sighting("x", &engine.url(), "1"),
    ]);
    eventually("the other is there", || !ids(&handle).is_empty()).await;
    assert_eq!(ids(&handle), ["x"]);
    pods.publish(vec![sighting("w", &engine.url(), "2")]);
    eventually("a new life", || ids(&handle) == ["w"]).await;
}

#[tokio::test]
async fn a_source_that_ends_takes_its_workers_along_and_a_stopping_sidecar_does_not() {
    let handle = sidecar(|config| config.drain_seconds = 0.3).await;
    let (keeps, ends) = (
        source(&handle, "keeps", Absence::Ended),
        source(&handle, "ends", Absence::Left),
    );
    keeps.publish(vec![sighting("k", "http://127.0.0.1:9", "")]);
    ends.publish(vec![sighting("e", "http://127.0.0.1:9", "")]);
    eventually("both", || ids(&handle) == ["e", "k"]).await;
    drop(ends);
    eventually("one is gone", || ids(&handle) == ["k"]).await;
    let app = handle.app().clone();
    handle.shutdown().await;
    drop(keeps);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(app.fleet.members().list().len(), 1);
}

/// Sources publish over each other in random order, through the real tasks and the real fleet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_publications_leave_no_ghost_and_lose_nobody() {
    let handle = sidecar(|config| {
        config.drain_seconds = 0.0;
        // Nobody listens anywhere; probing is not what is tried here.
        config.health_interval_seconds = 60.0;
        config.scrape_interval_seconds = 60.0;
    })
    .await;
    let rosters = ["one", "two", "three"].map(|name| {
        let absence = if name == "two" {
            Absence::Ended
        } else {
            Absence::Left
        };
        source(&handle, name, absence)
    });
    let mut random = fastrand::Rng::with_seed(5);
    let mut last: [Vec<Sighting>; 3] = Default::default();
    let end = Instant::now() + Duration::from_secs(10);
    for round in 0..1_000 {
        let index = random.usize(..3);
        last[index].clear();
        for number in 0..12 {
            if random.bool() {
                let (id, instance) = (format!("w{number}"), random.u8(..3).to_string());
                last[index].push(sighting(&id, "http://127.0.0.1:9", &instance));
            }
        }
        rosters[index].publish(last[index].clone());
        if random.u8(..4) == 0 {
            tokio::task::yield_now().await;
        }
        if Instant::now() > end {
            assert!(round > 100, "{round} rounds in 10 seconds");
            break;
        }
    }
    let listed = |index: usize| last[index].iter().map(|of| of.worker.id.to_string());
    let wanted: BTreeSet<String> = (0..3).flat_map(listed).collect();
    eventually("exactly the listed workers", || {
        let members = handle.app().fleet.members();
        let matches = members.list().iter().all(|worker| {
            let index = ["one", "two", "three"]
                .iter()
                .position(|name| **name == *worker.source());
            let mut listed = last[index.unwrap()].iter();
            listed
                .any(|of| of.worker.id.as_str() == worker.id() && of.instance == worker.instance())
                && !worker.is_draining()
        });
        matches && ids(&handle).into_iter().eq(wanted.iter().cloned())
    })
    .await;
    let router: BTreeSet<String> = handle
        .router
        .workers(Instant::now())
        .iter()
        .map(|info| info.id.to_string())
        .collect();
    assert_eq!(router, wanted, "the router knows the same");
}

#[tokio::test]
async fn of_two_sources_the_second_goes_on_with_the_life_and_the_cache_of_the_first() {
    let engine = engine(1.0).await;
    let handle = sidecar(|_| {}).await;
    let [file, dns] = ["file", "dns"].map(|name| source(&handle, name, Absence::Left));
    let mut told = sighting("w", &engine.url(), "");
    told.worker.events = engine.events_endpoint().map(str::to_owned);
    file.publish(vec![told]);
    until_state(&handle, "w", "ready").await;
    dns.publish(vec![sighting("w", &engine.url(), "")]);
    post(handle.proxy_addr, COMPLETIONS, &completion(0, 1)).await;
    eventually("stored", || {
        let workers = handle.app().router.workers(Instant::now());
        workers[0].index_blocks.device > 0
    })
    .await;
    let before = worker(&handle, "w").await;
    file.publish(Vec::new());
    eventually("handed over", || {
        let members = handle.app().fleet.members();
        members
            .find("w")
            .is_some_and(|worker| &*worker.source() == "dns")
    })
    .await;
    let after = worker(&handle, "w").await;
    assert_eq!(after["epoch"], before["epoch"]);
    assert_eq!(after["state"], "ready");
    assert_eq!(after["trust"][0]["batches"], before["trust"][0]["batches"]);
    for kept in ["events", "index_blocks"] {
        assert_eq!(after[kept], before[kept]);
    }
    dns.publish(Vec::new());
    eventually("removed", || ids(&handle).is_empty()).await;
}
