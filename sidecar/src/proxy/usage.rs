//! What the proxy reads from a response on its way through: usage, events and the end marker.
//!
//! The bytes themselves are never touched. The side copy is bounded: 4 KiB after the word `"usage"`, and the first
//! 24 bytes of a line. Text produced by a model cannot fake either: inside a JSON string a quote is escaped.

use memchr::memmem;
use serde::Deserialize;

/// Token counts that an engine reported for one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: Option<u32>,
    /// Prompt tokens that the engine did not have to compute.
    pub cached_tokens: Option<u32>,
    /// Tokens produced.
    pub completion_tokens: Option<u32>,
}

/// Finds the last usage object in a body, however the body is cut.
#[derive(Debug, Default)]
pub struct UsageScanner {
    /// The end of what came before, to find a word that is cut; or what follows the word so far.
    pending: Vec<u8>,
    capturing: bool,
    found: Option<Usage>,
}

const WORD: &[u8] = b"\"usage\"";
/// Longest usage object looked at; engines' own are below 500 bytes.
const MAX_OBJECT: usize = 4096;

impl UsageScanner {
    /// Looks at the next piece.
    pub fn feed(&mut self, mut piece: &[u8]) {
        while !piece.is_empty() {
            if self.capturing {
                piece = self.capture(piece);
            } else {
                piece = self.search(piece);
            }
        }
    }

    /// Returns the last usage object seen.
    #[must_use]
    pub const fn usage(&self) -> Option<Usage> {
        self.found
    }

    /// Searches for the word; returns what follows it.
    fn search<'a>(&mut self, piece: &'a [u8]) -> &'a [u8] {
        if !self.pending.is_empty() {
            // At most 6 bytes are kept, so the seam is small.
            let kept = self.pending.len();
            let take = piece.len().min(WORD.len() - 1);
            self.pending.extend_from_slice(&piece[..take]);
            if let Some(at) = memmem::find(&self.pending, WORD) {
                let end = at + WORD.len() - kept;
                self.begin_capture();
                return &piece[end..];
            }
        }
        if let Some(at) = memmem::find(piece, WORD) {
            self.begin_capture();
            return &piece[at + WORD.len()..];
        }
        self.keep_tail(piece);
        &[]
    }

    fn begin_capture(&mut self) {
        self.pending.clear();
        self.capturing = true;
    }

    /// Keeps what may be the beginning of the word.
    fn keep_tail(&mut self, piece: &[u8]) {
        let keep = WORD.len() - 1;
        if piece.len() >= keep {
            self.pending.clear();
            self.pending.extend_from_slice(&piece[piece.len() - keep..]);
        } else {
            // `pending` already ends with this piece when there was a seam.
            if self.pending.is_empty() {
                self.pending.extend_from_slice(piece);
            }
            let excess = self.pending.len().saturating_sub(keep);
            self.pending.drain(..excess);
        }
    }

    /// Collects the object after the word; returns what follows it.
    fn capture<'a>(&mut self, piece: &'a [u8]) -> &'a [u8] {
        let mut depth = self.depth();
        for (index, &byte) in piece.iter().enumerate() {
            let began = depth > 0;
            match byte {
                b'{' => depth += 1,
                b'}' if depth > 0 => depth -= 1,
                b':' | b' ' | b'\t' | b'\r' | b'\n' => {}
                _ if !began => return self.end_capture(&piece[index..]),
                _ => {}
            }
            self.pending.push(byte);
            if self.pending.len() > MAX_OBJECT {
                return self.end_capture(&piece[index + 1..]);
            }
            if began && depth == 0 {
                self.parse();
                return self.end_capture(&piece[index + 1..]);
            }
        }
        &[]
    }

    /// Open braces so far. Strings inside a usage object hold no braces; one that does only loses that object.
    fn depth(&self) -> usize {
        self.pending.iter().fold(0_usize, |depth, byte| match byte {
            b'{' => depth + 1,
            b'}' => depth.saturating_sub(1),
            _ => depth,
        })
    }

    fn end_capture<'a>(&mut self, rest: &'a [u8]) -> &'a [u8] {
        self.pending.clear();
        self.capturing = false;
        rest
    }

    fn parse(&mut self) {
        let start = self
            .pending
            .iter()
            .position(|byte| *byte == b'{')
            .unwrap_or(0);
        if let Ok(wire) = serde_json::from_slice::<WireUsage>(&self.pending[start..]) {
            self.found = Some(wire.into());
        }
    }
}

