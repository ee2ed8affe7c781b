//! One step's cache events in the router's own terms, to be encoded as vLLM does.

use kvlane::event::{BlockRemoved, BlockStored, EventBatch, ExtraKey, GroupKind, KvEvent};
use kvlane::index::{EngineHash, Tier};

use super::kv::{CacheEvent, StoredBlocks};

/// Returns the batch of one step.
pub(super) fn event_batch(ts: f64, events: Vec<CacheEvent>, block_size: u32) -> EventBatch {
    EventBatch {
        ts,
        dp_rank: Some(0),
        events: events
            .into_iter()
            .map(|event| kv_event(event, block_size))
            .collect(),
        ..EventBatch::default()
    }
}

fn kv_event(event: CacheEvent, block_size: u32) -> KvEvent {
    match event {
        CacheEvent::Stored(stored) => KvEvent::Stored(block_stored(stored, block_size)),
        CacheEvent::Removed(hash) => KvEvent::Removed(BlockRemoved {
            block_hashes: vec![EngineHash::Int(hash)],
            tier: Tier::Device,
            group: 0,
        }),
        CacheEvent::Cleared => KvEvent::Cleared,
    }
}

fn block_stored(stored: StoredBlocks, block_size: u32) -> BlockStored {
    // vLLM names the salt among the extra keys of the block that begins the prompt; the others have an empty entry.
    let mut extra_keys = vec![Vec::new(); stored.hashes.len()];
    if let (Some(first), Some(salt)) = (extra_keys.first_mut(), stored.salt) {
        first.push(ExtraKey::Text(salt));
    }
    BlockStored {
        block_hashes: stored.hashes.into_iter().map(EngineHash::Int).collect(),
        parent_hash: stored.parent.map(EngineHash::Int),
        token_ids: stored.tokens,
        block_size,
        extra_keys,
        tier: Tier::Device,
        group: 0,
        kind: GroupKind::Full,
        ..BlockStored::default()
    }
}

#[cfg(test)]
mod tests {
    use kvlane::event::encode::encode_batch;

    use super::*;

    #[test]
    fn keys_stand_as_in_a_capture_of_the_real_engine() {
        let stored = StoredBlocks {
            hashes: vec![7, 8],
            parent: None,
            tokens: vec![1, 2, 3, 4],
            salt: Some("tenant-a".to_owned()),
        };
        let payload = encode_batch(&event_batch(1.5, vec![CacheEvent::Stored(stored)], 2));
        let text = String::from_utf8_lossy(&payload);
        let keys = [
            "type",
            "BlockStored",
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "GPU",
            "lora_name",
            "extra_keys",
            "tenant-a",
            "group_idx",
            "kv_cache_spec_kind",
            "full_attention",
        ];
        let mut at = 0;
        for key in keys {
            let found = text[at..]
                .find(key)
                .unwrap_or_else(|| panic!("{key} is missing after byte {at}"));
            at += found + key.len();
        }
        // 11 pairs, and [["tenant-a"], nil].
        assert_eq!(payload[11], 0x8b);
        let extra = payload
            .windows(8)
            .position(|part| part == b"tenant-a")
            .unwrap();
        assert_eq!(payload[extra - 3..extra], [0x92, 0x91, 0xa8]);
        assert_eq!(payload[extra + 8], 0xc0);
    }
}
