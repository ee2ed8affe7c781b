use std::collections::HashMap;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::*;
use crate::block::LocalBlockHash;

#[expect(
    clippy::disallowed_methods,
    reason = "an origin for the test's own clock"
)]
fn origin() -> Instant {
    Instant::now()
}

fn after(origin: Instant, tenths: u64) -> Instant {
    origin + Duration::from_millis(100 * tenths)
}

/// A prompt of one block per byte.
fn prompt(blocks: &[u8]) -> Vec<LocalBlockHash> {
    blocks.iter().map(|&block| hash(block)).collect()
}

/// Different blocks begin prompts of different shards.
fn hash(block: u8) -> LocalBlockHash {
    LocalBlockHash((u64::from(block) + 1) << 8)
}

fn depths(index: &TtlIndex, blocks: &[u8], now: Instant) -> Vec<u32> {
    let mut depths = vec![77];
    index.overlap(&prompt(blocks), now, &mut depths);
    depths
}

#[test]
fn reuse_keeps_the_later_deadline() {
    // TTL 1 s: recorded at 0.0 and 0.9, so believed until 1.9.
    let (index, t) = (TtlIndex::new(), origin());
    let p = prompt(b"ab");
    index.record(Slot(0), &p, after(t, 10), t);
    index.record(Slot(0), &p, after(t, 19), after(t, 9));
    for at in [11, 18] {
        index.expire(after(t, at));
        assert_eq!(depths(&index, b"ab", after(t, at)), [2], "at {at}");
    }
    assert_eq!(depths(&index, b"ab", after(t, 21)), [0]);
    index.expire(after(t, 21));
    assert_eq!(index.stats(), TtlStats::default());
}

#[test]
fn a_shorter_ttl_does_not_cut_a_longer_one() {
    // TTL 5 s, then TTL 1 s: still there after 3 s, gone after 5 s.
    let (index, t) = (TtlIndex::new(), origin());
    let p = prompt(b"abc");
    index.record(Slot(0), &p, after(t, 50), t);
    index.record(Slot(0), &p, after(t, 10), t);
    index.expire(after(t, 30));
    assert_eq!(depths(&index, b"abc", after(t, 30)), [3]);
    assert_eq!(depths(&index, b"abc", after(t, 50)), [0]);
}

#[test]
fn each_block_has_its_own_deadline() {
    // "ab" until 5 s; then "abcd" until 1 s leaves ab at 5 s and gives cd 1 s.
    let (index, t) = (TtlIndex::new(), origin());
    index.record(Slot(0), &prompt(b"ab"), after(t, 50), t);
    index.record(Slot(0), &prompt(b"abcd"), after(t, 10), t);
    assert_eq!(depths(&index, b"abcd", after(t, 9)), [4]);
    assert_eq!(depths(&index, b"abcd", after(t, 10)), [2]);
    index.expire(after(t, 10));
    assert_eq!(index.blocks(Slot(0)), 2);
    assert_eq!(depths(&index, b"abcd", after(t, 49)), [2]);
    index.expire(after(t, 50));
    assert_eq!(index.blocks(Slot(0)), 0);
}

#[test]
fn a_short_prompt_expires_together_with_the_older_one_below_it() {
    // "q" frees the first number, so that the fresh "a" comes before the older "bc" in the order of numbers.
    let (index, t) = (TtlIndex::new(), origin());
    index.record(Slot(0), &prompt(b"q"), after(t, 5), t);
    index.record(Slot(0), &prompt(b"abc"), after(t, 10), t);
    index.expire(after(t, 5));
    index.record(Slot(0), &prompt(b"a"), after(t, 10), after(t, 5));
    assert_eq!(index.blocks(Slot(0)), 3);
    index.expire(after(t, 10));
    assert_eq!(index.stats(), TtlStats::default());
}

#[test]
fn a_failed_dispatch_leaves_no_entry() {
    let (index, t) = (TtlIndex::new(), origin());
    let failed = index.record(Slot(2), &prompt(b"q"), after(t, 10), t);
    assert_eq!(depths(&index, b"q", t), [0, 0, 1]);
    index.undo(failed);
    assert_eq!(depths(&index, b"q", t), [0, 0, 0]);
    assert_eq!(index.stats(), TtlStats::default());
}

