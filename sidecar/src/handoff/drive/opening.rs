//! The beginning of a decode leg's stream, until it says anything.
//!
//! An engine that cannot fetch what was handed over answers a stream with 200 all the same: the head is on its way before
//! the cache is. vLLM says so in an error event, after the events that begin a stream in chat and messages, and breaks off
//! after them in responses. As long as no output has come, the request can still be served without what was handed over.

use bytes::Bytes;
use memchr::memchr;
use serde_json::Value;

/// Keeps the beginning of a stream until its first output.
#[derive(Debug, Default)]
pub(super) struct Opening {
    held: Vec<u8>,
    /// Bytes of it that were looked at.
    seen: usize,
}

/// What a beginning turns out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// Nothing yet.
    No,
    /// The answer.
    Yes,
    /// The worker's word that it failed.
    Failed(String),
}

/// Longer beginnings are passed on unseen.
const MAX_BYTES: usize = 256 << 10;

impl Opening {
    /// Takes in the next piece.
    pub(super) fn feed(&mut self, piece: &Bytes) -> Opened {
        self.held.extend_from_slice(piece);
        while let Some(length) = memchr(b'\n', &self.held[self.seen..]) {
            let line = &self.held[self.seen..self.seen + length];
            self.seen += length + 1;
            match read(line) {
                Said::Nothing => {}
                Said::Output => return Opened::Yes,
                Said::Error(why) => return Opened::Failed(why),
            }
        }
        if self.held.len() > MAX_BYTES {
            return Opened::Yes;
        }
        Opened::No
    }

    /// Tells whether nothing of the stream has come.
    pub(super) const fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Gives out what was kept, if there is anything.
    pub(super) fn rest(self) -> Option<Bytes> {
        (!self.held.is_empty()).then(|| self.held.into())
    }
}

/// What a line of a stream says.
enum Said {
    Nothing,
    Output,
    Error(String),
}

fn read(line: &[u8]) -> Said {
    let Some(data) = line.strip_prefix(b"data:") else {
        return Said::Nothing;
    };
    // Anything else, `[DONE]` among it, is for the client to make sense of.
    let Ok(event) = serde_json::from_slice::<Value>(data) else {
        return Said::Output;
    };
    if let Some(why) = failure(&event) {
        return Said::Error(why);
    }
    if begins(&event) {
        Said::Nothing
    } else {
        Said::Output
    }
}

/// Returns what an event says of a failure, if that is what it says.
fn failure(event: &Value) -> Option<String> {
    let places = ["/error", "/response/error"];
    let mut found = places.iter().filter_map(|place| event.pointer(place));
    let error = found.find(|value| !value.is_null())?;
    let message = error.get("message").and_then(Value::as_str);
    Some(message.map_or_else(|| error.to_string(), str::to_owned))
}

/// Tells whether an event only begins a stream.
fn begins(event: &Value) -> bool {
    if let Some(kind) = event.get("type").and_then(Value::as_str) {
        return BEGINNINGS.contains(&kind);
    }
    let choices = event.get("choices").and_then(Value::as_array);
    choices.is_some_and(|choices| choices.iter().all(is_role_alone))
}

/// Events of messages and responses that hold no output.
const BEGINNINGS: [&str; 8] = [
    "message_start",
    "content_block_start",
    "ping",
    "response.created",
    "response.in_progress",
    "response.queued",
    "response.output_item.added",
    "response.content_part.added",
];

/// Tells whether a chat's choice names its role and nothing else.
fn is_role_alone(choice: &Value) -> bool {
    let is_said = |value: &Value| !value.is_null() && value.as_str() != Some("");
    let delta = choice.get("delta").and_then(Value::as_object);
    delta.is_some_and(|delta| {
        let mut fields = delta.iter().filter(|(name, _)| *name != "role");
        !fields.any(|(_, value)| is_said(value))
    }) && choice.get("finish_reason").is_none_or(Value::is_null)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handoff::recorded;

    const ERROR: &str = r#"data: {"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}"#;

    /// Feeds a stream byte by byte; returns what it turned out to be and after how many lines.
    fn open(stream: &str) -> (Opened, usize) {
        let mut opening = Opening::default();
        for (at, byte) in stream.bytes().enumerate() {
            let opened = opening.feed(&Bytes::from(vec![byte]));
            if opened != Opened::No {
                let kept = opening.rest().unwrap();
                assert_eq!(kept, stream.as_bytes()[..=at]);
                return (opened, stream[..=at].matches('\n').count());
            }
        }
        (Opened::No, 0)
    }

    #[test]
    fn a_worker_that_could_not_fetch_says_so_before_its_output() {
        let failed = Opened::Failed("Internal server error".to_owned());
        // As vLLM 0.32.0 answers when the prefill worker is gone; completions, chat and messages.
        assert_eq!(open(&format!("{ERROR}\n\n")), (failed.clone(), 1));
        let role = r#"data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#;
        assert_eq!(open(&format!("{role}\n\n{ERROR}\n\n")), (failed, 3));
        let message = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"content\":[]}}\n\n\
            event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"internal_error\",\"message\":\"no\"}}\n\n";
        assert_eq!(open(message), (Opened::Failed("no".to_owned()), 5));
        let response = "data: {\"type\":\"response.created\",\"response\":{\"error\":null}}\r\n\
            data: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"x\"}}}\r\n";
        assert_eq!(
            open(response),
            (Opened::Failed(r#"{"code":"x"}"#.to_owned()), 2)
        );
    }

    #[test]
    fn recorded_streams_open_or_fail() {
        for case in recorded() {
            let text = |name: &str| Bytes::from(case[name].as_str().unwrap().to_owned());
            assert_eq!(Opening::default().feed(&text("decode_stream")), Opened::Yes);
            let failed = Opening::default().feed(&text("failed_stream"));
            match case["path"].as_str() {
                // It breaks off there.
                Some("/v1/responses") => assert_eq!(failed, Opened::No),
                _ => assert!(matches!(failed, Opened::Failed(_)), "{failed:?}"),
            }
        }
    }

    #[test]
    fn the_first_output_opens_a_stream() {
        for stream in [
            "data: {\"choices\":[{\"text\":\" w1\"}]}\n",
            "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"stop\"}]}\n",
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"a\"}}]}\n",
            "data: {\"choices\":[{\"delta\":{\"tool_calls\":[]}}]}\n",
            "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n",
            "data: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"a\"}}\n",
            "data: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n",
            "data: [DONE]\n",
            "data: not json\n",
            "data: {}\n",
        ] {
            assert_eq!(open(stream), (Opened::Yes, 1), "{stream}");
        }
    }

    #[test]
    fn beginnings_are_kept_and_given_out_at_the_end() {
        let mut opening = Opening::default();
        assert!(opening.is_empty());
        let stream = ": comment\n\ndata: {\"type\":\"ping\"}\n\ndata: {\"type\":\"response.in_progress\"}\n\ndata: {\"choi";
        assert_eq!(opening.feed(&Bytes::from(stream)), Opened::No);
        assert!(!opening.is_empty());
        assert_eq!(opening.rest().unwrap(), stream);
        assert_eq!(Opening::default().rest(), None);
    }

    #[test]
    fn what_never_says_anything_passes() {
        let mut opening = Opening::default();
        let piece = Bytes::from(vec![b'x'; MAX_BYTES]);
        assert_eq!(opening.feed(&piece), Opened::No);
        assert_eq!(opening.feed(&piece), Opened::Yes);
    }
}
