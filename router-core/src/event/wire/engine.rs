//! The events of vLLM and SGLang: which field stands where, and what each may hold.

use std::str;

use super::error::DecodeError;
use super::reader::{Reader, Value};
use crate::event::{BlockRemoved, BlockStored, ExtraKey, GroupKind, KvEvent, SkipReason};
use crate::index::{EngineHash, Tier};

/// Bytes of the smallest event that is understood: an array of one string of 16 bytes.
pub(super) const MIN_EVENT_BYTES: usize = 18;

/// Largest engine block in tokens. Source: the largest in the field is 256 to 1,024 (offloaded chunks).
const MAX_BLOCK_SIZE: u64 = 65_536;

/// Longest engine hash in bytes; engines publish 16 or 32.
const MAX_HASH_BYTES: usize = 64;

/// Why an event was not decoded.
#[derive(Debug)]
pub(super) enum Fault {
    /// The payload is broken: nothing behind this point can be found.
    Structure(DecodeError),
    /// This event alone is to be skipped.
    Event(SkipReason),
}

impl From<DecodeError> for Fault {
    fn from(error: DecodeError) -> Self {
        Self::Structure(error)
    }
}

const MALFORMED: Fault = Fault::Event(SkipReason::Malformed);

/// Decodes one event. After a [`Fault::Event`] the reader stands somewhere inside the event.
pub(super) fn decode_event(reader: &mut Reader<'_>) -> Result<KvEvent, Fault> {
    match reader.value()? {
        Value::Array(elements @ 1..) => {
            let tag = Tag::read(reader)?;
            let mut fields = Fields::default();
            for position in 0..elements - 1 {
                match tag.positions().get(position) {
                    Some(&field) => fields.read(field, reader)?,
                    None => drop(reader.skip()?),
                }
            }
            fields.into_event(tag)
        }
        Value::Map(pairs) => {
            let tag = find_tag(*reader, pairs)?;
            let mut fields = Fields::default();
            for _ in 0..pairs {
                match key(reader)?.and_then(|name| tag.field(name)) {
                    Some(field) => fields.read(field, reader)?,
                    None => drop(reader.skip()?),
                }
            }
            fields.into_event(tag)
        }
        _ => Err(MALFORMED),
    }
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tag {
    Stored,
    Removed,
    Cleared,
}

impl Tag {
    fn read(reader: &mut Reader<'_>) -> Result<Self, Fault> {
        match reader.value()? {
            Value::Str(b"BlockStored") => Ok(Self::Stored),
            Value::Str(b"BlockRemoved") => Ok(Self::Removed),
            Value::Str(b"AllBlocksCleared") => Ok(Self::Cleared),
            Value::Str(_) => Err(Fault::Event(SkipReason::UnknownEvent)),
            _ => Err(MALFORMED),
        }
    }

    /// Fields of the array form behind the tag. Longest known: vLLM 0.22 and 0.23, with a window size as one more.
    const fn positions(self) -> &'static [Field] {
        match self {
            Self::Stored => &[
                Field::Hashes,
                Field::Parent,
                Field::Tokens,
                Field::BlockSize,
                Field::LoraId,
                Field::Medium,
                Field::LoraNameOrMetadata,
                Field::ExtraKeys,
                Field::Group,
                Field::Kind,
            ],
            Self::Removed => &[Field::Hashes, Field::Medium, Field::Group],
            Self::Cleared => &[],
        }
    }

    /// Field of the map form with this name, when this event has it.
    fn field(self, name: &[u8]) -> Option<Field> {
        let (field, of_removed) = match name {
            b"block_hashes" => (Field::Hashes, true),
            b"medium" => (Field::Medium, true),
            b"group_idx" => (Field::Group, true),
            b"locality" => (Field::Locality, true),
            b"parent_block_hash" => (Field::Parent, false),
            b"token_ids" => (Field::Tokens, false),
            b"block_size" => (Field::BlockSize, false),
            b"lora_id" => (Field::LoraId, false),
            b"lora_name" => (Field::LoraName, false),
            b"cache_salt" => (Field::CacheSalt, false),
            b"extra_keys" => (Field::ExtraKeys, false),
            b"kv_cache_spec_kind" => (Field::Kind, false),
            _ => return None,
        };
        match self {
            Self::Stored => Some(field),
            Self::Removed => of_removed.then_some(field),
            Self::Cleared => None,
        }
    }
}

