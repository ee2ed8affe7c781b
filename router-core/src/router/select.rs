//! Rank, select and book.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64;

use crate::config::IndexMode;
use crate::error::{Error, Result};
use crate::ids::LeaseId;
use crate::index::Placement;
use crate::load::active::BookedRequest;
use crate::policy::{CostInputs, CostWeights, Fullness, cost, pick};
use crate::prompt::PromptKind;
use crate::trust::TrustState;

use super::lease::{Lease, RequestGuard};
use super::request::{Candidate, Decision, DecisionRecord, SelectRequest};
use super::state::{Booking, Inner, Target, Worker, Workers};
use super::{Known, Router};

/// Decisions kept for explanation.
const HISTORY_KEPT: usize = 256;
/// A session's last target costs a tenth less: enough to break near-ties, too little to overrule load.
const SESSION_PREFERENCE: f64 = 0.9;
/// Sessions remembered at once; beyond, new ones get no preference until old ones are forgotten after the TTL.
pub(super) const SESSIONS_KEPT: usize = 65_536;

/// Every eligible target: what is told of it, and beside that what only the router needs.
struct Priced<'a> {
    candidates: Vec<Candidate>,
    places: Vec<(&'a Worker, &'a Arc<Target>)>,
}

impl Router {
    /// Returns every eligible target, cheapest first (then by worker id and rank). Nothing is booked.
    ///
    /// # Errors
    /// An override or ttl out of range; the router is closed.
    pub fn rank(&self, request: &SelectRequest<'_>, now: Instant) -> Result<Vec<Candidate>> {
        self.check(request)?;
        let workers = self.inner.workers.read();
        let known = self.inner.look_up(request.prompt, now);
        let booking = self.inner.booking.lock();
        let booked = booked_request(request, self.inner.config.block_size.tokens());
        let priced = self
            .inner
            .price(&workers, &booking, request, &known, &booked, now)?;
        let mut candidates = priced.candidates;
        candidates.sort_by(|a, b| a.cost.total.total_cmp(&b.cost.total));
        Ok(candidates)
    }

    /// Chooses a target and books the request on it. `None` when no worker is eligible.
    ///
    /// The decision, the booking and the note of where the prompt went are one step: a concurrent `select` sees them.
    ///
    /// # Errors
    /// An override or ttl out of range; the router is closed.
    pub fn select(
        &self,
        request: &SelectRequest<'_>,
        now: Instant,
    ) -> Result<Option<RequestGuard>> {
        self.check(request)?;
        self.tick_if_due(now);
        let workers = self.inner.workers.read();
        let known = self.inner.look_up(request.prompt, now);
        let booked = booked_request(request, self.inner.config.block_size.tokens());
        let mut booking = self.inner.booking.lock();
        if let Some(earlier) = self.inner.lease_of(request.request_id) {
            self.inner.release(earlier, None, now);
        }
        let priced = self
            .inner
            .price(&workers, &booking, request, &known, &booked, now)?;
        let costs: Vec<f64> = priced
            .candidates
            .iter()
            .map(|candidate| candidate.cost.total)
            .collect();
        let temperature = request
            .overrides
            .temperature
            .unwrap_or(self.inner.config.temperature);
        let fullness = |at: usize| self.inner.fullness(priced.places[at], request);
        let Some(chosen) = pick(&costs, fullness, temperature, &mut booking.rng) else {
            self.inner.counts.no_worker.fetch_add(1, Ordering::Relaxed);
            return Ok(None);
        };
        let guard = self.commit(&mut booking, request, booked, priced, chosen, now);
        Ok(Some(guard))
    }

    /// Books a request on a target that was chosen elsewhere (rank 0 when `dp_rank` is absent). Its cost is explained like
    /// that of a decision; eligibility is not checked.
    ///
    /// # Errors
    /// Unknown worker or rank; a live booking of the same request id; an override or ttl out of range; the router is closed.
    pub fn book(
        &self,
        worker: &str,
        dp_rank: Option<u32>,
        request: &SelectRequest<'_>,
        now: Instant,
    ) -> Result<RequestGuard> {
        self.check(request)?;
        self.tick_if_due(now);
        let workers = self.inner.workers.read();
        let target = workers.target(worker, dp_rank.unwrap_or(0))?;
        let owner = workers.worker(worker)?;
        let known = self.inner.look_up(request.prompt, now);
        let booked = booked_request(request, self.inner.config.block_size.tokens());
        let mut booking = self.inner.booking.lock();
        if let Some(id) = request.request_id
            && self.inner.lease_of(Some(id)).is_some()
        {
            return Err(Error::invalid(format!(
                "request id {id:?} is booked already; finish it first, or let select supersede it"
            )));
        }
        let weights = CostWeights::new(&self.inner.config, &request.overrides);
        let candidate = self
            .inner
            .price_one(&weights, target, request, &known, &booked, 1.0)?;
        let priced = Priced {
            candidates: vec![candidate],
            places: vec![(owner, target)],
        };
        Ok(self.commit(&mut booking, request, booked, priced, 0, now))
    }

