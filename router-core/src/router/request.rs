//! What is asked of a router, and what it answers.

use std::sync::Arc;
use std::time::Duration;

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use crate::config::Overrides;
use crate::ids::{LeaseId, Role, Slot, WorkerId, WorkerRank};
use crate::index::Overlap;
use crate::load::row::flag;
use crate::policy::CostBreakdown;
use crate::policy::price::{Ask, Columns};
use crate::prompt::Prompt;
use crate::trust::TrustState;

use super::table::Names;

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
///
/// It keeps 36 bytes a slot of what it saw, and spells that out when it is asked for.
#[derive(Clone, Debug)]
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
    /// The cost of the chosen target with its terms.
    pub cost: CostBreakdown,
    pub(super) seen: Seen,
}

/// What a decision saw.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) ask: Ask,
    pub(super) columns: Columns,
    pub(super) names: Arc<Names>,
}

impl Seen {
    pub(super) fn candidates(&self) -> impl Iterator<Item = Candidate> {
        let slots = self.columns.candidates(&self.ask);
        slots.filter_map(|slot| self.candidate(slot))
    }

    fn candidate(&self, slot: Slot) -> Option<Candidate> {
        let quote = self.columns.quote(slot, &self.ask)?;
        Some(Candidate {
            target: self.names.of(slot)?.clone(),
            overlap: quote.overlap,
            predicted_blocks: quote.predicted_blocks,
            fidelity: quote.fidelity,
            trust: flag::trust(quote.flags),
            cost: quote.cost,
        })
    }
}

impl Decision {
    /// Returns the leading blocks that the decision counts on, confirmed and predicted.
    #[must_use]
    pub const fn overlap_blocks(&self) -> u32 {
        self.overlap.blocks() + self.predicted_blocks
    }

    /// Returns every eligible target with every cost term, by worker id and rank; the chosen one among them.
    #[must_use]
    pub fn candidates(&self) -> Vec<Candidate> {
        let mut candidates: Vec<Candidate> = self.seen.candidates().collect();
        candidates.sort_by(|a, b| a.target.cmp(&b.target));
        candidates
    }

    /// Counts the eligible targets.
    #[must_use]
    pub fn eligible_targets(&self) -> usize {
        self.seen.columns.candidates(&self.seen.ask).count()
    }

    /// Slots that it tells of.
    pub(super) const fn slots(&self) -> usize {
        self.seen.columns.slots()
    }

    pub(super) fn into_columns(self) -> Columns {
        self.seen.columns
    }
}

impl Serialize for Decision {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Decision", 7)?;
        fields.serialize_field("target", &self.target)?;
        fields.serialize_field("overlap", &self.overlap)?;
        fields.serialize_field("predicted_blocks", &self.predicted_blocks)?;
        fields.serialize_field("predicted_cached_tokens", &self.predicted_cached_tokens)?;
        fields.serialize_field("request_blocks", &self.request_blocks)?;
        fields.serialize_field("trust", &self.trust)?;
        fields.serialize_field("candidates", &self.candidates())?;
        fields.end()
    }
}

/// A decision in the history.
#[derive(Clone, Debug, Serialize)]
pub struct DecisionRecord {
    /// The booking.
    pub lease: LeaseId,
    /// The caller's name of the request.
    pub request_id: Option<Arc<str>>,
    /// The decision.
    #[serde(flatten)]
    pub decision: Arc<Decision>,
}
