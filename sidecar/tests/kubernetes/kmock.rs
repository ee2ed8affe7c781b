//! kmock's emulator, an API server that others wrote. It knows neither versions nor selectors; both have their own tests.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::core::DynamicObject;
use kube::discovery::ApiResource;
use kube::{Client, Config};
use kvlane_sidecar::config::KubernetesSettings;
use kvlane_sidecar::pool::roster::Phase::{Serving, Starting};
use kvlane_tests::free_port;
use serde_json::{Value, json};

use crate::cluster::pod;
use crate::world::World;

struct Emulator {
    process: Child,
    client: Client,
    folder: tempfile::TempDir,
}

impl Emulator {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self::start_in(folder, false).await
    }

    /// Behind TLS, with a certificate of its own authority.
    async fn start_with_tls() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let made = Command::new("sh")
            .args(["-ec", CERTIFICATES])
            .current_dir(folder.path())
            .stderr(Stdio::null())
            .status();
        assert!(made.unwrap().success());
        Self::start_in(folder, true).await
    }

    async fn start_in(folder: tempfile::TempDir, tls: bool) -> Self {
        let python = std::env::var("KVLANE_KMOCK_PYTHON").expect(
            "KVLANE_KMOCK_PYTHON names a Python with kmock; scripts/test.sh kubernetes sets it",
        );
        let port = free_ports();
        let script = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/kubernetes/kmock_server.py"
        );
        let mut command = Command::new(python);
        command.args([script, &port.to_string()]);
        if tls {
            command.args(["cert.pem", "key.pem"]);
        }
        let mut process = command
            .current_dir(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let line = tokio::task::spawn_blocking(move || lines.next())
            .await
            .unwrap();
        assert_eq!(line.unwrap().unwrap(), "listening");
        let mut cluster = json!({"server": format!("http://127.0.0.1:{port}")});
        if tls {
            cluster = json!({
                "server": format!("https://127.0.0.1:{port}"),
                "certificate-authority": folder.path().join("ca.pem"),
            });
        }
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "kmock",
            "clusters": [{"name": "kmock", "cluster": cluster}],
            "users": [{"name": "kmock", "user": {}}],
            "contexts": [{"name": "kmock", "context": {"cluster": "kmock", "user": "kmock", "namespace": "inference"}}],
        });
        std::fs::write(folder.path().join("kubeconfig"), config.to_string()).unwrap();
        let plain = format!("http://127.0.0.1:{}", port + u16::from(tls));
        Self {
            process,
            client: Client::try_from(Config::new(plain.parse().unwrap())).unwrap(),
            folder,
        }
    }

    fn settings(&self) -> KubernetesSettings {
        let mut settings = KubernetesSettings::default();
        settings.kubeconfig = Some(self.folder.path().join("kubeconfig"));
        settings
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "inference")
    }

    async fn create(&self, pod: Value) {
        let pod = serde_json::from_value(pod).unwrap();
        self.pods()
            .create(&PostParams::default(), &pod)
            .await
            .unwrap();
    }
}

/// An authority, and what it signs.
const CERTIFICATES: &str = r#"
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.pem
openssl req -newkey rsa:2048 -nodes -subj /CN=kmock -keyout key.pem -out cert.csr
echo "subjectAltName=IP:127.0.0.1" >names
openssl x509 -req -in cert.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out cert.pem
"#;

/// A port that is free, and so is the next.
fn free_ports() -> u16 {
    let mut before = free_port();
    loop {
        let port = free_port();
        if port == before + 1 {
            return before;
        }
        before = port;
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
#[ignore = "needs kmock: scripts/test.sh kubernetes"]
async fn pods_are_listed_watched_changed_and_deleted() {
    let emulator = Emulator::start().await;
    emulator.create(pod("vllm-0", "10.0.0.1", true)).await;
    let mut settings = emulator.settings();
    settings.pods = Some("app=vllm".to_owned());
    let world = World::start(&settings).await;
    world.has(&[("vllm-0", Serving)]).await;
    emulator.create(pod("vllm-1", "fd00::1", false)).await;
    world
        .has(&[("vllm-0", Serving), ("vllm-1", Starting)])
        .await;
    let change = json!({"metadata": {"labels": {"tier": "gold"}}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    let change = Patch::Merge(&change);
    emulator
        .pods()
        .patch("vllm-1", &PatchParams::default(), &change)
        .await
        .unwrap();
    world.has(&[("vllm-0", Serving), ("vllm-1", Serving)]).await;
    assert_eq!(world.sightings()[1].worker.labels["tier"], "gold");
    emulator
        .pods()
        .delete("vllm-0", &DeleteParams::default())
        .await
        .unwrap();
    world.has(&[("vllm-1", Serving)]).await;
    world.is_well().await;
}

#[tokio::test]
#[ignore = "needs kmock: scripts/test.sh kubernetes"]
async fn an_inference_pool_selects_its_pods() {
    let emulator = Emulator::start().await;
    emulator.create(pod("vllm-0", "10.0.0.1", true)).await;
    let mut settings = emulator.settings();
    settings.inference_pool = Some("vllm".to_owned());
    let world = World::start(&settings).await;
    // The emulator knows a resource once there is an object of it.
    world.says(&["inferencepools", "not found"]).await;
    let resource = ApiResource::from_gvk_with_plural(
        &kube::core::gvk::GroupVersionKind::gvk(
            "inference.networking.k8s.io",
            "v1",
            "InferencePool",
        ),
        "inferencepools",
    );
    let pools =
        Api::<DynamicObject>::namespaced_with(emulator.client.clone(), "inference", &resource);
    let spec = json!({"spec": {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8100}]}});
    let pool = DynamicObject::new("vllm", &resource)
        .within("inference")
        .data(spec);
    pools.create(&PostParams::default(), &pool).await.unwrap();
    world.has(&[("vllm-0", Serving)]).await;
    assert_eq!(
        world.sightings()[0].worker.url.to_string(),
        "http://10.0.0.1:8100"
    );
    pools
        .delete("vllm", &DeleteParams::default())
        .await
        .unwrap();
    world.has(&[]).await;
}

#[tokio::test]
#[ignore = "needs kmock: scripts/test.sh kubernetes"]
async fn a_cluster_is_reached_over_tls_by_its_own_authority_alone() {
    let emulator = Emulator::start_with_tls().await;
    emulator.create(pod("vllm-0", "10.0.0.1", true)).await;
    let mut settings = emulator.settings();
    settings.pods = Some("app=vllm".to_owned());
    let world = World::start(&settings).await;
    world.has(&[("vllm-0", Serving)]).await;
    let path = settings.kubeconfig.clone().unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    let cluster = &mut config["clusters"][0]["cluster"];
    cluster
        .as_object_mut()
        .unwrap()
        .remove("certificate-authority");
    std::fs::write(&path, config.to_string()).unwrap();
    let world = World::start(&settings).await;
    world.says(&["cannot list pods", "certificate"]).await;
    assert_eq!(world.members(), []);
}
