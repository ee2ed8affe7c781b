//! Blocks and their hashes: the chain rule, its seeds and its salt.
//!
//! # Rule
//! A prompt is cut into blocks of [`BlockSize`] tokens; an incomplete tail has no hash. The *local hash* of a block is
//! XXH3-64 (seed [`TOKEN_SEED`]) over its tokens as little-endian u32, followed by the block's salt parts. A part is one tag
//! byte, its length as little-endian u32, and its bytes; an absent or empty part adds nothing. Parts, in this order:
//!
//! | tag | part | in blocks |
//! |---|---|---|
//! | 1 | adapter (LoRA) name, UTF-8 | the first |
//! | 2 | cache salt, UTF-8 | the first |
//! | 3 | media: offset of its first token from the block's first token as little-endian i64, then the digest | every block it touches |
//! | 4 | anything else an engine mixed in | as published |
//!
//! Adapter and salt stand in the first block alone because the engines publish the salt there alone; the chain carries
//! them on. The *sequence hash* of a prefix is the sum of a term for each of its blocks; see [`SequenceHash::child`].
//!
//! Text without a tokenizer uses [`TEXT_SEED`] (see [`text`](crate::text)), so the two kinds never meet.
//!
//! The rule is the same on every platform and in every language; `tests/parity/cases.json` of the repository has test vectors
//! (`hashes`), of whole prompts and, in the driver of this crate, of the same prompts in pieces ([`PromptHasher`]).

mod fixed;
mod hasher;

use std::borrow::Cow;
use std::num::NonZeroU32;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::error::{Error, Result};

use fixed::Fixed64;

pub use hasher::PromptHasher;

/// Seed of local hashes over token ids: the ASCII bytes `kvl/tok1`.
pub const TOKEN_SEED: u64 = u64::from_be_bytes(*b"kvl/tok1");
/// Seed of local hashes over text: the ASCII bytes `kvl/txt1`.
pub const TEXT_SEED: u64 = u64::from_be_bytes(*b"kvl/txt1");

/// Tokens per block, 1 to 65,536; must divide (or equal) the engine's block size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct BlockSize(NonZeroU32);

impl BlockSize {
    /// Largest accepted size.
    pub const MAX: u32 = 65_536;

    /// Parses a block size.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) when 0 or above [`MAX`](Self::MAX).
    pub fn new(tokens: u32) -> Result<Self> {
        match NonZeroU32::new(tokens) {
            Some(size) if tokens <= Self::MAX => Ok(Self(size)),
            _ => Err(Error::config(format!(
                "block_size {tokens} is out of range: 1 to {} tokens are accepted",
                Self::MAX
            ))),
        }
    }

    /// Returns the number of tokens per block.
    #[must_use]
    pub const fn tokens(self) -> usize {
        self.0.get() as usize
    }
}

impl Default for BlockSize {
    /// 16, the default of vLLM on GPUs.
    fn default() -> Self {
        const SIXTEEN: NonZeroU32 = NonZeroU32::new(16).expect("16 is not zero");
        Self(SIXTEEN)
    }
}

impl TryFrom<u32> for BlockSize {
    type Error = Error;

    fn try_from(tokens: u32) -> Result<Self> {
        Self::new(tokens)
    }
}

impl From<BlockSize> for u32 {
    fn from(size: BlockSize) -> Self {
        size.0.get()
    }
}

/// Hash of one block's content with its salt; says nothing of its prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LocalBlockHash(pub u64);

/// Hash of a block and everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceHash(pub u64);

impl SequenceHash {
    /// The hash of no block at all.
    pub(crate) const EMPTY: Self = Self(0);

    /// Begins a chain with the first block.
    #[must_use]
    pub const fn root(first: LocalBlockHash) -> Self {
        Self::EMPTY.child(first, 0)
    }

