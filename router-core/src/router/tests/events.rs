use crate::block::SaltContext;
use crate::event::{BlockStored, KvEvent, SkipReason};
use crate::index::{EngineHash, Tier};
use crate::worker::WorkerSpec;

use super::*;

#[test]
fn removing_a_worker_is_a_barrier() {
    let bench = Bench::new(&["w1"], |_| {});
    for n in 0..1_000u32 {
        bench.ingest(
            "w1",
            Some(n.into()),
            vec![store(&[u64::from(n)], None, t(n * 4, 4))],
        );
    }
    assert_eq!(bench.router.stats().index.blocks, 1_000);
    bench.router.remove_worker("w1").unwrap();
    assert_eq!(bench.router.stats().index.blocks, 0);
    let late = bench.router.ingest(
        "w1",
        0,
        Some(1_000),
        &payload(vec![store(&[5], None, t(0, 4))]),
        bench.start,
    );
    assert_eq!(late.unwrap_err().kind(), crate::ErrorKind::UnknownWorker);
    bench.add("w1");
    assert_eq!(bench.overlap(&t(0, 4)), []);
}

#[test]
fn concurrent_events_of_an_old_life_do_not_survive_removal() {
    let bench = Bench::new(&["w1"], |_| {});
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut n = 0u32;
            loop {
                let batch = payload(vec![store(&[n.into()], None, t(n * 4, 4))]);
                if bench
                    .router
                    .ingest("w1", 0, Some(n.into()), &batch, bench.start)
                    .is_err()
                {
                    return n;
                }
                n += 1;
            }
        });
        while bench.router.stats().index.blocks < 200 {
            std::thread::yield_now();
        }
        bench.router.remove_worker("w1").unwrap();
        assert_eq!(bench.router.stats().index.blocks, 0);
        assert!(writer.join().unwrap() >= 200);
    });
    assert_eq!(bench.router.stats().index.blocks, 0);
}

#[test]
fn a_clear_is_applied_in_order_with_its_neighbours() {
    let bench = Bench::new(&["w1", "w2"], |_| {});
    for worker in ["w1", "w2"] {
        bench.ingest(worker, Some(0), vec![store(&[1, 2], None, t(0, 8))]);
    }
    bench.ingest("w1", Some(1), vec![KvEvent::Cleared]);
    assert_eq!(bench.overlap(&t(0, 8)), [("w2".to_owned(), 2)]);
    bench.ingest(
        "w1",
        Some(2),
        vec![
            store(&[1], None, t(0, 4)),
            KvEvent::Cleared,
            store(&[9], None, t(40, 4)),
        ],
    );
    assert_eq!(bench.overlap(&t(0, 8)), [("w2".to_owned(), 2)]);
    assert_eq!(bench.overlap(&t(40, 4)), [("w1".to_owned(), 1)]);
    bench.router.clear("w1", None).unwrap();
    assert_eq!(bench.overlap(&t(40, 4)), []);
}

#[test]
fn repeated_stores_do_not_inflate_a_worker() {
    let bench = Bench::new(&["w1", "w2"], |_| {});
    for n in 0..5 {
        bench.ingest("w1", Some(n), vec![store(&[1, 2, 3], None, t(0, 12))]);
    }
    bench.ingest("w2", Some(0), vec![store(&[7, 8, 9], None, t(0, 12))]);
    let held: Vec<_> = bench
        .router
        .workers(bench.start)
        .iter()
        .map(|w| w.index_blocks.device)
        .collect();
    assert_eq!(held, [3, 3]);
    let mut wins = 0;
    for _ in 0..200 {
        let guard = bench.select(&t(0, 12));
        wins += u32::from(guard.worker() == "w1");
        bench.release(guard);
    }
    assert!((65..=135).contains(&wins), "{wins}");
}

