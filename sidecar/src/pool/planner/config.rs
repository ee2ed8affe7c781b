//! Targets, bounds and the times that keep a planner calm.

use std::time::Duration;

use kvlane::{Error, ErrorKind, Result, Role};
use serde::{Deserialize, Serialize};

/// What a planner aims at. Unknown keys are refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct PlannerConfig {
    /// Whether proposals are carried out (default dry run).
    pub mode: PlannerMode,
    /// Target of the time to the first token in seconds, 90th percentile (default 1).
    pub ttft_objective_seconds: f64,
    /// Target of the time between tokens in seconds, 90th percentile (default 0.1).
    pub itl_objective_seconds: f64,
    /// Share of a worker's time that should be busy (default 0.7, above 0 to 1). Higher saves workers and makes queues longer.
    pub target_utilisation: f64,
    /// Share of KV blocks that should be in use (default 0.8, above 0 to 1). Higher saves workers and evicts prefixes.
    pub target_kv_use: f64,
    /// Seconds in which waiting work should be done (default 30). Lower starts more workers for a queue.
    pub backlog_seconds: f64,
    /// Share by which a demand must leave a size before the size follows (default 0.1, 0 to 0.5).
    pub tolerance: f64,
    /// Seconds for which a demand must last before a role grows (default 30).
    pub up_window_seconds: f64,
    /// Seconds for which it must be gone before a role shrinks (default 300).
    pub down_window_seconds: f64,
    /// Seconds for which a role must have had a worker to spare before one is given to the other role (default 120).
    pub flip_window_seconds: f64,
    /// Seconds between two changes of one role (default 60). Above what a worker needs to start, or growth overshoots.
    pub cool_down_seconds: f64,
    /// Seconds between two role changes of any worker (default 120).
    pub flip_cool_down_seconds: f64,
    /// Workers of all roles at most (default 1,024).
    pub max_workers: u32,
    /// Bounds of the workers that process prompts only.
    pub prefill: Bounds,
    /// Bounds of the workers that decode only.
    pub decode: Bounds,
    /// Bounds of the workers that do both.
    pub both: Bounds,
}

/// Whether proposals are carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlannerMode {
    /// They are shown only.
    #[default]
    DryRun,
    /// They are carried out.
    Act,
}

/// Smallest and largest number of workers of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Bounds {
    /// At least (default 0: a role that nobody uses needs none).
    pub min: u32,
    /// At most (default 1,024).
    pub max: u32,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            min: 0,
            max: MAX_WORKERS,
        }
    }
}

/// Most workers of a pool.
const MAX_WORKERS: u32 = 1_024;
/// A day: longer windows follow nothing.
const MAX_SECONDS: f64 = 86_400.0;

impl Default for PlannerConfig {
    fn default() -> Self {
        Self {
            mode: PlannerMode::DryRun,
            ttft_objective_seconds: 1.0,
            itl_objective_seconds: 0.1,
            target_utilisation: 0.7,
            target_kv_use: 0.8,
            backlog_seconds: 30.0,
            tolerance: 0.1,
            up_window_seconds: 30.0,
            down_window_seconds: 300.0,
            flip_window_seconds: 120.0,
            cool_down_seconds: 60.0,
            flip_cool_down_seconds: 120.0,
            max_workers: MAX_WORKERS,
            prefill: Bounds::default(),
            decode: Bounds::default(),
            both: Bounds::default(),
        }
    }
}

