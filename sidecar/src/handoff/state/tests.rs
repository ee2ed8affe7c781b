use proptest::prelude::*;

use super::*;

const LEASE: Duration = Duration::from_secs(30);
const VALID: Duration = Duration::from_secs(20);

/// Everything that can happen, for enumeration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Happening {
    Admitted,
    HandedOver,
    NothingHandedOver,
    PrefillFailed(Failure),
    DecodeStarted,
    DecodeEnded,
    DecodeFailed(Failure),
    /// A late word of the first request to the decode worker.
    LateStart,
    LateFailure,
    ClientLeft,
    /// It leaves, and the prefill leg's answer is there as well.
    LeftBehind,
    /// What was handed over gets too old.
    Expiry,
}

const HAPPENINGS: [Happening; 16] = [
    Happening::Admitted,
    Happening::HandedOver,
    Happening::NothingHandedOver,
    Happening::PrefillFailed(Failure::Rejected),
    Happening::PrefillFailed(Failure::Failed),
    Happening::PrefillFailed(Failure::Unreachable),
    Happening::DecodeStarted,
    Happening::DecodeEnded,
    Happening::DecodeFailed(Failure::Rejected),
    Happening::DecodeFailed(Failure::Failed),
    Happening::DecodeFailed(Failure::Unreachable),
    Happening::LateStart,
    Happening::LateFailure,
    Happening::ClientLeft,
    Happening::LeftBehind,
    Happening::Expiry,
];

/// A handoff with a driver that believes nothing: it keeps its own account of legs, tickets and answers.
struct Watch {
    handoff: Handoff,
    now: Instant,
    name: u64,
    prefill_runs: bool,
    decode: Option<Attempt>,
    latest: Attempt,
    streamed: bool,
    tickets_used: u32,
    locals: u32,
    answers: Vec<Answer>,
    client_left: bool,
}

impl Watch {
    fn new(order: LegOrder, may_fall_back: bool) -> Self {
        let rules = HandoffRules {
            order,
            may_fall_back,
            lease: LEASE,
        };
        let now = Instant::now();
        let name = 7;
        let (handoff, actions) = match order {
            LegOrder::Sequential => Handoff::sequential(rules),
            LegOrder::Concurrent => (Handoff::concurrent(rules, ticket(name, now)), Vec::new()),
        };
        let mut watch = Self {
            handoff,
            now,
            name,
            prefill_runs: false,
            decode: None,
            latest: Attempt(0),
            streamed: false,
            tickets_used: 0,
            locals: 0,
            answers: Vec::new(),
            client_left: false,
        };
        watch.carry_out(actions);
        watch
    }

    fn happen(&mut self, happening: Happening) {
        let event = match happening {
            Happening::Admitted => Event::Admitted,
            Happening::HandedOver => Event::PrefillAnswered(Some(ticket(self.name, self.now))),
            Happening::NothingHandedOver => Event::PrefillAnswered(None),
            Happening::PrefillFailed(failure) => Event::PrefillFailed(failure),
            Happening::DecodeStarted => Event::DecodeStarted(self.latest),
            Happening::DecodeEnded => Event::DecodeEnded(self.latest),
            Happening::DecodeFailed(failure) => Event::DecodeFailed(self.latest, failure),
            Happening::LateStart => Event::DecodeStarted(Attempt(1)),
            Happening::LateFailure => Event::DecodeFailed(Attempt(1), Failure::Failed),
            Happening::ClientLeft => Event::ClientLeft,
            Happening::LeftBehind => Event::LeftBehind(Some(ticket(self.name, self.now))),
            Happening::Expiry => {
                self.now += VALID;
                Event::Tick
            }
        };
        self.account(&event);
        let was_open = self.handoff.is_open();
        let actions = self.handoff.on(event, self.now);
        assert!(was_open || actions.is_empty(), "a closed handoff acts");
        self.carry_out(actions);
        self.check();
    }

