//! Conversations that grow turn by turn on workers, and the events that their engines would publish.
//!
//! A conversation starts with one of a few shared prompts and stores a turn at a time. Before a turn it moves to another
//! worker now and then, and the new worker then computes what it lacks of the whole prefix. An engine announces only blocks
//! that were not in its cache, so each held block was announced once.
//!
//! Generating allocates nothing that outlives the returned events: the growth of the heap is the subject's alone.

use fastrand::Rng;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Parameters of a workload.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Engines.
    pub workers: u32,
    /// Conversations alive at a time.
    pub conversations: u32,
    /// Blocks of a conversation after its last turn.
    pub blocks: u32,
    /// Turns; each adds an equal share of the blocks.
    pub turns: u32,
    /// Probability that a conversation moves to another worker before a turn after the first.
    pub migration: f64,
    /// Different shared prompts.
    pub shared_prompts: u32,
    /// Blocks of each shared prompt.
    pub shared_blocks: u32,
    /// Tokens of a block.
    pub tokens_per_block: u32,
    /// Seed of every random choice.
    pub seed: u64,
}

/// Turns that a conversation may be held by different workers in.
const MAX_HOLDERS: usize = 8;
/// Blocks that one removal names.
const REMOVED_PER_EVENT: u32 = 32;

impl Shape {
    /// Workload W: 64 workers, 10,000 conversations of 256 blocks, 8 turns, a tenth migrates, 20 system prompts.
    pub const W: Self = Self {
        workers: 64,
        conversations: 10_000,
        blocks: 256,
        turns: 8,
        migration: 0.1,
        shared_prompts: 20,
        shared_blocks: 16,
        tokens_per_block: 16,
        seed: 0x6b76_6c61_6e65,
    };

    /// W with one prompt of 224 blocks before every conversation.
    pub const HOT_PREFIX: Self = Self {
        shared_prompts: 1,
        shared_blocks: 224,
        ..Self::W
    };

    /// W on 1,024 workers with 30 % migration.
    pub const MANY_WORKERS: Self = Self {
        workers: 1_024,
        migration: 0.3,
        ..Self::W
    };

    /// Few conversations of 8,192 blocks on 64 workers.
    pub const DEEP: Self = Self {
        conversations: 200,
        blocks: 8_192,
        ..Self::W
    };

    /// Changes the number of conversations.
    #[must_use]
    pub const fn conversations(self, conversations: u32) -> Self {
        Self {
            conversations,
            ..self
        }
    }

    /// Returns the local hash of a block of a conversation.
    #[must_use]
    pub fn local(&self, conversation: u32, position: u32) -> u64 {
        let shared = position < self.shared_blocks;
        let owner = if shared {
            u64::from(conversation % self.shared_prompts)
        } else {
            u64::from(conversation) | 1 << 32
        };
        mix(mix(self.seed ^ owner) ^ u64::from(position))
    }

    /// Returns the engine's hashes of the first blocks of a conversation.
    #[must_use]
    pub fn keys(&self, conversation: u32, blocks: u32) -> Vec<u64> {
        engine_hashes((0..blocks).map(|position| self.local(conversation, position)))
    }

    /// Returns the local hashes of a whole conversation.
    #[must_use]
    pub fn prompt(&self, conversation: u32) -> Vec<u64> {
        (0..self.blocks)
            .map(|position| self.local(conversation, position))
            .collect()
    }

    /// Returns local hashes that are nobody's, from `shared` blocks of a conversation on.
    #[must_use]
    pub fn stranger(&self, conversation: u32, shared: u32) -> Vec<u64> {
        (0..self.blocks)
            .map(|position| match position < shared {
                true => self.local(conversation, position),
                false => mix(self.local(conversation, position) ^ 0x6d69_7373),
            })
            .collect()
    }
}

