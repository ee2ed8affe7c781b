//! A response on its way to the client: forwarded piece by piece, watched from the side, and accounted at its end.

use std::error::Error as StdError;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::StatusCode;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{CONTENT_ENCODING, CONTENT_LENGTH};
use hyper::http::response::Parts;
use kvlane::{Decision, Outcome, RequestGuard};
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;

use super::split::Lesson;
use super::usage::UsageScanner;
use crate::fleet::{InFlight, Worker};
use crate::forward::breaker::Verdict;
use crate::forward::upstream::UpstreamBody;
use crate::forward::{EventLines, error_body, is_event_stream};
use crate::request::Endpoint;
use crate::sparing::warn_sparingly;

/// A booked request until its end. Dropping it counts as a client that left.
pub(super) struct Booking {
    guard: Option<RequestGuard>,
    worker: Arc<Worker>,
    endpoint: Endpoint,
    started: Instant,
    /// The engine's usage can be held against the prompt.
    audited: bool,
    lesson: Option<Lesson>,
    _in_flight: InFlight,
}

impl Booking {
    pub(super) fn new(
        guard: RequestGuard,
        worker: Arc<Worker>,
        endpoint: Endpoint,
        started: Instant,
        audited: bool,
    ) -> Self {
        Self {
            guard: Some(guard),
            audited,
            lesson: None,
            _in_flight: worker.enter(),
            worker,
            endpoint,
            started,
        }
    }

    /// Lets the handoff planner learn from the first token.
    pub(super) fn teaches(mut self, lesson: Option<Lesson>) -> Self {
        self.lesson = lesson;
        self
    }

    pub(super) const fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    pub(super) fn dp_rank(&self) -> u32 {
        self.guard.as_ref().map_or(0, RequestGuard::dp_rank)
    }

    pub(super) fn decision(&self) -> &Decision {
        let guard = self
            .guard
            .as_ref()
            .expect("the guard leaves only when the booking is consumed");
        guard.decision()
    }

    pub(super) fn release(mut self, outcome: &Outcome, now: Instant) {
        self.finish(outcome, now);
    }

    fn finish(&mut self, outcome: &Outcome, now: Instant) {
        if let Some(guard) = self.guard.take() {
            let outcome = if self.audited {
                outcome
            } else {
                &outcome.reported(None, None)
            };
            if let Some(cached) = outcome.cached_tokens {
                let predicted = guard.decision().predicted_cached_tokens;
                self.worker
                    .metrics
                    .predicted_cached_tokens
                    .observe(f64::from(predicted));
                self.worker
                    .metrics
                    .reported_cached_tokens
                    .observe(f64::from(cached));
            }
            let overlap = guard.decision().overlap_blocks();
            self.worker
                .metrics
                .overlap_blocks
                .observe(f64::from(overlap));
            guard.release(outcome, now);
        }
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        if self.guard.is_some() {
            self.worker.metrics.cancelled.inc();
            self.worker.abandoned();
        }
    }
}

/// The body that the client gets.
pub(super) struct ForwardBody {
    upstream: UpstreamBody,
    booking: Option<Booking>,
    status: StatusCode,
    is_events: bool,
    /// An event can be added to it: its length was not announced, and it is not compressed.
    takes_error_event: bool,
    usage: UsageScanner,
    lines: EventLines,
    began: bool,
    last_piece: Instant,
    idle: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    /// Ends the client's connection after a broken event stream.
    close: CancellationToken,
    ended: bool,
}

/// Ends the client's body.
type Cut = Box<dyn StdError + Send + Sync>;

impl ForwardBody {
    pub(super) fn new(
        upstream: UpstreamBody,
        booking: Booking,
        parts: &Parts,
        idle: Duration,
        close: CancellationToken,
    ) -> Self {
        let is_events = is_event_stream(&parts.headers);
        let mut body = Self {
            upstream,
            booking: Some(booking),
            status: parts.status,
            is_events,
            takes_error_event: is_events
                && !parts.headers.contains_key(CONTENT_LENGTH)
                && !parts.headers.contains_key(CONTENT_ENCODING),
            usage: UsageScanner::default(),
            lines: EventLines::default(),
            began: false,
            last_piece: Instant::now(),
            idle,
            timer: None,
            close,
            ended: false,
        };
        body.complete_if_settled();
        body
    }

