//! Configuration of `kvlane serve`: every key, default, unit and range, from a YAML file, from flags, or from code.
//!
//! The keys of the file stand at its top level: those of this module beside those of [`RouterConfig`], which may also be
//! put under `router:` (but not in both places). Flags override the file. Whatever is unknown, of the wrong type, out of
//! range or contradictory stops the start with a message that names the key.

mod discovery;
mod file;
mod flags;
mod handoff;
mod keys;
mod kubernetes;
pub(crate) mod mask;
mod planner;
mod processes;
mod strict;
mod worker;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use kvlane::{IndexMode, Role, RouterConfig};
use serde::{Serialize, Serializer};

pub use discovery::{DiscoverySettings, DnsSettings};
pub(crate) use file::parse_workers;
pub use flags::ServeArgs;
pub use handoff::HandoffSettings;
pub use kubernetes::{AddressFamily, KubernetesSettings, PortRef, Selection};
pub use planner::{PlannerSettings, ScaleRule};
pub use processes::{CudaVersion, Gpus, ProcessTemplate, RestartSettings, StrayPolicy};
pub use worker::WorkerConfig;

use crate::bounded;
use crate::net::HostPort;

/// Everything that `kvlane serve` can be told.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Config {
    /// Address of the proxy (default `0.0.0.0:8080`).
    #[serde(serialize_with = "display")]
    pub listen: HostPort,
    /// Address of the admin listener (default `127.0.0.1:9091`). Anything but a loopback address needs
    /// [`admin_key`](Self::admin_key) or [`allow_public_admin`](Self::allow_public_admin).
    #[serde(serialize_with = "display")]
    pub admin: HostPort,
    /// How workers are chosen (default `kv`).
    pub policy: PolicyKind,
    /// The model's folder with `tokenizer.json` and chat template; without it prompts given as text are matched as text.
    pub model: Option<PathBuf>,
    /// Adds `x-kvlane-*` headers to responses (default off).
    pub debug_headers: bool,
    /// Believes the request headers `x-kvlane-tenant-salt`, `x-session-id` and `x-kvlane-priority` (default off). Turn it
    /// on only behind a gateway that sets or strips them. A tenant salt replaces the body's `cache_salt`: the one case
    /// in which the bytes of a body change.
    pub trusted_headers: bool,
    /// Forwards handoff fields (`kv_transfer_params`, `bootstrap_*`) that a client sent (default off: such a body is
    /// refused with 400). An incomplete or stale one stops an engine or gives wrong text.
    pub allow_client_handoff_fields: bool,
    /// Key that admin calls which change something must carry as `Authorization: Bearer KEY`.
    pub admin_key: Option<Secret>,
    /// Lets the admin listener be reachable from other machines without a key (default off).
    pub allow_public_admin: bool,
    /// Largest request body in bytes (default 64 MiB). Turning it up costs that much memory for each open request.
    pub max_body_bytes: usize,
    /// Most client connections open at once (default 16,384); further ones wait in the kernel's queue.
    pub max_connections: usize,
    /// Idle connections kept open to each worker (default 256).
    pub max_idle_connections: usize,
    /// Seconds after which an idle connection to a worker is closed (default 60).
    pub idle_connection_seconds: f64,
    /// Seconds to wait for a connection to a worker (default 2).
    pub connect_timeout_seconds: f64,
    /// Seconds to wait for the first response byte (default 600; a long prompt's prefill lies in it).
    pub first_byte_timeout_seconds: f64,
    /// Seconds between two pieces of a response (default 300).
    pub response_idle_timeout_seconds: f64,
    /// Seconds between two pieces of a request body, and for which a client may leave what it is sent unread (default 60).
    pub client_idle_timeout_seconds: f64,
    /// Seconds that open requests have to finish after the first termination signal (default 30).
    pub shutdown_seconds: f64,
    /// Seconds that a worker which leaves the pool has to finish its requests (default 120). Turning it up keeps addresses
    /// longer of which only an open request says that somebody is there.
    pub drain_seconds: f64,
    /// Seconds between two readings of a worker's metrics (default 1).
    pub scrape_interval_seconds: f64,
    /// Seconds between two health checks of a worker (default 2).
    pub health_interval_seconds: f64,
    /// Failures in a row that open a worker's breaker (default 3).
    pub breaker_threshold: u32,
    /// Seconds that an open breaker stays open before one request may try (default 5).
    pub breaker_cooldown_seconds: f64,
    /// How requests are split over prefill and decode workers (default: they are not).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handoff: Option<HandoffSettings>,
    /// Engines that are started and kept on this machine.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<ProcessTemplate>,
    /// Where workers are looked for while the sidecar runs (default: nowhere).
    pub discovery: DiscoverySettings,
    /// How the pool is balanced between roles and in size (default: it is not).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub planner: Option<PlannerSettings>,
    /// The workers known at start; more may be added through the admin listener.
    pub workers: Vec<WorkerConfig>,
    /// The router's own settings.
    #[serde(flatten)]
    pub router: RouterConfig,
    /// Things worth a warning that do not stop the start.
    #[serde(skip)]
    pub warnings: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: HostPort::new("0.0.0.0", 8080),
            admin: HostPort::new("127.0.0.1", 9091),
            policy: PolicyKind::Kv,
            model: None,
            debug_headers: false,
            trusted_headers: false,
            allow_client_handoff_fields: false,
            admin_key: None,
            allow_public_admin: false,
            max_body_bytes: 64 << 20,
            max_connections: 16_384,
            max_idle_connections: 256,
            idle_connection_seconds: 60.0,
            connect_timeout_seconds: 2.0,
            first_byte_timeout_seconds: 600.0,
            response_idle_timeout_seconds: 300.0,
            client_idle_timeout_seconds: 60.0,
            shutdown_seconds: 30.0,
            drain_seconds: 120.0,
            scrape_interval_seconds: 1.0,
            health_interval_seconds: 2.0,
            breaker_threshold: 3,
            breaker_cooldown_seconds: 5.0,
            handoff: None,
            processes: Vec::new(),
            discovery: DiscoverySettings::default(),
            planner: None,
            workers: Vec::new(),
            router: RouterConfig::default(),
            warnings: Vec::new(),
        }
    }
}

