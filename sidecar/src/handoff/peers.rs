//! What is asked of workers before they hand over to each other: version, models, connector, and the engine ids of
//! Mooncake's.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hyper::StatusCode;
use hyper::header::HeaderValue;
use kvlane::{Role, WorkerId};
use parking_lot::RwLock;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;

use super::connector::Connector;
use crate::fleet::{Fleet, Worker};
use crate::forward::upstream::Pool;
use crate::net::HostPort;
use crate::scrape;

/// What a worker's engine says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PeerFacts {
    /// Its version.
    pub version: Option<String>,
    /// The models that it serves, adapters aside, in order.
    pub models: Vec<String>,
    /// Its connector.
    pub connector: Option<Connector>,
    /// Engine ids by rank, where a Mooncake bootstrap service tells them.
    pub engines: BTreeMap<u32, String>,
    /// Port of its bootstrap service, where it says so.
    pub bootstrap_port: Option<u16>,
}

/// What is known of one life of a worker.
#[derive(Debug)]
pub struct Peer {
    worker: Arc<Worker>,
    facts: Arc<PeerFacts>,
    at: Instant,
    /// Something that rests on it has failed.
    doubted: AtomicBool,
}

impl Peer {
    /// Returns what the engine said.
    #[must_use]
    pub const fn facts(&self) -> &Arc<PeerFacts> {
        &self.facts
    }

    /// Takes note that what rests on these facts has failed: the engine may have restarted, so it is asked again.
    pub fn doubt(&self) {
        self.doubted.store(true, Ordering::Relaxed);
    }

    fn is_due(&self) -> bool {
        self.doubted.load(Ordering::Relaxed) || self.at.elapsed() >= AGAIN
    }
}

/// Asks workers, again and again.
#[derive(Debug)]
pub struct Peers {
    shared: Arc<Shared>,
    started: Instant,
    /// Every worker that was there at first was asked.
    settled: AtomicBool,
    stop: CancellationToken,
}

#[derive(Debug)]
struct Shared {
    fleet: Arc<Fleet>,
    /// Port of bootstrap services, unless a worker has its own.
    bootstrap_port: u16,
    known: RwLock<HashMap<WorkerId, Arc<Peer>>>,
    wanted: Notify,
}

/// How long an answer is believed.
const AGAIN: Duration = Duration::from_secs(10);
/// How often it is looked whom to ask.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long workers that do not answer keep others from being taken for ready.
const GRACE: Duration = Duration::from_secs(5);
/// Time that one question is given.
const PATIENCE: Duration = Duration::from_secs(2);
/// vLLM tells its connector in this form alone; SGLang knows one form.
const SERVER_INFO: &str = "/server_info?config_format=json";
/// A server's own description of itself may be long.
const MAX_ANSWER: usize = 1 << 20;

impl Peers {
    /// Begins to ask the workers of a fleet; ends when dropped. Must be called within a runtime.
    #[must_use]
    pub fn start(fleet: Arc<Fleet>, bootstrap_port: u16) -> Self {
        let shared = Arc::new(Shared {
            fleet,
            bootstrap_port,
            known: RwLock::default(),
            wanted: Notify::new(),
        });
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        tasks.spawn(
            stop.clone()
                .run_until_cancelled_owned(Arc::clone(&shared).ask_on(tasks.clone())),
        );
        Self {
            shared,
            started: Instant::now(),
            settled: AtomicBool::new(false),
            stop,
        }
    }

    /// Returns what is known of a worker; `None` before it was asked.
    #[must_use]
    pub fn of(&self, worker: &Arc<Worker>) -> Option<Arc<Peer>> {
        let known = self.shared.known.read().get(&worker.config.id).cloned();
        let known = known.filter(|peer| Arc::ptr_eq(&peer.worker, worker));
        if known.as_ref().is_none_or(|peer| peer.is_due()) {
            self.shared.wanted.notify_one();
        }
        known
    }

    /// Tells whether the workers that were there at first have been asked: before that nothing is split. Stays true; those
    /// that are down, or do not answer for five seconds, are not waited for.
    #[must_use]
    pub fn are_settled(&self) -> bool {
        if self.settled.load(Ordering::Relaxed) {
            return true;
        }
        let members = self.shared.fleet.members();
        let waits =
            |worker: &Arc<Worker>| worker.healthy() != Some(false) && self.of(worker).is_none();
        let settled = self.started.elapsed() >= GRACE || !members.list().iter().any(waits);
        if settled {
            self.settled.store(true, Ordering::Relaxed);
        }
        settled
    }

