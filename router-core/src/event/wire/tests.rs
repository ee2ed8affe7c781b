use rmp::encode::{self, ByteBuf};

use super::*;
use crate::event::encode::encode_batch;
use crate::event::{BlockRemoved, BlockStored, ExtraKey, GroupKind, KvEvent, SkipReason};
use crate::index::{EngineHash, Tier};

/// A msgpack value to build payloads from.
#[derive(Clone, Debug)]
enum Node {
    Nil,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Float(f64),
    Str(&'static str),
    Bin(Vec<u8>),
    List(Vec<Self>),
    Map(Vec<(Self, Self)>),
    /// Bytes written as they are.
    Raw(Vec<u8>),
}

use Node::{Bin, Bool, Float, Int, List, Map, Nil, Raw, Str, Uint};

impl Node {
    fn write(&self, out: &mut ByteBuf) {
        match self {
            Nil => encode::write_nil(out).unwrap(),
            Bool(value) => encode::write_bool(out, *value).unwrap(),
            Int(value) => drop(encode::write_sint(out, *value).unwrap()),
            Uint(value) => drop(encode::write_uint(out, *value).unwrap()),
            Float(value) => encode::write_f64(out, *value).unwrap(),
            Str(value) => encode::write_str(out, value).unwrap(),
            Bin(value) => encode::write_bin(out, value).unwrap(),
            List(values) => {
                encode::write_array_len(out, values.len().try_into().unwrap()).unwrap();
                values.iter().for_each(|value| value.write(out));
            }
            Map(pairs) => {
                encode::write_map_len(out, pairs.len().try_into().unwrap()).unwrap();
                for (key, value) in pairs {
                    key.write(out);
                    value.write(out);
                }
            }
            Raw(bytes) => out.as_mut_vec().extend_from_slice(bytes),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = ByteBuf::new();
        self.write(&mut out);
        out.into_vec()
    }
}

fn ints(values: impl IntoIterator<Item = i64>) -> Node {
    List(values.into_iter().map(Int).collect())
}

fn map(pairs: impl IntoIterator<Item = (&'static str, Node)>) -> Node {
    Map(pairs
        .into_iter()
        .map(|(key, value)| (Str(key), value))
        .collect())
}

fn batch(events: Vec<Node>) -> Vec<u8> {
    List(vec![Float(1.5), List(events), Int(0)]).bytes()
}

fn decode(events: Vec<Node>) -> EventBatch {
    decode_batch(&batch(events)).unwrap()
}

/// `["BlockStored", hashes, parent, tokens, block size, lora id]`, the oldest form, and `tail`.
fn stored_array(hashes: Node, tokens: Node, block_size: Node, tail: Vec<Node>) -> Node {
    let mut elements = vec![Str("BlockStored"), hashes, Nil, tokens, block_size];
    if !tail.is_empty() {
        elements.push(Nil);
    }
    elements.extend(tail);
    List(elements)
}

/// A good store of one block of 4 tokens with `fields` added to its map.
fn stored_map(fields: impl IntoIterator<Item = (&'static str, Node)>) -> Node {
    let base = [
        ("type", Str("BlockStored")),
        ("block_hashes", ints([7])),
        ("parent_block_hash", Nil),
        ("token_ids", ints(0..4)),
        ("block_size", Int(4)),
        ("lora_id", Nil),
    ];
    map(base.into_iter().chain(fields))
}

fn good() -> Node {
    stored_array(ints([9]), ints(0..4), Int(4), vec![])
}

/// Decodes `event` beside a good one and returns it, having checked that the good one came through.
fn only(event: Node) -> Result<KvEvent, SkipReason> {
    let mut decoded = decode(vec![event, good()]);
    let KvEvent::Stored(last) = decoded.events.pop().unwrap() else {
        panic!("the good event is a store")
    };
    assert_eq!(last.block_hashes, [EngineHash::Int(9)]);
    match decoded.events.pop() {
        Some(event) => {
            assert!(decoded.skipped.is_empty());
            Ok(event)
        }
        None => {
            assert_eq!(decoded.skipped.values().sum::<u64>(), 1);
            Err(*decoded.skipped.keys().next().unwrap())
        }
    }
}

fn stored(event: Node) -> BlockStored {
    match only(event) {
        Ok(KvEvent::Stored(stored)) => stored,
        other => panic!("no store: {other:?}"),
    }
}

fn skip(event: Node) -> SkipReason {
    only(event).unwrap_err()
}

#[test]
fn fields_that_do_not_add_up_cost_their_event_alone() {
    let tokens = |count| ints(0..count);
    let decoded = decode(vec![
        stored_array(ints([]), tokens(16), Int(4), vec![]),
        stored_array(ints([1, 2, 3]), tokens(8), Int(4), vec![]),
        stored_array(ints([1, 2]), tokens(10), Int(4), vec![]),
        stored_array(ints([1]), tokens(4), Int(0), vec![]),
        List(vec![Str("BlockStored"), ints([1]), Nil, tokens(4)]),
        stored_array(ints([5]), tokens(4), Int(4), vec![]),
    ]);
    assert_eq!(decoded.events.len(), 1);
    assert_eq!(
        decoded.skipped.into_iter().collect::<Vec<_>>(),
        [
            (SkipReason::CountMismatch, 2),
            (SkipReason::NoHashes, 1),
            (SkipReason::BlockSize, 2),
        ]
    );
}

#[test]
fn block_size_has_a_range() {
    let sized = |size| stored_array(ints([1]), ints(0..4), size, vec![]);
    for bad in [Nil, Int(0), Int(-4), Int(65_537), Uint(u64::MAX)] {
        assert_eq!(skip(sized(bad.clone())), SkipReason::BlockSize, "{bad:?}");
    }
    for bad in [Float(4.0), Str("4"), Bool(true)] {
        assert_eq!(skip(sized(bad.clone())), SkipReason::Malformed, "{bad:?}");
    }
    let largest = stored_array(ints([1]), ints(0..65_536), Int(65_536), vec![]);
    assert_eq!(stored(largest).block_size, 65_536);
    assert_eq!(
        stored(sized(Raw(vec![0xcf, 0, 0, 0, 0, 0, 0, 0, 4]))).block_size,
        4
    );
}

#[test]
fn a_placeholder_has_neither_tokens_nor_block_size() {
    let placeholder = stored(stored_array(ints([1, 2]), ints([]), Int(0), vec![]));
    assert_eq!(
        (placeholder.block_size, placeholder.token_ids.len()),
        (0, 0)
    );
    let nil_tokens = stored(stored_array(ints([1, 2]), Nil, Int(0), vec![]));
    assert_eq!(nil_tokens, placeholder);
    let sized = stored_array(ints([1]), ints([]), Int(4), vec![]);
    assert_eq!(skip(sized), SkipReason::CountMismatch);
}

#[test]
fn counts_that_overflow_are_a_mismatch() {
    // 65,536 hashes of 65,536 tokens would be 2^32 tokens, 0 in 32 bits.
    let many = stored_array(ints((0..65_536).map(|_| 1)), ints([]), Int(65_536), vec![]);
    assert_eq!(skip(many), SkipReason::CountMismatch);
}

#[test]
fn holes_of_window_groups_are_no_mismatch() {
    let windowed = stored_map([
        ("kv_cache_spec_kind", Str("sliding_window")),
        ("token_ids", ints(0..12)),
    ]);
    assert_eq!(skip(windowed), SkipReason::CacheGroup);
}

#[test]
fn hashes_keep_their_space_and_normalise_their_sign() {
    let hash = |node| {
        let event = List(vec![Str("BlockRemoved"), List(vec![node])]);
        match only(event)? {
            KvEvent::Removed(removed) => Ok(removed.block_hashes[0].clone()),
            other => panic!("no removal: {other:?}"),
        }
    };
    assert_eq!(hash(Int(-1)), Ok(EngineHash::Int(u64::MAX)));
    assert_eq!(hash(Uint(u64::MAX)), Ok(EngineHash::Int(u64::MAX)));
    assert_eq!(hash(Int(i64::MIN)), Ok(EngineHash::Int(1 << 63)));
    assert_eq!(hash(Int(77)), Ok(EngineHash::Int(77)));
    for length in [1, 16, 32, 64] {
        let bytes = vec![0xab; length];
        let expected = Ok(EngineHash::Bytes(bytes.clone().into()));
        assert_eq!(hash(Bin(bytes)), expected);
    }
    // Eight bytes are not the integer of the same bits.
    let eight = vec![0, 0, 0, 0, 0, 0, 0, 77];
    assert_eq!(
        hash(Bin(eight.clone())),
        Ok(EngineHash::Bytes(eight.into()))
    );
    assert_eq!(hash(Str("abc")), Ok(EngineHash::Bytes(b"abc"[..].into())));
    for bad in [
        Float(1.5),
        Nil,
        Bool(true),
        List(vec![Int(1)]),
        map([("a", Int(1))]),
        Bin(vec![]),
        Bin(vec![0; 65]),
    ] {
        assert_eq!(hash(bad.clone()), Err(SkipReason::Malformed), "{bad:?}");
    }
}

#[test]
fn a_parent_is_a_hash_or_nil() {
    let child = |parent| stored_map([("parent_block_hash", parent)]);
    assert_eq!(stored(child(Nil)).parent_hash, None);
    assert_eq!(
        stored(child(Int(-2))).parent_hash,
        Some(EngineHash::Int(u64::MAX - 1))
    );
    assert_eq!(skip(child(Float(0.5))), SkipReason::Malformed);
    assert_eq!(skip(child(List(vec![]))), SkipReason::Malformed);
}

#[test]
fn tokens_are_32_bits_or_pairs() {
    let with = |tokens| stored_map([("token_ids", List(tokens))]);
    let wide = stored(with(vec![
        Raw(vec![0xcf, 0, 0, 0, 0, 0, 0, 0, 1]),
        Raw(vec![0xd3, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]),
        Raw(vec![0xd0, 3]),
        Uint(u32::MAX.into()),
    ]));
    assert_eq!(wide.token_ids, [1, u32::MAX, 3, u32::MAX]);
    let pair = |a, b| List(vec![Int(a), Int(b)]);
    let pairs = stored(with(vec![
        pair(5, 6),
        pair(6, 7),
        pair(7, 800),
        pair(800, 9),
    ]));
    assert_eq!(pairs.token_ids, [5, 6, 7, 800]);

    let last = |bad| with(vec![Int(0), Int(1), Int(2), bad]);
    for bad in [Int(-1), Uint(1 << 32), pair(-1, 2), pair(2, 1 << 32)] {
        assert_eq!(skip(last(bad.clone())), SkipReason::TokenRange, "{bad:?}");
    }
    for bad in [Float(1.0), Nil, Str("1"), ints([1, 2, 3]), ints([1])] {
        assert_eq!(skip(last(bad.clone())), SkipReason::Malformed, "{bad:?}");
    }
}

#[test]
fn media_map_to_tiers_whatever_their_case() {
    let at = |medium| stored(stored_map([("medium", medium)])).tier;
    assert_eq!(at(Nil), Tier::Device);
    assert_eq!(stored(stored_map([])).tier, Tier::Device);
    for (medium, tier) in [
        ("GPU", Tier::Device),
        ("gpu", Tier::Device),
        ("CPU", Tier::Host),
        ("cpu", Tier::Host),
        ("CPU_PINNED", Tier::Host),
        ("cpu_tier2", Tier::Host),
        ("cpu:0", Tier::Host),
        ("DISK", Tier::Disk),
        ("FS", Tier::Disk),
        ("STORAGE", Tier::External),
        ("obj", Tier::External),
        ("External", Tier::External),
        ("cuda:0", Tier::Disk),
        ("CPUX", Tier::Disk),
        ("цпу", Tier::Disk),
        ("", Tier::Disk),
    ] {
        assert_eq!(at(Str(medium)), tier, "{medium}");
    }
    assert_eq!(
        skip(stored_map([("medium", Int(1))])),
        SkipReason::Malformed
    );
    // Locality wins over the medium, in either order.
    for fields in [
        [("locality", Str("REMOTE")), ("medium", Str("GPU"))],
        [("medium", Str("GPU")), ("locality", Str("REMOTE"))],
    ] {
        assert_eq!(stored(stored_map(fields)).tier, Tier::External);
    }
    let local = [("locality", Str("LOCAL")), ("medium", Str("CPU"))];
    assert_eq!(stored(stored_map(local)).tier, Tier::Host);
}

#[test]
fn kinds_say_whether_prefixes_match() {
    let of = |kind| stored(stored_map([("kv_cache_spec_kind", kind)])).kind;
    assert_eq!(of(Nil), GroupKind::Unstated);
    for kind in ["full_attention", "mla_attention", "sink_full_attention"] {
        assert_eq!(of(Str(kind)), GroupKind::Full);
    }
    for kind in ["sliding_window", "mamba", "unknown", "of the future"] {
        assert_eq!(of(Str(kind)), GroupKind::Partial);
    }
}

#[test]
fn groups_are_32_bits() {
    let of = |group| stored_map([("group_idx", group)]);
    assert_eq!(stored(of(Nil)).group, 0);
    assert_eq!(stored(of(Uint(u32::MAX.into()))).group, u32::MAX);
    for bad in [Int(-1), Uint(1 << 32), Str("1")] {
        assert_eq!(skip(of(bad)), SkipReason::Malformed);
    }
}

#[test]
fn adapters_go_by_name_and_by_number_only_without_one() {
    let named = |id, name| stored(stored_map([("lora_id", id), ("lora_name", name)])).lora_name;
    assert_eq!(named(Int(1), Str("a")).as_deref(), Some("a"));
    assert_eq!(named(Nil, Str("a")).as_deref(), Some("a"));
    assert_eq!(named(Int(2), Nil).as_deref(), Some("#2"));
    assert_eq!(named(Int(2), Str("")).as_deref(), Some("#2"));
    assert_eq!(named(Nil, Nil), None);
    // vLLM 0.9: six elements, the number is all there is.
    let old = stored_array(ints([1]), ints(0..4), Int(4), vec![]);
    let List(mut elements) = old else {
        panic!("a list")
    };
    elements.push(Int(3));
    assert_eq!(stored(List(elements)).lora_name.as_deref(), Some("#3"));
    let not_utf8 = stored_map([("lora_name", Raw(vec![0xa2, 0xff, 0xfe]))]);
    assert_eq!(skip(not_utf8), SkipReason::Malformed);
}

#[test]
fn position_seven_is_a_name_or_a_map_with_the_salt() {
    let seventh = |node| stored(stored_array(ints([1]), ints(0..4), Int(4), vec![Nil, node]));
    let lora = seventh(Str("a"));
    assert_eq!(
        (lora.lora_name.as_deref(), lora.cache_salt),
        (Some("a"), None)
    );
    let salted = seventh(map([("other", ints([1, 2])), ("cache_salt", Str("s"))]));
    assert_eq!(
        (salted.lora_name, salted.cache_salt.as_deref()),
        (None, Some("s"))
    );
    let neither = seventh(Nil);
    assert_eq!((neither.lora_name, neither.cache_salt), (None, None));
    let named = stored(stored_map([("cache_salt", Str("s"))]));
    assert_eq!(named.cache_salt.as_deref(), Some("s"));
    let bad = stored_array(ints([1]), ints(0..4), Int(4), vec![Nil, Int(1)]);
    assert_eq!(skip(bad), SkipReason::Malformed);
}

#[test]
fn extra_keys_belong_to_their_block() {
    let two = |extra_keys| {
        stored_map([
            ("block_hashes", ints([1, 2])),
            ("token_ids", ints(0..8)),
            ("extra_keys", extra_keys),
        ])
    };
    let media = |digest, offset| List(vec![digest, offset]);
    let keys = List(vec![
        Nil,
        List(vec![
            Str("salt"),
            media(Str("img"), Int(-13)),
            media(Bin(vec![1, 2]), Int(3)),
            Bin(vec![9; 2]),
            List(vec![Str("x")]),
            media(Str("x"), Uint(u64::MAX)),
            media(Nil, Int(1)),
        ]),
    ]);
    let media = |digest: &[u8], offset| ExtraKey::Media {
        digest: digest.into(),
        offset,
    };
    let other = |bytes: &[u8]| ExtraKey::Other(bytes.into());
    assert_eq!(
        stored(two(keys)).extra_keys,
        [
            vec![],
            vec![
                ExtraKey::Text("salt".into()),
                media(b"img", -13),
                media(&[1, 2], 3),
                other(&[0xc4, 2, 9, 9]),
                other(&[0x91, 0xa1, b'x']),
                other(&[
                    0x92, 0xa1, b'x', 0xcf, 255, 255, 255, 255, 255, 255, 255, 255
                ]),
                other(&[0x92, 0xc0, 1]),
            ],
        ]
    );
    // An entry for each block and none of them says anything.
    assert!(
        stored(two(List(vec![Nil, List(vec![])])))
            .extra_keys
            .is_empty()
    );
    assert!(stored(two(Nil)).extra_keys.is_empty());
    for bad in [
        List(vec![]),
        List(vec![Nil]),
        List(vec![Nil, Nil, Nil]),
        List(vec![Nil, Str("x")]),
        Str("x"),
    ] {
        assert_eq!(skip(two(bad.clone())), SkipReason::Malformed, "{bad:?}");
    }
}

/// How a form of the encoding-change test writes the same two stores and one removal.
struct Form {
    hash: fn(i64) -> Node,
    event: fn(&'static str, Vec<(&'static str, Node)>) -> Node,
    rank: Vec<Node>,
}

impl Form {
    fn payload(&self) -> Vec<u8> {
        let hash = self.hash;
        let store = |hashes: Vec<i64>, parent: Node, first_token| {
            let count = i64::try_from(hashes.len()).unwrap() * 4;
            let fields = vec![
                ("block_hashes", List(hashes.into_iter().map(hash).collect())),
                ("parent_block_hash", parent),
                ("token_ids", ints(first_token..first_token + count)),
                ("block_size", Int(4)),
                ("lora_id", Nil),
            ];
            (self.event)("BlockStored", fields)
        };
        let removed = vec![("block_hashes", List(vec![hash(-1)]))];
        let events = vec![
            store(vec![-3, -2], Nil, 0),
            (self.event)("BlockMoved", vec![("block_hashes", List(vec![hash(-3)]))]),
            store(vec![-1], hash(-2), 500),
            (self.event)("BlockRemoved", removed),
        ];
        let mut elements = vec![Float(1.5), List(events)];
        elements.extend(self.rank.clone());
        List(elements).bytes()
    }
}

fn short_array(tag: &'static str, fields: Vec<(&'static str, Node)>) -> Node {
    let values = fields.into_iter().map(|(_, value)| value);
    List([Str(tag)].into_iter().chain(values).collect())
}

fn long_array(tag: &'static str, fields: Vec<(&'static str, Node)>) -> Node {
    let List(mut elements) = short_array(tag, fields) else {
        panic!("a list")
    };
    let known = if tag == "BlockStored" { 12 } else { 4 };
    elements.resize(known, Nil);
    elements.extend([ints([1]), Str("more"), map([("a", Int(1))])]);
    List(elements)
}

fn map_with_unknown_keys(tag: &'static str, fields: Vec<(&'static str, Node)>) -> Node {
    let Map(mut pairs) = map(fields) else {
        panic!("a map")
    };
    // The tag comes last, and keys need not be strings.
    pairs.insert(0, (ints([1, 2]), map([("type", Str("BlockRemoved"))])));
    pairs.insert(1, (Int(4), Nil));
    pairs.push((Str("future"), List(vec![map([("a", Bin(vec![0; 40]))])])));
    pairs.push((Str("type"), Str(tag)));
    Map(pairs)
}

