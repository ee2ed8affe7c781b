//! A prompt, reduced to what routing needs.

use std::sync::Arc;

use crate::block::{
    BlockHashes, BlockSize, LocalBlockHash, SaltContext, SequenceHash, block_hashes,
};

/// How a prompt was cut into blocks. The two kinds are kept apart everywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptKind {
    /// By token ids, comparable with engine events.
    Tokens,
    /// By chunks of text, comparable with other text alone.
    Text,
}

/// Hashes of one prompt, computed once and used for every question about it; cheap to clone.
#[derive(Clone, Debug)]
pub struct Prompt {
    local: Arc<[LocalBlockHash]>,
    sequence: Arc<[SequenceHash]>,
    kind: PromptKind,
    tokens: usize,
}

impl Prompt {
    /// Hashes token ids. An incomplete last block counts for load and not for matching.
    #[must_use]
    pub fn from_tokens(tokens: &[u32], block_size: BlockSize, salt: &SaltContext<'_>) -> Self {
        let hashes = block_hashes(tokens, block_size, salt);
        Self::new(hashes, PromptKind::Tokens, tokens.len())
    }

    /// Takes the chunk hashes of a text whose token count is unknown.
    #[must_use]
    pub fn from_text(hashes: BlockHashes) -> Self {
        let tokens = hashes.local.len() * crate::text::TOKENS_PER_CHUNK;
        Self::new(hashes, PromptKind::Text, tokens)
    }

    fn new(hashes: BlockHashes, kind: PromptKind, tokens: usize) -> Self {
        Self {
            local: hashes.local.into(),
            sequence: hashes.sequence.into(),
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

    pub(crate) fn local(&self) -> &[LocalBlockHash] {
        &self.local
    }

    pub(crate) const fn sequence(&self) -> &Arc<[SequenceHash]> {
        &self.sequence
    }
}
