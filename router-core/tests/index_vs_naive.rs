//! The radix tree answers exactly like the reference model, after every one of many random operations.
//!
//! The number of scenarios comes from `KVLANE_PROPTEST_CASES` (10,000 by default).

mod index_model;

use index_model::{Keys, Op, Path, Reached, SLOTS, To, World};
use kvlane::index::Tier;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn radix_and_naive_agree_after_every_operation(
        (max_run_blocks, probes, ops) in scenario(),
    ) {
        World::new(max_run_blocks, &probes).run(&ops);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases() / 10,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// What the fuzz target does, so that its decoder is known to work wherever the tests run.
    #[test]
    fn any_bytes_are_a_scenario_on_which_they_agree(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        index_model::check_bytes(&bytes);
    }
}

/// Guards the first test: scenarios that never attach an orphan would prove nothing about orphans.
#[test]
fn random_scenarios_reach_every_situation() {
    let mut runner = TestRunner::deterministic();
    let mut sum = World::new(3, &[]);
    for _ in 0..300 {
        let (max_run_blocks, probes, ops) = scenario().new_tree(&mut runner).unwrap().current();
        let mut world = World::new(max_run_blocks, &probes);
        world.reached = sum.reached.clone();
        world.run(&ops);
        sum = world;
    }
    let Reached {
        stored,
        removed,
        doubted,
        overlap,
    } = &sum.reached;
    for (what, times) in [
        ("placed", stored.placed),
        ("repeated", stored.repeated),
        ("orphaned", stored.orphaned),
        ("attached", stored.attached),
        ("refused", stored.refused),
        ("dropped", stored.dropped),
        ("removed", removed.removed),
        ("unknown", removed.unknown),
        ("doubted", *doubted),
        ("device blocks", overlap.device as usize),
        ("host blocks", overlap.host as usize),
        ("external blocks", overlap.external as usize),
        ("disk blocks", overlap.disk as usize),
    ] {
        assert!(times >= 100, "{what}: {times} times only");
    }
}

fn scenario() -> impl Strategy<Value = (u16, Vec<Path>, Vec<Op>)> {
    let max_run_blocks = prop_oneof![Just(1_u16), Just(3), Just(0x7FFF)];
    (
        max_run_blocks,
        prop::collection::vec(path(), 4),
        prop::collection::vec(op(), 1..50),
    )
}

fn cases() -> u32 {
    std::env::var("KVLANE_PROPTEST_CASES").map_or(10_000, |cases| {
        cases
            .parse()
            .expect("KVLANE_PROPTEST_CASES is a number of cases")
    })
}

fn op() -> impl Strategy<Value = Op> {
    let store = (
        to(),
        path(),
        0_usize..10,
        unit(),
        tier(),
        (keys(), keys()),
        wrong(),
    );
    let store = store.prop_map(
        |(to, path, known, unit, tier, (keys, parent_keys), wrong)| Op::Store {
            to,
            path,
            known: known.saturating_sub(5),
            unit,
            tier,
            keys,
            parent_keys,
            wrong,
        },
    );
    // The parent is most often named as it was announced; the other case is rare, yet must happen.
    let store = store.prop_perturb(|mut op, mut rng| {
        if let Op::Store {
            keys, parent_keys, ..
        } = &mut op
            && rng.random_range(0..4) > 0
        {
            *parent_keys = *keys;
        }
        op
    });
    let remove = (to(), path(), ends(), tier(), keys()).prop_map(|(to, path, ends, tier, keys)| {
        Op::Remove {
            to,
            path,
            ends,
            tier,
            keys,
        }
    });
    let touch =
        (to(), path(), ends(), tier(), keys()).prop_map(|(to, path, ends, tier, keys)| Op::Touch {
            to,
            path,
            ends,
            tier,
            keys,
        });
    prop_oneof![
        20 => store,
        12 => remove,
        1 => touch,
        1 => (to(), prop_oneof![Just(0b1111_u8), 0_u8..16]).prop_map(|(to, tiers)| Op::Clear { to, tiers }),
        1 => to().prop_map(|to| Op::Demote { to }),
        1 => to().prop_map(|to| Op::DropDemoted { to }),
        1 => (0_u8..8).prop_map(|seconds| Op::Wait { seconds }),
    ]
}

/// Mostly the front of a few paths that fork at different depths, so that operations meet; sometimes any path.
fn path() -> impl Strategy<Value = Path> {
    const SPINES: [[u8; 10]; 5] = [
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 0, 1, 0, 0, 0, 0, 0],
    ];
    let block = prop_oneof![12 => Just(0_u8), 4 => Just(1), 1 => Just(2)];
    let spine =
        prop_oneof![5 => Just(0_usize), 1 => Just(1), 2 => Just(2), 2 => Just(3), 1 => Just(4)];
    prop_oneof![
        6 => (spine, 2_usize..=10).prop_map(|(spine, blocks)| SPINES[spine][..blocks].to_vec()),
        1 => prop::collection::vec(block, 1..10),
    ]
}

fn to() -> impl Strategy<Value = To> {
    prop_oneof![
        18 => Just(To::Slot(0)),
        6 => Just(To::Slot(1)),
        2 => (0..SLOTS).prop_map(To::Slot),
        1 => Just(To::Everyone),
    ]
}

fn unit() -> impl Strategy<Value = usize> {
    prop_oneof![10 => Just(1_usize), 2 => Just(2), 1 => Just(4)]
}

fn tier() -> impl Strategy<Value = Tier> {
    prop_oneof![12 => Just(Tier::Device), 4 => Just(Tier::Host), 1 => Just(Tier::External), 1 => Just(Tier::Disk)]
}

fn keys() -> impl Strategy<Value = Keys> {
    prop_oneof![16 => Just(Keys::Int), 1 => Just(Keys::Alias), 1 => Just(Keys::Group), 1 => Just(Keys::Bytes)]
}

fn wrong() -> impl Strategy<Value = Option<(usize, Path)>> {
    prop_oneof![9 => Just(None), 1 => (0_usize..4, path()).prop_map(Some)]
}

/// Some ends of a path, from the tail backwards or in any order.
fn ends() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        prop::collection::vec(1_usize..10, 1..5),
        (1_usize..10, 1_usize..10).prop_map(|(a, b)| (a.min(b)..=a.max(b)).rev().collect()),
    ]
}
