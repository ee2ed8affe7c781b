//! Starting and stopping engines of this machine when the pool is balanced.
//!
//! A template's replicas have their GPUs from the beginning, so an engine that is not needed is parked and not forgotten.

use kvlane::{Role, WorkerId};
use tokio::sync::watch;

use super::{Kept, Processes, State};
use crate::pool::rebalance::{Lever, Pull};

/// Whether a replica should run.
#[derive(Debug)]
pub(super) struct Wanted(watch::Receiver<bool>);

impl Wanted {
    /// Creates the wish and where it is changed.
    pub(super) fn new(is_wanted: bool) -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(is_wanted);
        (sender, Self(receiver))
    }

    pub(super) fn is_wanted(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until the replica should run, or should not.
    pub(super) async fn becomes(&self, is_wanted: bool) {
        let mut wish = self.0.clone();
        if wish.wait_for(|&wish| wish == is_wanted).await.is_err() {
            // Nobody can change it any more.
            std::future::pending().await
        }
    }
}

impl Processes {
    fn of_role(&self, role: Role) -> impl Iterator<Item = &Kept> {
        self.kept.iter().filter(move |kept| kept.role == role)
    }

    /// Starts parked engines of a role.
    fn unpark(&self, role: Role, count: usize) -> Result<String, String> {
        let parked = self
            .of_role(role)
            .filter(|kept| !*kept.wanted.borrow())
            .take(count);
        let mut names = Vec::new();
        for kept in parked {
            kept.wanted.send_replace(true);
            names.push(kept.record.lock().name.clone());
        }
        if names.is_empty() {
            let gave_up = |kept: &&Kept| kept.record.lock().state == State::GaveUp;
            return Err(format!(
                "no engine of this machine is parked in the role {} ({} given up)",
                role.name(),
                self.of_role(role).filter(gave_up).count()
            ));
        }
        Ok(format!("starts {}", names.join(", ")))
    }

    /// Ends an engine that has finished what it had.
    fn park(&self, name: &str) -> Result<String, String> {
        let named = |kept: &&Kept| kept.record.lock().name == name;
        let kept = self.kept.iter().find(named);
        let kept = kept.ok_or_else(|| format!("{name} is no engine of this machine"))?;
        kept.wanted.send_replace(false);
        Ok(format!("parks {name}"))
    }
}

impl Lever for Processes {
    fn starts(&self, role: Role) -> bool {
        self.of_role(role).next().is_some()
    }

    fn stops(&self, _: Role, worker: &str) -> bool {
        self.kept
            .iter()
            .any(|kept| kept.record.lock().name == worker)
    }

    fn coming(&self) -> Vec<(WorkerId, Role)> {
        let coming = self.kept.iter().filter_map(|kept| {
            let record = kept.record.lock();
            let is_coming = match record.state {
                State::Blocked | State::Waiting | State::Starting | State::Pausing => true,
                // Parked until its task has heard of the wish.
                State::Serving | State::Parked => *kept.wanted.borrow(),
                State::GaveUp | State::Stopping | State::Stopped => false,
            };
            let id = WorkerId::new(&record.name).ok()?;
            is_coming.then_some((id, kept.role))
        });
        coming.collect()
    }

    fn start(&self, role: Role, count: u32, _: u32) -> Pull<'_> {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let started = self.unpark(role, count);
        Box::pin(async move { started })
    }

    fn stop<'a>(&'a self, _: Role, worker: &'a str) -> Pull<'a> {
        let parked = self.park(worker);
        Box::pin(async move { parked })
    }
}