#[test]
fn a_hole_ends_the_credit_and_filling_it_restores_the_run() {
    let bench = Bench::new(&["w1"], |_| {});
    bench.ingest("w1", Some(0), vec![store(&[1, 2, 3, 4], None, t(0, 16))]);
    bench.ingest("w1", Some(1), vec![remove(&[2])]);
    assert_eq!(bench.overlap(&t(0, 16)), [("w1".to_owned(), 1)]);
    bench.ingest("w1", Some(2), vec![store(&[2], Some(1), t(4, 4))]);
    assert_eq!(bench.overlap(&t(0, 16)), [("w1".to_owned(), 4)]);
    bench.ingest(
        "w1",
        Some(3),
        vec![remove(&[4]), remove(&[3]), remove(&[2]), remove(&[1])],
    );
    let report = bench.ingest("w1", Some(4), vec![remove(&[3])]);
    assert_eq!(report.skipped[&SkipReason::UnknownBlock], 1);
    assert_eq!(bench.overlap(&t(0, 16)), []);
    assert!(bench.router.stats().index.is_empty());
}

#[test]
fn events_that_do_not_add_up_are_skipped_alone() {
    let bench = Bench::new(&["w1"], |_| {});
    let bad = |hashes: &[u64], tokens: u32, block_size: u32| {
        KvEvent::Stored(BlockStored {
            block_hashes: ints(hashes),
            token_ids: t(100, tokens),
            block_size,
            ..BlockStored::default()
        })
    };
    let report = bench.ingest(
        "w1",
        Some(0),
        vec![
            bad(&[], 16, 4),
            bad(&[1, 2, 3], 8, 4),
            bad(&[1, 2], 10, 4),
            bad(&[1], 4, 0),
            store(&[5], None, t(0, 4)),
        ],
    );
    assert_eq!(report.applied, 1);
    assert_eq!(report.skipped.values().sum::<u64>(), 4, "{report:?}");
    assert_eq!(bench.overlap(&t(0, 4)), [("w1".to_owned(), 1)]);
    assert_eq!(bench.overlap(&t(100, 16)), []);
}

#[test]
fn engine_hashes_mean_something_inside_one_worker_only() {
    let bench = Bench::new(&["w1", "w2", "w3"], |_| {});
    bench.ingest(
        "w1",
        None,
        vec![store(&[1, 2], None, t(0, 8)), store(&[77], None, t(600, 4))],
    );
    bench.ingest(
        "w2",
        None,
        vec![
            store(&[31, 32], None, t(0, 8)),
            store(&[77], None, t(500, 4)),
        ],
    );
    bench.ingest("w2", None, vec![store(&[78], Some(77), t(504, 4))]);
    let bytes = |byte: u8| EngineHash::Bytes(vec![byte; 32].into());
    bench.ingest(
        "w3",
        None,
        vec![KvEvent::Stored(BlockStored {
            block_hashes: vec![bytes(1), bytes(2)],
            token_ids: t(0, 8),
            block_size: 4,
            ..BlockStored::default()
        })],
    );
    assert_eq!(
        bench.overlap(&t(0, 8)),
        [("w1".into(), 2), ("w2".into(), 2), ("w3".into(), 2)]
    );
    assert_eq!(bench.overlap(&t(500, 8)), [("w2".to_owned(), 2)]);
    let mixed: Vec<u32> = t(600, 4).into_iter().chain(t(504, 4)).collect();
    assert_eq!(bench.overlap(&mixed), [("w1".to_owned(), 1)]);
}

#[test]
fn a_coarse_host_block_is_credited_whole_or_not_at_all() {
    let bench = Bench::new(&["w1"], |config| {
        config.block_size = BlockSize::new(16).unwrap()
    });
    bench.ingest(
        "w1",
        None,
        vec![KvEvent::Stored(BlockStored {
            block_hashes: ints(&[1]),
            token_ids: t(0, 64),
            block_size: 64,
            tier: Tier::Host,
            ..BlockStored::default()
        })],
    );
    assert_eq!(
        bench.tiers("w1", &[t(0, 40), t(900, 24)].concat()).blocks(),
        0
    );
    assert_eq!(bench.tiers("w1", &t(0, 64)).host, 4); // 64 tokens
}

