//! What is known of one worker.

use std::time::Duration;

use super::line::{Fit, Line, Recent, Telling};
use super::options::PrefillSeed;

/// The prefill of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillWork {
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Leading tokens that the worker held.
    pub cached_tokens: u64,
    /// Prompt tokens that were waiting there when it was sent.
    pub queued_tokens: u64,
}

/// What a worker was doing when a stream waited for its next token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GapCause {
    /// Decoding alone.
    Decode,
    /// A prompt was being processed.
    Prefill(PrefillWork),
    /// A cache of this many tokens arrived.
    Transfer {
        /// Tokens moved.
        tokens: u64,
    },
}

/// Measurements of one worker.
#[derive(Clone, Debug)]
pub(super) struct WorkerEstimate {
    prefill: Line,
    attention_tokens: Option<f64>,
    gaps: Recent,
    /// Measured stall by a prompt as a multiple of its predicted longest step.
    prefill_stall: Recent,
    /// Measured stall by an arriving cache, seconds a token.
    transfer_stall: Recent,
}

/// Tokens from which on a prompt tells how fast a worker computes; also what prompts must differ by before slopes do.
///
/// # Source
/// A step that computes few tokens takes as long as reading the weights does and its launch: on cards of the last generations
/// that is the time of some 300 tokens, the ratio of their arithmetic to their memory (H100: 989 TFLOP/s to 3.35 TB/s at two
/// bytes a weight, 295). Measured with a 0.6B model: 13.76 ms at 22,646 tokens/s, 312 tokens. Beside 1,024 tokens that is a
/// third at most.
const TELLING_TOKENS: f64 = 1_024.0;

impl Default for WorkerEstimate {
    fn default() -> Self {
        let telling = Telling {
            units: TELLING_TOKENS,
            seconds: 0.0,
        };
        Self {
            prefill: Line::new(telling),
            attention_tokens: None,
            gaps: Recent::default(),
            prefill_stall: Recent::default(),
            transfer_stall: Recent::default(),
        }
    }
}

impl WorkerEstimate {
    pub(super) fn seed(&mut self, seed: &PrefillSeed) {
        self.attention_tokens = seed.attention_tokens;
        self.prefill.seed(Fit {
            fixed: seed.fixed_seconds,
            per_unit: 1.0 / seed.tokens_per_second,
        });
    }

    pub(super) fn observe_prefill(&mut self, work: &PrefillWork, elapsed: Duration) {
        let units = units(self.attention_tokens, work.input_tokens, work.cached_tokens);
        let queued = work.queued_tokens as f64;
        self.prefill.observe(units + queued, elapsed.as_secs_f64());
    }

    pub(super) fn observe_gap(&mut self, gap: Duration, cause: GapCause, step_tokens: u64) {
        let gap = gap.as_secs_f64();
        let stall = (gap - self.gaps.median().unwrap_or(0.0)).max(0.0);
        match cause {
            GapCause::Decode => self.gaps.observe(gap),
            GapCause::Prefill(work) => {
                let step = self.known().map_or(0.0, |known| {
                    known.longest_step(work.input_tokens, work.cached_tokens, step_tokens)
                });
                if step > 0.0 {
                    self.prefill_stall.observe(stall / step);
                }
            }
            GapCause::Transfer { tokens } if tokens > 0 => {
                self.transfer_stall.observe(stall / tokens as f64);
            }
            GapCause::Transfer { .. } => {}
        }
    }

    pub(super) fn measurements(&self) -> usize {
        self.prefill.measurements()
    }

    /// Returns the usual gap, the stall by a prompt and that by an arriving cache, as far as they were measured.
    pub(super) const fn stalls(&self) -> [Option<f64>; 3] {
        [
            self.gaps.median(),
            self.prefill_stall.median(),
            self.transfer_stall.median(),
        ]
    }

    pub(super) fn stall_measurements(&self) -> usize {
        self.prefill_stall.len() + self.transfer_stall.len()
    }

