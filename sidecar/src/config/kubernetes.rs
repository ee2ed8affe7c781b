//! The section `discovery.kubernetes`: workers that a cluster's API server tells of.

use std::path::PathBuf;

use kvlane::{Role, WorkerSpec};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// One source of workers in a cluster. Exactly one of `pods`, `service` and `inference_pool` says which they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct KubernetesSettings {
    /// Label selector of pods, as in `app=vllm,tier!=test`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pods: Option<String>,
    /// Name of a service: its endpoint slices are followed. Needs no right to see pods, and knows nothing of their labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// Name of an InferencePool: the pods that it selects, on its target ports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inference_pool: Option<String>,
    /// Namespace (default: the one of the service account or of the context); `*` for pods of every namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The engine's HTTP port, by number or name (default 8000). Not for an InferencePool, which says it itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<PortRef>,
    /// Port of KV events (default: none, so that workers are routed approximately). Of the second target port of an
    /// InferencePool it is the port after this one, and so on, as vLLM counts the ports of its ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events_port: Option<PortRef>,
    /// Port of the replay socket, counted like `events_port`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replay_port: Option<PortRef>,
    /// ZeroMQ topic prefix (default: everything).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
    /// Role of workers that do not say it themselves (default both).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// A label or annotation that says a worker's role, asked before `kvlane.io/role` and `llm-d.ai/role`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role_label: Option<String>,
    /// Data-parallel ranks behind each port (default 1).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dp_ranks: Option<u32>,
    /// Which of a dual-stack worker's addresses is used (default: its first).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address_family: Option<AddressFamily>,
    /// A kubeconfig file (default: `$KUBECONFIG`, `~/.kube/config`, or the pod's service account).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig (default: its current one).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<String>,
    /// Seconds after which a watch is begun anew (default 120). A connection that died without a word is noticed ten seconds later
    /// at most; turning it down costs one request for each watch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub watch_seconds: Option<u32>,
}

/// A port, by number or by the name that a pod or a service gives it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum PortRef {
    /// By number.
    Number(u16),
    /// By name.
    Name(String),
}

/// A family of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AddressFamily {
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
}

