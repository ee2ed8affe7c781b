//! Engine events come in.

use std::time::Instant;

use crate::config::IndexMode;
use crate::error::Result;
use crate::event::apply::{apply_batch, skip};
use crate::event::gap::Verdict;
use crate::event::wire::decode_batch;
use crate::event::{EventBatch, IngestReport, SkipReason};
use crate::index::PrefixIndex;

use super::Router;
use super::state::{Inner, Stream, Target};

impl Router {
    /// Applies one batch of events as an engine published it (the third frame of its message).
    ///
    /// With `sequence`, batches are checked against each other: one that was applied before is skipped, a jump is a gap
    /// (`report.gap`; what is held becomes unconfirmed and goes after the TTL unless stored again), a step back means that
    /// the engine restarted (its old entries are cleared first). Without, the batch is applied as it is.
    ///
    /// An undecodable payload changes no entry: the report has `applied == 0` and the reason. So has every payload when the
    /// router is configured with [`IndexMode::Approximate`].
    ///
    /// # Errors
    /// Unknown worker or rank; the router is closed.
    pub fn ingest(
        &self,
        worker: &str,
        dp_rank: u32,
        sequence: Option<u64>,
        payload: &[u8],
        now: Instant,
    ) -> Result<IngestReport> {
        self.inner.check_open()?;
        let target = {
            let workers = self.inner.workers.read();
            std::sync::Arc::clone(workers.target(worker, dp_rank)?)
        };
        let decoded = match self.inner.config.index {
            IndexMode::Events => Some(decode_batch(payload)),
            IndexMode::Approximate => None,
        };
        let mut stream = target.stream.lock();
        if stream.removed {
            return Err(crate::error::Error::unknown_worker(worker));
        }
        let report = match decoded {
            Some(Ok(batch)) => {
                self.inner
                    .apply(&target, &mut stream, sequence, payload, &batch, now)
            }
            Some(Err(error)) => self.inner.undecodable(
                &target,
                &mut stream,
                sequence,
                payload,
                &error.to_string(),
                now,
            ),
            None => {
                let mut report = IngestReport::default();
                skip(&mut report, SkipReason::ApproximateIndex, 1);
                report
            }
        };
        stream.events += report.applied;
        for (reason, count) in &report.skipped {
            *stream.skipped.entry(*reason).or_insert(0) += count;
        }
        drop(stream);
        self.inner.keep_budget();
        Ok(report)
    }

    /// Returns the sequence number that would be contiguous, `None` before the first batch of a life.
    ///
    /// # Errors
    /// Unknown worker or rank.
    pub fn next_sequence(&self, worker: &str, dp_rank: u32) -> Result<Option<u64>> {
        let workers = self.inner.workers.read();
        Ok(workers
            .target(worker, dp_rank)?
            .stream
            .lock()
            .tracker
            .next())
    }

    /// Tells whether this very payload came under this number before: `Some(false)` is another life of the engine, `None`
    /// a number that is not among the last 1,024.
    ///
    /// # Errors
    /// Unknown worker or rank.
    pub fn is_known_batch(
        &self,
        worker: &str,
        dp_rank: u32,
        sequence: u64,
        payload: &[u8],
    ) -> Result<Option<bool>> {
        let workers = self.inner.workers.read();
        let target = workers.target(worker, dp_rank)?;
        Ok(target.stream.lock().tracker.is_known(sequence, payload))
    }

    /// Says that the engine began anew: forgets its blocks and its sequence.
    ///
    /// # Errors
    /// Unknown worker or rank.
    pub fn restart_stream(
        &self,
        worker: &str,
        dp_rank: u32,
        cause: &str,
        now: Instant,
    ) -> Result<()> {
        self.with_stream(worker, dp_rank, |inner, target, stream| {
            inner.forget(target);
            stream.tracker.reset();
            inner.with_trust(target, stream, now, |trust, _| trust.restarted(cause, now));
        })
    }

    /// Says that the event stream is connected, which proves nothing yet.
    ///
    /// # Errors
    /// Unknown worker or rank.
    pub fn stream_up(&self, worker: &str, dp_rank: u32, now: Instant) -> Result<()> {
        self.with_stream(worker, dp_rank, |inner, target, stream| {
            inner.with_trust(target, stream, now, |trust, _| trust.stream_up(now));
        })
    }