/// What an engine publishes, with hashes as plain integers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Consecutive blocks were stored.
    Store {
        /// Who stored them.
        worker: u32,
        /// Key of the block before the first.
        parent: Option<u64>,
        /// Local hashes.
        locals: Vec<u64>,
        /// Engine hashes, one a local hash.
        keys: Vec<u64>,
    },
    /// Blocks were evicted.
    Remove {
        /// Who evicted them.
        worker: u32,
        /// Engine hashes.
        keys: Vec<u64>,
    },
    /// Everything was dropped.
    Clear {
        /// Who dropped it.
        worker: u32,
    },
}

impl Event {
    /// Returns who published the event.
    #[must_use]
    pub const fn worker(&self) -> u32 {
        match self {
            Self::Store { worker, .. } | Self::Remove { worker, .. } | Self::Clear { worker } => {
                *worker
            }
        }
    }

    /// Returns the number of blocks that it names.
    #[must_use]
    pub const fn blocks(&self) -> usize {
        match self {
            Self::Store { keys, .. } | Self::Remove { keys, .. } => keys.len(),
            Self::Clear { .. } => 0,
        }
    }
}

/// Conversations and what each engine holds of them.
#[derive(Debug)]
pub struct Workload {
    shape: Shape,
    rng: Rng,
    conversations: Vec<Conversation>,
    order: Vec<u32>,
    /// Resident blocks of each shared prompt, by worker and prompt.
    shared: Vec<u32>,
    /// Held blocks by worker.
    held: Vec<u64>,
    next: u32,
}

#[derive(Clone, Copy, Debug)]
struct Conversation {
    number: u32,
    worker: u32,
    holders: [Holder; MAX_HOLDERS],
    holder_count: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Holder {
    worker: u32,
    blocks: u32,
}

impl Workload {
    /// Creates conversations that have not stored anything.
    #[must_use]
    pub fn new(shape: Shape) -> Self {
        let mut rng = Rng::with_seed(shape.seed);
        let conversations = (0..shape.conversations)
            .map(|number| Conversation::new(number, rng.u32(..shape.workers)))
            .collect();
        Self {
            shape,
            rng,
            conversations,
            order: (0..shape.conversations).collect(),
            shared: vec![0; (shape.workers * shape.shared_prompts) as usize],
            held: vec![0; shape.workers as usize],
            next: shape.conversations,
        }
    }

    /// Returns the parameters.
    #[must_use]
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the blocks held by all workers, each counted once a holder.
    #[must_use]
    pub fn held_blocks(&self) -> u64 {
        self.held.iter().sum()
    }

    /// Returns the blocks that one worker holds.
    #[must_use]
    pub fn held_by(&self, worker: u32) -> u64 {
        self.held[worker as usize]
    }

    /// Returns the blocks that the fullest worker holds.
    #[must_use]
    pub fn held_by_fullest(&self) -> u64 {
        self.held.iter().copied().max().unwrap_or(0)
    }

    /// Returns the number of a random conversation among those at `places` of the population.
    pub fn random(&mut self, places: std::ops::Range<u32>) -> u32 {
        let place = self.rng.u32(places);
        self.conversations[place as usize].number
    }

    /// Plays every turn of every conversation, in random order within a turn.
    pub fn fill(&mut self, mut publish: impl FnMut(Event)) {
        let shape = self.shape;
        self.place_all(|placement| {
            if let Some(event) = placement.event(&shape) {
                publish(event);
            }
        });
    }

    /// As [`fill`](Self::fill), but tells where each turn of each conversation went.
    pub fn place_all(&mut self, mut tell: impl FnMut(Placement)) {
        for turn in 1..=self.shape.turns {
            self.rng.shuffle(&mut self.order);
            for index in 0..self.order.len() {
                let place = self.order[index] as usize;
                tell(self.advance(place, turn));
            }
        }
    }

    /// Evicts the conversations at `places`, tail first, and plays new ones in their stead; shared prompts stay.
    pub fn churn(&mut self, places: std::ops::Range<u32>, mut publish: impl FnMut(Event)) {
        for place in places {
            self.evict(place, &mut publish);
            let worker = self.rng.u32(..self.shape.workers);
            self.conversations[place as usize] = Conversation::new(self.next, worker);
            self.next += 1;
            for turn in 1..=self.shape.turns {
                if let Some(event) = self.advance(place as usize, turn).event(&self.shape) {
                    publish(event);
                }
            }
        }
    }

