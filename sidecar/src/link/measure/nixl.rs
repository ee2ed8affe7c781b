//! Bytes with NIXL: the measuring side reads the listener's memory.

use std::sync::Arc;
use std::time::Duration;

use kvlane::Result;
use parking_lot::Mutex;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::Plan;
use crate::link::args::LinkArgs;
use crate::link::failed;
use crate::link::region::{pattern, pieces};
use crate::link::wire::{self, MOVE_LIMIT, Offered, SESSION_LIMIT, STEP_LIMIT, Welcome};
use crate::nixl::{Agent, Direction, Memory, Nixl, Part, Transfer};

/// What a listener gives out.
#[derive(Debug)]
pub(in crate::link) struct Holder {
    nixl: Nixl,
    gpu: Option<u32>,
    /// What the last peer read; taken by the next that needs no more.
    kept: Mutex<Option<Kept>>,
    /// Each measurement has memory of its own.
    room: Semaphore,
}

#[derive(Debug)]
struct Kept {
    agent: Agent,
    memory: Arc<Memory>,
    name: String,
    of: String,
}

/// Measurements at once.
const MAX_MEASUREMENTS: usize = 2;
/// Bytes of the pattern that are written at once.
const CHUNK: usize = 1 << 20;

impl Holder {
    /// Loads NIXL, and sees whether the GPU is there.
    pub(in crate::link) async fn load(args: &LinkArgs) -> std::result::Result<Self, String> {
        let nixl = Nixl::load(args.nixl_lib.as_deref()).map_err(|error| error.to_string())?;
        if args.gpu.is_some() {
            allocate(&nixl, args.gpu, CHUNK).await?;
        }
        Ok(Self {
            nixl,
            gpu: args.gpu,
            kept: Mutex::new(None),
            room: Semaphore::new(MAX_MEASUREMENTS),
        })
    }

    /// Lets one peer read until it leaves.
    pub(in crate::link) async fn give(
        &self,
        stream: &mut TcpStream,
        mut welcome: Welcome,
        bytes: usize,
    ) -> Result<bool> {
        let Ok(_room) = self.room.try_acquire() else {
            let reason = "other measurements are running".to_owned();
            welcome.refused = Some(reason.clone());
            wire::say(stream, &welcome).await?;
            return Err(failed(reason));
        };
        let fitting = |kept: &mut Kept| kept.memory.len() >= bytes;
        let kept = self.kept.lock().take_if(fitting);
        let prepared = match kept {
            Some(kept) => Ok(kept),
            None => self.prepare(bytes).await,
        };
        let kept = match prepared {
            Ok(kept) => kept,
            Err(reason) => {
                welcome.refused = Some(reason.clone());
                wire::say(stream, &welcome).await?;
                return Err(failed(reason));
            }
        };
        welcome.nixl = Some(Offered {
            agent: kept.name.clone(),
            address: kept.memory.address(),
            gpu: kept.memory.gpu_number(),
            memory: kept.of.clone(),
        });
        let metadata = kept.agent.metadata().await;
        let metadata = metadata.map_err(|error| failed(error.to_string()))?;
        wire::say(stream, &welcome).await?;
        wire::say_bytes(stream, &metadata).await?;
        // It reads without our doing; a byte or its end says that it has finished.
        let _ = tokio::time::timeout(SESSION_LIMIT, stream.read_u8()).await;
        *self.kept.lock() = Some(kept);
        Ok(true)
    }

    async fn prepare(&self, bytes: usize) -> std::result::Result<Kept, String> {
        let name = format!("kvlane-link-{:032x}", fastrand::u128(..));
        let (memory, of) = allocate(&self.nixl, self.gpu, bytes).await?;
        let memory = Arc::new(memory);
        let filled = Arc::clone(&memory);
        let fill = move || {
            (0..filled.len()).step_by(CHUNK).try_for_each(|offset| {
                let length = CHUNK.min(filled.len() - offset);
                filled.write(offset, &pattern(offset, length))
            })
        };
        let filled = tokio::task::spawn_blocking(fill).await;
        filled.map_err(|error| error.to_string())??;
        let agent = self.nixl.agent(&name, &[]).await;
        let agent = agent.map_err(|error| error.to_string())?;
        let registered = agent.register(&memory).await;
        registered.map_err(|error| error.to_string())?;
        Ok(Kept {
            agent,
            memory,
            name,
            of,
        })
    }
}

/// Reads a listener's memory.
pub(super) struct Reader {
    agent: Agent,
    memory: Arc<Memory>,
    of: String,
    offered: Offered,
    /// Its end tells the listener that we are gone.
    _stream: TcpStream,
}

