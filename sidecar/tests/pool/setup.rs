//! A sidecar, simulated engines, and sources that a test publishes on.

use std::sync::Arc;
use std::time::Duration;

use kvlane_sidecar::config::{Config, WorkerConfig};
use kvlane_sidecar::engine::{Engine, EngineConfig, EngineHandle};
use kvlane_sidecar::net::HostPort;
use kvlane_sidecar::pool::roster::{Phase, Roster, Sighting};
use kvlane_sidecar::pool::sources::Absence;
use kvlane_sidecar::serve::{ServeHandle, start};
use serde_json::Value;

use crate::client::{Answer, request};

/// A sidecar without workers that looks after them often.
pub(crate) async fn sidecar(change: impl FnOnce(&mut Config)) -> ServeHandle {
    let mut config = Config::default();
    config.listen = HostPort::new("127.0.0.1", 0);
    config.admin = HostPort::new("127.0.0.1", 0);
    config.health_interval_seconds = 0.1;
    config.scrape_interval_seconds = 0.1;
    config.shutdown_seconds = 1.0;
    config.router.seed = Some(7);
    change(&mut config);
    start(config).await.unwrap()
}

/// A source of its own whose roster the test holds.
pub(crate) fn source(handle: &ServeHandle, name: &str, absence: Absence) -> Roster {
    let (roster, reader) = Roster::new();
    let _ = handle.app().follow_roster(name, absence, reader);
    roster
}

pub(crate) fn sighting(id: &str, url: &str, instance: &str) -> Sighting {
    Sighting {
        worker: WorkerConfig::new(id, url).unwrap(),
        instance: instance.to_owned(),
        phase: Phase::Serving,
    }
}

/// An engine that decodes a token in `decode_ms`.
pub(crate) async fn engine(decode_ms: f64) -> EngineHandle {
    let config = EngineConfig {
        decode_ms,
        prefill_overhead_ms: 1.0,
        ..EngineConfig::ephemeral()
    };
    Engine::start(config).await.unwrap()
}

pub(crate) async fn admin(handle: &ServeHandle, method: &str, path: &str, body: &str) -> Answer {
    request(handle.admin_addr, method, path, &[], body.as_bytes()).await
}

/// A worker as the admin listener shows it; null when there is none.
pub(crate) async fn worker(handle: &ServeHandle, id: &str) -> Value {
    let list = admin(handle, "GET", "/v1/workers", "").await.json();
    let workers = list["workers"].as_array().unwrap().clone();
    let found = workers.into_iter().find(|worker| worker["id"] == id);
    found.unwrap_or(Value::Null)
}

pub(crate) async fn metrics(handle: &ServeHandle) -> String {
    admin(handle, "GET", "/metrics", "").await.text()
}

/// The ids of all workers.
pub(crate) fn ids(handle: &ServeHandle) -> Vec<String> {
    let members = handle.app().fleet.members();
    let mut ids: Vec<_> = members
        .list()
        .iter()
        .map(|worker| worker.id().to_owned())
        .collect();
    ids.sort();
    ids
}

/// Waits until a worker is in a state.
pub(crate) async fn until_state(handle: &ServeHandle, id: &str, state: &str) {
    eventually(&format!("{id} is {state}"), || {
        let members = handle.app().fleet.members();
        let found = members.find(id).map(Arc::clone);
        found.is_some_and(|worker| worker.state().0.as_str() == state)
    })
    .await;
}

/// Waits up to 20 seconds (the machine may be busy) until the condition holds.
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..4_000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{what} did not come true within 20 seconds");
}
