//! The router.

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::Duration;

use kvlane::subscribe::Subscriber;
use kvlane::{
    BlockSize, Error, ErrorKind, LeaseId, LoadReport, Overrides, Prompt, Role, SelectRequest,
    WorkerId, WorkerSpec,
};
use napi::Either;
use napi::bindgen_prelude::{Env, Object, Uint8ArraySlice};
use napi_derive::napi;

use crate::clock::Clock;
use crate::error::{Result, invalid, to_js};
use crate::lease::{Decisions, Facts, read_outcome};
use crate::prompt::{Content, GivenPrompt, Salt};
use crate::read::{Given, MediaItem, maybe, need, options};
use crate::report::{IngestReport, RouterStats, Table, Trust, WorkerInfo, candidates, overlaps};

/// Decides which worker serves a request. Every method is synchronous; only `waitReady` waits. See `kvlane::Router` in the
/// Rust documentation.
#[napi]
#[expect(
    missing_debug_implementations,
    reason = "JavaScript sees it through its methods"
)]
pub struct Router {
    pub(crate) core: Core,
    /// Follows event streams; begun with the first worker that has one.
    subscriber: RefCell<Option<Subscriber>>,
    pub(crate) decisions: RefCell<Decisions>,
    pub(crate) facts: RefCell<Option<Facts>>,
}

/// The router and its clock.
pub(crate) struct Core {
    pub(crate) router: kvlane::Router,
    pub(crate) clock: Clock,
}

options! {
    /// A worker; everything is optional.
    WorkerOptions {
        /// Data-parallel ranks that share the worker's address (default 1). Each is a target of its own.
        "dpRanks" dp_ranks: u32,
        /// What the worker does (default both).
        #[napi(ts_type = "Role")]
        "role" role: String,
        /// Blocks of the router's block size that the KV cache of one rank holds, when known.
        "kvCapacityBlocks" kv_capacity_blocks: u32,
        /// ZeroMQ endpoint of rank 0's events, which are then followed by a thread; further ranks are on the following ports.
        "events" events: String,
        /// ZeroMQ endpoint of rank 0's replay socket; further ranks are on the following ports.
        "replay" replay: String,
        /// The engine's block size when known; must be a multiple of the router's.
        "blockSize" block_size: u32,
        /// Free-form labels, reported back.
        "labels" labels: HashMap<String, String>,
    }
}

options! {
    /// What a prompt is salted with.
    PromptOptions {
        /// Adapter (LoRA) name; empty or absent is the base model.
        "lora" lora: String,
        /// Cache salt; empty or absent is none.
        "salt" salt: String,
        /// Media items, in any order.
        "media" media: Vec<MediaItem>,
    }
}

options! {
    /// A placement that was decided elsewhere.
    RecordOptions {
        /// Rank of the worker (default 0).
        "dpRank" dp_rank: u32,
        /// Seconds that it is believed (default the configured `ttlSeconds`).
        "ttl" ttl: f64,
        /// Adapter (LoRA) name; empty or absent is the base model.
        "lora" lora: String,
        /// Cache salt; empty or absent is none.
        "salt" salt: String,
        /// Media items, in any order.
        "media" media: Vec<MediaItem>,
    }
}

options! {
    /// Settings changed for one request, each within the range of its namesake in `RouterOptions`.
    SelectOverrides {
        /// Replaces `prefillWeight`.
        "prefillWeight" prefill_weight: f64,
        /// Replaces `requestWeight`.
        "requestWeight" request_weight: f64,
        /// Replaces `deviceHitCredit`.
        "deviceHitCredit" device_hit_credit: f64,
        /// Replaces `hostHitCredit`.
        "hostHitCredit" host_hit_credit: f64,
        /// Replaces `diskHitCredit`.
        "diskHitCredit" disk_hit_credit: f64,
        /// Replaces `externalHitCredit`.
        "externalHitCredit" external_hit_credit: f64,
        /// Replaces `temperature`.
        "temperature" temperature: f64,
    }
}