    /// Returns what the measurements tell, if there is a speed among them.
    pub(super) fn known(&self) -> Option<WorkerSpeed> {
        Some(WorkerSpeed {
            prefill: self.prefill.fit()?,
            attention_tokens: self.attention_tokens,
            gap: self.gaps.median(),
            prefill_stall: self.prefill_stall.median(),
            transfer_stall: self.transfer_stall.median(),
        })
    }
}

/// How streams are held up, in seconds beyond their usual gap.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Stall {
    /// The longest of the gaps.
    pub(super) longest: f64,
    /// All of them together.
    pub(super) total: f64,
    /// How many there are.
    pub(super) count: u64,
}

/// How fast one worker is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct WorkerSpeed {
    pub(super) prefill: Fit,
    attention_tokens: Option<f64>,
    /// Seconds between tokens when nothing else goes on.
    pub(super) gap: Option<f64>,
    prefill_stall: Option<f64>,
    /// Seconds a token by which an arriving cache stalls streams.
    pub(super) transfer_stall: Option<f64>,
}

impl WorkerSpeed {
    /// Takes a speed that nobody has measured.
    pub(super) fn assumed(tokens_per_second: f64) -> Self {
        Self {
            prefill: Fit {
                fixed: 0.0,
                per_unit: 1.0 / tokens_per_second,
            },
            attention_tokens: None,
            gap: None,
            prefill_stall: None,
            transfer_stall: None,
        }
    }

    /// Takes the gaps that were measured, with the rest as it is.
    pub(super) fn with_gaps_of(self, estimate: Option<&WorkerEstimate>) -> Self {
        Self {
            gap: estimate.and_then(|own| own.gaps.median()).or(self.gap),
            prefill_stall: estimate
                .and_then(|own| own.prefill_stall.median())
                .or(self.prefill_stall),
            transfer_stall: estimate
                .and_then(|own| own.transfer_stall.median())
                .or(self.transfer_stall),
            ..self
        }
    }

    pub(super) fn prefill_seconds(&self, input_tokens: u64, cached_tokens: u64) -> f64 {
        let units = units(self.attention_tokens, input_tokens, cached_tokens);
        self.prefill.seconds(units)
    }

    pub(super) fn queue_seconds(&self, queued_tokens: u64) -> f64 {
        self.prefill.per_unit * queued_tokens as f64
    }

    /// Returns how a prompt stalls streams: once for each of its steps, as far as measured stalls agree with that.
    pub(super) fn prefill_stall(
        &self,
        input_tokens: u64,
        cached_tokens: u64,
        step_tokens: u64,
    ) -> Stall {
        let share = self.prefill_stall.unwrap_or(1.0);
        let longest = self.longest_step(input_tokens, cached_tokens, step_tokens);
        let all = self.prefill.per_unit * units(self.attention_tokens, input_tokens, cached_tokens);
        let uncached = input_tokens.saturating_sub(cached_tokens);
        Stall {
            longest: share * longest,
            total: share * all,
            count: uncached.div_ceil(step_tokens.max(1)),
        }
    }

    /// Engines cut a prompt into full steps and a rest. The last full step is the longest of its kind, since its tokens attend
    /// to all before them; the rest may be longer still, by attending to more.
    fn longest_step(&self, input_tokens: u64, cached_tokens: u64, step_tokens: u64) -> f64 {
        let cached = cached_tokens.min(input_tokens);
        let rest = (input_tokens - cached) % step_tokens.max(1);
        let before_rest = input_tokens - rest;
        let before_last = before_rest.saturating_sub(step_tokens).max(cached);
        let work = |to, from| units(self.attention_tokens, to, from);
        let longest = work(before_rest, before_last).max(work(input_tokens, before_rest));
        self.prefill.per_unit * longest
    }
}

