use std::time::{Duration, Instant};

use kvlane::{Role, WorkerId};
use proptest::prelude::*;

use super::simulation::{Account, STEP, Speeds, Step, play, read};
use super::*;

const AZURE: &str = include_str!("../../../tests/fixtures/traces/azure_llm_2023_conv_10s.csv");
const MOONCAKE: &str = include_str!("../../../tests/fixtures/traces/mooncake_conversation_10s.csv");

/// Ten minutes: what is undone sooner was not worth a start.
const SOON: Duration = Duration::from_secs(600);

fn speeds(prefill_tokens_per_second: f64, decode_tokens_per_second: f64) -> Speeds {
    Speeds {
        prefill_tokens_per_second,
        decode_tokens_per_second,
        start: Duration::from_secs(60),
        flip: Duration::from_secs(20),
    }
}

/// The same targets without anything that keeps them calm.
fn nervous() -> PlannerConfig {
    PlannerConfig {
        tolerance: 0.0,
        up_window_seconds: 0.0,
        down_window_seconds: 0.0,
        flip_window_seconds: 0.0,
        cool_down_seconds: 0.0,
        flip_cool_down_seconds: 0.0,
        ..calm()
    }
}

fn calm() -> PlannerConfig {
    PlannerConfig {
        mode: PlannerMode::Act,
        prefill: Bounds { min: 1, max: 64 },
        decode: Bounds { min: 1, max: 64 },
        ..PlannerConfig::default()
    }
}

fn report(name: &str, account: &Account) {
    println!(
        "{name}: {} changes, {} flips, {} undone, {:.1} % late, {:.1} workers (most {})",
        account.changes.len(),
        account.flips,
        account.reversals(SOON),
        100.0 * account.late_steps as f64 / account.steps as f64,
        account.mean_workers(),
        account.most_workers
    );
}

