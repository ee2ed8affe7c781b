//! The measured sets, all with real vLLM and NIXL: what is learned from the first half of a set predicts the rest.

use std::time::{Duration, Instant};

use crate::error::ErrorKind;
use crate::ids::{Role, WorkerId, WorkerRank};

use super::*;

mod learning;

/// A prefill and a decode worker with a link between them.
struct Lab {
    planner: HandoffPlanner,
    shape: KvShape,
    workers: Vec<PlanWorker>,
    link: LinkId,
    now: Instant,
}

impl Lab {
    #[expect(
        clippy::disallowed_methods,
        reason = "a test needs some instant to start from"
    )]
    fn new(config: HandoffConfig, layers: u32) -> Self {
        Self {
            planner: HandoffPlanner::new(config).unwrap(),
            shape: KvShape::dense(layers, 8, 128, 2.0).unwrap(),
            workers: vec![
                PlanWorker::new(target("p"), Role::Prefill),
                PlanWorker::new(target("d"), Role::Both),
            ],
            link: LinkId::new("p-d"),
            now: Instant::now(),
        }
    }

    fn objectives(ttft_seconds: f64, itl_seconds: f64) -> HandoffConfig {
        HandoffConfig::default().objectives(ttft_seconds, Some(itl_seconds))
    }

    fn running(mut self, streams: u32, gap_ms: u64) -> Self {
        self.workers[1].running_streams = streams;
        let gap = Duration::from_millis(gap_ms);
        self.planner
            .observe_gap(&self.workers[1], gap, GapCause::Decode);
        self
    }

    fn learn_prefill(&self, input_tokens: u64, ms: u64) {
        let work = PrefillWork {
            input_tokens,
            ..PrefillWork::default()
        };
        for worker in &self.workers {
            self.planner
                .observe_prefill(&worker.target, &work, Duration::from_millis(ms));
        }
    }

    fn learn_transfer(&self, tokens: u64, ms: u64) {
        let bytes = self.shape.bytes(tokens);
        self.planner
            .observe_transfer(&self.link, bytes, Duration::from_millis(ms));
    }

    fn plan(&self, input_tokens: u64) -> HandoffPlan {
        let request = PlanRequest {
            input_tokens,
            shape: &self.shape,
            splittable: true,
        };
        let link = |_: &PlanWorker, _: &PlanWorker| Some(self.link.clone());
        self.planner.plan(&request, &self.workers, link, self.now)
    }
}

fn target(name: &str) -> WorkerRank {
    WorkerRank {
        worker: WorkerId::new(name).unwrap(),
        dp_rank: 0,
    }
}

fn is_pair(option: &HandoffOption) -> bool {
    matches!(option.route, Route::Pair { .. })
}

fn single(plan: &HandoffPlan) -> &HandoffOption {
    plan.options.iter().find(|option| !is_pair(option)).unwrap()
}

fn pair(plan: &HandoffPlan) -> &HandoffOption {
    plan.options.iter().find(|option| is_pair(option)).unwrap()
}

fn splits(plan: &HandoffPlan) -> bool {
    plan.chosen().is_some_and(is_pair)
}

#[track_caller]
fn assert_within(predicted: f64, measured: f64, share: f64) {
    let off = predicted / measured - 1.0;
    assert!(
        off.abs() <= share,
        "predicted {predicted}, measured {measured}: {:+.1} %",
        off * 100.0
    );
}

/// Two servers, 1 GbE, 0.6B: one transfer of 3,067 tokens (351.75 MB) at 104 MB/s. Its prefill speed was not written down;
/// 57 ms for 1,500 tokens is that of the same model elsewhere.
fn ethernet() -> Lab {
    let lab = Lab::new(HandoffConfig::default(), 28);
    lab.learn_prefill(1_500, 57);
    lab.learn_transfer(3_067, 3_382);
    lab
}

#[test]
fn ethernet_adds_3_4_seconds_to_3000_tokens() {
    let plan = ethernet().plan(3_000);
    let added = pair(&plan).ttft.total_seconds - single(&plan).ttft.total_seconds;
    assert_within(added, 3.4, 0.2); // 344 MB ÷ 104 MB/s = 3.31 s
    assert_within(pair(&plan).ttft.transfer_bytes, 344_064_000.0, 1e-9);
}