/// The names used by chat and completions, by responses, and by messages.
#[derive(Deserialize)]
struct WireUsage {
    prompt_tokens: Option<u32>,
    input_tokens: Option<u32>,
    completion_tokens: Option<u32>,
    output_tokens: Option<u32>,
    prompt_tokens_details: Option<WireDetails>,
    input_tokens_details: Option<WireDetails>,
    cache_read_input_tokens: Option<u32>,
}

#[derive(Deserialize)]
struct WireDetails {
    cached_tokens: Option<u32>,
}

impl From<WireUsage> for Usage {
    fn from(wire: WireUsage) -> Self {
        let details = wire.prompt_tokens_details.or(wire.input_tokens_details);
        Self {
            prompt_tokens: wire.prompt_tokens.or(wire.input_tokens),
            cached_tokens: details
                .and_then(|details| details.cached_tokens)
                .or(wire.cache_read_input_tokens),
            completion_tokens: wire.completion_tokens.or(wire.output_tokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward::EventLines;

    const STREAM: &str = "data: {\"choices\":[{\"text\":\"日本 🎉 \\\"usage\\\":{\"}],\"usage\":null}\n\ndata:{\"choices\":[{\"text\":\"x\"}]}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":48,\"total_tokens\":50,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":32}}}\n\ndata: [DONE]\n\n";
    const EXPECTED: Usage = Usage {
        prompt_tokens: Some(48),
        cached_tokens: Some(32),
        completion_tokens: Some(2),
    };

    fn check(pieces: &[&[u8]]) {
        let mut scanner = UsageScanner::default();
        let mut lines = EventLines::default();
        for piece in pieces {
            scanner.feed(piece);
            lines.feed(piece);
            assert!(scanner.pending.capacity() <= 2 * MAX_OBJECT);
        }
        assert_eq!(scanner.usage(), Some(EXPECTED), "{pieces:?}");
        assert_eq!(lines.events(), 4);
        assert!(lines.ended());
    }

    #[test]
    fn usage_is_found_wherever_the_stream_is_cut() {
        for stream in [STREAM.to_owned(), STREAM.replace('\n', "\r\n")] {
            let bytes = stream.as_bytes();
            for cut in 0..=bytes.len() {
                check(&[&bytes[..cut], &bytes[cut..]]);
            }
            for size in [1, 2, 3, 5, 7] {
                check(&bytes.chunks(size).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_line_without_end_stays_capped() {
        let mut scanner = UsageScanner::default();
        let mut lines = EventLines::default();
        let piece = [b'x'; 65_536];
        scanner.feed(b"data: {\"usage\":{");
        for _ in 0..80 {
            scanner.feed(&piece); // 5 MB
            lines.feed(&piece);
        }
        assert!(scanner.pending.capacity() <= 2 * MAX_OBJECT);
        assert_eq!(
            (scanner.usage(), lines.events(), lines.ended()),
            (None, 0, false)
        );
        scanner.feed(b"\ndata: {\"usage\":{\"prompt_tokens\":7}}\n\n");
        assert_eq!(scanner.usage().unwrap().prompt_tokens, Some(7));
    }

    #[test]
    fn every_api_names_its_usage() {
        let cases: [(&str, Usage); 4] = [
            (
                r#"{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},"output_tokens":2}}"#,
                Usage {
                    prompt_tokens: Some(9),
                    cached_tokens: Some(4),
                    completion_tokens: Some(2),
                },
            ),
            (
                r#"{"usage": {"input_tokens":9,"cache_read_input_tokens":4,"output_tokens":2}}"#,
                Usage {
                    prompt_tokens: Some(9),
                    cached_tokens: Some(4),
                    completion_tokens: Some(2),
                },
            ),
            (
                r#"{"usage":{"prompt_tokens":9,"prompt_tokens_details":null}, "prompt_token_ids":[1,2,3]}"#,
                Usage {
                    prompt_tokens: Some(9),
                    ..Usage::default()
                },
            ),
            (
                r#"{"usage":{"prompt_tokens":1}} {"usage":{"prompt_tokens":2}}"#,
                Usage {
                    prompt_tokens: Some(2),
                    ..Usage::default()
                },
            ),
        ];
        for (body, expected) in cases {
            let mut scanner = UsageScanner::default();
            scanner.feed(body.as_bytes());
            assert_eq!(scanner.usage(), Some(expected), "{body}");
        }
    }
}