    /// Evicts one conversation everywhere, tail first, except for its shared prompt.
    pub fn evict(&mut self, place: u32, mut publish: impl FnMut(Event)) {
        let shape = self.shape;
        let conversation = &mut self.conversations[place as usize];
        let number = conversation.number;
        let holders = conversation.holders;
        let count = std::mem::take(&mut conversation.holder_count);
        let keys = shape.keys(number, shape.blocks);
        for holder in &holders[..count] {
            let mut end = holder.blocks;
            while end > shape.shared_blocks {
                let start = end
                    .saturating_sub(REMOVED_PER_EVENT)
                    .max(shape.shared_blocks);
                let keys: Vec<u64> = keys[start as usize..end as usize]
                    .iter()
                    .rev()
                    .copied()
                    .collect();
                self.held[holder.worker as usize] -= keys.len() as u64;
                publish(Event::Remove {
                    worker: holder.worker,
                    keys,
                });
                end = start;
            }
        }
    }

    /// Forgets what a worker holds, as its engine did.
    pub fn clear(&mut self, worker: u32) -> Event {
        for conversation in &mut self.conversations {
            conversation.forget(worker);
        }
        let prompts = self.shape.shared_prompts as usize;
        let first = worker as usize * prompts;
        self.shared[first..first + prompts].fill(0);
        self.held[worker as usize] = 0;
        Event::Clear { worker }
    }

    /// Plays a turn of one conversation.
    fn advance(&mut self, place: usize, turn: u32) -> Placement {
        let shape = self.shape;
        let conversation = &mut self.conversations[place];
        if turn > 1 && self.rng.f64() < shape.migration {
            let away = self.rng.u32(1..shape.workers);
            conversation.worker = (conversation.worker + away) % shape.workers;
        }
        let (number, worker) = (conversation.number, conversation.worker);
        let end = shape.blocks * turn / shape.turns;
        let shared = (worker * shape.shared_prompts + number % shape.shared_prompts) as usize;
        let resident = self.shared[shared].min(end);
        let held = conversation.held_by(worker).max(resident);
        conversation.hold(worker, end);
        self.shared[shared] = self.shared[shared].max(end.min(shape.shared_blocks));
        self.held[worker as usize] += u64::from(end - held.min(end));
        Placement {
            worker,
            conversation: number,
            held,
            end,
        }
    }
}

/// Where a turn of a conversation went.
#[derive(Clone, Copy, Debug)]
pub struct Placement {
    /// The worker.
    pub worker: u32,
    /// The conversation.
    pub conversation: u32,
    /// Leading blocks that the worker held before.
    pub held: u32,
    /// Blocks of the turn's prompt.
    pub end: u32,
}

impl Placement {
    /// Returns what the engine publishes; nothing when it holds everything already.
    #[must_use]
    pub fn event(&self, shape: &Shape) -> Option<Event> {
        if self.held >= self.end {
            return None;
        }
        let mut keys = shape.keys(self.conversation, self.end);
        let new = keys.split_off(self.held as usize);
        Some(Event::Store {
            worker: self.worker,
            parent: keys.pop(),
            locals: (self.held..self.end)
                .map(|position| shape.local(self.conversation, position))
                .collect(),
            keys: new,
        })
    }
}

impl Conversation {
    fn new(number: u32, worker: u32) -> Self {
        Self {
            number,
            worker,
            holders: [Holder::default(); MAX_HOLDERS],
            holder_count: 0,
        }
    }

    fn held_by(&self, worker: u32) -> u32 {
        let holders = &self.holders[..self.holder_count];
        holders
            .iter()
            .find(|holder| holder.worker == worker)
            .map_or(0, |holder| holder.blocks)
    }

    fn hold(&mut self, worker: u32, blocks: u32) {
        let holders = &mut self.holders[..self.holder_count];
        if let Some(holder) = holders.iter_mut().find(|holder| holder.worker == worker) {
            holder.blocks = holder.blocks.max(blocks);
        } else {
            self.holders[self.holder_count] = Holder { worker, blocks };
            self.holder_count += 1;
        }
    }