    fn observe(&mut self, piece: &[u8]) {
        let now = Instant::now();
        let before = std::mem::replace(&mut self.last_piece, now);
        let Some(booking) = &mut self.booking else {
            return;
        };
        booking.worker.count_progress();
        let Some(guard) = &booking.guard else { return };
        if !self.began {
            self.began = true;
            guard.prefill_done(now);
            booking
                .worker
                .metrics
                .ttft_seconds
                .observe((now - booking.started).as_secs_f64());
            let pulse = &booking.worker.pulse;
            pulse.first_token(now - booking.started);
            pulse.computed(guard.decision().cost.uncached_prefill_blocks);
            // An answer in one piece comes with its last token, which says nothing of the first.
            if let Some(lesson) = &mut booking.lesson {
                lesson.began();
                if self.is_events && self.status.is_success() {
                    lesson.teach(&guard.decision().target, now);
                }
            }
        } else if self.is_events {
            booking.worker.pulse.gap(now - before);
        }
        self.usage.feed(piece);
        if self.is_events {
            if let Some(lesson) = &mut booking.lesson {
                lesson.piece(piece, now);
            }
            self.lines.feed(piece);
            if let Some(tokens) = self.lines.growth() {
                guard.output_tokens(tokens, now);
            }
        }
    }

    /// The server never asks a body for more than its announced length, so its end is noticed with the last piece.
    fn complete_if_settled(&mut self) {
        if self.upstream.is_settled() {
            self.complete();
        }
    }

    /// Accounts a response that ended by itself.
    fn complete(&mut self) {
        self.ended = true;
        let Some(mut booking) = self.booking.take() else {
            return;
        };
        let now = Instant::now();
        let ok = self.status.is_success();
        let metrics = &booking.worker.metrics;
        metrics
            .request_seconds
            .observe((now - booking.started).as_secs_f64());
        let incomplete =
            self.is_events && ok && booking.endpoint.has_end_marker() && !self.lines.ended();
        if incomplete {
            metrics.incomplete.inc();
        } else if ok {
            booking.worker.completed();
        }
        let usage = self.usage.usage().filter(|_| ok).unwrap_or_default();
        let outcome = match self.status {
            _ if ok => Outcome::ok(),
            // What is refused is not computed: its prompt is in nobody's cache.
            status if status.is_client_error() => Outcome::not_dispatched(),
            _ => Outcome::failed(),
        };
        booking.finish(
            &outcome.reported(usage.cached_tokens, usage.prompt_tokens),
            now,
        );
    }

    /// Accounts a response that broke off, and tells the client as well as is still possible.
    fn break_off(&mut self, why: &str) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        self.ended = true;
        self.close.cancel();
        let mut name = String::new();
        if let Some(mut booking) = self.booking.take() {
            let now = Instant::now();
            name = booking.worker.id().to_owned();
            warn_sparingly!(worker = name, cause = why, "response broke off");
            booking.worker.metrics.interrupted.inc();
            if Verdict::of(self.status) != Verdict::Failure {
                booking.worker.failed(now);
            }
            booking.finish(&Outcome::failed(), now);
        }
        let message = format!("worker {name:?} ended the response before it was complete: {why}");
        if !self.takes_error_event {
            return Poll::Ready(Some(Err(message.into())));
        }
        // A piece of an event is ended first, so that the error is an event of its own.
        let before = if self.lines.is_inside_event() {
            "\n\n"
        } else {
            ""
        };
        let event = format!(
            "{before}data: {}\n\n",
            error_body(StatusCode::BAD_GATEWAY, &message)
        );
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(event)))))
    }

    /// Tells whether nothing came for too long; arms the timer that asks again.
    fn is_stalled(&mut self, cx: &mut Context<'_>) -> bool {
        loop {
            let deadline = self.last_piece + self.idle;
            let timer = self
                .timer
                .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline.into())));
            if timer.as_mut().poll(cx).is_pending() {
                return false;
            }
            if deadline <= Instant::now() {
                return true;
            }
            // Pieces came since the timer was set: moving it for each of them would cost more than this.
            timer.as_mut().reset(deadline.into());
        }
    }
}

impl Body for ForwardBody {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        match Pin::new(&mut self.upstream).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(piece) = frame.data_ref() {
                    let piece = piece.clone();
                    self.observe(&piece);
                }
                self.complete_if_settled();
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(None) => {
                self.complete();
                Poll::Ready(None)
            }
            Poll::Ready(Some(Err(error))) => self.break_off(&error.to_string()),
            Poll::Pending if self.is_stalled(cx) => {
                let why = format!("nothing came for {} seconds", self.idle.as_secs_f64());
                self.break_off(&why)
            }
            Poll::Pending => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }

    fn size_hint(&self) -> SizeHint {
        if self.ended {
            SizeHint::with_exact(0)
        } else {
            self.upstream.size_hint()
        }
    }
}
