//! Reading the few series that matter out of an engine's Prometheus text.

use std::collections::BTreeMap;

/// What an engine says of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineReport {
    /// Load of each data-parallel rank.
    pub loads: BTreeMap<u32, Load>,
    /// Tokens per block of the engine.
    pub block_size: Option<u32>,
    /// Blocks of the engine's size that its KV cache holds (a rank's).
    pub num_blocks: Option<u64>,
    /// When its process began, in seconds of its clock; another value is another process with an empty cache.
    pub born: Option<f64>,
}

/// Load of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Requests running.
    pub running: u32,
    /// Requests waiting.
    pub waiting: u32,
    /// Share of the KV cache in use, 0 to 1.
    pub kv_usage: f64,
}

/// Reads an engine's metrics: those of vLLM, SGLang and TensorRT-LLM; unknown series and broken lines are skipped.
///
/// Series of one rank (label `engine` or `dp_rank`) and name, as of several models, are added up; usage takes the maximum.
#[must_use]
pub fn parse(text: &str) -> EngineReport {
    let mut report = EngineReport::default();
    for line in text.lines() {
        let Some(series) = Series::parse(line) else {
            continue;
        };
        match series.name {
            "vllm:num_requests_running"
            | "sglang:num_running_reqs"
            | "trtllm_num_requests_running" => {
                let load = report.loads.entry(series.rank()).or_default();
                load.running = load.running.saturating_add(count(series.value));
            }
            "vllm:num_requests_waiting"
            | "sglang:num_queue_reqs"
            | "trtllm_num_requests_waiting" => {
                let load = report.loads.entry(series.rank()).or_default();
                load.waiting = load.waiting.saturating_add(count(series.value));
            }
            "vllm:kv_cache_usage_perc"
            | "vllm:gpu_cache_usage_perc"
            | "sglang:token_usage"
            | "trtllm_kv_cache_utilization" => {
                let load = report.loads.entry(series.rank()).or_default();
                if series.value.is_finite() {
                    load.kv_usage = load.kv_usage.max(series.value.clamp(0.0, 1.0));
                }
            }
            "vllm:cache_config_info" | "sglang:cache_config_info" => {
                let label = |names: [&str; 2]| {
                    names
                        .iter()
                        .find_map(|name| series.label(name)?.parse::<u64>().ok())
                };
                report.set_config(
                    label(["block_size", "page_size"]),
                    label(["num_gpu_blocks", "num_pages"]),
                );
            }
            "process_start_time_seconds" | "vllm:prefix_cache_queries_created" => {
                report.born = Some(report.born.unwrap_or(0.0).max(series.value));
            }
            "trtllm_kv_cache_tokens_per_block" => {
                report.set_config(Some(u64::from(count(series.value))), None)
            }
            "trtllm_kv_cache_max_blocks" => {
                report.set_config(None, Some(u64::from(count(series.value))))
            }
            _ => {}
        }
    }
    report
}

impl EngineReport {
    /// Adds up the ranks' loads; usage takes the maximum. `None` when the engine reported no load.
    #[must_use]
    pub fn sum(&self) -> Option<Load> {
        self.loads.values().copied().reduce(|a, b| Load {
            running: a.running.saturating_add(b.running),
            waiting: a.waiting.saturating_add(b.waiting),
            kv_usage: a.kv_usage.max(b.kv_usage),
        })
    }

    /// Returns the tokens that a rank's KV cache holds, when both its block size and its number of blocks are known.
    #[must_use]
    pub fn capacity_tokens(&self) -> Option<u64> {
        // An engine may claim anything: a bound beyond what can be counted bounds nothing.
        Some(u64::from(self.block_size?).saturating_mul(self.num_blocks?))
    }

    fn set_config(&mut self, block_size: Option<u64>, num_blocks: Option<u64>) {
        let block_size = block_size.and_then(|size| u32::try_from(size).ok());
        self.block_size = block_size.filter(|size| *size > 0).or(self.block_size);
        self.num_blocks = num_blocks.filter(|blocks| *blocks > 0).or(self.num_blocks);
    }
}

