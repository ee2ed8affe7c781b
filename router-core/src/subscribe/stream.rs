//! The sockets of one stream: connecting, watching the connection, reading.
//!
//! ZeroMQ's own reconnecting is off. Each connection has its own socket, so what arrives on it is of one life of the
//! engine, and whatever an earlier connection had queued goes away with its socket.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::follower::{Action, Counters, Follower};
use super::frames::{self, BadFrame, MAX_PARTS};
use super::options::{Budget, Options};
use super::{Endpoint, Followed, StreamSpec};

pub(super) struct Stream {
    spec: StreamSpec,
    followed: Arc<Followed>,
    context: zmq::Context,
    options: Options,
    follower: Follower,
    link: Link,
    replay: Option<zmq::Socket>,
    retry: Duration,
    attempt: u32,
    /// Since when there is no connection; `None` once that has been reported, or while there is one.
    down_since: Option<Instant>,
    was_up: bool,
    failure: String,
    /// Live messages read since there were none to read.
    backlog: usize,
    parts: Vec<zmq::Message>,
}

enum Link {
    Waiting { retry_at: Instant },
    Connecting { live: LiveSocket, deadline: Instant },
    Up { live: LiveSocket },
}

/// A subscription and what ZeroMQ tells about its connection.
struct LiveSocket {
    socket: zmq::Socket,
    monitor: Option<zmq::Socket>,
    monitor_address: String,
}

impl Drop for LiveSocket {
    fn drop(&mut self) {
        // ZeroMQ's I/O thread waits for ever when it has an event to tell and nobody is there to take it, and a socket
        // tells of its end after it was closed here. Asking for no events is the one way that the crate has to stop them.
        if self.monitor.is_some() {
            let _ = self.socket.monitor(&self.monitor_address, 0);
        }
    }
}

/// Which socket of a stream is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Port {
    Monitor,
    Live,
    Replay,
}

