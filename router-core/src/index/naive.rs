//! The reference model.
/// Placeholder.
#[derive(Debug)]
pub struct NaiveIndex;
