//! What to do with one stream's messages, without any I/O: order, gaps, replays, restarts.
//!
//! A follower is told what arrived and what time it is; [`Follower::advance`] applies what is due and says whether to
//! send a replay request. Connections are the caller's: it makes a new socket for each, so nothing of an earlier one can
//! arrive after [`Follower::on_connected`].

use std::time::Instant;

use super::frames::{BatchFrame, ReplayFrame};
use super::gate::Gate;
use super::options::{Budget, Limits, Options, Timing};
use super::queue::BatchQueue;
use super::replay::{Purpose, Replay, Step};

/// Counts of one stream since it was followed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) batches: u64,
    pub(super) duplicate_batches: u64,
    pub(super) refused_batches: u64,
    pub(super) bad_frames: u64,
    pub(super) other_topic_frames: u64,
    pub(super) gaps: u64,
    pub(super) unrepaired_gaps: u64,
    pub(super) replays: u64,
    pub(super) replay_batches: u64,
    pub(super) held_back_dropped: u64,
    pub(super) restarts: u64,
    pub(super) reconnects: u64,
}

/// What the caller should do with the replay socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Nothing,
    /// Ask for all batches from this sequence on, through a new socket.
    Ask(u64),
}

pub(super) struct Follower {
    gate: Gate,
    timing: Timing,
    limits: Limits,
    has_replay: bool,
    phase: Phase,
    /// Live batches that must wait for a replay, or for those before them.
    held: BatchQueue,
    /// Live batches up to here may repeat what the last replay brought.
    overlap_end: Option<u64>,
    /// A hole that begins here is known to be gone from the engine's buffer.
    unrepairable: Option<u64>,
    /// Last batch that the sink refused, so that it is not taken for lost.
    refused: Option<u64>,
    /// When the next replay may begin.
    replay_allowed: Instant,
    /// When to look for a lost tail.
    verify_at: Option<Instant>,
    was_connected: bool,
    pub(super) counters: Counters,
}

enum Phase {
    Offline,
    Live,
    Replaying(Replay),
}

enum Verdict {
    Done,
    /// The batch must wait for the replay that was just begun.
    Wait,
}

impl Follower {
    pub(super) fn new(gate: Gate, has_replay: bool, options: &Options, now: Instant) -> Self {
        Self {
            gate,
            timing: options.timing.clone(),
            limits: options.limits.clone(),
            has_replay,
            phase: Phase::Offline,
            held: BatchQueue::default(),
            overlap_end: None,
            unrepairable: None,
            refused: None,
            replay_allowed: now,
            verify_at: None,
            was_connected: false,
            counters: Counters::default(),
        }
    }

    pub(super) const fn gate(&self) -> &Gate {
        &self.gate
    }

    /// The subscription's handshake succeeded. What came before may be of another life of the engine.
    pub(super) fn on_connected(&mut self, now: Instant, budget: &mut Budget) {
        self.drop_queues(budget);
        if std::mem::replace(&mut self.was_connected, true) && self.expected().is_none() {
            // There is no batch to compare with, and what was placed there may have gone with the process.
            self.forget("the connection was lost before any event", now);
        }
        self.phase = Phase::Live;
        self.overlap_end = None;
        self.unrepairable = None;
        self.refused = None;
        self.replay_allowed = now + self.timing.settle;
        if self.has_replay {
            // The last applied batch is asked for again: the same life has it under the same number.
            let purpose = match self.expected().and_then(|next| next.checked_sub(1)) {
                Some(anchor) => Purpose::Check { anchor },
                None => Purpose::Rebuild,
            };
            self.begin(purpose, now);
        }
    }

    pub(super) fn on_disconnected(&mut self, budget: &mut Budget) {
        self.drop_queues(budget);
        self.phase = Phase::Offline;
        self.verify_at = None;
    }

    pub(super) fn on_live(&mut self, batch: &BatchFrame<'_>, now: Instant, budget: &mut Budget) {
        if self.verify_at.is_some() {
            self.verify_at = Some(now + self.timing.quiet);
        }
        let waiting = matches!(self.phase, Phase::Replaying(_)) || !self.held.is_empty();
        if waiting || matches!(self.apply_live(batch, now), Verdict::Wait) {
            self.hold(batch, now, budget);
        }
    }

    pub(super) fn on_replay(&mut self, frame: &ReplayFrame<'_>, now: Instant, budget: &mut Budget) {
        let Phase::Replaying(replay) = &mut self.phase else {
            return;
        };
        match replay.on_frame(frame, &self.gate, &self.limits, now, budget) {
            Step::Continue => {}
            Step::OtherLife(cause) => self.restart(cause, now, budget),
        }
    }

