//! The state machine, driven by hand with a clock of its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::follower::{Action, Follower};
use super::super::frames::{BatchFrame, ReplayFrame};
use super::super::gate::{Gate, Life};
use super::super::options::{Budget, Options};
use super::{FakeSink, Seen, batches, fake, payload, quick};
use crate::ids::{WorkerId, WorkerRank};

struct Bench {
    sink: Arc<FakeSink>,
    life: Arc<Life>,
    follower: Follower,
    budget: Budget,
    options: Options,
    now: Instant,
}

impl Bench {
    fn new(has_replay: bool) -> Self {
        Self::with(has_replay, quick())
    }

    fn with(has_replay: bool, options: Options) -> Self {
        let now = super::now();
        let sink = fake();
        let life = Arc::new(Life::new());
        let target = WorkerRank {
            worker: WorkerId::new("w").unwrap(),
            dp_rank: 0,
        };
        let gate = Gate::new(sink.clone(), target, life.clone());
        let follower = Follower::new(gate, has_replay, &options, now);
        Self {
            sink,
            life,
            follower,
            budget: Budget::new(options.limits.held_bytes),
            options,
            now,
        }
    }

    /// A stream whose first replay brought batches 0 to `count - 1`.
    fn established(count: u64) -> Self {
        let mut bench = Self::new(true);
        bench.connect();
        assert_eq!(bench.due(), Action::Ask(0));
        bench.answer("a", 0..count);
        bench
    }

    fn connect(&mut self) {
        self.follower.on_connected(self.now, &mut self.budget);
    }

    fn disconnect(&mut self) {
        self.follower.on_disconnected(&mut self.budget);
    }

    fn live(&mut self, life: &str, sequence: u64) {
        let payload = &payload(life, sequence);
        let batch = BatchFrame { sequence, payload };
        self.follower.on_live(&batch, self.now, &mut self.budget);
    }

    fn replayed(&mut self, life: &str, sequence: u64) {
        let payload = &payload(life, sequence);
        let frame = ReplayFrame::Batch(BatchFrame { sequence, payload });
        self.follower.on_replay(&frame, self.now, &mut self.budget);
    }

    fn end(&mut self) {
        self.follower
            .on_replay(&ReplayFrame::End, self.now, &mut self.budget);
    }

    fn answer(&mut self, life: &str, sequences: impl IntoIterator<Item = u64>) {
        for sequence in sequences {
            self.replayed(life, sequence);
        }
        self.end();
        self.settle();
    }

    /// Advances without letting time pass, until nothing is left to apply.
    fn settle(&mut self) -> Action {
        loop {
            let action = self.follower.advance(7, self.now, &mut self.budget);
            if action != Action::Nothing || !self.follower.has_work() {
                return action;
            }
        }
    }

    /// Lets time pass up to the next deadline, and on until there is something to do.
    fn due(&mut self) -> Action {
        for _ in 0..4 {
            let Some(at) = self.follower.next_deadline() else {
                return Action::Nothing;
            };
            self.now = self.now.max(at);
            self.follower.on_replay_empty(self.now);
            let action = self.settle();
            if action != Action::Nothing {
                return action;
            }
        }
        Action::Nothing
    }

    fn seen(&self) -> Seen {
        self.sink.seen("w")
    }
}

#[test]
fn without_replay_live_batches_are_applied_at_once() {
    let mut bench = Bench::new(false);
    bench.connect();
    for sequence in 5..8 {
        bench.live("a", sequence);
    }
    assert_eq!(bench.seen().sequences(), [5, 6, 7]);
    assert_eq!(bench.due(), Action::Nothing);
}

#[test]
fn live_batches_wait_for_the_replay_and_repetitions_are_dropped() {
    let mut bench = Bench::new(true);
    bench.connect();
    bench.live("a", 2);
    bench.live("a", 3);
    bench.live("a", 4);
    assert_eq!(bench.due(), Action::Ask(0));
    assert!(bench.seen().applied.is_empty());
    bench.answer("a", 0..4);
    assert_eq!(bench.seen().applied, batches("a", 0..5));
    // A live copy of what the replay brought may still be under way.
    bench.live("a", 4);
    bench.live("a", 5);
    assert_eq!(bench.seen().applied, batches("a", 0..6));
    assert_eq!(bench.follower.counters.duplicate_batches, 3);
    assert!(bench.seen().restarts.is_empty());
    assert_eq!(bench.budget.used(), 0);
}

