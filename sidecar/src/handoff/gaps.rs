//! Learns how long streams wait between tokens: alone, while a prompt is processed beside them, and while a cache arrives.
//!
//! Whoever forwards a stream tells of its pieces, whoever sends work to a worker tells of that; the planner is taught what
//! the one does to the other. What is unclear teaches nothing: pieces with several tokens, work that overlaps with other
//! work, answers of which it is not known when their prompt was done. The rest are medians, so a client that reads slowly
//! bends nothing.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvlane::handoff::{GapCause, HandoffPlanner, PlanWorker};
use kvlane::{Role, WorkerRank};
use memchr::memmem;
use parking_lot::{Mutex, RwLock};

/// The gaps of every worker's streams.
#[derive(Debug)]
pub struct Gaps {
    planner: Arc<HandoffPlanner>,
    ranks: RwLock<HashMap<WorkerRank, Arc<RankGaps>>>,
}

impl Gaps {
    /// Forgets the workers that `keep` does not name; streams that they still have go on without effect.
    pub fn retain(&self, keep: impl Fn(&WorkerRank) -> bool) {
        self.ranks.write().retain(|rank, _| keep(rank));
    }

    /// Creates an observer that teaches `planner`.
    #[must_use]
    pub fn new(planner: Arc<HandoffPlanner>) -> Self {
        Self {
            planner,
            ranks: RwLock::default(),
        }
    }

    /// Returns those of one worker.
    #[must_use]
    pub fn of(&self, target: &WorkerRank) -> Arc<RankGaps> {
        if let Some(rank) = self.ranks.read().get(target) {
            return Arc::clone(rank);
        }
        let mut ranks = self.ranks.write();
        // Workers come and go; those that nobody uses any more are forgotten.
        if ranks.len() >= PRUNED_ABOVE {
            ranks.retain(|_, rank| Arc::strong_count(rank) > 1);
        }
        let new = || Arc::new(RankGaps::new(Arc::clone(&self.planner), target));
        Arc::clone(ranks.entry(target.clone()).or_insert_with(new))
    }
}

const PRUNED_ABOVE: usize = 4_096;

/// The gaps of the streams on one worker.
#[derive(Debug)]
pub struct RankGaps {
    planner: Arc<HandoffPlanner>,
    worker: PlanWorker,
    /// Disturbances that are not over, or whose last gap has not come.
    open: AtomicUsize,
    /// Counts beginnings and ends, so that a stream notices what came and went between two of its tokens.
    changes: AtomicU64,
    disturbances: Mutex<Vec<Disturbance>>,
    next: AtomicU64,
    created: Instant,
    /// When a quiet gap was last taken, in milliseconds since `created`.
    sampled: AtomicU64,
}

/// What holds streams up.
#[derive(Debug)]
struct Disturbance {
    id: u64,
    /// What it teaches of; nothing when it overlapped with another.
    cause: Option<GapCause>,
    begun: Instant,
    ended: Option<Instant>,
    /// The longest gap of each stream meanwhile.
    longest: Vec<(u64, Duration)>,
}

/// Quiet gaps are taken this far apart: each takes the planner's lock, and a median needs no more.
const SAMPLE_EVERY: u64 = 20;
/// No engine makes tokens that quickly: they came together.
const SHORTEST: Duration = Duration::from_micros(200);
/// Streams of which one disturbance is learned.
const WITNESSES: usize = 32;
/// Nobody says when the prompt of an answer without a stream was done. Those that take longer are outliers.
const UNKNOWN_END: Duration = Duration::from_secs(2);

impl RankGaps {
    fn new(planner: Arc<HandoffPlanner>, target: &WorkerRank) -> Self {
        Self {
            planner,
            worker: PlanWorker::new(target.clone(), Role::Both),
            open: AtomicUsize::new(0),
            changes: AtomicU64::new(0),
            disturbances: Mutex::default(),
            next: AtomicU64::new(0),
            created: Instant::now(),
            sampled: AtomicU64::new(0),
        }
    }

