//! A publisher with a replay endpoint, as engines have them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use super::eventually;
use crate::subscribe::Endpoint;
use crate::sync::Mutex;

/// How replays are answered.
#[derive(Clone, Debug)]
pub(super) struct Manner {
    /// Answers carry the topic.
    pub(super) with_topic: bool,
    pub(super) end_marker: bool,
    /// Does not answer at all.
    pub(super) mute: bool,
    /// Most batches in one answer.
    pub(super) longest_answer: usize,
}

impl Default for Manner {
    fn default() -> Self {
        Self {
            with_topic: true,
            end_marker: true,
            mute: false,
            longest_answer: usize::MAX,
        }
    }
}

#[derive(Default)]
struct Kept {
    batches: Vec<(u64, Vec<u8>)>,
    manner: Manner,
    asked: Vec<u64>,
}

pub(super) struct Engine {
    pub(super) context: zmq::Context,
    /// XPUB instead of PUB, so that tests can see the subscription arrive.
    publisher: Option<zmq::Socket>,
    events: String,
    replay: String,
    kept: Arc<Mutex<Kept>>,
    server: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
    pub(super) topic: String,
}

impl Engine {
    pub(super) fn start(manner: Manner) -> Self {
        Self::start_at("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", manner)
    }

    fn start_at(events: &str, replay: &str, manner: Manner) -> Self {
        let context = zmq::Context::new();
        let kept = Arc::new(Mutex::new(Kept {
            manner,
            ..Kept::default()
        }));
        let (publisher, events) = bind(&context, zmq::XPUB, events);
        let (router, replay) = bind(&context, zmq::ROUTER, replay);
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (kept, stop) = (kept.clone(), stop.clone());
            move || serve(&router, &kept, &stop)
        });
        Self {
            context,
            publisher: Some(publisher),
            events,
            replay,
            kept,
            server: Some((stop, thread)),
            topic: String::new(),
        }
    }

    /// Ends this engine and starts another at the same addresses, with nothing in its buffer.
    pub(super) fn restart(mut self) -> Self {
        let (events, replay, topic) =
            (self.events.clone(), self.replay.clone(), self.topic.clone());
        let manner = self.kept.lock().manner.clone();
        self.stop();
        let mut next = Self::start_at(&events, &replay, manner);
        next.topic = topic;
        next
    }

    /// Closes the publishing socket alone, as a network failure would.
    pub(super) fn hang_up(&mut self) {
        self.publisher = None;
    }

    pub(super) fn listen_again(&mut self) {
        self.publisher = Some(bind(&self.context, zmq::XPUB, &self.events).0);
    }

    pub(super) fn events(&self) -> Endpoint {
        self.events.parse().unwrap()
    }

    pub(super) fn replay(&self) -> Endpoint {
        self.replay.parse().unwrap()
    }

    pub(super) fn set_manner(&self, manner: Manner) {
        self.kept.lock().manner = manner;
    }

    pub(super) fn asked(&self) -> Vec<u64> {
        self.kept.lock().asked.clone()
    }

    /// Drops the buffer's oldest batches.
    pub(super) fn forget_before(&self, sequence: u64) {
        self.kept.lock().batches.retain(|batch| batch.0 >= sequence);
    }

    /// Keeps a batch for replays without publishing it, as if it were lost on the way.
    pub(super) fn lose(&self, sequence: u64, payload: &[u8]) {
        self.kept.lock().batches.push((sequence, payload.to_vec()));
    }

    pub(super) fn publish(&self, sequence: u64, payload: &[u8]) {
        self.lose(sequence, payload);
        self.send(&[self.topic.as_bytes(), &sequence.to_be_bytes(), payload]);
    }

    pub(super) fn send(&self, parts: &[&[u8]]) {
        self.publisher
            .as_ref()
            .unwrap()
            .send_multipart(parts, 0)
            .unwrap();
    }

    /// Waits until a subscription arrives that has not been waited for.
    pub(super) fn wait_subscribed(&self) {
        let publisher = self.publisher.as_ref().unwrap();
        eventually("a subscription arrives", || {
            publisher
                .recv_bytes(zmq::DONTWAIT)
                .is_ok_and(|message| message.first() == Some(&1))
        });
    }

    fn stop(&mut self) {
        self.publisher = None;
        if let Some((stop, thread)) = self.server.take() {
            stop.store(true, Ordering::Relaxed);
            thread.join().unwrap();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

fn bind(context: &zmq::Context, kind: zmq::SocketType, endpoint: &str) -> (zmq::Socket, String) {
    let socket = context.socket(kind).unwrap();
    socket.set_linger(0).unwrap();
    // Small enough for a flood to lose batches on the way; replays lose none by themselves.
    let queue_messages = if kind == zmq::XPUB { 1_000 } else { 100_000 };
    socket.set_sndhwm(queue_messages).unwrap();
    // The address of an engine that just ended is free a moment later.
    eventually("the address is free", || socket.bind(endpoint).is_ok());
    let bound = socket.get_last_endpoint().unwrap().unwrap();
    (socket, bound)
}

fn serve(router: &zmq::Socket, kept: &Mutex<Kept>, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        if router.poll(zmq::POLLIN, 5).unwrap() == 0 {
            continue;
        }
        let request = router.recv_multipart(0).unwrap();
        let [client, delimiter, start] = request.as_slice() else {
            panic!("a replay request has an identity and two parts: {request:?}");
        };
        assert!(delimiter.is_empty());
        let start = u64::from_be_bytes(start.as_slice().try_into().unwrap());
        let (batches, manner) = {
            let mut kept = kept.lock();
            kept.asked.push(start);
            (kept.batches.clone(), kept.manner.clone())
        };
        if !manner.mute {
            answer(router, client, start, &batches, &manner);
        }
    }
}

fn answer(
    router: &zmq::Socket,
    client: &[u8],
    start: u64,
    batches: &[(u64, Vec<u8>)],
    manner: &Manner,
) {
    let reply = |topic: &[u8], sequence: u64, payload: &[u8]| {
        let sequence = sequence.to_be_bytes();
        let mut parts = vec![client, b""];
        if manner.with_topic {
            parts.push(topic);
        }
        parts.extend([&sequence[..], payload]);
        router.send_multipart(parts, 0).unwrap();
    };
    let wanted = batches.iter().filter(|batch| batch.0 >= start);
    for (sequence, payload) in wanted.take(manner.longest_answer) {
        reply(b"kv@pod", *sequence, payload);
    }
    if manner.end_marker {
        reply(b"", u64::MAX, b"");
    }
}
