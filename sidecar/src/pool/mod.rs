//! The workers as a pool: which there are, and how many of which role there should be.
//!
//! Sources (configuration, watched file, DNS, Kubernetes, local processes, admin calls) publish the workers that they see on
//! rosters ([`roster`]); the manager ([`manager`]) brings the fleet to what they say; each life of a worker is a [`member`].
//! [`sources::start`] is where all sources are started.

pub mod describe;
pub mod discovery;
pub mod manager;
pub mod member;
pub mod planner;
pub mod process;
mod quiet;
pub mod rebalance;
pub mod roster;
pub mod scale;
pub mod sources;
