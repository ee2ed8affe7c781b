//! Replicas through the scale subresource.

use kvlane_sidecar::pool::discovery::kubernetes::{Cluster, KubernetesScaler};
use kvlane_sidecar::pool::scale::{Replicas, ScaleTarget, Scaled, Scaler};
use serde_json::json;

use crate::api::{Api, Fault};
use crate::world::settings;

async fn scaler(api: &Api, dry_run: bool) -> KubernetesScaler {
    KubernetesScaler::new(Cluster::find(&settings(api)).await.unwrap(), dry_run)
}

fn workload(api: &Api, resource: &str, name: &str, replicas: u32) {
    let metadata = json!({"name": name, "namespace": "inference"});
    let object = json!({
        "metadata": metadata, "spec": {"replicas": replicas}, "status": {"replicas": replicas},
    });
    api.put(resource, object);
}

fn replicas(api: &Api, resource: &str, name: &str) -> u64 {
    api.change(|store| {
        let object = store.get(resource, "inference", name).unwrap();
        object["spec"]["replicas"].as_u64().unwrap()
    })
}

#[tokio::test]
async fn every_kind_of_workload_is_read_and_set() {
    let api = Api::start().await;
    let scaler = scaler(&api, false).await;
    let mut cell = ScaleTarget::new("ServingCell", "w").namespace("inference");
    cell.api_version = Some("example.com/v1alpha1".to_owned());
    for (target, resource) in [
        (ScaleTarget::new("Deployment", "w"), "deployments"),
        (ScaleTarget::new("StatefulSet", "w"), "statefulsets"),
        (ScaleTarget::new("LeaderWorkerSet", "w"), "leaderworkersets"),
        (cell, "servingcells"),
    ] {
        workload(&api, resource, "w", 2);
        let there = Replicas {
            desired: 2,
            running: 2,
        };
        assert_eq!(scaler.replicas(&target).await.unwrap(), there);
        let scaled = scaler.set_replicas(&target, 5).await.unwrap();
        let expected = Scaled {
            before: 2,
            after: 5,
            dry_run: false,
        };
        assert_eq!(scaled, expected);
        assert_eq!(replicas(&api, resource, "w"), 5);
        assert_eq!(scaler.replicas(&target).await.unwrap().running, 2);
        // Nothing to do is nothing done.
        let version = api.change(|store| store.version());
        scaler.set_replicas(&target, 5).await.unwrap();
        assert_eq!(api.change(|store| store.version()), version);
    }
}

#[tokio::test]
async fn whoever_changes_a_workload_at_the_same_time_is_not_overwritten_unseen() {
    let api = Api::start().await;
    let scaler = scaler(&api, false).await;
    let target = ScaleTarget::new("StatefulSet", "vllm");
    workload(&api, "statefulsets", "vllm", 1);
    api.fault("update statefulsets/scale", 2, Fault::Race);
    let scaled = scaler.set_replicas(&target, 3).await.unwrap();
    assert_eq!((scaled.before, scaled.after), (1, 3));
    assert_eq!(api.asked("get statefulsets/scale").len(), 3);
    let annotation = api.change(|store| {
        let object = store.get("statefulsets", "inference", "vllm").unwrap();
        object["metadata"]["annotations"]["changed"].clone()
    });
    assert_eq!(annotation, "by somebody else");
    api.fault("update statefulsets/scale", usize::MAX, Fault::Race);
    let error = scaler.set_replicas(&target, 4).await.unwrap_err();
    assert!(
        error.is_transient && error.message.contains("StatefulSet vllm"),
        "{error}"
    );
    assert!(error.message.contains("conflict"), "{error}");
    assert_eq!(replicas(&api, "statefulsets", "vllm"), 3);
}

#[tokio::test]
async fn a_dry_run_is_checked_by_the_server_and_changes_nothing() {
    let api = Api::start().await;
    let scaler = scaler(&api, true).await;
    workload(&api, "deployments", "vllm", 1);
    let target = ScaleTarget::new("Deployment", "vllm");
    let scaled = scaler.set_replicas(&target, 9).await.unwrap();
    assert_eq!((scaled.before, scaled.after, scaled.dry_run), (1, 9, true));
    assert_eq!(replicas(&api, "deployments", "vllm"), 1);
    assert_eq!(
        api.asked("update deployments/scale")[0].get("dryRun"),
        Some("All")
    );
}

#[tokio::test]
async fn errors_name_the_workload_and_what_is_missing() {
    let api = Api::start().await;
    let scaler = scaler(&api, false).await;
    let absent = ScaleTarget::new("Deployment", "absent");
    let error = scaler.set_replicas(&absent, 1).await.unwrap_err();
    assert!(
        !error.is_transient && error.message.contains("Deployment absent"),
        "{error}"
    );
    assert!(error.message.contains("not found"), "{error}");
    workload(&api, "deployments", "vllm", 1);
    let target = ScaleTarget::new("Deployment", "vllm").namespace("inference");
    api.fault(
        "update deployments/scale",
        1,
        Fault::Status(403, "Forbidden"),
    );
    let error = scaler.set_replicas(&target, 2).await.unwrap_err();
    for words in [
        "Deployment inference/vllm",
        "the verb update",
        "deployments/scale",
        "\"apps\"",
    ] {
        assert!(
            error.message.contains(words),
            "{error} does not say {words}"
        );
    }
    let unknown = ScaleTarget::new("Rollout", "vllm");
    let error = scaler.replicas(&unknown).await.unwrap_err();
    assert!(
        !error.is_transient && error.message.contains("api_version"),
        "{error}"
    );
    let error = scaler
        .replicas(&ScaleTarget::new("Deployment", "a/b"))
        .await
        .unwrap_err();
    assert!(error.message.contains("letters, digits"), "{error}");
    let error = scaler.set_replicas(&target, u32::MAX).await.unwrap_err();
    assert!(error.message.contains("4294967295"), "{error}");
    api.fault("get deployments/scale", 1, Fault::Hang);
    let error = scaler.replicas(&target).await.unwrap_err();
    assert!(
        error.is_transient && error.message.contains("5 seconds"),
        "{error}"
    );
}
