//! Pods come, change and go; the API server answers well, badly, or not at all.

use std::time::{Duration, Instant};

use kvlane::Role;
use kvlane_sidecar::config::AddressFamily;
use kvlane_sidecar::pool::roster::Phase::{Leaving, Serving, Starting};
use serde_json::json;

use crate::api::{Api, Fault};
use crate::cluster::pod;
use crate::world::{World, pods};

#[tokio::test]
async fn a_pod_is_followed_from_its_address_to_its_end() {
    let api = Api::start().await;
    let mut unscheduled = pod("vllm-0", "", false);
    unscheduled["status"] = json!({"phase": "Pending"});
    api.put("pods", unscheduled);
    let world = World::start(&pods(&api)).await;
    world
        .until("a waiting pod", || world.status().waiting == 1)
        .await;
    assert_eq!(world.members(), []);
    api.put("pods", pod("vllm-0", "10.0.0.1", false));
    world.has(&[("vllm-0", Starting)]).await;
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    world.has(&[("vllm-0", Serving)]).await;
    let sighting = &world.sightings()[0];
    assert_eq!(sighting.worker.url.to_string(), "http://10.0.0.1:8000");
    assert_eq!(
        sighting.worker.events.as_deref(),
        Some("tcp://10.0.0.1:5557")
    );
    assert_eq!(sighting.worker.labels["app"], "vllm");
    assert_eq!(
        (sighting.instance.as_str(), sighting.worker.role),
        ("uid-1/0", Role::Both)
    );
    api.edit("pods", "vllm-0", |pod| {
        pod["metadata"]["deletionTimestamp"] = json!("2026-11-01T11:00:00Z");
    });
    world.has(&[("vllm-0", Leaving)]).await;
    api.delete("pods", "vllm-0");
    world.has(&[]).await;
    assert_eq!(world.status().lists, 1, "nothing of it needed a list");
}

#[tokio::test]
async fn a_restarted_engine_and_a_recreated_pod_are_other_lives() {
    let api = Api::start().await;
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    let world = World::start(&pods(&api)).await;
    world.has(&[("vllm-0", Serving)]).await;
    // A service mesh's restart is not the engine's.
    api.edit("pods", "vllm-0", |pod| {
        let statuses = pod["status"]["containerStatuses"].as_array_mut().unwrap();
        let mut mesh = statuses[0].clone();
        mesh["name"] = json!("mesh");
        mesh["restartCount"] = json!(5);
        statuses.push(mesh);
        pod["metadata"]["labels"]["seen"] = json!("mesh");
    });
    let label = |name: &str| world.sightings()[0].worker.labels.contains_key(name);
    world.until("the label", || label("seen")).await;
    assert_eq!(world.sightings()[0].instance, "uid-1/0");
    api.edit("pods", "vllm-0", |pod| {
        pod["status"]["containerStatuses"][0]["restartCount"] = json!(1);
    });
    world
        .until("another life", || {
            world.sightings()[0].instance == "uid-1/1"
        })
        .await;
    api.change(|store| {
        store.delete("pods", "inference", "vllm-0");
        store.put("pods", pod("vllm-0", "10.0.0.1", true));
    });
    world
        .until("another pod", || world.sightings()[0].instance == "uid-2/0")
        .await;
}

#[tokio::test]
async fn a_label_moves_a_pod_out_of_the_selection_and_back() {
    let api = Api::start().await;
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    let world = World::start(&pods(&api)).await;
    world.has(&[("vllm-0", Serving)]).await;
    api.edit("pods", "vllm-0", |pod| {
        pod["metadata"]["labels"]["app"] = json!("retired")
    });
    world.has(&[]).await;
    api.edit("pods", "vllm-0", |pod| {
        pod["metadata"]["labels"]["app"] = json!("vllm")
    });
    world.has(&[("vllm-0", Serving)]).await;
}

#[tokio::test]
async fn pods_that_ended_are_none_and_an_address_has_one_owner() {
    let api = Api::start().await;
    let mut evicted = pod("vllm-0", "10.0.0.1", false);
    evicted["status"]["phase"] = json!("Failed");
    api.put("pods", evicted);
    let mut old = pod("vllm-1", "10.0.0.2", true);
    old["metadata"]["deletionTimestamp"] = json!("2026-11-01T11:00:00Z");
    api.put("pods", old);
    api.put("pods", pod("vllm-2", "10.0.0.2", true));
    let world = World::start(&pods(&api)).await;
    world.has(&[("vllm-2", Serving)]).await;
    let problem = &world.status().problems["vllm-1"];
    assert!(
        problem.contains("http://10.0.0.2:8000 is vllm-2's now"),
        "{problem}"
    );
}

