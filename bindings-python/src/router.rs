//! The router.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane::{
    BlockSize, LeaseId, LoadReport, Overrides, Prompt, Role, RouterConfig, SelectRequest, WorkerId,
    WorkerSpec,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::clock::Clock;
use crate::convert::{Media, Tokens, U32, U64, from_json, seconds, to_json, u32_of};
use crate::ending::Call;
use crate::error::{config_error, invalid, to_py};
use crate::info::{Candidate, IngestReport, Overlap, Trust, WorkerInfo};
use crate::lease::{Lease, outcome};
use crate::prompt::PromptArguments;
use crate::shared::Shared;

/// Decides which worker serves a request. Safe to use from many threads.
///
/// `config` is a dict of settings; `seed` replaces its seed; `clock` returns seconds and replaces this machine's clock, for
/// tests and simulation. See `kvlane::Router` in the Rust documentation for what each call does.
#[pyclass(frozen, module = "kvlane")]
pub(crate) struct Router(Arc<Shared>);

/// The options of `select` and `rank`.
#[derive(Default)]
struct Options<'a> {
    request_id: Option<&'a str>,
    allowed: Option<Vec<WorkerId>>,
    session: Option<&'a str>,
    role: Option<Role>,
    dp_rank: Option<u32>,
    priority: i32,
    expected_output_tokens: Option<u32>,
    ttl: Option<Duration>,
    overrides: Overrides,
}

impl<'a> Options<'a> {
    fn request(&'a self, prompt: &'a Prompt) -> SelectRequest<'a> {
        let mut request = SelectRequest::new(prompt);
        request.request_id = self.request_id;
        request.allowed = self.allowed.as_deref();
        request.session = self.session;
        request.role = self.role;
        request.dp_rank = self.dp_rank;
        request.priority = self.priority;
        request.expected_output_tokens = self.expected_output_tokens;
        request.ttl = self.ttl;
        request.overrides = self.overrides;
        request
    }
}

#[pymethods]
#[expect(
    clippy::too_many_arguments,
    reason = "the keyword arguments of Python, one by one"
)]
impl Router {
    #[new]
    #[pyo3(signature = (config = None, seed = None, clock = None))]
    fn new(
        py: Python<'_>,
        config: Option<&Bound<'_, PyAny>>,
        seed: Option<U64>,
        clock: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let _call = Call::enter();
        let mut config = match config {
            Some(config) => {
                RouterConfig::from_json(&to_json(config, "config", config_error)?).map_err(to_py)?
            }
            None => RouterConfig::default(),
        };
        config.seed = seed.map(|seed| seed.0).or(config.seed);
        let router = kvlane::Router::new(config).map_err(to_py)?;
        Ok(Self(Arc::new(Shared::new(router, Clock::new(py, clock)?))))
    }

    /// Registers a worker. With `events` (and `replay`) its ZMQ event streams are followed by a thread of the router.
    #[pyo3(signature = (id, dp_ranks = 1, role = "both", kv_capacity_blocks = None, events = None, replay = None, block_size = None, labels = None))]
    fn add_worker(
        &self,
        py: Python<'_>,
        id: &str,
        #[pyo3(from_py_with = u32_of)] dp_ranks: u32,
        role: &str,
        kv_capacity_blocks: Option<U64>,
        events: Option<String>,
        replay: Option<String>,
        block_size: Option<U32>,
        labels: Option<BTreeMap<String, String>>,
    ) -> PyResult<()> {
        let router = self.0.open()?;
        let block_size = block_size.map(|size| BlockSize::new(size.0)).transpose();
        let mut spec = WorkerSpec::new(id)
            .map_err(to_py)?
            .dp_ranks(dp_ranks)
            .role(role.parse().map_err(to_py)?)
            .kv_capacity_blocks(kv_capacity_blocks.map(|blocks| blocks.as_usize()))
            .block_size(block_size.map_err(to_py)?)
            .events(events, replay);
        spec.labels = labels.unwrap_or_default();
        let now = self.0.now(py)?;
        py.detach(|| {
            router.add_worker(spec.clone(), now)?;
            if spec.events.is_none() {
                return Ok(());
            }
            self.0
                .follow(&spec)
                .inspect_err(|_| drop(router.remove_worker(spec.id.as_str())))
        })
        .map_err(to_py)
    }

