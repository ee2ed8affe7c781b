//! What is known of workers before they hand over to each other: version, models and connector as their engines describe
//! themselves, and the engine ids of Mooncake's, which its bootstrap service alone tells.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hyper::StatusCode;
use hyper::header::HeaderValue;
use kvlane::{Role, WorkerId};
use parking_lot::{Mutex, RwLock};
use serde::Serialize;
use serde_json::Value;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;

use super::connector::Connector;
use crate::fleet::{Fleet, Knowledge, Model, Worker};
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
    /// What it was started with for a model: engines that compare it refuse those that have it under another name.
    pub model: Option<String>,
    /// Its connector.
    pub connector: Option<Connector>,
    /// Engine ids by rank, where a Mooncake bootstrap service tells them.
    pub engines: BTreeMap<u32, String>,
    /// Port of its bootstrap service, where it says so.
    pub bootstrap_port: Option<u16>,
}

impl PeerFacts {
    /// Puts together what a worker's engine and its labels say; `None` before the engine was asked.
    fn told(knowledge: &Knowledge) -> Option<Self> {
        let described = knowledge.described()?;
        let own = |model: &&Model| !model.is_adapter;
        let models = knowledge.models.iter().filter(own);
        let mut models: Vec<_> = models.map(|model| model.id.clone()).collect();
        models.sort_unstable();
        let label = knowledge.labels.get("connector");
        Some(Self {
            version: described.version,
            models,
            model: described.model,
            connector: label
                .and_then(|label| Connector::parse(label))
                .or(described.handoff),
            engines: BTreeMap::new(),
            bootstrap_port: described.bootstrap_port,
        })
    }
}

/// What is known of one life of a worker.
#[derive(Debug)]
pub struct Peer {
    worker: Arc<Worker>,
    facts: Arc<PeerFacts>,
    /// What it was told by the engine and the labels alone.
    told: PeerFacts,
    /// What that was put together from.
    knowledge: Mutex<Knowledge>,
    /// When its bootstrap service was asked, where it may have one.
    asked: Option<Instant>,
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
        self.worker.ask_again();
    }

    fn is_due(&self) -> bool {
        self.asked
            .is_some_and(|at| self.doubted.load(Ordering::Relaxed) || at.elapsed() >= AGAIN)
    }
}

/// What a worker's engine and labels say, and what that was put together from.
#[derive(Debug)]
struct Told {
    facts: PeerFacts,
    knowledge: Knowledge,
}

/// Keeps what is known of workers up to date.
#[derive(Debug)]
pub struct Peers {
    shared: Arc<Shared>,
    started: Instant,
    /// Every worker that was there at first is known.
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

/// How long an answer of a bootstrap service is believed.
const AGAIN: Duration = Duration::from_secs(10);
/// How often it is looked what workers are now.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long workers that do not answer keep others from being taken for ready.
const GRACE: Duration = Duration::from_secs(5);
/// Time that one question is given.
const PATIENCE: Duration = Duration::from_secs(2);
/// Bound of a bootstrap service's answer.
const MAX_ANSWER: usize = 1 << 20;

impl Peers {
    /// Begins to follow the workers of a fleet; ends when dropped. Must be called within a runtime.
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
                .run_until_cancelled_owned(Arc::clone(&shared).follow(tasks.clone())),
        );
        Self {
            shared,
            started: Instant::now(),
            settled: AtomicBool::new(false),
            stop,
        }
    }

    /// Returns what is known of a worker; `None` before its engine was asked.
    #[must_use]
    pub fn of(&self, worker: &Arc<Worker>) -> Option<Arc<Peer>> {
        let known = self.shared.known.read().get(&worker.config.id).cloned();
        let known = known.filter(|peer| Arc::ptr_eq(&peer.worker, worker));
        if known.as_ref().is_none_or(|peer| peer.is_due()) {
            self.shared.wanted.notify_one();
        }
        known
    }

    /// Tells whether the engines of the workers that were there at first have been asked: before that nothing is split. Stays true; those
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
    async fn follow(self: Arc<Self>, tasks: TaskTracker) {
        // One question at a time for each service, and no worker that waits for another's answer.
        let mut asking: HashMap<WorkerId, JoinHandle<()>> = HashMap::new();
        loop {
            asking.retain(|_, task| !task.is_finished());
            self.known
                .write()
                .retain(|_, peer| !peer.worker.removed().is_cancelled());
            for worker in self.fleet.members().list() {
                let id = &worker.config.id;
                let Some(told) = self.news(worker).filter(|_| !asking.contains_key(id)) else {
                    continue;
                };
                if has_bootstrap(worker, &told.facts) {
                    let (shared, worker) = (Arc::clone(&self), Arc::clone(worker));
                    let task = tasks.spawn(async move { shared.ask(worker, told).await });
                    asking.insert(id.clone(), task);
                } else {
                    self.keep(worker, told, None);
                }
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = self.wanted.notified() => {}
            }
        }
    }

    /// Returns what a worker's engine and labels say, where that is new or its bootstrap service is to be asked again.
    fn news(&self, worker: &Arc<Worker>) -> Option<Told> {
        let known = self.known.read();
        let peer = known.get(&worker.config.id);
        // All else is news.
        let peer = peer.filter(|peer| {
            let was_asked = peer.asked.is_some();
            let is_same = Arc::ptr_eq(&peer.worker, worker);
            is_same && was_asked == has_bootstrap(worker, &peer.told) && !peer.is_due()
        });
        let knowledge = worker.knowledge();
        if peer.is_some_and(|peer| peer.knowledge.lock().is_same(&knowledge)) {
            return None;
        }
        let facts = PeerFacts::told(&knowledge)?;
        if let Some(peer) = peer
            && peer.told == facts
        {
            *peer.knowledge.lock() = knowledge;
            return None;
        }
        Some(Told { facts, knowledge })
    }

    async fn ask(&self, worker: Arc<Worker>, told: Told) {
        let engines = self.engines(&worker).await;
        self.keep(&worker, told, Some(engines));
    }

    /// Keeps what is known of a worker: what it told, and the engine ids if its bootstrap service was asked for them.
    fn keep(&self, worker: &Arc<Worker>, told: Told, engines: Option<BTreeMap<u32, String>>) {
        let asked = engines.is_some().then(Instant::now);
        let mut facts = told.facts.clone();
        facts.engines = engines.unwrap_or_default();
        if !facts.engines.is_empty() {
            facts.connector = Some(Connector::Mooncake);
        }
        debug!(worker = worker.id(), ?facts, "what it hands over with");
        let peer = Peer {
            facts: Arc::new(facts),
            told: told.facts,
            knowledge: Mutex::new(told.knowledge),
            asked,
            doubted: AtomicBool::new(false),
            worker: Arc::clone(worker),
        };
        let id = worker.config.id.clone();
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

/// Tells whether a bootstrap service of Mooncake's may know more of a worker.
fn has_bootstrap(worker: &Worker, told: &PeerFacts) -> bool {
    let may_be_mooncake = matches!(told.connector, None | Some(Connector::Mooncake));
    may_be_mooncake && worker.role().serves(Role::Prefill)
}

fn text(value: &Value, name: &str) -> Option<String> {
    let text = value.get(name)?.as_str()?;
    (!text.is_empty() && text.len() <= 256).then(|| text.to_owned())
}
