//! Endpoint slices of a service.

use kvlane_sidecar::config::{AddressFamily, KubernetesSettings, PortRef};
use kvlane_sidecar::pool::roster::Phase::{Leaving, Serving, Starting};
use serde_json::{Value, json};

use crate::api::{Api, Fault};
use crate::world::{World, settings};

fn service(api: &Api) -> KubernetesSettings {
    let mut settings = settings(api);
    settings.service = Some("vllm".to_owned());
    settings
}

fn slice(name: &str, family: &str, endpoints: &[Value]) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family,
        "metadata": {
            "name": name, "namespace": "inference",
            "labels": {"kubernetes.io/service-name": "vllm", "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"},
        },
        "endpoints": endpoints,
        "ports": [{"name": "http", "port": 9000, "protocol": "TCP"}],
    })
}

fn endpoint(pod: &str, address: &str, conditions: &Value) -> Value {
    json!({
        "addresses": [address], "conditions": conditions, "nodeName": "node-1", "zone": "west-1a",
        "targetRef": {"kind": "Pod", "namespace": "inference", "name": pod, "uid": format!("uid-{pod}")},
    })
}

fn ready() -> Value {
    json!({"ready": true, "serving": true, "terminating": false})
}

const SLICES: &str = "endpointslices";

#[tokio::test]
async fn slices_are_put_together_with_their_conditions() {
    let api = Api::start().await;
    let first = [
        endpoint("vllm-0", "10.0.0.1", &ready()),
        endpoint(
            "vllm-1",
            "10.0.0.2",
            &json!({"ready": false, "serving": false, "terminating": false}),
        ),
    ];
    let second = [
        endpoint(
            "vllm-2",
            "10.0.0.3",
            &json!({"ready": false, "serving": true, "terminating": true}),
        ),
        // What is not said counts as ready.
        endpoint("vllm-3", "10.0.0.4", &json!({})),
    ];
    api.put(SLICES, slice("vllm-a", "IPv4", &first));
    api.put(SLICES, slice("vllm-b", "IPv4", &second));
    let mut other = slice(
        "other",
        "IPv4",
        &[endpoint("other-0", "10.0.9.1", &ready())],
    );
    other["metadata"]["labels"]["kubernetes.io/service-name"] = json!("other");
    api.put(SLICES, other);
    let world = World::start(&service(&api)).await;
    world
        .has(&[
            ("vllm-0", Serving),
            ("vllm-1", Starting),
            ("vllm-2", Leaving),
            ("vllm-3", Serving),
        ])
        .await;
    let sighting = &world.sightings()[0];
    assert_eq!(sighting.worker.url.to_string(), "http://10.0.0.1:9000");
    assert_eq!(sighting.instance, "uid-vllm-0");
    assert_eq!(
        sighting.worker.labels["topology.kubernetes.io/zone"],
        "west-1a"
    );
    api.delete(SLICES, "vllm-a");
    world.has(&[("vllm-2", Leaving), ("vllm-3", Serving)]).await;
}

#[tokio::test]
async fn an_endpoint_that_moves_between_slices_is_never_two_and_the_newer_slice_is_right() {
    let api = Api::start().await;
    api.put(
        SLICES,
        slice(
            "vllm-z",
            "IPv4",
            &[endpoint("vllm-0", "10.0.0.1", &ready())],
        ),
    );
    let world = World::start(&service(&api)).await;
    world.has(&[("vllm-0", Serving)]).await;
    let leaving = json!({"ready": false, "serving": true, "terminating": true});
    api.put(
        SLICES,
        slice(
            "vllm-a",
            "IPv4",
            &[endpoint("vllm-0", "10.0.0.1", &leaving)],
        ),
    );
    world.has(&[("vllm-0", Leaving)]).await;
    api.delete(SLICES, "vllm-z");
    api.edit(SLICES, "vllm-a", |slice| {
        slice["endpoints"][0]["conditions"] = ready()
    });
    world.has(&[("vllm-0", Serving)]).await;
}

#[tokio::test]
async fn a_dual_stack_endpoint_is_one_worker() {
    let api = Api::start().await;
    api.put(
        SLICES,
        slice("vllm-6", "IPv6", &[endpoint("vllm-0", "fd00::1", &ready())]),
    );
    api.put(
        SLICES,
        slice(
            "vllm-4",
            "IPv4",
            &[endpoint("vllm-0", "10.0.0.1", &ready())],
        ),
    );
    let world = World::start(&service(&api)).await;
    world.has(&[("vllm-0", Serving)]).await;
    assert_eq!(
        world.sightings()[0].worker.url.to_string(),
        "http://10.0.0.1:9000"
    );
    // News of the other family do not move it.
    api.edit(SLICES, "vllm-6", |slice| {
        slice["metadata"]["labels"]["touched"] = json!("yes")
    });
    api.put(
        SLICES,
        slice(
            "vllm-5",
            "IPv4",
            &[endpoint("vllm-1", "10.0.0.2", &ready())],
        ),
    );
    world.has(&[("vllm-0", Serving), ("vllm-1", Serving)]).await;
    assert_eq!(
        world.sightings()[0].worker.url.to_string(),
        "http://10.0.0.1:9000"
    );
    let mut six = service(&api);
    six.address_family = Some(AddressFamily::Ipv6);
    let world = World::start(&six).await;
    world.has(&[("vllm-0", Serving)]).await;
    assert_eq!(
        world.sightings()[0].worker.url.to_string(),
        "http://[fd00::1]:9000"
    );
}

#[tokio::test]
async fn ports_are_found_by_name_and_addresses_without_a_pod_have_names() {
    let api = Api::start().await;
    let mut slice = slice("vllm-a", "IPv4", &[json!({"addresses": ["192.0.2.7"]})]);
    let ports = slice["ports"].as_array_mut().unwrap();
    ports.push(json!({"name": "events", "port": 5557, "protocol": "TCP"}));
    api.put(SLICES, slice);
    let mut settings = service(&api);
    settings.port = Some(PortRef::Name("http".to_owned()));
    settings.events_port = Some(PortRef::Name("events".to_owned()));
    let world = World::start(&settings).await;
    world
        .until("the address", || world.members().len() == 1)
        .await;
    let worker = world.sightings()[0].worker.clone();
    assert_eq!(worker.url.to_string(), "http://192.0.2.7:9000");
    assert_eq!(worker.events.as_deref(), Some("tcp://192.0.2.7:5557"));
    settings.port = Some(PortRef::Name("grpc".to_owned()));
    let world = World::start(&settings).await;
    world
        .until("a problem", || !world.status().problems.is_empty())
        .await;
    let problem = &world.status().problems["inference/vllm-a"];
    assert!(
        problem.contains("192.0.2.7") && problem.contains("\"grpc\""),
        "{problem}"
    );
}

#[tokio::test]
async fn a_forbidden_watch_names_the_group() {
    let api = Api::start().await;
    api.fault(
        "watch endpointslices",
        usize::MAX,
        Fault::Status(403, "Forbidden"),
    );
    let world = World::start(&service(&api)).await;
    world
        .says(&[
            "the verb watch",
            "the resource endpointslices",
            "\"discovery.k8s.io\"",
        ])
        .await;
}
