//! The thread that makes all calls.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::ffi::{Agent, Api, Cuda, List, Memory, Request, Status};
use super::{Direction, Error, Timing, Transfer, gone};

/// The way to the thread.
#[derive(Debug)]
pub(super) struct Thread {
    work: Mutex<Sender<Work>>,
    library: PathBuf,
}

type Work = Box<dyn FnOnce(&mut Worker) + Send>;
type Done = oneshot::Sender<Result<Timing, Error>>;

impl Thread {
    pub(super) fn start(api: &'static Api, library: &Path) -> Result<Self, Error> {
        let (sender, work) = mpsc::channel();
        std::thread::Builder::new()
            .name("kvlane-nixl".to_owned())
            .spawn(move || Worker::new(api).run(&work))
            .map_err(|error| Error::Unavailable(format!("cannot start its thread: {error}")))?;
        Ok(Self {
            work: Mutex::new(sender),
            library: library.to_path_buf(),
        })
    }

    pub(super) fn library(&self) -> &Path {
        &self.library
    }

    /// Has something done; nobody learns when the thread has ended.
    pub(super) fn send(&self, work: impl FnOnce(&mut Worker) + Send + 'static) {
        let sent = self.work.lock().send(Box::new(work));
        // What was not taken may send something itself as it is dropped: not under the lock.
        drop(sent);
    }

    /// Has something done and waits for its result.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Worker) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (done, result) = oneshot::channel();
        self.send(move |worker| {
            let _ = done.send(work(worker));
        });
        result.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Ends every agent, and waits for that.
    pub(super) fn finish(&self, limit: Duration) {
        let (done, finished) = mpsc::channel();
        self.send(move |worker| {
            let agents: Vec<u64> = worker.agents.keys().copied().collect();
            agents.into_iter().for_each(|id| worker.end(id));
            let _ = done.send(());
        });
        if finished.recv_timeout(limit).is_err() {
            tracing::warn!(?limit, "NIXL's agents did not end");
        }
    }
}

/// What the thread has.
#[derive(Debug)]
pub(super) struct Worker {
    api: &'static Api,
    agents: HashMap<u64, Registered>,
    flights: Vec<Flight>,
    gpus: HashMap<u32, Arc<Cuda>>,
    next: u64,
}

/// An agent, and what it must not outlive: fields are dropped in order.
#[derive(Debug)]
struct Registered {
    agent: Agent,
    memories: Vec<Arc<Memory>>,
}

/// A transfer under way. NIXL writes to its memory until it is over, whether somebody waits for it or not.
#[derive(Debug)]
struct Flight {
    agent: u64,
    request: Request,
    memory: Arc<Memory>,
    keep: Option<Arc<dyn Any + Send + Sync>>,
    timing: Timing,
    done: Done,
}

/// For how long the thread looks at a transfer without a pause, as NIXL's own loops do: looking is part of what moves it, and most
/// prompts' caches have moved by then.
const EAGER: Duration = Duration::from_millis(500);
/// The pause between two looks after that, and for transfers that nobody waits for.
const PAUSE: Duration = Duration::from_micros(50);
const LONG_PAUSE: Duration = Duration::from_millis(5);

impl Worker {
    fn new(api: &'static Api) -> Self {
        Self {
            api,
            agents: HashMap::new(),
            flights: Vec::new(),
            gpus: HashMap::new(),
            next: 0,
        }
    }

    fn run(mut self, work: &Receiver<Work>) {
        loop {
            let pause = self.look();
            let next = match pause {
                None => work.recv().map_err(|_| TryRecvError::Disconnected),
                Some(Duration::ZERO) => work.try_recv(),
                Some(pause) => work.recv_timeout(pause).map_err(|error| match error {
                    RecvTimeoutError::Timeout => TryRecvError::Empty,
                    RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
                }),
            };
            match next {
                Ok(work) => work(&mut self),
                Err(TryRecvError::Empty) => std::hint::spin_loop(),
                Err(TryRecvError::Disconnected) => return,
            }
        }
    }

    /// Looks at every transfer; returns how long to wait before the next look, none when there is nothing to look at.
    fn look(&mut self) -> Option<Duration> {
        let mut pause = None;
        let mut at = 0;
        while at < self.flights.len() {
            let flight = &self.flights[at];
            let Some(registered) = self.agents.get(&flight.agent) else {
                at += 1;
                continue;
            };
            match registered.agent.poll(&flight.request) {
                Ok(Status::Running) => {
                    let wanted = flight.wanted();
                    pause = Some(pause.map_or(wanted, |pause: Duration| pause.min(wanted)));
                    at += 1;
                }
                over => {
                    let flight = self.flights.swap_remove(at);
                    flight.land(&registered.agent, over.map(|_| ()));
                }
            }
        }
        pause
    }