    /// Continues the chain of a prefix of `position` blocks with the next one.
    ///
    /// A sequence hash is the wrapping sum of a term for each block of the prefix: with `mixed` = `local ^ (K0 + position *
    /// K1)`, the term is `local` plus the product of the low and the high half of `mixed`. A term depends on no other block,
    /// so that a processor computes several at once, and a sum can go back as well as on; 256 blocks cost about 0.05 µs.
    /// Like the local hashes it guards against accident, not against somebody who looks for collisions; and it needs local
    /// hashes that are spread over 64 bits as XXH3's are, since sums of small numbers meet.
    ///
    /// # Source
    /// The product of halves beside the plain value is the accumulation step of XXH3; K0 is the first 64-bit word of the
    /// fractional part of π, K1 is 2^64 divided by the golden ratio (the step of SplitMix64).
    #[must_use]
    pub const fn child(self, local: LocalBlockHash, position: usize) -> Self {
        let place = PLACE_ZERO.wrapping_add((position as u64).wrapping_mul(PLACE_STEP));
        Self(self.0.wrapping_add(term(local, place)))
    }

    /// Chains local hashes from the root.
    #[must_use]
    pub fn chain(local_hashes: &[LocalBlockHash]) -> Vec<Self> {
        let mut chain = Vec::new();
        Self::EMPTY.continue_into(0, local_hashes, &mut chain);
        chain
    }

    /// Continues the chain of a prefix of `position` blocks with the blocks after it, appending to `chain`.
    pub(crate) fn continue_into(
        self,
        position: usize,
        local_hashes: &[LocalBlockHash],
        chain: &mut Vec<Self>,
    ) {
        let old = chain.len();
        chain.resize(old + local_hashes.len(), Self::EMPTY);
        let mut last = self;
        let blocks = chain[old..].iter_mut().zip(local_hashes);
        for (offset, (hash, &local)) in blocks.enumerate() {
            last = last.child(local, position + offset);
            *hash = last;
        }
    }

    /// Goes on from a prefix of `position` blocks over `local_hashes`, at once.
    pub(crate) fn advanced(self, position: usize, local_hashes: &[LocalBlockHash]) -> Self {
        Self(self.0.wrapping_add(terms(position, local_hashes)))
    }

    /// Goes back to a prefix of `position` blocks, which `local_hashes` follow.
    pub(crate) fn withdrawn(self, position: usize, local_hashes: &[LocalBlockHash]) -> Self {
        Self(self.0.wrapping_sub(terms(position, local_hashes)))
    }
}

/// Returns the sum of the terms of blocks that begin at `position`.
fn terms(position: usize, local_hashes: &[LocalBlockHash]) -> u64 {
    let mut place = PLACE_ZERO.wrapping_add((position as u64).wrapping_mul(PLACE_STEP));
    let mut sum = 0_u64;
    for &local in local_hashes {
        sum = sum.wrapping_add(term(local, place));
        place = place.wrapping_add(PLACE_STEP);
    }
    sum
}

const fn term(local: LocalBlockHash, place: u64) -> u64 {
    let mixed = local.0 ^ place;
    local.0.wrapping_add((mixed & 0xFFFF_FFFF) * (mixed >> 32))
}

const PLACE_ZERO: u64 = 0x243F_6A88_85A3_08D3;
const PLACE_STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// One image, sound or other media item inside a prompt.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MediaSpan {
    /// Position of its first placeholder token.
    pub offset_tokens: usize,
    /// Number of placeholder tokens; a span of 0 touches no block.
    pub length_tokens: usize,
    /// What identifies its content; must equal the engine's identifier (the bytes of vLLM's `mm_hash` string).
    pub digest: Vec<u8>,
}

/// What a prompt's blocks are salted with.
#[derive(Clone, Copy, Debug, Default)]
pub struct SaltContext<'a> {
    /// Adapter (LoRA) name; empty is the base model.
    pub lora: Option<&'a str>,
    /// Cache salt; empty is none.
    pub salt: Option<&'a str>,
    /// Media items, in any order.
    pub media: &'a [MediaSpan],
}

/// Salt parts of one block under construction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SaltParts(Vec<u8>);

impl SaltParts {
    /// Creates an empty salt.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds an adapter name (first block only).
    pub fn push_lora(&mut self, name: &str) {
        self.push(1, &[name.as_bytes()]);
    }

