//! Router configuration: every default, unit and range, parsed once.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::block::BlockSize;
use crate::error::{Error, Result};

/// Where the router's knowledge of caches comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IndexMode {
    /// Engine KV events, with own placements filling in where events do not prove themselves (default).
    #[default]
    Events,
    /// Own placements alone, with TTL and capacity bound.
    Approximate,
}

/// Everything that can be set about a router. Unknown keys are refused when it is read from a file or another language.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct RouterConfig {
    /// Tokens per index block (default 16, 1 to 65,536). Must divide the engines' block size. Larger blocks make the index
    /// smaller and the match coarser.
    pub block_size: BlockSize,
    /// Where knowledge comes from (default events).
    pub index: IndexMode,
    /// Seconds that an approximate entry is believed after its last use (default 120, above 0). Longer keeps hits of slow
    /// conversations; too long believes what the engine has evicted, unless the capacity is known.
    pub ttl_seconds: f64,
    /// Seconds that a placement on a worker with a proven event stream is believed without confirmation (default 2; 0 turns
    /// recording of own placements off in event mode). Longer helps bursts behind slow prefills.
    pub prediction_ttl_seconds: f64,
    /// Weight of uncached prefill blocks (default 1). Higher favours cache hits over even load.
    pub prefill_weight: f64,
    /// Weight of active requests, in blocks per request (default 0). Higher evens request counts out.
    pub request_weight: f64,
    /// Share of a block's prefill saved by a hit in device memory (default 1, 0 to 1).
    pub device_hit_credit: f64,
    /// Share saved by a hit in host memory (default 0.75, 0 to 1).
    pub host_hit_credit: f64,
    /// Share saved by a hit on disk (default 0.25, 0 to 1).
    pub disk_hit_credit: f64,
    /// Share saved by a hit in shared storage (default 0.5, 0 to 1).
    pub external_hit_credit: f64,
    /// 0 takes the cheapest target (default); above, targets are sampled, more evenly the higher it is.
    pub temperature: f64,
    /// Seconds without activity after which a detached booking is released (default 300, above 0).
    pub lease_seconds: f64,
    /// Bound of the memory of the index, of pending blocks and of own placements, in bytes (default none, at least 1 MiB).
    /// Beyond it what was used least recently is forgotten down to seven eighths, which costs hits and never wrong
    /// credit: each (worker, rank) with a full cache of n blocks takes about 25 n bytes.
    pub max_index_bytes: Option<u64>,
    /// Pending engine blocks with unknown parents kept for each (worker, rank) (default 65,536).
    pub max_orphan_blocks: usize,
    /// Seconds after its first request in which a worker must have published an event, or it is approximate (default 30).
    pub silent_worker_seconds: f64,
    /// Prompts of two blocks or more that a worker may serve without an event before it is approximate (default 16).
    pub silent_worker_requests: u32,
    /// Seed of tie-breaking and sampling; drawn at start when absent.
    pub seed: Option<u64>,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            block_size: BlockSize::default(),
            index: IndexMode::Events,
            ttl_seconds: 120.0,
            prediction_ttl_seconds: 2.0,
            prefill_weight: 1.0,
            request_weight: 0.0,
            device_hit_credit: 1.0,
            host_hit_credit: 0.75,
            disk_hit_credit: 0.25,
            external_hit_credit: 0.5,
            temperature: 0.0,
            lease_seconds: 300.0,
            max_index_bytes: None,
            max_orphan_blocks: 65_536,
            silent_worker_seconds: 30.0,
            silent_worker_requests: 16,
            seed: None,
        }
    }
}

