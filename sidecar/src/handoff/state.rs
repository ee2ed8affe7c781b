//! The state machine of one handoff, for every protocol.
//!
//! ```text
//! sequential: prefill ──answer──▶ held (until its deadline) ──admitted──▶ decode ──▶ done
//! concurrent: held (made here) ──admitted──▶ prefill + decode ──▶ done
//! either:     whatever is lost before the first byte ──▶ local prefill on the decode worker, once; else 502
//! ```
//!
//! The legs are linked: when one fails or the client leaves, the other is cancelled. The exception is a prefill that has
//! been handed over and not fetched: it is fetched and thrown away when the decode worker has room, or watched until its
//! lease ends.

use std::time::{Duration, Instant};

use super::LegOrder;
use super::ticket::Ticket;

/// What a handoff may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandoffRules {
    /// In which order the legs run.
    pub order: LegOrder,
    /// The decode worker can process the prompt itself, and has room for that.
    pub may_fall_back: bool,
    /// For how long a prefill worker holds what nobody fetches.
    pub lease: Duration,
}

/// Names one request to the decode worker. A late word of an earlier one is told apart by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Attempt(u8);

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// The decode worker may take the request now.
    Admitted,
    /// The prefill leg has answered with success. It hands something over in sequential protocols, or should.
    PrefillAnswered(Option<Ticket>),
    /// The prefill leg has failed.
    PrefillFailed(Failure),
    /// The first byte of the answer's body came.
    DecodeStarted(Attempt),
    /// The answer is complete.
    DecodeEnded(Attempt),
    /// The decode leg has failed; after its first byte that is a broken stream.
    DecodeFailed(Attempt, Failure),
    /// The client has left.
    ClientLeft,
    /// The client has left, and the prefill leg had answered before it could be cancelled. `None` when it hands nothing
    /// over.
    LeftBehind(Option<Ticket>),
    /// Time has passed; deadlines are looked at with every event.
    Tick,
}

/// How a leg failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The worker refuses the request itself (4xx but 429): no worker would take it.
    Rejected,
    /// The worker is there and answers with an error (5xx, 429), or takes too long.
    Failed,
    /// The worker cannot be reached.
    Unreachable,
}

/// Why the decode worker processes the prompt itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FallbackReason {
    /// The prefill leg failed.
    PrefillFailed,
    /// It answered without handing anything over.
    NothingHandedOver,
    /// What was handed over got too old before it could be used.
    Expired,
    /// The decode leg failed before its first byte; what was handed over is used up.
    DecodeFailed,
}

impl FallbackReason {
    /// Every reason, for metrics with one series each.
    pub const ALL: [Self; 4] = [
        Self::PrefillFailed,
        Self::NothingHandedOver,
        Self::Expired,
        Self::DecodeFailed,
    ];

    /// Returns the name used in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::PrefillFailed => "prefill_failed",
            Self::NothingHandedOver => "nothing_handed_over",
            Self::Expired => "expired",
            Self::DecodeFailed => "decode_failed",
        }
    }
}

/// What to do now, in this order.
#[derive(Debug)]
pub enum Action {
    /// Send the prefill leg; sequential protocols.
    SendPrefill,
    /// Send the decode leg with what was handed over. Should its time be over when it is redeemed, after waiting for
    /// something else, that is a [`Event::DecodeFailed`] with [`Failure::Failed`].
    SendDecode(Attempt, Ticket),
    /// Send both legs of a concurrent protocol, which share the ticket.
    SendBoth(Attempt, Ticket),
    /// Send the request to the decode worker as if there were no handoff.
    SendLocal(Attempt, FallbackReason),
    /// Fetch what was handed over and throw the answer away: the client has left, and the prefill worker would hold it until
    /// its lease ends.
    Collect(Attempt, Ticket),
    /// Close the prefill leg.
    CancelPrefill,
    /// Close the decode leg.
    CancelDecode(Attempt),
    /// Answer the client.
    Answer(Answer),
}

