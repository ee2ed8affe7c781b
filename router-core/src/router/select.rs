//! Rank, select and book.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::config::IndexMode;
use crate::error::{Error, Result};
use crate::ids::{LeaseId, Slot};
use crate::index::Placement;
use crate::load::row::flag;
use crate::policy::CostWeights;
use crate::policy::pick::{Fullness, pick};
use crate::policy::price::{Ask, Columns, Flags};
use crate::prompt::{Prompt, PromptKind};
use crate::sync::atomic::Ordering;
use crate::trust::TrustState;

use super::Router;
use super::history::History;
use super::lease::{Lease, Outcome, RequestGuard};
use super::request::{Candidate, Decision, DecisionRecord, Seen, SelectRequest};
use super::scratch::{Scratch, with_scratch};
use super::state::{Inner, Target};
use super::table::{View, Workers};

/// A session's last target costs a tenth less: enough to break near-ties, too little to overrule load.
const SESSION_PREFERENCE: f64 = 0.9;

/// A choice before it is booked.
struct Chosen<'a> {
    target: &'a Arc<Target>,
    ask: Ask,
    columns: Columns,
    number: u64,
}

impl Router {
    /// Returns every eligible target, cheapest first (then by worker id and rank). Nothing is booked.
    ///
    /// # Errors
    /// An override or ttl out of range; a prompt in blocks of another size; the router is closed.
    pub fn rank(&self, request: &SelectRequest<'_>, now: Instant) -> Result<Vec<Candidate>> {
        self.check(request)?;
        let view = self.inner.workers.read();
        let ask = self.inner.ask(&view, request, now);
        let columns = with_scratch(|scratch| {
            let slots = view.by_slot.len();
            self.inner.look_up(request.prompt, slots, now, scratch);
            scratch.allow(&view, request.allowed);
            self.inner.see(&ask, (0, slots), scratch).0
        });
        let names = Arc::clone(&view.names);
        drop(view);
        let seen = Seen {
            ask,
            columns,
            names,
        };
        let mut candidates: Vec<Candidate> = seen.candidates().collect();
        candidates.sort_by(|a, b| {
            let by_cost = a.cost.total.total_cmp(&b.cost.total);
            by_cost.then_with(|| a.target.cmp(&b.target))
        });
        Ok(candidates)
    }

    /// Chooses a target and books the request on it. `None` when no worker is eligible.
    ///
    /// The booking and the note of where the prompt went are done when this returns, so the next `select` sees them; calls
    /// that run at the same time may not see each other's.
    ///
    /// Cost: about 3 µs for 4,096 tokens at 64 workers, hashing included. Allocates its answer and nothing else, once its
    /// thread is warm and apart from what new prompts take to be remembered.
    ///
    /// # Errors
    /// An override or ttl out of range; a prompt in blocks of another size; the router is closed.
    pub fn select(
        &self,
        request: &SelectRequest<'_>,
        now: Instant,
    ) -> Result<Option<RequestGuard>> {
        self.check(request)?;
        self.tick_if_due(now);
        let inner = &*self.inner;
        if let Some(id) = request.request_id
            && let Some(earlier) = inner.leases.of_request(id)
        {
            inner.release(earlier, None, now);
        }
        let view = inner.workers.read();
        with_scratch(|scratch| {
            let slots = view.by_slot.len();
            inner.look_up(request.prompt, slots, now, scratch);
            let ask = inner.ask(&view, request, now);
            scratch.allow(&view, request.allowed);
            let (columns, lowest) = inner.see(&ask, (0, slots), scratch);
            if lowest.is_infinite() {
                inner.counts.no_worker.fetch_add(1, Ordering::Relaxed);
                return Ok(None);
            }
            let number = inner.counts.next.fetch_add(1, Ordering::Relaxed);
            let slot = inner.choose(&columns, lowest, request, number, scratch);
            let Some(target) = view.at(slot) else {
                // Only registered slots are candidates.
                return Ok(None);
            };
            let chosen = Chosen {
                target,
                ask,
                columns,
                number,
            };
            let (guard, _) = self.commit(&view, request, chosen, scratch, false, now);
            Ok(Some(guard))
        })
    }

