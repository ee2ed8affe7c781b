//! The section `discovery`: where workers are looked for that the configuration does not name.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kvlane::{BlockSize, Role};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::file;
use super::kubernetes::{self, KubernetesSettings};
use super::{Config, WorkerConfig};
use crate::net::HostPort;

/// Where to look for workers. All of it may be given at once; each is a source of its own. Unknown keys are refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct DiscoverySettings {
    /// A file with a list of workers as under `workers`, in YAML or JSON. It may come, change and go while the sidecar runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Seconds between two looks at the file (default 2).
    pub file_interval_seconds: f64,
    /// Names whose addresses are workers (feature `dns`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub dns: Vec<DnsSettings>,
    /// Workers that a Kubernetes API server tells of (feature `kubernetes`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kubernetes: Vec<KubernetesSettings>,
}

impl Default for DiscoverySettings {
    fn default() -> Self {
        Self {
            file: None,
            file_interval_seconds: 2.0,
            dns: Vec::new(),
            kubernetes: Vec::new(),
        }
    }
}

/// A name in the DNS and what is known of the workers behind it. Either `name` and `port`, or `srv`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct DnsSettings {
    /// Name whose A and AAAA records are the workers' addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Port of the workers' HTTP servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Name whose SRV records are the workers' hosts and ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub srv: Option<String>,
    /// Longest time in seconds between two questions (default 30); a record's own shorter life is kept to.
    #[serde(default = "default_interval")]
    pub interval_seconds: f64,
    /// Seconds for which the last answer stays after the name is said not to exist (default 30).
    #[serde(default = "default_grace")]
    pub grace_seconds: f64,
    /// Name servers to ask, as host:port (default: those of the system).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub servers: Vec<String>,
    /// What the workers do; asked of the engines where it is not given, and else both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// Data-parallel ranks of each; asked of the engines where it is not given, and else 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dp_ranks: Option<u32>,
    /// Port of their KV events; asked of the engines where it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub events_port: Option<u16>,
    /// Port of their replay sockets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay_port: Option<u16>,
    /// Their block size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<BlockSize>,
    /// Their labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

const fn default_interval() -> f64 {
    30.0
}

const fn default_grace() -> f64 {
    30.0
}

impl DiscoverySettings {
    /// Checks every range.
    pub(super) fn validate(&self) -> Result<(), String> {
        range(
            "file_interval_seconds",
            self.file_interval_seconds,
            0.05,
            3_600.0,
        )?;
        if self
            .file
            .as_ref()
            .is_some_and(|path| path.as_os_str().is_empty())
        {
            return Err("file: the path of a file is accepted, and this is empty".to_owned());
        }
        for (index, dns) in self.dns.iter().enumerate() {
            dns.validate()
                .map_err(|error| format!("dns[{index}].{error}"))?;
            let twice = self.dns[..index]
                .iter()
                .any(|other| other.source() == dns.source());
            if twice {
                return Err(format!("dns[{index}]: {} is given twice", dns.source()));
            }
        }
        if !self.dns.is_empty() && !cfg!(feature = "dns") {
            return Err("dns: this program was built without the feature dns".to_owned());
        }
        kubernetes::validate(&self.kubernetes)
    }
}

impl DnsSettings {
    /// Names the source in listings and metrics.
    #[must_use]
    pub fn source(&self) -> String {
        match (&self.srv, &self.name, self.port) {
            (Some(srv), ..) => format!("dns:{srv}"),
            (None, Some(name), Some(port)) => format!("dns:{}", HostPort::new(name, port)),
            (None, ..) => "dns".to_owned(),
        }
    }

    /// Describes the worker at an address; its name is the address.
    ///
    /// # Errors
    /// The address makes no name or no URL.
    pub fn worker(&self, host: &str, port: u16) -> Result<WorkerConfig, String> {
        let address = HostPort::new(host, port).to_string();
        let mut worker = WorkerConfig::new(&address, &format!("http://{address}"))?;
        let endpoint = |port: u16| format!("tcp://{}", HostPort::new(host, port));
        worker.give(self.role, self.dp_ranks);
        worker.events = self.events_port.map(endpoint);
        worker.replay = self.replay_port.map(endpoint);
        worker.block_size = self.block_size;
        worker.labels.clone_from(&self.labels);
        Ok(worker)
    }

    fn validate(&self) -> Result<(), String> {
        match (&self.name, self.port, &self.srv) {
            (Some(name), Some(port), None) if !name.is_empty() && port > 0 => {}
            (None, None, Some(srv)) if !srv.is_empty() => {}
            _ => {
                return Err("name: either name and port are accepted, or srv alone".to_owned());
            }
        }
        range("interval_seconds", self.interval_seconds, 0.05, 3_600.0)?;
        range("grace_seconds", self.grace_seconds, 0.0, 86_400.0)?;
        for server in &self.servers {
            if server.parse::<std::net::SocketAddr>().is_err() {
                return Err(format!(
                    "servers: {server:?} is not accepted; accepted: an address and a port, as in 10.0.0.10:53"
                ));
            }
        }
        let most = kvlane::WorkerSpec::MAX_DP_RANKS;
        if let Some(ranks) = self.dp_ranks.filter(|ranks| !(1..=most).contains(ranks)) {
            return Err(format!(
                "dp_ranks: {ranks} is not accepted; accepted: 1 to {most} ranks"
            ));
        }
        if self.replay_port.is_some() && self.events_port.is_none() {
            return Err("replay_port: events_port is missing; give both or neither".to_owned());
        }
        Ok(())
    }
}

fn range(key: &str, value: f64, low: f64, high: f64) -> Result<(), String> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(format!(
        "{key}: {value} is not accepted; accepted: {low} to {high} seconds"
    ))
}

/// Sets the section.
pub(super) fn set(config: &mut Config, value: &Value) -> Result<(), String> {
    let settings: DiscoverySettings = file::section("discovery", value.clone())?;
    settings
        .validate()
        .map_err(|error| format!("discovery.{error}"))?;
    config.discovery = settings;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_that_is_written_is_not_learned() {
        for (text, says) in [
            (r#"{"srv": "s"}"#, (false, false)),
            (r#"{"srv": "s", "role": "both"}"#, (true, false)),
            (r#"{"srv": "s", "dp_ranks": 1}"#, (false, true)),
        ] {
            let settings: DnsSettings = serde_json::from_str(text).unwrap();
            let worker = settings.worker("h", 1).unwrap();
            assert_eq!((worker.says_role(), worker.says_dp_ranks()), says, "{text}");
        }
    }
}
