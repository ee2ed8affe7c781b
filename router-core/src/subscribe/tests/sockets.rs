//! The whole subscriber against real publishers on loopback.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use super::engine::{Engine, Manner};
use super::{FakeSink, batches, eventually, fake, now, payload, quick, within};
use crate::ids::WorkerId;
use crate::subscribe::{Endpoint, Options, Sink, StreamSpec, Subscriber, SubscriberStats};

fn start(sink: &Arc<FakeSink>) -> Subscriber {
    start_with(sink, quick())
}

fn start_with(sink: &Arc<FakeSink>, options: Options) -> Subscriber {
    let sink: Arc<dyn Sink> = sink.clone();
    Subscriber::start_in(zmq::Context::new(), sink, options).unwrap()
}

fn spec(worker: &str, events: Endpoint) -> StreamSpec {
    StreamSpec::new(WorkerId::new(worker).unwrap(), 0, events)
}

fn with_replay(worker: &str, engine: &Engine) -> StreamSpec {
    spec(worker, engine.events()).replay(Some(engine.replay()))
}

fn stats(subscriber: &Subscriber, worker: &str) -> SubscriberStats {
    let all = subscriber.stats();
    all.into_iter()
        .find(|stats| stats.worker.as_str() == worker)
        .unwrap()
}

fn publish(engine: &Engine, life: &str, sequences: impl IntoIterator<Item = u64>) {
    for (sequence, payload) in batches(life, sequences) {
        engine.publish(sequence, &payload);
    }
}

/// Waits until exactly these batches are applied.
#[track_caller]
fn applied(sink: &FakeSink, worker: &str, expected: &[(u64, Vec<u8>)]) {
    let last = expected.last().map(|batch| batch.0);
    eventually(&format!("batch {last:?} is applied"), || {
        sink.seen(worker).applied.last().map(|batch| batch.0) == last
    });
    assert_eq!(sink.seen(worker).applied, expected);
}

#[test]
fn both_replay_layouts_give_the_same_and_live_goes_on() {
    for with_topic in [false, true] {
        let engine = Engine::start(Manner {
            with_topic,
            ..Manner::default()
        });
        publish(&engine, "a", 0..50);
        let sink = fake();
        let subscriber = start(&sink);
        subscriber.follow(with_replay("w", &engine));
        applied(&sink, "w", &batches("a", 0..50));
        publish(&engine, "a", 50..60);
        applied(&sink, "w", &batches("a", 0..60));
        let seen = sink.seen("w");
        assert_eq!((seen.holes, seen.repeated, seen.ups), (0, 0, 1));
        assert!(seen.restarts.is_empty());
        assert_eq!(engine.asked()[0], 0);
        eventually("counts are published", || {
            stats(&subscriber, "w").batches == 60
        });
        assert!(stats(&subscriber, "w").replay_batches >= 50);
    }
}

#[test]
fn bad_frames_are_counted_and_the_subscription_lives_on() {
    let engine = Engine::start(Manner::default());
    let sink = fake();
    let mut options = quick();
    options.limits.payload_bytes = 1_000;
    let subscriber = start_with(&sink, options);
    subscriber.follow(spec("w", engine.events()));
    engine.wait_subscribed();
    publish(&engine, "a", [0]);
    let number = 1_u64.to_be_bytes();
    engine.send(&[b"x"]);
    engine.send(&[&number, b"x"]);
    engine.send(&[b"", b"", &number, b"x"]);
    engine.send(&[b"", b"", b"", b"", b"", b"", b"", &number, b"x"]);
    engine.send(&[b"", &number[..7], b"x"]);
    engine.send(&[b"", &[0xFF; 8], b""]);
    engine.send(&[b"", &number, &[0; 1_001]]);
    publish(&engine, "a", [1]);
    applied(&sink, "w", &batches("a", 0..2));
    eventually("bad frames are counted", || {
        stats(&subscriber, "w").bad_frames == 7
    });
    assert_eq!(sink.seen("w").ups, 1);
}