impl Config {
    /// Reads a configuration file's text; `name` stands in messages.
    ///
    /// # Errors
    /// [`ConfigError`], naming the key, its line and what is accepted.
    pub fn from_yaml(text: &str, name: &str) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        file::apply(&mut config, text, name)?;
        config.finish()?;
        Ok(config)
    }

    /// Builds the configuration that the command line asks for: its file, overridden by its flags.
    ///
    /// # Errors
    /// [`ConfigError`], naming the flag or the key.
    pub fn from_args(args: &ServeArgs) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        if let Some(path) = &args.config {
            let name = path.display().to_string();
            let text = bounded::read_text(path, MAX_FILE).map_err(|error| {
                ConfigError(format!("--config {name}: cannot be read: {error}"))
            })?;
            file::apply(&mut config, &text, &name)?;
        }
        flags::apply(&mut config, args)?;
        config.finish()?;
        Ok(config)
    }

    /// Checks what no single key can: ranges of the router, and keys that contradict each other.
    ///
    /// # Errors
    /// [`ConfigError`], naming every key involved.
    pub fn finish(&mut self) -> Result<(), ConfigError> {
        self.router
            .validate()
            .map_err(|error| ConfigError(error.to_string()))?;
        if !self.admin.is_loopback() && self.admin_key.is_none() && !self.allow_public_admin {
            return Err(ConfigError(format!(
                "admin {} can be reached from other machines: set admin_key, or allow_public_admin: true, or listen on 127.0.0.1",
                self.admin
            )));
        }
        if let Some(handoff) = &self.handoff {
            handoff.validate().map_err(ConfigError)?;
        }
        self.discovery
            .validate()
            .map_err(|error| ConfigError(format!("discovery.{error}")))?;
        if self.admin == self.listen && self.listen.port() != 0 {
            return Err(ConfigError(format!(
                "listen and admin are both {}; give them different ports",
                self.listen
            )));
        }
        if self.router.index == IndexMode::Approximate
            && let Some(worker) = self.workers.iter().find(|worker| worker.events.is_some())
        {
            self.warnings.push(format!(
                "index is approximate, so the events of worker {:?} change nothing; set index: events to use them",
                worker.id
            ));
        }
        self.warn_of_what_is_missing();
        processes::check_all(&self.processes, &self.workers).map_err(ConfigError)?;
        worker::check_all(&self.workers, &mut self.warnings).map_err(ConfigError)
    }

    /// Says what nothing contradicts and still serves nobody: without it a pool stays empty, or unsplit, in silence.
    fn warn_of_what_is_missing(&mut self) {
        let discovery = &self.discovery;
        let is_looked_for = discovery.file.is_some()
            || !(discovery.dns.is_empty() && discovery.kubernetes.is_empty());
        if self.workers.is_empty() && self.processes.is_empty() && !is_looked_for {
            self.warnings.push(
                "no workers: none of workers (--worker), discovery and processes is given, so only POST /v1/workers adds some"
                    .to_owned(),
            );
        }
        let Some(handoff) = &self.handoff else {
            let listed = self.workers.iter().map(|one| (one.id.as_str(), one.role));
            let started = self.processes.iter();
            let started = started.map(|one| (one.name.as_str(), one.role.unwrap_or_default()));
            if let Some((name, _)) = listed.chain(started).find(|one| one.1 == Role::Prefill) {
                self.warnings.push(format!(
                    "{name:?} has the role prefill and gets no requests: prompts are handed over only where a section handoff is given"
                ));
            }
            return;
        };
        if self.model.is_none() && handoff.planner.assumed_prefill_tokens_per_second.is_none() {
            self.warnings.push(
                "handoff: without model only streams of prompts given as token ids tell how fast workers prefill, and until they do nothing is split; give model, or handoff.planner.assumed_prefill_tokens_per_second"
                    .to_owned(),
            );
        }
    }
}

