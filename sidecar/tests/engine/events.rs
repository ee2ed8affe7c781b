//! KV events: their content, order and replay.

use std::collections::HashMap;

use kvlane::event::{BlockStored, ExtraKey, GroupKind, KvEvent};
use kvlane::index::EngineHash;
use kvlane_sidecar::engine::{EngineConfig, EventConfig, EventFaults, ReplayLayout};
use serde_json::json;

use crate::client::{
    Batch, batch, complete, next_batch, post, replay, subscribe, subscription_arrives,
};
use crate::{eventually, fast, start};

fn only_store(batch: &Batch) -> &BlockStored {
    match batch.events.as_slice() {
        [KvEvent::Stored(stored)] => stored,
        other => panic!("unexpected {other:?}"),
    }
}

fn with_events(change: impl FnOnce(&mut EventConfig)) -> EngineConfig {
    let mut config = fast();
    change(config.events.as_mut().unwrap());
    config
}

/// Reads the batches of a replay in the current layout.
fn batches(messages: &[Vec<Vec<u8>>]) -> Vec<Batch> {
    let replayed = &messages[..messages.len() - 1];
    replayed
        .iter()
        .map(|parts| {
            assert_eq!(parts.len(), 4);
            assert!(parts[0].is_empty());
            batch(&parts[1], &parts[2], &parts[3])
        })
        .collect()
}

#[tokio::test]
async fn a_prompt_is_announced_as_one_run_of_full_blocks() {
    let engine = start(with_events(|events| {
        events.topic = "kv@pod@model".to_owned()
    }))
    .await;
    let socket = subscribe(&engine);
    subscription_arrives(&engine).await;
    complete(&engine, 100..137, 1).await; // 2 full blocks of 16
    let first = next_batch(&socket).unwrap();
    assert_eq!(
        (first.topic.as_slice(), first.seq),
        (&b"kv@pod@model"[..], 0)
    );
    let stored = only_store(&first);
    assert_eq!(stored.block_hashes.len(), 2);
    assert_eq!(stored.parent_hash, None);
    assert_eq!(stored.token_ids, (100..132).collect::<Vec<u32>>());
    assert_eq!((stored.block_size, stored.kind), (16, GroupKind::Full));
    let prompt: Vec<u32> = (100..137).collect();
    let body = json!({"prompt": prompt, "max_tokens": 1, "cache_salt": "tenant"});
    assert_eq!(post(&engine, "/v1/completions", &body).await.status, 200);
    let second = next_batch(&socket).unwrap();
    assert_eq!(second.seq, 1);
    let salted = only_store(&second);
    assert_eq!(
        salted.extra_keys,
        [vec![ExtraKey::Text("tenant".to_owned())], vec![]]
    );
    assert_ne!(salted.block_hashes, stored.block_hashes);
    // A longer prompt continues the unsalted chain.
    complete(&engine, 100..150, 1).await;
    let third = next_batch(&socket).unwrap();
    assert_eq!(
        only_store(&third).parent_hash.as_ref(),
        stored.block_hashes.last()
    );
    engine.shutdown().await;
}

#[tokio::test]
async fn removals_come_one_by_one_before_the_store_that_takes_the_blocks() {
    let engine = start(EngineConfig {
        kv_blocks: 7,
        ..fast()
    })
    .await; // 6 usable
    let socket = subscribe(&engine);
    subscription_arrives(&engine).await;
    complete(&engine, 0..64, 1).await; // 4 blocks, all full
    let first = next_batch(&socket).unwrap();
    let old = only_store(&first).block_hashes.clone();
    complete(&engine, 1000..1064, 1).await; // 2 unused blocks, then the old tail
    let second = next_batch(&socket).unwrap();
    let [
        KvEvent::Removed(a),
        KvEvent::Removed(b),
        KvEvent::Stored(new),
    ] = second.events.as_slice()
    else {
        panic!("unexpected {:?}", second.events);
    };
    assert_eq!(a.block_hashes, old[3..4]);
    assert_eq!(b.block_hashes, old[2..3]);
    assert_eq!(new.block_hashes.len(), 4);
    assert_eq!(complete(&engine, 0..64, 1).await, 32);
    engine.shutdown().await;
}

