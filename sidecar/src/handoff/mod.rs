//! Drives the handoff of one request from a prefill worker to a decode worker.
//!
//! What to do next is decided by [`Handoff`], a state machine without I/O or clock that serves every protocol; what to
//! write to the two workers by a [`Protocol`]. Both are pure: whoever sends requests (a proxy, an endpoint picker) feeds
//! events in and carries actions out.
//!
//! What a prefill worker hands over is a [`Ticket`]: it can be used once, because it is moved; not after its deadline,
//! because redeeming it takes the time; and for no other request, because only the machine of this request gives it out.
//! Engines do not notice any of the three: they answer 200 with text computed from somebody else's cache.

mod answer;
mod connector;
mod drive;
mod gaps;
mod leg;
mod links;
mod mooncake;
mod nixl;
mod pairing;
mod peers;
mod sglang;
mod state;
mod ticket;

pub use answer::{AnswerCorrector, correct_answer, prefill_cached_tokens};
pub use connector::{Connector, ProtocolChoice};
pub use drive::{DriveLimits, DriveRequest, Driver, HandoffMetrics, Pair, Side};
pub use gaps::{Disturbing, Gaps, RankGaps, StreamGaps, noticeable};
pub use leg::{Leg, LegContext, Unsplittable, check_ends, check_splittable, local_body, strip};
pub use links::{DEFAULT_LINK, LinkSettings, Links};
pub use mooncake::Mooncake;
pub use nixl::Nixl;
pub use pairing::{Known, PairTerms, Pairing, PairingRules};
pub use peers::{Peer, PeerFacts, Peers};
pub use sglang::Sglang;
pub use state::{
    Action, Answer, Attempt, Event, Failure, FallbackReason, Handoff, HandoffRules, Outcome,
};
pub use ticket::{Expired, Ticket};

use std::time::Instant;

use serde_json::Value;

use crate::request::Endpoint;

/// In which order the two legs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegOrder {
    /// The decode leg needs what the prefill leg answers.
    Sequential,
    /// Both legs run at once and find each other by what the router gave them.
    Concurrent,
}

/// How one kind of engine is told to hand over.
pub trait Protocol: std::fmt::Debug + Send + Sync {
    /// Returns in which order the legs run.
    fn order(&self) -> LegOrder;

    /// Makes what both legs of a concurrent protocol share; `None` where the prefill worker makes it, or where too little is
    /// known of the prefill worker to split the request.
    fn introduce(&self, context: &LegContext<'_>, now: Instant) -> Option<Ticket>;

    /// Writes the prefill leg. `ticket` is looked at, not used up: the decode leg of the same request takes it.
    fn prefill(
        &self,
        endpoint: Endpoint,
        body: &Value,
        ticket: Option<&Ticket>,
        context: &LegContext<'_>,
    ) -> Leg;

    /// Reads what the prefill leg hands over; `None` when it hands over nothing usable, which is no error.
    fn handed_over(&self, reply: &mut Value, now: Instant) -> Option<Ticket>;

    /// Writes the decode leg, which uses the ticket up.
    ///
    /// # Errors
    /// [`Expired`] when the ticket's time is over at `now`.
    fn decode(
        &self,
        body: Value,
        ticket: Ticket,
        context: &LegContext<'_>,
        now: Instant,
    ) -> Result<Leg, Expired>;
}

/// Turns a decode leg of a sequential protocol into one that only fetches what a prefill worker holds, so that it is free again: for a
/// handed-over prefill whose client has left.
pub fn collecting(endpoint: Endpoint, leg: &mut Leg) {
    leg::end_after_one_token(leg::Dialect::Vllm, endpoint, &mut leg.body);
}

/// What a pair of vLLM 0.32.0 was asked and answered, one API after the other.
#[cfg(test)]
fn recorded() -> Vec<Value> {
    let text = include_str!("../../../tests/fixtures/vllm-0.32.0/handoff.json");
    serde_json::from_str(text).expect("the recording is JSON")
}
