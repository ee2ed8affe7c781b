//! The loop of one handoff.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use hyper::http::response::Parts;
use kvlane::Outcome as BookingOutcome;
use kvlane::handoff::{GapCause, PrefillWork};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;
use tracing::debug;

use super::client::Client;
use super::leg::{LegError, LegEvent, Running, Sending};
use super::metrics::Open;
use super::{DriveRequest, Pair, Shared, Side};
use crate::forward::{EventLines, is_event_stream};
use crate::handoff::{
    Action, Answer, AnswerCorrector, Attempt, Disturbing, Event, Failure, FallbackReason, Handoff,
    HandoffRules, Leg, LegContext, LegOrder, Outcome, RankGaps, StreamGaps, Ticket, collecting,
    correct_answer, local_body, noticeable, prefill_cached_tokens,
};
use crate::sparing::warn_sparingly;

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
    /// When the last piece of a stream came.
    last_piece: Option<Instant>,
    /// Of the stream that the client gets.
    lines: EventLines,
    /// Legs that are answered with what a prefill worker handed over.
    fetching: Option<Attempt>,
    collecting: bool,
    refusal: Option<LegError>,
    last_failure: String,
    /// Of the prefill worker's answer.
    cached_tokens: Option<u64>,
    prefill_sent: Option<Instant>,
    prefill_answered: Option<Instant>,
    /// The decode worker has what was handed over.
    fetched: bool,
    /// What streams on the two workers may notice of this request.
    prefill_disturbs: Option<Disturbing>,
    decode_disturbs: Option<Disturbing>,
    random: u128,
}