options! {
    /// A request to place; everything is optional.
    SelectOptions {
        /// The caller's name of the request. Selecting again under a live name supersedes the earlier booking (a retry).
        "requestId" request_id: String,
        /// Only these workers may be chosen; all when absent.
        "allowed" allowed: Vec<String>,
        /// Adapter (LoRA) name; empty or absent is the base model.
        "lora" lora: String,
        /// Cache salt; empty or absent is none.
        "salt" salt: String,
        /// Media items, in any order.
        "media" media: Vec<MediaItem>,
        /// Requests of one session prefer the target of the one before, by a tenth of the cost.
        "session" session: String,
        /// Only workers that do this part; any when absent.
        #[napi(ts_type = "Role")]
        "role" role: String,
        /// Only this rank of a worker; any when absent. For `book`: the rank (default 0).
        "dpRank" dp_rank: u32,
        /// Accepted for an admission queue; without one it has no effect.
        "priority" priority: i32,
        /// Output tokens to expect; their blocks are booked from the start.
        "expectedOutputTokens" expected_output_tokens: u32,
        /// Seconds without activity after which the booking is released (default the configured `leaseSeconds`).
        "ttl" ttl: f64,
        /// Settings changed for this request.
        "overrides" overrides: SelectOverrides,
    }
}

options! {
    /// Where a batch of events comes from.
    IngestOptions {
        /// Its sequence number; absent, it is applied without order checks.
        #[napi(ts_type = "number | bigint")]
        "seq" seq: u64,
        /// The publishing rank (default 0).
        "dpRank" dp_rank: u32,
    }
}

options! {
    /// What an engine reports of its load.
    LoadOptions {
        /// Requests that it runs.
        "running" running: u32,
        /// Requests that wait there.
        "waiting" waiting: u32,
        /// Share of its KV cache in use, 0 to 1.
        "kvUsage" kv_usage: f64,
        /// The reporting rank; absent, the counts are spread over all ranks.
        "dpRank" dp_rank: u32,
    }
}

/// An argument that is a string.
type Text<'a> = Given<'a, String>;
/// An argument that is an object.
type Options<'a> = Given<'a, Object<'a>>;

#[napi]
impl Router {
    /// Creates a router without workers.
    #[napi(constructor)]
    pub fn new(
        env: &Env,
        #[napi(ts_arg_type = "RouterOptions")] options: Option<Options<'_>>,
    ) -> Result<Self> {
        let (config, clock) = crate::config::read(options)?;
        let core = Core {
            router: kvlane::Router::new(config).map_err(to_js)?,
            clock: Clock::new(env, clock)?,
        };
        Ok(Self {
            core,
            subscriber: RefCell::default(),
            decisions: RefCell::default(),
            facts: RefCell::default(),
        })
    }

    /// Registers a worker. With `events`, a thread follows its event streams; it does not keep the process alive.
    #[napi]
    pub fn add_worker(
        &self,
        env: &Env,
        #[napi(ts_arg_type = "string")] id: Text<'_>,
        #[napi(ts_arg_type = "WorkerOptions")] options: Option<Options<'_>>,
    ) -> Result<()> {
        let id: String = need(id, "id")?;
        let spec = worker_spec(&id, maybe(options, "options")?.unwrap_or_default())?;
        let now = self.core.clock.now(env)?;
        let router = self.open()?;
        router.add_worker(spec.clone(), now).map_err(to_js)?;
        self.follow(&spec).map_err(|error| {
            // It was not there a moment ago, so nobody has placed anything on it.
            drop(router.remove_worker(&id));
            to_js(error)
        })
    }

    /// Removes a worker. When this returns, nothing of its life is left. Its open bookings stay releasable.
    #[napi]
    pub fn remove_worker(&self, #[napi(ts_arg_type = "string")] id: Text<'_>) -> Result<()> {
        let id: String = need(id, "id")?;
        let router = self.open()?;
        if let Some(subscriber) = &*self.subscriber.borrow() {
            subscriber.unfollow(&id);
        }
        router.remove_worker(&id).map_err(to_js)
    }

