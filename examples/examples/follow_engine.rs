//! The router following an engine's event stream: connect, replay, live. The engine is simulated; a real vLLM publishes alike.
//!
//! `cargo run -p kvlane-examples --example follow_engine`

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use kvlane::subscribe::Subscriber;
use kvlane::{Router, RouterConfig, SaltContext, WorkerSpec};
use kvlane_sidecar::engine::{Engine, EngineConfig};
use serde_json::json;

fn main() -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Runtime::new()?;
    let engine = runtime.block_on(Engine::start(EngineConfig {
        speed: 50.0,
        ..EngineConfig::ephemeral()
    }))?;

    let router = Router::new(RouterConfig::default())?;
    let spec = WorkerSpec::new("w1")?.events(
        engine.events_endpoint().map(str::to_owned),
        engine.replay_endpoint().map(str::to_owned),
    );
    router.add_worker(spec.clone(), Instant::now())?;
    let subscriber = Subscriber::start(&router)?;
    subscriber.follow_worker(&spec)?;

    let tokens: Vec<u32> = (1_000..1_320).collect();
    complete(engine.address(), engine.model_name(), &tokens)?;
    let prompt = router.prompt(&tokens, &SaltContext::default());
    let started = Instant::now();
    let overlap = loop {
        if let Some((target, overlap)) = router.overlap(&prompt, Instant::now()).first() {
            println!(
                "{} holds {} of {} blocks",
                target.worker,
                overlap.device,
                prompt.blocks()
            );
            break *overlap;
        }
        if started.elapsed() > Duration::from_secs(20) {
            return Err("no event arrived within 20 seconds".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let trust = router.trust("w1", 0, Instant::now())?;
    println!("its stream is {}", trust.state);
    assert_eq!(
        (overlap.device, trust.state),
        (20, kvlane::TrustState::Exact)
    );

    subscriber.unfollow("w1");
    router.remove_worker("w1")?;
    runtime.block_on(engine.shutdown());
    Ok(())
}

/// Sends one completion, as a gateway would.
fn complete(engine: SocketAddr, model: &str, tokens: &[u32]) -> Result<(), Box<dyn Error>> {
    let body = json!({"model": model, "prompt": tokens, "max_tokens": 1}).to_string();
    let mut stream = TcpStream::connect(engine)?;
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: {engine}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    if !answer.starts_with("HTTP/1.1 200") {
        return Err(answer.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_runs() {
        super::main().unwrap();
    }
}
