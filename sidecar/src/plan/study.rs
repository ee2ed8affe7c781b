//! One model between two workers, asked for many prompt lengths.

use std::path::Path;
use std::time::{Duration, Instant};

use kvlane::handoff::{
    DecidedBy, GapCause, HandoffConfig, HandoffOption, HandoffPlanner, KvOptions, KvShape, LinkId,
    PlanRequest, PlanWorker, PrefillSeed, Route, attention_tokens,
};
use kvlane::{Error, ErrorKind, Result, Role, WorkerId, WorkerRank};
use serde::Serialize;

use super::args::{LinkSpeed, PlanArgs};
use super::table::grouped;
use crate::bounded;

/// What is compared: the workers, the model and the targets.
#[derive(Debug)]
pub(super) struct Study {
    shape: KvShape,
    planner: HandoffPlanner,
    workers: [PlanWorker; 2],
    link: LinkId,
    link_fixed: Duration,
    now: Instant,
}

/// A prompt length and what the planner says of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Point {
    pub(super) tokens: u64,
    pub(super) kv_bytes: f64,
    pub(super) one_worker: Prediction,
    pub(super) two_workers: Prediction,
    pub(super) split: bool,
    pub(super) decided_by: DecidedBy,
    /// Throughput above which two workers would be chosen; none when no link is fast enough.
    pub(super) pays_from_bytes_per_second: Option<f64>,
}

/// What the planner predicts of an option.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Prediction {
    pub(super) ttft_seconds: f64,
    pub(super) gap_seconds: f64,
}

/// A link and its points.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct LinkPoints {
    pub(super) link: String,
    pub(super) bytes_per_second: f64,
    pub(super) points: Vec<Point>,
    /// Prompt lengths at which the choice changes, within the range of the points.
    pub(super) changes_at_tokens: Vec<u64>,
}

impl Study {
    pub(super) fn new(args: &PlanArgs) -> Result<Self> {
        let (shape, attention) = model(args)?;
        let config = HandoffConfig::default().objectives(
            args.ttft_objective_ms / 1e3,
            Some(args.itl_objective_ms / 1e3),
        );
        let planner = HandoffPlanner::new(config)?;
        let attention_tokens = args.attention_tokens.or(attention);
        if let Some(tokens) = attention_tokens.filter(|tokens| !(1.0..=1e15).contains(tokens)) {
            return Err(refused(format!(
                "--attention-tokens {tokens} is out of range: 1 to 10^15 is accepted"
            )));
        }
        let seed = PrefillSeed {
            attention_tokens,
            ..PrefillSeed::tokens_per_second(speed(args, attention_tokens))
        };
        let worker = |name, role| -> Result<PlanWorker> {
            let worker = WorkerId::new(name)?;
            let mut worker = PlanWorker::new(WorkerRank { worker, dp_rank: 0 }, role);
            worker.step_tokens = args.step_tokens.max(1);
            planner.seed_prefill(&worker.target, &seed)?;
            Ok(worker)
        };
        let workers = [
            worker("prefill", Role::Prefill)?,
            worker("decode", Role::Both)?.running_streams(args.streams),
        ];
        let gap = seconds("--gap-ms", args.gap_ms)?;
        planner.observe_gap(&workers[1], gap, GapCause::Decode);
        Ok(Self {
            shape,
            planner,
            workers,
            link: LinkId::new("link"),
            link_fixed: seconds("--link-fixed-ms", args.link_fixed_ms)?,
            now: Instant::now(),
        })
    }

    pub(super) fn bytes_per_token(&self) -> f64 {
        self.shape.bytes_per_token()
    }

    /// Returns what the planner says over each link of the arguments.
    pub(super) fn links(&self, args: &PlanArgs) -> Result<Vec<LinkPoints>> {
        args.link
            .iter()
            .map(|link| self.link(link, &args.tokens))
            .collect()
    }

    fn link(&self, link: &LinkSpeed, tokens: &[u64]) -> Result<LinkPoints> {
        let mut tokens = tokens.to_vec();
        tokens.sort_unstable();
        tokens.dedup();
        let speed = link.bytes_per_second;
        let points: Vec<_> = tokens
            .iter()
            .map(|tokens| self.point(*tokens, speed))
            .collect::<Result<_>>()?;
        let mut changes_at_tokens = Vec::new();
        for pair in points.windows(2) {
            if pair[0].split != pair[1].split {
                changes_at_tokens.push(self.change(&pair[0], &pair[1], speed)?);
            }
        }
        Ok(LinkPoints {
            link: link.to_string(),
            bytes_per_second: speed,
            points,
            changes_at_tokens,
        })
    }

