//! Applies decoded events of one (worker, rank) to an index.

use std::time::Instant;

use crate::block::{BlockSize, LocalBlockHash, SaltParts};
use crate::ids::Slot;
use crate::index::{EngineHash, EngineKey, PrefixIndex, StoredRun, Tier};

use super::{
    BlockRemoved, BlockStored, EventBatch, ExtraKey, GroupKind, IngestReport, KvEvent, SkipReason,
};

/// What a batch showed about the engine besides its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Applied {
    /// An engine block size that does not fit the router's.
    pub(crate) refused_block_size: Option<u32>,
    /// A store of a fitting block size was applied.
    pub(crate) accepted_store: bool,
    /// The caches of the rank were cleared.
    pub(crate) cleared: bool,
}

/// Applies the events of a batch in order and adds to `report`.
pub(crate) fn apply_batch(
    index: &impl PrefixIndex,
    slot: Slot,
    block_size: BlockSize,
    batch: &EventBatch,
    now: Instant,
    report: &mut IngestReport,
) -> Applied {
    let mut applied = Applied::default();
    for (reason, count) in &batch.skipped {
        skip(report, *reason, *count);
    }
    for event in &batch.events {
        match event {
            KvEvent::Stored(stored) => {
                match store(index, slot, block_size, stored, now, report) {
                    Ok(true) => applied.accepted_store = true,
                    Ok(false) => {}
                    Err(SkipReason::BlockSize) => {
                        // Other tiers may be kept by a connector with chunks of its own, the last of them short.
                        if stored.tier == Tier::Device {
                            applied.refused_block_size = Some(stored.block_size);
                        }
                        skip(report, SkipReason::BlockSize, 1);
                    }
                    Err(reason) => skip(report, reason, 1),
                }
            }
            KvEvent::Removed(removed) => remove(index, slot, removed, report),
            KvEvent::Cleared => {
                // Shared storage outlives the engine's own caches.
                index.clear(slot, &[Tier::Device, Tier::Host, Tier::Disk]);
                applied.cleared = true;
                report.applied += 1;
            }
        }
    }
    applied
}

/// Stores a run. `Ok(true)` when it has tokens and fits the router's block size.
fn store(
    index: &impl PrefixIndex,
    slot: Slot,
    block_size: BlockSize,
    stored: &BlockStored,
    now: Instant,
    report: &mut IngestReport,
) -> Result<bool, SkipReason> {
    let matchable = match stored.kind {
        GroupKind::Full => true,
        GroupKind::Unstated => stored.group == 0,
        GroupKind::Partial => false,
    };
    if !matchable {
        return Err(SkipReason::CacheGroup);
    }
    let keys = keys(&stored.block_hashes, stored.group);
    if stored.token_ids.is_empty() {
        let outcome = index.touch(slot, &keys, stored.tier);
        if outcome.placed + outcome.repeated == 0 {
            return Err(SkipReason::Placeholder);
        }
        report.applied += 1;
        return Ok(false);
    }
    let blocks_per_key = blocks_per_key(stored, block_size)?;
    let parent = stored.parent_hash.as_ref().map(|hash| EngineKey {
        group: stored.group,
        hash: hash.clone(),
    });
    let local_hashes = local_hashes(stored, block_size, blocks_per_key);
    let outcome = index.store(
        slot,
        &StoredRun {
            parent: parent.as_ref(),
            keys: &keys,
            local_hashes: &local_hashes,
            blocks_per_key,
            tier: stored.tier,
        },
        now,
    );
    if outcome.refused > 0 {
        skip(report, SkipReason::Conflict, outcome.refused as u64);
    }
    if outcome.dropped > 0 {
        skip(report, SkipReason::OrphanLimit, outcome.dropped as u64);
    }
    if outcome.placed + outcome.repeated + outcome.orphaned > 0 {
        report.applied += 1;
    }
    Ok(true)
}

