//! Deadlines and limits of the subscriber, in one place so that tests can shorten them.

use std::time::Duration;

/// How long the subscriber waits for what.
#[derive(Clone, Debug)]
pub(crate) struct Timing {
    /// Longest attempt to connect, handshake included.
    pub(crate) connect: Duration,
    /// First pause before connecting again; doubles up to `retry_max`.
    pub(crate) retry_min: Duration,
    pub(crate) retry_max: Duration,
    /// Time without a connection after which the stream is reported down.
    pub(crate) down_after: Duration,
    /// Pause between the handshake and the first replay request, in which the subscription reaches the publisher.
    pub(crate) settle: Duration,
    /// Silence after which a replay is asked for again. Engines serve replays between other work, at times 0.1 s late.
    pub(crate) silence: Duration,
    /// Longest replay, from the first request.
    pub(crate) replay: Duration,
    /// Least pause between two replays: engines do not publish while they serve one.
    pub(crate) cooldown: Duration,
    /// Quiet time after losses in which the last batches, which no later one would show to be missing, are asked for.
    pub(crate) quiet: Duration,
    /// How long a replay endpoint that never answered is not asked again on the same connection.
    pub(crate) mute: Duration,
    /// Longest wait for the thread to end.
    pub(crate) join: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            retry_min: Duration::from_millis(100),
            retry_max: Duration::from_secs(2),
            down_after: Duration::from_secs(3),
            settle: Duration::from_millis(50),
            silence: Duration::from_secs(2),
            replay: Duration::from_secs(30),
            cooldown: Duration::from_secs(1),
            quiet: Duration::from_secs(2),
            mute: Duration::from_secs(60),
            join: Duration::from_secs(5),
        }
    }
}

/// How much the subscriber takes at most.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Largest payload of a batch. A connection that sends twice as much in one part is closed.
    pub(crate) payload_bytes: usize,
    /// Bytes kept while replays run, over all streams.
    pub(crate) held_bytes: usize,
    /// Messages that ZeroMQ queues for each live stream; past it the publisher drops.
    pub(crate) live_queue_messages: i32,
    /// Messages that ZeroMQ queues for each running replay.
    pub(crate) replay_queue_messages: i32,
    /// Requests in one replay.
    pub(crate) asks: u32,
    /// Requests without any answer after which an endpoint counts as mute.
    pub(crate) unanswered_asks: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            payload_bytes: 64 << 20,
            held_bytes: 96 << 20,
            live_queue_messages: 1_000,
            replay_queue_messages: 2_000,
            asks: 8,
            unanswered_asks: 3,
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    pub(crate) timing: Timing,
    pub(crate) limits: Limits,
}

/// Bytes that all streams keep together.
///
/// Half of the limit goes to whoever needs it; the other half is shared out, so that no stream can starve another.
#[derive(Debug)]
pub(super) struct Budget {
    limit: usize,
    used: usize,
    streams: usize,
}

impl Budget {
    pub(super) const fn new(limit: usize) -> Self {
        Self {
            limit,
            used: 0,
            streams: 1,
        }
    }

    pub(super) fn set_streams(&mut self, streams: usize) {
        self.streams = streams.max(1);
    }

    /// Tells whether a queue that keeps `own` bytes may take `more`.
    pub(super) fn allows(&self, own: usize, more: usize) -> bool {
        // Each stream has two queues: live batches held back, and replayed ones.
        let share = self.limit / (4 * self.streams);
        own.saturating_add(more) <= share || self.used.saturating_add(more) <= self.limit / 2
    }

    pub(super) const fn take(&mut self, bytes: usize) {
        self.used += bytes;
    }

    pub(super) const fn give_back(&mut self, bytes: usize) {
        self.used = self.used.saturating_sub(bytes);
    }

    #[cfg(test)]
    pub(super) const fn used(&self) -> usize {
        self.used
    }
}
