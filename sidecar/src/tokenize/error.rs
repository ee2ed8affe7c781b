//! What can go wrong between a request body and its token ids.

use std::error::Error as StdError;
use std::fmt;
use std::path::{Path, PathBuf};

/// Why a model folder was not loaded or a prompt has no token ids.
///
/// [`Load`](Self::Load) concerns every request, the others one. What has no token ids is routed by its text; nothing here
/// stops a start.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenizeError {
    /// A file of the model folder is missing, unreadable or malformed.
    Load {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The body is not one that an engine accepts.
    Invalid(String),
    /// The chat template refused the messages or failed.
    Render(String),
    /// The prompt depends on something that only the engine knows, such as an image processor.
    Unsupported(String),
    /// The tokenizer failed on the text.
    Encode(String),
}

impl TokenizeError {
    /// Returns a stable short name, fit for a metric's label.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Load { .. } => "load",
            Self::Invalid(_) => "invalid",
            Self::Render(_) => "render",
            Self::Unsupported(_) => "unsupported",
            Self::Encode(_) => "encode",
        }
    }

    pub(super) fn load(file: &Path, reason: impl fmt::Display) -> Self {
        Self::Load {
            file: file.to_owned(),
            reason: reason.to_string(),
        }
    }
}

impl fmt::Display for TokenizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load { file, reason } => {
                write!(f, "model file {} cannot be used: {reason}", file.display())
            }
            Self::Invalid(reason) => write!(f, "the request body is malformed: {reason}"),
            Self::Render(reason) => write!(f, "the chat template failed: {reason}"),
            Self::Unsupported(what) => write!(f, "the router cannot tokenize {what}"),
            Self::Encode(reason) => write!(f, "the tokenizer failed: {reason}"),
        }
    }
}

impl StdError for TokenizeError {}
