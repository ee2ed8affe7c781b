//! What an engine holds for others: given out once, until its lease ends.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::content::Content;
use super::{Means, Moved, Refusal};
use crate::engine::kv::BlockId;
use crate::engine::runner::Inbox;

/// What one engine counted of handoffs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferStats {
    /// Prompts whose blocks are held now.
    pub held: usize,
    /// Of those, being read by another engine now.
    pub moving: usize,
    /// Prompts that were ever held.
    pub handed_over: u64,
    /// Of those, fetched by another engine.
    pub collected: u64,
    /// Of those, freed because their lease ended.
    pub expired: u64,
    /// Prompts that this engine fetched.
    pub fetched: u64,
    refused: [u64; Refusal::ALL.len()],
    moved: [(u64, Duration); Means::ALL.len()],
}

impl TransferStats {
    /// Returns how many fetches of this engine failed for a reason.
    #[must_use]
    pub fn refused(&self, reason: Refusal) -> u64 {
        let at = Refusal::ALL.iter().position(|other| *other == reason);
        at.map_or(0, |at| self.refused[at])
    }

    /// Returns how many bytes this engine fetched by some means, and how long that took: from asking until the last byte was
    /// there, without checking them.
    #[must_use]
    pub fn moved(&self, means: Means) -> (u64, Duration) {
        self.moved[means as usize]
    }
}

/// What is held under a name.
#[derive(Clone, Debug)]
pub(super) struct Description {
    pub(super) name: Arc<str>,
    pub(super) blocks: Vec<BlockId>,
    pub(super) tokens: usize,
    pub(super) expires_unix_seconds: f64,
}

/// The account of one engine. Blocks are freed in the step loop, which it tells.
#[derive(Debug)]
pub(in crate::engine) struct Ledger {
    engine_id: String,
    lease: Duration,
    inbox: Arc<Inbox>,
    changed: Notify,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<Arc<str>, Entry>,
    /// Names that are over, the oldest first.
    ended: VecDeque<(Arc<str>, Refusal)>,
    stats: TransferStats,
}

#[derive(Debug)]
struct Entry {
    content: Arc<Content>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// The prompt is being processed.
    Computing,
    Held {
        blocks: Vec<BlockId>,
        until: Instant,
    },
    /// Another engine reads them: the lease does not end meanwhile.
    Moving {
        blocks: Vec<BlockId>,
        /// If the fetch fails nobody will try again.
        is_last: bool,
    },
}

/// Ended names that are told apart from unknown ones.
const REMEMBERED: usize = 4096;

/// A prompt in processing that will be held. Dropping it before it is drops the claim.
#[derive(Debug)]
pub(in crate::engine) struct Preparing {
    ledger: Arc<Ledger>,
    name: Arc<str>,
}

impl Preparing {
    /// Returns the name under which it will be held.
    pub(in crate::engine) const fn name(&self) -> &Arc<str> {
        &self.name
    }
}

impl Drop for Preparing {
    fn drop(&mut self) {
        let mut state = self.ledger.state.lock();
        let computing = |entry: &Entry| matches!(entry.stage, Stage::Computing);
        if state.entries.get(&self.name).is_some_and(computing) {
            state.entries.remove(&self.name);
        }
    }
}

/// A fetch under way. Dropped before it is complete, the blocks are held on.
#[derive(Debug)]
pub(super) struct Moving {
    ledger: Arc<Ledger>,
    name: Arc<str>,
    pub(super) content: Arc<Content>,
    blocks: Vec<BlockId>,
    complete: bool,
}

impl Moving {
    /// Returns the numbers of its blocks.
    #[cfg_attr(
        not(feature = "nixl"),
        expect(dead_code, reason = "only NIXL reads blocks where they lie")
    )]
    pub(super) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Tells that everything has arrived: the blocks are freed.
    pub(super) fn collected(mut self) {
        self.complete = true;
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        self.ledger.end_move(&self.name, self.complete);
    }
}

impl Ledger {
    pub(super) fn new(lease: Duration, inbox: Arc<Inbox>) -> Self {
        Self {
            engine_id: format!("{:032x}", fastrand::u128(..)),
            lease,
            inbox,
            changed: Notify::new(),
            state: Mutex::default(),
        }
    }

