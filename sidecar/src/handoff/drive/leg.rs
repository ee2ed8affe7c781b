//! One leg over HTTP, as a task that reports to its handoff.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::header::{ACCEPT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::http::response::Parts;
use hyper::{Method, Request, Response, StatusCode};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::opening::{Opened, Opening};
use super::{DriveLimits, DriveRequest, Side};
use crate::fleet::Worker;
use crate::forward::breaker::Verdict;
use crate::forward::upstream::{UpstreamBody, UpstreamError};
use crate::forward::{ClientBody, for_worker, full, is_event_stream, towards_client, uri};
use crate::handoff::{Attempt, Failure, Leg};

/// What a leg reports.
#[derive(Debug)]
pub(super) enum LegEvent {
    Prefilled(Result<Bytes, LegError>),
    /// The first byte has come.
    Began(Attempt, Box<Parts>),
    Piece(Attempt, Bytes),
    Ended(Attempt),
    Failed(Attempt, LegError),
}

/// How a leg failed.
#[derive(Debug)]
pub(super) struct LegError {
    pub(super) failure: Failure,
    pub(super) why: String,
    /// The worker saw nothing of it.
    pub(super) unconnected: bool,
    /// The worker's answer, if it gave one.
    answer: Option<(Box<Parts>, Bytes)>,
}

impl LegError {
    fn new(failure: Failure, worker: &Worker, why: &str) -> Self {
        Self {
            failure,
            why: format!("worker {:?} {why}", worker.id()),
            unconnected: false,
            answer: None,
        }
    }

    /// Tells whether the worker said that it is busy.
    pub(super) fn is_back_pressure(&self) -> bool {
        let answer = self.answer.as_ref();
        answer.is_some_and(|(parts, _)| Verdict::of(parts.status) == Verdict::BackPressure)
    }

    /// Makes the worker's answer the client's.
    pub(super) fn into_response(self) -> Option<Response<ClientBody>> {
        let (mut parts, body) = self.answer?;
        towards_client(&mut parts.headers);
        Some(Response::from_parts(*parts, full(body)))
    }
}

/// A leg that runs; dropping it closes its connection.
#[derive(Debug)]
pub(super) struct Running(AbortHandle);

