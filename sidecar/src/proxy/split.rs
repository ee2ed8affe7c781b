//! Requests that are worth two workers: planned, booked on both, and handed to the driver.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use hyper::header::HeaderValue;
use hyper::{Method, Response};
use kvlane::handoff::{
    GapCause, HandoffOption, HandoffPlan, HandoffPlanner, KvShape, PlanRequest, PlanWorker,
    PrefillWork, Route, TransferGuard,
};
use kvlane::{Candidate, Decision, LeaseId, Outcome, Role, SelectRequest, WorkerId, WorkerRank};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::{Head, Proxy, ProxyBody, Timeouts};
use crate::config::{Config, HandoffSettings, seconds};
use crate::fleet::{Fleet, Members};
use crate::forward::add_debug;
use crate::handoff::{
    Disturbing, DriveLimits, DriveRequest, Driver, HandoffMetrics, Known, Pair, PairTerms, Pairing,
    PairingRules, Peers, Side, StreamGaps, Unsplittable, check_ends, check_splittable, noticeable,
};
use crate::request::{Mode, Reading, has_few_parts};

/// Plans and drives handoffs.
#[derive(Debug)]
pub(super) struct Splitter {
    planner: Arc<HandoffPlanner>,
    driver: Driver,
    pairing: Pairing,
    fleet: Arc<Fleet>,
    shape: KvShape,
    plans: Mutex<VecDeque<Value>>,
    /// What the plan of each booking said, the oldest first.
    bookings: Mutex<VecDeque<(LeaseId, Arc<Value>)>>,
}

/// Plans that are kept to be looked at.
const KEPT_PLANS: usize = 16;
/// Bookings whose plan is kept to be shown with their decision, of which the router keeps no more.
const KEPT_BOOKINGS: usize = 1_024;

/// A request that two workers are booked for.
pub(super) struct Split {
    request: DriveRequest,
    pair: Pair,
    decision: Arc<Decision>,
}

/// What a plan came to.
pub(super) enum Planned {
    /// Two workers serve the request.
    Split(Box<Split>),
    /// One does, for this reason where there was a plan.
    Whole(Option<Arc<Value>>),
}

/// What the planner learns from a request that one worker serves.
#[derive(Debug)]
pub(super) struct Lesson {
    planner: Arc<HandoffPlanner>,
    /// The prompt, where its tokens are no guess.
    work: Option<PrefillWork>,
    sent: Instant,
    disturbing: Option<Disturbing>,
    gaps: Option<StreamGaps>,
}

impl Lesson {
    /// Tells the planner that the first token of a stream came.
    pub(super) fn teach(&self, worker: &WorkerRank, now: Instant) {
        let elapsed = now.saturating_duration_since(self.sent);
        if let Some(work) = &self.work {
            self.planner.observe_prefill(worker, work, elapsed);
        }
    }

    /// Takes in that an answer has begun.
    pub(super) fn began(&mut self) {
        self.disturbing = None;
    }

    /// Takes in a piece of a stream.
    pub(super) fn piece(&mut self, piece: &[u8], now: Instant) {
        if let Some(gaps) = &mut self.gaps {
            gaps.piece(piece, now);
        }
    }
}

/// What was chosen for a request.
struct Chosen {
    prefill: WorkerRank,
    decode: WorkerRank,
    work: PrefillWork,
    terms: PairTerms,
    transfer: Option<TransferGuard>,
    summary: Arc<Value>,
}

impl Splitter {
    pub(super) fn new(
        settings: &HandoffSettings,
        config: &Config,
        fleet: &Arc<Fleet>,
        timeouts: Timeouts,
        metrics: HandoffMetrics,
    ) -> kvlane::Result<Self> {
        let (planner, shape, links) = settings.planner()?;
        let planner = Arc::new(planner);
        let limits = DriveLimits {
            first_byte: timeouts.first_byte,
            idle: timeouts.response_idle,
            max_answer_bytes: config.max_body_bytes,
            busy_requests: settings.busy_requests,
        };
        let rules = PairingRules {
            protocol: settings.protocol,
            lease: settings.lease_seconds.map(seconds),
        };
        let peers = Peers::start(Arc::clone(fleet), settings.bootstrap_port);
        Ok(Self {
            driver: Driver::new(limits, metrics, Some(Arc::clone(&planner))),
            pairing: Pairing::new(rules, links, peers),
            fleet: Arc::clone(fleet),
            planner,
            shape,
            plans: Mutex::default(),
            bookings: Mutex::default(),
        })
    }

