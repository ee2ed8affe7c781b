//! Answers as the client should see them.
//!
//! Cached tokens are those of the prefill worker: to a decode worker everything it has fetched was cached. And what a worker
//! says of where its cache lies is for routers alone.

use memchr::{memchr, memmem};
use serde_json::{Map, Value, json};

/// Returns the cached tokens that a prefill leg's answer reports, if it does.
#[must_use]
pub fn prefill_cached_tokens(reply: &Value) -> Option<u64> {
    let usage = reply.get("usage");
    let reported = DETAILS
        .iter()
        .find_map(|name| usage?.get(name)?.get("cached_tokens")?.as_u64())
        .or_else(|| usage?.get(READ_TOKENS)?.as_u64());
    // vLLM from 0.31 says it there as well, also when it is not asked for details.
    let own = || {
        reply
            .get("kv_transfer_params")?
            .get("remote_prefill_cached_tokens")?
            .as_u64()
    };
    reported.or_else(own)
}

/// Replaces the cached tokens in an answer, or in one event of a stream, by `cached`; by null where they are not known.
/// Transfer parameters become null. Tells whether there was anything to change.
pub fn correct_answer(answer: &mut Value, cached: Option<u64>) -> bool {
    let Value::Object(fields) = answer else {
        return false;
    };
    // Chat and completions have it at the top; events of responses and messages one level below.
    let mut changed = correct_in(fields, cached);
    for name in ["response", "message"] {
        if let Some(Value::Object(nested)) = fields.get_mut(name) {
            changed |= correct_in(nested, cached);
        }
    }
    changed
}

/// Removes what opens a worker's cache; vLLM writes null where there is nothing, and so do we.
fn hide(fields: &mut Map<String, Value>) -> bool {
    let mut changed = false;
    for name in PARAMETERS {
        if let Some(value) = fields.get_mut(name).filter(|value| !value.is_null()) {
            *value = Value::Null;
            changed = true;
        }
    }
    changed
}

const PARAMETERS: [&str; 2] = ["kv_transfer_params", "ec_transfer_params"];

const DETAILS: [&str; 2] = ["prompt_tokens_details", "input_tokens_details"];
const READ_TOKENS: &str = "cache_read_input_tokens";

fn correct_in(fields: &mut Map<String, Value>, cached: Option<u64>) -> bool {
    let mut changed = hide(fields);
    let Some(Value::Object(usage)) = fields.get_mut("usage") else {
        return changed;
    };
    changed |= correct_messages(usage, cached);
    let prompt = ["prompt_tokens", "input_tokens"]
        .iter()
        .find_map(|name| usage.get(*name)?.as_u64());
    let cached = cached.map(|cached| prompt.map_or(cached, |prompt| cached.min(prompt)));
    for name in DETAILS {
        let details = usage.get_mut(name);
        if let Some(value) = details.and_then(|details| details.get_mut("cached_tokens")) {
            *value = json!(cached);
            changed = true;
        }
    }
    changed
}

/// Messages count apart what was cached: `input_tokens` is the rest.
fn correct_messages(usage: &mut Map<String, Value>, cached: Option<u64>) -> bool {
    let count = |name: &str| usage.get(name).and_then(Value::as_u64);
    let Some(read) = count(READ_TOKENS) else {
        return false;
    };
    if let Some(rest) = count("input_tokens") {
        let all = rest.saturating_add(read);
        let cached = cached.map(|cached| cached.min(all));
        usage.insert("input_tokens".to_owned(), json!(all - cached.unwrap_or(0)));
        usage.insert(READ_TOKENS.to_owned(), json!(cached));
    } else {
        usage.insert(READ_TOKENS.to_owned(), json!(cached));
    }
    true
}

/// Corrects an event stream as it passes. Lines without anything to correct pass byte for byte.
#[derive(Debug)]
pub struct AnswerCorrector {
    cached: Option<u64>,
    /// A line without its end so far.
    line: Vec<u8>,
    /// The line is too long to be looked at; the rest of it passes.
    passing: bool,
}

/// Longest line that is looked at. Usage comes at the end of a stream in a line of some hundred bytes, but the last event of
/// responses holds the whole answer.
const MAX_LINE: usize = 4 << 20;

impl AnswerCorrector {
    /// Creates a corrector to this number of cached tokens; to null where it is not known.
    #[must_use]
    pub const fn new(cached: Option<u64>) -> Self {
        Self {
            cached,
            line: Vec::new(),
            passing: false,
        }
    }

