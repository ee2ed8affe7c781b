//! The only door to locks and atomics, so that a model checker can replace them.
//!
//! With `--cfg loom` they are the model checker's, and the tests named `model` and those of `tests/loom.rs` try every order
//! of a few operations: `scripts/loom.sh`. Nothing else can run so.

mod brief;
mod dense;
mod striped;

pub(crate) use brief::Brief;
pub(crate) use dense::Dense;
pub(crate) use striped::{Padded, STRIPES, Shards, Striped, stripe};

// Set once and then only read: nothing for a model checker to schedule.
pub(crate) use std::sync::OnceLock;

#[cfg(not(loom))]
pub(crate) use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic;

#[cfg(loom)]
mod checked;
#[cfg(loom)]
pub(crate) use checked::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
#[cfg(loom)]
pub(crate) use loom::sync::atomic;
