//! What the router and the fleet know, as metrics, read at the moment somebody asks.

use std::fmt;
use std::time::Instant;

use kvlane::{Router, RouterStats, TrustState, WorkerInfo};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::fleet::Fleet;
use crate::forward::breaker::State;
use crate::pool::manager::{PoolReport, SourceReport};
use crate::pool::member::MemberState;
use crate::pool::planner::RolePlan;
use crate::pool::rebalance::Balance;

/// One moment's state.
#[derive(Debug)]
pub(super) struct Snapshot {
    stats: RouterStats,
    workers: Vec<WorkerInfo>,
    links: Vec<Link>,
    pool: PoolReport,
    balance: Balance,
    ready: bool,
}

#[derive(Debug)]
struct Link {
    worker: String,
    state: MemberState,
    mismatches: usize,
    healthy: bool,
    breaker: State,
    in_use: usize,
    in_flight: usize,
}

type Labels = Vec<(&'static str, String)>;

impl Snapshot {
    pub(super) fn take(router: &Router, fleet: &Fleet, pool: PoolReport, balance: Balance) -> Self {
        let members = fleet.members();
        let mismatches = members.mismatches();
        let links = members.list().iter().zip(&mismatches);
        let links = links.map(|(worker, mismatches)| Link {
            worker: worker.id().to_owned(),
            state: worker.state().0,
            mismatches: mismatches.len(),
            healthy: worker.healthy() == Some(true),
            breaker: worker.breaker_state(),
            in_use: worker.pool.in_use(),
            in_flight: worker.in_flight(),
        });
        Self {
            stats: router.stats(),
            workers: router.workers(Instant::now()),
            links: links.collect(),
            pool,
            balance,
            ready: fleet.is_ready(),
        }
    }

    fn encode_workers(&self, out: &mut Writer<'_>) -> fmt::Result {
        let of = |info: &WorkerInfo| vec![("worker", info.id.to_string())];
        let each = |value: fn(&WorkerInfo) -> f64| -> Vec<(Labels, f64)> {
            self.workers
                .iter()
                .map(|info| (of(info), value(info)))
                .collect()
        };
        out.gauges(
            "active_requests",
            "Requests booked and not released",
            each(|w| float(w.active_requests)),
        )?;
        out.gauges(
            "active_blocks",
            "Distinct blocks of those requests",
            each(|w| float(w.active_blocks)),
        )?;
        out.gauges(
            "prefill_blocks",
            "Blocks still to be prefilled for those requests",
            each(|w| w.prefill_blocks),
        )?;
        out.gauges(
            "predicted_blocks",
            "Blocks believed from own placements",
            each(|w| float(w.predicted_blocks)),
        )?;
        out.gauges(
            "worker_available",
            "1 when the worker may be chosen",
            each(|w| flag(w.available)),
        )?;
        out.gauges(
            "worker_draining",
            "1 when the worker gets nothing new",
            each(|w| flag(w.draining)),
        )?;
        let capacity = self
            .workers
            .iter()
            .filter_map(|info| Some((of(info), float(info.kv_capacity_blocks?))));
        out.gauges(
            "kv_capacity_blocks",
            "KV capacity of a rank, when known",
            capacity.collect(),
        )?;
        self.encode_tiers(out)
    }

    fn encode_tiers(&self, out: &mut Writer<'_>) -> fmt::Result {
        let mut tiers = Vec::new();
        for info in &self.workers {
            let blocks = &info.index_blocks;
            for (tier, count) in [
                ("device", blocks.device),
                ("host", blocks.host),
                ("disk", blocks.disk),
                ("external", blocks.external),
            ] {
                let labels = vec![("worker", info.id.to_string()), ("tier", tier.to_owned())];
                tiers.push((labels, float(count)));
            }
        }
        out.gauges(
            "index_blocks",
            "Blocks that events have confirmed, by tier",
            tiers,
        )
    }

    fn encode_ranks(&self, out: &mut Writer<'_>) -> fmt::Result {
        let mut states = Vec::new();
        let mut fidelity = Vec::new();
        let mut batches = Vec::new();
        let mut events = Vec::new();
        let mut gaps = Vec::new();
        let mut skipped = Vec::new();
        for info in &self.workers {
            for rank in &info.trust {
                let labels = vec![
                    ("worker", info.id.to_string()),
                    ("dp_rank", rank.dp_rank.to_string()),
                ];
                for state in TrustState::ALL {
                    let mut labels = labels.clone();
                    labels.push(("state", state.name().to_owned()));
                    states.push((labels, flag(rank.state == state)));
                }
                fidelity.push((labels.clone(), rank.fidelity));
                batches.push((labels.clone(), rank.batches));
                events.push((labels.clone(), rank.events));
                gaps.push((labels.clone(), rank.gaps));
                for (reason, count) in &rank.skipped {
                    let mut labels = labels.clone();
                    labels.push(("reason", reason.code().to_owned()));
                    skipped.push((labels, *count));
                }
            }
        }
        out.gauges(
            "trust_state",
            "1 for the state in which a rank's events are",
            states,
        )?;
        out.gauges(
            "fidelity",
            "Share of predicted cached tokens that the engine confirms",
            fidelity,
        )?;
        out.counters("event_batches", "Event batches applied", batches)?;
        out.counters("events", "Events applied", events)?;
        out.counters(
            "event_gaps",
            "Gaps in an event stream that were not repaired",
            gaps,
        )?;
        out.counters(
            "ingest_skipped",
            "What was not applied of an event stream, by reason",
            skipped,
        )
    }

    fn encode_links(&self, out: &mut Writer<'_>) -> fmt::Result {
        let each = |value: fn(&Link) -> f64| -> Vec<(Labels, f64)> {
            self.links
                .iter()
                .map(|link| (vec![("worker", link.worker.clone())], value(link)))
                .collect()
        };
        out.gauges(
            "worker_healthy",
            "1 when the last health probe succeeded",
            each(|link| flag(link.healthy)),
        )?;
        out.gauges(
            "worker_mismatches",
            "Contradictions between a worker's engine and what is said of it, or its mates",
            each(|link| float(link.mismatches)),
        )?;
        let states = self.links.iter().flat_map(|link| {
            MemberState::ALL.into_iter().map(|state| {
                let labels = vec![
                    ("worker", link.worker.clone()),
                    ("state", state.as_str().to_owned()),
                ];
                (labels, flag(link.state == state))
            })
        });
        out.gauges(
            "worker_state",
            "1 for the state in which a worker is",
            states.collect(),
        )?;
        out.gauges(
            "upstream_connections",
            "Connections in use",
            each(|link| float(link.in_use)),
        )?;
        out.gauges(
            "upstream_requests",
            "Requests sent and not finished",
            each(|link| float(link.in_flight)),
        )?;
        let states = self.links.iter().flat_map(|link| {
            State::ALL.into_iter().map(|state| {
                let labels = vec![
                    ("worker", link.worker.clone()),
                    ("state", state.as_str().to_owned()),
                ];
                (labels, flag(link.breaker == state))
            })
        });
        out.gauges(
            "breaker_state",
            "1 for the state in which a worker's breaker is",
            states.collect(),
        )
    }

    fn encode_pool(&self, out: &mut Writer<'_>) -> fmt::Result {
        let sources = &self.pool.sources;
        let each = |value: &dyn Fn(&SourceReport) -> f64| -> Vec<(Labels, f64)> {
            sources
                .iter()
                .map(|source| (vec![("source", source.name.to_string())], value(source)))
                .collect()
        };
        out.gauges(
            "pool_listed",
            "Workers that a source lists",
            each(&|source| float(source.listed)),
        )?;
        out.gauges(
            "pool_members",
            "Workers in the pool, by the source that told of them",
            each(&|source| float(source.members)),
        )?;
        out.gauges(
            "pool_refused",
            "Workers that a source lists and that cannot be added",
            each(&|source| float(source.refused.len())),
        )?;
        out.gauges(
            "pool_skipped",
            "Things that a source sees and that are no workers, or not all that they could be",
            each(&|source| float(source.skipped.len())),
        )?;
        out.gauges(
            "pool_source_failing",
            "1 while a source cannot tell which workers there are",
            each(&|source| flag(source.error.is_some())),
        )?;
        let conflicts = |source: &SourceReport| {
            let conflicts = self.pool.conflicts.iter();
            float(conflicts.filter(|of| of.source == source.name).count())
        };
        out.gauges(
            "pool_conflicts",
            "Workers that a source lists under a name that another source's worker has",
            each(&conflicts),
        )
    }

    fn encode_balance(&self, out: &mut Writer<'_>) -> fmt::Result {
        let each = |value: fn(&RolePlan) -> f64| -> Vec<(Labels, f64)> {
            let roles = self.balance.roles.iter();
            roles
                .map(|plan| (vec![("role", plan.role.name().to_owned())], value(plan)))
                .collect()
        };
        out.gauges(
            "pool_desired_workers",
            "Workers that a role should have",
            each(|plan| f64::from(plan.desired)),
        )?;
        out.gauges(
            "pool_current_workers",
            "Workers of a role that are ready or starting",
            each(|plan| f64::from(plan.current)),
        )?;
        out.gauges(
            "pool_demand_workers",
            "Workers that would keep a role at its targets now, before any calming",
            each(|plan| plan.demand_workers),
        )?;
        let proposals = self
            .balance
            .proposals
            .iter()
            .map(|(&(kind, role), &count)| {
                let labels = vec![("action", kind.to_owned()), ("role", role.to_owned())];
                (labels, count)
            });
        out.counters(
            "pool_proposals",
            "Changes that the pool's planner proposed",
            proposals.collect(),
        )
    }

    fn encode_totals(&self, out: &mut Writer<'_>) -> fmt::Result {
        let stats = &self.stats;
        out.gauges(
            "ready",
            "1 when some worker can take a request",
            vec![(vec![], flag(self.ready))],
        )?;
        out.gauges(
            "active_leases",
            "Bookings not yet released",
            vec![(vec![], float(stats.active_leases))],
        )?;
        out.counters(
            "router_decisions",
            "Bookings made",
            vec![(vec![], stats.decisions)],
        )?;
        out.counters(
            "no_worker",
            "Decisions without an eligible worker",
            vec![(vec![], stats.no_worker)],
        )?;
        out.counters(
            "expired_leases",
            "Bookings released because their lease ran out",
            vec![(vec![], stats.expired_leases)],
        )?;
        out.counters(
            "index_forgotten_blocks",
            "Blocks forgotten to keep within max_index_bytes",
            vec![(vec![], stats.forgotten_blocks)],
        )?;
        let placements = [stats.token_placements, stats.text_placements];
        let bytes = stats.index.bytes + placements.map(|of| of.bytes()).iter().sum::<usize>();
        out.gauges(
            "index_bytes",
            "Memory of the index, of pending blocks and of own placements",
            vec![(vec![], float(bytes))],
        )
    }
}

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Writer(encoder);
        self.encode_totals(&mut out)?;
        self.encode_workers(&mut out)?;
        self.encode_ranks(&mut out)?;
        self.encode_links(&mut out)?;
        self.encode_pool(&mut out)?;
        self.encode_balance(&mut out)
    }
}

struct Writer<'a>(DescriptorEncoder<'a>);

impl Writer<'_> {
    fn gauges(&mut self, name: &str, help: &str, series: Vec<(Labels, f64)>) -> fmt::Result {
        let mut family = self
            .0
            .encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in series {
            ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn counters(&mut self, name: &str, help: &str, series: Vec<(Labels, u64)>) -> fmt::Result {
        let mut family = self
            .0
            .encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in series {
            ConstCounter::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

fn flag(value: bool) -> f64 {
    f64::from(u8::from(value))
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts of blocks and requests stay far below 2^53"
)]
fn float(count: usize) -> f64 {
    count as f64
}