    /// Live batches queue up, so the publisher may be dropping some. Should those be the last, no later one shows it.
    pub(super) fn on_backlog(&mut self, now: Instant) {
        if self.has_replay {
            self.verify_at = Some(now + self.timing.quiet);
        }
    }

    /// The replay socket had nothing.
    pub(super) const fn on_replay_empty(&mut self, now: Instant) {
        if let Phase::Replaying(replay) = &mut self.phase {
            replay.on_empty(now);
        }
    }

    /// Tells whether the replay socket should be read: not while what it brought fills the memory.
    pub(super) fn wants_replay(&self, budget: &Budget) -> bool {
        matches!(&self.phase, Phase::Replaying(replay) if replay.wants_frames(budget))
    }

    /// Tells whether the replay socket is still of use.
    pub(super) fn is_listening(&self) -> bool {
        matches!(&self.phase, Phase::Replaying(replay) if replay.is_listening())
    }

    /// Applies up to `batches` waiting batches and checks deadlines.
    pub(super) fn advance(&mut self, batches: usize, now: Instant, budget: &mut Budget) -> Action {
        match &mut self.phase {
            Phase::Offline => Action::Nothing,
            Phase::Live => {
                self.apply_held(batches, now, budget);
                if self.verify_at.is_some_and(|at| at <= now) && self.held.is_empty() {
                    self.verify_at = None;
                    if self.can_replay(now) {
                        self.begin_repair(now);
                    }
                }
                Action::Nothing
            }
            Phase::Replaying(_) => self.advance_replay(batches, now, budget),
        }
    }

    /// Tells whether [`advance`](Self::advance) has something to apply at once.
    pub(super) fn has_work(&self) -> bool {
        match &self.phase {
            Phase::Offline => false,
            Phase::Live => !self.held.is_empty(),
            Phase::Replaying(replay) => replay.has_work(),
        }
    }

