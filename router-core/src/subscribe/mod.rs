//! Follows engines' ZeroMQ event streams and feeds the router; the one module of the core that does I/O.
//!
//! One thread serves all streams. A stream is one (worker, dp rank): a subscription to its publisher and, when the engine
//! offers it, the endpoint that replays its last batches. What the thread does for a stream:
//!
//! 1. connect and wait for the handshake; without a connection for a few seconds, report the stream down;
//! 2. with a replay endpoint: ask for everything the engine still has, hold live batches back meanwhile, apply the replay
//!    and then the live batches after it; without one, apply live batches at once;
//! 3. repair gaps through the replay endpoint; what cannot be repaired is handed on, and the router lowers its trust;
//! 4. after a new connection, compare the last applied batch with what the engine has under that number: another life of
//!    the engine means that all of its entries are gone, so the stream starts over.
//!
//! Identity comes from the subscription, never from a topic or payload. Memory is bounded: past the bound batches are
//! dropped and counted, which is a gap like any other. The publisher is never made to wait.
//!
//! `endpoint`, `frames`, `queue`, `replay` and `follower` are free of I/O; `stream` owns sockets, `thread` the loop.

mod endpoint;
mod follower;
mod frames;
mod gate;
mod options;
mod queue;
mod replay;
mod stream;
mod thread;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::Serialize;

pub use self::endpoint::Endpoint;
use self::follower::Counters;
use self::gate::Life;
pub(crate) use self::gate::Sink;
pub(crate) use self::options::Options;
use self::thread::{Mailbox, Worker};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{WorkerId, WorkerRank};
use crate::router::Router;
use crate::sync::Mutex;
use crate::worker::WorkerSpec;

/// One engine stream to follow.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StreamSpec {
    /// The worker that the events are about.
    pub worker: WorkerId,
    /// Its data-parallel rank.
    pub dp_rank: u32,
    /// Where the rank publishes.
    pub events: Endpoint,
    /// Where the rank replays its last batches; without it lost batches stay lost.
    pub replay: Option<Endpoint>,
    /// Topic of the batches; empty (default) accepts every topic, any other must be equal.
    pub topic: String,
}

impl StreamSpec {
    /// Describes a stream without replay and with any topic.
    ///
    /// `events` is the endpoint of this very rank; see [`Endpoint::for_rank`].
    #[must_use]
    pub const fn new(worker: WorkerId, dp_rank: u32, events: Endpoint) -> Self {
        Self {
            worker,
            dp_rank,
            events,
            replay: None,
            topic: String::new(),
        }
    }

    /// Sets the replay endpoint.
    #[must_use]
    pub fn replay(mut self, replay: Option<Endpoint>) -> Self {
        self.replay = replay;
        self
    }

    /// Sets the topic.
    #[must_use]
    pub fn topic(mut self, topic: impl Into<String>) -> Self {
        self.topic = topic.into();
        self
    }
}

/// Counts of one stream since it was followed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SubscriberStats {
    /// The worker.
    pub worker: WorkerId,
    /// Its data-parallel rank.
    pub dp_rank: u32,
    /// Whether there is a connection now.
    pub connected: bool,
    /// Batches handed to the router, live and replayed.
    pub batches: u64,
    /// Live batches passed over because they had been applied before.
    pub duplicate_batches: u64,
    /// Batches that the router refused.
    pub refused_batches: u64,
    /// Messages passed over: wrong number of parts, wrong sequence, payload too large.
    pub bad_frames: u64,
    /// Messages passed over because their topic only begins like the one asked for.
    pub other_topic_frames: u64,
    /// Jumps of the sequence seen in live batches.
    pub gaps: u64,
    /// Holes that were handed on because no replay filled them.
    pub unrepaired_gaps: u64,
    /// Replays begun.
    pub replays: u64,
    /// Batches applied from replays.
    pub replay_batches: u64,
    /// Live batches dropped because too many waited for a replay.
    pub held_back_dropped: u64,
    /// Engine restarts noticed.
    pub restarts: u64,
    /// Connections after the first.
    pub reconnects: u64,
}

/// Follows event streams until dropped.
///
/// Streams come and go at any time and from any thread. Dropping it ends the thread and waits for that, a few seconds at
/// most.
pub struct Subscriber {
    mailbox: Arc<Mailbox>,
    wake: Mutex<zmq::Socket>,
    streams: Mutex<BTreeMap<WorkerRank, Arc<Followed>>>,
    thread: Option<JoinHandle<()>>,
    /// Disconnects when the thread has ended.
    ended: Mutex<mpsc::Receiver<()>>,
    longest_join: Duration,
}

/// What the subscriber and its thread share about one stream.
#[derive(Debug)]
struct Followed {
    life: Arc<Life>,
    counters: Mutex<(Counters, bool)>,
}

impl Subscriber {
    /// Starts the thread that feeds `router`.
    ///
    /// The subscriber keeps the router alive, and ends with its own drop only; so it must not be kept inside what the
    /// router itself keeps alive.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when the system gives no thread or no file descriptors.
    pub fn start(router: &Router) -> Result<Self> {
        let sink: Arc<dyn Sink> = Arc::new(router.clone());
        Self::start_in(zmq::Context::new(), sink, Options::default())
    }