    /// Returns the port of a prefill worker's bootstrap service.
    #[must_use]
    pub fn bootstrap_port(&self, worker: &Worker, facts: &PeerFacts) -> u16 {
        self.shared.bootstrap_port(worker, facts.bootstrap_port)
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Shared {
    async fn ask_on(self: Arc<Self>, tasks: TaskTracker) {
        // One question at a time for each worker, and no worker that waits for another's answer.
        let mut asking: HashMap<WorkerId, tokio::task::JoinHandle<()>> = HashMap::new();
        loop {
            asking.retain(|_, task| !task.is_finished());
            self.known
                .write()
                .retain(|_, peer| !peer.worker.removed().is_cancelled());
            for worker in self.fleet.members().list() {
                if !asking.contains_key(&worker.config.id) && self.is_due(worker) {
                    let (shared, worker) = (Arc::clone(&self), Arc::clone(worker));
                    let id = worker.config.id.clone();
                    let task = tasks.spawn(async move { shared.ask(worker).await });
                    asking.insert(id, task);
                }
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = self.wanted.notified() => {}
            }
        }
    }

    fn is_due(&self, worker: &Arc<Worker>) -> bool {
        let known = self.known.read();
        let peer = known.get(&worker.config.id);
        peer.is_none_or(|peer| !Arc::ptr_eq(&peer.worker, worker) || peer.is_due())
    }

    async fn ask(&self, worker: Arc<Worker>) {
        // A worker that does not answer is asked again soon, and is not known until it does.
        let Some(version) = get(&worker, "/version").await else {
            tokio::time::sleep(LOOK_EVERY).await;
            return;
        };
        let info = get(&worker, SERVER_INFO).await.flatten();
        let info = info.unwrap_or(Value::Null);
        let port = info
            .get("disaggregation_bootstrap_port")
            .and_then(Value::as_u64)
            .and_then(|port| u16::try_from(port).ok());
        let labels = worker.labels();
        let label = labels.get("connector");
        let mut facts = PeerFacts {
            version: version
                .as_ref()
                .and_then(|answer| text(answer, "version"))
                .or_else(|| text(&info, "version")),
            models: models(get(&worker, "/v1/models").await.flatten()),
            connector: label
                .and_then(|label| Connector::parse(label))
                .or_else(|| Connector::told(&info)),
            engines: BTreeMap::new(),
            bootstrap_port: port,
        };
        let may_be_mooncake = matches!(facts.connector, None | Some(Connector::Mooncake));
        if may_be_mooncake && worker.role().serves(Role::Prefill) {
            facts.engines = self.engines(&worker).await;
            if !facts.engines.is_empty() {
                facts.connector = Some(Connector::Mooncake);
            }
        }
        debug!(
            worker = worker.id(),
            ?facts,
            "asked what it hands over with"
        );
        let peer = Peer {
            facts: Arc::new(facts),
            at: Instant::now(),
            doubted: AtomicBool::new(false),
            worker,
        };
        let id = peer.worker.config.id.clone();
        self.known.write().insert(id, Arc::new(peer));
    }

    /// Asks Mooncake's bootstrap service for the engine id of each rank.
    async fn engines(&self, worker: &Worker) -> BTreeMap<u32, String> {
        let host = worker.config.url.address().host();
        let address = HostPort::new(host, self.bootstrap_port(worker, None));
        let Ok(header) = HeaderValue::from_str(&address.to_string()) else {
            return BTreeMap::new();
        };
        let pool = Arc::new(Pool::new(address, PATIENCE, Duration::ZERO, 0));
        let answer = scrape::fetch(&pool, &header, "/query", MAX_ANSWER, PATIENCE).await;
        let Ok((StatusCode::OK, body)) = answer else {
            return BTreeMap::new();
        };
        let ranks: BTreeMap<String, Value> = serde_json::from_slice(&body).unwrap_or_default();
        let engine = |(rank, entry): (&String, &Value)| {
            Some((rank.parse().ok()?, text(entry, "engine_id")?))
        };
        ranks.iter().filter_map(engine).collect()
    }

    fn bootstrap_port(&self, worker: &Worker, told: Option<u16>) -> u16 {
        let configured = worker.config.bootstrap_port;
        configured.or(told).unwrap_or(self.bootstrap_port)
    }
}

/// Asks for JSON: `None` without an answer, `Some(None)` for one that is no success or no JSON.
async fn get(worker: &Worker, path: &str) -> Option<Option<Value>> {
    let (status, body) = scrape::get(worker, path, MAX_ANSWER, PATIENCE).await.ok()?;
    let value = status.is_success().then(|| serde_json::from_slice(&body));
    Some(value.and_then(Result::ok))
}

/// Reads a list of models.
fn models(answer: Option<Value>) -> Vec<String> {
    let answer = answer.unwrap_or(Value::Null);
    let list = answer.get("data").and_then(Value::as_array);
    let is_base = |model: &&Value| text(model, "parent").is_none();
    let own = list.into_iter().flatten().filter(is_base);
    let mut names: Vec<String> = own.filter_map(|model| text(model, "id")).collect();
    names.sort_unstable();
    names
}

fn text(value: &Value, name: &str) -> Option<String> {
    let text = value.get(name)?.as_str()?;
    (!text.is_empty() && text.len() <= 256).then(|| text.to_owned())
}