    /// Takes in the number when it becomes known after the stream began.
    pub const fn learn(&mut self, cached: Option<u64>) {
        self.cached = cached;
    }

    /// Takes the next piece and appends what can go on.
    pub fn feed(&mut self, mut piece: &[u8], out: &mut Vec<u8>) {
        while let Some(end) = memchr(b'\n', piece) {
            let (line, rest) = piece.split_at(end + 1);
            self.end_line(line, out);
            piece = rest;
        }
        if self.passing {
            out.extend_from_slice(piece);
        } else {
            self.line.extend_from_slice(piece);
            if self.line.len() > MAX_LINE {
                out.append(&mut self.line);
                self.passing = true;
            }
        }
    }

    /// Appends what is left when the stream has ended.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        self.end_line(&[], out);
    }

    fn end_line(&mut self, end: &[u8], out: &mut Vec<u8>) {
        if self.passing {
            self.passing = false;
            out.extend_from_slice(end);
        } else if self.line.is_empty() {
            // Most lines come whole and need no copy.
            correct_line(end, self.cached, out);
        } else {
            self.line.extend_from_slice(end);
            correct_line(&self.line, self.cached, out);
            self.line.clear();
        }
    }
}

fn correct_line(line: &[u8], cached: Option<u64>, out: &mut Vec<u8>) {
    match corrected(line, cached) {
        Some(text) => out.extend_from_slice(&text),
        None => out.extend_from_slice(line),
    }
}

