//! Flags of `kvlane demo`.

use clap::{Args, ValueEnum};
use kvlane::{Error, ErrorKind, Result};

/// Flags of `kvlane demo`: the measured story on embedded engines over real sockets.
#[derive(Args, Clone, Debug)]
pub struct DemoArgs {
    /// Prints one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
    /// Plays this policy only; may be repeated [default: all]
    #[arg(long, value_enum, value_name = "NAME")]
    pub policy: Vec<DemoPolicy>,
    /// Runs of each policy, with seeds 1, 2, …
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub seeds: u8,
    /// Compresses the engines' time; reported times are expanded again
    #[arg(long, value_name = "N", default_value_t = 4.0)]
    pub speed: f64,
}

/// What the demo compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DemoPolicy {
    /// Workers in turn.
    RoundRobin,
    /// Workers at random.
    Random,
    /// The router, from its own placements alone.
    KvApproximate,
    /// The router, told to follow events that never come.
    KvEventsMissing,
    /// The router, following the engines' events.
    KvEvents,
}

impl DemoPolicy {
    /// Every policy, in the order of the table.
    pub const ALL: [Self; 5] = [
        Self::RoundRobin,
        Self::Random,
        Self::KvApproximate,
        Self::KvEventsMissing,
        Self::KvEvents,
    ];

    /// Returns the name on the command line and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::KvApproximate => "kv-approximate",
            Self::KvEventsMissing => "kv-events-missing",
            Self::KvEvents => "kv-events",
        }
    }
}

impl DemoArgs {
    pub(super) fn policies(&self) -> Vec<DemoPolicy> {
        let wanted = |policy: &DemoPolicy| self.policy.is_empty() || self.policy.contains(policy);
        DemoPolicy::ALL.into_iter().filter(wanted).collect()
    }

    pub(super) fn validate(&self) -> Result<()> {
        if self.seeds == 0 {
            return Err(Error::new(
                ErrorKind::Config,
                "--seeds 0 is out of range: 1 to 255 are accepted",
            ));
        }
        if !(0.1..=100.0).contains(&self.speed) {
            return Err(Error::new(
                ErrorKind::Config,
                format!(
                    "--speed {} is out of range: 0.1 to 100 is accepted",
                    self.speed
                ),
            ));
        }
        Ok(())
    }
}
