//! Engines that `kvlane serve` starts and keeps, with real processes: simulated engines and small shells that misbehave.

#![expect(clippy::float_cmp, reason = "counts read as numbers are exact")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod balance;
mod kills;
mod roster;
mod starts;
mod strays;
mod traffic;
mod world;