#[test]
fn undo_keeps_what_others_placed_before_and_since() {
    let (index, t) = (TtlIndex::new(), origin());
    index.record(Slot(0), &prompt(b"ab"), after(t, 10), t);
    let failed = index.record(Slot(0), &prompt(b"abcdef"), after(t, 10), t);
    assert_eq!(failed.created_blocks(), 4);
    index.record(Slot(0), &prompt(b"abcx"), after(t, 10), t);
    index.undo(failed);
    // ab was there before, c was touched since; d, e and f go.
    assert_eq!(depths(&index, b"abcdef", t), [3]);
    assert_eq!(depths(&index, b"abcx", t), [4]);
    assert_eq!(index.blocks(Slot(0)), 4);
}

#[test]
fn undo_after_the_blocks_left_touches_nothing_new() {
    let (index, t) = (TtlIndex::new(), origin());
    let old = index.record(Slot(0), &prompt(b"abc"), after(t, 10), t);
    index.clear(Slot(0));
    index.record(Slot(0), &prompt(b"abc"), after(t, 10), t);
    index.undo(old);
    assert_eq!(depths(&index, b"abc", t), [3]);
}

#[test]
fn capacity_evicts_the_oldest_prompt_from_its_tail() {
    let (index, t) = (TtlIndex::new(), origin());
    index.set_capacity(Slot(0), Some(6));
    index.record(Slot(0), &prompt(b"abc"), after(t, 10), t);
    index.record(Slot(0), &prompt(b"xyz"), after(t, 10), t);
    index.record(Slot(0), &prompt(b"m"), after(t, 10), t); // 7 blocks: c goes
    assert_eq!(depths(&index, b"abc", t), [2]);
    index.record(Slot(0), &prompt(b"a"), after(t, 10), t); // a is fresh, b is still the oldest
    index.record(Slot(0), &prompt(b"no"), after(t, 10), t); // 8 blocks: b, then z
    assert_eq!(depths(&index, b"abc", t), [1]);
    assert_eq!(depths(&index, b"xyz", t), [2]);
    assert_eq!(index.blocks(Slot(0)), 6);
}

#[test]
fn a_prompt_over_the_capacity_keeps_its_head() {
    let (index, t) = (TtlIndex::new(), origin());
    index.set_capacity(Slot(0), Some(3));
    index.record(Slot(0), &prompt(b"xy"), after(t, 10), t);
    let placement = index.record(Slot(0), &prompt(b"abcde"), after(t, 10), t);
    assert_eq!(placement.created_blocks(), 3);
    assert_eq!(depths(&index, b"abcde", t), [3]);
    assert_eq!(depths(&index, b"xy", t), [0]);
    index.set_capacity(Slot(0), Some(1));
    assert_eq!(depths(&index, b"abcde", t), [1]);
    index.set_capacity(Slot(0), Some(0));
    index.record(Slot(0), &prompt(b"abcde"), after(t, 10), t);
    assert_eq!(index.stats(), TtlStats::default());
}

#[test]
fn fourteen_thousand_tokens_do_not_hold_eighteen_thousand() {
    // 926 blocks of 16 tokens; twelve prefixes of 93 blocks need 1,116.
    let (index, t) = (TtlIndex::new(), origin());
    index.set_capacity(Slot(0), Some(926));
    let prefixes: Vec<Vec<u8>> = (0..12).map(|prefix| vec![prefix; 93]).collect();
    for prefix in &prefixes {
        index.record(Slot(0), &prompt(prefix), after(t, 1200), t);
    }
    assert_eq!(index.blocks(Slot(0)), 926);
    // 1,116 - 926 = 190 = 2 × 93 + 4 blocks left: two prefixes and four blocks of the third.
    let held: Vec<u32> = prefixes
        .iter()
        .map(|prefix| depths(&index, prefix, t)[0])
        .collect();
    assert_eq!(held[..4], [0, 0, 89, 93]);
    assert!(held[4..].iter().all(|&blocks| blocks == 93));
}

#[test]
fn empty_prompts_and_past_deadlines_record_nothing() {
    let (index, t) = (TtlIndex::new(), origin());
    index.record(Slot(0), &[], after(t, 10), t);
    let placement = index.record(Slot(0), &prompt(b"a"), t, t);
    assert_eq!(placement.created_blocks(), 0);
    index.undo(placement);
    assert_eq!(depths(&index, b"", t), [0_u32; 0]);
    assert_eq!(index.stats(), TtlStats::default());
}

