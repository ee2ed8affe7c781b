//! A simulated vLLM for demos and tests: real sockets, real block hashes, finite KV, no model.
//!
//! What a router can observe is faithful: prefix caching with vLLM's allocation and eviction order, KV events in its
//! current layout with replay, cached tokens in `usage`, its metric names, continuous batching with chunked prefill,
//! waiting and preemption. What only a model could give is not: the words are drawn from a digest of the prompt, no
//! answer ends before its `max_tokens`, and time follows two rates (see [`EngineConfig`]).
//!
//! Three sides: a thread for the step loop, a thread for the event sockets, and HTTP tasks on the caller's runtime.

mod batch;
mod cli;
mod config;
mod http;
mod kv;
mod publisher;
mod runner;
mod scheduler;
mod sequence;
mod stats;
mod tokenizer;
mod transfer;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::SystemTime;

use kvlane::{Error, ErrorKind, Result, Role};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use self::cli::{EngineArgs, ProtocolArg, RoleArg, TransportArg, run};
pub use self::config::{EngineConfig, EventConfig, EventFaults, ReplayLayout};
pub use self::stats::EngineStats;
pub use self::transfer::{KvProtocol, KvTransport, Means, Refusal, TransferConfig, TransferStats};

use self::http::{Server, Service};
use self::kv::BlockPool;
use self::publisher::{BoundEvents, Publisher, PublisherCounters};
use self::runner::{Inbox, Runner};
use self::scheduler::{Limits, Scheduler};
use self::sequence::BlockHasher;
use self::tokenizer::Tokenizer;
use self::transfer::{Connector, Ledger};

/// The simulated engine; [`start`](Self::start) is the way in.
#[derive(Clone, Copy, Debug)]
pub struct Engine;

impl Engine {
    /// Binds all sockets and starts the engine; it serves when this returns.
    ///
    /// Must be called within a tokio runtime with time and I/O.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when a value is out of range or an address cannot be bound; the message names it.
    ///
    /// # Examples
    /// ```
    /// use kvlane_sidecar::engine::{Engine, EngineConfig};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> kvlane::Result<()> {
    /// let engine = Engine::start(EngineConfig::ephemeral()).await?;
    /// assert_ne!(engine.address().port(), 0);
    /// assert!(engine.events_endpoint().is_some());
    /// engine.shutdown().await;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn start(config: EngineConfig) -> Result<EngineHandle> {
        let max_model_len = config.validate()?;
        let server = Server::bind(&config).await?;
        let publisher = config.events.as_ref().map(Publisher::start).transpose()?;
        let events = publisher
            .as_ref()
            .map(|publisher| (publisher.bound().clone(), publisher.counters()));
        let tokenizer = Tokenizer::new(config.vocabulary);
        let hasher = BlockHasher {
            seed: config.hash_seed.unwrap_or_else(|| fastrand::u64(..)),
            block_size: config.block_size as usize,
        };
        let limits = Limits {
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
        };
        let scheduler = Scheduler::new(
            BlockPool::new(config.kv_blocks),
            hasher,
            tokenizer,
            config.seed,
            limits,
        );
        let inbox = Arc::new(Inbox::default());
        let (cancel, tasks) = (CancellationToken::new(), TaskTracker::new());
        let connector = match &config.transfer {
            Some(transfer) => {
                let block_size = config.block_size as usize;
                let blocks = config.kv_blocks as usize;
                let inbox = inbox.clone();
                let serves_rooms = config.role.serves(Role::Prefill);
                let starting = Connector::start(
                    transfer,
                    serves_rooms,
                    blocks,
                    block_size,
                    inbox,
                    &cancel,
                    &tasks,
                );
                Some(starting.await?)
            }
            None => None,
        };
        let ledger = connector.as_ref().map(|connector| connector.ledger.clone());
        let bootstrap = connector.as_ref().and_then(|connector| connector.bootstrap);
        let runner = Runner::new(inbox.clone(), scheduler, publisher, ledger.clone(), &config);
        let thread = std::thread::Builder::new()
            .name("kvlane-engine".to_owned())
            .spawn(move || runner.run())
            .map_err(|error| {
                Error::new(ErrorKind::Config, "cannot start the engine thread").with_source(error)
            })?;
        let service = service(
            &config,
            max_model_len,
            tokenizer,
            inbox.clone(),
            events.as_ref().map(|(bound, _)| bound),
            connector,
        );
        let address = server.address();
        tasks.spawn(server.serve(Arc::new(service), cancel.clone(), tasks.clone()));
        Ok(EngineHandle {
            address,
            model_name: config.model_name,
            events,
            ledger,
            bootstrap,
            inbox,
            thread: Some(thread),
            cancel,
            tasks,
        })
    }
}

/// A running engine. Dropping it stops the engine without waiting for it.
#[derive(Debug)]
pub struct EngineHandle {
    address: SocketAddr,
    model_name: String,
    events: Option<(BoundEvents, Arc<PublisherCounters>)>,
    ledger: Option<Arc<Ledger>>,
    bootstrap: Option<SocketAddr>,
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
    cancel: CancellationToken,
    tasks: TaskTracker,
}

