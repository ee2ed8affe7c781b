//! What one ZeroMQ message of an engine is: a live batch, a replayed one, the end of a replay, or nothing usable.

use std::ops::Deref;

/// Sequence that ends a replay answer; never the number of a batch.
const END_OF_REPLAY: u64 = u64::MAX;

/// Most parts that any message of the protocol has; further ones need not be kept to see that a message is bad.
pub(super) const MAX_PARTS: usize = 4;

/// One batch of a stream, still encoded.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BatchFrame<'a> {
    pub(super) sequence: u64,
    pub(super) payload: &'a [u8],
}

/// One message of a replay answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReplayFrame<'a> {
    Batch(BatchFrame<'a>),
    End,
}

/// Why a message was passed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadFrame {
    Parts,
    Sequence,
    Delimiter,
    TooLarge,
    /// A well-formed batch under another topic that merely begins like ours.
    OtherTopic,
}

/// Reads `[topic, sequence, payload]`. An empty `topic` accepts every topic; any other must match whole, because the
/// subscription filter only compares a prefix.
pub(super) fn parse_live<'a, P: Deref<Target = [u8]>>(
    parts: &'a [P],
    topic: &[u8],
    max_payload_bytes: usize,
) -> Result<BatchFrame<'a>, BadFrame> {
    let [found, sequence, payload] = parts else {
        return Err(BadFrame::Parts);
    };
    let batch = batch(sequence, payload, max_payload_bytes)?;
    if batch.sequence == END_OF_REPLAY {
        return Err(BadFrame::Sequence);
    }
    if !topic.is_empty() && **found != *topic {
        return Err(BadFrame::OtherTopic);
    }
    Ok(batch)
}

/// Reads `["", sequence, payload]` or `["", topic, sequence, payload]`; publishers of both kinds are in the field.
pub(super) fn parse_replay<P: Deref<Target = [u8]>>(
    parts: &[P],
    max_payload_bytes: usize,
) -> Result<ReplayFrame<'_>, BadFrame> {
    let ([delimiter, sequence, payload] | [delimiter, _, sequence, payload]) = parts else {
        return Err(BadFrame::Parts);
    };
    if !delimiter.is_empty() {
        return Err(BadFrame::Delimiter);
    }
    let batch = batch(sequence, payload, max_payload_bytes)?;
    if batch.sequence != END_OF_REPLAY {
        return Ok(ReplayFrame::Batch(batch));
    }
    if batch.payload.is_empty() {
        Ok(ReplayFrame::End)
    } else {
        Err(BadFrame::Sequence)
    }
}

fn batch<'a>(
    sequence: &[u8],
    payload: &'a [u8],
    max_payload_bytes: usize,
) -> Result<BatchFrame<'a>, BadFrame> {
    let sequence = sequence.try_into().map_err(|_| BadFrame::Sequence)?;
    if payload.len() > max_payload_bytes {
        return Err(BadFrame::TooLarge);
    }
    Ok(BatchFrame {
        sequence: u64::from_be_bytes(sequence),
        payload,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEVEN: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 7];

    fn parts(list: &[&[u8]]) -> Vec<Vec<u8>> {
        list.iter().map(|part| part.to_vec()).collect()
    }

    #[test]
    fn a_live_message_has_three_parts() {
        let good = parts(&[b"kv", &SEVEN, b"x"]);
        let batch = parse_live(&good, b"", 8).unwrap();
        assert_eq!((batch.sequence, batch.payload), (7, b"x".as_slice()));
        for bad in [
            parts(&[b"x"]),
            parts(&[&SEVEN, b"x"]),
            parts(&[b"", b"", &SEVEN, b"x"]),
            parts(&[]),
        ] {
            assert_eq!(parse_live(&bad, b"", 8), Err(BadFrame::Parts));
        }
    }

    #[test]
    fn a_sequence_is_eight_bytes_and_not_the_end_marker() {
        for sequence in [&SEVEN[..7], &[0; 9], &[], &[0xFF; 8]] {
            let message = parts(&[b"", sequence, b"x"]);
            assert_eq!(parse_live(&message, b"", 8), Err(BadFrame::Sequence));
        }
    }

    #[test]
    fn a_configured_topic_must_match_whole() {
        let message = parts(&[b"kv@pod-10", &SEVEN, b"x"]);
        assert_eq!(
            parse_live(&message, b"kv@pod-1", 8),
            Err(BadFrame::OtherTopic)
        );
        assert!(parse_live(&message, b"kv@pod-10", 8).is_ok());
    }

    #[test]
    fn a_payload_over_the_limit_is_refused() {
        let message = parts(&[b"", &SEVEN, b"123456789"]);
        assert_eq!(parse_live(&message, b"", 8), Err(BadFrame::TooLarge));
        assert!(parse_live(&message, b"", 9).is_ok());
    }

    #[test]
    fn both_replay_layouts_and_their_end_markers_are_read() {
        let batch = |payload| {
            Ok(ReplayFrame::Batch(BatchFrame {
                sequence: 7,
                payload,
            }))
        };
        let old = parts(&[b"", &SEVEN, b"x"]);
        let new = parts(&[b"", b"kv", &SEVEN, b"x"]);
        assert_eq!(parse_replay(&old, 8), batch(b"x"));
        assert_eq!(parse_replay(&new, 8), batch(b"x"));
        let old = parts(&[b"", &[0xFF; 8], b""]);
        let new = parts(&[b"", b"", &[0xFF; 8], b""]);
        assert_eq!(parse_replay(&old, 8), Ok(ReplayFrame::End));
        assert_eq!(parse_replay(&new, 8), Ok(ReplayFrame::End));
    }

    #[test]
    fn other_replay_messages_are_bad() {
        for (message, why) in [
            (parts(&[b"", &SEVEN]), BadFrame::Parts),
            (parts(&[b"", b"", b"", &SEVEN, b"x"]), BadFrame::Parts),
            (parts(&[b"kv", &SEVEN, b"x"]), BadFrame::Delimiter),
            (parts(&[b"", &SEVEN[..7], b"x"]), BadFrame::Sequence),
            (parts(&[b"", &[0xFF; 8], b"x"]), BadFrame::Sequence),
            (parts(&[b"", &SEVEN, b"123456789"]), BadFrame::TooLarge),
        ] {
            assert_eq!(parse_replay(&message, 8), Err(why));
        }
    }
}