#[test]
fn a_part_far_over_the_limit_costs_the_connection_and_no_more() {
    let engine = Engine::start(Manner::default());
    let sink = fake();
    let mut options = quick();
    options.limits.payload_bytes = 1_000;
    let subscriber = start_with(&sink, options);
    subscriber.follow(spec("w", engine.events()));
    engine.wait_subscribed();
    publish(&engine, "a", [0]);
    applied(&sink, "w", &batches("a", [0]));
    engine.send(&[b"", &1_u64.to_be_bytes(), &[0; 100_000]]);
    engine.wait_subscribed();
    publish(&engine, "a", [1]);
    applied(&sink, "w", &batches("a", 0..2));
    eventually("the reconnect is counted", || {
        stats(&subscriber, "w").reconnects == 1
    });
}

#[test]
fn a_topic_that_only_begins_alike_is_not_ours() {
    let mut engine = Engine::start(Manner::default());
    let sink = fake();
    let subscriber = start(&sink);
    subscriber.follow(spec("w", engine.events()).topic("kv@pod-1"));
    engine.wait_subscribed();
    engine.topic = "kv@pod-10".into();
    publish(&engine, "other", [0]);
    engine.topic = "kv@pod-1".into();
    publish(&engine, "a", [0]);
    applied(&sink, "w", &batches("a", [0]));
    eventually("the other topic is counted", || {
        stats(&subscriber, "w").other_topic_frames == 1
    });
}

#[test]
fn a_gap_is_repaired_by_replay() {
    let engine = Engine::start(Manner::default());
    let sink = fake();
    let subscriber = start(&sink);
    subscriber.follow(with_replay("w", &engine));
    publish(&engine, "a", 0..3);
    applied(&sink, "w", &batches("a", 0..3));
    for (sequence, payload) in batches("a", 3..6) {
        engine.lose(sequence, &payload);
    }
    engine.wait_subscribed();
    publish(&engine, "a", 6..9);
    applied(&sink, "w", &batches("a", 0..9));
    assert_eq!(sink.seen("w").holes, 0);
    assert!(engine.asked().contains(&3));
    eventually("the gap is counted", || {
        stats(&subscriber, "w").gaps >= 1 && stats(&subscriber, "w").unrepaired_gaps == 0
    });
}

#[test]
fn a_gap_without_replay_is_handed_on() {
    let engine = Engine::start(Manner::default());
    let sink = fake();
    let subscriber = start(&sink);
    subscriber.follow(spec("w", engine.events()));
    engine.wait_subscribed();
    publish(&engine, "a", [0, 1, 5, 6]);
    applied(&sink, "w", &batches("a", [0, 1, 5, 6]));
    assert_eq!(sink.seen("w").holes, 1);
    assert!(engine.asked().is_empty());
}

#[test]
fn batches_that_left_the_buffer_stay_lost_and_the_rest_is_kept() {
    let engine = Engine::start(Manner::default());
    publish(&engine, "a", 0..30);
    engine.forget_before(20);
    let sink = fake();
    let subscriber = start(&sink);
    subscriber.follow(with_replay("w", &engine));
    applied(&sink, "w", &batches("a", 20..30));
    for (sequence, payload) in batches("a", 30..40) {
        engine.lose(sequence, &payload);
    }
    engine.forget_before(35);
    engine.wait_subscribed();
    publish(&engine, "a", [40]);
    applied(&sink, "w", &batches("a", (20..30).chain(35..41)));
    assert_eq!(sink.seen("w").holes, 1);
    assert!(sink.seen("w").restarts.is_empty());
}