impl Running {
    pub(super) const fn new(handle: AbortHandle) -> Self {
        Self(handle)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What sending a leg takes.
#[derive(Debug)]
pub(super) struct Sending {
    worker: Arc<Worker>,
    request: Request<()>,
    body: Bytes,
    limits: DriveLimits,
    /// It carries what can be used once.
    once: bool,
    /// The client has the first piece of its answer.
    has_begun: bool,
    /// The breaker has not been told anything.
    untold: Untold,
}

/// Gives a breaker's place back when its leg is dropped without a verdict.
#[derive(Debug)]
struct Untold(Option<Arc<Worker>>);

impl Drop for Untold {
    fn drop(&mut self) {
        if let Some(worker) = self.0.take() {
            worker.abandoned();
        }
    }
}

impl Sending {
    /// Writes a leg to a worker.
    pub(super) fn new(request: &DriveRequest, side: &Side, leg: &Leg, limits: DriveLimits) -> Self {
        let worker = Arc::clone(&side.worker);
        let body = Bytes::from(leg.body.to_string());
        let mut headers = for_worker(
            &request.headers,
            &worker,
            side.dp_rank,
            &request.request_id,
            body.len(),
        );
        // What is compressed cannot be corrected.
        headers.remove(ACCEPT_ENCODING);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        for (name, value) in &leg.headers {
            if let Ok(value) = HeaderValue::from_str(value) {
                headers.insert(HeaderName::from_static(name), value);
            }
        }
        let mut head = Request::new(());
        *head.method_mut() = Method::POST;
        *head.uri_mut() = uri(worker.config.url.prefix(), &request.path);
        *head.headers_mut() = headers;
        Self {
            untold: Untold(Some(Arc::clone(&worker))),
            worker,
            request: head,
            body,
            limits,
            once: false,
            has_begun: false,
        }
    }

    /// Lets it be sent a single time, whatever becomes of the connection.
    pub(super) const fn once(mut self) -> Self {
        self.once = true;
        self
    }

    /// Runs the prefill leg.
    pub(super) async fn prefill(mut self, events: mpsc::Sender<LegEvent>) {
        let result = match self.open().await {
            Ok((_, body)) => self.collect(body).await,
            Err(error) => Err(error),
        };
        if result.is_ok() {
            self.worker.completed();
        }
        // The handoff is there as long as its legs are.
        let _ = events.send(LegEvent::Prefilled(result)).await;
    }

    /// Runs the decode leg.
    pub(super) async fn decode(mut self, attempt: Attempt, events: mpsc::Sender<LegEvent>) {
        let last = match self.forward(attempt, &events).await {
            Ok(()) => {
                self.worker.completed();
                LegEvent::Ended(attempt)
            }
            Err(error) => LegEvent::Failed(attempt, error),
        };
        let _ = events.send(last).await;
    }

    async fn forward(
        &mut self,
        attempt: Attempt,
        events: &mpsc::Sender<LegEvent>,
    ) -> Result<(), LegError> {
        let start = Instant::now();
        let (parts, mut body) = self.open().await?;
        let mut piece = self.first_piece(&parts, &mut body, start).await?;
        let _ = events.send(LegEvent::Began(attempt, Box::new(parts))).await;
        self.has_begun = true;
        while let Some(bytes) = piece {
            self.worker.count_progress();
            let _ = events.send(LegEvent::Piece(attempt, bytes)).await;
            piece = self.piece(&mut body, self.limits.idle).await?;
        }
        Ok(())
    }

    /// Waits for the first piece of an answer; where it is a stream made of what can be used once, for its first output.
    async fn first_piece(
        &mut self,
        parts: &Parts,
        body: &mut UpstreamBody,
        start: Instant,
    ) -> Result<Option<Bytes>, LegError> {
        let is_looked_at = self.once && is_event_stream(&parts.headers);
        let mut opening = Opening::default();
        loop {
            let limit = self.limits.first_byte.saturating_sub(start.elapsed());
            let piece = match self.piece(body, limit).await {
                // It is there, and had begun to answer.
                Err(error) if !opening.is_empty() => {
                    return Err(LegError {
                        failure: Failure::Failed,
                        ..error
                    });
                }
                piece => piece?,
            };
            if !is_looked_at {
                return Ok(piece);
            }
            let Some(piece) = piece else {
                return Ok(opening.rest());
            };
            match opening.feed(&piece) {
                Opened::No => {}
                Opened::Yes => return Ok(opening.rest()),
                Opened::Failed(why) => {
                    let why = format!("failed before its first output: {why}");
                    return Err(LegError::new(Failure::Failed, &self.worker, &why));
                }
            }
        }
    }

    /// Sends the request; returns an answer of success, or how it failed.
    async fn open(&mut self) -> Result<(Parts, UpstreamBody), LegError> {
        let request = || {
            let mut request = Request::new(Full::new(self.body.clone()));
            *request.method_mut() = self.request.method().clone();
            *request.uri_mut() = self.request.uri().clone();
            request.headers_mut().clone_from(self.request.headers());
            request
        };
        let lifeline = self.worker.lifeline();
        let pool = &self.worker.pool;
        let sending = tokio::time::timeout(self.limits.first_byte, async {
            if self.once {
                pool.send_once(request()).await
            } else {
                pool.send(request).await
            }
        });
        let sent = tokio::select! {
            biased;
            sent = sending => sent,
            () = lifeline.cancelled() => return Err(self.gone()),
        };
        let response = match sent {
            Ok(Ok(response)) => response,
            Ok(Err(UpstreamError::Connect(why) | UpstreamError::Slow(why))) => {
                let error = self.lost(Failure::Unreachable, &format!("cannot be reached: {why}"));
                return Err(LegError {
                    unconnected: true,
                    ..error
                });
            }
            Ok(Err(UpstreamError::Broken(why) | UpstreamError::Ended(why))) => {
                let why = format!("ended the connection before its answer: {why}");
                return Err(self.lost(Failure::Unreachable, &why));
            }
            Err(_) => return Err(self.lost(Failure::Failed, "did not answer in time")),
        };
        let (parts, body) = response.into_parts();
        let verdict = match Verdict::of(parts.status) {
            // So it answers as well when it is the other worker that cannot be fetched from.
            Verdict::Failure if self.once => Verdict::Neutral,
            verdict => verdict,
        };
        if verdict == Verdict::BackPressure {
            self.worker.metrics.back_pressure.inc();
        }
        self.told().responded(verdict, Instant::now());
        if parts.status.is_success() {
            return Ok((parts, body));
        }
        Err(self.refused(parts, body).await)
    }

    async fn refused(&mut self, parts: Parts, body: UpstreamBody) -> LegError {
        let status = parts.status;
        let rejected = status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS;
        let failure = if rejected {
            Failure::Rejected
        } else {
            Failure::Failed
        };
        let error = LegError::new(failure, &self.worker, &format!("answered {status}"));
        match self.collect(body).await {
            Ok(body) => LegError {
                answer: Some((Box::new(parts), body)),
                ..error
            },
            Err(_) => error,
        }
    }

    async fn collect(&mut self, mut body: UpstreamBody) -> Result<Bytes, LegError> {
        let mut whole = Vec::new();
        while let Some(piece) = self.piece(&mut body, self.limits.idle).await? {
            if whole.len() + piece.len() > self.limits.max_answer_bytes {
                return Err(self.lost(Failure::Failed, "answers with more than is accepted"));
            }
            whole.extend_from_slice(&piece);
        }
        Ok(whole.into())
    }

    /// Returns the next piece with data; `None` at the end.
    async fn piece(
        &mut self,
        body: &mut UpstreamBody,
        limit: Duration,
    ) -> Result<Option<Bytes>, LegError> {
        let lifeline = self.worker.lifeline();
        loop {
            let next = tokio::time::timeout(limit, body.frame());
            let frame = tokio::select! {
                biased;
                frame = next => frame,
                // Whoever has begun to answer may finish: it breaks off by itself when its worker does.
                () = lifeline.cancelled(), if !self.has_begun => return Err(self.gone()),
            };
            match frame {
                Err(_) => return Err(self.lost(Failure::Failed, "sent nothing for too long")),
                Ok(None) => return Ok(None),
                Ok(Some(Err(error))) => {
                    let why = format!("ended its answer before it was complete: {error}");
                    return Err(self.lost(Failure::Unreachable, &why));
                }
                Ok(Some(Ok(frame))) => {
                    if let Ok(piece) = frame.into_data()
                        && !piece.is_empty()
                    {
                        return Ok(Some(piece));
                    }
                }
            }
        }
    }

    fn gone(&mut self) -> LegError {
        LegError::new(
            Failure::Unreachable,
            &self.worker,
            "went down or was removed",
        )
    }

    fn lost(&mut self, failure: Failure, why: &str) -> LegError {
        self.told().failed(Instant::now());
        LegError::new(failure, &self.worker, why)
    }

    fn told(&mut self) -> &Worker {
        self.untold.0 = None;
        &self.worker
    }
}
