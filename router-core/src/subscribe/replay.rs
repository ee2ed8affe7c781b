//! One replay: requests, answers, silence and the moment to give up.

use std::time::Instant;

use super::frames::{BatchFrame, ReplayFrame};
use super::gate::Gate;
use super::options::{Budget, Limits, Timing};
use super::queue::BatchQueue;

/// Why batches are asked for again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Nothing of this life is known: everything the engine still has.
    Rebuild,
    /// Live batches from here on are missing.
    Repair { from: u64 },
    /// After a new connection: is the last applied batch still the engine's own under that number?
    Check { anchor: u64 },
}

/// What a frame of an answer means for the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Continue,
    /// The engine is not the one whose batches were applied.
    OtherLife(&'static str),
}

#[derive(Debug)]
pub(super) struct Replay {
    /// Batches that arrived and wait to be applied.
    pub(super) inbox: BatchQueue,
    /// First sequence asked for.
    start: u64,
    /// First sequence still missing.
    next: u64,
    /// The batch that has yet to prove that the engine's life is the same.
    anchor: Option<u64>,
    state: State,
    asks: u32,
    heard_any: bool,
    brought_any: bool,
    /// No batch of the current answer has come yet.
    fresh: bool,
    deadline: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    AskAt(Instant),
    Listening {
        heard: Instant,
        /// When the socket was last seen to be empty. A thread that is busy elsewhere must not take that for silence.
        empty: Instant,
    },
    Ended,
}

impl Replay {
    /// Begins a replay that asks at `at`.
    pub(super) fn new(purpose: Purpose, at: Instant, timing: &Timing) -> Self {
        let (start, anchor) = match purpose {
            Purpose::Rebuild => (0, None),
            Purpose::Repair { from } => (from, None),
            Purpose::Check { anchor } => (anchor, Some(anchor)),
        };
        Self {
            inbox: BatchQueue::default(),
            start,
            next: start,
            anchor,
            state: State::AskAt(at),
            asks: 0,
            heard_any: false,
            brought_any: false,
            fresh: true,
            deadline: at + timing.replay,
        }
    }

    pub(super) fn on_frame(
        &mut self,
        frame: &ReplayFrame<'_>,
        gate: &Gate,
        limits: &Limits,
        now: Instant,
        budget: &mut Budget,
    ) -> Step {
        if !matches!(self.state, State::Listening { .. }) {
            return Step::Continue;
        }
        self.heard_any = true;
        self.listen(now);
        match frame {
            ReplayFrame::Batch(batch) if self.anchor.is_some() => self.on_anchor(batch, gate),
            ReplayFrame::Batch(batch) => {
                self.on_batch(batch, limits, now, budget);
                Step::Continue
            }
            ReplayFrame::End if self.anchor.is_some() => Step::OtherLife(
                "the engine restarted: after a new connection it has fewer batches than before",
            ),
            ReplayFrame::End => {
                self.state = State::Ended;
                Step::Continue
            }
        }
    }

    /// Nothing was there to be read.
    pub(super) const fn on_empty(&mut self, now: Instant) {
        if let State::Listening { empty, .. } = &mut self.state {
            *empty = now;
        }
    }

    /// Sends due requests and notices silence. `first_held` is the first live batch that waits.
    ///
    /// Returns where to ask from, if a request is due.
    pub(super) fn advance(
        &mut self,
        timing: &Timing,
        limits: &Limits,
        first_held: Option<u64>,
        now: Instant,
    ) -> Option<u64> {
        if now >= self.deadline {
            self.state = State::Ended;
        }
        // An inbox that is not empty may be why nothing is read.
        if self.is_listening() && !self.inbox.is_empty() {
            self.listen(now);
        }
        match self.state {
            State::AskAt(at) if at <= now => {
                self.asks += 1;
                self.fresh = true;
                self.listen(now);
                Some(self.next)
            }
            State::Listening { heard, empty } if empty >= heard + timing.silence => {
                self.on_silence(limits, first_held, now);
                None
            }
            State::AskAt(_) | State::Listening { .. } | State::Ended => None,
        }
    }

    pub(super) const fn is_listening(&self) -> bool {
        matches!(self.state, State::Listening { .. })
    }

    pub(super) fn wants_frames(&self, budget: &Budget) -> bool {
        self.is_listening() && self.inbox.has_room(0, budget)
    }

    pub(super) fn has_work(&self) -> bool {
        self.is_over() || !self.inbox.is_empty()
    }

    pub(super) fn next_deadline(&self, timing: &Timing) -> Instant {
        let next = match self.state {
            State::AskAt(at) => at,
            State::Listening { heard, .. } => heard + timing.silence,
            State::Ended => self.deadline,
        };
        next.min(self.deadline)
    }

    pub(super) fn is_over(&self) -> bool {
        self.state == State::Ended && self.inbox.is_empty()
    }

    /// Tells whether no request was answered at all.
    pub(super) const fn was_mute(&self) -> bool {
        !self.heard_any
    }

    /// Returns why the engine's life must be taken for another one, when a check ended without a proof.
    pub(super) fn unconfirmed(&self) -> Option<&'static str> {
        self.anchor.map(|_| {
            "the engine may have restarted: after a new connection its replay endpoint did not answer"
        })
    }

    /// Returns the last sequence that the replay brought.
    pub(super) fn last_brought(&self) -> Option<u64> {
        self.brought_any.then(|| self.next - 1)
    }

    pub(super) const fn started_at(&self) -> u64 {
        self.start
    }

    const fn listen(&mut self, now: Instant) {
        self.state = State::Listening {
            heard: now,
            empty: now,
        };
    }

    fn on_anchor(&mut self, batch: &BatchFrame<'_>, gate: &Gate) -> Step {
        let Some(anchor) = self.anchor else {
            return Step::Continue;
        };
        if batch.sequence < anchor {
            return Step::Continue;
        }
        if batch.sequence > anchor {
            return Step::OtherLife(
                "the engine's life is unknown: after a new connection the last batch of before is gone",
            );
        }
        if gate.is_known_batch(batch.sequence, batch.payload) != Some(true) {
            return Step::OtherLife(
                "the engine restarted: after a new connection the last batch has other content",
            );
        }
        self.anchor = None;
        self.next = anchor + 1;
        self.start = self.next;
        self.fresh = false;
        Step::Continue
    }

    fn on_batch(
        &mut self,
        batch: &BatchFrame<'_>,
        limits: &Limits,
        now: Instant,
        budget: &mut Budget,
    ) {
        if batch.sequence < self.next {
            return;
        }
        // An answer may begin late, since the engine keeps only its last batches. A jump later on means that the engine
        // dropped messages which did not fit its send queue: those it still has.
        let torn = batch.sequence > self.next && !self.fresh;
        if torn && self.asks < limits.asks {
            self.state = State::AskAt(now);
            return;
        }
        self.inbox.push(batch, budget);
        self.fresh = false;
        self.brought_any = true;
        self.next = batch.sequence + 1;
    }

    fn on_silence(&mut self, limits: &Limits, first_held: Option<u64>, now: Instant) {
        let reaches_live =
            self.anchor.is_none() && first_held.is_some_and(|first| first <= self.next);
        let allowed = if self.heard_any {
            limits.asks
        } else {
            limits.unanswered_asks
        };
        self.state = if reaches_live || self.asks >= allowed {
            State::Ended
        } else {
            State::AskAt(now)
        };
    }
}
