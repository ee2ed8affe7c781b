//! What the legs of every protocol have in common: limits, streams, and fields that no client may send.

use std::fmt;

use kvlane::{Error, ErrorKind};
use serde_json::{Map, Value, json};

use crate::request::{Endpoint, is_handoff};

/// One request to one worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Leg {
    /// The body.
    pub body: Value,
    /// Headers beyond the client's own.
    pub headers: Vec<(&'static str, String)>,
}

/// What a protocol must know of a request and its two workers.
#[derive(Clone, Copy, Debug)]
pub struct LegContext<'a> {
    /// The request's id, the same on both legs.
    pub request_id: &'a str,
    /// Host of the prefill worker as the decode worker reaches it; an IPv6 address with brackets.
    pub prefill_host: &'a str,
    /// Port of its bootstrap service, where the protocol has one.
    pub bootstrap_port: u16,
    /// Engine id of the prefill rank, where the protocol needs it before the prefill (Mooncake).
    pub prefill_engine: Option<&'a str>,
    /// Rank on the prefill worker, and how many it has.
    pub prefill_rank: (u32, u32),
    /// Rank on the decode worker, and how many it has.
    pub decode_rank: (u32, u32),
    /// Drawn anew for each handoff: names it where the router has to.
    pub random: u128,
}

/// Whose names of fields a body is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    Vllm,
    Sglang,
}

