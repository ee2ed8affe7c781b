//! How workers are looked after: probes, progress, and readings that do not come all at once.

use std::time::Duration;

use kvlane_sidecar::config::WorkerConfig;

use crate::client::Client;
use crate::setup::{eventually, sidecar, until_state};
use crate::stub::{STREAM, Stub};

/// A probe is given two seconds, and three must fail: six seconds and some.
const UNTIL_DOWN: usize = 80;

#[tokio::test]
async fn one_whose_open_stream_goes_on_is_not_dead_though_its_probes_wait() {
    let stub = Stub::start().await;
    stub.stream(UNTIL_DOWN);
    let handle = sidecar(|config| {
        let worker = WorkerConfig::new("w", &stub.url).unwrap();
        config.workers.push(worker);
    })
    .await;
    until_state(&handle, "w", "ready").await;
    let mut client = Client::connect(handle.proxy_addr).await;
    client.send("GET", STREAM, &[], b"").await;
    client.head().await;
    stub.fall_silent("/health");
    let mut pieces = 0;
    let worker = handle.app().fleet.worker("w").unwrap();
    while client.chunk().await.is_some_and(|chunk| !chunk.is_empty()) {
        assert_eq!(worker.healthy(), Some(true), "after {pieces} pieces");
        pieces += 1;
    }
    assert_eq!(pieces, UNTIL_DOWN);
    until_state(&handle, "w", "unhealthy").await;
    assert_eq!(worker.state().1.as_deref(), Some("/health did not answer"));
    assert!(worker.is_silent() && worker.lifeline().is_cancelled());
}

#[tokio::test]
async fn workers_that_came_together_are_read_at_different_moments() {
    // A machine that stalls reads all at once when it goes on, or one of them late: the median says neither.
    let mut spreads = Vec::new();
    for _ in 0..5 {
        spreads.push(spread_of_first_readings().await);
    }
    spreads.sort();
    // 20 moments at random within a fifth of the interval, 0.4 seconds.
    assert!(spreads[2] > Duration::from_millis(150), "{spreads:?}");
}

async fn spread_of_first_readings() -> Duration {
    let stubs = stubs(20).await;
    let handle = sidecar(|config| {
        config.scrape_interval_seconds = 2.0;
        for (index, stub) in stubs.iter().enumerate() {
            let worker = WorkerConfig::new(&format!("w{index}"), &stub.url).unwrap();
            config.workers.push(worker);
        }
    })
    .await;
    eventually("all were read", || {
        stubs.iter().all(|stub| !stub.asked("/metrics").is_empty())
    })
    .await;
    let mut first: Vec<_> = stubs.iter().map(|stub| stub.asked("/metrics")[0]).collect();
    first.sort();
    drop(handle);
    first[19] - first[0]
}

async fn stubs(count: usize) -> Vec<Stub> {
    let mut all = Vec::new();
    for _ in 0..count {
        all.push(Stub::start().await);
    }
    all
}
