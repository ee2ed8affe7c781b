//! The command line, and the processes of a whole run.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use clap::{Args, Parser, Subcommand};
use serde_json::Value;

use crate::measure::{self, Cells, Part};
use crate::report::{Machine, Report};
use crate::subject::Name;

#[derive(Parser)]
#[command(about = "Measures kvlane's index and decision beside its peers.")]
struct Cli {
    #[command(subcommand)]
    command: Mode,
}

#[derive(Subcommand)]
enum Mode {
    /// Measures everything, each subject in processes of its own.
    Run(RunArgs),
    /// Measures one part of one subject, and prints it as JSON.
    Measure {
        /// What to measure.
        #[arg(long)]
        part: Part,
        /// Of whom.
        #[arg(long)]
        subject: Name,
        /// At the sizes of a quick run.
        #[arg(long)]
        quick: bool,
    },
    /// Makes the table from the JSON of a run.
    Table {
        /// The JSON.
        json: PathBuf,
    },
}

#[derive(Args)]
struct RunArgs {
    /// Smaller sizes, fewer rounds, and the main peers only.
    #[arg(long)]
    quick: bool,
    /// Rounds over all subjects (default 5, and 3 when quick).
    #[arg(long)]
    rounds: Option<u32>,
    /// Where to write the JSON.
    #[arg(long)]
    json: PathBuf,
    /// Where to write the table.
    #[arg(long)]
    markdown: Option<PathBuf>,
    /// File with a shorter table between two markers, which is replaced.
    #[arg(long)]
    readme: Option<PathBuf>,
    /// Commit that is measured.
    #[arg(long, default_value = "unknown")]
    commit: String,
    /// Compiler that it was built with.
    #[arg(long, default_value = "unknown")]
    toolchain: String,
}

/// Runs the command line.
#[must_use]
pub fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Mode::Run(args) => run(&args),
        Mode::Measure {
            part,
            subject,
            quick,
        } => measure::measure(part, subject, quick).and_then(|cells| {
            let text = serde_json::to_string(&cells).map_err(|error| error.to_string())?;
            print(&text)
        }),
        Mode::Table { json } => read(&json).and_then(|report| print(&report.markdown())),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn print(text: &str) -> Result<(), String> {
    writeln!(io::stdout(), "{text}").map_err(|error| error.to_string())
}

fn tell(text: &str) {
    // Progress that nobody can read is no reason to stop.
    let _ = writeln!(io::stderr(), "{text}");
}

fn read(path: &Path) -> Result<Report, String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    serde_json::from_str(&text).map_err(|error| format!("cannot parse {}: {error}", path.display()))
}

/// Returns what other commands have put at the end of the results.
fn kept(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    ["<!-- kv moved -->", "<!-- gpu -->"]
        .iter()
        .filter_map(|begin| text.find(begin))
        .min()
        .map_or_else(String::new, |at| format!("\n{}", &text[at..]))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)
            .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    }
    std::fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

fn run(args: &RunArgs) -> Result<(), String> {
    let start = Instant::now();
    let rounds = args.rounds.unwrap_or(if args.quick { 3 } else { 5 });
    let machine = Machine::read(&args.toolchain, &args.commit);
    let mut report = Report::new(machine, args.quick, rounds);
    for (number, job) in jobs(args.quick, rounds).into_iter().enumerate() {
        let begin = Instant::now();
        let cells = job.run(args.quick)?;
        tell(&format!(
            "{number:3} {} of {}: {:.1} s",
            job.part.as_str(),
            job.subject,
            begin.elapsed().as_secs_f64()
        ));
        report.add(job.subject, &cells);
    }
    report.finish(start.elapsed().as_secs_f64());
    let json = serde_json::to_string_pretty(&report).map_err(|error| error.to_string())?;
    write(&args.json, &(json + "\n"))?;
    if let Some(path) = &args.markdown {
        write(path, &(report.markdown() + &kept(path)))?;
    }
    if let Some(path) = &args.readme {
        let readme = std::fs::read_to_string(path)
            .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        write(path, &report.put_into_readme(&readme)?)?;
    }
    Ok(())
}

/// One process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Job {
    part: Part,
    subject: Name,
}

/// Lists processes: what is timed once a round, in turning order; what counts bytes or answers once, as it never varies.
fn jobs(is_quick: bool, rounds: u32) -> Vec<Job> {
    let subjects: Vec<Name> = Name::built()
        .into_iter()
        .filter(|subject| !(is_quick && matches!(subject, Name::Radix | Name::Positional)))
        .collect();
    let mut jobs = Vec::new();
    let mut push = |part: Part, subject: Name| {
        if part.applies_to(subject) {
            jobs.push(Job { part, subject });
        }
    };
    for &subject in &subjects {
        push(Part::Heap, subject);
        push(Part::ApproximateHeap, subject);
        push(Part::Probes, subject);
    }
    for round in 0..rounds {
        let mut order = subjects.clone();
        if round % 2 == 1 {
            order.reverse();
        }
        for subject in order {
            // The model and the indexes that are nobody's first choice get one round.
            let is_main = matches!(subject, Name::Ours | Name::Crtc | Name::Chain);
            if is_main || round == 0 {
                push(Part::Speed, subject);
                push(Part::SizedStores, subject);
                push(Part::Select, subject);
            }
            if round < 3 || subject == Name::Ours {
                push(Part::Approximate, subject);
            }
        }
    }
    jobs
}

impl Job {
    fn run(self, is_quick: bool) -> Result<Cells, String> {
        let program = self.program()?;
        let mut command = Command::new(&program);
        command
            .arg("measure")
            .args(["--part", self.part.as_str()])
            .args(["--subject", self.subject.as_str()]);
        if is_quick {
            command.arg("--quick");
        }
        let what = format!("{} of {}", self.part.as_str(), self.subject);
        let output = command
            .stderr(std::process::Stdio::inherit())
            .output()
            .map_err(|error| format!("{what}: cannot start {}: {error}", program.display()))?;
        if !output.status.success() {
            return Err(format!("{what}: ended with {}", output.status));
        }
        match serde_json::from_slice(&output.stdout) {
            Ok(Value::Object(cells)) => Ok(cells),
            _ => Err(format!("{what}: did not print an object")),
        }
    }

    /// Returns this program, or its sibling whose allocator counts.
    fn program(self) -> Result<PathBuf, String> {
        let this = std::env::current_exe().map_err(|error| error.to_string())?;
        Ok(match self.part.counts_heap() {
            true => this.with_file_name("bench-heap"),
            false => this,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_change_their_order_from_round_to_round() {
        let speed: Vec<Name> = jobs(true, 2)
            .into_iter()
            .filter(|job| job.part == Part::Speed)
            .map(|job| job.subject)
            .collect();
        let main: Vec<Name> = speed
            .into_iter()
            .filter(|name| *name != Name::Naive)
            .collect();
        let (first, second) = main.split_at(main.len() / 2);
        let mut reversed = second.to_vec();
        reversed.reverse();
        assert_eq!(first, reversed);
        assert_eq!(first[0], Name::Ours);
    }

    #[test]
    fn command_line_is_well_formed() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
