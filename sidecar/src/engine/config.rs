//! What a simulated engine can be told, with the ranges that it accepts.

use std::net::SocketAddr;

use kvlane::{Error, ErrorKind, Result, Role};

use super::transfer::TransferConfig;

/// Everything that one simulated engine is made of.
///
/// Times are those of the engine at `speed` 1. The defaults of `prefill_tokens_per_second` and `prefill_overhead_ms`
/// reproduce the measured story of the project: a 0.6B model answers a 1,500-token prompt with the first token after
/// 80 ms when nothing is cached and after 15 ms when 1,472 tokens are:
/// 13.76 ms + 1,500 / 22,646 s = 80 ms, 13.76 ms + 28 / 22,646 s = 15 ms.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// HTTP listener; port 0 lets the system choose (default `127.0.0.1:8000`).
    pub listen: SocketAddr,
    /// Name that requests must ask for (default `sim`).
    pub model_name: String,
    /// Where KV events go; `None` binds no socket (default).
    pub events: Option<EventConfig>,
    /// Size of the KV pool in blocks (default 926). One is reserved, as in vLLM, so 925 hold tokens.
    pub kv_blocks: u32,
    /// Tokens per block (default 16).
    pub block_size: u32,
    /// Longest prompt plus output in tokens; `None` is what the KV pool holds.
    pub max_model_len: Option<u32>,
    /// Requests in one step at most; the others wait (default 256).
    pub max_num_seqs: usize,
    /// Tokens in one step at most; longer prompts are cut into chunks (default 8192).
    pub max_num_batched_tokens: usize,
    /// What the engine says it is for; it serves every request all the same (default both).
    pub role: Role,
    /// Its part in handoffs; `None` is an engine without a KV connector (default).
    pub transfer: Option<TransferConfig>,
    /// Prompt tokens computed per second (default 22,646, see above).
    pub prefill_tokens_per_second: f64,
    /// Fixed time of a step that computes prompt tokens (default 13.76 ms, see above).
    pub prefill_overhead_ms: f64,
    /// Time of a step that produces one token for every running request (default 5 ms, an assumption).
    pub decode_ms: f64,
    /// Divides every time (default 1.0).
    pub speed: f64,
    /// Chooses the words that the engine "generates"; equal seeds give equal words (default 0).
    pub seed: u64,
    /// Number of token ids (default 151,936, that of Qwen3).
    pub vocabulary: u32,
    /// Seed of the block hashes; `None` draws one, so that no two engines or lives agree (default), as in vLLM.
    pub hash_seed: Option<u64>,
}

/// Where and how an engine publishes what happens in its KV cache.
#[derive(Clone, Debug)]
pub struct EventConfig {
    /// ZMQ endpoint that the publisher binds, such as `tcp://127.0.0.1:0`.
    pub endpoint: String,
    /// ZMQ endpoint that answers replay requests; `None` offers no replay.
    pub replay_endpoint: Option<String>,
    /// Topic of every message (default empty).
    pub topic: String,
    /// Batches kept for replay (default 10,000, as vLLM's `buffer_steps`).
    pub buffer_steps: usize,
    /// Messages that wait for one subscriber before the newest are dropped (default 100,000, as vLLM's `hwm`).
    pub hwm: i32,
    /// The same for one replay reader (default 20,002; vLLM before 0.33.0 had 1,000 and lost the rest).
    pub replay_hwm: i32,
    /// Binds the sockets and publishes nothing: the silent worker (default false).
    pub silent: bool,
    /// Layout of replay answers.
    pub replay_layout: ReplayLayout,
    /// Faults to inject.
    pub faults: EventFaults,
}

/// How a replay answer is cut into parts, after the empty delimiter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplayLayout {
    /// Topic, sequence, payload (vLLM from 0.26.0).
    #[default]
    Topic,
    /// Sequence, payload (vLLM to 0.25.1).
    Bare,
}

/// Batches, by sequence number, that go wrong on purpose.
#[derive(Clone, Debug, Default)]
pub struct EventFaults {
    /// Never published, but kept for replay: a repairable gap.
    pub drop: Vec<u64>,
    /// Neither published nor kept: the number is burnt, as by a failed encoding.
    pub burn: Vec<u64>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8000)),
            model_name: "sim".to_owned(),
            events: None,
            kv_blocks: 926,
            block_size: 16,
            max_model_len: None,
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            role: Role::Both,
            transfer: None,
            prefill_tokens_per_second: 22_646.0,
            prefill_overhead_ms: 13.76,
            decode_ms: 5.0,
            speed: 1.0,
            seed: 0,
            vocabulary: 151_936,
            hash_seed: None,
        }
    }
}

