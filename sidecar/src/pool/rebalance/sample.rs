//! What the planner is told of the pool: looks at every worker, several a second, added up to one sample a plan.
//!
//! # Source
//! A prompt worker computes one prompt after the other, so the share of looks at which it has prompts to compute is the work
//! that was offered to it, in workers. A decode worker is never idle while it has a stream; what it is offered is its streams
//! over those that it decodes within the target, which only a measurement can tell.

use std::collections::BTreeMap;
use std::time::Instant;

use kvlane::{Role, WorkerId};

use crate::app::App;
use crate::fleet::{Beat, Worker};
use crate::pool::member;
use crate::pool::planner::{MemberState, PoolMember, PoolSample, RoleLoad};

/// Label of a worker that can do both, and whose role may be changed: `true`.
pub const FLIPPABLE: &str = "kvlane.io/flippable";

/// One worker at one look.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Its place in the pool.
    pub member: PoolMember,
    /// Blocks of prompts that wait or are computed.
    pub prefill_blocks: f64,
    /// Share of its KV blocks that its requests need, when its capacity is known.
    pub kv_use: Option<f64>,
    /// What its requests showed since the last look.
    pub beat: Beat,
}

/// Adds looks up.
#[derive(Debug)]
pub struct Sampler {
    decode_streams: Option<f64>,
    looks: f64,
    sums: BTreeMap<WorkerId, Sums>,
    /// Blocks that a busy worker of a role computes from one look to the next, by the role's name; as learned so far.
    speeds: BTreeMap<&'static str, f64>,
}

/// What was seen of one worker.
#[derive(Debug)]
struct Sums {
    busy_looks: f64,
    streams: f64,
    kv_use: f64,
    beat: Beat,
    last: Seen,
}

/// Weight of the latest sample in a speed.
const NEWEST: f64 = 0.3;

impl Sampler {
    /// Creates a sampler that has seen nothing. `decode_streams`: streams that a worker decodes within the target, when known.
    #[must_use]
    pub const fn new(decode_streams: Option<f64>) -> Self {
        Self {
            decode_streams,
            looks: 0.0,
            sums: BTreeMap::new(),
            speeds: BTreeMap::new(),
        }
    }

    /// Takes in a look at all workers; they come at even distances.
    pub fn look(&mut self, workers: Vec<Seen>) {
        self.looks += 1.0;
        let mut before = std::mem::take(&mut self.sums);
        for seen in workers {
            let id = seen.member.id.clone();
            let mut sums = before.remove(&id).unwrap_or_else(|| Sums {
                busy_looks: 0.0,
                streams: 0.0,
                kv_use: 0.0,
                beat: Beat::default(),
                last: seen.clone(),
            });
            sums.busy_looks += f64::from(u8::from(seen.prefill_blocks > 0.0));
            sums.streams += seen.member.active_requests as f64;
            sums.kv_use += seen.kv_use.unwrap_or(0.0);
            sums.beat.add(&seen.beat);
            sums.last = seen;
            // Who is not seen any more is gone, with what it did.
            self.sums.insert(id, sums);
        }
    }

    /// Returns what was seen since the last call, and the seconds between two looks are `between`.
    pub fn take(&mut self, between: f64) -> PoolSample {
        let looks = std::mem::replace(&mut self.looks, 0.0).max(1.0);
        let sums = std::mem::take(&mut self.sums);
        let mut beats: BTreeMap<&'static str, Beat> = BTreeMap::new();
        for sums in sums.values() {
            let role = sums.last.member.role.name();
            beats.entry(role).or_default().add(&sums.beat);
        }
        let load = |sampler: &mut Self, role: Role| {
            let of: Vec<&Sums> = sums
                .values()
                .filter(|sums| sums.last.member.role == role)
                .collect();
            sampler.learn_speed(role, &of);
            sampler.load(role, &of, looks, between)
        };
        let mut sample = PoolSample {
            prefill: load(self, Role::Prefill),
            decode: load(self, Role::Decode),
            both: load(self, Role::Both),
            members: sums.values().map(|sums| sums.last.member.clone()).collect(),
        };
        let p90 = |role: Role, of: fn(&Beat) -> Option<f64>| beats.get(role.name()).and_then(of);
        let first_token = |beat: &Beat| beat.first_tokens.p90_seconds();
        let gap = |beat: &Beat| beat.gaps.p90_seconds();
        sample.both.ttft_seconds = p90(Role::Both, first_token);
        sample.both.itl_seconds = p90(Role::Both, gap);
        // The first token of a request that is split comes from its decode worker, and is late because of its prefill.
        sample.prefill.ttft_seconds = p90(Role::Decode, first_token);
        sample.decode.itl_seconds = p90(Role::Decode, gap);
        sample
    }

    fn learn_speed(&mut self, role: Role, workers: &[&Sums]) {
        let computed: u64 = workers.iter().map(|sums| sums.beat.computed_blocks).sum();
        let busy: f64 = workers.iter().map(|sums| sums.busy_looks).sum();
        if computed == 0 || busy == 0.0 {
            return;
        }
        let latest = computed as f64 / busy;
        let speed = self.speeds.entry(role.name()).or_insert(latest);
        *speed += (latest - *speed) * NEWEST;
    }

