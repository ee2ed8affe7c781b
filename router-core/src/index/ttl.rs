//! Approximate entries.