    /// Gives a worker nothing new; what it has goes on.
    #[napi]
    pub fn drain_worker(&self, #[napi(ts_arg_type = "string")] id: Text<'_>) -> Result<()> {
        let id: String = need(id, "id")?;
        self.open()?.drain_worker(&id).map_err(to_js)
    }

    /// Takes back `drainWorker`: the worker is given requests again, and has kept its cache.
    #[napi]
    pub fn undrain_worker(&self, #[napi(ts_arg_type = "string")] id: Text<'_>) -> Result<()> {
        let id: String = need(id, "id")?;
        self.open()?.undrain_worker(&id).map_err(to_js)
    }

    /// Changes what a worker does; it keeps its cache, and finishes what it has.
    #[napi]
    pub fn set_role(
        &self,
        #[napi(ts_arg_type = "string")] id: Text<'_>,
        #[napi(ts_arg_type = "Role")] role: Text<'_>,
    ) -> Result<()> {
        let id: String = need(id, "id")?;
        let name: String = need(role, "role")?;
        let router = self.open()?;
        router.set_role(&id, self::role(&name)?).map_err(to_js)
    }

    /// Replaces the labels that `workers` reports of a worker.
    #[napi]
    pub fn set_labels(
        &self,
        #[napi(ts_arg_type = "string")] id: Text<'_>,
        #[napi(ts_arg_type = "Record<string, string>")] labels: Options<'_>,
    ) -> Result<()> {
        let id: String = need(id, "id")?;
        let labels: HashMap<String, String> = need(labels, "labels")?;
        let labels = labels.into_iter().collect();
        self.open()?.set_labels(&id, labels).map_err(to_js)
    }

    /// Lists the workers by id.
    #[napi]
    pub fn workers(&self, env: &Env) -> Result<Vec<WorkerInfo>> {
        let now = self.core.clock.now(env)?;
        let workers = self.open()?.workers(now).into_iter();
        let clock = &self.core.clock;
        Ok(workers
            .map(|worker| WorkerInfo::new(worker, clock, now))
            .collect())
    }

    /// Applies one batch of events as an engine published it. One that cannot be decoded changes no entry and comes back
    /// with the reason.
    #[napi]
    pub fn ingest(
        &self,
        env: &Env,
        #[napi(ts_arg_type = "string")] worker: Text<'_>,
        #[napi(ts_arg_type = "Uint8Array")] payload: Given<'_, Uint8ArraySlice<'_>>,
        #[napi(ts_arg_type = "IngestOptions")] options: Option<Options<'_>>,
    ) -> Result<IngestReport> {
        let worker: String = need(worker, "worker")?;
        let Either::A(payload) = payload else {
            return Err(invalid("payload must be a Buffer or Uint8Array"));
        };
        let options: IngestOptions = maybe(options, "options")?.unwrap_or_default();
        let dp_rank = options.dp_rank.unwrap_or(0);
        let now = self.core.clock.now(env)?;
        let router = self.open()?;
        let report = router.ingest(&worker, dp_rank, options.seq, &payload, now);
        report.map(Into::into).map_err(to_js)
    }

    /// Forgets what a worker's cache holds: one rank, or all of them.
    #[napi]
    pub fn clear(
        &self,
        #[napi(ts_arg_type = "string")] worker: Text<'_>,
        #[napi(ts_arg_type = "number")] dp_rank: Option<Given<'_, f64>>,
    ) -> Result<()> {
        let worker: String = need(worker, "worker")?;
        let dp_rank = maybe(dp_rank, "dpRank")?;
        self.open()?.clear(&worker, dp_rank).map_err(to_js)
    }