    /// Tells that work was sent which streams may notice, until the guard is dropped. Without a cause it is only kept from
    /// being taken for quiet.
    pub fn disturb(self: &Arc<Self>, cause: Option<GapCause>, now: Instant) -> Disturbing {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut list = self.disturbances.lock();
        let over: Vec<_> = list
            .extract_if(.., |other| other.end(now).is_some())
            .collect();
        let alone = list.is_empty();
        list.iter_mut().for_each(|other| other.cause = None);
        list.push(Disturbance {
            id,
            cause: cause.filter(|_| alone),
            begun: now,
            ended: None,
            longest: Vec::new(),
        });
        self.changed(&list);
        drop(list);
        self.teach(over);
        Disturbing {
            rank: Arc::clone(self),
            id,
        }
    }

    /// Begins to follow a stream.
    #[must_use]
    pub fn follow(self: &Arc<Self>) -> StreamGaps {
        StreamGaps {
            id: self.next.fetch_add(1, Ordering::Relaxed),
            rank: Arc::clone(self),
            last: None,
            changes: 0,
        }
    }

    fn changed(&self, list: &[Disturbance]) {
        self.open.store(list.len(), Ordering::Release);
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    fn end(&self, id: u64, now: Instant) {
        let mut list = self.disturbances.lock();
        if let Some(it) = list.iter_mut().find(|it| it.id == id) {
            it.ended = Some(now);
            self.changed(&list);
        }
    }

    /// Takes in a gap in which nothing else went on.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "milliseconds fit 64 bits for long enough"
    )]
    fn quiet(&self, gap: Duration, now: Instant) {
        let at = now.saturating_duration_since(self.created).as_millis() as u64;
        let before = self.sampled.load(Ordering::Relaxed);
        if at < before + SAMPLE_EVERY {
            return;
        }
        self.sampled.store(at, Ordering::Relaxed);
        self.planner
            .observe_gap(&self.worker, gap, GapCause::Decode);
    }

    /// Takes in a gap in which something else went on, or may have.
    fn disturbed(&self, stream: u64, from: Instant, now: Instant) {
        let mut list = self.disturbances.lock();
        for it in list.iter_mut() {
            if it.end(now).is_none_or(|end| from < end) {
                it.witness(stream, now - from);
            }
        }
        // A gap that began after its end was the last that could show it.
        let over: Vec<_> = list
            .extract_if(.., |it| it.end(now).is_some_and(|end| from >= end))
            .collect();
        if !over.is_empty() {
            self.changed(&list);
        }
        drop(list);
        self.teach(over);
    }

    fn teach(&self, over: Vec<Disturbance>) {
        for mut it in over {
            it.longest.sort_unstable_by_key(|(_, gap)| *gap);
            if let (Some(cause), Some((_, gap))) = (it.cause, it.longest.get(it.longest.len() / 2))
            {
                self.planner.observe_gap(&self.worker, *gap, cause);
            }
        }
    }
}

impl Disturbance {
    fn end(&self, now: Instant) -> Option<Instant> {
        let by_itself = || {
            let end = self.begun + UNKNOWN_END;
            (self.cause.is_none() && end <= now).then_some(end)
        };
        self.ended.or_else(by_itself)
    }

    fn witness(&mut self, stream: u64, gap: Duration) {
        if let Some((_, longest)) = self.longest.iter_mut().find(|(id, _)| *id == stream) {
            *longest = gap.max(*longest);
        } else if self.longest.len() < WITNESSES {
            self.longest.push((stream, gap));
        }
    }
}

/// Returns the cause, if what it does to streams stands out of their usual unsteadiness, which would else be divided by few
/// tokens: a prompt that takes some steps' time, and an arrival of some ten milliseconds where 8.8 µs a token were measured.
#[must_use]
pub fn noticeable(cause: GapCause) -> Option<GapCause> {
    let (tokens, least) = match cause {
        GapCause::Decode => return None,
        GapCause::Prefill(work) => (work.input_tokens.saturating_sub(work.cached_tokens), 256),
        GapCause::Transfer { tokens } => (tokens, 1_024),
    };
    (tokens >= least).then_some(cause)
}

/// Work that streams may notice; it ends when this is dropped.
#[derive(Debug)]
#[must_use = "the work is taken to be over when this is dropped"]
pub struct Disturbing {
    rank: Arc<RankGaps>,
    id: u64,
}