impl Stream {
    pub(super) fn new(
        spec: StreamSpec,
        followed: Arc<Followed>,
        follower: Follower,
        context: zmq::Context,
        options: Options,
        now: Instant,
    ) -> Self {
        Self {
            spec,
            followed,
            context,
            retry: options.timing.retry_min,
            options,
            follower,
            link: Link::Waiting { retry_at: now },
            replay: None,
            attempt: 0,
            down_since: Some(now),
            was_up: false,
            failure: "nothing answered".into(),
            backlog: 0,
            parts: Vec::new(),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.follower.gate().is_over()
    }

    pub(super) fn close(&mut self, budget: &mut Budget) {
        self.follower.close(budget);
    }

    /// Does what is due. Returns when to be called again even if nothing arrives.
    pub(super) fn step(&mut self, now: Instant, budget: &mut Budget) -> Option<Instant> {
        self.step_link(now, budget);
        if let Action::Ask(from) = self.follower.advance(APPLY_BATCHES, now, budget) {
            // A failure looks like silence, which has its own deadline.
            self.replay = self.ask(from).ok();
        }
        self.publish();
        if self.follower.has_work() {
            return Some(now);
        }
        let link = match &self.link {
            Link::Waiting { retry_at } => Some(*retry_at),
            Link::Connecting { deadline, .. } => Some(*deadline),
            Link::Up { .. } => None,
        };
        let report = self
            .down_since
            .map(|since| since + self.options.timing.down_after);
        [link, report, self.follower.next_deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Calls `add` with each socket that should be waited for.
    pub(super) fn sockets<'a>(
        &'a self,
        budget: &Budget,
        mut add: impl FnMut(Port, &'a zmq::Socket),
    ) {
        if let Link::Connecting { live, .. } | Link::Up { live } = &self.link {
            if let Some(monitor) = &live.monitor {
                add(Port::Monitor, monitor);
            }
            if matches!(self.link, Link::Up { .. }) {
                add(Port::Live, &live.socket);
            }
        }
        if let Some(socket) = &self.replay
            && self.follower.wants_replay(budget)
        {
            add(Port::Replay, socket);
        }
    }

    pub(super) fn read(&mut self, port: Port, now: Instant, budget: &mut Budget) {
        match port {
            Port::Monitor => self.read_monitor(now, budget),
            Port::Live => self.read_live(now, budget),
            Port::Replay => self.read_replay(now, budget),
        }
    }

    /// Takes note that nothing of a replay was there to be read.
    pub(super) const fn note_no_replay(&mut self, now: Instant) {
        self.follower.on_replay_empty(now);
    }

    fn step_link(&mut self, now: Instant, budget: &mut Budget) {
        match &self.link {
            Link::Waiting { retry_at } if *retry_at <= now => self.connect(now, budget),
            Link::Connecting { deadline, .. } if *deadline <= now => {
                self.failure = "no handshake in time".into();
                self.retry_later(now);
            }
            Link::Waiting { .. } | Link::Connecting { .. } | Link::Up { .. } => {}
        }
        if self
            .down_since
            .is_some_and(|since| since + self.options.timing.down_after <= now)
        {
            self.down_since = None;
            let cause = format!(
                "no connection to the event stream at {}: {}",
                self.spec.events, self.failure
            );
            self.follower.gate().stream_down(&cause, now);
        }
    }

    fn connect(&mut self, now: Instant, budget: &mut Budget) {
        match self.open_live() {
            Ok(live) if live.monitor.is_some() => {
                let deadline = now + self.options.timing.connect;
                self.link = Link::Connecting { live, deadline };
            }
            Ok(live) => {
                self.link = Link::Up { live };
                self.connected(now, budget);
            }
            Err(error) => {
                self.failure = format!("cannot open a socket: {error}");
                self.retry_later(now);
            }
        }
    }

    fn connected(&mut self, now: Instant, budget: &mut Budget) {
        if self.was_up {
            self.follower.counters.reconnects += 1;
        }
        self.was_up = true;
        self.down_since = None;
        self.retry = self.options.timing.retry_min;
        self.follower.gate().stream_up(now);
        self.follower.on_connected(now, budget);
        self.replay = None;
    }

    fn disconnected(&mut self, now: Instant, budget: &mut Budget) {
        self.follower.on_disconnected(budget);
        self.replay = None;
        self.down_since = Some(now);
        self.failure = "the engine closed the connection".into();
        self.retry_later(now);
    }

    fn retry_later(&mut self, now: Instant) {
        self.link = Link::Waiting {
            retry_at: now + self.retry,
        };
        self.retry = (self.retry * 2).min(self.options.timing.retry_max);
        self.attempt = self.attempt.wrapping_add(1);
    }

    fn open_live(&self) -> zmq::Result<LiveSocket> {
        let limits = &self.options.limits;
        let socket = self.open(zmq::SUB, &self.spec.events, limits.live_queue_messages)?;
        socket.set_reconnect_ivl(-1)?;
        socket.set_subscribe(self.spec.topic.as_bytes())?;
        let number = MONITORS.fetch_add(1, Ordering::Relaxed);
        let mut live = LiveSocket {
            socket,
            monitor: None,
            monitor_address: format!("inproc://kvlane-monitor-{number}"),
        };
        if !self.spec.events.is_inproc() {
            let monitor = self.context.socket(zmq::PAIR)?;
            monitor.set_linger(0)?;
            let address = &live.monitor_address;
            live.socket.monitor(address, monitored_events())?;
            monitor.connect(address)?;
            live.monitor = Some(monitor);
        }
        live.socket.connect(&self.spec.events.to_string())?;
        Ok(live)
    }

    /// Each request has its own socket, so that a late answer to an earlier one cannot be taken for this one's.
    fn ask(&self, from: u64) -> zmq::Result<zmq::Socket> {
        let Some(endpoint) = &self.spec.replay else {
            return Err(zmq::Error::EINVAL);
        };
        let queue_messages = self.options.limits.replay_queue_messages;
        let socket = self.open(zmq::DEALER, endpoint, queue_messages)?;
        socket.connect(&endpoint.to_string())?;
        let start = from.to_be_bytes();
        socket.send_multipart([&b""[..], &start[..]], zmq::DONTWAIT)?;
        Ok(socket)
    }

    fn open(
        &self,
        kind: zmq::SocketType,
        endpoint: &Endpoint,
        queue_messages: i32,
    ) -> zmq::Result<zmq::Socket> {
        let timing = &self.options.timing;
        let limit = self.options.limits.payload_bytes.saturating_mul(2);
        let socket = self.context.socket(kind)?;
        socket.set_linger(0)?;
        socket.set_rcvhwm(queue_messages)?;
        // A part slightly over the limit is passed over; one far over it costs the connection.
        socket.set_maxmsgsize(i64::try_from(limit).unwrap_or(i64::MAX))?;
        socket.set_ipv6(endpoint.uses_ipv6(self.attempt))?;
        socket
            .set_connect_timeout(i32::try_from(timing.connect.as_millis()).unwrap_or(i32::MAX))?;
        // Finds peers that went away without a word, within 25 s. ZeroMQ's own heartbeat would cut off publishers that
        // do not know it.
        socket.set_tcp_keepalive(1)?;
        socket.set_tcp_keepalive_idle(10)?;
        socket.set_tcp_keepalive_intvl(5)?;
        socket.set_tcp_keepalive_cnt(3)?;
        Ok(socket)
    }

    fn read_monitor(&mut self, now: Instant, budget: &mut Budget) {
        loop {
            let (Link::Connecting { live, .. } | Link::Up { live }) = &self.link else {
                return;
            };
            let Some(monitor) = &live.monitor else {
                return;
            };
            let event = match receive(monitor, &mut self.parts) {
                Ok(true) => monitor_event(&self.parts),
                Ok(false) | Err(_) => return,
            };
            let is_up = matches!(self.link, Link::Up { .. });
            match event {
                Some(zmq::SocketEvent::HANDSHAKE_SUCCEEDED) if !is_up => {
                    self.link_up(now);
                    self.connected(now, budget);
                }
                Some(
                    zmq::SocketEvent::HANDSHAKE_FAILED_NO_DETAIL
                    | zmq::SocketEvent::HANDSHAKE_FAILED_PROTOCOL
                    | zmq::SocketEvent::HANDSHAKE_FAILED_AUTH,
                ) => {
                    self.failure = "what listens there is no ZeroMQ publisher".into();
                    self.retry_later(now);
                }
                Some(zmq::SocketEvent::DISCONNECTED) if is_up => self.disconnected(now, budget),
                Some(zmq::SocketEvent::DISCONNECTED) => {
                    self.failure = "the connection was closed before the handshake".into();
                    self.retry_later(now);
                }
                Some(zmq::SocketEvent::CLOSED) if !is_up => {
                    self.failure = "connection refused or host not reachable".into();
                    self.retry_later(now);
                }
                Some(_) | None => {}
            }
        }
    }

    fn link_up(&mut self, now: Instant) {
        let waiting = Link::Waiting { retry_at: now };
        self.link = match std::mem::replace(&mut self.link, waiting) {
            Link::Connecting { live, .. } => Link::Up { live },
            other @ (Link::Waiting { .. } | Link::Up { .. }) => other,
        };
    }

    fn read_live(&mut self, now: Instant, budget: &mut Budget) {
        for _ in 0..LIVE_MESSAGES {
            let Link::Up { live } = &self.link else {
                return;
            };
            if !matches!(receive(&live.socket, &mut self.parts), Ok(true)) {
                self.backlog = 0;
                return;
            }
            self.note_backlog(now);
            let limit = self.options.limits.payload_bytes;
            match frames::parse_live(&self.parts, self.spec.topic.as_bytes(), limit) {
                Ok(batch) => self.follower.on_live(&batch, now, budget),
                Err(bad) => count_bad(&mut self.follower.counters, bad),
            }
        }
    }

    fn note_backlog(&mut self, now: Instant) {
        self.backlog += 1;
        // ZeroMQ refills a full queue when half of it has been read.
        let full = usize::try_from(self.options.limits.live_queue_messages / 2).unwrap_or(1);
        if self.backlog >= full {
            self.follower.on_backlog(now);
        }
    }

    fn read_replay(&mut self, now: Instant, budget: &mut Budget) {
        for _ in 0..REPLAY_MESSAGES {
            let Some(socket) = &self.replay else {
                return;
            };
            if !self.follower.wants_replay(budget)
                || !matches!(receive(socket, &mut self.parts), Ok(true))
            {
                break;
            }
            match frames::parse_replay(&self.parts, self.options.limits.payload_bytes) {
                Ok(frame) => self.follower.on_replay(&frame, now, budget),
                Err(bad) => count_bad(&mut self.follower.counters, bad),
            }
        }
        if !self.follower.is_listening() {
            self.replay = None;
        }
    }

    fn publish(&self) {
        let connected = matches!(self.link, Link::Up { .. });
        *self.followed.counters.lock() = (self.follower.counters, connected);
    }
}

/// Receives one message without waiting, as its first parts: one more than any good message has. Returns false when
/// there is none.
fn receive(socket: &zmq::Socket, parts: &mut Vec<zmq::Message>) -> zmq::Result<bool> {
    parts.clear();
    loop {
        let part = match socket.recv_msg(zmq::DONTWAIT) {
            Ok(part) => part,
            Err(zmq::Error::EAGAIN) if parts.is_empty() => return Ok(false),
            Err(error) => return Err(error),
        };
        let more = part.get_more();
        if parts.len() <= MAX_PARTS {
            parts.push(part);
        }
        if !more {
            return Ok(true);
        }
    }
}

fn monitored_events() -> i32 {
    [
        zmq::SocketEvent::CLOSED,
        zmq::SocketEvent::DISCONNECTED,
        zmq::SocketEvent::HANDSHAKE_SUCCEEDED,
        zmq::SocketEvent::HANDSHAKE_FAILED_NO_DETAIL,
        zmq::SocketEvent::HANDSHAKE_FAILED_PROTOCOL,
        zmq::SocketEvent::HANDSHAKE_FAILED_AUTH,
    ]
    .into_iter()
    .fold(0, |mask, event| mask | i32::from(event.to_raw()))
}

/// Reads the first part of a monitor message: the event in two bytes and its value in four, in native order.
fn monitor_event(parts: &[zmq::Message]) -> Option<zmq::SocketEvent> {
    let number = u16::from_ne_bytes(parts.first()?.get(..2)?.try_into().ok()?);
    // One bit of those asked for; the conversion refuses others by panicking.
    let asked = i32::from(number) & monitored_events() != 0 && number.is_power_of_two();
    asked.then(|| zmq::SocketEvent::from_raw(number))
}

fn count_bad(counters: &mut Counters, bad: BadFrame) {
    match bad {
        BadFrame::OtherTopic => counters.other_topic_frames += 1,
        BadFrame::Parts | BadFrame::Sequence | BadFrame::Delimiter | BadFrame::TooLarge => {
            counters.bad_frames += 1;
        }
    }
}

/// Numbers the monitors of all contexts, so that no two share an address. Any order will do: nothing for a model checker.
static MONITORS: AtomicU64 = AtomicU64::new(0);

/// Messages read and batches applied for one stream before the others have their turn. Replays are read faster than they
/// are applied, since engines drop what is not read in time.
const LIVE_MESSAGES: usize = 64;
const REPLAY_MESSAGES: usize = 1_024;
const APPLY_BATCHES: usize = 64;
