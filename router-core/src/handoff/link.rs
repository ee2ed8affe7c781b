//! A link on which transfers share the throughput.
//!
//! Transfers in flight are taken to get equal shares, as TCP streams of one port do: four at once on a 1 GbE port moved 26
//! to 28 MB/s each where one alone moved 104 MB/s.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::line::{Fit, Line, Telling};

/// One link: what is known of its speed, and what it is moving.
#[derive(Debug)]
pub(super) struct Link {
    line: Line,
    open: BTreeMap<u64, Open>,
    /// Integral of time divided by the transfers in flight: the time that each of them had the link for itself.
    share: f64,
    last: Option<Instant>,
}

/// A transfer that has not ended.
#[derive(Clone, Copy, Debug)]
struct Open {
    bytes: f64,
    /// Bytes left, as far as the learned speed tells.
    left: f64,
    /// How long its prefill was predicted to take, in seconds.
    prefill: f64,
    state: State,
    /// Nobody tells when its prefill ends: it is taken to end as predicted.
    starts_unseen: bool,
    /// Nobody tells when its bytes have arrived: it is over when the learned speed says so.
    ends_unseen: bool,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// Its prefill still runs, and is expected to end then.
    Waiting { until: Instant },
    /// Moving since then, when the shared time was this.
    Moving { since: Instant, share: f64 },
}

/// Transfers simulated one by one, which takes half a microsecond; more are taken as one lump.
const SIMULATED: usize = 16;

/// Seconds from which on a transfer tells how slow its link is.
///
/// # Source
/// A first token takes some 15 ms where nothing is to be moved (0.6B, 1,472 of 1,500 tokens cached). Of three times that, a
/// third is fixed; of less, more, and a small prompt would make the fastest link look slow, over which nothing would be moved any
/// more to show otherwise.
const TELLING_SECONDS: f64 = 0.045;

/// Share of a predicted prefill by which the prediction is taken to be wrong: where nobody tells when a prefill ends, what comes
/// after it is known to that. It tells a speed when it takes three times as long, and else that a transfer took no longer.
///
/// # Source
/// The calibration sets: every first token is predicted within 20 %.
const PREFILL_DOUBT: f64 = 0.2;

impl Default for Link {
    fn default() -> Self {
        let telling = Telling {
            units: 0.0,
            seconds: TELLING_SECONDS,
        };
        Self {
            line: Line::new(telling),
            open: BTreeMap::new(),
            share: 0.0,
            last: None,
        }
    }
}

impl Link {
    pub(super) fn seed(&mut self, bytes_per_second: f64, fixed: Duration) {
        self.line.seed(Fit {
            fixed: fixed.as_secs_f64(),
            per_unit: 1.0 / bytes_per_second,
        });
    }

    pub(super) const fn fit(&self) -> Option<Fit> {
        self.line.fit()
    }

    pub(super) const fn is_measured(&self) -> bool {
        self.line.is_measured()
    }

    pub(super) fn measurements(&self) -> usize {
        self.line.measurements()
    }

    pub(super) fn open_transfers(&self) -> usize {
        self.open.len()
    }

    /// Books a transfer whose prefill begins now and is expected to take so long.
    pub(super) fn book(&mut self, id: u64, bytes: f64, prefill: Duration, now: Instant) {
        let until = now + prefill;
        let open = Open {
            bytes,
            left: bytes,
            prefill: prefill.as_secs_f64(),
            state: State::Waiting { until },
            starts_unseen: false,
            ends_unseen: false,
        };
        self.open.insert(id, open);
    }

    /// Lets a booked transfer begin when its prefill, sent now, is expected to end.
    pub(super) fn starts_unseen(&mut self, id: u64, now: Instant) {
        if let Some(open) = self.open.get_mut(&id)
            && let State::Waiting { until } = &mut open.state
        {
            *until = now + Duration::from_secs_f64(open.prefill);
            open.starts_unseen = true;
        }
    }

