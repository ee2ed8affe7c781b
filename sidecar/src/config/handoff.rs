//! The section `handoff`: whether and how requests are split over two workers.

use kvlane::handoff::{HandoffConfig, HandoffPlanner, KvShape, LinkId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Config, seconds};

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
    /// Seconds for which an engine holds a prefill that nobody fetches (default 30, vLLM's since 0.22; more than the engine's
    /// own sends what is no longer there).
    #[serde(default = "default_lease")]
    pub lease_seconds: f64,
    /// Targets and assumptions of the planner.
    #[serde(default)]
    pub planner: HandoffConfig,
}

const fn default_lease() -> f64 {
    30.0
}

/// The name of the one link: every pair of workers is taken to share it.
const LINK: &str = "configured";

impl HandoffSettings {
    /// Creates a planner, the model's shape, and the link that all pairs share.
    ///
    /// # Errors
    /// Names the key, its value and the accepted range.
    pub fn planner(&self) -> kvlane::Result<(HandoffPlanner, KvShape, LinkId)> {
        let shape = KvShape::per_token(self.kv_bytes_per_token)?;
        let planner = HandoffPlanner::new(self.planner.clone())?;
        let link = LinkId::new(LINK);
        planner.seed_link(
            &link,
            self.link_bytes_per_second,
            seconds(self.link_fixed_seconds),
        )?;
        Ok((planner, shape, link))
    }

    /// Checks every range.
    pub(super) fn validate(&self) -> Result<(), String> {
        for (key, value, low, high) in [
            ("link_fixed_seconds", self.link_fixed_seconds, 0.0, 600.0),
            ("lease_seconds", self.lease_seconds, 1.0, 3_600.0),
        ] {
            if !(low..=high).contains(&value) {
                return Err(format!(
                    "handoff.{key}: {value} is not accepted; accepted: {low} to {high} seconds"
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
    let settings: HandoffSettings = serde_json::from_value(value.clone())
        .map_err(|error| format!("handoff: not accepted: {error}"))?;
    settings.validate()?;
    config.handoff = Some(settings);
    Ok(())
}
