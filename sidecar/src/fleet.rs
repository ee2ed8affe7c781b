//! The workers as the sidecar sees them: where they are, whether they work, and what is open towards them.
//!
//! The router knows caches and loads; this knows connections, health and breakers, and tells the router one thing of
//! each worker: whether it may be chosen.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use hyper::header::HeaderValue;
use kvlane::{Role, Router, WorkerId};
use parking_lot::{Mutex, RwLock};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config::{Config, WorkerConfig, seconds};
use crate::forward::breaker::{Breaker, State, Verdict};
use crate::forward::upstream::Pool;
use crate::metrics::{Metrics, WorkerMetrics};

/// One worker.
#[derive(Debug)]
pub struct Worker {
    /// What was configured.
    pub config: WorkerConfig,
    /// Connections to it.
    pub pool: Arc<Pool>,
    /// Its series in the metrics.
    pub metrics: WorkerMetrics,
    router: Arc<Router>,
    breaker: Mutex<Breaker>,
    health: Mutex<Health>,
    draining: AtomicBool,
    /// Requests sent and not finished, whatever the policy.
    in_flight: AtomicUsize,
    /// Counts response pieces, so that a busy worker is not taken for a dead one.
    progress: AtomicU64,
    models: RwLock<Arc<Vec<Model>>>,
    host_header: HeaderValue,
    removed: CancellationToken,
    /// When the engine's process began, as its metrics say.
    born: Mutex<Option<f64>>,
    /// Its process was seen to end since its birth was last read.
    ended: AtomicBool,
}

/// What is known of a worker's health.
#[derive(Debug)]
struct Health {
    /// `None` before the first probe has ended: the worker may be chosen, and does not make the sidecar ready.
    healthy: Option<bool>,
    /// What was last told to the router.
    available: bool,
    /// Cancelled when the worker goes down, to wake whoever waits for its first byte; replaced when it comes back.
    lifeline: CancellationToken,
}

/// What a health probe found.
#[derive(Debug)]
pub(crate) enum Probe {
    /// It works.
    Healthy,
    /// It answers that it does not.
    Unwell(String),
    /// It does not answer: whoever waits for it should wait no longer.
    Gone(String),
}

/// A model that a worker serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Its id in the API.
    pub id: String,
    /// It is a LoRA adapter of another model.
    pub is_adapter: bool,
}

impl Worker {
    fn new(
        config: WorkerConfig,
        settings: &Config,
        router: Arc<Router>,
        metrics: &Metrics,
    ) -> Self {
        let pool = Pool::new(
            config.url.address().clone(),
            seconds(settings.connect_timeout_seconds),
            seconds(settings.idle_connection_seconds),
            settings.max_idle_connections,
        );
        let cool_down = seconds(settings.breaker_cooldown_seconds);
        let removed = CancellationToken::new();
        Self {
            pool: Arc::new(pool),
            metrics: metrics.worker(config.id.as_str()),
            router,
            breaker: Mutex::new(Breaker::new(settings.breaker_threshold, cool_down)),
            health: Mutex::new(Health {
                healthy: None,
                available: true,
                lifeline: removed.child_token(),
            }),
            draining: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
            progress: AtomicU64::new(0),
            models: RwLock::new(Arc::new(Vec::new())),
            host_header: HeaderValue::from_str(&config.url.address().to_string())
                .unwrap_or(HeaderValue::from_static("worker")),
            removed,
            born: Mutex::new(None),
            ended: AtomicBool::new(false),
            config,
        }
    }

    /// Returns its name.
    #[must_use]
    pub fn id(&self) -> &str {
        self.config.id.as_str()
    }

    /// Returns the value of the `host` header for requests to it.
    #[must_use]
    pub const fn host_header(&self) -> &HeaderValue {
        &self.host_header
    }

    /// Returns a token that is cancelled when the worker is removed.
    #[must_use]
    pub const fn removed(&self) -> &CancellationToken {
        &self.removed
    }

    /// Returns a token that is cancelled when the worker is removed or goes down.
    #[must_use]
    pub fn lifeline(&self) -> CancellationToken {
        self.health.lock().lifeline.clone()
    }