#[tokio::test]
async fn events_replayed_into_a_model_equal_the_cache() {
    let engine = start(EngineConfig {
        kv_blocks: 60,
        max_num_seqs: 4,
        ..fast()
    })
    .await;
    let mut seed = fastrand::Rng::with_seed(7);
    for _ in 0..25 {
        // Eight at once share a batch, preempt and evict each other.
        let requests = (0..8).map(|_| {
            let family = seed.u32(0..12) * 1000;
            complete(&engine, family..family + seed.u32(1..150), seed.u32(1..60))
        });
        join(requests.map(Box::pin).collect()).await;
    }
    let mut held: HashMap<EngineHash, usize> = HashMap::new();
    for (at, batch) in batches(&replay(&engine, 0)).into_iter().enumerate() {
        assert_eq!(batch.seq, at as u64);
        for event in batch.events {
            match event {
                KvEvent::Stored(stored) => {
                    stored
                        .block_hashes
                        .into_iter()
                        .for_each(|hash| *held.entry(hash).or_default() += 1);
                }
                KvEvent::Removed(removed) => {
                    for hash in removed.block_hashes {
                        *held.get_mut(&hash).unwrap() -= 1;
                    }
                }
                KvEvent::Cleared => panic!("nobody cleared"),
            }
        }
    }
    eventually("the blocks are free", || engine.stats().used_blocks == 0).await;
    let stats = engine.stats();
    assert_eq!(held.values().sum::<usize>(), stats.cached_blocks);
    assert_eq!(stats.finished_requests, 200);
    assert!(stats.prefix_hit_tokens > 0);
    engine.shutdown().await;
}