#[tokio::test]
async fn addresses_of_both_families_are_written_as_urls() {
    let api = Api::start().await;
    api.put("pods", pod("vllm-0", "fd00::5", true));
    let mut dual = pod("vllm-1", "10.0.0.1", true);
    dual["status"]["podIPs"] = json!([{"ip": "10.0.0.1"}, {"ip": "FD00:0::6"}]);
    api.put("pods", dual);
    let world = World::start(&pods(&api)).await;
    world.has(&[("vllm-0", Serving), ("vllm-1", Serving)]).await;
    let urls = |world: &World| -> Vec<String> {
        let all = world.sightings();
        all.iter()
            .map(|sighting| sighting.worker.url.to_string())
            .collect()
    };
    assert_eq!(
        urls(&world),
        ["http://[fd00::5]:8000", "http://10.0.0.1:8000"]
    );
    let events = world.sightings()[0].worker.events.clone();
    assert_eq!(events.as_deref(), Some("tcp://[fd00::5]:5557"));
    let mut settings = pods(&api);
    settings.address_family = Some(AddressFamily::Ipv6);
    let world = World::start(&settings).await;
    world.has(&[("vllm-0", Serving), ("vllm-1", Serving)]).await;
    assert_eq!(urls(&world)[1], "http://[fd00::6]:8000");
    settings.address_family = Some(AddressFamily::Ipv4);
    let world = World::start(&settings).await;
    world.has(&[("vllm-1", Serving)]).await;
    let problem = &world.status().problems["inference/vllm-0"];
    assert!(
        problem.contains("family") && problem.contains("fd00::5"),
        "{problem}"
    );
}

#[tokio::test]
async fn what_a_pod_says_of_itself_is_believed_or_named() {
    let api = Api::start().await;
    let annotated = |name: &str, ip: &str, annotations: serde_json::Value| {
        let mut pod = pod(name, ip, true);
        pod["metadata"]["annotations"] = annotations;
        api.put("pods", pod);
    };
    annotated(
        "a-prefill",
        "10.0.0.1",
        json!({"kvlane.io/role": "prefill", "kvlane.io/events-port": "6000", "kvlane.io/replay-port": "6001", "kvlane.io/topic": "kv", "kvlane.io/dp-ranks": "4"}),
    );
    annotated("b-role", "10.0.0.2", json!({"kvlane.io/role": "prefil"}));
    annotated("c-ranks", "10.0.0.3", json!({"kvlane.io/dp-ranks": "0"}));
    annotated(
        "d-events",
        "10.0.0.4",
        json!({"kvlane.io/events-port": "no-such"}),
    );
    annotated(
        "e-events",
        "10.0.0.5",
        json!({"kvlane.io/events-port": "65536"}),
    );
    let mut llm_d = pod("f-llm-d", "10.0.0.6", true);
    llm_d["metadata"]["labels"]["llm-d.ai/role"] = json!("decode");
    api.put("pods", llm_d);
    let world = World::start(&pods(&api)).await;
    let members = ["a-prefill", "d-events", "e-events", "f-llm-d"];
    world.has(&members.map(|name| (name, Serving))).await;
    let sightings = world.sightings();
    let worker = &sightings[0].worker;
    assert_eq!((worker.role, worker.dp_ranks), (Role::Prefill, 4));
    assert_eq!(worker.events.as_deref(), Some("tcp://10.0.0.1:6000"));
    assert_eq!(worker.replay.as_deref(), Some("tcp://10.0.0.1:6001"));
    assert_eq!(worker.topic.as_deref(), Some("kv"));
    assert_eq!(sightings[1].worker.events, None);
    // What is not said is left to be learned from the engine.
    assert!(worker.says_role() && !sightings[1].worker.says_role());
    assert_eq!(sightings[3].worker.role, Role::Decode);
    let problems = world.status().problems;
    for (name, words) in [
        (
            "b-role",
            ["skipped", "kvlane.io/role", "\"prefil\"", "prefill, decode"],
        ),
        (
            "c-ranks",
            ["skipped", "kvlane.io/dp-ranks", "\"0\"", "1 to 1,024"],
        ),
        (
            "d-events",
            ["without events", "no-such", "no port named", "events, http"],
        ),
        (
            "e-events",
            [
                "without events",
                "kvlane.io/events-port",
                "65536",
                "1 to 65535",
            ],
        ),
    ] {
        let problem = &problems[&format!("inference/{name}")];
        for word in words {
            assert!(problem.contains(word), "{problem:?} does not say {word:?}");
        }
    }
    assert_eq!(problems.len(), 4, "{problems:?}");
    // Corrected, they are members.
    api.edit("pods", "b-role", |pod| {
        pod["metadata"]["annotations"]["kvlane.io/role"] = json!("both")
    });
    world
        .until("the corrected pod", || world.members().len() == 5)
        .await;
    let said = world.sightings();
    assert!(said[1].worker.says_role() && said[1].worker.role == Role::Both);
    assert_eq!(world.status().problems.len(), 3);
}