    /// Lets a transfer end when the learned speed says so.
    pub(super) fn ends_unseen(&mut self, id: u64) {
        if let Some(open) = self.open.get_mut(&id) {
            open.ends_unseen = true;
        }
    }

    /// Marks a booked transfer as moving.
    pub(super) fn start(&mut self, id: u64, now: Instant) {
        self.advance(now);
        let share = self.share;
        if let Some(open) = self.open.get_mut(&id)
            && matches!(open.state, State::Waiting { .. })
        {
            open.state = State::Moving { since: now, share };
        }
    }

    /// Ends a transfer and learns from it, if it moved anything.
    pub(super) fn finish(&mut self, id: u64, now: Instant) {
        self.advance(now);
        let Some(open) = self.open.remove(&id) else {
            return;
        };
        let (seconds, bytes) = match open.state {
            State::Moving { since, share } => {
                let seconds = now.saturating_duration_since(since).as_secs_f64();
                let alone = self.share - share;
                if alone <= 0.0 {
                    return;
                }
                // Mean number of transfers in flight meanwhile, by which its bytes were slowed down.
                (seconds, open.bytes * (seconds / alone))
            }
            // It was over before its prefill was expected to be.
            State::Waiting { .. } if open.starts_unseen => (0.0, open.bytes),
            State::Waiting { .. } => return,
        };
        if open.ends_unseen {
            return;
        }
        let doubt = PREFILL_DOUBT * open.prefill;
        if !open.starts_unseen || seconds >= 3.0 * doubt {
            self.line.observe(bytes, seconds);
        } else {
            self.line.observe_bound(bytes, seconds + doubt);
        }
    }

    /// Forgets a transfer that came to nothing.
    pub(super) fn abandon(&mut self, id: u64) {
        self.open.remove(&id);
    }

    /// Takes in a transfer measured elsewhere, alone on the link.
    pub(super) fn observe(&mut self, bytes: f64, elapsed: Duration) {
        self.line.observe(bytes, elapsed.as_secs_f64());
    }

    /// Moves the clock on; an earlier `now` is taken as the latest seen.
    pub(super) fn advance(&mut self, now: Instant) {
        // One after the other, since each slows down those that move already.
        while let Some((id, until)) = self.next_unseen().filter(|(_, until)| *until <= now) {
            self.pass(until);
            let (share, since) = (self.share, self.last.unwrap_or(until));
            if let Some(open) = self.open.get_mut(&id) {
                open.state = State::Moving { since, share };
            }
        }
        self.pass(now);
    }

    /// Returns which of the transfers that begin unseen is the next, and when.
    fn next_unseen(&self) -> Option<(u64, Instant)> {
        let waiting = |(id, open): (&u64, &Open)| match open.state {
            State::Waiting { until } if open.starts_unseen => Some((*id, until)),
            _ => None,
        };
        self.open
            .iter()
            .filter_map(waiting)
            .min_by_key(|(_, until)| *until)
    }

    fn pass(&mut self, now: Instant) {
        let mut seconds = self
            .last
            .map_or(Duration::ZERO, |last| now.saturating_duration_since(last))
            .as_secs_f64();
        self.last = self.last.max(Some(now));
        let per_unit = self.line.fit().map(|fit| fit.per_unit);
        while seconds > 0.0 {
            let moving = self.open.values_mut().filter(|open| open.is_moving());
            let moving: Vec<&mut Open> = moving.collect();
            if moving.is_empty() {
                return;
            }
            // As far as the next one that ends unseen: from then on the others share the link among fewer.
            let unseen = moving.iter().filter(|open| open.ends_unseen);
            let least = unseen.map(|open| open.left).fold(f64::INFINITY, f64::min);
            let each =
                (seconds / moving.len() as f64).min(least * per_unit.unwrap_or(f64::INFINITY));
            self.share += each;
            seconds -= each * moving.len() as f64;
            for open in moving {
                let left = per_unit.map_or(open.left, |per_unit| open.left - each / per_unit);
                // Less than a byte is what rounding left.
                open.left = if left < 1.0 { 0.0 } else { left };
            }
        }
    }

