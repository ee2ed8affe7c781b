//! NIXL, the library that moves KV caches between vLLMs, loaded when it is asked for.
//!
//! `libnixl_capi.so` is opened at run time from an explicit path or from where `pip install nixl-cu12` puts it, so that
//! neither the build nor a machine without it knows the difference: it is then [`Error::Unavailable`], and callers use
//! TCP. All symbols are resolved at once and the first that is missing is named. The library is never unloaded.
//!
//! Every call is made by one thread of the process; what is here sends it work and waits. Memory is kept until no agent
//! and no transfer refers to it, also when whoever asked has gone away.
//!
//! On a machine without InfiniBand, UCX inside of NIXL crashes the process at its end unless `UCX_MODULES` is set before it
//! starts ([`prepare_environment`]); without that, loading is refused.

mod environment;
mod ffi;
mod locate;
mod worker;

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use self::environment::prepare_environment;
pub use self::ffi::Memory;

use self::ffi::Cuda;
use self::worker::Thread;

/// The process's NIXL. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Nixl {
    thread: Arc<Thread>,
}

/// Why NIXL did not do something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The library is not there, or is not one that can be used; says why.
    Unavailable(String),
    /// A call failed.
    Failed {
        /// The function of the C API, without its prefix.
        call: &'static str,
        /// Its status code.
        code: i32,
    },
    /// An argument is out of range.
    Refused(String),
    /// A transfer took longer than it may.
    TimedOut(Duration),
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the peer's memory into ours.
    Read,
    /// From ours into the peer's.
    Write,
}

/// A part of a memory on each side of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Offset in our memory.
    pub local: usize,
    /// Address in the peer's address space.
    pub remote: u64,
    /// Bytes.
    pub length: usize,
}

/// A transfer to be made.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// Which way.
    pub direction: Direction,
    /// Our memory, registered with the agent.
    pub memory: Arc<Memory>,
    /// The peer, by the name that [`Agent::load_remote`] returned.
    pub peer: String,
    /// Number of the peer's GPU, or none for memory of its host.
    pub peer_gpu: Option<u32>,
    /// What moves.
    pub parts: Vec<Part>,
    /// What the peer is told when everything has arrived.
    pub notification: Option<Vec<u8>>,
    /// How long it may take.
    pub limit: Duration,
    /// What is kept until the transfer is over, whether somebody waits for it or not.
    pub keep: Option<Arc<dyn std::any::Any + Send + Sync>>,
}

/// When a transfer's stages were over.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// NIXL's thread took it up.
    pub began: Instant,
    /// Descriptors were listed and the transfer was posted.
    pub posted: Instant,
    /// Everything had arrived.
    pub done: Instant,
}

impl Timing {
    /// Returns how long it took, the listing of descriptors included.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.done - self.began
    }
}

static LOADED: Mutex<Option<Nixl>> = Mutex::new(None);

impl Nixl {
    /// Loads the library, or returns what was loaded before.
    ///
    /// `setting` is the path of `libnixl_capi.so`; without it, the variable `NIXL_CAPI_LIB`, and then the places of
    /// installed wheels are tried.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: there is none, a symbol is missing, or it would crash this process at its end.
    pub fn load(setting: Option<&Path>) -> Result<Self, Error> {
        let mut loaded = LOADED.lock();
        if let Some(nixl) = &*loaded {
            return Ok(nixl.clone());
        }
        let path = locate::find(setting).map_err(Error::Unavailable)?;
        environment::check().map_err(Error::Unavailable)?;
        let api = ffi::Api::load(&path).map_err(Error::Unavailable)?;
        let thread = Thread::start(Box::leak(Box::new(api)), &path)?;
        let nixl = Self {
            thread: Arc::new(thread),
        };
        *loaded = Some(nixl.clone());
        Ok(nixl)
    }

    /// Returns the file that was loaded.
    #[must_use]
    pub fn library(&self) -> &Path {
        self.thread.library()
    }

    /// Creates an agent with the backend UCX. `name` must be unlike that of any other that peers know.
    ///
    /// # Errors
    /// NIXL refuses; a parameter is none of the backend's.
    pub async fn agent(&self, name: &str, parameters: &[(String, String)]) -> Result<Agent, Error> {
        let (name, parameters) = (name.to_owned(), parameters.to_vec());
        let thread = Arc::clone(&self.thread);
        let (id, plugins) = thread
            .call(move |worker| worker.create_agent(&name, "UCX", &parameters))
            .await?;
        Ok(Agent {
            nixl: self.clone(),
            id,
            plugins,
        })
    }

