//! The only door to locks, so that a model checker can replace them.

pub(crate) use parking_lot::{Mutex, RwLock};
