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
    new(error.kind(), &error.to_string())
}

/// An argument that the core never sees, since it has no such type.
pub(crate) fn invalid(message: impl AsRef<str>) -> napi::Error<Code> {
    new(ErrorKind::InvalidRequest, message.as_ref())
}

pub(crate) fn config(message: impl AsRef<str>) -> napi::Error<Code> {
    new(ErrorKind::Config, message.as_ref())
}

/// What napi could not read or make: a getter that threw, a value of another type.
#[expect(clippy::needless_pass_by_value, reason = "it is handed to map_err")]
pub(crate) fn of_napi(error: napi::Error) -> napi::Error<Code> {
    let status = error.status;
    match &*error.reason {
        "" => invalid(format!("the value cannot be read: {status}")),
        reason => invalid(format!("the value cannot be read: {reason}")),
    }
}

fn new(kind: ErrorKind, message: &str) -> napi::Error<Code> {
    napi::Error::new(Code(kind), camel_names(message))
}

/// Writes the names of the core as they are called here (`block_size` as `blockSize`), outside of double quotes: what is
/// quoted is the caller's.
fn camel_names(message: &str) -> String {
    let mut written = String::with_capacity(message.len());
    let (mut quoted, mut escaped, mut raise) = (false, false, false);
    let mut before = ' ';
    let mut rest = message.chars().peekable();
    while let Some(char) = rest.next() {
        quoted ^= char == '"' && !escaped;
        escaped = quoted && char == '\\' && !escaped;
        let joins = char == '_'
            && !quoted
            && before.is_ascii_lowercase()
            && rest.peek().is_some_and(char::is_ascii_lowercase);
        if joins {
            raise = true;
        } else if std::mem::take(&mut raise) {
            written.push(char.to_ascii_uppercase());
        } else {
            written.push(char);
        }
        before = char;
    }
    written
}
