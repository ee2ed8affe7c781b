//! Tests of the subscriber: the state machine alone, and the whole over real sockets.

mod engine;
mod follower;
mod router;
mod sockets;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64;

use super::options::{Limits, Options, Timing};
use super::{Sink, now};
use crate::error::{Error, Result};
use crate::event::IngestReport;
use crate::sync::Mutex;

/// What a router would know of one stream.
#[derive(Clone, Debug, Default)]
struct Seen {
    next: Option<u64>,
    /// Batches of the present life, in the order in which they were applied, with the first 16 bytes of their payloads.
    applied: Vec<(u64, Vec<u8>)>,
    known: HashMap<u64, u64>,
    holes: u64,
    restarts: Vec<String>,
    ups: u64,
    downs: Vec<String>,
    /// Calls that a router would have to sort out by itself.
    repeated: u64,
}

impl Seen {
    fn sequences(&self) -> Vec<u64> {
        self.applied.iter().map(|(sequence, _)| *sequence).collect()
    }
}

/// A sink that keeps order like the router does, and can be slow or refuse payloads.
#[derive(Default)]
struct FakeSink {
    streams: Mutex<BTreeMap<(String, u32), Seen>>,
    delay: Option<Duration>,
}

impl FakeSink {
    fn slow(delay: Duration) -> Self {
        Self {
            delay: Some(delay),
            ..Self::default()
        }
    }

    fn seen(&self, worker: &str) -> Seen {
        self.with(worker, 0, |seen| seen.clone())
    }

    fn with<T>(&self, worker: &str, rank: u32, act: impl FnOnce(&mut Seen) -> T) -> T {
        let mut streams = self.streams.lock();
        act(streams.entry((worker.to_owned(), rank)).or_default())
    }
}

impl Sink for FakeSink {
    fn ingest(
        &self,
        worker: &str,
        dp_rank: u32,
        sequence: Option<u64>,
        payload: &[u8],
        _now: Instant,
    ) -> Result<IngestReport> {
        if let Some(delay) = self.delay {
            std::thread::sleep(delay);
        }
        if payload == b"refuse" {
            return Err(Error::invalid("payload is no batch"));
        }
        let sequence = sequence.expect("streams have sequences");
        self.with(worker, dp_rank, |seen| {
            let expected = seen.next.unwrap_or(sequence);
            seen.holes += u64::from(sequence > expected);
            seen.repeated += u64::from(sequence < expected);
            seen.next = Some(sequence + 1);
            seen.known.insert(sequence, xxh3_64(payload));
            let beginning = &payload[..payload.len().min(16)];
            seen.applied.push((sequence, beginning.to_vec()));
        });
        Ok(IngestReport::default())
    }

    fn next_sequence(&self, worker: &str, dp_rank: u32) -> Result<Option<u64>> {
        Ok(self.with(worker, dp_rank, |seen| seen.next))
    }

    fn is_known_batch(
        &self,
        worker: &str,
        dp_rank: u32,
        sequence: u64,
        payload: &[u8],
    ) -> Result<Option<bool>> {
        Ok(self.with(worker, dp_rank, |seen| {
            seen.known
                .get(&sequence)
                .map(|known| *known == xxh3_64(payload))
        }))
    }

    fn restart_stream(&self, worker: &str, dp_rank: u32, cause: &str, _now: Instant) -> Result<()> {
        self.with(worker, dp_rank, |seen| {
            seen.next = None;
            seen.applied.clear();
            seen.known.clear();
            seen.restarts.push(cause.to_owned());
        });
        Ok(())
    }

    fn stream_up(&self, worker: &str, dp_rank: u32, _now: Instant) -> Result<()> {
        self.with(worker, dp_rank, |seen| seen.ups += 1);
        Ok(())
    }

    fn stream_down(&self, worker: &str, dp_rank: u32, cause: &str, _now: Instant) -> Result<()> {
        self.with(worker, dp_rank, |seen| seen.downs.push(cause.to_owned()));
        Ok(())
    }
}

/// Short waits. Too short only where the outcome is the same after asking again.
fn quick() -> Options {
    Options {
        timing: Timing {
            connect: Duration::from_secs(2),
            retry_min: Duration::from_millis(20),
            retry_max: Duration::from_millis(100),
            down_after: Duration::from_millis(200),
            settle: Duration::from_millis(20),
            silence: Duration::from_millis(400),
            replay: Duration::from_secs(20),
            cooldown: Duration::from_millis(50),
            quiet: Duration::from_millis(200),
            mute: Duration::from_secs(60),
            join: Duration::from_secs(5),
        },
        limits: Limits::default(),
    }
}

/// Waits until `condition` holds, generously: the machine may be busy with other things.
#[track_caller]
fn eventually(what: &str, condition: impl FnMut() -> bool) {
    within(Duration::from_secs(30), what, condition);
}

#[track_caller]
fn within(longest: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = now() + longest;
    while !condition() {
        assert!(now() < deadline, "{what}: not within {longest:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn payload(life: &str, sequence: u64) -> Vec<u8> {
    format!("{life}-{sequence}").into_bytes()
}

fn batches(life: &str, sequences: impl IntoIterator<Item = u64>) -> Vec<(u64, Vec<u8>)> {
    sequences
        .into_iter()
        .map(|sequence| (sequence, payload(life, sequence)))
        .collect()
}

fn fake() -> Arc<FakeSink> {
    Arc::new(FakeSink::default())
}
