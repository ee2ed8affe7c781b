//! The parts of `kvlane serve`, put together, and what may be done to them while they run.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use kvlane::{IndexMode, Role, Router, TrustState, WorkerId};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::config::{Config, WorkerConfig, seconds};
use crate::events::EventStreams;
use crate::fleet::{Fleet, Streams, Worker};
use crate::metrics::Metrics;
use crate::pool::manager::{ChangeError, Hands, Manager};
use crate::pool::member::Fact;
use crate::pool::process::Processes;
use crate::pool::rebalance::Rebalancer;
use crate::pool::roster::{Phase, Roster, RosterReader, Sighting};
use crate::pool::sources::{Absence, Feed, Report};
use crate::proxy::Proxy;
use crate::request::{Reader, Tokenize};
use crate::scrape;

/// Everything behind the two listeners.
#[derive(Debug)]
pub struct App {
    /// The configuration at start.
    pub config: Arc<Config>,
    /// The router.
    pub router: Arc<Router>,
    /// The workers.
    pub fleet: Arc<Fleet>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// What reads requests.
    pub reader: Arc<Reader>,
    /// The proxy.
    pub proxy: Arc<Proxy>,
    /// Which workers there should be.
    pub pool: Manager,
    /// The engines that this sidecar keeps, once they are started; unset where none are configured.
    pub processes: OnceLock<Arc<Processes>>,
    /// What balances the pool; unset where it is not configured.
    pub rebalancer: OnceLock<Arc<Rebalancer>>,
    events: EventStreams,
    /// Held while a worker is added or removed: half of one change must not mix with another of the same id, or a removed
    /// worker's events would be followed on.
    changing: Mutex<()>,
    tasks: TaskTracker,
    stop: CancellationToken,
    stopping: AtomicBool,
}