#[test]
fn one_batch_in_every_encoding_decodes_alike() {
    let signed: fn(i64) -> Node = Int;
    let unsigned: fn(i64) -> Node = |hash| Uint(hash.cast_unsigned());
    let bytes: fn(i64) -> Node = |hash| Bin([hash.to_be_bytes(); 4].concat());
    let int_forms = [signed, unsigned];
    let event_forms = [short_array, long_array, map_with_unknown_keys];
    let ranks = [
        vec![],
        vec![Nil],
        vec![Int(0)],
        vec![Int(0), Str("more"), ints([1])],
    ];
    let mut decoded = Vec::new();
    let mut decoded_bytes = Vec::new();
    for event in event_forms {
        for rank in &ranks {
            let form = |hash| Form {
                hash,
                event,
                rank: rank.clone(),
            };
            for hash in int_forms {
                decoded.push(decode_batch(&form(hash).payload()).unwrap());
            }
            decoded_bytes.push(decode_batch(&form(bytes).payload()).unwrap());
        }
    }
    let int = |hash: i64| EngineHash::Int(hash.cast_unsigned());
    check_forms(&decoded, int);
    check_forms(&decoded_bytes, |hash| {
        EngineHash::Bytes([hash.to_be_bytes(); 4].concat().into())
    });
}

