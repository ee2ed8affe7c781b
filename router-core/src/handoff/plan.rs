//! The options of one request, predicted, weighed and explained.

use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use crate::ids::{Role, WorkerRank};

use super::estimate::WorkerSpeed;
use super::link::Link;
use super::options::{HandoffConfig, LinkId, PlanRequest, PlanWorker};

/// What to do with a request, and why.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HandoffPlan {
    /// Every option, the chosen one first; empty when no worker can serve the request.
    pub options: Vec<HandoffOption>,
    /// What made the first option the first.
    pub decided_by: DecidedBy,
    /// Pairs that are no option, and why not.
    pub excluded: Vec<Excluded>,
    /// The target of the first token's time that weighed the options.
    pub ttft_objective_seconds: f64,
    /// The target of the gap between tokens that weighed them, if there is one.
    pub itl_objective_seconds: Option<f64>,
}

impl HandoffPlan {
    /// Returns the chosen option.
    #[must_use]
    pub fn chosen(&self) -> Option<&HandoffOption> {
        self.options.first()
    }
}

/// One way to serve the request, with what it is predicted to cost.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HandoffOption {
    /// The worker or workers.
    #[serde(flatten)]
    pub route: Route,
    /// By how much both targets are missed, each in multiples of itself, and a tenth of the first token's time within its
    /// target: with `t` and `g` the predictions divided by their targets, `0.1 × min(t, 1) + max(t − 1, 0)` and
    /// `max(g − 1, 0)` for each gap that is stalled. Lower is better.
    pub cost: f64,
    /// The time to the first token.
    pub ttft: TtftTerms,
    /// What streams that run already will notice.
    pub itl: ItlTerms,
}

/// Where a request is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "route", rename_all = "snake_case")]
pub enum Route {
    /// On one worker.
    Single {
        /// It processes the prompt and decodes.
        worker: WorkerRank,
    },
    /// On two, with the KV cache handed over.
    Pair {
        /// It processes the prompt.
        prefill: WorkerRank,
        /// It decodes.
        decode: WorkerRank,
        /// What the cache moves over.
        link: LinkId,
    },
}

/// The predicted time to the first token; the seconds add up to `total_seconds`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TtftTerms {
    /// Sum of all.
    pub total_seconds: f64,
    /// Prompts that wait there already.
    pub queue_seconds: f64,
    /// The prompt's own prefill.
    pub prefill_seconds: f64,
    /// What a transfer costs whatever its size.
    pub transfer_fixed_seconds: f64,
    /// The bytes at the link's whole speed.
    pub transfer_seconds: f64,
    /// What other transfers on the link add.
    pub sharing_seconds: f64,
    /// Tokens to prefill.
    pub uncached_tokens: u64,
    /// Bytes to move.
    pub transfer_bytes: f64,
    /// The worker's speed was not measured: it is that of its peers, or the configured assumption.
    pub assumed_speed: bool,
    /// No transfer has told the link's speed yet: it is that of its seed.
    pub seeded_link: bool,
}

/// The predicted effect on streams that run already, where it is worst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ItlTerms {
    /// The longest gap between two tokens; 0 when no stream is affected.
    pub gap_seconds: f64,
    /// The usual gap there.
    pub base_seconds: f64,
    /// What this request adds to the longest.
    pub stall_seconds: f64,
    /// Gaps that it makes longer: one for each step of a prompt, one for an arriving cache.
    pub stalled_gaps: u64,
    /// What it adds to all of them together.
    pub total_stall_seconds: f64,
    /// By how much the stalled gaps miss their target, in multiples of it, summed up.
    pub missed: f64,
    /// Streams that are stalled, on all workers together.
    pub stalled_streams: u32,
}

/// What decided between the options.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DecidedBy {
    /// Nothing can serve the request.
    Nothing,
    /// There was one option.
    Only,
    /// The chosen option is best in both.
    Both,
    /// It brings the first token soonest, and that was worth more than the gaps it causes.
    Ttft,
    /// It spares running streams, and that was worth more than its later first token.
    Itl,
    /// Options cost the same; the one with fewer parts that can fail was taken.
    Simplicity,
}