/// What the client gets that is not the decode leg's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The prefill worker's own refusal, with its body.
    PrefillRefusal,
    /// The decode worker's own refusal, with its body.
    DecodeRefusal,
    /// 502: neither leg nor fallback can serve the request.
    BadGateway,
    /// An error event in the stream that has begun, and its end.
    BrokenStream,
}

/// How a handoff ended for the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Served by both workers.
    Split,
    /// Served by the decode worker alone.
    Local(FallbackReason),
    /// Answered with an error.
    Answered(Answer),
    /// The client left.
    Left,
}

/// One handoff.
///
/// Feed every event in; carry out what comes back, at once. It is over when [`is_open`](Self::is_open) says so, which may
/// be after the client has its answer.
#[derive(Debug)]
pub struct Handoff {
    rules: HandoffRules,
    prefill: PrefillLeg,
    decode: DecodeLeg,
    attempts: u8,
    admitted: bool,
    /// Handed over and not used.
    held: Option<Ticket>,
    /// A fallback that waits for admission.
    due: Option<FallbackReason>,
    fallback: Option<FallbackReason>,
    /// Until then the prefill worker may hold a cache that nobody will fetch, or that is being fetched.
    pinned_until: Option<Instant>,
    outcome: Option<Outcome>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PrefillLeg {
    Waiting,
    Running,
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DecodeLeg {
    Waiting,
    /// Sent, without a byte of an answer.
    Sent(Attempt, Kind),
    Streaming(Attempt, Kind),
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// With what was handed over.
    Split,
    /// Without.
    Local,
    /// With it, for nobody.
    Collecting,
}

impl Handoff {
    /// Begins a handoff of a sequential protocol: its prefill leg is sent at once.
    #[must_use]
    pub fn sequential(rules: HandoffRules) -> (Self, Vec<Action>) {
        let mut handoff = Self::new(rules, None);
        handoff.prefill = PrefillLeg::Running;
        (handoff, vec![Action::SendPrefill])
    }

    /// Begins a handoff of a concurrent protocol: both legs are sent when the decode worker admits the request.
    #[must_use]
    pub fn concurrent(rules: HandoffRules, ticket: Ticket) -> Self {
        Self::new(rules, Some(ticket))
    }

    const fn new(rules: HandoffRules, held: Option<Ticket>) -> Self {
        Self {
            rules,
            prefill: PrefillLeg::Waiting,
            decode: DecodeLeg::Waiting,
            attempts: 0,
            admitted: false,
            held,
            due: None,
            fallback: None,
            pinned_until: None,
            outcome: None,
        }
    }

    /// Takes in an event. Events that cannot be, late ones among them, change nothing.
    pub fn on(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        self.pass_time(now);
        match event {
            Event::Admitted => self.admitted = true,
            Event::PrefillAnswered(ticket) => self.prefill_answered(ticket, now),
            Event::PrefillFailed(failure) => self.prefill_failed(failure, &mut actions),
            Event::DecodeStarted(attempt) => self.decode_started(attempt),
            Event::DecodeEnded(attempt) => self.decode_ended(attempt, &mut actions),
            Event::DecodeFailed(attempt, failure) => {
                self.decode_failed(attempt, failure, now, &mut actions);
            }
            Event::ClientLeft => self.client_left(now, &mut actions),
            Event::LeftBehind(ticket) => self.left_behind(ticket, now, &mut actions),
            Event::Tick => {}
        }
        self.proceed(&mut actions);
        actions
    }

    /// Returns how it ended for the client, once it has.
    #[must_use]
    pub const fn outcome(&self) -> Option<Outcome> {
        self.outcome
    }

    /// Tells whether anything is still to come: an answer, a leg that runs, or a prefill worker that holds a cache.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.outcome.is_none()
            || matches!(self.prefill, PrefillLeg::Running)
            || matches!(self.decode, DecodeLeg::Sent(..) | DecodeLeg::Streaming(..))
            || self.pinned_until.is_some()
    }

    /// Tells whether the prefill worker works for the request, will, or holds a cache of it.
    #[must_use]
    pub const fn occupies_prefill(&self) -> bool {
        !matches!(self.prefill, PrefillLeg::Over)
            || self.held.is_some()
            || self.pinned_until.is_some()
    }

    /// Returns when to come back with [`Event::Tick`] if nothing else happens.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let held = self.held.as_ref().map(Ticket::deadline);
        [held, self.pinned_until].into_iter().flatten().min()
    }

