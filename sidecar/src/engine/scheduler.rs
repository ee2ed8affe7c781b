//! Which tokens the next step computes: continuous batching over one KV pool, without a clock.
//!
//! Running requests come first, in order of arrival, then waiting ones while there is room in the batch and the pool.
//! A running request that finds no free block takes them from the request that began last, which starts over later.

use std::collections::VecDeque;
use std::sync::Arc;

use hashbrown::HashMap;

use super::kv::{BlockId, BlockPool, CacheEvent};
use super::sequence::{BlockHasher, Delivery, NewSequence, Sequence};
use super::tokenizer::Tokenizer;

/// Bounds of one step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) max_num_seqs: usize,
    pub(super) max_num_batched_tokens: usize,
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) finished_requests: u64,
    pub(super) aborted_requests: u64,
    pub(super) preemptions: u64,
    pub(super) prompt_tokens: u64,
    pub(super) generated_tokens: u64,
    pub(super) prefix_queries: u64,
    pub(super) prefix_hits: u64,
    pub(super) steps: u64,
}

/// What one step does.
#[derive(Debug, Default)]
pub(super) struct Step {
    /// Prompt tokens computed, recomputed ones after a preemption included.
    pub(super) prefill_tokens: usize,
    /// Requests that each get one further token.
    pub(super) decodes: usize,
    /// What happened in the cache since the step before.
    pub(super) events: Vec<CacheEvent>,
}

impl Step {
    /// Tells whether it computes nothing.
    pub(super) const fn is_empty(&self) -> bool {
        self.prefill_tokens == 0 && self.decodes == 0
    }
}

/// What a finished step brings.
#[derive(Debug)]
pub(super) struct Completed {
    /// Tokens to hand out.
    pub(super) deliveries: Vec<Delivery>,
    /// Names under which blocks are held now.
    pub(super) held: Vec<Arc<str>>,
}

/// The queue, the running batch and the KV pool of one engine.
#[derive(Debug)]
pub(super) struct Scheduler {
    pool: BlockPool,
    hasher: BlockHasher,
    tokenizer: Tokenizer,
    seed: u64,
    limits: Limits,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    /// Blocks that stay in use for another engine.
    held: HashMap<Arc<str>, Vec<BlockId>>,
    totals: Totals,
}

impl Scheduler {
    /// Creates an idle scheduler.
    pub(super) fn new(
        pool: BlockPool,
        hasher: BlockHasher,
        tokenizer: Tokenizer,
        seed: u64,
        limits: Limits,
    ) -> Self {
        Self {
            pool,
            hasher,
            tokenizer,
            seed,
            limits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            held: HashMap::new(),
            totals: Totals::default(),
        }
    }

    /// Puts a prompt at the end of the queue. It must fit the pool when alone.
    pub(super) fn add(&mut self, new: NewSequence) {
        self.waiting.push_back(Sequence::new(new, &self.hasher));
    }

    /// Drops the sequences that nobody waits for, giving their blocks back.
    pub(super) fn drop_abandoned(&mut self) {
        let before = self.running.len() + self.waiting.len();
        self.waiting.retain(|sequence| !sequence.abandoned());
        let pool = &mut self.pool;
        self.running.retain(|sequence| {
            let abandoned = sequence.abandoned();
            if abandoned {
                pool.release(&sequence.blocks);
            }
            !abandoned
        });
        let dropped = before - self.running.len() - self.waiting.len();
        self.totals.aborted_requests += dropped as u64;
    }

    /// Tells whether there is anything to compute.
    pub(super) fn has_work(&self) -> bool {
        !self.running.is_empty() || !self.waiting.is_empty()
    }

    /// Decides the next step and takes the blocks it needs. Follow it with [`complete`](Self::complete).
    pub(super) fn schedule(&mut self) -> Step {
        let mut step = Step::default();
        let mut budget = self.limits.max_num_batched_tokens;
        if !self.schedule_running(&mut budget, &mut step) {
            self.schedule_waiting(&mut budget, &mut step);
        }
        step.events = self.pool.take_events();
        self.totals.steps += 1;
        step
    }

    /// Finishes the step: every sequence that is computed to its end gets its next token.
    pub(super) fn complete(&mut self) -> Completed {
        let Self {
            pool,
            hasher,
            tokenizer,
            seed,
            held,
            totals,
            ..
        } = self;
        let (mut deliveries, mut new_held) = (Vec::new(), Vec::new());
        self.running.retain_mut(|sequence| {
            let scheduled = std::mem::take(&mut sequence.scheduled);
            sequence.computed += scheduled;
            if scheduled == 0 || sequence.computed < sequence.len() {
                return true;
            }
            let delivery = sequence.generate(hasher, *tokenizer, *seed);
            let finished = delivery.output.finished;
            deliveries.push(delivery);
            totals.generated_tokens += 1;
            if finished {
                let blocks = std::mem::take(&mut sequence.blocks);
                match sequence.handed_over_as() {
                    Some(name) => {
                        held.insert(Arc::clone(name), blocks);
                        new_held.push(Arc::clone(name));
                    }
                    None => pool.release(&blocks),
                }
                totals.finished_requests += 1;
            }
            !finished
        });
        Completed {
            deliveries,
            held: new_held,
        }
    }

