//! Requests that are worth two workers: planned, booked on both, and handed to the driver.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::{Method, Response};
use kvlane::handoff::{
    HandoffPlan, HandoffPlanner, KvShape, LinkId, PlanRequest, PlanWorker, PrefillWork, Route,
    TransferGuard,
};
use kvlane::{Candidate, Decision, Role, SelectRequest, WorkerRank};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::{Head, Proxy, ProxyBody, Timeouts};
use crate::config::{Config, HandoffSettings, seconds};
use crate::fleet::Members;
use crate::forward::add_debug;
use crate::handoff::{
    DriveLimits, DriveRequest, Driver, HandoffMetrics, Nixl, Pair, Side, check_splittable,
};
use crate::request::{Mode, Reading};

/// Plans and drives handoffs.
#[derive(Debug)]
pub(super) struct Splitter {
    planner: Arc<HandoffPlanner>,
    driver: Driver,
    shape: KvShape,
    link: LinkId,
    lease: Duration,
    plans: Mutex<VecDeque<Value>>,
}

/// Plans that are kept to be looked at.
const KEPT_PLANS: usize = 16;

/// A request that two workers are booked for.
pub(super) struct Split {
    request: DriveRequest,
    pair: Pair,
    decision: Arc<Decision>,
}

/// What the planner learns from a request that one worker serves.
#[derive(Debug)]
pub(super) struct Lesson {
    planner: Arc<HandoffPlanner>,
    work: PrefillWork,
    sent: Instant,
}

impl Lesson {
    /// Tells the planner that the first token came.
    pub(super) fn teach(&self, worker: &WorkerRank, now: Instant) {
        let elapsed = now.saturating_duration_since(self.sent);
        self.planner.observe_prefill(worker, &self.work, elapsed);
    }
}

/// What was chosen for a request.
struct Chosen {
    prefill: WorkerRank,
    decode: WorkerRank,
    work: PrefillWork,
    transfer: Option<TransferGuard>,
}

impl Splitter {
    pub(super) fn new(
        settings: &HandoffSettings,
        config: &Config,
        timeouts: Timeouts,
        metrics: HandoffMetrics,
    ) -> kvlane::Result<Self> {
        let (planner, shape, link) = settings.planner()?;
        let planner = Arc::new(planner);
        let limits = DriveLimits {
            first_byte: timeouts.first_byte,
            idle: timeouts.response_idle,
            max_answer_bytes: config.max_body_bytes,
        };
        Ok(Self {
            driver: Driver::new(limits, metrics, Some(Arc::clone(&planner))),
            planner,
            shape,
            link,
            lease: seconds(settings.lease_seconds),
            plans: Mutex::default(),
        })
    }

    /// Plans a request; `None` when one worker serves it.
    pub(super) async fn plan(
        &self,
        proxy: &Proxy,
        head: &Head,
        reading: &Reading,
    ) -> Option<Split> {
        if head.method != Method::POST || reading.mode == Mode::Load || reading.extra_blocks > 0 {
            return None;
        }
        let members = proxy.fleet.members();
        let is_prefill = |role: Role| role == Role::Prefill;
        if !members
            .list()
            .iter()
            .any(|worker| is_prefill(worker.role()))
        {
            return None;
        }
        let now = Instant::now();
        let chosen = self.choose(proxy, &members, head, reading, now)?;
        let body = read_body(proxy, head, reading).await?;
        if let Err(reason) = check_splittable(head.endpoint, &body) {
            debug!(request_id = head.request_id, %reason, "request is not split");
            return None;
        }
        self.book(proxy, &members, (head, reading), chosen, body)
    }

    /// Returns what can be learned from a request that goes to one worker now; nothing where its tokens are a guess.
    pub(super) fn lesson(
        &self,
        proxy: &Proxy,
        reading: &Reading,
        decision: &Decision,
    ) -> Option<Lesson> {
        if reading.mode != Mode::Tokens || reading.extra_blocks > 0 {
            return None;
        }
        let block_size = proxy.config.router.block_size.tokens() as u64;
        Some(Lesson {
            planner: Arc::clone(&self.planner),
            work: PrefillWork {
                input_tokens: reading.prompt.tokens() as u64,
                cached_tokens: u64::from(decision.predicted_cached_tokens),
                queued_tokens: tokens(decision.cost.booked_prefill_blocks, block_size),
            },
            sent: Instant::now(),
        })
    }

    /// Serves a planned request.
    pub(super) async fn drive(
        &self,
        proxy: &Proxy,
        split: Split,
        close: &CancellationToken,
    ) -> Response<ProxyBody> {
        let Split {
            request,
            pair,
            decision,
        } = split;
        let endpoint = request.endpoint.as_str();
        let mut response = self.driver.drive(request, pair, close.clone()).await;
        let worker = decision.target.worker.as_str();
        let status = response.status().as_u16();
        proxy.metrics.count_request(endpoint, worker, status);
        if proxy.config.debug_headers {
            add_debug(response.headers_mut(), &decision, "handoff");
        }
        response
    }