    /// Returns how long `bytes` take that start `delay` after `now`, the fixed part included, if the speed is known.
    ///
    /// [`advance`](Self::advance) first.
    pub(super) fn seconds(&self, bytes: f64, delay: f64, now: Instant) -> Option<f64> {
        let fit = self.line.fit()?;
        let own = Job {
            start: delay,
            left: bytes * fit.per_unit,
        };
        let others = self
            .open
            .values()
            .filter(|open| open.left > 0.0)
            .map(|open| Job {
                start: open.starts_in(now),
                left: open.left * fit.per_unit,
            });
        let end = if self.open.len() > SIMULATED {
            lumped_end(others, own)
        } else {
            shared_end(&mut others.collect::<Vec<_>>(), own)
        };
        Some(fit.fixed + end - delay)
    }
}

impl Open {
    const fn is_moving(&self) -> bool {
        matches!(self.state, State::Moving { .. }) && !(self.ends_unseen && self.left <= 0.0)
    }

    fn starts_in(&self, now: Instant) -> f64 {
        match self.state {
            State::Waiting { until } => until.saturating_duration_since(now).as_secs_f64(),
            State::Moving { .. } => 0.0,
        }
    }
}

/// Work for a link of speed 1.
#[derive(Clone, Copy, Debug)]
struct Job {
    start: f64,
    left: f64,
}

/// Returns when `own` ends while the link is shared equally among the jobs that have started.
fn shared_end(others: &mut [Job], mut own: Job) -> f64 {
    others.sort_by(|one, other| one.start.total_cmp(&other.start));
    let mut time = 0.0_f64;
    // Each round ends a job or starts one.
    for _ in 0..=2 * others.len() + 2 {
        let own_moves = own.start <= time;
        let moving = |job: &&Job| job.start <= time && job.left > 0.0;
        let in_flight = others.iter().filter(moving).count() + usize::from(own_moves);
        let next_start = others
            .iter()
            .map(|job| job.start)
            .chain([own.start])
            .filter(|start| *start > time)
            .fold(f64::INFINITY, f64::min);
        if in_flight == 0 {
            time = next_start;
            continue;
        }
        let least = others
            .iter()
            .filter(moving)
            .map(|job| job.left)
            .chain(own_moves.then_some(own.left))
            .fold(f64::INFINITY, f64::min);
        let step = (least * in_flight as f64).min(next_start - time);
        if own_moves && own.left * in_flight as f64 <= step {
            return time + own.left * in_flight as f64;
        }
        let done = step / in_flight as f64;
        for job in others.iter_mut().filter(|job| job.start <= time) {
            // What is left of rounding would only cost another round.
            job.left = if job.left - done <= job.left * 1e-12 {
                0.0
            } else {
                job.left - done
            };
        }
        if own_moves {
            own.left -= done;
        }
        time += step;
    }
    time.max(own.start) + own.left
}

