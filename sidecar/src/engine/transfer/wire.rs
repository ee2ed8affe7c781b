//! What two engines say to each other about a fetch, over TCP.
//!
//! ```text
//! fetcher: frame {engine_id, request_id, digest, nixl, known}
//! holder:  frame {"refused": reason}
//!     or:  frame {"blocks": n}, then n × (frame of bytes, 8 bytes of their XXH3)
//!     or:  frame {"blocks": n, "nixl": {address, stride}}, a frame of NIXL's metadata, a frame of n × (4 bytes of a
//!          block's number, 8 bytes of its XXH3); the fetcher reads the blocks with NIXL
//! fetcher: one byte, when all arrived and are right; the holder frees them
//! ```
//! Frames are those of [`crate::frame`]. The connection stays open while blocks move, so that each
//! side learns at once that the other is gone.

use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::frame;

use super::Refusal;
use super::content::Content;
use super::parameters::{MAX_TEXT, Source};

/// What a fetcher asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Wanted {
    pub(super) engine_id: String,
    pub(super) request_id: String,
    pub(super) digest: u64,
    /// Whether the fetcher can read with NIXL.
    #[serde(default)]
    pub(super) nixl: bool,
    /// Whether it has the holder's metadata.
    #[serde(default)]
    pub(super) known: bool,
}

/// What the holder answers.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Offer {
    pub(super) blocks: usize,
    pub(super) refused: Option<String>,
    #[serde(default)]
    pub(super) nixl: Option<Placement>,
}

/// Where a holder's blocks lie.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Placement {
    /// Address of block 0.
    pub(super) address: u64,
    /// Bytes from one block to the next.
    pub(super) stride: u64,
}

/// Bound of the two JSON frames.
pub(super) const MAX_HEAD: usize = 4 * MAX_TEXT;

/// Says that everything arrived.
pub(super) const DONE: u8 = 6;

/// Time for one fetch: an engine that stalls must not hold a request for ever (vLLM's handshake gives up after 5 s).
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(30);
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Asks a holder for a prompt's blocks; returns the open connection with its offer.
pub(super) async fn ask(
    source: &Source,
    content: &Content,
    nixl: bool,
    known: bool,
) -> io::Result<Result<(BufReader<TcpStream>, Offer), Refusal>> {
    let connecting = TcpStream::connect((source.host.as_str(), source.port));
    let stream = tokio::time::timeout(CONNECT_LIMIT, connecting).await??;
    stream.set_nodelay(true)?;
    let mut stream = BufReader::with_capacity(1 << 16, stream);
    let wanted = Wanted {
        engine_id: source.engine_id.clone(),
        request_id: source.request_id.clone(),
        digest: content.digest(),
        nixl,
        known,
    };
    frame::write(&mut stream, &serde_json::to_vec(&wanted)?).await?;
    stream.flush().await?;
    let offer: Offer = serde_json::from_slice(&frame::read(&mut stream, MAX_HEAD).await?)?;
    if let Some(reason) = &offer.refused {
        let known = Refusal::ALL
            .into_iter()
            .find(|known| known.as_str() == *reason);
        return Ok(Err(known.unwrap_or(Refusal::Unknown)));
    }
    if offer.blocks != content.blocks() {
        return Ok(Err(Refusal::Foreign));
    }
    Ok(Ok((stream, offer)))
}