    /// Books a request on a target that was chosen elsewhere (rank 0 when `dp_rank` is absent). Its cost is explained like
    /// that of a decision; eligibility is not checked.
    ///
    /// # Errors
    /// Unknown worker or rank; a live booking of the same request id; an override or ttl out of range; a prompt in blocks of
    /// another size; the router is closed.
    pub fn book(
        &self,
        worker: &str,
        dp_rank: Option<u32>,
        request: &SelectRequest<'_>,
        now: Instant,
    ) -> Result<RequestGuard> {
        self.check(request)?;
        self.tick_if_due(now);
        let inner = &*self.inner;
        let view = inner.workers.read();
        let target = view.target(worker, dp_rank.unwrap_or(0))?;
        if let Some(id) = request.request_id
            && inner.leases.of_request(id).is_some()
        {
            return Err(booked_already(id));
        }
        let booked = with_scratch(|scratch| {
            let at = target.slot.index();
            inner.look_up(request.prompt, view.by_slot.len(), now, scratch);
            let ask = Ask {
                preferred: None,
                flags: Flags::any(),
                ..inner.ask(&view, request, now)
            };
            scratch.allow(&view, None);
            let (columns, _) = inner.see(&ask, (at, 1), scratch);
            let chosen = Chosen {
                target,
                ask,
                columns,
                number: inner.counts.next.fetch_add(1, Ordering::Relaxed),
            };
            self.commit(&view, request, chosen, scratch, true, now)
        });
        match (booked, request.request_id) {
            ((guard, Some(_)), Some(id)) => {
                // Another call booked it meanwhile.
                guard.release(&Outcome::not_dispatched(), now);
                Err(booked_already(id))
            }
            ((guard, _), _) => Ok(guard),
        }
    }

