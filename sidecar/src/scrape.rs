//! What is asked of each worker from time to time: its health, its load and capacity, and its models.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::header::{ACCEPT, HOST, HeaderValue};
use hyper::{Request, StatusCode};
use kvlane::LoadReport;
use serde::Deserialize;
use serde_json::Value;
use tracing::debug;

use crate::config::{Config, seconds};
use crate::fleet::{Fleet, Model, Worker};
use crate::forward::upstream::{Pool, UpstreamError};
use crate::pool::describe::{Described, ranks_of};
use crate::pool::member::Probe;

mod exposition;

pub use exposition::{EngineReport, Load, parse};

/// Follows one worker until it is removed.
pub async fn follow(worker: Arc<Worker>, fleet: Arc<Fleet>, config: Arc<Config>) {
    let removed = worker.removed().clone();
    let probes = probe_loop(&worker, &fleet, seconds(config.health_interval_seconds));
    let readings = read_loop(&worker, seconds(config.scrape_interval_seconds));
    tokio::select! {
        () = removed.cancelled() => {}
        () = async { tokio::join!(probes, readings); } => {}
    }
}

/// Probes health; asks for the models whenever the engine is asked what it is, and now and then.
async fn probe_loop(worker: &Arc<Worker>, fleet: &Fleet, interval: Duration) {
    const MODELS_EVERY: Duration = Duration::from_secs(30);
    const TIMEOUTS_UNTIL_DOWN: u32 = 3;
    let mut timeouts = 0;
    let mut progress = worker.progress();
    let mut models_at: Option<Instant> = None;
    let mut again = Again::default();
    loop {
        let was_healthy = worker.healthy() == Some(true);
        let before = std::mem::replace(&mut progress, worker.progress());
        match get(worker, "/health", SMALL, interval.max(MIN_PROBE_TIMEOUT)).await {
            // An engine without the route lives as well as one that answers it.
            Ok((status, _)) if status.is_success() || status == StatusCode::NOT_FOUND => {
                timeouts = 0;
                worker.probed(&Probe::Healthy);
            }
            Ok((status, _)) => {
                worker.metrics.health_failures.inc();
                worker.probed(&Probe::Unwell(format!("/health answered {status}")));
            }
            Err(error) if !is_refused(&error) && progress != before => timeouts = 0,
            Err(FetchError::Timeout | FetchError::Transport(UpstreamError::Slow(_))) => {
                timeouts += 1;
                worker.metrics.health_failures.inc();
                if timeouts >= TIMEOUTS_UNTIL_DOWN {
                    worker.probed(&Probe::Gone("/health did not answer".to_owned()));
                }
            }
            Err(error) => {
                worker.metrics.health_failures.inc();
                if is_refused(&error) && was_healthy {
                    worker.process_ended();
                }
                worker.probed(&Probe::Gone(format!("/health: {error}")));
            }
        }
        let is_healthy = worker.healthy() == Some(true);
        if is_healthy && (worker.take_stale() || !was_healthy || again.is_due()) {
            models_at = Some(Instant::now());
            let was_answered = describe(worker, fleet).await;
            again.note(was_answered);
        } else if is_healthy && models_at.is_none_or(|at| at.elapsed() >= MODELS_EVERY) {
            models_at = Some(Instant::now());
            learn_models(fleet, worker, ask(worker, MODELS).await.ok().flatten());
        }
        // One that is down is asked more often, so that it is missed no longer than needed.
        let pause = if is_healthy {
            interval
        } else {
            interval.min(WHILE_DOWN)
        };
        tokio::time::sleep(jittered(pause)).await;
    }
}

/// Tells whether nothing listens there any more. All else may come from a worker that is only busy.
const fn is_refused(error: &FetchError) -> bool {
    matches!(
        error,
        FetchError::Transport(UpstreamError::Connect(_) | UpstreamError::Ended(_))
    )
}

/// Longest pause between two probes of a worker that is down.
const WHILE_DOWN: Duration = Duration::from_millis(500);
/// Shortest time that a probe is given.
const MIN_PROBE_TIMEOUT: Duration = Duration::from_secs(2);
const SMALL: usize = 64 << 10;

const MODELS: &str = "/v1/models";
/// Models of a worker that are kept, adapters among them.
const MOST_MODELS: usize = 10_000;

