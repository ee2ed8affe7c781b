//! What is published of local engines.

use std::path::PathBuf;
use std::time::Duration;

use kvlane_sidecar::config::Config;
use kvlane_sidecar::pool::process::{ProcessMetrics, Processes};
use kvlane_sidecar::pool::roster::{Phase, RosterReader, Sighting};

use crate::world::{KVLANE, QUICK, engine, kill, nothing_is_left, unique};

async fn until(roster: &mut RosterReader, what: impl Fn(&[Sighting]) -> bool) -> Vec<Sighting> {
    let found = roster.wait_for(|list| what(list));
    let found = tokio::time::timeout(Duration::from_secs(30), found).await;
    found.expect("it comes").unwrap().clone()
}

#[tokio::test]
async fn engines_are_published_with_their_life_and_phase() {
    let template = unique();
    let text = format!(
        "processes: [{{name: {template}, replicas: 2, role: prefill, labels: {{zone: a}}, command: {}, {QUICK}}}]",
        engine()
    );
    let config = Config::from_yaml(&text, "test").unwrap();
    let started = Processes::start_under(
        &config.processes,
        PathBuf::from(KVLANE),
        ProcessMetrics::default(),
    )
    .await;
    let (processes, mut roster) = started.unwrap();
    let first = until(&mut roster, |list| !list.is_empty()).await;
    assert_eq!(first[0].phase, Phase::Starting);
    let serves =
        |list: &[Sighting]| list.len() == 2 && list.iter().all(|one| one.phase == Phase::Serving);
    let both = until(&mut roster, serves).await;
    let worker = &both[1].worker;
    assert_eq!(worker.id.as_str(), format!("{template}-1"));
    assert_eq!(
        (worker.role, worker.labels["zone"].as_str()),
        (kvlane::Role::Prefill, "a")
    );
    let (pid, _) = both[1].instance.split_once('-').unwrap();
    kill("KILL", &[pid.parse().unwrap()]);
    until(&mut roster, |list| list.len() == 1).await;
    let again = until(&mut roster, serves).await;
    assert_eq!(again[0], both[0]);
    assert_ne!(again[1].instance, both[1].instance);
    assert_ne!(
        again[1].worker.url, both[1].worker.url,
        "ports are not used again"
    );
    roster.mark_unchanged();
    let run = processes.run();
    let stopping = tokio::task::JoinSet::from_iter([async move { processes.stop().await }]);
    let leaving = |list: &[Sighting]| list.iter().all(|one| one.phase == Phase::Leaving);
    until(&mut roster, leaving).await;
    until(&mut roster, <[_]>::is_empty).await;
    stopping.join_all().await;
    nothing_is_left(&run, &[]);
}
