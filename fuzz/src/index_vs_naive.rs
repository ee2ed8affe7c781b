//! The radix tree answers like the reference model after every operation of a scenario read from bytes.

#[allow(dead_code, reason = "the property test reads more of it")]
#[path = "../../router-core/tests/index_model/mod.rs"]
mod index_model;

/// Runs the scenario.
///
/// # Panics
/// When the two indexes differ, or the tree's invariants do not hold.
pub fn check(bytes: &[u8]) {
    index_model::check_bytes(bytes);
}
