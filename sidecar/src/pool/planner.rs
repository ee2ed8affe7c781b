//! Proposes role changes and replica counts from load and latency targets.
//!
//! Pure: a sample of the pool goes in with its time, a plan comes out; whoever calls it starts, stops and re-labels
//! workers, or only writes down what it would do. Three things keep it from swinging:
//!
//! * a dead band: a role grows only when its demand exceeds what it has by a tolerance, and shrinks only to a size that the
//!   demand would leave by a tolerance as well;
//! * windows: it grows by the least demand of the latest half minute, so a burst that passes asks for nothing, and shrinks by
//!   the greatest of the latest five minutes;
//! * cool-downs: after a change of a role its next one waits until the effect can be seen.
//!
//! # Source
//! Windows and tolerance are those of Kubernetes' horizontal autoscaler (tolerance 0.1, 300 s to shrink); growing waits for
//! 30 s where it waits for none, since a start of an engine costs minutes.

mod config;
mod demand;

use std::time::{Duration, Instant};

use kvlane::{Role, WorkerId};
use serde::Serialize;

pub use config::{Bounds, PlannerConfig, PlannerMode};
use demand::{Demand, History};

/// One look at the pool.
#[derive(Clone, Debug, Default)]
pub struct PoolSample {
    /// Every worker that is not gone.
    pub members: Vec<PoolMember>,
    /// Load of the workers that process prompts only.
    pub prefill: RoleLoad,
    /// Load of the workers that decode only.
    pub decode: RoleLoad,
    /// Load of the workers that do both.
    pub both: RoleLoad,
}

/// One worker of a sample.
#[derive(Clone, Debug)]
pub struct PoolMember {
    /// Its name.
    pub id: WorkerId,
    /// What it does now.
    pub role: Role,
    /// It can do both, and its role may be changed between prefill and decode.
    pub flippable: bool,
    /// How far it is.
    pub state: MemberState,
    /// Requests on it; the emptiest worker is changed or stopped first.
    pub active_requests: usize,
}

/// How far a worker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// Takes requests.
    Ready,
    /// Is being started, or is changing to the role that it is listed with.
    Starting,
    /// Takes no more requests and stops when those it has are done; no longer counted.
    Draining,
}

/// Load of all workers of one role together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RoleLoad {
    /// Work that came in since the last sample, in seconds of one worker for each second: 2.5 keeps two and a half workers
    /// busy.
    pub offered_workers: f64,
    /// Work that waits, in seconds of one worker.
    pub backlog_seconds: f64,
    /// Share of KV blocks in use, 0 to 1, mean of the role's workers.
    pub kv_use: f64,
    /// Time to the first token, 90th percentile, where the role has a part in it.
    pub ttft_seconds: Option<f64>,
    /// Time between two tokens, 90th percentile, where the role has a part in it.
    pub itl_seconds: Option<f64>,
}

/// What should be, and what to do about it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PoolPlan {
    /// Of each role with workers or a minimum: what it has, what it should have and why.
    pub roles: Vec<RolePlan>,
    /// What to do now.
    pub proposals: Vec<Proposal>,
    /// Nothing of it is to be carried out.
    pub dry_run: bool,
}

impl PoolPlan {
    /// Returns how many workers a role should have, for an autoscaler that is told by a metric.
    #[must_use]
    pub fn desired(&self, role: Role) -> u32 {
        let plan = self.roles.iter().find(|plan| plan.role == role);
        plan.map_or(0, |plan| plan.desired)
    }
}

/// The size of one role.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RolePlan {
    /// The role.
    pub role: Role,
    /// Workers that are ready or starting.
    pub current: u32,
    /// Workers that it should have.
    pub desired: u32,
    /// Workers that the latest sample would keep at their target.
    pub demand_workers: f64,
    /// What determines the demand.
    pub cause: Cause,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Proposal {
    /// Drain the worker and give it another role.
    Flip {
        /// The worker.
        worker: WorkerId,
        /// Its role.
        from: Role,
        /// Its next role.
        to: Role,
        /// Why the other role needs it.
        cause: Cause,
    },
    /// Start workers.
    Start {
        /// Their role.
        role: Role,
        /// How many.
        count: u32,
        /// Why.
        cause: Cause,
    },
    /// Drain the worker and stop it.
    Stop {
        /// The worker.
        worker: WorkerId,
        /// Its role.
        role: Role,
    },
}

