//! The top-level fields of a JSON body, as slices of it.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Raw values of the fields that routing looks at. A key that comes twice counts with its last value, as in Python.
#[derive(Default)]
pub(super) struct Fields<'a> {
    pub(super) model: Option<&'a RawValue>,
    pub(super) prompt: Option<&'a RawValue>,
    pub(super) messages: Option<&'a RawValue>,
    pub(super) tools: Option<&'a RawValue>,
    pub(super) input: Option<&'a RawValue>,
    pub(super) instructions: Option<&'a RawValue>,
    pub(super) system: Option<&'a RawValue>,
    pub(super) token_ids: Option<&'a RawValue>,
    pub(super) input_ids: Option<&'a RawValue>,
    pub(super) text: Option<&'a RawValue>,
    pub(super) cache_salt: Option<&'a RawValue>,
    /// Every value of `cache_salt`, to be replaced.
    pub(super) cache_salts: Vec<&'a RawValue>,
    /// Names of handoff fields, and containers in which one may hide.
    pub(super) handoff: Option<String>,
    pub(super) containers: Vec<&'a RawValue>,
    pub(super) has_fields: bool,
    pub(super) add_special_tokens: Option<&'a RawValue>,
    /// Fields with which the engine's cached tokens say nothing of the prompt as sent.
    unaudited: [Option<&'a RawValue>; 6],
    limits: [Option<&'a RawValue>; 3],
}

impl Fields<'_> {
    /// Tells whether the engine's cached tokens can be held against the prompt. They cannot when the engine computes the
    /// prompt again for its log-probabilities, reports one of several sequences, or cuts the prompt first.
    pub(super) fn is_audited(&self) -> bool {
        let several =
            |raw: &RawValue| serde_json::from_str::<f64>(raw.get()).is_ok_and(|n| n > 1.0);
        let set = |raw: &RawValue| !matches!(raw.get(), "null" | "false");
        let [n, best_of, rest @ ..] = &self.unaudited;
        !n.is_some_and(several)
            && !best_of.is_some_and(several)
            && !rest.iter().flatten().any(|raw| set(raw))
    }

    /// Tells whether text gets the tokenizer's special tokens (such as a beginning token); engines do so by default.
    pub(super) fn adds_special_tokens(&self) -> bool {
        self.add_special_tokens
            .is_none_or(|raw| raw.get() != "false")
    }

    /// Returns the number of output tokens to expect: the request's limit, of which no more than a usual answer is
    /// believed. Clients set limits of thousands, and one of 2^31 would keep everybody else off its worker; what comes
    /// beyond is booked as it is produced.
    pub(super) fn max_output_tokens(&self) -> Option<u32> {
        const USUAL_ANSWER: u32 = 256;
        let limits = self.limits.iter().flatten();
        limits
            .filter_map(|raw| serde_json::from_str::<u64>(raw.get()).ok())
            .filter_map(|limit| u32::try_from(limit.min(USUAL_ANSWER.into())).ok())
            .min()
    }
}

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
        let mut fields = Fields::default();
        while let Some(Key(key)) = map.next_key()? {
            fields.has_fields = true;
            let slot = match &*key {
                "model" => &mut fields.model,
                "prompt" => &mut fields.prompt,
                "messages" => &mut fields.messages,
                "tools" => &mut fields.tools,
                "input" => &mut fields.input,
                "instructions" => &mut fields.instructions,
                "system" => &mut fields.system,
                "token_ids" | "prompt_token_ids" => &mut fields.token_ids,
                "input_ids" => &mut fields.input_ids,
                "text" => &mut fields.text,
                "add_special_tokens" => &mut fields.add_special_tokens,
                "n" => &mut fields.unaudited[0],
                "best_of" => &mut fields.unaudited[1],
                "echo" => &mut fields.unaudited[2],
                "prompt_logprobs" => &mut fields.unaudited[3],
                "truncate_prompt_tokens" => &mut fields.unaudited[4],
                "use_beam_search" => &mut fields.unaudited[5],
                "max_tokens" => &mut fields.limits[0],
                "max_completion_tokens" => &mut fields.limits[1],
                "max_output_tokens" => &mut fields.limits[2],
                "cache_salt" => {
                    let value = map.next_value()?;
                    fields.cache_salts.push(value);
                    fields.cache_salt = Some(value);
                    continue;
                }
                key if super::guard::is_handoff(key) => {
                    fields.handoff = Some(key.to_owned());
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
                "vllm_xargs" | "extra_args" | "sampling_params" | "extra_body" => {
                    fields.containers.push(map.next_value()?);
                    continue;
                }
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            *slot = Some(map.next_value()?);
        }
        Ok(fields)
    }
}

/// A key, borrowed unless it has escapes.
struct Key<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = Key<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(KeyVisitor)
    }
}
