//! One source: what it follows, and what it publishes.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::Api;
use kube::core::{DynamicObject, NamespaceResourceScope};
use kube::{Client, Resource as KubeResource};
use tokio::sync::watch;

use super::assemble::{Listing, assemble};
use super::failure::{Failure, Kind, Resource};
use super::follow::{Followed, Listener, follow};
use super::inference_pool::{self, PoolSpec};
use super::reflect::Reflection;
use super::rules::{Reading, Rules};
use super::status::Outlet;
use super::{pods, slices};
use crate::config::{KubernetesSettings, Selection};

/// One source in a cluster, ready to be followed.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) settings: KubernetesSettings,
    pub(super) rules: Rules,
    /// `None` for every namespace.
    pub(super) namespace: Option<String>,
}

impl Source {
    /// Follows until dropped.
    pub(super) async fn run(&self, client: &Client, outlet: &Outlet) {
        match self.settings.selection() {
            Ok(Selection::Pods(selector)) => {
                self.follow_pods(client, selector, &self.rules, outlet)
                    .await;
            }
            Ok(Selection::Service(name)) => self.follow_slices(client, name, outlet).await,
            Ok(Selection::InferencePool(name)) => self.follow_pool(client, name, outlet).await,
            Err(problem) => outlet.failed("settings", &problem),
        }
    }

    async fn follow_pods(&self, client: &Client, selector: &str, rules: &Rules, outlet: &Outlet) {
        let followed = self.followed("pods", "", Some(selector.to_owned()), None);
        let read = |pod: &Pod, key: &_| pods::read(pod, key, rules);
        let workers = Workers {
            outlet,
            kind: "pods",
        };
        follow(self.api(client), followed, read, &workers).await;
    }

    async fn follow_slices(&self, client: &Client, service: &str, outlet: &Outlet) {
        let selector = format!("kubernetes.io/service-name={service}");
        let followed = self.followed("endpointslices", "discovery.k8s.io", Some(selector), None);
        let read = |slice: &EndpointSlice, key: &_| slices::read(slice, key, &self.rules);
        let workers = Workers {
            outlet,
            kind: "endpointslices",
        };
        follow(self.api(client), followed, read, &workers).await;
    }

    /// Follows the pool, and the pods that it selects at the time. When it selects others, the last list stays until that of the
    /// new selection is complete.
    async fn follow_pool(&self, client: &Client, name: &str, outlet: &Outlet) {
        let (sight, mut seen) = watch::channel(Sight::Unknown);
        let pods = async {
            loop {
                let sight = seen.borrow_and_update().clone();
                let following = async {
                    if let Sight::Found(spec) = &sight {
                        let rules = self.rules.with_ports(&spec.ports);
                        self.follow_pods(client, &spec.selector, &rules, outlet)
                            .await;
                    }
                    std::future::pending::<()>().await;
                };
                tokio::select! {
                    _ = seen.changed() => {}
                    () = following => {}
                }
            }
        };
        tokio::join!(self.follow_pool_object(client, name, outlet, &sight), pods);
    }

    /// Looks for the pool in the API's current group and in the one before it, until it is found; and again when it is gone.
    async fn follow_pool_object(
        &self,
        client: &Client,
        name: &str,
        outlet: &Outlet,
        sight: &watch::Sender<Sight>,
    ) {
        let namespace = self.namespace.clone().unwrap_or_default();
        for round in 0_u64.. {
            for resource in inference_pool::resources() {
                let fields = format!("metadata.name={name}");
                let followed = self.followed(&resource.plural, &resource.group, None, Some(fields));
                let pool = Pool {
                    outlet,
                    name: format!("{namespace}/{name}"),
                    sight,
                    is_first_look: round == 0,
                };
                let api =
                    Api::<DynamicObject>::namespaced_with(client.clone(), &namespace, &resource);
                let read = |pool: &DynamicObject, _: &_| inference_pool::read(pool);
                tokio::select! {
                    () = follow(api, followed, read, &pool) => {}
                    () = has_no_use(sight.subscribe()) => {}
                }
            }
        }
    }