/// Finds the tag of a map, wherever it stands; engines put it first, where this costs nothing.
fn find_tag(mut reader: Reader<'_>, pairs: usize) -> Result<Tag, Fault> {
    for _ in 0..pairs {
        if key(&mut reader)? == Some(b"type") {
            return Tag::read(&mut reader);
        }
        reader.skip()?;
    }
    Err(MALFORMED)
}

/// Reads a map's key: its bytes when it is a string, and nothing for another type, which names no field.
fn key<'a>(reader: &mut Reader<'a>) -> Result<Option<&'a [u8]>, DecodeError> {
    let start = *reader;
    if let Value::Str(name) = reader.value()? {
        return Ok(Some(name));
    }
    *reader = start;
    reader.skip()?;
    Ok(None)
}

#[derive(Clone, Copy, Debug)]
enum Field {
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    LoraName,
    /// vLLM: the adapter's name. SGLang 0.5.18 and 0.5.19, same position: a map that holds the salt.
    LoraNameOrMetadata,
    CacheSalt,
    Medium,
    Locality,
    ExtraKeys,
    Group,
    Kind,
}

/// What has been read of one event.
#[derive(Debug, Default)]
struct Fields {
    hashes: Option<Vec<EngineHash>>,
    parent: Option<EngineHash>,
    tokens: Vec<u32>,
    block_size: Option<u64>,
    lora_id: Option<i128>,
    lora_name: Option<String>,
    cache_salt: Option<String>,
    extra_keys: Option<ExtraKeys>,
    tier: Tier,
    remote: bool,
    group: u32,
    kind: GroupKind,
}

impl Fields {
    fn read(&mut self, field: Field, reader: &mut Reader<'_>) -> Result<(), Fault> {
        match field {
            Field::Hashes => self.hashes = hashes(reader)?,
            Field::Parent => self.parent = parent(reader)?,
            Field::Tokens => self.tokens = tokens(reader)?,
            Field::BlockSize => self.block_size = block_size(reader)?,
            Field::LoraId => self.lora_id = integer(reader)?,
            Field::LoraName => self.lora_name = name(reader)?,
            Field::LoraNameOrMetadata => {
                let start = *reader;
                if let Value::Map(pairs) = reader.value()? {
                    self.cache_salt = salt_of_metadata(reader, pairs)?;
                } else {
                    *reader = start;
                    self.lora_name = name(reader)?;
                }
            }
            Field::CacheSalt => self.cache_salt = name(reader)?,
            Field::Medium => self.tier = text(reader)?.map_or(Tier::Device, tier),
            Field::Locality => {
                self.remote = text(reader)?.is_some_and(|it| it.eq_ignore_ascii_case("remote"));
            }
            Field::ExtraKeys => self.extra_keys = extra_keys(reader)?,
            Field::Group => {
                let group = integer(reader)?.unwrap_or_default();
                self.group = u32::try_from(group).map_err(|_| MALFORMED)?;
            }
            Field::Kind => self.kind = text(reader)?.map_or(GroupKind::Unstated, kind),
        }
        Ok(())
    }

    fn into_event(self, tag: Tag) -> Result<KvEvent, Fault> {
        match tag {
            Tag::Stored => self.into_stored().map(KvEvent::Stored),
            Tag::Removed => self.into_removed().map(KvEvent::Removed),
            Tag::Cleared => Ok(KvEvent::Cleared),
        }
    }

