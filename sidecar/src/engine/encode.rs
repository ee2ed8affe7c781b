//! One step's cache events as vLLM's msgpack (map layout, from 0.24.0).

use std::convert::Infallible;

use rmp::encode::{ByteBuf, ValueWriteError};

use super::kv::{CacheEvent, StoredBlocks};

/// Returns the payload of one batch: `[ts, events, dp_rank]`.
pub(super) fn encode_batch(ts: f64, events: &[CacheEvent], block_size: u32) -> Vec<u8> {
    let mut payload = Writer::with_capacity(64 + events.len() * 96);
    match write_batch(&mut payload, ts, events, block_size) {
        Ok(()) => payload.into_vec(),
        Err(
            ValueWriteError::InvalidMarkerWrite(never) | ValueWriteError::InvalidDataWrite(never),
        ) => match never {},
    }
}

/// Memory: writing to it cannot fail.
type Writer = ByteBuf;

type Written = Result<(), ValueWriteError<Infallible>>;

fn write_batch(out: &mut Writer, ts: f64, events: &[CacheEvent], block_size: u32) -> Written {
    rmp::encode::write_array_len(out, 3)?;
    rmp::encode::write_f64(out, ts)?;
    rmp::encode::write_array_len(out, length(events))?;
    for event in events {
        match event {
            CacheEvent::Stored(stored) => write_stored(out, stored, block_size)?,
            CacheEvent::Removed(hash) => write_removed(out, *hash)?,
            CacheEvent::Cleared => {
                rmp::encode::write_map_len(out, 1)?;
                write_text(out, "type", "AllBlocksCleared")?;
            }
        }
    }
    rmp::encode::write_uint(out, 0)?;
    Ok(())
}

fn write_stored(out: &mut Writer, stored: &StoredBlocks, block_size: u32) -> Written {
    rmp::encode::write_map_len(out, 10)?;
    write_text(out, "type", "BlockStored")?;
    rmp::encode::write_str(out, "block_hashes")?;
    write_integers(out, stored.hashes.iter().copied())?;
    rmp::encode::write_str(out, "parent_block_hash")?;
    match stored.parent {
        Some(parent) => {
            rmp::encode::write_uint(out, parent)?;
        }
        None => write_nil(out)?,
    }
    rmp::encode::write_str(out, "token_ids")?;
    write_integers(out, stored.tokens.iter().map(|&token| u64::from(token)))?;
    rmp::encode::write_str(out, "block_size")?;
    rmp::encode::write_uint(out, u64::from(block_size))?;
    rmp::encode::write_str(out, "lora_id")?;
    write_nil(out)?;
    write_text(out, "medium", "GPU")?;
    rmp::encode::write_str(out, "lora_name")?;
    write_nil(out)?;
    write_extra_keys(out, stored)?;
    write_group(out)?;
    write_text(out, "kv_cache_spec_kind", "full_attention")
}

fn write_removed(out: &mut Writer, hash: u64) -> Written {
    rmp::encode::write_map_len(out, 4)?;
    write_text(out, "type", "BlockRemoved")?;
    rmp::encode::write_str(out, "block_hashes")?;
    write_integers(out, std::iter::once(hash))?;
    write_text(out, "medium", "GPU")?;
    write_group(out)
}

/// One entry a block: the salt for the block that begins a salted prompt, nil for all others.
fn write_extra_keys(out: &mut Writer, stored: &StoredBlocks) -> Written {
    rmp::encode::write_str(out, "extra_keys")?;
    rmp::encode::write_array_len(out, length(&stored.hashes))?;
    for at in 0..stored.hashes.len() {
        match stored.salt.as_deref().filter(|_| at == 0) {
            Some(salt) => {
                rmp::encode::write_array_len(out, 1)?;
                rmp::encode::write_str(out, salt)?;
            }
            None => write_nil(out)?,
        }
    }
    Ok(())
}

fn write_group(out: &mut Writer) -> Written {
    rmp::encode::write_str(out, "group_idx")?;
    rmp::encode::write_uint(out, 0)?;
    Ok(())
}

fn write_text(out: &mut Writer, key: &str, value: &str) -> Written {
    rmp::encode::write_str(out, key)?;
    rmp::encode::write_str(out, value)
}

fn write_integers(out: &mut Writer, values: impl ExactSizeIterator<Item = u64>) -> Written {
    rmp::encode::write_array_len(out, u32::try_from(values.len()).unwrap_or(u32::MAX))?;
    for value in values {
        rmp::encode::write_uint(out, value)?;
    }
    Ok(())
}

fn write_nil(out: &mut Writer) -> Written {
    rmp::encode::write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite)
}

/// A step's lists are bounded by the pool, far below 2³².
fn length<T>(list: &[T]) -> u32 {
    u32::try_from(list.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_real_engine() {
        let events = [
            CacheEvent::Stored(StoredBlocks {
                hashes: vec![0x1234_5678_9abc_def0],
                parent: None,
                tokens: vec![300, 7],
                salt: Some("t".to_owned()),
            }),
            CacheEvent::Removed(5),
            CacheEvent::Cleared,
        ];
        let payload = encode_batch(1.5, &events, 2);
        let mut expected = vec![0x93, 0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0, 0x93];
        let text = |out: &mut Vec<u8>, text: &str| {
            out.push(0xa0 | u8::try_from(text.len()).unwrap());
            out.extend_from_slice(text.as_bytes());
        };
        let out = &mut expected;
        out.push(0x8a);
        text(out, "type");
        text(out, "BlockStored");
        text(out, "block_hashes");
        out.extend([0x91, 0xcf, 0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0]);
        text(out, "parent_block_hash");
        out.push(0xc0);
        text(out, "token_ids");
        out.extend([0x92, 0xcd, 0x01, 0x2c, 7]);
        text(out, "block_size");
        out.push(2);
        text(out, "lora_id");
        out.push(0xc0);
        text(out, "medium");
        text(out, "GPU");
        text(out, "lora_name");
        out.push(0xc0);
        text(out, "extra_keys");
        out.extend([0x91, 0x91]);
        text(out, "t");
        text(out, "group_idx");
        out.push(0);
        text(out, "kv_cache_spec_kind");
        text(out, "full_attention");
        out.push(0x84);
        text(out, "type");
        text(out, "BlockRemoved");
        text(out, "block_hashes");
        out.extend([0x91, 5]);
        text(out, "medium");
        text(out, "GPU");
        text(out, "group_idx");
        out.push(0);
        out.push(0x81);
        text(out, "type");
        text(out, "AllBlocksCleared");
        out.push(0);
        assert_eq!(payload, expected);
    }
}
