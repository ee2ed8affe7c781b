//! Measures in timed runs, and drives whole runs.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvlane_benches::driver::main()
}