impl Drop for Disturbing {
    fn drop(&mut self) {
        self.rank.end(self.id, Instant::now());
    }
}

/// One stream's gaps.
#[derive(Debug)]
pub struct StreamGaps {
    rank: Arc<RankGaps>,
    id: u64,
    last: Option<Instant>,
    changes: u64,
}

impl StreamGaps {
    /// Takes in a piece of the stream. Costs a search through it and two loads, and a lock when something else goes on.
    pub fn piece(&mut self, piece: &[u8], now: Instant) {
        self.tokens(events(piece), now);
    }

    fn tokens(&mut self, events: usize, now: Instant) {
        let changes = self.rank.changes.load(Ordering::Acquire);
        let before = std::mem::replace(&mut self.changes, changes);
        let Some(last) = self.last.replace(now) else {
            return;
        };
        // Several at once came late, and a part of one is no token. Pieces may also have waited for their reader one by one.
        if events != 1 || now.saturating_duration_since(last) < SHORTEST {
            return;
        }
        if before == changes && self.rank.open.load(Ordering::Acquire) == 0 {
            self.rank.quiet(now - last, now);
        } else {
            self.rank.disturbed(self.id, last, now);
        }
    }
}

/// Counts the events that begin in a piece.
fn events(piece: &[u8]) -> usize {
    let first = usize::from(piece.starts_with(b"data:"));
    first + memmem::find_iter(piece, b"\ndata:").count()
}

#[cfg(test)]
mod tests {
    use kvlane::WorkerId;
    use kvlane::handoff::{HandoffConfig, PrefillSeed, PrefillStats, PrefillWork};

    use super::*;

    struct Bench {
        planner: Arc<HandoffPlanner>,
        rank: Arc<RankGaps>,
        now: Instant,
        streams: Vec<StreamGaps>,
    }

    impl Bench {
        fn new(streams: usize) -> Self {
            let planner = Arc::new(HandoffPlanner::new(HandoffConfig::default()).unwrap());
            let target = WorkerRank {
                worker: WorkerId::new("d").unwrap(),
                dp_rank: 0,
            };
            // 1,000 tokens a second: a prompt of 500 tokens is one step of 0.5 s.
            let seed = PrefillSeed::tokens_per_second(1_000.0);
            planner.seed_prefill(&target, &seed).unwrap();
            let rank = Gaps::new(Arc::clone(&planner)).of(&target);
            let streams = (0..streams).map(|_| rank.follow()).collect();
            let mut bench = Self {
                planner,
                rank,
                now: Instant::now(),
                streams,
            };
            bench.tokens(0);
            bench
        }

        /// Every stream has its next token.
        fn tokens(&mut self, after_ms: u64) {
            self.now += Duration::from_millis(after_ms);
            for stream in &mut self.streams {
                stream.tokens(1, self.now);
            }
        }

        fn prefill(&self) -> Disturbing {
            let work = PrefillWork {
                input_tokens: 500,
                ..PrefillWork::default()
            };
            self.rank.disturb(Some(GapCause::Prefill(work)), self.now)
        }

        fn end(&self, disturbing: Disturbing) {
            self.rank.end(disturbing.id, self.now);
            std::mem::forget(disturbing);
        }

        fn known(&self) -> PrefillStats {
            self.planner.stats().prefill.remove(0)
        }
    }

    fn close(value: Option<f64>, expected: f64) -> bool {
        value.is_some_and(|value| (value - expected).abs() < 1e-6)
    }

    #[test]
    fn gaps_with_and_without_a_prompt_are_told_apart() {
        let mut bench = Bench::new(8);
        for _ in 0..10 {
            bench.tokens(30);
        }
        for _ in 0..3 {
            let prompt = bench.prefill();
            bench.tokens(30);
            bench.tokens(280);
            bench.end(prompt);
            // The step in which the prompt ended is the last that shows it.
            bench.tokens(40);
            bench.tokens(30);
        }
        let known = bench.known();
        assert!(close(known.gap_seconds, 0.03), "{known:?}");
        // 0.28 s less the usual 0.03 s, where one step of 0.5 s was predicted.
        assert!(close(known.prefill_stall, 0.5), "{known:?}");
        assert_eq!(known.stall_measurements, 3);
    }