#[test]
fn four_transfers_share_one_ethernet_link() {
    let lab = ethernet();
    // Measured: 26 to 28 MB/s each, so 344 MB take 12.3 to 13.2 s.
    let guards: Vec<_> = (0..3)
        .map(|_| {
            let mut plan = lab.plan(3_000);
            plan.options.retain(is_pair);
            let guard = lab.planner.book(&plan, lab.now).unwrap();
            guard.started(lab.now);
            guard
        })
        .collect();
    let fourth = lab.plan(3_000);
    let terms = pair(&fourth).ttft;
    let transfer = terms.transfer_fixed_seconds + terms.transfer_seconds + terms.sharing_seconds;
    assert_within(terms.transfer_bytes / transfer, 27e6, 0.2);
    assert_within(terms.total_seconds, 344.064e6 / 27e6 + 0.114, 0.2);
    assert!(!splits(&fourth));
    drop(guards);
    assert_within(pair(&lab.plan(3_000)).ttft.total_seconds, 3.42, 0.01);
}

#[test]
fn ethernet_speed_is_learned_from_shared_transfers_too() {
    let lab = Lab::new(HandoffConfig::default(), 28);
    lab.learn_prefill(1_500, 57);
    lab.planner
        .seed_link(&lab.link, 1e9, Duration::ZERO)
        .unwrap();
    for round in 0..3_u64 {
        let start = lab.now + Duration::from_secs(60 * round);
        let mut plan = lab.plan(3_000);
        plan.options.retain(is_pair);
        let guards: Vec<_> = (0..4)
            .map(|_| lab.planner.book(&plan, start).unwrap())
            .collect();
        guards.iter().for_each(|guard| guard.started(start));
        for guard in guards {
            guard.finished(start + Duration::from_millis(12_743)); // 27 MB/s each
        }
    }
    let lab = Lab {
        now: lab.now + Duration::from_secs(200),
        ..lab
    };
    let plan = lab.plan(3_000);
    assert_within(pair(&plan).ttft.transfer_seconds, 3.4, 0.2);
}

#[test]
fn ethernet_serves_on_one_worker() {
    for objectives in [(1.0, 0.1), (0.2, 0.05), (2.0, 0.2), (1.0, 10.0)] {
        for streams in [0, 8] {
            let mut lab = Lab::new(Lab::objectives(objectives.0, objectives.1), 28);
            lab.learn_prefill(1_500, 57);
            lab.learn_transfer(3_067, 3_382);
            lab = lab.running(streams, 6);
            for tokens in [1_500, 3_000, 8_000] {
                let plan = lab.plan(tokens);
                assert!(
                    !splits(&plan),
                    "{objectives:?} {streams} {tokens}: {plan:#?}"
                );
            }
        }
    }
}

/// Two workers on one card, 0.6B: 1,500 tokens (172 MB) take 57 ms on one worker and 575 ms split.
fn shared_card(config: HandoffConfig) -> Lab {
    let mut lab = Lab::new(config, 28);
    lab.learn_prefill(1_500, 57);
    lab.learn_transfer(1_500, 575 - 57);
    for worker in &mut lab.workers {
        worker.device = Some("gpu0".into());
    }
    lab
}

#[test]
fn four_at_once_on_a_shared_card() {
    let mut lab = shared_card(HandoffConfig::default());
    let mut guards = Vec::new();
    for before in 0..4 {
        lab.workers[0].queued_prefill_tokens = before * 1_500;
        let mut plan = lab.plan(1_500);
        plan.options.retain(is_pair);
        if before == 3 {
            assert_within(pair(&plan).ttft.total_seconds, 2.111, 0.2);
        }
        guards.push(lab.planner.book(&plan, lab.now));
    }
}

#[test]
fn a_shared_card_serves_on_one_worker_whatever_the_objectives() {
    for (ttft, itl) in [(1.0, 0.1), (0.1, 1.0), (100.0, 0.01)] {
        for streams in [0, 8] {
            let lab = shared_card(Lab::objectives(ttft, itl)).running(streams, 6);
            for tokens in [1_500, 6_000, 14_000] {
                let plan = lab.plan(tokens);
                assert!(!splits(&plan));
                // Splitting spares nobody there: the card is the same.
                assert_eq!(plan.decided_by, DecidedBy::Both);
            }
        }
    }
}

/// Two H200 with NVLink, 8B shape: 8,000 tokens take 220 ms on one worker and 419 ms split. Eight streams have a p99 gap of
/// 31 ms.
fn nvlink(config: HandoffConfig) -> Lab {
    let lab = Lab::new(config, 36);
    lab.learn_prefill(8_000, 220);
    lab.learn_transfer(8_000, 419 - 220);
    lab.running(8, 31)
}

