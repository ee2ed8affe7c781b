//! The concurrent prefix-block radix tree.
/// Placeholder.
#[derive(Debug)]
pub struct RadixIndex;
