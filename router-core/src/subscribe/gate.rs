//! The way from a stream to the router, which can be shut for good.

use std::sync::Arc;
use std::time::Instant;

use crate::error::Result;
use crate::event::IngestReport;
use crate::ids::WorkerRank;
use crate::router::Router;
use crate::sync::Mutex;

/// What a stream feeds: the router, or a fake in tests.
///
/// Calls come from one thread. They must not wait for [`Subscriber::unfollow`](super::Subscriber::unfollow), which waits
/// for them.
pub(crate) trait Sink: Send + Sync {
    fn ingest(
        &self,
        worker: &str,
        dp_rank: u32,
        sequence: Option<u64>,
        payload: &[u8],
        now: Instant,
    ) -> Result<IngestReport>;

    /// Sequence that would be contiguous; `None` before the first batch of a life.
    fn next_sequence(&self, worker: &str, dp_rank: u32) -> Result<Option<u64>>;

    /// `Some(true)`: this very payload came under that sequence; `Some(false)`: another did; `None`: not remembered.
    fn is_known_batch(
        &self,
        worker: &str,
        dp_rank: u32,
        sequence: u64,
        payload: &[u8],
    ) -> Result<Option<bool>>;

    /// The engine restarted: its entries are cleared and its sequence is forgotten.
    fn restart_stream(&self, worker: &str, dp_rank: u32, cause: &str, now: Instant) -> Result<()>;

    fn stream_up(&self, worker: &str, dp_rank: u32, now: Instant) -> Result<()>;

    fn stream_down(&self, worker: &str, dp_rank: u32, cause: &str, now: Instant) -> Result<()>;
}

impl Sink for Router {
    fn ingest(
        &self,
        worker: &str,
        dp_rank: u32,
        sequence: Option<u64>,
        payload: &[u8],
        now: Instant,
    ) -> Result<IngestReport> {
        Self::ingest(self, worker, dp_rank, sequence, payload, now)
    }

    fn next_sequence(&self, worker: &str, dp_rank: u32) -> Result<Option<u64>> {
        Self::next_sequence(self, worker, dp_rank)
    }

    fn is_known_batch(
        &self,
        worker: &str,
        dp_rank: u32,
        sequence: u64,
        payload: &[u8],
    ) -> Result<Option<bool>> {
        Self::is_known_batch(self, worker, dp_rank, sequence, payload)
    }

    fn restart_stream(&self, worker: &str, dp_rank: u32, cause: &str, now: Instant) -> Result<()> {
        Self::restart_stream(self, worker, dp_rank, cause, now)
    }

    fn stream_up(&self, worker: &str, dp_rank: u32, now: Instant) -> Result<()> {
        Self::stream_up(self, worker, dp_rank, now)
    }

    fn stream_down(&self, worker: &str, dp_rank: u32, cause: &str, now: Instant) -> Result<()> {
        Self::stream_down(self, worker, dp_rank, cause, now)
    }
}

/// Whether a followed stream still belongs to a live worker. Held during each call into the sink, so that after
/// [`end`](Self::end) none is running and none follows.
#[derive(Debug)]
pub(super) struct Life(Mutex<bool>);

impl Life {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(true))
    }

    pub(super) fn end(&self) {
        *self.0.lock() = false;
    }

    pub(super) fn is_over(&self) -> bool {
        !*self.0.lock()
    }
}

/// One stream's calls into the sink: under its own identity, and only while it lives.
pub(super) struct Gate {
    sink: Arc<dyn Sink>,
    target: WorkerRank,
    life: Arc<Life>,
}

impl Gate {
    pub(super) fn new(sink: Arc<dyn Sink>, target: WorkerRank, life: Arc<Life>) -> Self {
        Self { sink, target, life }
    }

    pub(super) fn is_over(&self) -> bool {
        self.life.is_over()
    }

    /// Returns whether the sink took the batch.
    pub(super) fn ingest(&self, sequence: u64, payload: &[u8], now: Instant) -> bool {
        self.call(|sink, worker, rank| sink.ingest(worker, rank, Some(sequence), payload, now))
            .is_some()
    }

    pub(super) fn next_sequence(&self) -> Option<u64> {
        self.call(|sink, worker, rank| sink.next_sequence(worker, rank))
            .flatten()
    }

    pub(super) fn is_known_batch(&self, sequence: u64, payload: &[u8]) -> Option<bool> {
        self.call(|sink, worker, rank| sink.is_known_batch(worker, rank, sequence, payload))
            .flatten()
    }

    pub(super) fn restart_stream(&self, cause: &str, now: Instant) {
        self.call(|sink, worker, rank| sink.restart_stream(worker, rank, cause, now));
    }

    pub(super) fn stream_up(&self, now: Instant) {
        self.call(|sink, worker, rank| sink.stream_up(worker, rank, now));
    }

    pub(super) fn stream_down(&self, cause: &str, now: Instant) {
        self.call(|sink, worker, rank| sink.stream_down(worker, rank, cause, now));
    }

    /// Refusals (a worker that is being removed, a closed router) need no handling of their own: the stream is told to
    /// end by whoever caused them.
    fn call<T>(&self, call: impl FnOnce(&dyn Sink, &str, u32) -> Result<T>) -> Option<T> {
        let alive = self.life.0.lock();
        if !*alive {
            return None;
        }
        call(
            self.sink.as_ref(),
            self.target.worker.as_str(),
            self.target.dp_rank,
        )
        .ok()
    }
}