#[test]
fn nvlink_predicts_16000_tokens_from_8000() {
    let plan = nvlink(HandoffConfig::default()).plan(16_000);
    assert_within(single(&plan).ttft.total_seconds, 0.496, 0.2);
    assert_within(pair(&plan).ttft.total_seconds, 0.875, 0.2);
    // About 6 GB/s.
    let terms = pair(&plan).ttft;
    assert_within(terms.transfer_bytes / terms.transfer_seconds, 6e9, 0.05);
}

#[test]
fn nvlink_predicts_8000_tokens_from_16000() {
    let lab = Lab::new(HandoffConfig::default(), 36);
    lab.learn_prefill(16_000, 496);
    lab.learn_transfer(16_000, 875 - 496);
    let plan = lab.plan(8_000);
    assert_within(single(&plan).ttft.total_seconds, 0.22, 0.2);
    assert_within(pair(&plan).ttft.total_seconds, 0.419, 0.2);
}

#[test]
fn nvlink_with_attention_is_within_five_percent() {
    let lab = nvlink(HandoffConfig::default());
    // 36 layers of hidden size 4,096, intermediate 12,288: matrices and attention cost the same at 47,000 tokens.
    let seed = PrefillSeed {
        tokens_per_second: 40_000.0,
        fixed_seconds: 0.0,
        attention_tokens: Some(47_000.0),
    };
    for worker in &lab.workers {
        lab.planner.seed_prefill(&worker.target, &seed).unwrap();
    }
    for _ in 0..3 {
        lab.learn_prefill(8_000, 220);
    }
    let plan = lab.plan(16_000);
    assert_within(single(&plan).ttft.total_seconds, 0.496, 0.05);
    // The rest of 7,808 tokens: 278 ms, on top of 31.
    assert_within(single(&plan).itl.gap_seconds, 0.265, 0.2);
    assert_within(pair(&plan).ttft.total_seconds, 0.875, 0.05);
}

#[test]
fn nvlink_gaps_are_predicted_from_the_longest_step() {
    let lab = nvlink(HandoffConfig::default());
    let plan = lab.plan(16_000);
    // 31 ms + 8,192 tokens of 16,000: 256 ms where 265 were measured.
    assert_within(single(&plan).itl.gap_seconds, 0.265, 0.2);
    // Rests on the default stall per token, which comes from this very measurement.
    assert_within(pair(&plan).itl.gap_seconds, 0.172, 0.2);
    // Half the tokens arrive: half the stall.
    assert_within(pair(&lab.plan(8_000)).itl.stall_seconds, 0.0704, 0.01);
    let arrival = GapCause::Transfer { tokens: 16_000 };
    for _ in 0..3 {
        let gap = Duration::from_millis(31 + 320);
        lab.planner.observe_gap(&lab.workers[1], gap, arrival);
    }
    assert_within(pair(&lab.plan(8_000)).itl.stall_seconds, 0.16, 0.01);
}

#[test]
fn nvlink_follows_the_objectives_and_says_which_won() {
    // One worker: 440 ms and 256 ms; two: 838 ms and 172 ms.
    let cases = [
        // Two miss the gap's target by less, and both are in time.
        (1.0, 0.05, true, DecidedBy::Itl),
        (1.0, 0.1, true, DecidedBy::Itl),
        // Two alone meet both targets.
        (1.0, 0.2, true, DecidedBy::Itl),
        // One meets both, so that the sooner first token counts.
        (1.0, 0.5, false, DecidedBy::Ttft),
        (5.0, 0.5, false, DecidedBy::Ttft),
        // Two miss the first token's target by 7.4 times and a gap's by 0.7; one 3.4 times, and that of two gaps by 1.5.
        (0.1, 0.1, false, DecidedBy::Ttft),
        // The same in half the hurry: 3.2 and 0.7 against 1.2 and twice 1.5.
        (0.2, 0.1, true, DecidedBy::Itl),
    ];
    for (ttft, itl, split, decided_by) in cases {
        let plan = nvlink(Lab::objectives(ttft, itl)).plan(16_000);
        assert_eq!(
            (splits(&plan), plan.decided_by),
            (split, decided_by),
            "{ttft} {itl}"
        );
    }
    // Without a target for gaps, or without a stream to spare, the first token decides.
    let config = HandoffConfig::default().objectives(1.0, None);
    let plan = nvlink(config).plan(16_000);
    assert_eq!((splits(&plan), plan.decided_by), (false, DecidedBy::Ttft));
    let plan = nvlink(HandoffConfig::default()).running(0, 31).plan(16_000);
    assert_eq!((splits(&plan), plan.decided_by), (false, DecidedBy::Both));
}

