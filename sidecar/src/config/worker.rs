//! One worker's configuration, the same from the file, a flag and the admin listener.

use std::collections::BTreeMap;

use kvlane::{BlockSize, Role, WorkerId, WorkerSpec};
use serde::Serialize;
use serde_json::{Map, Value};

use super::file::unknown;
use crate::net::{HostPort, WorkerUrl};

/// A worker: who it is, where its HTTP server is, and where its KV events come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct WorkerConfig {
    /// The worker's name, 1 to 256 bytes.
    #[serde(serialize_with = "super::display")]
    pub id: WorkerId,
    /// Its HTTP server.
    #[serde(serialize_with = "super::display")]
    pub url: WorkerUrl,
    /// ZeroMQ endpoint of its KV events; further ranks are on the following ports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events: Option<String>,
    /// ZeroMQ endpoint of its replay socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replay: Option<String>,
    /// ZeroMQ topic prefix to subscribe to; everything when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
    /// What it does (default both).
    pub role: Role,
    /// Data-parallel ranks behind its URL (default 1).
    pub dp_ranks: u32,
    /// The engine's block size when it is known beforehand; read from its metrics otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_size: Option<BlockSize>,
    /// KV capacity of a rank in blocks of the router's size; read from its metrics otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_capacity_blocks: Option<usize>,
    /// Port of its bootstrap service, where it hands over by SGLang's or Mooncake's protocol; `handoff.bootstrap_port`
    /// when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootstrap_port: Option<u16>,
    /// Free-form labels. Those that handoffs read: `connector`, `version`, `host`, `device`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// What was said, if only to say the default.
    #[serde(skip)]
    said: Said,
}

/// Fields whose default does not tell whether it was meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Said {
    role: bool,
    dp_ranks: bool,
}

/// The fields of a worker, for messages.
const FIELDS: [&str; 11] = [
    "id",
    "url",
    "events",
    "replay",
    "topic",
    "role",
    "dp_ranks",
    "block_size",
    "kv_capacity_blocks",
    "bootstrap_port",
    "labels",
];

impl WorkerConfig {
    /// Creates a worker with defaults.
    ///
    /// # Errors
    /// Names the field and what is accepted.
    pub fn new(id: &str, url: &str) -> Result<Self, String> {
        Ok(Self {
            id: WorkerId::new(id).map_err(|error| format!("id: {error}"))?,
            url: WorkerUrl::parse(url)?,
            events: None,
            replay: None,
            topic: None,
            role: Role::Both,
            dp_ranks: 1,
            block_size: None,
            kv_capacity_blocks: None,
            bootstrap_port: None,
            labels: BTreeMap::new(),
            said: Said::default(),
        })
    }

    /// Reads a worker from the fields of a mapping.
    ///
    /// # Errors
    /// Names the field and what is accepted.
    pub fn from_fields(fields: &Map<String, Value>) -> Result<Self, String> {
        let required = |name: &str| {
            fields
                .get(name)
                .ok_or_else(|| format!("{name}: missing; every worker needs an id and a url"))?
                .as_str()
                .ok_or_else(|| format!("{name}: a text is accepted"))
        };
        let mut worker = Self::new(required("id")?, required("url")?)?;
        for (name, value) in fields {
            worker.set(name, value)?;
        }
        if worker.replay.is_some() && worker.events.is_none() {
            return Err(format!(
                "replay: worker {:?} has a replay endpoint and no events endpoint; give both or neither",
                worker.id
            ));
        }
        Ok(worker)
    }