    /// Returns the first length between two at which the choice is that of the longer.
    fn change(&self, from: &Point, to: &Point, speed: f64) -> Result<u64> {
        let (mut low, mut high) = (from.tokens, to.tokens);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.ask(middle, speed)?.split == to.split {
                high = middle;
            } else {
                low = middle;
            }
        }
        Ok(high)
    }

    fn point(&self, tokens: u64, speed: f64) -> Result<Point> {
        Ok(Point {
            pays_from_bytes_per_second: self.pays_from(tokens)?,
            ..self.ask(tokens, speed)?
        })
    }

    /// Searches the throughput from which on two workers are chosen: the faster a link, the sooner they are.
    pub(super) fn pays_from(&self, tokens: u64) -> Result<Option<f64>> {
        let (mut low, mut high) = (SLOWEST.ln(), FASTEST.ln());
        if !self.ask(tokens, FASTEST)?.split {
            return Ok(None);
        }
        for _ in 0..50 {
            let middle = f64::midpoint(low, high);
            if self.ask(tokens, middle.exp())?.split {
                high = middle;
            } else {
                low = middle;
            }
        }
        Ok(Some(high.exp()))
    }

    fn ask(&self, tokens: u64, speed: f64) -> Result<Point> {
        self.planner.seed_link(&self.link, speed, self.link_fixed)?;
        let request = PlanRequest {
            input_tokens: tokens,
            shape: &self.shape,
            splittable: true,
        };
        let link = |_: &PlanWorker, _: &PlanWorker| Some(self.link.clone());
        let plan = self.planner.plan(&request, &self.workers, link, self.now);
        let is_pair = |option: &&HandoffOption| matches!(option.route, Route::Pair { .. });
        let prediction = |option: Option<&HandoffOption>| {
            option
                .map(|option| Prediction {
                    ttft_seconds: option.ttft.total_seconds,
                    gap_seconds: option.itl.gap_seconds,
                })
                .ok_or_else(|| refused("the planner gave no plan".to_owned()))
        };
        Ok(Point {
            tokens,
            kv_bytes: self.shape.bytes(tokens),
            one_worker: prediction(plan.options.iter().find(|option| !is_pair(option)))?,
            two_workers: prediction(plan.options.iter().find(is_pair))?,
            split: plan.chosen().as_ref().is_some_and(is_pair),
            decided_by: plan.decided_by,
            pays_from_bytes_per_second: None,
        })
    }
}

/// A modem, and a tenth of what the fastest memory reads: no link is outside.
const SLOWEST: f64 = 1e3;
const FASTEST: f64 = 1e14;
/// A `config.json` has some kilobytes.
const MAX_CONFIG: u64 = 16 << 20;

/// Reads the model: its KV cache, and from where on it attends more than it multiplies.
fn model(args: &PlanArgs) -> Result<(KvShape, Option<f64>)> {
    if let Some(bytes) = args.kv_bytes_per_token {
        return Ok((KvShape::per_token(bytes)?, None));
    }
    let path = args.model.as_deref().unwrap_or_else(|| Path::new("."));
    let file = if path.is_dir() {
        path.join("config.json")
    } else {
        path.to_path_buf()
    };
    let config = bounded::read_text(&file, MAX_CONFIG)
        .map_err(|error| refused(format!("cannot read {}", file.display())).with_source(error))?;
    let options = KvOptions::default()
        .cache_dtype(&args.kv_cache_dtype)
        .tensor_parallel(args.tensor_parallel);
    Ok((
        KvShape::from_config(&config, &options)?,
        attention_tokens(&config)?,
    ))
}

/// Tells what a model's configuration alone can: bytes of KV, and where attention dominates.
pub(super) fn model_alone(args: &PlanArgs) -> Result<String> {
    let (shape, attention) = model(args)?;
    let bytes = shape.bytes_per_token();
    let attention = args.attention_tokens.or(attention);
    if args.json {
        let json = serde_json::json!({"kv_bytes_per_token": bytes, "attention_tokens": attention});
        return Ok(format!("{json:#}\n"));
    }
    let attention = attention.map_or_else(String::new, |tokens| {
        format!(
            "; attention takes as long as everything else at {} tokens",
            grouped(tokens)
        )
    });
    Ok(format!(
        "{} KV bytes a token{attention}.\n\nhandoff:\n  kv_bytes_per_token: {bytes}\n",
        grouped(bytes)
    ))
}

/// Returns the median speed of the measured prompts, attention aside.
fn speed(args: &PlanArgs, attention_tokens: Option<f64>) -> f64 {
    let mut speeds: Vec<f64> = args
        .prefill
        .iter()
        .map(|point| {
            let tokens = point.tokens as f64;
            let attention = attention_tokens.map_or(0.0, |at| tokens * tokens / at);
            (tokens + attention) / (point.ms / 1e3)
        })
        .collect();
    speeds.sort_by(f64::total_cmp);
    speeds.get(speeds.len() / 2).copied().unwrap_or(f64::NAN)
}

fn seconds(flag: &str, ms: f64) -> Result<Duration> {
    if (0.0..=1e9).contains(&ms) {
        return Ok(Duration::from_secs_f64(ms / 1e3));
    }
    Err(refused(format!(
        "{flag} {ms} is out of range: 0 to 10^9 is accepted"
    )))
}

fn refused(message: String) -> Error {
    Error::new(ErrorKind::Config, message)
}