    /// Plans a request.
    pub(super) async fn plan(&self, proxy: &Proxy, head: &Head, reading: &Reading) -> Planned {
        let mut summary = None;
        match self.try_plan(proxy, head, reading, &mut summary).await {
            Some(split) => Planned::Split(Box::new(split)),
            None => Planned::Whole(summary),
        }
    }

    /// Returns the workers that may serve a request that is not split, of those that it may go to: not those that cannot
    /// process a prompt. `None` when all may.
    pub(super) fn whole_only(
        &self,
        members: &Members,
        only: Option<&[WorkerId]>,
    ) -> Option<Vec<WorkerId>> {
        let known = self.pairing.know(members);
        let able = |worker: &&Arc<crate::fleet::Worker>| self.pairing.serves_alone(&known, worker);
        if members.list().iter().all(|worker| able(&worker)) {
            return None;
        }
        let may = |id: &WorkerId| only.is_none_or(|only| only.contains(id));
        let able = members.list().iter().filter(able);
        let ids = able.map(|worker| worker.config.id.clone());
        Some(ids.filter(may).collect())
    }

    async fn try_plan(
        &self,
        proxy: &Proxy,
        head: &Head,
        reading: &Reading,
        summary: &mut Option<Arc<Value>>,
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
        let chosen = self.choose(proxy, &members, (head, reading), summary)?;
        let checked = read_body(proxy, head, reading).await.and_then(|body| {
            check_splittable(head.endpoint, &body)?;
            // Where nobody serves it whole, either leg refuses it.
            if chosen.terms.may_fall_back {
                check_ends(&body, room(&members, &chosen.decode, reading))?;
            }
            Ok(body)
        });
        match checked {
            Ok(body) => self.book(proxy, &members, (head, reading), chosen, body),
            Err(reason) => {
                debug!(request_id = head.request_id, %reason, "request is not split");
                *summary = Some(Arc::new(
                    json!({"route": "single", "unsplittable": reason.to_string()}),
                ));
                None
            }
        }
    }

    /// Returns what can be learned from a request that goes to one worker now; nothing where its tokens are a guess.
    pub(super) fn lesson(
        &self,
        proxy: &Proxy,
        reading: &Reading,
        decision: &Decision,
    ) -> Option<Lesson> {
        if reading.mode == Mode::Load {
            return None;
        }
        let block_size = proxy.config.router.block_size.tokens() as u64;
        let work = PrefillWork {
            input_tokens: reading.prompt.tokens() as u64,
            cached_tokens: u64::from(decision.predicted_cached_tokens),
            queued_tokens: tokens(decision.cost.booked_prefill_blocks, block_size),
        };
        let exact = reading.mode == Mode::Tokens && reading.extra_blocks == 0;
        let work = exact.then_some(work);
        let now = Instant::now();
        let gaps = self.driver.gaps().map(|gaps| gaps.of(&decision.target));
        // What is mostly cached stalls nobody for long enough to be told from noise.
        let noticed = work.is_none_or(|work| work.input_tokens > work.cached_tokens + UNNOTICED);
        let streams = asks_for_stream(&reading.body);
        let cause = work.filter(|_| streams).map(GapCause::Prefill);
        let cause = cause.and_then(noticeable);
        Some(Lesson {
            planner: Arc::clone(&self.planner),
            work,
            sent: now,
            disturbing: gaps
                .as_ref()
                .filter(|_| noticed)
                .map(|gaps| gaps.disturb(cause, now)),
            gaps: gaps.map(|gaps| gaps.follow()),
        })
    }

    /// Tells whether it knows the workers.
    pub(super) fn is_settled(&self) -> bool {
        self.pairing.is_settled()
    }

