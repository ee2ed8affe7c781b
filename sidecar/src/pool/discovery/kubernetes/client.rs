//! Finding the cluster.

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use super::failure::chain;
use crate::config::KubernetesSettings;

/// A cluster that can be asked, and the namespace that is meant where none is said.
#[derive(Clone)]
pub struct Cluster {
    pub(super) client: Client,
    pub(super) namespace: String,
}

impl Cluster {
    /// Finds the cluster that the settings name: by kubeconfig file and context, or else the way every client does
    /// (`$KUBECONFIG`, `~/.kube/config`, the pod's service account). Asks nothing yet, so the API server need not be up.
    ///
    /// # Errors
    /// There is none, or its certificates or credentials cannot be read.
    pub async fn find(settings: &KubernetesSettings) -> Result<Self, String> {
        let config = match (&settings.kubeconfig, &settings.context) {
            (None, None) => Config::infer().await.map_err(|error| {
                format!(
                    "kubernetes: no cluster is known: neither a kubeconfig nor a service account can be used: {}",
                    chain(&error)
                )
            })?,
            (file, context) => {
                let fail = |error: &dyn std::error::Error| {
                    let file = file.as_ref().map_or_else(
                        || "the default kubeconfig".to_owned(),
                        |file| file.display().to_string(),
                    );
                    format!("kubernetes: kubeconfig {file}: {}", chain(error))
                };
                let options = KubeConfigOptions {
                    context: context.clone(),
                    ..KubeConfigOptions::default()
                };
                let config = match file {
                    Some(file) => {
                        let file = Kubeconfig::read_from(file).map_err(|error| fail(&error))?;
                        Config::from_custom_kubeconfig(file, &options).await
                    }
                    None => Config::from_kubeconfig(&options).await,
                };
                config.map_err(|error| fail(&error))?
            }
        };
        Self::new(config)
    }

    fn new(mut config: Config) -> Result<Self, String> {
        // Failures are shown and tried again here; a second layer would hide them.
        config.default_retry = false;
        let namespace = config.default_namespace.clone();
        let client = Client::try_from(config).map_err(|error| {
            format!("kubernetes: the cluster cannot be used: {}", chain(&error))
        })?;
        Ok(Self { client, namespace })
    }
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}
