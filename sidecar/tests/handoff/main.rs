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

/// Plays a failure until the client twice had its answer within 100 ms, at most five times: the machine may be busy, and one that is
/// quick lucky.
async fn answers_quickly(what: &str, mut play: impl AsyncFnMut() -> Duration) {
    const LIMIT: Duration = Duration::from_millis(100);
    let mut took = Vec::new();
    let mut quick = 0;
    while quick < 2 {
        assert!(took.len() < 5, "{what}: {took:?}");
        let one = play().await;
        quick += usize::from(one < LIMIT);
        took.push(one);
    }
}