/// Takes in the models that a worker serves, and returns the answer that told of them.
fn learn_models(fleet: &Fleet, worker: &Worker, answer: Option<Value>) -> Option<Value> {
    #[derive(Deserialize)]
    struct Entry {
        id: String,
        parent: Option<String>,
    }
    let answer = answer?;
    let Some(list) = answer["data"].as_array() else {
        return Some(answer);
    };
    // An entry that is not understood says nothing of the others.
    let entries = list
        .iter()
        .filter_map(|entry| Entry::deserialize(entry).ok());
    let models = entries.take(MOST_MODELS).map(|entry| Model {
        is_adapter: entry.parent.is_some_and(|parent| !parent.is_empty()),
        id: entry.id,
    });
    if worker.set_models(models.collect()) {
        fleet.refresh_models();
    }
    Some(answer)
}

/// When a description that is not whole is asked for again.
#[derive(Debug, Default)]
struct Again {
    due: Option<Instant>,
    pause: Duration,
}

impl Again {
    /// First pause; each is twice the one before it, since a question that is not answered holds up the next probe.
    const FIRST: Duration = Duration::from_millis(500);
    const LONGEST: Duration = Duration::from_secs(30);

    fn is_due(&self) -> bool {
        self.due.is_some_and(|due| due <= Instant::now())
    }

    fn note(&mut self, was_answered: bool) {
        if was_answered {
            *self = Self::default();
        } else {
            self.pause = (self.pause * 2).clamp(Self::FIRST, Self::LONGEST);
            self.due = Some(Instant::now() + self.pause);
        }
    }
}

/// Asks a worker for JSON: nothing where it answers, and says that it does not know.
async fn ask(worker: &Worker, path: &'static str) -> Result<Option<Value>, FetchError> {
    match get(worker, path, 4 << 20, MIN_PROBE_TIMEOUT).await {
        Ok((StatusCode::OK, body)) => Ok(serde_json::from_slice::<Value>(&body).ok()),
        Ok(_) | Err(FetchError::TooLarge) => Ok(None),
        Err(error) => {
            debug!(worker = worker.id(), path, cause = %error, "no description");
            Err(error)
        }
    }
}

/// Asks the engine what it is; tells whether every question was answered. Hardly any engine knows all of them, and one that
/// says so has answered.
async fn describe(worker: &Worker, fleet: &Fleet) -> bool {
    let server_info = async {
        // The newer name first: the older one is a burden for an engine that has both. As text, vLLM tells less.
        match ask(worker, "/server_info?config_format=json").await {
            Ok(None) => ask(worker, "/get_server_info").await,
            info => info,
        }
    };
    let (models, version, sources, info) = tokio::join!(
        ask(worker, MODELS),
        ask(worker, "/version"),
        ask(worker, "/kv_event_sources"),
        server_info
    );
    let host = worker.config.url.address().host();
    let all_answered = models.is_ok() && version.is_ok() && sources.is_ok() && info.is_ok();
    // What was learned before stands until the engine says something else: silence is no answer.
    let mut described = if all_answered {
        Described::default()
    } else {
        worker.answers()
    };
    if let Ok(Some(info)) = info {
        described.read_server_info(&info, host);
    }
    if let Ok(Some(version)) = &version {
        described.read_version(version);
    }
    let is_there = version.is_ok();
    if let Ok(Some(models)) = models.map(|models| learn_models(fleet, worker, models)) {
        described.read_models(&models);
    }
    if let Ok(Some(sources)) = sources {
        described.read_event_sources(&sources, host);
    }
    worker.answered(described, is_there);
    all_answered
}

/// Reads load and capacity.
async fn read_loop(worker: &Worker, interval: Duration) {
    tokio::time::sleep(first_pause(interval)).await;
    loop {
        let asked = Instant::now();
        match get(worker, "/metrics", 8 << 20, interval.max(MIN_PROBE_TIMEOUT)).await {
            Ok((StatusCode::OK, body)) => {
                apply(worker, &parse(&String::from_utf8_lossy(&body)), asked);
            }
            Ok(_) => {}
            Err(error) => {
                worker.metrics.scrape_failures.inc();
                debug!(worker = worker.id(), cause = %error, "metrics could not be read");
            }
        }
        tokio::time::sleep(jittered(interval)).await;
    }
}