    /// Removes a worker: when it returns, nothing of its life is left and nothing queued for it will be applied.
    fn remove_worker(&self, py: Python<'_>, id: &str) -> PyResult<()> {
        let router = self.0.open()?;
        py.detach(|| {
            self.0.unfollow(id);
            router.remove_worker(id)
        })
        .map_err(to_py)
    }

    /// Gives a worker nothing new; what it has goes on.
    fn drain_worker(&self, id: &str) -> PyResult<()> {
        self.0.open()?.drain_worker(id).map_err(to_py)
    }

    /// Takes back `drain_worker`: the worker is given requests again, and has kept its cache.
    fn undrain_worker(&self, id: &str) -> PyResult<()> {
        self.0.open()?.undrain_worker(id).map_err(to_py)
    }

    /// Changes what a worker does; it keeps its cache, and finishes what it has.
    fn set_role(&self, id: &str, role: &str) -> PyResult<()> {
        let router = self.0.open()?;
        let role = role.parse().map_err(to_py)?;
        router.set_role(id, role).map_err(to_py)
    }

    /// Replaces the labels that `workers` reports of a worker.
    fn set_labels(&self, id: &str, labels: BTreeMap<String, String>) -> PyResult<()> {
        self.0.open()?.set_labels(id, labels).map_err(to_py)
    }

    /// Says whether a worker may be chosen, as far as its health is known.
    fn set_available(&self, id: &str, available: bool) -> PyResult<()> {
        self.0.open()?.set_available(id, available).map_err(to_py)
    }

    /// Sets the KV capacity of one rank in blocks of the router's block size; None is unknown.
    #[pyo3(signature = (id, blocks))]
    fn set_kv_capacity(&self, id: &str, blocks: Option<U64>) -> PyResult<()> {
        let blocks = blocks.map(|blocks| blocks.as_usize());
        self.0.open()?.set_kv_capacity(id, blocks).map_err(to_py)
    }

    /// Lists the workers by id.
    fn workers(&self, py: Python<'_>) -> PyResult<Vec<WorkerInfo>> {
        let router = self.0.open()?;
        let now = self.0.now(py)?;
        let workers = py.detach(|| router.workers(now));
        self.0.log_trust(py);
        Ok(workers
            .into_iter()
            .map(|info| WorkerInfo::new(info, &self.0.clock, now))
            .collect())
    }

    /// Applies one batch of events, bytes as the engine published them. Without `seq` it is applied without order checks.
    #[pyo3(signature = (worker, payload, seq = None, dp_rank = 0))]
    fn ingest(
        &self,
        py: Python<'_>,
        worker: &str,
        payload: &Bound<'_, PyAny>,
        seq: Option<U64>,
        #[pyo3(from_py_with = u32_of)] dp_rank: u32,
    ) -> PyResult<IngestReport> {
        let router = self.0.open()?;
        let payload = crate::convert::payload(payload)?;
        let now = self.0.now(py)?;
        let seq = seq.map(|seq| seq.0);
        py.detach(|| router.ingest(worker, dp_rank, seq, &payload, now))
            .map(IngestReport::from)
            .map_err(to_py)
    }

    /// Forgets what a worker's cache is known or believed to hold: one rank, or all of them.
    #[pyo3(signature = (worker, dp_rank = None))]
    fn clear(&self, py: Python<'_>, worker: &str, dp_rank: Option<U32>) -> PyResult<()> {
        let router = self.0.open()?;
        let dp_rank = dp_rank.map(|rank| rank.0);
        py.detach(|| router.clear(worker, dp_rank)).map_err(to_py)
    }