#[tokio::test]
async fn a_large_list_is_published_whole() {
    let api = Api::start().await;
    for n in 0..1_203 {
        api.put(
            "pods",
            pod(
                &format!("vllm-{n:04}"),
                &format!("10.0.{}.{}", n / 250, n % 250),
                true,
            ),
        );
    }
    let world = World::start(&pods(&api)).await;
    world
        .until("the list", || {
            let count = world.members().len();
            assert!(
                count == 0 || count == 1_203,
                "{count} of 1,203 were published"
            );
            count == 1_203
        })
        .await;
    let pages = api.asked("list pods");
    assert_eq!(pages.len(), 3);
    assert_eq!(pages[0].get("limit"), Some("500"));
}

#[tokio::test]
async fn an_expired_watch_lists_anew_and_drops_ghosts() {
    let api = Api::start().await;
    for (name, ip) in [("vllm-0", "10.0.0.1"), ("vllm-1", "10.0.0.2")] {
        api.put("pods", pod(name, ip, true));
    }
    let world = World::start(&pods(&api)).await;
    world.has(&[("vllm-0", Serving), ("vllm-1", Serving)]).await;
    // Nobody hears of the end of the second, nor of the third's beginning: the server has forgotten both.
    api.change(|store| {
        store.delete("pods", "inference", "vllm-1");
        store.put("pods", pod("vllm-2", "10.0.0.3", true));
        store.compact();
    });
    world.has(&[("vllm-0", Serving), ("vllm-2", Serving)]).await;
    world.is_well().await;
    assert_eq!(world.status().lists, 2);
    api.fault("watch pods", 1, Fault::Error(410, "Gone"));
    world
        .until("a third list", || world.status().lists == 3)
        .await;
    api.put("pods", pod("vllm-3", "10.0.0.4", false));
    let members = [
        ("vllm-0", Serving),
        ("vllm-2", Serving),
        ("vllm-3", Starting),
    ];
    world.has(&members).await;
}

#[tokio::test]
async fn a_watch_that_is_refused_as_too_old_is_not_asked_for_again() {
    let api = Api::start().await;
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    api.fault("watch pods", 1, Fault::Status(410, "Expired"));
    let world = World::start(&pods(&api)).await;
    world
        .until("a second list", || world.status().lists == 2)
        .await;
    api.put("pods", pod("vllm-1", "10.0.0.2", true));
    world.has(&[("vllm-0", Serving), ("vllm-1", Serving)]).await;
}

#[tokio::test]
async fn a_watch_that_ends_or_breaks_goes_on_where_it_was() {
    let api = Api::start().await;
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    let world = World::start(&pods(&api)).await;
    world.has(&[("vllm-0", Serving)]).await;
    for (n, fault) in [(1, Fault::End), (2, Fault::Break)] {
        api.fault("watch pods", 1, fault);
        let before = api.asked("watch pods").len();
        api.put(
            "pods",
            pod(&format!("vllm-{n}"), &format!("10.0.0.{}", n + 1), true),
        );
        world
            .until("the next pod", || world.members().len() == n + 1)
            .await;
        assert!(api.asked("watch pods").len() > before);
    }
    assert_eq!(world.status().lists, 1);
    world.is_well().await;
}

#[tokio::test]
async fn bookmarks_spare_a_list_after_a_quiet_time() {
    let api = Api::start().await;
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    let world = World::start(&pods(&api)).await;
    world.has(&[("vllm-0", Serving)]).await;
    // Much happens to pods that are not ours, and the server forgets it.
    api.change(|store| {
        for _ in 0..50 {
            let mut other = pod("other", "10.0.1.1", true);
            other["metadata"]["labels"] = json!({"app": "other"});
            store.put("pods", other);
        }
    });
    let version = api.change(|store| store.version());
    tokio::time::sleep(Duration::from_millis(600)).await;
    api.change(|store| store.compact());
    api.fault("watch pods", 1, Fault::End);
    world
        .until("the next watch", || {
            let last = api.asked("watch pods").pop().unwrap();
            last.get("resourceVersion").unwrap().parse::<u64>().unwrap() >= version
        })
        .await;
    api.put("pods", pod("vllm-1", "10.0.0.2", true));
    world.has(&[("vllm-0", Serving), ("vllm-1", Serving)]).await;
    assert_eq!(world.status().lists, 1);
}

