//! The section `handoff`: whether and how requests are split over two workers.

use std::path::{Path, PathBuf};

use kvlane::handoff::{HandoffConfig, HandoffPlanner, KvShape};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Config, file};
use crate::bounded;
use crate::handoff::{LinkSettings, Links, ProtocolChoice};

/// What splitting requests takes. There is no default for what only a measurement can tell. Unknown keys are refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HandoffSettings {
    /// KV bytes of one token; `kvlane plan --model` prints them.
    pub kv_bytes_per_token: f64,
    /// Bytes per second that one transfer alone reaches between a prefill and a decode worker. Later transfers correct it.
    pub link_bytes_per_second: f64,
    /// Seconds that a transfer takes whatever its size (default 0).
    #[serde(default)]
    pub link_fixed_seconds: f64,
    /// Where the two were read from, if `kvlane link --write` wrote them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_file: Option<PathBuf>,
    /// Links between hosts with a speed of their own (default none); every other pair shares the link above. The first
    /// that matches is taken, and all pairs that match it share it.
    #[serde(default)]
    pub links: Vec<LinkSettings>,
    /// How workers hand over: `auto` (default: what their label `connector` or their engine says), `nixl`, `sglang` or
    /// `mooncake`.
    #[serde(default)]
    pub protocol: ProtocolChoice,
    /// Port of the prefill workers' bootstrap services, with SGLang and Mooncake (default 8998, theirs); a worker's own
    /// `bootstrap_port` comes first.
    #[serde(default = "default_bootstrap_port")]
    pub bootstrap_port: u16,
    /// Requests in flight from which on a decode worker fetches nothing for a client that has left (default 128; more
    /// frees prefill workers sooner, at the cost of those that decode).
    #[serde(default = "default_busy_requests")]
    pub busy_requests: usize,
    /// Seconds for which an engine holds a prefill that nobody fetches (default: what vLLM of its version does, 30 where the
    /// version is not understood; more than the engine's own sends what is no longer there).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_seconds: Option<f64>,
    /// Targets and assumptions of the planner.
    #[serde(default)]
    pub planner: HandoffConfig,
}

const fn default_bootstrap_port() -> u16 {
    8_998
}

const fn default_busy_requests() -> usize {
    128
}

impl HandoffSettings {
    /// Creates a planner, the model's shape, and the links between workers.
    ///
    /// # Errors
    /// Names the key, its value and the accepted range.
    pub fn planner(&self) -> kvlane::Result<(HandoffPlanner, KvShape, Links)> {
        let shape = KvShape::per_token(self.kv_bytes_per_token)?;
        let planner = HandoffPlanner::new(self.planner.clone())?;
        let default = (self.link_bytes_per_second, self.link_fixed_seconds);
        let links = Links::seed(&planner, &self.links, default)?;
        Ok((planner, shape, links))
    }

    /// Checks every range.
    pub(super) fn validate(&self) -> Result<(), String> {
        let fixed = Some(self.link_fixed_seconds);
        for (key, value, low, high) in [
            ("link_fixed_seconds", fixed, 0.0, 600.0),
            ("lease_seconds", self.lease_seconds, 1.0, 3_600.0),
        ] {
            if let Some(value) = value
                && !(low..=high).contains(&value)
            {
                return Err(format!(
                    "handoff.{key}: {value} is not accepted; accepted: {low} to {high} seconds"
                ));
            }
        }
        if self.bootstrap_port == 0 {
            return Err(
                "handoff.bootstrap_port: 0 is not accepted; accepted: 1 to 65535".to_owned(),
            );
        }
        for (index, link) in self.links.iter().enumerate() {
            if !(0.0..=600.0).contains(&link.fixed_seconds) {
                return Err(format!(
                    "handoff.links[{index}].fixed_seconds: {} is not accepted; accepted: 0 to 600 seconds",
                    link.fixed_seconds
                ));
            }
            if link.from.is_empty() || link.to.is_empty() {
                return Err(format!(
                    "handoff.links[{index}]: from and to are a host each, or * for every host"
                ));
            }
        }
        let planner = self.planner();
        planner
            .map(|_| ())
            .map_err(|error| format!("handoff: {error}"))
    }
}

/// Sets the section.
pub(super) fn set(config: &mut Config, value: &Value) -> Result<(), String> {
    let value = with_link(value)?;
    let settings: HandoffSettings = file::section("handoff", value)?;
    settings.validate()?;
    config.handoff = Some(settings);
    Ok(())
}

/// Keys that a file of `kvlane link` may have.
const LINK_KEYS: [&str; 2] = ["link_bytes_per_second", "link_fixed_seconds"];
/// Bound of such a file, which has three lines.
const MAX_LINK_FILE: u64 = 1 << 16;

/// Puts in what the file named by `link_file` says.
fn with_link(value: &Value) -> Result<Value, String> {
    let mut value = value.clone();
    let (Some(path), Some(keys)) = (
        value
            .get("link_file")
            .and_then(Value::as_str)
            .map(str::to_owned),
        value.as_object_mut(),
    ) else {
        return Ok(value);
    };
    if let Some(key) = LINK_KEYS.into_iter().find(|key| keys.contains_key(*key)) {
        return Err(format!(
            "handoff.{key}: not accepted beside link_file, which says it"
        ));
    }
    let refused = |why: String| format!("handoff.link_file: {path}: {why}");
    let text = bounded::read_text(Path::new(&path), MAX_LINK_FILE)
        .map_err(|error| refused(error.to_string()))?;
    let measured: Value =
        serde_saphyr::from_str(&text).map_err(|error| refused(error.to_string()))?;
    for (key, value) in measured.as_object().into_iter().flatten() {
        if !LINK_KEYS.contains(&key.as_str()) {
            return Err(refused(format!(
                "unknown key {key}; accepted: {}",
                LINK_KEYS.join(", ")
            )));
        }
        keys.insert(key.clone(), value.clone());
    }
    Ok(value)
}