struct Series<'a> {
    name: &'a str,
    labels: &'a str,
    value: f64,
}

impl<'a> Series<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        if line.starts_with('#') {
            return None;
        }
        let (name, labels, rest) = match line.split_once('{') {
            Some((name, rest)) => {
                let (labels, rest) = rest.rsplit_once('}')?;
                (name, labels, rest)
            }
            None => {
                let (name, rest) = line.split_once(' ')?;
                (name, "", rest)
            }
        };
        let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
        Some(Self {
            name: name.trim(),
            labels,
            value,
        })
    }

    fn label(&self, wanted: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        loop {
            let (name, after) = rest.split_once("=\"")?;
            let end = closing_quote(after)?;
            if name.trim_start_matches(',').trim() == wanted {
                return Some(&after[..end]);
            }
            rest = &after[end + 1..];
        }
    }

    fn rank(&self) -> u32 {
        let label = self.label("dp_rank").or_else(|| self.label("engine"));
        label.and_then(|rank| rank.parse().ok()).unwrap_or(0)
    }
}

fn closing_quote(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let closes = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        closes
    })
}

/// Converts a sample to a count; anything that is none is 0.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to the range before"
)]
fn count(value: f64) -> u32 {
    if value.is_nan() {
        0
    } else {
        value.clamp(0.0, f64::from(u32::MAX)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vllm_is_read_by_rank() {
        let report = parse(
            "# HELP vllm:num_requests_running x\n\
             vllm:num_requests_running{engine=\"0\",model_name=\"a\"} 3.0\n\
             vllm:num_requests_running{engine=\"1\",model_name=\"a\"} 5.0 1700000000\n\
             vllm:num_requests_waiting{engine=\"0\",model_name=\"we\\\"ird,}=x\"} 2.0\n\
             vllm:kv_cache_usage_perc{engine=\"1\"} 0.25\n\
             vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"926\",sliding_window=\"None\"} 1.0\n",
        );
        assert_eq!(
            report.loads[&0],
            Load {
                running: 3,
                waiting: 2,
                kv_usage: 0.0
            }
        );
        assert_eq!(
            report.loads[&1],
            Load {
                running: 5,
                waiting: 0,
                kv_usage: 0.25
            }
        );
        assert_eq!(
            (report.block_size, report.num_blocks),
            (Some(16), Some(926))
        );
    }

    #[test]
    fn sglang_is_read() {
        let report = parse(
            "sglang:num_running_reqs{model_name=\"m\"} 7\nsglang:num_queue_reqs 1\nsglang:token_usage 0.5\n\
             sglang:cache_config_info{page_size=\"64\",num_pages=\"100\"} 1\n",
        );
        assert_eq!(
            report.loads[&0],
            Load {
                running: 7,
                waiting: 1,
                kv_usage: 0.5
            }
        );
        assert_eq!(
            (report.block_size, report.num_blocks),
            (Some(64), Some(100))
        );
    }

    #[test]
    fn a_captured_page_says_when_the_process_began() {
        let page = include_str!("../../../tests/fixtures/vllm-0.32.0/metrics.txt");
        let born = parse(page).born.unwrap();
        assert!((1_795_965_377.0..1_795_965_378.0).contains(&born), "{born}");
        assert_eq!(parse("vllm:num_requests_running 1").born, None);
    }

    #[test]
    fn a_capacity_beyond_counting_is_no_overflow() {
        let report = parse(
            "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"18446744073709551615\"} 1\n",
        );
        assert_eq!(report.capacity_tokens(), Some(u64::MAX));
        assert_eq!(parse("").capacity_tokens(), None);
    }

    #[test]
    fn nonsense_is_skipped() {
        let report = parse(
            "vllm:num_requests_running{engine=\"0\" NaN\nvllm:num_requests_running NaN\nvllm:num_requests_waiting -4\n\
             vllm:kv_cache_usage_perc Inf\nvllm:cache_config_info{block_size=\"0\",num_gpu_blocks=\"None\"} 1\n}{\n\n x",
        );
        assert_eq!(report.loads[&0], Load::default());
        assert_eq!((report.block_size, report.num_blocks), (None, None));
    }
}
