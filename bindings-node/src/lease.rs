//! Bookings: what `Lease` in lib/lease.js asks of its router.
//!
//! A lease is an object of JavaScript with a number. An object of a native class would cost more than the whole decision: it is
//! made and unmade through the runtime's tables, and it keeps its memory until the garbage collector asks for it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use kvlane::{Decision, Error, ErrorKind, LeaseId, Outcome, RequestGuard};
use napi::bindgen_prelude::{Buffer, Env, Object};
use napi_derive::napi;

use crate::error::{Result, invalid, to_js};
use crate::read::{Given, maybe, need, options};
use crate::report::{Table, candidates};
use crate::router::Router;

/// The decisions behind bookings that live; of those that ended, the core keeps the last.
#[derive(Default)]
pub(crate) struct Decisions {
    live: HashMap<LeaseId, Arc<Decision>>,
    /// At this size, those are dropped whose lease has run out.
    limit: usize,
}

impl Decisions {
    fn add(&mut self, router: &kvlane::Router, id: LeaseId, decision: Arc<Decision>) {
        if self.live.len() >= self.limit.max(MIN_LIMIT) {
            self.live.retain(|id, _| router.is_booked(*id));
            self.limit = 2 * self.live.len();
        }
        self.live.insert(id, decision);
    }

    pub(crate) fn remove(&mut self, id: LeaseId) {
        self.live.remove(&id);
    }
}

const MIN_LIMIT: usize = 1_024;

/// Memory that JavaScript shares: four numbers of the last booking, as `Lease` in lib/lease.js reads them.
pub(crate) struct Facts(Buffer);

impl Facts {
    fn write(&mut self, id: LeaseId, decision: &Decision) {
        let facts = [
            id.as_u64() as f64,
            decision.target.dp_rank.into(),
            decision.overlap_blocks().into(),
            decision.predicted_cached_tokens.into(),
        ];
        for (place, fact) in self.0.as_chunks_mut::<8>().0.iter_mut().zip(facts) {
            *place = fact.to_ne_bytes();
        }
    }
}

options! {
    /// How a request ended.
    FinishOptions {
        /// The worker answered it (default true).
        "ok" ok: bool,
        /// What the engine reported as cached (`usage.prompt_tokens_details.cached_tokens`).
        "cachedTokens" cached_tokens: u32,
        /// What the engine counted (`usage.prompt_tokens`).
        "promptTokens" prompt_tokens: u32,
        /// False when the request never reached the worker: the note of where its prompt went is taken back.
        "dispatched" dispatched: bool,
    }
}

#[napi]
impl Router {
    /// Takes the memory for the numbers of a booking.
    #[napi(js_name = "_shareFacts", skip_typescript)]
    pub fn share_facts(&self, memory: Buffer) {
        *self.facts.borrow_mut() = Some(Facts(memory));
    }

    /// Lists the candidates of a decision.
    #[napi(js_name = "_explain", skip_typescript)]
    pub fn lease_explain(&self, lease: f64) -> Result<Table> {
        let id = id_of(lease);
        let live = self.decisions.borrow().live.get(&id).map(Arc::clone);
        let decision = live.or_else(|| self.core.router.decision(id));
        let decision = decision.ok_or_else(|| {
            invalid(format!(
                "the decision of lease {id} is not kept any more: those of live leases are, and the last few"
            ))
        })?;
        Ok(candidates(&decision.candidates()))
    }

    /// See `Lease.prefillDone`.
    #[napi(js_name = "_prefillDone", skip_typescript)]
    pub fn lease_prefill_done(&self, env: &Env, lease: f64) -> Result<()> {
        let now = self.core.clock.now(env)?;
        self.core.router.prefill_done(id_of(lease), now);
        Ok(())
    }

    /// See `Lease.outputTokens`.
    #[napi(js_name = "_outputTokens", skip_typescript)]
    pub fn lease_output_tokens(&self, env: &Env, lease: f64, tokens: Given<'_, f64>) -> Result<()> {
        let total = need(tokens, "tokens")?;
        let now = self.core.clock.now(env)?;
        self.core.router.output_tokens(id_of(lease), total, now);
        Ok(())
    }

    /// Releases with an outcome that lib/lease.js has read; a negative count is absent.
    #[napi(js_name = "_release", skip_typescript)]
    pub fn lease_release(
        &self,
        env: &Env,
        lease: f64,
        ok: bool,
        dispatched: bool,
        cached_tokens: f64,
        prompt_tokens: f64,
    ) -> Result<bool> {
        let outcome = outcome(ok, dispatched, count(cached_tokens), count(prompt_tokens));
        self.release(env, id_of(lease), &outcome)
    }

    /// Releases with an outcome that is not known to be well formed.
    #[napi(js_name = "_releaseWith", skip_typescript)]
    pub fn lease_release_with(
        &self,
        env: &Env,
        lease: f64,
        outcome: Option<Given<'_, Object<'_>>>,
    ) -> Result<bool> {
        self.release(env, id_of(lease), &read_outcome(outcome)?)
    }
}

impl Router {
    /// Hands a booking over to JavaScript: its worker here, its numbers in the shared memory.
    pub(crate) fn lend(&self, guard: RequestGuard, now: Instant) -> Result<String> {
        let decision = Arc::clone(guard.decision());
        let mut facts = self.facts.borrow_mut();
        let Some(facts) = &mut *facts else {
            let error = Error::new(ErrorKind::Closed, "the router was not made by its class");
            return Err(to_js(error));
        };
        let id = guard.detach(now);
        facts.write(id, &decision);
        let worker = decision.target.worker.as_str().to_owned();
        let mut decisions = self.decisions.borrow_mut();
        decisions.add(&self.core.router, id, decision);
        Ok(worker)
    }

    pub(crate) fn release(&self, env: &Env, id: LeaseId, outcome: &Outcome) -> Result<bool> {
        let now = self.core.clock.now(env)?;
        self.decisions.borrow_mut().remove(id);
        Ok(self.core.router.finish(id, outcome, now))
    }
}

pub(crate) fn read_outcome(given: Option<Given<'_, Object<'_>>>) -> Result<Outcome> {
    let read: FinishOptions = maybe(given, "outcome")?.unwrap_or_default();
    let (ok, dispatched) = (read.ok.unwrap_or(true), read.dispatched.unwrap_or(true));
    Ok(outcome(
        ok,
        dispatched,
        read.cached_tokens,
        read.prompt_tokens,
    ))
}

fn outcome(
    ok: bool,
    dispatched: bool,
    cached_tokens: Option<u32>,
    prompt_tokens: Option<u32>,
) -> Outcome {
    let outcome = match (dispatched, ok) {
        (false, _) => Outcome::not_dispatched(),
        (true, false) => Outcome::failed(),
        (true, true) => Outcome::ok(),
    };
    outcome.reported(cached_tokens, prompt_tokens)
}

fn id_of(lease: f64) -> LeaseId {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it was made from an id; casts saturate"
    )]
    LeaseId::from_u64(lease as u64)
}

fn count(number: f64) -> Option<u32> {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "lib/lease.js lets u32 and -1 through; casts saturate"
    )]
    (number >= 0.0).then_some(number as u32)
}
