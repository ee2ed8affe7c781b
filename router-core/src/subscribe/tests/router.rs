//! From an engine's socket to the router's answer.

use super::engine::{Engine, Manner};
use super::{eventually, now};
use crate::event::encode::encode_batch;
use crate::event::{BlockStored, EventBatch, KvEvent};
use crate::index::{EngineHash, Tier};
use crate::subscribe::Subscriber;
use crate::{ErrorKind, Router, RouterConfig, SaltContext, TrustState, WorkerSpec};

/// One batch that stores the block `number` of a prompt whose tokens count up from 0.
fn store(number: u64) -> Vec<u8> {
    let first = u32::try_from(number * 16).unwrap();
    let event = BlockStored {
        block_hashes: vec![EngineHash::Int(number + 1)],
        parent_hash: number.checked_sub(1).map(|_| EngineHash::Int(number)),
        token_ids: (first..first + 16).collect(),
        block_size: 16,
        tier: Tier::Device,
        ..BlockStored::default()
    };
    encode_batch(&EventBatch {
        ts: 1_000.0 + f64::from(first),
        events: vec![KvEvent::Stored(event)],
        ..EventBatch::default()
    })
}

fn overlap(router: &Router) -> u32 {
    let tokens: Vec<u32> = (0..160).collect();
    let prompt = router.prompt(&tokens, &SaltContext::default());
    let overlaps = router.overlap(&prompt, now());
    overlaps.iter().map(|(_, overlap)| overlap.blocks()).sum()
}

fn worker(engine: &Engine) -> WorkerSpec {
    WorkerSpec::new("w").unwrap().events(
        Some(engine.events().to_string()),
        Some(engine.replay().to_string()),
    )
}

#[test]
fn a_router_follows_an_engine_through_its_life_and_the_next() {
    let engine = Engine::start(Manner::default());
    for number in 0..4 {
        engine.publish(number, &store(number));
    }
    let router = Router::new(RouterConfig::default()).unwrap();
    let subscriber = Subscriber::start(&router).unwrap();
    router.add_worker(worker(&engine), now()).unwrap();
    subscriber.follow_worker(&worker(&engine)).unwrap();
    eventually("four blocks come by replay", || overlap(&router) == 4);
    let trust = || router.trust("w", 0, now()).unwrap();
    assert_eq!(trust().state, TrustState::Exact);

    engine.lose(4, &store(4));
    engine.wait_subscribed();
    engine.publish(5, &store(5));
    eventually("the lost block comes by replay", || overlap(&router) == 6);
    assert_eq!(trust().state, TrustState::Exact);

    let engine = engine.restart();
    engine.publish(0, &store(0));
    eventually("only the new life is left", || overlap(&router) == 1);
    assert_eq!(trust().state, TrustState::Exact);

    drop(engine);
    eventually("the engine is missed", || {
        trust().state == TrustState::Unreachable
    });
    subscriber.unfollow("w");
    router.remove_worker("w").unwrap();
    assert_eq!(overlap(&router), 0);
}

#[test]
fn a_worker_with_a_bad_endpoint_is_refused_by_name() {
    let router = Router::new(RouterConfig::default()).unwrap();
    let subscriber = Subscriber::start(&router).unwrap();
    let refused = |events: &str, ranks| {
        let worker = WorkerSpec::new("w").unwrap().dp_ranks(ranks);
        let error = subscriber
            .follow_worker(&worker.events(Some(events.into()), None))
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        error.to_string()
    };
    assert!(refused("tcp://*:5557", 1).contains("tcp://HOST:PORT"));
    assert!(refused("ipc:///tmp/kv", 2).contains("dp rank 1"));
    assert!(subscriber.stats().is_empty());
    subscriber
        .follow_worker(&WorkerSpec::new("w").unwrap())
        .unwrap();
    assert!(subscriber.stats().is_empty());
}