#[test]
fn a_gap_is_filled_before_what_came_after_it() {
    let mut bench = Bench::established(3);
    bench.live("a", 6);
    bench.live("a", 7);
    assert_eq!(bench.seen().sequences(), [0, 1, 2]);
    assert_eq!(bench.due(), Action::Ask(3));
    bench.answer("a", 3..7);
    assert_eq!(bench.seen().applied, batches("a", 0..8));
    assert_eq!(bench.seen().holes, 0);
    assert_eq!(
        (
            bench.follower.counters.gaps,
            bench.follower.counters.unrepaired_gaps
        ),
        (1, 0)
    );
}

#[test]
fn a_hole_that_no_replay_fills_is_handed_on_once() {
    let mut bench = Bench::established(3);
    bench.live("a", 6);
    assert_eq!(bench.due(), Action::Ask(3));
    bench.answer("a", []);
    assert_eq!(bench.seen().sequences(), [0, 1, 2, 6]);
    bench.live("a", 7);
    assert_eq!(bench.seen().sequences(), [0, 1, 2, 6, 7]);
    assert_eq!(bench.seen().holes, 1);
    assert_eq!(bench.follower.counters.gaps, 1);
    assert_eq!(bench.follower.counters.unrepaired_gaps, 1);
}

#[test]
fn a_late_beginning_of_the_answer_is_a_hole_and_the_rest_is_kept() {
    let mut bench = Bench::established(3);
    bench.live("a", 20);
    assert_eq!(bench.due(), Action::Ask(3));
    bench.answer("a", 10..20);
    assert_eq!(
        bench.seen().sequences(),
        (0..3).chain(10..21).collect::<Vec<_>>()
    );
    assert_eq!(bench.seen().holes, 1);
}

#[test]
fn a_jump_inside_an_answer_is_asked_for_again() {
    let mut bench = Bench::new(true);
    bench.connect();
    assert_eq!(bench.due(), Action::Ask(0));
    bench.replayed("a", 0);
    bench.replayed("a", 1);
    bench.replayed("a", 4);
    assert_eq!(bench.settle(), Action::Ask(2));
    bench.answer("a", 2..6);
    assert_eq!(bench.seen().applied, batches("a", 0..6));
    assert_eq!(bench.seen().holes, 0);
}

#[test]
fn numbers_that_are_nowhere_do_not_make_it_ask_for_ever() {
    let mut bench = Bench::new(true);
    bench.connect();
    assert_eq!(bench.due(), Action::Ask(0));
    let mut asks = 1;
    for _ in 0..100 {
        for sequence in (0..40).filter(|sequence| sequence % 2 == 1) {
            bench.replayed("a", sequence);
        }
        bench.end();
        if bench.settle() == Action::Nothing {
            break;
        }
        asks += 1;
    }
    assert_eq!(asks, bench.options.limits.asks);
    let odd: Vec<u64> = (0..40).filter(|sequence| sequence % 2 == 1).collect();
    assert_eq!(bench.seen().sequences(), odd);
}

#[test]
fn silence_is_asked_again_from_where_it_began_until_live_is_reached() {
    let mut bench = Bench::new(true);
    bench.connect();
    assert_eq!(bench.due(), Action::Ask(0));
    bench.replayed("a", 0);
    bench.replayed("a", 1);
    assert_eq!(bench.settle(), Action::Nothing);
    assert_eq!(bench.due(), Action::Ask(2));
    bench.live("a", 4);
    bench.replayed("a", 2);
    bench.replayed("a", 3);
    bench.settle();
    // No end marker, but the next one is there already.
    assert_eq!(bench.due(), Action::Nothing);
    assert_eq!(bench.seen().applied, batches("a", 0..5));
}

#[test]
fn the_tail_of_a_backlog_is_asked_for_when_it_is_over() {
    let mut bench = Bench::established(3);
    bench.follower.on_backlog(bench.now);
    bench.live("a", 3);
    assert_eq!(bench.due(), Action::Ask(4));
    bench.answer("a", 4..6);
    assert_eq!(bench.seen().applied, batches("a", 0..6));
    assert_eq!(bench.due(), Action::Nothing);
}

#[test]
fn a_busy_thread_is_not_taken_for_a_silent_engine() {
    let mut bench = Bench::new(true);
    bench.connect();
    assert_eq!(bench.due(), Action::Ask(0));
    // Time passes, but nobody has looked whether something came.
    bench.now += bench.options.timing.silence * 3;
    assert_eq!(bench.settle(), Action::Nothing);
    bench.follower.on_replay_empty(bench.now);
    assert_eq!(bench.settle(), Action::Nothing);
    assert_eq!(bench.due(), Action::Ask(0));
}

#[test]
fn a_mute_replay_endpoint_delays_live_batches_once() {
    let mut bench = Bench::new(true);
    bench.connect();
    let started = bench.now;
    bench.live("a", 5);
    for _ in 0..bench.options.limits.unanswered_asks {
        assert_eq!(bench.due(), Action::Ask(0));
    }
    bench.due();
    assert_eq!(bench.seen().sequences(), [5]);
    assert!(bench.now - started < Duration::from_secs(2));
    bench.live("a", 9);
    assert_eq!(bench.seen().sequences(), [5, 9]);
}