/// Returns about when `own` ends among very many: all of them are taken to move from the start on, and to be done in equal
/// shares by the time that `own` starts.
fn lumped_end(others: impl Iterator<Item = Job>, own: Job) -> f64 {
    let (all, before) = others.fold((0.0, 0.0), |(all, before), job| {
        (all + job.left, before + job.left.min(own.left))
    });
    let remaining = if all > 0.0 {
        (1.0 - own.start / all).max(0.0)
    } else {
        0.0
    };
    own.start + own.left + before * remaining
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(
        clippy::disallowed_methods,
        reason = "a test needs some instant to start from"
    )]
    fn start() -> Instant {
        Instant::now()
    }

    fn after(from: Instant, seconds: f64) -> Instant {
        from + Duration::from_secs_f64(seconds)
    }

    fn job(start: f64, left: f64) -> Job {
        Job { start, left }
    }

    fn assert_close(value: f64, expected: f64) {
        assert!((value - expected).abs() < 1e-6, "{value} for {expected}");
    }

    #[test]
    fn equal_shares_end_as_computed_by_hand() {
        // Alone.
        assert_close(shared_end(&mut [], job(0.0, 5.0)), 5.0);
        assert_close(shared_end(&mut [], job(2.0, 5.0)), 7.0);
        // Four equals end together.
        assert_close(shared_end(&mut [job(0.0, 2.0); 3], job(0.0, 2.0)), 8.0);
        // A long one beside it: half speed all the way.
        assert_close(shared_end(&mut [job(0.0, 100.0)], job(0.0, 3.0)), 6.0);
        // A short one beside it: 1 + 1 shared, 2 alone.
        assert_close(shared_end(&mut [job(0.0, 1.0)], job(0.0, 3.0)), 4.0);
        // One that ends before: 2 of its 2 are done when ours starts.
        assert_close(shared_end(&mut [job(0.0, 2.0)], job(2.0, 3.0)), 5.0);
        // One that joins at 1: 1 alone, then 2 left at half speed.
        assert_close(shared_end(&mut [job(1.0, 9.0)], job(0.0, 3.0)), 5.0);
        // One that starts after we ended.
        assert_close(shared_end(&mut [job(9.0, 9.0)], job(0.0, 3.0)), 3.0);
    }

    #[test]
    fn the_end_comes_no_sooner_with_more_company_and_never_after_all_work() {
        let mut rng = fastrand::Rng::with_seed(3);
        for _ in 0..500 {
            let count = rng.usize(0..20);
            let mut others: Vec<Job> = (0..count)
                .map(|_| job(rng.f64() * 5.0, rng.f64()))
                .collect();
            let own = job(rng.f64() * 5.0, 0.01 + rng.f64());
            let all: f64 = others.iter().map(|job| job.left).sum();
            let with = shared_end(&mut others.clone(), own);
            others.pop();
            let without = shared_end(&mut others, own);
            assert!(with >= without - 1e-9, "{with} {without}");
            assert!(with <= own.start + own.left + all + 1e-9, "{with}");
        }
    }

    #[test]
    fn shared_transfers_teach_the_speed_of_the_link() {
        let from = start();
        let mut link = Link::default();
        // Four of 344 MB at once, done after 12.7 s: 27 MB/s each, 108 MB/s the link.
        for id in 0..4 {
            link.book(id, 344e6, Duration::ZERO, from);
            link.start(id, from);
        }
        for id in 0..4 {
            link.finish(id, after(from, 12.74));
        }
        let speed = 1.0 / link.fit().unwrap().per_unit;
        assert!((speed / 108e6 - 1.0).abs() < 0.01, "{speed}");
        assert_eq!(link.open_transfers(), 0);
    }

    #[test]
    fn what_is_in_flight_slows_the_next() {
        let from = start();
        let mut link = Link::default();
        link.seed(100.0, Duration::from_millis(500));
        assert_close(link.seconds(200.0, 0.0, from).unwrap(), 2.5);
        link.book(1, 1_000.0, Duration::from_secs(1), from);
        // Still waiting: 1 s alone, then 100 bytes at half speed.
        assert_close(link.seconds(200.0, 0.0, from).unwrap(), 3.5);
        link.start(1, from);
        link.advance(after(from, 9.0));
        // 100 of its bytes are left: as long as ours, less what ours has beyond.
        assert_close(link.seconds(200.0, 0.0, after(from, 9.0)).unwrap(), 3.5);
        link.abandon(1);
        assert_close(link.seconds(200.0, 0.0, after(from, 9.0)).unwrap(), 2.5);
    }

    #[test]
    fn a_crowd_is_taken_as_one_lump() {
        let from = start();
        let mut link = Link::default();
        link.seed(100.0, Duration::ZERO);
        for id in 0..200 {
            link.book(id, 100.0, Duration::ZERO, from);
        }
        assert_close(link.seconds(100.0, 0.0, from).unwrap(), 201.0);
        // Half of the 200 s are done by then.
        assert_close(link.seconds(100.0, 100.0, from).unwrap(), 101.0);
        assert_close(link.seconds(100.0, 500.0, from).unwrap(), 1.0);
    }

    #[test]
    fn a_transfer_that_never_moved_teaches_nothing() {
        let from = start();
        let mut link = Link::default();
        link.book(1, 1_000.0, Duration::ZERO, from);
        link.finish(1, after(from, 5.0));
        link.finish(7, after(from, 6.0));
        assert_eq!((link.fit(), link.seconds(1.0, 0.0, from)), (None, None));
    }

    #[test]
    fn what_begins_unseen_is_learned_from_where_its_prefill_was_expected_to_end() {
        let from = start();
        let mut link = Link::default();
        link.seed(1_000.0, Duration::ZERO);
        for round in 0..2 {
            let from = after(from, 100.0 * f64::from(round));
            // Booked a while before it is sent; 1 s of prefill, then 1,000 bytes at 100 a second.
            link.book(1, 1_000.0, Duration::from_secs(1), from);
            link.starts_unseen(1, after(from, 0.5));
            link.advance(after(from, 5.0));
            link.finish(1, after(from, 11.5));
        }
        assert_close(1.0 / link.fit().unwrap().per_unit, 100.0);
    }

    #[test]
    fn two_that_begin_unseen_share_from_when_the_second_begins() {
        let from = start();
        let mut link = Link::default();
        link.book(1, 300.0, Duration::ZERO, from);
        link.book(2, 200.0, Duration::from_secs(1), from);
        link.starts_unseen(1, from);
        link.starts_unseen(2, from);
        // 100 alone, then both at half speed: 200 each in 4 s.
        link.finish(1, after(from, 5.0));
        link.finish(2, after(from, 5.0));
        let fit = link.fit().unwrap();
        assert_close(1.0 / fit.per_unit, 100.0);
    }

    #[test]
    fn a_transfer_that_drowns_in_its_prefill_is_a_bound() {
        // 10 s of prefill were expected. 1,000 bytes that come within 11 take 3 at most; before 10, 2.
        for (took, speed) in [(11.0, 1_000.0 / 3.0), (9.0, 500.0)] {
            let from = start();
            let mut link = Link::default();
            link.seed(100.0, Duration::ZERO);
            for round in 0..3 {
                let from = after(from, 100.0 * f64::from(round));
                link.book(1, 1_000.0, Duration::from_secs(10), from);
                link.starts_unseen(1, from);
                link.finish(1, after(from, took));
            }
            assert_close(1.0 / link.fit().unwrap().per_unit, speed);
        }
    }

    #[test]
    fn what_ends_unseen_teaches_nothing_and_shares_no_longer_than_it_moves() {
        let from = start();
        let mut link = Link::default();
        link.seed(100.0, Duration::ZERO);
        for id in 0..2 {
            link.book(id, 1_000.0, Duration::ZERO, from);
            link.start(id, from);
        }
        link.ends_unseen(0);
        // Both have moved after 20 s; whatever is generated after that moves nothing.
        link.advance(after(from, 20.0));
        link.finish(0, after(from, 500.0));
        assert_eq!(link.measurements(), 0);
        link.book(2, 1_000.0, Duration::ZERO, from);
        link.start(2, after(from, 500.0));
        link.finish(2, after(from, 510.0));
        assert_eq!(link.measurements(), 1);
    }

    #[test]
    fn what_ends_unseen_slows_others_down_no_longer_than_it_moves() {
        let mut link = Link::default();
        link.seed(100.0, Duration::ZERO);
        let from = start();
        for round in 0..3 {
            let from = after(from, 1_000.0 * f64::from(round));
            for (id, bytes) in [(0, 1_000.0), (1, 4_000.0)] {
                link.book(id, bytes, Duration::ZERO, from);
                link.start(id, from);
            }
            link.ends_unseen(0);
            // Nobody looks in between: 1,000 of each in 20 s, then 3,000 alone in 30.
            link.finish(1, after(from, 50.0));
            link.finish(0, after(from, 900.0));
        }
        assert_eq!(link.measurements(), 3);
        assert_close(1.0 / link.fit().unwrap().per_unit, 100.0);
    }
}
