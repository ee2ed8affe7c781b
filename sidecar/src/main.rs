//! The kvlane command.
fn main() {}