    /// Returns when [`advance`](Self::advance) should be called even if nothing arrives.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Offline => None,
            Phase::Live => self.verify_at,
            Phase::Replaying(replay) => Some(replay.next_deadline(&self.timing)),
        }
    }

    /// Gives back what the stream keeps in memory; it is not used afterwards.
    pub(super) fn close(&mut self, budget: &mut Budget) {
        self.on_disconnected(budget);
    }

    fn advance_replay(&mut self, batches: usize, now: Instant, budget: &mut Budget) -> Action {
        let mut replay = match std::mem::replace(&mut self.phase, Phase::Live) {
            Phase::Replaying(replay) => replay,
            other @ (Phase::Offline | Phase::Live) => {
                self.phase = other;
                return Action::Nothing;
            }
        };
        for _ in 0..batches {
            let Some(batch) = replay.inbox.pop(budget) else {
                break;
            };
            self.apply_replayed(batch.sequence, &batch.payload, now);
        }
        let asked = replay.advance(&self.timing, &self.limits, self.held.first_sequence(), now);
        if replay.is_over() {
            self.finish(&replay, now, budget);
            return Action::Nothing;
        }
        self.phase = Phase::Replaying(replay);
        asked.map_or(Action::Nothing, Action::Ask)
    }

    fn finish(&mut self, replay: &Replay, now: Instant, budget: &mut Budget) {
        self.phase = Phase::Live;
        self.replay_allowed = now + self.timing.cooldown;
        if replay.was_mute() {
            self.replay_allowed = now + self.timing.mute;
        }
        if let Some(cause) = replay.unconfirmed() {
            self.restart(cause, now, budget);
            return;
        }
        self.overlap_end = replay.last_brought().or(self.overlap_end);
        // Published batches lie behind the hole, and still the answer did not fill it: asking again is of no use.
        if let (Some(next), Some(first)) = (self.expected(), self.held.first_sequence())
            && first > next
            && (replay.was_mute() || replay.started_at() == next)
        {
            self.unrepairable = Some(next);
        }
    }

    fn apply_held(&mut self, batches: usize, now: Instant, budget: &mut Budget) {
        for _ in 0..batches {
            let Some(batch) = self.held.pop(budget) else {
                break;
            };
            let frame = BatchFrame {
                sequence: batch.sequence,
                payload: &batch.payload,
            };
            if matches!(self.apply_live(&frame, now), Verdict::Wait) {
                self.held.put_back(batch, budget);
                break;
            }
        }
    }

    fn apply_live(&mut self, batch: &BatchFrame<'_>, now: Instant) -> Verdict {
        match self.expected() {
            Some(next) if batch.sequence > next => self.apply_after_gap(next, batch, now),
            Some(next) if batch.sequence < next => self.apply_old(batch, now),
            _ => {
                self.ingest(batch.sequence, batch.payload, now);
                Verdict::Done
            }
        }
    }

    fn apply_after_gap(&mut self, next: u64, batch: &BatchFrame<'_>, now: Instant) -> Verdict {
        let known = self.unrepairable == Some(next);
        if !known {
            self.counters.gaps += 1;
        }
        if self.has_replay {
            self.verify_at = Some(now + self.timing.quiet);
        }
        if !known && self.can_replay(now) {
            self.begin_repair(now);
            return Verdict::Wait;
        }
        self.counters.unrepaired_gaps += 1;
        self.ingest(batch.sequence, batch.payload, now);
        Verdict::Done
    }

    /// A number below the expected one: a repetition, or an engine that restarted behind our back.
    fn apply_old(&mut self, batch: &BatchFrame<'_>, now: Instant) -> Verdict {
        let known = self.gate.is_known_batch(batch.sequence, batch.payload);
        let overlap = self.overlap_end.is_some_and(|end| batch.sequence <= end);
        if known == Some(true) || (known.is_none() && overlap) {
            self.counters.duplicate_batches += 1;
            return Verdict::Done;
        }
        self.forget(
            "the engine restarted: its sequence went backwards without a new connection",
            now,
        );
        if self.can_replay(now) {
            self.begin(Purpose::Rebuild, now);
            return Verdict::Wait;
        }
        self.ingest(batch.sequence, batch.payload, now);
        Verdict::Done
    }

    fn apply_replayed(&mut self, sequence: u64, payload: &[u8], now: Instant) {
        let expected = self.expected();
        if expected.is_some_and(|next| sequence < next) {
            return;
        }
        if expected.is_some_and(|next| sequence > next) {
            self.counters.unrepaired_gaps += 1;
        }
        self.counters.replay_batches += 1;
        self.ingest(sequence, payload, now);
    }

    fn ingest(&mut self, sequence: u64, payload: &[u8], now: Instant) {
        self.counters.batches += 1;
        if !self.gate.ingest(sequence, payload, now) {
            self.counters.refused_batches += 1;
            self.refused = Some(sequence);
        }
        if self.overlap_end.is_some_and(|end| sequence > end) {
            self.overlap_end = None;
        }
    }

    /// Returns the sequence that would be contiguous, counting refused batches as seen.
    fn expected(&self) -> Option<u64> {
        let next = self.gate.next_sequence()?;
        Some(self.refused.map_or(next, |refused| next.max(refused + 1)))
    }

    fn hold(&mut self, batch: &BatchFrame<'_>, now: Instant, budget: &mut Budget) {
        if self.held.has_room(batch.payload.len(), budget) {
            self.held.push(batch, budget);
        } else {
            self.counters.held_back_dropped += 1;
            self.verify_at = Some(now + self.timing.quiet);
        }
    }

    fn restart(&mut self, cause: &str, now: Instant, budget: &mut Budget) {
        if let Phase::Replaying(replay) = &mut self.phase {
            replay.inbox.clear(budget);
        }
        self.phase = Phase::Live;
        self.forget(cause, now);
        if self.can_replay(now) {
            self.replay_allowed = now;
            self.begin(Purpose::Rebuild, now);
        }
    }

    fn forget(&mut self, cause: &str, now: Instant) {
        self.gate.restart_stream(cause, now);
        self.counters.restarts += 1;
        self.overlap_end = None;
        self.unrepairable = None;
        self.refused = None;
    }

    /// Tells whether a replay may be of use soon: an endpoint that proved to be mute would only delay live batches.
    fn can_replay(&self, now: Instant) -> bool {
        self.has_replay && self.replay_allowed <= now + self.timing.cooldown.max(self.timing.settle)
    }

    fn begin_repair(&mut self, now: Instant) {
        if let Some(from) = self.expected() {
            self.begin(Purpose::Repair { from }, now);
        }
    }

    fn begin(&mut self, purpose: Purpose, now: Instant) {
        self.counters.replays += 1;
        let at = self.replay_allowed.max(now);
        self.phase = Phase::Replaying(Replay::new(purpose, at, &self.timing));
    }

    fn drop_queues(&mut self, budget: &mut Budget) {
        self.held.clear(budget);
        if let Phase::Replaying(replay) = &mut self.phase {
            replay.inbox.clear(budget);
        }
    }
}
