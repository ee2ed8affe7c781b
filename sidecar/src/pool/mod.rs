//! The workers as a pool: how many of which role there should be.

pub mod planner;
pub mod roster;
