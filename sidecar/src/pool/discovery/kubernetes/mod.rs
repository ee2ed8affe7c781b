//! Workers that a Kubernetes API server tells of: pods by label, the endpoints of a service, the pods of an InferencePool.
//!
//! Three layers, each of which can be tried alone. `reflect` turns lists and watch events into the whole set of objects;
//! `pods`, `slices` and `inference_pool` read one object each, by the `rules` of the configuration; `assemble` makes one list
//! of workers of it, which is published as a whole. `follow` is what talks to the server.
//!
//! A list is published when it is complete, and the last one stays for as long as the server cannot be asked: whether workers
//! answer is seen by probes, not here. An object that cannot be used is named with the reason, never left out in silence.

mod assemble;
mod client;
mod failure;
mod follow;
mod inference_pool;
mod pods;
pub mod reflect;
mod rules;
mod scale;
mod slices;
mod source;
mod status;

pub use client::Cluster;
pub use scale::KubernetesScaler;
pub use status::{OnChange, Outlet, Snapshot, Status};

use std::sync::Arc;

use follow::Delay;
use rules::Rules;
use source::Source;

use crate::app::App;
use crate::config::KubernetesSettings;
use crate::pool::sources::{Absence, Feed};

/// Starts every source of the section `discovery.kubernetes`.
pub fn start(app: &Arc<App>, sources: &[KubernetesSettings]) {
    let is_qualified = are_names_qualified(sources);
    for settings in sources.iter().cloned() {
        app.start_source(&settings.source(), Absence::Left, |feed| {
            run(settings, is_qualified, feed)
        });
    }
}

/// Finds the cluster that the settings name, as often as it takes, and follows it until dropped.
async fn run(settings: KubernetesSettings, is_qualified: bool, feed: Feed) {
    let Feed { roster, report, .. } = feed;
    let on_change = move |status: &Snapshot| {
        report.skipped(status.problems.clone());
        match status.error() {
            Some(problem) => report.failed(problem),
            None => report.succeeded(),
        }
    };
    let outlet = Outlet::new(roster, Box::new(on_change));
    let mut delay = Delay::default();
    loop {
        match Cluster::find(&settings).await {
            Ok(cluster) => {
                outlet.succeeded(CLUSTER);
                follow(&cluster, &settings, is_qualified, &outlet).await;
            }
            // A kubeconfig or a token may be mounted later than the sidecar starts.
            Err(problem) => outlet.failed(CLUSTER, &problem),
        }
        tokio::time::sleep(delay.next()).await;
    }
}

const CLUSTER: &str = "cluster";

/// Follows one source until dropped.
///
/// Worker names are pods' names; `is_qualified` puts the namespace before them (`namespace.pod`), which is needed where several
/// namespaces are followed.
pub async fn follow(
    cluster: &Cluster,
    settings: &KubernetesSettings,
    is_qualified: bool,
    outlet: &Outlet,
) {
    let namespace = match settings.namespace.as_deref() {
        Some("*") => None,
        Some(namespace) => Some(namespace.to_owned()),
        None => Some(cluster.namespace.clone()),
    };
    let source = Source {
        rules: Rules::new(settings, is_qualified),
        settings: settings.clone(),
        namespace,
    };
    source.run(&cluster.client, outlet).await;
}

/// Tells whether names must be qualified: several namespaces are followed.
fn are_names_qualified(sources: &[KubernetesSettings]) -> bool {
    let place = |source: &KubernetesSettings| {
        (
            source.kubeconfig.clone(),
            source.context.clone(),
            source.namespace.clone(),
        )
    };
    let mut places = sources.iter().map(place);
    let first = places.next();
    places.any(|place| Some(place) != first)
}

/// The model of an API server that the tests over HTTP use, too.
#[cfg(test)]
#[path = "../../../../tests/kubernetes/cluster.rs"]
#[allow(dead_code, reason = "each of its two users needs a part of it")]
mod cluster;
#[cfg(test)]
mod random_tests;
#[cfg(test)]
mod tests;
