//! The OpenAI-compatible proxy: every request goes to the worker that the policy chooses, as it came.
//!
//! # Contract
//! - Bodies pass unchanged in both directions; response pieces are forwarded as they arrive, never collected or re-framed.
//! - A booking begins with the decision and ends when the response body ends, breaks, or is dropped by a client that left;
//!   dropping also closes the connection to the worker, which is how an engine learns to stop.
//! - Before the first response byte a failure is retried, each worker once. Afterwards nothing is retried: an event
//!   stream gets one error event and no `[DONE]`, anything else is cut off, and the client's connection is closed.
//! - Headers by which a client could choose a destination are removed and never acted upon.

pub mod usage;

mod attempt;
mod body;
mod policy;
mod split;
mod stream;

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};
use kvlane::{LeaseId, Router};
use tokio_util::sync::CancellationToken;

use crate::config::{Config, seconds};
use crate::fleet::Fleet;
use crate::forward::{request_id, towards_worker};
use crate::metrics::Metrics;
use crate::request::{Endpoint, Reader, Reading, Trusted};

pub use crate::forward::ClientBody as ProxyBody;
pub(crate) use crate::forward::{Problem, full};

use attempt::Attempt;
use body::BodyError;
use policy::Chooser;
use split::{Planned, Splitter};

/// The proxy: share it behind an `Arc`, and give it every request of every connection.
#[derive(Debug)]
pub struct Proxy {
    config: Arc<Config>,
    fleet: Arc<Fleet>,
    reader: Arc<Reader>,
    metrics: Arc<Metrics>,
    chooser: Chooser,
    router: Arc<Router>,
    splitter: Option<Splitter>,
    timeouts: Timeouts,
}

/// The configured times, converted once.
#[derive(Clone, Copy, Debug)]
struct Timeouts {
    client_idle: Duration,
    first_byte: Duration,
    response_idle: Duration,
}

/// Longest path and query of a request. With a worker's own path before it, it stays below what a URI may have.
const MAX_PATH: usize = 60_000;

/// What is known of a request besides its body.
struct Head {
    method: Method,
    path: Bytes,
    headers: hyper::HeaderMap,
    endpoint: Endpoint,
    request_id: String,
    session: Option<String>,
    priority: i32,
    started: Instant,
}

impl Proxy {
    /// Puts a proxy together.
    ///
    /// # Errors
    /// A value of `handoff` is out of range.
    pub fn new(
        config: Arc<Config>,
        router: Arc<Router>,
        fleet: Arc<Fleet>,
        reader: Arc<Reader>,
        metrics: Arc<Metrics>,
    ) -> kvlane::Result<Self> {
        let timeouts = Timeouts {
            client_idle: seconds(config.client_idle_timeout_seconds),
            first_byte: seconds(config.first_byte_timeout_seconds),
            response_idle: seconds(config.response_idle_timeout_seconds),
        };
        let splitter = match &config.handoff {
            Some(settings) => {
                let counts = metrics.handoff.clone();
                Some(Splitter::new(settings, &config, &fleet, timeouts, counts)?)
            }
            None => None,
        };
        Ok(Self {
            splitter,
            chooser: Chooser::new(config.policy, Arc::clone(&router)),
            router,
            config,
            fleet,
            reader,
            metrics,
            timeouts,
        })
    }

    /// Answers one request. Cancelling `close` makes the client's connection end after this response.
    ///
    /// # Errors
    /// Never; the type is what a connection wants.
    pub async fn handle(
        self: Arc<Self>,
        request: Request<Incoming>,
        close: CancellationToken,
    ) -> Result<Response<ProxyBody>, Infallible> {
        let started = Instant::now();
        let response = match self.serve(request, &close, started).await {
            Ok(response) => response,
            Err(refusal) => {
                self.metrics.count_rejected(refusal.reason);
                if refusal.closes {
                    close.cancel();
                }
                refusal.problem.response()
            }
        };
        Ok(response)
    }

    /// Returns what is known of handoffs, and the last plans; null where requests are not split.
    #[must_use]
    pub fn handoff_report(&self) -> serde_json::Value {
        let splitter = self.splitter.as_ref();
        splitter.map_or(serde_json::Value::Null, Splitter::report)
    }

    /// Forgets what was learned of workers that are gone.
    pub(crate) fn sweep(&self) {
        if let Some(splitter) = &self.splitter {
            splitter.sweep();
        }
    }

