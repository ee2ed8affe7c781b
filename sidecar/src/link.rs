//! `kvlane link`: how fast KV moves between two hosts, for the planner.
//!
//! One host listens, the other measures: with NIXL where both have it, over TCP otherwise. Cells are measured in turn, round
//! by round, so that what else happens on the link spreads over all of them, and their medians are reported.

mod args;
mod fit;
mod listen;
mod measure;
mod region;
mod report;
mod wire;

#[cfg(test)]
mod tests;

use std::io::Write as _;
use std::pin::pin;

use kvlane::{Error, ErrorKind, Result};
use tokio_util::sync::CancellationToken;

use crate::signals::Ending;

pub use self::args::{LinkArgs, LinkTransport, Piece, Size};

/// Listens, or measures and prints.
///
/// # Errors
/// The peer cannot be reached, is no kvlane of this version, or does not answer in time; a file cannot be written.
pub async fn run(args: LinkArgs) -> Result<()> {
    if args.peer == "listen" {
        let mut ending = Ending::watch()?;
        let listener = listen::Listener::bind(&args).await?;
        tracing::info!(
            address = %listener.address(),
            transport = listener.transport(),
            "waiting for kvlane link HOST:PORT"
        );
        let cancel = CancellationToken::new();
        let mut serving = pin!(listener.serve(cancel.clone()));
        tokio::select! {
            served = serving.as_mut() => return served,
            () = ending.asked() => cancel.cancel(),
        }
        return serving.await;
    }
    let measured = measure::measure(&args).await?;
    let text = if args.json {
        format!("{:#}\n", measured.json())
    } else {
        measured.table()
    };
    if let Some(path) = &args.write {
        std::fs::write(path, measured.file()).map_err(|error| {
            failed(format!("cannot write {}", path.display())).with_source(error)
        })?;
    }
    std::io::stdout()
        .lock()
        .write_all(text.as_bytes())
        .map_err(|error| failed("cannot write to standard output".to_owned()).with_source(error))
}

fn failed(message: String) -> Error {
    Error::new(ErrorKind::Config, message)
}
