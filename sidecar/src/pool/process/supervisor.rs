//! Keeps one replica running.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Serialize, Serializer};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{error, info, warn};

use super::board::Board;
use super::cards::Match;
use super::gate::{Gate, Turn};
use super::gpu::Inventory;
use super::launch::{self, Launch, Replica};
use super::lever::Wanted;
use super::life::{Begin, End, Life};
use super::log::Log;
use super::metrics::ProcessMetrics;
use super::muster::Muster;
use super::ports::Ports;
use super::probe::Probe;
use super::restarts::{Next, Restarts};
use super::run::{RunFile, RunId};
use super::strays::{self, Stray};
use crate::config::{ProcessTemplate, StrayPolicy, mask, seconds};
use crate::pool::roster::Phase;

/// What all replicas share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) run: RunId,
    pub(super) run_file: RunFile,
    /// Where run files lie.
    pub(super) folder: Option<PathBuf>,
    pub(super) guard: PathBuf,
    /// The GPUs of this machine, where a template says something about them.
    pub(super) inventory: Option<Result<Inventory, String>>,
    pub(super) metrics: ProcessMetrics,
    pub(super) ports: Ports,
    pub(super) gate: Gate,
    pub(super) board: Board,
    pub(super) tasks: TaskTracker,
    /// What was last seen of earlier runs.
    pub(super) strays: Mutex<Vec<Stray>>,
    pub(super) stop: CancellationToken,
}

/// One replica.
#[derive(Debug)]
pub(super) struct Supervisor {
    pub(super) shared: Arc<Shared>,
    pub(super) template: Arc<ProcessTemplate>,
    pub(super) replica: Replica,
    pub(super) muster: Arc<Muster>,
    pub(super) wanted: Wanted,
    pub(super) log: Arc<Log>,
    pub(super) record: Arc<Mutex<Record>>,
}

/// What is known of one replica.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Record {
    pub(super) name: String,
    pub(super) template: String,
    pub(super) state: State,
    #[serde(skip)]
    pub(super) since: Instant,
    pub(super) pid: Option<u32>,
    pub(super) url: Option<String>,
    pub(super) ports: BTreeMap<&'static str, u16>,
    pub(super) gpus: Vec<String>,
    /// Starts after the first.
    pub(super) restarts: u32,
    pub(super) last_exit: Option<String>,
    pub(super) last_error: Option<String>,
}

/// What a replica is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Processes of an earlier run are in its way.
    Blocked,
    /// Another engine of its model starts first.
    Waiting,
    /// Runs, and is not ready.
    Starting,
    /// Is ready.
    Serving,
    /// Failed, and is tried again after a pause.
    Pausing,
    /// Failed too often.
    GaveUp,
    /// Is not needed, and would be started again.
    Parked,
    /// Is being ended.
    Stopping,
    /// Ended because the sidecar ends.
    Stopped,
}

impl State {
    /// Returns the name used in metrics and listings.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Blocked => "blocked",
            Self::Waiting => "waiting",
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Pausing => "pausing",
            Self::GaveUp => "gave-up",
            Self::Parked => "parked",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
        }
    }
}

impl Serialize for State {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// How a life came to its end.
enum Outcome {
    /// We ended it.
    Stopped,
    Failed(Failure),
}

struct Failure {
    /// What happened, with the last lines it wrote.
    why: String,
    /// How long it had been ready.
    served: Duration,
    /// Another try would end the same way.
    is_hopeless: bool,
}

impl Supervisor {
    /// Keeps the replica, while it is wanted, until the sidecar ends.
    pub(super) async fn run(self) {
        let stop = self.shared.stop.clone();
        let mut restarts = Restarts::new(self.template.restart);
        while !stop.is_cancelled() {
            if self.wanted.is_wanted() {
                self.keep(&mut restarts).await;
            } else {
                self.enter(State::Parked);
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = self.wanted.becomes(true) => {}
                }
            }
        }
        if self.record.lock().state != State::GaveUp {
            self.enter(State::Stopped);
        }
    }

    /// Keeps the replica until it should not run.
    async fn keep(&self, restarts: &mut Restarts) {
        let begun = async {
            self.wait_for_strays().await;
            self.turn().await
        };
        let mut turn = tokio::select! {
            () = self.called_off() => return,
            turn = begun => turn,
        };
        while let Outcome::Failed(failure) = self.live(turn).await {
            let resumed = async {
                self.after(failure, restarts).await;
                self.turn().await
            };
            turn = tokio::select! {
                () = self.called_off() => return,
                turn = resumed => turn,
            };
            self.record.lock().restarts += 1;
            self.shared.metrics.restarted(&self.replica.name);
        }
    }

    /// Waits until the replica should not run.
    async fn called_off(&self) {
        tokio::select! {
            () = self.shared.stop.cancelled() => {}
            () = self.wanted.becomes(false) => {}
        }
    }