fn apply(worker: &Worker, report: &EngineReport, asked: Instant) {
    if let Some(born) = report.born {
        worker.noted_birth(born);
    }
    worker.measured(Described {
        block_size: report.block_size,
        kv_blocks: report.num_blocks,
        // One row of numbers may be the sum of several ranks.
        dp_ranks: ranks_of(report.loads.len() as u64).filter(|ranks| *ranks > 1),
        ..Described::default()
    });
    // The worker may have been removed while it answered, and another may have its name: then nobody wants to know.
    worker.tell(|router, id| {
        let ranks_are_told_apart = report.loads.len() > 1 && worker.config.dp_ranks > 1;
        if ranks_are_told_apart {
            for (dp_rank, load) in &report.loads {
                let _ = router.report_load(id, Some(*dp_rank), as_report(load), asked);
            }
        } else if let Some(sum) = report.sum() {
            let _ = router.report_load(id, None, as_report(&sum), asked);
        }
        let Some(tokens) = report.block_size else {
            return;
        };
        let _ = router.note_engine_block_size(id, tokens, Instant::now());
        if worker.config.kv_capacity_blocks.is_none()
            && let Some(tokens) = report.capacity_tokens()
        {
            let own = tokens / u64::from(u32::from(router.config().block_size));
            let blocks = usize::try_from(own).ok().filter(|blocks| *blocks > 0);
            let _ = router.set_kv_capacity(id, blocks);
        }
    });
}

const fn as_report(load: &Load) -> LoadReport {
    LoadReport {
        running: load.running,
        waiting: load.waiting,
        kv_usage: load.kv_usage,
    }
}

/// Lets workers that were added together be asked at different moments, within a fifth of the interval.
fn first_pause(interval: Duration) -> Duration {
    interval.mul_f64(0.2 * fastrand::f64())
}

/// Spreads askers by a twentieth, so that they do not fall into step.
fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(0.95 + 0.1 * fastrand::f64())
}

/// Why a worker could not be asked.
#[derive(Debug)]
pub enum FetchError {
    /// No connection, or it broke.
    Transport(UpstreamError),
    /// The answer broke off.
    Broken,
    /// No whole answer in time.
    Timeout,
    /// The answer is larger than accepted.
    TooLarge,
}

impl fmt::Display for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Transport(error) => error.fmt(f),
            Self::Broken => f.write_str("the answer broke off"),
            Self::Timeout => f.write_str("no answer in time"),
            Self::TooLarge => f.write_str("the answer is too large"),
        }
    }
}

/// Asks a worker for a path; an answer above `limit` bytes is refused.
///
/// # Errors
/// [`FetchError`].
pub async fn get(
    worker: &Worker,
    path: &str,
    limit: usize,
    timeout: Duration,
) -> Result<(StatusCode, Bytes), FetchError> {
    let target = format!("{}{path}", worker.config.url.prefix());
    fetch(&worker.pool, worker.host_header(), &target, limit, timeout).await
}

/// Asks whoever listens at a pool's address for a path; an answer above `limit` bytes is refused.
///
/// # Errors
/// [`FetchError`].
pub async fn fetch(
    pool: &Arc<Pool>,
    host: &HeaderValue,
    target: &str,
    limit: usize,
    timeout: Duration,
) -> Result<(StatusCode, Bytes), FetchError> {
    let request = || {
        let mut request = Request::new(Full::default());
        *request.uri_mut() = target.parse().unwrap_or_default();
        request.headers_mut().insert(HOST, host.clone());
        request
            .headers_mut()
            .insert(ACCEPT, HeaderValue::from_static("*/*"));
        request
    };
    let whole = async {
        let response = pool.send(request).await.map_err(FetchError::Transport)?;
        let status = response.status();
        let mut body = response.into_body();
        let mut collected = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| FetchError::Broken)?;
            if let Some(piece) = frame.data_ref() {
                if collected.len() + piece.len() > limit {
                    return Err(FetchError::TooLarge);
                }
                collected.extend_from_slice(piece);
            }
        }
        Ok((status, collected.freeze()))
    };
    tokio::time::timeout(timeout, whole)
        .await
        .unwrap_or(Err(FetchError::Timeout))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Holds a pause that is drawn anew each time against its range, of which it must use nearly all.
    fn is_spread(draw: fn(Duration) -> Duration, from: f64, to: f64) {
        let interval = Duration::from_secs(10);
        let seconds = || draw(interval).as_secs_f64();
        let (mut least, mut most) = (f64::MAX, 0.0_f64);
        for drawn in std::iter::repeat_with(seconds).take(1_000) {
            least = least.min(drawn);
            most = most.max(drawn);
        }
        let tenth = (to - from) / 10.0;
        assert!(
            (from..from + tenth).contains(&least),
            "{least} of {from} to {to}"
        );
        assert!(
            (to - tenth..=to).contains(&most),
            "{most} of {from} to {to}"
        );
    }

    #[test]
    fn pauses_are_spread_over_their_whole_range() {
        is_spread(first_pause, 0.0, 2.0);
        is_spread(jittered, 9.5, 10.5);
    }
}
