//! Workers join, leave, drain, and are listed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::ids::{Role, WorkerRank};
use crate::index::{PrefixIndex, TierBlocks};
use crate::load::row::flag;
use crate::load::{LoadReport, TargetLoad};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::worker::{RankTrust, WorkerInfo, WorkerSpec};

use super::Router;
use super::state::{Duty, Target, Worker};

impl Router {
    /// Registers a worker.
    ///
    /// # Errors
    /// A worker of that id is registered, the spec is out of range, more than 65,536 ranks, or the router is closed. A block
    /// size that does not fit is no error: the worker is served approximately, with that cause.
    pub fn add_worker(&self, spec: WorkerSpec, now: Instant) -> Result<()> {
        spec.validate()?;
        self.inner.check_open()?;
        let mut registry = self.inner.registry.lock();
        let workers = registry.workers();
        if workers.by_id.contains_key(spec.id.as_str()) {
            return Err(Error::invalid(format!(
                "worker {:?} is registered already; remove it first",
                spec.id
            )));
        }
        // A removed worker's slot counts until its last booking is released.
        let in_use = registry.slots as usize - self.inner.free_slots.lock().len();
        if in_use + spec.dp_ranks as usize > MAX_TARGETS {
            return Err(Error::invalid(format!(
                "worker {:?} would be one too many: {MAX_TARGETS} ranks are accepted in all",
                spec.id
            )));
        }
        registry.lives += 1;
        let life = registry.lives;
        let duty = Duty {
            role: spec.role,
            labels: spec.labels.clone(),
        };
        let mut worker = Worker {
            duty: Mutex::new(duty),
            draining: AtomicBool::new(false),
            available: AtomicBool::new(true),
            capacity: AtomicUsize::new(spec.kv_capacity_blocks.unwrap_or(0)),
            targets: Vec::with_capacity(spec.dp_ranks as usize),
            spec,
        };
        let spec = &worker.spec;
        for dp_rank in 0..spec.dp_ranks {
            let slot = self.inner.take_slot(&mut registry);
            self.inner.expect_blocks(slot, spec.kv_capacity_blocks);
            let id = WorkerRank {
                worker: spec.id.clone(),
                dp_rank,
            };
            let trust = self.inner.new_trust(now);
            let row = self.inner.row(slot);
            row.begin(worker.flags() | flag::of_rank(dp_rank));
            row.set_belief(trust.state(), trust.fidelity());
            row.set_capacity_blocks(spec.kv_capacity_blocks);
            worker
                .targets
                .push(Arc::new(Target::new(id, slot, life, trust)));
        }
        let (id, block_size) = (spec.id.clone(), spec.block_size);
        self.inner.change_workers(&mut registry, |by_id| {
            by_id.insert(id.clone(), Arc::new(worker));
        });
        drop(registry);
        if let Some(size) = block_size {
            self.note_engine_block_size(id.as_str(), size.into(), now)?;
        }
        Ok(())
    }

    /// Removes a worker. When this returns, nothing of its life is left in any index, and nothing that is still queued for
    /// it will be applied; a worker of the same id added later begins empty. Its open bookings stay releasable.
    ///
    /// # Errors
    /// Unknown worker.
    pub fn remove_worker(&self, id: &str) -> Result<()> {
        let mut registry = self.inner.registry.lock();
        let worker = Arc::clone(registry.workers().worker(id)?);
        // Every call that could decide for this worker or note a placement on it has ended when this returns.
        self.inner.change_workers(&mut registry, |by_id| {
            by_id.remove(id);
        });
        for target in &worker.targets {
            target.stream.lock().removed = true;
            self.inner.row(target.slot).end();
            self.inner.forget(target);
            self.inner.expect_blocks(target.slot, None);
            if self.inner.with_load(target, TargetLoad::retire) {
                self.inner.free_slot(target.slot);
            }
        }
        Ok(())
    }

    /// Gives a worker nothing new; what it has goes on.
    ///
    /// # Errors
    /// Unknown worker.
    pub fn drain_worker(&self, id: &str) -> Result<()> {
        self.set_draining(id, true)
    }

    /// Takes back [`drain_worker`](Self::drain_worker): the worker is given requests again, and has kept its cache.
    ///
    /// # Errors
    /// Unknown worker.
    pub fn undrain_worker(&self, id: &str) -> Result<()> {
        self.set_draining(id, false)
    }