    fn into_stored(self) -> Result<BlockStored, Fault> {
        let tier = self.tier();
        let block_hashes = self.hashes.unwrap_or_default();
        if block_hashes.is_empty() {
            return Err(Fault::Event(SkipReason::NoHashes));
        }
        let block_size = match self.block_size {
            Some(0) if self.tokens.is_empty() => 0,
            Some(size @ 1..=MAX_BLOCK_SIZE) => u32::try_from(size).unwrap_or(u32::MAX),
            _ => return Err(Fault::Event(SkipReason::BlockSize)),
        };
        if self.tokens.len() as u128 != block_hashes.len() as u128 * u128::from(block_size) {
            return Err(Fault::Event(match self.kind {
                // Normal there: window and state groups leave blocks out without saying which.
                GroupKind::Partial => SkipReason::CacheGroup,
                GroupKind::Full | GroupKind::Unstated => SkipReason::CountMismatch,
            }));
        }
        let extra_keys = self.extra_keys.unwrap_or_default();
        if extra_keys
            .count
            .is_some_and(|count| count != block_hashes.len())
        {
            return Err(MALFORMED);
        }
        Ok(BlockStored {
            block_hashes,
            parent_hash: self.parent,
            token_ids: self.tokens,
            block_size,
            lora_name: self
                .lora_name
                .or_else(|| self.lora_id.map(|id| format!("#{id}"))),
            cache_salt: self.cache_salt,
            extra_keys: extra_keys.by_block,
            tier,
            group: self.group,
            kind: self.kind,
        })
    }

    fn into_removed(self) -> Result<BlockRemoved, Fault> {
        let tier = self.tier();
        Ok(BlockRemoved {
            block_hashes: self.hashes.ok_or(MALFORMED)?,
            tier,
            group: self.group,
        })
    }

    /// Shared storage is external whatever it is made of.
    const fn tier(&self) -> Tier {
        if self.remote {
            Tier::External
        } else {
            self.tier
        }
    }
}

fn hashes(reader: &mut Reader<'_>) -> Result<Option<Vec<EngineHash>>, Fault> {
    let count = match reader.value()? {
        Value::Nil => return Ok(None),
        Value::Array(count) => count,
        _ => return Err(MALFORMED),
    };
    // Reserved by what hashes take in practice, nine bytes, since an element takes 24 here; short ones make it grow.
    let mut hashes = Vec::with_capacity(count.min(reader.left() / 8));
    for _ in 0..count {
        hashes.push(hash(reader.value()?)?);
    }
    Ok(Some(hashes))
}

fn parent(reader: &mut Reader<'_>) -> Result<Option<EngineHash>, Fault> {
    match reader.value()? {
        Value::Nil => Ok(None),
        value => hash(value).map(Some),
    }
}

/// Strings count as bytes: that is how publishers without the bin type write them.
fn hash(value: Value<'_>) -> Result<EngineHash, Fault> {
    match value {
        Value::Unsigned(hash) => Ok(EngineHash::Int(hash)),
        Value::Negative(hash) => Ok(EngineHash::Int(hash.cast_unsigned())),
        Value::Bin(hash) | Value::Str(hash) if (1..=MAX_HASH_BYTES).contains(&hash.len()) => {
            Ok(EngineHash::Bytes(hash.into()))
        }
        _ => Err(MALFORMED),
    }
}

fn tokens(reader: &mut Reader<'_>) -> Result<Vec<u32>, Fault> {
    let count = match reader.value()? {
        Value::Nil => 0,
        Value::Array(count) => count,
        _ => return Err(MALFORMED),
    };
    let mut tokens = Vec::with_capacity(count);
    loop {
        reader.unsigned_run(count - tokens.len(), &mut tokens);
        if tokens.len() == count {
            return Ok(tokens);
        }
        tokens.push(other_token(reader)?);
    }
}

/// Reads a token that is not a short unsigned integer: a signed or longer one, or a pair of this token and the next
/// (SGLang with EAGLE).
fn other_token(reader: &mut Reader<'_>) -> Result<u32, Fault> {
    match reader.value()? {
        Value::Array(2) => {
            let first = token(reader.value()?)?;
            token(reader.value()?)?;
            Ok(first)
        }
        value => token(value),
    }
}

fn token(value: Value<'_>) -> Result<u32, Fault> {
    let out_of_range = Fault::Event(SkipReason::TokenRange);
    match value {
        Value::Unsigned(token) => u32::try_from(token).map_err(|_| out_of_range),
        Value::Negative(_) => Err(out_of_range),
        _ => Err(MALFORMED),
    }
}

/// Reads any integer; which are in range is checked with the other counts of the event.
fn block_size(reader: &mut Reader<'_>) -> Result<Option<u64>, Fault> {
    match reader.value()? {
        Value::Nil => Ok(None),
        Value::Unsigned(size) => Ok(Some(size)),
        Value::Negative(_) => Ok(Some(u64::MAX)),
        _ => Err(MALFORMED),
    }
}