    fn account(&mut self, event: &Event) {
        match event {
            Event::PrefillAnswered(_) | Event::PrefillFailed(_) => self.prefill_runs = false,
            Event::DecodeStarted(attempt) if self.decode == Some(*attempt) => self.streamed = true,
            Event::DecodeEnded(attempt) | Event::DecodeFailed(attempt, _)
                if self.decode == Some(*attempt) =>
            {
                self.decode = None;
            }
            Event::LeftBehind(_) if self.handoff.outcome().is_none() => {
                self.client_left = true;
                self.prefill_runs = false;
            }
            Event::ClientLeft if self.handoff.outcome().is_none() => self.client_left = true,
            _ => {}
        }
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::SendPrefill => self.prefill_runs = true,
                Action::SendDecode(attempt, ticket) => self.send_with(attempt, ticket),
                Action::SendBoth(attempt, ticket) => {
                    self.prefill_runs = true;
                    self.send_with(attempt, ticket);
                }
                Action::SendLocal(attempt, _) => {
                    self.locals += 1;
                    assert!(!self.client_left && self.answers.is_empty());
                    self.send(attempt);
                }
                Action::Collect(attempt, ticket) => {
                    assert!(self.client_left);
                    self.use_up(ticket);
                    self.send(attempt);
                }
                Action::CancelPrefill => {
                    assert!(self.prefill_runs, "cancels a prefill that does not run");
                    self.prefill_runs = false;
                }
                Action::CancelDecode(attempt) => {
                    assert_eq!(self.decode, Some(attempt), "cancels another decode");
                    self.decode = None;
                }
                Action::Answer(answer) => {
                    assert!(!self.client_left, "answers a client that has left");
                    assert_eq!(answer == Answer::BrokenStream, self.streamed);
                    self.answers.push(answer);
                }
            }
        }
    }

    fn send_with(&mut self, attempt: Attempt, ticket: Ticket) {
        assert!(!self.client_left && self.answers.is_empty());
        self.use_up(ticket);
        self.send(attempt);
    }

    fn use_up(&mut self, ticket: Ticket) {
        self.tickets_used += 1;
        let parameters = ticket.redeem(self.now).expect("an expired ticket is sent");
        assert_eq!(parameters["name"], self.name, "a foreign ticket is sent");
    }

    fn send(&mut self, attempt: Attempt) {
        assert_eq!(self.decode, None, "two decodes at once");
        assert!(attempt > self.latest);
        (self.decode, self.latest, self.streamed) = (Some(attempt), attempt, false);
    }

    fn check(&self) {
        assert!(self.tickets_used <= 1, "a ticket is used twice");
        assert!(self.locals <= 1, "falls back twice");
        assert!(self.answers.len() <= 1, "{:?}", self.answers);
        if !self.handoff.is_open() {
            assert!(
                !self.prefill_runs && self.decode.is_none(),
                "closed with a leg that runs"
            );
            assert!(self.handoff.outcome().is_some());
        }
        let outcome = self.handoff.outcome();
        assert_eq!(outcome == Some(Outcome::Left), self.client_left);
        let answered = matches!(outcome, Some(Outcome::Answered(_)));
        assert_eq!(answered, !self.answers.is_empty());
    }

    /// Lets everything that runs end, and time pass: it must end for the client as well.
    fn run_out(&mut self) {
        self.happen(Happening::Admitted);
        for _ in 0..4 {
            if self.prefill_runs {
                self.happen(Happening::PrefillFailed(Failure::Failed));
            }
            if self.decode.is_some() {
                self.happen(Happening::DecodeEnded);
            }
        }
        assert!(self.handoff.outcome().is_some(), "ends without an answer");
        self.close();
    }

    /// Lets the client leave.
    fn leave(&mut self) {
        self.happen(Happening::ClientLeft);
        assert!(!self.prefill_runs, "the prefill of nobody goes on");
        self.happen(Happening::Admitted);
        if self.decode.is_some() {
            self.happen(Happening::DecodeFailed(Failure::Failed));
        }
        self.close();
    }

    fn close(&mut self) {
        while let Some(deadline) = self.handoff.next_deadline() {
            assert!(deadline > self.now, "a deadline stays");
            self.now = deadline;
            let actions = self.handoff.on(Event::Tick, self.now);
            self.carry_out(actions);
        }
        assert!(!self.handoff.is_open(), "stays open: {:?}", self.handoff);
    }
}

fn ticket(name: u64, now: Instant) -> Ticket {
    Ticket::new(serde_json::json!({"name": name}), now, VALID)
}

fn every_kind() -> impl Iterator<Item = (LegOrder, bool)> {
    [LegOrder::Sequential, LegOrder::Concurrent]
        .into_iter()
        .flat_map(|order| [(order, true), (order, false)])
}

