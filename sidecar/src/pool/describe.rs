//! What an engine says of itself, and where that contradicts what it was taken for.
//!
//! Everything here is a function of answers' bodies. An engine need not answer any of the questions, and an answer that is no
//! answer to them says nothing.

use std::collections::BTreeMap;

use kvlane::Role;
use serde::Serialize;
use serde_json::Value;

use crate::config::WorkerConfig;
use crate::handoff::Connector;
use crate::net::HostPort;

/// What was learned of an engine; what it did not tell is absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Described {
    /// Its version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The model it was started with, adapters apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Longest prompt plus output in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u64>,
    /// Tokens per block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,
    /// Blocks of that size that the KV cache of one rank holds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_blocks: Option<u64>,
    /// Data-parallel ranks behind its address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dp_ranks: Option<u32>,
    /// Where the events of its first rank are, to connect to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events: Option<String>,
    /// Where they can be replayed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replay: Option<String>,
    /// Their topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
    /// What it was started for, when it is not for both.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// What moves its KV: vLLM's connector, SGLang's transfer backend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connector: Option<String>,
    /// How it is asked to hand over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handoff: Option<Connector>,
    /// Port where its prefills are fetched (SGLang).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootstrap_port: Option<u16>,
    /// Where it says that its events are, when that is an address of its own machine alone: they are not followed, since here
    /// the address is another place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events_out_of_reach: Option<String>,
}

/// Most ranks that are believed.
const MAX_RANKS: u64 = kvlane::WorkerSpec::MAX_DP_RANKS as u64;

impl Described {
    /// Takes in `GET /version`: vLLM's, and that of others that answer alike.
    pub fn read_version(&mut self, body: &Value) {
        if let Some(version) = short_text(&body["version"]) {
            self.version = Some(version);
        }
    }

    /// Takes in `GET /v1/models`.
    pub fn read_models(&mut self, body: &Value) {
        let is_base = |model: &&Value| short_text(&model["parent"]).is_none();
        let list = body["data"].as_array();
        let Some(model) = list.and_then(|list| list.iter().find(is_base)) else {
            return;
        };
        // Two workers may serve one model under different names, and one name for different models.
        self.model = short_text(&model["root"]).or_else(|| short_text(&model["id"]));
        self.max_model_len = model["max_model_len"].as_u64();
    }

    /// Takes in `GET /kv_event_sources` of an engine at `host` (vLLM from 0.31).
    pub fn read_event_sources(&mut self, body: &Value, host: &str) {
        let Some(sources) = body.as_object() else {
            return;
        };
        let ranks = sources
            .iter()
            .filter_map(|(rank, source)| Some((rank.parse::<u32>().ok()?, source)));
        let Some((_, first)) = ranks.min_by_key(|(rank, _)| *rank) else {
            return;
        };
        if first["enable_kv_cache_events"] == false || first["publisher"] == "null" {
            return;
        }
        let endpoint = |name: &str| reachable(first[name].as_str()?, host);
        self.learn_events(endpoint("endpoint"), endpoint("replay_endpoint"));
        self.topic = short_text(&first["topic"]);
        self.dp_ranks = ranks_of(sources.len() as u64);
    }

    /// Takes in `GET /server_info` of an engine at `host`: SGLang's, vLLM's in its development mode, the simulated engine's.
    pub fn read_server_info(&mut self, body: &Value, host: &str) {
        if let Some(version) = short_text(&body["version"]) {
            self.version = Some(version);
        }
        let size = body["page_size"]
            .as_u64()
            .or_else(|| body["block_size"].as_u64());
        self.block_size = size
            .and_then(|size| u32::try_from(size).ok())
            .filter(|size| *size > 0)
            .or(self.block_size);
        self.dp_ranks = body["dp_size"]
            .as_u64()
            .and_then(ranks_of)
            .or(self.dp_ranks);
        self.role = match body["disaggregation_mode"]
            .as_str()
            .or_else(|| body["role"].as_str())
        {
            Some("prefill") => Some(Role::Prefill),
            Some("decode") => Some(Role::Decode),
            _ => self.role,
        };
        if matches!(
            body["disaggregation_mode"].as_str(),
            Some("prefill" | "decode")
        ) {
            self.connector = short_text(&body["disaggregation_transfer_backend"]);
            self.bootstrap_port = port(&body["disaggregation_bootstrap_port"]);
        }
        self.handoff = Connector::told(body).or(self.handoff);
        self.read_transfer_config(&body["vllm_config"]["kv_transfer_config"]);
        self.read_kv_events(&body["kv_events"], host);
    }

