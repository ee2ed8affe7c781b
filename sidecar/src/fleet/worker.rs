//! One life of one worker: its connections, its state, and what is open towards it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use hyper::header::HeaderValue;
use kvlane::{Role, Router};
use parking_lot::{Mutex, RwLock};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::knowledge::{Description, Knowledge};
use super::pulse::Pulse;
use super::telling::Telling;
use crate::config::{Config, WorkerConfig, seconds};
use crate::forward::breaker::{Breaker, State, Verdict};
use crate::forward::upstream::Pool;
use crate::metrics::{Metrics, WorkerMetrics};
use crate::pool::describe::Described;
use crate::pool::member::{Epoch, Fact, Member, MemberState, Probe};
use crate::pool::roster::{Phase, Sighting};

/// One worker, from when it is added until it is removed.
#[derive(Debug)]
pub struct Worker {
    /// What it was added as; its role and labels may have changed since, see [`role`](Self::role) and
    /// [`labels`](Self::labels).
    pub config: WorkerConfig,
    /// Connections to it.
    pub pool: Arc<Pool>,
    /// Its series in the metrics.
    pub metrics: WorkerMetrics,
    /// How quick its requests are.
    pub pulse: Pulse,
    epoch: Epoch,
    router: Arc<Router>,
    breaker: Mutex<Breaker>,
    standing: Mutex<Standing>,
    /// Requests sent and not finished, whatever the policy.
    in_flight: AtomicUsize,
    /// Counts response pieces, so that a busy worker is not taken for a dead one.
    progress: AtomicU64,
    models: RwLock<Arc<Vec<Model>>>,
    description: RwLock<Arc<Description>>,
    /// The description has changed since it was last acted on.
    has_news: AtomicBool,
    /// The engine is to be asked for its description again.
    is_stale: AtomicBool,
    /// The event streams that are followed.
    streams: Mutex<Option<Streams>>,
    host_header: HeaderValue,
    removed: CancellationToken,
    /// When the engine's process began, as its metrics say.
    born: Mutex<Option<f64>>,
    /// Its process was seen to end since its birth was last read.
    ended: AtomicBool,
}

/// Where a worker stands, and what was last told of it.
#[derive(Debug)]
struct Standing {
    member: Member,
    /// The source that speaks for it, and what that calls this life.
    source: Arc<str>,
    instance: String,
    role: Role,
    labels: Arc<BTreeMap<String, String>>,
    /// What its source says of it, before anything was learned.
    told: Arc<WorkerConfig>,
    /// The role was set since it was added: the engine's own word does not change it any more.
    is_role_asked: bool,
    /// When its process was first looked at, and what the log was last told of its health.
    begun: Instant,
    telling: Telling,
    /// What was last told to the router.
    available: bool,
    draining: bool,
    /// Cancelled when the worker goes down, to wake whoever waits for its first byte; replaced when it comes back.
    lifeline: CancellationToken,
}

/// Where a worker's events are followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Streams {
    pub(crate) events: String,
    pub(crate) replay: Option<String>,
    pub(crate) topic: Option<String>,
}