impl EngineConfig {
    /// Returns the defaults on ports that the system chooses, with events and replay on loopback.
    #[must_use]
    pub fn ephemeral() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            events: Some(EventConfig {
                replay_endpoint: Some("tcp://127.0.0.1:0".to_owned()),
                ..EventConfig::new("tcp://127.0.0.1:0")
            }),
            ..Self::default()
        }
    }

    /// Returns how many tokens of KV fit: the reserved block holds none.
    #[must_use]
    pub const fn kv_capacity_tokens(&self) -> u64 {
        self.kv_blocks.saturating_sub(1) as u64 * self.block_size as u64
    }

    /// Checks every value and returns the longest prompt plus output in tokens.
    pub(crate) fn validate(&self) -> Result<usize> {
        in_range("block_size", u64::from(self.block_size), 1, 65_536)?;
        in_range("kv_blocks", u64::from(self.kv_blocks), 2, 1 << 24)?;
        in_range("max_num_seqs", self.max_num_seqs as u64, 1, 1 << 16)?;
        in_range(
            "max_num_batched_tokens",
            self.max_num_batched_tokens as u64,
            1,
            1 << 24,
        )?;
        in_range(
            "vocabulary",
            u64::from(self.vocabulary),
            64,
            u64::from(u32::MAX),
        )?;
        if self.model_name.is_empty() || self.model_name.chars().any(char::is_control) {
            let name = &self.model_name;
            return Err(config(format!(
                "model_name {name:?} must be a non-empty name without control characters"
            )));
        }
        positive("prefill_tokens_per_second", self.prefill_tokens_per_second)?;
        positive("speed", self.speed)?;
        duration("prefill_overhead_ms", self.prefill_overhead_ms)?;
        duration("decode_ms", self.decode_ms)?;
        if let Some(events) = &self.events {
            events.validate()?;
        }
        if let Some(transfer) = &self.transfer {
            transfer.validate(self.block_size)?;
        }
        let capacity = self.kv_capacity_tokens();
        let max_model_len = self
            .max_model_len
            .map_or_else(|| capacity.min(1 << 24), u64::from);
        in_range("max_model_len", max_model_len, 1, capacity)?;
        Ok(usize::try_from(max_model_len).unwrap_or(usize::MAX))
    }
}

impl TransferConfig {
    fn validate(&self, block_size: u32) -> Result<()> {
        let lease = self.lease.as_millis();
        in_range(
            "transfer.lease (milliseconds)",
            u64::try_from(lease).unwrap_or(u64::MAX),
            1,
            86_400_000,
        )?;
        // A block is one frame.
        let most = (64 << 20) / u64::from(block_size);
        let bytes = u64::from(self.kv_bytes_per_token);
        in_range("transfer.kv_bytes_per_token", bytes, 1, most)
    }
}

impl EventConfig {
    /// Returns the defaults for a publisher bound to `endpoint`, without replay.
    #[must_use]
    pub fn new(endpoint: impl Into<String>) -> Self {
        Self {
            endpoint: endpoint.into(),
            replay_endpoint: None,
            topic: String::new(),
            buffer_steps: 10_000,
            hwm: 100_000,
            replay_hwm: 20_002,
            silent: false,
            replay_layout: ReplayLayout::default(),
            faults: EventFaults::default(),
        }
    }

    fn validate(&self) -> Result<()> {
        in_range(
            "events.buffer_steps",
            self.buffer_steps as u64,
            1,
            1_000_000,
        )?;
        in_range("events.topic (bytes)", self.topic.len() as u64, 0, 4096)?;
        for (key, hwm) in [
            ("events.hwm", self.hwm),
            ("events.replay_hwm", self.replay_hwm),
        ] {
            if hwm < 0 {
                return Err(config(format!(
                    "{key} is {hwm}; 0 (no limit) or more is accepted"
                )));
            }
        }
        Ok(())
    }
}

fn in_range(key: &str, value: u64, low: u64, high: u64) -> Result<()> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(config(format!(
        "{key} is {value}; {low} to {high} is accepted"
    )))
}

fn positive(key: &str, value: f64) -> Result<()> {
    if (1e-3..=1e9).contains(&value) {
        return Ok(());
    }
    Err(config(format!(
        "{key} is {value}; 0.001 to 1e9 is accepted"
    )))
}

fn duration(key: &str, value: f64) -> Result<()> {
    if (0.0..=60_000.0).contains(&value) {
        return Ok(());
    }
    Err(config(format!("{key} is {value}; 0 to 60000 is accepted")))
}

fn config(message: String) -> Error {
    Error::new(ErrorKind::Config, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_timing_tells_the_measured_story() {
        let config = EngineConfig::default();
        let first_token_ms = |tokens: f64| {
            config.prefill_overhead_ms + tokens / config.prefill_tokens_per_second * 1000.0
        };
        assert!((first_token_ms(1500.0) - 80.0).abs() < 0.1);
        assert!((first_token_ms(1500.0 - 1472.0) - 15.0).abs() < 0.1);
    }

    #[test]
    fn errors_name_the_key_and_the_range() {
        let bad = EngineConfig {
            block_size: 0,
            ..EngineConfig::default()
        };
        let error = bad.validate().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert_eq!(error.to_string(), "block_size is 0; 1 to 65536 is accepted");
        for bad in [
            EngineConfig {
                speed: f64::NAN,
                ..EngineConfig::default()
            },
            EngineConfig {
                decode_ms: -1.0,
                ..EngineConfig::default()
            },
            // 926 blocks hold 925 × 16 = 14,800 tokens.
            EngineConfig {
                max_model_len: Some(14_801),
                ..EngineConfig::default()
            },
        ] {
            bad.validate().unwrap_err();
        }
        assert_eq!(EngineConfig::default().validate().unwrap(), 14_800);
    }
}
