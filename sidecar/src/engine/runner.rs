//! The step loop: one thread that schedules, publishes, lets the engine's time pass and hands out tokens.
//!
//! The real engine core is a process of its own; here it is a thread of its own, which also makes sleeps far shorter
//! than an async timer's millisecond exact enough. It sleeps until a deadline that advances by the length of each step,
//! so an early or late wake-up is made good by the next one, and steps too short to sleep for are done ahead of time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kvlane::event::encode::encode_batch;
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

use super::batch::event_batch;
use super::config::EngineConfig;
use super::kv::CacheEvent;
use super::publisher::Publisher;
use super::scheduler::{Scheduler, Step};
use super::sequence::{Delivery, NewSequence};
use super::stats::EngineStats;
use super::transfer::Ledger;

/// What the step loop shares with the HTTP side.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    state: Mutex<InboxState>,
    changed: Condvar,
    stats: Mutex<EngineStats>,
}

#[derive(Debug, Default)]
struct InboxState {
    commands: VecDeque<Command>,
    /// Prompts among the commands.
    queued: usize,
    /// Prompts in the scheduler's queue.
    waiting: usize,
    stopped: bool,
}

#[derive(Debug)]
enum Command {
    Add(Vec<NewSequence>),
    Reset(oneshot::Sender<bool>),
    /// Give back what was held for another engine.
    Free(Arc<str>),
}

impl Inbox {
    /// Queues the prompts of one request; false when too many wait or the engine has stopped.
    pub(super) fn submit(&self, sequences: Vec<NewSequence>) -> bool {
        let mut state = self.state.lock();
        if state.stopped || state.queued + state.waiting + sequences.len() > MAX_WAITING {
            return false;
        }
        state.queued += sequences.len();
        state.commands.push_back(Command::Add(sequences));
        drop(state);
        self.changed.notify_one();
        true
    }

    /// Asks for a cache reset; the answer comes between two steps.
    pub(super) fn reset(&self) -> oneshot::Receiver<bool> {
        let (done, receiver) = oneshot::channel();
        let mut state = self.state.lock();
        if !state.stopped {
            state.commands.push_back(Command::Reset(done));
        }
        drop(state);
        self.changed.notify_one();
        receiver
    }

    /// Gives back what was held for another engine under a name.
    pub(super) fn free(&self, name: Arc<str>) {
        self.state.lock().commands.push_back(Command::Free(name));
        self.changed.notify_one();
    }

    /// Makes the step loop end at once.
    pub(super) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_one();
    }

    /// Returns the numbers of the last finished step.
    pub(super) fn stats(&self) -> EngineStats {
        *self.stats.lock()
    }

    /// Takes the commands, waiting for one when `idle`; `None` says stop.
    fn take(&self, idle: bool) -> Option<VecDeque<Command>> {
        let mut state = self.state.lock();
        while idle && state.commands.is_empty() && !state.stopped {
            self.changed.wait(&mut state);
        }
        if state.stopped {
            return None;
        }
        // They are counted as waiting until the scheduler says otherwise.
        state.waiting += std::mem::take(&mut state.queued);
        Some(std::mem::take(&mut state.commands))
    }

    /// Sleeps until `deadline`; false says stop.
    fn sleep_until(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        while !state.stopped && Instant::now() < deadline {
            self.changed.wait_until(&mut state, deadline);
        }
        !state.stopped
    }

    fn update(&self, scheduler: &Scheduler) {
        self.state.lock().waiting = scheduler.waiting();
        *self.stats.lock() = EngineStats::of(scheduler);
    }
}

/// The step loop's own state.
#[derive(Debug)]
pub(super) struct Runner {
    inbox: Arc<Inbox>,
    scheduler: Scheduler,
    publisher: Option<Publisher>,
    ledger: Option<Arc<Ledger>>,
    block_size: u32,
    costs: StepCosts,
    last_ts: f64,
}

impl Runner {
    /// Puts the parts together.
    pub(super) fn new(
        inbox: Arc<Inbox>,
        scheduler: Scheduler,
        publisher: Option<Publisher>,
        ledger: Option<Arc<Ledger>>,
        config: &EngineConfig,
    ) -> Self {
        inbox.update(&scheduler);
        Self {
            inbox,
            scheduler,
            publisher,
            ledger,
            block_size: config.block_size,
            costs: StepCosts::new(config),
            last_ts: 0.0,
        }
    }

    /// Steps until told to stop. What is in flight then is dropped, as when a process dies.
    pub(super) fn run(mut self) {
        let mut pace = Pace::new(Instant::now());
        loop {
            let idle = !self.scheduler.has_work();
            let Some(commands) = self.inbox.take(idle) else {
                return;
            };
            if idle {
                pace.resume(Instant::now());
            }
            for command in commands {
                self.apply(command);
            }
            self.scheduler.drop_abandoned();
            if self.scheduler.has_work() {
                let mut step = self.scheduler.schedule();
                self.publish(std::mem::take(&mut step.events));
                let now = Instant::now();
                // All room may be held for other engines; then nothing runs until some is given back.
                let deadline = if step.is_empty() {
                    Some(now + WAIT_FOR_ROOM)
                } else {
                    pace.advance(self.costs.duration(&step), now)
                };
                self.inbox.update(&self.scheduler);
                if deadline.is_some_and(|deadline| !self.inbox.sleep_until(deadline)) {
                    return;
                }
                let completed = self.scheduler.complete();
                self.hold(&completed.held);
                // Counted before it is handed out: whoever has the answer finds it in the numbers.
                self.inbox.update(&self.scheduler);
                completed.deliveries.into_iter().for_each(Delivery::send);
            } else {
                self.inbox.update(&self.scheduler);
            }
        }
    }

