//! Random and mutated payloads: nothing panics, nothing is believed that is not there, and encoding is decoding's reverse.

#![expect(clippy::unwrap_used, reason = "what fails to unwrap fails the test")]

#[path = "../../fuzz/src/wire.rs"]
#[expect(unreachable_pub, reason = "the fuzz package exports it")]
mod wire;

use std::fs;
use std::path::Path;

use kvlane::event::encode::encode_batch;
use kvlane::event::wire::decode_batch;
use kvlane::event::{BlockRemoved, BlockStored, EventBatch, ExtraKey, GroupKind, KvEvent};
use kvlane::index::{EngineHash, Tier};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{Index, select};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn random_bytes_hold_every_promise(payload in vec(any::<u8>(), 0..400)) {
        wire::check(&payload);
    }

    #[test]
    fn mutated_captures_hold_every_promise(
        payload in select(golden()),
        mutations in vec(mutation(), 1..5),
    ) {
        let mut payload = payload;
        mutations.iter().for_each(|mutation| mutation.apply(&mut payload));
        wire::check(&payload);
    }
}

proptest! {
    #[test]
    fn decoding_reverses_encoding(
        ts in any::<f64>().prop_filter("finite", |ts| ts.is_finite()),
        dp_rank in option::of(any::<i64>()),
        events in vec(event(), 0..8),
    ) {
        let batch = EventBatch { ts, dp_rank, events, ..EventBatch::default() };
        prop_assert_eq!(decode_batch(&encode_batch(&batch)), Ok(batch));
    }
}

#[test]
fn every_capture_and_every_prefix_of_it_holds_every_promise() {
    for payload in golden() {
        for end in 0..=payload.len() {
            wire::check(&payload[..end]);
        }
    }
}

/// Golden payloads short enough to be mutated many times.
fn golden() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden");
    let payloads: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|it| it == "msgpack"))
        .map(|path| fs::read(path).unwrap())
        .filter(|payload| payload.len() < 4096)
        .collect();
    assert!(payloads.len() > 30);
    payloads
}

/// One change of a payload. Bytes that begin containers and long strings are the interesting ones.
#[derive(Clone, Debug)]
enum Mutation {
    Set(Index, u8),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    Repeat(Index, usize),
    Cut(Index),
}

impl Mutation {
    fn apply(&self, payload: &mut Vec<u8>) {
        if payload.is_empty() {
            return;
        }
        let length = payload.len();
        let range = |at: &Index, count: usize| {
            let start = at.index(length);
            start..(start + count).min(length)
        };
        match self {
            Self::Set(at, byte) => payload[at.index(length)] = *byte,
            Self::Insert(at, bytes) => drop(payload.splice(range(at, 0), bytes.iter().copied())),
            Self::Remove(at, count) => drop(payload.drain(range(at, *count))),
            Self::Repeat(at, count) => {
                let piece = payload[range(at, *count)].to_vec();
                drop(payload.splice(range(at, 0), piece));
            }
            Self::Cut(at) => payload.truncate(at.index(length)),
        }
    }
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<Index>;
    let byte = || {
        prop_oneof![
            any::<u8>(),
            0xc0..=0xdf_u8,
            0x80..=0xaf_u8,
            select(vec![0_u8, 0x7f, 0xff]),
        ]
    };
    prop_oneof![
        8 => (at(), byte()).prop_map(|(at, byte)| Mutation::Set(at, byte)),
        2 => (at(), vec(byte(), 1..6)).prop_map(|(at, bytes)| Mutation::Insert(at, bytes)),
        2 => (at(), 1..12_usize).prop_map(|(at, count)| Mutation::Remove(at, count)),
        2 => (at(), 1..80_usize).prop_map(|(at, count)| Mutation::Repeat(at, count)),
        1 => at().prop_map(Mutation::Cut),
    ]
}

fn event() -> impl Strategy<Value = KvEvent> {
    let removed =
        (vec(hash(), 0..12), tier(), any::<u32>()).prop_map(|(block_hashes, tier, group)| {
            BlockRemoved {
                block_hashes,
                tier,
                group,
            }
        });
    prop_oneof![
        4 => stored().prop_map(KvEvent::Stored),
        2 => removed.prop_map(KvEvent::Removed),
        1 => Just(KvEvent::Cleared),
    ]
}

prop_compose! {
    fn stored()(hashes in vec(hash(), 1..12), block_size in 0..20_u32)(
        token_ids in vec(
            prop_oneof![any::<u32>(), 0..300_u32],
            hashes.len() * block_size as usize,
        ),
        extra_keys in option::of(vec(vec(extra_key(), 0..4), hashes.len())),
        parent_hash in option::of(hash()),
        lora_name in option::of(".{1,12}"),
        cache_salt in option::of(".{1,12}"),
        tier in tier(),
        group in prop_oneof![Just(0), any::<u32>()],
        kind in select(vec![GroupKind::Unstated, GroupKind::Full, GroupKind::Partial]),
        hashes in Just(hashes),
        block_size in Just(block_size),
    ) -> BlockStored {
        // Decoding has one way only to say that no block has a key.
        let extra_keys = extra_keys
            .filter(|by_block| !by_block.iter().all(Vec::is_empty))
            .unwrap_or_default();
        BlockStored {
            block_hashes: hashes, parent_hash, token_ids, block_size, lora_name, cache_salt,
            extra_keys, tier, group, kind,
        }
    }
}

fn hash() -> impl Strategy<Value = EngineHash> {
    prop_oneof![
        any::<u64>().prop_map(EngineHash::Int),
        (0..200_u64).prop_map(EngineHash::Int),
        vec(any::<u8>(), 1..=64).prop_map(|bytes| EngineHash::Bytes(bytes.into())),
    ]
}

fn tier() -> impl Strategy<Value = Tier> {
    select(Tier::ALL.to_vec())
}

fn extra_key() -> impl Strategy<Value = ExtraKey> {
    // Values that are no other kind of key: a digest, a number, a list, a map.
    let others = [
        &[0xc4, 2, 0, 0xff][..],
        &[7],
        &[0x91, 0xa1, b'x'],
        &[0x81, 1, 2],
    ];
    prop_oneof![
        ".{0,12}".prop_map(ExtraKey::Text),
        (vec(any::<u8>(), 0..20), any::<i64>())
            .prop_map(|(digest, offset)| ExtraKey::Media { digest, offset }),
        select(others.map(<[u8]>::to_vec).to_vec()).prop_map(ExtraKey::Other),
    ]
}
