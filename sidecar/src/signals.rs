//! The signals that ask a process to end.

use kvlane::{Error, ErrorKind, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and SIGINT, caught from its creation on: a program creates it before it tells anyone that it is there, since whom
/// it told may end it at once.
#[derive(Debug)]
pub struct Ending {
    terminate: Signal,
    interrupt: Signal,
}

impl Ending {
    /// Catches the signals from now on.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] with what the system says.
    pub fn watch() -> Result<Self> {
        let catch = |kind| {
            signal(kind).map_err(|error| {
                Error::new(ErrorKind::Config, "cannot watch for signals").with_source(error)
            })
        };
        Ok(Self {
            terminate: catch(SignalKind::terminate())?,
            interrupt: catch(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next of them; one that came since the last call counts.
    pub async fn asked(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
