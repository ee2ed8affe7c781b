//! kvlane sidecar: the proxy, the simulated engine and what the `kvlane` command is made of.

pub mod engine;
pub mod tokenize;