impl LegContext<'_> {
    /// Checks that both ranks exist: an engine refuses one that does not, after the other leg has begun.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`], naming the rank.
    pub fn check_ranks(&self) -> kvlane::Result<()> {
        for (leg, (rank, ranks)) in [("prefill", self.prefill_rank), ("decode", self.decode_rank)] {
            if rank >= ranks {
                return Err(Error::new(
                    ErrorKind::InvalidRequest,
                    format!(
                        "rank {rank} of the {leg} worker is out of range: it has {ranks}, counted from 0"
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// Why a request is served on one worker whatever a plan would say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsplittable {
    /// Its API generates nothing, or is not known.
    Endpoint,
    /// Its body is not an object.
    Body,
    /// It asks for several answers, the best of several, or a beam search.
    SeveralAnswers,
    /// It holds several prompts.
    SeveralPrompts,
    /// It asks for log-probabilities of its prompt, which only the worker that computes it has, or for its echo.
    PromptOutput,
    /// What says where its output ends is nothing that an engine takes.
    End,
    /// It has so many parts that rewriting it would take too much memory.
    Parts,
}

impl fmt::Display for Unsplittable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Endpoint => "its API cannot be split",
            Self::Body => "its body is not an object",
            Self::SeveralAnswers => "it asks for several answers or a search",
            Self::SeveralPrompts => "it holds several prompts",
            Self::PromptOutput => "it asks for its prompt back",
            Self::End => "what says where its output ends will be refused",
            Self::Parts => "its body has more parts than are taken apart",
        })
    }
}

/// Tells whether a request can be split at all.
///
/// # Errors
/// [`Unsplittable`], the reason why it cannot.
pub fn check_splittable(endpoint: Endpoint, body: &Value) -> Result<(), Unsplittable> {
    if !generates(endpoint) {
        return Err(Unsplittable::Endpoint);
    }
    let fields = body.as_object().ok_or(Unsplittable::Body)?;
    let parts = || [Some(fields), sampling(fields)].into_iter().flatten();
    let several = |name: &str| {
        let is_several = |value: &Value| !value.is_null() && value.as_u64().is_none_or(|n| n > 1);
        parts().filter_map(|part| part.get(name)).any(is_several)
    };
    let set = |name: &str| {
        let is_set = |value: &Value| !matches!(value, Value::Null | Value::Bool(false));
        parts().filter_map(|part| part.get(name)).any(is_set)
    };
    if several("n") || several("best_of") || set("use_beam_search") {
        return Err(Unsplittable::SeveralAnswers);
    }
    if ["prompt", "text", "input_ids", "token_ids"]
        .iter()
        .any(|name| fields.get(*name).is_some_and(is_batch))
    {
        return Err(Unsplittable::SeveralPrompts);
    }
    let outputs = [
        "echo",
        "prompt_logprobs",
        "return_logprob",
        "return_hidden_states",
    ];
    if outputs.into_iter().any(set) {
        return Err(Unsplittable::PromptOutput);
    }
    Ok(())
}

/// Tells whether an engine will take what a prefill leg leaves out of a request; `room` is how many tokens of output its
/// context has room for, where that is known.
///
/// Such a request is refused by its decode leg alone, after the whole prompt was computed, and the prefill worker then holds a
/// cache that nobody fetches until its lease ends. One worker refuses it before it computes anything.
///
/// # Errors
/// [`Unsplittable::End`].
pub fn check_ends(body: &Value, room: Option<u64>) -> Result<(), Unsplittable> {
    let fields = body.as_object().ok_or(Unsplittable::Body)?;
    let parts = [Some(fields), sampling(fields)];
    let accepted = parts.into_iter().flatten().all(|part| {
        let streams = fields.get("stream") == Some(&Value::Bool(true));
        let limits = LIMITS.iter().filter_map(|name| part.get(*name)?.as_u64());
        let (lowest, highest) = limits.fold((u64::MAX, 0), |(lowest, highest), limit| {
            (lowest.min(limit), highest.max(limit))
        });
        let fits = room.is_none_or(|room| highest <= room);
        let mut given = part.iter().filter(|(_, value)| !value.is_null());
        fits && given.all(|(name, value)| match name.as_str() {
            name if LIMITS.contains(&name) => value.as_u64().is_some_and(|limit| limit > 0),
            "min_tokens" | "min_new_tokens" => value.as_u64().is_some_and(|least| least <= lowest),
            "n" | "best_of" => value.as_u64() == Some(1),
            "stream" | "ignore_eos" => value.is_boolean(),
            "stream_options" => value.is_object() && streams,
            "stop" | "stop_sequences" | "stop_regex" => is_text_or_texts(value),
            "stop_token_ids" => is_list_of(value, Value::is_i64),
            _ => true,
        })
    });
    accepted.then_some(()).ok_or(Unsplittable::End)
}

fn is_text_or_texts(value: &Value) -> bool {
    value.is_string() || is_list_of(value, Value::is_string)
}

fn is_list_of(value: &Value, is_one: impl Fn(&Value) -> bool) -> bool {
    value.as_array().is_some_and(|list| list.iter().all(is_one))
}

/// Removes every handoff field that a client may have sent, wherever an engine might look for one.
pub fn strip(body: &mut Value) {
    let Value::Object(fields) = body else { return };
    strip_fields(fields);
    for name in ["sampling_params", "vllm_xargs", "extra_args", "extra_body"] {
        if let Some(Value::Object(nested)) = fields.get_mut(name) {
            strip_fields(nested);
        }
    }
}

/// Returns the body of the request as the decode worker serves it alone.
#[must_use]
pub fn local_body(mut body: Value) -> Value {
    strip(&mut body);
    body
}

/// Returns the body of a prefill leg: the client's own, ended after one token and without a stream.
pub(super) fn prefill_body(dialect: Dialect, endpoint: Endpoint, body: &Value) -> Value {
    let mut body = local_body(body.clone());
    end_after_one_token(dialect, endpoint, &mut body);
    body
}

/// Lets a request end after one token, by length and by nothing else: engines hand over what ended so.
///
/// What may be part of the prompt stays (tools, `response_format`, chat template arguments): both legs must see the same
/// tokens.
pub(super) fn end_after_one_token(dialect: Dialect, endpoint: Endpoint, body: &mut Value) {
    let Value::Object(fields) = body else { return };
    fields.remove("stream_options");
    fields.insert("stream".to_owned(), json!(false));
    limit(fields);
    if let Some(limit_name) = limit_name(endpoint) {
        fields.insert(limit_name.to_owned(), json!(1));
    }
    if takes_ignore_eos(endpoint) {
        fields.insert("ignore_eos".to_owned(), json!(true));
    }
    if endpoint == Endpoint::Generate {
        let sampling = fields.entry("sampling_params").or_insert_with(|| json!({}));
        if let Value::Object(sampling) = sampling {
            limit(sampling);
            // Each refuses or ignores the other's name.
            let name = match dialect {
                Dialect::Vllm => "max_tokens",
                Dialect::Sglang => "max_new_tokens",
            };
            sampling.insert(name.to_owned(), json!(1));
            sampling.insert("ignore_eos".to_owned(), json!(true));
        }
    }
}

/// How each API names the most tokens of an output.
const LIMITS: [&str; 4] = [
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
];

/// Sets the limits that are there to one token and removes other ends.
fn limit(fields: &mut Map<String, Value>) {
    for name in LIMITS {
        if let Some(value) = fields.get_mut(name) {
            *value = json!(1);
        }
    }
    for name in [
        "min_tokens",
        "min_new_tokens",
        "n",
        "best_of",
        "stop",
        "stop_sequences",
        "stop_token_ids",
        "stop_regex",
    ] {
        fields.remove(name);
    }
}

/// Returns the limit that must be there: without one an engine would go on.
const fn limit_name(endpoint: Endpoint) -> Option<&'static str> {
    match endpoint {
        Endpoint::Chat | Endpoint::Completions | Endpoint::Messages => Some("max_tokens"),
        Endpoint::Responses => Some("max_output_tokens"),
        Endpoint::Generate | Endpoint::Embeddings | Endpoint::Other => None,
    }
}

