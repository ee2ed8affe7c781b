//! One life of an engine: from the start of its guard until nothing is left of it.

use std::io::{self, PipeWriter};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::exit::Exit;
use super::guard::Report;
use super::launch::Launch;
use super::log::Log;
use super::proc::{self, Identity, PATIENCE};
use super::strays;

/// A running engine. Dropping it ends the engine without waiting.
#[derive(Debug)]
pub(super) struct Life {
    /// The engine lives while this pipe is open.
    pipe: Arc<Mutex<Option<PipeWriter>>>,
    course: watch::Receiver<Course>,
}

/// How far a life is.
#[derive(Clone, Debug, Default)]
struct Course {
    engine: Option<Identity>,
    /// The engine's own process has ended, or a guard: nobody should be sent there any more.
    is_ending: bool,
    end: Option<End>,
}

/// How a life ended.
#[derive(Clone, Debug, Default)]
pub(super) struct End {
    /// How the engine's own process did; `None` when a guard was killed, and nobody saw it.
    pub(super) exit: Option<Exit>,
    /// Processes that cannot be killed.
    pub(super) left: Vec<u32>,
}

/// What a life is begun with.
#[derive(Debug)]
pub(super) struct Begin<'a> {
    /// The binary that is the guard.
    pub(super) guard: &'a Path,
    pub(super) stop_after: Duration,
    /// The run that it belongs to.
    pub(super) run: String,
    pub(super) log: &'a Arc<Log>,
    pub(super) tasks: &'a TaskTracker,
}

impl Life {
    /// Starts an engine under its guard.
    ///
    /// # Errors
    /// The guard cannot be started.
    pub(super) fn begin(launch: &Launch, with: Begin<'_>) -> io::Result<Self> {
        let name = launch.worker.id.as_str().to_owned();
        let (end_of_guard, pipe) = io::pipe()?;
        let (output, end_of_engine) = io::pipe()?;
        let mut command = Command::new(with.guard);
        command
            .arg0("kvlane")
            .args(["guard", "--stage=outer"])
            .arg(format!("--stop-seconds={}", with.stop_after.as_secs_f64()))
            .arg("--")
            .args(&launch.command)
            .envs(launch.environment.iter().cloned())
            .stdin(end_of_guard)
            .stdout(Stdio::piped())
            .stderr(end_of_engine)
            // What the terminal sends to the sidecar is not for its engines.
            .process_group(0);
        if let Some(folder) = &launch.cwd {
            command.current_dir(folder);
        }
        let output = with.log.follow(&name, output)?;
        let guard = command.spawn()?;
        // It holds this end of the pipes, which would never close otherwise.
        drop(command);
        let (sender, course) = watch::channel(Course::default());
        let pipe = Arc::new(Mutex::new(Some(pipe)));
        let follower = Follower {
            name,
            run: with.run,
            stop_after: with.stop_after,
            output,
            pipe: Arc::clone(&pipe),
            course: sender,
        };
        with.tasks.spawn(follower.follow(guard));
        Ok(Self { pipe, course })
    }

    /// Waits for the engine's process; `None` when there will be none.
    pub(super) async fn engine(&mut self) -> Option<Identity> {
        let started = self
            .course
            .wait_for(|course| course.engine.is_some() || course.end.is_some());
        started.await.ok().and_then(|course| course.engine)
    }

    /// Waits until the engine's own process has ended, or will because its guard has.
    pub(super) async fn ending(&mut self) {
        let ending = |course: &Course| course.is_ending || course.end.is_some();
        let _ = self.course.wait_for(ending).await;
    }

    /// Waits until nothing is left.
    pub(super) async fn over(&mut self) -> End {
        let over = self.course.wait_for(|course| course.end.is_some()).await;
        over.ok()
            .and_then(|course| course.end.clone())
            .unwrap_or_default()
    }

    /// Begins to end it: politely, and after its time not.
    pub(super) fn stop(&self) {
        self.pipe.lock().take();
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Hears what the guards say.
struct Follower {
    name: String,
    run: String,
    stop_after: Duration,
    /// Ends when all that was written has been read.
    output: oneshot::Receiver<()>,
    pipe: Arc<Mutex<Option<PipeWriter>>>,
    course: watch::Sender<Course>,
}

impl Follower {
    async fn follow(self, mut guard: Child) {
        let mut end = End::default();
        let mut engine = None;
        let mut reports = guard.stdout.take().map(|out| BufReader::new(out).lines());
        // Set when the outer guard has ended; the inner one ends before it, or sees the pipe close.
        let mut deadline: Option<Instant> = None;
        while reports.is_some() || deadline.is_none() {
            let next = async {
                match &mut reports {
                    Some(reports) => reports.next_line().await.ok().flatten(),
                    None => std::future::pending().await,
                }
            };
            let late = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                line = next => match line.as_deref().map(str::parse) {
                    None => reports = None,
                    Some(Ok(Report::Started(id))) => {
                        engine = Some(id);
                        self.course.send_modify(|course| course.engine = engine);
                    }
                    Some(Ok(Report::Ended(exit))) => {
                        end.exit = Some(exit);
                        self.course.send_modify(|course| course.is_ending = true);
                    }
                    Some(Ok(Report::Left(pids))) => end.left.extend(pids),
                    // Not ours.
                    Some(Err(())) => {}
                },
                _ = guard.wait(), if deadline.is_none() => {
                    self.pipe.lock().take();
                    self.course.send_modify(|course| course.is_ending = true);
                    deadline = Some(Instant::now() + self.stop_after + PATIENCE * 2);
                }
                () = late => break,
            }
        }
        if let Some(engine) = engine {
            // Nothing, unless both guards were killed.
            let select = |all: &[proc::Stat]| strays::of_engine(all, engine, &self.name, &self.run);
            let left = proc::end(select, |_| Duration::ZERO).await;
            end.left.extend(left.iter().map(|id| id.pid));
            end.left.sort_unstable();
            end.left.dedup();
        }
        // Its last lines say why; something that does not end may hold the pipe open.
        let _ = tokio::time::timeout(Duration::from_secs(1), self.output).await;
        self.course.send_modify(|course| course.end = Some(end));
    }
}