impl App {
    /// Puts the parts together; no worker yet. Tasks end when `stop` is cancelled.
    ///
    /// # Errors
    /// As [`Router::new`].
    pub fn new(
        config: Arc<Config>,
        tokenizer: Option<Arc<dyn Tokenize>>,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> kvlane::Result<Arc<Self>> {
        let router = Arc::new(Router::new(config.router.clone())?);
        let metrics = Arc::new(Metrics::new());
        let fleet = Arc::new(Fleet::new(
            Arc::clone(&config),
            Arc::clone(&router),
            Arc::clone(&metrics),
        ));
        let reader = Arc::new(Reader::new(
            config.router.block_size,
            tokenizer,
            Arc::clone(&metrics),
        ));
        let proxy = Arc::new(Proxy::new(
            Arc::clone(&config),
            Arc::clone(&router),
            Arc::clone(&fleet),
            Arc::clone(&reader),
            Arc::clone(&metrics),
        )?);
        Ok(Arc::new(Self {
            pool: Manager::new(seconds(config.drain_seconds)),
            processes: OnceLock::new(),
            rebalancer: OnceLock::new(),
            events: EventStreams::new((*router).clone()),
            changing: Mutex::new(()),
            config,
            router,
            fleet,
            metrics,
            reader,
            proxy,
            tasks,
            stop,
            stopping: AtomicBool::new(false),
        }))
    }

    /// Starts a source of workers under a name of its own. `run` publishes on its feed for as long as it runs; when it returns,
    /// the source lists nothing any more. It ends when the sidecar stops.
    pub fn start_source<F>(
        self: &Arc<Self>,
        name: &str,
        absence: Absence,
        run: impl FnOnce(Feed) -> F,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let (roster, reader) = Roster::new();
        let report = self.follow_roster(name, absence, reader);
        let stop = self.stop.clone();
        let source = run(Feed {
            roster,
            report,
            stop: stop.clone(),
        });
        self.tasks.spawn(async move {
            tokio::select! {
                // What the source still lists stays until the very end.
                biased;
                () = stop.cancelled() => {}
                () = source => {}
            }
        });
    }

    /// Runs a task that the sidecar waits for a few seconds when it stops: for a source that has to clean up, which watches
    /// [`stop`](Self::stop) by itself.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Returns a token that is cancelled when the sidecar stops, after its open requests have ended.
    #[must_use]
    pub const fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Keeps the fleet as a source lists it, under a name of its own, until the sidecar stops. What it lists already is there
    /// when this returns.
    pub fn follow_roster(
        self: &Arc<Self>,
        name: &str,
        absence: Absence,
        mut reader: RosterReader,
    ) -> Report {
        let (source, report) = self.pool.attach(name, absence);
        let (app, stop) = (Arc::clone(self), self.stop.clone());
        let list = reader.borrow_and_update().clone();
        self.pool.listed(source, list, &**self, Instant::now());
        self.tasks.spawn(async move {
            loop {
                let changed = tokio::select! {
                    // A source that ends because the sidecar does has not lost its workers.
                    biased;
                    () = stop.cancelled() => return,
                    changed = reader.changed() => changed,
                };
                let list = match changed {
                    Ok(()) => reader.borrow_and_update().clone(),
                    Err(_) => Vec::new(),
                };
                app.pool.listed(source, list, &*app, Instant::now());
                if changed.is_err() {
                    return;
                }
            }
        });
        report
    }

    /// Lists workers that are there from the start, as one source.
    ///
    /// # Errors
    /// Why the first of them cannot be added.
    pub fn add_configured(self: &Arc<Self>, workers: &[WorkerConfig]) -> Result<(), String> {
        let list = workers.iter().cloned().map(|worker| Sighting {
            worker,
            instance: String::new(),
            phase: Phase::Serving,
        });
        let (source, _) = self.pool.attach("config", Absence::Left);
        self.pool
            .listed(source, list.collect(), &**self, Instant::now());
        let refused = self
            .pool
            .report()
            .sources
            .into_iter()
            .flat_map(|source| source.refused);
        match refused.into_iter().next() {
            Some((_, cause)) => Err(cause),
            None => Ok(()),
        }
    }

    /// Adds a worker, as an operator asks.
    ///
    /// # Errors
    /// Its name is taken, or it cannot be added.
    pub fn add_worker(&self, worker: WorkerConfig) -> Result<(), ChangeError> {
        self.pool.add(worker, self, Instant::now())
    }

    /// Removes a worker at once, as an operator asks; nothing of its events is applied after this returns. Its source does not
    /// bring it back before it tells of another life of it.
    ///
    /// # Errors
    /// It is unknown.
    pub fn remove_worker(&self, id: &str) -> kvlane::Result<()> {
        let worker = self.fleet.worker(id)?;
        if self.pool.dismiss(&worker.config.id, self, Instant::now()) {
            return Ok(());
        }
        // Removed by somebody else meanwhile.
        self.fleet.worker(id).map(|_| ())
    }

    /// Gives a worker no new requests, or gives it some again.
    ///
    /// # Errors
    /// It is unknown.
    pub fn drain_worker(&self, id: &str, drain: bool) -> kvlane::Result<()> {
        // Not while the worker begins anew: the next life would not know.
        self.pool.hold(|| {
            let worker = self.fleet.worker(id)?;
            worker.learn(Fact::DrainAsked(drain));
            Ok(())
        })?;
        info!(worker = id, drain, "an operator changed the drain");
        Ok(())
    }

    /// Changes what a worker does, until its source says otherwise. It keeps its cache, and finishes what it has.
    ///
    /// # Errors
    /// It is unknown.
    pub fn set_role(&self, id: &str, role: Role) -> kvlane::Result<()> {
        // Not while the worker begins anew: the next life would not know.
        self.pool.hold(|| self.change_role(id, role))
    }

    fn change_role(&self, id: &str, role: Role) -> kvlane::Result<()> {
        let worker = self.fleet.worker(id)?;
        if worker.set_role(role) {
            info!(worker = id, role = role.name(), "role changed");
            return Ok(());
        }
        self.fleet.worker(id).map(|_| ())
    }

    /// Begins to follow a worker that was just added.
    fn begin(&self, worker: Arc<Worker>) {
        info!(
            worker = worker.id(),
            url = %worker.config.url,
            events = worker.config.events,
            source = &*worker.source(),
            epoch = %worker.epoch(),
            "worker added"
        );
        let follow = scrape::follow(worker, Arc::clone(&self.fleet), Arc::clone(&self.config));
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = follow => {}
            }
        });
    }

    /// Follows the events that a worker is known to have, unless they are followed already.
    fn follow_events(&self, worker: &Worker, known: &WorkerConfig) -> kvlane::Result<()> {
        let streams = Streams::of(known).filter(|_| self.config.router.index == IndexMode::Events);
        let before = worker.streams();
        if streams == before {
            return Ok(());
        }
        info!(
            worker = worker.id(),
            events = known.events,
            replay = known.replay,
            "following events"
        );
        if before.is_some() {
            self.events.unfollow(worker.id());
            worker.set_streams(None);
        }
        if streams.is_some() {
            self.events.follow(known)?;
        }
        worker.set_streams(streams);
        Ok(())
    }

    /// Acts on what a worker's engine told of itself: its events are followed, its role is taken over, and where it has more
    /// ranks than was thought, it begins anew with them.
    fn adopt(&self, worker: &Arc<Worker>, known: WorkerConfig) -> kvlane::Result<()> {
        let _changing = self.changing.lock();
        let id = worker.id();
        let is_member = |member: &Arc<Worker>| Arc::ptr_eq(member, worker);
        if !self.fleet.members().find(id).is_some_and(is_member) {
            return Ok(());
        }
        let (role, dp_ranks) = (known.role, known.dp_ranks);
        if dp_ranks != worker.config.dp_ranks {
            info!(
                worker = id,
                dp_ranks, "the engine has other ranks than was thought"
            );
            self.events.unfollow(id);
            let next = self.fleet.replace(worker, known, Instant::now())?;
            self.begin(Arc::clone(&next));
            return self.follow_events(&next, &next.config);
        }
        if role != worker.role() {
            info!(worker = id, role = role.name(), "the engine has a role");
            worker.adopt_role(role);
        }
        self.follow_events(worker, &known)
    }

    /// Tells whether new requests can be served.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.stopping.load(Ordering::Relaxed) && self.fleet.is_ready() && self.proxy.is_settled()
    }

    /// Makes the readiness check fail from now on.
    pub fn begin_stopping(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Does what is due: the router's deadlines, cool-downs, idle connections, and one log line for each trust change.
    pub fn tick(&self) {
        let now = Instant::now();
        self.router.tick(now);
        for worker in self.fleet.members().list() {
            worker.tick(now);
            worker.pool.sweep();
            if worker.has_news() {
                // Taken while nobody changes the worker: an operator's role that came in between would be lost.
                let adopted = self.pool.hold(|| {
                    let news = worker.take_news();
                    news.map_or(Ok(()), |known| self.adopt(worker, known))
                });
                if let Err(error) = adopted {
                    warn!(worker = worker.id(), cause = %error, "what the engine tells of itself cannot be used");
                }
            }
        }
        self.pool.tick(self, now);
        self.proxy.sweep();
        for change in self.router.take_trust_changes() {
            let (worker, dp_rank) = (&change.target.worker, change.target.dp_rank);
            let cause = change.cause.as_deref().unwrap_or("");
            if change.to == TrustState::Exact {
                info!(%worker, dp_rank, from = %change.from, to = %change.to, cause, "trust changed");
            } else {
                warn!(%worker, dp_rank, from = %change.from, to = %change.to, cause, "trust changed");
            }
        }
    }

    /// Ends the event streams.
    pub fn stop_events(&self) {
        self.events.stop();
    }
}

