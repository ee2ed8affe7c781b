//! From an endpoint slice of a service to workers.

use std::collections::BTreeMap;

use k8s_openapi::api::discovery::v1::{
    Endpoint as SliceEndpoint, EndpointConditions, EndpointSlice,
};

use super::reflect::Key;
use super::rules::{Endpoint, NamedPorts, Reading, Rules};
use crate::config::PortRef;
use crate::net::HostPort;
use crate::pool::roster::Phase;

/// Reads a slice. Its endpoints may stand in another slice as well; who puts slices together decides.
pub(super) fn read(slice: &EndpointSlice, key: &Key, rules: &Rules) -> Reading {
    let (ports, only) = ports(slice);
    // Where a service has one port, its name and number need not be said.
    let own = match only {
        Some(only) if rules.is_port_free => Some(rules.with_ports(&[only])),
        _ => None,
    };
    let rules = own.as_ref().unwrap_or(rules);
    let mut all = Reading::default();
    for endpoint in &slice.endpoints {
        let Some(host) = endpoint.addresses.first() else {
            continue;
        };
        if !rules.accepts(host) {
            continue;
        }
        let reading = read_endpoint(endpoint, host, key, &ports, rules);
        all.workers.extend(reading.workers);
        for problem in reading.problems {
            all.problems.push(format!("{host}: {problem}"));
        }
    }
    all
}

fn read_endpoint(
    endpoint: &SliceEndpoint,
    host: &str,
    slice: &Key,
    ports: &NamedPorts,
    rules: &Rules,
) -> Reading {
    let target = endpoint.target_ref.as_ref();
    let pod = target.filter(|target| target.kind.as_deref() == Some("Pod"));
    let name = pod.and_then(|pod| pod.name.clone());
    let namespace = pod.and_then(|pod| pod.namespace.clone());
    let key = Key {
        namespace: namespace.unwrap_or_else(|| slice.namespace.clone()),
        // Addresses that no pod is behind are written into slices by hand; they have no other name.
        name: name.unwrap_or_else(|| address_name(host, rules)),
    };
    let zone = endpoint.zone.clone().map(|zone| (ZONE.to_owned(), zone));
    rules.read(&Endpoint {
        key: &key,
        host,
        instance: pod.and_then(|pod| pod.uid.clone()).unwrap_or_default(),
        phase: phase(endpoint.conditions.as_ref()),
        created: 0,
        ports: ports.clone(),
        labels: &zone.into_iter().collect(),
        annotations: &BTreeMap::new(),
    })
}

const ZONE: &str = "topology.kubernetes.io/zone";

fn address_name(host: &str, rules: &Rules) -> String {
    match rules.ports.first() {
        Some(PortRef::Number(port)) => HostPort::new(host, *port).to_string(),
        _ => host.to_owned(),
    }
}

/// What is not said counts as the API documents it: ready, and not terminating.
fn phase(conditions: Option<&EndpointConditions>) -> Phase {
    let said = |read: fn(&EndpointConditions) -> Option<bool>| conditions.and_then(read);
    if said(|conditions| conditions.terminating) == Some(true) {
        return Phase::Leaving;
    }
    if said(|conditions| conditions.ready).unwrap_or(true) {
        Phase::Serving
    } else {
        Phase::Starting
    }
}

/// Returns the slice's ports by name, and its only one.
fn ports(slice: &EndpointSlice) -> (NamedPorts, Option<u16>) {
    let tcp = slice
        .ports
        .iter()
        .flatten()
        .filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP");
    let ports: Vec<(String, u16)> = tcp
        .filter_map(|port| {
            let number = u16::try_from(port.port?)
                .ok()
                .filter(|number| *number > 0)?;
            Some((port.name.clone().unwrap_or_default(), number))
        })
        .collect();
    let only = match ports.as_slice() {
        [(_, only)] => Some(*only),
        _ => None,
    };
    (ports.into_iter().collect(), only)
}