    pub(super) fn engine_id(&self) -> &str {
        &self.engine_id
    }

    /// Returns the numbers.
    pub(in crate::engine) fn stats(&self) -> TransferStats {
        let state = self.state.lock();
        let held = |entry: &&Entry| !matches!(entry.stage, Stage::Computing);
        let moves = |entry: &&Entry| matches!(entry.stage, Stage::Moving { .. });
        TransferStats {
            held: state.entries.values().filter(held).count(),
            moving: state.entries.values().filter(moves).count(),
            ..state.stats
        }
    }

    /// Announces that a prompt will be held.
    pub(in crate::engine) fn prepare(
        self: &Arc<Self>,
        request_id: &str,
        content: Content,
    ) -> Preparing {
        // The client's own id is cut: it comes back in every message about it.
        let request_id: String = request_id.chars().take(64).collect();
        let name: Arc<str> = format!("{request_id}-0-{:016x}", fastrand::u64(..)).into();
        let entry = Entry {
            content: Arc::new(content),
            stage: Stage::Computing,
        };
        self.state.lock().entries.insert(Arc::clone(&name), entry);
        Preparing {
            ledger: Arc::clone(self),
            name,
        }
    }

    /// Takes in that a prompt was processed; false when nobody waits for it any more, and its blocks are to be freed.
    pub(in crate::engine) fn hold(&self, name: &Arc<str>, blocks: &[BlockId]) -> bool {
        let mut state = self.state.lock();
        let Some(entry) = state.entries.get_mut(name) else {
            return false;
        };
        entry.stage = Stage::Held {
            blocks: blocks.to_vec(),
            until: Instant::now() + self.lease,
        };
        state.stats.handed_over += 1;
        drop(state);
        self.changed.notify_one();
        true
    }

    pub(super) fn describe(&self, name: &str) -> Option<Description> {
        let state = self.state.lock();
        let (name, entry) = state.entries.get_key_value(name)?;
        let Stage::Held { blocks, until } = &entry.stage else {
            return None;
        };
        let left = until.saturating_duration_since(Instant::now());
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Some(Description {
            name: Arc::clone(name),
            blocks: blocks.clone(),
            tokens: entry.content.tokens(),
            expires_unix_seconds: (unix.unwrap_or_default() + left).as_secs_f64(),
        })
    }

    /// Begins a fetch of what is held under `name`, for an engine whose prompt has this digest.
    pub(super) fn begin_move(
        self: &Arc<Self>,
        engine_id: &str,
        name: &str,
        digest: u64,
    ) -> Result<Moving, Refusal> {
        if engine_id != self.engine_id {
            return Err(Refusal::OtherEngine);
        }
        let mut state = self.state.lock();
        let state = &mut *state;
        let Some((name, _)) = state.entries.get_key_value(name) else {
            let ended = state.ended.iter().find(|(ended, _)| **ended == *name);
            return Err(ended.map_or(Refusal::Unknown, |(_, reason)| *reason));
        };
        let name = Arc::clone(name);
        let Some(entry) = state.entries.get_mut(&name) else {
            return Err(Refusal::Unknown);
        };
        let Stage::Held { blocks, until } = &mut entry.stage else {
            return Err(match entry.stage {
                Stage::Moving { .. } => Refusal::Used,
                Stage::Computing | Stage::Held { .. } => Refusal::Unknown,
            });
        };
        if *until <= Instant::now() {
            return Err(Refusal::Expired);
        }
        if entry.content.digest() != digest {
            return Err(Refusal::Foreign);
        }
        let blocks = std::mem::take(blocks);
        Ok(self.moving(name, entry, blocks))
    }

    /// Keeps what is held under `name` from everybody, and its lease from ending, until what this returns is dropped.
    pub(super) fn keep(self: &Arc<Self>, name: &Arc<str>) -> Option<Moving> {
        let mut state = self.state.lock();
        let entry = state.entries.get_mut(name)?;
        let Stage::Held { blocks, .. } = &mut entry.stage else {
            return None;
        };
        let blocks = std::mem::take(blocks);
        Some(self.moving(Arc::clone(name), entry, blocks))
    }

