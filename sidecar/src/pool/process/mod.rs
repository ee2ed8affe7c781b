//! Engines that the sidecar starts on its own machine, and keeps.
//!
//! A template says how one is started; each of its replicas has a supervisor that starts it, waits until its model answers
//! and its KV capacity is known, starts it again when it ends, and gives up when that does not help. What runs is published
//! as a roster, as every other source of workers does.
//!
//! No process outlives its sidecar. An engine runs below two guards ([`guard`]), which end everything that it ever started
//! when the sidecar says so, or is gone. Should all three be killed at once, the next run finds what is left by its marks
//! (`strays`).

mod assign;
mod board;
mod cards;
mod exit;
mod gate;
mod gpu;
pub mod guard;
mod launch;
mod lever;
mod life;
mod log;
mod metrics;
mod muster;
pub(crate) mod placeholders;
mod ports;
mod probe;
mod proc;
mod restarts;
mod run;
mod strays;
mod supervisor;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane::Role;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::config::{Gpus, ProcessTemplate, seconds};
use crate::pool::roster::{Roster, RosterReader};

pub use metrics::ProcessMetrics;

use board::Board;
use gate::Gate;
use gpu::Inventory;
use launch::Replica;
use lever::Wanted;
use log::Log;
use muster::Muster;
use ports::Ports;
use proc::PATIENCE;
use run::{RunFile, RunId};
use strays::Stray;
use supervisor::{Record, Shared, State, Supervisor};

/// The engines of this machine.
#[derive(Debug)]
pub struct Processes {
    shared: Arc<Shared>,
    kept: Vec<Kept>,
    /// How long ending all of them may take.
    stop_within: Duration,
}

/// What is shown of one replica.
#[derive(Debug)]
struct Kept {
    record: Arc<Mutex<Record>>,
    log: Arc<Log>,
    /// What its template says that it does.
    role: Role,
    wanted: watch::Sender<bool>,
}

impl Processes {
    /// Starts the engines of all templates and returns at once; the roster tells when they serve.
    ///
    /// # Errors
    /// Names the template and what it asks for that this machine does not have.
    pub async fn start(
        templates: &[ProcessTemplate],
        metrics: ProcessMetrics,
    ) -> Result<(Arc<Self>, RosterReader), String> {
        Self::start_under(templates, PathBuf::from(guard::OWN_BINARY), metrics).await
    }

