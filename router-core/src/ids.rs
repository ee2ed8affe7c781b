//! Names of the things a router tells apart.

use std::fmt;
use std::sync::Arc;

use serde::{Serialize, Serializer};

use crate::error::{Error, Result};

/// The caller's own name of an engine instance; cheap to clone.
///
/// Between 1 and 256 bytes without control characters, so that it is safe in a log line, a metric label and a header.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(Arc<str>);

impl WorkerId {
    /// Parses a worker name.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`](crate::ErrorKind::InvalidRequest) when empty, longer than 256 bytes or holding control characters.
    pub fn new(id: &str) -> Result<Self> {
        if id.is_empty() || id.len() > 256 || id.chars().any(char::is_control) {
            return Err(Error::invalid(format!(
                "worker id {id:?} is not valid: 1 to 256 bytes without control characters are accepted"
            )));
        }
        Ok(Self(id.into()))
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for WorkerId {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl std::borrow::Borrow<str> for WorkerId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// What a request is routed to: an engine instance and its data-parallel rank (0 without data parallelism).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct WorkerRank {
    /// The engine instance.
    pub worker: WorkerId,
    /// Its data-parallel rank, counted from 0.
    pub dp_rank: u32,
}

/// Names one booking for its whole life; never reused by a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub(crate) u64);

impl LeaseId {
    /// Returns the number, for transport across a process or language boundary.
    #[must_use]
    pub const fn as_u64(self) -> u64 {
        self.0
    }

    /// Rebuilds an id that [`as_u64`](Self::as_u64) gave out.
    #[must_use]
    pub const fn from_u64(id: u64) -> Self {
        Self(id)
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl Serialize for LeaseId {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What part a worker takes in serving a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Processes prompts only.
    Prefill,
    /// Produces tokens after the first only.
    Decode,
    /// Does both (default).
    #[default]
    Both,
}

impl Role {
    /// Returns the stable name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }

    /// Tells whether a worker of this role can take a request that asks for `wanted`.
    #[must_use]
    pub fn serves(self, wanted: Self) -> bool {
        self == Self::Both || self == wanted
    }
}

impl std::str::FromStr for Role {
    type Err = Error;

    /// Parses `prefill`, `decode` or `both`.
    fn from_str(name: &str) -> Result<Self> {
        match name {
            "prefill" => Ok(Self::Prefill),
            "decode" => Ok(Self::Decode),
            "both" => Ok(Self::Both),
            _ => Err(Error::invalid(format!(
                "role {name:?} is not known: prefill, decode and both are"
            ))),
        }
    }
}

/// Dense index of one (worker, dp rank) life inside one router; reused only after everything of the old life is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

impl Slot {
    /// Returns the slot as an array index.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}