    fn moving(self: &Arc<Self>, name: Arc<str>, entry: &mut Entry, blocks: Vec<BlockId>) -> Moving {
        entry.stage = Stage::Moving {
            blocks: blocks.clone(),
            is_last: false,
        };
        Moving {
            ledger: Arc::clone(self),
            name,
            content: Arc::clone(&entry.content),
            blocks,
            complete: false,
        }
    }

    fn end_move(&self, name: &Arc<str>, complete: bool) {
        let mut state = self.state.lock();
        let mut is_over = complete;
        if complete {
            state.stats.collected += 1;
            state.end(name, Refusal::Used);
        } else if let Some(entry) = state.entries.get_mut(name)
            && let Stage::Moving { blocks, is_last } = &mut entry.stage
        {
            is_over = *is_last;
            let blocks = std::mem::take(blocks);
            let until = Instant::now() + self.lease;
            entry.stage = Stage::Held { blocks, until };
            if is_over {
                state.end(name, Refusal::Unknown);
            }
        }
        drop(state);
        if is_over {
            self.inbox.free(Arc::clone(name));
        }
        self.changed.notify_one();
    }

    /// Counts how a fetch of this engine ended.
    pub(in crate::engine) fn count_fetch(&self, fetched: Result<Moved, Refusal>) {
        let mut state = self.state.lock();
        match fetched {
            Ok(moved) => {
                state.stats.fetched += 1;
                let (bytes, elapsed) = &mut state.stats.moved[moved.means as usize];
                *bytes += moved.bytes;
                *elapsed += moved.elapsed;
            }
            Err(reason) => {
                if let Some(at) = Refusal::ALL.iter().position(|other| *other == reason) {
                    state.stats.refused[at] += 1;
                }
            }
        }
    }

    /// Returns how what was held under `name` ended; `None` while it has not.
    pub(super) fn ended(&self, name: &str) -> Option<Refusal> {
        let state = self.state.lock();
        let ended = state.ended.iter().rev().find(|(ended, _)| **ended == *name);
        ended.map(|(_, reason)| *reason)
    }

    /// Frees what is held under `name`, which nobody will fetch; what is being fetched, when that fails.
    pub(super) fn give_up(&self, name: &Arc<str>) {
        let mut state = self.state.lock();
        match state.entries.get_mut(name).map(|entry| &mut entry.stage) {
            Some(Stage::Held { .. }) => {
                state.end(name, Refusal::Unknown);
                drop(state);
                self.inbox.free(Arc::clone(name));
            }
            Some(Stage::Moving { is_last, .. }) => *is_last = true,
            Some(Stage::Computing) | None => {}
        }
    }

    /// Ends the leases of what is held now, as if their time had run out.
    pub(in crate::engine) fn run_out(&self) {
        let now = Instant::now();
        for entry in self.state.lock().entries.values_mut() {
            if let Stage::Held { until, .. } = &mut entry.stage {
                *until = now;
            }
        }
        self.changed.notify_one();
    }

    /// Ends leases as they run out.
    pub(super) async fn end_leases(self: Arc<Self>, cancel: CancellationToken) {
        loop {
            let next = self.expire();
            let lease_ends = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = cancel.cancelled() => return,
                () = self.changed.notified() => {}
                () = lease_ends => {}
            }
        }
    }

    /// Frees what is over; returns when the next lease ends.
    fn expire(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut state = self.state.lock();
        let ends = |entry: &Entry| match entry.stage {
            Stage::Held { until, .. } => Some(until),
            Stage::Computing | Stage::Moving { .. } => None,
        };
        let over: Vec<Arc<str>> = state
            .entries
            .iter()
            .filter(|(_, entry)| ends(entry).is_some_and(|until| until <= now))
            .map(|(name, _)| Arc::clone(name))
            .collect();
        for name in over {
            state.stats.expired += 1;
            state.end(&name, Refusal::Expired);
            self.inbox.free(name);
        }
        state.entries.values().filter_map(ends).min()
    }
}

