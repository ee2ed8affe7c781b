//! The loop of one handoff.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use hyper::http::response::Parts;
use kvlane::Outcome as BookingOutcome;
use kvlane::WorkerRank;
use kvlane::handoff::PrefillWork;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use super::client::Client;
use super::leg::{LegError, LegEvent, Running, Sending};
use super::metrics::Open;
use super::{DriveRequest, Pair, Shared};
use crate::forward::is_event_stream;
use crate::handoff::{
    Action, Answer, AnswerCorrector, Attempt, Event, FallbackReason, Handoff, HandoffRules, Leg,
    LegContext, LegOrder, Outcome, Ticket, collecting, correct_answer, local_body,
    prefill_cached_tokens,
};

/// One handoff on its way.
#[derive(Debug)]
pub(super) struct Run {
    shared: Arc<Shared>,
    request: DriveRequest,
    pair: Pair,
    client: Client,
    open: Open,
    events: (mpsc::Sender<LegEvent>, mpsc::Receiver<LegEvent>),
    tasks: TaskTracker,
    prefill: Option<Running>,
    decode: Option<(Attempt, Running)>,
    /// What the client gets of the decode leg, by attempt.
    answer: Option<(Attempt, Forwarded)>,
    /// Legs that are answered with what a prefill worker handed over.
    fetching: Option<Attempt>,
    collecting: bool,
    refusal: Option<LegError>,
    last_failure: String,
    /// Of the prefill worker's answer.
    cached_tokens: Option<u64>,
    prefill_sent: Option<Instant>,
    prefill_answered: Option<Instant>,
    random: u128,
}

/// An answer that is being forwarded.
#[derive(Debug)]
enum Forwarded {
    /// Kept until it is whole.
    Whole(Box<Parts>, Vec<u8>),
    /// A stream; corrected where the decode worker did not process the prompt.
    Stream(Option<AnswerCorrector>),
}

/// Pieces that wait for the client.
const QUEUED_EVENTS: usize = 16;

impl Run {
    pub(super) fn new(
        shared: Arc<Shared>,
        request: DriveRequest,
        pair: Pair,
        client: Client,
    ) -> Self {
        Self {
            open: shared.metrics.begin(),
            shared,
            request,
            pair,
            client,
            events: mpsc::channel(QUEUED_EVENTS),
            tasks: TaskTracker::new(),
            prefill: None,
            decode: None,
            answer: None,
            fetching: None,
            collecting: false,
            refusal: None,
            last_failure: "no worker served the request".to_owned(),
            cached_tokens: None,
            prefill_sent: None,
            prefill_answered: None,
            random: fastrand::u128(..),
        }
    }

    /// Runs the handoff until nothing of it is open.
    pub(super) async fn finish(mut self) {
        let rules = HandoffRules {
            order: self.pair.protocol.order(),
            may_fall_back: self.pair.may_fall_back,
            lease: self.pair.lease,
        };
        let mut handoff = match rules.order {
            LegOrder::Sequential => {
                let (handoff, actions) = Handoff::sequential(rules);
                self.carry_out(actions).await;
                handoff
            }
            LegOrder::Concurrent => {
                let now = Instant::now();
                let Some(ticket) = self.pair.protocol.introduce(&self.context(), now) else {
                    self.client.bad_gateway(
                        "too little is known of the prefill worker to split the request",
                    );
                    return;
                };
                Handoff::concurrent(rules, ticket)
            }
        };
        // Both workers are booked, so there is nothing to wait for.
        self.step(&mut handoff, Event::Admitted).await;
        while handoff.is_open() {
            let event = self.next(&handoff).await;
            if let Some(event) = event {
                self.step(&mut handoff, event).await;
            }
        }
        debug!(request_id = self.request.request_id, outcome = ?handoff.outcome(), "handoff is over");
    }

