//! From what a cluster says of an endpoint to a worker: ports, role, events, name.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use kvlane::{Role, WorkerSpec};

use super::reflect::Key;
use crate::config::{AddressFamily, KubernetesSettings, PortRef, WorkerConfig};
use crate::net::HostPort;
use crate::pool::roster::{Phase, Sighting};

/// How endpoints become workers.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    /// The HTTP ports; each is a worker of its own.
    pub(super) ports: Vec<PortRef>,
    /// No port was chosen: where an endpoint has one only, it is that one.
    pub(super) is_port_free: bool,
    pub(super) events_port: Option<PortRef>,
    pub(super) replay_port: Option<PortRef>,
    topic: Option<String>,
    role: Option<Role>,
    role_label: Option<String>,
    dp_ranks: Option<u32>,
    pub(super) family: Option<AddressFamily>,
    /// Names are preceded by the namespace, because several namespaces are followed.
    pub(super) is_qualified: bool,
}

/// What is read from one object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reading {
    /// The workers.
    pub(super) workers: Vec<Found>,
    /// What is wrong with it: why it is skipped, or what of it is not believed.
    pub(super) problems: Vec<String>,
    /// It has no address yet, or none any more.
    pub(super) is_waiting: bool,
}

/// One worker, and what decides between two of one name or at one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) sighting: Sighting,
    /// Seconds since the epoch at which its object was created.
    pub(super) created: i64,
    /// It was read from an object that tells of IPv4 addresses.
    pub(super) is_ipv4: bool,
}

/// Ports by name, as a pod or a slice declares them.
pub(super) type NamedPorts = BTreeMap<String, u16>;

/// One endpoint, before the rules are applied.
#[derive(Debug)]
pub(super) struct Endpoint<'a> {
    pub(super) key: &'a Key,
    pub(super) host: &'a str,
    pub(super) instance: String,
    pub(super) phase: Phase,
    pub(super) created: i64,
    pub(super) ports: NamedPorts,
    pub(super) labels: &'a BTreeMap<String, String>,
    pub(super) annotations: &'a BTreeMap<String, String>,
}

/// Annotations that say what a worker's own pod knows best.
pub(super) mod annotation {
    pub(crate) const ROLE: &str = "kvlane.io/role";
    pub(crate) const LLM_D_ROLE: &str = "llm-d.ai/role";
    pub(crate) const EVENTS_PORT: &str = "kvlane.io/events-port";
    pub(crate) const REPLAY_PORT: &str = "kvlane.io/replay-port";
    pub(crate) const TOPIC: &str = "kvlane.io/topic";
    pub(crate) const DP_RANKS: &str = "kvlane.io/dp-ranks";
}

/// The engine's port where none is configured.
const DEFAULT_PORT: u16 = 8_000;

impl Rules {
    pub(super) fn new(settings: &KubernetesSettings, is_qualified: bool) -> Self {
        let port = settings.port.clone();
        Self {
            is_port_free: port.is_none(),
            ports: vec![port.unwrap_or(PortRef::Number(DEFAULT_PORT))],
            events_port: settings.events_port.clone(),
            replay_port: settings.replay_port.clone(),
            topic: settings.topic.clone(),
            role: settings.role,
            role_label: settings.role_label.clone(),
            dp_ranks: settings.dp_ranks,
            family: settings.address_family,
            is_qualified: is_qualified || settings.namespace.as_deref() == Some("*"),
        }
    }

    /// The same with the target ports of an InferencePool.
    pub(super) fn with_ports(&self, ports: &[u16]) -> Self {
        Self {
            ports: ports.iter().copied().map(PortRef::Number).collect(),
            is_port_free: false,
            ..self.clone()
        }
    }