#[test]
fn slots_share_blocks_and_leave_alone() {
    let (index, t) = (TtlIndex::new(), origin());
    index.record(Slot(0), &prompt(b"sys-one"), after(t, 10), t);
    index.record(Slot(1), &prompt(b"sys-two"), after(t, 10), t);
    index.record(Slot(2), &prompt(b"sy"), after(t, 10), t);
    // Distinct blocks: "sys-" and "one" and "two".
    assert_eq!((index.stats().blocks, index.stats().held_blocks), (10, 16));
    assert_eq!(depths(&index, b"sys-two", t), [4, 7, 2]);
    index.clear(Slot(1));
    // The parts join again: one node of "sys-one".
    assert_eq!((index.stats().blocks, index.stats().nodes), (7, 1));
    assert_eq!(depths(&index, b"sys-two", t), [4, 0, 2]);
    index.clear(Slot(0));
    assert_eq!(index.stats().blocks, 2);
    index.clear(Slot(2));
    assert_eq!(index.stats(), TtlStats::default());
}

#[test]
fn a_lookup_finds_the_very_block_where_prompts_part() {
    let (index, t) = (TtlIndex::new(), origin());
    let stored = vec![0; 100];
    index.record(Slot(0), &prompt(&stored), after(t, 10), t);
    for length in [1, 2, 3, 64, 99, 100, 101, 200] {
        for parts_at in 0..length {
            let mut asked = vec![0; length];
            asked[parts_at] = 1;
            let expected = u32::try_from(parts_at.min(100)).unwrap();
            // Nothing may be known of its shard at all.
            let found = depths(&index, &asked, t);
            let found = found.first().copied().unwrap_or(0);
            assert_eq!(found, expected, "{length} {parts_at}");
        }
    }
}

#[test]
fn memory_per_block_stays_small() {
    // Conversations of 256 blocks in 8 turns, one system prompt of 16 blocks, turns on two of 8 slots.
    let (index, t) = (TtlIndex::new(), origin());
    for conversation in 0..200_u64 {
        let local: Vec<_> = (0..256_u64)
            .map(|at| LocalBlockHash(if at < 16 { at } else { conversation << 20 | at }))
            .collect();
        for turn in 1..=8_u32 {
            let slot = Slot(u32::try_from(conversation % 8).unwrap() ^ u32::from(turn == 8));
            index.record(slot, &local[..32 * turn as usize], after(t, 1200), t);
        }
    }
    let stats = index.stats();
    // 200 × 240 + 16 blocks, one node a conversation and one for the system prompt; each turn replaces the run of the turn before.
    assert_eq!(
        (stats.blocks, stats.nodes, stats.placements),
        (48_016, 201, 400)
    );
    let shards = index.shards.iter();
    let bytes: usize = shards.map(|shard| shard.read().heap_bytes()).sum();
    assert!(
        bytes / stats.held_blocks < 20,
        "{bytes} bytes for {} held blocks",
        stats.held_blocks
    );
    assert!(
        bytes / stats.blocks < 20,
        "{bytes} bytes for {} distinct blocks",
        stats.blocks
    );
}

/// The trivially correct index: every held prefix by itself.
#[derive(Default)]
struct Model {
    held: HashMap<(u32, Vec<u8>), Entry>,
    capacity: HashMap<u32, usize>,
    clock: u64,
}

struct Entry {
    deadline: Instant,
    last_use: u64,
    created_by: u64,
}

impl Model {
    fn record(&mut self, slot: u32, prompt: &[u8], deadline: Instant, now: Instant) -> u64 {
        self.clock += 1;
        if deadline <= now || prompt.is_empty() {
            return self.clock;
        }
        // What expired leaves with its shard, and everywhere when there is no room.
        let shard = |path: &[u8]| shard_of(hash(path[0]));
        self.held.retain(|(holder, path), entry| {
            *holder != slot || entry.deadline > now || shard(path) != shard(prompt)
        });
        let capacity = self.capacity.get(&slot).copied().unwrap_or(usize::MAX);
        for depth in 1..=prompt.len().min(capacity) {
            let created = Entry {
                deadline,
                last_use: 0,
                created_by: self.clock,
            };
            let entry = self
                .held
                .entry((slot, prompt[..depth].to_vec()))
                .or_insert(created);
            entry.deadline = entry.deadline.max(deadline);
            entry.last_use = self.clock;
        }
        if self.blocks(slot) > capacity {
            self.held
                .retain(|(holder, _), entry| *holder != slot || entry.deadline > now);
        }
        self.evict(slot);
        self.clock
    }