    async fn step(&mut self, handoff: &mut Handoff, event: Event) {
        let ended = matches!(event, Event::DecodeEnded(_));
        let mut event = event;
        // A ticket may be too old when it is redeemed; that is told at once.
        loop {
            let actions = handoff.on(event, Instant::now());
            match self.carry_out(actions).await {
                Some(failed) => event = failed,
                None => break,
            }
        }
        self.open.outcome = handoff.outcome();
        if ended {
            self.finish_answer().await;
        }
        if handoff.outcome().is_some() {
            self.release_decode(handoff);
        }
    }

    /// Waits for what happens next; `None` when it concerns nobody.
    async fn next(&mut self, handoff: &Handoff) -> Option<Event> {
        let deadline = handoff.next_deadline();
        let time_passes = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        let waits = handoff.outcome().is_none();
        let happened = tokio::select! {
            biased;
            () = self.client.left(), if waits => return Some(Event::ClientLeft),
            happened = self.events.1.recv() => happened,
            () = time_passes => return Some(Event::Tick),
        };
        match happened? {
            LegEvent::Prefilled(Ok(reply)) => Some(self.prefilled(&reply)),
            LegEvent::Prefilled(Err(error)) => {
                self.prefill = None;
                Some(Event::PrefillFailed(self.failed(error)))
            }
            LegEvent::Began(attempt, parts) => self.began(attempt, parts),
            LegEvent::Piece(attempt, piece) => {
                self.forward(attempt, &piece).await;
                None
            }
            LegEvent::Ended(attempt) => self.is_current(attempt).then(|| {
                self.decode = None;
                Event::DecodeEnded(attempt)
            }),
            LegEvent::Failed(attempt, error) => self.is_current(attempt).then(|| {
                self.decode = None;
                Event::DecodeFailed(attempt, self.failed(error))
            }),
        }
    }

    fn failed(&mut self, error: LegError) -> crate::handoff::Failure {
        warn!(
            request_id = self.request.request_id,
            cause = error.why,
            "a leg of a handoff failed"
        );
        let failure = error.failure;
        self.last_failure.clone_from(&error.why);
        self.refusal = Some(error);
        failure
    }

    fn is_current(&self, attempt: Attempt) -> bool {
        self.decode
            .as_ref()
            .is_some_and(|(current, _)| *current == attempt)
    }

    /// Takes in the prefill leg's answer.
    fn prefilled(&mut self, reply: &Bytes) -> Event {
        let now = Instant::now();
        self.prefill = None;
        self.prefill_answered = Some(now);
        let mut reply: Value = serde_json::from_slice(reply).unwrap_or(Value::Null);
        self.cached_tokens = prefill_cached_tokens(&reply);
        self.learn_prefill(now);
        self.pair.prefill.prefill_done(now);
        let ticket = self.pair.protocol.handed_over(&mut reply, now);
        if let Some(transfer) = &self.pair.transfer {
            transfer.started(now);
        }
        Event::PrefillAnswered(ticket)
    }

    fn learn_prefill(&self, now: Instant) {
        let Some(sent) = self.prefill_sent else {
            return;
        };
        let elapsed = now - sent;
        self.shared
            .metrics
            .prefill_seconds
            .observe(elapsed.as_secs_f64());
        if let Some(planner) = &self.shared.planner {
            let side = &self.pair.prefill;
            let target = WorkerRank {
                worker: side.worker.config.id.clone(),
                dp_rank: side.dp_rank,
            };
            let work = PrefillWork {
                cached_tokens: self.cached_tokens.unwrap_or(self.pair.work.cached_tokens),
                ..self.pair.work
            };
            planner.observe_prefill(&target, &work, elapsed);
        }
    }

    fn began(&mut self, attempt: Attempt, parts: Box<Parts>) -> Option<Event> {
        if !self.is_current(attempt) {
            return None;
        }
        let now = Instant::now();
        self.pair.decode.prefill_done(now);
        let fetched = self.fetching == Some(attempt);
        if fetched {
            self.learn_transfer(now);
            // The prefill worker holds nothing of it any more.
            self.release_prefill(true);
        }
        if !self.collecting {
            let waited = now - self.request.started;
            let metrics = &self.pair.decode.worker.metrics;
            metrics.ttft_seconds.observe(waited.as_secs_f64());
            let forwarded = if is_event_stream(&parts.headers) {
                self.client.begin_stream(*parts);
                Forwarded::Stream(fetched.then(|| AnswerCorrector::new(self.cached_tokens)))
            } else {
                Forwarded::Whole(parts, Vec::new())
            };
            self.answer = Some((attempt, forwarded));
        }
        Some(Event::DecodeStarted(attempt))
    }

