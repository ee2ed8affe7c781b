//! Frames on a stream: a length (4 bytes, little endian) and as many bytes.

use std::io::{Error, ErrorKind, Result};

use bytes::Buf;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Writes a frame; what buffers has to be flushed.
pub(crate) async fn write(
    stream: &mut (impl AsyncWrite + Unpin + Send),
    bytes: &[u8],
) -> Result<()> {
    let length = u32::try_from(bytes.len())
        .map_err(Error::other)?
        .to_le_bytes();
    // In one go: a length that travels alone is a packet of its own.
    let mut frame = Buf::chain(&length[..], bytes);
    stream.write_all_buf(&mut frame).await
}

/// Reads a frame of at most `limit` bytes; a longer one is [`ErrorKind::InvalidData`].
pub(crate) async fn read(
    stream: &mut (impl AsyncRead + Unpin + Send),
    limit: usize,
) -> Result<Vec<u8>> {
    let length = stream.read_u32_le().await? as usize;
    if length > limit {
        let message = format!("a frame of {length} bytes; at most {limit} are accepted");
        return Err(Error::new(ErrorKind::InvalidData, message));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}