    /// Reads a worker from `key=value` pairs separated by commas, as in `id=w1,url=http://127.0.0.1:8000`.
    ///
    /// # Errors
    /// Names the field and what is accepted.
    pub fn from_flag(text: &str) -> Result<Self, String> {
        let mut fields = Map::new();
        let mut labels = Map::new();
        for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
            let (name, value) = pair
                .split_once('=')
                .ok_or_else(|| format!("{pair:?}: field=value is accepted, as in id=w1"))?;
            let (name, value) = (name.trim(), value.trim());
            if let Some(label) = name.strip_prefix("label.") {
                labels.insert(label.to_owned(), Value::from(value));
                continue;
            }
            let numeric = matches!(
                name,
                "dp_ranks" | "block_size" | "kv_capacity_blocks" | "bootstrap_port"
            );
            let value = match value.parse::<u64>() {
                Ok(number) if numeric => Value::from(number),
                _ => Value::from(value),
            };
            if fields.insert(name.to_owned(), value).is_some() {
                return Err(format!("{name}: given twice"));
            }
        }
        if !labels.is_empty() {
            fields.insert("labels".to_owned(), Value::Object(labels));
        }
        Self::from_fields(&fields)
    }

    /// Gives it a role and ranks, where they are known: what is given stands, if only the default, and is not learned.
    pub fn give(&mut self, role: Option<Role>, dp_ranks: Option<u32>) {
        if let Some(role) = role {
            self.role = role;
            self.said.role = true;
        }
        if let Some(dp_ranks) = dp_ranks {
            self.dp_ranks = dp_ranks;
            self.said.dp_ranks = true;
        }
    }

    /// Tells whether its role was given, and is not only the default that the engine's own word replaces.
    #[must_use]
    pub fn says_role(&self) -> bool {
        self.said.role || self.role != Role::default()
    }

    /// Tells whether its number of ranks was given.
    #[must_use]
    pub const fn says_dp_ranks(&self) -> bool {
        self.said.dp_ranks || self.dp_ranks != 1
    }

    /// Tells whether a worker described so is the same process: it is reached alike, and what is known of its cache is the same.
    #[must_use]
    pub fn is_same_place(&self, other: &Self) -> bool {
        let mut moved = self.clone();
        moved.role = other.role;
        moved.said = other.said;
        moved.labels.clone_from(&other.labels);
        moved == *other
    }

    /// Tells whether `other` may describe this worker in fewer words: what it says of where the process is and of its cache is the
    /// same, and what it does not say is left open.
    #[must_use]
    pub fn is_described_by(&self, other: &Self) -> bool {
        fn agrees<T: PartialEq>(own: Option<&T>, other: Option<&T>) -> bool {
            other.is_none() || own == other
        }
        self.id == other.id
            && self.url == other.url
            && agrees(self.events.as_ref(), other.events.as_ref())
            && agrees(self.replay.as_ref(), other.replay.as_ref())
            && agrees(self.topic.as_ref(), other.topic.as_ref())
            && agrees(self.block_size.as_ref(), other.block_size.as_ref())
            && agrees(
                self.kv_capacity_blocks.as_ref(),
                other.kv_capacity_blocks.as_ref(),
            )
            && agrees(self.bootstrap_port.as_ref(), other.bootstrap_port.as_ref())
            && (!other.says_dp_ranks() || self.dp_ranks == other.dp_ranks)
    }

    /// Returns what the router has to know.
    #[must_use]
    pub fn spec(&self) -> WorkerSpec {
        let mut spec =
            WorkerSpec::new(self.id.as_str()).expect("the id was checked when it was read");
        spec.dp_ranks = self.dp_ranks;
        spec.role = self.role;
        spec.block_size = self.block_size;
        spec.kv_capacity_blocks = self.kv_capacity_blocks;
        spec.events.clone_from(&self.events);
        spec.replay.clone_from(&self.replay);
        spec.labels.clone_from(&self.labels);
        spec
    }

    fn set(&mut self, name: &str, value: &Value) -> Result<(), String> {
        let bad = |accepted: &str| format!("{name}: {value} is not accepted; accepted: {accepted}");
        match name {
            "id" | "url" => {}
            "events" => self.events = Some(endpoint(name, value)?),
            "replay" => self.replay = Some(endpoint(name, value)?),
            "topic" => {
                let topic = value.as_str().ok_or_else(|| bad("a text"))?;
                self.topic = Some(topic.to_owned());
            }
            "role" => {
                self.role = serde_json::from_value(value.clone())
                    .map_err(|_| bad("prefill, decode or both"))?;
                self.said.role = true;
            }
            "dp_ranks" => {
                let ranks = value.as_u64().and_then(|ranks| u32::try_from(ranks).ok());
                self.dp_ranks = ranks
                    .filter(|ranks| (1..=WorkerSpec::MAX_DP_RANKS).contains(ranks))
                    .ok_or_else(|| bad("1 to 1,024 ranks"))?;
                self.said.dp_ranks = true;
            }
            "block_size" => {
                let size = serde_json::from_value(value.clone());
                self.block_size = Some(size.map_err(|_| bad("1 to 65,536 tokens"))?);
            }
            "kv_capacity_blocks" => {
                let blocks = value
                    .as_u64()
                    .and_then(|blocks| usize::try_from(blocks).ok());
                let blocks = blocks.filter(|blocks| *blocks > 0);
                self.kv_capacity_blocks = Some(blocks.ok_or_else(|| bad("1 or more blocks"))?);
            }
            "bootstrap_port" => {
                let port = value.as_u64().and_then(|port| u16::try_from(port).ok());
                let port = port.filter(|port| *port != 0);
                self.bootstrap_port = Some(port.ok_or_else(|| bad("1 to 65,535"))?);
            }
            "labels" => {
                self.labels = serde_json::from_value(value.clone())
                    .map_err(|_| bad("a mapping of texts to texts"))?;
            }
            _ => return Err(unknown(name, FIELDS.into_iter())),
        }
        Ok(())
    }

    /// Lists the event endpoints of all ranks, which count up from the configured port.
    fn event_endpoints(&self) -> Vec<String> {
        let Some(events) = &self.events else {
            return Vec::new();
        };
        let Some(address) = events.strip_prefix("tcp://") else {
            return vec![events.clone()];
        };
        let Ok(address) = HostPort::parse(address, None) else {
            return vec![events.clone()];
        };
        (0..self.dp_ranks)
            .filter_map(|rank| address.port().checked_add(u16::try_from(rank).ok()?))
            .map(|port| format!("tcp://{}", HostPort::new(address.host(), port)))
            .collect()
    }
}