/// Returns how many of the router's blocks one engine block covers.
fn blocks_per_key(stored: &BlockStored, block_size: BlockSize) -> Result<usize, SkipReason> {
    let engine_tokens = stored.block_size as usize;
    if engine_tokens == 0 || !engine_tokens.is_multiple_of(block_size.tokens()) {
        return Err(SkipReason::BlockSize);
    }
    if stored.token_ids.len() != stored.block_hashes.len() * engine_tokens {
        return Err(SkipReason::CountMismatch);
    }
    let blocks_per_key = engine_tokens / block_size.tokens();
    let has_media = stored
        .extra_keys
        .iter()
        .flatten()
        .any(|key| matches!(key, ExtraKey::Media { .. }));
    if blocks_per_key > 1 && has_media {
        // The event gives where an item begins and not where it ends, so its blocks cannot be told.
        return Err(SkipReason::MediaBlockSize);
    }
    Ok(blocks_per_key)
}

fn local_hashes(
    stored: &BlockStored,
    block_size: BlockSize,
    blocks_per_key: usize,
) -> Vec<LocalBlockHash> {
    stored
        .token_ids
        .chunks_exact(block_size.tokens())
        .enumerate()
        .map(|(block, tokens)| {
            let parts = if block.is_multiple_of(blocks_per_key) {
                salt_parts(stored, block / blocks_per_key)
            } else {
                SaltParts::new()
            };
            LocalBlockHash::of_tokens(tokens, &parts)
        })
        .collect()
}

/// Collects the salt of the engine block with the given index, in the order of the chain rule.
fn salt_parts(stored: &BlockStored, engine_block: usize) -> SaltParts {
    let begins_prompt = engine_block == 0 && stored.parent_hash.is_none();
    let extra = stored
        .extra_keys
        .get(engine_block)
        .map_or(&[][..], Vec::as_slice);
    let lora = stored.lora_name.as_deref().unwrap_or_default();
    let mut parts = SaltParts::new();
    let mut texts = extra
        .iter()
        .filter_map(|key| match key {
            ExtraKey::Text(text) => Some(text.as_str()),
            ExtraKey::Media { .. } | ExtraKey::Other(_) => None,
        })
        .peekable();
    // The adapter's name comes first among the strings and is in the event's own field too.
    if !lora.is_empty() {
        texts.next_if(|text| *text == lora);
    }
    if begins_prompt {
        parts.push_lora(lora);
        let salt = stored.cache_salt.as_deref().or_else(|| texts.next());
        parts.push_salt(salt.unwrap_or_default());
    }
    let mut media: Vec<(i64, &[u8])> = extra
        .iter()
        .filter_map(|key| match key {
            ExtraKey::Media { digest, offset } => Some((*offset, digest.as_slice())),
            ExtraKey::Text(_) | ExtraKey::Other(_) => None,
        })
        .collect();
    media.sort_unstable();
    for (offset, digest) in media {
        parts.push_media(offset, digest);
    }
    for text in texts {
        if stored.cache_salt.as_deref() != Some(text) {
            parts.push_other(text.as_bytes());
        }
    }
    for key in extra {
        if let ExtraKey::Other(bytes) = key {
            parts.push_other(bytes);
        }
    }
    parts
}

fn remove(index: &impl PrefixIndex, slot: Slot, removed: &BlockRemoved, report: &mut IngestReport) {
    let outcome = index.remove(
        slot,
        &keys(&removed.block_hashes, removed.group),
        removed.tier,
    );
    if outcome.unknown > 0 {
        skip(report, SkipReason::UnknownBlock, outcome.unknown as u64);
    }
    if outcome.removed > 0 {
        report.applied += 1;
    }
}

fn keys(hashes: &[EngineHash], group: u32) -> Vec<EngineKey> {
    hashes
        .iter()
        .map(|hash| EngineKey {
            group,
            hash: hash.clone(),
        })
        .collect()
}

pub(crate) fn skip(report: &mut IngestReport, reason: SkipReason, count: u64) {
    if count > 0 {
        *report.skipped.entry(reason).or_insert(0) += count;
    }
}