    /// Waits until no process of an earlier run is in the way, or ends those that are.
    async fn wait_for_strays(&self) {
        const AGAIN: Duration = Duration::from_secs(1);
        let name = &self.replica.name;
        let (mut is_told, mut is_doubt_told) = (false, false);
        loop {
            let mut strays = strays::search(self.shared.folder.clone()).await;
            self.shared.strays.lock().clone_from(&strays);
            if !std::mem::replace(&mut is_doubt_told, true) {
                self.tell_of_doubt(&strays);
            }
            strays.retain(|stray| self.obstructs(stray) == Match::Yes);
            if strays.is_empty() {
                return;
            }
            let list: Vec<_> = strays.iter().map(|stray| stray.pid.to_string()).collect();
            let list = list.join(", ");
            let mut left = strays;
            if self.template.strays == StrayPolicy::Stop {
                warn!(
                    process = name,
                    pids = list,
                    "ending what an earlier run left behind"
                );
                let ids = strays::stop(&left, seconds(self.template.stop_seconds)).await;
                left.retain(|stray| ids.contains(&stray.id));
                if left.is_empty() {
                    continue;
                }
            }
            let advice = match self.template.strays {
                StrayPolicy::Report => "end them, or set strays: stop",
                StrayPolicy::Stop => "they do not end although they were killed",
            };
            let why = format!("processes of an earlier run are in its way: {list}; {advice}");
            if !std::mem::replace(&mut is_told, true) {
                warn!(process = name, cause = why, "engine is not started");
            }
            self.enter_because(State::Blocked, Some(why));
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Tells whether a process of an earlier run is in this replica's way.
    fn obstructs(&self, stray: &Stray) -> Match {
        let inventory = self.shared.inventory.as_ref();
        let inventory = inventory.and_then(|found| found.as_ref().ok());
        stray.obstructs(&self.replica, inventory)
    }

    /// Says of which processes of an earlier run it cannot be told whether they are on this replica's GPUs.
    fn tell_of_doubt(&self, strays: &[Stray]) {
        let why = match &self.shared.inventory {
            Some(Err(why)) => why,
            _ => "the driver does not tell which cards these are",
        };
        let doubtful = strays.iter();
        for stray in doubtful.filter(|stray| self.obstructs(stray) == Match::Unknown) {
            warn!(
                process = self.replica.name,
                gpus = self.replica.gpus.join(","),
                pid = stray.pid,
                its_gpus = stray.gpus.join(","),
                cause = why,
                "it cannot be told whether a process of an earlier run is on the GPU of an engine, which is started"
            );
        }
    }

    /// Waits for the right to start.
    async fn turn(&self) -> Option<Turn> {
        let model = self.template.model.as_deref();
        let waits = || self.enter(State::Waiting);
        self.shared.gate.enter(model, waits).await
    }

    /// Runs the engine once.
    async fn live(&self, turn: Option<Turn>) -> Outcome {
        let (launch, mut life) = match self.begin() {
            Ok(begun) => begun,
            Err(why) => {
                return Outcome::Failed(Failure {
                    why,
                    served: Duration::ZERO,
                    is_hopeless: false,
                });
            }
        };
        let outcome = self.course(&launch, &mut life, turn).await;
        self.shared.board.remove(&launch.worker.id);
        self.record.lock().pid = None;
        outcome
    }

    fn begin(&self) -> Result<(Launch, Life), String> {
        let shared = &self.shared;
        let launch = launch::prepare(&self.template, &self.replica, &shared.ports, &shared.run)?;
        {
            let mut record = self.record.lock();
            record.url = Some(launch.worker.url.to_string());
            record.ports.clone_from(&launch.ports);
        }
        self.enter(State::Starting);
        self.log.hide(launch.secrets());
        let shown = mask::command(&launch.command);
        self.log.note(&format!("starting {shown:?}"));
        let begin = Begin {
            guard: &shared.guard,
            stop_after: seconds(self.template.stop_seconds),
            run: shared.run.to_string(),
            log: &self.log,
            tasks: &shared.tasks,
        };
        let life = Life::begin(&launch, begin);
        let life = life.map_err(|error| format!("its guard cannot be started: {error}"))?;
        Ok((launch, life))
    }

    /// Follows a life to its end.
    async fn course(&self, launch: &Launch, life: &mut Life, turn: Option<Turn>) -> Outcome {
        let (shared, name) = (&self.shared, &self.replica.name);
        let Some(engine) = life.engine().await else {
            return self.failed(life, Duration::ZERO).await;
        };
        self.record.lock().pid = Some(engine.pid);
        shared.run_file.note(name, engine, &self.replica.gpus);
        let worker = launch.worker.clone();
        shared
            .board
            .put(worker, engine.to_string(), Phase::Starting);
        info!(process = name, pid = engine.pid, url = %launch.worker.url, "engine started");
        let begin = Instant::now();
        let probe = Probe::new(&launch.worker);
        let ready = tokio::time::timeout(seconds(self.template.ready_seconds), probe.until_ready());
        tokio::select! {
            () = self.called_off() => return self.stopped(life).await,
            () = life.ending() => return self.failed(life, Duration::ZERO).await,
            ready = ready => if ready.is_err() {
                return self.not_ready(life, &probe.missing()).await;
            }
        }
        shared.gate.opened(self.template.model.as_deref());
        drop(turn);
        let took = begin.elapsed().as_secs_f64();
        shared.metrics.was_ready_after(took);
        info!(process = name, seconds = took, "engine is ready");
        shared.board.set_phase(&launch.worker.id, Phase::Serving);
        self.enter_because(State::Serving, None);
        self.muster.take(name, None);
        let ready_at = Instant::now();
        tokio::select! {
            () = self.called_off() => self.stopped(life).await,
            () = life.ending() => {
                let served = ready_at.elapsed();
                shared.board.remove(&launch.worker.id);
                self.failed(life, served).await
            }
        }
    }

    /// Ends a life that should not go on.
    async fn stopped(&self, life: &mut Life) -> Outcome {
        self.enter(State::Stopping);
        life.stop();
        let end = life.over().await;
        self.note_end(&end);
        Outcome::Stopped
    }

    /// Ends a life that was not ready in time.
    async fn not_ready(&self, life: &mut Life, missing: &str) -> Outcome {
        // What it writes while it ends is not why it is ended.
        let tail = self.log.tail();
        self.enter(State::Stopping);
        life.stop();
        let end = life.over().await;
        self.note_end(&end);
        let why = format!(
            "was not ready within {} seconds: {missing}; {tail}",
            self.template.ready_seconds
        );
        Outcome::Failed(Failure {
            why,
            served: Duration::ZERO,
            is_hopeless: false,
        })
    }

    /// Waits until nothing is left of a life that ended by itself.
    async fn failed(&self, life: &mut Life, served: Duration) -> Outcome {
        self.enter(State::Stopping);
        let end = life.over().await;
        self.note_end(&end);
        let was_ready = served > Duration::ZERO;
        let how = describe(&end);
        let when = if was_ready {
            ""
        } else {
            " before it was ready"
        };
        Outcome::Failed(Failure {
            why: format!("{how}{when}; {}", self.log.tail()),
            served,
            is_hopeless: !was_ready && end.exit.is_some_and(|exit| exit.is_wrong_command()),
        })
    }

    fn note_end(&self, end: &End) {
        let how = describe(end);
        self.log.note(&how);
        self.record.lock().last_exit = Some(how);
        let name = &self.replica.name;
        if end.left.is_empty() {
            self.shared.run_file.forget(name);
        } else {
            error!(process = name, pids = ?end.left, "processes do not end although they were killed; they may hang in a driver");
        }
    }

    /// Waits for as long as it should after a failure; for ever after giving up.
    async fn after(&self, failure: Failure, restarts: &mut Restarts) {
        let name = &self.replica.name;
        let Failure {
            why,
            served,
            is_hopeless,
        } = failure;
        self.muster.take(name, Some(&why));
        let next = restarts.failed(served, Instant::now(), fastrand::f64());
        match next {
            Next::After(pause) if !is_hopeless => {
                warn!(
                    process = name,
                    cause = why,
                    pause_seconds = pause.as_secs_f64(),
                    "engine failed and is started again"
                );
                self.enter_because(State::Pausing, Some(why));
                tokio::time::sleep(pause).await;
            }
            Next::After(_) | Next::GiveUp(_) => {
                let why = match next {
                    Next::GiveUp(failures) if !is_hopeless => {
                        let window = self.template.restart.window_seconds;
                        format!("failed {failures} times within {window} seconds, last: {why}")
                    }
                    _ => format!("its command is wrong: {why}"),
                };
                error!(process = name, cause = why, "engine is given up");
                self.enter_because(State::GaveUp, Some(why));
                std::future::pending().await
            }
        }
    }

    fn enter(&self, state: State) {
        let mut record = self.record.lock();
        if record.state != state {
            let (from, to) = (record.state.as_str(), state.as_str());
            self.shared.metrics.entered(&self.replica.name, from, to);
            record.state = state;
            record.since = Instant::now();
        }
    }

    fn enter_because(&self, state: State, why: Option<String>) {
        self.enter(state);
        let mut record = self.record.lock();
        // What went wrong before is worth knowing while it serves again.
        if why.is_some() {
            record.last_error = why;
        }
    }
}

fn describe(end: &End) -> String {
    end.exit.map_or_else(
        || "its guard was killed".to_owned(),
        |exit| exit.to_string(),
    )
}
