//! The only door to locks and atomics, so that a model checker can replace them.
//!
//! With `--cfg loom`, what is in [`checked`] is loom's, and the tests named `model` explore every interleaving of the
//! protocols that are built on it: `scripts/test.sh loom`. Nothing else can run so.

mod checked;
mod dense;
mod striped;

pub(crate) use dense::Dense;
pub(crate) use striped::{Padded, STRIPES, Shards, Striped, stripe};

pub(crate) use std::sync::{OnceLock, atomic};

pub(crate) use parking_lot::{Mutex, RwLock};