#[test]
fn short_answers_without_an_end_marker_are_asked_for_again() {
    let engine = Engine::start(Manner {
        end_marker: false,
        longest_answer: 20,
        ..Manner::default()
    });
    publish(&engine, "a", 0..50);
    let sink = fake();
    let mut options = quick();
    options.timing.silence = Duration::from_millis(100);
    let subscriber = start_with(&sink, options);
    subscriber.follow(with_replay("w", &engine));
    applied(&sink, "w", &batches("a", 0..50));
    engine.wait_subscribed();
    publish(&engine, "a", 50..55);
    applied(&sink, "w", &batches("a", 0..55));
    assert_eq!(sink.seen("w").holes, 0);
    assert_eq!(engine.asked()[..3], [0, 20, 40]);
}

#[test]
fn a_restart_is_noticed_with_fewer_and_with_more_batches_than_before() {
    for published in [5, 40] {
        let engine = Engine::start(Manner::default());
        publish(&engine, "a", 0..20);
        let sink = fake();
        let subscriber = start(&sink);
        subscriber.follow(with_replay("w", &engine));
        applied(&sink, "w", &batches("a", 0..20));
        let engine = engine.restart();
        publish(&engine, "b", 0..published);
        eventually("the new life is read", || {
            sink.seen("w").applied == batches("b", 0..published)
        });
        engine.wait_subscribed();
        publish(&engine, "b", [published]);
        applied(&sink, "w", &batches("b", 0..=published));
        let seen = sink.seen("w");
        assert_eq!((seen.restarts.len(), seen.holes), (1, 0));
        assert!(seen.ups >= 2);
    }
}

#[test]
fn a_restart_on_the_same_connection_is_noticed() {
    for has_replay in [false, true] {
        let engine = Engine::start(Manner::default());
        let sink = fake();
        let subscriber = start(&sink);
        let replay = has_replay.then(|| engine.replay());
        subscriber.follow(spec("w", engine.events()).replay(replay));
        engine.wait_subscribed();
        publish(&engine, "a", 0..9);
        applied(&sink, "w", &batches("a", 0..9));
        engine.forget_before(u64::MAX);
        publish(&engine, "b", 0..3);
        eventually("the new life is read", || {
            sink.seen("w").applied == batches("b", 0..3)
        });
        assert_eq!(sink.seen("w").restarts.len(), 1);
    }
}

#[test]
fn a_lost_connection_to_the_same_life_costs_nothing() {
    let mut engine = Engine::start(Manner::default());
    publish(&engine, "a", 0..20);
    let sink = fake();
    let subscriber = start(&sink);
    subscriber.follow(with_replay("w", &engine));
    applied(&sink, "w", &batches("a", 0..20));
    engine.hang_up();
    for (sequence, payload) in batches("a", 20..30) {
        engine.lose(sequence, &payload);
    }
    engine.listen_again();
    applied(&sink, "w", &batches("a", 0..30));
    engine.wait_subscribed();
    publish(&engine, "a", [30]);
    applied(&sink, "w", &batches("a", 0..31));
    let seen = sink.seen("w");
    assert!(seen.restarts.is_empty());
    assert_eq!(seen.holes, 0);
    assert!(engine.asked().contains(&19));
    assert!(stats(&subscriber, "w").reconnects >= 1);
}

#[test]
fn an_absent_publisher_is_reported_and_found_when_it_appears() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("tcp://{}", port.local_addr().unwrap());
    drop(port);
    let sink = fake();
    let subscriber = start(&sink);
    subscriber.follow(spec("w", endpoint.parse().unwrap()));
    eventually("the stream is reported down", || {
        !sink.seen("w").downs.is_empty()
    });
    let cause = sink.seen("w").downs[0].clone();
    assert!(
        cause.contains(&endpoint) && cause.contains("refused"),
        "{cause}"
    );
    assert!(!stats(&subscriber, "w").connected);

    let context = zmq::Context::new();
    let publisher = context.socket(zmq::PUB).unwrap();
    eventually("the port is free", || publisher.bind(&endpoint).is_ok());
    eventually("the stream is up", || sink.seen("w").ups == 1);
    eventually("a batch arrives", || {
        let parts = [&b""[..], &7_u64.to_be_bytes()[..], b"x"];
        publisher.send_multipart(parts, 0).unwrap();
        sink.seen("w").next == Some(8)
    });
    assert_eq!(sink.seen("w").downs.len(), 1);
    drop(publisher);
    eventually("the end is reported", || sink.seen("w").downs.len() == 2);
}