    /// Keeps what was planned, to be shown with the decision.
    pub(super) fn note(&self, lease: LeaseId, summary: &Arc<Value>) {
        let mut bookings = self.bookings.lock();
        if bookings.len() == KEPT_BOOKINGS {
            bookings.pop_front();
        }
        bookings.push_back((lease, Arc::clone(summary)));
    }

    /// Returns what was planned for bookings.
    pub(super) fn summaries(&self) -> HashMap<LeaseId, Arc<Value>> {
        self.bookings.lock().iter().cloned().collect()
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
        let prefill = pair.prefill.worker().id().to_owned();
        let endpoint = request.endpoint.as_str();
        let mut response = self.driver.drive(request, pair, close.clone()).await;
        let worker = decision.target.worker.as_str();
        let status = response.status().as_u16();
        proxy.metrics.count_request(endpoint, worker, status);
        if proxy.config.debug_headers {
            add_debug(response.headers_mut(), &decision, "handoff");
            if let Ok(name) = HeaderValue::from_str(&prefill) {
                response
                    .headers_mut()
                    .insert("x-kvlane-prefill-worker", name);
            }
        }
        response
    }

    fn choose(
        &self,
        proxy: &Proxy,
        members: &Members,
        (head, reading): (&Head, &Reading),
        summary: &mut Option<Arc<Value>>,
    ) -> Option<Chosen> {
        let now = Instant::now();
        let request = select(head, reading);
        let known = self.pairing.know(members);
        let block_size = proxy.config.router.block_size.tokens() as u64;
        let candidates = proxy.router.rank(&request, now).ok()?;
        let workers: Vec<PlanWorker> = candidates
            .iter()
            .filter_map(|candidate| {
                let worker = members.find(candidate.target.worker.as_str())?;
                let planned = plan_worker(candidate, worker.role(), block_size);
                Some(self.pairing.describe(&known, worker, planned))
            })
            .collect();
        let input_tokens = reading.prompt.tokens() as u64;
        let request = PlanRequest {
            input_tokens,
            shape: &self.shape,
            splittable: true,
        };
        let link = |prefill: &PlanWorker, decode: &PlanWorker| {
            let find = |worker: &PlanWorker| members.find(worker.target.worker.as_str());
            Some(self.pairing.link(find(prefill)?, find(decode)?))
        };
        let plan = self.planner.plan(&request, &workers, link, now);
        self.keep(&head.request_id, &plan);
        let chosen = summarise(&plan);
        *summary = Some(Arc::clone(&chosen));
        let Route::Pair {
            prefill, decode, ..
        } = &plan.chosen()?.route
        else {
            return None;
        };
        let terms = self.terms(&known, members, prefill)?;
        let at = workers.iter().find(|worker| worker.target == *prefill)?;
        Some(Chosen {
            prefill: prefill.clone(),
            decode: decode.clone(),
            work: PrefillWork {
                input_tokens,
                cached_tokens: at.cached_tokens,
                queued_tokens: at.queued_prefill_tokens,
            },
            terms,
            transfer: self.planner.book(&plan, now),
            summary: chosen,
        })
    }

    fn terms(&self, known: &Known, members: &Members, prefill: &WorkerRank) -> Option<PairTerms> {
        let worker = members.find(prefill.worker.as_str())?;
        self.pairing.terms(known, worker, prefill)
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

    /// Forgets workers that are gone.
    pub(super) fn sweep(&self) {
        let members = self.fleet.members();
        let is_there = |rank: &WorkerRank| members.find(rank.worker.as_str()).is_some();
        self.planner.retain_workers(is_there);
        if let Some(gaps) = self.driver.gaps() {
            gaps.retain(is_there);
        }
    }

    /// Returns what is known of workers and links, and the last plans, the newest first.
    pub(super) fn report(&self) -> Value {
        let stats = self.planner.stats();
        let plans: Vec<Value> = self.plans.lock().iter().rev().cloned().collect();
        let peers = self.pairing.report(&self.fleet.members());
        json!({
            "open": self.driver.open(), "prefill": stats.prefill, "links": stats.links, "workers": peers, "plans": plans,
        })
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
            if !worker.admit() {
                guard.release(&Outcome::not_dispatched(), Instant::now());
                return None;
            }
            let decision = Arc::clone(guard.decision());
            self.note(guard.id(), &chosen.summary);
            Some((Side::new(Arc::clone(worker), guard), decision))
        };
        let request = select(head, reading);
        let mut prompt_only = request.clone();
        prompt_only.expected_output_tokens = Some(1);
        let (prefill, _) = side(&chosen.prefill, &prompt_only)?;
        // The prefill worker has its booking back where the decode worker has none.
        let (decode, decision) = side(&chosen.decode, &request)?;
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
                terms: chosen.terms,
                transfer: chosen.transfer,
                work: chosen.work,
            },
            decision,
        })
    }
}