    fn set_draining(&self, id: &str, draining: bool) -> Result<()> {
        let workers = self.inner.workers.read();
        let worker = workers.worker(id)?;
        worker.draining.store(draining, Ordering::Relaxed);
        for target in &worker.targets {
            let row = self.inner.row(target.slot);
            row.set_flag(flag::DRAINING, draining);
        }
        Ok(())
    }

    /// Changes what a worker does. What is known of its caches stays, and so do its bookings; decisions that begin afterwards
    /// see the new role.
    ///
    /// # Errors
    /// Unknown worker.
    pub fn set_role(&self, id: &str, role: Role) -> Result<()> {
        let workers = self.inner.workers.read();
        let worker = workers.worker(id)?;
        // Held to the end: of two changes at once, all ranks follow the later.
        let mut duty = worker.duty.lock();
        duty.role = role;
        for target in &worker.targets {
            self.inner.row(target.slot).set_role(role);
        }
        Ok(())
    }

    /// Changes the labels that [`workers`](Self::workers) reports of a worker.
    ///
    /// # Errors
    /// Unknown worker.
    pub fn set_labels(&self, id: &str, labels: BTreeMap<String, String>) -> Result<()> {
        let workers = self.inner.workers.read();
        workers.worker(id)?.duty.lock().labels = labels;
        Ok(())
    }

    /// Says whether a worker may be chosen, as far as its health is known.
    ///
    /// # Errors
    /// Unknown worker.
    pub fn set_available(&self, id: &str, available: bool) -> Result<()> {
        let workers = self.inner.workers.read();
        let worker = workers.worker(id)?;
        worker.available.store(available, Ordering::Relaxed);
        for target in &worker.targets {
            let row = self.inner.row(target.slot);
            row.set_flag(flag::UNAVAILABLE, !available);
        }
        Ok(())
    }

    /// Sets the KV capacity of one rank, in blocks of the router's block size; `None` or 0 is unknown.
    ///
    /// # Errors
    /// Unknown worker.
    pub fn set_kv_capacity(&self, id: &str, blocks: Option<usize>) -> Result<()> {
        let workers = self.inner.workers.read();
        let worker = workers.worker(id)?;
        let blocks = blocks.filter(|blocks| *blocks > 0);
        if worker.capacity.swap(blocks.unwrap_or(0), Ordering::Relaxed) != blocks.unwrap_or(0) {
            for target in &worker.targets {
                self.inner.expect_blocks(target.slot, blocks);
                self.inner.row(target.slot).set_capacity_blocks(blocks);
            }
        }
        Ok(())
    }

    /// Takes note of an engine's block size, learned from its metrics or its configuration. One that is no multiple of the
    /// router's makes the worker approximate, with that cause.
    ///
    /// # Errors
    /// Unknown worker.
    pub fn note_engine_block_size(&self, id: &str, tokens: u32, now: Instant) -> Result<()> {
        let router = self.inner.config.block_size.tokens();
        let fits = tokens > 0 && (tokens as usize).is_multiple_of(router);
        let workers = self.inner.workers.read();
        for target in &workers.worker(id)?.targets {
            let mut stream = target.stream.lock();
            self.inner.with_trust(target, &mut stream, now, |trust, _| {
                if !fits {
                    trust.block_size_refused(tokens, router, now);
                }
            });
        }
        Ok(())
    }

    /// Takes in what an engine reports of its load. Without `dp_rank` the counts are spread over the worker's ranks.
    ///
    /// `asked` is when the engine was asked (now, where that is not known): bookings released since may be in the report and
    /// are not taken for somebody else's requests.
    ///
    /// # Errors
    /// Unknown worker or rank; a `kv_usage` that is not between 0 and 1.
    pub fn report_load(
        &self,
        id: &str,
        dp_rank: Option<u32>,
        report: LoadReport,
        asked: Instant,
    ) -> Result<()> {
        if !(0.0..=1.0).contains(&report.kv_usage) {
            return Err(Error::invalid(format!(
                "kv_usage {} of worker {id:?} is out of range: 0 to 1 is accepted",
                report.kv_usage
            )));
        }
        let workers = self.inner.workers.read();
        let worker = workers.worker(id)?;
        let capacity = worker.capacity_blocks();
        if let Some(dp_rank) = dp_rank {
            self.inner.with_load(workers.target(id, dp_rank)?, |load| {
                load.report(report, capacity, asked);
            });
            return Ok(());
        }
        let ranks = worker.spec.dp_ranks;
        for target in &worker.targets {
            let share = LoadReport {
                running: report.running.div_ceil(ranks),
                waiting: report.waiting / ranks,
                kv_usage: report.kv_usage,
            };
            self.inner
                .with_load(target, |load| load.report(share, capacity, asked));
        }
        Ok(())
    }

