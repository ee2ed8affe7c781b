//! What a router and its leases share, and what guards it: closing and forking.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kvlane::subscribe::Subscriber;
use kvlane::{Error, ErrorKind, TrustChange, TrustState};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::clock::Clock;
use crate::ending::Call;
use crate::error::to_py;

/// Forks of this process's ancestors and itself that made it.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Counts a fork in the child.
#[pyfunction]
fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    crate::ending::forked();
}

/// Has the interpreter call [`forked`] in every child. Asking for the process id at each call would cost a system call.
pub(crate) fn watch_forks(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let os = module.py().import("os")?;
    if let Some(register) = os.getattr_opt("register_at_fork")? {
        let options = PyDict::new(module.py());
        options.set_item("after_in_child", wrap_pyfunction!(forked, module)?)?;
        register.call((), Some(&options))?;
    }
    Ok(())
}

/// A router with its clock and its subscriber.
pub(crate) struct Shared {
    router: kvlane::Router,
    pub(crate) clock: Clock,
    subscriber: Mutex<Option<Subscriber>>,
    forks: u64,
}

impl Shared {
    pub(crate) fn new(router: kvlane::Router, clock: Clock) -> Self {
        Self {
            router,
            clock,
            subscriber: Mutex::new(None),
            forks: FORKS.load(Ordering::Relaxed),
        }
    }

    /// Tells whether this is the child of the process that made the router. Threads do not live on in a child, and locks
    /// that they held stay locked, so nothing of the router may be touched there.
    pub(crate) fn is_forked(&self) -> bool {
        self.forks != FORKS.load(Ordering::Relaxed)
    }

    /// Returns the router, also a closed one.
    pub(crate) fn not_forked(&self) -> PyResult<Entered<'_>> {
        let call = Call::enter();
        if self.is_forked() {
            return Err(to_py(Error::new(
                ErrorKind::Closed,
                "the router was made before this process was forked; make a new one here",
            )));
        }
        Ok(Entered {
            router: &self.router,
            _call: call,
        })
    }

    /// Returns the router unless it is closed.
    pub(crate) fn open(&self) -> PyResult<Entered<'_>> {
        let router = self.not_forked()?;
        if router.is_closed() {
            return Err(to_py(Error::new(ErrorKind::Closed, "the router is closed")));
        }
        Ok(router)
    }

    /// Follows the worker's events, which it has, starting the thread for it when it is the first.
    pub(crate) fn follow(&self, worker: &kvlane::WorkerSpec) -> kvlane::Result<()> {
        let mut subscriber = self.subscriber.lock();
        if let Some(subscriber) = &*subscriber {
            return subscriber.follow_worker(worker);
        }
        let first = Subscriber::start(&self.router)?;
        first.follow_worker(worker)?;
        *subscriber = Some(first);
        Ok(())
    }

    pub(crate) fn unfollow(&self, worker: &str) {
        if let Some(subscriber) = &*self.subscriber.lock() {
            subscriber.unfollow(worker);
        }
    }

    /// Counts of the followed streams as JSON.
    pub(crate) fn subscriptions(&self) -> serde_json::Value {
        let stats = self.subscriber.lock().as_ref().map(Subscriber::stats);
        serde_json::to_value(stats.unwrap_or_default()).unwrap_or_default()
    }

    /// Ends the subscriber's thread, then refuses decisions.
    pub(crate) fn close(&self) {
        drop(self.subscriber.lock().take());
        self.router.close();
    }

    /// Lets leases run out and logs trust changes, each once.
    pub(crate) fn log_trust(&self, py: Python<'_>) {
        let changes = self.router.take_trust_changes();
        if !changes.is_empty()
            && let Err(error) = log(py, &changes)
        {
            error.write_unraisable(py, None);
        }
    }

    pub(crate) fn now(&self, py: Python<'_>) -> PyResult<Instant> {
        self.clock.now(py)
    }
}

/// The router, for as long as one call from Python lasts.
pub(crate) struct Entered<'a> {
    router: &'a kvlane::Router,
    _call: Call,
}

impl Deref for Entered<'_> {
    type Target = kvlane::Router;

    fn deref(&self) -> &kvlane::Router {
        self.router
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.is_forked() {
            // Its thread is not in this process; waiting for it would take for ever.
            std::mem::forget(self.subscriber.get_mut().take());
        }
    }
}

fn log(py: Python<'_>, changes: &[TrustChange]) -> PyResult<()> {
    let logger = py
        .import("logging")?
        .getattr("getLogger")?
        .call1(("kvlane",))?;
    for change in changes {
        let level = match change.to {
            TrustState::Exact | TrustState::Unproven => "info",
            _ => "warning",
        };
        let text = format!(
            "worker {} rank {}: {} -> {}{}{}",
            change.target.worker,
            change.target.dp_rank,
            change.from,
            change.to,
            if change.cause.is_some() { ": " } else { "" },
            change.cause.as_deref().unwrap_or_default()
        );
        logger.getattr(level)?.call1(("%s", text))?;
    }
    Ok(())
}
