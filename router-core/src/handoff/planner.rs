//! Learns how fast workers and links are, and plans with it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use serde::Serialize;

use crate::error::Result;
use crate::ids::WorkerRank;
use crate::sync::Mutex;

use super::estimate::{GapCause, PrefillWork, WorkerEstimate, WorkerSpeed};
use super::link::Link;
use super::options::{HandoffConfig, LinkId, PlanRequest, PlanWorker, PrefillSeed, positive};
use super::plan::{Context, Excluded, HandoffOption, HandoffPlan, Reason, Route, choose};

/// Chooses a pair of workers or a single one for each request, from measured speeds and the operator's targets.
///
/// Feed it what happens (`observe_*`, and a [`TransferGuard`] for each handoff), ask it with [`plan`](Self::plan). What a
/// racing reader sees: a plan counts every transfer whose guard exists, and none whose guard is gone.
///
/// # Examples
/// ```
/// use kvlane::handoff::{HandoffConfig, HandoffPlanner, KvShape, LinkId, PlanRequest, PlanWorker, PrefillSeed, Route};
/// use kvlane::{Role, WorkerId, WorkerRank};
/// # use std::time::{Duration, Instant};
/// # let now = Instant::now();
///
/// let planner = HandoffPlanner::new(HandoffConfig::default())?;
/// let target = |name| Ok::<_, kvlane::Error>(WorkerRank { worker: WorkerId::new(name)?, dp_rank: 0 });
/// let (p, d, link) = (target("p")?, target("d")?, LinkId::new("1 GbE"));
/// for worker in [&p, &d] {
///     planner.seed_prefill(worker, &PrefillSeed::tokens_per_second(20_000.0))?;
/// }
/// planner.seed_link(&link, 104e6, Duration::ZERO)?;
///
/// let shape = KvShape::dense(28, 8, 128, 2.0)?;
/// let request = PlanRequest { input_tokens: 3_000, shape: &shape, splittable: true };
/// let workers = [PlanWorker::new(p, Role::Prefill), PlanWorker::new(d.clone(), Role::Decode)];
/// let plan = planner.plan(&request, &workers, |_, _| Some(link.clone()), now);
/// // 3,000 ÷ 20,000 = 0.15 s on one worker; 344 MB at 104 MB/s = 3.3 s more on two.
/// assert_eq!(plan.chosen().unwrap().route, Route::Single { worker: d });
/// # Ok::<(), kvlane::Error>(())
/// ```
#[derive(Debug)]
pub struct HandoffPlanner {
    config: HandoffConfig,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    workers: HashMap<WorkerRank, WorkerEstimate>,
    links: HashMap<LinkId, Link>,
    next_transfer: u64,
}