/// Name, load, speeds of the workers, and how many prefill and decode workers there are at first.
type Hour = (&'static str, Vec<Step>, Speeds, (u32, u32));

/// The recorded hours on workers slow enough to need some ten of them.
fn traces() -> [Hour; 2] {
    [
        ("azure", read(AZURE), speeds(1_500.0, 400.0), (6, 4)),
        ("mooncake", read(MOONCAKE), speeds(8_000.0, 400.0), (7, 4)),
    ]
}

#[test]
fn recorded_hours_are_followed_without_swinging() {
    for (name, load, speeds, size) in traces() {
        let account = play(&load, speeds, calm(), size);
        report(name, &account);
        assert_eq!(account.reversals(SOON), 0, "{name}");
        assert!(account.changes.len() <= 15, "{name}");
        assert!(account.late_steps * 20 <= account.steps, "{name}: 5 % late");
        // What was undone would have been seen: without windows the same targets swing all the time.
        let swinging = play(&load, speeds, nervous(), size);
        report("  without windows", &swinging);
        assert!(swinging.reversals(SOON) > 100, "{name}");
    }
}

#[test]
fn a_cold_pool_finds_its_size() {
    for (name, load, speeds, size) in traces() {
        let cold = play(&load, speeds, calm(), (1, 1));
        report(name, &cold);
        let warm = play(&load, speeds, calm(), size);
        assert!(cold.mean_workers() < 1.5 * warm.mean_workers(), "{name}");
        assert!(cold.late_steps * 10 <= cold.steps, "{name}: 10 % late");
        assert!(cold.reversals(SOON) <= 3, "{name}");
    }
}

#[test]
fn a_recorded_hour_is_played_the_same_again() {
    let [(_, load, speeds, size), _] = traces();
    let play = || play(&load, speeds, calm(), size);
    assert_eq!(play().changes, play().changes);
}

#[test]
fn a_fixed_pool_moves_workers_to_where_the_load_went() {
    // Half an hour of prompts, half an hour of answers; ten workers that nobody may add to.
    let step = |input_tokens, output_tokens| Step {
        input_tokens,
        output_tokens,
    };
    let mut load = vec![step(40_000.0, 4_000.0); 180];
    load.extend(vec![step(10_000.0, 16_000.0); 180]);
    let config = PlannerConfig {
        max_workers: 10,
        prefill: Bounds { min: 1, max: 10 },
        decode: Bounds { min: 1, max: 10 },
        ..calm()
    };
    // One worker does 1,000 tokens of prompts or 400 of answers a second: 4.0 and 1.0 busy, then 1.0 and 4.0.
    let account = play(&load, speeds(1_000.0, 400.0), config, (5, 5));
    report("shifting", &account);
    assert!(account.flips >= 2, "{account:?}");
    assert_eq!(account.reversals(Duration::from_secs(900)), 0);
    let late = account
        .changes
        .iter()
        .filter(|(at, role, by)| *at >= STEP * 180 && *role == Role::Decode && *by > 0);
    assert!(late.count() >= 2, "{account:?}");
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn member(name: &str, role: Role, active_requests: usize) -> PoolMember {
    PoolMember {
        id: WorkerId::new(name).unwrap(),
        role,
        flippable: true,
        state: MemberState::Ready,
        active_requests,
    }
}

fn busy(offered_workers: f64) -> RoleLoad {
    RoleLoad {
        offered_workers,
        ..RoleLoad::default()
    }
}

/// Shows the same sample every ten seconds and returns each plan.
fn watch(planner: &mut Planner, sample: &PoolSample, from: Instant, seconds: u64) -> Vec<PoolPlan> {
    (0..seconds / 10)
        .map(|step| planner.plan(sample, from + at(10 * step)))
        .collect()
}

fn proposals(plans: &[PoolPlan]) -> Vec<&Proposal> {
    plans.iter().flat_map(|plan| &plan.proposals).collect()
}

#[test]
fn a_dry_run_shows_what_acting_would_do_and_repeats_it_with_each_cool_down() {
    let sample = PoolSample {
        members: vec![member("a", Role::Both, 3)],
        both: busy(1.4),
        ..PoolSample::default()
    };
    let now = Instant::now();
    let run = |mode| {
        let config = PlannerConfig {
            mode,
            ..PlannerConfig::default()
        };
        watch(&mut Planner::new(config).unwrap(), &sample, now, 100)
    };
    let (shown, acted) = (run(PlannerMode::DryRun), run(PlannerMode::Act));
    assert!(shown.iter().all(|plan| plan.dry_run) && acted.iter().all(|plan| !plan.dry_run));
    assert_eq!(proposals(&shown), proposals(&acted));
    // 1.4 ÷ 0.7 = 2 workers, after 30 s, and again 60 s later.
    let start = Proposal::Start {
        role: Role::Both,
        count: 1,
        cause: Cause::Load,
    };
    assert_eq!(proposals(&shown), [&start, &start]);
    assert_eq!(shown[3].proposals.len(), 1);
    assert_eq!(shown[3].desired(Role::Both), 2);
    let json = serde_json::to_value(&shown[3]).unwrap();
    assert_eq!(json["proposals"][0]["action"], "start");
    assert_eq!(json["roles"][0]["cause"], "load");
}

#[test]
fn a_missing_minimum_is_started_at_once() {
    let config = PlannerConfig {
        decode: Bounds { min: 2, max: 9 },
        ..calm()
    };
    let sample = PoolSample {
        members: vec![member("p", Role::Prefill, 0), member("d", Role::Decode, 0)],
        ..PoolSample::default()
    };
    let now = Instant::now();
    let mut planner = Planner::new(config).unwrap();
    let plan = planner.plan(&sample, now);
    let start = Proposal::Start {
        role: Role::Decode,
        count: 1,
        cause: Cause::Minimum,
    };
    assert_eq!(plan.proposals, [start]);
    // It need not be visible at once that it starts.
    assert_eq!(planner.plan(&sample, now + at(10)).proposals, []);
    assert_eq!(planner.plan(&sample, now + at(60)).proposals.len(), 1);
}

#[test]
fn a_burst_that_passes_asks_for_nothing() {
    let mut planner = Planner::new(PlannerConfig::default()).unwrap();
    let now = Instant::now();
    for step in 0..60 {
        let sample = PoolSample {
            members: vec![member("a", Role::Both, 0), member("b", Role::Both, 0)],
            // Twenty seconds of every minute.
            both: busy(if step % 6 < 2 { 9.0 } else { 1.0 }),
            ..PoolSample::default()
        };
        let plan = planner.plan(&sample, now + at(10 * step));
        assert_eq!(plan.proposals, []);
    }
}

#[test]
fn a_late_first_token_asks_for_workers_only_where_they_are_busy() {
    let late = |offered| PoolSample {
        members: vec![member("a", Role::Both, 0), member("b", Role::Both, 0)],
        both: RoleLoad {
            ttft_seconds: Some(3.0),
            ..busy(offered)
        },
        ..PoolSample::default()
    };
    let now = Instant::now();
    let plans = |sample: &PoolSample| {
        let mut planner = Planner::new(PlannerConfig::default()).unwrap();
        let plans = watch(&mut planner, sample, now, 60);
        let last = plans.last().unwrap();
        (last.desired(Role::Both), last.roles[0].cause)
    };
    assert_eq!(plans(&late(1.2)), (3, Cause::Ttft));
    assert_eq!(plans(&late(0.1)).0, 2);
}

#[test]
fn every_signal_names_itself() {
    let now = Instant::now();
    let cases = [
        (
            RoleLoad {
                kv_use: 1.0,
                ..busy(0.5)
            },
            Cause::KvUse,
        ),
        (
            RoleLoad {
                backlog_seconds: 300.0,
                ..busy(0.1)
            },
            Cause::Backlog,
        ),
        (
            RoleLoad {
                itl_seconds: Some(0.2),
                ..busy(1.0)
            },
            Cause::Itl,
        ),
        (busy(5.0), Cause::Load),
    ];
    for (both, cause) in cases {
        let sample = PoolSample {
            members: vec![member("a", Role::Both, 0)],
            both,
            ..PoolSample::default()
        };
        let plans = watch(
            &mut Planner::new(PlannerConfig::default()).unwrap(),
            &sample,
            now,
            60,
        );
        let all = proposals(&plans);
        let is_expected = matches!(all[0], Proposal::Start { cause: named, .. } if *named == cause);
        assert!(is_expected, "{all:?} for {cause:?}");
    }
}

#[test]
fn the_emptiest_worker_that_may_is_moved() {
    let mut fixed = member("a", Role::Prefill, 0);
    fixed.flippable = false;
    let sample = |flippable: bool| PoolSample {
        members: [("b", 5), ("c", 2), ("d", 2)]
            .map(|(name, active)| PoolMember {
                flippable,
                ..member(name, Role::Prefill, active)
            })
            .into_iter()
            .chain([fixed.clone(), member("e", Role::Decode, 9)])
            .collect(),
        prefill: busy(0.5),
        decode: busy(1.4),
        ..PoolSample::default()
    };
    let config = PlannerConfig {
        max_workers: 5,
        ..calm()
    };
    let now = Instant::now();
    let mut planner = Planner::new(config.clone()).unwrap();
    let plans = watch(&mut planner, &sample(true), now, 200);
    let Proposal::Flip {
        worker, from, to, ..
    } = proposals(&plans)[0]
    else {
        panic!("{plans:?}");
    };
    assert_eq!(
        (worker.as_str(), *from, *to),
        ("c", Role::Prefill, Role::Decode)
    );
    let plans = watch(&mut Planner::new(config).unwrap(), &sample(false), now, 200);
    assert!(proposals(&plans).is_empty(), "{plans:?}");
}

proptest! {
    /// Under a load that stays, a pool settles: no role grows after it shrank, or shrinks after it grew.
    #[test]
    fn a_steady_load_is_answered_once(
        input in 100.0..60_000.0_f64,
        output in 100.0..60_000.0_f64,
        prefill in 1_u32..20,
        decode in 1_u32..20,
    ) {
        let load = vec![Step { input_tokens: 10.0 * input, output_tokens: 10.0 * output }; 400];
        // Twenty workers of each would do.
        let account = play(&load, speeds(4_500.0, 4_500.0), calm(), (prefill, decode));
        let settled = account.changes.last().map_or(Duration::ZERO, |(at, ..)| *at);
        prop_assert!(settled < Duration::from_secs(3_600), "{:?}", account);
        for role in [Role::Prefill, Role::Decode] {
            let signs: Vec<_> = account
                .changes
                .iter()
                .filter(|(_, of, _)| *of == role)
                .map(|(_, _, by)| by.signum())
                .collect();
            let turns = signs.windows(2).filter(|pair| pair[0] != pair[1]).count();
            // A queue that stood before the pool had its size may be drained by a worker too many.
            prop_assert!(turns <= 1, "{role:?} {signs:?}");
        }
    }

    /// Nothing that a scrape may bring makes it panic or go beyond its bounds.
    #[test]
    fn no_sample_breaks_the_planner(
        numbers in prop::collection::vec(prop::num::f64::ANY, 15),
        members in prop::collection::vec((0_u8..3, 0_u8..3, any::<bool>(), any::<usize>()), 0..20),
        gaps in prop::collection::vec(0_u64..1_000_000, 1..20),
    ) {
        let load = |at: usize| RoleLoad {
            offered_workers: numbers[at],
            backlog_seconds: numbers[at + 1],
            kv_use: numbers[at + 2],
            ttft_seconds: Some(numbers[at + 3]),
            itl_seconds: Some(numbers[at + 4]),
        };
        let members = members.iter().enumerate().map(|(at, (role, state, flippable, active))| {
            PoolMember {
                flippable: *flippable,
                state: [MemberState::Ready, MemberState::Starting, MemberState::Draining][usize::from(*state)],
                ..member(&format!("w{at}"), [Role::Prefill, Role::Decode, Role::Both][usize::from(*role)], *active)
            }
        });
        let sample = PoolSample {
            members: members.collect(),
            prefill: load(0),
            decode: load(5),
            both: load(10),
        };
        let mut planner = Planner::new(PlannerConfig { max_workers: 30, ..calm() }).unwrap();
        let mut now = Instant::now();
        for gap in gaps {
            now += Duration::from_millis(gap);
            let plan = planner.plan(&sample, now);
            let started: u32 = plan.proposals.iter().map(|proposal| match proposal {
                Proposal::Start { count, .. } => *count,
                Proposal::Flip { .. } | Proposal::Stop { .. } => 0,
            }).sum();
            prop_assert!(sample.members.len() + started as usize <= 30);
            prop_assert!(plan.roles.iter().all(|role| role.desired <= 1_024));
        }
    }
}