/// The other APIs have no such field.
const fn takes_ignore_eos(endpoint: Endpoint) -> bool {
    matches!(endpoint, Endpoint::Chat | Endpoint::Completions)
}

const fn generates(endpoint: Endpoint) -> bool {
    !matches!(endpoint, Endpoint::Embeddings | Endpoint::Other)
}

fn sampling(fields: &Map<String, Value>) -> Option<&Map<String, Value>> {
    fields.get("sampling_params")?.as_object()
}

/// Tells whether a prompt field holds several prompts: a list of texts or of lists. One in a list counts as well, since its
/// answer comes in the shape of several.
fn is_batch(value: &Value) -> bool {
    let is_prompt = |first: &Value| first.is_string() || first.is_array() || first.is_object();
    value
        .as_array()
        .is_some_and(|list| list.first().is_some_and(is_prompt))
}

fn strip_fields(fields: &mut Map<String, Value>) {
    let routing = [
        "routed_dp_rank",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
    ];
    fields.retain(|name, _| !is_handoff(name) && !routing.contains(&name.as_str()));
}

/// Writes a leg to vLLM: transfer parameters at the top of the body, the rank in a header.
pub(super) fn vllm_leg(mut body: Value, parameters: Value, rank: (u32, u32)) -> Leg {
    set(&mut body, "kv_transfer_params", parameters);
    Leg {
        body,
        headers: rank_header(rank),
    }
}

/// Returns the header by which vLLM is told a rank; none where there is one rank.
fn rank_header((rank, ranks): (u32, u32)) -> Vec<(&'static str, String)> {
    if ranks > 1 {
        vec![("x-data-parallel-rank", rank.to_string())]
    } else {
        Vec::new()
    }
}

