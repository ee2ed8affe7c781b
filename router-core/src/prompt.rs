//! A prompt, reduced to what routing needs.

use std::sync::Arc;

use crate::block::{BlockHashes, BlockSize, LocalBlockHash, SaltContext, local_hashes};

/// How a prompt was cut into blocks. The two kinds are kept apart everywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptKind {
    /// By token ids, comparable with engine events.
    Tokens,
    /// By chunks of text, comparable with other text alone.
    Text,
}

/// Hashes of one prompt, computed once and used for every question about it; cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    local: Arc<[LocalBlockHash]>,
    kind: PromptKind,
    tokens: usize,
}

impl Prompt {
    /// Hashes token ids. An incomplete last block counts for load and not for matching.
    ///
    /// Cost: about 4 ns a block of 16 tokens. [`PromptHasher`](crate::PromptHasher) hashes only what a conversation gained.
    #[must_use]
    pub fn from_tokens(tokens: &[u32], block_size: BlockSize, salt: &SaltContext<'_>) -> Self {
        let local = local_hashes(tokens, block_size, salt);
        Self::new(local, PromptKind::Tokens, tokens.len())
    }

    /// Takes the chunk hashes of a text whose token count is unknown.
    #[must_use]
    pub fn from_text(hashes: BlockHashes) -> Self {
        let tokens = hashes.local.len() * crate::text::TOKENS_PER_CHUNK;
        Self::new(hashes.local.into(), PromptKind::Text, tokens)
    }

    pub(crate) const fn new(local: Arc<[LocalBlockHash]>, kind: PromptKind, tokens: usize) -> Self {
        Self {
            local,
            kind,
            tokens,
        }
    }

    /// Returns the number of complete blocks (chunks for text).
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.local.len()
    }

    /// Returns the number of tokens; an estimate for text.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns how it was cut.
    #[must_use]
    pub const fn kind(&self) -> PromptKind {
        self.kind
    }

    /// Returns the local hash of each complete block, as [`block_hashes`](crate::block_hashes) does.
    #[must_use]
    pub fn local_hashes(&self) -> &[LocalBlockHash] {
        &self.local
    }

    /// Tells whether it was cut into blocks of this size, as far as the numbers say; chunks of text have a size of their own.
    pub(crate) fn is_cut_by(&self, block_size: BlockSize) -> bool {
        match self.kind {
            PromptKind::Tokens => self.tokens / block_size.tokens() == self.blocks(),
            PromptKind::Text => true,
        }
    }

    pub(crate) const fn local(&self) -> &Arc<[LocalBlockHash]> {
        &self.local
    }
}
