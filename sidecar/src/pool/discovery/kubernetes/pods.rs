//! From a pod to workers.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, PodSpec, PodStatus};

use super::reflect::Key;
use super::rules::{Endpoint, NamedPorts, Reading, Rules, number_of};
use crate::pool::roster::Phase;

/// Reads a pod. One that has ended, for whatever reason, is no worker; one without an address is none yet.
pub(super) fn read(pod: &Pod, key: &Key, rules: &Rules) -> Reading {
    let no_status = PodStatus::default();
    let status = pod.status.as_ref().unwrap_or(&no_status);
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return Reading::default();
    }
    let addresses = addresses(status);
    let Some(host) = addresses.iter().find(|address| rules.accepts(address)) else {
        return without_address(&addresses);
    };
    let ports = ports(pod.spec.as_ref());
    let none = BTreeMap::new();
    rules.read(&Endpoint {
        key,
        host,
        instance: instance(pod, status, rules, &ports),
        phase: phase(pod, status),
        created: created(pod),
        labels: pod.metadata.labels.as_ref().unwrap_or(&none),
        annotations: pod.metadata.annotations.as_ref().unwrap_or(&none),
        ports,
    })
}

fn without_address(addresses: &[&str]) -> Reading {
    let problems = if addresses.is_empty() {
        Vec::new()
    } else {
        vec![format!(
            "skipped: none of its addresses {} is of the configured family",
            addresses.join(", ")
        )]
    };
    Reading {
        is_waiting: addresses.is_empty(),
        problems,
        ..Reading::default()
    }
}

/// Lists the addresses, the primary one first.
fn addresses(status: &PodStatus) -> Vec<&str> {
    let mut all: Vec<&str> = Vec::new();
    let primary = status.pod_ip.as_deref();
    let further = status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str());
    for address in primary.into_iter().chain(further) {
        if !address.is_empty() && !all.contains(&address) {
            all.push(address);
        }
    }
    all
}

fn phase(pod: &Pod, status: &PodStatus) -> Phase {
    if pod.metadata.deletion_timestamp.is_some() {
        return Phase::Leaving;
    }
    let mut conditions = status.conditions.iter().flatten();
    if conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True") {
        Phase::Serving
    } else {
        Phase::Starting
    }
}

/// Names the life: the pod, and how often its engine was started again in it. The engine's container is the one that
/// declares the port; where none does, any restart counts.
fn instance(pod: &Pod, status: &PodStatus, rules: &Rules, ports: &NamedPorts) -> String {
    let wanted: Vec<u16> = rules
        .ports
        .iter()
        .filter_map(|port| number_of(port, ports).ok())
        .collect();
    let declares = |name: &str| {
        let containers = pod.spec.iter().flat_map(containers);
        let mut declared = containers
            .filter(|container| container.name == name)
            .flat_map(|container| container.ports.iter().flatten());
        declared
            .any(|port| u16::try_from(port.container_port).is_ok_and(|port| wanted.contains(&port)))
    };
    let all = || {
        let init = status.init_container_statuses.iter().flatten();
        status.container_statuses.iter().flatten().chain(init)
    };
    let is_declared = all().any(|container| declares(&container.name));
    let counted = all().filter(|container| !is_declared || declares(&container.name));
    let restarts: i64 = counted
        .map(|container| i64::from(container.restart_count))
        .sum();
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    format!("{uid}/{restarts}")
}

fn containers(spec: &PodSpec) -> impl Iterator<Item = &k8s_openapi::api::core::v1::Container> {
    // Init containers that go on running are where service meshes and, at times, engines live.
    spec.containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
}

fn ports(spec: Option<&PodSpec>) -> NamedPorts {
    let declared = spec
        .into_iter()
        .flat_map(containers)
        .flat_map(|container| container.ports.iter().flatten());
    declared
        .filter_map(|port| {
            let number = u16::try_from(port.container_port).ok()?;
            Some((port.name.clone()?, number))
        })
        .collect()
}

fn created(pod: &Pod) -> i64 {
    let created = pod.metadata.creation_timestamp.as_ref();
    created.map_or(0, |time| time.0.as_second())
}
