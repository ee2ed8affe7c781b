//! Reading a request body whole, within its limit.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::HeaderMap;
use hyper::body::{Body, Incoming};
use hyper::header::CONTENT_LENGTH;

/// Why a body could not be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BodyError {
    /// It is, or says it is, larger than the limit.
    TooLarge {
        /// The limit in bytes.
        limit: usize,
    },
    /// Nothing came for too long.
    Stalled,
    /// It ended before it was complete.
    Broken,
}

/// Reads the body; never holds more than `limit` bytes of it and the piece that goes beyond.
pub(super) async fn read(
    mut incoming: Incoming,
    headers: &HeaderMap,
    limit: usize,
    idle: Duration,
) -> Result<Bytes, BodyError> {
    let announced = announced_length(headers).or_else(|| incoming.size_hint().exact());
    if announced.is_some_and(|length| length > limit as u64) {
        return Err(BodyError::TooLarge { limit });
    }
    if incoming.is_end_stream() {
        return Ok(Bytes::new());
    }
    let Some(first) = next(&mut incoming, idle).await? else {
        return Ok(Bytes::new());
    };
    if first.len() > limit {
        return Err(BodyError::TooLarge { limit });
    }
    // Most bodies arrive in one piece, which then needs no copy.
    let Some(second) = next(&mut incoming, idle).await? else {
        return Ok(first);
    };
    let mut whole = BytesMut::new();
    for piece in [first, second] {
        append(&mut whole, &piece, announced, limit)?;
    }
    while let Some(piece) = next(&mut incoming, idle).await? {
        append(&mut whole, &piece, announced, limit)?;
    }
    Ok(whole.freeze())
}

/// Appends a piece, growing within the limit: an announced length is believed up to 1 MiB, beyond that growth doubles.
fn append(
    whole: &mut BytesMut,
    piece: &[u8],
    announced: Option<u64>,
    limit: usize,
) -> Result<(), BodyError> {
    const BELIEVED: usize = 1 << 20;
    let needed = whole.len() + piece.len();
    if needed > limit {
        return Err(BodyError::TooLarge { limit });
    }
    if needed > whole.capacity() {
        let announced = usize::try_from(announced.unwrap_or(0)).unwrap_or(usize::MAX);
        let target = needed
            .max(announced.min(BELIEVED))
            .max(whole.len().saturating_mul(2).min(announced.max(needed)))
            .min(limit);
        whole.reserve(target - whole.len());
    }
    whole.extend_from_slice(piece);
    Ok(())
}

/// Returns the next piece with data; `None` at the end.
async fn next(incoming: &mut Incoming, idle: Duration) -> Result<Option<Bytes>, BodyError> {
    loop {
        let frame = match tokio::time::timeout(idle, incoming.frame()).await {
            Err(_) => return Err(BodyError::Stalled),
            Ok(None) => return Ok(None),
            Ok(Some(Err(_))) => return Err(BodyError::Broken),
            Ok(Some(Ok(frame))) => frame,
        };
        // Trailers carry nothing that an engine reads.
        if let Ok(data) = frame.into_data()
            && !data.is_empty()
        {
            return Ok(Some(data));
        }
    }
}

fn announced_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
