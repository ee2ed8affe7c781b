//! Flags of `kvlane plan`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

/// Flags of `kvlane plan`: a model, a link and what was measured; prints from where on a handoff pays. A model alone prints its KV
/// bytes.
#[derive(Args, Clone, Debug)]
pub struct PlanArgs {
    /// A model's folder, or its config.json; alone, prints what a token's KV takes
    #[arg(
        long,
        value_name = "PATH",
        required_unless_present = "kv_bytes_per_token"
    )]
    pub model: Option<PathBuf>,
    /// KV bytes of a token, instead of --model
    #[arg(long, value_name = "N", conflicts_with = "model")]
    pub kv_bytes_per_token: Option<f64>,
    /// The engine's --kv-cache-dtype
    #[arg(long, value_name = "DTYPE", default_value = "auto")]
    pub kv_cache_dtype: String,
    /// Tensor-parallel ranks of the engine
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub tensor_parallel: u32,
    /// A measured prompt, as tokens:milliseconds to its first token; may be repeated
    #[arg(
        long,
        value_name = "TOKENS:MS",
        required_unless_present = "model",
        requires = "link"
    )]
    pub prefill: Vec<PrefillPoint>,
    /// Prompt tokens at which attention takes as long as everything else [default: from the model; else never]
    #[arg(long, value_name = "N")]
    pub attention_tokens: Option<f64>,
    /// Measured throughput of one KV transfer, such as 6GB/s, 104MB/s or 100Gbit/s; may be repeated
    #[arg(
        long,
        value_name = "SPEED",
        required_unless_present = "model",
        requires = "prefill"
    )]
    pub link: Vec<LinkSpeed>,
    /// Milliseconds of a transfer whatever its size
    #[arg(long, value_name = "MS", default_value_t = 0.0)]
    pub link_fixed_ms: f64,
    /// Streams that run on the decode worker
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub streams: u32,
    /// Milliseconds between two tokens of those streams when no prompt comes
    #[arg(long, value_name = "MS", default_value_t = 20.0)]
    pub gap_ms: f64,
    /// Tokens that the engine computes in one step at most (its --max-num-batched-tokens)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), default_value_t = 8_192)]
    pub step_tokens: u64,
    /// Target of the time to the first token in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1_000.0)]
    pub ttft_objective_ms: f64,
    /// Target of the time between two tokens in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 100.0)]
    pub itl_objective_ms: f64,
    /// Prompt lengths of the table
    #[arg(
        long,
        value_name = "N,N,…",
        value_delimiter = ',',
        value_parser = clap::value_parser!(u64).range(1..=10_000_000),
        default_value = "500,1000,2000,4000,8000,16000,32000,64000,128000"
    )]
    pub tokens: Vec<u64>,
    /// Prints one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
    /// Writes the crossover as a picture
    #[arg(long, value_name = "FILE", requires = "link")]
    pub svg: Option<PathBuf>,
}

/// A prompt and how long its first token took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillPoint {
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Milliseconds.
    pub ms: f64,
}

impl FromStr for PrefillPoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once(':');
        let point = parts.and_then(|(tokens, ms)| {
            Some(Self {
                tokens: tokens.parse().ok()?,
                ms: ms.parse().ok()?,
            })
        });
        point
            .filter(|point| (1..=10_000_000).contains(&point.tokens))
            .filter(|point| (1e-3..=1e9).contains(&point.ms))
            .ok_or_else(|| {
                format!(
                    "{text:?} is not tokens:milliseconds, such as 8000:220, with 1 to 10,000,000 tokens and 0.001 to 10^9 ms"
                )
            })
    }
}

/// A throughput in bytes per second, as it was written.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkSpeed {
    /// Bytes per second.
    pub bytes_per_second: f64,
    text: String,
}

impl FromStr for LinkSpeed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const UNITS: [(&str, f64); 5] = [
            ("MB/s", 1e6),
            ("GB/s", 1e9),
            ("TB/s", 1e12),
            ("Mbit/s", 1e6 / 8.0),
            ("Gbit/s", 1e9 / 8.0),
        ];
        let speed = UNITS.iter().find_map(|(unit, bytes)| {
            let number = text.strip_suffix(unit)?.trim_end();
            Some(number.parse::<f64>().ok()? * bytes)
        });
        speed
            .filter(|speed| (1e3..=1e14).contains(speed))
            .map(|bytes_per_second| Self {
                bytes_per_second,
                text: text.to_owned(),
            })
            .ok_or_else(|| {
                format!(
                    "{text:?} is not a throughput from 0.001MB/s to 100TB/s, such as 104MB/s, 6GB/s or 100Gbit/s"
                )
            })
    }
}

impl fmt::Display for LinkSpeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
