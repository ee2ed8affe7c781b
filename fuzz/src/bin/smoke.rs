//! Runs one target over its corpus and over random mutations of it, on any toolchain and without coverage guidance.
//!
//! `smoke TARGET [SECONDS] [SEED]`: every file of `corpus/TARGET` beside this package's manifest as it is, then mutations
//! of them for SECONDS (10). A failing input is written to `artifacts/TARGET/` and the process ends with a failure.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use std::{env, fs, io, panic};

use fastrand::Rng;
use kvlane_fuzz::{TARGETS, Target};

/// Inputs above this are run as they are and not mutated: they are slow and have the structure of smaller ones.
const MAX_MUTATED_BYTES: usize = 16 << 10;

fn main() -> ExitCode {
    match run() {
        Ok(inputs) => {
            eprintln!("{inputs} inputs, every promise held");
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<u64, String> {
    let mut arguments = env::args().skip(1);
    let name = arguments.next().unwrap_or_default();
    let Some(target) = TARGETS.into_iter().find(|(known, _)| *known == name) else {
        let known: Vec<_> = TARGETS.iter().map(|(name, _)| *name).collect();
        return Err(format!("target {name:?} is none of {known:?}"));
    };
    let seconds = number(arguments.next(), "SECONDS", 10)?;
    let seed = number(arguments.next(), "SEED", fastrand::u64(..))?;
    let folder = package().join("corpus").join(&name);
    let corpus = read_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    if corpus.is_empty() {
        return Err(format!("{}: no files; run seed.sh", folder.display()));
    }
    for input in &corpus {
        check(target, input)?;
    }
    eprintln!(
        "{} files held; mutating for {seconds} s with seed {seed}",
        corpus.len()
    );
    let mut random = Rng::with_seed(seed);
    let small: Vec<_> = corpus
        .iter()
        .filter(|input| input.len() <= MAX_MUTATED_BYTES)
        .collect();
    let start = Instant::now();
    let mut inputs = corpus.len() as u64;
    while start.elapsed() < Duration::from_secs(seconds) && !small.is_empty() {
        let mut input = small[random.usize(..small.len())].clone();
        let other = small[random.usize(..small.len())];
        for _ in 0..random.usize(1..6) {
            mutate(&mut input, other, &mut random);
        }
        check(target, &input)?;
        inputs += 1;
    }
    Ok(inputs)
}

fn number(argument: Option<String>, name: &str, default: u64) -> Result<u64, String> {
    argument.map_or(Ok(default), |text| {
        text.parse()
            .map_err(|_| format!("{name} {text:?} is no whole number"))
    })
}

fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read_all(folder: &Path) -> io::Result<Vec<Vec<u8>>> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)?
        .map(|entry| entry.map(|it| it.path()))
        .collect::<io::Result<_>>()?;
    files.sort();
    files.into_iter().map(fs::read).collect()
}

fn check((name, body): Target, input: &[u8]) -> Result<(), String> {
    if panic::catch_unwind(|| body(input)).is_ok() {
        return Ok(());
    }
    let folder = package().join("artifacts").join(name);
    let file = folder.join("smoke");
    fs::create_dir_all(&folder)
        .and_then(|()| fs::write(&file, input))
        .map_err(|error| format!("{}: {error}", file.display()))?;
    Err(format!(
        "a promise does not hold: input in {}",
        file.display()
    ))
}

fn mutate(input: &mut Vec<u8>, other: &[u8], random: &mut Rng) {
    let at = random.usize(..=input.len());
    let end = (at + random.usize(..32)).min(input.len());
    match random.u8(..8) {
        0..=2 if at < input.len() => input[at] = random.u8(..),
        // Headers of msgpack containers, strings and numbers.
        3 if at < input.len() => input[at] = random.u8(0x80..=0xdf),
        4 => drop(
            input.splice(
                at..at,
                (0..random.usize(1..6))
                    .map(|_| random.u8(..))
                    .collect::<Vec<_>>(),
            ),
        ),
        5 => drop(input.drain(at..end)),
        6 => {
            let from = random.usize(..=other.len());
            let to = (from + random.usize(..64)).min(other.len());
            drop(input.splice(at..end, other[from..to].iter().copied()));
        }
        _ => input.truncate(at),
    }
}