    fn evict(&mut self, slot: u32) {
        let capacity = self.capacity.get(&slot).copied().unwrap_or(usize::MAX);
        while self.blocks(slot) > capacity {
            let of_slot = self.held.iter().filter(|((holder, _), _)| *holder == slot);
            let victim =
                of_slot.min_by_key(|((_, path), entry)| (entry.last_use, usize::MAX - path.len()));
            let victim = victim.map(|(key, _)| key.clone()).unwrap();
            self.held.remove(&victim);
        }
    }

    fn undo(&mut self, record: u64) {
        self.held
            .retain(|_, entry| (entry.created_by, entry.last_use) != (record, record));
    }

    fn blocks(&self, slot: u32) -> usize {
        self.held
            .keys()
            .filter(|(holder, _)| *holder == slot)
            .count()
    }

    fn depth(&self, slot: u32, prompt: &[u8], now: Instant) -> u32 {
        let held = |depth: &u32| {
            let entry = self.held.get(&(slot, prompt[..*depth as usize].to_vec()));
            entry.is_some_and(|entry| entry.deadline > now)
        };
        let all = u32::try_from(prompt.len()).unwrap();
        (1..=all).take_while(held).last().unwrap_or(0)
    }
}

#[derive(Clone, Debug)]
enum Op {
    Record {
        slot: u32,
        prompt: Vec<u8>,
        ttl: u64,
    },
    Undo {
        nth: usize,
    },
    Overlap {
        prompt: Vec<u8>,
    },
    Expire,
    Capacity {
        slot: u32,
        blocks: Option<usize>,
    },
    Clear {
        slot: u32,
    },
    Pass {
        tenths: u64,
    },
}

const SLOTS: u32 = 4;

/// Prompts of few letters, so that they share prefixes, diverge and extend each other.
fn prompts() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(0_u8..2, 0..10),
        (0_usize..10, 0_u8..3).prop_map(|(length, last)| {
            let mut prompt = vec![0; length];
            prompt.push(last);
            prompt
        }),
    ]
}

fn ops() -> impl Strategy<Value = Op> {
    let ttl = prop_oneof![3 => Just(20_u64), 1 => 0_u64..60];
    prop_oneof![
        8 => (0..SLOTS, prompts(), ttl).prop_map(|(slot, prompt, ttl)| Op::Record { slot, prompt, ttl }),
        2 => (0_usize..8).prop_map(|nth| Op::Undo { nth }),
        3 => prompts().prop_map(|prompt| Op::Overlap { prompt }),
        1 => Just(Op::Expire),
        1 => (0..SLOTS, prop::option::weighted(0.8, 0_usize..14))
            .prop_map(|(slot, blocks)| Op::Capacity { slot, blocks }),
        1 => (0..SLOTS).prop_map(|slot| Op::Clear { slot }),
        2 => (0_u64..15).prop_map(|tenths| Op::Pass { tenths }),
    ]
}

/// Both indexes, the placements not yet taken back, and the clock.
struct Pair {
    index: TtlIndex,
    model: Model,
    placements: Vec<(Placement, u64)>,
    now: Instant,
}