    /// Records a placement that was decided elsewhere; it is believed for `ttl` seconds.
    #[pyo3(signature = (worker, tokens = None, dp_rank = None, ttl = None, lora = None, salt = None, media = None, *, text = None, messages = None, tools = None))]
    fn record(
        &self,
        py: Python<'_>,
        worker: &str,
        tokens: Option<Tokens>,
        dp_rank: Option<U32>,
        ttl: Option<f64>,
        lora: Option<&str>,
        salt: Option<&str>,
        media: Option<Media>,
        text: Option<&Bound<'_, PyString>>,
        messages: Option<&Bound<'_, PyAny>>,
        tools: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let router = self.0.open()?;
        let prompt = PromptArguments::new(tokens, text, messages, tools, lora, salt, media)?;
        let ttl = ttl.map(|ttl| seconds("ttl", ttl)).transpose()?;
        let dp_rank = dp_rank.map(|rank| rank.0);
        let now = self.0.now(py)?;
        prompt.with_prompt(py, router.config().block_size, |prompt| {
            router.record(worker, dp_rank, prompt, ttl, now)
        })
    }

    /// Returns the leading blocks that each target holds, by (worker, rank); targets with none are absent.
    #[pyo3(signature = (tokens = None, lora = None, salt = None, media = None, *, text = None, messages = None, tools = None))]
    fn overlap(
        &self,
        py: Python<'_>,
        tokens: Option<Tokens>,
        lora: Option<&str>,
        salt: Option<&str>,
        media: Option<Media>,
        text: Option<&Bound<'_, PyString>>,
        messages: Option<&Bound<'_, PyAny>>,
        tools: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<HashMap<(String, u32), Overlap>> {
        let router = self.0.open()?;
        let prompt = PromptArguments::new(tokens, text, messages, tools, lora, salt, media)?;
        let now = self.0.now(py)?;
        let overlaps = prompt.with_prompt(py, router.config().block_size, |prompt| {
            Ok(router.overlap(prompt, now))
        })?;
        Ok(overlaps
            .into_iter()
            .map(|(target, overlap)| {
                (
                    (target.worker.to_string(), target.dp_rank),
                    Overlap::from(overlap),
                )
            })
            .collect())
    }

    /// Returns every eligible target, cheapest first. Nothing is booked.
    #[pyo3(signature = (tokens = None, allowed = None, lora = None, salt = None, media = None, session = None, role = None, dp_rank = None, priority = 0, expected_output_tokens = None, overrides = None, *, text = None, messages = None, tools = None))]
    fn rank(
        &self,
        py: Python<'_>,
        tokens: Option<Tokens>,
        allowed: Option<Vec<Bound<'_, PyString>>>,
        lora: Option<&str>,
        salt: Option<&str>,
        media: Option<Media>,
        session: Option<&str>,
        role: Option<&str>,
        dp_rank: Option<U32>,
        priority: i32,
        expected_output_tokens: Option<U32>,
        overrides: Option<&Bound<'_, PyAny>>,
        text: Option<&Bound<'_, PyString>>,
        messages: Option<&Bound<'_, PyAny>>,
        tools: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Candidate>> {
        let router = self.0.open()?;
        let prompt = PromptArguments::new(tokens, text, messages, tools, lora, salt, media)?;
        let options = Options {
            request_id: None,
            allowed: allowed_workers(allowed)?,
            session,
            role: role.map(str::parse).transpose().map_err(to_py)?,
            dp_rank: dp_rank.map(|rank| rank.0),
            priority,
            expected_output_tokens: expected_output_tokens.map(|tokens| tokens.0),
            ttl: None,
            overrides: read_overrides(overrides)?,
        };
        let now = self.0.now(py)?;
        let ranked = prompt.with_prompt(py, router.config().block_size, |prompt| {
            router.rank(&options.request(prompt), now)
        })?;
        Ok(ranked.iter().map(Candidate::from).collect())
    }

    /// Chooses a target and books the request on it; None when no worker is eligible.
    #[pyo3(signature = (tokens = None, request_id = None, allowed = None, lora = None, salt = None, media = None, session = None, role = None, dp_rank = None, priority = 0, expected_output_tokens = None, ttl = None, overrides = None, *, text = None, messages = None, tools = None))]
    fn select(
        &self,
        py: Python<'_>,
        tokens: Option<Tokens>,
        request_id: Option<&str>,
        allowed: Option<Vec<Bound<'_, PyString>>>,
        lora: Option<&str>,
        salt: Option<&str>,
        media: Option<Media>,
        session: Option<&str>,
        role: Option<&str>,
        dp_rank: Option<U32>,
        priority: i32,
        expected_output_tokens: Option<U32>,
        ttl: Option<f64>,
        overrides: Option<&Bound<'_, PyAny>>,
        text: Option<&Bound<'_, PyString>>,
        messages: Option<&Bound<'_, PyAny>>,
        tools: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Lease>> {
        let router = self.0.open()?;
        let prompt = PromptArguments::new(tokens, text, messages, tools, lora, salt, media)?;
        let options = Options {
            request_id,
            allowed: allowed_workers(allowed)?,
            session,
            role: role.map(str::parse).transpose().map_err(to_py)?,
            dp_rank: dp_rank.map(|rank| rank.0),
            priority,
            expected_output_tokens: expected_output_tokens.map(|tokens| tokens.0),
            ttl: ttl.map(|ttl| seconds("ttl", ttl)).transpose()?,
            overrides: read_overrides(overrides)?,
        };
        let now = self.0.now(py)?;
        let booked = prompt.with_prompt(py, router.config().block_size, |prompt| {
            let guard = router.select(&options.request(prompt), now)?;
            Ok(guard.map(|guard| {
                let decision = Arc::clone(guard.decision());
                (guard.detach(now), decision)
            }))
        })?;
        self.0.log_trust(py);
        Ok(booked.map(|(id, decision)| Lease::new(Arc::clone(&self.0), id, decision)))
    }

    /// Books a request on a target that was chosen before, without asking whether it is eligible.
    #[pyo3(signature = (request_id, worker, tokens = None, dp_rank = None, lora = None, salt = None, media = None, session = None, expected_output_tokens = None, ttl = None, *, text = None, messages = None, tools = None))]
    fn book(
        &self,
        py: Python<'_>,
        request_id: Option<&str>,
        worker: &str,
        tokens: Option<Tokens>,
        dp_rank: Option<U32>,
        lora: Option<&str>,
        salt: Option<&str>,
        media: Option<Media>,
        session: Option<&str>,
        expected_output_tokens: Option<U32>,
        ttl: Option<f64>,
        text: Option<&Bound<'_, PyString>>,
        messages: Option<&Bound<'_, PyAny>>,
        tools: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Lease> {
        let router = self.0.open()?;
        let prompt = PromptArguments::new(tokens, text, messages, tools, lora, salt, media)?;
        let options = Options {
            request_id,
            session,
            expected_output_tokens: expected_output_tokens.map(|tokens| tokens.0),
            ttl: ttl.map(|ttl| seconds("ttl", ttl)).transpose()?,
            ..Options::default()
        };
        let dp_rank = dp_rank.map(|rank| rank.0);
        let now = self.0.now(py)?;
        let (id, decision) = prompt.with_prompt(py, router.config().block_size, |prompt| {
            let guard = router.book(worker, dp_rank, &options.request(prompt), now)?;
            let decision = Arc::clone(guard.decision());
            Ok((guard.detach(now), decision))
        })?;
        Ok(Lease::new(Arc::clone(&self.0), id, decision))
    }

    /// Ends a booking by its id, from another callback or process boundary. Returns whether it was live; an id that is not
    /// known (any more) is no error.
    #[pyo3(signature = (lease_id, ok = true, cached_tokens = None, *, prompt_tokens = None, dispatched = true))]
    fn finish(
        &self,
        py: Python<'_>,
        lease_id: &str,
        ok: bool,
        cached_tokens: Option<U32>,
        prompt_tokens: Option<U32>,
        dispatched: bool,
    ) -> PyResult<bool> {
        let router = self.0.not_forked()?;
        let Ok(id) = lease_id.parse() else {
            return Ok(false);
        };
        let outcome = outcome(ok, dispatched, cached_tokens, prompt_tokens);
        Ok(router.finish(LeaseId::from_u64(id), &outcome, self.0.now(py)?))
    }

    /// Takes in what an engine reports of its load; without `dp_rank`, of all ranks together.
    #[pyo3(signature = (worker, running = 0, waiting = 0, kv_usage = 0.0, dp_rank = None))]
    fn report_load(
        &self,
        py: Python<'_>,
        worker: &str,
        #[pyo3(from_py_with = u32_of)] running: u32,
        #[pyo3(from_py_with = u32_of)] waiting: u32,
        kv_usage: f64,
        dp_rank: Option<U32>,
    ) -> PyResult<()> {
        let report = LoadReport {
            running,
            waiting,
            kv_usage,
        };
        let dp_rank = dp_rank.map(|rank| rank.0);
        self.0
            .open()?
            .report_load(worker, dp_rank, report, self.0.now(py)?)
            .map_err(to_py)
    }

    /// Returns how far the events of one rank are believed.
    #[pyo3(signature = (worker, dp_rank = 0))]
    fn trust(
        &self,
        py: Python<'_>,
        worker: &str,
        #[pyo3(from_py_with = u32_of)] dp_rank: u32,
    ) -> PyResult<Trust> {
        let router = self.0.open()?;
        let now = self.0.now(py)?;
        let trust = py
            .detach(|| router.trust(worker, dp_rank, now))
            .map_err(to_py)?;
        self.0.log_trust(py);
        Ok(Trust::new(dp_rank, trust, &self.0.clock, now))
    }

    /// Returns sizes and counts, with those of the followed event streams under `subscriptions`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let router = self.0.open()?;
        let now = self.0.now(py)?;
        let json = py.detach(|| {
            router.tick(now);
            let mut stats = serde_json::to_value(router.stats()).unwrap_or_default();
            stats["subscriptions"] = self.0.subscriptions();
            stats.to_string()
        });
        self.0.log_trust(py);
        from_json(py, &json)
    }

    /// Returns how many workers may be chosen and need no more waiting: on every rank, events are heard, or it is settled
    /// that none will be.
    fn ready_workers(&self, py: Python<'_>) -> PyResult<usize> {
        let router = self.0.open()?;
        let now = self.0.now(py)?;
        Ok(py.detach(|| router.ready_workers(now)))
    }

    /// Waits until `workers` of them are ready, and returns whether they are; at most `timeout` seconds. Other threads run
    /// meanwhile, and an interrupt ends it. For asyncio see `kvlane.aio.wait_ready`.
    #[pyo3(signature = (timeout = None, workers = 1))]
    fn wait_ready(&self, py: Python<'_>, timeout: Option<f64>, workers: usize) -> PyResult<bool> {
        let timeout = timeout
            .map(|timeout| seconds("timeout", timeout))
            .transpose()?;
        let started = Instant::now();
        loop {
            if self.ready_workers(py)? >= workers {
                self.0.log_trust(py);
                return Ok(true);
            }
            let left = match timeout {
                Some(timeout) => timeout.saturating_sub(started.elapsed()),
                None => POLL,
            };
            if left.is_zero() {
                return Ok(false);
            }
            py.detach(|| std::thread::sleep(left.min(POLL)));
            py.check_signals()?;
        }
    }

    /// Stops following events and refuses every further call; leases can still be released.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if !self.0.is_forked() {
            py.detach(|| self.0.close());
        }
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (exc_type, exc_value, traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: &Bound<'_, PyAny>,
        exc_value: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let _ = (exc_type, exc_value, traceback);
        self.close(py)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "a kvlane.Router cannot be pickled or copied: pass its configuration, and make a router where it is needed",
        ))
    }

    fn __repr__(&self) -> &'static str {
        "<kvlane.Router>"
    }
}

/// Pause between two looks at what is waited for; an interrupt is noticed as late.
const POLL: Duration = Duration::from_millis(20);

fn allowed_workers(allowed: Option<Vec<Bound<'_, PyString>>>) -> PyResult<Option<Vec<WorkerId>>> {
    let Some(allowed) = allowed else {
        return Ok(None);
    };
    let ids = allowed
        .iter()
        .map(|id| WorkerId::new(crate::convert::text("allowed", id)?).map_err(to_py));
    ids.collect::<PyResult<_>>().map(Some)
}

fn read_overrides(overrides: Option<&Bound<'_, PyAny>>) -> PyResult<Overrides> {
    match overrides {
        Some(overrides) => {
            Overrides::from_json(&to_json(overrides, "overrides", invalid)?).map_err(to_py)
        }
        None => Ok(Overrides::default()),
    }
}