impl Streams {
    /// Returns where the events of a worker are, if that is known.
    pub(crate) fn of(config: &WorkerConfig) -> Option<Self> {
        Some(Self {
            events: config.events.clone()?,
            replay: config.replay.clone(),
            topic: config.topic.clone(),
        })
    }
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
    pub(super) fn new(
        sighting: Sighting,
        told: Arc<WorkerConfig>,
        source: Arc<str>,
        member: Member,
        (settings, router, metrics): (&Config, &Arc<Router>, &Metrics),
    ) -> Self {
        let config = sighting.worker;
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
            pulse: Pulse::default(),
            epoch: member.epoch(),
            router: Arc::clone(router),
            breaker: Mutex::new(Breaker::new(settings.breaker_threshold, cool_down)),
            standing: Mutex::new(Standing {
                member,
                source,
                instance: sighting.instance,
                role: config.role,
                labels: Arc::new(config.labels.clone()),
                told,
                is_role_asked: false,
                begun: Instant::now(),
                telling: Telling::default(),
                available: true,
                draining: false,
                lifeline: removed.child_token(),
            }),
            in_flight: AtomicUsize::new(0),
            progress: AtomicU64::new(0),
            models: RwLock::new(Arc::new(Vec::new())),
            description: RwLock::default(),
            has_news: AtomicBool::new(false),
            is_stale: AtomicBool::new(true),
            streams: Mutex::new(None),
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

    /// Returns which life of that name it is.
    #[must_use]
    pub const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns the name of the source that tells of it.
    #[must_use]
    pub fn source(&self) -> Arc<str> {
        Arc::clone(&self.standing.lock().source)
    }

    /// Returns what its source calls this life; empty where it cannot tell lives apart.
    #[must_use]
    pub fn instance(&self) -> String {
        self.standing.lock().instance.clone()
    }

    /// Takes in that another source speaks for it, and what that calls this life.
    pub(crate) fn hand_over(&self, source: &Arc<str>, instance: &str) {
        let mut standing = self.standing.lock();
        standing.source = Arc::clone(source);
        instance.clone_into(&mut standing.instance);
    }

    /// Returns what it does at the moment.
    #[must_use]
    pub fn role(&self) -> Role {
        self.standing.lock().role
    }

    /// Returns its labels at the moment.
    #[must_use]
    pub fn labels(&self) -> Arc<BTreeMap<String, String>> {
        Arc::clone(&self.standing.lock().labels)
    }

    /// Returns what it was added as, with what it does and how it is labelled at the moment.
    pub(super) fn current(&self) -> WorkerConfig {
        let mut config = self.config.clone();
        let standing = self.standing.lock();
        config.role = standing.role;
        config.labels.clone_from(&standing.labels);
        config
    }

    /// Returns where it stands, and why it is not ready.
    #[must_use]
    pub fn state(&self) -> (MemberState, Option<String>) {
        let standing = self.standing.lock();
        let cause = standing.member.cause().map(str::to_owned);
        (standing.member.state(), cause)
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
        self.standing.lock().lifeline.clone()
    }

    /// Tells whether a probe found it healthy, it drains nothing, and its breaker passes requests.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.standing.lock().member.state() == MemberState::Ready && self.breaker.lock().passes()
    }

    /// Tells whether it may be given a new request.
    #[must_use]
    pub fn is_eligible(&self) -> bool {
        let standing = self.standing.lock();
        standing.role.serves(Role::Decode) && standing.member.may_be_chosen()
    }

