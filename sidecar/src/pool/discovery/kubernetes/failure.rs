//! Why the API server could not be asked, in words that say what to do.

use std::fmt;
use std::time::Duration;

use kube::core::Status;

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Question {
    /// As roles name it: `list`, `watch`, `get` or `update`.
    pub(super) verb: &'static str,
    pub(super) resource: Resource,
}

/// A kind of object in a namespace, as roles name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Resource {
    pub(super) plural: String,
    /// Empty for the core API.
    pub(super) group: String,
    /// `None` for every namespace.
    pub(super) namespace: Option<String>,
}

/// A failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) kind: Kind,
    /// Seconds that the server asks to wait.
    pub(super) retry_after: Duration,
    text: String,
}

/// What the caller can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// 410: what was known is too old; list anew.
    Gone,
    /// 404.
    NotFound,
    /// 409: somebody else was faster.
    Conflict,
    /// An answer that cannot be read: something was lost.
    Unreadable,
    /// Anything else: try again.
    Other,
}

/// Longest wait that is done at the server's wish.
const MAX_RETRY_AFTER: u32 = 60;

impl Failure {
    pub(super) fn of(error: &kube::Error, question: &Question) -> Self {
        match error {
            kube::Error::Api(status) => Self::of_status(status, question),
            other => Self {
                kind: match other {
                    kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => Kind::Unreadable,
                    _ => Kind::Other,
                },
                retry_after: Duration::ZERO,
                text: format!("cannot {question}: {}", chain(other)),
            },
        }
    }

    pub(super) fn of_status(status: &Status, question: &Question) -> Self {
        let says = status.message.as_str();
        let (kind, text) = match (status.code, status.reason.as_str()) {
            // The library takes an event that it cannot read for a status, of which it then knows nothing.
            (0, "") => (
                Kind::Unreadable,
                format!("cannot {question}: the API server sent what cannot be read: {says}"),
            ),
            (401, _) => (
                Kind::Other,
                format!(
                    "cannot {question}: the API server does not accept the credentials: {says}"
                ),
            ),
            (403, _) => (Kind::Other, question.forbidden(says)),
            (404, _) => (
                Kind::NotFound,
                format!("cannot {question}: not found: {says}"),
            ),
            (409, _) => (
                Kind::Conflict,
                format!("cannot {question}: conflict: {says}"),
            ),
            (410, _) | (_, "Gone" | "Expired") => (
                Kind::Gone,
                format!("cannot {question}: what was known is too old: {says}"),
            ),
            (code, reason) => (
                Kind::Other,
                format!("cannot {question}: the API server answers {code} {reason}: {says}"),
            ),
        };
        let seconds = status
            .details
            .as_ref()
            .map_or(0, |details| details.retry_after_seconds);
        Self {
            kind,
            retry_after: Duration::from_secs(seconds.min(MAX_RETRY_AFTER).into()),
            text,
        }
    }

    /// The server did not answer in time.
    pub(super) fn silence(question: &Question, waited: Duration) -> Self {
        Self {
            kind: Kind::Other,
            retry_after: Duration::ZERO,
            text: format!(
                "cannot {question}: the API server has not answered for {} seconds",
                waited.as_secs_f64()
            ),
        }
    }

    /// More objects than a source may hold.
    pub(super) fn too_many(question: &Question, limit: usize) -> Self {
        Self {
            kind: Kind::Other,
            retry_after: Duration::from_secs(u64::from(MAX_RETRY_AFTER)),
            text: format!(
                "cannot {question}: more than {limit} match; narrow the selector or the namespace"
            ),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Question {
    fn forbidden(&self, says: &str) -> String {
        let Resource {
            plural,
            group,
            namespace,
        } = &self.resource;
        let role = namespace.as_ref().map_or_else(
            || "a ClusterRole".to_owned(),
            |namespace| format!("a Role in namespace {namespace}"),
        );
        let verb = self.verb;
        format!(
            "not permitted to {self}: bind {role} with the verb {verb} on the resource {plural} of the API group {group:?} (the API server says: {says})"
        )
    }
}

impl fmt::Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Resource {
            plural,
            group,
            namespace,
        } = &self.resource;
        write!(f, "{} {plural}", self.verb)?;
        if !group.is_empty() {
            write!(f, ".{group}")?;
        }
        match namespace {
            Some(namespace) => write!(f, " in namespace {namespace}"),
            None => f.write_str(" in all namespaces"),
        }
    }
}

/// Spells out an error with what is behind it.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