/// Which workers a source tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection<'a> {
    /// Pods by label selector.
    Pods(&'a str),
    /// Endpoints of a service.
    Service(&'a str),
    /// Pods of an InferencePool.
    InferencePool(&'a str),
}

/// Most sources: each costs at least one connection that stays open.
const MAX_SOURCES: usize = 16;

impl KubernetesSettings {
    /// Returns which workers the source tells of.
    ///
    /// # Errors
    /// None is named, or several are.
    pub fn selection(&self) -> Result<Selection<'_>, String> {
        let given = [
            self.pods.as_deref().map(Selection::Pods),
            self.service.as_deref().map(Selection::Service),
            self.inference_pool.as_deref().map(Selection::InferencePool),
        ];
        let mut given = given.into_iter().flatten();
        match (given.next(), given.next()) {
            (Some(selection), None) => Ok(selection),
            (None, _) => Err("one of pods, service and inference_pool must be given".to_owned()),
            (Some(_), Some(_)) => Err(
                "only one of pods, service and inference_pool may be given; a list takes several sources"
                    .to_owned(),
            ),
        }
    }

    /// Names the source in listings and metrics.
    #[must_use]
    pub fn source(&self) -> String {
        let what = match self.selection() {
            Ok(Selection::Pods(selector)) => format!("pods/{selector}"),
            Ok(Selection::Service(name)) => format!("service/{name}"),
            Ok(Selection::InferencePool(name)) => format!("inference_pool/{name}"),
            Err(_) => "nothing".to_owned(),
        };
        let place = [self.context.as_deref(), self.namespace.as_deref()];
        let mut name = "kubernetes:".to_owned();
        for part in place.into_iter().flatten() {
            name.push_str(part);
            name.push('/');
        }
        name + &what
    }

    /// Returns the seconds after which a watch is begun anew.
    #[must_use]
    pub fn watch_seconds(&self) -> u32 {
        self.watch_seconds.unwrap_or(120)
    }

    /// Checks every field.
    pub(super) fn validate(&self) -> Result<(), String> {
        let selection = self.selection();
        match selection.map_err(|error| format!("pods: {error}"))? {
            Selection::Pods(selector) => is_selector(selector)
                .then_some(())
                .ok_or_else(|| bad("pods", selector, "a label selector, as in app=vllm"))?,
            Selection::Service(name) => check("service", name, is_label, LABEL)?,
            Selection::InferencePool(name) => check("inference_pool", name, is_name, NAME)?,
        }
        match self.namespace.as_deref() {
            Some("*") if self.pods.is_none() => {
                return Err("namespace: \"*\" is accepted for pods only".to_owned());
            }
            None | Some("*") => {}
            Some(name) => check("namespace", name, is_label, LABEL)?,
        }
        if self.inference_pool.is_some() && self.port.is_some() {
            return Err("port: an InferencePool says its target ports itself".to_owned());
        }
        for (key, port) in [
            ("port", &self.port),
            ("events_port", &self.events_port),
            ("replay_port", &self.replay_port),
        ] {
            port.as_ref().map_or(Ok(()), |port| port.validate(key))?;
        }
        if self.replay_port.is_some() && self.events_port.is_none() {
            return Err("replay_port: needs an events_port; give both or neither".to_owned());
        }
        if let Some(key) = &self.role_label {
            check(
                "role_label",
                key,
                is_key,
                "the name of a label, as in example.com/role",
            )?;
        }
        if self
            .dp_ranks
            .is_some_and(|ranks| !(1..=WorkerSpec::MAX_DP_RANKS).contains(&ranks))
        {
            return Err("dp_ranks: 1 to 1,024 ranks are accepted".to_owned());
        }
        if !(1..=290).contains(&self.watch_seconds()) {
            return Err("watch_seconds: 1 to 290 seconds are accepted".to_owned());
        }
        Ok(())
    }
}

impl PortRef {
    /// Reads a number, or else a name.
    ///
    /// # Errors
    /// It is neither.
    pub fn parse(text: &str) -> Result<Self, String> {
        let port = text.parse::<u64>().map_or_else(
            |_| Some(Self::Name(text.to_owned())),
            |number| u16::try_from(number).ok().map(Self::Number),
        );
        let port = port.ok_or_else(|| format!("{text:?} is not {PORT}"))?;
        port.validate("port").map(|()| port)
    }

    fn validate(&self, key: &str) -> Result<(), String> {
        match self {
            Self::Number(0) => Err(bad(key, "0", PORT)),
            Self::Number(_) => Ok(()),
            Self::Name(name) => check(key, name, is_port_name, PORT),
        }
    }
}

impl<'de> Deserialize<'de> for PortRef {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let port = match &value {
            Value::String(text) => Self::parse(text).ok(),
            other => other
                .as_u64()
                .and_then(|number| u16::try_from(number).ok())
                .map(Self::Number),
        };
        port.filter(|port| port.validate("").is_ok())
            .ok_or_else(|| D::Error::custom(format!("{value} is not accepted; accepted: {PORT}")))
    }
}

impl std::fmt::Display for PortRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Name(name) => write!(f, "{name:?}"),
        }
    }
}

const PORT: &str = "a port: 1 to 65535, or a name of up to 63 letters, digits and dashes";
const LABEL: &str = "1 to 63 small letters, digits and dashes";
const NAME: &str = "1 to 253 small letters, digits, dashes and dots";

fn check(key: &str, text: &str, is_good: fn(&str) -> bool, accepted: &str) -> Result<(), String> {
    is_good(text)
        .then_some(())
        .ok_or_else(|| bad(key, text, accepted))
}

fn bad(key: &str, text: &str, accepted: &str) -> String {
    format!("{key}: {text:?} is not accepted; accepted: {accepted}")
}

fn is_label(text: &str) -> bool {
    text.len() <= 63 && !text.contains('.') && is_name(text)
}

fn is_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    let is_plain = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    bytes.len() <= 253
        && bytes.first().is_some_and(is_plain)
        && bytes.last().is_some_and(is_plain)
        && bytes
            .iter()
            .all(|byte| is_plain(byte) || matches!(byte, b'-' | b'.'))
}

fn is_port_name(text: &str) -> bool {
    // Ports of services may have longer names than those of containers.
    is_label(&text.to_ascii_lowercase()) && text.bytes().any(|byte| byte.is_ascii_alphabetic())
}

fn is_key(text: &str) -> bool {
    let is_part =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'/');
    (1..=317).contains(&text.len()) && text.bytes().all(is_part)
}

fn is_selector(text: &str) -> bool {
    let printable = text
        .bytes()
        .all(|byte| byte == b' ' || byte.is_ascii_graphic());
    (1..=1_024).contains(&text.len()) && printable && !text.trim().is_empty()
}