    pub(super) fn of(&self, id: u64) -> Result<&Agent, Error> {
        let registered = self.agents.get(&id).ok_or_else(gone)?;
        Ok(&registered.agent)
    }

    pub(super) fn create_agent(
        &mut self,
        name: &str,
        backend: &str,
        parameters: &[(String, String)],
    ) -> Result<(u64, Vec<String>), Error> {
        let agent = Agent::new(self.api, name, backend, parameters)?;
        let plugins = agent.plugins()?;
        self.next += 1;
        let memories = Vec::new();
        self.agents
            .insert(self.next, Registered { agent, memories });
        Ok((self.next, plugins))
    }

    pub(super) fn register(&mut self, id: u64, memory: Arc<Memory>) -> Result<(), Error> {
        let registered = self.agents.get_mut(&id).ok_or_else(gone)?;
        // Kept in any case: NIXL does not say what a failure leaves registered.
        let result = registered.agent.register(&memory);
        registered.memories.push(memory);
        result
    }

    pub(super) fn gpu(&mut self, number: u32) -> Result<Arc<Cuda>, Error> {
        if let Some(gpu) = self.gpus.get(&number) {
            return Ok(Arc::clone(gpu));
        }
        let gpu = Arc::new(Cuda::open(number).map_err(Error::Refused)?);
        self.gpus.insert(number, Arc::clone(&gpu));
        Ok(gpu)
    }

    /// Lists descriptors and posts a transfer.
    pub(super) fn begin(&mut self, id: u64, transfer: Transfer, done: Done) {
        if done.is_closed() {
            return;
        }
        match self.post(id, &transfer) {
            Ok((request, timing, status)) => {
                let flight = Flight {
                    agent: id,
                    request,
                    memory: transfer.memory,
                    keep: transfer.keep,
                    timing,
                    done,
                };
                match (status, self.agents.get(&id)) {
                    (Status::Done, Some(registered)) => flight.land(&registered.agent, Ok(())),
                    _ => self.flights.push(flight),
                }
            }
            Err(error) => {
                let _ = done.send(Err(error));
            }
        }
    }

    fn post(&self, id: u64, transfer: &Transfer) -> Result<(Request, Timing, Status), Error> {
        let began = Instant::now();
        let agent = self.of(id)?;
        let local = transfer.local()?;
        let gpu = transfer.memory.gpu_number();
        let local = List::new(self.api, gpu, local.into_iter())?;
        let remote = transfer.parts.iter().map(|part| {
            let end = part.remote.saturating_add(part.length as u64);
            part.remote..end
        });
        let remote = List::new(self.api, transfer.peer_gpu, remote)?;
        let write = transfer.direction == Direction::Write;
        let notification = transfer.notification.as_deref();
        let request = agent.request(write, &local, &remote, &transfer.peer, notification)?;
        match agent.post(&request) {
            Ok(status) => {
                let posted = Instant::now();
                let timing = Timing {
                    began,
                    posted,
                    done: posted,
                };
                Ok((request, timing, status))
            }
            Err(error) => {
                agent.release(request);
                Err(error)
            }
        }
    }

    /// Ends an agent. One with transfers under way is left for the process's end: its memory is being written to.
    pub(super) fn end(&mut self, id: u64) {
        self.look();
        if self.flights.iter().any(|flight| flight.agent == id) {
            tracing::warn!("an agent of NIXL is left with a transfer under way");
            return;
        }
        self.agents.remove(&id);
    }
}

impl Flight {
    /// Returns how soon somebody wants to know.
    fn wanted(&self) -> Duration {
        if self.done.is_closed() {
            LONG_PAUSE
        } else if self.timing.began.elapsed() < EAGER {
            Duration::ZERO
        } else {
            PAUSE
        }
    }

    fn land(self, agent: &Agent, result: Result<(), Error>) {
        let timing = Timing {
            done: Instant::now(),
            ..self.timing
        };
        agent.release(self.request);
        drop((self.keep, self.memory));
        let _ = self.done.send(result.map(|()| timing));
    }
}