#[test]
fn adapters_and_the_base_model_are_separate_spaces() {
    let bench = Bench::new(&["w1", "w2", "w3"], |_| {});
    for (worker, lora) in [("w1", None), ("w2", Some("a")), ("w3", Some("b"))] {
        bench.ingest(
            worker,
            None,
            vec![KvEvent::Stored(BlockStored {
                block_hashes: ints(&[1, 2]),
                token_ids: t(0, 8),
                block_size: 4,
                lora_name: lora.map(str::to_owned),
                ..BlockStored::default()
            })],
        );
    }
    for (lora, expected) in [
        (None, vec!["w1"]),
        (Some("a"), vec!["w2"]),
        (Some("b"), vec!["w3"]),
        (Some("c"), vec![]),
    ] {
        let prompt = bench.router.prompt(
            &t(0, 8),
            &SaltContext {
                lora,
                ..SaltContext::default()
            },
        );
        let found: Vec<String> = bench
            .overlap_of(&prompt, 0.0)
            .into_iter()
            .map(|(worker, _)| worker)
            .collect();
        assert_eq!(found, expected, "adapter {lora:?}");
    }
}

#[test]
fn a_salt_is_part_of_the_key_and_the_chain_carries_it_on() {
    let bench = Bench::new(&["w1"], |_| {});
    // As vLLM publishes it: the salt stands in the first block's extra keys alone.
    bench.ingest(
        "w1",
        None,
        vec![
            KvEvent::Stored(BlockStored {
                block_hashes: ints(&[1]),
                token_ids: t(0, 4),
                block_size: 4,
                extra_keys: vec![vec![crate::event::ExtraKey::Text("s1".to_owned())]],
                ..BlockStored::default()
            }),
            store(&[2], Some(1), t(4, 4)),
        ],
    );
    for (salt, blocks) in [(Some("s1"), 2), (Some("s2"), 0), (None, 0)] {
        let prompt = bench.router.prompt(
            &t(0, 8),
            &SaltContext {
                salt,
                ..SaltContext::default()
            },
        );
        let found: u32 = bench
            .overlap_of(&prompt, 0.0)
            .iter()
            .map(|(_, blocks)| blocks)
            .sum();
        assert_eq!(found, blocks, "salt {salt:?}");
    }
}

#[test]
fn media_enter_the_blocks_that_they_touch() {
    let bench = Bench::new(&["w1"], |_| {});
    // An image of 6 tokens from token 2 on: blocks 0 (offset 2) and 1 (offset -2).
    let media = |offset| {
        vec![crate::event::ExtraKey::Media {
            digest: b"cat".to_vec(),
            offset,
        }]
    };
    bench.ingest(
        "w1",
        None,
        vec![KvEvent::Stored(BlockStored {
            block_hashes: ints(&[1, 2, 3]),
            token_ids: t(0, 12),
            block_size: 4,
            extra_keys: vec![media(2), media(-2), vec![]],
            ..BlockStored::default()
        })],
    );
    let with = |digest: &[u8]| {
        let media = [crate::MediaSpan {
            offset_tokens: 2,
            length_tokens: 6,
            digest: digest.to_vec(),
        }];
        let salt = SaltContext {
            media: &media,
            ..SaltContext::default()
        };
        bench.overlap_of(&bench.router.prompt(&t(0, 12), &salt), 0.0)
    };
    assert_eq!(with(b"cat"), [("w1".to_owned(), 3)]);
    assert_eq!(with(b"dog"), []);
    assert_eq!(bench.overlap(&t(0, 12)), []);
}

#[test]
fn ranks_are_targets_of_their_own() {
    let bench = Bench::new(&[], |_| {});
    bench
        .router
        .add_worker(WorkerSpec::new("w1").unwrap().dp_ranks(2), bench.start)
        .unwrap();
    bench.ingest_rank("w1", 0, Some(0), vec![store(&[1, 2], None, t(0, 8))]);
    bench.ingest_rank("w1", 1, Some(0), vec![store(&[1, 2], None, t(50, 8))]);
    let guard = bench.select(&t(0, 8));
    assert_eq!(
        (
            guard.worker(),
            guard.dp_rank(),
            guard.decision().overlap.device
        ),
        ("w1", 0, 2)
    );
    bench.router.clear("w1", Some(1)).unwrap();
    assert_eq!(bench.overlap(&t(50, 8)), []);
    assert_eq!(bench.overlap(&t(0, 8)), [("w1".to_owned(), 2)]);
    bench.ingest_rank("w1", 0, Some(1), vec![KvEvent::Cleared]);
    assert_eq!(bench.overlap(&t(0, 8)), []);
    let error = bench
        .router
        .ingest("w1", 2, None, &payload(vec![]), bench.start)
        .unwrap_err();
    assert!(error.to_string().contains("0 to 1"), "{error}");
}

