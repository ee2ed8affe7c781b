//! Sequence watching.