/// What asks for workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The configured minimum.
    Minimum,
    /// Work that comes in.
    Load,
    /// Work that waits.
    Backlog,
    /// KV blocks in use.
    KvUse,
    /// A first token later than its target.
    Ttft,
    /// A gap between tokens longer than its target.
    Itl,
}

/// Proposes; holds what it has seen and when it last changed something.
#[derive(Debug)]
pub struct Planner {
    config: PlannerConfig,
    roles: [RoleState; 3],
    last_flip: Option<Instant>,
}

#[derive(Debug)]
struct RoleState {
    role: Role,
    history: History,
    last_change: Option<Instant>,
    last_start: Option<Instant>,
}

impl Planner {
    /// Creates a planner that has seen nothing.
    ///
    /// # Errors
    /// As [`PlannerConfig::validate`].
    pub fn new(config: PlannerConfig) -> kvlane::Result<Self> {
        config.validate()?;
        let state = |role| RoleState {
            role,
            history: History::default(),
            last_change: None,
            last_start: None,
        };
        Ok(Self {
            config,
            roles: [state(Role::Prefill), state(Role::Decode), state(Role::Both)],
            last_flip: None,
        })
    }

    /// Takes in a sample and plans. Call it every few seconds; samples that are not later than the one before are planned
    /// with the time of that one.
    ///
    /// Proposals are taken to be carried out: the role's cool-down begins, in dry-run mode as well, so that the same
    /// proposal does not come with every sample.
    pub fn plan(&mut self, sample: &PoolSample, now: Instant) -> PoolPlan {
        let mut sizes = self.sizes(sample, now);
        let mut proposals = Vec::new();
        self.propose_flip(sample, &mut sizes, now, &mut proposals);
        self.propose_starts(sample, &sizes, now, &mut proposals);
        self.propose_stops(sample, &sizes, now, &mut proposals);
        let shown = |size: &&Size| size.plan.current > 0 || size.plan.desired > 0;
        PoolPlan {
            roles: sizes.iter().filter(shown).map(|size| size.plan).collect(),
            proposals,
            dry_run: self.config.mode == PlannerMode::DryRun,
        }
    }

    fn sizes(&mut self, sample: &PoolSample, now: Instant) -> [Size; 3] {
        let config = &self.config;
        let loads = [sample.prefill, sample.decode, sample.both];
        let mut at = 0;
        self.roles.each_mut().map(|state| {
            let load = loads[at];
            at += 1;
            let count = |wanted: MemberState| {
                let is = |member: &&PoolMember| member.role == state.role && member.state == wanted;
                u32::try_from(sample.members.iter().filter(is).count()).unwrap_or(u32::MAX)
            };
            let ready = count(MemberState::Ready);
            let current = ready + count(MemberState::Starting);
            let demand = Demand::of(&load, ready, config);
            state.history.push(now, demand.workers);
            Size::new(state, current, demand, config, now)
        })
    }

    /// Moves one worker from a role that can spare it to one that needs it.
    fn propose_flip(
        &mut self,
        sample: &PoolSample,
        sizes: &mut [Size; 3],
        now: Instant,
        proposals: &mut Vec<Proposal>,
    ) {
        let cool_down = self.config.flip_cool_down();
        if is_recent(self.last_flip, cool_down, now) {
            return;
        }
        for (needy, donor) in [(0, 1), (1, 0)] {
            let needs = sizes[needy].lacking() > 0 && sizes[donor].spare > 0;
            if !needs || self.is_cooling(needy, now) || self.is_cooling(donor, now) {
                continue;
            }
            let (from, to) = (self.roles[donor].role, self.roles[needy].role);
            let Some(worker) = emptiest(sample, from, |member| member.flippable) else {
                continue;
            };
            proposals.push(Proposal::Flip {
                worker: worker.id.clone(),
                from,
                to,
                cause: sizes[needy].plan.cause,
            });
            self.last_flip = Some(now);
            self.changed(needy, now);
            self.changed(donor, now);
            sizes[needy].plan.current += 1;
            sizes[donor].plan.current -= 1;
            sizes[donor].plan.desired = sizes[donor].plan.desired.min(sizes[donor].plan.current);
            return;
        }
    }