    /// Records a placement that was decided elsewhere.
    #[napi]
    pub fn record(
        &self,
        env: &Env,
        #[napi(ts_arg_type = "string")] worker: Text<'_>,
        #[napi(ts_arg_type = "Prompt")] prompt: GivenPrompt<'_>,
        #[napi(ts_arg_type = "RecordOptions")] options: Option<Options<'_>>,
    ) -> Result<()> {
        let worker: String = need(worker, "worker")?;
        let options: RecordOptions = maybe(options, "options")?.unwrap_or_default();
        let ttl = options.ttl.map(|ttl| seconds(ttl, "ttl")).transpose()?;
        let salt = Salt::new(options.lora, options.salt, options.media);
        let prompt = self.prompt(&prompt, &salt)?;
        let now = self.core.clock.now(env)?;
        let router = self.open()?;
        router
            .record(&worker, options.dp_rank, &prompt, ttl, now)
            .map_err(to_js)
    }

    /// Returns the leading blocks that each target holds, by worker and rank; targets with none are absent.
    #[napi(ts_return_type = "Array<TargetOverlap>")]
    pub fn overlap(
        &self,
        env: &Env,
        #[napi(ts_arg_type = "Prompt")] prompt: GivenPrompt<'_>,
        #[napi(ts_arg_type = "PromptOptions")] options: Option<Options<'_>>,
    ) -> Result<Table> {
        let options: PromptOptions = maybe(options, "options")?.unwrap_or_default();
        let salt = Salt::new(options.lora, options.salt, options.media);
        let prompt = self.prompt(&prompt, &salt)?;
        let found = self.open()?.overlap(&prompt, self.core.clock.now(env)?);
        Ok(overlaps(&found))
    }