/// An answer that is being forwarded.
#[derive(Debug)]
enum Forwarded {
    /// Kept until it is whole.
    Whole(Box<Parts>, Vec<u8>),
    /// A stream; corrected where the decode worker did not process the prompt.
    Stream(Option<AnswerCorrector>, Option<StreamGaps>),
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
            last_piece: None,
            lines: EventLines::default(),
            fetching: None,
            collecting: false,
            refusal: None,
            last_failure: "no worker served the request".to_owned(),
            cached_tokens: None,
            prefill_sent: None,
            prefill_answered: None,
            fetched: false,
            prefill_disturbs: None,
            decode_disturbs: None,
            random: fastrand::u128(..),
        }
    }

    /// Returns where legs report to.
    #[cfg(test)]
    pub(super) fn events(&self) -> mpsc::Sender<LegEvent> {
        self.events.0.clone()
    }

    /// Runs the handoff until nothing of it is open.
    pub(super) async fn finish(mut self) {
        let rules = HandoffRules {
            order: self.pair.terms.protocol.order(),
            may_fall_back: self.pair.terms.may_fall_back,
            lease: self.pair.terms.lease,
        };
        let mut handoff = match rules.order {
            LegOrder::Sequential => {
                let (handoff, actions) = Handoff::sequential(rules);
                self.carry_out(actions).await;
                handoff
            }
            LegOrder::Concurrent => {
                let now = Instant::now();
                let Some(ticket) = self.pair.terms.protocol.introduce(&self.context(), now) else {
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
        // It is booked while it holds a cache.
        if !handoff.occupies_prefill() {
            self.release_prefill(self.fetched || self.prefill_answered.is_some());
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
            () = self.client.left(), if waits => return Some(self.client_left()),
            happened = self.events.1.recv() => happened,
            () = time_passes => return Some(Event::Tick),
        };
        match happened? {
            LegEvent::Prefilled(Ok(reply)) => Some(Event::PrefillAnswered(self.prefilled(&reply))),
            LegEvent::Prefilled(Err(error)) => {
                self.prefill = None;
                self.prefill_disturbs = None;
                self.doubt();
                if error.unconnected {
                    self.pair.prefill.leg_did_not_connect();
                }
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
                self.decode_disturbs = None;
                if self.fetching == Some(attempt) && !self.fetched {
                    self.doubt();
                }
                if error.unconnected {
                    self.pair.decode.leg_did_not_connect();
                }
                Event::DecodeFailed(attempt, self.failed(error))
            }),
        }
    }

    fn failed(&mut self, error: LegError) -> Failure {
        let failure = error.failure;
        let request_id = &self.request.request_id;
        match failure {
            // Its client is told, and may ask so as often as it likes.
            Failure::Rejected => debug!(request_id, cause = error.why, "a leg of a handoff failed"),
            _ => warn_sparingly!(request_id, cause = error.why, "a leg of a handoff failed"),
        }
        self.last_failure.clone_from(&error.why);
        self.refusal = Some(error);
        failure
    }

    fn is_current(&self, attempt: Attempt) -> bool {
        self.decode
            .as_ref()
            .is_some_and(|(current, _)| *current == attempt)
    }

    /// Takes in that the client has left. The prefill leg's answer may be there already: then something is held for it.
    fn client_left(&mut self) -> Event {
        if self.decode.is_some() || !self.is_sequential() {
            return Event::ClientLeft;
        }
        match self.events.1.try_recv() {
            Ok(LegEvent::Prefilled(Ok(reply))) => Event::LeftBehind(self.prefilled(&reply)),
            _ => Event::ClientLeft,
        }
    }

    /// Takes in the prefill leg's answer; returns what it hands over.
    fn prefilled(&mut self, reply: &Bytes) -> Option<Ticket> {
        let now = Instant::now();
        self.prefill = None;
        self.prefill_disturbs = None;
        self.prefill_answered = Some(now);
        let mut reply: Value = serde_json::from_slice(reply).unwrap_or(Value::Null);
        self.cached_tokens = prefill_cached_tokens(&reply);
        self.pair.prefill.prefill_done(now);
        if self.is_sequential() {
            self.learn_prefill(now);
            if let Some(transfer) = &self.pair.transfer {
                transfer.started(now);
            }
        } else {
            // It comes when the decode worker has the cache, or later: the answer may be on its way already.
            if let Some((_, Forwarded::Stream(Some(corrector), _))) = &mut self.answer {
                corrector.learn(self.cached_tokens);
            }
            if self.fetched {
                self.release_prefill(true);
            }
        }
        self.pair.terms.protocol.handed_over(&mut reply, now)
    }

    fn is_sequential(&self) -> bool {
        self.pair.terms.protocol.order() == LegOrder::Sequential
    }

    /// Lets the prefill worker be asked again who it is: it may have restarted.
    fn doubt(&self) {
        if let Some(peer) = &self.pair.terms.peer {
            peer.doubt();
        }
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
            let target = self.pair.prefill.target();
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
        self.decode_disturbs = None;
        let fetched = self.fetching == Some(attempt);
        let is_stream = is_event_stream(&parts.headers);
        if fetched {
            self.fetched = true;
            self.learn_transfer(now, is_stream);
            // The prefill worker holds nothing of it any more. In concurrent protocols its answer tells what it had cached.
            if self.is_sequential() || self.prefill.is_none() {
                self.release_prefill(true);
            }
        }
        if !self.collecting {
            let waited = now - self.request.started;
            let metrics = &self.pair.decode.worker.metrics;
            metrics.ttft_seconds.observe(waited.as_secs_f64());
            self.pair.decode.worker.pulse.first_token(waited);
            let forwarded = if is_stream {
                self.client.begin_stream(*parts);
                let corrector = fetched.then(|| AnswerCorrector::new(self.cached_tokens));
                let gaps = self.gaps_of(&self.pair.decode);
                Forwarded::Stream(corrector, gaps.map(|gaps| gaps.follow()))
            } else {
                Forwarded::Whole(parts, Vec::new())
            };
            self.answer = Some((attempt, forwarded));
        }
        Some(Event::DecodeStarted(attempt))
    }

    fn gaps_of(&self, side: &Side) -> Option<Arc<RankGaps>> {
        let gaps = self.shared.gaps.as_ref();
        gaps.map(|gaps| gaps.of(&side.target()))
    }

    fn learn_transfer(&mut self, now: Instant, is_stream: bool) {
        let transfer = self.pair.transfer.take();
        // The first byte of an answer that is no stream comes with the last token.
        if !is_stream {
            return;
        }
        if let Some(answered) = self.prefill_answered.filter(|_| self.is_sequential()) {
            let seconds = (now - answered).as_secs_f64();
            self.shared.metrics.transfer_seconds.observe(seconds);
        }
        if let Some(transfer) = transfer {
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
            Forwarded::Stream(corrector, gaps) => {
                let now = Instant::now();
                if let Some(last) = self.last_piece.replace(now) {
                    self.pair.decode.worker.pulse.gap(now - last);
                }
                if let Some(gaps) = gaps {
                    gaps.piece(piece, now);
                }
                self.lines.feed(piece);
                if let Some(tokens) = self.lines.growth() {
                    self.pair.decode.output_tokens(tokens, now);
                }
                let mut out = Vec::with_capacity(piece.len());
                match corrector {
                    Some(corrector) => corrector.feed(piece, &mut out),
                    None => out.extend_from_slice(piece),
                }
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
            Forwarded::Stream(corrector, _) => {
                let mut out = Vec::new();
                if let Some(mut corrector) = corrector {
                    corrector.finish(&mut out);
                }
                if self.request.endpoint.has_end_marker() && !self.lines.ended() {
                    self.pair.decode.worker.metrics.incomplete.inc();
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
                    failed = self.collect(attempt, ticket).or(failed);
                }
                Action::SendLocal(attempt, reason) => self.send_local(attempt, reason),
                Action::CancelPrefill => {
                    self.prefill = None;
                    self.prefill_disturbs = None;
                }
                Action::CancelDecode(attempt) => {
                    if self.is_current(attempt) {
                        self.decode = None;
                        self.decode_disturbs = None;
                    }
                }
                Action::Answer(answer) => self.answer_client(answer).await,
            }
        }
        failed
    }

    /// Fetches for nobody what was handed over, where that takes nothing from others; else its lease is waited for.
    fn collect(&mut self, attempt: Attempt, ticket: Ticket) -> Option<Event> {
        let worker = &self.pair.decode.worker;
        // This request is among those in flight.
        let has_room = worker.in_flight() <= self.shared.limits.busy_requests;
        if !(has_room && worker.is_eligible()) {
            self.shared.metrics.left_to_lease.inc();
            return Some(Event::DecodeFailed(attempt, Failure::Failed));
        }
        self.collecting = true;
        self.shared.metrics.collected.inc();
        self.send_split(attempt, ticket)
    }

    fn send_prefill(&mut self, ticket: Option<&Ticket>) {
        let request = &self.request;
        let protocol = &self.pair.terms.protocol;
        let leg = protocol.prefill(request.endpoint, &request.body, ticket, &self.context());
        let sending = Sending::new(request, &self.pair.prefill, &leg, self.shared.limits);
        self.pair.prefill.leg_begins();
        let task = self.tasks.spawn(sending.prefill(self.events.0.clone()));
        let now = Instant::now();
        self.prefill_sent = Some(now);
        if let Some(transfer) = &self.pair.transfer {
            if !self.is_sequential() {
                transfer.sent_together(now);
            }
            if !asks_for_stream(&self.request.body) {
                transfer.ends_unseen();
            }
        }
        let gaps = self.gaps_of(&self.pair.prefill);
        // The answer of a concurrent protocol comes after its transfer, and says nothing of the prompt's end.
        let cause = Some(GapCause::Prefill(self.pair.work)).filter(|_| self.is_sequential());
        let cause = cause.and_then(noticeable);
        self.prefill_disturbs = gaps.map(|gaps| gaps.disturb(cause, now));
        self.prefill = Some(Running::new(task.abort_handle()));
    }

    /// Sends the decode leg with what was handed over.
    fn send_split(&mut self, attempt: Attempt, ticket: Ticket) -> Option<Event> {
        let body = Value::clone(&self.request.body);
        let protocol = &self.pair.terms.protocol;
        match protocol.decode(body, ticket, &self.context(), Instant::now()) {
            Ok(mut leg) => {
                if self.collecting {
                    collecting(self.request.endpoint, &mut leg);
                }
                self.fetching = Some(attempt);
                let tokens = self.pair.work.input_tokens;
                self.send_decode(attempt, &leg, GapCause::Transfer { tokens });
                None
            }
            Err(expired) => {
                self.last_failure = expired.to_string();
                self.refusal = None;
                Some(Event::DecodeFailed(attempt, Failure::Failed))
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
        let cause = GapCause::Prefill(PrefillWork {
            cached_tokens: 0,
            queued_tokens: 0,
            ..self.pair.work
        });
        self.send_decode(attempt, &leg, cause);
    }

    fn send_decode(&mut self, attempt: Attempt, leg: &Leg, cause: GapCause) {
        let gaps = self.gaps_of(&self.pair.decode);
        self.decode_disturbs = gaps.map(|gaps| gaps.disturb(noticeable(cause), Instant::now()));
        let mut sending = Sending::new(&self.request, &self.pair.decode, leg, self.shared.limits);
        if self.fetching == Some(attempt) {
            sending = sending.once();
        }
        self.pair.decode.leg_begins();
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
            // A busy worker says when to come again, and an answer of ours would not.
            Answer::BadGateway => match self.refusal.take_if(|why| why.is_back_pressure()) {
                Some(busy) => self.client.refuse(Some(busy)),
                None => self.client.bad_gateway(&self.last_failure),
            },
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
            bootstrap_port: self.pair.terms.bootstrap_port,
            prefill_engine: self.pair.terms.prefill_engine.as_deref(),
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

    /// Ends the decode worker's booking with the client's answer.
    fn release_decode(&mut self, handoff: &Handoff) {
        if self.decode.is_none() && self.pair.decode.is_booked() {
            let now = Instant::now();
            let booking = self.count_end(handoff.outcome(), now);
            self.pair.decode.release(&booking, now);
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

fn asks_for_stream(body: &Value) -> bool {
    body.get("stream").and_then(Value::as_bool) == Some(true)
}
