//! One booking.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvlane::{Decision, LeaseId, Outcome};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::convert::U32;
use crate::info::Candidate;
use crate::shared::Shared;

/// A booked request. Release it when the request ends; a `with` block does, and an abandoned one runs out after its TTL.
///
/// As a last resort, dropping the object releases the booking, unless `id` was read: then whoever has the id finishes it.
#[pyclass(frozen, module = "kvlane")]
pub(crate) struct Lease {
    shared: Arc<Shared>,
    id: LeaseId,
    decision: Arc<Decision>,
    /// Dropping the object releases the booking.
    owned: AtomicBool,
}

impl Lease {
    pub(crate) const fn new(shared: Arc<Shared>, id: LeaseId, decision: Arc<Decision>) -> Self {
        Self {
            shared,
            id,
            decision,
            owned: AtomicBool::new(true),
        }
    }

    fn end(&self, py: Python<'_>, outcome: &Outcome) -> PyResult<()> {
        let router = self.shared.not_forked()?;
        let now = self.shared.now(py)?;
        self.owned.store(false, Ordering::Relaxed);
        router.finish(self.id, outcome, now);
        Ok(())
    }
}

#[pymethods]
impl Lease {
    /// The chosen worker.
    #[getter]
    fn worker(&self) -> &str {
        self.decision.target.worker.as_str()
    }

    /// The chosen data-parallel rank.
    #[getter]
    fn dp_rank(&self) -> u32 {
        self.decision.target.dp_rank
    }

    /// Leading blocks that the decision counts on, confirmed by events or predicted from placements.
    #[getter]
    fn overlap_blocks(&self) -> u32 {
        self.decision.overlap_blocks()
    }

    /// Prompt tokens that the engine is expected to report as cached.
    #[getter]
    fn predicted_cached_tokens(&self) -> u32 {
        self.decision.predicted_cached_tokens
    }

    /// Name of the booking for `Router.finish`. Reading it leaves the booking to `release`, `finish` and its TTL: dropping
    /// this object no longer ends it.
    #[getter]
    fn id(&self) -> String {
        self.owned.store(false, Ordering::Relaxed);
        self.id.to_string()
    }

    /// Returns every eligible target with every cost term, by worker and rank.
    fn explain(&self) -> Vec<Candidate> {
        self.decision
            .candidates()
            .iter()
            .map(Candidate::from)
            .collect()
    }

    /// Says that the first token came: the prompt no longer waits for prefill.
    fn prefill_done(&self, py: Python<'_>) -> PyResult<()> {
        let router = self.shared.not_forked()?;
        router.prefill_done(self.id, self.shared.now(py)?);
        Ok(())
    }

    /// Says how many tokens were produced so far; extends the lease.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "PyO3 extracts arguments by value"
    )]
    fn output_tokens(&self, py: Python<'_>, n: U32) -> PyResult<()> {
        let router = self.shared.not_forked()?;
        router.output_tokens(self.id, n.0, self.shared.now(py)?);
        Ok(())
    }

    /// Ends the booking; a second time does nothing.
    ///
    /// `cached_tokens` and `prompt_tokens` are what the engine reported; `ok` is false when it did not answer properly, and
    /// `dispatched` when the request never reached it.
    #[pyo3(signature = (cached_tokens = None, ok = true, *, prompt_tokens = None, dispatched = true))]
    fn release(
        &self,
        py: Python<'_>,
        cached_tokens: Option<U32>,
        ok: bool,
        prompt_tokens: Option<U32>,
        dispatched: bool,
    ) -> PyResult<()> {
        self.end(py, &outcome(ok, dispatched, cached_tokens, prompt_tokens))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Releases the booking; an exception means that it did not go well.
    #[pyo3(signature = (exc_type, exc_value, traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: &Bound<'_, PyAny>,
        exc_value: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let _ = (exc_value, traceback);
        if self.shared.is_forked() {
            return Ok(()); // it is the parent's to end
        }
        self.end(py, &outcome(exc_type.is_none(), true, None, None))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "a kvlane.Lease cannot be pickled or copied: pass lease.id, and call router.finish(id) where the router is",
        ))
    }

    fn __repr__(&self) -> String {
        format!(
            "Lease(worker={:?}, dp_rank={}, overlap_blocks={}, predicted_cached_tokens={})",
            self.worker(),
            self.dp_rank(),
            self.overlap_blocks(),
            self.predicted_cached_tokens()
        )
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if *self.owned.get_mut()
            && let Ok(router) = self.shared.not_forked()
        {
            // An abandoned request teaches nothing, so the time does not matter, nor does the caller's clock.
            router.finish(self.id, &Outcome::failed(), Instant::now());
        }
    }
}

/// Makes the outcome of a request.
pub(crate) fn outcome(
    ok: bool,
    dispatched: bool,
    cached_tokens: Option<U32>,
    prompt_tokens: Option<U32>,
) -> Outcome {
    let outcome = match (ok, dispatched) {
        (_, false) => Outcome::not_dispatched(),
        (true, true) => Outcome::ok(),
        (false, true) => Outcome::failed(),
    };
    outcome.reported(
        cached_tokens.map(|tokens| tokens.0),
        prompt_tokens.map(|tokens| tokens.0),
    )
}