/// A pair that is no option.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Excluded {
    /// The worker that would process the prompt.
    pub prefill: WorkerRank,
    /// The worker that would decode.
    pub decode: WorkerRank,
    /// Why not.
    pub reason: Reason,
    /// The two groups, where they are the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub groups: Option<[Option<Arc<str>>; 2]>,
}

impl Excluded {
    pub(super) fn new(prefill: &PlanWorker, decode: &PlanWorker, reason: Reason) -> Self {
        let groups = || [prefill.group.clone(), decode.group.clone()];
        Self {
            prefill: prefill.target.clone(),
            decode: decode.target.clone(),
            reason,
            groups: (reason == Reason::OtherGroup).then(groups),
        }
    }
}

/// Why a pair is no option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The request cannot be split (several answers, beam search).
    Unsplittable,
    /// Engine version, model or connector differ.
    OtherGroup,
    /// Nothing connects them.
    NoLink,
    /// The link was neither measured nor seeded; requests are not split on a guess.
    UnmeasuredLink,
    /// How fast any of the workers computes a prompt is not known yet, nor assumed by the configuration, and one worker can
    /// serve the request.
    SpeedNotKnown,
}

/// Costs nearer than this share count as equal: predictions are no better than that.
const TIE: f64 = 0.01;

/// What the options are computed from.
#[derive(Debug)]
pub(super) struct Context<'a> {
    pub(super) config: &'a HandoffConfig,
    pub(super) request: &'a PlanRequest<'a>,
    pub(super) workers: &'a [PlanWorker],
    /// Of each worker: its speed, and whether that is assumed.
    pub(super) speeds: Vec<(WorkerSpeed, bool)>,
    /// None of these speeds is more than a guess, and a worker serves alone.
    pub(super) must_not_guess: bool,
}

impl Context<'_> {
    /// Predicts serving the request on one worker.
    pub(super) fn single(&self, at: usize) -> HandoffOption {
        let ttft = self.prefill(at);
        let itl = self.interference(at, None);
        let worker = self.workers[at].target.clone();
        self.weighed(Route::Single { worker }, ttft, itl)
    }

    /// Predicts serving it on two; `None` when the link's speed is not known.
    pub(super) fn pair(
        &self,
        prefill: usize,
        decode: usize,
        link: (LinkId, &Link),
        now: Instant,
    ) -> Option<HandoffOption> {
        let (link_id, link) = link;
        let fit = link.fit()?;
        let mut ttft = self.prefill(prefill);
        let held = self.workers[decode].cached_tokens;
        let input = self.request.input_tokens;
        let bytes = self.request.shape.bytes_after(input, held);
        let seconds = link.seconds(bytes, ttft.total_seconds, now)?;
        ttft.transfer_bytes = bytes;
        ttft.seeded_link = !link.is_measured();
        ttft.transfer_fixed_seconds = fit.fixed;
        ttft.transfer_seconds = fit.per_unit * bytes;
        ttft.sharing_seconds = (seconds - fit.seconds(bytes)).max(0.0);
        ttft.total_seconds += seconds;
        let itl = self.interference(prefill, Some(decode));
        let target = |at: usize| self.workers[at].target.clone();
        let route = Route::Pair {
            prefill: target(prefill),
            decode: target(decode),
            link: link_id,
        };
        Some(self.weighed(route, ttft, itl))
    }

    /// Tells why a pair is no option, as far as that does not depend on its link.
    pub(super) fn excluded(&self, prefill: usize, decode: usize) -> Option<Reason> {
        if !self.request.splittable {
            return Some(Reason::Unsplittable);
        }
        if self.workers[prefill].group != self.workers[decode].group {
            return Some(Reason::OtherGroup);
        }
        self.must_not_guess.then_some(Reason::SpeedNotKnown)
    }

    /// Returns the pairs by role. Of very many, those with the quickest prefill and the most of the prompt at the decoder.
    pub(super) fn pairs(&self) -> Vec<(usize, usize)> {
        let serving = |role: Role| {
            let serves = move |at: &usize| self.workers[*at].role.serves(role);
            (0..self.workers.len()).filter(serves).collect::<Vec<_>>()
        };
        let (mut prefill, mut decode) = (serving(Role::Prefill), serving(Role::Decode));
        if prefill.len() * decode.len() > MAX_PAIRS {
            let seconds = |at: &usize| self.prefill(*at).total_seconds;
            prefill.sort_by(|one, other| seconds(one).total_cmp(&seconds(other)));
            decode.sort_by_key(|at| {
                let worker = &self.workers[*at];
                (
                    std::cmp::Reverse(worker.cached_tokens),
                    worker.running_streams,
                )
            });
            prefill.truncate(SHORTLIST);
            decode.truncate(SHORTLIST);
        }
        let all = prefill
            .iter()
            .flat_map(|prefill| decode.iter().map(move |decode| (*prefill, *decode)));
        all.filter(|(prefill, decode)| prefill != decode).collect()
    }

    fn prefill(&self, at: usize) -> TtftTerms {
        let worker = &self.workers[at];
        let (speed, assumed_speed) = self.speeds[at];
        let input = self.request.input_tokens;
        let queue_seconds = speed.queue_seconds(worker.queued_prefill_tokens);
        let prefill_seconds = speed.prefill_seconds(input, worker.cached_tokens);
        TtftTerms {
            total_seconds: queue_seconds + prefill_seconds,
            queue_seconds,
            prefill_seconds,
            uncached_tokens: input.saturating_sub(worker.cached_tokens),
            assumed_speed,
            ..TtftTerms::default()
        }
    }

    fn weighed(&self, route: Route, ttft: TtftTerms, itl: ItlTerms) -> HandoffOption {
        let wait = ttft.total_seconds / self.config.ttft_objective_seconds;
        HandoffOption {
            route,
            cost: WITHIN * wait.min(1.0) + (wait - 1.0).max(0.0) + itl.missed,
            ttft,
            itl,
        }
    }
}

