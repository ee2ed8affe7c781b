//! Blocks with NIXL: the fetcher reads them out of the holder's pool.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::content::Content;
use super::parameters::Source;
use super::peers::{Peers, Use};
use super::pool::{LISTED, Landed, Landing, Pool, read_list};
use super::wire::{self, DONE, Placement, TIME_LIMIT};
use super::{Fetching, Means, Moved, Refusal, Transport, tcp};
use crate::engine::kv::BlockId;
use crate::frame;
use crate::nixl::{Agent, Direction, Memory, Nixl, Part, Transfer};

/// Fetches with NIXL, or over TCP from a holder that has no NIXL.
#[derive(Debug)]
pub(super) struct Mover {
    agent: Arc<Agent>,
    landing: Landing,
    bytes_per_token: usize,
    /// Holders whose metadata is loaded, by engine id, which is also the agent's name.
    peers: Peers,
}

/// Holders that are remembered while nothing is fetched from them.
const MAX_KNOWN: usize = 256;
/// Bound of a holder's metadata; with one registered pool it has some 400 bytes.
const MAX_METADATA: usize = 1 << 16;

/// Loads NIXL and makes an agent with a KV pool that others may read and memory that fetched blocks land in.
///
/// Both are as large as the pool; the system gives pages as they are used.
pub(super) async fn start(
    library: Option<&Path>,
    engine_id: &str,
    kv_blocks: usize,
    block_size: usize,
    bytes_per_token: usize,
) -> Result<(Mover, Pool), String> {
    let stride = block_size * bytes_per_token;
    let bytes = kv_blocks
        .checked_mul(stride)
        .ok_or_else(|| format!("a KV pool of {kv_blocks} blocks of {stride} bytes is too large"))?;
    let nixl = Nixl::load(library).map_err(|error| error.to_string())?;
    let started = async {
        let agent = nixl.agent(engine_id, &[]).await?;
        let pool = Arc::new(Memory::host(bytes).map_err(crate::nixl::Error::Refused)?);
        agent.register(&pool).await?;
        // Taken now, so that it does not give away where fetched blocks land.
        let metadata = agent.metadata().await?;
        let landing = Arc::new(Memory::host(bytes).map_err(crate::nixl::Error::Refused)?);
        agent.register(&landing).await?;
        Ok((agent, pool, metadata, landing))
    };
    let (agent, pool, metadata, landing) = started
        .await
        .map_err(|error: crate::nixl::Error| error.to_string())?;
    tracing::info!(library = %nixl.library().display(), "KV moves with NIXL");
    let agent = Arc::new(agent);
    let at = Arc::clone(&agent);
    let mover = Mover {
        agent,
        landing: Landing::new(landing, stride),
        bytes_per_token,
        peers: Peers::new(MAX_KNOWN, move |name| at.forget_remote(name)),
    };
    Ok((mover, Pool::new(pool, metadata, stride, bytes_per_token)))
}

impl Mover {
    async fn exchange(
        &self,
        source: &Source,
        content: &Content,
    ) -> io::Result<Result<Moved, Refusal>> {
        let began = Instant::now();
        let peer = Arc::new(self.peers.begin(&source.engine_id));
        let known = peer.is_known();
        let (mut stream, offer) = match wire::ask(source, content, true, known).await? {
            Ok(answered) => answered,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let Some(placement) = offer.nixl else {
            return tcp::receive(stream, content, self.bytes_per_token, began).await;
        };
        let metadata = frame::read(&mut stream, MAX_METADATA).await?;
        let list = frame::read(&mut stream, content.blocks() * LISTED).await?;
        let list = read_list(&list).filter(|list| list.len() == content.blocks());
        let Some(list) = list else {
            return Ok(Err(Refusal::Damaged));
        };
        if !known {
            self.meet(&peer, &source.engine_id, metadata).await?;
        }
        let Some(landed) = self.landing.take(content.blocks()).await else {
            return Err(io::Error::other(
                "the prompt has more blocks than this engine",
            ));
        };
        let landed = Arc::new(landed);
        let moving = self.read((source, &peer), content, placement, &list, &landed);
        let (bytes, arrived) = tokio::select! {
            moved = moving => moved?,
            // Its last word was the list: whatever is read now is that it is gone.
            _ = stream.read_u8() => return Err(io::Error::from(io::ErrorKind::ConnectionReset)),
        };
        let moved = Moved {
            bytes,
            elapsed: arrived.saturating_duration_since(began),
            means: Means::Nixl,
        };
        if !self.check(content, list, &landed).await {
            return Ok(Err(Refusal::Damaged));
        }
        finish(stream).await?;
        Ok(Ok(moved))
    }

    /// Takes in a holder's metadata.
    async fn meet(&self, peer: &Use, engine_id: &str, metadata: Vec<u8>) -> io::Result<()> {
        let name = self.agent.load_remote(metadata).await;
        let name = name.map_err(io::Error::other)?;
        if name != engine_id {
            self.peers.begin(&name).loaded();
            return Err(io::Error::other("the metadata is that of another engine"));
        }
        peer.loaded();
        Ok(())
    }

    /// Reads all blocks; returns their bytes and when the last was there.
    async fn read(
        &self,
        (source, peer): (&Source, &Arc<Use>),
        content: &Content,
        placement: Placement,
        list: &[(BlockId, u64)],
        landed: &Arc<Landed>,
    ) -> io::Result<(u64, Instant)> {
        let parts: Vec<Part> = landed
            .offsets()
            .zip(list)
            .enumerate()
            .map(|(index, (local, (block, _)))| Part {
                local,
                remote: placement
                    .address
                    .saturating_add(u64::from(*block).saturating_mul(placement.stride)),
                length: content.block_tokens(index) * self.bytes_per_token,
            })
            .collect();
        let bytes = parts.iter().map(|part| part.length as u64).sum();
        let transfer = Transfer {
            direction: Direction::Read,
            memory: Arc::clone(self.landing.memory()),
            peer: source.engine_id.clone(),
            peer_gpu: None,
            parts,
            notification: None,
            limit: TIME_LIMIT,
            // Where somebody stops waiting, NIXL still writes.
            keep: Some(Arc::new((Arc::clone(landed), Arc::clone(peer)))),
        };
        match self.agent.transfer(transfer).await {
            Ok(timing) => Ok((bytes, timing.done)),
            Err(error) => {
                // Its metadata may be that of a connection that broke; the next fetch brings it again.
                peer.failed();
                Err(io::Error::other(error))
            }
        }
    }

    async fn check(
        &self,
        content: &Content,
        list: Vec<(BlockId, u64)>,
        landed: &Arc<Landed>,
    ) -> bool {
        let (content, landed) = (content.clone(), Arc::clone(landed));
        let bytes_per_token = self.bytes_per_token;
        let check = move || {
            let checksums: Vec<u64> = list.iter().map(|(_, checksum)| *checksum).collect();
            landed.is(&content, &checksums, bytes_per_token)
        };
        tokio::task::spawn_blocking(check).await.unwrap_or(false)
    }
}

impl Transport for Mover {
    fn fetch<'a>(&'a self, source: &'a Source, content: &'a Content) -> Fetching<'a> {
        Box::pin(tcp::within_limit(source, self.exchange(source, content)))
    }
}

async fn finish(mut stream: BufReader<TcpStream>) -> io::Result<()> {
    stream.write_u8(DONE).await?;
    stream.flush().await
}
