//! Carries a handoff out: sends the legs, tells the state machine what happens, and answers the client.
//!
//! It does not know who asks. Given a request and two booked workers it returns a response; the rest goes on in a task of
//! its own, which outlives the client where a prefill worker still holds a cache. Dropping the response, or not waiting
//! for it, is how a client leaves.

mod client;
mod leg;
mod metrics;
mod opening;
mod run;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::{HeaderMap, Response, StatusCode};
use kvlane::handoff::{HandoffPlanner, PrefillWork, TransferGuard};
use kvlane::{Outcome, RequestGuard, WorkerRank};
use serde_json::Value;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::gaps::Gaps;
use super::pairing::PairTerms;
use crate::fleet::{InFlight, Worker};
use crate::forward::{ClientBody, Problem};
use crate::request::Endpoint;

pub use metrics::HandoffMetrics;

use client::Client;
use run::Run;

/// The request to split.
#[derive(Clone, Debug)]
pub struct DriveRequest {
    /// Its API.
    pub endpoint: Endpoint,
    /// Path and query, as they go to both workers.
    pub path: Bytes,
    /// The client's headers, without those that concern its connection or name a destination.
    pub headers: HeaderMap,
    /// Its name, the same on both legs.
    pub request_id: String,
    /// The body as the client sent it.
    pub body: Arc<Value>,
    /// When it came.
    pub started: Instant,
    /// An engine's usage can be held against the prompt.
    pub audited: bool,
}

/// One of the two workers, booked for the request and admitted by its breaker.
#[derive(Debug)]
pub struct Side {
    worker: Arc<Worker>,
    dp_rank: u32,
    guard: Option<RequestGuard>,
    legs: Legs,
    /// As long as it is booked: a worker that drains waits for no more.
    in_flight: Option<InFlight>,
}

/// The legs of one worker.
#[derive(Clone, Copy, Debug, Default)]
struct Legs {
    /// Those that were begun. The first takes the breaker's place over.
    begun: u32,
    /// Those of them that never got a connection.
    unconnected: u32,
}

impl Side {
    /// Takes over a booking.
    #[must_use]
    pub fn new(worker: Arc<Worker>, guard: RequestGuard) -> Self {
        Self {
            dp_rank: guard.dp_rank(),
            in_flight: Some(worker.enter()),
            worker,
            guard: Some(guard),
            legs: Legs::default(),
        }
    }

    /// Returns the worker.
    #[must_use]
    pub const fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    fn target(&self) -> WorkerRank {
        WorkerRank {
            worker: self.worker.config.id.clone(),
            dp_rank: self.dp_rank,
        }
    }

    fn rank(&self) -> (u32, u32) {
        (self.dp_rank, self.worker.config.dp_ranks)
    }

    const fn is_booked(&self) -> bool {
        self.guard.is_some()
    }

    fn prefill_done(&self, now: Instant) {
        if let Some(guard) = &self.guard {
            guard.prefill_done(now);
            let uncached = guard.decision().cost.uncached_prefill_blocks;
            self.worker.pulse.computed(uncached);
        }
    }

    fn output_tokens(&self, total: u32, now: Instant) {
        if let Some(guard) = &self.guard {
            guard.output_tokens(total, now);
        }
    }

    const fn leg_begins(&mut self) {
        self.legs.begun += 1;
    }

    const fn leg_did_not_connect(&mut self) {
        self.legs.unconnected += 1;
    }

    /// Tells whether the worker may have seen anything of the request.
    const fn was_reached(&self) -> bool {
        self.legs.begun > self.legs.unconnected
    }

    /// Ends the booking. Where nothing of the request reached the worker, it says nothing of the worker, and the note of where the
    /// prompt went is taken back.
    fn release(&mut self, outcome: &Outcome, now: Instant) {
        self.in_flight = None;
        let Some(guard) = self.guard.take() else {
            return;
        };
        if self.was_reached() {
            guard.release(outcome, now);
        } else {
            guard.release(&Outcome::not_dispatched(), now);
        }
    }
}

impl Drop for Side {
    /// Gives back what no leg has used: the breaker's place, and the booking.
    fn drop(&mut self) {
        if self.legs.begun == 0 {
            self.worker.abandoned();
        }
        if !self.was_reached() {
            self.release(&Outcome::not_dispatched(), Instant::now());
        }
    }
}

/// The two workers and how they hand over.
#[derive(Debug)]
pub struct Pair {
    /// It processes the prompt.
    pub prefill: Side,
    /// It decodes.
    pub decode: Side,
    /// How they hand over.
    pub terms: PairTerms,
    /// The plan's transfer, from which its link's speed is learned.
    pub transfer: Option<TransferGuard>,
    /// The prompt as it was planned, from which the prefill worker's speed is learned.
    pub work: PrefillWork,
}

/// Bounds of what a handoff waits for and keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriveLimits {
    /// From sending a leg to the first byte of its answer's body.
    pub first_byte: Duration,
    /// Between two pieces of an answer.
    pub idle: Duration,
    /// Bytes of an answer that is kept whole: the prefill leg's, or the client's when it is no stream.
    pub max_answer_bytes: usize,
    /// Requests in flight from which on a decode worker fetches nothing for a client that has left.
    pub busy_requests: usize,
}

impl Default for DriveLimits {
    /// 300 seconds, 120 seconds, 64 MiB and 128 requests.
    fn default() -> Self {
        Self {
            first_byte: Duration::from_secs(300),
            idle: Duration::from_secs(120),
            max_answer_bytes: 64 << 20,
            busy_requests: 128,
        }
    }
}

/// Carries handoffs out.
#[derive(Debug)]
pub struct Driver {
    shared: Arc<Shared>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

#[derive(Debug)]
struct Shared {
    limits: DriveLimits,
    metrics: HandoffMetrics,
    planner: Option<Arc<HandoffPlanner>>,
    gaps: Option<Gaps>,
}

impl Driver {
    /// Creates a driver that teaches `planner` what it observes.
    #[must_use]
    pub fn new(
        limits: DriveLimits,
        metrics: HandoffMetrics,
        planner: Option<Arc<HandoffPlanner>>,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                limits,
                metrics,
                gaps: planner.clone().map(Gaps::new),
                planner,
            }),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        }
    }

    /// Returns what observes the gaps between tokens, for whoever forwards streams that are not split.
    #[must_use]
    pub fn gaps(&self) -> Option<&Gaps> {
        self.shared.gaps.as_ref()
    }

    /// Returns the number of handoffs that are not over.
    #[must_use]
    pub fn open(&self) -> usize {
        self.tasks.len()
    }

    /// Serves a request on two workers. Cancelling `close` makes the client's connection end after this response.
    pub async fn drive(
        &self,
        request: DriveRequest,
        pair: Pair,
        close: CancellationToken,
    ) -> Response<ClientBody> {
        let (answer, answered) = oneshot::channel();
        let client = Client::new(answer, close);
        let run = Run::new(Arc::clone(&self.shared), request, pair, client);
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = run.finish() => {}
            }
        });
        answered.await.unwrap_or_else(|_| {
            let message = "the router stops, and with it this handoff";
            Problem::new(StatusCode::BAD_GATEWAY, message).response()
        })
    }

    /// Ends every handoff at once; what prefill workers hold is left to its lease.
    pub async fn stop(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[cfg(test)]
mod tests;
