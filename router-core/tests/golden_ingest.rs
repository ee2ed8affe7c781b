//! Feeds payloads of real engines to `Router::ingest` and holds the overlaps against a model that knows only the manifest.

#![expect(clippy::unwrap_used, reason = "what fails to unwrap fails the test")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use kvlane::{
    BlockSize, IngestReport, MediaSpan, Overlap, Router, RouterConfig, SaltContext, SkipReason,
    WorkerSpec,
};
use serde_json::Value;

/// What the manifest says that the engine holds: enough to foretell every overlap.
#[derive(Default)]
struct Model {
    /// Engine hash to the tokens and hashes from the start of its prompt to its end.
    paths: BTreeMap<String, (Vec<u32>, Vec<String>)>,
    /// Copies by hash, medium and cache group.
    copies: BTreeMap<(String, String, u64), u32>,
}

impl Model {
    fn apply(&mut self, event: &Value) {
        let medium = event["medium"].as_str().unwrap_or("GPU").to_uppercase();
        match event["type"].as_str().unwrap() {
            "BlockStored" => self.store(event, &medium),
            "BlockRemoved" => {
                for hash in hashes(event) {
                    if let Some(copies) = self.copies.get_mut(&(hash, medium.clone(), group(event)))
                    {
                        *copies = copies.saturating_sub(1);
                    }
                }
            }
            _ => self.copies.retain(|(_, medium, _), _| medium == "STORAGE"),
        }
    }

    fn store(&mut self, event: &Value, medium: &str) {
        let tokens = tokens(event);
        let usable = match event["kv_cache_spec_kind"].as_str() {
            Some(kind) => kind == "full_attention",
            None => group(event) == 0,
        };
        // An event of thousands of blocks gives their number alone, and is compared as a whole.
        if tokens.is_empty() || hashes(event).is_empty() || !usable {
            return;
        }
        let (mut path, mut chain) = match &event["parent"] {
            Value::Null => <(Vec<u32>, Vec<String>)>::default(),
            parent => match self.paths.get(&name(parent)) {
                Some(known) => known.clone(),
                None => return, // an orphan is never credited
            },
        };
        let block = usize::try_from(event["block_size"].as_u64().unwrap()).unwrap();
        for (hash, block) in hashes(event).into_iter().zip(tokens.chunks_exact(block)) {
            path.extend_from_slice(block);
            chain.push(hash.clone());
            *self
                .copies
                .entry((hash.clone(), medium.to_owned(), group(event)))
                .or_default() += 1;
            self.paths.insert(hash, (path.clone(), chain.clone()));
        }
    }

    fn holds(&self, hash: &str) -> bool {
        self.copies
            .iter()
            .any(|((held, ..), copies)| held == hash && *copies > 0)
    }

    /// Leading tokens of the path that are held.
    fn held_tokens(&self, hash: &str) -> usize {
        let (path, chain) = &self.paths[hash];
        let held = chain.iter().take_while(|hash| self.holds(hash)).count();
        path.len() / chain.len() * held
    }
}

#[test]
fn every_payload_is_ingested_as_the_manifest_says() {
    let manifest: Value =
        serde_json::from_slice(&fs::read(golden("manifest.json")).unwrap()).unwrap();
    let cases = manifest["cases"].as_array().unwrap();
    let (mut rejected, mut skipped, mut compared) = (0, 0, 0);
    for case in cases {
        let file = case["file"].as_str().unwrap();
        let router = router(if file.contains("bigram") { 4 } else { 16 });
        let report = ingest(&router, file);
        match case["outcome"].as_str().unwrap() {
            "reject" => {
                assert_eq!(report.applied, 0, "{file}");
                assert_eq!(report.skipped[&SkipReason::Undecodable], 1, "{file}");
                rejected += 1;
                continue;
            }
            "ok_skip" => {
                let bad: u64 = report
                    .skipped
                    .iter()
                    .filter(|(reason, _)| **reason != SkipReason::UnknownBlock)
                    .map(|(_, count)| count)
                    .sum();
                let expected = case["expected"]["skipped"].as_array().unwrap().len();
                assert_eq!(bad, expected as u64, "{file}: {report:?}");
                skipped += 1;
            }
            _ => assert_nothing_lost(file, &report),
        }
        let mut model = Model::default();
        for event in case["expected"]["events"].as_array().unwrap() {
            model.apply(event);
        }
        for event in case["expected"]["events"].as_array().unwrap() {
            compared += compare(&router, &model, event, file);
        }
    }
    assert_eq!((rejected, skipped), (5, 3));
    assert!(compared >= 30, "{compared} paths compared");
}