impl RouterConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), naming the key, its value and the accepted range.
    pub fn validate(&self) -> Result<()> {
        in_range(
            "ttl_seconds",
            self.ttl_seconds,
            f64::MIN_POSITIVE,
            MAX_SECONDS,
        )?;
        in_range(
            "prediction_ttl_seconds",
            self.prediction_ttl_seconds,
            0.0,
            MAX_SECONDS,
        )?;
        in_range(
            "lease_seconds",
            self.lease_seconds,
            f64::MIN_POSITIVE,
            MAX_SECONDS,
        )?;
        in_range(
            "silent_worker_seconds",
            self.silent_worker_seconds,
            0.0,
            MAX_SECONDS,
        )?;
        in_range("prefill_weight", self.prefill_weight, 0.0, MAX_WEIGHT)?;
        in_range("request_weight", self.request_weight, 0.0, MAX_WEIGHT)?;
        in_range("device_hit_credit", self.device_hit_credit, 0.0, 1.0)?;
        in_range("host_hit_credit", self.host_hit_credit, 0.0, 1.0)?;
        in_range("disk_hit_credit", self.disk_hit_credit, 0.0, 1.0)?;
        in_range("external_hit_credit", self.external_hit_credit, 0.0, 1.0)?;
        in_range("temperature", self.temperature, 0.0, MAX_WEIGHT)?;
        if self.silent_worker_requests == 0 {
            return Err(Error::config(
                "silent_worker_requests 0 is out of range: 1 or more prompts are accepted",
            ));
        }
        if let Some(bytes) = self
            .max_index_bytes
            .filter(|&bytes| bytes < MIN_INDEX_BYTES)
        {
            return Err(Error::config(format!(
                "max_index_bytes {bytes} is out of range: {MIN_INDEX_BYTES} or more are accepted"
            )));
        }
        Ok(())
    }

    /// Reads a JSON object with these keys (feature `json`); absent ones have their defaults.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), naming the key that is unknown, of another type, or out of range.
    ///
    /// # Examples
    /// ```
    /// use kvlane::RouterConfig;
    ///
    /// assert_eq!(RouterConfig::from_json(r#"{"temperature": 0.5}"#)?.temperature, 0.5);
    /// let error = RouterConfig::from_json(r#"{"temperature": "hot"}"#).unwrap_err();
    /// assert!(error.to_string().starts_with("temperature: "));
    /// # Ok::<(), kvlane::Error>(())
    /// ```
    #[cfg(feature = "json")]
    pub fn from_json(json: &str) -> Result<Self> {
        let config: Self = read_json(json).map_err(Error::config)?;
        config.validate()?;
        Ok(config)
    }

    pub(crate) fn ttl(&self) -> Duration {
        Duration::from_secs_f64(self.ttl_seconds)
    }

    pub(crate) fn prediction_ttl(&self) -> Duration {
        Duration::from_secs_f64(self.prediction_ttl_seconds)
    }

    pub(crate) fn lease(&self) -> Duration {
        Duration::from_secs_f64(self.lease_seconds)
    }

    pub(crate) fn silent_worker(&self) -> Duration {
        Duration::from_secs_f64(self.silent_worker_seconds)
    }
}

/// Settings that one request may change, each within the range of its [`RouterConfig`] namesake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct Overrides {
    /// Replaces [`RouterConfig::prefill_weight`].
    pub prefill_weight: Option<f64>,
    /// Replaces [`RouterConfig::request_weight`].
    pub request_weight: Option<f64>,
    /// Replaces [`RouterConfig::device_hit_credit`].
    pub device_hit_credit: Option<f64>,
    /// Replaces [`RouterConfig::host_hit_credit`].
    pub host_hit_credit: Option<f64>,
    /// Replaces [`RouterConfig::disk_hit_credit`].
    pub disk_hit_credit: Option<f64>,
    /// Replaces [`RouterConfig::external_hit_credit`].
    pub external_hit_credit: Option<f64>,
    /// Replaces [`RouterConfig::temperature`].
    pub temperature: Option<f64>,
}

impl Overrides {
    /// Checks every range.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`](crate::ErrorKind::InvalidRequest), naming the override.
    pub fn validate(&self) -> Result<()> {
        let ranges = [
            ("prefill_weight", self.prefill_weight, MAX_WEIGHT),
            ("request_weight", self.request_weight, MAX_WEIGHT),
            ("device_hit_credit", self.device_hit_credit, 1.0),
            ("host_hit_credit", self.host_hit_credit, 1.0),
            ("disk_hit_credit", self.disk_hit_credit, 1.0),
            ("external_hit_credit", self.external_hit_credit, 1.0),
            ("temperature", self.temperature, MAX_WEIGHT),
        ];
        for (key, value, max) in ranges {
            if let Some(value) = value {
                in_range(key, value, 0.0, max)
                    .map_err(|error| Error::invalid(format!("override {error}")))?;
            }
        }
        Ok(())
    }
}

