//! `kvlane demo`: the measured story on embedded engines over real sockets.
//!
//! Two engines hold 926 blocks of 16 tokens each. Twelve prefixes of 1,500 tokens are sent six times each, shuffled, the
//! last 24 tokens always fresh: together they do not fit into one engine, and just fit into two when each prefix stays
//! where it is. The same requests go through each policy, on fresh engines and a fresh router. A repeat is a hit when the
//! engine itself reports every complete block of the shared prefix as cached.

mod args;
mod client;
mod overhead;
mod report;
mod workload;

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvlane::{Error, ErrorKind, IndexMode, Result};

use crate::config::{Config, PolicyKind, WorkerConfig};
use crate::engine::{Engine, EngineConfig, EngineHandle};
use crate::net::HostPort;
use crate::serve::{self, ServeHandle};

pub use args::{DemoArgs, DemoPolicy};
pub use report::{PolicyReport, Report};

use client::{Answer, Client};
use workload::Workload;

/// KV pool of each engine: 14,816 tokens, as in the measured story.
const KV_BLOCKS: u32 = 926;
const ENGINES: usize = 2;

/// Runs the demo and prints its table (or JSON) on standard output.
///
/// # Errors
/// A socket cannot be bound, or an engine or the proxy does not answer as it must; the message names the request.
pub async fn run(args: DemoArgs) -> Result<()> {
    let report = play(&args).await?;
    report.print(args.json)
}

/// Runs the demo and returns what it measured.
///
/// # Errors
/// As [`run`].
pub async fn play(args: &DemoArgs) -> Result<Report> {
    args.validate()?;
    let policies = args.policies();
    let requests = Workload::REQUESTS * args.seeds as usize * policies.len();
    let progress = progress_bar(requests, args.json);
    let mut reports = Vec::with_capacity(policies.len());
    for policy in policies {
        let mut report = PolicyReport::new(policy);
        for seed in 1..=u64::from(args.seeds) {
            progress.set_message(format!("{} (seed {seed})", policy.name()));
            run_once(policy, seed, args.speed, &progress, &mut report).await?;
        }
        reports.push(report);
    }
    progress.set_message("router overhead");
    let router_overhead_ms_p50 = overhead::measure().await?;
    progress.finish_and_clear();
    Ok(Report::new(reports, router_overhead_ms_p50))
}

/// Plays the workload once, on engines and a router of its own.
async fn run_once(
    policy: DemoPolicy,
    seed: u64,
    speed: f64,
    progress: &ProgressBar,
    report: &mut PolicyReport,
) -> Result<()> {
    let mut engines = Vec::with_capacity(ENGINES);
    for _ in 0..ENGINES {
        engines.push(start_engine(policy, speed).await?);
    }
    let proxy = start_proxy(policy, seed, &engines).await?;
    ready(proxy.admin_addr).await?;
    let mut client = Client::new(proxy.proxy_addr);
    let workload = Workload::new(seed);
    let mut hits = 0;
    for request in workload.requests() {
        let answer = client
            .stream(&request.body(engines[0].model_name()))
            .await?;
        // Times are the engine's own: wall time, expanded by what the engine's clock was compressed.
        report.add_ttft(request.repeat, answer.ttft.mul_f64(speed));
        hits += u32::from(request.repeat && is_hit(&answer));
        progress.inc(1);
    }
    report.hits.push(hits);
    proxy.shutdown().await;
    for engine in engines {
        engine.shutdown().await;
    }
    Ok(())
}

/// A hit: the engine found every complete block of the shared prefix.
fn is_hit(answer: &Answer) -> bool {
    answer.cached_tokens >= Workload::SHARED_BLOCK_TOKENS
}

async fn start_engine(policy: DemoPolicy, speed: f64) -> Result<EngineHandle> {
    let mut config = EngineConfig {
        kv_blocks: KV_BLOCKS,
        speed,
        ..EngineConfig::ephemeral()
    };
    if let Some(events) = &mut config.events {
        events.silent = policy == DemoPolicy::KvEventsMissing;
    }
    Engine::start(config).await
}

async fn start_proxy(
    policy: DemoPolicy,
    seed: u64,
    engines: &[EngineHandle],
) -> Result<ServeHandle> {
    let mut config = Config {
        listen: HostPort::new("127.0.0.1", 0),
        admin: HostPort::new("127.0.0.1", 0),
        policy: match policy {
            DemoPolicy::RoundRobin => PolicyKind::RoundRobin,
            DemoPolicy::Random => PolicyKind::Random,
            DemoPolicy::KvApproximate | DemoPolicy::KvEventsMissing | DemoPolicy::KvEvents => {
                PolicyKind::Kv
            }
        },
        scrape_interval_seconds: 0.2,
        ..Config::default()
    };
    config.router.seed = Some(seed);
    if policy == DemoPolicy::KvApproximate {
        config.router.index = IndexMode::Approximate;
    }
    for (number, engine) in engines.iter().enumerate() {
        let mut worker =
            WorkerConfig::new(&format!("w{}", number + 1), &engine.url()).map_err(unexpected)?;
        if matches!(policy, DemoPolicy::KvEventsMissing | DemoPolicy::KvEvents) {
            worker.events = engine.events_endpoint().map(str::to_owned);
            worker.replay = engine.replay_endpoint().map(str::to_owned);
        }
        config.workers.push(worker);
    }
    serve::start(config).await.map_err(unexpected)
}

/// Waits until the proxy knows its workers, as an orchestrator would before it sends traffic.
async fn ready(admin: SocketAddr) -> Result<()> {
    let mut client = Client::new(admin);
    for _ in 0..200 {
        if client.get_status("/readyz").await? == 200 {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    Err(unexpected("the proxy was not ready within 5 seconds"))
}

fn progress_bar(requests: usize, json: bool) -> ProgressBar {
    let shown = std::io::stderr().is_terminal() && !json;
    let target = if shown {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(Some(requests as u64), target);
    if let Ok(style) =
        ProgressStyle::with_template("{bar:40} {pos}/{len} requests  {elapsed}  {msg}")
    {
        bar.set_style(style);
    }
    bar
}

fn unexpected(message: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidRequest, format!("demo: {message}"))
}