    fn forget(&mut self, worker: u32) {
        let holders = &self.holders[..self.holder_count];
        if let Some(index) = holders.iter().position(|holder| holder.worker == worker) {
            self.holder_count -= 1;
            self.holders.swap(index, self.holder_count);
        }
    }
}

/// Returns the engine's hashes of a chain of blocks: a function of the prefix, equal on all workers as with equal seeds.
///
/// XXH3 over the parent's hash and the local hash, the first block's being its local hash. Any hash would do for most;
/// Dynamo's Positional finds nothing unless engines hash by this rule of its own.
#[must_use]
pub fn engine_hashes(locals: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut parent = None;
    locals
        .map(|local| {
            let hash = match parent {
                None => local,
                Some(parent) => {
                    let pair = u128::from(parent) | u128::from(local) << 64;
                    xxh3_64_with_seed(&pair.to_le_bytes(), 1_337)
                }
            };
            parent = Some(hash);
            hash
        })
        .collect()
}

/// Mixes the bits of an integer (the finaliser of `SplitMix64`).
#[must_use]
pub const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    const SMALL: Shape = Shape {
        workers: 6,
        conversations: 40,
        ..Shape::W
    };

    /// Applies events to plain sets, insisting on what a real engine promises.
    #[derive(Default)]
    struct Engines {
        held: HashMap<u32, HashSet<u64>>,
    }

    impl Engines {
        fn apply(&mut self, event: &Event) {
            let held = self.held.entry(event.worker()).or_default();
            match event {
                Event::Store { parent, keys, .. } => {
                    assert!(parent.is_none_or(|parent| held.contains(&parent)));
                    assert!(keys.iter().all(|&key| held.insert(key)), "announced twice");
                }
                Event::Remove { keys, .. } => {
                    assert!(keys.iter().all(|key| held.remove(key)), "removed twice");
                }
                Event::Clear { .. } => held.clear(),
            }
        }

        fn blocks(&self) -> u64 {
            self.held.values().map(|held| held.len() as u64).sum()
        }
    }

    #[test]
    fn engines_announce_only_what_they_lack() {
        for shape in [SMALL, Shape::HOT_PREFIX.conversations(40)] {
            let (mut workload, mut engines) = (Workload::new(shape), Engines::default());
            workload.fill(|event| engines.apply(&event));
            assert_eq!(engines.blocks(), workload.held_blocks());
            for place in 0..40 {
                let keys = shape.keys(place, shape.blocks);
                let last = keys.last().unwrap();
                assert!(engines.held.values().any(|held| held.contains(last)));
            }
        }
    }

    #[test]
    fn churn_keeps_residency_and_removal_ends_with_shared_prompts() {
        let (mut workload, mut engines) = (Workload::new(SMALL), Engines::default());
        workload.fill(|event| engines.apply(&event));
        let before = engines.blocks();
        for _ in 0..3 {
            workload.churn(0..40, |event| engines.apply(&event));
            assert_eq!(engines.blocks(), workload.held_blocks());
        }
        assert!(engines.blocks().abs_diff(before) < before / 5);
        for place in 0..40 {
            workload.evict(place, |event| engines.apply(&event));
        }
        // At most 20 prompts of 16 blocks on each of 6 workers.
        assert!(engines.blocks() > 0 && engines.blocks() <= 6 * 20 * 16);
        let event = workload.clear(3);
        engines.apply(&event);
        assert_eq!(workload.held_by(3), 0);
        assert_eq!(engines.blocks(), workload.held_blocks());
    }

    #[test]
    fn same_seed_gives_same_events() {
        let play = |shape| {
            let mut events = Vec::new();
            Workload::new(shape).fill(|event| events.push(event));
            events
        };
        assert_eq!(play(SMALL), play(SMALL));
        assert_ne!(play(SMALL), play(Shape { seed: 1, ..SMALL }));
    }
}