#[test]
fn a_large_model_behind_100_gbit_is_split_when_its_decoder_is_busy() {
    // 80 layers: 8,000 tokens are 2.62 GB, 0.21 s at 12.5 GB/s; 8,000 tokens/s of prefill.
    for (streams, split) in [(0, false), (64, true)] {
        let lab = Lab::new(Lab::objectives(2.0, 0.1), 80).running(streams, 30);
        lab.learn_prefill(8_000, 1_000);
        lab.planner
            .seed_link(&lab.link, 12.5e9, Duration::from_millis(5))
            .unwrap();
        let plan = lab.plan(8_000);
        assert_eq!(splits(&plan), split, "{plan:#?}");
        assert_within(pair(&plan).ttft.total_seconds, 1.215, 0.01);
    }
}

#[test]
fn a_busy_prefill_of_the_decoder_is_part_of_the_choice() {
    let mut lab = nvlink(HandoffConfig::default()).running(0, 31);
    assert!(!splits(&lab.plan(8_000)));
    // 20,000 tokens wait at the decoder: 0.55 s more there.
    lab.workers[1].queued_prefill_tokens = 20_000;
    let plan = lab.plan(8_000);
    assert!(splits(&plan));
    assert_within(single(&plan).ttft.queue_seconds, 0.55, 0.01);
}

#[test]
fn what_the_decoder_holds_is_neither_computed_nor_moved() {
    let mut lab = nvlink(HandoffConfig::default());
    lab.workers[1].cached_tokens = 6_000;
    let plan = lab.plan(8_000);
    assert_eq!(single(&plan).ttft.uncached_tokens, 2_000);
    assert_within(pair(&plan).ttft.transfer_bytes, 2_000.0 * 147_456.0, 1e-9);
    assert_eq!(pair(&plan).ttft.uncached_tokens, 8_000);
}

#[test]
fn pairs_that_cannot_be_are_named_with_the_reason() {
    let lab = nvlink(HandoffConfig::default());
    let request = |splittable| PlanRequest {
        input_tokens: 8_000,
        shape: &lab.shape,
        splittable,
    };
    let reason = |plan: &HandoffPlan| plan.excluded.first().map(|excluded| excluded.reason);
    let known = |_: &PlanWorker, _: &PlanWorker| Some(lab.link.clone());
    let plan = lab
        .planner
        .plan(&request(false), &lab.workers, known, lab.now);
    assert_eq!(reason(&plan), Some(Reason::Unsplittable));
    assert_eq!(plan.decided_by, DecidedBy::Only);
    let plan = lab
        .planner
        .plan(&request(true), &lab.workers, |_, _| None, lab.now);
    assert_eq!(reason(&plan), Some(Reason::NoLink));
    let other = |_: &PlanWorker, _: &PlanWorker| Some(LinkId::new("other"));
    let plan = lab
        .planner
        .plan(&request(true), &lab.workers, other, lab.now);
    assert_eq!(reason(&plan), Some(Reason::UnmeasuredLink));
    let mut workers = lab.workers.clone();
    workers[0].group = Some("vllm 0.22.1".into());
    let plan = lab.planner.plan(&request(true), &workers, known, lab.now);
    assert_eq!(reason(&plan), Some(Reason::OtherGroup));
    // A decoder that cannot process prompts and a pair that cannot be: nothing is left.
    workers[1].serves_alone = false;
    let plan = lab.planner.plan(&request(true), &workers, known, lab.now);
    assert_eq!((plan.chosen(), plan.decided_by), (None, DecidedBy::Nothing));
    assert!(lab.planner.book(&plan, lab.now).is_none());
}

#[test]
fn an_unmeasured_worker_is_as_fast_as_its_peers_and_says_so() {
    let mut lab = nvlink(HandoffConfig::default());
    lab.workers.push(PlanWorker::new(target("new"), Role::Both));
    let plan = lab.plan(8_000);
    let new = plan.options.iter().find(|option| {
        option.route
            == Route::Single {
                worker: target("new"),
            }
    });
    let terms = new.unwrap().ttft;
    assert!(terms.assumed_speed);
    assert_within(terms.total_seconds, 0.22, 1e-6);
    let lonely = Lab::new(HandoffConfig::default(), 36).plan(8_000);
    assert!(single(&lonely).ttft.assumed_speed);
    assert_within(single(&lonely).ttft.total_seconds, 0.8, 1e-6);
}