    fn read_transfer_config(&mut self, config: &Value) {
        let Some(connector) = short_text(&config["kv_connector"]) else {
            return;
        };
        self.connector = Some(connector);
        self.role = match config["kv_role"].as_str() {
            Some("kv_producer") => Some(Role::Prefill),
            Some("kv_consumer") => Some(Role::Decode),
            _ => self.role,
        };
    }

    /// Takes in where SGLang publishes (from 0.5.14).
    fn read_kv_events(&mut self, events: &Value, host: &str) {
        let published_at = events["endpoint_host"].as_str().unwrap_or("*");
        let endpoint = |name: &str| {
            let bound = HostPort::new(published_at, port(&events[name])?);
            reachable(&format!("tcp://{bound}"), host)
        };
        let Some(published) = endpoint("endpoint_port_base") else {
            return;
        };
        self.learn_events(Some(published), endpoint("replay_endpoint_port_base"));
        self.topic = short_text(&events["topic"]);
    }

    fn learn_events(&mut self, events: Option<Reach>, replay: Option<Reach>) {
        (self.events, self.events_out_of_reach) = match events {
            None => (None, None),
            Some(Reach::From(endpoint)) => (Some(endpoint), None),
            Some(Reach::OwnMachine(endpoint)) => (None, Some(endpoint)),
        };
        self.replay = match replay {
            Some(Reach::From(endpoint)) if self.events.is_some() => Some(endpoint),
            _ => None,
        };
    }

    /// Returns what a worker is, once what its source did not say is filled in.
    #[must_use]
    pub fn complete(&self, config: &WorkerConfig) -> WorkerConfig {
        let mut whole = config.clone();
        if !whole.says_dp_ranks()
            && let Some(ranks) = self.dp_ranks
        {
            whole.dp_ranks = ranks;
        }
        if whole.events.is_none() {
            whole.events.clone_from(&self.events);
            whole.replay.clone_from(&self.replay);
            whole.topic = whole.topic.or_else(|| self.topic.clone());
        }
        if !whole.says_role()
            && let Some(role) = self.role
        {
            whole.role = role;
        }
        whole
    }

    /// Names every contradiction between what a worker was taken for and what its engine says.
    #[must_use]
    pub fn mismatches(&self, config: &WorkerConfig) -> Vec<String> {
        let mut all = Vec::new();
        let mut compare = |what: &str, configured: Option<String>, learned: Option<String>| {
            if let (Some(configured), Some(learned)) = (configured, learned)
                && configured != learned
            {
                all.push(format!(
                    "{what} is {configured} here and {learned} in the engine"
                ));
            }
        };
        let size = config.block_size.map(|size| u32::from(size).to_string());
        compare(
            "block_size",
            size,
            self.block_size.map(|size| size.to_string()),
        );
        let ranks = config.says_dp_ranks().then(|| config.dp_ranks.to_string());
        compare(
            "dp_ranks",
            ranks,
            self.dp_ranks.map(|ranks| ranks.to_string()),
        );
        let role = config.says_role().then(|| config.role.name().to_owned());
        compare("role", role, self.role.map(|role| role.name().to_owned()));
        compare("events", config.events.clone(), self.events.clone());
        compare("replay", config.replay.clone(), self.replay.clone());
        if let (None, Some(told)) = (&config.events, &self.events_out_of_reach) {
            all.push(format!(
                "events are at {told}, which is reached on the engine's own machine alone"
            ));
        }
        if let (Some(here), Some(learned)) = (config.kv_capacity_blocks, self.kv_blocks)
            && config.block_size.map(u32::from) == self.block_size
            && here as u64 > learned
        {
            all.push(format!(
                "kv_capacity_blocks is {here} here and {learned} in the engine"
            ));
        }
        all
    }
}

