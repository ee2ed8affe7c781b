//! `kvlane guard`: what stands between the sidecar and an engine that it started.
//!
//! The sidecar runs the outer guard, that one the inner guard, and that one the engine. All three live on one pipe whose
//! other end is the sidecar's: when it closes, because the sidecar says so or died, everything below is ended. Both guards
//! are where the kernel hands processes that lost their parent to, so that nothing which an engine starts can leave them,
//! whatever session or group it makes for itself. When one guard is killed the other one is still there; when both are, the
//! engine gets its death signal.
//!
//! A guard writes to its standard output, one report a line; the engine writes to the guard's standard error.

use std::ffi::OsString;
use std::future::Future;
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use rustix::process::{
    Signal, WaitOptions, getpid, getppid, set_child_subreaper, set_parent_process_death_signal,
    setsid, wait,
};
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};
use tokio::sync::oneshot;

use super::exit::Exit;
use super::proc::{self, Identity, PATIENCE};
use crate::config::seconds;

/// Flags of `kvlane guard`, which the sidecar runs and nobody else needs to.
#[derive(Args, Clone, Debug)]
pub struct GuardArgs {
    /// Which one it is
    #[arg(long, value_enum)]
    stage: Stage,
    /// Seconds between asking the engine to end and killing it
    #[arg(long)]
    stop_seconds: f64,
    /// Process that it must be a child of
    #[arg(long)]
    parent: Option<u32>,
    /// The engine's command
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// What `kvlane guard` does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Stage {
    /// Guards the inner guard.
    Outer,
    /// Guards the engine.
    Inner,
    /// Becomes the engine.
    Exec,
}

/// One line that the guards tell the sidecar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Report {
    /// The engine's process runs.
    Started(Identity),
    /// The engine's own process has ended; what it started is being ended.
    Ended(Exit),
    /// These processes do not end although they were killed.
    Left(Vec<u32>),
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Started(id) => write!(f, "started {} {}", id.pid, id.start),
            Self::Ended(Exit::Code(code)) => write!(f, "ended code {code}"),
            Self::Ended(Exit::Signal(signal)) => write!(f, "ended signal {signal}"),
            Self::Left(pids) => {
                f.write_str("left")?;
                pids.iter().try_for_each(|pid| write!(f, " {pid}"))
            }
        }
    }
}

impl FromStr for Report {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let number = |word: &str| word.parse().map_err(drop);
        Ok(match words.as_slice() {
            ["started", pid, start] => Self::Started(Identity {
                pid: pid.parse().map_err(drop)?,
                start: start.parse().map_err(drop)?,
            }),
            ["ended", "code", code] => Self::Ended(Exit::Code(number(code)?)),
            ["ended", "signal", signal] => Self::Ended(Exit::Signal(number(signal)?)),
            ["left", pids @ ..] => {
                let pids = pids.iter().map(|pid| pid.parse().map_err(drop));
                Self::Left(pids.collect::<Result<_, _>>()?)
            }
            _ => return Err(()),
        })
    }
}

/// Runs a guard; call it from the main thread, which lives as long as the process. The engine gets its death signal when the
/// thread that started it ends.
#[must_use]
pub fn run(args: &GuardArgs) -> ExitCode {
    if args.stage == Stage::Exec {
        return become_engine(args);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let result = runtime.and_then(|runtime| runtime.block_on(watch(args)));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("{error}"));
            ExitCode::FAILURE
        }
    }
}

/// Starts the next stage and stays until nothing is left of it.
async fn watch(args: &GuardArgs) -> io::Result<()> {
    // Another name than the sidecar's, so that whoever kills the sidecar by name leaves what cleans up after it.
    let _ = rustix::thread::set_name(c"engine-guard");
    set_child_subreaper(Some(getpid()))?;
    let mut family = Family::new()?;
    let stop = stop_wanted()?;
    let child = next_stage(args)?;
    let is_asked = tokio::select! {
        () = family.until_over(child) => false,
        () = stop => true,
    };
    let left = match args.stage {
        Stage::Inner => {
            let stop = seconds(args.stop_seconds);
            let engine = proc::identity(child);
            let mut ended = (!is_asked).then_some(Duration::ZERO);
            // What an engine that ended leaves behind is not waited for long: the next one needs its memory.
            let grace = |elapsed| {
                if !engine.is_some_and(proc::is_alive) {
                    ended.get_or_insert(elapsed);
                }
                ended.map_or(stop, |at| stop.min(at + REST))
            };
            // At once where it ended by itself: nobody should wait for it until the rest has ended, too.
            let told = family.report_exit();
            let left = end_descendants(grace).await;
            family.reap(child);
            if !told {
                family.report_exit();
            }
            left
        }
        Stage::Outer | Stage::Exec => {
            if is_asked {
                // It has seen the pipe close; a signal it has not.
                let _ = proc::identity(child).map(|id| proc::signal(id, Signal::TERM));
                let most = seconds(args.stop_seconds) + PATIENCE + REST;
                let _ = tokio::time::timeout(most, family.until_over(child)).await;
            }
            end_descendants(|_| Duration::ZERO).await
        }
    };
    if !left.is_empty() {
        report(&Report::Left(left.iter().map(|id| id.pid).collect()));
    }
    Ok(())
}