#[test]
fn the_pair_is_chosen_jointly() {
    // The quicker prefill worker has the slower link; the decoder with the prefix is worth it.
    let lab = Lab::new(HandoffConfig::default(), 36);
    let worker = |name: &str, role| PlanWorker::new(target(name), role);
    let workers = [
        worker("quick", Role::Prefill),
        worker("near", Role::Prefill).queued_prefill_tokens(2_000),
        worker("cold", Role::Decode).serves_alone(false),
        worker("warm", Role::Decode)
            .serves_alone(false)
            .cached_tokens(7_000),
    ];
    let speed = PrefillSeed::tokens_per_second(36_000.0);
    for worker in &workers {
        lab.planner.seed_prefill(&worker.target, &speed).unwrap();
    }
    let (slow, fast) = (LinkId::new("slow"), LinkId::new("fast"));
    lab.planner.seed_link(&slow, 1e9, Duration::ZERO).unwrap();
    lab.planner.seed_link(&fast, 50e9, Duration::ZERO).unwrap();
    let link = |prefill: &PlanWorker, _: &PlanWorker| {
        let is_near = prefill.target == target("near");
        Some(if is_near { fast.clone() } else { slow.clone() })
    };
    let plan_with = |cached: u64| {
        let mut workers = workers.clone();
        workers[3].cached_tokens = cached;
        let request = PlanRequest {
            input_tokens: 8_000,
            shape: &lab.shape,
            splittable: true,
        };
        lab.planner.plan(&request, &workers, link, lab.now)
    };
    let route = |plan: &HandoffPlan| match &plan.chosen().unwrap().route {
        Route::Pair {
            prefill, decode, ..
        } => (prefill.worker.to_string(), decode.worker.to_string()),
        Route::Single { .. } => unreachable!("no worker serves alone"),
    };
    // 147 MB at 1 GB/s = 0.147 s; near: 0.055 s of queue and 3 ms.
    assert_eq!(route(&plan_with(7_000)), ("near".into(), "warm".into()));
    // 15 MB at 1 GB/s = 0.015 s is less than the queue.
    assert_eq!(route(&plan_with(7_900)), ("quick".into(), "warm".into()));
}

#[test]
fn equal_histories_plan_alike_and_explain_themselves_as_json() {
    let plan = || nvlink(HandoffConfig::default()).plan(16_000);
    assert_eq!(plan(), plan());
    let json = serde_json::to_value(plan()).unwrap();
    assert_eq!(json["decided_by"], "itl");
    assert_eq!(json["options"][0]["route"], "pair");
    assert_eq!(json["options"][0]["prefill"]["worker"], "p");
    assert_eq!(json["options"][1]["route"], "single");
    assert!(
        json["options"][1]["ttft"]["prefill_seconds"]
            .as_f64()
            .unwrap()
            > 0.4
    );
}

#[test]
fn the_terms_add_up() {
    let mut lab = nvlink(HandoffConfig::default());
    lab.workers[0].queued_prefill_tokens = 2_000;
    for option in lab.plan(12_345).options {
        let terms = option.ttft;
        let sum = terms.queue_seconds
            + terms.prefill_seconds
            + terms.transfer_fixed_seconds
            + terms.transfer_seconds
            + terms.sharing_seconds;
        assert!((sum - terms.total_seconds).abs() < 1e-9);
        // The first token within its target of 1 s, the gap beyond its target of 0.1 s.
        assert!(terms.total_seconds < 1.0 && option.itl.gap_seconds > 0.1);
        let itl = option.itl;
        let mean = itl.base_seconds + itl.total_stall_seconds / itl.stalled_gaps as f64;
        let missed = itl.stalled_gaps as f64 * (mean / 0.1 - 1.0);
        assert!((0.1 * terms.total_seconds + missed - option.cost).abs() < 1e-9);
        assert_eq!(itl.stalled_gaps, if is_pair(&option) { 1 } else { 2 });
        let gap = option.itl.base_seconds + option.itl.stall_seconds;
        assert!((gap - option.itl.gap_seconds).abs() < 1e-9);
    }
}

#[test]
fn options_that_cost_the_same_keep_the_request_whole() {
    let lab = Lab::new(HandoffConfig::default(), 36);
    lab.learn_prefill(8_000, 220);
    lab.planner
        .seed_link(&lab.link, 1e15, Duration::ZERO)
        .unwrap();
    // One more prompt of 8 tokens at the worker alone, 0.1 %.
    let mut lab = lab;
    lab.workers[1].queued_prefill_tokens = 8;
    let plan = lab.plan(8_000);
    assert_eq!(
        (splits(&plan), plan.decided_by),
        (false, DecidedBy::Simplicity)
    );
}

