//! The engine's event stream: a publishing socket for live batches and a ROUTER socket for replay, on one thread.
//!
//! As in vLLM the step loop hands batches over through a bounded queue and waits when it is full; the publisher numbers
//! them from 0, sends and keeps them, and answers one replay request at a time. Batches go over an in-process socket, so
//! that one poll waits for both work and requests.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use kvlane::{Error, ErrorKind, Result};
use zmq::{Context, Message, POLLIN, Socket, SocketType};

use super::config::{EventConfig, ReplayLayout};

/// The step loop's end of the stream. Dropping it stops the thread and frees the ports.
pub(super) struct Publisher {
    queue: Option<Socket>,
    thread: Option<JoinHandle<()>>,
    silent: bool,
    bound: BoundEvents,
    counters: Arc<PublisherCounters>,
}

/// Where a publisher's sockets are bound.
#[derive(Clone, Debug)]
pub(super) struct BoundEvents {
    pub(super) endpoint: String,
    pub(super) replay_endpoint: Option<String>,
}

/// What a publisher counts, and the one fault that can be set while it runs.
#[derive(Debug, Default)]
pub(super) struct PublisherCounters {
    /// Sequence numbers taken.
    pub(super) batches: AtomicU64,
    /// Replay requests answered.
    pub(super) replays: AtomicU64,
    /// Subscriptions that came.
    pub(super) subscriptions: AtomicU64,
    /// How many of the next batches are kept for replay but not published.
    pub(super) drop_next: AtomicU64,
}

impl std::fmt::Debug for Publisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher")
            .field("bound", &self.bound)
            .finish_non_exhaustive()
    }
}