    /// Tells whether a probe found it healthy and its breaker passes requests.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.health.lock().healthy == Some(true) && self.breaker.lock().passes()
    }

    /// Tells whether it may be given a new request.
    #[must_use]
    pub fn is_eligible(&self) -> bool {
        !self.draining.load(Ordering::Relaxed)
            && self.config.role.serves(Role::Decode)
            && self.health.lock().available
    }

    /// Tells whether it is finishing what it has.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Returns the state of its breaker.
    #[must_use]
    pub fn breaker_state(&self) -> State {
        self.breaker.lock().state()
    }

    /// Returns what the last probe found; `None` before the first.
    #[must_use]
    pub fn healthy(&self) -> Option<bool> {
        self.health.lock().healthy
    }

    /// Returns the number of requests sent to it and not finished.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns the models it said it serves; empty before it did.
    #[must_use]
    pub fn models(&self) -> Arc<Vec<Model>> {
        Arc::clone(&self.models.read())
    }

    /// Takes in the models that the worker serves; tells whether they changed.
    pub(crate) fn set_models(&self, models: Vec<Model>) -> bool {
        let changed = **self.models.read() != models;
        if changed {
            *self.models.write() = Arc::new(models);
        }
        changed
    }

    /// Asks the breaker for a place for one request.
    pub(crate) fn admit(&self) -> bool {
        let admitted = self.breaker.lock().admit();
        self.publish();
        admitted
    }

    /// Takes in the status of a response.
    pub(crate) fn responded(&self, verdict: Verdict, now: Instant) {
        self.change_breaker(|breaker| breaker.responded(verdict, now));
    }

    /// Takes in that a successful response was read to its end.
    pub(crate) fn completed(&self) {
        self.breaker.lock().completed();
    }

    /// Takes in a transport error.
    pub(crate) fn failed(&self, now: Instant) {
        self.change_breaker(|breaker| breaker.failed(now));
    }

    /// Gives back a breaker's place without a verdict.
    pub(crate) fn abandoned(&self) {
        self.change_breaker(Breaker::abandoned);
    }

    /// Lets a breaker's cool-down end.
    pub(crate) fn tick(&self, now: Instant) {
        self.change_breaker(|breaker| breaker.tick(now));
    }

    /// Takes in the result of a health probe.
    pub(crate) fn probed(&self, probe: &Probe) {
        let healthy = matches!(probe, Probe::Healthy);
        let changed = {
            let mut health = self.health.lock();
            let changed = health.healthy != Some(healthy);
            health.healthy = Some(healthy);
            match probe {
                // A worker that answers, if only to say that it is not well, may still finish what it has.
                Probe::Unwell(_) => {}
                Probe::Gone(_) => health.lifeline.cancel(),
                Probe::Healthy if health.lifeline.is_cancelled() => {
                    health.lifeline = self.removed.child_token();
                }
                Probe::Healthy => {}
            }
            changed
        };
        match probe {
            Probe::Healthy if changed => info!(worker = self.id(), "worker is healthy"),
            Probe::Unwell(why) | Probe::Gone(why) if changed => {
                warn!(worker = self.id(), cause = why, "worker is not healthy");
                self.pool.close_idle();
            }
            _ => {}
        }
        self.publish();
    }

    /// Takes note that nothing listens any more: the process ended, and with it its cache.
    pub(crate) fn process_ended(&self) {
        self.cache_ended("nothing listens at its address");
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Forgets a cache that is gone. Where events can be replayed, their follower compares lives and knows better.
    fn cache_ended(&self, cause: &str) {
        // The worker may be removed at any moment; then nothing of it is left anyway.
        let _ = self.router.forget_placements(self.id());
        if self.config.events.is_some() && self.config.replay.is_none() {
            let cause = format!("the engine's process ended: {cause}");
            for dp_rank in 0..self.config.dp_ranks {
                let _ = self
                    .router
                    .restart_stream(self.id(), dp_rank, &cause, Instant::now());
            }
        }
    }

    /// Takes note of when the engine's process began. Another time than before is another process with an empty cache;
    /// its events say so too, but a worker without events is routed by own placements, which only this clears.
    pub(crate) fn noted_birth(&self, born: f64) {
        let before = self.born.lock().replace(born);
        // An end that was seen must not be acted on again: the new process may have told of its blocks since.
        let seen = self.ended.swap(false, Ordering::Relaxed);
        if before.is_some_and(|before| before.to_bits() != born.to_bits()) && !seen {
            info!(worker = self.id(), "the engine's process restarted");
            self.cache_ended("its counters began anew");
        }
    }

    pub(crate) fn count_progress(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Counts a request until the guard is dropped.
    pub(crate) fn enter(self: &Arc<Self>) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(Arc::clone(self))
    }

    /// Wakes whoever waits for it, and lets nothing of it reach the router after this returns.
    fn retire(&self) {
        let _no_publishing = self.health.lock();
        self.removed.cancel();
    }

    fn change_breaker(&self, change: impl FnOnce(&mut Breaker)) {
        let (before, after) = {
            let mut breaker = self.breaker.lock();
            let before = (breaker.state(), breaker.passes());
            change(&mut breaker);
            (before, (breaker.state(), breaker.passes()))
        };
        if before.0 != after.0 {
            warn!(
                worker = self.id(),
                from = before.0.as_str(),
                to = after.0.as_str(),
                "breaker changed"
            );
        }
        if before != after {
            self.publish();
        }
    }

    /// Tells the router whether the worker may be chosen, when that changed.
    fn publish(&self) {
        let mut health = self.health.lock();
        // Another worker may have its id by now, and would be marked for ever by what becomes of this one's last requests.
        if self.removed.is_cancelled() {
            return;
        }
        let available = health.healthy != Some(false) && self.breaker.lock().passes();
        if health.available != available {
            health.available = available;
            // Unknown to the router only while it is being removed.
            let _ = self.router.set_available(self.id(), available);
        }
    }
}

