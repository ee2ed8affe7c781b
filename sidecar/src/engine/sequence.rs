//! One prompt on its way through the engine, and the chain of hashes over its blocks.

use std::sync::Arc;

use tokio::sync::mpsc::UnboundedSender;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use super::kv::{BlockHash, BlockId, StoredBlocks};
use super::tokenizer::Tokenizer;

/// What the engine is asked to do with one prompt.
#[derive(Debug)]
pub(super) struct NewSequence {
    /// Number within its request.
    pub(super) index: u32,
    /// Sample number among those of the same prompt; each generates other words.
    pub(super) sample: u32,
    pub(super) prompt: Vec<u32>,
    /// At least 1.
    pub(super) max_tokens: usize,
    pub(super) salt: Option<String>,
    pub(super) handoff: Handoff,
    /// Where tokens go; when its receiver is gone the sequence is aborted.
    pub(super) output: UnboundedSender<Output>,
}

/// A prompt's part in a handoff.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Handoff {
    /// None.
    #[default]
    Whole,
    /// Its blocks stay in use under this name when it is done.
    HandOver(Arc<str>),
    /// Its KV has been fetched: all that is left to compute is the output of its last token.
    Fetched,
}

/// One generated token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Output {
    /// Number of the sequence within its request.
    pub(super) index: u32,
    pub(super) token: u32,
    /// Prompt tokens that were cached when the sequence was first scheduled.
    pub(super) cached_tokens: usize,
    /// No more tokens follow.
    pub(super) finished: bool,
}

/// A generated token and whom it is for.
#[derive(Debug)]
pub(super) struct Delivery {
    to: UnboundedSender<Output>,
    pub(super) output: Output,
}

impl Delivery {
    /// Hands the token out.
    pub(super) fn send(self) {
        // A client that left is noticed before the next step.
        let _ = self.to.send(self.output);
    }
}

/// Makes a block's hash from its parent's, its tokens and what else tells it apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockHasher {
    /// Stands for the parent of a first block, and makes the hashes of one engine life its own.
    pub(super) seed: u64,
    pub(super) block_size: usize,
}

/// A sequence that waits or runs.
#[derive(Debug)]
pub(super) struct Sequence {
    new: NewSequence,
    /// Prompt, then generated tokens.
    tokens: Vec<u32>,
    prompt_tokens: usize,
    /// Hash of each complete block of `tokens`.
    hashes: Vec<BlockHash>,
    /// Blocks held, first to last.
    pub(super) blocks: Vec<BlockId>,
    /// Leading tokens whose KV exists.
    pub(super) computed: usize,
    /// Leading blocks that are in the cache's table.
    pub(super) filled: usize,
    /// Tokens that the current step computes.
    pub(super) scheduled: usize,
    /// Set when first scheduled.
    pub(super) cached_tokens: Option<usize>,
    /// Running digest of `tokens`, from which the next one is drawn.
    digest: u64,
}

impl BlockHasher {
    fn hash(&self, parent: Option<BlockHash>, tokens: &[u32], salt: Option<&str>) -> BlockHash {
        let mut hasher = Xxh3::with_seed(self.seed);
        hasher.update(&parent.unwrap_or(self.seed).to_le_bytes());
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        if let Some(salt) = salt {
            hasher.update(b"salt");
            hasher.update(salt.as_bytes());
        }
        hasher.digest()
    }
}

impl Sequence {
    /// Takes a prompt in and hashes its complete blocks.
    pub(super) fn new(mut new: NewSequence, hasher: &BlockHasher) -> Self {
        let tokens = std::mem::take(&mut new.prompt);
        let mut sequence = Self {
            prompt_tokens: tokens.len(),
            digest: u64::from(new.sample),
            hashes: Vec::with_capacity(tokens.len() / hasher.block_size),
            tokens,
            new,
            blocks: Vec::new(),
            computed: 0,
            filled: 0,
            scheduled: 0,
            cached_tokens: None,
        };
        for at in 0..sequence.tokens.len() {
            sequence.digest = mix(sequence.digest, sequence.tokens[at]);
        }
        sequence.extend_hashes(hasher);
        sequence
    }

    /// Returns the number of tokens, generated ones included.
    pub(super) const fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the hashes of those complete blocks that a cache hit may cover: at least the last token is computed anew,
    /// since its output is needed.
    pub(super) fn reusable_hashes(&self, block_size: usize) -> &[BlockHash] {
        &self.hashes[..(self.tokens.len() - 1) / block_size]
    }

    /// Tells whether all that remains is one generated token at a time.
    pub(super) const fn decodes(&self) -> bool {
        self.computed >= self.prompt_tokens && self.computed + 1 == self.tokens.len()
    }

    /// Returns how many leading tokens need not be computed where `held` are in the cache.
    pub(super) fn ready_tokens(&mut self, held: usize) -> usize {
        match std::mem::take(&mut self.new.handoff) {
            // Once: what a preemption takes away is computed anew.
            Handoff::Fetched => self.prompt_tokens - 1,
            other => {
                self.new.handoff = other;
                held
            }
        }
    }

    /// Returns the name under which the blocks are to be held.
    pub(super) const fn handed_over_as(&self) -> Option<&Arc<str>> {
        match &self.new.handoff {
            Handoff::HandOver(name) => Some(name),
            Handoff::Whole | Handoff::Fetched => None,
        }
    }

    /// Tells whether nobody waits for the answer any more.
    pub(super) fn abandoned(&self) -> bool {
        self.new.output.is_closed()
    }

    /// Describes blocks `filled..end`, which are about to be computed.
    pub(super) fn stored_blocks(&self, end: usize, block_size: usize) -> StoredBlocks {
        let begin = self.filled;
        StoredBlocks {
            hashes: self.hashes[begin..end].to_vec(),
            parent: begin.checked_sub(1).map(|parent| self.hashes[parent]),
            tokens: self.tokens[begin * block_size..end * block_size].to_vec(),
            salt: self.new.salt.clone().filter(|_| begin == 0),
        }
    }

    /// Draws the next token.
    pub(super) fn generate(
        &mut self,
        hasher: &BlockHasher,
        tokenizer: Tokenizer,
        seed: u64,
    ) -> Delivery {
        let token = tokenizer.word(xxh3_64_with_seed(&self.digest.to_le_bytes(), seed));
        self.tokens.push(token);
        self.digest = mix(self.digest, token);
        self.extend_hashes(hasher);
        Delivery {
            to: self.new.output.clone(),
            output: Output {
                index: self.new.index,
                token,
                cached_tokens: self.cached_tokens.unwrap_or(0),
                finished: self.tokens.len() - self.prompt_tokens >= self.new.max_tokens,
            },
        }
    }

    /// Forgets all progress but the tokens, and returns the blocks that were held.
    pub(super) fn restart(&mut self) -> Vec<BlockId> {
        self.computed = 0;
        self.filled = 0;
        self.scheduled = 0;
        std::mem::take(&mut self.blocks)
    }

    fn extend_hashes(&mut self, hasher: &BlockHasher) {
        while (self.hashes.len() + 1) * hasher.block_size <= self.tokens.len() {
            let begin = self.hashes.len() * hasher.block_size;
            let tokens = &self.tokens[begin..begin + hasher.block_size];
            let salt = self.new.salt.as_deref().filter(|_| begin == 0);
            self.hashes
                .push(hasher.hash(self.hashes.last().copied(), tokens, salt));
        }
    }
}

/// One step of a multiplicative digest; only its distribution matters.
const fn mix(digest: u64, token: u32) -> u64 {
    (digest ^ token as u64)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .rotate_left(29)
}
