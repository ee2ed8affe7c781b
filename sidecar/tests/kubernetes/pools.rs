//! InferencePools of both shapes.

use kvlane_sidecar::config::{KubernetesSettings, PortRef};
use kvlane_sidecar::pool::roster::Phase::Serving;
use serde_json::{Value, json};

use crate::api::{Api, Fault};
use crate::cluster::pod;
use crate::world::{World, settings};

const POOLS: &str = "inferencepools";

fn pool(api: &Api) -> KubernetesSettings {
    let mut settings = settings(api);
    settings.inference_pool = Some("vllm".to_owned());
    settings.events_port = Some(PortRef::Number(5557));
    settings
}

fn current(ports: &[u16], labels: &Value) -> Value {
    let ports: Vec<_> = ports.iter().map(|port| json!({"number": port})).collect();
    json!({
        "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
        "metadata": {"name": "vllm", "namespace": "inference"},
        "spec": {
            "selector": {"matchLabels": labels}, "targetPorts": ports,
            "endpointPickerRef": {"name": "kvlane", "port": {"number": 9002}, "failureMode": "FailClose"},
        },
    })
}

fn urls(world: &World) -> Vec<String> {
    let all = world.sightings();
    all.iter()
        .map(|sighting| sighting.worker.url.to_string())
        .collect()
}

#[tokio::test]
async fn every_target_port_is_a_worker_with_events_of_its_own() {
    let api = Api::start().await;
    api.put(POOLS, current(&[3000, 3001], &json!({"app": "vllm"})));
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    let world = World::start(&pool(&api)).await;
    world
        .has(&[("vllm-0:3000", Serving), ("vllm-0:3001", Serving)])
        .await;
    let sightings = world.sightings();
    let events: Vec<_> = sightings
        .iter()
        .map(|sighting| sighting.worker.events.as_deref().unwrap())
        .collect();
    assert_eq!(events, ["tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"]);
}

#[tokio::test]
async fn the_older_shape_is_found_where_the_newer_is_not_known() {
    let api = Api::start().await;
    api.set_groups(&["inference.networking.x-k8s.io"]);
    let old = json!({
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2", "kind": "InferencePool",
        "metadata": {"name": "vllm", "namespace": "inference"},
        "spec": {"selector": {"app": "vllm"}, "targetPortNumber": 8200, "extensionRef": {"name": "epp"}},
    });
    api.put(POOLS, old);
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    let world = World::start(&pool(&api)).await;
    world.has(&[("vllm-0", Serving)]).await;
    assert_eq!(urls(&world), ["http://10.0.0.1:8200"]);
    world.is_well().await;
}

#[tokio::test]
async fn another_selector_selects_others_without_an_empty_moment() {
    let api = Api::start().await;
    api.put(POOLS, current(&[8000], &json!({"app": "vllm"})));
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    let mut next = pod("next-0", "10.0.0.2", true);
    next["metadata"]["labels"] = json!({"app": "next"});
    api.put("pods", next);
    let world = World::start(&pool(&api)).await;
    world.has(&[("vllm-0", Serving)]).await;
    api.put(POOLS, current(&[8001], &json!({"app": "next"})));
    world
        .until("the next selection", || {
            let members = world.members();
            assert_eq!(members.len(), 1, "{members:?}");
            members[0].0 == "next-0"
        })
        .await;
    assert_eq!(urls(&world), ["http://10.0.0.2:8001"]);
}

#[tokio::test]
async fn a_pool_that_is_missing_is_said_and_found_when_it_comes() {
    let api = Api::start().await;
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    let world = World::start(&pool(&api)).await;
    world
        .says(&["InferencePool inference/vllm does not exist"])
        .await;
    assert_eq!(world.members(), []);
    api.put(POOLS, current(&[8000], &json!({"app": "vllm"})));
    world.has(&[("vllm-0", Serving)]).await;
    world.is_well().await;
    api.delete(POOLS, "vllm");
    world.has(&[]).await;
    world.says(&["does not exist"]).await;
}

#[tokio::test]
async fn a_pool_that_makes_no_sense_keeps_the_last_selection() {
    let api = Api::start().await;
    api.put(POOLS, current(&[8000], &json!({"app": "vllm"})));
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    let world = World::start(&pool(&api)).await;
    world.has(&[("vllm-0", Serving)]).await;
    for (spec, words) in [
        (current(&[8000], &json!({})), "would select every pod"),
        (
            current(&[], &json!({"app": "vllm"})),
            "1 to 8 different ports",
        ),
        (
            current(&[8000, 8000], &json!({"app": "vllm"})),
            "1 to 8 different ports",
        ),
        (
            current(&[1, 2, 3, 4, 5, 6, 7, 8, 9], &json!({"app": "vllm"})),
            "1 to 8 different ports",
        ),
    ] {
        api.put(POOLS, spec);
        world.says(&["InferencePool inference/vllm", words]).await;
        assert_eq!(urls(&world), ["http://10.0.0.1:8000"]);
    }
    api.put(POOLS, current(&[8000], &json!({"app": "vllm"})));
    world.is_well().await;
}

#[tokio::test]
async fn a_forbidden_pool_is_named() {
    let api = Api::start().await;
    api.fault(
        "list inferencepools",
        usize::MAX,
        Fault::Status(403, "Forbidden"),
    );
    let world = World::start(&pool(&api)).await;
    world
        .says(&[
            "the verb list",
            "the resource inferencepools",
            "\"inference.networking.",
        ])
        .await;
}