fn integer(reader: &mut Reader<'_>) -> Result<Option<i128>, Fault> {
    match reader.value()? {
        Value::Nil => Ok(None),
        Value::Unsigned(value) => Ok(Some(value.into())),
        Value::Negative(value) => Ok(Some(value.into())),
        _ => Err(MALFORMED),
    }
}

fn text<'a>(reader: &mut Reader<'a>) -> Result<Option<&'a str>, Fault> {
    match reader.value()? {
        Value::Nil => Ok(None),
        Value::Str(text) => str::from_utf8(text).map(Some).map_err(|_| MALFORMED),
        _ => Err(MALFORMED),
    }
}

/// Reads a name, of which an empty one is none.
fn name(reader: &mut Reader<'_>) -> Result<Option<String>, Fault> {
    Ok(text(reader)?.filter(|it| !it.is_empty()).map(str::to_owned))
}

fn salt_of_metadata(reader: &mut Reader<'_>, pairs: usize) -> Result<Option<String>, Fault> {
    let mut salt = None;
    for _ in 0..pairs {
        if key(reader)? == Some(b"cache_salt") {
            salt = name(reader)?;
        } else {
            reader.skip()?;
        }
    }
    Ok(salt)
}

/// Maps the engines' words for a place. What is not known is credited least.
fn tier(medium: &str) -> Tier {
    let is = |known: &str| medium.eq_ignore_ascii_case(known);
    let begins = |known: &str| {
        medium
            .get(..known.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(known))
    };
    if is("gpu") {
        Tier::Device
    } else if is("cpu") || begins("cpu_") || begins("cpu:") {
        Tier::Host
    } else if is("storage") || is("obj") || is("external") {
        Tier::External
    } else {
        Tier::Disk
    }
}

fn kind(name: &str) -> GroupKind {
    match name {
        "full_attention" | "mla_attention" | "sink_full_attention" => GroupKind::Full,
        _ => GroupKind::Partial,
    }
}

/// Extra keys of the event's blocks.
#[derive(Debug, Default)]
struct ExtraKeys {
    /// Entries that were read, when the field was there.
    count: Option<usize>,
    /// Empty when no entry holds a key: current engines send an entry for each block, nearly all nil.
    by_block: Vec<Vec<ExtraKey>>,
}

fn extra_keys(reader: &mut Reader<'_>) -> Result<Option<ExtraKeys>, Fault> {
    let count = match reader.value()? {
        Value::Nil => return Ok(None),
        Value::Array(count) => count,
        _ => return Err(MALFORMED),
    };
    let mut by_block: Vec<Vec<ExtraKey>> = Vec::new();
    for block in 0..count {
        let keys = match reader.value()? {
            Value::Nil => 0,
            Value::Array(keys) => keys,
            _ => return Err(MALFORMED),
        };
        if keys > 0 && by_block.is_empty() {
            by_block.resize_with(block, Vec::new);
        }
        if keys > 0 || !by_block.is_empty() {
            let keys: Result<_, Fault> = (0..keys).map(|_| extra_key(reader)).collect();
            by_block.push(keys?);
        }
    }
    Ok(Some(ExtraKeys {
        count: Some(count),
        by_block,
    }))
}

fn extra_key(reader: &mut Reader<'_>) -> Result<ExtraKey, Fault> {
    let start = *reader;
    let known = match reader.value()? {
        Value::Str(text) => str::from_utf8(text)
            .ok()
            .map(|it| ExtraKey::Text(it.into())),
        Value::Array(2) => media(reader)?,
        _ => None,
    };
    if let Some(key) = known {
        return Ok(key);
    }
    *reader = start;
    Ok(ExtraKey::Other(reader.skip()?.to_vec()))
}

fn media(reader: &mut Reader<'_>) -> Result<Option<ExtraKey>, Fault> {
    let (Value::Str(digest) | Value::Bin(digest)) = reader.value()? else {
        return Ok(None);
    };
    let offset = match reader.value()? {
        Value::Unsigned(offset) => i64::try_from(offset).ok(),
        Value::Negative(offset) => Some(offset),
        _ => None,
    };
    Ok(offset.map(|offset| ExtraKey::Media {
        digest: digest.to_vec(),
        offset,
    }))
}
