//! Engine encodings to [`EventBatch`].
//!
//! Every vLLM from 0.9 and every SGLang from 0.4.6 is decoded by what stands in the payload, never by a configured
//! version: the batch is an array `[seconds, events, rank, ...]` of two or more elements, each event an array (tag first,
//! fields by position) or a map (`type` and named fields, in any order). Unknown fields, keys and positions are passed
//! over.
//!
//! An event that is not understood is skipped alone and counted by [`SkipReason`](super::SkipReason). A payload whose
//! msgpack structure is broken anywhere (truncated, a length that lies, the reserved byte, bytes behind the batch) is
//! refused whole: what seems to stand before the break cannot be trusted either.
//!
//! Memory is bounded by the payload: no length is believed before that many bytes are there, and nothing recurses.

mod engine;
mod error;
mod reader;
#[cfg(test)]
mod tests;

pub use error::DecodeError;

use super::EventBatch;
use engine::Fault;
use error::Problem;
use reader::{Reader, Value};

/// Largest payload that is looked at, in bytes.
///
/// A store of 131,072 tokens in blocks of 16 takes 0.6 MB; one step that evicts 7 million blocks takes 63 MB.
pub const MAX_PAYLOAD_BYTES: usize = 64 << 20;

/// Decodes one message payload. Time and memory are linear in its length.
///
/// A time that is not finite reads as 0; a rank that is no 64-bit integer as none. Elements behind the rank are passed
/// over.
///
/// # Errors
/// When the payload is not exactly one msgpack value of the batch's shape, or exceeds [`MAX_PAYLOAD_BYTES`].
///
/// # Examples
/// ```
/// use kvlane::event::{KvEvent, wire::decode_batch};
///
/// // [1.5, [["AllBlocksCleared"]], 0]
/// let payload = b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x91\x91\xb0AllBlocksCleared\0";
/// let batch = decode_batch(payload)?;
/// assert_eq!((batch.ts, batch.dp_rank), (1.5, Some(0)));
/// assert_eq!(batch.events, [KvEvent::Cleared]);
/// # Ok::<_, kvlane::event::wire::DecodeError>(())
/// ```
pub fn decode_batch(payload: &[u8]) -> Result<EventBatch, DecodeError> {
    if payload.len() > MAX_PAYLOAD_BYTES {
        return Err(DecodeError::new(0, Problem::TooLarge(payload.len())));
    }
    let mut reader = Reader::new(payload);
    let not_a_batch = reader.error(Problem::NotABatch);
    let Value::Array(elements @ 2..) = reader.value()? else {
        return Err(not_a_batch);
    };
    let mut batch = EventBatch {
        ts: seconds(&mut reader)?,
        ..EventBatch::default()
    };
    decode_events(&mut reader, &mut batch)?;
    if elements > 2 {
        batch.dp_rank = rank(&mut reader)?;
    }
    for _ in 3..elements {
        reader.skip()?;
    }
    if reader.left() > 0 {
        return Err(reader.error(Problem::Trailing));
    }
    Ok(batch)
}

fn seconds(reader: &mut Reader<'_>) -> Result<f64, DecodeError> {
    let not_a_batch = reader.error(Problem::NotABatch);
    #[expect(
        clippy::cast_precision_loss,
        reason = "a whole number of seconds is far below 2^53"
    )]
    let seconds = match reader.value()? {
        Value::Float(seconds) => seconds,
        Value::Unsigned(seconds) => seconds as f64,
        Value::Negative(seconds) => seconds as f64,
        _ => return Err(not_a_batch),
    };
    Ok(if seconds.is_finite() { seconds } else { 0.0 })
}

fn decode_events(reader: &mut Reader<'_>, batch: &mut EventBatch) -> Result<(), DecodeError> {
    let not_a_batch = reader.error(Problem::NotABatch);
    let Value::Array(count) = reader.value()? else {
        return Err(not_a_batch);
    };
    batch
        .events
        .reserve(count.min(reader.left() / engine::MIN_EVENT_BYTES));
    for _ in 0..count {
        let start = *reader;
        match engine::decode_event(reader) {
            Ok(event) => batch.events.push(event),
            Err(Fault::Event(reason)) => {
                *batch.skipped.entry(reason).or_default() += 1;
                *reader = start;
                reader.skip()?;
            }
            Err(Fault::Structure(error)) => return Err(error),
        }
    }
    Ok(())
}

fn rank(reader: &mut Reader<'_>) -> Result<Option<i64>, DecodeError> {
    let mut ahead = *reader;
    let rank = match ahead.value()? {
        Value::Unsigned(rank) => i64::try_from(rank).ok(),
        Value::Negative(rank) => Some(rank),
        _ => None,
    };
    reader.skip()?;
    Ok(rank)
}

/// Says whether `bytes` are exactly one well-formed value.
pub(super) fn is_one_value(bytes: &[u8]) -> bool {
    let mut reader = Reader::new(bytes);
    reader.skip().is_ok() && reader.left() == 0
}
