//! What time it is: the system's monotonic clock, or a function of the caller's for tests and simulation.

use std::cell::Cell;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use napi::Either;
use napi::bindgen_prelude::{Env, FunctionRef};

use crate::error::{Result, invalid, of_napi};
use crate::read::Given;

/// A function that returns seconds from any beginning.
pub(crate) type ClockFunction = FunctionRef<(), Given<'static, f64>>;

pub(crate) enum Clock {
    System,
    Caller(CallerClock),
}

pub(crate) struct CallerClock {
    function: ClockFunction,
    /// What the function returned when the router was made, and the instant that it stands for.
    zero: f64,
    start: Instant,
    /// The latest time seen, so that time never goes backwards.
    latest: Cell<Duration>,
}

impl Clock {
    pub(crate) fn new(env: &Env, function: Option<ClockFunction>) -> Result<Self> {
        let Some(function) = function else {
            return Ok(Self::System);
        };
        let zero = ask(env, &function)?;
        Ok(Self::Caller(CallerClock {
            function,
            zero,
            start: Instant::now(),
            latest: Cell::default(),
        }))
    }

    pub(crate) fn now(&self, env: &Env) -> Result<Instant> {
        match self {
            Self::System => Ok(Instant::now()),
            Self::Caller(clock) => clock.now(env),
        }
    }

    /// Returns the seconds of `at`: those of the caller's clock, or else those since 1970.
    pub(crate) fn seconds(&self, at: Instant, now: Instant) -> f64 {
        match self {
            Self::System => {
                let since_1970 = SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .unwrap_or_default();
                since_1970.as_secs_f64() - now.saturating_duration_since(at).as_secs_f64()
            }
            Self::Caller(clock) => {
                clock.zero + at.saturating_duration_since(clock.start).as_secs_f64()
            }
        }
    }
}

impl CallerClock {
    fn now(&self, env: &Env) -> Result<Instant> {
        let seconds = ask(env, &self.function)? - self.zero;
        if seconds > MAX_SECONDS {
            return Err(invalid(format!(
                "clock went on by {seconds} seconds: up to {MAX_SECONDS} are accepted"
            )));
        }
        let passed = Duration::from_secs_f64(seconds.max(0.0)).max(self.latest.get());
        self.latest.set(passed);
        Ok(self.start + passed)
    }
}

/// Ten years: what is beyond overflows clocks before it means anything.
const MAX_SECONDS: f64 = 315_360_000.0;

fn ask(env: &Env, function: &ClockFunction) -> Result<f64> {
    let answer = function
        .borrow_back(env)
        .map_err(of_napi)?
        .call(())
        .map_err(|error| invalid(format!("clock failed: {}", error.reason)))?;
    match answer {
        Either::A(seconds) if seconds.is_finite() => Ok(seconds),
        _ => Err(invalid("clock must return a finite number of seconds")),
    }
}
