//! The pool over `kvlane serve`: sources say which workers there are, and the fleet follows.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod balance;
#[path = "../proxy/client.rs"]
#[expect(dead_code, reason = "shared with the tests of the proxy")]
mod client;
mod described;
#[cfg(feature = "dns")]
mod dns;
mod file;
mod health;
mod members;
mod setup;
mod stub;
