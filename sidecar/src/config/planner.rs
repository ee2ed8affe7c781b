//! The section `planner`: whether and how the pool is balanced between roles and in size.

use kvlane::Role;
use serde::Serialize;
use serde_json::{Map, Value};

use super::{Config, file};
use crate::pool::planner::PlannerConfig;
use crate::pool::scale::ScaleTarget;

/// How the pool is balanced. Besides the keys of [`PlannerConfig`] the section takes those of this type.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannerSettings {
    /// Seconds between two plans (default 5, 0.1 to 3,600).
    pub interval_seconds: f64,
    /// Streams that one worker decodes within the target of the gaps between tokens; measure it with the engine's own
    /// benchmark. Without it, decode workers are counted by their KV use and by missed targets alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_streams: Option<f64>,
    /// The workloads whose replicas are the workers of a role (feature `kubernetes`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub scale: Vec<ScaleRule>,
    /// Targets, bounds and times.
    #[serde(flatten)]
    pub planner: PlannerConfig,
}

/// A workload whose replicas are the workers of a role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ScaleRule {
    /// The role.
    pub role: Role,
    /// The workload.
    #[serde(flatten)]
    pub target: ScaleTarget,
}

impl ScaleRule {
    fn from_value(value: &Value) -> Result<Self, String> {
        let mut fields = value
            .as_object()
            .cloned()
            .ok_or("a mapping with role, kind and name is accepted")?;
        let role = fields.remove("role").ok_or("role: missing")?;
        let role = serde_json::from_value(role.clone()).map_err(|_| {
            format!("role: {role} is not accepted; accepted: prefill, decode or both")
        })?;
        let target = serde_json::from_value(Value::Object(fields))
            .map_err(|error| format!("not accepted: {error}"))?;
        Ok(Self { role, target })
    }
}

fn rules(value: Option<Value>) -> Result<Vec<ScaleRule>, String> {
    let Some(value) = value else {
        return Ok(Vec::new());
    };
    if !cfg!(feature = "kubernetes") {
        return Err("planner.scale: this program was built without the feature kubernetes; build it with --features kubernetes".to_owned());
    }
    let list = value
        .as_array()
        .ok_or("planner.scale: a list of workloads is accepted")?;
    let mut rules: Vec<ScaleRule> = Vec::new();
    for (index, value) in list.iter().enumerate() {
        let rule = ScaleRule::from_value(value)
            .map_err(|error| format!("planner.scale[{index}]: {error}"))?;
        if rules.iter().any(|before| before.role == rule.role) {
            return Err(format!(
                "planner.scale[{index}]: the role {} has a workload already",
                rule.role.name()
            ));
        }
        rules.push(rule);
    }
    Ok(rules)
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
        let scale = rules(rest.remove("scale"))?;
        let planner: PlannerConfig =
            file::section("planner", Value::Object(rest)).map_err(|error| {
                if error.contains("unknown field") && error.contains("cool_down_seconds") {
                    error + ", `interval_seconds`, `decode_streams`, `scale`"
                } else {
                    error
                }
            })?;
        // Its messages name the section.
        planner.validate().map_err(|error| error.to_string())?;
        Ok(Self {
            interval_seconds: interval.unwrap_or(5.0),
            decode_streams: streams,
            scale,
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: &Value) -> Result<PlannerSettings, String> {
        PlannerSettings::from_fields(value.as_object().unwrap())
    }

    #[test]
    fn what_is_not_accepted_is_named() {
        for (value, parts) in [
            (
                json!({"interval_seconds": 0}),
                ["planner.interval_seconds", "0.1"],
            ),
            (
                json!({"decode_streams": "many"}),
                ["planner.decode_streams", "many"],
            ),
            (json!({"tolerence": 1}), ["tolerence", "decode_streams"]),
            (json!({"tolerance": 1}), ["tolerance", "0.5"]),
        ] {
            let error = read(&value).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn workloads_are_read_one_for_each_role() {
        let rule = json!({"role": "decode", "kind": "StatefulSet", "name": "d", "namespace": "n"});
        let read_rules = |list: &Value| read(&json!({"scale": list}));
        if !cfg!(feature = "kubernetes") {
            let error = read_rules(&json!([rule])).unwrap_err();
            assert!(error.contains("--features kubernetes"), "{error}");
            return;
        }
        let settings = read_rules(&json!([rule])).unwrap();
        assert_eq!(settings.scale[0].role, Role::Decode);
        assert_eq!(settings.scale[0].target.to_string(), "StatefulSet n/d");
        let error = read_rules(&json!([rule, rule])).unwrap_err();
        assert!(
            error.contains("planner.scale[1]") && error.contains("decode"),
            "{error}"
        );
        let error = read_rules(&json!([{"role": "decode", "knd": "x", "name": "d"}])).unwrap_err();
        assert!(
            error.contains("planner.scale[0]") && error.contains("knd"),
            "{error}"
        );
    }
}