    fn check(&self, request: &SelectRequest<'_>) -> Result<()> {
        self.inner.check_open()?;
        request.overrides.validate()?;
        if request
            .ttl
            .is_some_and(|ttl| ttl.is_zero() || ttl > super::MAX_TTL)
        {
            return Err(Error::invalid(format!(
                "ttl of {:?} is out of range: above 0 to {} seconds is accepted",
                request.ttl.unwrap_or_default(),
                super::MAX_TTL.as_secs()
            )));
        }
        Ok(())
    }

    /// Books the chosen candidate and notes where the prompt went.
    fn commit(
        &self,
        booking: &mut Booking,
        request: &SelectRequest<'_>,
        booked: BookedRequest,
        priced: Priced<'_>,
        chosen: usize,
        now: Instant,
    ) -> RequestGuard {
        let inner = &self.inner;
        let id = LeaseId(booking.next_lease);
        booking.next_lease += 1;
        let target = Arc::clone(priced.places[chosen].1);
        let chosen = priced.candidates[chosen].clone();
        let decision = Arc::new(Decision {
            target: chosen.target.clone(),
            overlap: chosen.overlap,
            predicted_blocks: chosen.predicted_blocks,
            predicted_cached_tokens: inner
                .cached_tokens(request, chosen.overlap.blocks() + chosen.predicted_blocks),
            request_blocks: blocks_u32(request.prompt.blocks()),
            trust: chosen.trust,
            candidates: priced.candidates,
        });
        target
            .load
            .lock()
            .booked
            .book(id, &booked, chosen.cost.uncached_prefill_blocks);
        let placement = inner.note_placement(&target, request, chosen.trust, now);
        if let Some(session) = request.session {
            let key = xxh3_64(session.as_bytes());
            if booking.sessions.len() < SESSIONS_KEPT || booking.sessions.contains_key(&key) {
                booking
                    .sessions
                    .insert(key, (target.slot, target.life, now));
            }
        }
        let ttl = request.ttl.unwrap_or_else(|| inner.config.lease());
        let lease = Lease {
            target,
            booked,
            kind: request.prompt.kind(),
            prompt_tokens: request.prompt.tokens(),
            request_blocks: decision.request_blocks,
            expected_output_tokens: request.expected_output_tokens.unwrap_or(0),
            predicted_tokens: decision.predicted_cached_tokens,
            confirmed_tokens: inner.cached_tokens(request, chosen.overlap.blocks()),
            ttl,
            deadline: now + ttl,
            held: true,
            in_prefill: true,
            placement,
            request_id: request.request_id.map(str::to_owned),
        };
        inner.leases.lock().insert(id, lease);
        inner.remember(id, request, &decision);
        RequestGuard::new(self.clone(), id, decision)
    }
}