impl Publisher {
    /// Binds the sockets and starts the thread.
    pub(super) fn start(config: &EventConfig) -> Result<Self> {
        let context = Context::new();
        // As PUB, and tells of subscriptions as well.
        let live = socket(&context, SocketType::XPUB, config.hwm)?;
        live.set_xpub_verbose(true)
            .map_err(|error| zmq_error("configure", error))?;
        let endpoint = bind(&live, "events.endpoint", &config.endpoint)?;
        let replay = match &config.replay_endpoint {
            Some(wanted) => {
                let router = socket(&context, SocketType::ROUTER, config.replay_hwm)?;
                let bound = bind(&router, "events.replay_endpoint", wanted)?;
                Some((router, bound))
            }
            None => None,
        };
        let inbox = socket(&context, SocketType::PULL, QUEUED_BATCHES)?;
        bind(&inbox, "queue", QUEUE_ENDPOINT)?;
        let queue = socket(&context, SocketType::PUSH, QUEUED_BATCHES)?;
        // Only a dead thread takes longer; the engine must not hang on it.
        queue
            .set_sndtimeo(QUEUE_TIMEOUT_MS)
            .and_then(|()| queue.connect(QUEUE_ENDPOINT))
            .map_err(|error| zmq_error("connect", error))?;
        let (router, replay_endpoint) = replay.unzip();
        let counters = Arc::new(PublisherCounters::default());
        let state = Stream {
            live,
            router,
            inbox,
            topic: config.topic.clone().into_bytes(),
            layout: config.replay_layout,
            kept: VecDeque::new(),
            kept_bytes: 0,
            buffer_steps: config.buffer_steps,
            next: 0,
            drop: config.faults.drop.iter().copied().collect(),
            burn: config.faults.burn.iter().copied().collect(),
            counters: counters.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("kvlane-events".to_owned())
            .spawn(move || state.run())
            .map_err(|error| start_error("start the event thread").with_source(error))?;
        Ok(Self {
            queue: Some(queue),
            thread: Some(thread),
            silent: config.silent,
            bound: BoundEvents {
                endpoint,
                replay_endpoint,
            },
            counters,
        })
    }

    /// Returns where the sockets are bound.
    pub(super) const fn bound(&self) -> &BoundEvents {
        &self.bound
    }

    /// Returns the counters.
    pub(super) fn counters(&self) -> Arc<PublisherCounters> {
        self.counters.clone()
    }

    /// Hands over one encoded batch, waiting while the queue is full.
    pub(super) fn publish(&self, payload: Vec<u8>) {
        if self.silent {
            return;
        }
        if let Some(queue) = &self.queue
            && let Err(error) = queue.send(payload, 0)
        {
            tracing::warn!(%error, "event batch lost: the event queue does not take it");
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        let Some(queue) = self.queue.take() else {
            return;
        };
        // An empty message is no batch: it says stop. The queue must outlive the thread, which reads it to this end.
        let stopped = queue.send(Message::new(), 0);
        if let Some(thread) = self.thread.take()
            && stopped.is_ok()
            && thread.join().is_err()
        {
            tracing::error!("the event thread panicked");
        }
        // Dropping the last socket ends the context, which returns when the ports are free.
    }
}

/// What the thread owns.
struct Stream {
    live: Socket,
    router: Option<Socket>,
    inbox: Socket,
    topic: Vec<u8>,
    layout: ReplayLayout,
    kept: VecDeque<(u64, Vec<u8>)>,
    kept_bytes: usize,
    buffer_steps: usize,
    next: u64,
    drop: HashSet<u64>,
    burn: HashSet<u64>,
    counters: Arc<PublisherCounters>,
}

impl Stream {
    fn run(mut self) {
        loop {
            let mut items = vec![
                self.inbox.as_poll_item(POLLIN),
                self.live.as_poll_item(POLLIN),
            ];
            items.extend(self.router.iter().map(|router| router.as_poll_item(POLLIN)));
            match zmq::poll(&mut items, -1) {
                Ok(_) => {}
                Err(zmq::Error::EINTR) => continue,
                Err(error) => {
                    tracing::error!(%error, "event thread stops: its sockets cannot be polled");
                    return;
                }
            }
            let batch_waits = items[0].is_readable();
            let subscription_waits = items[1].is_readable();
            let request_waits = items.get(2).is_some_and(zmq::PollItem::is_readable);
            if subscription_waits {
                self.count_subscriptions();
            }
            if batch_waits && !self.drain_inbox() {
                return;
            }
            if request_waits {
                self.answer_replay();
            }
        }
    }

    fn count_subscriptions(&self) {
        while let Ok(message) = self.live.recv_bytes(zmq::DONTWAIT) {
            if message.first() == Some(&1) {
                self.counters.subscriptions.fetch_add(1, Ordering::AcqRel);
            }
        }
    }

    /// Publishes what is queued; false means stop.
    fn drain_inbox(&mut self) -> bool {
        loop {
            match self.inbox.recv_bytes(zmq::DONTWAIT) {
                Ok(payload) if payload.is_empty() => return false,
                Ok(payload) => self.publish(payload),
                Err(zmq::Error::EINTR) => {}
                Err(_) => return true,
            }
        }
    }

    fn publish(&mut self, payload: Vec<u8>) {
        let seq = self.next;
        self.next += 1;
        self.counters.batches.store(self.next, Ordering::Release);
        if self.burn.remove(&seq) {
            return;
        }
        let dropped = self.drop.remove(&seq) || self.take_drop();
        if !dropped {
            let parts: [&[u8]; 3] = [&self.topic, &seq.to_be_bytes(), &payload];
            if let Err(error) = self.live.send_multipart(parts, zmq::DONTWAIT) {
                tracing::warn!(%error, seq, "event batch was not sent");
            }
        }
        self.keep(seq, payload);
    }

    fn take_drop(&self) -> bool {
        let take = |left: u64| left.checked_sub(1);
        self.counters
            .drop_next
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, take)
            .is_ok()
    }

    fn keep(&mut self, seq: u64, payload: Vec<u8>) {
        self.kept_bytes += payload.len();
        self.kept.push_back((seq, payload));
        while self.kept.len() > self.buffer_steps
            || (self.kept_bytes > MAX_KEPT_BYTES && self.kept.len() > 1)
        {
            if let Some((_, oldest)) = self.kept.pop_front() {
                self.kept_bytes -= oldest.len();
            }
        }
    }

    /// Answers one request `[identity, "", start]`; anything else is ignored, as by the real engine.
    fn answer_replay(&self) {
        let Some(router) = &self.router else { return };
        let Ok(request) = router.recv_multipart(zmq::DONTWAIT) else {
            return;
        };
        let [identity, delimiter, start] = request.as_slice() else {
            tracing::warn!(
                parts = request.len(),
                "replay request ignored: 3 parts are expected"
            );
            return;
        };
        if !delimiter.is_empty() {
            tracing::warn!("replay request ignored: its second part is not empty");
            return;
        }
        let start = big_endian(start);
        for (seq, payload) in self.kept.iter().filter(|(seq, _)| *seq >= start) {
            self.reply(router, identity, &self.topic, *seq, payload);
        }
        self.reply(router, identity, &[], END_OF_REPLAY, &[]);
        self.counters.replays.fetch_add(1, Ordering::AcqRel);
    }

    fn reply(&self, router: &Socket, identity: &[u8], topic: &[u8], seq: u64, payload: &[u8]) {
        let seq = seq.to_be_bytes();
        let parts: &[&[u8]] = match self.layout {
            ReplayLayout::Topic => &[identity, &[], topic, &seq, payload],
            ReplayLayout::Bare => &[identity, &[], &seq, payload],
        };
        // A reader that is gone or does not read loses messages, as with the real engine.
        let _ = router.send_multipart(parts, zmq::DONTWAIT);
    }
}

/// Sequence number of the message that ends a replay (-1 as a signed number).
const END_OF_REPLAY: u64 = u64::MAX;

/// Batches between step loop and publisher; vLLM allows 100,000.
const QUEUED_BATCHES: i32 = 10_000;

/// Bound of what is kept for replay, whatever the number of batches.
const MAX_KEPT_BYTES: usize = 256 << 20;

/// How long the step loop waits for a place in the queue.
const QUEUE_TIMEOUT_MS: i32 = 5_000;

/// Name within this publisher's own context.
const QUEUE_ENDPOINT: &str = "inproc://batches";

/// How long closing waits for a subscriber to take what was sent; vLLM drops it at once.
const LINGER_MS: i32 = 100;

fn big_endian(bytes: &[u8]) -> u64 {
    let fold = |number: u64, &byte: &u8| number.saturating_mul(256).saturating_add(u64::from(byte));
    bytes.iter().fold(0, fold)
}

fn socket(context: &Context, kind: SocketType, hwm: i32) -> Result<Socket> {
    let socket = context
        .socket(kind)
        .map_err(|error| zmq_error("create", error))?;
    let configured = socket
        .set_sndhwm(hwm)
        .and_then(|()| socket.set_rcvhwm(hwm))
        .and_then(|()| socket.set_linger(LINGER_MS));
    configured.map_err(|error| zmq_error("configure", error))?;
    Ok(socket)
}

fn bind(socket: &Socket, key: &str, endpoint: &str) -> Result<String> {
    let bound = socket
        .set_ipv6(endpoint.contains('['))
        .and_then(|()| socket.bind(endpoint));
    bound.map_err(|error| {
        start_error(&format!(
            "bind {key} {endpoint:?}; an endpoint such as tcp://127.0.0.1:5557 is accepted"
        ))
        .with_source(error)
    })?;
    let actual = socket
        .get_last_endpoint()
        .map_err(|error| zmq_error("read the address of", error))?;
    actual.map_err(|_| start_error(&format!("read back {key} {endpoint:?}")))
}

fn zmq_error(what: &str, error: zmq::Error) -> Error {
    start_error(&format!("{what} an event socket")).with_source(error)
}

fn start_error(what: &str) -> Error {
    Error::new(ErrorKind::Config, format!("cannot {what}"))
}
