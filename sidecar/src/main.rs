//! The kvlane command.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
#[cfg(feature = "nixl")]
use kvlane_sidecar::nixl;
use kvlane_sidecar::pool::process::guard;
use kvlane_sidecar::{demo, engine, link, plan, serve};
use tracing_subscriber::EnvFilter;

#[derive(Parser)]
#[command(
    name = "kvlane",
    version,
    about = "Sends each LLM request to the worker where its KV cache is warm."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the OpenAI-compatible proxy in front of workers
    Serve(Box<serve::ServeArgs>),
    /// Plays the measured story on embedded engines and prints the hit table
    Demo(demo::DemoArgs),
    /// Runs a simulated vLLM with finite KV, KV events and metrics
    Engine(engine::EngineArgs),
    /// Prints from which prompt length and link speed on a prefill handed over to another worker pays
    Plan(plan::PlanArgs),
    /// Measures how fast KV moves between two hosts or GPUs, and prints what the planner wants
    Link(link::LinkArgs),
    /// Stands between the proxy and an engine that it started
    #[command(hide = true)]
    Guard(guard::GuardArgs),
}

#[cfg(feature = "nixl")]
impl Command {
    fn may_load_nixl(&self) -> bool {
        match self {
            Self::Engine(args) => args.may_load_nixl(),
            Self::Link(args) => args.may_load_nixl(),
            Self::Serve(_) | Self::Demo(_) | Self::Plan(_) | Self::Guard(_) => false,
        }
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    // Before there are threads: what it starts hangs on the life of this one.
    if let Command::Guard(args) = &cli.command {
        return guard::run(args);
    }
    #[cfg(feature = "nixl")]
    if cli.command.may_load_nixl()
        && let Err(error) = nixl::prepare_environment()
    {
        eprintln!("cannot start again with UCX_MODULES set, so NIXL will not load: {error}");
    }
    // The demo's table is its output; what its workers and proxies say on the way is not.
    let level = if matches!(cli.command, Command::Demo(_)) {
        "error"
    } else {
        "info"
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| {
            kvlane::Error::new(kvlane::ErrorKind::Config, "cannot start the runtime")
                .with_source(error)
        })
        .and_then(|runtime| match cli.command {
            Command::Serve(args) => runtime.block_on(serve::run(*args)),
            Command::Demo(args) => runtime
                .block_on(demo::run(args))
                .map(|()| ExitCode::SUCCESS),
            Command::Plan(args) => plan::run(&args).map(|()| ExitCode::SUCCESS),
            Command::Link(args) => runtime
                .block_on(link::run(args))
                .map(|()| ExitCode::SUCCESS),
            Command::Guard(args) => Ok(guard::run(&args)),
            Command::Engine(args) => runtime
                .block_on(engine::run(args))
                .map(|()| ExitCode::SUCCESS),
        });
    #[cfg(feature = "nixl")]
    nixl::finish(std::time::Duration::from_secs(5));
    match result {
        Ok(code) => code,
        Err(error) => {
            let mut cause = std::error::Error::source(&error);
            let mut message = error.to_string();
            while let Some(source) = cause {
                message = format!("{message}: {source}");
                cause = source.source();
            }
            tracing::error!("{message}");
            ExitCode::FAILURE
        }
    }
}