/// Counts one request in flight on a worker.
#[derive(Debug)]
pub(crate) struct InFlight(Arc<Worker>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Every worker.
#[derive(Debug)]
pub struct Fleet {
    settings: Arc<Config>,
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    members: RwLock<Arc<Members>>,
}

/// A snapshot of the workers.
#[derive(Debug, Default)]
pub struct Members {
    list: Vec<Arc<Worker>>,
    by_id: HashMap<WorkerId, usize>,
    models: HashMap<String, ModelEntry>,
}

/// Which workers serve a model.
#[derive(Debug, Default)]
pub struct ModelEntry {
    /// Some worker said it is a LoRA adapter.
    pub is_adapter: bool,
    /// The workers that listed it; `None` when all that listed any model did.
    pub only: Option<Vec<WorkerId>>,
}

impl Members {
    fn of(list: Vec<Arc<Worker>>) -> Self {
        let by_id = list
            .iter()
            .enumerate()
            .map(|(index, worker)| (worker.config.id.clone(), index))
            .collect();
        let models = index_models(&list);
        Self {
            list,
            by_id,
            models,
        }
    }

    /// Returns the workers in the order in which they were added.
    #[must_use]
    pub fn list(&self) -> &[Arc<Worker>] {
        &self.list
    }

    /// Finds a worker.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<&Arc<Worker>> {
        self.by_id.get(id).map(|index| &self.list[*index])
    }

    /// Finds what is known of a model id.
    #[must_use]
    pub fn model(&self, id: &str) -> Option<&ModelEntry> {
        self.models.get(id)
    }
}

fn index_models(list: &[Arc<Worker>]) -> HashMap<String, ModelEntry> {
    let mut models: HashMap<String, ModelEntry> = HashMap::new();
    // A worker that has not listed its models yet is not held to lack any.
    let silent: Vec<_> = list
        .iter()
        .filter(|worker| worker.models().is_empty())
        .collect();
    for worker in list {
        for model in worker.models().iter() {
            let entry = models.entry(model.id.clone()).or_default();
            entry.is_adapter |= model.is_adapter;
            entry
                .only
                .get_or_insert_default()
                .push(worker.config.id.clone());
        }
    }
    for entry in models.values_mut() {
        let only = entry.only.get_or_insert_default();
        only.extend(silent.iter().map(|worker| worker.config.id.clone()));
        if only.len() >= list.len() {
            entry.only = None;
        }
    }
    models
}

impl Fleet {
    /// Creates a fleet without workers.
    #[must_use]
    pub fn new(settings: Arc<Config>, router: Arc<Router>, metrics: Arc<Metrics>) -> Self {
        Self {
            settings,
            router,
            metrics,
            members: RwLock::new(Arc::new(Members::default())),
        }
    }

    /// Returns the workers as they are now.
    #[must_use]
    pub fn members(&self) -> Arc<Members> {
        Arc::clone(&self.members.read())
    }

    /// Adds a worker to the router and the fleet.
    ///
    /// # Errors
    /// As [`Router::add_worker`].
    pub fn add(&self, config: WorkerConfig, now: Instant) -> kvlane::Result<Arc<Worker>> {
        let mut members = self.members.write();
        self.router.add_worker(config.spec(), now)?;
        let worker = Worker::new(
            config,
            &self.settings,
            Arc::clone(&self.router),
            &self.metrics,
        );
        let worker = Arc::new(worker);
        let mut list = members.list.clone();
        list.push(Arc::clone(&worker));
        *members = Arc::new(Members::of(list));
        Ok(worker)
    }

    /// Removes a worker; requests that wait for its first byte go elsewhere.
    ///
    /// # Errors
    /// As [`Router::remove_worker`].
    pub fn remove(&self, id: &str) -> kvlane::Result<()> {
        let mut members = self.members.write();
        self.router.remove_worker(id)?;
        let (gone, list): (Vec<_>, Vec<_>) = members
            .list
            .iter()
            .cloned()
            .partition(|worker| worker.id() == id);
        *members = Arc::new(Members::of(list));
        // Before another worker of that id can come, whose series these would be.
        for worker in gone {
            worker.retire();
            worker.pool.close_idle();
            self.metrics.forget_worker(id);
        }
        Ok(())
    }

    /// Gives a worker no new requests; what it has is finished.
    ///
    /// # Errors
    /// As [`Router::drain_worker`].
    pub fn drain(&self, id: &str) -> kvlane::Result<()> {
        self.router.drain_worker(id)?;
        if let Some(worker) = self.members().find(id) {
            worker.draining.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Rebuilds what is known of models after a worker listed others than before.
    pub(crate) fn refresh_models(&self) {
        let mut members = self.members.write();
        *members = Arc::new(Members::of(members.list.clone()));
    }

    /// Tells whether some worker can take a request, confirmed by a probe.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let members = self.members();
        members.list().iter().any(|worker| {
            worker.is_ready() && !worker.is_draining() && worker.config.role.serves(Role::Decode)
        })
    }
}
