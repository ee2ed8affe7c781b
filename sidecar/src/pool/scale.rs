//! Changing how many replicas a workload has, whatever runs it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use serde::{Deserialize, Serialize};

/// A workload whose replicas can be counted and set.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleTarget {
    /// What it is: `Deployment`, `StatefulSet`, `ReplicaSet` or `LeaderWorkerSet`, or with [`api_version`](Self::api_version) anything
    /// that has a scale subresource.
    pub kind: String,
    /// Group and version, as in `leaderworkerset.x-k8s.io/v1`; known for the kinds above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    /// Its name in the API's paths (default: the kind in small letters and plural).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plural: Option<String>,
    /// Its namespace (default: the one of the service account or of the context).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
}

impl ScaleTarget {
    /// Names a workload in the default namespace.
    #[must_use]
    pub fn new(kind: &str, name: &str) -> Self {
        Self {
            kind: kind.to_owned(),
            api_version: None,
            plural: None,
            namespace: None,
            name: name.to_owned(),
        }
    }

    /// In a namespace.
    #[must_use]
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.namespace = Some(namespace.to_owned());
        self
    }
}

impl fmt::Display for ScaleTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, name, .. } = self;
        match &self.namespace {
            Some(namespace) => write!(f, "{kind} {namespace}/{name}"),
            None => write!(f, "{kind} {name}"),
        }
    }
}

/// How many replicas a workload has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Replicas {
    /// How many it should have.
    pub desired: u32,
    /// How many there are.
    pub running: u32,
}

/// What became of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Scaled {
    /// How many replicas it should have had.
    pub before: u32,
    /// How many it should have now.
    pub after: u32,
    /// Nothing was changed, only tried: everything but the last step was done.
    pub dry_run: bool,
}

/// Why replicas could not be read or set: names the workload and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScaleError {
    /// Trying again may help.
    pub is_transient: bool,
    /// The reason.
    pub message: String,
}

impl fmt::Display for ScaleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ScaleError {}

/// What a [`Scaler`] answers.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, ScaleError>> + Send + 'a>>;

/// Reads and sets replicas. Every call ends within a minute; dropping one gives up waiting, not what was sent.
pub trait Scaler: fmt::Debug + Send + Sync {
    /// Reads how many replicas there are.
    ///
    /// # Errors
    /// The workload is unknown, or cannot be asked for.
    fn replicas<'a>(&'a self, target: &'a ScaleTarget) -> Answer<'a, Replicas>;

    /// Sets how many replicas there should be. Whoever changes them at the same time is not overwritten unseen: the number is read
    /// again and set on that.
    ///
    /// # Errors
    /// The workload is unknown, must not be changed, or was changed by others each time.
    fn set_replicas<'a>(&'a self, target: &'a ScaleTarget, replicas: u32) -> Answer<'a, Scaled>;
}