impl PlannerConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// [`ErrorKind::Config`], naming the key, its value and the accepted range.
    pub fn validate(&self) -> Result<()> {
        let ranges = [
            (
                "ttft_objective_seconds",
                self.ttft_objective_seconds,
                1e-6,
                MAX_SECONDS,
            ),
            (
                "itl_objective_seconds",
                self.itl_objective_seconds,
                1e-6,
                MAX_SECONDS,
            ),
            ("target_utilisation", self.target_utilisation, 0.01, 1.0),
            ("target_kv_use", self.target_kv_use, 0.01, 1.0),
            ("backlog_seconds", self.backlog_seconds, 0.1, MAX_SECONDS),
            ("tolerance", self.tolerance, 0.0, 0.5),
            (
                "up_window_seconds",
                self.up_window_seconds,
                0.0,
                MAX_SECONDS,
            ),
            (
                "down_window_seconds",
                self.down_window_seconds,
                0.0,
                MAX_SECONDS,
            ),
            (
                "flip_window_seconds",
                self.flip_window_seconds,
                0.0,
                MAX_SECONDS,
            ),
            (
                "cool_down_seconds",
                self.cool_down_seconds,
                0.0,
                MAX_SECONDS,
            ),
            (
                "flip_cool_down_seconds",
                self.flip_cool_down_seconds,
                0.0,
                MAX_SECONDS,
            ),
        ];
        for (key, value, min, max) in ranges {
            if !(min..=max).contains(&value) {
                return Err(refused(&format!(
                    "{key} {value} is out of range: {min} to {max} is accepted"
                )));
            }
        }
        self.validate_bounds()
    }

    fn validate_bounds(&self) -> Result<()> {
        for (key, bounds) in [
            ("prefill", self.prefill),
            ("decode", self.decode),
            ("both", self.both),
        ] {
            if bounds.min > bounds.max || bounds.max > MAX_WORKERS {
                return Err(refused(&format!(
                    "{key}: min {} and max {} are out of range: 0 ≤ min ≤ max ≤ {MAX_WORKERS} is accepted",
                    bounds.min, bounds.max
                )));
            }
        }
        let minimum = self.prefill.min + self.decode.min + self.both.min;
        if self.max_workers < minimum || self.max_workers > MAX_WORKERS {
            return Err(refused(&format!(
                "max_workers {} is out of range: {minimum} (the sum of the minimums) to {MAX_WORKERS} is accepted",
                self.max_workers
            )));
        }
        Ok(())
    }

    pub(super) const fn bounds(&self, role: Role) -> Bounds {
        match role {
            Role::Prefill => self.prefill,
            Role::Decode => self.decode,
            Role::Both => self.both,
        }
    }

    pub(super) fn up_window(&self) -> Duration {
        Duration::from_secs_f64(self.up_window_seconds)
    }

    pub(super) fn down_window(&self) -> Duration {
        Duration::from_secs_f64(self.down_window_seconds)
    }

    pub(super) fn flip_window(&self) -> Duration {
        Duration::from_secs_f64(self.flip_window_seconds)
    }

    pub(super) fn cool_down(&self) -> Duration {
        Duration::from_secs_f64(self.cool_down_seconds)
    }

    pub(super) fn flip_cool_down(&self) -> Duration {
        Duration::from_secs_f64(self.flip_cool_down_seconds)
    }
}

fn refused(message: &str) -> Error {
    Error::new(ErrorKind::Config, format!("planner: {message}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_only_shown() {
        PlannerConfig::default().validate().unwrap();
        assert_eq!(PlannerConfig::default().mode, PlannerMode::DryRun);
    }

    #[test]
    fn what_is_out_of_range_is_named() {
        for (json, part) in [
            (r#"{"tolerance": 0.9}"#, "tolerance 0.9"),
            (r#"{"target_utilisation": 0}"#, "target_utilisation 0"),
            (r#"{"decode": {"min": 3, "max": 2}}"#, "decode"),
            (r#"{"prefill": {"max": 5000}}"#, "prefill"),
            (
                r#"{"max_workers": 1, "prefill": {"min": 2}}"#,
                "max_workers 1",
            ),
        ] {
            let config: PlannerConfig = serde_json::from_str(json).unwrap();
            let error = config.validate().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(part), "{error}");
        }
        let error = serde_json::from_str::<PlannerConfig>(r#"{"tolerence": 0.1}"#).unwrap_err();
        assert!(error.to_string().contains("tolerence"));
        let error = serde_json::from_str::<PlannerConfig>(r#"{"mode": "go"}"#).unwrap_err();
        assert!(error.to_string().contains("dry_run"), "{error}");
    }
}