/// How a worker is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// By cached prefix, booked and reported load: the router's cost (default).
    #[default]
    Kv,
    /// In turn.
    RoundRobin,
    /// At random, seeded.
    Random,
    /// The one with the fewest requests in flight.
    LeastLoaded,
}

impl PolicyKind {
    /// Every policy.
    pub const ALL: [Self; 4] = [Self::Kv, Self::RoundRobin, Self::Random, Self::LeastLoaded];

    /// Returns the name used in configuration, metrics and headers.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::LeastLoaded => "least-loaded",
        }
    }
}

/// A value that is never shown: not in logs, listings or debug output.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a value.
    #[must_use]
    pub const fn new(value: String) -> Self {
        Self(value)
    }

    /// Returns the value, to be handed to whom it is for.
    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }

    /// Compares in time that depends on the lengths alone.
    #[must_use]
    pub fn matches(&self, given: &[u8]) -> bool {
        let own = self.0.as_bytes();
        let differing = own
            .iter()
            .zip(given)
            .fold(0, |differing, (a, b)| differing | (a ^ b));
        own.len() == given.len() && differing == 0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(MASK)
    }
}

/// Stands where something is not shown.
pub(crate) const MASK: &str = "***";
/// Largest configuration file.
const MAX_FILE: u64 = 16 << 20;

/// Why a configuration is refused, in one message that names the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(pub(crate) String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

/// Converts a checked number of seconds.
pub(crate) fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or(Duration::MAX)
}

pub(crate) fn display<T: fmt::Display, S: Serializer>(
    value: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

#[cfg(test)]
mod tests;