/// Says in a line what was chosen and why, for the decision that follows from it.
fn summarise(plan: &HandoffPlan) -> Arc<Value> {
    let mut summary = json!({"decided_by": plan.decided_by});
    if let (Some(chosen), Some(fields)) = (plan.chosen(), summary.as_object_mut()) {
        if let Ok(Value::Object(route)) = serde_json::to_value(&chosen.route) {
            fields.extend(route);
        }
        let ttft = chosen.ttft.total_seconds;
        fields.insert("predicted_ttft_seconds".to_owned(), json!(ttft));
        let gap = chosen.itl.gap_seconds;
        fields.insert("predicted_gap_seconds".to_owned(), json!(gap));
        let is_pair = |option: &HandoffOption| matches!(option.route, Route::Pair { .. });
        if is_pair(chosen) {
            let says = if chosen.ttft.seeded_link {
                "seed"
            } else {
                "transfers"
            };
            fields.insert("link_speed_from".to_owned(), json!(says));
        } else if !plan.options.iter().any(is_pair)
            && let Some(excluded) = plan.excluded.first()
        {
            fields.insert("not_split".to_owned(), json!(excluded.reason));
        }
    }
    Arc::new(summary)
}

/// Tells whether a body asks for a stream: only a stream says when its prompt was done. In a text the quotes would be escaped.
fn asks_for_stream(body: &[u8]) -> bool {
    const NAME: &[u8] = b"\"stream\"";
    let set = |at: usize| {
        let rest = body[at + NAME.len()..].trim_ascii_start();
        let value = rest.strip_prefix(b":").map(<[u8]>::trim_ascii_start);
        value.is_some_and(|value| value.starts_with(b"true"))
    };
    memchr::memmem::find_iter(body, NAME).any(set)
}

/// Tokens to compute below which a prompt is not taken to hold streams up.
const UNNOTICED: u64 = 64;

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

/// Returns how many tokens of output a decode worker's context has room for, where that is known.
fn room(members: &Members, decode: &WorkerRank, reading: &Reading) -> Option<u64> {
    let worker = members.find(decode.worker.as_str())?;
    let context = worker.description()?.max_model_len?;
    let is_exact = reading.mode == Mode::Tokens;
    let prompt = if is_exact {
        reading.prompt.tokens() as u64
    } else {
        0
    };
    Some(context.saturating_sub(prompt))
}

/// Parses the body, on another thread when it is much work.
async fn read_body(proxy: &Proxy, head: &Head, reading: &Reading) -> Result<Value, Unsplittable> {
    let body = reading.body.clone();
    let is_heavy = proxy.reader.is_heavy(head.endpoint, body.len());
    let parse = move || {
        if !has_few_parts(&body) {
            return Err(Unsplittable::Parts);
        }
        serde_json::from_slice(&body).map_err(|_| Unsplittable::Body)
    };
    if !is_heavy {
        return parse();
    }
    let parsing = tokio::task::spawn_blocking(parse);
    parsing.await.unwrap_or(Err(Unsplittable::Body))
}

#[cfg(test)]
mod tests {
    use super::asks_for_stream;

    #[test]
    fn a_stream_is_asked_for_by_the_field_and_not_by_a_text() {
        for (body, asked) in [
            (r#"{"stream":true}"#, true),
            (r#"{"n": 1, "stream" : true, "x": 1}"#, true),
            (r#"{"stream": false}"#, false),
            (r#"{"prompt": "\"stream\": true"}"#, false),
            (r#"{"stream""#, false),
            ("", false),
        ] {
            assert_eq!(asks_for_stream(body.as_bytes()), asked, "{body}");
        }
    }
}