    /// Tells whether it is finishing what it has.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.standing.lock().member.is_draining()
    }

    /// Tells whether the last probe found nobody.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.standing.lock().member.is_silent()
    }

    /// Returns the state of its breaker.
    #[must_use]
    pub fn breaker_state(&self) -> State {
        self.breaker.lock().state()
    }

    /// Returns what the last probe found; `None` before the first.
    #[must_use]
    pub fn healthy(&self) -> Option<bool> {
        self.standing.lock().member.healthy()
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

    /// Returns what its engine says of itself.
    #[must_use]
    pub fn described(&self) -> Described {
        self.description.read().whole()
    }

    /// Returns what is known of it at the moment, uncopied.
    pub(crate) fn knowledge(&self) -> Knowledge {
        Knowledge {
            description: Arc::clone(&self.description.read()),
            models: self.models(),
            labels: self.labels(),
        }
    }

    /// Returns what its engine says of itself; `None` before it was asked.
    pub(crate) fn description(&self) -> Option<Described> {
        self.description.read().told()
    }

    /// Returns what its engine answered, its metrics aside.
    pub(crate) fn answers(&self) -> Described {
        self.description.read().answered.clone()
    }

    /// Returns the version of its engine, once it told.
    #[must_use]
    pub fn version(&self) -> Option<String> {
        self.description.read().answered.version.clone()
    }

    /// Names where its engine contradicts what its source says.
    #[must_use]
    pub fn mismatches(&self) -> Vec<String> {
        self.description.read().mismatches.clone()
    }

    /// Takes in what the engine answered; `is_there` when it answered anything at all.
    pub(crate) fn answered(&self, answered: Described, is_there: bool) {
        self.redescribe(|description| {
            description.answered = answered;
            description.was_asked |= is_there;
        });
    }

    /// Takes in what the engine's metrics show.
    pub(crate) fn measured(&self, measured: Described) {
        self.redescribe(|description| description.measured = measured);
    }

    fn redescribe(&self, change: impl FnOnce(&mut Description)) {
        let mut description = self.description.write();
        let mut next = (**description).clone();
        change(&mut next);
        if next == **description {
            return;
        }
        let told = Arc::clone(&self.standing.lock().told);
        self.compare(&mut next, &told);
        *description = Arc::new(next);
        self.has_news.store(true, Ordering::Relaxed);
    }

    fn compare(&self, next: &mut Description, told: &WorkerConfig) {
        let mismatches = next.whole().mismatches(told);
        let before = std::mem::replace(&mut next.mismatches, mismatches);
        for mismatch in &next.mismatches {
            if !before.contains(mismatch) {
                warn!(
                    worker = self.id(),
                    mismatch, "the engine contradicts what is said of it"
                );
            }
        }
    }

    /// Tells whether more was learned since [`take_news`](Self::take_news) was last called.
    pub(crate) fn has_news(&self) -> bool {
        self.has_news.load(Ordering::Relaxed)
    }

    /// Returns what it is now known to be, when more was learned since this was last asked.
    pub(crate) fn take_news(&self) -> Option<WorkerConfig> {
        let has_news = self.has_news.swap(false, Ordering::Relaxed);
        has_news.then(|| self.known())
    }

    /// Returns what it is now known to be: what its source says, and what was learned.
    pub(crate) fn known(&self) -> WorkerConfig {
        let described = self.described();
        let standing = self.standing.lock();
        let mut whole = described.complete(&standing.told);
        if described.dp_ranks.is_none() {
            whole.dp_ranks = self.config.dp_ranks;
        }
        if standing.is_role_asked || standing.told.says_role() {
            whole.role = standing.role;
        }
        whole
    }

    /// Lets the next probe ask the engine for its description: something that rests on it has failed.
    pub(crate) fn ask_again(&self) {
        self.is_stale.store(true, Ordering::Relaxed);
    }

    /// Tells whether the engine is to be asked for its description, once.
    pub(crate) fn take_stale(&self) -> bool {
        self.is_stale.swap(false, Ordering::Relaxed)
    }

    /// Returns where its events are followed.
    #[must_use]
    pub(crate) fn streams(&self) -> Option<Streams> {
        self.streams.lock().clone()
    }

    pub(crate) fn set_streams(&self, streams: Option<Streams>) {
        *self.streams.lock() = streams;
    }

    /// Begins another life of it as `config`, at the same place.
    pub(super) fn reborn(
        &self,
        config: WorkerConfig,
        epoch: Epoch,
        parts: (&Config, &Arc<Router>, &Metrics),
    ) -> Self {
        let before = self.standing.lock();
        let sighting = Sighting {
            worker: config,
            instance: before.instance.clone(),
            phase: Phase::Serving,
        };
        let (told, source) = (Arc::clone(&before.told), Arc::clone(&before.source));
        let next = Self::new(sighting, told, source, before.member.reborn(epoch), parts);
        {
            // It is the same process, of which all of this was learned and told.
            let mut standing = next.standing.lock();
            standing.is_role_asked = before.is_role_asked;
            standing.begun = before.begun;
            standing.telling = before.telling;
        }
        drop(before);
        *next.description.write() = Arc::clone(&self.description.read());
        next
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
        let healthy = *probe == Probe::Healthy;
        let (changed, telling) = {
            let mut standing = self.standing.lock();
            let changed = standing.member.healthy() != Some(healthy);
            if !standing.member.learn(Fact::Probed(probe.clone())) {
                return;
            }
            match probe {
                // A worker that answers, if only to say that it is not well, may still finish what it has.
                Probe::Unwell(_) => {}
                Probe::Gone(_) => standing.lifeline.cancel(),
                Probe::Healthy if standing.lifeline.is_cancelled() => {
                    standing.lifeline = self.removed.child_token();
                }
                Probe::Healthy => {}
            }
            let starts = standing.member.is_said_to_start();
            let age = standing.begun.elapsed();
            (changed, standing.telling.next(healthy, starts, age))
        };
        if let Some(telling) = telling {
            telling.say(self.id(), probe);
        }
        if changed && !healthy {
            self.pool.close_idle();
        }
        self.publish();
    }

    /// Takes in what its source or an operator says of it.
    pub(crate) fn learn(&self, fact: Fact) {
        self.standing.lock().member.learn(fact);
        self.publish();
    }

    /// Changes what it does; tells whether it was still there. Requests that it has are finished, and its cache is kept.
    pub(crate) fn set_role(&self, role: Role) -> bool {
        let mut standing = self.standing.lock();
        if standing.member.state() == MemberState::Gone {
            return false;
        }
        standing.role = role;
        standing.is_role_asked = true;
        self.router.set_role(self.id(), role).is_ok()
    }

    /// Takes in another role that its source says: what the engine says is compared with that from now on.
    pub(crate) fn retold_role(&self, role: Role) {
        // The order of the locks is that of `redescribe`.
        let mut description = self.description.write();
        let told = {
            let mut standing = self.standing.lock();
            Arc::make_mut(&mut standing.told).give(Some(role), None);
            Arc::clone(&standing.told)
        };
        self.compare(Arc::make_mut(&mut description), &told);
    }

    /// Changes its labels.
    pub(crate) fn set_labels(&self, labels: BTreeMap<String, String>) {
        let mut standing = self.standing.lock();
        if standing.member.state() == MemberState::Gone {
            return;
        }
        Arc::make_mut(&mut standing.told).labels.clone_from(&labels);
        standing.labels = Arc::new(labels.clone());
        let _ = self.router.set_labels(self.id(), labels);
    }

    /// Takes over the role that the engine says it has.
    pub(crate) fn adopt_role(&self, role: Role) {
        let mut standing = self.standing.lock();
        if standing.member.state() != MemberState::Gone && !standing.is_role_asked {
            standing.role = role;
            let _ = self.router.set_role(self.id(), role);
        }
    }

    /// Tells the router something of this life, unless it is over: another worker may have its id by now, and what comes late
    /// must not be taken for news of that one.
    pub(crate) fn tell<T>(&self, tell: impl FnOnce(&Router, &str) -> T) -> Option<T> {
        let standing = self.standing.lock();
        (standing.member.state() != MemberState::Gone).then(|| tell(&self.router, self.id()))
    }

    /// Takes note that nothing listens any more: the process ended, and with it its cache.
    pub(crate) fn process_ended(&self) {
        self.cache_ended("nothing listens at its address");
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Forgets a cache that is gone. Where events can be replayed, their follower compares lives and knows better.
    fn cache_ended(&self, cause: &str) {
        let cause = format!("the engine's process ended: {cause}");
        // What runs there next may be another version with other settings.
        self.ask_again();
        self.tell(|router, id| {
            let _ = router.forget_placements(id);
            if self
                .streams()
                .is_some_and(|streams| streams.replay.is_none())
            {
                for dp_rank in 0..self.config.dp_ranks {
                    let _ = router.restart_stream(id, dp_rank, &cause, Instant::now());
                }
            }
        });
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
    pub(super) fn retire(&self) {
        self.standing.lock().member.learn(Fact::Removed);
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

    /// Tells the router whether the worker may be chosen, where that changed.
    pub(super) fn publish(&self) {
        let mut standing = self.standing.lock();
        // Read under the lock, so that of two changes at once the later is told last.
        let passes = self.breaker.lock().passes();
        if !standing.member.learn(Fact::BreakerPasses(passes)) {
            return;
        }
        // Unknown to the router only while it is being removed.
        let available = standing.member.is_available();
        if std::mem::replace(&mut standing.available, available) != available {
            let _ = self.router.set_available(self.id(), available);
        }
        let draining = standing.member.is_draining();
        if std::mem::replace(&mut standing.draining, draining) != draining {
            let _ = if draining {
                self.router.drain_worker(self.id())
            } else {
                self.router.undrain_worker(self.id())
            };
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{fleet, w1};
    use super::*;

    #[test]
    fn another_life_of_a_process_is_not_told_of_again() {
        let fleet = fleet();
        let old = w1(&fleet);
        old.probed(&Probe::Healthy);
        std::thread::sleep(Duration::from_millis(1));
        let next = fleet.replace(&old, old.config.clone(), Instant::now());
        let next = next.unwrap();
        let standing = next.standing.lock();
        assert_eq!(standing.telling, Telling::Healthy);
        assert_eq!(standing.begun, old.standing.lock().begun);
    }
}
