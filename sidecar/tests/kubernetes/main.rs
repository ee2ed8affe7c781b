//! Discovery in Kubernetes, against API servers that can do what a real one can, and fail as one can.
#![cfg(feature = "kubernetes")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod api;
#[path = "../proxy/client.rs"]
#[expect(dead_code, reason = "shared with the tests of the proxy")]
mod client;
mod cluster;
mod discovery;
mod kmock;
mod manifests;
mod pools;
mod scale;
mod serve;
mod services;
mod streams;
mod world;
