//! The indexes of dynamo-kv-router.
//!
//! The concurrent ones apply events on threads of their own, which hold the reverse maps; a writer here is one such thread
//! behind its channel. Lookups run on the caller's thread, by the call that takes a slice.

use std::cell::RefCell;
use std::fmt;
use std::hint::black_box;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dynamo_kv_router::indexer::positional::{PositionalIndexer, SearchMode};
use dynamo_kv_router::indexer::pruning::PruneConfig;
use dynamo_kv_router::indexer::{SyncIndexer, ThreadPoolIndexer, WorkerTask};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent, WorkerWithDpRank,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, RadixTree as Tree};
use tokio::sync::oneshot;

use super::{Answer, Name, Reader, Subject, Writer};
use crate::workload::Event;

/// `ConcurrentRadixTreeCompressed`, its production index.
pub type Crtc = Pooled<ConcurrentRadixTreeCompressed>;
/// `PositionalIndexer` with its strided search.
pub type Positional = Pooled<PositionalIndexer>;

/// An index behind event threads.
#[derive(Debug)]
pub struct Pooled<B> {
    backend: Arc<B>,
}

/// Which of Dynamo's concurrent indexes.
pub trait Backend: SyncIndexer {
    /// Its name in results.
    const NAME: Name;

    /// Creates it empty.
    fn create() -> Self;
}

impl Backend for ConcurrentRadixTreeCompressed {
    const NAME: Name = Name::Crtc;

    fn create() -> Self {
        Self::new()
    }
}

impl Backend for PositionalIndexer {
    const NAME: Name = Name::Positional;

    fn create() -> Self {
        // 32 is the stride that its documentation proposes.
        Self::new_with_mode(32, SearchMode::Strided)
    }
}

impl<B: Backend> Subject for Pooled<B> {
    const NAME: Name = B::NAME;
    type Event = RouterEvent;
    type Prompt = Vec<LocalBlockHash>;
    type Writer = PooledWriter<B>;
    type Reader = PooledReader<B>;

    fn new(_workers: u32) -> Self {
        Self {
            backend: Arc::new(B::create()),
        }
    }

    fn writer(&self) -> PooledWriter<B> {
        let (sender, receiver) = flume::unbounded();
        let backend = self.backend.clone();
        let thread = thread::spawn(move || {
            backend
                .worker(receiver, None)
                .expect("the event thread ends when it is told to");
        });
        PooledWriter {
            sender,
            thread: Some(thread),
            backend: PhantomData,
        }
    }

    fn reader(&self) -> PooledReader<B> {
        PooledReader {
            backend: self.backend.clone(),
        }
    }

    fn event(event: Event) -> RouterEvent {
        router_event(event)
    }

    fn prompt(locals: &[u64]) -> Vec<LocalBlockHash> {
        locals.iter().copied().map(LocalBlockHash).collect()
    }

    fn maintain(&self) {
        self.backend.run_cleanup_task();
    }
}

fn router_event(event: Event) -> RouterEvent {
    let worker = event.worker();
    let data = match event {
        Event::Store {
            parent,
            locals,
            keys,
            ..
        } => KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: parent.map(ExternalSequenceBlockHash),
            start_position: None,
            blocks: keys
                .into_iter()
                .zip(locals)
                .map(|(key, local)| KvCacheStoredBlockData {
                    block_hash: ExternalSequenceBlockHash(key),
                    tokens_hash: LocalBlockHash(local),
                    mm_extra_info: None,
                })
                .collect(),
        }),
        Event::Remove { keys, .. } => KvCacheEventData::Removed(KvCacheRemoveData {
            block_hashes: keys.into_iter().map(ExternalSequenceBlockHash).collect(),
        }),
        Event::Clear { .. } => KvCacheEventData::Cleared,
    };
    let event = KvCacheEvent {
        event_id: 0,
        dp_rank: 0,
        data,
    };
    RouterEvent::new(u64::from(worker), event)
}

fn answer_of(scores: &OverlapScores) -> Answer {
    let scores = scores.scores.iter();
    scores
        .map(|(worker, &score)| (u32::try_from(worker.worker_id).unwrap_or(u32::MAX), score))
        .filter(|&(_, score)| score > 0)
        .collect()
}

/// One event thread.
#[derive(Debug)]
pub struct PooledWriter<B> {
    sender: flume::Sender<WorkerTask>,
    thread: Option<JoinHandle<()>>,
    backend: PhantomData<B>,
}

impl<B> PooledWriter<B> {
    fn ask(&self, task: impl FnOnce(oneshot::Sender<()>) -> WorkerTask) {
        let (done, wait) = oneshot::channel();
        self.sender
            .send(task(done))
            .expect("the event thread outlives its writer");
        wait.blocking_recv()
            .expect("the event thread answers before it ends");
    }
}