    fn pass_time(&mut self, now: Instant) {
        if self
            .held
            .as_ref()
            .is_some_and(|ticket| ticket.is_expired(now))
        {
            self.held = None;
            self.due = Some(FallbackReason::Expired).filter(|_| self.outcome.is_none());
        }
        if self.pinned_until.is_some_and(|until| until <= now) {
            self.pinned_until = None;
        }
    }

    /// Sends to the decode worker what is ready, once it may be.
    fn proceed(&mut self, actions: &mut Vec<Action>) {
        if self.decode != DecodeLeg::Waiting {
            return;
        }
        if self.outcome.is_some() {
            self.collect(actions);
            return;
        }
        if self.due.is_some() && !self.rules.may_fall_back {
            self.answer(Answer::BadGateway, actions);
            return;
        }
        if !self.admitted {
            return;
        }
        if let Some(reason) = self.due.take() {
            self.fallback = Some(reason);
            let attempt = self.send(Kind::Local);
            actions.push(Action::SendLocal(attempt, reason));
        } else if let Some(ticket) = self.held.take() {
            let attempt = self.send(Kind::Split);
            actions.push(match self.rules.order {
                LegOrder::Sequential => Action::SendDecode(attempt, ticket),
                LegOrder::Concurrent => {
                    self.prefill = PrefillLeg::Running;
                    Action::SendBoth(attempt, ticket)
                }
            });
        }
    }

    fn send(&mut self, kind: Kind) -> Attempt {
        // Three at most: with what was handed over, without, for nobody.
        self.attempts += 1;
        let attempt = Attempt(self.attempts);
        self.decode = DecodeLeg::Sent(attempt, kind);
        attempt
    }

    fn prefill_answered(&mut self, ticket: Option<Ticket>, now: Instant) {
        // A ticket that comes when nobody waits for it (the leg was cancelled) is dropped with its request.
        if self.prefill != PrefillLeg::Running {
            return;
        }
        self.prefill = PrefillLeg::Over;
        if self.rules.order == LegOrder::Concurrent {
            return;
        }
        match ticket {
            Some(ticket) => {
                self.pinned_until = Some(now + self.rules.lease);
                if ticket.is_expired(now) {
                    self.due = Some(FallbackReason::Expired);
                } else {
                    self.held = Some(ticket);
                }
            }
            None => self.due = Some(FallbackReason::NothingHandedOver),
        }
    }

    fn prefill_failed(&mut self, failure: Failure, actions: &mut Vec<Action>) {
        if self.prefill != PrefillLeg::Running {
            return;
        }
        self.prefill = PrefillLeg::Over;
        match self.decode {
            DecodeLeg::Waiting => {}
            DecodeLeg::Sent(attempt, _) => {
                actions.push(Action::CancelDecode(attempt));
                self.decode = DecodeLeg::Waiting;
            }
            // It has what it needs.
            DecodeLeg::Streaming(..) | DecodeLeg::Over => return,
        }
        if failure == Failure::Rejected {
            self.answer(Answer::PrefillRefusal, actions);
        } else {
            self.due = Some(FallbackReason::PrefillFailed);
        }
    }

    fn decode_started(&mut self, attempt: Attempt) {
        if let DecodeLeg::Sent(current, kind) = self.decode
            && current == attempt
        {
            self.decode = DecodeLeg::Streaming(attempt, kind);
            if kind != Kind::Local {
                // Fetched: the prefill worker has been told so.
                self.pinned_until = None;
            }
        }
    }

