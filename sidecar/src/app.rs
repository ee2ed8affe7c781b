//! The parts of `kvlane serve`, put together, and what may be done to them while they run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvlane::{IndexMode, Router, TrustState};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::config::{Config, WorkerConfig};
use crate::events::EventStreams;
use crate::fleet::Fleet;
use crate::metrics::Metrics;
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

    /// Adds a worker and begins to follow its health, its load and, unless `index` is approximate, its events.
    ///
    /// # Errors
    /// Its id is taken, or its events cannot be followed.
    pub fn add_worker(&self, config: WorkerConfig) -> kvlane::Result<()> {
        let _changing = self.changing.lock();
        let worker = self.fleet.add(config, Instant::now())?;
        if self.config.router.index == IndexMode::Events
            && let Err(error) = self.events.follow(&worker.config)
        {
            self.fleet.remove(worker.id())?;
            return Err(error);
        }
        info!(worker = worker.id(), url = %worker.config.url, events = worker.config.events, "worker added");
        let follow = scrape::follow(
            worker,
            Arc::clone(&self.fleet),
            Arc::clone(&self.router),
            Arc::clone(&self.config),
        );
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = follow => {}
            }
        });
        Ok(())
    }

    /// Removes a worker; nothing of its events is applied after this returns.
    ///
    /// # Errors
    /// It is unknown.
    pub fn remove_worker(&self, id: &str) -> kvlane::Result<()> {
        let _changing = self.changing.lock();
        if self.fleet.members().find(id).is_some() {
            self.events.unfollow(id);
        }
        self.fleet.remove(id)?;
        info!(worker = id, "worker removed");
        Ok(())
    }

    /// Gives a worker no new requests.
    ///
    /// # Errors
    /// It is unknown.
    pub fn drain_worker(&self, id: &str) -> kvlane::Result<()> {
        self.fleet.drain(id)?;
        info!(worker = id, "worker draining");
        Ok(())
    }

    /// Tells whether new requests can be served.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.stopping.load(Ordering::Relaxed) && self.fleet.is_ready()
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
        }
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