    /// Tells whether what splitting takes is known of the workers that were there at first.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.splitter.as_ref().is_none_or(Splitter::is_settled)
    }

    /// Returns what handoff plans said of the bookings of the last decisions.
    #[must_use]
    pub fn handoff_summaries(&self) -> HashMap<LeaseId, Arc<serde_json::Value>> {
        let splitter = self.splitter.as_ref();
        splitter.map(Splitter::summaries).unwrap_or_default()
    }

    async fn serve(
        self: &Arc<Self>,
        request: Request<Incoming>,
        close: &CancellationToken,
        started: Instant,
    ) -> Result<Response<ProxyBody>, Refusal> {
        let (parts, incoming) = request.into_parts();
        if parts.method == Method::CONNECT {
            return Err(Refusal::closing(
                "method",
                StatusCode::METHOD_NOT_ALLOWED,
                "CONNECT is not supported: requests go to the configured workers only",
            ));
        }
        let trusted = self.trusted(&parts.headers)?;
        let session = self.believed(&parts.headers, "x-session-id");
        let priority = self.believed(&parts.headers, "x-kvlane-priority");
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        if path.len() > MAX_PATH {
            return Err(Refusal::closing(
                "path_too_long",
                StatusCode::URI_TOO_LONG,
                &format!("the path is longer than {MAX_PATH} bytes"),
            ));
        }
        let head = Head {
            endpoint: Endpoint::of(parts.uri.path()),
            path: Bytes::copy_from_slice(path.as_bytes()),
            request_id: request_id(&parts.headers),
            session,
            priority: priority.and_then(|text| text.parse().ok()).unwrap_or(0),
            started,
            headers: towards_worker(parts.headers),
            method: parts.method,
        };
        let body = body::read(
            incoming,
            &head.headers,
            self.config.max_body_bytes,
            self.timeouts.client_idle,
        )
        .await
        .map_err(Refusal::from)?;
        let mut reading = self.read(&head, body, trusted).await?;
        if let Some(field) = &reading.handoff_field
            && !self.config.allow_client_handoff_fields
        {
            return Err(Refusal::new(
                "handoff_field",
                StatusCode::BAD_REQUEST,
                &format!("{field} is set by the router alone and is not accepted from clients"),
            ));
        }
        if reading.lacks_tenant_salt {
            return Err(Refusal::new(
                "tenant_salt",
                StatusCode::BAD_REQUEST,
                "the request body is not JSON in UTF-8, so the tenant's cache salt cannot be written into it",
            ));
        }
        self.metrics.count_prompt(reading.mode.as_str());
        let mut planned = None;
        if let Some(splitter) = &self.splitter {
            match splitter.plan(self, &head, &reading).await {
                Planned::Split(split) => return Ok(splitter.drive(self, *split, close).await),
                Planned::Whole(summary) => planned = summary,
            }
            let members = self.fleet.members();
            if let Some(only) = splitter.whole_only(&members, reading.only.as_deref()) {
                reading.only = Some(only);
            }
        }
        Attempt::new(self, &head, reading, planned).run(close).await
    }

    /// Reads the request, on another thread when it is much work.
    async fn read(&self, head: &Head, body: Bytes, trusted: Trusted) -> Result<Reading, Refusal> {
        let members = self.fleet.members();
        if !self.reader.is_heavy(head.endpoint, body.len()) {
            return Ok(self.reader.read(head.endpoint, body, &trusted, &members));
        }
        let reader = Arc::clone(&self.reader);
        let endpoint = head.endpoint;
        let reading =
            tokio::task::spawn_blocking(move || reader.read(endpoint, body, &trusted, &members));
        reading.await.map_err(|_| {
            Refusal::new(
                "internal",
                StatusCode::INTERNAL_SERVER_ERROR,
                "the request could not be read because of a fault in the router",
            )
        })
    }

    /// Reads what is believed of the headers. A salt that cannot be read must not leave the choice to the body.
    fn trusted(&self, headers: &hyper::HeaderMap) -> Result<Trusted, Refusal> {
        const SALT: &str = "x-kvlane-tenant-salt";
        let readable =
            |value: &hyper::header::HeaderValue| std::str::from_utf8(value.as_bytes()).is_ok();
        let mut given = headers.get_all(SALT).iter();
        let is_clear = given.next().is_none_or(readable) && given.next().is_none();
        if self.config.trusted_headers && !is_clear {
            return Err(Refusal::new(
                "tenant_salt",
                StatusCode::BAD_REQUEST,
                "x-kvlane-tenant-salt is accepted once, in UTF-8",
            ));
        }
        Ok(Trusted {
            tenant_salt: self.believed(headers, SALT),
        })
    }

    /// Returns a header that is only believed when configured so.
    fn believed(&self, headers: &hyper::HeaderMap, name: &str) -> Option<String> {
        if !self.config.trusted_headers {
            return None;
        }
        let value = std::str::from_utf8(headers.get(name)?.as_bytes())
            .ok()?
            .trim();
        (!value.is_empty()).then(|| value.to_owned())
    }
}

/// An answer of the proxy's own.
struct Refusal {
    reason: &'static str,
    problem: Problem,
    /// The rest of the request was not read, so the connection cannot go on.
    closes: bool,
}

impl Refusal {
    fn new(reason: &'static str, status: StatusCode, message: &str) -> Self {
        Self {
            reason,
            problem: Problem::new(status, message),
            closes: false,
        }
    }

    fn closing(reason: &'static str, status: StatusCode, message: &str) -> Self {
        Self {
            closes: true,
            ..Self::new(reason, status, message)
        }
    }
}

impl From<BodyError> for Refusal {
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::TooLarge { limit } => Self::closing(
                "body_too_large",
                StatusCode::PAYLOAD_TOO_LARGE,
                &format!("the request body is larger than max_body_bytes, {limit} bytes"),
            ),
            BodyError::Stalled => Self::closing(
                "body_stalled",
                StatusCode::REQUEST_TIMEOUT,
                "the request body stopped arriving",
            ),
            BodyError::Broken => Self::closing(
                "body_broken",
                StatusCode::BAD_REQUEST,
                "the request body ended before it was complete",
            ),
        }
    }
}