    fn check(&self, request: &SelectRequest<'_>) -> Result<()> {
        self.inner.check_open()?;
        request.overrides.validate()?;
        self.inner.check_blocks(request.prompt)?;
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

    /// Books what was chosen and notes where the prompt went. Returns, beside the guard, a live booking of the same request:
    /// one that was superseded, or with `or_keep` the one that the request's name stays with.
    fn commit(
        &self,
        view: &View,
        request: &SelectRequest<'_>,
        chosen: Chosen<'_>,
        scratch: &mut Scratch,
        or_keep: bool,
        now: Instant,
    ) -> (RequestGuard, Option<LeaseId>) {
        let inner = &*self.inner;
        let Chosen { target, number, .. } = chosen;
        let id = LeaseId(number);
        let decision = Arc::new(inner.explain(view, request, chosen));
        let request_id: Option<Arc<str>> = request.request_id.map(Arc::from);
        let mut lease = inner.book_on(target, id, request, &decision, now);
        lease.request_id.clone_from(&request_id);
        inner.leases.insert(id, lease);
        if let Some(session) = request.session {
            inner.sessions.note(session, target, now);
        }
        let mut earlier = None;
        if let Some(request_id) = &request_id {
            earlier = inner.leases.name(request_id, id, or_keep);
            if let (Some(earlier), false) = (earlier, or_keep) {
                inner.release(earlier, None, now);
            }
        }
        let forgotten = inner.history.add(DecisionRecord {
            lease: id,
            request_id,
            decision: Arc::clone(&decision),
        });
        if let Some(columns) = forgotten.and_then(History::recycle) {
            scratch.spare = columns;
        }
        (RequestGuard::new(self.handle(), id, decision), earlier)
    }
}

impl Inner {
    /// Refuses a prompt in blocks of another size, whose numbers would mean nothing here.
    pub(super) fn check_blocks(&self, prompt: &Prompt) -> Result<()> {
        let block_size = self.config.block_size;
        if prompt.is_cut_by(block_size) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "a prompt of {} tokens was hashed in {} blocks: only blocks of the router's block_size {} are accepted",
            prompt.tokens(),
            prompt.blocks(),
            block_size.tokens()
        )))
    }

    /// What the request asks of every target.
    fn ask(&self, workers: &Workers, request: &SelectRequest<'_>, now: Instant) -> Ask {
        let own = own_blocks(request, self.config.block_size.tokens());
        let session = request.session.and_then(|session| {
            let (slot, life) = self.sessions.last(session, now, self.config.ttl())?;
            let target = workers.at(slot)?;
            (target.life == life).then_some((slot, SESSION_PREFERENCE))
        });
        Ask {
            weights: CostWeights::new(&self.config, &request.overrides),
            request_blocks: blocks_u32(request.prompt.blocks())
                .saturating_add(request.extra_blocks),
            grown_blocks: blocks_u32(request.prompt.blocks() + own),
            preferred: session,
            flags: Flags::eligible(request.role, request.dp_rank, request.allowed.is_some()),
        }
    }

    /// Takes in what the scratch and the rows have of some slots, and prices them. Returns the lowest cost, too.
    fn see(&self, ask: &Ask, slots: (usize, usize), scratch: &mut Scratch) -> (Columns, f64) {
        let mut columns = std::mem::take(&mut scratch.spare);
        let mut costs = std::mem::take(&mut scratch.costs);
        let depths = scratch.depths();
        let lowest = columns.take_in(slots, self.rows.pieces(), &depths, ask, &mut costs);
        scratch.costs = costs;
        (columns, lowest)
    }

    /// Chooses among the priced slots.
    fn choose(
        &self,
        columns: &Columns,
        lowest: f64,
        request: &SelectRequest<'_>,
        number: u64,
        scratch: &mut Scratch,
    ) -> Slot {
        // A generator for each decision: nothing to share, and the same seed decides alike.
        let mut rng = Rng::with_seed(self.seed ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let temperature = request
            .overrides
            .temperature
            .unwrap_or(self.config.temperature);
        let fullness = |at| self.fullness(columns.slot(at), request);
        let Scratch { costs, equals, .. } = scratch;
        columns.slot(pick(costs, lowest, fullness, temperature, equals, &mut rng))
    }

    /// Adds a request to the load of a target, and notes where its prompt went.
    fn book_on(
        &self,
        target: &Arc<Target>,
        id: LeaseId,
        request: &SelectRequest<'_>,
        decision: &Decision,
        now: Instant,
    ) -> Lease {
        let own = own_blocks(request, self.config.block_size.tokens());
        let prefill = decision.cost.uncached_prefill_blocks;
        let booked = self.with_load(target, |load| {
            let prompt = request.prompt.local();
            let (booked, gained) = self.active.book(prompt, target.slot, id, own, prefill);
            load.book(gained, prefill);
            booked
        });
        let ttl = request.ttl.unwrap_or_else(|| self.config.lease());
        Lease {
            target: Arc::clone(target),
            booked,
            kind: request.prompt.kind(),
            prompt_tokens: request.prompt.tokens(),
            request_blocks: decision.request_blocks,
            expected_output_tokens: request.expected_output_tokens.unwrap_or(0),
            output_blocks: 0,
            predicted_tokens: decision.predicted_cached_tokens,
            confirmed_tokens: self.cached_tokens(request, decision.overlap.blocks()),
            ttl,
            deadline: now + ttl,
            held: true,
            in_prefill: true,
            placement: self.note_placement(target, request, decision, now),
            request_id: None,
        }
    }

    /// Says what was decided and from what.
    fn explain(&self, view: &View, request: &SelectRequest<'_>, chosen: Chosen<'_>) -> Decision {
        let Chosen {
            target,
            ask,
            columns,
            ..
        } = chosen;
        let quote = columns
            .quote(target.slot, &ask)
            .expect("the chosen slot is one of those priced");
        let overlap_blocks = quote.overlap.blocks() + quote.predicted_blocks;
        Decision {
            target: target.id.clone(),
            overlap: quote.overlap,
            predicted_blocks: quote.predicted_blocks,
            predicted_cached_tokens: self.cached_tokens(request, overlap_blocks),
            request_blocks: blocks_u32(request.prompt.blocks()),
            trust: flag::trust(quote.flags),
            cost: quote.cost,
            seen: Seen {
                ask,
                columns,
                names: Arc::clone(&view.names),
            },
        }
    }

    /// How full a target is as far as known: what its events say, or what was placed where they say less.
    ///
    /// One without room for the request counts as full, however many blocks are missing: it evicts as a full one does, and
    /// among caches in their steady state a few blocks more or less must not decide where everything new goes.
    fn fullness(&self, slot: Slot, request: &SelectRequest<'_>) -> Fullness {
        let row = self.row(slot);
        let placed = self.placements(request.prompt.kind()).blocks(slot);
        let blocks = row.resident_blocks().max(placed);
        let capacity_blocks = row.capacity_blocks();
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

    /// Notes that the prompt's blocks will be on the target, for as long as its trust allows. Where complete events say that
    /// all of them are, there is nothing to believe, and should they leave, the events say so.
    fn note_placement(
        &self,
        target: &Target,
        request: &SelectRequest<'_>,
        decision: &Decision,
        now: Instant,
    ) -> Option<Placement> {
        let trust = decision.trust;
        if trust == TrustState::Exact && decision.overlap.device == decision.request_blocks {
            return None;
        }
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
}

fn booked_already(id: &str) -> Error {
    Error::invalid(format!(
        "request id {id:?} is booked already; finish it first, or let select supersede it"
    ))
}

/// What the request occupies besides its prompt's blocks: blocks for its tail, its output and further prompts.
fn own_blocks(request: &SelectRequest<'_>, block_tokens: usize) -> usize {
    let prompt = request.prompt;
    let tail = match prompt.kind() {
        PromptKind::Tokens => prompt.tokens() - prompt.blocks() * block_tokens,
        PromptKind::Text => 0,
    };
    let output = request.expected_output_tokens.unwrap_or(1).max(1) as usize;
    ((tail + output).div_ceil(block_tokens) + request.extra_blocks as usize).max(1)
}

fn blocks_u32(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
