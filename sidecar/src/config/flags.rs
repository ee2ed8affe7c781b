//! The command line of `kvlane serve`.

use std::path::PathBuf;

use clap::Args;
use serde_json::Value;

use super::file;
use super::{Config, ConfigError, WorkerConfig};

/// Flags of `kvlane serve`. They override the file; everything without a flag of its own can be given with `--set`.
#[derive(Args, Clone, Debug, Default)]
pub struct ServeArgs {
    /// Configuration file (YAML)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Address of the proxy [default: 0.0.0.0:8080]
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// Address of the admin listener [default: 127.0.0.1:9091]
    #[arg(long, value_name = "HOST:PORT")]
    pub admin: Option<String>,
    /// kv, round-robin, random or least-loaded [default: kv]
    #[arg(long, value_name = "NAME")]
    pub policy: Option<String>,
    /// Where knowledge of caches comes from: events or approximate [default: events]
    #[arg(long, value_name = "MODE")]
    pub index: Option<String>,
    /// Tokens per block [default: 16]
    #[arg(long, value_name = "TOKENS")]
    pub block_size: Option<String>,
    /// Model folder with tokenizer.json and chat template; without it prompts are matched as text
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Seed of tie-breaking and sampling
    #[arg(long, value_name = "NUMBER")]
    pub seed: Option<String>,
    /// Seconds that an approximate entry is believed [default: 120]
    #[arg(long, value_name = "SECONDS")]
    pub ttl_seconds: Option<String>,
    /// Add x-kvlane-* headers to responses
    #[arg(long)]
    pub debug_headers: bool,
    /// Believe x-kvlane-tenant-salt, x-session-id and x-kvlane-priority
    #[arg(long)]
    pub trusted_headers: bool,
    /// A worker, as comma-separated fields
    #[arg(
        long = "worker",
        value_name = "FIELDS",
        help = "A worker: id=w1,url=http://host:port[,events=tcp://host:port][,replay=tcp://host:port][,role=both|prefill|decode][,dp_ranks=N][,block_size=N][,kv_capacity_blocks=N][,topic=T][,bootstrap_port=N][,label.NAME=VALUE]"
    )]
    pub workers: Vec<String>,
    /// Any other key of the configuration file, as in --set breaker_threshold=5; sections are JSON
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Applies the flags to `config`.
pub(super) fn apply(config: &mut Config, args: &ServeArgs) -> Result<(), ConfigError> {
    let model = args.model.as_ref().map(|path| path.display().to_string());
    let texts = [
        ("listen", &args.listen),
        ("admin", &args.admin),
        ("policy", &args.policy),
        ("index", &args.index),
        ("block_size", &args.block_size),
        ("model", &model),
        ("seed", &args.seed),
        ("ttl_seconds", &args.ttl_seconds),
    ];
    let mut given = Vec::new();
    for (key, text) in texts {
        let Some(text) = text else { continue };
        let flag = format!("--{}", key.replace('_', "-"));
        set(config, key, text).map_err(|error| ConfigError(format!("{flag}: {error}")))?;
        given.push(key);
    }
    config.debug_headers |= args.debug_headers;
    config.trusted_headers |= args.trusted_headers;
    for pair in &args.set {
        let (key, text) = pair.split_once('=').ok_or_else(|| {
            ConfigError(format!(
                "--set {pair}: key=value is accepted, as in breaker_threshold=5"
            ))
        })?;
        let key = key.trim().replace('-', "_");
        if given.contains(&key.as_str()) {
            let flag = key.replace('_', "-");
            return Err(ConfigError(format!(
                "--{flag} and --set {key} are both given; keep one of them"
            )));
        }
        set(config, &key, text.trim()).map_err(|error| ConfigError(format!("--set {error}")))?;
    }
    apply_workers(config, &args.workers)
}

/// Adds the workers given as flags; one with the id of a worker in the file replaces it.
fn apply_workers(config: &mut Config, texts: &[String]) -> Result<(), ConfigError> {
    let mut added: Vec<WorkerConfig> = Vec::new();
    for text in texts {
        let worker = WorkerConfig::from_flag(text)
            .map_err(|error| ConfigError(format!("--worker {text}: {error}")))?;
        if added.iter().any(|other| other.id == worker.id) {
            return Err(ConfigError(format!(
                "--worker {text}: id: {:?} is given twice; ids must differ",
                worker.id
            )));
        }
        added.push(worker);
    }
    config
        .workers
        .retain(|old| added.iter().all(|new| new.id != old.id));
    config.workers.append(&mut added);
    Ok(())
}

fn set(config: &mut Config, key: &str, text: &str) -> Result<(), String> {
    let value = match key {
        "listen" | "admin" | "policy" | "index" | "model" | "admin_key" => Value::from(text),
        _ => serde_json::from_str(text).unwrap_or_else(|_| Value::from(text)),
    };
    file::apply_key(config, key, &value)
}
