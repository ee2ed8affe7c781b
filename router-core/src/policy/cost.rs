//! Cost terms and weights.

use serde::Serialize;

use crate::config::{Overrides, RouterConfig};
use crate::error::{Error, Result};
use crate::index::Overlap;
use crate::load::Load;

/// Weights and credits of one decision.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CostWeights {
    /// Weight of prefill blocks.
    pub prefill_weight: f64,
    /// Weight of an active request, in blocks.
    pub request_weight: f64,
    /// Share of a block saved by a hit in device memory.
    pub device_hit_credit: f64,
    /// Share saved by a hit in host memory.
    pub host_hit_credit: f64,
    /// Share saved by a hit on disk.
    pub disk_hit_credit: f64,
    /// Share saved by a hit in shared storage.
    pub external_hit_credit: f64,
}

impl CostWeights {
    /// Takes the configured weights with a request's overrides.
    #[must_use]
    pub fn new(config: &RouterConfig, overrides: &Overrides) -> Self {
        Self {
            prefill_weight: overrides.prefill_weight.unwrap_or(config.prefill_weight),
            request_weight: overrides.request_weight.unwrap_or(config.request_weight),
            device_hit_credit: overrides
                .device_hit_credit
                .unwrap_or(config.device_hit_credit),
            host_hit_credit: overrides.host_hit_credit.unwrap_or(config.host_hit_credit),
            disk_hit_credit: overrides.disk_hit_credit.unwrap_or(config.disk_hit_credit),
            external_hit_credit: overrides
                .external_hit_credit
                .unwrap_or(config.external_hit_credit),
        }
    }

    /// Returns the blocks of prefill that an overlap saves, before fidelity.
    #[must_use]
    pub fn credit(&self, overlap: &Overlap) -> f64 {
        self.device_hit_credit * f64::from(overlap.device)
            + self.host_hit_credit * f64::from(overlap.host)
            + self.disk_hit_credit * f64::from(overlap.disk)
            + self.external_hit_credit * f64::from(overlap.external)
    }

    /// The cost before preference.
    #[inline]
    pub(super) fn sum(&self, prefill_blocks: f64, decode_blocks: f64, requests: f64) -> f64 {
        self.prefill_weight * prefill_blocks + decode_blocks + self.request_weight * requests
    }
}

/// What is known of one placement.
#[derive(Clone, Copy, Debug)]
pub struct CostInputs {
    /// Complete blocks of the prompt (of all prompts of a batch).
    pub request_blocks: u32,
    /// Leading blocks present on the target, own placements included as device blocks.
    pub overlap: Overlap,
    /// Share of predicted cached tokens that the target's engine confirms, 0 to 1.
    pub fidelity: f64,
    /// Load of the target before the placement, without prefill that is of this request's own prefix.
    pub load: Load,
    /// Distinct blocks active there after the placement.
    pub decode_blocks: f64,
    /// Multiplier of the whole cost for soft preferences, 0.5 to 2; 1 is none.
    pub preference: f64,
}

/// A cost with its terms, all in blocks; lower is better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CostBreakdown {
    /// `preference × (prefill_weight × (uncached + booked) + decode_blocks + request_weight × active_requests)`.
    pub total: f64,
    /// Request blocks less credited overlap.
    pub uncached_prefill_blocks: f64,
    /// Prefill already booked on the target, less what is of this request's own prefix.
    pub booked_prefill_blocks: f64,
    /// Distinct blocks active after the placement.
    pub decode_blocks: f64,
    /// Active requests before the placement.
    pub active_requests: f64,
    /// The weight of both prefill terms.
    pub prefill_weight: f64,
    /// The weight of active requests.
    pub request_weight: f64,
    /// The multiplier.
    pub preference: f64,
}

