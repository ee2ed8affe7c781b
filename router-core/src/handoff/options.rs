//! What a plan is made of.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::ids::{Role, WorkerRank};

use super::kv_shape::KvShape;

/// The operator's targets and what is believed before anything is measured. Unknown keys are refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct HandoffConfig {
    /// Target of the time to the first token, in seconds (default 1, above 0). Lower makes waiting dearer against gaps.
    pub ttft_objective_seconds: f64,
    /// Target of the time between two tokens of a stream, in seconds (default 0.1, above 0). Lower makes gaps dearer, and
    /// so splits more; none lets the first token alone decide. Gaps below it cost nothing.
    pub itl_objective_seconds: Option<f64>,
    /// Prompt tokens per second of workers of which, like of all others, none is seeded or measured (default none, above 0).
    /// Plans that rest on it say so. Without it a request is not split before a speed is known, where one worker can serve it.
    pub assumed_prefill_tokens_per_second: Option<f64>,
    /// Seconds for each token moved by which an arriving cache stalls the streams of its worker, until it is measured
    /// (default 8.8e-6, 0 or more).
    ///
    /// # Source
    /// Two H200 with NVLink, 8B shape, vLLM 0.22: 16,000 tokens arriving raise the gap from 31 ms to 172 ms.
    pub transfer_stall_seconds_per_token: f64,
}

impl Default for HandoffConfig {
    fn default() -> Self {
        Self {
            ttft_objective_seconds: 1.0,
            itl_objective_seconds: Some(0.1),
            assumed_prefill_tokens_per_second: None,
            transfer_stall_seconds_per_token: 8.8e-6,
        }
    }
}

impl HandoffConfig {
    /// Sets both targets; no ITL target lets the first token alone decide.
    #[must_use]
    pub const fn objectives(mut self, ttft_seconds: f64, itl_seconds: Option<f64>) -> Self {
        self.ttft_objective_seconds = ttft_seconds;
        self.itl_objective_seconds = itl_seconds;
        self
    }

    /// Checks every range.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), naming the key, its value and the accepted range.
    pub fn validate(&self) -> Result<()> {
        positive("ttft_objective_seconds", self.ttft_objective_seconds, 1e-6)?;
        if let Some(seconds) = self.itl_objective_seconds {
            positive("itl_objective_seconds", seconds, 1e-6)?;
        }
        if let Some(speed) = self.assumed_prefill_tokens_per_second {
            positive("assumed_prefill_tokens_per_second", speed, 1e-3)?;
        }
        positive(
            "transfer_stall_seconds_per_token",
            self.transfer_stall_seconds_per_token,
            0.0,
        )
    }
}

/// Keeps every sum finite.
const MAX_VALUE: f64 = 1e15;

/// Refuses a number outside `min` to the largest that keeps sums finite.
pub(super) fn positive(key: &str, value: f64, min: f64) -> Result<()> {
    if (min..=MAX_VALUE).contains(&value) {
        return Ok(());
    }
    Err(Error::config(format!(
        "{key} {value} is out of range: {min} to {MAX_VALUE:e} is accepted"
    )))
}

/// What is known of a worker's prefill before it is measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillSeed {
    /// Prompt tokens computed per second, attention aside.
    pub tokens_per_second: f64,
    /// Seconds of a prefill whatever its length.
    pub fixed_seconds: f64,
    /// Prompt tokens at which attention takes as long as everything else, when known: a prompt of `n` then costs
    /// `n + n² ÷ attention_tokens`. About 50,000 for an 8B model, 8,000 for a 0.6B model. Without it, long prompts are
    /// predicted too short until they are measured.
    pub attention_tokens: Option<f64>,
}

impl PrefillSeed {
    /// Creates a seed of a speed alone.
    #[must_use]
    pub const fn tokens_per_second(tokens_per_second: f64) -> Self {
        Self {
            tokens_per_second,
            fixed_seconds: 0.0,
            attention_tokens: None,
        }
    }
}

/// Names what transfers share: a pair of hosts, a port, one card. Pairs whose transfers meet in one port name the same
/// link.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(Arc<str>);

impl LinkId {
    /// Creates a name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for LinkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for LinkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl Serialize for LinkId {
    fn serialize<S: serde::Serializer>(
        &self,
        serializer: S,
    ) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

/// The request to plan.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest<'a> {
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// The model's KV cache.
    pub shape: &'a KvShape,
    /// It may be split at all: not with several answers, beam search, or a protocol that cannot.
    pub splittable: bool,
}

/// One worker that a plan may use, as it is for this request.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PlanWorker {
    /// The target.
    pub target: WorkerRank,
    /// What it does.
    pub role: Role,
    /// It can serve a request alone. True for every role but prefill; an engine that was started as a decoder and cannot
    /// process prompts (SGLang) is set false.
    pub serves_alone: bool,
    /// Workers of one group can hand over to each other: same engine version, model, connector. `None` is a group, too.
    pub group: Option<Arc<str>>,
    /// Workers of one device stall each other's streams (several engines on one card).
    pub device: Option<Arc<str>>,
    /// Leading tokens of the prompt that it holds, as far as they are credited.
    pub cached_tokens: u64,
    /// Prompt tokens that wait for prefill there already.
    pub queued_prefill_tokens: u64,
    /// Streams that decode there.
    pub running_streams: u32,
    /// Tokens that its engine computes in one step at most (default 8,192, as vLLM's `max_num_batched_tokens` on large
    /// cards).
    pub step_tokens: u64,
}

impl PlanWorker {
    /// Creates an idle worker of `role` that holds nothing.
    #[must_use]
    pub fn new(target: WorkerRank, role: Role) -> Self {
        Self {
            target,
            role,
            serves_alone: role != Role::Prefill,
            group: None,
            device: None,
            cached_tokens: 0,
            queued_prefill_tokens: 0,
            running_streams: 0,
            step_tokens: 8_192,
        }
    }

    /// Sets the streams that decode there.
    #[must_use]
    pub const fn running_streams(mut self, streams: u32) -> Self {
        self.running_streams = streams;
        self
    }

    /// Sets the leading tokens that it holds.
    #[must_use]
    pub const fn cached_tokens(mut self, tokens: u64) -> Self {
        self.cached_tokens = tokens;
        self
    }

    /// Sets the prompt tokens that wait there.
    #[must_use]
    pub const fn queued_prefill_tokens(mut self, tokens: u64) -> Self {
        self.queued_prefill_tokens = tokens;
        self
    }

    /// Sets the device that it shares.
    #[must_use]
    pub fn device(mut self, device: &str) -> Self {
        self.device = Some(device.into());
        self
    }

    /// Sets the group within which it can hand over.
    #[must_use]
    pub fn group(mut self, group: &str) -> Self {
        self.group = Some(group.into());
        self
    }

    /// Sets whether it can serve a request alone.
    #[must_use]
    pub const fn serves_alone(mut self, serves_alone: bool) -> Self {
        self.serves_alone = serves_alone;
        self
    }

    pub(super) fn shares_device_with(&self, other: &Self) -> bool {
        self.target == other.target || (self.device.is_some() && self.device == other.device)
    }
}