impl State {
    fn end(&mut self, name: &Arc<str>, reason: Refusal) {
        self.entries.remove(name);
        if self.ended.len() == REMEMBERED {
            self.ended.pop_front();
        }
        self.ended.push_back((Arc::clone(name), reason));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger(lease_ms: u64) -> Arc<Ledger> {
        let lease = Duration::from_millis(lease_ms);
        Arc::new(Ledger::new(lease, Arc::new(Inbox::default())))
    }

    fn held(ledger: &Arc<Ledger>, token: u32) -> (Arc<str>, u64) {
        let content = Content::of(&[token; 8], None, 4);
        let digest = content.digest();
        let preparing = ledger.prepare("cmpl-1", content);
        assert!(ledger.hold(preparing.name(), &[1, 2]));
        (Arc::clone(preparing.name()), digest)
    }

    #[test]
    fn what_is_held_is_given_out_once_and_to_its_own_prompt() {
        let ledger = ledger(60_000);
        let (name, digest) = held(&ledger, 1);
        let (_, other) = held(&ledger, 2);
        let id = ledger.engine_id().to_owned();
        let begin = |name: &str, digest| ledger.begin_move(&id, name, digest);
        assert_eq!(begin("x", digest).unwrap_err(), Refusal::Unknown);
        assert_eq!(begin(&name, other).unwrap_err(), Refusal::Foreign);
        let other_life = ledger.begin_move("other", &name, digest);
        assert_eq!(other_life.unwrap_err(), Refusal::OtherEngine);
        let broken = begin(&name, digest).unwrap();
        assert_eq!(begin(&name, digest).unwrap_err(), Refusal::Used);
        drop(broken);
        begin(&name, digest).unwrap().collected();
        assert_eq!(begin(&name, digest).unwrap_err(), Refusal::Used);
        let stats = ledger.stats();
        assert_eq!((stats.held, stats.handed_over, stats.collected), (1, 2, 1));
    }

    #[test]
    fn a_lease_ends_and_is_remembered() {
        let ledger = ledger(1);
        let (name, digest) = held(&ledger, 1);
        assert!(ledger.describe(&name).is_some());
        std::thread::sleep(Duration::from_millis(5));
        let id = ledger.engine_id().to_owned();
        let late = ledger.begin_move(&id, &name, digest);
        assert_eq!(late.unwrap_err(), Refusal::Expired);
        assert_eq!(ledger.expire(), None);
        assert_eq!((ledger.stats().held, ledger.stats().expired), (0, 1));
        let later = ledger.begin_move(&id, &name, digest);
        assert_eq!(later.unwrap_err(), Refusal::Expired);
    }

    #[test]
    fn what_was_given_up_while_it_moved_is_not_held_again() {
        let ledger = ledger(60_000);
        let (name, digest) = held(&ledger, 1);
        let id = ledger.engine_id().to_owned();
        let broken = ledger.begin_move(&id, &name, digest).unwrap();
        ledger.give_up(&name);
        assert_eq!((ledger.stats().held, ledger.stats().moving), (1, 1));
        drop(broken);
        assert_eq!((ledger.stats().held, ledger.stats().expired), (0, 0));
        let later = ledger.begin_move(&id, &name, digest);
        assert_eq!(later.unwrap_err(), Refusal::Unknown);
    }

    #[test]
    fn a_lease_that_runs_out_at_once_ends_with_the_next_look() {
        let ledger = ledger(60_000);
        let (name, digest) = held(&ledger, 1);
        ledger.run_out();
        assert_eq!(ledger.expire(), None);
        assert_eq!((ledger.stats().held, ledger.stats().expired), (0, 1));
        let late = ledger.begin_move(ledger.engine_id(), &name, digest);
        assert_eq!(late.unwrap_err(), Refusal::Expired);
    }

    #[test]
    fn a_claim_whose_client_left_holds_nothing() {
        let ledger = ledger(60_000);
        let preparing = ledger.prepare("cmpl-1", Content::of(&[1], None, 4));
        let name = Arc::clone(preparing.name());
        assert!(ledger.describe(&name).is_none());
        drop(preparing);
        assert!(!ledger.hold(&name, &[1]));
        assert_eq!(ledger.stats(), TransferStats::default());
    }
}