impl Pair {
    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        let Self {
            index,
            model,
            placements,
            now,
        } = self;
        match op {
            Op::Record {
                slot,
                prompt: blocks,
                ttl,
            } => {
                let deadline = after(*now, *ttl);
                let stamp = model.record(*slot, blocks, deadline, *now);
                let placement = index.record(Slot(*slot), &prompt(blocks), deadline, *now);
                placements.push((placement, stamp));
            }
            Op::Undo { nth } if *nth < placements.len() => {
                let (placement, stamp) = placements.remove(placements.len() - 1 - nth);
                index.undo(placement);
                model.undo(stamp);
            }
            Op::Undo { .. } => {}
            Op::Overlap { prompt } => self.compare(prompt)?,
            Op::Expire => {
                index.expire(*now);
                model.held.retain(|_, entry| entry.deadline > *now);
            }
            Op::Capacity { slot, blocks } => {
                index.set_capacity(Slot(*slot), *blocks);
                match blocks {
                    Some(blocks) => model.capacity.insert(*slot, *blocks),
                    None => model.capacity.remove(slot),
                };
                model.evict(*slot);
            }
            Op::Clear { slot } => {
                index.clear(Slot(*slot));
                model.held.retain(|(holder, _), _| holder != slot);
            }
            Op::Pass { tenths } => *now = after(*now, *tenths),
        }
        Ok(())
    }

    fn compare(&self, prompt: &[u8]) -> Result<(), TestCaseError> {
        let found = depths(&self.index, prompt, self.now);
        for slot in 0..SLOTS {
            let found = found.get(slot as usize).copied().unwrap_or(0);
            prop_assert_eq!(
                found,
                self.model.depth(slot, prompt, self.now),
                "slot {}",
                slot
            );
        }
        Ok(())
    }

    fn compare_sizes(&self) -> Result<(), TestCaseError> {
        for slot in 0..SLOTS {
            prop_assert_eq!(
                self.index.blocks(Slot(slot)),
                self.model.blocks(slot),
                "slot {}",
                slot
            );
        }
        let distinct: std::collections::HashSet<_> =
            self.model.held.keys().map(|(_, path)| path).collect();
        prop_assert_eq!(self.index.stats().blocks, distinct.len());
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 8 } else { 4_000 }, ..ProptestConfig::default() })]

    #[test]
    fn equals_the_model(ops in prop::collection::vec(ops(), 1..60)) {
        let mut pair = Pair {
            index: TtlIndex::new(),
            model: Model::default(),
            placements: Vec::new(),
            now: origin(),
        };
        for op in &ops {
            pair.apply(op)?;
            pair.compare_sizes()?;
            for shard in pair.index.shards.iter() {
                shard.read().check();
            }
        }
        let held: Vec<_> = pair.model.held.keys().map(|(_, path)| path.clone()).collect();
        for path in &held {
            pair.compare(path)?;
        }
        for slot in 0..SLOTS {
            pair.index.set_capacity(Slot(slot), None);
            pair.index.clear(Slot(slot));
        }
        prop_assert_eq!(pair.index.stats(), TtlStats::default());
        for shard in pair.index.shards.iter() {
            prop_assert_eq!(shard.read().slots(), 0);
            prop_assert_eq!(shard.read().heap_bytes(), 0);
        }
    }
}

#[test]
fn placements_of_many_threads_add_up() {
    // Four threads on two slots, one of them bounded; prompts share prefixes, expire, are taken back and cleared.
    let (index, t) = (TtlIndex::new(), origin());
    index.set_capacity(Slot(1), Some(40));
    std::thread::scope(|scope| {
        for seed in 0..4_u64 {
            let index = &index;
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed);
                for step in 0..3_000 {
                    let (slot, now) = (Slot(rng.u32(0..2)), after(t, step / 10));
                    let length = rng.usize(1..12);
                    let blocks: Vec<u8> = (0..length).map(|_| rng.u8(0..2)).collect();
                    let blocks = prompt(&blocks);
                    let placement = index.record(slot, &blocks, after(now, rng.u64(1..30)), now);
                    match rng.u8(0..40) {
                        0..8 => index.undo(placement),
                        8 => index.clear(slot),
                        9 => index.expire(now),
                        _ => {}
                    }
                    let mut found = Vec::new();
                    index.overlap(&blocks, now, &mut found);
                    assert!(found.iter().all(|&depth| depth as usize <= blocks.len()));
                }
            });
        }
    });
    assert!(index.blocks(Slot(1)) <= 40);
    for shard in index.shards.iter() {
        shard.read().check();
    }
    let stats = index.stats();
    let sums = [0, 1].map(|slot| index.blocks(Slot(slot)));
    assert_eq!(stats.held_blocks, sums.iter().sum::<usize>());
    index.expire(after(t, 1_000));
    let stats = index.stats();
    assert_eq!(
        (stats.held_blocks, stats.blocks, stats.placements),
        (0, 0, 0)
    );
}