/// Returns the cost of placing a request on one target, in block-equivalents (lower is better).
///
/// Terms are never negative, so no weight can turn a busy worker into a cheap one.
///
/// # Errors
/// [`ErrorKind::InvalidRequest`](crate::ErrorKind::InvalidRequest) when the overlap exceeds the request's blocks.
///
/// # Examples
/// ```
/// use kvlane::policy::{CostInputs, CostWeights, cost};
/// use kvlane::{Load, Overlap, Overrides, RouterConfig};
///
/// let weights = CostWeights::new(&RouterConfig::default(), &Overrides::default());
/// let placed = cost(
///     &weights,
///     &CostInputs {
///         request_blocks: 100,
///         overlap: Overlap { device: 60, host: 20, ..Overlap::default() },
///         fidelity: 1.0,
///         load: Load { active_requests: 2, active_blocks: 40.0, prefill_blocks: 10.0 },
///         decode_blocks: 81.0,
///         preference: 1.0,
///     },
/// )?;
/// assert_eq!(placed.uncached_prefill_blocks, 25.0); // 100 − (1.0 × 60 + 0.75 × 20)
/// assert_eq!(placed.total, 116.0); // 1.0 × (25 + 10) + 81 + 0 × 2
/// # Ok::<(), kvlane::Error>(())
/// ```
///
/// # Source
/// The shape (weighted uncached prefill blocks plus decode blocks) is that of NVIDIA Dynamo's KV router; fidelity and
/// booked prefill are ours, and ARCHITECTURE.md says why. The default tier credits are assumptions, not measurements.
pub fn cost(weights: &CostWeights, inputs: &CostInputs) -> Result<CostBreakdown> {
    if inputs.overlap.blocks() > inputs.request_blocks {
        return Err(Error::invalid(format!(
            "overlap of {} blocks exceeds the request's {} blocks",
            inputs.overlap.blocks(),
            inputs.request_blocks
        )));
    }
    let credit = weights.credit(&inputs.overlap) * inputs.fidelity.clamp(0.0, 1.0);
    let uncached_prefill_blocks = (f64::from(inputs.request_blocks) - credit).max(0.0);
    let active_requests = inputs.load.active_requests as f64;
    let sum = weights.sum(
        uncached_prefill_blocks + inputs.load.prefill_blocks,
        inputs.decode_blocks,
        active_requests,
    );
    let preference = inputs.preference.clamp(0.5, 2.0);
    Ok(CostBreakdown {
        total: preference * sum,
        uncached_prefill_blocks,
        booked_prefill_blocks: inputs.load.prefill_blocks,
        decode_blocks: inputs.decode_blocks,
        active_requests,
        prefill_weight: weights.prefill_weight,
        request_weight: weights.request_weight,
        preference,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn inputs(device: u32) -> CostInputs {
        CostInputs {
            request_blocks: 100,
            overlap: Overlap {
                device,
                ..Overlap::default()
            },
            fidelity: 1.0,
            load: Load::default(),
            decode_blocks: 101.0,
            preference: 1.0,
        }
    }

    fn weights() -> CostWeights {
        CostWeights::new(&RouterConfig::default(), &Overrides::default())
    }

    #[test]
    fn a_worker_that_breaks_its_promises_gets_less_credit() {
        let half = CostInputs {
            fidelity: 0.5,
            ..inputs(80)
        };
        let placed = cost(&weights(), &half).unwrap();
        assert!((placed.uncached_prefill_blocks - 60.0).abs() < 1e-9); // 100 − 0.5 × 80
    }

    #[test]
    fn an_overlap_beyond_the_request_is_refused() {
        assert!(cost(&weights(), &inputs(101)).is_err());
    }

    proptest! {
        #[test]
        fn more_overlap_never_raises_the_cost(a in 0u32..=100, b in 0u32..=100, fidelity in 0.0f64..=1.0) {
            let (less, more) = (a.min(b), a.max(b));
            let of = |device| cost(&weights(), &CostInputs { fidelity, ..inputs(device) }).unwrap().total;
            prop_assert!(of(more) <= of(less));
        }

        #[test]
        fn terms_are_never_negative(prefill in 0.0f64..1e6, decode in 0.0f64..1e6, device in 0u32..=100) {
            let placed = cost(&weights(), &CostInputs {
                load: Load { active_requests: 3, active_blocks: decode, prefill_blocks: prefill },
                decode_blocks: decode,
                ..inputs(device)
            }).unwrap();
            prop_assert!(placed.total >= 0.0 && placed.uncached_prefill_blocks >= 0.0);
        }
    }
}
