//! Hashing a conversation that grows.

use super::{BlockSize, LocalBlockHash, MediaSpan, SaltContext, SaltParts, block_salt};
use crate::error::{Error, Result};
use crate::prompt::{Prompt, PromptKind};

/// Hashes a prompt piece by piece: each turn of a conversation costs its own tokens, not those before it.
///
/// The hashes are those of [`block_hashes`](super::block_hashes) over all tokens at once, however they were cut into pieces.
/// Memory: 8 bytes a complete block, and the tokens of the incomplete one.
///
/// # Examples
/// ```
/// use kvlane::{BlockSize, Prompt, PromptHasher, SaltContext};
///
/// let (size, salt) = (BlockSize::new(4)?, SaltContext::default());
/// let mut conversation = PromptHasher::new(size, &salt);
/// conversation.append(&[1, 2, 3, 4, 5, 6]);
/// assert_eq!(conversation.prompt().blocks(), 1); // tokens 5 and 6 begin the second block
/// conversation.append(&[7, 8, 9]);
/// let prompt = conversation.prompt();
/// assert_eq!(prompt, Prompt::from_tokens(&[1, 2, 3, 4, 5, 6, 7, 8, 9], size, &salt));
/// # Ok::<(), kvlane::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PromptHasher {
    block_size: BlockSize,
    local: Vec<LocalBlockHash>,
    /// Salt of the first block; empty from then on.
    first: SaltParts,
    media: Vec<MediaSpan>,
    /// Tokens of the incomplete block.
    tail: Vec<u32>,
}

impl PromptHasher {
    /// Begins a prompt with the salt and the media items known so far.
    #[must_use]
    pub fn new(block_size: BlockSize, salt: &SaltContext<'_>) -> Self {
        let mut first = SaltParts::new();
        first.push_lora(salt.lora.unwrap_or_default());
        first.push_salt(salt.salt.unwrap_or_default());
        Self {
            block_size,
            local: Vec::new(),
            first,
            media: salt.media.to_vec(),
            tail: Vec::new(),
        }
    }

    /// Adds a media item, before any block that it touches is complete; its offset counts from the prompt's first token.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`](crate::ErrorKind::InvalidRequest) when it begins in a block that is hashed already.
    pub fn push_media(&mut self, span: MediaSpan) -> Result<()> {
        let hashed = self.local.len() * self.block_size.tokens();
        if span.offset_tokens < hashed && span.length_tokens > 0 {
            return Err(Error::invalid(format!(
                "media at token {} begins in a block that is hashed: {hashed} or more is accepted",
                span.offset_tokens
            )));
        }
        self.media.push(span);
        Ok(())
    }

    /// Adds tokens and hashes the blocks that they complete.
    pub fn append(&mut self, tokens: &[u32]) {
        let size = self.block_size.tokens();
        let mut tokens = tokens;
        if !self.tail.is_empty() {
            let (head, rest) = tokens.split_at(tokens.len().min(size - self.tail.len()));
            self.tail.extend_from_slice(head);
            tokens = rest;
            if self.tail.len() < size {
                return;
            }
            let mut tail = std::mem::take(&mut self.tail);
            self.push(&tail);
            tail.clear();
            self.tail = tail;
        }
        let blocks = tokens.chunks_exact(size);
        self.tail.extend_from_slice(blocks.remainder());
        self.local.reserve(blocks.len());
        for block in blocks {
            self.push(block);
        }
    }

    /// Returns the number of tokens so far.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.local.len() * self.block_size.tokens() + self.tail.len()
    }

    /// Returns the prompt so far. Cost: a copy of 8 bytes a block.
    #[must_use]
    pub fn prompt(&self) -> Prompt {
        Prompt::new(
            self.local.as_slice().into(),
            PromptKind::Tokens,
            self.tokens(),
        )
    }

    fn push(&mut self, block: &[u32]) {
        let index = self.local.len();
        let hash = if self.media.is_empty() && (index > 0 || self.first.is_empty()) {
            LocalBlockHash::bare(block)
        } else {
            let context = SaltContext {
                media: &self.media,
                ..SaltContext::default()
            };
            let mut parts = block_salt(index, self.block_size, &context);
            if index == 0 {
                parts = std::mem::take(&mut self.first).then(&parts);
            }
            LocalBlockHash::of_tokens(block, &parts)
        };
        self.local.push(hash);
        let hashed = self.local.len() * self.block_size.tokens();
        // What ended before the next block touches none that is still to come.
        self.media
            .retain(|span| span.offset_tokens.saturating_add(span.length_tokens) > hashed);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;

    fn media() -> impl Strategy<Value = Vec<MediaSpan>> {
        let span = (0usize..80, 0usize..30, prop::collection::vec(0u8..3, 0..3));
        prop::collection::vec(span, 0..3).prop_map(|spans| {
            let spans = spans.into_iter();
            spans
                .map(|(offset_tokens, length_tokens, digest)| MediaSpan {
                    offset_tokens,
                    length_tokens,
                    digest,
                })
                .collect()
        })
    }

    proptest! {
        #[test]
        fn pieces_hash_as_the_whole(
            tokens in prop::collection::vec(any::<u32>(), 0..100),
            cuts in prop::collection::vec(0usize..100, 0..5),
            size in prop::sample::select(vec![1u32, 3, 4, 16]),
            salt in prop::sample::select(vec!["", "tenant"]),
            media in media(),
        ) {
            let size = BlockSize::new(size).unwrap();
            let salt = SaltContext { lora: Some("adapter"), salt: Some(salt), media: &media };
            let mut hasher = PromptHasher::new(size, &salt);
            let mut cuts = cuts;
            cuts.retain(|cut| *cut <= tokens.len());
            cuts.push(tokens.len());
            cuts.sort_unstable();
            let mut start = 0;
            for end in cuts {
                hasher.append(&tokens[start..end]);
                prop_assert_eq!(hasher.prompt(), Prompt::from_tokens(&tokens[..end], size, &salt));
                start = end;
            }
        }
    }

    #[test]
    fn media_that_comes_too_late_is_refused() {
        let span = |offset_tokens| MediaSpan {
            offset_tokens,
            length_tokens: 4,
            digest: b"d1".to_vec(),
        };
        let mut hasher = PromptHasher::new(BlockSize::default(), &SaltContext::default());
        hasher.append(&[7; 20]);
        let error = hasher.push_media(span(15)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidRequest);
        hasher.push_media(span(20)).unwrap();
        hasher.append(&[7; 12]);
        let media = [span(20)];
        let salt = SaltContext {
            media: &media,
            ..SaltContext::default()
        };
        let whole = Prompt::from_tokens(&[7; 32], BlockSize::default(), &salt);
        assert_eq!(hasher.prompt(), whole);
    }
}