    fn choose(
        &self,
        proxy: &Proxy,
        members: &Members,
        head: &Head,
        reading: &Reading,
        now: Instant,
    ) -> Option<Chosen> {
        let request = select(head, reading);
        let block_size = proxy.config.router.block_size.tokens() as u64;
        let candidates = proxy.router.rank(&request, now).ok()?;
        let workers: Vec<PlanWorker> = candidates
            .iter()
            .filter_map(|candidate| {
                let worker = members.find(candidate.target.worker.as_str())?;
                Some(plan_worker(candidate, worker.role(), block_size))
            })
            .collect();
        let input_tokens = reading.prompt.tokens() as u64;
        let request = PlanRequest {
            input_tokens,
            shape: &self.shape,
            splittable: true,
        };
        let link = |_: &PlanWorker, _: &PlanWorker| Some(self.link.clone());
        let plan = self.planner.plan(&request, &workers, link, now);
        self.keep(&head.request_id, &plan);
        let Route::Pair {
            prefill, decode, ..
        } = &plan.chosen()?.route
        else {
            return None;
        };
        let at = workers.iter().find(|worker| worker.target == *prefill)?;
        Some(Chosen {
            prefill: prefill.clone(),
            decode: decode.clone(),
            work: PrefillWork {
                input_tokens,
                cached_tokens: at.cached_tokens,
                queued_tokens: at.queued_prefill_tokens,
            },
            transfer: self.planner.book(&plan, now),
        })
    }

    /// Keeps a plan to be looked at.
    fn keep(&self, request_id: &str, plan: &HandoffPlan) {
        let plan = json!({"request_id": request_id, "plan": plan});
        let mut plans = self.plans.lock();
        if plans.len() == KEPT_PLANS {
            plans.pop_front();
        }
        plans.push_back(plan);
    }

    /// Returns what is known of workers and links, and the last plans, the newest first.
    pub(super) fn report(&self) -> Value {
        let stats = self.planner.stats();
        let plans: Vec<Value> = self.plans.lock().iter().rev().cloned().collect();
        json!({"open": self.driver.open(), "prefill": stats.prefill, "links": stats.links, "plans": plans})
    }

    fn book(
        &self,
        proxy: &Proxy,
        members: &Members,
        (head, reading): (&Head, &Reading),
        chosen: Chosen,
        body: Value,
    ) -> Option<Split> {
        let side = |target: &WorkerRank, request: &SelectRequest<'_>| {
            let worker = members.find(target.worker.as_str())?;
            let (id, rank) = (worker.id(), Some(target.dp_rank));
            let guard = proxy.router.book(id, rank, request, Instant::now()).ok()?;
            worker.admit().then(|| {
                let decision = Arc::clone(guard.decision());
                (Side::new(Arc::clone(worker), guard), decision)
            })
        };
        let request = select(head, reading);
        let mut prompt_only = request.clone();
        prompt_only.expected_output_tokens = Some(1);
        let (prefill, _) = side(&chosen.prefill, &prompt_only)?;
        let Some((decode, decision)) = side(&chosen.decode, &request) else {
            prefill.give_back();
            return None;
        };
        Some(Split {
            request: DriveRequest {
                endpoint: head.endpoint,
                path: head.path.clone(),
                headers: head.headers.clone(),
                request_id: head.request_id.clone(),
                body: Arc::new(body),
                started: head.started,
                audited: reading.audited,
            },
            pair: Pair {
                prefill,
                decode,
                protocol: Arc::new(Nixl::new(self.lease)),
                lease: self.lease,
                may_fall_back: true,
                bootstrap_port: 0,
                prefill_engine: None,
                transfer: chosen.transfer,
                work: chosen.work,
            },
            decision,
        })
    }
}

fn select<'a>(head: &'a Head, reading: &'a Reading) -> SelectRequest<'a> {
    let mut request = SelectRequest::new(&reading.prompt);
    request.allowed = reading.only.as_deref();
    request.session = head.session.as_deref();
    request.priority = head.priority;
    request.expected_output_tokens = reading.expected_output_tokens;
    request
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "loads are not negative and far below 2^53; `as` saturates"
)]
fn plan_worker(candidate: &Candidate, role: Role, block_size: u64) -> PlanWorker {
    let held = u64::from(candidate.overlap.blocks()) + u64::from(candidate.predicted_blocks);
    let queued = tokens(candidate.cost.booked_prefill_blocks, block_size);
    // What is booked on a prefill worker are prompts, and caches that wait to be fetched: no stream would stall.
    let streams = if role.serves(Role::Decode) {
        candidate.cost.active_requests as u32
    } else {
        0
    };
    PlanWorker::new(candidate.target.clone(), role)
        .cached_tokens(held * block_size)
        .queued_prefill_tokens(queued)
        .running_streams(streams)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "loads are not negative and far below 2^53; `as` saturates"
)]
fn tokens(blocks: f64, block_size: u64) -> u64 {
    (blocks * block_size as f64) as u64
}

/// Parses the body, on another thread when it is much work.
async fn read_body(proxy: &Proxy, head: &Head, reading: &Reading) -> Option<Value> {
    let body = reading.body.clone();
    if !proxy.reader.is_heavy(head.endpoint, body.len()) {
        return serde_json::from_slice(&body).ok();
    }
    let parsing = tokio::task::spawn_blocking(move || serde_json::from_slice(&body).ok());
    parsing.await.ok().flatten()
}