/// Weight of waiting within its target. Small, so that an option that misses the other target never wins by it; not
/// nothing, since a first token cannot come too soon. An assumption, not a measurement.
const WITHIN: f64 = 0.1;
/// Pairs computed one by one; above, the shortlists of both sides are crossed.
const MAX_PAIRS: usize = 1_024;
const SHORTLIST: usize = 32;

/// Puts the option to choose first, and says what decided.
///
/// Among options that cost the same, one worker comes before two, then the earlier first token, then the order given. The
/// others are not sorted: that would take longer than all predictions.
pub(super) fn choose(options: &mut [HandoffOption]) -> DecidedBy {
    let costs = options.iter().map(|option| option.cost);
    let Some(cheapest) = costs.min_by(f64::total_cmp) else {
        return DecidedBy::Nothing;
    };
    let limit = cheapest * (1.0 + TIE);
    let is_pair = |option: &HandoffOption| matches!(option.route, Route::Pair { .. });
    let best = options
        .iter()
        .enumerate()
        .filter(|(_, option)| option.cost <= limit)
        .min_by(|(_, one), (_, other)| {
            let key = is_pair(one).cmp(&is_pair(other));
            key.then(one.ttft.total_seconds.total_cmp(&other.ttft.total_seconds))
        })
        .map_or(0, |(at, _)| at);
    let tied = options[best].cost > cheapest;
    options[..=best].rotate_right(1);
    decided_by(options, tied)
}

fn decided_by(options: &[HandoffOption], tied: bool) -> DecidedBy {
    let [chosen, others @ ..] = options else {
        return DecidedBy::Nothing;
    };
    if others.is_empty() {
        return DecidedBy::Only;
    }
    let best = |value: fn(&HandoffOption) -> f64| {
        let least = others.iter().map(value).fold(f64::INFINITY, f64::min);
        value(chosen) <= least
    };
    let first_token = best(|option| option.ttft.total_seconds);
    let gap = best(|option| option.itl.gap_seconds);
    match (first_token, gap) {
        (true, true) => DecidedBy::Both,
        _ if tied => DecidedBy::Simplicity,
        (true, false) => DecidedBy::Ttft,
        (false, _) => DecidedBy::Itl,
    }
}
