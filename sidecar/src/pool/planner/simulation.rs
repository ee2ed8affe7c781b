//! A pool that serves a recorded load, in steps of ten seconds, to try planners on.

use std::time::{Duration, Instant};

use kvlane::{Role, WorkerId};

use super::{MemberState, Planner, PlannerConfig, PoolMember, PoolSample, Proposal, RoleLoad};

/// Requests, input and output tokens of ten seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Step {
    pub(super) input_tokens: f64,
    pub(super) output_tokens: f64,
}

pub(super) const STEP: Duration = Duration::from_secs(10);

/// What one worker can do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speeds {
    pub(super) prefill_tokens_per_second: f64,
    pub(super) decode_tokens_per_second: f64,
    pub(super) start: Duration,
    pub(super) flip: Duration,
}

/// Reads a trace of `requests,input_tokens,output_tokens`.
pub(super) fn read(csv: &str) -> Vec<Step> {
    let number = |field: Option<&str>| field.unwrap().parse::<f64>().unwrap();
    csv.lines()
        .skip(1)
        .map(|line| {
            let mut fields = line.split(',').skip(1);
            Step {
                input_tokens: number(fields.next()),
                output_tokens: number(fields.next()),
            }
        })
        .collect()
}

/// What happened to a pool.
#[derive(Clone, Debug, Default)]
pub(super) struct Account {
    /// Time, role and +1 or −1 for each worker that came or went, in order.
    pub(super) changes: Vec<(Duration, Role, i32)>,
    /// Steps in which the first token came later than its target.
    pub(super) late_steps: usize,
    pub(super) steps: usize,
    /// Sum over steps of the workers paid for.
    pub(super) worker_steps: usize,
    pub(super) most_workers: usize,
    pub(super) flips: usize,
}

impl Account {
    /// Counts changes that undo a change of the same role within `span`.
    pub(super) fn reversals(&self, span: Duration) -> usize {
        let undone = |(number, (at, role, by)): (usize, &(Duration, Role, i32))| {
            self.changes[..number]
                .iter()
                .rev()
                .find(|(_, other, _)| other == role)
                .is_some_and(|(before, _, earlier)| {
                    earlier.signum() != by.signum() && *at - *before < span
                })
        };
        self.changes
            .iter()
            .enumerate()
            .filter(|change| undone(*change))
            .count()
    }

    pub(super) fn mean_workers(&self) -> f64 {
        self.worker_steps as f64 / self.steps as f64
    }
}

struct Pool {
    speeds: Speeds,
    members: Vec<(PoolMember, Instant)>,
    names: u32,
    backlogs: [f64; 2],
}

/// Plays a load against a pool of `prefill` and `decode` workers that obeys the planner.
pub(super) fn play(
    load: &[Step],
    speeds: Speeds,
    config: PlannerConfig,
    (prefill, decode): (u32, u32),
) -> Account {
    let ttft_objective = config.ttft_objective_seconds;
    let mut planner = Planner::new(config).unwrap();
    let begin = Instant::now();
    let mut pool = Pool {
        speeds,
        members: Vec::new(),
        names: 0,
        backlogs: [0.0; 2],
    };
    (0..prefill).for_each(|_| pool.start(Role::Prefill, begin));
    (0..decode).for_each(|_| pool.start(Role::Decode, begin));
    let mut account = Account::default();
    for (number, step) in load.iter().enumerate() {
        let passed = STEP * u32::try_from(number).unwrap();
        let now = begin + passed;
        let sample = pool.serve(*step, now);
        let late = sample
            .prefill
            .ttft_seconds
            .is_some_and(|seconds| seconds > ttft_objective);
        account.late_steps += usize::from(late);
        account.steps += 1;
        account.worker_steps += pool.members.len();
        account.most_workers = account.most_workers.max(pool.members.len());
        let plan = planner.plan(&sample, now);
        assert!(pool.members.len() <= 1_024);
        for proposal in plan.proposals {
            pool.obey(&proposal, passed, now, &mut account);
        }
    }
    account
}

impl Pool {
    fn start(&mut self, role: Role, ready: Instant) {
        self.names += 1;
        let member = PoolMember {
            id: WorkerId::new(&format!("w{:04}", self.names)).unwrap(),
            role,
            flippable: true,
            state: MemberState::Starting,
            active_requests: 0,
        };
        self.members.push((member, ready));
    }

    fn serve(&mut self, step: Step, now: Instant) -> PoolSample {
        for (member, ready) in &mut self.members {
            if *ready <= now {
                member.state = MemberState::Ready;
            }
        }
        let work = [
            step.input_tokens / self.speeds.prefill_tokens_per_second,
            step.output_tokens / self.speeds.decode_tokens_per_second,
        ];
        let seconds = STEP.as_secs_f64();
        let mut loads = [RoleLoad::default(); 2];
        for (at, role) in [Role::Prefill, Role::Decode].into_iter().enumerate() {
            let ready = |(member, _): &&(PoolMember, Instant)| {
                member.role == role && member.state == MemberState::Ready
            };
            let ready = self.members.iter().filter(ready).count() as f64;
            let capacity = ready * seconds;
            self.backlogs[at] = (self.backlogs[at] + work[at] - capacity).max(0.0);
            let waits = self.backlogs[at] / ready.max(1.0);
            loads[at] = RoleLoad {
                offered_workers: work[at] / seconds,
                backlog_seconds: self.backlogs[at],
                ..RoleLoad::default()
            };
            match role {
                Role::Prefill => loads[at].ttft_seconds = Some(0.2 + waits),
                Role::Decode => {
                    let busy = (work[at] / capacity.max(1.0)).min(1.0);
                    loads[at].itl_seconds = Some(0.02 + 0.04 * busy);
                    loads[at].kv_use = 0.8 * busy;
                }
                Role::Both => {}
            }
        }
        PoolSample {
            members: self
                .members
                .iter()
                .map(|(member, _)| member.clone())
                .collect(),
            prefill: loads[0],
            decode: loads[1],
            both: RoleLoad::default(),
        }
    }

    fn obey(&mut self, proposal: &Proposal, passed: Duration, now: Instant, account: &mut Account) {
        match proposal {
            Proposal::Start { role, count, .. } => {
                for _ in 0..*count {
                    self.start(*role, now + self.speeds.start);
                    account.changes.push((passed, *role, 1));
                }
            }
            Proposal::Stop { worker, role } => {
                self.members.retain(|(member, _)| member.id != *worker);
                account.changes.push((passed, *role, -1));
            }
            Proposal::Flip {
                worker, from, to, ..
            } => {
                let ready = now + self.speeds.flip;
                for (member, since) in &mut self.members {
                    if member.id == *worker {
                        member.role = *to;
                        member.state = MemberState::Starting;
                        *since = ready;
                    }
                }
                account.flips += 1;
                account.changes.push((passed, *from, -1));
                account.changes.push((passed, *to, 1));
            }
        }
    }
}