    /// Says that the event stream cannot be reached, and why.
    ///
    /// # Errors
    /// Unknown worker or rank.
    pub fn stream_down(&self, worker: &str, dp_rank: u32, cause: &str, now: Instant) -> Result<()> {
        self.with_stream(worker, dp_rank, |inner, target, stream| {
            inner.with_trust(target, stream, now, |trust, _| {
                trust.stream_down(cause, now)
            });
        })
    }

    fn with_stream(
        &self,
        worker: &str,
        dp_rank: u32,
        act: impl FnOnce(&Inner, &Target, &mut Stream),
    ) -> Result<()> {
        let workers = self.inner.workers.read();
        let target = workers.target(worker, dp_rank)?;
        act(&self.inner, target, &mut target.stream.lock());
        Ok(())
    }
}

impl Inner {
    fn apply(
        &self,
        target: &Target,
        stream: &mut Stream,
        sequence: Option<u64>,
        payload: &[u8],
        batch: &EventBatch,
        now: Instant,
    ) -> IngestReport {
        let mut report = IngestReport::default();
        if let Some(sequence) = sequence {
            let verdict = stream.tracker.observe(sequence, payload, Some(batch.ts));
            if verdict == Verdict::Duplicate {
                skip(&mut report, SkipReason::DuplicateBatch, 1);
                return report;
            }
            self.heed(target, stream, sequence, verdict, &mut report, now);
        } else {
            self.with_trust(target, stream, now, |trust, limits| {
                trust.continued(limits, now)
            });
        }
        stream.batches += 1;
        let block_size = self.config.block_size;
        let applied = apply_batch(
            &self.index,
            target.slot,
            block_size,
            batch,
            now,
            &mut report,
        );
        self.note_resident(target);
        if applied.cleared {
            // The engine dropped what our placements had put there, too.
            self.token_placements.clear(target.slot);
            self.text_placements.clear(target.slot);
        }
        self.with_trust(target, stream, now, |trust, _| {
            if applied.accepted_store {
                trust.block_size_accepted(now);
            } else if let Some(engine) = applied.refused_block_size {
                trust.block_size_refused(engine, block_size.tokens(), now);
            }
        });
        report
    }

    /// Acts on what the position of a batch in its stream means.
    fn heed(
        &self,
        target: &Target,
        stream: &mut Stream,
        sequence: u64,
        verdict: Verdict,
        report: &mut IngestReport,
        now: Instant,
    ) {
        match verdict {
            Verdict::Next | Verdict::Duplicate => {
                self.with_trust(target, stream, now, |trust, limits| {
                    trust.continued(limits, now)
                });
            }
            Verdict::Start => self.with_trust(target, stream, now, |trust, _| trust.started(now)),
            Verdict::Late => self.with_trust(target, stream, now, |trust, limits| {
                trust.joined_late(sequence, limits, now);
            }),
            Verdict::Gap { lost } => {
                report.gap = true;
                stream.gaps += 1;
                self.index.demote(target.slot);
                self.with_trust(target, stream, now, |trust, limits| {
                    trust.lost(lost, limits, now)
                });
            }
            Verdict::Restart => {
                report.restarted = true;
                self.forget(target);
                self.with_trust(target, stream, now, |trust, limits| {
                    if sequence == 0 {
                        trust.started(now);
                    } else {
                        trust.joined_late(sequence, limits, now);
                    }
                });
            }
        }
    }

    fn undecodable(
        &self,
        target: &Target,
        stream: &mut Stream,
        sequence: Option<u64>,
        payload: &[u8],
        why: &str,
        now: Instant,
    ) -> IngestReport {
        let mut report = IngestReport::default();
        skip(&mut report, SkipReason::Undecodable, 1);
        if let Some(sequence) = sequence {
            if stream.tracker.next().is_some_and(|next| sequence < next) {
                return report; // a damaged copy of the past says nothing
            }
            // The number is used up: asking for it again would bring the same bytes.
            stream.tracker.observe(sequence, payload, None);
        }
        if self.with_trust(target, stream, now, |trust, limits| {
            trust.undecodable(why, limits, now)
        }) {
            self.index.demote(target.slot);
        }
        report
    }
}
