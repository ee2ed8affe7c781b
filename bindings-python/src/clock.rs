//! The router's `now`: this machine's clock, or the caller's.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pyo3::prelude::*;

use crate::error::invalid;

/// Where the time comes from.
pub(crate) struct Clock {
    /// A callable that returns seconds, and what it returned first.
    caller: Option<(Py<PyAny>, f64)>,
    /// When the clock was made.
    base: Instant,
}

impl Clock {
    pub(crate) fn new(py: Python<'_>, caller: Option<Py<PyAny>>) -> PyResult<Self> {
        let caller = caller
            .map(|caller| {
                let first = read(py, &caller)?;
                PyResult::Ok((caller, first))
            })
            .transpose()?;
        Ok(Self {
            caller,
            base: Instant::now(),
        })
    }

    /// Returns the time now. A caller's clock that goes behind its first value stands at it.
    pub(crate) fn now(&self, py: Python<'_>) -> PyResult<Instant> {
        let Some((caller, first)) = &self.caller else {
            return Ok(Instant::now());
        };
        let passed = (read(py, caller)? - first).max(0.0);
        Duration::try_from_secs_f64(passed)
            .ok()
            .and_then(|passed| self.base.checked_add(passed))
            .ok_or_else(|| {
                invalid(format!(
                    "the clock is {passed} seconds after its first value, which is too far"
                ))
            })
    }

    /// Returns the seconds of `at`: the caller's clock, or else those since 1970.
    pub(crate) fn seconds(&self, at: Instant, now: Instant) -> f64 {
        match &self.caller {
            Some((_, first)) => first + at.saturating_duration_since(self.base).as_secs_f64(),
            None => {
                let since_1970 = SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .unwrap_or_default();
                since_1970.as_secs_f64() - now.saturating_duration_since(at).as_secs_f64()
            }
        }
    }
}

fn read(py: Python<'_>, caller: &Py<PyAny>) -> PyResult<f64> {
    let seconds: f64 = caller.bind(py).call0()?.extract()?;
    if !seconds.is_finite() {
        return Err(invalid(format!(
            "the clock returned {seconds}: finite seconds are accepted"
        )));
    }
    Ok(seconds)
}