/// Every order of five happenings of a sequential handoff with a fallback, and of four of the other kinds, each with both
/// ends: (16^5 + 3 × 16^4) × 2 = 2.5 million handoffs.
#[test]
fn every_interleaving_keeps_the_rules() {
    let kinds = HAPPENINGS.len();
    for (order, may_fall_back) in every_kind() {
        let richest = order == LegOrder::Sequential && may_fall_back;
        let depth = if richest { 5 } else { 4 };
        for number in 0..kinds.pow(depth) {
            for leaves in [false, true] {
                let mut watch = Watch::new(order, may_fall_back);
                let mut rest = number;
                for _ in 0..depth {
                    watch.happen(HAPPENINGS[rest % kinds]);
                    rest /= kinds;
                }
                if leaves {
                    watch.leave();
                } else {
                    watch.run_out();
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn random_interleavings_keep_the_rules(
        happenings in prop::collection::vec(prop::sample::select(HAPPENINGS.to_vec()), 0..30),
        concurrent: bool,
        may_fall_back: bool,
        leaves: bool,
    ) {
        let order = if concurrent { LegOrder::Concurrent } else { LegOrder::Sequential };
        let mut watch = Watch::new(order, may_fall_back);
        for happening in happenings {
            watch.happen(happening);
        }
        if leaves {
            watch.leave();
        } else {
            watch.run_out();
        }
    }
}

fn sequential() -> Watch {
    Watch::new(LegOrder::Sequential, true)
}

fn play(watch: &mut Watch, happenings: &[Happening]) {
    for happening in happenings {
        watch.happen(*happening);
    }
}

#[test]
fn a_sequential_handoff_ends_with_both_legs() {
    let mut watch = sequential();
    play(&mut watch, &[Happening::Admitted, Happening::HandedOver]);
    assert_eq!((watch.tickets_used, watch.locals), (1, 0));
    assert!(watch.handoff.next_deadline().is_some());
    // Fetched with the first token: nothing is held any more.
    watch.happen(Happening::DecodeStarted);
    assert_eq!(watch.handoff.next_deadline(), None);
    watch.happen(Happening::DecodeEnded);
    assert_eq!(watch.handoff.outcome(), Some(Outcome::Split));
    assert!(!watch.handoff.is_open());
}

#[test]
fn a_concurrent_handoff_sends_both_legs_at_admission() {
    let mut watch = Watch::new(LegOrder::Concurrent, false);
    assert!(!watch.prefill_runs);
    watch.happen(Happening::Admitted);
    assert!(watch.prefill_runs && watch.decode.is_some());
    play(
        &mut watch,
        &[Happening::NothingHandedOver, Happening::DecodeEnded],
    );
    assert_eq!(watch.handoff.outcome(), Some(Outcome::Split));
    assert!(!watch.handoff.is_open());
}

#[test]
fn a_lost_prefill_falls_back_once_and_only_where_it_may() {
    for (order, may_fall_back) in every_kind() {
        let mut watch = Watch::new(order, may_fall_back);
        let lost = Happening::PrefillFailed(Failure::Unreachable);
        play(&mut watch, &[Happening::Admitted, lost]);
        if may_fall_back {
            assert_eq!((watch.locals, watch.answers.len()), (1, 0));
            watch.happen(Happening::DecodeEnded);
            let expected = Outcome::Local(FallbackReason::PrefillFailed);
            assert_eq!(watch.handoff.outcome(), Some(expected));
        } else {
            assert_eq!(watch.answers, [Answer::BadGateway]);
            assert!(!watch.prefill_runs && watch.decode.is_none());
        }
    }
}

#[test]
fn a_refused_prompt_is_refused_by_whoever_refused_it() {
    for (order, may_fall_back) in every_kind() {
        let mut watch = Watch::new(order, may_fall_back);
        let refused = Happening::PrefillFailed(Failure::Rejected);
        play(&mut watch, &[Happening::Admitted, refused]);
        assert_eq!(watch.answers, [Answer::PrefillRefusal]);
        assert!(!watch.handoff.is_open());
    }
}

#[test]
fn a_decode_that_fails_before_its_first_byte_is_repeated_without_what_was_used() {
    let mut watch = sequential();
    let failed = Happening::DecodeFailed(Failure::Failed);
    play(
        &mut watch,
        &[Happening::Admitted, Happening::HandedOver, failed],
    );
    assert_eq!((watch.tickets_used, watch.locals), (1, 1));
    watch.happen(failed);
    assert_eq!(watch.answers, [Answer::BadGateway]);
    // The prefill worker may still hold it; the decode worker may just have extended the lease.
    assert_eq!(watch.handoff.next_deadline(), Some(watch.now + LEASE));
    watch.close();
}

#[test]
fn a_stream_that_has_begun_is_never_repeated() {
    for (order, may_fall_back) in every_kind() {
        let mut watch = Watch::new(order, may_fall_back);
        let broken = Happening::DecodeFailed(Failure::Failed);
        play(
            &mut watch,
            &[
                Happening::Admitted,
                Happening::HandedOver,
                Happening::DecodeStarted,
                broken,
            ],
        );
        assert_eq!(watch.answers, [Answer::BrokenStream]);
        assert_eq!(watch.locals, 0);
    }
}

#[test]
fn what_waits_too_long_for_admission_is_computed_again() {
    let mut watch = sequential();
    play(
        &mut watch,
        &[
            Happening::HandedOver,
            Happening::Expiry,
            Happening::Admitted,
        ],
    );
    assert_eq!((watch.tickets_used, watch.locals), (0, 1));
}

#[test]
fn a_client_that_leaves_between_the_legs_leaves_nothing_behind() {
    // Not admitted: the lease is waited for.
    let mut watch = sequential();
    play(&mut watch, &[Happening::HandedOver, Happening::ClientLeft]);
    assert_eq!((watch.decode, watch.handoff.is_open()), (None, true));
    watch.close();
    // Room comes in time: it is fetched and thrown away.
    let mut watch = sequential();
    play(
        &mut watch,
        &[
            Happening::HandedOver,
            Happening::ClientLeft,
            Happening::Admitted,
        ],
    );
    assert_eq!((watch.tickets_used, watch.decode.is_some()), (1, true));
    watch.happen(Happening::DecodeEnded);
    assert!(!watch.handoff.is_open());
    // Room comes too late.
    let mut watch = sequential();
    play(
        &mut watch,
        &[
            Happening::HandedOver,
            Happening::ClientLeft,
            Happening::Expiry,
            Happening::Admitted,
        ],
    );
    assert_eq!((watch.tickets_used, watch.handoff.is_open()), (0, true));
    watch.close();
    // Handed over while the decode leg was on its way: cancelled, and the lease waited for.
    let mut watch = sequential();
    play(
        &mut watch,
        &[
            Happening::Admitted,
            Happening::HandedOver,
            Happening::ClientLeft,
        ],
    );
    assert_eq!((watch.decode, watch.handoff.is_open()), (None, true));
    watch.close();
}

#[test]
fn what_was_handed_over_when_its_client_left_is_collected_or_waited_for() {
    // Whether the decode worker has room is asked when it is to be fetched.
    let mut watch = sequential();
    play(&mut watch, &[Happening::Admitted, Happening::LeftBehind]);
    assert_eq!((watch.tickets_used, watch.decode.is_some()), (1, true));
    assert!(watch.handoff.is_open());
    watch.happen(Happening::DecodeEnded);
    assert!(!watch.handoff.is_open());
    // No room: the lease is waited for.
    let mut watch = sequential();
    play(&mut watch, &[Happening::Admitted, Happening::LeftBehind]);
    watch.happen(Happening::DecodeFailed(Failure::Failed));
    assert_eq!(watch.handoff.next_deadline(), Some(watch.now + LEASE));
    watch.close();
    assert_eq!(watch.handoff.outcome(), Some(Outcome::Left));
}

#[test]
fn a_prefill_that_fails_behind_a_running_stream_is_nobodys_loss() {
    let mut watch = Watch::new(LegOrder::Concurrent, true);
    let lost = Happening::PrefillFailed(Failure::Unreachable);
    play(
        &mut watch,
        &[
            Happening::Admitted,
            Happening::DecodeStarted,
            lost,
            Happening::DecodeEnded,
        ],
    );
    assert_eq!(watch.handoff.outcome(), Some(Outcome::Split));
}
