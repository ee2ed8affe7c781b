//! Replicas through the scale subresource.

use std::str::FromStr;
use std::time::Duration;

use k8s_openapi::api::autoscaling::v1::Scale;
use kube::api::{Api, PostParams};
use kube::core::DynamicObject;
use kube::core::gvk::GroupVersion;
use kube::discovery::ApiResource;
use tracing::info;

use super::client::Cluster;
use super::failure::{Failure, Kind, Question, Resource};
use super::follow::{Delay, within};
use crate::pool::scale::{Answer, Replicas, ScaleError, ScaleTarget, Scaled, Scaler};

/// Reads and sets replicas through the scale subresource of the cluster's API.
///
/// The role needs `get` and `update` on the subresource, as in `statefulsets/scale`.
#[derive(Clone, Debug)]
pub struct KubernetesScaler {
    cluster: Cluster,
    dry_run: bool,
}

/// How often a change is tried when others change the workload at the same time.
const TRIES: u32 = 5;
/// How long the server may take for one answer.
const ANSWER: Duration = Duration::from_secs(5);

impl KubernetesScaler {
    /// Creates one; with `dry_run` the server checks every change and makes none.
    #[must_use]
    pub const fn new(cluster: Cluster, dry_run: bool) -> Self {
        Self { cluster, dry_run }
    }

    async fn read(&self, target: &ScaleTarget) -> Result<Replicas, ScaleError> {
        let workload = self.workload(target)?;
        let scale = workload.get().await?;
        Ok(Replicas {
            desired: desired(&scale),
            running: count(scale.status.map_or(0, |status| status.replicas)),
        })
    }

    async fn set(&self, target: &ScaleTarget, replicas: u32) -> Result<Scaled, ScaleError> {
        let wanted = i32::try_from(replicas).map_err(|_| ScaleError {
            is_transient: false,
            message: format!(
                "{target}: {replicas} replicas are not accepted; accepted: up to 2147483647"
            ),
        })?;
        let workload = self.workload(target)?;
        let mut delay = Delay::default();
        let mut tries = 1;
        loop {
            let mut scale = workload.get().await?;
            let scaled = Scaled {
                before: desired(&scale),
                after: replicas,
                dry_run: self.dry_run,
            };
            if scaled.before == replicas {
                return Ok(scaled);
            }
            scale.spec.get_or_insert_default().replicas = Some(wanted);
            match workload.put(&scale, self.dry_run).await {
                Ok(()) => {
                    info!(%target, before = scaled.before, after = replicas, dry_run = self.dry_run, "replicas set");
                    return Ok(scaled);
                }
                Err(failure) if failure.kind == Kind::Conflict && tries < TRIES => {
                    tries += 1;
                    tokio::time::sleep(delay.next()).await;
                }
                Err(failure) => return Err(workload.error(&failure)),
            }
        }
    }

    fn workload<'a>(&self, target: &'a ScaleTarget) -> Result<Workload<'a>, ScaleError> {
        let resource = resource(target)?;
        let namespace = target.namespace.as_ref().unwrap_or(&self.cluster.namespace);
        Ok(Workload {
            api: Api::namespaced_with(self.cluster.client.clone(), namespace, &resource),
            resource: Resource {
                plural: format!("{}/scale", resource.plural),
                group: resource.group,
                namespace: Some(namespace.clone()),
            },
            target,
        })
    }
}

impl Scaler for KubernetesScaler {
    fn replicas<'a>(&'a self, target: &'a ScaleTarget) -> Answer<'a, Replicas> {
        Box::pin(self.read(target))
    }

    fn set_replicas<'a>(&'a self, target: &'a ScaleTarget, replicas: u32) -> Answer<'a, Scaled> {
        Box::pin(self.set(target, replicas))
    }
}

struct Workload<'a> {
    api: Api<DynamicObject>,
    resource: Resource,
    target: &'a ScaleTarget,
}

impl Workload<'_> {
    async fn get(&self) -> Result<Scale, ScaleError> {
        let question = self.question("get");
        let answer = within(ANSWER, &question, self.api.get_scale(&self.target.name)).await;
        answer.map_err(|failure| self.error(&failure))
    }

    /// Sets what was read. The resource version stands in it, so that the server refuses it when somebody else was faster.
    async fn put(&self, scale: &Scale, dry_run: bool) -> Result<(), Failure> {
        let question = self.question("update");
        let params = PostParams {
            dry_run,
            field_manager: Some("kvlane".to_owned()),
        };
        let answer = self.api.replace_scale(&self.target.name, &params, scale);
        within(ANSWER, &question, answer).await.map(drop)
    }

    fn question(&self, verb: &'static str) -> Question {
        Question {
            verb,
            resource: self.resource.clone(),
        }
    }

    fn error(&self, failure: &Failure) -> ScaleError {
        ScaleError {
            is_transient: failure.kind != Kind::NotFound,
            message: format!("{}: {failure}", self.target),
        }
    }
}

/// Finds the API's path of a workload.
fn resource(target: &ScaleTarget) -> Result<ApiResource, ScaleError> {
    let known = match target.kind.as_str() {
        "Deployment" | "StatefulSet" | "ReplicaSet" => Some("apps/v1"),
        "LeaderWorkerSet" => Some("leaderworkerset.x-k8s.io/v1"),
        _ => None,
    };
    let refused = |why: &str| ScaleError {
        is_transient: false,
        message: format!("{target}: {why}"),
    };
    let is_name = |text: &str| {
        (1..=253).contains(&text.len())
            && text
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.'))
    };
    let names = [
        Some(&target.kind),
        Some(&target.name),
        target.plural.as_ref(),
        target.namespace.as_ref(),
    ];
    if !names.into_iter().flatten().all(|name| is_name(name)) {
        return Err(refused(
            "kind, plural, namespace and name are letters, digits, dashes and dots",
        ));
    }
    let version = target.api_version.as_deref().or(known).ok_or_else(|| {
        refused("its api_version must be given, as in apps/v1; it is known for Deployment, StatefulSet, ReplicaSet and LeaderWorkerSet")
    })?;
    let kind = GroupVersion::from_str(version)
        .map_err(|_| refused("api_version: group/version is accepted, as in apps/v1"))?
        .with_kind(&target.kind);
    Ok(match &target.plural {
        Some(plural) => ApiResource::from_gvk_with_plural(&kind, plural),
        None => ApiResource::from_gvk(&kind),
    })
}

fn desired(scale: &Scale) -> u32 {
    // What is left out when it is zero, is zero.
    count(
        scale
            .spec
            .as_ref()
            .and_then(|spec| spec.replicas)
            .unwrap_or(0),
    )
}

fn count(replicas: i32) -> u32 {
    u32::try_from(replicas).unwrap_or(0)
}
