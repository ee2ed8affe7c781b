//! Why a payload is no event batch.

use std::fmt;

use super::MAX_PAYLOAD_BYTES;
use crate::event::SkipReason;

/// A payload that is no event batch; nothing of it may be applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeError {
    offset: usize,
    problem: Problem,
}

/// What is wrong at the offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Problem {
    /// The payload has this many bytes, above the limit.
    TooLarge(usize),
    /// A value goes on behind the end of the payload.
    Truncated,
    /// An array or map claims more elements than bytes are left.
    Length(usize),
    /// The one byte that begins no value (0xc1).
    Reserved,
    /// The outermost value is not `[seconds, events, ...]`.
    NotABatch,
    /// Bytes follow the batch.
    Trailing,
}

impl DecodeError {
    pub(super) const fn new(offset: usize, problem: Problem) -> Self {
        Self { offset, problem }
    }

    /// Returns where in the payload decoding stopped, in bytes.
    #[must_use]
    pub const fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the reason to count the batch under: always [`SkipReason::Undecodable`].
    #[must_use]
    pub const fn reason(&self) -> SkipReason {
        SkipReason::Undecodable
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event payload at byte {}: ", self.offset)?;
        match self.problem {
            Problem::TooLarge(bytes) => {
                write!(f, "{bytes} bytes, at most {MAX_PAYLOAD_BYTES} are accepted")
            }
            Problem::Truncated => f.write_str("ends inside a value"),
            Problem::Length(elements) => {
                write!(f, "claims {elements} elements, more than the bytes left")
            }
            Problem::Reserved => f.write_str("0xc1 begins no msgpack value"),
            Problem::NotABatch => f.write_str(
                "not a batch, which is an array of seconds, an array of events, and more",
            ),
            Problem::Trailing => {
                f.write_str("bytes follow the batch, exactly one value is accepted")
            }
        }
    }
}

impl std::error::Error for DecodeError {}
