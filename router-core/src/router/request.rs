//! What is asked of a router, and what it answers.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use crate::config::Overrides;
use crate::ids::{LeaseId, Role, WorkerId, WorkerRank};
use crate::index::Overlap;
use crate::policy::CostBreakdown;
use crate::prompt::Prompt;
use crate::trust::TrustState;

/// A request to place; everything but the prompt has a default.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SelectRequest<'a> {
    /// The prompt.
    pub prompt: &'a Prompt,
    /// The caller's name of the request. Selecting again under a live name supersedes the earlier booking (a retry).
    pub request_id: Option<&'a str>,
    /// Only these workers may be chosen; all when absent.
    pub allowed: Option<&'a [WorkerId]>,
    /// Requests of one session prefer the target of the one before, by a tenth of the cost.
    pub session: Option<&'a str>,
    /// Only workers that do this part; any when absent.
    pub role: Option<Role>,
    /// Only this rank of a worker; any when absent.
    pub dp_rank: Option<u32>,
    /// Accepted for an admission queue; without one it has no effect.
    pub priority: i32,
    /// Output tokens to expect; their blocks are booked from the start.
    pub expected_output_tokens: Option<u32>,
    /// Blocks of further prompts in the same request (a batch is matched by its first and booked for all).
    pub extra_blocks: u32,
    /// Lease without activity; the configured one when absent.
    pub ttl: Option<Duration>,
    /// Settings changed for this request.
    pub overrides: Overrides,
}

impl<'a> SelectRequest<'a> {
    /// Creates a request with defaults.
    #[must_use]
    pub fn new(prompt: &'a Prompt) -> Self {
        Self {
            prompt,
            request_id: None,
            allowed: None,
            session: None,
            role: None,
            dp_rank: None,
            priority: 0,
            expected_output_tokens: None,
            extra_blocks: 0,
            ttl: None,
            overrides: Overrides::default(),
        }
    }
}

/// One target and what placing the request there would cost.
#[derive(Clone, Debug, Serialize)]
pub struct Candidate {
    /// The target.
    pub target: WorkerRank,
    /// Leading blocks that its events confirm.
    pub overlap: Overlap,
    /// Leading blocks beyond those that own placements predict.
    pub predicted_blocks: u32,
    /// Share of predicted cached tokens that its engine confirms.
    pub fidelity: f64,
    /// How far its events are believed.
    pub trust: TrustState,
    /// The cost with its terms.
    pub cost: CostBreakdown,
}

/// A decision with everything that it was made from.
#[derive(Clone, Debug, Serialize)]
pub struct Decision {
    /// The chosen target.
    pub target: WorkerRank,
    /// Leading blocks that its events confirm.
    pub overlap: Overlap,
    /// Leading blocks beyond those that own placements predict.
    pub predicted_blocks: u32,
    /// Prompt tokens that the engine is expected to report as cached. Engines compute at least the last token anew, so
    /// this never reaches the whole prompt.
    pub predicted_cached_tokens: u32,
    /// Complete blocks of the prompt.
    pub request_blocks: u32,
    /// How far the target's events are believed.
    pub trust: TrustState,
    /// Every eligible target, by worker id and rank; the chosen one among them.
    pub candidates: Vec<Candidate>,
}

impl Decision {
    /// Returns the leading blocks that the decision counts on, confirmed and predicted.
    #[must_use]
    pub const fn overlap_blocks(&self) -> u32 {
        self.overlap.blocks() + self.predicted_blocks
    }
}

/// A decision in the history.
#[derive(Clone, Debug, Serialize)]
pub struct DecisionRecord {
    /// The booking.
    pub lease: LeaseId,
    /// The caller's name of the request.
    pub request_id: Option<String>,
    /// The decision.
    #[serde(flatten)]
    pub decision: Arc<Decision>,
}