    /// Starts the thread, in a ZeroMQ context given by the caller.
    pub(crate) fn start_in(
        context: zmq::Context,
        sink: Arc<dyn Sink>,
        options: Options,
    ) -> Result<Self> {
        let (wake, woken) = wake_pair(&context)
            .map_err(|error| failure("cannot open the subscriber's sockets").with_source(error))?;
        let mailbox = Arc::new(Mailbox::default());
        let longest_join = options.timing.join;
        let worker = Worker::new(Arc::clone(&mailbox), woken, context, sink, options);
        let (ended_sender, ended) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("kvlane-subscribe".into())
            .spawn(move || {
                worker.run();
                drop(ended_sender);
            })
            .map_err(|error| failure("cannot start the subscriber's thread").with_source(error))?;
        Ok(Self {
            mailbox,
            wake: Mutex::new(wake),
            streams: Mutex::new(BTreeMap::new()),
            thread: Some(thread),
            ended: Mutex::new(ended),
            longest_join,
        })
    }

    /// Follows a stream. An earlier one of the same worker and rank is ended first, as by [`unfollow`](Self::unfollow).
    ///
    /// Returns at once: an engine that is not there yet is connected to when it appears.
    pub fn follow(&self, spec: StreamSpec) {
        let target = WorkerRank {
            worker: spec.worker.clone(),
            dp_rank: spec.dp_rank,
        };
        let followed = Arc::new(Followed {
            life: Arc::new(Life::new()),
            counters: Mutex::new((Counters::default(), false)),
        });
        let earlier = self.streams.lock().insert(target, Arc::clone(&followed));
        if let Some(earlier) = earlier {
            earlier.life.end();
        }
        self.mailbox.add(spec, followed);
        self.wake();
    }

    /// Follows every rank of a worker that has an events endpoint; of one without, nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when an endpoint is malformed or has no place for a rank; nothing is followed then.
    pub fn follow_worker(&self, worker: &WorkerSpec) -> Result<()> {
        let Some(events) = &worker.events else {
            return Ok(());
        };
        let events: Endpoint = events.parse()?;
        let replay: Option<Endpoint> = worker.replay.as_deref().map(str::parse).transpose()?;
        let mut specs = Vec::new();
        for rank in 0..worker.dp_ranks {
            let replay = replay.as_ref().map(|at| at.for_rank(rank)).transpose()?;
            let spec = StreamSpec::new(worker.id.clone(), rank, events.for_rank(rank)?);
            specs.push(spec.replay(replay));
        }
        for spec in specs {
            self.follow(spec);
        }
        Ok(())
    }

    /// Ends all streams of a worker; a worker without any is no error.
    ///
    /// This is a barrier: when it returns, no call into the router for these streams is running, and nothing that they
    /// had queued is applied any more. Call it before the worker is removed from the router. It waits for at most one such
    /// call, so it must not be called from within one.
    pub fn unfollow(&self, worker: &str) {
        let mut ended = Vec::new();
        self.streams.lock().retain(|target, followed| {
            let keep = target.worker.as_str() != worker;
            if !keep {
                ended.push(Arc::clone(followed));
            }
            keep
        });
        for followed in ended {
            followed.life.end();
        }
        self.wake();
    }

    /// Returns the counts of every followed stream, by worker and rank.
    #[must_use]
    pub fn stats(&self) -> Vec<SubscriberStats> {
        let streams = self.streams.lock();
        streams
            .iter()
            .map(|(target, followed)| {
                let (counters, connected) = *followed.counters.lock();
                SubscriberStats::of(target, &counters, connected)
            })
            .collect()
    }

    /// A full queue means that the thread has been woken already.
    fn wake(&self) {
        let _ = self.wake.lock().send(zmq::Message::new(), zmq::DONTWAIT);
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        for followed in self.streams.lock().values() {
            followed.life.end();
        }
        self.mailbox.stop();
        self.wake();
        let Some(thread) = self.thread.take() else {
            return;
        };
        // The thread itself drops this when it held the last reference to the owner.
        if thread.thread().id() == std::thread::current().id() {
            return;
        }
        let ended = self.ended.lock().recv_timeout(self.longest_join);
        if ended != Err(mpsc::RecvTimeoutError::Timeout) {
            drop(thread.join());
        }
    }
}

impl fmt::Debug for Subscriber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscriber")
            .field("streams", &self.streams.lock().keys())
            .finish_non_exhaustive()
    }
}

impl SubscriberStats {
    fn of(target: &WorkerRank, counters: &Counters, connected: bool) -> Self {
        Self {
            worker: target.worker.clone(),
            dp_rank: target.dp_rank,
            connected,
            batches: counters.batches,
            duplicate_batches: counters.duplicate_batches,
            refused_batches: counters.refused_batches,
            bad_frames: counters.bad_frames,
            other_topic_frames: counters.other_topic_frames,
            gaps: counters.gaps,
            unrepaired_gaps: counters.unrepaired_gaps,
            replays: counters.replays,
            replay_batches: counters.replay_batches,
            held_back_dropped: counters.held_back_dropped,
            restarts: counters.restarts,
            reconnects: counters.reconnects,
        }
    }
}

fn wake_pair(context: &zmq::Context) -> zmq::Result<(zmq::Socket, zmq::Socket)> {
    // Contexts do not share names, but several subscribers may share a context.
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let address = format!("inproc://kvlane-wake-{number}");
    let woken = context.socket(zmq::PAIR)?;
    woken.set_linger(0)?;
    woken.bind(&address)?;
    let wake = context.socket(zmq::PAIR)?;
    wake.set_linger(0)?;
    wake.connect(&address)?;
    Ok((wake, woken))
}

fn failure(what: &str) -> Error {
    Error::new(
        ErrorKind::Config,
        format!("{what}: raise the limit on open files or threads"),
    )
}

#[expect(
    clippy::disallowed_methods,
    reason = "the core has no clock; this module alone does I/O and needs deadlines"
)]
fn now() -> Instant {
    Instant::now()
}