impl Hands for App {
    fn add(&self, sighting: &Sighting, source: &Arc<str>) -> kvlane::Result<()> {
        let _changing = self.changing.lock();
        let source = Arc::clone(source);
        let worker = self.fleet.join(sighting.clone(), source, Instant::now())?;
        if let Err(error) = self.follow_events(&worker, &worker.config) {
            self.fleet.remove(worker.id())?;
            return Err(error);
        }
        self.begin(worker);
        Ok(())
    }

    fn remove(&self, id: &WorkerId, why: &str) {
        let _changing = self.changing.lock();
        self.events.unfollow(id.as_str());
        match self.fleet.remove(id.as_str()) {
            Ok(()) => info!(worker = %id, why, "worker removed"),
            Err(error) => warn!(worker = %id, cause = %error, "worker could not be removed"),
        }
    }

    fn learn(&self, id: &WorkerId, fact: Fact) {
        if let Some(worker) = self.fleet.members().find(id.as_str()) {
            worker.learn(fact);
            let (state, cause) = worker.state();
            info!(worker = %id, state = state.as_str(), cause, "a source changed a worker");
        }
    }

    fn set_role(&self, id: &WorkerId, role: Role) {
        if let Some(worker) = self.fleet.members().find(id.as_str()) {
            worker.retold_role(role);
        }
        // Members change under the manager's lock alone, so it is there.
        let _ = self.change_role(id.as_str(), role);
    }

    fn set_labels(&self, id: &WorkerId, labels: BTreeMap<String, String>) {
        if let Some(worker) = self.fleet.members().find(id.as_str()) {
            worker.set_labels(labels);
        }
    }

    fn is_described_by(&self, id: &WorkerId, other: &WorkerConfig) -> bool {
        let members = self.fleet.members();
        let worker = members.find(id.as_str());
        worker.is_some_and(|worker| worker.known().is_described_by(other))
    }

    fn hand_over(&self, id: &WorkerId, source: &Arc<str>, instance: &str) {
        if let Some(worker) = self.fleet.members().find(id.as_str()) {
            worker.hand_over(source, instance);
        }
    }

    fn is_done(&self, id: &WorkerId) -> bool {
        let members = self.fleet.members();
        members
            .find(id.as_str())
            .is_none_or(|worker| worker.in_flight() == 0 || worker.is_silent())
    }
}