/// Returns the line corrected, if there is anything to correct.
fn corrected(line: &[u8], cached: Option<u64>) -> Option<Vec<u8>> {
    let data = line.strip_prefix(b"data:")?;
    memmem::find(data, b"\"usage\"").or_else(|| memmem::find(data, b"_transfer_params\""))?;
    let mut event: Value = serde_json::from_slice(data).ok()?;
    if !correct_answer(&mut event, cached) {
        return None;
    }
    let mut text = b"data: ".to_vec();
    serde_json::to_writer(&mut text, &event).ok()?;
    let end = data
        .iter()
        .rev()
        .take_while(|byte| byte.is_ascii_whitespace());
    text.extend_from_slice(&data[data.len() - end.count()..]);
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::super::recorded;
    use super::*;

    const STREAM: &str = concat!(
        "data: {\"choices\":[{\"text\":\"a \\\"usage\\\":{\"}],\"usage\":null}\n\n",
        ": comment\r\n",
        "data:  {\"choices\":[],  \"usage\":{\"prompt_tokens\":48,\"prompt_tokens_details\":{\"cached_tokens\":47}}}\r\n\r\n",
        "data: [DONE]\n\n"
    );
    const CORRECTED: &str = concat!(
        "data: {\"choices\":[{\"text\":\"a \\\"usage\\\":{\"}],\"usage\":null}\n\n",
        ": comment\r\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":48,\"prompt_tokens_details\":{\"cached_tokens\":32}}}\r\n\r\n",
        "data: [DONE]\n\n"
    );

    fn pass(pieces: &[&[u8]]) -> String {
        let mut corrector = AnswerCorrector::new(Some(32));
        let mut out = Vec::new();
        for piece in pieces {
            corrector.feed(piece, &mut out);
        }
        corrector.finish(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn recorded_answers_are_read_and_corrected() {
        let places = [
            "/prompt_tokens_details/cached_tokens",
            "/input_tokens_details/cached_tokens",
            "/cache_read_input_tokens",
        ];
        for mut case in recorded() {
            assert_eq!(prefill_cached_tokens(&case["prefill_answer"]), Some(0));
            let answer = &mut case["decode_answer"];
            assert!(correct_answer(answer, Some(7)), "{answer}");
            let mut found = places
                .iter()
                .filter_map(|place| answer["usage"].pointer(place));
            assert_eq!(found.next(), Some(&json!(7)), "{answer}");
        }
    }

    #[test]
    fn a_stream_is_corrected_wherever_it_is_cut() {
        let bytes = STREAM.as_bytes();
        for cut in 0..=bytes.len() {
            assert_eq!(pass(&[&bytes[..cut], &bytes[cut..]]), CORRECTED, "{cut}");
        }
        let single: Vec<_> = bytes.chunks(1).collect();
        assert_eq!(pass(&single), CORRECTED);
        // Without an end of the last line.
        let unended = STREAM
            .trim_end()
            .strip_suffix("data: [DONE]")
            .unwrap()
            .trim_end();
        let expected = CORRECTED
            .trim_end()
            .strip_suffix("data: [DONE]")
            .unwrap()
            .trim_end();
        assert_eq!(pass(&[unended.as_bytes()]), expected);
    }

    #[test]
    fn a_line_without_end_passes_in_bounded_memory() {
        let mut corrector = AnswerCorrector::new(Some(1));
        let mut out = Vec::new();
        corrector.feed(b"data: {\"usage\":", &mut out);
        let piece = [b'x'; 65_536];
        for _ in 0..200 {
            corrector.feed(&piece, &mut out);
            assert!(corrector.line.capacity() <= 2 * MAX_LINE + piece.len());
        }
        assert_eq!(out.len(), 15 + 200 * 65_536);
        out.clear();
        corrector.feed(b"\n", &mut out);
        corrector.feed(STREAM.as_bytes(), &mut out);
        assert!(
            String::from_utf8(out)
                .unwrap()
                .contains("\"cached_tokens\":1")
        );
    }

    #[test]
    fn every_api_is_corrected_and_unknown_is_not_everything() {
        let details = |cached: Value| json!({"usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": cached, "audio": 1}}});
        let mut answer = details(json!(99));
        assert!(correct_answer(&mut answer, Some(64)));
        assert_eq!(answer, details(json!(64)));
        assert!(correct_answer(&mut answer, None));
        assert_eq!(answer, details(Value::Null));
        // More than the prompt holds cannot be.
        assert!(correct_answer(&mut answer, Some(7_000)));
        assert_eq!(answer, details(json!(100)));

        let mut event = json!({"type": "response.completed", "response": {"usage": {"input_tokens": 9,
            "input_tokens_details": {"cached_tokens": 9}}}});
        assert!(correct_answer(&mut event, Some(4)));
        assert_eq!(
            event["response"]["usage"]["input_tokens_details"]["cached_tokens"],
            4
        );
        // Messages: 106 tokens, of which the prefill worker had 64.
        let event = |input: Value, read: Value| {
            json!({"type": "message_start", "message": {"usage": {"input_tokens": input,
                "cache_read_input_tokens": read}}})
        };
        for (cached, input, read) in [
            (Some(64), json!(42), json!(64)),
            (Some(900), json!(0), json!(106)),
            (None, json!(106), Value::Null),
        ] {
            let mut answer = event(json!(10), json!(96));
            assert!(correct_answer(&mut answer, cached));
            assert_eq!(answer, event(input, read));
        }
        for untouched in [
            json!([]),
            json!({"usage": null}),
            json!({"usage": {"prompt_tokens_details": null}}),
        ] {
            assert!(
                !correct_answer(&mut untouched.clone(), Some(4)),
                "{untouched}"
            );
        }
    }

    #[test]
    fn where_a_cache_lies_is_not_told() {
        let parameters = json!({"remote_host": "10.0.0.7", "remote_port": 5600});
        let mut answer =
            json!({"id": "x", "kv_transfer_params": parameters, "ec_transfer_params": null});
        assert!(correct_answer(&mut answer, None));
        let hidden = json!({"id": "x", "kv_transfer_params": null, "ec_transfer_params": null});
        assert_eq!(answer, hidden);
        assert!(!correct_answer(&mut answer, None));
        let mut out = Vec::new();
        let event = format!("data: {{\"choices\":[],\"kv_transfer_params\":{parameters}}}\n\n");
        AnswerCorrector::new(None).feed(event.as_bytes(), &mut out);
        assert_eq!(
            out,
            b"data: {\"choices\":[],\"kv_transfer_params\":null}\n\n"
        );
    }

    #[test]
    fn the_prefills_number_is_found_in_its_answer() {
        let reply =
            |usage: Value, params: Value| json!({"usage": usage, "kv_transfer_params": params});
        let own = json!({"remote_prefill_cached_tokens": 96});
        let details = json!({"prompt_tokens_details": {"cached_tokens": 64}});
        let none = json!({"prompt_tokens_details": null});
        assert_eq!(
            prefill_cached_tokens(&reply(details, own.clone())),
            Some(64)
        );
        assert_eq!(prefill_cached_tokens(&reply(none.clone(), own)), Some(96));
        assert_eq!(prefill_cached_tokens(&reply(none, Value::Null)), None);
        assert_eq!(prefill_cached_tokens(&json!("text")), None);
    }
}
