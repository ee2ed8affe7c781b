//! What the two sides say to each other, over TCP.
//!
//! The measuring side says [`Hello`] on every connection and gets a [`Welcome`]; where that offers NIXL, a frame of metadata
//! follows and the bytes are read with NIXL. Otherwise each [`Ask`] is answered with as many bytes. Messages are
//! JSON in the frames of [`crate::frame`].

use std::time::Duration;

use kvlane::Result;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

use crate::frame;

use super::failed;

/// What both sides begin with.
pub(super) const PROTOCOL: &str = "kvlane-link";
pub(super) const VERSION: u32 = 1;

/// Time for each step that moves no bulk.
pub(super) const STEP_LIMIT: Duration = Duration::from_secs(10);
/// Time for one transfer.
pub(super) const MOVE_LIMIT: Duration = Duration::from_secs(120);
/// Time for one measurement, after which its connections are closed.
pub(super) const SESSION_LIMIT: Duration = Duration::from_secs(3_600);
/// Bound of a frame.
const MAX_FRAME: usize = 1 << 16;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) protocol: String,
    pub(super) version: u32,
    /// Memory that is to be read at most.
    pub(super) bytes: usize,
    pub(super) nixl: bool,
}

impl Hello {
    pub(super) fn new(bytes: usize, nixl: bool) -> Self {
        Self {
            protocol: PROTOCOL.to_owned(),
            version: VERSION,
            bytes,
            nixl,
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Welcome {
    pub(super) protocol: String,
    pub(super) version: u32,
    #[serde(default)]
    pub(super) refused: Option<String>,
    #[serde(default)]
    pub(super) nixl: Option<Offered>,
    /// Why there is no NIXL.
    #[serde(default)]
    pub(super) without: Option<String>,
}

/// Memory that is read with NIXL.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Offered {
    pub(super) agent: String,
    pub(super) address: u64,
    pub(super) gpu: Option<u32>,
    /// What the memory is of, for people.
    pub(super) memory: String,
}

/// Bytes to be sent over TCP, in writes of one piece.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Ask {
    pub(super) bytes: usize,
    pub(super) piece: usize,
}

/// Writes one message.
pub(super) async fn say(
    stream: &mut (impl AsyncWrite + Unpin + Send),
    message: &(impl Serialize + Sync),
) -> Result<()> {
    let bytes = serde_json::to_vec(message)
        .map_err(|error| failed("cannot write a message".to_owned()).with_source(error))?;
    say_bytes(stream, &bytes).await
}

/// Writes one frame.
pub(super) async fn say_bytes(
    stream: &mut (impl AsyncWrite + Unpin + Send),
    bytes: &[u8],
) -> Result<()> {
    let writing = async {
        frame::write(stream, bytes).await?;
        stream.flush().await
    };
    match tokio::time::timeout(STEP_LIMIT, writing).await {
        Ok(written) => {
            written.map_err(|error| failed("the peer went away".to_owned()).with_source(error))
        }
        Err(_) => Err(late()),
    }
}

/// Reads one message.
pub(super) async fn hear<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin + Send),
    limit: Duration,
) -> Result<T> {
    let bytes = hear_bytes(stream, limit).await?;
    serde_json::from_slice(&bytes).map_err(|error| {
        failed("the peer is no kvlane link: its message is not understood".to_owned())
            .with_source(error)
    })
}

/// Reads one frame.
pub(super) async fn hear_bytes(
    stream: &mut (impl AsyncRead + Unpin + Send),
    limit: Duration,
) -> Result<Vec<u8>> {
    match tokio::time::timeout(limit, frame::read(stream, MAX_FRAME)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::InvalidData => Err(failed(format!(
            "the peer is no kvlane link: it sends {error}"
        ))),
        Ok(Err(error)) => Err(failed("the peer went away".to_owned()).with_source(error)),
        Err(_) => Err(late()),
    }
}

/// Refuses another protocol or version.
pub(super) fn check(protocol: &str, version: u32) -> Result<()> {
    if protocol == PROTOCOL && version == VERSION {
        return Ok(());
    }
    let protocol: String = protocol.chars().take(40).collect();
    Err(failed(format!(
        "the peer speaks {protocol:?} version {version}; {PROTOCOL:?} version {VERSION} is accepted"
    )))
}

fn late() -> kvlane::Error {
    failed("the peer did not answer in time".to_owned())
}