impl HandoffPlanner {
    /// Creates a planner that has measured nothing.
    ///
    /// # Errors
    /// As [`HandoffConfig::validate`].
    pub fn new(config: HandoffConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self {
            config,
            state: Arc::default(),
        })
    }

    /// Returns the configuration.
    #[must_use]
    pub const fn config(&self) -> &HandoffConfig {
        &self.config
    }

    /// Sets what is believed of a worker's prefill until two of its prompts tell otherwise.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) unless speed and attention tokens are above 0 and the fixed part is
    /// not negative.
    pub fn seed_prefill(&self, worker: &WorkerRank, seed: &PrefillSeed) -> Result<()> {
        positive("tokens_per_second", seed.tokens_per_second, 1e-3)?;
        positive("fixed_seconds", seed.fixed_seconds, 0.0)?;
        positive(
            "attention_tokens",
            seed.attention_tokens.unwrap_or(1.0),
            1.0,
        )?;
        let mut state = self.state.lock();
        state.workers.entry_ref(worker).or_default().seed(seed);
        Ok(())
    }

    /// Sets what is believed of a link until two transfers tell otherwise: bytes per second of one transfer alone, and what a
    /// transfer costs whatever its size.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) unless the speed is above 0.
    pub fn seed_link(&self, link: &LinkId, bytes_per_second: f64, fixed: Duration) -> Result<()> {
        positive("bytes_per_second", bytes_per_second, 1e-3)?;
        let mut state = self.state.lock();
        let link = state.links.entry_ref(link).or_default();
        link.seed(bytes_per_second, fixed);
        Ok(())
    }

    /// Takes in the time from sending a prompt to its first token, or to the answer of a prefill leg. Prompts of less than 1,024
    /// tokens to compute tell no speed: what is fixed outweighs what each token takes.
    pub fn observe_prefill(&self, worker: &WorkerRank, work: &PrefillWork, elapsed: Duration) {
        let mut state = self.state.lock();
        let estimate = state.workers.entry_ref(worker).or_default();
        estimate.observe_prefill(work, elapsed);
    }

    /// Takes in the time between two tokens of one stream, and what else went on meanwhile.
    pub fn observe_gap(&self, worker: &PlanWorker, gap: Duration, cause: GapCause) {
        let mut state = self.state.lock();
        let estimate = state.workers.entry_ref(&worker.target).or_default();
        estimate.observe_gap(gap, cause, worker.step_tokens);
    }

    /// Takes in a transfer that was alone on its link, such as a probe's: from the prefill's end to the first token, or to
    /// the arrival of the last byte.
    pub fn observe_transfer(&self, link: &LinkId, bytes: f64, elapsed: Duration) {
        let mut state = self.state.lock();
        let link = state.links.entry_ref(link).or_default();
        link.observe(bytes, elapsed);
    }

    /// Forgets a worker.
    pub fn remove_worker(&self, worker: &WorkerRank) {
        self.state.lock().workers.remove(worker);
    }

    /// Forgets the workers that `keep` does not name: requests that end late teach of workers that are gone.
    pub fn retain_workers(&self, keep: impl Fn(&WorkerRank) -> bool) {
        self.state.lock().workers.retain(|worker, _| keep(worker));
    }

    /// Forgets a link. Transfers that are open on it end without effect.
    pub fn remove_link(&self, link: &LinkId) {
        self.state.lock().links.remove(link);
    }

    /// Predicts every option for a request and chooses.
    ///
    /// `link_of` names what lies between a prefill and a decode worker, if anything. Of more than 1,024 pairs, those with the
    /// quickest prefill and the most of the prompt at the decoder are compared.
    ///
    /// Takes 0.2 µs for each pair whose link is idle and up to 0.5 µs where transfers are open on it: 3 µs for 4 × 4 workers, 50
    /// to 130 µs for 16 × 16 (release build, a busy 2-core machine).
    #[must_use]
    pub fn plan(
        &self,
        request: &PlanRequest<'_>,
        workers: &[PlanWorker],
        link_of: impl Fn(&PlanWorker, &PlanWorker) -> Option<LinkId>,
        now: Instant,
    ) -> HandoffPlan {
        let mut state = self.state.lock();
        for link in state.links.values_mut() {
            link.advance(now);
        }
        let (speeds, is_guess) = state.speeds(workers, &self.config);
        let context = Context {
            config: &self.config,
            request,
            workers,
            speeds,
            must_not_guess: is_guess && workers.iter().any(|worker| worker.serves_alone),
        };
        let alone = |at: &usize| workers[*at].serves_alone;
        let singles = (0..workers.len()).filter(alone);
        let mut options: Vec<_> = singles.map(|at| context.single(at)).collect();
        let mut excluded = Vec::new();
        for (prefill, decode) in context.pairs() {
            let pair = state.pair(&context, (prefill, decode), &link_of, now);
            match pair {
                Ok(option) => options.push(option),
                Err(reason) => {
                    excluded.push(Excluded::new(&workers[prefill], &workers[decode], reason))
                }
            }
        }
        let decided_by = choose(&mut options);
        HandoffPlan {
            options,
            decided_by,
            excluded,
            ttft_objective_seconds: self.config.ttft_objective_seconds,
            itl_objective_seconds: self.config.itl_objective_seconds,
        }
    }

    /// Books the transfer of a plan's chosen pair, so that later plans count it; `None` when one worker was chosen.
    #[must_use]
    pub fn book(&self, plan: &HandoffPlan, now: Instant) -> Option<TransferGuard> {
        let chosen = plan.chosen()?;
        let Route::Pair { link, .. } = &chosen.route else {
            return None;
        };
        let prefill = chosen.ttft.queue_seconds + chosen.ttft.prefill_seconds;
        let prefill = Duration::try_from_secs_f64(prefill).unwrap_or(MAX_WAIT);
        let mut state = self.state.lock();
        let id = state.next_transfer;
        state.next_transfer += 1;
        let assumed = self.config.assumed_prefill_tokens_per_second;
        let knows_prefill = assumed.is_some() || state.knows_prefill();
        let open = state.links.entry_ref(link).or_default();
        open.book(id, chosen.ttft.transfer_bytes, prefill.min(MAX_WAIT), now);
        Some(TransferGuard {
            state: Arc::clone(&self.state),
            link: link.clone(),
            id,
            knows_prefill,
        })
    }

    /// Returns what is known.
    #[must_use]
    pub fn stats(&self) -> HandoffStats {
        let state = self.state.lock();
        let mut prefill: Vec<_> = state.workers.iter().filter_map(PrefillStats::of).collect();
        prefill.sort_by(|one, other| one.worker.cmp(&other.worker));
        let mut links: Vec<_> = state.links.iter().map(LinkStats::of).collect();
        links.sort_by(|one, other| one.link.cmp(&other.link));
        HandoffStats { prefill, links }
    }
}