    /// Adds a cache salt (first block only).
    pub fn push_salt(&mut self, salt: &str) {
        self.push(2, &[salt.as_bytes()]);
    }

    /// Adds a media item that begins `offset` tokens after the block's first token (negative: before it).
    pub fn push_media(&mut self, offset: i64, digest: &[u8]) {
        self.push(3, &[&offset.to_le_bytes(), digest]);
    }

    /// Adds anything else that an engine mixed into the block.
    pub fn push_other(&mut self, bytes: &[u8]) {
        self.push(4, &[bytes]);
    }

    /// Tells whether nothing was added.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends the parts of another salt.
    fn then(mut self, more: &Self) -> Self {
        self.0.extend_from_slice(&more.0);
        self
    }

    fn push(&mut self, tag: u8, pieces: &[&[u8]]) {
        let length: usize = pieces.iter().map(|piece| piece.len()).sum();
        if length == 0 {
            return;
        }
        self.0.push(tag);
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        self.0.extend_from_slice(&length.to_le_bytes());
        for piece in pieces {
            self.0.extend_from_slice(piece);
        }
    }
}

impl LocalBlockHash {
    /// Hashes one block's tokens with its salt.
    #[must_use]
    pub fn of_tokens(tokens: &[u32], salt: &SaltParts) -> Self {
        if salt.is_empty() {
            return Self::bare(tokens);
        }
        Self::of_bytes(&token_bytes(tokens), TOKEN_SEED, salt)
    }

    /// Hashes one chunk of text with its salt.
    #[must_use]
    pub fn of_text(text: &[u8], salt: &SaltParts) -> Self {
        Self::of_bytes(text, TEXT_SEED, salt)
    }

    /// Hashes tokens that stand alone, without salt.
    fn bare(tokens: &[u32]) -> Self {
        match tokens.try_into() {
            Ok(sixteen) => Self(OF_TOKENS.hash_words(sixteen)),
            Err(_) => Self(xxh3_64_with_seed(&token_bytes(tokens), TOKEN_SEED)),
        }
    }

    /// Hashes a full chunk of text that stands alone, without salt.
    pub(crate) fn of_full_chunk(chunk: &[u8; 64]) -> Self {
        Self(OF_TEXT.hash_bytes(chunk))
    }

    fn of_bytes(bytes: &[u8], seed: u64, salt: &SaltParts) -> Self {
        if salt.is_empty() {
            return Self(xxh3_64_with_seed(bytes, seed));
        }
        let mut hasher = Xxh3::with_seed(seed);
        hasher.update(bytes);
        hasher.update(&salt.0);
        Self(hasher.digest())
    }
}

const OF_TOKENS: Fixed64 = Fixed64::new(TOKEN_SEED);
const OF_TEXT: Fixed64 = Fixed64::new(TEXT_SEED);

/// Returns the tokens as little-endian bytes: in place where the machine stores them so.
fn token_bytes(tokens: &[u32]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        Cow::Borrowed(bytemuck::cast_slice(tokens))
    } else {
        Cow::Owned(
            tokens
                .iter()
                .flat_map(|token| token.to_le_bytes())
                .collect(),
        )
    }
}

/// Counts the leading blocks that two prompts share.
pub(crate) fn common_prefix(a: &[LocalBlockHash], b: &[LocalBlockHash]) -> usize {
    // Eight at a time, which compiles to vector comparisons.
    let (a_lines, _) = a.as_chunks::<8>();
    let (b_lines, _) = b.as_chunks::<8>();
    let equal = |(a, b): &(&[LocalBlockHash; 8], &[LocalBlockHash; 8])| {
        let differences = a.iter().zip(*b).map(|(a, b)| a.0 ^ b.0);
        differences.fold(0, |all, one| all | one) == 0
    };
    let whole = 8 * a_lines.iter().zip(b_lines).take_while(equal).count();
    let rest = a[whole..].iter().zip(&b[whole..]);
    whole + rest.take_while(|(a, b)| a == b).count()
}

/// The hashes of one prompt's complete blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockHashes {
    /// Local hash of each complete block.
    pub local: Vec<LocalBlockHash>,
    /// Sequence hash of each complete block.
    pub sequence: Vec<SequenceHash>,
}