#[test]
fn something_else_on_the_port_is_reported() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
    let server = std::thread::spawn(move || {
        for connection in listener.incoming().take(3) {
            let mut connection = connection.unwrap();
            let _ = connection.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let sink = fake();
    let subscriber = start(&sink);
    subscriber.follow(spec("w", endpoint.parse().unwrap()));
    eventually("the stream is reported down", || {
        !sink.seen("w").downs.is_empty()
    });
    assert_eq!(sink.seen("w").ups, 0);
    server.join().unwrap();
}

#[test]
fn nothing_is_applied_after_unfollow_returns() {
    let engine = Engine::start(Manner::default());
    publish(&engine, "a", 0..1_000);
    let sink = Arc::new(FakeSink::slow(Duration::from_millis(1)));
    let subscriber = start(&sink);
    subscriber.follow(with_replay("w", &engine));
    eventually("the queue drains", || sink.seen("w").applied.len() >= 10);
    subscriber.unfollow("w");
    let count = sink.seen("w").applied.len();
    assert!(count < 1_000, "the queue was empty before the barrier");
    assert!(subscriber.stats().is_empty());

    // Whatever the old life had queued would be applied before the new one's replay has ended.
    sink.restart_stream("w", 0, "added again", now()).unwrap();
    let engine = engine.restart();
    publish(&engine, "b", 0..5);
    subscriber.follow(with_replay("w", &engine));
    applied(&sink, "w", &batches("b", 0..5));
    assert_eq!(sink.seen("w").restarts.len(), 1);
}

#[test]
fn streams_that_come_and_go_leave_no_trace() {
    let engine = Engine::start(Manner::default());
    publish(&engine, "a", 0..3);
    let sink = fake();
    let subscriber = start(&sink);
    for round in 1..=40 {
        subscriber.follow(with_replay("w", &engine));
        eventually("the stream is up", || sink.seen("w").ups == round);
        subscriber.unfollow("w");
        subscriber.unfollow("w");
    }
    subscriber.follow(with_replay("w", &engine));
    applied(&sink, "w", &batches("a", 0..3));
}

#[test]
fn following_again_replaces_the_stream() {
    let first = Engine::start(Manner::default());
    let second = Engine::start(Manner::default());
    let sink = fake();
    let subscriber = start(&sink);
    subscriber.follow(spec("w", first.events()));
    first.wait_subscribed();
    publish(&first, "a", [0]);
    applied(&sink, "w", &batches("a", [0]));
    subscriber.follow(spec("w", second.events()));
    second.wait_subscribed();
    publish(&first, "a", [1]);
    publish(&second, "b", [1]);
    applied(&sink, "w", &[(0, payload("a", 0)), (1, payload("b", 1))]);
    assert_eq!(subscriber.stats().len(), 1);
}

#[test]
fn a_mute_replay_endpoint_stops_neither_its_stream_nor_others() {
    let mute = Engine::start(Manner {
        mute: true,
        ..Manner::default()
    });
    let good = Engine::start(Manner::default());
    publish(&good, "g", 0..10);
    let sink = fake();
    let mut options = quick();
    options.timing.silence = Duration::from_millis(300);
    let subscriber = start_with(&sink, options);
    subscriber.follow(with_replay("mute", &mute));
    mute.wait_subscribed();
    eventually("the mute one is asked", || !mute.asked().is_empty());
    subscriber.follow(with_replay("good", &good));
    applied(&sink, "good", &batches("g", 0..10));
    publish(&mute, "m", 3..6);
    applied(&sink, "mute", &batches("m", 3..6));
    assert_eq!(mute.asked(), [0, 0, 0]);
    // It may come to its senses: after a new connection it is asked again.
    mute.set_manner(Manner::default());
    let mute = mute.restart();
    mute.wait_subscribed();
    publish(&mute, "n", 0..2);
    eventually("the new life is read", || {
        sink.seen("mute").applied == batches("n", 0..2)
    });
}

#[test]
fn an_inproc_publisher_in_the_same_context_is_followed() {
    let context = zmq::Context::new();
    let publisher = context.socket(zmq::XPUB).unwrap();
    publisher.bind("inproc://kv-events").unwrap();
    let sink = fake();
    let subscriber = Subscriber::start_in(context, sink.clone(), quick()).unwrap();
    subscriber.follow(spec("w", "inproc://kv-events".parse().unwrap()));
    eventually("a batch arrives", || {
        let parts = [&b""[..], &7_u64.to_be_bytes()[..], b"x"];
        publisher.send_multipart(parts, 0).unwrap();
        sink.seen("w").next == Some(8)
    });
}

#[test]
fn dropping_the_subscriber_ends_its_thread_soon() {
    let engine = Engine::start(Manner {
        mute: true,
        ..Manner::default()
    });
    let sink = fake();
    let subscriber = start(&sink);
    subscriber.follow(with_replay("w", &engine));
    subscriber.follow(spec("absent", "tcp://127.0.0.1:1".parse().unwrap()));
    engine.wait_subscribed();
    let started = now();
    drop(subscriber);
    assert!(now() - started < Duration::from_secs(4));
    assert_eq!(Arc::strong_count(&sink), 1);
}

struct Flood {
    publishers: u64,
    batches: u64,
    payload_bytes: usize,
    delay: Duration,
}

impl Flood {
    /// Lets publishers send faster than the sink takes, until every stream is at its last batch. Returns how much the
    /// process grew at most.
    fn run(&self) -> usize {
        let sink = Arc::new(FakeSink::slow(self.delay));
        let subscriber = start(&sink);
        let names: Vec<String> = (0..self.publishers).map(|n| format!("w{n}")).collect();
        let engines: Vec<Engine> = names
            .iter()
            .map(|name| {
                let engine = Engine::start(Manner::default());
                subscriber.follow(with_replay(name, &engine));
                engine.wait_subscribed();
                engine
            })
            .collect();
        let before = resident_bytes();
        let mut peak = before;
        for sequence in 0..self.batches {
            let mut payload = payload("a", sequence);
            payload.resize(self.payload_bytes, 0);
            for engine in &engines {
                engine.publish(sequence, &payload);
                // A short buffer, so that what grows is not the engines.
                if sequence % 1_000 == 999 {
                    engine.forget_before(sequence - 500);
                }
            }
            if sequence % 1_000 == 0 {
                peak = peak.max(resident_bytes());
            }
        }
        for name in &names {
            let what = format!("{name} is at its last batch");
            within(Duration::from_secs(300), &what, || {
                peak = peak.max(resident_bytes());
                sink.with(name, 0, |seen| seen.next) == Some(self.batches)
            });
            let seen = sink.seen(name);
            assert!(seen.sequences().is_sorted(), "{name} is out of order");
            assert!(seen.restarts.is_empty(), "{name}: {:?}", seen.restarts);
        }
        peak.saturating_sub(before)
    }
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0_usize) * 4_096
}

#[test]
fn a_flood_ends_with_every_stream_at_its_last_batch() {
    let flood = Flood {
        publishers: 3,
        batches: 3_000,
        payload_bytes: 2_000,
        delay: Duration::from_micros(50),
    };
    flood.run();
}

#[test]
#[ignore = "measures the whole process: run alone"]
fn a_long_flood_does_not_grow_the_process() {
    let flood = Flood {
        publishers: 8,
        batches: 50_000,
        payload_bytes: 2_000,
        delay: Duration::from_micros(150),
    };
    let grown = flood.run();
    eprintln!("grew by {} MiB", grown >> 20);
    assert!(grown < 200 << 20, "grew by {} MiB", grown >> 20);
}
