//! The `kvlane._native` module: converts, calls the core, and converts back.

mod clock;
mod convert;
mod ending;
mod error;
mod info;
mod lease;
mod prompt;
mod router;
mod shared;

use kvlane::BlockSize;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::convert::{Media, Tokens, u32_of};
use crate::error::to_py;
use crate::prompt::PromptArguments;

/// Hashes the complete blocks of a prompt.
///
/// `tokens` is a contiguous u32, i32 or i64 buffer or a sequence of integers; `text` or `messages` (with `tools`) may be given
/// instead, which are cut into chunks of text. Returns the local hashes and the sequence hashes, one of each per block. See
/// `kvlane::block_hashes` in the Rust documentation for the rule.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "the keyword arguments of Python, one by one"
)]
#[pyo3(signature = (tokens = None, block_size = 16, lora = None, salt = None, media = None, *, text = None, messages = None, tools = None))]
fn block_hashes(
    py: Python<'_>,
    tokens: Option<Tokens>,
    #[pyo3(from_py_with = u32_of)] block_size: u32,
    lora: Option<&str>,
    salt: Option<&str>,
    media: Option<Media>,
    text: Option<&Bound<'_, PyString>>,
    messages: Option<&Bound<'_, PyAny>>,
    tools: Option<&Bound<'_, PyAny>>,
) -> PyResult<(Vec<u64>, Vec<u64>)> {
    let _call = ending::Call::enter();
    let block_size = BlockSize::new(block_size).map_err(to_py)?;
    let prompt = PromptArguments::new(tokens, text, messages, tools, lora, salt, media)?;
    let hashes = prompt.hashes(py, block_size)?;
    Ok((
        hashes.local.into_iter().map(|hash| hash.0).collect(),
        hashes.sequence.into_iter().map(|hash| hash.0).collect(),
    ))
}

#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(module)?;
    shared::watch_forks(module)?;
    ending::watch(module)?;
    module.add_class::<router::Router>()?;
    module.add_class::<lease::Lease>()?;
    module.add_class::<info::Candidate>()?;
    module.add_class::<info::CostBreakdown>()?;
    module.add_class::<info::IngestReport>()?;
    module.add_class::<info::Overlap>()?;
    module.add_class::<info::Trust>()?;
    module.add_class::<info::WorkerInfo>()?;
    module.add_function(wrap_pyfunction!(block_hashes, module)?)
}
