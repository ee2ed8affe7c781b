//! Circuit breaker of one worker, as a state machine without a clock.

use std::time::{Duration, Instant};

use hyper::StatusCode;

/// What a response status says about the worker's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// 2xx: the worker works.
    Success,
    /// 4xx and everything else that says nothing about the worker.
    Neutral,
    /// 429 or 503: the worker is busy and says so; no fault.
    BackPressure,
    /// Any other 5xx.
    Failure,
}

impl Verdict {
    /// Judges a status.
    #[must_use]
    pub fn of(status: StatusCode) -> Self {
        match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Self::BackPressure,
            status if status.is_success() => Self::Success,
            status if status.is_server_error() => Self::Failure,
            _ => Self::Neutral,
        }
    }
}

/// State of a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Requests pass.
    Closed,
    /// No request passes until the cool-down ends.
    Open,
    /// One request at a time passes, to try.
    HalfOpen,
}

impl State {
    /// Every state, for metrics with one series a state.
    pub const ALL: [Self; 3] = [Self::Closed, Self::Open, Self::HalfOpen];

    /// Returns the name used in metrics and listings.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
        }
    }
}

/// Opens after a run of failures and closes again on a success.
///
/// Neutral answers and back-pressure neither count nor end a run of failures; only a success does.
#[derive(Debug)]
pub struct Breaker {
    threshold: u32,
    cool_down: Duration,
    failures: u32,
    state: Inner,
}

#[derive(Debug)]
enum Inner {
    Closed,
    Open { until: Instant },
    HalfOpen { trying: bool },
}

impl Breaker {
    /// Creates a closed breaker that opens after `threshold` failures in a row, for `cool_down`.
    #[must_use]
    pub const fn new(threshold: u32, cool_down: Duration) -> Self {
        Self {
            threshold,
            cool_down,
            failures: 0,
            state: Inner::Closed,
        }
    }

    /// Returns the state.
    #[must_use]
    pub const fn state(&self) -> State {
        match self.state {
            Inner::Closed => State::Closed,
            Inner::Open { .. } => State::Open,
            Inner::HalfOpen { .. } => State::HalfOpen,
        }
    }

    /// Tells whether a request would pass now.
    #[must_use]
    pub const fn passes(&self) -> bool {
        matches!(
            self.state,
            Inner::Closed | Inner::HalfOpen { trying: false }
        )
    }

    /// Ends the cool-down when its time has come.
    pub fn tick(&mut self, now: Instant) {
        if let Inner::Open { until } = self.state
            && now >= until
        {
            self.state = Inner::HalfOpen { trying: false };
        }
    }

    /// Admits one request, taking the only place while half-open.
    pub fn admit(&mut self) -> bool {
        match &mut self.state {
            Inner::Closed => true,
            Inner::Open { .. } => false,
            Inner::HalfOpen { trying } => !std::mem::replace(trying, true),
        }
    }

    /// Takes in a status: a failure counts at once, a success closes a half-open breaker at once.
    pub fn responded(&mut self, verdict: Verdict, now: Instant) {
        match verdict {
            Verdict::Failure => self.failed(now),
            Verdict::Success => {
                if let Inner::HalfOpen { .. } = self.state {
                    self.failures = 0;
                    self.state = Inner::Closed;
                }
            }
            Verdict::Neutral | Verdict::BackPressure => self.abandoned(),
        }
    }

    /// Takes in a successful response that was read to its end, which ends a run of failures.
    pub const fn completed(&mut self) {
        self.failures = 0;
    }

    /// Takes in a transport error or a failure status.
    pub fn failed(&mut self, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        let half_open = matches!(self.state, Inner::HalfOpen { .. });
        let closed = matches!(self.state, Inner::Closed);
        if half_open || (closed && self.failures >= self.threshold) {
            self.state = Inner::Open {
                until: now + self.cool_down,
            };
        }
    }

    /// Gives back a half-open place without a verdict, as when the client left.
    pub const fn abandoned(&mut self) {
        if let Inner::HalfOpen { trying } = &mut self.state {
            *trying = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COOL_DOWN: Duration = Duration::from_secs(5);

    fn run(breaker: &mut Breaker, statuses: &[u16], now: Instant) {
        for &status in statuses {
            if !breaker.admit() {
                continue;
            }
            let verdict = Verdict::of(StatusCode::from_u16(status).unwrap());
            breaker.responded(verdict, now);
            if verdict == Verdict::Success {
                breaker.completed();
            }
        }
    }

    #[test]
    fn only_failures_open_and_only_success_closes() {
        let start = Instant::now();
        let table: [(&[u16], State); 5] = [
            (&[400; 10], State::Closed),
            (&[503; 10], State::Closed),
            (&[429; 10], State::Closed),
            (&[500, 500, 400, 500], State::Open),
            (&[500, 500, 200, 500], State::Closed),
        ];
        for (statuses, expected) in table {
            let mut breaker = Breaker::new(3, COOL_DOWN);
            run(&mut breaker, statuses, start);
            assert_eq!(breaker.state(), expected, "{statuses:?}");
        }
    }

    #[test]
    fn half_open_lets_one_through_and_a_400_leaves_it_half_open() {
        let start = Instant::now();
        let mut breaker = Breaker::new(3, COOL_DOWN);
        run(&mut breaker, &[500; 3], start);
        breaker.tick(start + COOL_DOWN / 2);
        assert!(!breaker.admit(), "still cooling down");
        breaker.tick(start + COOL_DOWN);
        assert_eq!(breaker.state(), State::HalfOpen);
        assert!(breaker.admit());
        assert!(!breaker.admit(), "only one at a time");
        breaker.responded(Verdict::Neutral, start);
        assert_eq!(breaker.state(), State::HalfOpen);
        assert!(breaker.admit());
        breaker.responded(Verdict::Success, start);
        assert_eq!(breaker.state(), State::Closed);
    }

    #[test]
    fn a_failed_trial_opens_again_at_once() {
        let start = Instant::now();
        let mut breaker = Breaker::new(3, COOL_DOWN);
        run(&mut breaker, &[500; 3], start);
        breaker.tick(start + COOL_DOWN);
        assert!(breaker.admit());
        breaker.failed(start + COOL_DOWN);
        assert_eq!(breaker.state(), State::Open);
        breaker.tick(start + COOL_DOWN + COOL_DOWN / 2);
        assert!(!breaker.passes());
    }

    #[test]
    fn a_success_header_alone_does_not_end_a_run_of_failures() {
        let start = Instant::now();
        let mut breaker = Breaker::new(3, COOL_DOWN);
        for _ in 0..3 {
            breaker.responded(Verdict::Success, start); // headers arrived, then the stream broke
            breaker.failed(start);
        }
        assert_eq!(breaker.state(), State::Open);
    }
}
