//! The section `planner`: whether and how the pool is balanced between roles and in size.

use serde::Serialize;
use serde_json::{Map, Value};

use super::Config;
use crate::pool::planner::PlannerConfig;

/// How the pool is balanced. Besides the keys of [`PlannerConfig`] the section takes those of this type.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannerSettings {
    /// Seconds between two plans (default 5, 0.1 to 3,600).
    pub interval_seconds: f64,
    /// Streams that one worker decodes within the target of the gaps between tokens; measure it with the engine's own
    /// benchmark. Without it, decode workers are counted by their KV use and by missed targets alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_streams: Option<f64>,
    /// Targets, bounds and times.
    #[serde(flatten)]
    pub planner: PlannerConfig,
}

impl PlannerSettings {
    /// Reads the section.
    ///
    /// # Errors
    /// Names the key and what is accepted.
    pub fn from_fields(fields: &Map<String, Value>) -> Result<Self, String> {
        let mut rest = fields.clone();
        let interval = number(
            rest.remove("interval_seconds"),
            "interval_seconds",
            0.1,
            3_600.0,
        )?;
        let streams = number(
            rest.remove("decode_streams"),
            "decode_streams",
            1.0,
            65_536.0,
        )?;
        let planner: PlannerConfig =
            serde_json::from_value(Value::Object(rest)).map_err(|error| {
                format!("planner: not accepted: {error} (and interval_seconds, decode_streams)")
            })?;
        // Its messages name the section.
        planner.validate().map_err(|error| error.to_string())?;
        Ok(Self {
            interval_seconds: interval.unwrap_or(5.0),
            decode_streams: streams,
            planner,
        })
    }
}

fn number(value: Option<Value>, key: &str, min: f64, max: f64) -> Result<Option<f64>, String> {
    let Some(value) = value else {
        return Ok(None);
    };
    let accepted = value.as_f64().filter(|number| (min..=max).contains(number));
    accepted
        .map(Some)
        .ok_or_else(|| format!("planner.{key}: {value} is not accepted; accepted: {min} to {max}"))
}

/// Sets the section.
pub(super) fn set(config: &mut Config, value: &Value) -> Result<(), String> {
    let fields = value
        .as_object()
        .ok_or("planner: a mapping of the planner's keys is accepted")?;
    config.planner = Some(PlannerSettings::from_fields(fields)?);
    Ok(())
}