/// Returns the work of a prompt in tokens, with what its tokens pay for attending to those before them.
fn units(attention_tokens: Option<f64>, input_tokens: u64, cached_tokens: u64) -> f64 {
    let all = input_tokens as f64;
    let cached = cached_tokens.min(input_tokens) as f64;
    let attention = attention_tokens.map_or(0.0, |tokens| (all * all - cached * cached) / tokens);
    all - cached + attention
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(value: f64, expected: f64) {
        assert!((value - expected).abs() < 1e-9, "{value} for {expected}");
    }

    fn seeded(attention_tokens: Option<f64>, fixed_seconds: f64) -> WorkerEstimate {
        let mut worker = WorkerEstimate::default();
        worker.seed(&PrefillSeed {
            tokens_per_second: 1_000.0,
            fixed_seconds,
            attention_tokens,
        });
        worker
    }

    #[test]
    fn attention_makes_long_prompts_dearer() {
        let worker = seeded(Some(1_000.0), 0.5).known().unwrap();
        // 0.5 + (1,000 + 1,000² ÷ 1,000) ÷ 1,000; the second thousand attends to the first as well.
        assert_close(worker.prefill_seconds(1_000, 0), 2.5);
        assert_close(worker.prefill_seconds(2_000, 1_000), 4.5);
        assert_close(worker.prefill_seconds(2_000, 2_000), 0.5);
        assert_close(worker.prefill_seconds(2_000, 9_000), 0.5);
    }

    #[test]
    fn a_prompt_stalls_streams_for_its_longest_step() {
        let mut worker = seeded(None, 0.0);
        let stall = |worker: &WorkerEstimate, input, cached| {
            let known = worker.known().unwrap();
            known.prefill_stall(input, cached, 2_000).longest
        };
        assert_close(stall(&worker, 500, 0), 0.5);
        assert_close(stall(&worker, 9_000, 0), 2.0);
        assert_close(stall(&worker, 9_000, 8_900), 0.1);
        assert_close(stall(&worker, 9_000, 10_000), 0.0);
        let whole = worker.known().unwrap().prefill_stall(9_000, 0, 2_000);
        assert_close(whole.total, 9.0);
        assert_eq!(whole.count, 5);
        for _ in 0..3 {
            worker.observe_gap(Duration::from_millis(100), GapCause::Decode, 2_000);
        }
        // Gaps of 1.1 s where 2 s were predicted: 1.0 beyond the usual 0.1.
        let work = PrefillWork {
            input_tokens: 9_000,
            ..PrefillWork::default()
        };
        worker.observe_gap(Duration::from_millis(1_100), GapCause::Prefill(work), 2_000);
        assert_close(stall(&worker, 9_000, 0), 1.0);
        // 0.4 s beyond the usual for 8,000 tokens.
        let arrival = GapCause::Transfer { tokens: 8_000 };
        worker.observe_gap(Duration::from_millis(500), arrival, 2_000);
        assert_close(
            worker.known().unwrap().transfer_stall.unwrap(),
            0.4 / 8_000.0,
        );
    }

    #[test]
    fn a_rest_that_attends_to_more_is_the_longest_step() {
        let stall = |attention, input| {
            let known = seeded(attention, 0.0).known().unwrap();
            known.prefill_stall(input, 0, 2_000).longest
        };
        assert_close(stall(None, 3_900), 2.0);
        // 2,000 + 2,000² ÷ 10,000 = 2,400; 1,900 + (3,900² − 2,000²) ÷ 10,000 = 3,021.
        assert_close(stall(Some(10_000.0), 3_900), 3.021);
        assert_close(stall(Some(10_000.0), 2_000), 2.4);
    }

    #[test]
    fn waiting_prompts_are_part_of_what_is_measured() {
        let mut worker = WorkerEstimate::default();
        for queued_tokens in [0, 1_000, 4_000] {
            let work = PrefillWork {
                input_tokens: 1_000,
                cached_tokens: 0,
                queued_tokens,
            };
            let seconds = (1_000 + queued_tokens) as f64 / 10_000.0;
            worker.observe_prefill(&work, Duration::from_secs_f64(seconds));
        }
        assert_close(worker.known().unwrap().prefill_seconds(1_000, 0), 0.1);
    }
}
