//! Blocks over TCP: what serves where NIXL's library is not.
//!
//! ```text
//! fetcher: frame {engine_id, request_id, digest}
//! holder:  frame {"blocks": n} or {"refused": reason}, then n × (frame of bytes, 8 bytes of their XXH3)
//! fetcher: one byte, when all arrived and are right; the holder frees them
//! ```
//! A frame is a length (4 bytes, little endian) and as many bytes.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use xxhash_rust::xxh3::xxh3_64;

use super::content::Content;
use super::ledger::Ledger;
use super::parameters::{MAX_TEXT, Source};
use super::{Fetching, Refusal, Transport};

/// Fetches over TCP.
#[derive(Debug)]
pub(super) struct Tcp {
    bytes_per_token: usize,
}

#[derive(Debug, Serialize, Deserialize)]
struct Wanted {
    engine_id: String,
    request_id: String,
    digest: u64,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Offer {
    blocks: usize,
    refused: Option<String>,
}

/// Bound of the two JSON frames.
const MAX_HEAD: usize = 4 * MAX_TEXT;

/// Says that everything arrived.
const DONE: u8 = 6;

/// Time for one fetch: an engine that stalls must not hold a request for ever (vLLM's handshake gives up after 5 s).
const TIME_LIMIT: Duration = Duration::from_secs(30);
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

impl Tcp {
    pub(super) const fn new(bytes_per_token: usize) -> Self {
        Self { bytes_per_token }
    }

    async fn exchange(
        &self,
        source: &Source,
        content: &Content,
    ) -> io::Result<Result<(), Refusal>> {
        let connecting = TcpStream::connect((source.host.as_str(), source.port));
        let stream = tokio::time::timeout(CONNECT_LIMIT, connecting).await??;
        stream.set_nodelay(true)?;
        let mut stream = BufReader::with_capacity(1 << 16, stream);
        let wanted = Wanted {
            engine_id: source.engine_id.clone(),
            request_id: source.request_id.clone(),
            digest: content.digest(),
        };
        let frame = serde_json::to_vec(&wanted)?;
        write_frame(&mut stream, &frame).await?;
        stream.flush().await?;
        let offer: Offer = serde_json::from_slice(&read_frame(&mut stream, MAX_HEAD).await?)?;
        if let Some(reason) = offer.refused {
            let known = Refusal::ALL
                .into_iter()
                .find(|known| known.as_str() == reason);
            return Ok(Err(known.unwrap_or(Refusal::Unknown)));
        }
        if offer.blocks != content.blocks() {
            return Ok(Err(Refusal::Foreign));
        }
        let mut expected = Vec::new();
        for index in 0..content.blocks() {
            content.write_block(index, self.bytes_per_token, &mut expected);
            let bytes = read_frame(&mut stream, expected.len()).await?;
            let checksum = stream.read_u64_le().await?;
            if xxh3_64(&bytes) != checksum || bytes != expected {
                return Ok(Err(Refusal::Damaged));
            }
        }
        stream.write_u8(DONE).await?;
        stream.flush().await?;
        Ok(Ok(()))
    }
}

impl Transport for Tcp {
    fn fetch<'a>(&'a self, source: &'a Source, content: &'a Content) -> Fetching<'a> {
        Box::pin(async move {
            let exchange = self.exchange(source, content);
            match tokio::time::timeout(TIME_LIMIT, exchange).await {
                Ok(Ok(result)) => result,
                Ok(Err(error)) => {
                    tracing::debug!(%error, host = source.host, port = source.port, "fetch failed");
                    Err(Refusal::Unreachable)
                }
                Err(_) => Err(Refusal::Unreachable),
            }
        })
    }
}

/// Serves what the ledger holds until cancelled.
pub(super) async fn serve(
    listener: TcpListener,
    ledger: Arc<Ledger>,
    bytes_per_token: usize,
    cancel: CancellationToken,
    tasks: TaskTracker,
) {
    loop {
        let accepted = tokio::select! {
            () = cancel.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let (ledger, cancel) = (Arc::clone(&ledger), cancel.clone());
                tasks.spawn(async move {
                    let serving = tokio::time::timeout(
                        TIME_LIMIT,
                        serve_one(stream, &ledger, bytes_per_token),
                    );
                    tokio::select! {
                        () = cancel.cancelled() => {}
                        served = serving => tracing::debug!(?served, "fetch ended"),
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a fetch");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn serve_one(
    stream: TcpStream,
    ledger: &Arc<Ledger>,
    bytes_per_token: usize,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut reader, writer) = stream.into_split();
    let mut writer = BufWriter::with_capacity(1 << 16, writer);
    let wanted: Wanted = serde_json::from_slice(&read_frame(&mut reader, MAX_HEAD).await?)?;
    let moving = match ledger.begin_move(&wanted.engine_id, &wanted.request_id, wanted.digest) {
        Ok(moving) => moving,
        Err(reason) => {
            let offer = Offer {
                refused: Some(reason.as_str().to_owned()),
                ..Offer::default()
            };
            write_frame(&mut writer, &serde_json::to_vec(&offer)?).await?;
            return writer.flush().await;
        }
    };
    let offer = Offer {
        blocks: moving.content.blocks(),
        refused: None,
    };
    write_frame(&mut writer, &serde_json::to_vec(&offer)?).await?;
    let mut bytes = Vec::new();
    for index in 0..moving.content.blocks() {
        moving
            .content
            .write_block(index, bytes_per_token, &mut bytes);
        write_frame(&mut writer, &bytes).await?;
        writer.write_u64_le(xxh3_64(&bytes)).await?;
    }
    writer.flush().await?;
    if reader.read_u8().await? == DONE {
        moving.collected();
    }
    Ok(())
}

async fn write_frame(
    stream: &mut (impl AsyncWriteExt + Unpin + Send),
    bytes: &[u8],
) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_u32_le(length).await?;
    stream.write_all(bytes).await
}

/// Reads a frame of at most `limit` bytes.
async fn read_frame(
    stream: &mut (impl AsyncRead + Unpin + Send),
    limit: usize,
) -> io::Result<Vec<u8>> {
    let length = stream.read_u32_le().await? as usize;
    if length > limit {
        let message = format!("a frame of {length} bytes; at most {limit} are accepted");
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}