impl Inner {
    /// Prices every eligible target.
    fn price<'a>(
        &self,
        workers: &'a Workers,
        booking: &Booking,
        request: &SelectRequest<'_>,
        known: &Known,
        booked: &BookedRequest,
        now: Instant,
    ) -> Result<Priced<'a>> {
        let weights = CostWeights::new(&self.config, &request.overrides);
        let session = request.session.and_then(|session| {
            let (slot, life, used) = *booking.sessions.get(&xxh3_64(session.as_bytes()))?;
            (now.saturating_duration_since(used) <= self.config.ttl()).then_some((slot, life))
        });
        let mut priced = Priced {
            candidates: Vec::with_capacity(workers.by_id.len()),
            places: Vec::with_capacity(workers.by_id.len()),
        };
        for worker in workers.by_id.values() {
            if !eligible(worker, request) {
                continue;
            }
            for target in &worker.targets {
                if request
                    .dp_rank
                    .is_some_and(|rank| rank != target.id.dp_rank)
                {
                    continue;
                }
                let preference = if session == Some((target.slot, target.life)) {
                    SESSION_PREFERENCE
                } else {
                    1.0
                };
                let candidate =
                    self.price_one(&weights, target, request, known, booked, preference)?;
                priced.candidates.push(candidate);
                priced.places.push((worker, target));
            }
        }
        Ok(priced)
    }

    fn price_one(
        &self,
        weights: &CostWeights,
        target: &Target,
        request: &SelectRequest<'_>,
        known: &Known,
        booked: &BookedRequest,
        preference: f64,
    ) -> Result<Candidate> {
        let (trust, fidelity) = (target.belief.state(), target.belief.fidelity());
        let (load, decode_blocks) = target.load.lock().before_and_after(booked);
        let inputs = CostInputs {
            request_blocks: blocks_u32(request.prompt.blocks())
                .saturating_add(request.extra_blocks),
            overlap: known.merged(target.slot),
            fidelity,
            load,
            decode_blocks,
            preference,
        };
        Ok(Candidate {
            target: target.id.clone(),
            overlap: known.confirmed.get(target.slot),
            predicted_blocks: known.predicted(target.slot),
            fidelity,
            trust,
            cost: cost(weights, &inputs)?,
        })
    }

    /// How full a target is as far as known: what its events say, or what was placed where they say less.
    ///
    /// One without room for the request counts as full, however many blocks are missing: it evicts as a full one does, and
    /// among caches in their steady state a few blocks more or less must not decide where everything new goes.
    fn fullness(
        &self,
        (worker, target): (&Worker, &Arc<Target>),
        request: &SelectRequest<'_>,
    ) -> Fullness {
        let placed = self.placements(request.prompt.kind()).blocks(target.slot);
        let blocks = target.belief.resident_blocks().max(placed);
        let capacity_blocks = worker.capacity_blocks();
        let needed = request.prompt.blocks() + request.extra_blocks as usize;
        Fullness {
            blocks: match capacity_blocks {
                // Blocks with an incomplete content are in use and in no index: a twentieth is left for them.
                Some(capacity) if blocks + needed + capacity / 20 >= capacity => capacity,
                _ => blocks,
            },
            capacity_blocks,
        }
    }

    /// Returns the tokens that an engine would report as cached for `blocks` leading blocks.
    fn cached_tokens(&self, request: &SelectRequest<'_>, blocks: u32) -> u32 {
        let prompt = request.prompt;
        match prompt.kind() {
            PromptKind::Tokens => {
                let block = self.config.block_size.tokens();
                // Engines compute at least the last token, and cache in whole blocks.
                let most = prompt.tokens().saturating_sub(1) / block * block;
                blocks_u32((blocks as usize * block).min(most))
            }
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "positive; casts saturate"
            )]
            PromptKind::Text => (f64::from(blocks) * self.tokens_per_chunk()) as u32,
        }
    }

    /// Notes that the prompt's blocks will be on the target, for as long as its trust allows.
    fn note_placement(
        &self,
        target: &Target,
        request: &SelectRequest<'_>,
        trust: TrustState,
        now: Instant,
    ) -> Option<Placement> {
        let ttl = self.placement_ttl(request.prompt.kind(), trust)?;
        Some(self.placements(request.prompt.kind()).record(
            target.slot,
            request.prompt.local(),
            now + ttl,
            now,
        ))
    }

    /// Own placements are believed shortly where events will confirm them, and for the full TTL where nothing will.
    pub(super) fn placement_ttl(&self, kind: PromptKind, trust: TrustState) -> Option<Duration> {
        if self.config.index == IndexMode::Events && self.config.prediction_ttl_seconds <= 0.0 {
            return None;
        }
        match (kind, trust) {
            (PromptKind::Tokens, TrustState::Exact) => Some(self.config.prediction_ttl()),
            _ => Some(self.config.ttl()),
        }
    }

    fn remember(&self, id: LeaseId, request: &SelectRequest<'_>, decision: &Arc<Decision>) {
        self.counts.decisions.fetch_add(1, Ordering::Relaxed);
        let mut history = self.history.lock();
        if history.len() == HISTORY_KEPT {
            history.pop_front();
        }
        history.push_back(DecisionRecord {
            lease: id,
            request_id: request.request_id.map(str::to_owned),
            decision: Arc::clone(decision),
        });
    }
}

fn eligible(worker: &Worker, request: &SelectRequest<'_>) -> bool {
    !worker.draining.load(Ordering::Relaxed)
        && worker.available.load(Ordering::Relaxed)
        && request
            .role
            .is_none_or(|role| worker.spec.role.serves(role))
        && request
            .allowed
            .is_none_or(|allowed| allowed.contains(&worker.spec.id))
}

/// What the request occupies: its prompt's blocks, and blocks of its own for its tail, output and further prompts.
fn booked_request(request: &SelectRequest<'_>, block_tokens: usize) -> BookedRequest {
    let prompt = request.prompt;
    let tail = match prompt.kind() {
        PromptKind::Tokens => prompt.tokens() - prompt.blocks() * block_tokens,
        PromptKind::Text => 0,
    };
    let output = request.expected_output_tokens.unwrap_or(1).max(1) as usize;
    let own = (tail + output).div_ceil(block_tokens) + request.extra_blocks as usize;
    BookedRequest::new(Arc::clone(prompt.local()), own)
}

fn blocks_u32(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