    /// Returns every eligible target, cheapest first. Nothing is booked.
    #[napi(
        ts_args_type = "prompt: Prompt, options?: SelectOptions",
        ts_return_type = "Array<Candidate>"
    )]
    pub fn rank(
        &self,
        env: &Env,
        prompt: GivenPrompt<'_>,
        options: Option<Options<'_>>,
        // The names of `allowed` with NULs between them, when lib/prompt.js has joined them.
        joined: Option<String>,
    ) -> Result<Table> {
        let request = self.request(&prompt, options, joined.as_deref())?;
        let now = self.core.clock.now(env)?;
        let ranked = self.open()?.rank(&request.borrow(), now);
        Ok(candidates(&ranked.map_err(to_js)?))
    }

    /// Chooses a target and books the request on it. `null` when no worker is eligible.
    #[napi(
        ts_args_type = "prompt: Prompt, options?: SelectOptions",
        ts_return_type = "Lease | null"
    )]
    pub fn select(
        &self,
        env: &Env,
        prompt: GivenPrompt<'_>,
        options: Option<Options<'_>>,
        // The names of `allowed` with NULs between them, when lib/prompt.js has joined them.
        joined: Option<String>,
    ) -> Result<Option<String>> {
        let request = self.request(&prompt, options, joined.as_deref())?;
        let now = self.core.clock.now(env)?;
        let guard = self.open()?.select(&request.borrow(), now);
        let guard = guard.map_err(to_js)?;
        guard.map(|guard| self.lend(guard, now)).transpose()
    }

    /// Books a request on a target that was chosen elsewhere.
    #[napi(ts_return_type = "Lease")]
    pub fn book(
        &self,
        env: &Env,
        #[napi(ts_arg_type = "string")] request_id: Text<'_>,
        #[napi(ts_arg_type = "string")] worker: Text<'_>,
        #[napi(ts_arg_type = "Prompt")] prompt: GivenPrompt<'_>,
        #[napi(ts_arg_type = "SelectOptions")] options: Option<Options<'_>>,
    ) -> Result<String> {
        let request_id: String = need(request_id, "requestId")?;
        let worker: String = need(worker, "worker")?;
        let mut request = self.request(&prompt, options, None)?;
        request.options.request_id = Some(request_id);
        let dp_rank = request.options.dp_rank;
        let now = self.core.clock.now(env)?;
        let router = self.open()?;
        let guard = router.book(&worker, dp_rank, &request.borrow(), now);
        self.lend(guard.map_err(to_js)?, now)
    }

    /// Releases a booking by its id. False when it is not known (any more): a no-op.
    #[napi]
    pub fn finish(
        &self,
        env: &Env,
        #[napi(ts_arg_type = "string")] lease_id: Text<'_>,
        #[napi(ts_arg_type = "FinishOptions")] outcome: Option<Options<'_>>,
    ) -> Result<bool> {
        let id: String = need(lease_id, "leaseId")?;
        let outcome = read_outcome(outcome)?;
        let Ok(id) = id.parse() else {
            return Ok(false);
        };
        self.release(env, LeaseId::from_u64(id), &outcome)
    }

    /// Takes in what an engine reports of its load.
    #[napi]
    pub fn report_load(
        &self,
        env: &Env,
        #[napi(ts_arg_type = "string")] worker: Text<'_>,
        #[napi(ts_arg_type = "LoadOptions")] load: Option<Options<'_>>,
    ) -> Result<()> {
        let worker: String = need(worker, "worker")?;
        let load: LoadOptions = maybe(load, "load")?.unwrap_or_default();
        let report = LoadReport {
            running: load.running.unwrap_or(0),
            waiting: load.waiting.unwrap_or(0),
            kv_usage: load.kv_usage.unwrap_or(0.0),
        };
        let now = self.core.clock.now(env)?;
        let router = self.open()?;
        router
            .report_load(&worker, load.dp_rank, report, now)
            .map_err(to_js)
    }

    /// Returns how far the events of one rank are believed (rank 0 when `dpRank` is absent).
    #[napi]
    pub fn trust(
        &self,
        env: &Env,
        #[napi(ts_arg_type = "string")] worker: Text<'_>,
        #[napi(ts_arg_type = "number")] dp_rank: Option<Given<'_, f64>>,
    ) -> Result<Trust> {
        let worker: String = need(worker, "worker")?;
        let dp_rank = maybe(dp_rank, "dpRank")?.unwrap_or(0);
        let now = self.core.clock.now(env)?;
        let trust = self.open()?.trust(&worker, dp_rank, now);
        let trust = trust.map_err(to_js)?;
        Ok(Trust::new(trust, &self.core.clock, now))
    }

    /// Returns sizes and counts.
    #[napi]
    pub fn stats(&self, env: &Env) -> Result<RouterStats> {
        // Nothing else may have been called since leases ran out.
        self.open()?.tick(self.core.clock.now(env)?);
        Ok(self.core.router.stats().into())
    }

    /// Counts the workers that may be chosen and need no more waiting: on every rank, events are heard, or it is settled that
    /// none will be.
    #[napi]
    pub fn ready_workers(&self, env: &Env) -> Result<u32> {
        let ready = self.open()?.ready_workers(self.core.clock.now(env)?);
        Ok(u32::try_from(ready).unwrap_or(u32::MAX))
    }

    /// Ends the threads, and refuses every further call but `finish` and `Lease.release`.
    #[napi]
    pub fn close(&self) {
        self.core.router.close();
        drop(self.subscriber.take());
    }

    /// Returns the router unless it is closed.
    fn open(&self) -> Result<&kvlane::Router> {
        if self.core.router.is_closed() {
            return Err(to_js(Error::new(ErrorKind::Closed, "the router is closed")));
        }
        Ok(&self.core.router)
    }

    fn follow(&self, spec: &WorkerSpec) -> kvlane::Result<()> {
        if spec.events.is_none() {
            return Ok(());
        }
        let mut subscriber = self.subscriber.borrow_mut();
        if subscriber.is_none() {
            *subscriber = Some(Subscriber::start(&self.core.router)?);
        }
        match &*subscriber {
            Some(subscriber) => subscriber.follow_worker(spec),
            None => Err(Error::new(ErrorKind::Closed, "the router is closed")),
        }
    }

    fn prompt(&self, given: &GivenPrompt<'_>, salt: &Salt) -> Result<Prompt> {
        Content::read(given)?.prompt(self.core.router.config().block_size, salt)
    }

    fn request(
        &self,
        prompt: &GivenPrompt<'_>,
        options: Option<Options<'_>>,
        joined: Option<&str>,
    ) -> Result<Request> {
        let mut options: SelectOptions = maybe(options, "options")?.unwrap_or_default();
        let salt = Salt::new(
            options.lora.take(),
            options.salt.take(),
            options.media.take(),
        );
        let given = options.allowed.take();
        let allowed = match joined {
            Some(names) => Some(worker_ids(names.split('\0'))),
            None => given.map(|names| worker_ids(names.iter().map(String::as_str))),
        };
        Ok(Request {
            prompt: self.prompt(prompt, &salt)?,
            allowed,
            role: options.role.as_deref().map(role).transpose()?,
            ttl: options.ttl.map(|ttl| seconds(ttl, "ttl")).transpose()?,
            overrides: overrides(options.overrides.take().unwrap_or_default()),
            options,
        })
    }
}