impl<B: Backend> Writer for PooledWriter<B> {
    type Event = RouterEvent;
    const IS_ASYNC: bool = true;

    fn apply(&mut self, event: RouterEvent) -> Option<RouterEvent> {
        self.sender
            .send(WorkerTask::Event(event))
            .expect("the event thread outlives its writer");
        None
    }

    fn drain(&mut self) {
        self.ask(WorkerTask::Flush);
    }

    fn remove_worker(&mut self, worker: u32) {
        self.ask(|resp| WorkerTask::RemoveWorker {
            worker_id: u64::from(worker),
            sweep_tree: true,
            resp,
        });
    }
}

impl<B> Drop for PooledWriter<B> {
    fn drop(&mut self) {
        // A failure means that the thread has panicked, and told so.
        let _ = self.sender.send(WorkerTask::Terminate);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Looks up on the caller's thread.
#[derive(Debug)]
pub struct PooledReader<B> {
    backend: Arc<B>,
}

impl<B: Backend> Reader for PooledReader<B> {
    type Prompt = Vec<LocalBlockHash>;

    fn look_up(&mut self, prompt: &mut Vec<LocalBlockHash>) {
        black_box(self.backend.find_matches(prompt, false));
    }

    fn answer(&mut self, prompt: &mut Vec<LocalBlockHash>) -> Answer {
        answer_of(&self.backend.find_matches(prompt, false))
    }
}

/// `RadixTree`, its single-threaded index.
pub struct RadixTree {
    tree: Rc<RefCell<Tree>>,
}

impl Subject for RadixTree {
    const NAME: Name = Name::Radix;
    type Event = RouterEvent;
    type Prompt = Vec<LocalBlockHash>;
    type Writer = Self;
    type Reader = Self;

    fn new(_workers: u32) -> Self {
        Self {
            tree: Rc::new(RefCell::new(Tree::new())),
        }
    }

    fn writer(&self) -> Self {
        self.reader()
    }

    fn reader(&self) -> Self {
        Self {
            tree: self.tree.clone(),
        }
    }

    fn event(event: Event) -> RouterEvent {
        router_event(event)
    }

    fn prompt(locals: &[u64]) -> Vec<LocalBlockHash> {
        Crtc::prompt(locals)
    }
}

impl Writer for RadixTree {
    type Event = RouterEvent;

    fn apply(&mut self, event: RouterEvent) -> Option<RouterEvent> {
        // What it refuses, the probes count.
        let _ = black_box(self.tree.borrow_mut().apply_event(event));
        None
    }

    fn remove_worker(&mut self, worker: u32) {
        self.tree.borrow_mut().remove_worker(u64::from(worker));
    }
}

impl Reader for RadixTree {
    type Prompt = Vec<LocalBlockHash>;

    fn look_up(&mut self, prompt: &mut Vec<LocalBlockHash>) {
        let prompt = std::mem::take(prompt);
        black_box(self.tree.borrow().find_matches(prompt, false));
    }

    fn answer(&mut self, prompt: &mut Vec<LocalBlockHash>) -> Answer {
        let prompt = std::mem::take(prompt);
        answer_of(&self.tree.borrow().find_matches(prompt, false))
    }
}

impl fmt::Debug for RadixTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RadixTree").finish_non_exhaustive()
    }
}

/// CRTC in approximate mode: placements with a TTL, without a capacity bound.
pub struct CrtcTtl {
    indexer: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
    runtime: tokio::runtime::Runtime,
}

impl CrtcTtl {
    /// Creates an empty index that believes a placement for two minutes.
    #[must_use]
    pub fn new(tokens_per_block: u32) -> Self {
        let backend = ConcurrentRadixTreeCompressed::new();
        let config = PruneConfig {
            ttl: Duration::from_secs(120),
        };
        Self {
            indexer: ThreadPoolIndexer::new_with_pruning(backend, 1, tokens_per_block, config),
            runtime: tokio::runtime::Builder::new_current_thread()
                .build()
                .expect("a runtime without drivers starts"),
        }
    }

    /// Records a placement, and returns when it is in the index.
    pub fn record(&self, worker: u32, locals: &[LocalBlockHash], keys: &[u64]) {
        let worker = WorkerWithDpRank::new(u64::from(worker), 0);
        let recorded = self
            .indexer
            .process_routing_decision_hash_slices(worker, locals, keys);
        self.runtime
            .block_on(recorded)
            .expect("the event thread is running");
    }
}

impl Drop for CrtcTtl {
    fn drop(&mut self) {
        use dynamo_kv_router::indexer::KvIndexerInterface;
        self.indexer.shutdown();
    }
}

impl fmt::Debug for CrtcTtl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CrtcTtl").finish_non_exhaustive()
    }
}
