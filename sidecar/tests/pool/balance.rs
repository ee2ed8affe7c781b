//! The pool's planner over `kvlane serve`: what it proposes, what is done of it, and what the metrics say.

use std::time::Instant;

use kvlane::{Role, SaltContext, SelectRequest};
use kvlane_sidecar::config::PlannerSettings;
use kvlane_sidecar::pool::roster::Sighting;
use kvlane_sidecar::pool::sources::Absence;
use kvlane_sidecar::serve::ServeHandle;
use serde_json::{Value, json};

use crate::setup::{admin, engine, eventually, metrics, sidecar, sighting, source, until_state};

fn settings(mode: &str) -> PlannerSettings {
    let text = json!({
        "mode": mode,
        "interval_seconds": 0.1,
        "up_window_seconds": 0.3,
        "flip_window_seconds": 0.3,
        "flip_cool_down_seconds": 60,
        "cool_down_seconds": 0.5,
        "prefill": {"min": 1},
        "decode": {"min": 1},
    });
    PlannerSettings::from_fields(text.as_object().unwrap()).unwrap()
}

fn role_of(handle: &ServeHandle, id: &str) -> Role {
    handle.app().fleet.members().find(id).unwrap().role()
}

async fn planner(handle: &ServeHandle) -> Value {
    admin(handle, "GET", "/v1/pool", "").await.json()["planner"].clone()
}

/// One worker for prompts, which has one to compute all the time, and two that decode and have nothing to do.
async fn busy_with_prompts(mode: &str) -> ServeHandle {
    let engine = engine(1.0).await;
    let handle = sidecar(|config| config.planner = Some(settings(mode))).await;
    let of = |id: &str, role: Role, flippable: &str| {
        let mut sighting: Sighting = sighting(id, &engine.url(), "1");
        sighting.worker.role = role;
        let label = ("kvlane.io/flippable".to_owned(), flippable.to_owned());
        sighting.worker.labels.extend([label]);
        sighting
    };
    let pods = source(&handle, "pods", Absence::Ended);
    pods.publish(vec![
        of("d1", Role::Decode, "true"),
        of("d2", Role::Decode, "false"),
        of("p1", Role::Prefill, "true"),
    ]);
    for id in ["d1", "d2", "p1"] {
        until_state(&handle, id, "ready").await;
    }
    let tokens: Vec<u32> = (0..1_600).collect();
    let prompt = handle.router.prompt(&tokens, &SaltContext::default());
    let request = SelectRequest::new(&prompt);
    let booked = handle.router.book("p1", None, &request, Instant::now());
    // Given back when its lease ends, which is after the test.
    let _ = booked.unwrap().detach(Instant::now());
    // The engine and the source's end live as long as the test.
    std::mem::forget((engine, pods));
    handle
}

#[tokio::test]
async fn a_worker_that_may_changes_its_role_to_where_the_load_is() {
    let handle = busy_with_prompts("act").await;
    eventually("a decode worker computes prompts", || {
        role_of(&handle, "d1") == Role::Prefill
    })
    .await;
    assert_eq!(role_of(&handle, "d2"), Role::Decode);
    let shown = planner(&handle).await;
    let actions = shown["actions"].as_array().unwrap();
    let flip = actions
        .iter()
        .find(|action| action["proposal"]["action"] == "flip");
    let flip = flip.unwrap_or_else(|| panic!("{shown}"));
    assert_eq!(flip["proposal"]["worker"], "d1");
    assert_eq!(flip["outcome"], "role changed");
    let text = metrics(&handle).await;
    assert!(
        text.contains("kvlane_pool_proposals_total{action=\"flip\",role=\"prefill\"} 1"),
        "{text}"
    );
    assert!(
        text.contains("kvlane_pool_current_workers{role=\"decode\"}"),
        "{text}"
    );
}

#[tokio::test]
async fn a_dry_run_shows_and_changes_nothing() {
    let handle = busy_with_prompts("dry_run").await;
    let text = tokio::time::timeout(std::time::Duration::from_secs(20), async {
        loop {
            let text = metrics(&handle).await;
            if text.contains("kvlane_pool_proposals_total{action=\"flip\",role=\"prefill\"} 1") {
                return text;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    });
    text.await.expect("a flip is proposed");
    assert_eq!(role_of(&handle, "d1"), Role::Decode);
    let shown = planner(&handle).await;
    assert_eq!(shown["mode"], "dry_run");
    assert_eq!(shown["actions"][0]["outcome"], "dry run", "{shown}");
}

#[tokio::test]
async fn a_role_that_nothing_starts_says_so_and_is_left_to_an_autoscaler() {
    let handle = sidecar(|config| {
        let mut settings = settings("act");
        settings.planner.both.min = 2;
        settings.planner.prefill.min = 0;
        settings.planner.decode.min = 0;
        config.planner = Some(settings);
    })
    .await;
    let mut shown = Value::Null;
    for _ in 0..1_000 {
        shown = planner(&handle).await;
        if shown["actions"]
            .as_array()
            .is_some_and(|list| !list.is_empty())
        {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let outcome = shown["actions"][0]["outcome"].as_str().unwrap();
    assert!(
        outcome.contains("nothing starts or stops both workers"),
        "{shown}"
    );
    let text = metrics(&handle).await;
    assert!(
        text.contains("kvlane_pool_desired_workers{role=\"both\"} 2"),
        "{text}"
    );
}
