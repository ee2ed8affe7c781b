//! The one error type of the core and its stable codes.

use std::error::Error as StdError;
use std::fmt;

/// What went wrong, as a small stable set that every boundary maps once.
///
/// [`code`](Self::code) is the same string in Rust, Python (`Error.code`), Node (`error.code`) and the sidecar's JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A configuration key is unknown, out of range, or contradicts another.
    Config,
    /// An argument or payload of a call is malformed or out of range.
    InvalidRequest,
    /// The named worker is not registered.
    UnknownWorker,
    /// Every eligible worker is over its limit.
    Overloaded,
    /// The router has been closed.
    Closed,
}

impl ErrorKind {
    /// Every kind, so that boundaries can test that none is forgotten.
    pub const ALL: [Self; 5] = [
        Self::Config,
        Self::InvalidRequest,
        Self::UnknownWorker,
        Self::Overloaded,
        Self::Closed,
    ];

    /// Returns the stable code.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Config => "config_error",
            Self::InvalidRequest => "invalid_request",
            Self::UnknownWorker => "unknown_worker",
            Self::Overloaded => "overloaded",
            Self::Closed => "closed",
        }
    }
}

/// An error that names the operation, the offending value and the accepted range.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The result of a core operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Creates an error of `kind` with a full-sentence message.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            source: None,
        }
    }

    /// Attaches the error that caused this one.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Returns what went wrong.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    pub(crate) fn config(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Config, message)
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidRequest, message)
    }

    pub(crate) fn unknown_worker(worker: &str) -> Self {
        Self::new(
            ErrorKind::UnknownWorker,
            format!("worker {worker:?} is not registered; add it with add_worker first"),
        )
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source
            .as_deref()
            .map(|source| source as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct() {
        let codes: std::collections::HashSet<_> =
            ErrorKind::ALL.iter().map(|kind| kind.code()).collect();
        assert_eq!(codes.len(), ErrorKind::ALL.len());
    }
}