/// What the workers of one source have in common.
#[derive(Clone, Debug, Default)]
pub struct Mates {
    models: Counts,
    versions: Counts,
}

type Counts = BTreeMap<String, usize>;

impl Mates {
    /// Counts one worker.
    pub fn add(&mut self, described: &Described) {
        for (counts, value) in [
            (&mut self.models, &described.model),
            (&mut self.versions, &described.version),
        ] {
            if let Some(value) = value {
                *counts.entry(value.clone()).or_default() += 1;
            }
        }
    }

    /// Names where one of those that were counted differs from what most of the others have in common.
    #[must_use]
    pub fn differences(&self, described: &Described) -> Vec<String> {
        let differs = |(what, counts, own): (&str, &Counts, &Option<String>)| {
            let own = own.as_ref()?;
            let others = counts.values().sum::<usize>().checked_sub(1)?;
            let (common, count) = counts.iter().max_by_key(|(_, count)| **count)?;
            let is_odd = common != own && count * 2 > others;
            is_odd.then(|| format!("{what} is {own} here and {common} in most of its mates"))
        };
        [
            ("model", &self.models, &described.model),
            ("version", &self.versions, &described.version),
        ]
        .into_iter()
        .filter_map(differs)
        .collect()
    }
}

/// An endpoint of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Reach {
    /// It can be connected to.
    From(String),
    /// It is a loopback of the engine's machine, which is not this one.
    OwnMachine(String),
}

/// Returns an endpoint to connect to, for one that an engine at `host` binds; `None` where that cannot be done.
fn reachable(endpoint: &str, host: &str) -> Option<Reach> {
    let Some(address) = endpoint.strip_prefix("tcp://") else {
        // A socket in a file system, which need not be ours.
        return None;
    };
    let (bound, port) = address.rsplit_once(':')?;
    let port = port.parse::<u16>().ok().filter(|port| *port > 0)?;
    let bound = bound.trim_start_matches('[').trim_end_matches(']');
    let is_anywhere = matches!(bound, "*" | "0.0.0.0" | "::" | "");
    let target = HostPort::new(if is_anywhere { host } else { bound }, port);
    let endpoint = format!("tcp://{target}");
    let is_elsewhere = target.is_loopback() && !HostPort::new(host, port).is_loopback();
    Some(if is_elsewhere {
        Reach::OwnMachine(endpoint)
    } else {
        Reach::From(endpoint)
    })
}

/// Returns a number of ranks, if it is one that a worker can have.
pub(crate) fn ranks_of(ranks: u64) -> Option<u32> {
    let ranks = (1..=MAX_RANKS).contains(&ranks).then_some(ranks)?;
    u32::try_from(ranks).ok()
}

fn port(value: &Value) -> Option<u16> {
    let port = u16::try_from(value.as_u64()?).ok()?;
    (port > 0).then_some(port)
}