#[test]
fn the_same_life_goes_on_after_a_new_connection() {
    let mut bench = Bench::established(3);
    bench.disconnect();
    bench.connect();
    bench.live("a", 5);
    assert_eq!(bench.due(), Action::Ask(2));
    bench.answer("a", 2..5);
    assert_eq!(bench.seen().applied, batches("a", 0..6));
    assert!(bench.seen().restarts.is_empty());
}

#[test]
fn another_life_after_a_new_connection_starts_over() {
    // Fewer batches than before, other content under the number, and the number gone: none proves the same life.
    for (have, cause) in [
        (0..1, "fewer batches"),
        (0..9, "other content"),
        (5..9, "is gone"),
    ] {
        let mut bench = Bench::established(3);
        bench.disconnect();
        bench.connect();
        assert_eq!(bench.due(), Action::Ask(2));
        bench.answer("b", have.clone().filter(|&sequence| sequence >= 2));
        assert_eq!(bench.due(), Action::Ask(0));
        bench.answer("b", have.clone());
        bench.live("b", have.end);
        let seen = bench.seen();
        assert_eq!(seen.applied, batches("b", have.start..=have.end));
        assert_eq!(seen.restarts.len(), 1);
        assert!(seen.restarts[0].contains(cause), "{:?}", seen.restarts);
    }
}

#[test]
fn without_an_answer_after_a_new_connection_nothing_is_trusted() {
    let mut bench = Bench::established(3);
    bench.disconnect();
    bench.connect();
    bench.live("b", 3);
    for _ in 0..bench.options.limits.unanswered_asks {
        assert_eq!(bench.due(), Action::Ask(2));
    }
    bench.due();
    assert_eq!(bench.seen().applied, batches("b", [3]));
    assert!(bench.seen().restarts[0].contains("did not answer"));
}

#[test]
fn a_restart_behind_our_back_starts_over() {
    let mut bench = Bench::established(3);
    bench.live("b", 1);
    bench.live("b", 2);
    assert_eq!(bench.due(), Action::Ask(0));
    bench.answer("b", 0..2);
    assert_eq!(bench.seen().applied, batches("b", 0..3));
    assert_eq!(bench.seen().restarts.len(), 1);
    assert!(bench.seen().restarts[0].contains("backwards"));

    let mut bench = Bench::new(false);
    bench.connect();
    bench.live("a", 8);
    bench.live("a", 8);
    bench.live("b", 0);
    assert_eq!(bench.seen().applied, batches("b", [0]));
    assert_eq!(bench.follower.counters.duplicate_batches, 1);
}

#[test]
fn what_is_held_back_is_bounded_and_dropped_batches_come_by_replay() {
    let mut options = quick();
    options.limits.held_bytes = 2_000;
    let mut bench = Bench::with(true, options);
    bench.connect();
    assert_eq!(bench.due(), Action::Ask(0));
    for sequence in 1..100 {
        bench.live("a", sequence);
        assert!(bench.budget.used() <= 2_000);
    }
    assert!(bench.follower.counters.held_back_dropped > 80);
    bench.answer("a", 0..1);
    // Nothing comes any more that would show the loss: after a quiet time the rest is asked for.
    let Action::Ask(from) = bench.due() else {
        panic!("the dropped batches were not asked for");
    };
    assert!(from < 20);
    for sequence in from..100 {
        bench.replayed("a", sequence);
        bench.settle();
    }
    bench.end();
    bench.settle();
    assert_eq!(bench.seen().applied, batches("a", 0..100));
    assert_eq!(bench.seen().holes, 0);
}

#[test]
fn a_refused_batch_is_not_taken_for_a_lost_one() {
    let mut bench = Bench::established(3);
    let refused = BatchFrame {
        sequence: 3,
        payload: b"refuse",
    };
    bench
        .follower
        .on_live(&refused, bench.now, &mut bench.budget);
    bench.live("a", 4);
    assert_eq!(bench.seen().sequences(), [0, 1, 2, 4]);
    assert_eq!(bench.follower.counters.refused_batches, 1);
    assert_eq!(bench.follower.counters.gaps, 0);
}

#[test]
fn nothing_of_an_ended_life_reaches_the_sink() {
    let mut bench = Bench::established(3);
    bench.life.end();
    bench.live("a", 3);
    bench.live("b", 0);
    bench.disconnect();
    bench.connect();
    bench.due();
    assert_eq!(bench.seen().applied, batches("a", 0..3));
    assert!(bench.seen().restarts.is_empty());
}