#[test]
fn consecutive_captures_of_a_running_vllm_add_up() {
    let router = router(32);
    let overlap = |tokens: &[u32], salt: Option<&str>| {
        let prompt = router.prompt(
            tokens,
            &SaltContext {
                salt,
                ..SaltContext::default()
            },
        );
        router
            .overlap(&prompt, now())
            .first()
            .map_or_else(Overlap::default, |(_, overlap)| *overlap)
    };
    let manifest: Value =
        serde_json::from_slice(&fs::read(golden("manifest.json")).unwrap()).unwrap();
    let event = |n: usize| {
        let file = format!("vllm-0.32.0-real-{n:03}.msgpack");
        let cases = manifest["cases"].as_array().unwrap();
        let case = cases
            .iter()
            .find(|case| case["file"] == file.as_str())
            .unwrap();
        case["expected"]["events"][0].clone()
    };
    let step = |n: usize| {
        let payload = fs::read(golden(&format!("vllm-0.32.0-real-{n:03}.msgpack"))).unwrap();
        router
            .ingest("w", 0, Some(n as u64), &payload, now())
            .unwrap()
    };
    step(0);
    let first = tokens(&event(0));
    assert_eq!(overlap(&first, None).device, 2);
    step(1);
    let mut longer = first.clone();
    longer.extend(tokens(&event(1)));
    assert_eq!(overlap(&longer, None).device, 3);
    step(2);
    let salted = tokens(&event(2));
    assert_eq!(overlap(&salted, Some("tenant-a")).device, 2);
    step(3);
    step(4);
    step(5); // AllBlocksCleared
    assert_eq!(
        overlap(&longer, None).blocks() + overlap(&salted, Some("tenant-a")).blocks(),
        0
    );
    step(6);
    assert_eq!(overlap(&tokens(&event(6)), None).device, 1);
}

fn assert_nothing_lost(file: &str, report: &IngestReport) {
    for (reason, count) in &report.skipped {
        let normal = matches!(
            reason,
            SkipReason::UnknownBlock | SkipReason::CacheGroup | SkipReason::Placeholder
        );
        assert!(normal, "{file}: {count} × {}", reason.code());
    }
}

/// Compares the path of each hash that the event stored; returns how many.
fn compare(router: &Router, model: &Model, event: &Value, file: &str) -> usize {
    let mut compared = 0;
    if let Some(blocks) = event["block_hashes"]["n"].as_u64() {
        let prompt = router.prompt(&tokens(event), &SaltContext::default());
        let (_, overlap) = router.overlap(&prompt, now())[0];
        assert_eq!(u64::from(overlap.device), blocks, "{file}");
        compared += 1;
    }
    for hash in hashes(event)
        .iter()
        .filter(|hash| model.paths.contains_key(*hash))
    {
        let path = &model.paths[hash].0;
        let media = media(event);
        let salts: Vec<&str> = texts(event);
        let lora = event["lora_name"].as_str();
        let salt = SaltContext {
            lora,
            salt: event["cache_salt"]
                .as_str()
                .or_else(|| salts.iter().find(|text| Some(**text) != lora).copied()),
            media: &media,
        };
        let found = router
            .overlap(&router.prompt(path, &salt), now())
            .first()
            .map_or(0, |(_, overlap)| overlap.blocks() as usize);
        let held = model.held_tokens(hash) / router.config().block_size.tokens();
        assert_eq!(found, held, "{file}: hash {hash}");
        if held > 0 && salt.salt.is_some() {
            let unsalted = router.prompt(path, &SaltContext { salt: None, ..salt });
            assert!(
                router.overlap(&unsalted, now()).is_empty(),
                "{file}: salt ignored"
            );
        }
        compared += 1;
    }
    compared
}