    #[test]
    fn one_slow_reader_and_one_slow_step_bend_nothing() {
        let mut bench = Bench::new(5);
        for number in 0..60 {
            // Each seventh step of the engine is slow.
            bench.tokens(if number % 7 == 0 { 900 } else { 30 });
        }
        let prompt = bench.prefill();
        bench.tokens(280);
        // One of five reads its next token seconds later than the others.
        bench.streams[0].last = Some(bench.now);
        bench.end(prompt);
        let late = bench.now + Duration::from_secs(9);
        let (first, others) = bench.streams.split_at_mut(1);
        let now = bench.now + Duration::from_millis(30);
        others.iter_mut().for_each(|stream| stream.tokens(1, now));
        first[0].tokens(1, late);
        bench.now = late;
        bench.tokens(30);
        let known = bench.known();
        assert!(close(known.gap_seconds, 0.03), "{known:?}");
        assert!(close(known.prefill_stall, 0.5), "{known:?}");
    }

    #[test]
    fn what_is_unclear_teaches_nothing() {
        let mut bench = Bench::new(2);
        let (one, other) = (bench.prefill(), bench.prefill());
        bench.tokens(400);
        bench.end(one);
        bench.end(other);
        bench.tokens(30);
        bench.tokens(30);
        // Several tokens at once, and parts of one.
        bench.now += Duration::from_millis(500);
        bench.streams[0].tokens(3, bench.now);
        bench.streams[1].tokens(0, bench.now);
        // One by one, but out of a queue.
        for _ in 0..100 {
            bench.now += Duration::from_micros(3);
            bench.streams[0].tokens(1, bench.now);
        }
        let known = bench.known();
        assert_eq!(known.prefill_stall, None);
        assert!(close(known.gap_seconds, 0.03), "{known:?}");
    }

    #[test]
    fn an_answer_without_a_stream_does_not_keep_gaps_from_being_learned() {
        let mut bench = Bench::new(1);
        let whole = bench.rank.disturb(None, bench.now);
        for _ in 0..50 {
            bench.tokens(25);
        }
        assert_eq!(bench.known().gap_seconds, None);
        for _ in 0..50 {
            bench.tokens(25);
        }
        assert!(
            close(bench.known().gap_seconds, 0.025),
            "{:?}",
            bench.known()
        );
        drop(whole);
    }

    #[test]
    fn an_arriving_cache_is_learned_by_its_tokens() {
        let mut bench = Bench::new(1);
        for _ in 0..3 {
            bench.tokens(30);
        }
        let arriving = bench
            .rank
            .disturb(Some(GapCause::Transfer { tokens: 1_000 }), bench.now);
        bench.tokens(130);
        bench.end(arriving);
        bench.tokens(30);
        bench.tokens(30);
        let known = bench.known();
        assert!(
            close(known.transfer_stall_seconds_per_token, 0.1 / 1_000.0),
            "{known:?}"
        );
    }

    #[test]
    fn what_is_lost_in_noise_is_not_noticed() {
        let prompt = |input_tokens, cached_tokens| {
            noticeable(GapCause::Prefill(PrefillWork {
                input_tokens,
                cached_tokens,
                queued_tokens: 0,
            }))
        };
        assert!(prompt(1_000, 744).is_some());
        assert_eq!(prompt(1_000, 745), None);
        assert_eq!(prompt(1_000, 2_000), None);
        assert_eq!(noticeable(GapCause::Transfer { tokens: 1_023 }), None);
        assert!(noticeable(GapCause::Transfer { tokens: 1_024 }).is_some());
    }

    #[test]
    fn events_are_counted_where_they_begin() {
        for (piece, count) in [
            ("data: {}\n\n", 1),
            ("data: {}\n\ndata: {}\n\n", 2),
            ("\"}\n\n", 0),
            ("\n\ndata: {\"text\": \"data: x\"}\n\n", 1),
        ] {
            assert_eq!(events(piece.as_bytes()), count, "{piece}");
        }
    }
}