/// Sets a top-level field of a body that is an object.
pub(super) fn set(body: &mut Value, name: &str, value: Value) {
    if let Value::Object(fields) = body {
        fields.insert(name.to_owned(), value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_api_ends_after_one_token() {
        let cases = [
            (
                Endpoint::Chat,
                json!({"messages": [], "max_tokens": 50, "max_completion_tokens": 60, "min_tokens": 9, "stream": true,
                       "stream_options": {"include_usage": true}, "stop": ["a"], "stop_token_ids": [5], "n": 1,
                       "response_format": {"type": "json_object"}, "tools": [1]}),
                json!({"messages": [], "max_tokens": 1, "max_completion_tokens": 1, "stream": false,
                       "response_format": {"type": "json_object"}, "tools": [1], "ignore_eos": true}),
            ),
            (
                Endpoint::Completions,
                json!({"prompt": "x"}),
                json!({"prompt": "x", "stream": false, "max_tokens": 1, "ignore_eos": true}),
            ),
            (
                Endpoint::Responses,
                json!({"input": "x", "max_output_tokens": 900, "stream": true}),
                json!({"input": "x", "max_output_tokens": 1, "stream": false}),
            ),
            (
                Endpoint::Messages,
                json!({"messages": [], "max_tokens": 900, "stop_sequences": ["x"]}),
                json!({"messages": [], "max_tokens": 1, "stream": false}),
            ),
            (
                Endpoint::Generate,
                json!({"token_ids": [1], "sampling_params": {"max_tokens": 5, "min_tokens": 2, "n": 1, "top_p": 0.5}}),
                json!({"token_ids": [1], "sampling_params": {"max_tokens": 1, "top_p": 0.5, "ignore_eos": true},
                       "stream": false}),
            ),
        ];
        for (endpoint, body, expected) in cases {
            let prefill = prefill_body(Dialect::Vllm, endpoint, &body);
            assert_eq!(prefill, expected, "{endpoint:?}");
        }
        let generate = json!({"input_ids": [1], "sampling_params": {"max_new_tokens": 9}});
        let prefill = prefill_body(Dialect::Sglang, Endpoint::Generate, &generate);
        let expected = json!({"max_new_tokens": 1, "ignore_eos": true});
        assert_eq!(prefill["sampling_params"], expected);
    }

    #[test]
    fn what_a_client_sends_of_a_handoff_is_removed_everywhere() {
        let mut body = json!({
            "prompt": "x", "kv_transfer_params": {"do_remote_prefill": true}, "bootstrap_room": 1, "bootstrap_host": "h",
            "bootstrap_port": 1, "ec_transfer_params": {}, "routed_dp_rank": 1, "data_parallel_rank": 1,
            "disagg_prefill_dp_rank": 2, "extra_body": {"kv_transfer_params": {}, "kept": 1},
            "vllm_xargs": {"kv_transfer_params": "{}"}, "sampling_params": {"extra_args": 1, "bootstrap_room": 2}
        });
        strip(&mut body);
        let left = json!({
            "prompt": "x", "extra_body": {"kept": 1}, "vllm_xargs": {}, "sampling_params": {"extra_args": 1}
        });
        assert_eq!(body, left);
        assert_eq!(local_body(json!("text")), "text");
    }

    #[test]
    fn a_rank_that_does_not_exist_is_refused() {
        let context = |prefill_rank, decode_rank| LegContext {
            request_id: "rid",
            prefill_host: "p",
            bootstrap_port: 0,
            prefill_engine: None,
            prefill_rank,
            decode_rank,
            random: 0,
        };
        assert!(context((0, 1), (3, 4)).check_ranks().is_ok());
        for (prefill, decode, name) in [((1, 1), (0, 1), "prefill"), ((0, 1), (4, 4), "decode")] {
            let error = context(prefill, decode).check_ranks().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidRequest);
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn what_cannot_be_split_is_told_with_its_reason() {
        let whole = [json!(null), json!(1)];
        for value in whole {
            let body = json!({"prompt": "x", "n": value, "best_of": value});
            assert_eq!(
                check_splittable(Endpoint::Completions, &body),
                Ok(()),
                "{body}"
            );
        }
        let cases = [
            (
                Endpoint::Embeddings,
                json!({"input": "x"}),
                Unsplittable::Endpoint,
            ),
            (Endpoint::Chat, json!([]), Unsplittable::Body),
            (
                Endpoint::Chat,
                json!({"n": 2}),
                Unsplittable::SeveralAnswers,
            ),
            (
                Endpoint::Chat,
                json!({"n": "2"}),
                Unsplittable::SeveralAnswers,
            ),
            (
                Endpoint::Completions,
                json!({"best_of": 3}),
                Unsplittable::SeveralAnswers,
            ),
            (
                Endpoint::Chat,
                json!({"use_beam_search": true}),
                Unsplittable::SeveralAnswers,
            ),
            (
                Endpoint::Generate,
                json!({"token_ids": [1], "sampling_params": {"n": 4}}),
                Unsplittable::SeveralAnswers,
            ),
            (
                Endpoint::Completions,
                json!({"prompt": ["a", "b"]}),
                Unsplittable::SeveralPrompts,
            ),
            (
                Endpoint::Completions,
                json!({"prompt": [[1, 2]]}),
                Unsplittable::SeveralPrompts,
            ),
            (
                Endpoint::Completions,
                json!({"prompt": "a", "echo": true}),
                Unsplittable::PromptOutput,
            ),
            (
                Endpoint::Chat,
                json!({"prompt_logprobs": 0}),
                Unsplittable::PromptOutput,
            ),
        ];
        for (endpoint, body, reason) in cases {
            assert_eq!(check_splittable(endpoint, &body), Err(reason), "{body}");
        }
        let tokens = json!({"prompt": [1, 2, 3]});
        assert_eq!(check_splittable(Endpoint::Completions, &tokens), Ok(()));
    }

    #[test]
    fn ends_that_an_engine_refuses_are_told_from_others() {
        for body in [
            json!({"prompt": "x"}),
            json!({"max_tokens": 1, "min_tokens": 1, "n": 1, "stop": "a", "stream": false}),
            json!({"max_tokens": null, "stop": ["a", "b"], "stop_token_ids": [1], "best_of": null}),
            json!({"max_completion_tokens": 100, "stream": true, "stream_options": {}}),
            json!({"sampling_params": {"max_tokens": 100, "ignore_eos": true}}),
        ] {
            assert_eq!(check_ends(&body, Some(100)), Ok(()), "{body}");
        }
        for body in [
            json!({"max_tokens": 0}),
            json!({"max_tokens": -1}),
            json!({"max_tokens": "5"}),
            json!({"max_tokens": 1.5}),
            json!({"max_tokens": 101}),
            json!({"max_tokens": 18_446_744_073_709_551_615_u64}),
            json!({"max_tokens": 5, "min_tokens": 6}),
            json!({"min_tokens": -1}),
            json!({"n": 0}),
            json!({"stream": "yes"}),
            json!({"stream_options": {"include_usage": true}}),
            json!({"stream": true, "stream_options": []}),
            json!({"stop": 5}),
            json!({"stop": [5]}),
            json!({"stop_token_ids": ["a"]}),
            json!({"sampling_params": {"max_tokens": 0}}),
        ] {
            assert_eq!(
                check_ends(&body, Some(100)),
                Err(Unsplittable::End),
                "{body}"
            );
        }
        let long = json!({"max_tokens": 101});
        assert_eq!(check_ends(&long, None), Ok(()), "nothing is known");
    }
}