impl EngineHandle {
    /// Returns the address of the HTTP listener.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the base URL of the HTTP listener, without a trailing slash.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the model name that requests must ask for.
    #[must_use]
    pub fn model_name(&self) -> &str {
        &self.model_name
    }

    /// Returns the bound endpoint of live events, such as `tcp://127.0.0.1:40001`.
    #[must_use]
    pub fn events_endpoint(&self) -> Option<&str> {
        self.events
            .as_ref()
            .map(|(bound, _)| bound.endpoint.as_str())
    }

    /// Returns the bound endpoint of replay requests.
    #[must_use]
    pub fn replay_endpoint(&self) -> Option<&str> {
        self.events.as_ref()?.0.replay_endpoint.as_deref()
    }

    /// Returns the engine's numbers after its last step; an answer that a client has is in them.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        self.inbox.stats()
    }

    /// Returns the numbers of handoffs; all are 0 without a connector.
    #[must_use]
    pub fn transfers(&self) -> TransferStats {
        let ledger = self.ledger.as_ref();
        ledger.map_or_else(TransferStats::default, |ledger| ledger.stats())
    }

    /// Returns the address of the bootstrap service, where its protocol has one.
    #[must_use]
    pub const fn bootstrap_address(&self) -> Option<SocketAddr> {
        self.bootstrap
    }

    /// Returns how many event batches were numbered so far.
    #[must_use]
    pub fn published_batches(&self) -> u64 {
        self.count(|counters| counters.batches.load(Ordering::Acquire))
    }

    /// Returns how many replay requests were answered.
    #[must_use]
    pub fn answered_replays(&self) -> u64 {
        self.count(|counters| counters.replays.load(Ordering::Acquire))
    }

    /// Returns how many subscriptions to events have come so far.
    #[must_use]
    pub fn subscriptions(&self) -> u64 {
        self.count(|counters| counters.subscriptions.load(Ordering::Acquire))
    }

    /// Loses the next `batches` event batches on the live socket; replay still has them.
    pub fn drop_next_batches(&self, batches: u64) {
        if let Some((_, counters)) = &self.events {
            counters.drop_next.store(batches, Ordering::Release);
        }
    }

    /// Ends the leases of what is held for other engines now, as if their time had run out.
    pub fn end_leases(&self) {
        if let Some(ledger) = &self.ledger {
            ledger.run_out();
        }
    }

    /// Forgets all cached blocks, and tells whether it did: not while a request holds blocks.
    ///
    /// As in vLLM subscribers learn of it with the next step, not before.
    pub async fn reset_cache(&self) -> bool {
        self.inbox.reset().await.unwrap_or(false)
    }

    /// Stops the engine as if its process died: connections are cut, and its ports are free when this returns.
    pub async fn shutdown(mut self) {
        self.stop();
        self.tasks.wait().await;
        if let Some(thread) = self.thread.take() {
            // The thread ends between two steps and then closes the event sockets.
            let joined = tokio::task::spawn_blocking(move || thread.join()).await;
            if !matches!(joined, Ok(Ok(()))) {
                tracing::error!("the engine thread panicked");
            }
        }
    }

    fn count(&self, read: impl Fn(&PublisherCounters) -> u64) -> u64 {
        self.events
            .as_ref()
            .map_or(0, |(_, counters)| read(counters))
    }

    fn stop(&self) {
        self.cancel.cancel();
        self.tasks.close();
        self.inbox.stop();
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.stop();
    }
}

fn service(
    config: &EngineConfig,
    max_model_len: usize,
    tokenizer: Tokenizer,
    inbox: Arc<Inbox>,
    bound: Option<&BoundEvents>,
    connector: Option<Connector>,
) -> Service {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let sources = match (&config.events, bound) {
        (Some(events), Some(bound)) if !events.silent => json!({"0": {
            "enable_kv_cache_events": true, "publisher": "zmq",
            "endpoint": as_configured(&events.endpoint, &bound.endpoint),
            "replay_endpoint": events.replay_endpoint.as_deref().zip(bound.replay_endpoint.as_deref())
                .map(|(configured, bound)| as_configured(configured, bound)), "buffer_steps": events.buffer_steps, "hwm": events.hwm,
            "max_queue_size": 100_000, "topic": events.topic,
        }}),
        _ => json!({}),
    };
    Service {
        inbox,
        tokenizer,
        model_name: config.model_name.clone(),
        max_model_len,
        block_size: config.block_size,
        kv_blocks: config.kv_blocks,
        role: config.role,
        event_sources: sources,
        connector,
        born: now.unwrap_or_default().as_secs_f64(),
    }
}

/// Returns the bound endpoint with the wildcard that it was configured with, as vLLM reports it.
fn as_configured(configured: &str, bound: &str) -> String {
    match (configured.starts_with("tcp://*:"), bound.rsplit_once(':')) {
        (true, Some((_, port))) => format!("tcp://*:{port}"),
        _ => bound.to_owned(),
    }
}
