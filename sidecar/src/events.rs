//! The workers' KV event streams: who is subscribed to.

use kvlane::Router;
use kvlane::subscribe::{Endpoint, StreamSpec, Subscriber};
use parking_lot::Mutex;
use tracing::warn;

use crate::config::WorkerConfig;

/// Follows the event streams of all workers that have one. The thread behind it starts with the first.
#[derive(Debug)]
pub struct EventStreams {
    router: Router,
    subscriber: Mutex<Option<Subscriber>>,
}

impl EventStreams {
    /// Follows nothing yet.
    #[must_use]
    pub const fn new(router: Router) -> Self {
        Self {
            router,
            subscriber: Mutex::new(None),
        }
    }

    /// Follows the streams of all ranks of a worker.
    ///
    /// # Errors
    /// The thread cannot be started, or an endpoint has no port for every rank.
    pub fn follow(&self, worker: &WorkerConfig) -> kvlane::Result<()> {
        let Some(events) = &worker.events else {
            return Ok(());
        };
        let events: Endpoint = events.parse()?;
        let replay = worker
            .replay
            .as_deref()
            .map(str::parse::<Endpoint>)
            .transpose()?;
        let mut specs = Vec::new();
        for dp_rank in 0..worker.dp_ranks {
            let replay = replay
                .as_ref()
                .map(|replay| replay.for_rank(dp_rank))
                .transpose()?;
            let spec = StreamSpec::new(worker.id.clone(), dp_rank, events.for_rank(dp_rank)?);
            specs.push(
                spec.replay(replay)
                    .topic(worker.topic.as_deref().unwrap_or_default()),
            );
        }
        let mut subscriber = self.subscriber.lock();
        if subscriber.is_none() {
            *subscriber = Some(Subscriber::start(&self.router)?);
        }
        if let Some(subscriber) = &*subscriber {
            specs.into_iter().for_each(|spec| subscriber.follow(spec));
        }
        Ok(())
    }

    /// Ends the streams of a worker; nothing of them is applied after this returns.
    pub fn unfollow(&self, worker: &str) {
        if let Some(subscriber) = &*self.subscriber.lock() {
            subscriber.unfollow(worker);
        }
    }

    /// Ends all streams.
    pub fn stop(&self) {
        let subscriber = self.subscriber.lock().take();
        if let Some(subscriber) = subscriber
            && std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(subscriber))).is_err()
        {
            warn!("the event subscriber did not end cleanly");
        }
    }
}
