//! How an engine's process ended.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    /// It ended itself with this code.
    Code(i32),
    /// A signal of this number ended it.
    Signal(i32),
}

impl Exit {
    /// The code of a command that is not there, as shells have it.
    pub(super) const NOT_FOUND: u8 = 127;
    /// The code of a command that is there and cannot be run, as shells have it.
    pub(super) const NOT_EXECUTABLE: u8 = 126;
    /// The code of a command line that was not understood, as argument parsers have it.
    const USAGE: u8 = 2;

    /// Tells whether the command itself is wrong, which no second try changes.
    pub(super) fn is_wrong_command(self) -> bool {
        let codes = [Self::USAGE, Self::NOT_EXECUTABLE, Self::NOT_FOUND];
        matches!(self, Self::Code(code) if codes.map(i32::from).contains(&code))
    }
}

impl From<ExitStatus> for Exit {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Code(-1),
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(number) => {
                let name = NAMES.iter().find(|(known, _)| *known == number);
                write!(f, "was ended by signal {number}")?;
                name.map_or(Ok(()), |(_, name)| write!(f, " ({name})"))
            }
        }
    }
}

/// The signals that end engines.
const NAMES: [(i32, &str); 9] = [
    (1, "SIGHUP"),
    (2, "SIGINT"),
    (4, "SIGILL"),
    (6, "SIGABRT"),
    (7, "SIGBUS"),
    (8, "SIGFPE"),
    (9, "SIGKILL"),
    (11, "SIGSEGV"),
    (15, "SIGTERM"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_are_told_in_words() {
        assert_eq!(Exit::Code(3).to_string(), "exited with code 3");
        assert_eq!(
            Exit::Signal(9).to_string(),
            "was ended by signal 9 (SIGKILL)"
        );
        assert_eq!(Exit::Signal(34).to_string(), "was ended by signal 34");
    }

    #[test]
    fn only_a_wrong_command_is_not_tried_again() {
        for (exit, is_wrong) in [
            (Exit::Code(2), true),
            (Exit::Code(126), true),
            (Exit::Code(127), true),
            (Exit::Code(1), false),
            (Exit::Code(0), false),
            (Exit::Signal(2), false),
        ] {
            assert_eq!(exit.is_wrong_command(), is_wrong, "{exit}");
        }
    }
}