    /// Enters what is held now, before anybody is told of it.
    fn hold(&mut self, names: &[Arc<str>]) {
        for name in names {
            let ledger = self.ledger.as_ref();
            if !ledger.is_some_and(|ledger| ledger.hold(name, self.scheduler.held(name))) {
                self.scheduler.free(name);
            }
        }
    }

    fn apply(&mut self, command: Command) {
        match command {
            Command::Add(sequences) => sequences
                .into_iter()
                .for_each(|sequence| self.scheduler.add(sequence)),
            Command::Free(name) => self.scheduler.free(&name),
            Command::Reset(done) => {
                let reset = self.scheduler.reset_cache();
                if !reset {
                    tracing::warn!("cache not reset: requests hold blocks");
                }
                // Whoever asked may be gone.
                let _ = done.send(reset);
            }
        }
    }

    fn publish(&mut self, events: Vec<CacheEvent>) {
        let Some(publisher) = self.publisher.as_ref().filter(|_| !events.is_empty()) else {
            return;
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let ts = now.unwrap_or_default().as_secs_f64().max(self.last_ts);
        self.last_ts = ts;
        publisher.publish(encode_batch(&event_batch(ts, events, self.block_size)));
    }
}

/// How long a step takes, `speed` applied.
#[derive(Debug)]
struct StepCosts {
    prefill_overhead_seconds: f64,
    prefill_token_seconds: f64,
    decode_seconds: f64,
}

impl StepCosts {
    fn new(config: &EngineConfig) -> Self {
        Self {
            prefill_overhead_seconds: config.prefill_overhead_ms / 1000.0 / config.speed,
            prefill_token_seconds: 1.0 / config.prefill_tokens_per_second / config.speed,
            decode_seconds: config.decode_ms / 1000.0 / config.speed,
        }
    }

    /// Decodes ride along with prefills and wait for them, so only the longer of the two fixed parts counts.
    fn duration(&self, step: &Step) -> Duration {
        let mut fixed = 0.0_f64;
        if step.prefill_tokens > 0 {
            fixed = fixed.max(self.prefill_overhead_seconds);
        }
        if step.decodes > 0 {
            fixed = fixed.max(self.decode_seconds);
        }
        #[expect(
            clippy::cast_precision_loss,
            reason = "a batch is far below 2^52 tokens"
        )]
        let prefill = step.prefill_tokens as f64 * self.prefill_token_seconds;
        Duration::from_secs_f64(fixed + prefill)
    }
}

/// The engine's own time against the clock.
#[derive(Debug)]
struct Pace {
    deadline: Instant,
}

impl Pace {
    const fn new(now: Instant) -> Self {
        Self { deadline: now }
    }

    /// Begins to work after a pause: idle time is no debt.
    fn resume(&mut self, now: Instant) {
        self.deadline = self.deadline.max(now);
    }

    /// Lets `step` pass; returns until when to sleep, if it is worth it.
    fn advance(&mut self, step: Duration, now: Instant) -> Option<Instant> {
        self.deadline += step;
        if self.deadline + MAX_DEBT < now {
            self.deadline = now;
        }
        (self.deadline > now + SHORTEST_SLEEP).then_some(self.deadline)
    }
}

/// The operating system wakes a sleeper about 50 µs late (its timer slack), so shorter sleeps only add error.
const SHORTEST_SLEEP: Duration = Duration::from_micros(50);

/// A delay beyond this is not made good: it would shorten the steps of whoever comes next.
const MAX_DEBT: Duration = Duration::from_millis(2);

/// How often a queue without room is looked at.
const WAIT_FOR_ROOM: Duration = Duration::from_millis(1);

/// Prompts that may wait; each holds its tokens in memory.
const MAX_WAITING: usize = 65_536;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_steps_add_up_to_their_length() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let mut now = start;
        for _ in 0..10_000 {
            // A sleeper that wakes 60 µs late each time.
            if let Some(deadline) = pace.advance(Duration::from_micros(20), now) {
                now = deadline + Duration::from_micros(60);
            }
        }
        let elapsed = now - start;
        // 10,000 × 20 µs = 200 ms, within one late wake-up and one short sleep.
        assert!(
            elapsed.abs_diff(Duration::from_millis(200)) < Duration::from_micros(120),
            "{elapsed:?}"
        );
    }

    #[test]
    fn idle_time_and_long_stalls_are_no_debt() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let later = start + Duration::from_secs(5);
        pace.resume(later);
        let step = Duration::from_millis(10);
        assert_eq!(pace.advance(step, later), Some(later + step));
        let stalled = later + Duration::from_secs(60);
        assert_eq!(pace.advance(step, stalled), None);
        assert_eq!(pace.advance(step, stalled), Some(stalled + step));
    }

    #[test]
    fn decodes_ride_along_with_prefills() {
        let costs = StepCosts::new(&EngineConfig {
            prefill_tokens_per_second: 10_000.0,
            prefill_overhead_ms: 10.0,
            decode_ms: 5.0,
            speed: 2.0,
            ..EngineConfig::default()
        });
        let duration = |prefill_tokens, decodes| {
            costs.duration(&Step {
                prefill_tokens,
                decodes,
                events: Vec::new(),
            })
        };
        // (10 ms + 100 / 10,000 s) / 2 with or without decodes; 5 ms / 2 for decodes alone.
        assert_eq!(duration(100, 0), Duration::from_millis(10));
        assert_eq!(duration(100, 3), Duration::from_millis(10));
        assert_eq!(duration(0, 3), Duration::from_micros(2500));
    }
}