/// The bare strings of the first block's extra keys.
fn texts(event: &Value) -> Vec<&str> {
    let first = event["extra_keys"]
        .as_array()
        .and_then(|keys| keys.first()?.as_array());
    first.map_or_else(Vec::new, |keys| {
        keys.iter().filter_map(Value::as_str).collect()
    })
}

/// The media items of the first block; each is taken to end with the last block that names it.
fn media(event: &Value) -> Vec<MediaSpan> {
    let Some(blocks) = event["extra_keys"].as_array() else {
        return Vec::new();
    };
    let named = |digest: &str| {
        let touched = blocks.iter().take_while(|block| {
            block
                .as_array()
                .is_some_and(|keys| keys.iter().any(|key| key[0] == digest))
        });
        touched.count() * 16
    };
    let Some(first) = blocks.first().and_then(Value::as_array) else {
        return Vec::new();
    };
    first
        .iter()
        .filter_map(|key| {
            let (digest, offset) = (key[0].as_str()?, key[1].as_u64()?);
            let offset_tokens = usize::try_from(offset).unwrap();
            Some(MediaSpan {
                offset_tokens,
                length_tokens: named(digest) - offset_tokens,
                digest: digest.as_bytes().to_vec(),
            })
        })
        .collect()
}

fn tokens(event: &Value) -> Vec<u32> {
    match &event["token_ids"] {
        Value::Array(tokens) => tokens
            .iter()
            // Of a pair (EAGLE) the first is the block's token.
            .map(|token| token.as_u64().or_else(|| token[0].as_u64()).unwrap())
            .map(|token| u32::try_from(token).unwrap())
            .collect(),
        // The long event gives its number and ends: it counts up from 0.
        summary @ Value::Object(_) => {
            let count = u32::try_from(summary["n"].as_u64().unwrap()).unwrap();
            assert_eq!(summary["last"][3], u64::from(count) - 1);
            (0..count).collect()
        }
        _ => Vec::new(),
    }
}

fn hashes(event: &Value) -> Vec<String> {
    match &event["block_hashes"] {
        Value::Array(hashes) => hashes.iter().map(name).collect(),
        _ => Vec::new(),
    }
}

fn group(event: &Value) -> u64 {
    event["group_idx"].as_u64().unwrap_or(0)
}

fn name(hash: &Value) -> String {
    hash["hex"]
        .as_str()
        .or_else(|| hash["u64"].as_str())
        .unwrap()
        .to_owned()
}

fn ingest(router: &Router, file: &str) -> IngestReport {
    let payload = fs::read(golden(file)).unwrap();
    router.ingest("w", 0, None, &payload, now()).unwrap()
}

fn router(block_size: u32) -> Router {
    let config = RouterConfig::default();
    let config = with(config, |config| {
        config.block_size = BlockSize::new(block_size).unwrap()
    });
    let router = Router::new(config).unwrap();
    router
        .add_worker(WorkerSpec::new("w").unwrap(), now())
        .unwrap();
    router
}

fn with<T>(mut value: T, change: impl FnOnce(&mut T)) -> T {
    change(&mut value);
    value
}

#[expect(clippy::disallowed_methods, reason = "a caller has a clock")]
fn now() -> Instant {
    Instant::now()
}

fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/golden")
        .join(file)
}
