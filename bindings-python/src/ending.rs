//! The end of the interpreter, met by threads that go on.
//!
//! Until Python 3.14 a daemon thread that asks for the interpreter after its end is ended with `pthread_exit`. When that
//! happens in Python code that Rust code called (a clock, a logging handler, the JSON encoder), its unwinding meets Rust frames,
//! and the process aborts. So no such call may be under way at the end: an `atexit` function, which still runs before it,
//! waits for those under way, and from then on keeps other threads out.

use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::prelude::*;

/// Calls under way. Signed, since a forked child begins with none and may see those of its one thread end.
static CALLS: AtomicIsize = AtomicIsize::new(0);
static ENDING: AtomicBool = AtomicBool::new(false);
/// The thread that ends the interpreter, which may go on calling: other `atexit` functions do.
static ENDER: Mutex<Option<ThreadId>> = Mutex::new(None);

/// How long the end waits for calls under way; longer only for a callback of the user's that does not return.
const PATIENCE: Duration = Duration::from_secs(2);

/// A call from Python that may run Python code in its turn.
pub(crate) struct Call(());

impl Call {
    /// Enters; does not return when the interpreter ends and this is not the thread that ends it.
    pub(crate) fn enter() -> Self {
        // Counted first: either the end sees this call, or this call sees the end.
        CALLS.fetch_add(1, Ordering::SeqCst);
        let call = Self(());
        if ENDING.load(Ordering::SeqCst) && *ENDER.lock() != Some(thread::current().id()) {
            drop(call);
            rest();
        }
        call
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Gives the interpreter back for good; the thread ends with the process.
fn rest() -> ! {
    Python::attach(|py| {
        py.detach(|| {
            loop {
                thread::park();
            }
        })
    })
}

/// Waits for the calls under way and keeps new ones out.
#[pyfunction]
fn ending(py: Python<'_>) {
    *ENDER.lock() = Some(thread::current().id());
    ENDING.store(true, Ordering::SeqCst);
    let patience_ends = Instant::now() + PATIENCE;
    while CALLS.load(Ordering::SeqCst) > 0 && Instant::now() < patience_ends {
        py.detach(|| thread::sleep(Duration::from_millis(1)));
    }
}

/// Forgets, in a forked child, the calls of threads that are not in it.
pub(crate) fn forked() {
    CALLS.store(0, Ordering::SeqCst);
}

/// Has the interpreter call [`ending`] when it ends.
pub(crate) fn watch(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let register = module.py().import("atexit")?.getattr("register")?;
    register.call1((wrap_pyfunction!(ending, module)?,))?;
    Ok(())
}