#[test]
fn hundreds_of_workers_are_planned_from_shortlists() {
    let lab = nvlink(HandoffConfig::default());
    let workers: Vec<_> = (0..200)
        .map(|at| {
            let role = if at % 2 == 0 {
                Role::Prefill
            } else {
                Role::Decode
            };
            PlanWorker::new(target(&format!("w{at}")), role)
                .serves_alone(false)
                .queued_prefill_tokens(1_000 - at)
                .cached_tokens(at)
        })
        .collect();
    let request = PlanRequest {
        input_tokens: 8_000,
        shape: &lab.shape,
        splittable: true,
    };
    let link = |_: &PlanWorker, _: &PlanWorker| Some(lab.link.clone());
    let plan = lab.planner.plan(&request, &workers, link, lab.now);
    assert_eq!(plan.options.len(), 32 * 32);
    let best = Route::Pair {
        prefill: target("w198"),
        decode: target("w199"),
        link: lab.link.clone(),
    };
    assert_eq!(plan.chosen().unwrap().route, best);
}

#[test]
fn open_transfers_return_to_zero_however_they_end() {
    let lab = nvlink(HandoffConfig::default());
    let open = || lab.planner.stats().links[0].open_transfers;
    let mut plan = lab.plan(8_000);
    plan.options.retain(is_pair);
    let book = || lab.planner.book(&plan, lab.now).unwrap();
    let (finished, dropped, never_started, orphan) = (book(), book(), book(), book());
    assert_eq!(open(), 4);
    finished.started(lab.now);
    dropped.started(lab.now);
    finished.finished(lab.now + Duration::from_millis(200));
    drop(dropped);
    never_started.finished(lab.now);
    assert_eq!(open(), 1);
    lab.planner.remove_link(&lab.link);
    orphan.finished(lab.now);
    assert!(lab.planner.stats().links.is_empty());
    lab.planner.remove_worker(&target("p"));
    assert_eq!(lab.planner.stats().prefill.len(), 1);
}

#[test]
fn numbers_out_of_range_are_refused_by_name() {
    let planner = HandoffPlanner::new(HandoffConfig::default()).unwrap();
    let speed = PrefillSeed::tokens_per_second;
    for value in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(planner.seed_prefill(&target("p"), &speed(value)).is_err());
        let link = LinkId::new("l");
        assert!(planner.seed_link(&link, value, Duration::ZERO).is_err());
        let config = HandoffConfig::default().objectives(value, None);
        let error = HandoffPlanner::new(config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(
            error.to_string().contains("ttft_objective_seconds"),
            "{error}"
        );
    }
    let error = serde_json::from_str::<HandoffConfig>(r#"{"ttft": 1}"#).unwrap_err();
    assert!(error.to_string().contains("ttft"), "{error}");
}

proptest::proptest! {
    /// Whatever is observed, plans are finite, and the same again.
    #[test]
    fn no_observation_breaks_a_plan(
        prefills in proptest::collection::vec((0_u64..200_000, 0_u64..200_000, 0_u64..1 << 40), 0..20),
        transfers in proptest::collection::vec((0_u64..1 << 50, 0_u64..1 << 40), 0..20),
        input in 0_u64..1 << 40,
        cached in 0_u64..1 << 41,
    ) {
        let mut lab = Lab::new(HandoffConfig::default(), 36).running(3, 20);
        for (input_tokens, cached_tokens, nanos) in prefills {
            let work = PrefillWork { input_tokens, cached_tokens, queued_tokens: 0 };
            lab.planner.observe_prefill(&target("d"), &work, Duration::from_nanos(nanos));
            let gap = GapCause::Prefill(work);
            lab.planner.observe_gap(&lab.workers[1], Duration::from_nanos(nanos), gap);
        }
        for (bytes, nanos) in transfers {
            lab.planner.observe_transfer(&lab.link, bytes as f64, Duration::from_nanos(nanos));
        }
        lab.workers[1].cached_tokens = cached;
        let plan = lab.plan(input);
        proptest::prop_assert!(plan.chosen().is_some());
        for option in &plan.options {
            proptest::prop_assert!(option.cost.is_finite() && option.cost >= 0.0);
        }
        proptest::prop_assert_eq!(lab.plan(input), plan);
    }
}
