//! What must hold for every payload. Used by the fuzz target and, over captures and mutations, by the core's tests.

use kvlane::event::encode::encode_batch;
use kvlane::event::wire::{MAX_PAYLOAD_BYTES, decode_batch};
use kvlane::event::{BlockStored, EventBatch, KvEvent, SkipReason};

/// Decodes `payload`; when that succeeds, checks the promises of the event types and that encoding and decoding again
/// gives the same batch.
///
/// # Panics
/// When something does not hold.
pub fn check(payload: &[u8]) {
    match decode_batch(payload) {
        Err(error) => {
            assert_eq!(error.reason(), SkipReason::Undecodable);
            assert!(error.offset() <= payload.len());
            assert!(!error.to_string().is_empty());
        }
        Ok(batch) => {
            check_promises(&batch);
            check_round_trip(batch);
        }
    }
}

fn check_promises(batch: &EventBatch) {
    assert!(batch.ts.is_finite());
    assert!(batch.skipped.values().all(|&count| count > 0));
    for event in &batch.events {
        if let KvEvent::Stored(stored) = event {
            check_stored(stored);
        }
    }
}

fn check_stored(stored: &BlockStored) {
    let blocks = stored.block_hashes.len();
    assert!(blocks > 0);
    assert!(stored.block_size <= 65_536);
    assert_eq!(stored.token_ids.len(), blocks * stored.block_size as usize);
    assert!(stored.extra_keys.is_empty() || stored.extra_keys.len() == blocks);
    assert_ne!(stored.lora_name.as_deref(), Some(""));
    assert_ne!(stored.cache_salt.as_deref(), Some(""));
}

fn check_round_trip(batch: EventBatch) {
    let encoded = encode_batch(&batch);
    // Maps are longer than the arrays that they may have come from.
    if encoded.len() > MAX_PAYLOAD_BYTES {
        return;
    }
    let again = decode_batch(&encoded).expect("what was encoded decodes");
    let expected = EventBatch {
        skipped: [].into(),
        ..batch
    };
    assert_eq!(again, expected);
}
