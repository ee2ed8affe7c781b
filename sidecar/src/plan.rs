//! `kvlane plan`: from which prompt length and link speed on a handoff pays, by the planner itself.

mod args;
mod plot;
mod study;
mod table;

use std::io::Write as _;

use kvlane::{Error, ErrorKind, Result};

pub use args::{LinkSpeed, PlanArgs, PrefillPoint};

use study::Study;

/// Prints the crossover table, or JSON, and writes the plot where it is asked for. Without a link, prints the model's KV bytes.
///
/// # Errors
/// The model's configuration cannot be read or understood, a number is out of range, or the plot cannot be written.
pub fn run(args: &PlanArgs) -> Result<()> {
    if args.link.is_empty() {
        return print(&study::model_alone(args)?);
    }
    let study = Study::new(args)?;
    let text = if args.json {
        let json = serde_json::json!({
            "kv_bytes_per_token": study.bytes_per_token(),
            "links": study.links(args)?,
        });
        format!("{json:#}\n")
    } else {
        table::tables(&study, args)?
    };
    if let Some(path) = &args.svg {
        std::fs::write(path, plot::plot(&study, args)?).map_err(|error| {
            Error::new(
                ErrorKind::Config,
                format!("cannot write {}", path.display()),
            )
            .with_source(error)
        })?;
    }
    print(&text)
}

fn print(text: &str) -> Result<()> {
    std::io::stdout()
        .lock()
        .write_all(text.as_bytes())
        .map_err(|error| {
            Error::new(ErrorKind::Config, "cannot write to standard output").with_source(error)
        })
}

#[cfg(test)]
mod tests;
