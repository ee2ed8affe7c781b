//! The `kvlane` command with the real NIXL, process by process.
//!
//! Not part of `cargo test`: `scripts/test.sh nixl` installs the library and runs it.

mod engines;
mod link;
mod process;
