//! What a placement costs, and which of the costs is taken.

pub mod cost;
pub mod pick;

pub use cost::{CostBreakdown, CostInputs, CostWeights, cost};
pub use pick::{Fullness, pick};
