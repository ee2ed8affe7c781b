//! Starting a sidecar in front of mock workers.

use std::time::Duration;

use kvlane_sidecar::config::{Config, WorkerConfig};
use kvlane_sidecar::net::HostPort;
use kvlane_sidecar::serve::{ServeHandle, start};

use crate::client::{Answer, request};
use crate::mock::Mock;

/// Starts a sidecar with workers `w1`, `w2`, … and waits until it is ready.
pub(crate) async fn sidecar(workers: &[&Mock]) -> ServeHandle {
    sidecar_with(workers, |_| {}).await
}

pub(crate) async fn sidecar_with(
    workers: &[&Mock],
    change: impl FnOnce(&mut Config),
) -> ServeHandle {
    let urls: Vec<String> = workers.iter().map(|worker| worker.url()).collect();
    let handle = sidecar_to(&urls, change).await;
    eventually("ready", || async {
        admin(&handle, "GET", "/readyz", "").await.status == 200
    })
    .await;
    handle
}

pub(crate) async fn sidecar_to(urls: &[String], change: impl FnOnce(&mut Config)) -> ServeHandle {
    let mut config = Config::default();
    config.listen = HostPort::new("127.0.0.1", 0);
    config.admin = HostPort::new("127.0.0.1", 0);
    config.health_interval_seconds = 0.1;
    config.scrape_interval_seconds = 0.1;
    config.shutdown_seconds = 1.0;
    config.router.seed = Some(7);
    for (index, url) in urls.iter().enumerate() {
        config
            .workers
            .push(WorkerConfig::new(&format!("w{}", index + 1), url).unwrap());
    }
    change(&mut config);
    start(config).await.unwrap()
}

pub(crate) async fn admin(handle: &ServeHandle, method: &str, path: &str, body: &str) -> Answer {
    request(handle.admin_addr, method, path, &[], body.as_bytes()).await
}

pub(crate) async fn metric(handle: &ServeHandle, series: &str) -> f64 {
    let answer = admin(handle, "GET", "/metrics", "").await;
    let text = answer.text();
    let line = text.lines().find_map(|line| line.strip_prefix(series));
    line.map_or(0.0, |value| value.trim().parse().unwrap())
}

/// Sum of a field over the admin listener's workers.
pub(crate) async fn sum(handle: &ServeHandle, field: &str) -> f64 {
    let list = admin(handle, "GET", "/v1/workers", "").await.json();
    let workers = list["workers"].as_array().unwrap();
    workers.iter().map(|worker| number(worker, field)).sum()
}

/// A field's number; 0 while it is not known yet.
fn number(worker: &serde_json::Value, field: &str) -> f64 {
    let value = worker.get(field).expect("a known field");
    value.as_f64().unwrap_or(0.0)
}

/// Waits up to 20 seconds (the machine may be busy) until the condition holds.
pub(crate) async fn eventually<F: Future<Output = bool>>(what: &str, condition: impl Fn() -> F) {
    for _ in 0..2_000 {
        if condition().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what} did not come true within 20 seconds");
}
