//! The pool over `kvlane serve`: sources say which workers there are, and the fleet follows.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]
#![expect(
    clippy::disallowed_methods,
    reason = "a test's tasks end with its runtime"
)]

#[path = "../proxy/client.rs"]
#[expect(dead_code, reason = "shared with the tests of the proxy")]
mod client;
mod members;
mod setup;
