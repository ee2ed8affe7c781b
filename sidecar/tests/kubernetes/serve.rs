//! A sidecar whose workers come and go in a cluster, under traffic.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvlane_sidecar::config::{Config, KubernetesSettings, PortRef};
use kvlane_sidecar::engine::{Engine, EngineConfig, EngineHandle};
use kvlane_sidecar::net::HostPort;
use kvlane_sidecar::serve::{ServeHandle, start};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::api::{Api, Fault};
use crate::client::{post, request};
use crate::cluster::pod;
use crate::world::settings;

/// A pod with an engine in it, on a loopback address of its own.
async fn running(api: &Api, name: &str, ip: &str) -> EngineHandle {
    let mut config = EngineConfig::ephemeral();
    config.listen = format!("{ip}:0").parse().unwrap();
    config.decode_ms = 1.0;
    let engine = Engine::start(config).await.unwrap();
    api.put(
        "pods",
        with_port(pod(name, ip, true), engine.address().port()),
    );
    engine
}

fn with_port(mut pod: Value, port: u16) -> Value {
    pod["spec"]["containers"][0]["ports"] = json!([{"name": "http", "containerPort": port}]);
    pod
}

async fn sidecar(kubernetes: KubernetesSettings) -> ServeHandle {
    let mut config = Config::default();
    config.listen = HostPort::new("127.0.0.1", 0);
    config.admin = HostPort::new("127.0.0.1", 0);
    config.health_interval_seconds = 0.1;
    config.scrape_interval_seconds = 0.1;
    config.shutdown_seconds = 1.0;
    config.router.seed = Some(7);
    config.discovery.kubernetes = vec![kubernetes];
    start(config).await.unwrap()
}

/// The workers that take requests, in order of their names.
fn ready(handle: &ServeHandle) -> Vec<String> {
    let members = handle.app().fleet.members();
    let ready = members
        .list()
        .iter()
        .filter(|worker| worker.state().0.as_str() == "ready");
    let mut ids: Vec<_> = ready.map(|worker| worker.id().to_owned()).collect();
    ids.sort();
    ids
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not come true");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn until_ready(handle: &ServeHandle, ids: &[&str]) {
    until(&format!("ready: {ids:?}"), || ready(handle) == ids).await;
}

async fn report(handle: &ServeHandle) -> Value {
    let answer = request(handle.admin_addr, "GET", "/v1/pool", &[], b"").await;
    let sources = answer.json()["sources"].as_array().unwrap().clone();
    let mut found = sources.into_iter().filter(|source| {
        source["name"]
            .as_str()
            .is_some_and(|name| name.starts_with("kubernetes:"))
    });
    found.next().unwrap()
}

/// Clients that ask without a pause until they are stopped.
struct Traffic {
    tasks: JoinSet<()>,
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
}

impl Traffic {
    fn start(handle: &ServeHandle) -> Self {
        let mut traffic = Self {
            tasks: JoinSet::new(),
            stop: Arc::default(),
            answered: Arc::default(),
        };
        for client in 0..4 {
            let (stop, answered) = (Arc::clone(&traffic.stop), Arc::clone(&traffic.answered));
            let address = handle.proxy_addr;
            traffic.tasks.spawn(async move {
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let prompt = format!("w{client} w{number} ").repeat(20);
                    let body = json!({"model": "sim", "prompt": prompt, "max_tokens": 3});
                    let answer = post(address, "/v1/completions", &body.to_string()).await;
                    assert_eq!(answer.status, 200, "{}", answer.text());
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        traffic
    }

    /// Waits until more requests have been answered.
    async fn flows(&self) {
        let before = self.answered.load(Ordering::Relaxed);
        until("requests are answered", || {
            self.answered.load(Ordering::Relaxed) > before + 20
        })
        .await;
    }

    async fn end(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(result) = self.tasks.join_next().await {
            result.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_come_and_go_under_traffic_and_no_request_fails() {
    let api = Api::start().await;
    let first = running(&api, "vllm-0", "127.0.0.11").await;
    let mut kubernetes = settings(&api);
    kubernetes.pods = Some("app=vllm".to_owned());
    kubernetes.port = Some(PortRef::Name("http".to_owned()));
    let handle = sidecar(kubernetes).await;
    until_ready(&handle, &["vllm-0"]).await;
    let traffic = Traffic::start(&handle);
    traffic.flows().await;
    let second = running(&api, "vllm-1", "127.0.0.12").await;
    until_ready(&handle, &["vllm-0", "vllm-1"]).await;
    traffic.flows().await;
    // The first terminates: it finishes what it has, then its process ends, then its object.
    api.edit("pods", "vllm-0", |pod| {
        pod["metadata"]["deletionTimestamp"] = json!("2026-11-01T11:00:00Z");
    });
    until_ready(&handle, &["vllm-1"]).await;
    until("drained", || {
        handle.app().fleet.members().find("vllm-0").is_none()
    })
    .await;
    first.shutdown().await;
    api.delete("pods", "vllm-0");
    traffic.flows().await;
    // It comes back in another life; the watch breaks, expires and comes again meanwhile.
    api.fault("watch pods", 1, Fault::Break);
    let third = running(&api, "vllm-0", "127.0.0.13").await;
    until_ready(&handle, &["vllm-0", "vllm-1"]).await;
    api.fault("watch pods", 1, Fault::Error(410, "Expired"));
    traffic.flows().await;
    // While the API server refuses, everything goes on.
    api.fault("list pods", usize::MAX, Fault::Status(403, "Forbidden"));
    api.change(|store| store.compact());
    api.edit("pods", "vllm-1", |pod| {
        pod["metadata"]["labels"]["seen"] = json!("no")
    });
    api.change(|store| store.compact());
    traffic.flows().await;
    let source = report(&handle).await;
    assert_eq!(source["name"], "kubernetes:pods/app=vllm");
    assert_eq!(ready(&handle), ["vllm-0", "vllm-1"]);
    api.no_faults();
    // A pod that says nonsense is named, and takes nothing.
    let mut odd = with_port(pod("vllm-2", "127.0.0.14", true), 9);
    odd["metadata"]["annotations"] = json!({"kvlane.io/role": "decoder"});
    api.put("pods", odd);
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let source = report(&handle).await;
        let skipped = source["skipped"]["inference/vllm-2"].as_str();
        if skipped.is_some_and(|text| text.contains("decoder")) && source["error"].is_null() {
            break;
        }
        assert!(Instant::now() < deadline, "{source}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    traffic.flows().await;
    traffic.end().await;
    let members = handle.app().fleet.members();
    assert!(members.list().iter().all(|worker| worker.in_flight() == 0));
    handle.shutdown().await;
    second.shutdown().await;
    third.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_kubeconfig_is_shown_and_waited_for() {
    let api = Api::start().await;
    let engine = running(&api, "vllm-0", "127.0.0.15").await;
    let mut kubernetes = settings(&api);
    kubernetes.pods = Some("app=vllm".to_owned());
    kubernetes.port = Some(PortRef::Name("http".to_owned()));
    let there = kubernetes.kubeconfig.take().unwrap();
    let late = there.with_file_name("late");
    kubernetes.kubeconfig = Some(late.clone());
    let handle = sidecar(kubernetes).await;
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let source = report(&handle).await;
        if source["error"]
            .as_str()
            .is_some_and(|text| text.contains("late"))
        {
            break;
        }
        assert!(Instant::now() < deadline, "{source}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    std::fs::copy(there, late).unwrap();
    until_ready(&handle, &["vllm-0"]).await;
    handle.shutdown().await;
    engine.shutdown().await;
}
