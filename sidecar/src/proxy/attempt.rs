//! One request's way to a worker: choose, send, and choose again when that fails before the first byte.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, StatusCode};
use kvlane::{Outcome, RequestGuard, Role, SelectRequest, WorkerId};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::stream::{Booking, ForwardBody};
use super::{Head, Proxy, ProxyBody, Refusal};
use crate::fleet::Worker;
use crate::forward::breaker::Verdict;
use crate::forward::upstream::{UpstreamBody, UpstreamError};
use crate::forward::{add_debug, for_worker, towards_client, uri};
use crate::request::Reading;
use crate::sparing::warn_sparingly;

/// A request on its way.
pub(super) struct Attempt<'a> {
    proxy: &'a Arc<Proxy>,
    head: &'a Head,
    reading: Reading,
    /// What a handoff plan said, where there was one.
    planned: Option<Arc<serde_json::Value>>,
    /// Workers that failed it, or had no place for it.
    tried: Vec<WorkerId>,
    last_failure: Option<String>,
}

/// How one worker failed a request before its first byte.
enum Failure {
    /// It never got the request.
    Connect(String),
    /// It got it and its connection ended.
    Broken(String),
    /// It was removed or went down meanwhile.
    Gone,
    /// It did not answer in time. Another worker would not be faster, and may be given the same work twice.
    Timeout,
}

impl<'a> Attempt<'a> {
    pub(super) const fn new(
        proxy: &'a Arc<Proxy>,
        head: &'a Head,
        reading: Reading,
        planned: Option<Arc<serde_json::Value>>,
    ) -> Self {
        Self {
            proxy,
            head,
            reading,
            planned,
            tried: Vec::new(),
            last_failure: None,
        }
    }

    pub(super) async fn run(
        mut self,
        close: &CancellationToken,
    ) -> Result<Response<ProxyBody>, Refusal> {
        while let Some((worker, guard)) = self.place()? {
            if let (Some(splitter), Some(planned)) = (&self.proxy.splitter, &self.planned) {
                splitter.note(guard.id(), planned);
            }
            let booking = Booking::new(
                guard,
                Arc::clone(&worker),
                self.head.endpoint,
                self.head.started,
                self.reading.audited,
            );
            let splitter = self.proxy.splitter.as_ref();
            let lesson = splitter.and_then(|splitter| {
                splitter.lesson(self.proxy, &self.reading, booking.decision())
            });
            let booking = booking.teaches(lesson);
            match self.send(&worker, booking.dp_rank()).await {
                Ok(response) => return Ok(self.forward(response, booking, close)),
                Err(failure) => self.give_up_on(&worker, booking, failure)?,
            }
        }
        Err(self.no_worker())
    }

    /// Chooses and books a worker whose breaker lets the request pass.
    fn place(&mut self) -> Result<Option<(Arc<Worker>, RequestGuard)>, Refusal> {
        loop {
            let Some(guard) = self.choose()? else {
                return Ok(None);
            };
            let members = self.proxy.fleet.members();
            let worker = members.find(guard.worker()).cloned();
            match worker {
                Some(worker) if worker.admit() => return Ok(Some((worker, guard))),
                _ => {
                    self.tried.push(guard.target().worker.clone());
                    guard.release(&Outcome::not_dispatched(), Instant::now());
                }
            }
        }
    }

    fn choose(&self) -> Result<Option<RequestGuard>, Refusal> {
        let proxy = self.proxy;
        let members = proxy.fleet.members();
        let allowed: Option<Vec<WorkerId>> = if self.tried.is_empty() {
            self.reading.only.clone()
        } else {
            let all = members.list().iter().map(|worker| &worker.config.id);
            let may = |id: &&WorkerId| {
                !self.tried.contains(id)
                    && self
                        .reading
                        .only
                        .as_ref()
                        .is_none_or(|only| only.contains(id))
            };
            Some(all.filter(may).cloned().collect())
        };
        let mut request = SelectRequest::new(&self.reading.prompt);
        request.allowed = allowed.as_deref();
        request.session = self.head.session.as_deref();
        request.priority = self.head.priority;
        request.role = Some(Role::Decode);
        request.extra_blocks = self.reading.extra_blocks;
        request.expected_output_tokens = self.reading.expected_output_tokens;
        let now = Instant::now();
        let guard = proxy
            .chooser
            .choose(&members, &request, now)
            .map_err(|error| {
                Refusal::new(
                    "router",
                    StatusCode::SERVICE_UNAVAILABLE,
                    &error.to_string(),
                )
            })?;
        if let Some(guard) = &guard {
            let policy = proxy.config.policy.as_str();
            proxy
                .metrics
                .count_decision(policy, guard.worker(), now.elapsed());
        }
        Ok(guard)
    }

