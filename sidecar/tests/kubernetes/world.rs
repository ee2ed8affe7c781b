//! A source that follows a cluster, and what it has published.

use std::time::{Duration, Instant};

use kvlane_sidecar::config::{KubernetesSettings, PortRef};
use kvlane_sidecar::pool::discovery::kubernetes::{Cluster, Outlet, Snapshot, Status, follow};
use kvlane_sidecar::pool::roster::{Phase, Roster, RosterReader, Sighting};
use tokio::task::JoinSet;

use crate::api::Api;

/// Ends with its source.
pub(crate) struct World {
    reader: RosterReader,
    status: Status,
    _task: JoinSet<()>,
}

/// Settings that lead to a server.
pub(crate) fn settings(api: &Api) -> KubernetesSettings {
    let mut settings = KubernetesSettings::default();
    settings.kubeconfig = Some(api.kubeconfig());
    settings.watch_seconds = Some(30);
    settings
}

/// Pods with the label `app=vllm`, with events on the port `events`.
pub(crate) fn pods(api: &Api) -> KubernetesSettings {
    let mut settings = settings(api);
    settings.pods = Some("app=vllm".to_owned());
    settings.events_port = Some(PortRef::Name("events".to_owned()));
    settings
}

impl World {
    pub(crate) async fn start(settings: &KubernetesSettings) -> Self {
        let cluster = Cluster::find(settings).await.unwrap();
        let (roster, reader) = Roster::new();
        let outlet = Outlet::new(roster, Box::new(|_| {}));
        let status = outlet.status();
        let settings = settings.clone();
        let mut task = JoinSet::new();
        task.spawn(async move { follow(&cluster, &settings, false, &outlet).await });
        Self {
            reader,
            status,
            _task: task,
        }
    }

    pub(crate) fn sightings(&self) -> Vec<Sighting> {
        self.reader.borrow().clone()
    }

    pub(crate) fn status(&self) -> Snapshot {
        self.status.snapshot()
    }

    /// Names and phases, in order of names.
    pub(crate) fn members(&self) -> Vec<(String, Phase)> {
        let sightings = self.sightings();
        let all = sightings.iter();
        all.map(|sighting| (sighting.worker.id.to_string(), sighting.phase))
            .collect()
    }

    /// Waits for a list; panics with what is there instead.
    pub(crate) async fn has(&self, expected: &[(&str, Phase)]) {
        let expected: Vec<_> = expected
            .iter()
            .map(|(name, phase)| ((*name).to_owned(), *phase))
            .collect();
        self.until(&format!("{expected:?}"), || self.members() == expected)
            .await;
    }

    pub(crate) async fn until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !is_so() {
            let there = (self.members(), self.status());
            assert!(
                Instant::now() < deadline,
                "waited for {what}, there is {there:?}"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits for an error that says all of this.
    pub(crate) async fn says(&self, words: &[&str]) {
        self.until(&format!("an error that says {words:?}"), || {
            let error = self.status().error().unwrap_or_default();
            !error.is_empty() && words.iter().all(|word| error.contains(word))
        })
        .await;
    }

    pub(crate) async fn is_well(&self) {
        self.until("no error", || self.status().error().is_none())
            .await;
    }
}
