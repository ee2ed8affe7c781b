//! The `kvlane._native` module: converts, calls the core, and converts back.

mod convert;
mod error;

use kvlane::{BlockSize, SaltContext};
use pyo3::prelude::*;

use crate::convert::Tokens;
use crate::error::to_py;

/// Hashes the complete blocks of a prompt.
///
/// `tokens` is a contiguous u32, i32 or i64 buffer or a sequence of integers. Returns the local hashes and the sequence
/// hashes, one of each per complete block. See `kvlane::block_hashes` in the Rust documentation for the rule.
#[pyfunction]
#[expect(
    clippy::needless_pass_by_value,
    reason = "PyO3 extracts arguments by value"
)]
#[pyo3(signature = (tokens, block_size = 16, lora = None, salt = None))]
fn block_hashes(
    py: Python<'_>,
    tokens: Tokens,
    block_size: u32,
    lora: Option<&str>,
    salt: Option<&str>,
) -> PyResult<(Vec<u64>, Vec<u64>)> {
    let block_size = BlockSize::new(block_size).map_err(to_py)?;
    let context = SaltContext {
        lora,
        salt,
        media: &[],
    };
    let hashes = py.detach(|| kvlane::block_hashes(&tokens.0, block_size, &context));
    Ok((
        hashes.local.into_iter().map(|hash| hash.0).collect(),
        hashes.sequence.into_iter().map(|hash| hash.0).collect(),
    ))
}

#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(module)?;
    module.add_function(wrap_pyfunction!(block_hashes, module)?)
}