/// Hashes the complete blocks of a prompt.
///
/// Cost: about 4 ns a block of 16 tokens for the local hash and 2 ns for the sequence hash, without media. Media items are
/// looked at for each block they may touch.
///
/// # Examples
/// ```
/// use kvlane::{BlockSize, SaltContext, block_hashes};
///
/// let size = BlockSize::new(4)?;
/// let plain = block_hashes(&[1, 2, 3, 4, 5, 6, 7, 8, 9], size, &SaltContext::default());
/// assert_eq!(plain.local.len(), 2); // token 9 begins an incomplete block
///
/// let salted = SaltContext { salt: Some("tenant-a"), ..SaltContext::default() };
/// let other = block_hashes(&[1, 2, 3, 4, 5, 6, 7, 8], size, &salted);
/// assert_ne!(plain.local[0], other.local[0]); // the salt stands in the first block
/// assert_eq!(plain.local[1], other.local[1]); // and the chain carries it on
/// assert_ne!(plain.sequence[1], other.sequence[1]);
/// # Ok::<(), kvlane::Error>(())
/// ```
#[must_use]
pub fn block_hashes(tokens: &[u32], block_size: BlockSize, salt: &SaltContext<'_>) -> BlockHashes {
    let local = local_hashes(tokens, block_size, salt).to_vec();
    let sequence = SequenceHash::chain(&local);
    BlockHashes { local, sequence }
}

/// Hashes the complete blocks of a prompt, each by itself.
pub(crate) fn local_hashes(
    tokens: &[u32],
    block_size: BlockSize,
    salt: &SaltContext<'_>,
) -> Arc<[LocalBlockHash]> {
    let blocks = tokens.chunks_exact(block_size.tokens());
    if !salt.media.is_empty() {
        return blocks
            .enumerate()
            .map(|(index, block)| {
                LocalBlockHash::of_tokens(block, &block_salt(index, block_size, salt))
            })
            .collect();
    }
    // Several blocks are in flight at once: one does not depend on another.
    let mut local: Arc<[_]> = if block_size.tokens() == 16 {
        let (blocks, _) = tokens.as_chunks::<16>();
        blocks
            .iter()
            .map(|block| LocalBlockHash(OF_TOKENS.hash_words(block)))
            .collect()
    } else {
        blocks.clone().map(LocalBlockHash::bare).collect()
    };
    // Adapter and salt stand in the first block alone.
    let parts = block_salt(0, block_size, salt);
    if !parts.is_empty()
        && let (Some(first), Some(block)) = (
            Arc::get_mut(&mut local).and_then(|local| local.first_mut()),
            tokens.get(..block_size.tokens()),
        )
    {
        *first = LocalBlockHash::of_tokens(block, &parts);
    }
    local
}

/// Collects the salt parts of the block with the given index.
fn block_salt(index: usize, block_size: BlockSize, salt: &SaltContext<'_>) -> SaltParts {
    let mut parts = SaltParts::new();
    if index == 0 {
        parts.push_lora(salt.lora.unwrap_or_default());
        parts.push_salt(salt.salt.unwrap_or_default());
    }
    if !salt.media.is_empty() {
        push_media(
            &mut parts,
            index * block_size.tokens(),
            block_size,
            salt.media,
        );
    }
    parts
}

/// Adds the media items that touch the block beginning at token `start`, by position and then digest.
fn push_media(parts: &mut SaltParts, start: usize, block_size: BlockSize, media: &[MediaSpan]) {
    let end = start + block_size.tokens();
    let mut touching: Vec<&MediaSpan> = media
        .iter()
        .filter(|span| {
            span.offset_tokens < end
                && span.offset_tokens.saturating_add(span.length_tokens) > start
        })
        .collect();
    touching.sort_by(|a, b| (a.offset_tokens, &a.digest).cmp(&(b.offset_tokens, &b.digest)));
    for span in touching {
        let offset = i64::try_from(span.offset_tokens).unwrap_or(i64::MAX)
            - i64::try_from(start).unwrap_or(i64::MAX);
        parts.push_media(offset, &span.digest);
    }
}
