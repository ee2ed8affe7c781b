//! Shared pieces of the cross-process tests.
