//! What an InferencePool says: which pods, and on which ports. Both shapes of the object are read.

use std::collections::BTreeMap;

use kube::core::DynamicObject;
use kube::core::gvk::GroupVersionKind;
use kube::discovery::ApiResource;
use serde_json::Value;

/// The pods of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PoolSpec {
    /// Label selector.
    pub(super) selector: String,
    /// Target ports; each is an endpoint of its own on every pod.
    pub(super) ports: Vec<u16>,
}

/// The versions of the object, the current one first.
const VERSIONS: [(&str, &str); 2] = [
    ("inference.networking.k8s.io", "v1"),
    ("inference.networking.x-k8s.io", "v1alpha2"),
];

/// Most target ports, as the API accepts.
const MAX_PORTS: usize = 8;

/// Returns the object's types, the current one first.
pub(super) fn resources() -> [ApiResource; 2] {
    VERSIONS.map(|(group, version)| {
        let kind = GroupVersionKind::gvk(group, version, "InferencePool");
        ApiResource::from_gvk_with_plural(&kind, "inferencepools")
    })
}

/// Reads a pool.
///
/// # Errors
/// Names the field and what is accepted.
pub(super) fn read(pool: &DynamicObject) -> Result<PoolSpec, String> {
    let spec = &pool.data["spec"];
    Ok(PoolSpec {
        selector: selector(&spec["selector"])?,
        ports: ports(spec)?,
    })
}

/// `{matchLabels: {..}}` since v1, the labels themselves before.
fn selector(value: &Value) -> Result<String, String> {
    let labels = match &value["matchLabels"] {
        Value::Object(labels) => labels,
        _ => value
            .as_object()
            .ok_or("spec.selector: a mapping of labels is accepted")?,
    };
    let mut terms = BTreeMap::new();
    for (key, value) in labels {
        let value = value
            .as_str()
            .ok_or_else(|| format!("spec.selector: {key} is {value}; a text is accepted"))?;
        terms.insert(key, value);
    }
    if terms.is_empty() {
        return Err("spec.selector: is empty and would select every pod".to_owned());
    }
    let terms: Vec<_> = terms
        .into_iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    Ok(terms.join(","))
}

/// `targetPorts: [{number}]` since v1, `targetPortNumber` before.
fn ports(spec: &Value) -> Result<Vec<u16>, String> {
    let numbers: Vec<&Value> = match spec["targetPorts"].as_array() {
        Some(ports) => ports.iter().map(|port| &port["number"]).collect(),
        None => vec![&spec["targetPortNumber"]],
    };
    let accepted = "1 to 8 different ports from 1 to 65535 are accepted";
    let mut ports: Vec<u16> = Vec::new();
    for number in numbers.iter().take(MAX_PORTS + 1) {
        let port = number.as_u64().and_then(|port| u16::try_from(port).ok());
        match port.filter(|port| *port > 0 && !ports.contains(port)) {
            Some(port) => ports.push(port),
            None => {
                return Err(format!(
                    "spec.targetPorts: {number} is not accepted; {accepted}"
                ));
            }
        }
    }
    if ports.is_empty() || ports.len() > MAX_PORTS {
        return Err(format!(
            "spec.targetPorts: {} ports; {accepted}",
            numbers.len()
        ));
    }
    Ok(ports)
}
