//! What one prefill hands over, once.

use std::fmt;
use std::time::{Duration, Instant};

use serde_json::Value;

/// The transfer parameters of one request, which can be used once and until their deadline.
///
/// It can be neither copied nor cloned, and using it consumes it:
///
/// ```compile_fail,E0382
/// # use std::time::{Duration, Instant};
/// # use kvlane_sidecar::handoff::Ticket;
/// # let now = Instant::now();
/// let ticket = Ticket::new(serde_json::json!({}), now, Duration::from_secs(20));
/// let first = ticket.redeem(now);
/// let second = ticket.redeem(now); // used after move
/// ```
/// ```compile_fail,E0599
/// # use std::time::{Duration, Instant};
/// # use kvlane_sidecar::handoff::Ticket;
/// let ticket = Ticket::new(serde_json::json!({}), Instant::now(), Duration::from_secs(20));
/// let copy = ticket.clone(); // not found
/// ```
///
/// The deadline is our own: it counts from when the answer was read, on the monotonic clock. What an engine says of its
/// own clock cannot be compared with ours.
#[must_use = "what a prefill worker holds stays held until the ticket is used or its lease ends"]
pub struct Ticket {
    parameters: Value,
    deadline: Instant,
}

impl Ticket {
    /// Creates a ticket that is valid for `valid`.
    pub fn new(parameters: Value, now: Instant, valid: Duration) -> Self {
        Self {
            parameters,
            deadline: now + valid.min(LONGEST),
        }
    }

    /// Returns until when it can be used.
    #[must_use]
    pub const fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Tells whether its time is over.
    #[must_use]
    pub fn is_expired(&self, now: Instant) -> bool {
        now >= self.deadline
    }

    /// Uses the parameters up.
    ///
    /// # Errors
    /// [`Expired`] when its time is over; the parameters are gone all the same.
    pub fn redeem(self, now: Instant) -> Result<Value, Expired> {
        if self.is_expired(now) {
            return Err(Expired);
        }
        Ok(self.parameters)
    }

    /// Looks at a parameter, for the other leg of a concurrent protocol.
    pub(super) fn parameter(&self, name: &str) -> Option<&Value> {
        self.parameters.get(name)
    }
}

/// Keeps instants from overflowing; no engine holds a prefill for a day.
const LONGEST: Duration = Duration::from_secs(86_400);

impl fmt::Debug for Ticket {
    /// Leaves the parameters out: they open somebody's cache.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

/// The time of a [`Ticket`] was over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expired;

impl fmt::Display for Expired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the prefill worker's lease is over")
    }
}

impl std::error::Error for Expired {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_worth_nothing_at_its_deadline() {
        let now = Instant::now();
        let ticket = || Ticket::new(serde_json::json!({"a": 1}), now, Duration::from_secs(20));
        let just_before = now + Duration::from_millis(19_999);
        assert_eq!(ticket().redeem(just_before).unwrap()["a"], 1);
        let deadline = now + Duration::from_secs(20);
        assert_eq!(ticket().redeem(deadline), Err(Expired));
    }

    #[test]
    fn a_ticket_does_not_print_its_parameters() {
        let ticket = Ticket::new(
            serde_json::json!({"secret": 1}),
            Instant::now(),
            Duration::MAX,
        );
        assert!(!format!("{ticket:?}").contains("secret"));
    }
}
