//! The manifests of the example, read as what they say they are.

use std::collections::BTreeSet;
use std::path::PathBuf;

use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{ConfigMap, Service, ServiceAccount};
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kvlane_sidecar::config::{Config, ServeArgs};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

fn documents() -> Vec<Value> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/kubernetes");
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "yaml")
        {
            let text = std::fs::read_to_string(&path).unwrap();
            let parts = text.split("\n---\n");
            all.extend(parts.map(|part| serde_saphyr::from_str::<Value>(part).unwrap()));
        }
    }
    all
}

fn find(kind: &str, name: &str) -> Value {
    let all = documents();
    let found = all
        .into_iter()
        .find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("{kind} {name} is not there"))
}

/// Reads an object as its type, and finds every field in it again: one that the type does not have would be lost.
fn typed<T: DeserializeOwned + Serialize>(object: &Value) -> T {
    let typed: T = serde_json::from_value(object.clone()).unwrap();
    let again = serde_json::to_value(&typed).unwrap();
    let (kind, name) = (&object["kind"], &object["metadata"]["name"]);
    assert_contains(&again, object, &format!("{kind} {name}"));
    typed
}

fn assert_contains(all: &Value, part: &Value, place: &str) {
    match part {
        Value::Object(fields) => {
            for (key, value) in fields {
                assert_contains(&all[key], value, &format!("{place}.{key}"));
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                assert_contains(&all[index], item, &format!("{place}[{index}]"));
            }
        }
        value => assert_eq!(all, value, "{place}"),
    }
}

#[test]
fn every_object_is_of_its_kind_and_has_no_unknown_field() {
    let mut kinds = BTreeSet::new();
    for object in documents() {
        match object["kind"].as_str().unwrap() {
            "ServiceAccount" => drop(typed::<ServiceAccount>(&object)),
            "Role" => drop(typed::<Role>(&object)),
            "RoleBinding" => drop(typed::<RoleBinding>(&object)),
            "ConfigMap" => drop(typed::<ConfigMap>(&object)),
            "Deployment" => drop(typed::<Deployment>(&object)),
            "StatefulSet" => drop(typed::<StatefulSet>(&object)),
            "Service" => drop(typed::<Service>(&object)),
            "InferencePool" => assert_eq!(object["apiVersion"], "inference.networking.k8s.io/v1"),
            other => panic!("{other} is not checked"),
        }
        kinds.insert(object["kind"].to_string());
    }
    assert_eq!(kinds.len(), 8);
}

#[test]
#[should_panic(expected = "replicaCount")]
fn an_unknown_field_is_found() {
    let mut object = find("StatefulSet", "vllm");
    object["spec"]["replicaCount"] = Value::from(3);
    typed::<StatefulSet>(&object);
}

/// Returns what the container's `--set` becomes with the variable of its secret.
fn admin_key() -> String {
    let deployment: Deployment = typed(&find("Deployment", "kvlane"));
    let container = &deployment.spec.unwrap().template.spec.unwrap().containers[0];
    let variable = &container.env.as_ref().unwrap()[0];
    assert!(
        variable
            .value_from
            .as_ref()
            .unwrap()
            .secret_key_ref
            .is_some()
    );
    let args = container.args.as_ref().unwrap();
    assert_eq!(args[args.len() - 2], "--set");
    let name = format!("$({})", variable.name);
    args[args.len() - 1].replace(&name, "0123456789abcdef")
}

#[test]
fn the_sidecar_starts_with_its_configuration_and_finds_the_ports_of_the_pods() {
    let config: ConfigMap = typed(&find("ConfigMap", "kvlane"));
    let text = &config.data.unwrap()["kvlane.yaml"];
    let refused = Config::from_yaml(text, "kvlane.yaml").unwrap_err();
    assert!(refused.to_string().contains("admin_key"), "{refused}");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let config = Config::from_args(&ServeArgs {
        config: Some(file.path().to_owned()),
        set: vec![admin_key()],
        ..ServeArgs::default()
    })
    .unwrap();
    let source = &config.discovery.kubernetes[0];
    let stateful: StatefulSet = typed(&find("StatefulSet", "vllm"));
    let template = stateful.spec.unwrap().template;
    let labels = template.metadata.unwrap().labels.unwrap();
    let (key, value) = source.pods.as_ref().unwrap().split_once('=').unwrap();
    assert_eq!(labels[key], value);
    let container = &template.spec.unwrap().containers[0];
    let named: Vec<_> = container
        .ports
        .iter()
        .flatten()
        .map(|port| port.name.clone().unwrap())
        .collect();
    assert_eq!(named, ["http", "events", "replay"]);
    for port in [&source.port, &source.events_port, &source.replay_port] {
        let port = port.as_ref().unwrap().to_string();
        assert!(
            named.iter().any(|name| port == format!("{name:?}")),
            "{port}"
        );
    }
}

#[test]
fn the_role_allows_what_the_sources_and_the_scaler_ask_for_and_no_more() {
    let role: Role = typed(&find("Role", "kvlane"));
    let mut allowed = BTreeSet::new();
    for rule in role.rules.unwrap() {
        for resource in rule.resources.unwrap() {
            for group in rule.api_groups.iter().flatten() {
                for verb in &rule.verbs {
                    allowed.insert(format!("{verb} {resource} {group}").trim_end().to_owned());
                }
            }
        }
    }
    let expected = [
        "get statefulsets/scale apps",
        "list endpointslices discovery.k8s.io",
        "list inferencepools inference.networking.k8s.io",
        "list inferencepools inference.networking.x-k8s.io",
        "list pods",
        "update statefulsets/scale apps",
        "watch endpointslices discovery.k8s.io",
        "watch inferencepools inference.networking.k8s.io",
        "watch inferencepools inference.networking.x-k8s.io",
        "watch pods",
    ];
    let allowed: Vec<_> = allowed.iter().map(String::as_str).collect();
    assert_eq!(allowed, expected);
}
