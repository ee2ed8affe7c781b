//! What a placement costs, and which of the costs is taken.

pub mod cost;
pub(crate) mod pick;
pub(crate) mod price;

pub use cost::{CostBreakdown, CostInputs, CostWeights, cost};