    fn api<K>(&self, client: &Client) -> Api<K>
    where
        K: KubeResource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        match &self.namespace {
            Some(namespace) => Api::namespaced(client.clone(), namespace),
            None => Api::all(client.clone()),
        }
    }

    fn followed(
        &self,
        plural: &str,
        group: &str,
        labels: Option<String>,
        fields: Option<String>,
    ) -> Followed {
        Followed {
            resource: Resource {
                plural: plural.to_owned(),
                group: group.to_owned(),
                namespace: self.namespace.clone(),
            },
            labels,
            fields,
            watch_seconds: self.settings.watch_seconds(),
        }
    }
}

/// Publishes what pods or slices say.
struct Workers<'a> {
    outlet: &'a Outlet,
    kind: &'static str,
}

impl Listener<Reading> for Workers<'_> {
    fn changed(&self, reflection: &Reflection<Reading>) {
        self.outlet.publish(assemble(reflection.objects()));
    }

    fn failed(&self, failure: &Failure) {
        self.outlet.failed(self.kind, failure);
    }

    fn succeeded(&self) {
        self.outlet.succeeded(self.kind);
    }

    fn listing(&self) {
        self.outlet.listing();
    }
}

/// What is known of an InferencePool.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Sight {
    /// Nothing yet.
    Unknown,
    /// It is not there.
    Absent,
    /// It selects these.
    Found(PoolSpec),
}

/// Takes in what an InferencePool says.
struct Pool<'a> {
    outlet: &'a Outlet,
    name: String,
    sight: &'a watch::Sender<Sight>,
    /// The other group has not been looked at yet.
    is_first_look: bool,
}

/// Whether the object can be asked for.
const POOL: &str = "inferencepools";
/// Whether it is there and can be read.
const STATE: &str = "inferencepool";

impl Listener<Result<PoolSpec, String>> for Pool<'_> {
    fn changed(&self, reflection: &Reflection<Result<PoolSpec, String>>) {
        match reflection.objects().values().next().map(|pool| &pool.value) {
            Some(Ok(spec)) => {
                self.outlet.succeeded(STATE);
                self.sight.send_if_modified(|sight| {
                    let next = Sight::Found(spec.clone());
                    let changed = *sight != next;
                    *sight = next;
                    changed
                });
            }
            Some(Err(problem)) => {
                let problem = format!("InferencePool {}: {problem}", self.name);
                self.outlet.wrong(STATE, problem);
            }
            None => self.absent(),
        }
    }

    fn failed(&self, failure: &Failure) {
        // The group that a cluster does not know is looked for once at least.
        if failure.kind != Kind::NotFound || !self.is_first_look {
            self.outlet.failed(POOL, failure);
        }
    }

    fn succeeded(&self) {
        self.outlet.succeeded(POOL);
    }

    fn listing(&self) {
        self.outlet.listing();
    }
}

impl Pool<'_> {
    fn absent(&self) {
        let before = self.sight.send_replace(Sight::Absent);
        if matches!(before, Sight::Found(_)) {
            self.outlet.publish(Listing::default());
        }
        if !self.is_first_look || matches!(before, Sight::Found(_)) {
            let problem = format!("InferencePool {} does not exist", self.name);
            self.outlet.wrong(STATE, problem);
        }
    }
}

/// Returns when the pool has not been found for a while.
async fn has_no_use(mut seen: watch::Receiver<Sight>) {
    let is_found = |sight: &Sight| matches!(sight, Sight::Found(_));
    loop {
        if seen.wait_for(|sight| !is_found(sight)).await.is_err() {
            return;
        }
        let found = seen.wait_for(is_found);
        if tokio::time::timeout(PATIENCE, found).await.is_err() {
            return;
        }
    }
}

/// How long the pool is looked for in one group.
const PATIENCE: Duration = Duration::from_secs(3);
