//! The only door to locks and atomics, so that a model checker can replace them.

mod dense;
mod striped;

pub(crate) use dense::Dense;
pub(crate) use striped::{Padded, STRIPES, Shards, Striped, stripe};

pub(crate) use std::sync::{OnceLock, atomic};

pub(crate) use parking_lot::{Mutex, RwLock};
