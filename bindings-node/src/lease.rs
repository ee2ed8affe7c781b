//! Bookings.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use kvlane::{Decision, LeaseId, Outcome, RequestGuard};
use napi::bindgen_prelude::{Env, Object};
use napi_derive::napi;

use crate::error::Result;
use crate::read::{Given, maybe, need, options};
use crate::report::Candidate;
use crate::router::Core;

/// A booked request. It ends with `release`, with `Router.finish`, or when it was idle for its `ttl`; that the object is
/// collected ends nothing, so the id alone may be kept.
#[napi]
#[expect(
    missing_debug_implementations,
    reason = "JavaScript sees it through its getters"
)]
pub struct Lease {
    core: Rc<Core>,
    id: LeaseId,
    decision: Arc<Decision>,
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
impl Lease {
    pub(crate) fn new(core: &Rc<Core>, guard: RequestGuard, now: Instant) -> Self {
        let decision = Arc::clone(guard.decision());
        Self {
            core: Rc::clone(core),
            id: guard.detach(now),
            decision,
        }
    }

    /// The booking's name, for `Router.finish`.
    #[napi(getter)]
    pub fn id(&self) -> String {
        self.id.to_string()
    }

    /// The chosen worker.
    #[napi(getter)]
    pub fn worker(&self) -> &str {
        self.decision.target.worker.as_str()
    }

    /// The chosen rank.
    #[napi(getter)]
    pub fn dp_rank(&self) -> u32 {
        self.decision.target.dp_rank
    }

    /// Leading blocks that the decision counts on, confirmed by events or predicted from placements.
    #[napi(getter)]
    pub fn overlap_blocks(&self) -> u32 {
        self.decision.overlap_blocks()
    }

    /// Prompt tokens that the engine is expected to report as cached.
    #[napi(getter)]
    pub fn predicted_cached_tokens(&self) -> u32 {
        self.decision.predicted_cached_tokens
    }

    /// Returns every candidate of the decision with every cost term, by worker and rank.
    #[napi]
    pub fn explain(&self) -> Vec<Candidate> {
        self.decision.candidates().iter().map(Into::into).collect()
    }

    /// Says that the first token came: the prompt no longer waits for prefill. Extends the lease.
    #[napi]
    pub fn prefill_done(&self, env: &Env) -> Result<()> {
        let now = self.core.clock.now(env)?;
        self.core.router.prefill_done(self.id, now);
        Ok(())
    }

    /// Says how many tokens were produced so far. Extends the lease.
    #[napi]
    pub fn output_tokens(
        &self,
        env: &Env,
        #[napi(ts_arg_type = "number")] tokens: Given<'_, f64>,
    ) -> Result<()> {
        let total = need(tokens, "tokens")?;
        let now = self.core.clock.now(env)?;
        self.core.router.output_tokens(self.id, total, now);
        Ok(())
    }

    /// Releases the booking and learns from how it ended. Returns false when it had ended before: a no-op.
    #[napi]
    pub fn release(
        &self,
        env: &Env,
        #[napi(ts_arg_type = "FinishOptions")] outcome: Option<Given<'_, Object<'_>>>,
    ) -> Result<bool> {
        let outcome = read_outcome(outcome)?;
        let now = self.core.clock.now(env)?;
        Ok(self.core.router.finish(self.id, &outcome, now))
    }
}

pub(crate) fn read_outcome(given: Option<Given<'_, Object<'_>>>) -> Result<Outcome> {
    let read: FinishOptions = maybe(given, "outcome")?.unwrap_or_default();
    let mut outcome = match (read.dispatched, read.ok) {
        (Some(false), _) => Outcome::not_dispatched(),
        (_, Some(false)) => Outcome::failed(),
        _ => Outcome::ok(),
    };
    outcome = outcome.reported(read.cached_tokens, read.prompt_tokens);
    Ok(outcome)
}
