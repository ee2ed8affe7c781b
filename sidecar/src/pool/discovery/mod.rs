//! Sources that look for workers: each asks again and again, publishes whole lists, and keeps its last good one while it
//! cannot ask.

#[cfg(feature = "dns")]
pub mod dns;
pub mod file;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
