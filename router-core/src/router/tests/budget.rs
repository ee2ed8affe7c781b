//! The bound of memory.

use super::*;

const MIB: u64 = 1 << 20;

fn bytes(router: &Router) -> usize {
    let stats = router.stats();
    stats.index.bytes + stats.token_placements.bytes() + stats.text_placements.bytes()
}

/// One conversation of 64 blocks, with hashes and tokens of its own.
fn conversation(number: u32) -> (Vec<u64>, Vec<u32>) {
    let first = u64::from(number) * 64 + 1;
    ((first..first + 64).collect(), t(number * 256, 256))
}

#[test]
fn events_beyond_the_bound_push_out_what_was_used_least_recently() {
    let bench = Bench::new(&["w1", "w2"], |config| config.max_index_bytes = Some(MIB));
    // 2,000 conversations × 64 blocks are 128,000 keys, about 3 MiB.
    for number in 0..2_000 {
        let (hashes, tokens) = conversation(number);
        let worker = if number % 2 == 0 { "w1" } else { "w2" };
        bench.ingest(worker, None, vec![store(&hashes, None, tokens)]);
        // The first conversation is asked for again and again.
        assert_eq!(bench.overlap(&conversation(0).1), [("w1".to_owned(), 64)]);
        assert!(bytes(&bench.router) <= 1 << 20, "after {number}");
    }
    let stats = bench.router.stats();
    assert!(stats.forgotten_blocks > 50_000, "{stats:?}");
    assert_eq!(
        bench.overlap(&conversation(1_999).1),
        [("w2".to_owned(), 64)]
    );
    assert_eq!(bench.overlap(&conversation(1).1), []);
    // The engine does not know what was forgotten: its removal of it is passed over, and it may announce it anew.
    let (hashes, tokens) = conversation(1);
    bench.ingest(
        "w2",
        None,
        vec![remove(&hashes), store(&hashes, None, tokens.clone())],
    );
    assert_eq!(bench.overlap(&tokens), [("w2".to_owned(), 64)]);
}

#[test]
fn own_placements_are_bounded_too() {
    let bench = Bench::new(&["w1"], |config| {
        config.max_index_bytes = Some(MIB);
        config.prediction_ttl_seconds = 100.0;
    });
    for number in 0..4_000 {
        let guard = bench.select(&conversation(number).1);
        bench.release(guard);
        if number % 100 == 0 {
            bench.router.tick(bench.start);
            assert!(bytes(&bench.router) <= 1 << 20, "after {number}");
        }
    }
    assert!(bench.router.stats().forgotten_blocks > 0);
}
