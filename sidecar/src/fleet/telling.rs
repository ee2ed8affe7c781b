//! What the log says of a worker's health: each change once, and of one that still starts nothing that sounds like a failure.

use std::time::Duration;

use tracing::{info, warn};

use crate::pool::member::Probe;

/// What was last said of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Telling {
    /// Nothing yet.
    #[default]
    Silent,
    /// That it does not answer yet.
    Awaited,
    /// That it is healthy.
    Healthy,
    /// That it is not.
    Unhealthy,
}

impl Telling {
    /// Takes in a probe's result of a worker that is `age` old, and of which its source says or does not say that it starts. Returns
    /// what is to be said now, where that is something else than before.
    pub(super) fn next(
        &mut self,
        is_healthy: bool,
        is_said_to_start: bool,
        age: Duration,
    ) -> Option<Self> {
        let was_healthy = matches!(self, Self::Healthy | Self::Unhealthy);
        let next = if is_healthy {
            Self::Healthy
        } else if !was_healthy && (is_said_to_start || age < START_WITHIN) {
            Self::Awaited
        } else {
            Self::Unhealthy
        };
        (std::mem::replace(self, next) != next).then_some(next)
    }

    /// Writes it to the log.
    pub(super) fn say(self, worker: &str, probe: &Probe) {
        match probe {
            Probe::Healthy => info!(worker, "worker is healthy"),
            Probe::Unwell(cause) | Probe::Gone(cause) if self == Self::Awaited => {
                info!(worker, cause, "worker is not there yet");
            }
            Probe::Unwell(cause) | Probe::Gone(cause) => {
                warn!(worker, cause, "worker is not healthy");
            }
        }
    }
}

/// How long a worker may take to answer for the first time before that is called a failure. A source that says itself when a worker
/// is there has a deadline of its own.
const START_WITHIN: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_starts_is_a_failure_when_it_was_healthy_once_or_its_time_is_up() {
        use Telling::{Awaited, Healthy, Unhealthy};
        let [early, late] = [59, 61].map(Duration::from_secs);
        let mut told = Telling::default();
        // Its source has its own deadline.
        assert_eq!(told.next(false, true, late), Some(Awaited));
        assert_eq!(told.next(false, true, late), None);
        assert_eq!(told.next(false, false, early), None);
        assert_eq!(told.next(false, false, late), Some(Unhealthy));
        assert_eq!(told.next(true, false, late), Some(Healthy));
        assert_eq!(told.next(true, false, late), None);
        assert_eq!(told.next(false, false, early), Some(Unhealthy));

        let mut told = Telling::default();
        assert_eq!(told.next(true, true, early), Some(Healthy));
        assert_eq!(told.next(false, true, early), Some(Unhealthy));
        assert_eq!(told.next(false, true, late), None);
    }
}
