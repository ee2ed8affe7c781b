//! [`EventBatch`] to the bytes that an engine would publish, for simulated engines and tests.

use std::convert::Infallible;

use rmp::encode::{self, ByteBuf, ValueWriteError};

use super::wire::is_one_value;
use super::{BlockRemoved, BlockStored, EventBatch, ExtraKey, GroupKind, KvEvent};
use crate::index::{EngineHash, Tier};

/// Encodes a batch as current vLLM does: events are maps, nullable fields are present, later ones only when they say
/// something. A cache salt goes into SGLang's field, since vLLM has none of its own.
///
/// [`decode_batch`](super::wire::decode_batch) gives the same batch back, with nothing skipped, when every event in it is
/// one that decoding can return.
///
/// # Examples
/// ```
/// use kvlane::event::{EventBatch, KvEvent, encode::encode_batch, wire::decode_batch};
///
/// let batch = EventBatch { ts: 1.5, dp_rank: Some(0), events: vec![KvEvent::Cleared], ..EventBatch::default() };
/// assert_eq!(decode_batch(&encode_batch(&batch)), Ok(batch));
/// ```
#[must_use]
pub fn encode_batch(batch: &EventBatch) -> Vec<u8> {
    let mut out = Writer::default();
    out.array(3);
    sure(encode::write_f64(&mut out.bytes, batch.ts));
    out.array(batch.events.len());
    for event in &batch.events {
        match event {
            KvEvent::Stored(stored) => out.stored(stored),
            KvEvent::Removed(removed) => out.removed(removed),
            KvEvent::Cleared => {
                out.map(1);
                out.entry("type", "AllBlocksCleared");
            }
        }
    }
    match batch.dp_rank {
        Some(rank) => drop(sure(encode::write_sint(&mut out.bytes, rank))),
        None => out.nil(),
    }
    out.bytes.into_vec()
}

#[derive(Default)]
struct Writer {
    bytes: ByteBuf,
}

impl Writer {
    fn stored(&mut self, event: &BlockStored) {
        let kind = match event.kind {
            GroupKind::Unstated => None,
            GroupKind::Full => Some("full_attention"),
            GroupKind::Partial => Some("sliding_window"),
        };
        let grouped = event.group != 0 || kind.is_some();
        let optional = [
            event.cache_salt.is_some(),
            !event.extra_keys.is_empty(),
            grouped,
            kind.is_some(),
            event.tier == Tier::External,
        ];
        self.map(8 + optional.into_iter().filter(|&present| present).count());
        self.entry("type", "BlockStored");
        self.text("block_hashes");
        self.hashes(&event.block_hashes);
        self.text("parent_block_hash");
        match &event.parent_hash {
            Some(hash) => self.hash(hash),
            None => self.nil(),
        }
        self.text("token_ids");
        self.array(event.token_ids.len());
        for &token in &event.token_ids {
            self.unsigned(token.into());
        }
        self.text("block_size");
        self.unsigned(event.block_size.into());
        self.text("lora_id");
        self.nil();
        self.medium(event.tier);
        self.text("lora_name");
        match &event.lora_name {
            Some(name) => self.text(name),
            None => self.nil(),
        }
        if let Some(salt) = &event.cache_salt {
            self.entry("cache_salt", salt);
        }
        if !event.extra_keys.is_empty() {
            self.text("extra_keys");
            self.extra_keys(&event.extra_keys);
        }
        if grouped {
            self.text("group_idx");
            self.unsigned(event.group.into());
        }
        if let Some(kind) = kind {
            self.entry("kv_cache_spec_kind", kind);
        }
        self.locality(event.tier);
    }

    fn removed(&mut self, event: &BlockRemoved) {
        self.map(4 + usize::from(event.tier == Tier::External));
        self.entry("type", "BlockRemoved");
        self.text("block_hashes");
        self.hashes(&event.block_hashes);
        self.medium(event.tier);
        self.text("group_idx");
        self.unsigned(event.group.into());
        self.locality(event.tier);
    }

    fn medium(&mut self, tier: Tier) {
        self.entry(
            "medium",
            match tier {
                Tier::Device => "GPU",
                Tier::Host => "CPU",
                Tier::External => "STORAGE",
                Tier::Disk => "DISK",
            },
        );
    }

    fn locality(&mut self, tier: Tier) {
        if tier == Tier::External {
            self.entry("locality", "REMOTE");
        }
    }

    fn extra_keys(&mut self, by_block: &[Vec<ExtraKey>]) {
        self.array(by_block.len());
        for keys in by_block {
            if keys.is_empty() {
                self.nil();
                continue;
            }
            self.array(keys.len());
            for key in keys {
                self.extra_key(key);
            }
        }
    }

    fn extra_key(&mut self, key: &ExtraKey) {
        match key {
            ExtraKey::Text(text) => self.text(text),
            ExtraKey::Media { digest, offset } => {
                self.array(2);
                match str::from_utf8(digest) {
                    Ok(text) => self.text(text),
                    Err(_) => self.bin(digest),
                }
                sure(encode::write_sint(&mut self.bytes, *offset));
            }
            // Bytes that are no value would break the whole batch.
            ExtraKey::Other(value) if is_one_value(value) => {
                self.bytes.as_mut_vec().extend_from_slice(value);
            }
            ExtraKey::Other(bytes) => self.bin(bytes),
        }
    }

    fn hashes(&mut self, hashes: &[EngineHash]) {
        self.array(hashes.len());
        for hash in hashes {
            self.hash(hash);
        }
    }

    fn hash(&mut self, hash: &EngineHash) {
        match hash {
            EngineHash::Int(hash) => self.unsigned(*hash),
            EngineHash::Bytes(hash) => self.bin(hash),
        }
    }

    fn entry(&mut self, key: &str, value: &str) {
        self.text(key);
        self.text(value);
    }

    fn map(&mut self, pairs: usize) {
        sure(encode::write_map_len(&mut self.bytes, header_length(pairs)));
    }

    fn array(&mut self, elements: usize) {
        sure(encode::write_array_len(
            &mut self.bytes,
            header_length(elements),
        ));
    }

    fn text(&mut self, text: &str) {
        sure(encode::write_str(&mut self.bytes, text));
    }

    fn bin(&mut self, bytes: &[u8]) {
        sure(encode::write_bin(&mut self.bytes, bytes));
    }

    fn unsigned(&mut self, value: u64) {
        sure(encode::write_uint(&mut self.bytes, value));
    }

    fn nil(&mut self) {
        let Ok(()) = encode::write_nil(&mut self.bytes);
    }
}

fn header_length(length: usize) -> u32 {
    u32::try_from(length).expect("a batch in memory has fewer than 2^32 elements")
}

/// Takes the value of a write to memory, the error of which has no values.
fn sure<T>(written: Result<T, ValueWriteError<Infallible>>) -> T {
    let Ok(value) = written;
    value
}