/// A prefill that is predicted to take longer is as good as never done; also keeps instants from overflowing.
const MAX_WAIT: Duration = Duration::from_secs(86_400);

/// Prompt tokens per second where nothing tells them: what is predicted with it is shown, and decides nothing but between workers
/// that serve alone or, where none does, between pairs. Between a small model on a small card and a large one on several.
const GUESS: f64 = 10_000.0;

impl State {
    /// Tells whether the speed of any worker is known: others are taken to be as fast.
    fn knows_prefill(&self) -> bool {
        let known = |estimate: &WorkerEstimate| estimate.known().is_some();
        self.workers.values().any(known)
    }

    /// Returns each worker's speed, that of its peers where it has none of its own; and whether all of them are a guess.
    fn speeds(
        &self,
        workers: &[PlanWorker],
        config: &HandoffConfig,
    ) -> (Vec<(WorkerSpeed, bool)>, bool) {
        let known = |worker: &PlanWorker| self.workers.get(&worker.target)?.known();
        let own: Vec<_> = workers.iter().map(known).collect();
        let estimate = |worker: &PlanWorker| self.workers.get(&worker.target);
        let mut peers: Vec<_> = own.iter().flatten().copied().collect();
        peers.sort_by(|one, other| one.prefill.per_unit.total_cmp(&other.prefill.per_unit));
        let configured = config.assumed_prefill_tokens_per_second;
        let is_guess = peers.is_empty() && configured.is_none();
        let assumed = peers
            .get(peers.len() / 2)
            .copied()
            .unwrap_or_else(|| WorkerSpeed::assumed(configured.unwrap_or(GUESS)));
        // Gaps of a worker are its own, also where its speed is that of its peers.
        let taken = |(speed, worker): (Option<WorkerSpeed>, &PlanWorker)| match speed {
            Some(speed) => (speed, false),
            None => (assumed.with_gaps_of(estimate(worker)), true),
        };
        (own.into_iter().zip(workers).map(taken).collect(), is_guess)
    }

    fn pair(
        &self,
        context: &Context<'_>,
        (prefill, decode): (usize, usize),
        link_of: impl Fn(&PlanWorker, &PlanWorker) -> Option<LinkId>,
        now: Instant,
    ) -> std::result::Result<HandoffOption, Reason> {
        if let Some(reason) = context.excluded(prefill, decode) {
            return Err(reason);
        }
        let workers = context.workers;
        let id = link_of(&workers[prefill], &workers[decode]).ok_or(Reason::NoLink)?;
        let link = self.links.get(&id).ok_or(Reason::UnmeasuredLink)?;
        context
            .pair(prefill, decode, (id, link), now)
            .ok_or(Reason::UnmeasuredLink)
    }
}

/// A transfer that plans count until it ends. Dropping it forgets the transfer without learning from it.
#[derive(Debug)]
#[must_use = "a dropped guard forgets its transfer at once"]
pub struct TransferGuard {
    state: Arc<Mutex<State>>,
    link: LinkId,
    id: u64,
    /// The prediction of its prefill rests on a speed that is known.
    knows_prefill: bool,
}