/// Reads a text that is worth showing.
fn short_text(value: &Value) -> Option<String> {
    let text = value.as_str()?;
    (!text.is_empty() && text.len() <= 1_024).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn configured(change: impl FnOnce(&mut WorkerConfig)) -> WorkerConfig {
        let mut config = WorkerConfig::new("w", "http://gpu-3:8000").unwrap();
        change(&mut config);
        config
    }

    fn vllm() -> Described {
        let mut described = Described::default();
        let read = |text| serde_json::from_str::<Value>(text).unwrap();
        described.read_version(&json!({"version": "0.32.0"}));
        described.read_models(&read(include_str!(
            "../../../tests/fixtures/vllm-0.32.0/models.json"
        )));
        let sources = include_str!("../../../tests/fixtures/vllm-0.32.0/kv-event-sources.json");
        described.read_event_sources(&read(sources), "gpu-3");
        described
    }

    #[test]
    fn a_captured_vllm_tells_its_model_and_where_its_events_are() {
        let described = vllm();
        assert_eq!(described.model.as_deref(), Some("/models/tiny"));
        assert_eq!(described.max_model_len, Some(512));
        assert_eq!(described.events.as_deref(), Some("tcp://gpu-3:21970"));
        assert_eq!(described.replay.as_deref(), Some("tcp://gpu-3:21971"));
        assert_eq!(described.topic.as_deref(), Some("kv@w1@tiny"));
        assert_eq!(described.dp_ranks, Some(1));
        assert_eq!(described.version.as_deref(), Some("0.32.0"));
    }

    #[test]
    fn sglang_tells_its_role_ranks_and_events() {
        let mut described = Described::default();
        let info = json!({
            "version": "0.5.23", "page_size": 64, "dp_size": 4, "disaggregation_mode": "prefill",
            "disaggregation_transfer_backend": "nixl", "disaggregation_bootstrap_port": 8998,
            "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv",
                "replay_endpoint_port_base": 5657, "block_size": 64, "dp_size": 4},
        });
        described.read_server_info(&info, "fd00::7");
        let expected = Described {
            version: Some("0.5.23".into()),
            block_size: Some(64),
            dp_ranks: Some(4),
            events: Some("tcp://[fd00::7]:5557".into()),
            replay: Some("tcp://[fd00::7]:5657".into()),
            topic: Some("kv".into()),
            role: Some(Role::Prefill),
            connector: Some("nixl".into()),
            handoff: Some(Connector::Sglang),
            bootstrap_port: Some(8998),
            ..Described::default()
        };
        assert_eq!(described, expected);
    }

    #[test]
    fn vllm_tells_its_connector_in_its_development_mode() {
        let mut described = Described::default();
        let config = json!({"kv_connector": "NixlConnector", "kv_role": "kv_consumer"});
        let info = json!({"vllm_config": {"kv_transfer_config": config}});
        described.read_server_info(&info, "h");
        assert_eq!(described.connector.as_deref(), Some("NixlConnector"));
        assert_eq!(described.handoff, Some(Connector::Nixl));
        assert_eq!(described.role, Some(Role::Decode));
    }

    #[test]
    fn a_wildcard_is_the_workers_host_and_an_address_is_itself() {
        for (endpoint, expected) in [
            ("tcp://*:5557", Some("tcp://gpu-3:5557")),
            ("tcp://0.0.0.0:5557", Some("tcp://gpu-3:5557")),
            ("tcp://[::]:5557", Some("tcp://gpu-3:5557")),
            ("tcp://10.0.0.3:5557", Some("tcp://10.0.0.3:5557")),
            ("tcp://[fd00::3]:5557", Some("tcp://[fd00::3]:5557")),
            ("tcp://*:0", None),
            ("tcp://*:x", None),
            ("tcp://nothing", None),
            ("ipc:///tmp/socket", None),
            ("inproc://here", None),
        ] {
            let expected = expected.map(|endpoint| Reach::From(endpoint.to_owned()));
            assert_eq!(reachable(endpoint, "gpu-3"), expected, "{endpoint}");
        }
    }

    #[test]
    fn a_loopback_of_another_machine_is_not_followed_here() {
        for bound in [
            "127.0.0.1",
            "127.1.2.3",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "localhost",
            "localhost.",
        ] {
            let endpoint = format!("tcp://{bound}:5557");
            let sources = json!({"0": {"endpoint": endpoint, "replay_endpoint": "tcp://*:5558"}});
            let mut remote = Described::default();
            remote.read_event_sources(&sources, "gpu-3");
            assert_eq!((&remote.events, &remote.replay), (&None, &None), "{bound}");
            assert_eq!(remote.complete(&configured(|_| {})).events, None);
            let mismatches = remote.mismatches(&configured(|_| {}));
            assert!(
                mismatches[0].contains("own machine alone"),
                "{mismatches:?}"
            );
            let said = configured(|config| config.events = Some("tcp://gpu-3:5557".to_owned()));
            assert_eq!(remote.mismatches(&said), [""; 0], "its source knows better");
            let mut local = Described::default();
            local.read_event_sources(&sources, "127.0.0.1");
            assert_eq!(local.events.as_deref(), Some(&*endpoint));
            assert_eq!(local.replay.as_deref(), Some("tcp://127.0.0.1:5558"));
        }
        let mut sglang = Described::default();
        let events = json!({"endpoint_host": "127.0.0.1", "endpoint_port_base": 5557});
        sglang.read_server_info(&json!({"kv_events": events}), "gpu-3");
        assert_eq!(sglang.events, None);
        assert!(sglang.events_out_of_reach.is_some());
    }

    #[test]
    fn what_the_source_says_is_kept_and_the_rest_is_filled_in() {
        let mut described = vllm();
        described.dp_ranks = Some(2);
        described.role = Some(Role::Prefill);
        let whole = described.complete(&configured(|_| {}));
        assert_eq!((whole.dp_ranks, whole.role), (2, Role::Prefill));
        assert_eq!(whole.events.as_deref(), Some("tcp://gpu-3:21970"));
        assert_eq!(whole.topic.as_deref(), Some("kv@w1@tiny"));
        let said = configured(|config| {
            config.dp_ranks = 4;
            config.role = Role::Decode;
            config.events = Some("tcp://h:1".to_owned());
        });
        assert_eq!(described.complete(&said), said);
        let text = json!({"id": "w", "url": "http://h:1", "role": "both", "dp_ranks": 1});
        let said = WorkerConfig::from_fields(text.as_object().unwrap()).unwrap();
        let whole = described.complete(&said);
        assert_eq!(
            (whole.dp_ranks, whole.role),
            (1, Role::Both),
            "said, if only the defaults"
        );
    }

    #[test]
    fn each_contradiction_is_named() {
        let mut described = vllm();
        described.block_size = Some(32);
        described.kv_blocks = Some(64);
        described.role = Some(Role::Decode);
        assert_eq!(described.mismatches(&configured(|_| {})), [""; 0]);
        let config = configured(|config| {
            config.block_size = Some(kvlane::BlockSize::new(16).unwrap());
            config.dp_ranks = 2;
            config.role = Role::Prefill;
            config.events = Some("tcp://gpu-3:5557".to_owned());
        });
        assert_eq!(
            described.mismatches(&config),
            [
                "block_size is 16 here and 32 in the engine",
                "dp_ranks is 2 here and 1 in the engine",
                "role is prefill here and decode in the engine",
                "events is tcp://gpu-3:5557 here and tcp://gpu-3:21970 in the engine",
            ]
        );
        let config = configured(|config| {
            config.block_size = Some(kvlane::BlockSize::new(32).unwrap());
            config.kv_capacity_blocks = Some(65);
        });
        assert_eq!(
            described.mismatches(&config),
            ["kv_capacity_blocks is 65 here and 64 in the engine"]
        );
    }

    #[test]
    fn one_that_differs_from_most_of_its_mates_is_named() {
        let of = |model: &str, version: &str| Described {
            model: Some(model.to_owned()),
            version: Some(version.to_owned()),
            ..Described::default()
        };
        let (one, odd) = (of("m", "0.32.0"), of("m", "0.31.0"));
        let silent = Described::default();
        let differences = |of: &Described, mates: &[&Described]| {
            let mut all = Mates::default();
            mates.iter().for_each(|mate| all.add(mate));
            all.add(of);
            all.differences(of)
        };
        assert_eq!(
            differences(&odd, &[&one, &one, &silent]),
            ["version is 0.31.0 here and 0.32.0 in most of its mates"]
        );
        // Of two others, one alone is not most.
        assert_eq!(differences(&one, &[&one, &odd]), [""; 0]);
        assert_eq!(differences(&silent, &[&one]), [""; 0]);
        assert_eq!(differences(&one, &[]), [""; 0]);
        assert_eq!(differences(&of("n", "0.31.0"), &[&one, &one]).len(), 2);
    }

    #[test]
    fn nonsense_says_nothing() {
        for body in [
            json!(null),
            json!(7),
            json!([]),
            json!("x"),
            json!({}),
            json!({"data": 7}),
            json!({"data": [{}]}),
            json!({"version": 3}),
            json!({"0": null, "x": {}}),
            json!({"dp_size": -1, "page_size": 0, "kv_events": [], "disaggregation_mode": "null"}),
            json!({"dp_size": 1e300, "kv_events": {"endpoint_port_base": 70_000}}),
        ] {
            let mut described = Described::default();
            described.read_version(&body);
            described.read_models(&body);
            described.read_server_info(&body, "h");
            let events_only = described.clone();
            assert_eq!(events_only, Described::default(), "{body}");
            described.read_event_sources(&body, "h");
            assert_eq!(described.events, None, "{body}");
        }
    }
}
