//! The simulated engine over real sockets.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]
#![expect(
    clippy::disallowed_methods,
    reason = "a test's tasks end with its runtime"
)]

mod client;
mod events;
mod http;
mod transfer;

use kvlane_sidecar::engine::{Engine, EngineConfig, EngineHandle};

/// An engine that is a thousand times as fast as a real one.
fn fast() -> EngineConfig {
    EngineConfig {
        speed: 1000.0,
        ..EngineConfig::ephemeral()
    }
}

async fn start(config: EngineConfig) -> EngineHandle {
    Engine::start(config).await.unwrap()
}

/// Waits until `done`, or fails after 10 s.
async fn eventually(what: &str, done: impl Fn() -> bool) {
    for _ in 0..5000 {
        if done() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    panic!("{what} did not happen within 10 s");
}
