//! Handoffs between simulated engines: what a client sees, and what is left behind, when things go wrong.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]
#![expect(
    clippy::disallowed_methods,
    reason = "a test's tasks end with its runtime"
)]

mod concurrent;
mod faults;
mod gate;
mod independence;
mod links;
mod ranks;
mod serve;
mod served;
mod table;
mod world;

use std::time::Duration;

/// Waits up to 20 seconds (the machine may be busy) until the condition holds.
async fn eventually(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..10_000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("{what} did not come true within 20 seconds");
}