    fn decode_ended(&mut self, attempt: Attempt, actions: &mut Vec<Action>) {
        self.decode_started(attempt);
        let DecodeLeg::Streaming(current, kind) = self.decode else {
            return;
        };
        if current != attempt {
            return;
        }
        self.decode = DecodeLeg::Over;
        match kind {
            Kind::Collecting => {}
            Kind::Split => self.outcome = Some(Outcome::Split),
            Kind::Local => self.outcome = self.fallback.map(Outcome::Local),
        }
        self.cancel_prefill(actions);
    }

    fn decode_failed(
        &mut self,
        attempt: Attempt,
        failure: Failure,
        now: Instant,
        actions: &mut Vec<Action>,
    ) {
        let (current, kind, streaming) = match self.decode {
            DecodeLeg::Sent(current, kind) => (current, kind, false),
            DecodeLeg::Streaming(current, kind) => (current, kind, true),
            DecodeLeg::Waiting | DecodeLeg::Over => return,
        };
        if current != attempt {
            return;
        }
        self.decode = DecodeLeg::Over;
        self.hold_lease(kind, streaming, now);
        self.cancel_prefill(actions);
        let can_retry =
            kind == Kind::Split && failure == Failure::Failed && self.rules.may_fall_back;
        match (kind, failure) {
            (Kind::Collecting, _) => {}
            _ if streaming => self.answer(Answer::BrokenStream, actions),
            (_, Failure::Rejected) => self.answer(Answer::DecodeRefusal, actions),
            _ if can_retry => {
                self.decode = DecodeLeg::Waiting;
                self.due = Some(FallbackReason::DecodeFailed);
            }
            (_, Failure::Failed | Failure::Unreachable) => self.answer(Answer::BadGateway, actions),
        }
    }

    fn client_left(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.outcome.is_some() {
            return;
        }
        self.outcome = Some(Outcome::Left);
        self.due = None;
        self.cancel_prefill(actions);
        if let DecodeLeg::Sent(attempt, kind) | DecodeLeg::Streaming(attempt, kind) = self.decode {
            let streaming = matches!(self.decode, DecodeLeg::Streaming(..));
            self.decode = DecodeLeg::Over;
            self.hold_lease(kind, streaming, now);
            actions.push(Action::CancelDecode(attempt));
        }
        // Nobody holds anything yet for what was made here.
        if self.rules.order == LegOrder::Concurrent {
            self.held = None;
        }
    }

    fn left_behind(&mut self, ticket: Option<Ticket>, now: Instant, actions: &mut Vec<Action>) {
        if self.outcome.is_none() {
            self.prefill_answered(ticket, now);
        }
        self.client_left(now, actions);
    }

    /// Fetches for nobody what was handed over, once the decode worker has room. Until then, and where it has none, the
    /// lease is waited for.
    fn collect(&mut self, actions: &mut Vec<Action>) {
        if !self.admitted {
            return;
        }
        if let Some(ticket) = self.held.take() {
            let attempt = self.send(Kind::Collecting);
            actions.push(Action::Collect(attempt, ticket));
        }
    }

    /// Answers the client with an error, and cancels what runs for it.
    fn answer(&mut self, answer: Answer, actions: &mut Vec<Action>) {
        self.outcome = Some(Outcome::Answered(answer));
        self.due = None;
        self.held = None;
        self.cancel_prefill(actions);
        actions.push(Action::Answer(answer));
    }

    fn cancel_prefill(&mut self, actions: &mut Vec<Action>) {
        if self.prefill == PrefillLeg::Running {
            self.prefill = PrefillLeg::Over;
            actions.push(Action::CancelPrefill);
        }
    }

    /// Counts a cache that may never be fetched as held until its lease ends, which its decode worker may just have
    /// extended.
    fn hold_lease(&mut self, kind: Kind, streaming: bool, now: Instant) {
        let sequential = self.rules.order == LegOrder::Sequential;
        if sequential && kind != Kind::Local && !streaming {
            self.pinned_until = Some(now + self.rules.lease);
        }
    }
}

#[cfg(test)]
mod tests;
