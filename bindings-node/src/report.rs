//! What the router answers, as JavaScript objects.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use kvlane::{TrustState, WorkerRank};
use napi::bindgen_prelude::Float64Array;
use napi_derive::napi;

use crate::clock::Clock;

/// Declares objects that are answered, with their TypeScript types.
macro_rules! answers {
    ($($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)+ })+) => {$(
        $(#[$meta])*
        #[napi(object, object_from_js = false, use_nullable = true)]
        #[derive(Debug)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)+
        }
    )+};
}

answers! {
    /// What was done with one batch of events.
    IngestReport {
        /// Events that were applied.
        applied: i64,
        /// What was not applied, by reason.
        skipped: HashMap<String, i64>,
        /// Batches were lost before this one and have not been repaired.
        gap: bool,
        /// The engine restarted: its old entries were cleared first.
        restarted: bool,
    }

    /// How far the events of one rank are believed.
    Trust {
        /// The state.
        #[napi(ts_type = "TrustState")]
        state: String,
        /// Share of predicted cached tokens that the engine confirms, 0 to 1.
        fidelity: f64,
        /// Why it is not exact.
        cause: Option<String>,
        /// Since when it is in this state: seconds of the router's clock, or since 1970 as `Date.now() / 1000`.
        since: f64,
    }

    /// Trust in one rank, as listed.
    RankTrust {
        /// The rank.
        dp_rank: u32,
        /// The state.
        #[napi(ts_type = "TrustState")]
        state: String,
        /// Share of predicted cached tokens that the engine confirms, 0 to 1.
        fidelity: f64,
        /// Why it is not exact.
        cause: Option<String>,
        /// Since when it is in this state: seconds of the router's clock, or since 1970 as `Date.now() / 1000`.
        since: f64,
        /// Event batches applied.
        batches: i64,
        /// Events applied.
        events: i64,
        /// Gaps in the sequence that were not repaired.
        gaps: i64,
        /// What was not applied, by reason.
        skipped: HashMap<String, i64>,
    }

    /// Blocks by tier.
    TierBlocks {
        /// In accelerator memory.
        device: i64,
        /// In host memory.
        host: i64,
        /// On local disk.
        disk: i64,
        /// In shared storage.
        external: i64,
    }

    /// What is known of one worker. Counts are sums over its ranks.
    WorkerInfo {
        /// The caller's name.
        id: String,
        /// Its data-parallel ranks.
        dp_ranks: u32,
        /// What it does.
        #[napi(ts_type = "Role")]
        role: String,
        /// It finishes what it has and gets nothing new.
        draining: bool,
        /// It may be chosen, as far as its health is known.
        available: bool,
        /// Requests booked and not released.
        active_requests: i64,
        /// Distinct blocks of those requests.
        active_blocks: i64,
        /// Blocks still to be prefilled for those requests.
        prefill_blocks: f64,
        /// Blocks that events have confirmed, by tier.
        index_blocks: TierBlocks,
        /// Blocks believed from own placements.
        predicted_blocks: i64,
        /// KV capacity of one rank in blocks, when known.
        kv_capacity_blocks: Option<i64>,
        /// Free-form labels.
        labels: HashMap<String, String>,
        /// Trust in each rank's event stream.
        trust: Vec<RankTrust>,
    }

    /// Size of the index of confirmed blocks.
    IndexStats {
        /// Distinct blocks held by anybody.
        blocks: i64,
        /// Nodes of the tree.
        nodes: i64,
        /// Pending engine blocks whose parent is unknown.
        orphans: i64,
        /// Memory in bytes.
        bytes: i64,
    }

    /// Size of what own placements are believed to hold.
    PlacementStats {
        /// Blocks, counted once per target that holds them.
        held_blocks: i64,
        /// Blocks, counted once.
        blocks: i64,
        /// Nodes of the tree.
        nodes: i64,
        /// Placements that were the last to touch some block.
        placements: i64,
    }

    /// Size and history of a router.
    RouterStats {
        /// The index of confirmed blocks.
        index: IndexStats,
        /// Own placements of token prompts.
        token_placements: PlacementStats,
        /// Own placements of text prompts.
        text_placements: PlacementStats,
        /// Registered workers.
        workers: i64,
        /// Bookings not yet released.
        active_leases: i64,
        /// Decisions since the start.
        decisions: i64,
        /// Decisions without an eligible worker.
        no_worker: i64,
        /// Bookings that were released because their lease ran out.
        expired_leases: i64,
        /// Blocks that were forgotten to keep within `maxIndexBytes`.
        forgotten_blocks: i64,
        /// What was not applied of all event streams, by reason.
        skipped: HashMap<String, i64>,
    }
}

/// Candidates as JavaScript makes objects of them: the worker of each, and sixteen numbers of each as lib/targets.js reads them.
pub(crate) type Table = (Vec<String>, Float64Array);

pub(crate) fn candidates(from: &[kvlane::Candidate]) -> Table {
    let workers = from.iter();
    let workers = workers.map(|candidate| candidate.target.worker.as_str().to_owned());
    let numbers: Vec<f64> = from.iter().flat_map(numbers).collect();
    (workers.collect(), numbers.into())
}