    /// Forgets what a worker's cache is known or believed to hold: one rank, or all of them.
    ///
    /// # Errors
    /// Unknown worker or rank.
    pub fn clear(&self, id: &str, dp_rank: Option<u32>) -> Result<()> {
        let workers = self.inner.workers.read();
        let targets = match dp_rank {
            Some(dp_rank) => std::slice::from_ref(workers.target(id, dp_rank)?),
            None => &workers.worker(id)?.targets[..],
        };
        for target in targets {
            let _stream = target.stream.lock();
            self.inner.forget(target);
        }
        Ok(())
    }

    /// Forgets where own placements went on a worker, and leaves to its events what they confirm: for a process that is known
    /// to have ended, by other evidence than its events.
    ///
    /// # Errors
    /// Unknown worker.
    pub fn forget_placements(&self, id: &str) -> Result<()> {
        let workers = self.inner.workers.read();
        for target in &workers.worker(id)?.targets {
            self.inner.token_placements.clear(target.slot);
            self.inner.text_placements.clear(target.slot);
        }
        Ok(())
    }

    /// Lists the workers by id.
    #[must_use]
    pub fn workers(&self, now: Instant) -> Vec<WorkerInfo> {
        self.tick_if_due(now);
        let workers = self.inner.workers.read();
        workers
            .by_id
            .values()
            .map(|worker| self.describe(worker, now))
            .collect()
    }

    /// Counts the workers that may be chosen and need no more waiting: on every rank, events are heard, or it is settled that
    /// they cannot be used.
    #[must_use]
    pub fn ready_workers(&self, now: Instant) -> usize {
        self.tick_if_due(now);
        let workers = self.inner.workers.read();
        workers
            .by_id
            .values()
            .filter(|worker| {
                !worker.draining.load(Ordering::Relaxed)
                    && worker.available.load(Ordering::Relaxed)
                    && worker
                        .targets
                        .iter()
                        .all(|target| self.inner.row(target.slot).trust().is_settled())
            })
            .count()
    }

    fn describe(&self, worker: &Worker, now: Instant) -> WorkerInfo {
        let duty = worker.duty.lock();
        let mut info = WorkerInfo {
            id: worker.spec.id.clone(),
            dp_ranks: worker.spec.dp_ranks,
            role: duty.role,
            draining: worker.draining.load(Ordering::Relaxed),
            available: worker.available.load(Ordering::Relaxed),
            active_requests: 0,
            active_blocks: 0,
            prefill_blocks: 0.0,
            index_blocks: TierBlocks::default(),
            predicted_blocks: 0,
            kv_capacity_blocks: worker.capacity_blocks(),
            labels: duty.labels.clone(),
            trust: Vec::with_capacity(worker.targets.len()),
        };
        drop(duty);
        for target in &worker.targets {
            self.inner.with_load(target, |load| {
                info.active_requests += load.requests();
                info.active_blocks += load.blocks();
                info.prefill_blocks += load.prefill_blocks();
            });
            let held = self.inner.index.slot_blocks(target.slot);
            info.index_blocks.device += held.device;
            info.index_blocks.host += held.host;
            info.index_blocks.disk += held.disk;
            info.index_blocks.external += held.external;
            info.predicted_blocks += self.inner.token_placements.blocks(target.slot)
                + self.inner.text_placements.blocks(target.slot);
            info.trust.push(rank_trust(target, now));
        }
        info
    }
}

/// Slots are dense and 16 bits of them are plenty; the bound keeps every per-slot array small.
const MAX_TARGETS: usize = 65_536;

fn rank_trust(target: &Target, now: Instant) -> RankTrust {
    let stream = target.stream.lock();
    RankTrust {
        dp_rank: target.id.dp_rank,
        state: stream.trust.state(),
        fidelity: stream.trust.fidelity(),
        cause: stream.trust.cause().map(str::to_owned),
        since_seconds: now
            .saturating_duration_since(stream.trust.since())
            .as_secs_f64(),
        batches: stream.batches,
        events: stream.events,
        gaps: stream.gaps,
        skipped: stream.skipped.clone(),
    }
}
