//! Stores whose parent is unknown, kept whole until it appears.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher;
use std::time::{Duration, Instant};

use hashbrown::DefaultHashBuilder;

use crate::block::LocalBlockHash;
use crate::index::{EngineKey, StoredRun, Tier};

/// Pending runs of one slot, oldest first.
///
/// The two ordered sets find runs by a parent's and by a key's fingerprint; the key itself is compared in the run. They
/// are sets of tuples, so that one key announced a thousand times costs no more than a thousand keys.
#[derive(Debug, Default)]
pub(super) struct Pending {
    runs: BTreeMap<u64, PendingRun>,
    /// Parent's fingerprint, then the run's number.
    by_parent: BTreeSet<(u64, u64)>,
    /// Fingerprint and tier of a key that was not removed, then the run's number and the key's index in it.
    live: BTreeSet<(u64, Tier, u64, usize)>,
    next: u64,
    keys: usize,
    hasher: DefaultHashBuilder,
}

/// One store, as it was announced.
#[derive(Debug)]
pub(super) struct PendingRun {
    pub(super) parent: EngineKey,
    pub(super) keys: Vec<EngineKey>,
    pub(super) local_hashes: Vec<LocalBlockHash>,
    pub(super) unit: usize,
    pub(super) tier: Tier,
    pub(super) confirmed: bool,
    /// Indices of keys that were removed since, in order.
    pub(super) dead: BTreeSet<usize>,
    since: Instant,
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    pub(super) const fn keys(&self) -> usize {
        self.keys
    }

    /// Estimates the memory, in bytes: what a key with its fingerprints and its hash takes.
    pub(super) const fn bytes(&self) -> usize {
        const KEY: usize = size_of::<EngineKey>()
            + size_of::<LocalBlockHash>()
            + 2 * size_of::<(u64, Tier, u64, usize)>();
        self.keys * KEY
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = &PendingRun> {
        self.runs.values()
    }

    /// Keeps a run, the youngest now.
    pub(super) fn push(&mut self, parent: &EngineKey, run: &StoredRun<'_>, now: Instant) {
        let number = self.next;
        self.next += 1;
        self.by_parent.insert((self.fingerprint(parent), number));
        for (index, key) in run.keys.iter().enumerate() {
            let entry = (self.fingerprint(key), run.tier, number, index);
            self.live.insert(entry);
        }
        self.keys += run.keys.len();
        let run = PendingRun {
            parent: parent.clone(),
            keys: run.keys.to_vec(),
            local_hashes: run.local_hashes.to_vec(),
            unit: run.blocks_per_key,
            tier: run.tier,
            confirmed: true,
            dead: BTreeSet::new(),
            since: now,
        };
        self.runs.insert(number, run);
    }

    /// Drops the oldest runs until at most `keys` keys are left, returning how many keys went.
    pub(super) fn shrink_to(&mut self, keys: usize) -> usize {
        let before = self.keys;
        while self.keys > keys
            && let Some((&oldest, _)) = self.runs.first_key_value()
        {
            self.take(oldest);
        }
        before - self.keys
    }

    /// Drops the oldest runs while they are older than `max_age`, returning how many keys went.
    pub(super) fn expire(&mut self, now: Instant, max_age: Duration) -> usize {
        let before = self.keys;
        while let Some((&oldest, run)) = self.runs.first_key_value()
            && now.saturating_duration_since(run.since) > max_age
        {
            self.take(oldest);
        }
        before - self.keys
    }

    /// Drops the runs that `stays` does not select.
    pub(super) fn retain(&mut self, stays: impl Fn(&PendingRun) -> bool) {
        let goes = self.runs.iter().filter(|(_, run)| !stays(run));
        let goes: Vec<u64> = goes.map(|(&number, _)| number).collect();
        for number in goes {
            self.take(number);
        }
    }

    pub(super) fn doubt(&mut self) {
        for run in self.runs.values_mut() {
            run.confirmed = false;
        }
    }

    /// Adds the numbers of the runs that wait for `parent` to `ready`.
    pub(super) fn waiting(&self, parent: &EngineKey, ready: &mut BTreeSet<u64>) {
        let print = self.fingerprint(parent);
        let same_print = self.by_parent.range((print, 0)..=(print, u64::MAX));
        ready.extend(
            same_print
                .map(|&(_, number)| number)
                .filter(|number| self.runs[number].parent == *parent),
        );
    }

    /// Marks the oldest announcement of `key` in `tier` as removed, telling whether there was one.
    pub(super) fn remove(&mut self, key: &EngineKey, tier: Tier) -> bool {
        let print = self.fingerprint(key);
        let range = (print, tier, 0, 0)..=(print, tier, u64::MAX, usize::MAX);
        let mut same_print = self.live.range(range).copied();
        let oldest =
            same_print.find(|&(_, _, number, index)| self.runs[&number].keys[index] == *key);
        let Some(entry @ (_, _, number, index)) = oldest else {
            return false;
        };
        self.live.remove(&entry);
        if let Some(run) = self.runs.get_mut(&number) {
            run.dead.insert(index);
        }
        true
    }

    /// Takes a run out.
    pub(super) fn take(&mut self, number: u64) -> Option<PendingRun> {
        let run = self.runs.remove(&number)?;
        self.by_parent
            .remove(&(self.fingerprint(&run.parent), number));
        for (index, key) in run.keys.iter().enumerate() {
            let entry = (self.fingerprint(key), run.tier, number, index);
            self.live.remove(&entry);
        }
        self.keys -= run.keys.len();
        Some(run)
    }

    fn fingerprint(&self, key: &EngineKey) -> u64 {
        self.hasher.hash_one(key)
    }
}
