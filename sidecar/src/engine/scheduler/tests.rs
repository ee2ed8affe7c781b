//! The scheduler step by step, without time.

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::engine::sequence::{Handoff, Output};

const BLOCK: usize = 4;

fn scheduler(blocks: u32, limits: Limits) -> Scheduler {
    let hasher = BlockHasher {
        seed: 1,
        block_size: BLOCK,
    };
    Scheduler::new(
        BlockPool::new(blocks),
        hasher,
        Tokenizer::new(1024),
        0,
        limits,
    )
}

const WIDE: Limits = Limits {
    max_num_seqs: 8,
    max_num_batched_tokens: 1000,
};

fn add(
    scheduler: &mut Scheduler,
    prompt: impl IntoIterator<Item = u32>,
    max_tokens: usize,
) -> UnboundedReceiver<Output> {
    let (output, receiver) = unbounded_channel();
    scheduler.add(NewSequence {
        index: 0,
        sample: 0,
        prompt: prompt.into_iter().collect(),
        max_tokens,
        salt: None,
        handoff: Handoff::Whole,
        output,
    });
    receiver
}

fn run(scheduler: &mut Scheduler) -> Vec<Step> {
    let mut steps = Vec::new();
    while scheduler.has_work() {
        steps.push(scheduler.schedule());
        complete(scheduler);
        assert!(steps.len() < 10_000, "the scheduler makes no progress");
    }
    steps
}

fn complete(scheduler: &mut Scheduler) {
    for delivery in scheduler.complete().deliveries {
        delivery.send();
    }
}

fn outputs(receiver: &mut UnboundedReceiver<Output>) -> Vec<Output> {
    std::iter::from_fn(|| receiver.try_recv().ok()).collect()
}

#[test]
fn a_repeated_prompt_computes_at_least_its_last_token() {
    let mut scheduler = scheduler(17, WIDE);
    // 8 tokens are 2 full blocks; only the first may be a hit: floor((8 - 1) / 4) × 4 = 4.
    for cached in [0, 4, 4] {
        let mut receiver = add(&mut scheduler, 10..18, 1);
        run(&mut scheduler);
        assert_eq!(outputs(&mut receiver)[0].cached_tokens, cached);
    }
    let totals = scheduler.totals();
    assert_eq!((totals.prefix_queries, totals.prefix_hits), (24, 8));
    assert_eq!(scheduler.pool().used_blocks(), 0);
    // The second block was computed three times and is held in three copies.
    assert_eq!(scheduler.pool().cached_blocks(), 1 + 3);
}

#[test]
fn generated_blocks_are_cached_but_never_the_last_token() {
    let mut scheduler = scheduler(17, WIDE);
    let mut receiver = add(&mut scheduler, 10..14, 5);
    let steps = run(&mut scheduler);
    let stored: Vec<usize> = steps
        .iter()
        .flat_map(|step| &step.events)
        .map(|event| match event {
            CacheEvent::Stored(stored) => stored.hashes.len(),
            other => panic!("unexpected {other:?}"),
        })
        .collect();
    // 4 prompt tokens, then 5 generated of which 4 are computed: blocks at 4 and 8 tokens.
    assert_eq!(stored, [1, 1]);
    assert_eq!(steps.len(), 5);
    let words: Vec<u32> = outputs(&mut receiver)
        .iter()
        .map(|output| output.token)
        .collect();
    assert_eq!(words.len(), 5);
    let mut next = add(&mut scheduler, (10..14).chain(words), 1);
    run(&mut scheduler);
    assert_eq!(outputs(&mut next)[0].cached_tokens, 8);
}

#[test]
fn equal_prompts_of_one_step_share_blocks_and_their_decodes_do_not() {
    let mut scheduler = scheduler(33, WIDE);
    let receivers = [
        add(&mut scheduler, 10..19, 8),
        add(&mut scheduler, 10..19, 8),
    ];
    let steps = run(&mut scheduler);
    let mut counts = std::collections::BTreeMap::new();
    for event in steps.iter().flat_map(|step| &step.events) {
        if let CacheEvent::Stored(stored) = event {
            for hash in &stored.hashes {
                *counts.entry(*hash).or_insert(0) += 1;
            }
        }
    }
    // 9 prompt + 7 computed words = 16 tokens = 4 blocks: the prompt's 2 once, the others twice.
    let mut counts: Vec<i32> = counts.into_values().collect();
    counts.sort_unstable();
    assert_eq!(counts, [1, 1, 2, 2]);
    drop(receivers);
}