    /// Allocates memory of a GPU, on NIXL's thread, whose context it becomes.
    ///
    /// # Errors
    /// There is no CUDA driver, no such GPU, or no room.
    pub async fn gpu_memory(&self, gpu: u32, length: usize) -> Result<(Memory, String), Error> {
        self.thread
            .call(move |worker| {
                let cuda: Arc<Cuda> = worker.gpu(gpu)?;
                let memory = Memory::gpu(&cuda, length).map_err(Error::Refused)?;
                Ok((memory, cuda.name().to_owned()))
            })
            .await
    }
}

/// Ends all agents before the process does, since UCX's threads must not outlive its exit handlers; waits `limit` at most.
pub fn finish(limit: Duration) {
    let loaded = LOADED.lock().clone();
    if let Some(nixl) = loaded {
        nixl.thread.finish(limit);
    }
}

/// One end of transfers. Dropping it ends it on NIXL's thread.
#[derive(Debug)]
pub struct Agent {
    nixl: Nixl,
    id: u64,
    plugins: Vec<String>,
}

impl Agent {
    /// Returns the names of the backends that this installation has.
    #[must_use]
    pub fn plugins(&self) -> &[String] {
        &self.plugins
    }

    /// Makes memory reachable for peers that get [`metadata`](Self::metadata) from then on. The agent keeps it.
    ///
    /// # Errors
    /// NIXL refuses.
    pub async fn register(&self, memory: &Arc<Memory>) -> Result<(), Error> {
        let (id, memory) = (self.id, Arc::clone(memory));
        self.call(move |worker| worker.register(id, memory)).await
    }

    /// Returns what peers need to reach this agent and its memory.
    ///
    /// # Errors
    /// NIXL refuses.
    pub async fn metadata(&self) -> Result<Vec<u8>, Error> {
        let id = self.id;
        self.call(move |worker| worker.of(id)?.metadata()).await
    }

    /// Takes in a peer's metadata; returns the peer's name.
    ///
    /// # Errors
    /// It is damaged, or shares no backend with this agent.
    pub async fn load_remote(&self, metadata: Vec<u8>) -> Result<String, Error> {
        let id = self.id;
        self.call(move |worker| worker.of(id)?.load_remote(&metadata))
            .await
    }

    /// Forgets a peer, if there is one of this name; waits for nothing. No transfer with it may be under way.
    pub fn forget_remote(&self, name: &str) {
        let (id, name) = (self.id, name.to_owned());
        self.nixl.thread.send(move |worker| {
            // An engine that is gone has nothing to lose.
            let _ = worker.of(id).and_then(|agent| agent.forget_remote(&name));
        });
    }

    /// Moves bytes. Dropping the future does not stop a transfer that was posted: the memory is kept until it is over.
    ///
    /// # Errors
    /// The peer is unknown or gone, a part is outside of its memory, or it took too long.
    pub async fn transfer(&self, transfer: Transfer) -> Result<Timing, Error> {
        let (id, limit) = (self.id, transfer.limit);
        let (done, result) = tokio::sync::oneshot::channel();
        self.nixl
            .thread
            .send(move |worker| worker.begin(id, transfer, done));
        match tokio::time::timeout(limit, result).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(gone()),
            Err(_) => Err(Error::TimedOut(limit)),
        }
    }

    /// Returns the notifications that came since the last call, each with the name of its sender.
    ///
    /// # Errors
    /// NIXL refuses.
    pub async fn notifications(&self) -> Result<Vec<(String, Vec<u8>)>, Error> {
        let id = self.id;
        self.call(move |worker| worker.of(id)?.notifications())
            .await
    }

    async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut worker::Worker) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.nixl.thread.call(work).await
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let id = self.id;
        self.nixl.thread.send(move |worker| worker.end(id));
    }
}

impl Transfer {
    /// Returns the ranges of our side, checked.
    fn local(&self) -> Result<Vec<Range<u64>>, Error> {
        let part = |part: &Part| self.memory.part(part.local, part.length);
        let parts: Result<Vec<_>, String> = self.parts.iter().map(part).collect();
        parts.map_err(Error::Refused)
    }
}

fn gone() -> Error {
    Error::Unavailable("NIXL's thread has ended".to_owned())
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unavailable(why) => write!(f, "NIXL is not available: {why}"),
            Self::Failed { call, code } => {
                let meaning = match code {
                    -1 => "invalid parameter",
                    -2 => "backend error",
                    -3 => "invalid state",
                    -4 => "exception",
                    -6 => "not found",
                    _ => "unknown",
                };
                write!(f, "NIXL's {call} failed with code {code} ({meaning})")
            }
            Self::Refused(why) => f.write_str(why),
            Self::TimedOut(limit) => write!(f, "a transfer was not over after {limit:?}"),
        }
    }
}

impl std::error::Error for Error {}