/// Checks every source, and that there can be any.
pub(super) fn validate(sources: &[KubernetesSettings]) -> Result<(), String> {
    if !sources.is_empty() && !cfg!(feature = "kubernetes") {
        return Err(
            "kubernetes: this program was built without the feature kubernetes; build it with --features kubernetes"
                .to_owned(),
        );
    }
    if sources.len() > MAX_SOURCES {
        return Err(format!(
            "kubernetes: up to {MAX_SOURCES} sources are accepted"
        ));
    }
    for (index, source) in sources.iter().enumerate() {
        source
            .validate()
            .map_err(|error| format!("kubernetes[{index}].{error}"))?;
        let name = source.source();
        if sources[..index].iter().any(|other| other.source() == name) {
            return Err(format!("kubernetes[{index}]: {name} is given twice"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<KubernetesSettings, String> {
        let settings: KubernetesSettings =
            serde_json::from_str(text).map_err(|error| error.to_string())?;
        settings.validate().map(|()| settings)
    }

    #[test]
    fn each_way_to_find_workers_is_accepted() {
        let pods = read(
            r#"{"pods": "app in (vllm, sglang),tier!=test", "namespace": "*", "port": "http", "events_port": 5557, "role": "decode", "address_family": "ipv6"}"#,
        )
        .unwrap();
        assert_eq!(pods.port, Some(PortRef::Name("http".to_owned())));
        assert_eq!(pods.events_port, Some(PortRef::Number(5557)));
        assert_eq!(
            pods.source(),
            "kubernetes:*/pods/app in (vllm, sglang),tier!=test"
        );
        let service = read(r#"{"service": "vllm", "namespace": "a"}"#).unwrap();
        assert_eq!(service.source(), "kubernetes:a/service/vllm");
        let pool = read(r#"{"inference_pool": "vllm.pool"}"#).unwrap();
        assert_eq!(pool.selection(), Ok(Selection::InferencePool("vllm.pool")));
    }

    #[test]
    fn what_is_wrong_is_named_with_what_is_accepted() {
        for (text, words) in [
            ("{}", vec!["one of pods, service and inference_pool"]),
            (r#"{"pods": "a=b", "service": "c"}"#, vec!["only one of"]),
            (r#"{"pods": " "}"#, vec!["pods", "app=vllm"]),
            (r#"{"service": "Vllm"}"#, vec!["service", "small letters"]),
            (r#"{"service": "a.b"}"#, vec!["service", "small letters"]),
            (r#"{"inference_pool": "-a"}"#, vec!["inference_pool"]),
            (
                r#"{"service": "a", "namespace": "*"}"#,
                vec!["namespace", "pods only"],
            ),
            (
                r#"{"service": "a", "namespace": "b/c"}"#,
                vec!["namespace", "b/c"],
            ),
            (r#"{"service": "a", "port": 0}"#, vec!["1 to 65535"]),
            (
                r#"{"service": "a", "port": 65536}"#,
                vec!["65536", "1 to 65535"],
            ),
            (r#"{"service": "a", "port": "0"}"#, vec!["1 to 65535"]),
            (
                r#"{"service": "a", "port": "a b"}"#,
                vec!["a b", "1 to 65535"],
            ),
            (
                r#"{"inference_pool": "a", "port": 80}"#,
                vec!["port", "target ports"],
            ),
            (
                r#"{"service": "a", "replay_port": 80}"#,
                vec!["replay_port", "events_port"],
            ),
            (
                r#"{"service": "a", "dp_ranks": 0}"#,
                vec!["dp_ranks", "1 to 1,024"],
            ),
            (
                r#"{"service": "a", "watch_seconds": 291}"#,
                vec!["watch_seconds", "1 to 290"],
            ),
            (
                r#"{"service": "a", "role_label": "a b"}"#,
                vec!["role_label"],
            ),
            (
                r#"{"service": "a", "selector": "b"}"#,
                vec!["selector", "watch_seconds"],
            ),
        ] {
            let error = read(text).unwrap_err();
            for word in words {
                assert!(error.contains(word), "{error:?} does not say {word:?}");
            }
        }
    }

    #[test]
    fn several_sources_are_told_apart_or_refused() {
        let source = read(r#"{"service": "vllm"}"#).unwrap();
        let twice = validate(&[source.clone(), source.clone()]);
        let many = validate(&vec![source.clone(); 17]);
        if cfg!(feature = "kubernetes") {
            assert!(
                twice
                    .unwrap_err()
                    .contains("kubernetes:service/vllm is given twice")
            );
            assert!(many.unwrap_err().contains("up to 16"));
            let bad = KubernetesSettings::default();
            let error = validate(&[source, bad]).unwrap_err();
            assert!(error.starts_with("kubernetes[1]."), "{error}");
        } else {
            for error in [twice, many] {
                assert!(error.unwrap_err().contains("--features kubernetes"));
            }
        }
    }
}
