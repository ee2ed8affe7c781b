//! Blocks over TCP: what serves where NIXL's library is not.

use std::io;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use xxhash_rust::xxh3::xxh3_64;

use super::content::Content;
use super::ledger::Moving;
use super::parameters::Source;
use super::wire::{self, DONE, TIME_LIMIT};
use super::{Fetching, Means, Moved, Refusal, Transport};
use crate::frame;

/// Fetches over TCP.
#[derive(Debug)]
pub(super) struct Tcp {
    bytes_per_token: usize,
}

impl Tcp {
    pub(super) const fn new(bytes_per_token: usize) -> Self {
        Self { bytes_per_token }
    }

    async fn exchange(
        &self,
        source: &Source,
        content: &Content,
    ) -> io::Result<Result<Moved, Refusal>> {
        let began = Instant::now();
        match wire::ask(source, content, false, false).await? {
            Ok((stream, _)) => receive(stream, content, self.bytes_per_token, began).await,
            Err(refusal) => Ok(Err(refusal)),
        }
    }
}

impl Transport for Tcp {
    fn fetch<'a>(&'a self, source: &'a Source, content: &'a Content) -> Fetching<'a> {
        Box::pin(within_limit(source, self.exchange(source, content)))
    }
}

/// Waits for an exchange; one that fails or takes too long did not reach its holder.
pub(super) async fn within_limit(
    source: &Source,
    exchange: impl Future<Output = io::Result<Result<Moved, Refusal>>>,
) -> Result<Moved, Refusal> {
    match tokio::time::timeout(TIME_LIMIT, exchange).await {
        Ok(Ok(result)) => result,
        Ok(Err(error)) => {
            tracing::debug!(%error, host = source.host, port = source.port, "fetch failed");
            Err(Refusal::Unreachable)
        }
        Err(_) => Err(Refusal::Unreachable),
    }
}

/// Reads blocks as they come and compares them with what they must be.
pub(super) async fn receive(
    mut stream: BufReader<TcpStream>,
    content: &Content,
    bytes_per_token: usize,
    began: Instant,
) -> io::Result<Result<Moved, Refusal>> {
    let mut expected = Vec::new();
    let mut bytes = 0;
    let mut checking = Duration::ZERO;
    for index in 0..content.blocks() {
        let length = content.block_tokens(index) * bytes_per_token;
        let block = frame::read(&mut stream, length).await?;
        let checksum = stream.read_u64_le().await?;
        let arrived = Instant::now();
        content.write_block(index, bytes_per_token, &mut expected);
        if xxh3_64(&block) != checksum || block != expected {
            return Ok(Err(Refusal::Damaged));
        }
        checking += arrived.elapsed();
        bytes += block.len() as u64;
    }
    let elapsed = began.elapsed().saturating_sub(checking);
    stream.write_u8(DONE).await?;
    stream.flush().await?;
    Ok(Ok(Moved {
        bytes,
        elapsed,
        means: Means::Tcp,
    }))
}

/// Writes all blocks of what is given out.
pub(super) async fn send(
    writer: &mut (impl AsyncWriteExt + Unpin + Send),
    moving: &Moving,
    bytes_per_token: usize,
) -> io::Result<()> {
    let mut bytes = Vec::new();
    for index in 0..moving.content.blocks() {
        moving
            .content
            .write_block(index, bytes_per_token, &mut bytes);
        frame::write(writer, &bytes).await?;
        writer.write_u64_le(xxh3_64(&bytes)).await?;
    }
    writer.flush().await
}
