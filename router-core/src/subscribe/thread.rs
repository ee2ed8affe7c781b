//! The one thread that serves all streams.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::follower::Follower;
use super::gate::{Gate, Sink};
use super::options::{Budget, Options};
use super::stream::{Port, Stream};
use super::{Followed, StreamSpec};
use crate::ids::WorkerRank;
use crate::sync::Mutex;

/// What the thread is told besides what its sockets bring. A message on the wake socket says that there is news.
#[derive(Default)]
pub(super) struct Mailbox(Mutex<News>);

#[derive(Default)]
struct News {
    added: Vec<(StreamSpec, Arc<Followed>)>,
    stop: bool,
}

impl Mailbox {
    pub(super) fn add(&self, spec: StreamSpec, followed: Arc<Followed>) {
        self.0.lock().added.push((spec, followed));
    }

    pub(super) fn stop(&self) {
        self.0.lock().stop = true;
    }
}

pub(super) struct Worker {
    mailbox: Arc<Mailbox>,
    wake: zmq::Socket,
    sink: Arc<dyn Sink>,
    options: Options,
    contexts: Contexts,
    budget: Budget,
    streams: Vec<Stream>,
}

impl Worker {
    pub(super) fn new(
        mailbox: Arc<Mailbox>,
        wake: zmq::Socket,
        context: zmq::Context,
        sink: Arc<dyn Sink>,
        options: Options,
    ) -> Self {
        let budget = Budget::new(options.limits.held_bytes);
        Self {
            mailbox,
            wake,
            sink,
            options,
            contexts: Contexts::new(context),
            budget,
            streams: Vec::new(),
        }
    }

    /// Serves until told to stop.
    pub(super) fn run(mut self) {
        loop {
            let now = super::now();
            if !self.read_news(now) {
                return;
            }
            let mut due = now + LONGEST_WAIT;
            for stream in &mut self.streams {
                if let Some(at) = stream.step(now, &mut self.budget) {
                    due = due.min(at);
                }
            }
            let ready = self.wait(due.saturating_duration_since(now));
            self.read(&ready);
        }
    }

    /// Takes in new streams and lets ended ones go. Returns false when the thread should end.
    fn read_news(&mut self, now: Instant) -> bool {
        let news = std::mem::take(&mut *self.mailbox.0.lock());
        if news.stop {
            return false;
        }
        for (spec, followed) in news.added {
            let target = WorkerRank {
                worker: spec.worker.clone(),
                dp_rank: spec.dp_rank,
            };
            let gate = Gate::new(Arc::clone(&self.sink), target, Arc::clone(&followed.life));
            let follower = Follower::new(gate, spec.replay.is_some(), &self.options, now);
            let context = self.contexts.pick(&followed);
            let options = self.options.clone();
            self.streams
                .push(Stream::new(spec, followed, follower, context, options, now));
        }
        for stream in self.streams.iter_mut().filter(|stream| stream.is_over()) {
            stream.close(&mut self.budget);
        }
        self.streams.retain(|stream| !stream.is_over());
        self.budget.set_streams(self.streams.len());
        true
    }

    /// Waits for messages; returns which sockets have some.
    fn wait(&self, longest: Duration) -> Vec<(usize, Port)> {
        let mut ports = Vec::new();
        let mut items = vec![self.wake.as_poll_item(zmq::POLLIN)];
        for (index, stream) in self.streams.iter().enumerate() {
            stream.sockets(&self.budget, |port, socket| {
                ports.push((index, port));
                items.push(socket.as_poll_item(zmq::POLLIN));
            });
        }
        // Rounded up, so that the thread does not spin through the last part of a millisecond.
        let millis = i64::try_from(longest.as_micros().div_ceil(1_000)).unwrap_or(i64::MAX);
        if zmq::poll(&mut items, millis).is_err() {
            // Interrupted, or a socket of a context that is being ended: the next round sees to it.
            std::thread::sleep(PAUSE_AFTER_ERROR);
            return Vec::new();
        }
        let readable = items.iter().skip(1).map(zmq::PollItem::is_readable);
        ports
            .into_iter()
            .zip(readable)
            .filter_map(|(port, readable)| readable.then_some(port))
            .collect()
    }

    fn read(&mut self, ready: &[(usize, Port)]) {
        while self.wake.recv_msg(zmq::DONTWAIT).is_ok() {}
        let now = super::now();
        for (index, stream) in self.streams.iter_mut().enumerate() {
            if !ready.contains(&(index, Port::Replay)) {
                stream.note_no_replay(now);
            }
        }
        for &(index, port) in ready {
            self.streams[index].read(port, super::now(), &mut self.budget);
        }
    }
}

/// ZeroMQ contexts, each with an I/O thread of its own.
///
/// A context has 1,023 sockets and a stream up to four, plus those that are being closed.
struct Contexts(Vec<(zmq::Context, Vec<std::sync::Weak<Followed>>)>);

impl Contexts {
    fn new(first: zmq::Context) -> Self {
        Self(vec![(first, Vec::new())])
    }

    fn pick(&mut self, followed: &Arc<Followed>) -> zmq::Context {
        for (context, users) in &mut self.0 {
            users.retain(|user| user.strong_count() > 0);
            if users.len() < STREAMS_PER_CONTEXT {
                users.push(Arc::downgrade(followed));
                return context.clone();
            }
        }
        let context = zmq::Context::new();
        self.0
            .push((context.clone(), vec![Arc::downgrade(followed)]));
        context
    }
}

const STREAMS_PER_CONTEXT: usize = 128;

/// Bounds how long anything that goes by unnoticed can wait.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(5);