    fn learn_transfer(&mut self, now: Instant) {
        if let Some(answered) = self.prefill_answered {
            let seconds = (now - answered).as_secs_f64();
            self.shared.metrics.transfer_seconds.observe(seconds);
        }
        if let Some(transfer) = self.pair.transfer.take() {
            transfer.finished(now);
        }
    }

    async fn forward(&mut self, attempt: Attempt, piece: &Bytes) {
        let most = self.shared.limits.max_answer_bytes;
        let Some((current, forwarded)) = &mut self.answer else {
            return;
        };
        if *current != attempt {
            return;
        }
        match forwarded {
            // What is longer is cut, and refused at its end.
            Forwarded::Whole(_, whole) => {
                let room = most.saturating_add(1).saturating_sub(whole.len());
                whole.extend_from_slice(&piece[..piece.len().min(room)]);
            }
            Forwarded::Stream(None) => self.client.send(piece.to_vec()).await,
            Forwarded::Stream(Some(corrector)) => {
                let mut out = Vec::with_capacity(piece.len());
                corrector.feed(piece, &mut out);
                self.client.send(out).await;
            }
        }
    }

    /// Gives the client the rest of its answer.
    async fn finish_answer(&mut self) {
        let Some((attempt, forwarded)) = self.answer.take() else {
            return;
        };
        match forwarded {
            Forwarded::Stream(corrector) => {
                let mut out = Vec::new();
                if let Some(mut corrector) = corrector {
                    corrector.finish(&mut out);
                }
                self.client.send(out).await;
                self.client.end();
            }
            Forwarded::Whole(_, whole) if whole.len() > self.shared.limits.max_answer_bytes => {
                self.client
                    .bad_gateway("the answer is larger than is accepted");
            }
            Forwarded::Whole(parts, mut whole) => {
                if self.fetching == Some(attempt)
                    && let Ok(mut answer) = serde_json::from_slice::<Value>(&whole)
                    && correct_answer(&mut answer, self.cached_tokens)
                {
                    whole = answer.to_string().into_bytes();
                }
                self.client.answer_whole(*parts, whole);
            }
        }
    }

    /// Carries actions out; returns what failed at once.
    async fn carry_out(&mut self, actions: Vec<Action>) -> Option<Event> {
        let mut failed = None;
        for action in actions {
            match action {
                Action::SendPrefill => self.send_prefill(None),
                Action::SendDecode(attempt, ticket) => {
                    failed = self.send_split(attempt, ticket).or(failed);
                }
                Action::SendBoth(attempt, ticket) => {
                    self.send_prefill(Some(&ticket));
                    failed = self.send_split(attempt, ticket).or(failed);
                }
                Action::Collect(attempt, ticket) => {
                    self.collecting = true;
                    self.shared.metrics.collected.inc();
                    failed = self.send_split(attempt, ticket).or(failed);
                }
                Action::SendLocal(attempt, reason) => self.send_local(attempt, reason),
                Action::CancelPrefill => self.prefill = None,
                Action::CancelDecode(attempt) => {
                    if self.is_current(attempt) {
                        self.decode = None;
                    }
                }
                Action::Answer(answer) => self.answer_client(answer).await,
            }
        }
        failed
    }

    fn send_prefill(&mut self, ticket: Option<&Ticket>) {
        let request = &self.request;
        let protocol = &self.pair.protocol;
        let leg = protocol.prefill(request.endpoint, &request.body, ticket, &self.context());
        let sending = Sending::new(request, &self.pair.prefill, &leg, self.shared.limits);
        let task = self.tasks.spawn(sending.prefill(self.events.0.clone()));
        self.prefill_sent = Some(Instant::now());
        self.prefill = Some(Running::new(task.abort_handle()));
    }