    fn propose_starts(
        &mut self,
        sample: &PoolSample,
        sizes: &[Size; 3],
        now: Instant,
        proposals: &mut Vec<Proposal>,
    ) {
        let members = u32::try_from(sample.members.len()).unwrap_or(u32::MAX);
        let mut room = self.config.max_workers.saturating_sub(members);
        for (at, size) in sizes.iter().enumerate() {
            // A missing minimum waits for no other change of its role: a worker has died.
            let urgent = size.plan.current < self.config.bounds(size.plan.role).min;
            let waits = if urgent {
                is_recent(self.roles[at].last_start, self.config.cool_down(), now)
            } else {
                self.is_cooling(at, now)
            };
            if waits {
                continue;
            }
            // Growth beyond doubling rests on a measurement that the growth itself changes.
            let count = size.lacking().min(size.plan.current.max(1)).min(room);
            if count == 0 {
                continue;
            }
            room -= count;
            proposals.push(Proposal::Start {
                role: size.plan.role,
                count,
                cause: size.plan.cause,
            });
            self.changed(at, now);
            self.roles[at].last_start = Some(now);
        }
    }

    fn propose_stops(
        &mut self,
        sample: &PoolSample,
        sizes: &[Size; 3],
        now: Instant,
        proposals: &mut Vec<Proposal>,
    ) {
        for (at, size) in sizes.iter().enumerate() {
            if size.plan.desired >= size.plan.current || self.is_cooling(at, now) {
                continue;
            }
            let role = size.plan.role;
            if let Some(worker) = emptiest(sample, role, |_| true) {
                proposals.push(Proposal::Stop {
                    worker: worker.id.clone(),
                    role,
                });
                self.changed(at, now);
            }
        }
    }

    fn is_cooling(&self, at: usize, now: Instant) -> bool {
        is_recent(self.roles[at].last_change, self.config.cool_down(), now)
    }

    fn changed(&mut self, at: usize, now: Instant) {
        self.roles[at].last_change = Some(now);
    }
}

fn is_recent(then: Option<Instant>, span: Duration, now: Instant) -> bool {
    then.is_some_and(|then| now.saturating_duration_since(then) < span)
}

/// Returns the ready worker of a role with the fewest requests, by name among equals.
fn emptiest(
    sample: &PoolSample,
    role: Role,
    may: impl Fn(&PoolMember) -> bool,
) -> Option<&PoolMember> {
    let ready = |member: &&PoolMember| {
        member.role == role && member.state == MemberState::Ready && may(member)
    };
    let members = sample.members.iter().filter(ready);
    members.min_by(|one, other| {
        let load = one.active_requests.cmp(&other.active_requests);
        load.then_with(|| one.id.cmp(&other.id))
    })
}

/// The size of a role, and how many it could give away.
#[derive(Clone, Copy, Debug)]
struct Size {
    plan: RolePlan,
    spare: u32,
}

impl Size {
    fn new(
        state: &RoleState,
        current: u32,
        demand: Demand,
        config: &PlannerConfig,
        now: Instant,
    ) -> Self {
        let bounds = config.bounds(state.role);
        let grown = state
            .history
            .least(now, config.up_window())
            .map_or(0, |least| grown(current, least, config.tolerance));
        let seen = |window| state.history.greatest(now, window);
        let shrunk = |greatest: Option<f64>| {
            greatest.map_or(current, |greatest| {
                shrunk(current, greatest, config.tolerance)
            })
        };
        let needed = if grown > current {
            grown
        } else {
            shrunk(seen(config.down_window()))
        };
        let desired = needed.clamp(bounds.min, bounds.max);
        let kept = shrunk(seen(config.flip_window())).max(bounds.min);
        let cause = if desired > needed && desired == bounds.min {
            Cause::Minimum
        } else {
            demand.cause
        };
        Self {
            plan: RolePlan {
                role: state.role,
                current,
                desired,
                demand_workers: demand.workers,
                cause,
            },
            spare: current.saturating_sub(kept),
        }
    }

    const fn lacking(&self) -> u32 {
        self.plan.desired.saturating_sub(self.plan.current)
    }
}

/// Returns the size that a demand asks for beyond the tolerance; the current size within it.
fn grown(current: u32, demand: f64, tolerance: f64) -> u32 {
    if demand <= f64::from(current) * (1.0 + tolerance) {
        return current;
    }
    whole(demand)
}

/// Returns the least size that a demand would not make grow again at once; the current size at most.
fn shrunk(current: u32, demand: f64, tolerance: f64) -> u32 {
    whole(demand / (1.0 - tolerance)).min(current)
}

/// Rounds up. Demands are bounded, so the conversion saturates only where a bound follows.
fn whole(workers: f64) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "saturates, and is clamped to the configured bounds afterwards"
    )]
    let whole = (workers - 1e-9).ceil() as u32;
    whole
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
