//! Locks of the protocols that a model checker explores.

#[cfg(not(loom))]
pub(super) use parking_lot::{RwLock, RwLockReadGuard};

#[cfg(loom)]
pub(super) use loom::sync::RwLockReadGuard;

/// Loom's lock with the methods of ours: it is never poisoned, since a model ends with its first panic.
#[cfg(loom)]
#[derive(Debug)]
pub(super) struct RwLock<T>(loom::sync::RwLock<T>);

#[cfg(loom)]
impl<T> RwLock<T> {
    pub(super) fn new(value: T) -> Self {
        Self(loom::sync::RwLock::new(value))
    }

    pub(super) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0
            .read()
            .expect("nothing panics while it holds the lock")
    }

    pub(super) fn write(&self) -> loom::sync::RwLockWriteGuard<'_, T> {
        self.0
            .write()
            .expect("nothing panics while it holds the lock")
    }
}