/// Polls all futures on one task until each is done.
async fn join<F: Future + Unpin>(mut futures: Vec<F>) {
    std::future::poll_fn(|context| {
        futures.retain_mut(|future| std::pin::Pin::new(future).poll(context).is_pending());
        if futures.is_empty() {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
}

#[tokio::test]
async fn replay_has_both_layouts() {
    for layout in [ReplayLayout::Topic, ReplayLayout::Bare] {
        let engine = start(with_events(|events| {
            events.topic = "t".to_owned();
            events.replay_layout = layout;
        }))
        .await;
        for prompt in [0..16, 100..116, 200..216] {
            complete(&engine, prompt, 1).await;
        }
        eventually("the third batch", || engine.published_batches() == 3).await;
        let messages = replay(&engine, 1);
        let end = [0xff; 8].to_vec();
        match layout {
            ReplayLayout::Topic => {
                assert_eq!(
                    batches(&messages)
                        .iter()
                        .map(|batch| batch.seq)
                        .collect::<Vec<_>>(),
                    [1, 2]
                );
                assert_eq!(messages[0][1], b"t");
                assert_eq!(
                    messages[2],
                    [vec![], vec![], end, vec![]],
                    "the end marker has an empty topic"
                );
            }
            ReplayLayout::Bare => {
                assert_eq!(messages.len(), 3);
                assert_eq!(batch(b"", &messages[0][1], &messages[0][2]).seq, 1);
                assert_eq!(messages[2], [vec![], end, vec![]]);
            }
        }
        assert_eq!(engine.answered_replays(), 1);
        assert_eq!(replay(&engine, 99).len(), 1, "only the end marker");
        engine.shutdown().await;
    }
}

#[tokio::test]
async fn the_replay_buffer_keeps_the_newest() {
    let engine = start(with_events(|events| events.buffer_steps = 2)).await;
    for prompt in [0..16, 100..116, 200..216, 300..316] {
        complete(&engine, prompt, 1).await;
    }
    eventually("the fourth batch", || engine.published_batches() == 4).await;
    let kept: Vec<u64> = batches(&replay(&engine, 0))
        .iter()
        .map(|batch| batch.seq)
        .collect();
    assert_eq!(kept, [2, 3]);
    engine.shutdown().await;
}

#[tokio::test]
async fn malformed_replay_requests_are_ignored_and_the_next_is_answered() {
    let engine = start(fast()).await;
    let socket = zmq::Context::new().socket(zmq::DEALER).unwrap();
    socket.set_linger(0).unwrap();
    socket.set_rcvtimeo(200).unwrap();
    socket.connect(engine.replay_endpoint().unwrap()).unwrap();
    let start: &[u8] = &[0; 8];
    for bad in [vec![start], vec![b"x", start], vec![b"", start, start]] {
        socket.send_multipart(bad, 0).unwrap();
    }
    assert!(socket.recv_multipart(0).is_err(), "no answer");
    assert_eq!(replay(&engine, 0).len(), 1);
    engine.shutdown().await;
}

#[tokio::test]
async fn faults_lose_batches_as_told() {
    let engine = start(with_events(|events| {
        events.faults = EventFaults {
            drop: vec![0],
            burn: vec![1],
        };
    }))
    .await;
    let socket = subscribe(&engine);
    subscription_arrives(&engine).await;
    for prompt in [0..16, 100..116, 200..216] {
        complete(&engine, prompt, 1).await;
    }
    assert_eq!(next_batch(&socket).unwrap().seq, 2);
    let kept: Vec<u64> = batches(&replay(&engine, 0))
        .iter()
        .map(|batch| batch.seq)
        .collect();
    assert_eq!(kept, [0, 2]);
    engine.drop_next_batches(1);
    for prompt in [300..316, 400..416] {
        complete(&engine, prompt, 1).await;
    }
    assert_eq!(next_batch(&socket).unwrap().seq, 4);
    engine.shutdown().await;
}

#[tokio::test]
async fn a_silent_engine_binds_and_says_nothing() {
    let engine = start(with_events(|events| events.silent = true)).await;
    let socket = subscribe(&engine);
    socket.set_rcvtimeo(300).unwrap();
    subscription_arrives(&engine).await;
    assert_eq!(complete(&engine, 0..40, 1).await, 0);
    assert_eq!(
        complete(&engine, 0..40, 1).await,
        32,
        "it caches all the same"
    );
    assert_eq!(next_batch(&socket), None);
    assert_eq!(replay(&engine, 0).len(), 1);
    engine.shutdown().await;
}

#[tokio::test]
async fn a_reset_is_announced_with_the_next_step_only() {
    let engine = start(fast()).await;
    complete(&engine, 0..40, 1).await;
    eventually("the first batch", || engine.published_batches() == 1).await;
    // A reset does nothing while a request holds blocks, and the answer may be here before they are given back.
    eventually("the blocks are free", || engine.stats().used_blocks == 0).await;
    let answer = post(&engine, "/reset_prefix_cache", &json!({})).await;
    assert_eq!((answer.status.as_u16(), answer.text.as_str()), (200, ""));
    eventually("the cache is empty", || engine.stats().cached_blocks == 0).await;
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    assert_eq!(engine.published_batches(), 1);
    assert_eq!(complete(&engine, 0..40, 1).await, 0);
    eventually("the second batch", || engine.published_batches() == 2).await;
    let last = batches(&replay(&engine, 1)).remove(0);
    assert!(
        matches!(
            last.events.as_slice(),
            [KvEvent::Cleared, KvEvent::Stored(_)]
        ),
        "{last:?}"
    );
    engine.shutdown().await;
}

#[tokio::test]
async fn a_restart_frees_the_ports_and_begins_another_life() {
    let [http, events, replay_at] = [(); 3].map(|()| kvlane_tests::free_address());
    let fixed = || EngineConfig {
        listen: http,
        events: Some(EventConfig {
            replay_endpoint: Some(format!("tcp://{replay_at}")),
            ..EventConfig::new(format!("tcp://{events}"))
        }),
        ..fast()
    };
    let first = start(fixed()).await;
    complete(&first, 0..16, 1).await;
    eventually("the first batch", || first.published_batches() == 1).await;
    let before = batches(&replay(&first, 0)).remove(0);
    first.shutdown().await;
    let second = start(fixed()).await;
    assert_eq!(complete(&second, 0..16, 1).await, 0);
    eventually("the first batch", || second.published_batches() == 1).await;
    let after = batches(&replay(&second, 0)).remove(0);
    assert_eq!((before.seq, after.seq), (0, 0));
    let (before, after) = (only_store(&before), only_store(&after));
    assert_eq!(before.token_ids, after.token_ids);
    assert_ne!(before.block_hashes, after.block_hashes);
    second.shutdown().await;
}
