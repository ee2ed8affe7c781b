//! What the router itself adds to a request.

use std::time::Duration;

use kvlane::Result;
use serde_json::json;

use crate::engine::{Engine, EngineConfig};

use super::args::DemoPolicy;
use super::client::Client;
use super::start_proxy;

/// Pairs of one direct and one routed request.
const PAIRS: usize = 300;
/// Pairs before counting begins: connections, caches and the first prefill are not what is measured.
const WARM_UP: usize = 50;

/// Sends the same 7.5 KB chat alternately to an engine and through the router in front of it, one at a time, and returns
/// the difference of the medians in milliseconds. The engine's own time is compressed to almost nothing.
pub(super) async fn measure() -> Result<f64> {
    let engine = Engine::start(EngineConfig {
        speed: 100.0,
        ..EngineConfig::ephemeral()
    })
    .await?;
    let engines = [engine];
    let proxy = start_proxy(DemoPolicy::KvEvents, 1, &engines).await?;
    super::ready(proxy.admin_addr).await?;
    let words: Vec<String> = (0..1_100)
        .map(|word| format!("w{}", 3_000 + word))
        .collect();
    let body = json!({
        "model": engines[0].model_name(),
        "messages": [{"role": "user", "content": words.join(" ")}],
        "max_tokens": 1,
    })
    .to_string();
    let mut direct = Client::new(engines[0].address());
    let mut routed = Client::new(proxy.proxy_addr);
    let (mut direct_times, mut routed_times) = (Vec::new(), Vec::new());
    for pair in 0..WARM_UP + PAIRS {
        let without = direct.post("/v1/chat/completions", body.as_bytes()).await?;
        let with = routed.post("/v1/chat/completions", body.as_bytes()).await?;
        if pair >= WARM_UP {
            direct_times.push(without);
            routed_times.push(with);
        }
    }
    proxy.shutdown().await;
    for engine in engines {
        engine.shutdown().await;
    }
    Ok((median(routed_times) - median(direct_times)) * 1_000.0)
}

/// Median in seconds.
fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times
        .get(times.len() / 2)
        .map_or(0.0, Duration::as_secs_f64)
}