fn check_forms(batches: &[EventBatch], hash: impl Fn(i64) -> EngineHash) {
    let store = |hashes: Vec<i64>, parent: Option<i64>, tokens: std::ops::Range<u32>| {
        KvEvent::Stored(BlockStored {
            block_hashes: hashes.into_iter().map(&hash).collect(),
            parent_hash: parent.map(&hash),
            token_ids: tokens.collect(),
            block_size: 4,
            ..BlockStored::default()
        })
    };
    let expected = [
        store(vec![-3, -2], None, 0..8),
        store(vec![-1], Some(-2), 500..504),
        KvEvent::Removed(BlockRemoved {
            block_hashes: vec![hash(-1)],
            ..BlockRemoved::default()
        }),
    ];
    for batch in batches {
        assert_eq!(batch.events, expected);
        assert_eq!(batch.skipped, [(SkipReason::UnknownEvent, 1)].into());
    }
}

#[test]
fn what_is_no_event_is_skipped_alone() {
    for (event, reason) in [
        (Nil, SkipReason::Malformed),
        (Str("AllBlocksCleared"), SkipReason::Malformed),
        (List(vec![]), SkipReason::Malformed),
        (map([]), SkipReason::Malformed),
        (map([("block_hashes", ints([1]))]), SkipReason::Malformed),
        (List(vec![Int(1), ints([1])]), SkipReason::Malformed),
        (List(vec![Str("")]), SkipReason::UnknownEvent),
        (List(vec![Str("blockstored")]), SkipReason::UnknownEvent),
        (map([("type", Str("X"))]), SkipReason::UnknownEvent),
        (List(vec![Str("BlockRemoved")]), SkipReason::Malformed),
        (List(vec![Str("BlockStored")]), SkipReason::NoHashes),
    ] {
        assert_eq!(skip(event.clone()), reason, "{event:?}");
    }
    let cleared = map([("type", Str("AllBlocksCleared")), ("medium", Int(3))]);
    assert_eq!(only(cleared), Ok(KvEvent::Cleared));
}

