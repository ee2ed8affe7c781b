//! Starting and stopping workers by the replicas of a workload.

use std::sync::Arc;

use kvlane::Role;

use super::{Lever, Pull};
use crate::config::ScaleRule;
use crate::pool::scale::Scaler;

/// The workloads of some roles. Which replica goes is the workload's own choice; it drains when its source says that it leaves.
#[derive(Debug)]
pub struct ScaleLever {
    scaler: Arc<dyn Scaler>,
    rules: Vec<ScaleRule>,
}

impl ScaleLever {
    /// Creates the lever of the workloads of `rules`, one for each role.
    #[must_use]
    pub fn new(scaler: Arc<dyn Scaler>, rules: Vec<ScaleRule>) -> Self {
        Self { scaler, rules }
    }

    /// Changes the replicas of a role; more than `current` are not added to.
    async fn change(&self, role: Role, by: i64, current: u32) -> Result<String, String> {
        let rule = self.rules.iter().find(|rule| rule.role == role);
        let rule = rule.ok_or_else(|| format!("no workload has the role {}", role.name()))?;
        let target = &rule.target;
        let replicas = self.scaler.replicas(target).await;
        let before = replicas.map_err(|error| error.to_string())?.desired;
        // Those that have no address yet, or no place to run, are seen by nobody, and asked for all the same.
        if by > 0 && before > current {
            return Err(format!(
                "{target}: {current} of {before} replicas are there yet"
            ));
        }
        let after = u32::try_from(i64::from(before) + by).unwrap_or(0);
        let scaled = self.scaler.set_replicas(target, after).await;
        let scaled = scaled.map_err(|error| error.to_string())?;
        Ok(format!(
            "{target}: {} replicas instead of {}{}",
            scaled.after,
            scaled.before,
            if scaled.dry_run { ", tried only" } else { "" }
        ))
    }
}

impl Lever for ScaleLever {
    fn starts(&self, role: Role) -> bool {
        self.rules.iter().any(|rule| rule.role == role)
    }

    fn stops(&self, role: Role, _: &str) -> bool {
        self.starts(role)
    }

    fn chooses(&self) -> bool {
        true
    }

    fn start(&self, role: Role, count: u32, current: u32) -> Pull<'_> {
        Box::pin(self.change(role, i64::from(count), current))
    }

    fn stop<'a>(&'a self, role: Role, _: &'a str) -> Pull<'a> {
        Box::pin(self.change(role, -1, u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;
    use crate::pool::scale::{Answer, Replicas, ScaleError, ScaleTarget, Scaled};

    /// A workload in memory.
    #[derive(Debug)]
    struct Memory(Mutex<Option<u32>>);

    impl Scaler for Memory {
        fn replicas<'a>(&'a self, target: &'a ScaleTarget) -> Answer<'a, Replicas> {
            let found = *self.0.lock();
            Box::pin(async move {
                found
                    .map(|desired| Replicas {
                        desired,
                        running: desired,
                    })
                    .ok_or_else(|| ScaleError {
                        is_transient: false,
                        message: format!("{target}: not found"),
                    })
            })
        }

        fn set_replicas<'a>(&'a self, _: &'a ScaleTarget, replicas: u32) -> Answer<'a, Scaled> {
            let before = self.0.lock().replace(replicas).unwrap_or(0);
            Box::pin(async move {
                Ok(Scaled {
                    before,
                    after: replicas,
                    dry_run: false,
                })
            })
        }
    }

    fn lever(replicas: Option<u32>) -> (Arc<Memory>, ScaleLever) {
        let memory = Arc::new(Memory(Mutex::new(replicas)));
        let rule = ScaleRule {
            role: Role::Decode,
            target: ScaleTarget::new("StatefulSet", "decode"),
        };
        let lever = ScaleLever::new(Arc::<Memory>::clone(&memory), vec![rule]);
        (memory, lever)
    }

    #[tokio::test]
    async fn replicas_go_up_by_what_is_asked_for_and_down_one_at_a_time() {
        let (memory, lever) = lever(Some(2));
        let done = lever.start(Role::Decode, 3, 2).await.unwrap();
        assert_eq!(done, "StatefulSet decode: 5 replicas instead of 2");
        lever.stop(Role::Decode, "decode-1").await.unwrap();
        assert_eq!(*memory.0.lock(), Some(4));
        assert!(lever.starts(Role::Decode) && !lever.starts(Role::Prefill));
        assert!(lever.start(Role::Prefill, 1, 0).await.is_err());
    }

    #[tokio::test]
    async fn nothing_is_added_to_replicas_that_are_not_there_yet() {
        let (memory, lever) = lever(Some(3));
        let why = lever.start(Role::Decode, 1, 2).await.unwrap_err();
        assert_eq!(why, "StatefulSet decode: 2 of 3 replicas are there yet");
        assert_eq!(*memory.0.lock(), Some(3));
    }

    #[tokio::test]
    async fn a_workload_that_is_not_there_is_named() {
        let (memory, lever) = lever(None);
        let why = lever.stop(Role::Decode, "decode-0").await.unwrap_err();
        assert_eq!(why, "StatefulSet decode: not found");
        assert_eq!(*memory.0.lock(), None);
    }

    #[tokio::test]
    async fn no_workload_falls_below_nothing() {
        let (memory, lever) = lever(Some(0));
        lever.stop(Role::Decode, "decode-0").await.unwrap();
        assert_eq!(*memory.0.lock(), Some(0));
    }
}
