//! kvlane for Node: converts, calls the core, and converts back.
#![expect(
    clippy::needless_pass_by_value,
    reason = "napi hands arguments over by value"
)]

mod clock;
mod config;
mod error;
mod lease;
mod prompt;
mod read;
mod report;
mod router;

pub use config::RouterOptions;
pub use lease::FinishOptions;
pub use prompt::HashOptions;
pub use read::MediaItem;
pub use report::{
    IndexStats, IngestReport, PlacementStats, RankTrust, RouterStats, TierBlocks, Trust, WorkerInfo,
};
pub use router::{
    IngestOptions, LoadOptions, PromptOptions, RecordOptions, Router, SelectOptions,
    SelectOverrides, WorkerOptions,
};

use kvlane::{BlockSize, ErrorKind, TrustState};
use napi::bindgen_prelude::{BigUint64Array, Object};
use napi_derive::napi;

use crate::error::{Result, to_js};
use crate::prompt::{Content, GivenPrompt, Salt};
use crate::read::{Given, maybe};

/// The version of this package.
#[napi]
pub fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Every `code` that an error may have.
#[napi(ts_return_type = "Array<ErrorCode>")]
pub fn error_codes() -> Vec<&'static str> {
    ErrorKind::ALL.iter().map(|kind| kind.code()).collect()
}

/// Every trust state, in the order of its numbers in `rank`.
#[napi(skip_typescript)]
pub fn trust_states() -> Vec<&'static str> {
    TrustState::ALL.iter().map(|state| state.name()).collect()
}

/// The hashes of a prompt's complete blocks.
#[napi(object, object_from_js = false)]
#[expect(
    missing_debug_implementations,
    reason = "the array types of Node have none"
)]
pub struct BlockHashes {
    /// Local hash of each complete block.
    pub local: BigUint64Array,
    /// Sequence hash of each complete block.
    pub sequence: BigUint64Array,
}

/// Hashes the complete blocks of a prompt, or chunks of a text. See `kvlane::block_hashes` in the Rust documentation for the
/// rule.
#[napi]
pub fn block_hashes(
    #[napi(ts_arg_type = "Prompt")] prompt: GivenPrompt<'_>,
    #[napi(ts_arg_type = "HashOptions")] options: Option<Given<'_, Object<'_>>>,
) -> Result<BlockHashes> {
    let options: HashOptions = maybe(options, "options")?.unwrap_or_default();
    let block_size = options.block_size.map(BlockSize::new).transpose();
    let block_size = block_size.map_err(to_js)?.unwrap_or_default();
    let salt = Salt::new(options.lora, options.salt, options.media);
    let hashes = Content::read(&prompt)?.hashes(block_size, &salt)?;
    let local: Vec<u64> = hashes.local.into_iter().map(|hash| hash.0).collect();
    let sequence: Vec<u64> = hashes.sequence.into_iter().map(|hash| hash.0).collect();
    Ok(BlockHashes {
        local: local.into(),
        sequence: sequence.into(),
    })
}