#[test]
fn a_batch_is_an_array_of_seconds_and_events() {
    let payload = |node: Node| decode_batch(&node.bytes());
    let events = || List(vec![List(vec![Str("AllBlocksCleared")])]);
    for bad in [
        List(vec![]),
        List(vec![Float(1.0)]),
        List(vec![Float(1.0), Nil]),
        List(vec![Nil, events()]),
        List(vec![events(), Float(1.0)]),
        map([("ts", Float(1.0)), ("events", events())]),
        Nil,
        Str("[1.0, [], 0]"),
    ] {
        let error = payload(bad.clone()).unwrap_err();
        assert_eq!(error.reason(), SkipReason::Undecodable, "{bad:?}");
    }
    assert!(decode_batch(b"").is_err());
    for (seconds, ts) in [
        (Int(3), 3.0),
        (Int(-3), -3.0),
        (Float(f64::NAN), 0.0),
        (Float(f64::INFINITY), 0.0),
        (Raw(vec![0xca, 0x3f, 0xc0, 0, 0]), 1.5),
    ] {
        let decoded = payload(List(vec![seconds, events()])).unwrap();
        assert_eq!(decoded.ts.to_bits(), f64::to_bits(ts));
        assert_eq!(decoded.dp_rank, None);
    }
    for (rank, dp_rank) in [
        (Nil, None),
        (Int(5), Some(5)),
        (Int(-5), Some(-5)),
        (Uint(u64::MAX), None),
        (Str("0"), None),
        (ints([0, 1]), None),
    ] {
        let decoded = payload(List(vec![Float(1.0), events(), rank])).unwrap();
        assert_eq!(decoded.dp_rank, dp_rank);
        assert_eq!(decoded.events, [KvEvent::Cleared]);
    }
}