    fn load(&self, role: Role, workers: &[&Sums], looks: f64, between: f64) -> RoleLoad {
        let offered = |sums: &&Sums| {
            let prompts = sums.busy_looks / looks;
            let streams = sums.streams / looks / self.decode_streams.unwrap_or(f64::INFINITY);
            match role {
                Role::Prefill => prompts,
                Role::Decode => streams,
                Role::Both => prompts.max(streams),
            }
        };
        let waiting: f64 = workers.iter().map(|sums| sums.last.prefill_blocks).sum();
        let speed = self.speeds.get(role.name());
        let kv_use: f64 = workers.iter().map(|sums| sums.kv_use / looks).sum();
        RoleLoad {
            offered_workers: workers.iter().map(offered).sum(),
            // A decode worker's prompts are computed elsewhere.
            backlog_seconds: speed
                .filter(|_| role != Role::Decode)
                .map_or(0.0, |speed| waiting / speed * between),
            kv_use: kv_use / (workers.len() as f64).max(1.0),
            ttft_seconds: None,
            itl_seconds: None,
        }
    }
}

/// Looks at every worker that is not gone.
pub(super) fn see(app: &App, now: Instant) -> Vec<Seen> {
    let members = app.fleet.members();
    let infos = app.router.workers(now).into_iter();
    infos
        .filter_map(|info| {
            let worker = members.find(info.id.as_str())?;
            Some(Seen {
                member: PoolMember {
                    id: info.id,
                    role: info.role,
                    flippable: info
                        .labels
                        .get(FLIPPABLE)
                        .is_some_and(|value| value == "true"),
                    state: state_of(worker)?,
                    active_requests: info.active_requests,
                },
                prefill_blocks: info.prefill_blocks,
                kv_use: info.kv_capacity_blocks.map(|blocks| {
                    info.active_blocks as f64 / (blocks as f64 * f64::from(info.dp_ranks))
                }),
                beat: worker.pulse.take(),
            })
        })
        .collect()
}

/// One that is not well mostly comes back: it is counted, so that none is started in its stead before its source gives it up.
fn state_of(worker: &Worker) -> Option<MemberState> {
    match worker.state().0 {
        member::MemberState::Ready => Some(MemberState::Ready),
        member::MemberState::Starting | member::MemberState::Unhealthy => {
            Some(MemberState::Starting)
        }
        member::MemberState::Draining => Some(MemberState::Draining),
        member::MemberState::Gone => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fleet::Pulse;

    fn seen(id: &str, role: Role) -> Seen {
        Seen {
            member: PoolMember {
                id: WorkerId::new(id).unwrap(),
                role,
                flippable: false,
                state: MemberState::Ready,
                active_requests: 0,
            },
            prefill_blocks: 0.0,
            kv_use: None,
            beat: Beat::default(),
        }
    }

    #[test]
    fn the_share_of_busy_looks_is_what_prompt_workers_are_offered() {
        let mut sampler = Sampler::new(None);
        for look in 0..4 {
            let mut one = seen("p1", Role::Prefill);
            one.prefill_blocks = f64::from(look % 2);
            let mut two = seen("p2", Role::Prefill);
            two.prefill_blocks = 3.0;
            sampler.look(vec![one, two]);
        }
        let sample = sampler.take(0.25);
        assert!((sample.prefill.offered_workers - 1.5).abs() < 1e-9);
        assert_eq!(sample.members.len(), 2);
    }

    #[test]
    fn streams_count_against_what_a_worker_decodes() {
        let mut sampler = Sampler::new(Some(8.0));
        for _ in 0..3 {
            let mut one = seen("d1", Role::Decode);
            one.member.active_requests = 12;
            one.kv_use = Some(0.5);
            sampler.look(vec![one]);
        }
        let sample = sampler.take(0.25);
        assert!((sample.decode.offered_workers - 1.5).abs() < 1e-9);
        assert!((sample.decode.kv_use - 0.5).abs() < 1e-9);
        let sample = Sampler::new(None).take(0.25);
        assert_eq!(sample.decode, RoleLoad::default());
    }

    #[test]
    fn waiting_prompts_are_seconds_at_the_speed_that_was_seen() {
        let mut sampler = Sampler::new(None);
        let pulse = Pulse::default();
        pulse.computed(200.0);
        for look in 0..2 {
            let mut one = seen("p1", Role::Prefill);
            one.prefill_blocks = 50.0;
            if look == 0 {
                one.beat = pulse.take();
            }
            sampler.look(vec![one]);
        }
        // 200 blocks in two busy looks, so 50 take half a look of a quarter of a second.
        let sample = sampler.take(0.25);
        assert!((sample.prefill.backlog_seconds - 0.125).abs() < 1e-9);
    }

    #[test]
    fn a_late_first_token_of_split_requests_is_the_prompt_workers_matter() {
        let mut sampler = Sampler::new(None);
        let pulse = Pulse::default();
        pulse.first_token(Duration::from_secs(2));
        pulse.gap(Duration::from_millis(50));
        let mut decode = seen("d1", Role::Decode);
        decode.beat = pulse.take();
        sampler.look(vec![seen("p1", Role::Prefill), decode]);
        let sample = sampler.take(0.25);
        assert!(sample.prefill.ttft_seconds.unwrap() > 1.5);
        assert_eq!(sample.decode.ttft_seconds, None);
        assert!(sample.decode.itl_seconds.unwrap() > 0.04);
    }

    #[test]
    fn who_is_gone_is_not_in_the_sample() {
        let mut sampler = Sampler::new(None);
        sampler.look(vec![seen("b1", Role::Both), seen("b2", Role::Both)]);
        sampler.look(vec![seen("b2", Role::Both)]);
        let sample = sampler.take(0.25);
        assert_eq!(sample.members.len(), 1);
    }
}