/// Checks the workers against each other: ids are unique; what is merely suspicious becomes a warning.
pub(super) fn check_all(
    workers: &[WorkerConfig],
    warnings: &mut Vec<String>,
) -> Result<(), String> {
    let mut ids: BTreeMap<&str, usize> = BTreeMap::new();
    let mut urls: BTreeMap<String, &str> = BTreeMap::new();
    let mut endpoints: BTreeMap<String, String> = BTreeMap::new();
    for (index, worker) in workers.iter().enumerate() {
        let id = worker.id.as_str();
        if let Some(first) = ids.insert(id, index) {
            return Err(format!(
                "workers[{first}].id and workers[{index}].id are both {id:?}; ids must differ"
            ));
        }
        if let Some(first) = urls.insert(worker.url.to_string(), id) {
            warnings.push(format!(
                "workers {first:?} and {id:?} have the same url {}; their load is counted twice",
                worker.url
            ));
        }
        for (rank, endpoint) in worker.event_endpoints().into_iter().enumerate() {
            let owner = format!("worker {id:?} rank {rank}");
            if let Some(first) = endpoints.insert(endpoint.clone(), owner.clone()) {
                warnings.push(format!(
                    "{first} and {owner} claim the same event endpoint {endpoint}; each would be credited with what the other cached"
                ));
            }
        }
    }
    Ok(())
}

/// Checks a ZeroMQ endpoint to connect to and writes its address in canonical form.
fn endpoint(name: &str, value: &Value) -> Result<String, String> {
    let bad = |why: &str| {
        format!(
            "{name}: {value} is not accepted ({why}); accepted: tcp://host:port or ipc://path, to connect to"
        )
    };
    let text = value.as_str().ok_or_else(|| bad("not a text"))?;
    if let Some(address) = text.strip_prefix("tcp://") {
        if address.starts_with("*:") {
            return Err(bad(
                "a wildcard is an address to bind, name the worker's host",
            ));
        }
        let address = HostPort::parse(address, None).map_err(|error| bad(&error))?;
        return Ok(format!("tcp://{address}"));
    }
    match text.split_once("://") {
        Some(("ipc" | "inproc", path)) if !path.is_empty() => Ok(text.to_owned()),
        _ => Err(bad("unknown transport")),
    }
}
