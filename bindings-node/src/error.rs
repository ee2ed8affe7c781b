//! Core errors as JavaScript errors whose `code` is the core's.

use kvlane::{Error, ErrorKind};

/// The result of a call from Node.
pub(crate) type Result<T> = std::result::Result<T, napi::Error<Code>>;

/// An error's `code`.
#[derive(Debug)]
#[expect(
    unnameable_types,
    reason = "it stands in the results of the exported functions"
)]
pub struct Code(ErrorKind);

impl AsRef<str> for Code {
    fn as_ref(&self) -> &str {
        self.0.code()
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it is handed to map_err")]
pub(crate) fn to_js(error: Error) -> napi::Error<Code> {
    napi::Error::new(Code(error.kind()), error.to_string())
}
