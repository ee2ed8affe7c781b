//! The table of keys: name, what is accepted, and how it is set.

use std::path::PathBuf;

use serde_json::Value;

use super::{Config, PolicyKind, Secret};
use crate::net::HostPort;

/// One key of the configuration.
pub(super) struct Key {
    pub(super) name: &'static str,
    /// What is accepted, as a phrase for messages.
    accepts: &'static str,
    set: fn(&mut Config, &Value) -> Option<()>,
}

impl Key {
    /// Sets the key, or says what is accepted.
    pub(super) fn set(&self, config: &mut Config, value: &Value) -> Result<(), String> {
        (self.set)(config, value).ok_or_else(|| {
            let shown = if self.name == "admin_key" {
                "(hidden)".to_owned()
            } else {
                value.to_string()
            };
            format!(
                "{}: {shown} is not accepted; accepted: {}",
                self.name, self.accepts
            )
        })
    }
}

/// Finds a key by name.
pub(super) fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// Names every key at the file's top level, for messages.
pub(super) fn all_names() -> impl Iterator<Item = &'static str> {
    KEYS.iter()
        .map(|key| key.name)
        .chain([
            "workers",
            "router",
            "handoff",
            "processes",
            "discovery",
            "planner",
        ])
        .chain(ROUTER_KEYS.iter().copied())
}

/// The keys of the router's own configuration.
pub(super) const ROUTER_KEYS: [&str; 17] = [
    "block_size",
    "index",
    "ttl_seconds",
    "prediction_ttl_seconds",
    "prefill_weight",
    "request_weight",
    "device_hit_credit",
    "host_hit_credit",
    "disk_hit_credit",
    "external_hit_credit",
    "temperature",
    "lease_seconds",
    "max_index_bytes",
    "max_orphan_blocks",
    "silent_worker_seconds",
    "silent_worker_requests",
    "seed",
];

/// Sets one of the router's keys; its range is checked by the router's own validation.
pub(super) fn set_router(config: &mut Config, name: &str, value: &Value) -> Result<(), String> {
    let fail = |error: &dyn std::fmt::Display| format!("{name}: {value} is not accepted: {error}");
    let mut all = serde_json::to_value(&config.router).map_err(|error| fail(&error))?;
    all[name] = value.clone();
    config.router = serde_json::from_value(all).map_err(|error| fail(&error))?;
    config.router.validate().map_err(|error| fail(&error))
}

macro_rules! keys {
    ($($name:ident: $accepts:literal, $parse:expr;)*) => {
        const KEYS: &[Key] = &[$(Key {
            name: stringify!($name),
            accepts: $accepts,
            set: |config, value| {
                config.$name = $parse(value)?;
                Some(())
            },
        }),*];
    };
}

keys! {
    listen: "host:port, as in 0.0.0.0:8080 or [::]:8080", address;
    admin: "host:port, as in 127.0.0.1:9091", address;
    policy: "kv, round-robin, random or least-loaded", policy;
    model: "the path of a model folder", path;
    debug_headers: "true or false", Value::as_bool;
    trusted_headers: "true or false", Value::as_bool;
    allow_client_handoff_fields: "true or false", Value::as_bool;
    admin_key: "a text of 8 to 1,024 printable characters", secret;
    allow_public_admin: "true or false", Value::as_bool;
    max_body_bytes: "1 to 4,294,967,296 bytes", |v| count(v, 1, 1 << 32);
    max_connections: "1 to 1,000,000", |v| count(v, 1, 1_000_000);
    max_idle_connections: "0 to 65,536", |v| count(v, 0, 65_536);
    idle_connection_seconds: "0 to 3,600 seconds", |v| number(v, 0.0, 3600.0);
    connect_timeout_seconds: "0.01 to 600 seconds", |v| number(v, 0.01, 600.0);
    first_byte_timeout_seconds: "0.01 to 86,400 seconds", |v| number(v, 0.01, 86_400.0);
    response_idle_timeout_seconds: "0.01 to 86,400 seconds", |v| number(v, 0.01, 86_400.0);
    client_idle_timeout_seconds: "0.01 to 3,600 seconds", |v| number(v, 0.01, 3600.0);
    shutdown_seconds: "0 to 3,600 seconds", |v| number(v, 0.0, 3600.0);
    drain_seconds: "0 to 86,400 seconds", |v| number(v, 0.0, 86_400.0);
    scrape_interval_seconds: "0.05 to 3,600 seconds", |v| number(v, 0.05, 3600.0);
    health_interval_seconds: "0.05 to 3,600 seconds", |v| number(v, 0.05, 3600.0);
    breaker_threshold: "1 to 1,000,000 failures", |v| count(v, 1, 1_000_000);
    breaker_cooldown_seconds: "0.01 to 3,600 seconds", |v| number(v, 0.01, 3600.0);
}

fn address(value: &Value) -> Option<HostPort> {
    HostPort::parse(value.as_str()?, None).ok()
}

fn policy(value: &Value) -> Option<PolicyKind> {
    let name = value.as_str()?;
    PolicyKind::ALL
        .into_iter()
        .find(|kind| kind.as_str() == name)
}

fn path(value: &Value) -> Option<Option<PathBuf>> {
    let text = value.as_str()?;
    (!text.is_empty()).then(|| Some(PathBuf::from(text)))
}

fn secret(value: &Value) -> Option<Option<Secret>> {
    let text = value.as_str()?;
    let printable = text.bytes().all(|byte| byte.is_ascii_graphic());
    ((8..=1024).contains(&text.len()) && printable).then(|| Some(Secret::new(text.to_owned())))
}

fn count<T: TryFrom<u64>>(value: &Value, min: u64, max: u64) -> Option<T> {
    let number = value.as_u64()?;
    (min..=max)
        .contains(&number)
        .then(|| T::try_from(number).ok())?
}

fn number(value: &Value, min: f64, max: f64) -> Option<f64> {
    value.as_f64().filter(|number| (min..=max).contains(number))
}
