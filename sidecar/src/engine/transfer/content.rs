//! What stands for the KV of a prompt: bytes that can be told from those of any other.

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// The KV of one prompt, block by block. Equal prompts have equal content in every engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::engine) struct Content {
    /// Digest of each block's tokens and all before it.
    digests: Vec<u64>,
    /// Tokens in all blocks but the last.
    block_size: usize,
    tokens: usize,
}

impl Content {
    /// Describes the KV of these tokens.
    pub(super) fn of(tokens: &[u32], salt: Option<&str>, block_size: usize) -> Self {
        let mut before = salt.map_or(0, |salt| xxh3_64(salt.as_bytes()));
        let digest = |block: &[u32]| {
            let mut hasher = Xxh3::with_seed(before);
            block
                .iter()
                .for_each(|token| hasher.update(&token.to_le_bytes()));
            before = hasher.digest();
            before
        };
        Self {
            digests: tokens.chunks(block_size).map(digest).collect(),
            block_size,
            tokens: tokens.len(),
        }
    }

    /// Returns a number that tells this content from any other.
    pub(super) fn digest(&self) -> u64 {
        self.digests.last().copied().unwrap_or(0)
    }

    /// Returns the number of blocks.
    pub(super) const fn blocks(&self) -> usize {
        self.digests.len()
    }

    /// Returns the digest of one block's tokens and all before it.
    pub(super) fn block_digest(&self, index: usize) -> u64 {
        self.digests.get(index).copied().unwrap_or(0)
    }

    /// Returns the number of tokens in one block.
    pub(super) fn block_tokens(&self, index: usize) -> usize {
        let before = index.saturating_mul(self.block_size);
        self.block_size.min(self.tokens.saturating_sub(before))
    }

    /// Returns the number of tokens.
    pub(super) const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Writes the bytes of a block.
    pub(super) fn write_block(&self, index: usize, bytes_per_token: usize, out: &mut Vec<u8>) {
        let length = self.block_tokens(index) * bytes_per_token;
        out.resize(length.next_multiple_of(8), 0);
        let mut state = self.block_digest(index);
        let (words, _) = out.as_chunks_mut::<8>();
        for word in words {
            // One step of a Weyl sequence and a multiplication: cheap, and different for each digest.
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            *word = (state ^ (state >> 31))
                .wrapping_mul(0xBF58_476D_1CE4_E5B9)
                .to_le_bytes();
        }
        out.truncate(length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(content: &Content, index: usize) -> Vec<u8> {
        let mut out = Vec::new();
        content.write_block(index, 10, &mut out);
        out
    }

    #[test]
    fn a_blocks_bytes_tell_its_prefix_and_salt() {
        let one = Content::of(&[1, 2, 3, 4, 5], None, 2);
        assert_eq!((one.blocks(), one.tokens()), (3, 5));
        // Two tokens in a block, one in the last, 10 bytes each.
        assert_eq!([0, 1, 2].map(|at| bytes(&one, at).len()), [20, 20, 10]);
        let other = Content::of(&[9, 2, 3, 4, 5], None, 2);
        let salted = Content::of(&[1, 2, 3, 4, 5], Some("tenant"), 2);
        for at in 0..3 {
            assert_ne!(bytes(&one, at), bytes(&other, at));
            assert_ne!(bytes(&one, at), bytes(&salted, at));
        }
        assert_eq!(one, Content::of(&[1, 2, 3, 4, 5], None, 2));
        assert_eq!(bytes(&one, 9).len(), 0);
    }
}
