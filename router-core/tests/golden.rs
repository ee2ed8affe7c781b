//! Decodes payloads of real engines, and hostile ones, as their manifest says.

#![expect(clippy::unwrap_used, reason = "what fails to unwrap fails the test")]

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use kvlane::event::wire::{DecodeError, decode_batch};
use kvlane::event::{
    BlockRemoved, BlockStored, EventBatch, ExtraKey, GroupKind, KvEvent, SkipReason,
};
use kvlane::index::{EngineHash, Tier};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

#[test]
fn every_payload_decodes_as_the_manifest_says() {
    let manifest: Value =
        serde_json::from_slice(&fs::read(golden("manifest.json")).unwrap()).unwrap();
    let mut outcomes = [0; 3];
    for case in manifest["cases"].as_array().unwrap() {
        let file = case["file"].as_str().unwrap();
        let payload = fs::read(golden(file)).unwrap();
        assert_eq!(hex(&Sha256::digest(&payload)), case["sha256"], "{file}");
        let decoded = decode_batch(&payload);
        let outcome = match case["outcome"].as_str().unwrap() {
            "reject" => check_reject(file, decoded),
            "ok" => check_batch(file, &decoded.unwrap(), &case["expected"], 0),
            "ok_skip" => {
                let skipped = case["expected"]["skipped"].as_array().unwrap().len();
                check_batch(file, &decoded.unwrap(), &case["expected"], skipped)
            }
            other => panic!("{file}: outcome {other}"),
        };
        outcomes[outcome] += 1;
    }
    // Whole batches, batches with a bad event, refused payloads.
    assert_eq!(outcomes, [29, 3, 5]);
}

#[test]
fn skipped_events_are_counted_by_reason() {
    let skipped = |file: &str| {
        let batch = decode_batch(&fs::read(golden(file)).unwrap()).unwrap();
        batch.skipped.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(
        skipped("hostile-x-unknown-tag-array.msgpack"),
        [(SkipReason::UnknownEvent, 1)]
    );
    assert_eq!(
        skipped("hostile-x-hash-float.msgpack"),
        [(SkipReason::Malformed, 1)]
    );
    assert_eq!(
        skipped("hostile-x-hashes-more-than-tokens.msgpack"),
        [(SkipReason::CountMismatch, 1)]
    );
}

fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/golden")
        .join(file)
}

fn check_reject(file: &str, decoded: Result<EventBatch, DecodeError>) -> usize {
    let error = decoded.expect_err(file);
    assert_eq!(error.reason(), SkipReason::Undecodable, "{file}");
    2
}

fn check_batch(file: &str, batch: &EventBatch, expected: &Value, skipped: usize) -> usize {
    assert_eq!(Some(batch.ts), expected["ts"].as_f64(), "{file}");
    assert_eq!(batch.dp_rank, expected["dp_rank"].as_i64(), "{file}");
    let total: u64 = batch.skipped.values().sum();
    assert_eq!(total, skipped as u64, "{file}");
    let events = expected["events"].as_array().unwrap();
    assert_eq!(batch.events.len(), events.len(), "{file}");
    for (event, expected) in batch.events.iter().zip(events) {
        let expected = expected.as_object().unwrap();
        match (expected["type"].as_str().unwrap(), event) {
            ("BlockStored", KvEvent::Stored(stored)) => check_stored(file, stored, expected),
            ("BlockRemoved", KvEvent::Removed(removed)) => check_removed(file, removed, expected),
            ("AllBlocksCleared", KvEvent::Cleared) => {}
            (tag, event) => panic!("{file}: {tag} came out as {event:?}"),
        }
    }
    usize::from(skipped > 0)
}

fn check_stored(file: &str, event: &BlockStored, expected: &Map<String, Value>) {
    check_hashes(file, &event.block_hashes, &expected["block_hashes"]);
    match &expected["parent"] {
        Value::Null => assert_eq!(event.parent_hash, None, "{file}"),
        parent => assert!(
            is_hash(event.parent_hash.as_ref().unwrap(), parent),
            "{file}"
        ),
    }
    check_tokens(file, &event.token_ids, &expected["token_ids"]);
    let block_size = u64::from(event.block_size);
    assert_eq!(Some(block_size), expected["block_size"].as_u64(), "{file}");
    assert_eq!(event.tier, tier(expected), "{file}");
    assert_eq!(u64::from(event.group), group(expected), "{file}");
    assert_eq!(event.kind, kind(expected), "{file}");
    let (lora, salt) = (text(expected, "lora_name"), text(expected, "cache_salt"));
    assert_eq!(event.lora_name.as_deref(), lora, "{file}");
    assert_eq!(event.cache_salt.as_deref(), salt, "{file}");
    check_extra_keys(file, event, expected.get("extra_keys"));
}

fn check_removed(file: &str, event: &BlockRemoved, expected: &Map<String, Value>) {
    check_hashes(file, &event.block_hashes, &expected["block_hashes"]);
    assert_eq!(event.tier, tier(expected), "{file}");
    assert_eq!(u64::from(event.group), group(expected), "{file}");
}