    /// As [`start`](Self::start), with the path of a `kvlane` binary that has the guard: for programs that are not one.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub async fn start_under(
        templates: &[ProcessTemplate],
        guard: PathBuf,
        metrics: ProcessMetrics,
    ) -> Result<(Arc<Self>, RosterReader), String> {
        let inventory = inventory_for(templates).await;
        let known = match &inventory {
            Some(found) => found.as_ref().map_err(String::as_str),
            None => Err("was not asked for"),
        };
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let replicas = assign::assign(templates, known, visible.as_deref())?;
        for folder in templates
            .iter()
            .filter_map(|template| template.log_dir.as_ref())
        {
            std::fs::create_dir_all(folder)
                .map_err(|error| format!("processes: log_dir {}: {error}", folder.display()))?;
        }
        let folder = run::state_folder();
        let run = RunId::new().map_err(|error| format!("processes: {error}"))?;
        let strays = strays::search(folder.clone()).await;
        tell_of_strays(&strays);
        if let Ok(inventory) = known {
            tell_of_foreign(inventory, replicas.iter().flatten(), &strays);
        }
        let (roster, reader) = Roster::new();
        let shared = Arc::new(Shared {
            run_file: RunFile::new(folder.as_deref(), &run),
            run,
            guard,
            metrics,
            ports: Ports::new(),
            gate: Gate::new(folder.clone()),
            inventory,
            folder,
            board: Board::new(roster),
            tasks: TaskTracker::new(),
            strays: Mutex::new(strays),
            stop: CancellationToken::new(),
        });
        let longest = templates.iter().map(|template| template.stop_seconds);
        let mut processes = Self {
            stop_within: seconds(longest.fold(0.0, f64::max)) + PATIENCE * 4,
            kept: Vec::new(),
            shared,
        };
        for (template, replicas) in templates.iter().zip(replicas) {
            processes.keep(template, replicas);
        }
        Ok((Arc::new(processes), reader))
    }

    /// Returns the name of this run, which its processes carry in the variable `KVLANE_RUN`.
    #[must_use]
    pub fn run(&self) -> String {
        self.shared.run.to_string()
    }

    /// Describes every replica, the GPUs, and what earlier runs left behind.
    #[must_use]
    pub fn report(&self) -> Value {
        let describe = |kept: &Kept| {
            let record = kept.record.lock().clone();
            let mut value = json!(record);
            value["state_seconds"] = json!(record.since.elapsed().as_secs_f64());
            value
        };
        let gpus = match &self.shared.inventory {
            None => Value::Null,
            Some(Ok(inventory)) => json!(inventory),
            Some(Err(why)) => json!({"error": why}),
        };
        json!({
            "run": self.run(),
            "processes": self.kept.iter().map(describe).collect::<Vec<_>>(),
            "gpus": gpus,
            "strays": *self.shared.strays.lock(),
        })
    }

    /// Returns the last output of a replica; `None` when there is none of that name.
    #[must_use]
    pub fn log(&self, name: &str) -> Option<Value> {
        let kept = self
            .kept
            .iter()
            .find(|kept| kept.record.lock().name == name)?;
        Some(json!({"name": name, "lines": kept.log.lines()}))
    }

    /// Ends all engines: politely, and after their template's `stop_seconds` not. Returns when nothing is left of them.
    pub async fn stop(&self) {
        self.shared.board.leave();
        self.shared.stop.cancel();
        self.shared.tasks.close();
        let all = self.shared.tasks.wait();
        if tokio::time::timeout(self.stop_within, all).await.is_err() {
            warn!("some engines have not ended");
        }
    }

    fn keep(&mut self, template: &ProcessTemplate, replicas: Vec<Replica>) {
        let wanted_first = template.initial_replicas.unwrap_or(replicas.len());
        let muster = Muster::new(template.name.clone(), wanted_first.min(replicas.len()));
        let muster = Arc::new(muster);
        let template = Arc::new(template.clone());
        for replica in replicas {
            let record = Record {
                name: replica.name.clone(),
                template: template.name.clone(),
                state: State::Waiting,
                since: Instant::now(),
                pid: None,
                url: None,
                ports: std::collections::BTreeMap::new(),
                gpus: replica.gpus.clone(),
                restarts: 0,
                last_exit: None,
                last_error: None,
            };
            let (name, state) = (&record.name, record.state.as_str());
            self.shared.metrics.entered(name, state, state);
            let log = Arc::new(Log::new(
                &replica.name,
                template.log_kib << 10,
                template.log_dir.as_deref(),
                template.log_file_mib << 20,
            ));
            let (wanted, wish) = Wanted::new(replica.index < wanted_first);
            let kept = Kept {
                record: Arc::new(Mutex::new(record)),
                log,
                role: template.role.unwrap_or_default(),
                wanted,
            };
            let supervisor = Supervisor {
                shared: Arc::clone(&self.shared),
                template: Arc::clone(&template),
                replica,
                muster: Arc::clone(&muster),
                wanted: wish,
                log: Arc::clone(&kept.log),
                record: Arc::clone(&kept.record),
            };
            self.kept.push(kept);
            self.shared.tasks.spawn(supervisor.run());
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

/// Asks the driver if any template says something about GPUs.
async fn inventory_for(templates: &[ProcessTemplate]) -> Option<Result<Inventory, String>> {
    const TIMEOUT: Duration = Duration::from_secs(60);
    let asks =
        |template: &ProcessTemplate| template.gpus != Gpus::Inherited || template.cuda.is_some();
    if !templates.iter().any(asks) {
        return None;
    }
    let asked = tokio::task::spawn_blocking(gpu::inventory);
    let found = match tokio::time::timeout(TIMEOUT, asked).await {
        Ok(Ok(found)) => found,
        Ok(Err(_)) => Err("NVML failed".to_owned()),
        Err(_) => Err(format!("NVML did not answer within {TIMEOUT:?}")),
    };
    match &found {
        Ok(inventory) => {
            let cuda = inventory.cuda.map(|cuda| cuda.to_string());
            info!(
                driver = inventory.driver,
                cuda,
                gpus = inventory.gpus.len(),
                "NVIDIA driver found"
            );
            for gpu in &inventory.gpus {
                info!(uuid = gpu.uuid, "{gpu}");
            }
        }
        Err(why) => warn!("{why}"),
    }
    Some(found)
}

fn tell_of_strays(strays: &[Stray]) {
    for stray in strays {
        warn!(
            pid = stray.pid,
            process = stray.process,
            gpus = stray.gpus.join(","),
            command = stray.command,
            "an earlier run left this process behind"
        );
    }
}

/// Warns of processes that are not ours on GPUs that our engines will use.
fn tell_of_foreign<'a>(
    inventory: &Inventory,
    replicas: impl Iterator<Item = &'a Replica>,
    strays: &[Stray],
) {
    let used: Vec<&String> = replicas.flat_map(|replica| &replica.gpus).collect();
    for gpu in &inventory.gpus {
        if !used.iter().any(|name| gpu.is_called(name)) {
            continue;
        }
        let foreign = gpu
            .users
            .iter()
            .filter(|user| strays.iter().all(|stray| stray.pid != user.pid));
        for user in foreign {
            warn!(
                gpu = gpu.index,
                pid = user.pid,
                bytes = user.bytes,
                name = user.name,
                "another process uses a GPU that an engine is given; there may not be enough memory for both"
            );
        }
    }
}