#[test]
fn a_batch_is_never_applied_twice_and_a_restart_clears_first() {
    let bench = Bench::new(&["w1"], |_| {});
    let first = payload(vec![store(&[1, 2], None, t(0, 8))]);
    let ingest = |seq, payload: &[u8]| {
        bench
            .router
            .ingest("w1", 0, Some(seq), payload, bench.start)
            .unwrap()
    };
    ingest(0, &first);
    let again = ingest(0, &first);
    assert_eq!(
        (again.applied, again.skipped[&SkipReason::DuplicateBatch]),
        (0, 1)
    );
    ingest(1, &payload(vec![remove(&[1, 2])]));
    assert_eq!(
        bench.overlap(&t(0, 8)),
        [],
        "a batch applied twice would have left a count"
    );
    ingest(2, &payload(vec![store(&[3], None, t(20, 4))]));
    let restarted = ingest(0, &payload(vec![store(&[9], None, t(40, 4))]));
    assert!(restarted.restarted);
    assert_eq!(bench.overlap(&t(20, 4)), []);
    assert_eq!(bench.overlap(&t(40, 4)), [("w1".to_owned(), 1)]);
}

#[test]
fn an_undecodable_payload_changes_no_entry() {
    let bench = Bench::new(&["w1"], |_| {});
    bench.ingest("w1", Some(0), vec![store(&[1, 2], None, t(0, 8))]);
    for bytes in [&b"{}"[..], b"", b"\xdd\xff\xff\xff\xff", b"not msgpack"] {
        let report = bench
            .router
            .ingest("w1", 0, None, bytes, bench.start)
            .unwrap();
        assert_eq!(
            (report.applied, report.skipped[&SkipReason::Undecodable]),
            (0, 1)
        );
    }
    assert_eq!(bench.overlap(&t(0, 8)), [("w1".to_owned(), 2)]);
}

#[test]
fn lost_batches_leave_entries_believed_until_the_ttl() {
    let bench = Bench::new(&["w1"], |config| config.ttl_seconds = 10.0);
    bench.ingest(
        "w1",
        Some(0),
        vec![store(&[1, 2], None, t(0, 8)), store(&[5], None, t(50, 4))],
    );
    let report = bench.ingest(
        "w1",
        Some(3),
        vec![
            store(&[1, 2], None, t(0, 8)),
            store(&[6], Some(5), t(54, 4)),
        ],
    );
    assert!(report.gap);
    assert_eq!(bench.overlap(&t(0, 8)), [("w1".to_owned(), 2)]);
    assert_eq!(bench.overlap(&t(50, 8)), [("w1".to_owned(), 2)]);
    bench.router.tick(bench.at(10.0));
    assert_eq!(
        bench.overlap(&t(0, 8)),
        [("w1".to_owned(), 2)],
        "stored again since"
    );
    assert_eq!(bench.overlap(&t(50, 8)), [], "never confirmed");
}

#[test]
fn an_unfitting_engine_block_size_is_refused_by_name() {
    let bench = Bench::new(&["w1"], |config| {
        config.block_size = BlockSize::new(16).unwrap()
    });
    let report = bench.ingest(
        "w1",
        Some(0),
        vec![KvEvent::Stored(BlockStored {
            block_hashes: ints(&[1]),
            token_ids: t(0, 24),
            block_size: 24,
            ..BlockStored::default()
        })],
    );
    assert_eq!(report.skipped[&SkipReason::BlockSize], 1);
    let trust = bench.router.trust("w1", 0, bench.start).unwrap();
    assert_eq!(trust.state, crate::TrustState::Approximate);
    assert!(trust.cause.unwrap().contains("24"));
}
