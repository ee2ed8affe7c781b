//! The workers as the sidecar sees them: where they are, whether they work, and what is open towards them.
//!
//! The router knows caches and loads; this knows connections, health and breakers, and tells the router one thing of
//! each worker: whether it may be chosen.

mod knowledge;
mod pulse;
mod telling;
mod worker;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kvlane::{Error, ErrorKind, Role, Router, WorkerId};
use parking_lot::RwLock;
use tracing::warn;

pub(crate) use knowledge::Knowledge;
pub use pulse::{Beat, Counts, Pulse};
pub(crate) use worker::InFlight;
pub(crate) use worker::Streams;
pub use worker::{Model, Worker};

use crate::config::{Config, WorkerConfig};
use crate::metrics::Metrics;
use crate::pool::describe::{Described, Mates};
use crate::pool::member::{Epoch, Member};
use crate::pool::roster::{Phase, Sighting};

/// Every worker.
#[derive(Debug)]
pub struct Fleet {
    settings: Arc<Config>,
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    members: RwLock<Arc<Members>>,
    lives: AtomicU64,
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

    /// Names, for each worker of the list, where its engine contradicts what its source says, or differs from most of the source's
    /// other workers.
    #[must_use]
    pub fn mismatches(&self) -> Vec<Vec<String>> {
        let look = |worker: &Arc<Worker>| (worker.source(), worker.described());
        let described: Vec<(Arc<str>, Described)> = self.list.iter().map(look).collect();
        let mut mates: HashMap<&str, Mates> = HashMap::new();
        for (source, described) in &described {
            mates.entry(source).or_default().add(described);
        }
        let of = |(worker, (source, described)): (&Arc<Worker>, &(Arc<str>, Described))| {
            let mut all = worker.mismatches();
            all.extend(mates[&**source].differences(described));
            all
        };
        self.list.iter().zip(&described).map(of).collect()
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
            lives: AtomicU64::new(0),
        }
    }

    /// Returns the workers as they are now.
    #[must_use]
    pub fn members(&self) -> Arc<Members> {
        Arc::clone(&self.members.read())
    }

    /// Adds a worker that no source told of, as a test or an embedding program does.
    ///
    /// # Errors
    /// As [`Router::add_worker`].
    pub fn add(&self, config: WorkerConfig, now: Instant) -> kvlane::Result<Arc<Worker>> {
        let sighting = Sighting {
            worker: config,
            instance: String::new(),
            phase: Phase::Serving,
        };
        self.join(sighting, Arc::from("none"), now)
    }

    /// Adds a worker to the router and the fleet: a new life, with an epoch of its own.
    ///
    /// # Errors
    /// As [`Router::add_worker`].
    pub fn join(
        &self,
        sighting: Sighting,
        source: Arc<str>,
        now: Instant,
    ) -> kvlane::Result<Arc<Worker>> {
        let mut members = self.members.write();
        self.router.add_worker(sighting.worker.spec(), now)?;
        let member = Member::new(self.next_epoch(), sighting.phase);
        let told = Arc::new(sighting.worker.clone());
        Ok(self.enter(
            &mut members,
            Worker::new(sighting, told, source, member, self.parts()),
        ))
    }

    /// Replaces a worker by another life of it, which is `config` at the same place: for what cannot be changed of a life. What its
    /// source and operators said of it holds on.
    ///
    /// # Errors
    /// As [`Router::add_worker`]. Where `config` is refused, the worker begins anew as it was.
    pub(crate) fn replace(
        &self,
        worker: &Worker,
        config: WorkerConfig,
        now: Instant,
    ) -> kvlane::Result<Arc<Worker>> {
        self.remove(worker.id())?;
        let mut members = self.members.write();
        let config = match self.router.add_worker(config.spec(), now) {
            Ok(()) => config,
            Err(error) => {
                warn!(worker = worker.id(), cause = %error, "a worker cannot be what its engine says");
                let current = worker.current();
                self.router.add_worker(current.spec(), now)?;
                current
            }
        };
        let next = worker.reborn(config, self.next_epoch(), self.parts());
        Ok(self.enter(&mut members, next))
    }

    fn next_epoch(&self) -> Epoch {
        Epoch(self.lives.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn parts(&self) -> (&Config, &Arc<Router>, &Metrics) {
        (&self.settings, &self.router, &self.metrics)
    }

    fn enter(&self, members: &mut Arc<Members>, worker: Worker) -> Arc<Worker> {
        let worker = Arc::new(worker);
        worker.publish();
        let mut list = members.list.clone();
        list.push(Arc::clone(&worker));
        *members = Arc::new(Members::of(list));
        worker
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

    /// Finds a worker.
    ///
    /// # Errors
    /// It is unknown.
    pub fn worker(&self, id: &str) -> kvlane::Result<Arc<Worker>> {
        self.members().find(id).cloned().ok_or_else(|| {
            Error::new(
                ErrorKind::UnknownWorker,
                format!("worker {id:?} is not registered"),
            )
        })
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
        members
            .list()
            .iter()
            .any(|worker| worker.is_ready() && worker.role().serves(Role::Decode))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvlane::{IndexMode, RouterConfig, SaltContext};

    use super::*;
    use crate::forward::breaker::Verdict;
    use crate::pool::member::{Fact, MemberState, Probe};

    pub(super) fn fleet() -> Fleet {
        let mut router = RouterConfig::default();
        router.index = IndexMode::Approximate;
        Fleet::new(
            Arc::new(Config::default()),
            Arc::new(Router::new(router).unwrap()),
            Arc::new(Metrics::new()),
        )
    }

    pub(super) fn w1(fleet: &Fleet) -> Arc<Worker> {
        let config = WorkerConfig::new("w1", "http://127.0.0.1:9").unwrap();
        fleet.add(config, Instant::now()).unwrap()
    }

    #[test]
    fn what_comes_late_of_an_old_life_leaves_the_next_alone() {
        let fleet = fleet();
        let (router, now) = (Arc::clone(&fleet.router), Instant::now());
        let old = w1(&fleet);
        old.noted_birth(1.0);
        fleet.remove("w1").unwrap();
        let new = w1(&fleet);
        assert!(new.epoch() > old.epoch());
        new.probed(&Probe::Healthy);
        let prompt = router.prompt(&(0..64).collect::<Vec<_>>(), &SaltContext::default());
        router.record("w1", None, &prompt, None, now).unwrap();
        let before = format!("{:?}", router.workers(now)[0]);

        old.probed(&Probe::Gone("late".to_owned()));
        old.process_ended();
        old.noted_birth(2.0);
        for _ in 0..100 {
            old.failed(now);
            old.responded(Verdict::Failure, now);
        }
        old.tick(now + Duration::from_secs(3_600));
        for fact in [
            Fact::DrainAsked(true),
            Fact::Listed(false),
            Fact::Phase(Phase::Leaving),
        ] {
            old.learn(fact);
        }
        assert!(!old.set_role(Role::Prefill));
        assert_eq!(old.tell(|_, id| id.to_owned()), None);

        assert_eq!(format!("{:?}", router.workers(now)[0]), before);
        assert_eq!(router.overlap(&prompt, now).len(), 1);
        assert_eq!(new.state(), (MemberState::Ready, None));
        assert_eq!(old.state().0, MemberState::Gone);
        assert!(old.lifeline().is_cancelled() && !new.lifeline().is_cancelled());
    }

    #[test]
    fn a_drain_is_told_to_the_router_and_taken_back() {
        let fleet = fleet();
        let worker = w1(&fleet);
        let told = || {
            let info = fleet.router.workers(Instant::now()).remove(0);
            (info.available, info.draining)
        };
        worker.learn(Fact::Phase(Phase::Starting));
        assert_eq!(told(), (false, false));
        worker.learn(Fact::Phase(Phase::Serving));
        worker.learn(Fact::DrainAsked(true));
        worker.learn(Fact::Listed(false));
        assert_eq!((told(), worker.is_eligible()), ((true, true), false));
        worker.learn(Fact::DrainAsked(false));
        assert_eq!(told(), (true, true));
        worker.learn(Fact::Listed(true));
        assert_eq!((told(), worker.is_eligible()), ((true, false), true));
        assert!(worker.set_role(Role::Prefill) && !worker.is_eligible());
    }
}