/// A request that has been read.
struct Request {
    prompt: Prompt,
    allowed: Option<Vec<WorkerId>>,
    role: Option<Role>,
    ttl: Option<Duration>,
    overrides: Overrides,
    /// The rest.
    options: SelectOptions,
}

impl Request {
    fn borrow(&self) -> SelectRequest<'_> {
        let mut request = SelectRequest::new(&self.prompt);
        request.request_id = self.options.request_id.as_deref();
        request.allowed = self.allowed.as_deref();
        request.session = self.options.session.as_deref();
        request.role = self.role;
        request.dp_rank = self.options.dp_rank;
        request.priority = self.options.priority.unwrap_or(0);
        request.expected_output_tokens = self.options.expected_output_tokens;
        request.ttl = self.ttl;
        request.overrides = self.overrides;
        request
    }
}

/// A name that no worker can have allows nobody.
fn worker_ids<'a>(names: impl Iterator<Item = &'a str>) -> Vec<WorkerId> {
    names.filter_map(|name| WorkerId::new(name).ok()).collect()
}

fn worker_spec(id: &str, options: WorkerOptions) -> Result<WorkerSpec> {
    let mut spec = WorkerSpec::new(id).map_err(to_js)?;
    if let Some(ranks) = options.dp_ranks {
        spec = spec.dp_ranks(ranks);
    }
    if let Some(name) = &options.role {
        spec = spec.role(role(name)?);
    }
    let block_size = options.block_size.map(BlockSize::new).transpose();
    spec.labels = options.labels.unwrap_or_default().into_iter().collect();
    Ok(spec
        .kv_capacity_blocks(options.kv_capacity_blocks.map(|blocks| blocks as usize))
        .block_size(block_size.map_err(to_js)?)
        .events(options.events, options.replay))
}

fn overrides(read: SelectOverrides) -> Overrides {
    let mut overrides = Overrides::default();
    overrides.prefill_weight = read.prefill_weight;
    overrides.request_weight = read.request_weight;
    overrides.device_hit_credit = read.device_hit_credit;
    overrides.host_hit_credit = read.host_hit_credit;
    overrides.disk_hit_credit = read.disk_hit_credit;
    overrides.external_hit_credit = read.external_hit_credit;
    overrides.temperature = read.temperature;
    overrides
}

fn role(name: &str) -> Result<Role> {
    name.parse().map_err(to_js)
}

fn seconds(value: f64, name: &str) -> Result<Duration> {
    Duration::try_from_secs_f64(value).map_err(|_| {
        invalid(format!(
            "{name} {value} is out of range: seconds above 0 are accepted"
        ))
    })
}
