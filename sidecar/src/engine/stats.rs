//! What an engine counts, as numbers and as vLLM's metrics page.

use std::fmt::Write;

use super::scheduler::Scheduler;

/// A snapshot of one engine, taken between two steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Prompts that the batch works on.
    pub running_requests: usize,
    /// Prompts in the queue.
    pub waiting_requests: usize,
    /// Blocks that requests hold.
    pub used_blocks: usize,
    /// Blocks that are free, cached content included.
    pub free_blocks: usize,
    /// Blocks with cached content, copies counted.
    pub cached_blocks: usize,
    /// Used share of the pool, 0 to 1.
    pub kv_usage: f64,
    /// Prompts answered to the end.
    pub finished_requests: u64,
    /// Prompts whose client left.
    pub aborted_requests: u64,
    /// Times a running prompt had to give its blocks back and start over.
    pub preemptions: u64,
    /// Prompt tokens of all scheduled prompts.
    pub prompt_tokens: u64,
    /// Generated tokens.
    pub generated_tokens: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_query_tokens: u64,
    /// Those found there.
    pub prefix_hit_tokens: u64,
    /// Steps done.
    pub steps: u64,
}

impl EngineStats {
    pub(super) fn of(scheduler: &Scheduler) -> Self {
        let (pool, totals) = (scheduler.pool(), scheduler.totals());
        #[expect(
            clippy::cast_precision_loss,
            reason = "pools are far below 2^52 blocks"
        )]
        let kv_usage = pool.used_blocks() as f64 / pool.usable_blocks() as f64;
        Self {
            running_requests: scheduler.running(),
            waiting_requests: scheduler.waiting(),
            used_blocks: pool.used_blocks(),
            free_blocks: pool.free_blocks(),
            cached_blocks: pool.cached_blocks(),
            kv_usage,
            finished_requests: totals.finished_requests,
            aborted_requests: totals.aborted_requests,
            preemptions: totals.preemptions,
            prompt_tokens: totals.prompt_tokens,
            generated_tokens: totals.generated_tokens,
            prefix_query_tokens: totals.prefix_queries,
            prefix_hit_tokens: totals.prefix_hits,
            steps: totals.steps,
        }
    }
}

/// Writes the metrics page of one engine in the Prometheus text format, with vLLM's names.
pub(super) fn render(
    stats: &EngineStats,
    model_name: &str,
    block_size: u32,
    kv_blocks: u32,
    born: f64,
) -> String {
    let model = escape(model_name);
    let labels = format!(r#"engine="0",model_name="{model}""#);
    let mut page = Page {
        text: String::new(),
        labels,
    };
    page.metric(
        "vllm:num_requests_running",
        "gauge",
        "Requests in model execution batches.",
        stats.running_requests,
    );
    page.metric(
        "vllm:num_requests_waiting",
        "gauge",
        "Requests waiting to be processed.",
        stats.waiting_requests,
    );
    page.metric(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "KV-cache usage; 1 means full.",
        stats.kv_usage,
    );
    page.metric(
        "vllm:prefix_cache_queries_total",
        "counter",
        "Tokens looked up in the prefix cache.",
        stats.prefix_query_tokens,
    );
    page.metric(
        "vllm:prefix_cache_hits_total",
        "counter",
        "Tokens found in the prefix cache.",
        stats.prefix_hit_tokens,
    );
    page.metric(
        "vllm:num_preemptions_total",
        "counter",
        "Preemptions of running requests.",
        stats.preemptions,
    );
    page.metric(
        "vllm:prompt_tokens_total",
        "counter",
        "Prompt tokens processed.",
        stats.prompt_tokens,
    );
    page.metric(
        "vllm:generation_tokens_total",
        "counter",
        "Tokens generated.",
        stats.generated_tokens,
    );
    page.head(
        "vllm:request_success_total",
        "counter",
        "Requests finished, by reason.",
    );
    let reasons = [
        ("stop", 0),
        ("length", stats.finished_requests),
        ("abort", stats.aborted_requests),
    ];
    for (reason, count) in reasons {
        page.sample(
            "vllm:request_success_total",
            &format!(r#",finished_reason="{reason}""#),
            count,
        );
    }
    page.metric(
        "vllm:prefix_cache_queries_created",
        "gauge",
        "When the counter of tokens looked up began, in seconds since 1970.",
        born,
    );
    page.head(
        "vllm:cache_config_info",
        "gauge",
        "Settings of the KV cache.",
    );
    let settings = format!(
        r#",block_size="{block_size}",cache_dtype="auto",enable_prefix_caching="True",num_gpu_blocks="{kv_blocks}",prefix_caching_hash_algo="xxhash""#
    );
    page.sample("vllm:cache_config_info", &settings, "1.0");
    page.text
}

struct Page {
    text: String,
    labels: String,
}

impl Page {
    fn metric(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        self.head(name, kind, help);
        self.sample(name, "", value);
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, more_labels: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.text, "{name}{{{}{more_labels}}} {value}", self.labels);
    }
}

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_has_vllm_names_and_escaped_labels() {
        let stats = EngineStats {
            running_requests: 3,
            kv_usage: 0.25,
            ..EngineStats::default()
        };
        let page = render(&stats, r#"a"b"#, 16, 926, 1.5);
        for line in [
            r#"vllm:num_requests_running{engine="0",model_name="a\"b"} 3"#,
            r#"vllm:kv_cache_usage_perc{engine="0",model_name="a\"b"} 0.25"#,
            "# TYPE vllm:prefix_cache_hits_total counter",
            r#"vllm:prefix_cache_queries_created{engine="0",model_name="a\"b"} 1.5"#,
        ] {
            assert!(
                page.lines().any(|found| found == line),
                "{line} is missing in\n{page}"
            );
        }
        assert!(page.contains(r#"block_size="16""#) && page.contains(r#"num_gpu_blocks="926""#));
    }
}