/// The same for overlaps, five numbers of each.
pub(crate) fn overlaps(from: &[(WorkerRank, kvlane::Overlap)]) -> Table {
    let workers = from
        .iter()
        .map(|(target, _)| target.worker.as_str().to_owned());
    let numbers: Vec<f64> = from
        .iter()
        .flat_map(|(target, overlap)| {
            let blocks = [overlap.device, overlap.host, overlap.disk, overlap.external];
            [target.dp_rank].into_iter().chain(blocks).map(f64::from)
        })
        .collect();
    (workers.collect(), numbers.into())
}

fn numbers(candidate: &kvlane::Candidate) -> [f64; 16] {
    let state = TrustState::ALL
        .iter()
        .position(|state| *state == candidate.trust)
        .unwrap_or_default();
    let (overlap, cost) = (&candidate.overlap, &candidate.cost);
    [
        candidate.target.dp_rank.into(),
        overlap.device.into(),
        overlap.host.into(),
        overlap.disk.into(),
        overlap.external.into(),
        candidate.predicted_blocks.into(),
        candidate.fidelity,
        state as f64,
        cost.total,
        cost.uncached_prefill_blocks,
        cost.booked_prefill_blocks,
        cost.decode_blocks,
        cost.active_requests,
        cost.prefill_weight,
        cost.request_weight,
        cost.preference,
    ]
}

impl From<kvlane::IngestReport> for IngestReport {
    fn from(from: kvlane::IngestReport) -> Self {
        Self {
            applied: count(from.applied),
            skipped: skipped(&from.skipped),
            gap: from.gap,
            restarted: from.restarted,
        }
    }
}

impl Trust {
    pub(crate) fn new(from: kvlane::TrustInfo, clock: &Clock, now: Instant) -> Self {
        Self {
            state: from.state.name().to_owned(),
            fidelity: from.fidelity,
            cause: from.cause,
            since: clock.seconds(from.since, now),
        }
    }
}

impl RankTrust {
    fn new(from: kvlane::RankTrust, clock: &Clock, now: Instant) -> Self {
        let age = Duration::try_from_secs_f64(from.since_seconds).unwrap_or_default();
        Self {
            dp_rank: from.dp_rank,
            state: from.state.name().to_owned(),
            fidelity: from.fidelity,
            cause: from.cause,
            since: clock.seconds(now.checked_sub(age).unwrap_or(now), now),
            batches: count(from.batches),
            events: count(from.events),
            gaps: count(from.gaps),
            skipped: skipped(&from.skipped),
        }
    }
}

impl WorkerInfo {
    pub(crate) fn new(from: kvlane::WorkerInfo, clock: &Clock, now: Instant) -> Self {
        let trust = from.trust.into_iter();
        Self {
            id: from.id.as_str().to_owned(),
            dp_ranks: from.dp_ranks,
            role: from.role.name().to_owned(),
            draining: from.draining,
            available: from.available,
            active_requests: count(from.active_requests),
            active_blocks: count(from.active_blocks),
            prefill_blocks: from.prefill_blocks,
            index_blocks: TierBlocks {
                device: count(from.index_blocks.device),
                host: count(from.index_blocks.host),
                disk: count(from.index_blocks.disk),
                external: count(from.index_blocks.external),
            },
            predicted_blocks: count(from.predicted_blocks),
            kv_capacity_blocks: from.kv_capacity_blocks.map(count),
            labels: from.labels.into_iter().collect(),
            trust: trust.map(|rank| RankTrust::new(rank, clock, now)).collect(),
        }
    }
}

impl From<kvlane::RouterStats> for RouterStats {
    fn from(from: kvlane::RouterStats) -> Self {
        Self {
            index: IndexStats {
                blocks: count(from.index.blocks),
                nodes: count(from.index.nodes),
                orphans: count(from.index.orphans),
                bytes: count(from.index.bytes),
            },
            token_placements: from.token_placements.into(),
            text_placements: from.text_placements.into(),
            workers: count(from.workers),
            active_leases: count(from.active_leases),
            decisions: count(from.decisions),
            no_worker: count(from.no_worker),
            expired_leases: count(from.expired_leases),
            forgotten_blocks: count(from.forgotten_blocks),
            skipped: skipped(&from.skipped),
        }
    }
}

impl From<kvlane::index::TtlStats> for PlacementStats {
    fn from(from: kvlane::index::TtlStats) -> Self {
        Self {
            held_blocks: count(from.held_blocks),
            blocks: count(from.blocks),
            nodes: count(from.nodes),
            placements: count(from.placements),
        }
    }
}

fn skipped(from: &BTreeMap<kvlane::SkipReason, u64>) -> HashMap<String, i64> {
    let named = from
        .iter()
        .map(|(reason, number)| (reason.code().to_owned(), count(*number)));
    named.collect()
}

/// napi hands an `i64` over as a number.
fn count(number: impl TryInto<i64>) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}