#[test]
fn a_broken_structure_costs_the_payload() {
    let whole = batch(vec![good(), stored_map([("extra_keys", List(vec![Nil]))])]);
    assert_eq!(decode_batch(&whole).unwrap().events.len(), 2);
    for end in 0..whole.len() {
        assert!(decode_batch(&whole[..end]).is_err(), "cut at {end}");
    }
    let trailing = [&whole[..], &[0xc0]].concat();
    assert_eq!(decode_batch(&trailing).unwrap_err().offset(), whole.len());
    // The same inside an event that is skipped for another reason, and in a field that nobody reads.
    for lie in [
        vec![0xdd, 0xff, 0xff, 0xff, 0xff],
        vec![0xc6, 0xff, 0xff, 0xff, 0xff],
        vec![0xc1],
    ] {
        let unknown = List(vec![Str("BlockMoved"), Raw(lie.clone())]);
        assert!(decode_batch(&batch(vec![unknown])).is_err(), "{lie:x?}");
        let unread = stored_map([("future", Raw(lie.clone()))]);
        assert!(decode_batch(&batch(vec![unread])).is_err(), "{lie:x?}");
    }
}

#[test]
fn payloads_have_a_limit() {
    let error = decode_batch(&vec![0xc0; MAX_PAYLOAD_BYTES + 1]).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("67108865") && text.contains("67108864"),
        "{text}"
    );
}

#[test]
fn encoding_keeps_a_batch_whole_when_a_key_is_no_value() {
    let stored = BlockStored {
        block_hashes: vec![EngineHash::Int(1)],
        token_ids: vec![1, 2],
        block_size: 2,
        extra_keys: vec![vec![ExtraKey::Other(vec![0xc1, 0xff])]],
        ..BlockStored::default()
    };
    let batch = EventBatch {
        events: vec![KvEvent::Stored(stored)],
        ..EventBatch::default()
    };
    let decoded = decode_batch(&encode_batch(&batch)).unwrap();
    let KvEvent::Stored(stored) = &decoded.events[0] else {
        panic!("a store")
    };
    // bin8 of two bytes.
    let expected = ExtraKey::Other(vec![0xc4, 2, 0xc1, 0xff]);
    assert_eq!(stored.extra_keys, [[expected]]);
}