impl TransferGuard {
    /// Tells that prefill and decode were sent together, so that nobody will tell when the prefill ends and the bytes move: it is
    /// taken to end as predicted, and what is learned from the first token is as good as that. Where no speed of prefill is
    /// known, nothing is.
    pub fn sent_together(&self, now: Instant) {
        if self.knows_prefill
            && let Some(link) = self.state.lock().links.get_mut(&self.link)
        {
            link.starts_unseen(self.id, now);
        }
    }

    /// Tells that nobody will tell when the bytes have arrived, as where the first token comes with the last. Nothing is learned then.
    pub fn ends_unseen(&self) {
        if let Some(link) = self.state.lock().links.get_mut(&self.link) {
            link.ends_unseen(self.id);
        }
    }

    /// Tells that the prefill has ended and the bytes move.
    pub fn started(&self, now: Instant) {
        if let Some(link) = self.state.lock().links.get_mut(&self.link) {
            link.start(self.id, now);
        }
    }

    /// Tells that they have arrived: the first token came. The link's speed is learned from it.
    pub fn finished(self, now: Instant) {
        if let Some(link) = self.state.lock().links.get_mut(&self.link) {
            link.finish(self.id, now);
        }
    }
}

impl Drop for TransferGuard {
    fn drop(&mut self) {
        if let Some(link) = self.state.lock().links.get_mut(&self.link) {
            link.abandon(self.id);
        }
    }
}

/// What a planner knows, as listed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HandoffStats {
    /// Each measured or seeded worker.
    pub prefill: Vec<PrefillStats>,
    /// Each link.
    pub links: Vec<LinkStats>,
}

/// What is known of one worker.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PrefillStats {
    /// The worker.
    pub worker: WorkerRank,
    /// Prompt tokens per second, attention aside, when known: short prompts alone do not tell.
    pub tokens_per_second: Option<f64>,
    /// Seconds of a prefill whatever its length, when known.
    pub fixed_seconds: Option<f64>,
    /// Seconds between tokens when nothing else goes on, when measured.
    pub gap_seconds: Option<f64>,
    /// Measured stall of streams by a prompt as a multiple of its longest step.
    pub prefill_stall: Option<f64>,
    /// Measured stall of streams by an arriving cache, in seconds for each of its tokens.
    pub transfer_stall_seconds_per_token: Option<f64>,
    /// Stalls by prompts and caches in these estimates.
    pub stall_measurements: usize,
    /// Prompts in the estimate; 0 when it is seeded alone.
    pub measurements: usize,
}

impl PrefillStats {
    fn of((worker, estimate): (&WorkerRank, &WorkerEstimate)) -> Option<Self> {
        let prefill = estimate.known().map(|speed| speed.prefill);
        let [gap_seconds, prefill_stall, transfer_stall] = estimate.stalls();
        if prefill.is_none() && gap_seconds.is_none() && estimate.measurements() == 0 {
            return None;
        }
        Some(Self {
            worker: worker.clone(),
            tokens_per_second: prefill.map(|fit| 1.0 / fit.per_unit),
            fixed_seconds: prefill.map(|fit| fit.fixed),
            gap_seconds,
            prefill_stall,
            transfer_stall_seconds_per_token: transfer_stall,
            stall_measurements: estimate.stall_measurements(),
            measurements: estimate.measurements(),
        })
    }
}

/// What is known of one link.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinkStats {
    /// The link.
    pub link: LinkId,
    /// Bytes per second of one transfer alone, when known.
    pub bytes_per_second: Option<f64>,
    /// Seconds of a transfer whatever its size, when known.
    pub fixed_seconds: Option<f64>,
    /// Transfers booked or moving.
    pub open_transfers: usize,
    /// Transfers in the estimate; 0 when it is seeded alone.
    pub measurements: usize,
    /// They tell the speed; else the seed does.
    pub is_measured: bool,
}

impl LinkStats {
    fn of((id, link): (&LinkId, &Link)) -> Self {
        let fit = link.fit();
        Self {
            link: id.clone(),
            bytes_per_second: fit.map(|fit| 1.0 / fit.per_unit),
            fixed_seconds: fit.map(|fit| fit.fixed),
            open_transfers: link.open_transfers(),
            measurements: link.measurements(),
            is_measured: link.is_measured(),
        }
    }
}