    /// Sends the decode leg with what was handed over.
    fn send_split(&mut self, attempt: Attempt, ticket: Ticket) -> Option<Event> {
        let body = Value::clone(&self.request.body);
        let protocol = &self.pair.protocol;
        match protocol.decode(body, ticket, &self.context(), Instant::now()) {
            Ok(mut leg) => {
                if self.collecting {
                    collecting(self.request.endpoint, &mut leg);
                }
                self.fetching = Some(attempt);
                self.send_decode(attempt, &leg);
                None
            }
            Err(expired) => {
                self.last_failure = expired.to_string();
                let failure = crate::handoff::Failure::Failed;
                Some(Event::DecodeFailed(attempt, failure))
            }
        }
    }

    fn send_local(&mut self, attempt: Attempt, reason: FallbackReason) {
        self.shared.metrics.fell_back(reason);
        // Nothing will be learned from what did not move.
        self.pair.transfer = None;
        let leg = Leg {
            body: local_body(Value::clone(&self.request.body)),
            headers: Vec::new(),
        };
        self.send_decode(attempt, &leg);
    }

    fn send_decode(&mut self, attempt: Attempt, leg: &Leg) {
        let mut sending = Sending::new(&self.request, &self.pair.decode, leg, self.shared.limits);
        if self.fetching == Some(attempt) {
            sending = sending.once();
        }
        let task = self
            .tasks
            .spawn(sending.decode(attempt, self.events.0.clone()));
        self.decode = Some((attempt, Running::new(task.abort_handle())));
    }

    async fn answer_client(&mut self, answer: Answer) {
        match answer {
            Answer::PrefillRefusal | Answer::DecodeRefusal => {
                let refusal = self.refusal.take();
                self.client.refuse(refusal);
            }
            Answer::BadGateway => self.client.bad_gateway(&self.last_failure),
            Answer::BrokenStream => {
                self.answer = None;
                let why = self.last_failure.clone();
                self.client.break_off(&why).await;
            }
        }
    }

    fn context(&self) -> LegContext<'_> {
        LegContext {
            request_id: &self.request.request_id,
            prefill_host: self.pair.prefill.worker.config.url.address().host(),
            bootstrap_port: self.pair.bootstrap_port,
            prefill_engine: self.pair.prefill_engine.as_deref(),
            prefill_rank: self.pair.prefill.rank(),
            decode_rank: self.pair.decode.rank(),
            random: self.random,
        }
    }

    fn release_prefill(&mut self, ok: bool) {
        let cached = self
            .cached_tokens
            .and_then(|cached| u32::try_from(cached).ok());
        let outcome = match (ok, self.request.audited) {
            (true, true) => BookingOutcome::ok().reported(cached, None),
            (true, false) => BookingOutcome::ok(),
            (false, _) => BookingOutcome::failed(),
        };
        self.pair.prefill.release(&outcome, Instant::now());
    }

    /// Ends the decode worker's booking with the client's answer; the prefill worker's lasts while it holds a cache.
    fn release_decode(&mut self, handoff: &Handoff) {
        if self.decode.is_none() && self.pair.decode.is_booked() {
            let now = Instant::now();
            let booking = self.count_end(handoff.outcome(), now);
            self.pair.decode.release(&booking, now);
        }
        if !handoff.is_open() {
            self.release_prefill(self.prefill_answered.is_some());
        }
    }
    /// Counts how the request ended among those of the decode worker; returns what that says of the booking.
    fn count_end(&self, outcome: Option<Outcome>, now: Instant) -> BookingOutcome {
        let metrics = &self.pair.decode.worker.metrics;
        match outcome {
            Some(Outcome::Split | Outcome::Local(_)) => {
                let took = now - self.request.started;
                metrics.request_seconds.observe(took.as_secs_f64());
                return BookingOutcome::ok();
            }
            Some(Outcome::Left) => {
                metrics.cancelled.inc();
            }
            Some(Outcome::Answered(Answer::BrokenStream)) => {
                metrics.interrupted.inc();
            }
            Some(Outcome::Answered(_)) | None => {}
        }
        BookingOutcome::failed()
    }
}
