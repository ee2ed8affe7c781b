//! Bodies of the fuzz targets: functions from bytes that panic when a promise does not hold.
//!
//! A body is a plain function so that the libFuzzer target, the `smoke` binary and the core's own tests run the same code.

pub mod index_vs_naive;
pub mod wire;

/// A body and the name of its target and corpus folder.
pub type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: [Target; 2] = [
    ("wire", wire::check),
    ("index_vs_naive", index_vs_naive::check),
];