/// Longest wait for what an engine leaves behind.
const REST: Duration = Duration::from_secs(3);

/// The children of a guard, its own and those that the kernel handed it.
struct Family {
    ended: Signals,
    /// How the own child ended.
    exit: Option<Exit>,
}

impl Family {
    fn new() -> io::Result<Self> {
        Ok(Self {
            ended: signal(SignalKind::child())?,
            exit: None,
        })
    }

    /// Waits until the own child has ended.
    async fn until_over(&mut self, child: u32) {
        loop {
            self.reap(child);
            if self.exit.is_some() {
                return;
            }
            self.ended.recv().await;
        }
    }

    /// Tells how the own child ended; tells whether it has.
    fn report_exit(&self) -> bool {
        self.exit.is_some_and(|exit| {
            report(&Report::Ended(exit));
            true
        })
    }

    /// Takes note of children that have ended.
    fn reap(&mut self, child: u32) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if u32::try_from(pid.as_raw_nonzero().get()) == Ok(child) {
                self.exit = Some(Exit::from(ExitStatus::from_raw(status.as_raw())));
            }
        }
    }
}

async fn end_descendants(grace: impl FnMut(Duration) -> Duration) -> Vec<Identity> {
    let own = std::process::id();
    proc::end(|all| proc::descendants(all, own), grace).await
}

/// Waits until the sidecar closes its end of the pipe, or a signal asks to end.
fn stop_wanted() -> io::Result<impl Future<Output = ()>> {
    let (sender, closed) = oneshot::channel();
    // Not the runtime's own reader, for which its end would wait.
    std::thread::Builder::new().spawn(move || {
        let mut piece = [0; 64];
        while matches!(io::stdin().read(&mut piece), Ok(1..)) {}
        let _ = sender.send(());
    })?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    Ok(async move {
        tokio::select! {
            _ = closed => {}
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hang_up.recv() => {}
        }
    })
}

/// Starts what this guard guards.
fn next_stage(args: &GuardArgs) -> io::Result<u32> {
    let mut command = this_command(if args.stage == Stage::Outer {
        Stage::Inner
    } else {
        Stage::Exec
    });
    command
        .arg(format!("--stop-seconds={}", args.stop_seconds))
        .arg(format!("--parent={}", std::process::id()));
    if args.stage == Stage::Inner {
        // The pipes to the sidecar are not the engine's.
        command.stdin(Stdio::null()).stdout(io::stderr());
    }
    let child = command.arg("--").args(&args.command).spawn()?;
    if args.stage == Stage::Inner
        && let Some(id) = proc::identity(child.id())
    {
        report(&Report::Started(id));
    }
    Ok(child.id())
}

/// The command of a stage, in this very binary, even when its file was replaced since.
fn this_command(stage: Stage) -> Command {
    let mut command = Command::new(OWN_BINARY);
    command.arg0("kvlane").arg("guard");
    command.arg(match stage {
        Stage::Outer => "--stage=outer",
        Stage::Inner => "--stage=inner",
        Stage::Exec => "--stage=exec",
    });
    command
}

/// The binary that runs, as the kernel knows it.
pub(super) const OWN_BINARY: &str = "/proc/self/exe";

/// Turns this process into the engine; returns only if that fails.
fn become_engine(args: &GuardArgs) -> ExitCode {
    let prepared = set_parent_process_death_signal(Some(Signal::KILL)).and_then(|()| setsid());
    if let Err(error) = prepared {
        say(&format!("cannot prepare the engine's process: {error}"));
        return ExitCode::FAILURE;
    }
    let parent = getppid().and_then(|pid| u32::try_from(pid.as_raw_nonzero().get()).ok());
    if args.parent.is_some() && parent != args.parent {
        // It died before its death could be heard of.
        return ExitCode::FAILURE;
    }
    let Some((program, arguments)) = args.command.split_first() else {
        return ExitCode::FAILURE;
    };
    let error = Command::new(program).args(arguments).exec();
    say(&format!(
        "{} cannot be started: {error}",
        program.to_string_lossy()
    ));
    // As a shell says it.
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound {
        Exit::NOT_FOUND
    } else {
        Exit::NOT_EXECUTABLE
    })
}

fn report(report: &Report) {
    // A sidecar that died does not read it.
    let _ = writeln!(io::stdout(), "{report}");
}

fn say(message: &str) {
    let _ = writeln!(io::stderr(), "kvlane guard: {message}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_read_as_they_are_written() {
        for report in [
            Report::Started(Identity { pid: 7, start: 9 }),
            Report::Ended(Exit::Code(2)),
            Report::Ended(Exit::Signal(9)),
            Report::Left(vec![1, 22]),
        ] {
            assert_eq!(report.to_string().parse(), Ok(report));
        }
        for line in ["", "started 1", "ended code x", "left x", "hello"] {
            assert_eq!(line.parse::<Report>(), Err(()), "{line}");
        }
    }
}
