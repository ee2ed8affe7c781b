//! Where the requests of a session went last.

use std::time::{Duration, Instant};

use hashbrown::HashMap;
use xxhash_rust::xxh3::xxh3_64;

use crate::ids::Slot;
use crate::sync::{Mutex, STRIPES, Shards};

use super::state::Target;

/// The last target of each session, by hash of the session's name.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    shards: Shards<Mutex<HashMap<u64, Last>>>,
}

#[derive(Clone, Copy, Debug)]
struct Last {
    slot: Slot,
    life: u64,
    used: Instant,
}

/// Sessions remembered at once; beyond, new ones get no preference until old ones are forgotten after the TTL.
const SESSIONS_KEPT: usize = 65_536;

impl Sessions {
    /// Returns the slot of a session's last target and the life of it, when it was used within `ttl`.
    pub(super) fn last(&self, session: &str, now: Instant, ttl: Duration) -> Option<(Slot, u64)> {
        let key = xxh3_64(session.as_bytes());
        let last = *self.shards.of(key).lock().get(&key)?;
        (now.saturating_duration_since(last.used) <= ttl).then_some((last.slot, last.life))
    }

    pub(super) fn note(&self, session: &str, target: &Target, now: Instant) {
        let key = xxh3_64(session.as_bytes());
        let mut shard = self.shards.of(key).lock();
        if shard.len() < SESSIONS_KEPT / STRIPES || shard.contains_key(&key) {
            let last = Last {
                slot: target.slot,
                life: target.life,
                used: now,
            };
            shard.insert(key, last);
        }
    }

    /// Forgets sessions that were not used within `ttl`.
    pub(super) fn forget(&self, now: Instant, ttl: Duration) {
        for shard in self.shards.iter() {
            let mut shard = shard.lock();
            shard.retain(|_, last| now.saturating_duration_since(last.used) <= ttl);
        }
    }
}
