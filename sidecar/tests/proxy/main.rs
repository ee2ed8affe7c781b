//! The proxy over real sockets, in front of workers that do exactly what a test tells them.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]
#![expect(clippy::float_cmp, reason = "counts read as numbers are exact")]
#![expect(
    clippy::disallowed_methods,
    reason = "a test's tasks end with its runtime"
)]

mod admin;
mod client;
mod command;
mod events;
mod failures;
mod forwarding;
mod load;
mod mock;
mod setup;
mod streams;
