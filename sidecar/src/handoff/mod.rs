//! Drives the handoff of one request from a prefill worker to a decode worker.
//!
//! What to do next is decided by [`Handoff`], a state machine without I/O or clock that serves every protocol: whoever sends requests (a proxy, an endpoint picker) feeds
//! events in and carries actions out.
//!
//! What a prefill worker hands over is a [`Ticket`]: it can be used once, because it is moved; not after its deadline,
//! because redeeming it takes the time; and for no other request, because only the machine of this request gives it out.
//! Engines do not notice any of the three: they answer 200 with text computed from somebody else's cache.

mod state;
mod ticket;

pub use state::{
    Action, Answer, Attempt, Event, Failure, FallbackReason, Handoff, HandoffRules, Outcome,
};
pub use ticket::{Expired, Ticket};

/// In which order the two legs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegOrder {
    /// The decode leg needs what the prefill leg answers.
    Sequential,
    /// Both legs run at once and find each other by what the router gave them.
    Concurrent,
}