    /// Tells whether an address is of the family that is asked for.
    pub(super) fn accepts(&self, address: &str) -> bool {
        let Some(family) = self.family else {
            return true;
        };
        address
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_ipv6() == (family == AddressFamily::Ipv6))
    }

    /// Makes workers of an endpoint, one for each port.
    ///
    /// What decides where requests go (port, role, ranks) must be right, or the endpoint is skipped; without what helps only
    /// (events), it is taken and routed approximately. Both are said.
    pub(super) fn read(&self, endpoint: &Endpoint<'_>) -> Reading {
        let mut reading = Reading::default();
        for index in 0..self.ports.len() {
            match self.worker(endpoint, index, &mut reading.problems) {
                Ok(worker) => reading.workers.push(Found {
                    sighting: Sighting {
                        worker,
                        instance: endpoint.instance.clone(),
                        phase: endpoint.phase,
                    },
                    created: endpoint.created,
                    is_ipv4: endpoint.host.parse::<Ipv4Addr>().is_ok(),
                }),
                Err(problem) => reading.problems.push(format!("skipped: {problem}")),
            }
        }
        reading.problems.dedup();
        reading
    }

    fn worker(
        &self,
        endpoint: &Endpoint<'_>,
        index: usize,
        problems: &mut Vec<String>,
    ) -> Result<WorkerConfig, String> {
        let port = number_of(&self.ports[index], &endpoint.ports)?;
        let name = self.name_of(endpoint.key, (self.ports.len() > 1).then_some(port));
        let url = format!("http://{}", HostPort::new(endpoint.host, port));
        let mut worker = WorkerConfig::new(&name, &url)?;
        worker.give(self.role_of(endpoint)?, self.ranks_of(endpoint)?);
        worker.labels = endpoint.labels.clone();
        let mut side_port = |key: &str, configured: &Option<PortRef>| {
            self.side_port(endpoint, key, configured.as_ref(), index)
                .unwrap_or_else(|problem| {
                    problems.push(format!("without events: {problem}"));
                    None
                })
        };
        worker.events = side_port(annotation::EVENTS_PORT, &self.events_port);
        if worker.events.is_some() {
            worker.replay = side_port(annotation::REPLAY_PORT, &self.replay_port);
            let topic = endpoint.annotations.get(annotation::TOPIC);
            worker.topic = topic.or(self.topic.as_ref()).cloned();
        }
        Ok(worker)
    }

    /// Names a worker: a pod's name may hold dots and a namespace may not, and neither a colon, so no two names meet.
    fn name_of(&self, key: &Key, port: Option<u16>) -> String {
        let mut name = if self.is_qualified {
            format!("{}.{}", key.namespace, key.name)
        } else {
            key.name.clone()
        };
        if let Some(port) = port {
            name.push_str(&format!(":{port}"));
        }
        name
    }

    fn role_of(&self, endpoint: &Endpoint<'_>) -> Result<Option<Role>, String> {
        let own = self.role_label.as_deref();
        for key in own
            .into_iter()
            .chain([annotation::ROLE, annotation::LLM_D_ROLE])
        {
            let value = endpoint
                .annotations
                .get(key)
                .or_else(|| endpoint.labels.get(key));
            let Some(value) = value else { continue };
            return match value.as_str() {
                "prefill" => Ok(Some(Role::Prefill)),
                "decode" => Ok(Some(Role::Decode)),
                // llm-d's names of a worker that does both; one that also encodes media does so for itself.
                "both" | "prefill-decode" | "encode-prefill-decode" => Ok(Some(Role::Both)),
                _ => Err(format!(
                    "{key} is {value:?}; accepted: prefill, decode, both, prefill-decode or encode-prefill-decode"
                )),
            };
        }
        Ok(self.role)
    }

    fn ranks_of(&self, endpoint: &Endpoint<'_>) -> Result<Option<u32>, String> {
        let Some(text) = endpoint.annotations.get(annotation::DP_RANKS) else {
            return Ok(self.dp_ranks);
        };
        let ranks = text.parse::<u32>().ok();
        ranks
            .filter(|ranks| (1..=WorkerSpec::MAX_DP_RANKS).contains(ranks))
            .map(Some)
            .ok_or_else(|| {
                format!(
                    "{} is {text:?}; accepted: 1 to 1,024 ranks",
                    annotation::DP_RANKS
                )
            })
    }

    /// Returns the address of a side channel: by annotation, or as configured. Each further target port is a rank of its own,
    /// whose channels are on the following ports.
    fn side_port(
        &self,
        endpoint: &Endpoint<'_>,
        key: &str,
        configured: Option<&PortRef>,
        index: usize,
    ) -> Result<Option<String>, String> {
        let given = match endpoint.annotations.get(key) {
            Some(text) => {
                let port = PortRef::parse(text).map_err(|error| format!("{key}: {error}"))?;
                Some(port)
            }
            None => configured.cloned(),
        };
        let Some(given) = given else {
            return Ok(None);
        };
        let first = number_of(&given, &endpoint.ports)?;
        let port = u16::try_from(index)
            .ok()
            .and_then(|index| first.checked_add(index))
            .ok_or_else(|| format!("{key}: no port {index} after {first}"))?;
        let address = HostPort::new(endpoint.host, port);
        Ok(Some(format!("tcp://{address}")))
    }
}

/// Resolves a port by number or name.
pub(super) fn number_of(port: &PortRef, named: &NamedPorts) -> Result<u16, String> {
    match port {
        PortRef::Number(number) => Ok(*number),
        PortRef::Name(name) => named.get(name).copied().ok_or_else(|| {
            let known: Vec<_> = named.keys().map(String::as_str).collect();
            format!(
                "it has no port named {name:?} (it has: {})",
                known.join(", ")
            )
        }),
    }
}