    /// Returns the blocks that are held under a name.
    pub(super) fn held(&self, name: &str) -> &[BlockId] {
        self.held.get(name).map_or(&[], Vec::as_slice)
    }

    /// Gives back what was held for another engine.
    pub(super) fn free(&mut self, name: &str) {
        if let Some(blocks) = self.held.remove(name) {
            self.pool.release(&blocks);
        }
    }

    /// Forgets all cached content when no request runs; tells whether it did.
    pub(super) fn reset_cache(&mut self) -> bool {
        self.pool.reset()
    }

    /// Returns the number of running requests.
    pub(super) fn running(&self) -> usize {
        self.running.len()
    }

    /// Returns the number of waiting requests.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the KV pool.
    pub(super) const fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Returns the totals.
    pub(super) const fn totals(&self) -> Totals {
        self.totals
    }

    /// Plans the running requests and tells whether one had to be preempted.
    fn schedule_running(&mut self, budget: &mut usize, step: &mut Step) -> bool {
        let mut preempted = false;
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            let sequence = &mut self.running[at];
            let tokens = (sequence.len() - sequence.computed).min(*budget);
            if take_blocks(&mut self.pool, sequence, tokens, self.hasher.block_size) {
                count(sequence, step);
                *budget -= tokens;
                at += 1;
                continue;
            }
            preempted = true;
            self.preempt_last();
        }
        preempted
    }

    fn preempt_last(&mut self) {
        if let Some(mut victim) = self.running.pop() {
            let blocks = victim.restart();
            self.pool.release(&blocks);
            self.waiting.push_front(victim);
            self.totals.preemptions += 1;
        }
    }

    fn schedule_waiting(&mut self, budget: &mut usize, step: &mut Step) {
        while *budget > 0 && self.running.len() < self.limits.max_num_seqs {
            let Some(mut sequence) = self.waiting.pop_front() else {
                return;
            };
            let block_size = self.hasher.block_size;
            let hits = self.pool.lookup(sequence.reusable_hashes(block_size));
            // The whole prompt must find room, or chunks of several prompts would block each other.
            let needed =
                sequence.len().div_ceil(block_size) - hits.len() + self.pool.free_among(&hits);
            if needed > self.pool.free_blocks() {
                self.waiting.push_front(sequence);
                return;
            }
            self.pool.touch(&hits);
            let held = hits.len() * block_size;
            sequence.computed = sequence.ready_tokens(held);
            sequence.filled = hits.len();
            sequence.blocks = hits;
            self.count_lookup(&mut sequence, held);
            let tokens = (sequence.len() - sequence.computed).min(*budget);
            let taken = take_blocks(&mut self.pool, &mut sequence, tokens, block_size);
            debug_assert!(taken, "room for the whole prompt was checked");
            count(&sequence, step);
            *budget -= tokens;
            self.running.push(sequence);
        }
    }

    /// Counts a prompt once, however often it is preempted.
    fn count_lookup(&mut self, sequence: &mut Sequence, held: usize) {
        if sequence.cached_tokens.is_none() {
            sequence.cached_tokens = Some(sequence.computed);
            self.totals.prompt_tokens += sequence.len() as u64;
            self.totals.prefix_queries += sequence.len() as u64;
            self.totals.prefix_hits += held as u64;
        }
    }
}

/// Takes the blocks for `tokens` more tokens and announces those that become full; tells whether there was room.
fn take_blocks(
    pool: &mut BlockPool,
    sequence: &mut Sequence,
    tokens: usize,
    block_size: usize,
) -> bool {
    let end = sequence.computed + tokens;
    let missing = end
        .div_ceil(block_size)
        .saturating_sub(sequence.blocks.len());
    let Some(new) = pool.allocate(missing) else {
        return false;
    };
    sequence.blocks.extend(new);
    sequence.scheduled = tokens;
    let full = end / block_size;
    if full > sequence.filled {
        let stored = sequence.stored_blocks(full, block_size);
        pool.fill(&sequence.blocks[sequence.filled..full], stored);
        sequence.filled = full;
    }
    true
}

fn count(sequence: &Sequence, step: &mut Step) {
    if sequence.decodes() {
        step.decodes += 1;
    } else {
        step.prefill_tokens += sequence.scheduled;
    }
}

#[cfg(test)]
mod tests;