#[cfg(feature = "json")]
impl Overrides {
    /// Reads a JSON object with these keys (feature `json`).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`](crate::ErrorKind::InvalidRequest), naming the key that is unknown, of another type, or
    /// out of range.
    pub fn from_json(json: &str) -> Result<Self> {
        let overrides: Self =
            read_json(json).map_err(|message| Error::invalid(format!("override {message}")))?;
        overrides.validate()?;
        Ok(overrides)
    }
}

/// Reads an object; the error names the key, which serde does only for unknown ones.
#[cfg(feature = "json")]
fn read_json<T: serde::de::DeserializeOwned>(json: &str) -> std::result::Result<T, String> {
    // Serde would take a list for the fields in their order.
    if !json.trim_start().starts_with('{') {
        return Err("settings must be an object of keys and values".to_owned());
    }
    serde_json::from_str(json).map_err(|error| {
        let entries: std::collections::BTreeMap<String, serde_json::Value> =
            serde_json::from_str(json).unwrap_or_default();
        entries
            .into_iter()
            .find_map(|(key, value)| {
                let alone = serde_json::json!({ &key: value });
                let error = serde_json::from_value::<T>(alone).err()?;
                Some(format!("{key}: {error}"))
            })
            .unwrap_or_else(|| error.to_string())
    })
}

/// Ten years: longer spans overflow clocks before they mean anything.
const MAX_SECONDS: f64 = 315_360_000.0;
/// Keeps every cost finite.
const MAX_WEIGHT: f64 = 1e9;

fn in_range(key: &str, value: f64, min: f64, max: f64) -> Result<()> {
    if value.is_finite() && (min..=max).contains(&value) {
        return Ok(());
    }
    let low = if min > 0.0 {
        "above 0".to_owned()
    } else {
        format!("{min}")
    };
    Err(Error::config(format!(
        "{key} {value} is out of range: {low} to {max} is accepted"
    )))
}

/// Below this the fixed parts of an index would crowd out what it is for.
const MIN_INDEX_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn defaults_are_valid() {
        RouterConfig::default().validate().unwrap();
    }

    #[test]
    fn an_unknown_key_is_refused_by_name() {
        let error = serde_json::from_str::<RouterConfig>(r#"{"blok_size": 16}"#).unwrap_err();
        assert!(error.to_string().contains("blok_size"), "{error}");
    }

    #[cfg(feature = "json")]
    #[test]
    fn settings_from_json_are_objects_and_errors_name_the_key() {
        for (json, part) in [
            ("[]", "object"),
            ("\"text\"", "object"),
            ("null", "object"),
            ("{", "EOF"),
            (
                r#"{"temperature": "hot", "prefill_weight": 1}"#,
                "temperature: ",
            ),
            (r#"{"temperature": 0.5, "blok_size": 5}"#, "blok_size"),
            (r#"{"temperature": -1}"#, "temperature -1"),
        ] {
            let error = RouterConfig::from_json(json).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(part), "{json}: {error}");
            let error = Overrides::from_json(json).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidRequest, "{json}");
        }
        assert_eq!(
            RouterConfig::from_json(" {}").unwrap(),
            RouterConfig::default()
        );
    }

    #[test]
    fn a_value_out_of_range_names_its_key() {
        for (key, value) in [
            ("ttl_seconds", 0.0),
            ("ttl_seconds", f64::NAN),
            ("host_hit_credit", 1.5),
            ("prefill_weight", -1.0),
            ("temperature", f64::INFINITY),
            ("lease_seconds", 0.0),
        ] {
            let mut config = RouterConfig::default();
            match key {
                "ttl_seconds" => config.ttl_seconds = value,
                "host_hit_credit" => config.host_hit_credit = value,
                "prefill_weight" => config.prefill_weight = value,
                "temperature" => config.temperature = value,
                _ => config.lease_seconds = value,
            }
            let error = config.validate().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(key), "{error}");
        }
        let small = RouterConfig {
            max_index_bytes: Some(MIN_INDEX_BYTES - 1),
            ..RouterConfig::default()
        };
        assert!(
            small
                .validate()
                .unwrap_err()
                .to_string()
                .contains("max_index_bytes")
        );
    }
}