impl Reader {
    /// Gets ready to read what a listener offers on this connection.
    pub(super) async fn start(
        nixl: &Nixl,
        mut stream: TcpStream,
        offered: Offered,
        gpu: Option<u32>,
        room: usize,
    ) -> Result<Self> {
        let metadata = wire::hear_bytes(&mut stream, STEP_LIMIT).await?;
        let started = async {
            let (memory, of) = allocate(nixl, gpu, room).await?;
            let memory = Arc::new(memory);
            let name = format!("kvlane-link-{:032x}", fastrand::u128(..));
            let agent = nixl.agent(&name, &[]).await?;
            agent.register(&memory).await?;
            let met = agent.load_remote(metadata).await?;
            if met != offered.agent {
                return Err(crate::nixl::Error::Refused(
                    "the metadata is that of another agent".to_owned(),
                ));
            }
            Ok((agent, memory, of))
        };
        let (agent, memory, of) = started
            .await
            .map_err(|error: crate::nixl::Error| failed(error.to_string()))?;
        Ok(Self {
            agent,
            memory,
            of,
            offered,
            _stream: stream,
        })
    }

    /// Returns what the two memories are of.
    pub(super) fn memories(&self) -> String {
        let from: String = self.offered.memory.chars().take(80).collect();
        format!("{from} to {}", self.of)
    }

    pub(super) async fn run(&mut self, plan: &Plan) -> Result<Duration> {
        let piece = plan.piece.of(plan.bytes);
        let transfers = (0..plan.streams).map(|stream| {
            let parts = pieces(stream * plan.bytes, plan.bytes, piece);
            let part = |(offset, length): (usize, usize)| Part {
                local: offset,
                remote: self.offered.address.saturating_add(offset as u64),
                length,
            };
            Transfer {
                direction: Direction::Read,
                memory: Arc::clone(&self.memory),
                peer: self.offered.agent.clone(),
                peer_gpu: self.offered.gpu,
                parts: parts.into_iter().map(part).collect(),
                notification: None,
                limit: MOVE_LIMIT,
                keep: None,
            }
        });
        let moves: Vec<_> = transfers
            .map(|transfer| Box::pin(self.agent.transfer(transfer)))
            .collect();
        let timings = join(moves).await;
        let (mut began, mut done) = (None, None);
        for timing in timings {
            let timing = timing.map_err(|error| failed(error.to_string()))?;
            began = began.min(Some(timing.began)).or(Some(timing.began));
            done = done.max(Some(timing.done));
        }
        self.check(plan, piece)?;
        let elapsed = began.zip(done).map(|(began, done)| done - began);
        elapsed.ok_or_else(|| failed("nothing was moved".to_owned()))
    }

    /// Compares the first bytes of some pieces with what the listener holds.
    fn check(&self, plan: &Plan, piece: usize) -> Result<()> {
        let all = plan.streams * plan.bytes;
        let step = (all / 64).next_multiple_of(piece).max(1);
        for offset in (0..all).step_by(step).filter(|offset| offset % 8 == 0) {
            let mut bytes = vec![0; 64.min(all - offset)];
            let read = self.memory.read(offset, &mut bytes);
            read.map_err(failed)?;
            if bytes != pattern(offset, bytes.len()) {
                return Err(failed(format!("what arrived at {offset} is damaged")));
            }
        }
        Ok(())
    }
}

async fn allocate(
    nixl: &Nixl,
    gpu: Option<u32>,
    bytes: usize,
) -> std::result::Result<(Memory, String), crate::nixl::Error> {
    match gpu {
        None => {
            let memory = Memory::host(bytes).map_err(crate::nixl::Error::Refused)?;
            Ok((memory, "host".to_owned()))
        }
        Some(gpu) => {
            let (memory, name) = nixl.gpu_memory(gpu, bytes).await?;
            Ok((memory, format!("GPU {gpu} ({name})")))
        }
    }
}

impl From<crate::nixl::Error> for String {
    fn from(error: crate::nixl::Error) -> Self {
        error.to_string()
    }
}

/// Waits for all at once.
async fn join<F: Future + Unpin>(mut futures: Vec<F>) -> Vec<F::Output> {
    let mut done: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, done) in futures.iter_mut().zip(&mut done) {
            if done.is_none()
                && let std::task::Poll::Ready(output) = std::pin::Pin::new(future).poll(context)
            {
                *done = Some(output);
            }
        }
        if done.iter().all(Option::is_some) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    done.into_iter().flatten().collect()
}
