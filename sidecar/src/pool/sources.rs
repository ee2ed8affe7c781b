//! The sources of workers: what each publishes, and how it says that it cannot.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::discovery::file;
use super::process::Processes;
use super::quiet::Lately;
use super::roster::Roster;
use crate::app::App;
use crate::config::{ConfigError, seconds};

/// Starts every source that the configuration asks for. Each has a name of its own, in listings and metrics, and ends when the
/// sidecar stops.
///
/// # Errors
/// A worker of the configuration cannot be added.
pub fn start(app: &Arc<App>) -> Result<(), ConfigError> {
    let config = Arc::clone(&app.config);
    app.add_configured(&config.workers).map_err(ConfigError)?;
    let discovery = &config.discovery;
    if let Some(path) = discovery.file.clone() {
        let interval = seconds(discovery.file_interval_seconds);
        app.start_source("file", Absence::Left, |feed| {
            file::follow(path, interval, feed)
        });
    }
    #[cfg(feature = "dns")]
    for settings in discovery.dns.clone() {
        let name = settings.source();
        app.start_source(&name, Absence::Left, |feed| {
            super::discovery::dns::follow(settings, feed)
        });
    }
    #[cfg(feature = "kubernetes")]
    super::discovery::kubernetes::start(app, &discovery.kubernetes);
    Ok(())
}

/// Starts the engines that the configuration asks for, which are a source as well: what it lists is a process of this machine.
///
/// # Errors
/// Names the template and what it asks for that this machine does not have.
pub async fn start_processes(app: &Arc<App>) -> Result<(), ConfigError> {
    let templates = &app.config.processes;
    if templates.is_empty() {
        return Ok(());
    }
    let started = Processes::start(templates, app.metrics.processes.clone()).await;
    let (processes, roster) = started.map_err(ConfigError)?;
    app.follow_roster("processes", Absence::Ended, roster);
    let _ = app.processes.set(processes);
    Ok(())
}

/// What it means that a source no longer lists a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absence {
    /// Nobody should be sent there any more: what it has may still be finished.
    Left,
    /// Its process has ended: whoever waits for it waits in vain.
    Ended,
}

/// What a source is given when it is started.
#[derive(Debug)]
pub struct Feed {
    /// Where it publishes its workers.
    pub roster: Roster,
    /// Where it says whether it can.
    pub report: Report,
    /// Cancelled when the sidecar stops. The source's task is dropped then; one that has to clean up watches it.
    pub stop: CancellationToken,
}

/// Says whether a source can tell what there is. Clones are one report.
#[derive(Clone, Debug)]
pub struct Report {
    source: Arc<str>,
    lately: Arc<Mutex<Lately>>,
    skipped: Arc<Mutex<BTreeMap<String, String>>>,
}

impl Report {
    pub(super) fn new(source: Arc<str>) -> Self {
        Self {
            source,
            lately: Arc::default(),
            skipped: Arc::default(),
        }
    }

    /// Says why the source cannot tell what there is; its last list stays. Logged when it is another reason than before, and has
    /// not been logged for some minutes.
    pub fn failed(&self, problem: impl fmt::Display) {
        let problem = problem.to_string();
        if self.lately.lock().failed(&problem, Instant::now()) {
            warn!(
                source = &*self.source,
                cause = problem,
                "a source of workers fails; its last list stays"
            );
        }
    }

    /// Says that the source can tell again what there is.
    pub fn succeeded(&self) {
        if self.lately.lock().succeeded() {
            info!(source = &*self.source, "a source of workers is back");
        }
    }

    /// Says what of that which the source sees is no worker, or not all that it could be, and why.
    pub fn skipped(&self, skipped: BTreeMap<String, String>) {
        *self.skipped.lock() = skipped;
    }

    /// Returns what of that which the source sees is no worker, or not all that it could be, and why.
    #[must_use]
    pub fn all_skipped(&self) -> BTreeMap<String, String> {
        self.skipped.lock().clone()
    }

    /// Returns why the source cannot tell what there is.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.lately.lock().problem().map(str::to_owned)
    }
}