    async fn send(
        &self,
        worker: &Arc<Worker>,
        dp_rank: u32,
    ) -> Result<Response<UpstreamBody>, Failure> {
        let request = || self.request_for(worker, dp_rank);
        let lifeline = worker.lifeline();
        let first_byte =
            tokio::time::timeout(self.proxy.timeouts.first_byte, worker.pool.send(request));
        tokio::select! {
            biased;
            answered = first_byte => match answered {
                // Upgrades are never asked for, so this is no answer, and nothing of HTTP follows it.
                Ok(Ok(response)) if response.status().is_informational() => {
                    Err(Failure::Broken(format!("it answered {}", response.status())))
                }
                Ok(Ok(response)) => Ok(response),
                Ok(Err(UpstreamError::Connect(why) | UpstreamError::Slow(why))) => {
                    Err(Failure::Connect(why))
                }
                Ok(Err(UpstreamError::Broken(why) | UpstreamError::Ended(why))) => {
                    Err(Failure::Broken(why))
                }
                Err(_) => Err(Failure::Timeout),
            },
            () = lifeline.cancelled() => Err(Failure::Gone),
        }
    }

    fn request_for(&self, worker: &Worker, dp_rank: u32) -> Request<Full<Bytes>> {
        let head = self.head;
        let body = self.reading.body.clone();
        let mut request = Request::new(Full::new(body.clone()));
        *request.method_mut() = head.method.clone();
        *request.uri_mut() = uri(worker.config.url.prefix(), &head.path);
        *request.headers_mut() =
            for_worker(&head.headers, worker, dp_rank, &head.request_id, body.len());
        request
    }

    /// Releases what was booked on a worker that failed, and decides whether to go on.
    fn give_up_on(
        &mut self,
        worker: &Worker,
        booking: Booking,
        failure: Failure,
    ) -> Result<(), Refusal> {
        let now = Instant::now();
        self.tried.push(worker.config.id.clone());
        let why = match failure {
            Failure::Connect(why) => {
                worker.failed(now);
                worker.metrics.retries_connect.inc();
                booking.release(&Outcome::not_dispatched(), now);
                format!("worker {:?} could not be reached: {why}", worker.id())
            }
            Failure::Broken(why) => {
                worker.failed(now);
                worker.metrics.retries_broken.inc();
                booking.release(&Outcome::failed(), now);
                format!(
                    "worker {:?} ended the connection before its response: {why}",
                    worker.id()
                )
            }
            Failure::Gone => {
                worker.abandoned();
                worker.metrics.retries_gone.inc();
                booking.release(&Outcome::failed(), now);
                format!(
                    "worker {:?} left while the request waited for it",
                    worker.id()
                )
            }
            Failure::Timeout => {
                worker.failed(now);
                booking.release(&Outcome::failed(), now);
                let message = format!(
                    "worker {:?} sent nothing within {} seconds",
                    worker.id(),
                    self.proxy.config.first_byte_timeout_seconds
                );
                return Err(Refusal::new(
                    "first_byte_timeout",
                    StatusCode::GATEWAY_TIMEOUT,
                    &message,
                ));
            }
        };
        debug!(request_id = self.head.request_id, "{why}");
        self.last_failure = Some(why);
        Ok(())
    }

    fn no_worker(self) -> Refusal {
        match self.last_failure {
            Some(why) => {
                warn_sparingly!(
                    request_id = self.head.request_id,
                    cause = why,
                    "no worker could serve the request"
                );
                Refusal::new("upstream_failed", StatusCode::BAD_GATEWAY, &why)
            }
            None => Refusal::new(
                "no_eligible_worker",
                StatusCode::SERVICE_UNAVAILABLE,
                if self.proxy.fleet.members().list().is_empty() {
                    "no worker is eligible: there is none in the pool"
                } else {
                    "no worker is eligible: all are unhealthy, draining, or do not serve this request"
                },
            ),
        }
    }

    fn forward(
        &self,
        response: Response<UpstreamBody>,
        booking: Booking,
        close: &CancellationToken,
    ) -> Response<ProxyBody> {
        let (mut parts, body) = response.into_parts();
        let worker = booking.worker();
        let verdict = Verdict::of(parts.status);
        worker.responded(verdict, Instant::now());
        if verdict == Verdict::BackPressure {
            worker.metrics.back_pressure.inc();
        }
        self.proxy.metrics.count_request(
            self.head.endpoint.as_str(),
            worker.id(),
            parts.status.as_u16(),
        );
        towards_client(&mut parts.headers);
        if self.proxy.config.debug_headers {
            add_debug(
                &mut parts.headers,
                booking.decision(),
                self.proxy.config.policy.as_str(),
            );
        }
        let body = ForwardBody::new(
            body,
            booking,
            &parts,
            self.proxy.timeouts.response_idle,
            close.clone(),
        );
        Response::from_parts(parts, body.boxed_unsync())
    }
}