/// The manifest lists all hashes, or the number, the first and the last of very many.
fn check_hashes(file: &str, hashes: &[EngineHash], expected: &Value) {
    if let Some(expected) = expected.as_array() {
        assert_eq!(hashes.len(), expected.len(), "{file}");
        for (hash, expected) in hashes.iter().zip(expected) {
            assert!(
                is_hash(hash, expected),
                "{file}: {hash:?} is not {expected}"
            );
        }
    } else {
        assert_eq!(Some(hashes.len() as u64), expected["n"].as_u64(), "{file}");
        assert!(is_hash(&hashes[0], &expected["first"]), "{file}");
        assert!(
            is_hash(&hashes[hashes.len() - 1], &expected["last"]),
            "{file}"
        );
    }
}

/// A byte hash has a hex form besides the integer that it would shorten to.
fn is_hash(hash: &EngineHash, expected: &Value) -> bool {
    match hash {
        EngineHash::Bytes(bytes) => expected["hex"] == hex(bytes),
        EngineHash::Int(int) => {
            expected.get("hex").is_none()
                && number(&expected["u64"]) == Some(*int)
                && number(&expected["i64"]) == Some(int.cast_signed())
        }
    }
}

/// Integers of 64 bits stand in strings, which JSON readers do not round.
fn number<T: FromStr>(expected: &Value) -> Option<T> {
    expected.as_str()?.parse().ok()
}

/// The manifest lists all tokens (pairs when the engine sends pairs), or a digest of very many.
fn check_tokens(file: &str, tokens: &[u32], expected: &Value) {
    if let Some(expected) = expected.as_array() {
        let expected: Vec<_> = expected
            .iter()
            .map(|token| token.get(0).unwrap_or(token).as_u64().unwrap())
            .collect();
        let tokens: Vec<_> = tokens.iter().copied().map(u64::from).collect();
        assert_eq!(tokens, expected, "{file}");
    } else {
        assert_eq!(Some(tokens.len() as u64), expected["n"].as_u64(), "{file}");
        let bytes: Vec<_> = tokens
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect();
        assert_eq!(
            expected["sha256_u32le"],
            hex(&Sha256::digest(bytes)),
            "{file}"
        );
    }
}

fn check_extra_keys(file: &str, event: &BlockStored, expected: Option<&Value>) {
    let expected = expected.and_then(Value::as_array);
    let says_something = |entries: &&Vec<Value>| !entries.iter().all(Value::is_null);
    let Some(expected) = expected.filter(says_something) else {
        // Absent, or only nil entries (of very many the manifest gives the number alone).
        assert!(event.extra_keys.is_empty(), "{file}");
        return;
    };
    assert_eq!(event.extra_keys.len(), expected.len(), "{file}");
    for (keys, expected) in event.extra_keys.iter().zip(expected) {
        let expected: Vec<_> = expected
            .as_array()
            .into_iter()
            .flatten()
            .map(extra_key)
            .collect();
        assert_eq!(*keys, expected, "{file}");
    }
}

fn extra_key(expected: &Value) -> ExtraKey {
    match expected {
        Value::String(text) => ExtraKey::Text(text.clone()),
        Value::Array(pair) => ExtraKey::Media {
            digest: pair[0].as_str().unwrap().into(),
            offset: pair[1].as_i64().unwrap(),
        },
        bytes => {
            let hex = bytes["$bytes"].as_str().unwrap();
            let content = (0..hex.len())
                .step_by(2)
                .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap());
            // As received: bin8 with its length.
            let header = [0xc4, u8::try_from(hex.len() / 2).unwrap()];
            ExtraKey::Other(header.into_iter().chain(content).collect())
        }
    }
}

fn tier(expected: &Map<String, Value>) -> Tier {
    if text(expected, "locality") == Some("REMOTE") {
        return Tier::External;
    }
    match text(expected, "medium") {
        None | Some("GPU") => Tier::Device,
        Some("CPU" | "cpu" | "CPU_PINNED") => Tier::Host,
        Some("STORAGE") => Tier::External,
        Some(other) => panic!("medium {other} is new: say what it is"),
    }
}

fn group(expected: &Map<String, Value>) -> u64 {
    expected
        .get("group_idx")
        .map_or(0, |group| group.as_u64().unwrap())
}

fn kind(expected: &Map<String, Value>) -> GroupKind {
    match text(expected, "kv_cache_spec_kind") {
        None => GroupKind::Unstated,
        Some("full_attention") => GroupKind::Full,
        Some("sliding_window" | "sliding_window_mla") => GroupKind::Partial,
        Some(other) => panic!("kind {other} is new: say what it is"),
    }
}

fn text<'a>(expected: &'a Map<String, Value>, key: &str) -> Option<&'a str> {
    expected.get(key).and_then(Value::as_str)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