#[test]
fn long_prompts_are_computed_in_chunks_beside_running_decodes() {
    let mut scheduler = scheduler(
        33,
        Limits {
            max_num_seqs: 8,
            max_num_batched_tokens: 10,
        },
    );
    let _first = add(&mut scheduler, 10..14, 20);
    scheduler.schedule();
    complete(&mut scheduler);
    let _second = add(&mut scheduler, 100..125, 1);
    let plan: Vec<(usize, usize)> = (0..4)
        .map(|_| {
            let step = scheduler.schedule();
            complete(&mut scheduler);
            (step.prefill_tokens, step.decodes)
        })
        .collect();
    // 25 tokens, 9 a step beside one decode.
    assert_eq!(plan, [(9, 1), (9, 1), (7, 1), (0, 1)]);
}

#[test]
fn requests_wait_for_a_place_in_the_batch_and_for_blocks() {
    let mut scheduler = scheduler(
        9,
        Limits {
            max_num_seqs: 2,
            max_num_batched_tokens: 1000,
        },
    );
    let receivers: Vec<_> = (0..3)
        .map(|i| add(&mut scheduler, i * 100..i * 100 + 4, 2))
        .collect();
    scheduler.schedule();
    assert_eq!((scheduler.running(), scheduler.waiting()), (2, 1));
    complete(&mut scheduler);
    run(&mut scheduler);
    // 8 usable blocks: the second prompt of 20 tokens (5 blocks) does not fit beside the first.
    let more = [
        add(&mut scheduler, 500..520, 1),
        add(&mut scheduler, 600..620, 1),
    ];
    scheduler.schedule();
    assert_eq!((scheduler.running(), scheduler.waiting()), (1, 1));
    complete(&mut scheduler);
    run(&mut scheduler);
    assert_eq!(scheduler.totals().finished_requests, 5);
    drop((receivers, more));
}

#[test]
fn running_out_of_blocks_preempts_the_last_and_all_finish() {
    let mut scheduler = scheduler(9, WIDE); // 8 usable blocks, 32 tokens
    let mut receivers = [
        add(&mut scheduler, 10..22, 12),
        add(&mut scheduler, 100..112, 12),
    ];
    run(&mut scheduler);
    let totals = scheduler.totals();
    assert!(totals.preemptions > 0);
    assert_eq!(totals.finished_requests, 2);
    assert_eq!(totals.generated_tokens, 24);
    assert_eq!(scheduler.pool().used_blocks(), 0);
    for receiver in &mut receivers {
        let tokens = outputs(receiver);
        assert_eq!(tokens.len(), 12, "no token is handed out twice");
        assert!(tokens[11].finished);
    }
}

#[test]
fn abandoned_sequences_give_their_blocks_back() {
    let mut scheduler = scheduler(
        9,
        Limits {
            max_num_seqs: 1,
            max_num_batched_tokens: 1000,
        },
    );
    let running = add(&mut scheduler, 10..22, 12);
    let waiting = add(&mut scheduler, 100..112, 12);
    scheduler.schedule();
    complete(&mut scheduler);
    assert_eq!(scheduler.pool().used_blocks(), 3);
    drop((running, waiting));
    scheduler.drop_abandoned();
    assert!(!scheduler.has_work());
    assert_eq!(scheduler.pool().used_blocks(), 0);
    assert_eq!(scheduler.totals().aborted_requests, 2);
}

#[test]
fn salts_and_seeds_keep_hashes_apart() {
    let first_hash = |seed: u64, salt: Option<&str>| {
        let mut scheduler = Scheduler::new(
            BlockPool::new(9),
            BlockHasher {
                seed,
                block_size: BLOCK,
            },
            Tokenizer::new(1024),
            0,
            WIDE,
        );
        let (output, _receiver) = unbounded_channel();
        scheduler.add(NewSequence {
            index: 0,
            sample: 0,
            prompt: (0..9).collect(),
            max_tokens: 1,
            salt: salt.map(str::to_owned),
            handoff: Handoff::Whole,
            output,
        });
        match scheduler.schedule().events.remove(0) {
            CacheEvent::Stored(stored) => stored,
            other => panic!("unexpected {other:?}"),
        }
    };
    let plain = first_hash(1, None);
    let salted = first_hash(1, Some("a"));
    assert_eq!(salted.salt.as_deref(), Some("a"));
    assert_eq!(plain, first_hash(1, None));
    // The second block differs through its parent.
    for other in [&salted, &first_hash(1, Some("b")), &first_hash(2, None)] {
        assert_ne!(plain.hashes[0], other.hashes[0]);
        assert_ne!(plain.hashes[1], other.hashes[1]);
    }
}