#[tokio::test]
async fn events_that_come_twice_and_in_the_wrong_order_end_in_the_right_state() {
    let api = Api::start().await;
    api.is_messy(true);
    let world = World::start(&pods(&api)).await;
    world
        .until("the first list", || world.status().synced)
        .await;
    for round in 0..20 {
        api.change(|store| {
            store.put("pods", pod("vllm-0", "10.0.0.1", false));
            store.put("pods", pod("vllm-0", "10.0.0.1", true));
            store.delete("pods", "inference", "vllm-0");
            store.put("pods", pod("vllm-1", "10.0.0.2", round % 2 == 0));
        });
    }
    world.has(&[("vllm-1", Starting)]).await;
    assert_eq!(world.status().lists, 1);
}

#[tokio::test]
async fn an_event_that_cannot_be_read_costs_a_list_and_no_member() {
    let api = Api::start().await;
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    let world = World::start(&pods(&api)).await;
    world.has(&[("vllm-0", Serving)]).await;
    api.fault("watch pods", 1, Fault::Garbage);
    world
        .until("a second list", || world.status().lists == 2)
        .await;
    api.put("pods", pod("vllm-1", "10.0.0.2", true));
    world.has(&[("vllm-0", Serving), ("vllm-1", Serving)]).await;
    world.is_well().await;
}

#[tokio::test]
async fn a_forbidden_list_names_the_verb_and_the_resource() {
    let api = Api::start().await;
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    api.fault("list pods", usize::MAX, Fault::Status(403, "Forbidden"));
    let world = World::start(&pods(&api)).await;
    world
        .says(&[
            "not permitted to list pods in namespace inference",
            "a Role in namespace inference",
            "the verb list",
            "the resource pods",
            "API group \"\"",
        ])
        .await;
    assert!(!world.status().synced);
    api.no_faults();
    world.has(&[("vllm-0", Serving)]).await;
    world.is_well().await;
    let mut everywhere = pods(&api);
    everywhere.namespace = Some("*".to_owned());
    api.fault("list pods", usize::MAX, Fault::Status(403, "Forbidden"));
    let world = World::start(&everywhere).await;
    world
        .says(&["list pods in all namespaces", "a ClusterRole"])
        .await;
    api.no_faults();
    world.has(&[("inference.vllm-0", Serving)]).await;
}

#[tokio::test]
async fn a_server_that_fails_or_leaves_keeps_the_last_list() {
    let api = Api::start().await;
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    let world = World::start(&pods(&api)).await;
    world.has(&[("vllm-0", Serving)]).await;
    api.fault("list pods", usize::MAX, Fault::Status(500, "InternalError"));
    api.fault(
        "watch pods",
        usize::MAX,
        Fault::Status(503, "ServiceUnavailable"),
    );
    api.fault("list pods", usize::MAX, Fault::Status(500, "InternalError"));
    drop(api);
    world
        .says(&["cannot", "pods in namespace inference", "onnect"])
        .await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(world.members(), [("vllm-0".to_owned(), Serving)]);
}

#[tokio::test]
async fn a_server_that_never_answers_is_given_up_and_asked_again() {
    let api = Api::start().await;
    api.put("pods", pod("vllm-0", "10.0.0.1", true));
    api.fault("list pods", 1, Fault::Hang);
    let begun = Instant::now();
    let world = World::start(&pods(&api)).await;
    world.has(&[("vllm-0", Serving)]).await;
    assert!(begun.elapsed() >= Duration::from_secs(14));
    assert_eq!(world.status().failures, 1);
}

#[tokio::test]
async fn credentials_that_are_not_accepted_are_said() {
    let api = Api::start().await;
    let mut settings = pods(&api);
    let path = settings.kubeconfig.take().unwrap();
    let text = std::fs::read_to_string(&path)
        .unwrap()
        .replace("secret", "wrong");
    std::fs::write(&path, text).unwrap();
    settings.kubeconfig = Some(path);
    let world = World::start(&settings).await;
    world.says(&["does not accept the credentials"]).await;
}

#[tokio::test]
async fn a_cluster_that_cannot_be_found_says_where_it_was_looked_for() {
    use kvlane_sidecar::pool::discovery::kubernetes::Cluster;
    let api = Api::start().await;
    let mut settings = pods(&api);
    settings.context = Some("elsewhere".to_owned());
    let error = Cluster::find(&settings).await.unwrap_err();
    assert!(
        error.contains("kubeconfig") && error.contains("elsewhere"),
        "{error}"
    );
    settings.kubeconfig = Some("/nonexistent/kubeconfig".into());
    let error = Cluster::find(&settings).await.unwrap_err();
    assert!(error.contains("/nonexistent/kubeconfig"), "{error}");
}
