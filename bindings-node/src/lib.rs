//! kvlane for Node: converts, calls the core, and converts back.
#![expect(
    clippy::needless_pass_by_value,
    reason = "napi hands arguments over by value"
)]

mod error;

use kvlane::{BlockSize, SaltContext};
use napi::bindgen_prelude::{BigUint64Array, Uint32Array};
use napi_derive::napi;

use crate::error::{Result, to_js};

/// The version of this package.
#[napi]
pub fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// What the hashes of a prompt depend on beside its tokens.
#[napi(object)]
#[derive(Debug, Default)]
pub struct HashOptions {
    /// Adapter (LoRA) name; empty or absent is the base model.
    pub lora: Option<String>,
    /// Cache salt; empty or absent is none.
    pub salt: Option<String>,
}

/// The hashes of a prompt's complete blocks.
#[napi(object)]
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

/// Hashes the complete blocks of a prompt. See `kvlane::block_hashes` in the Rust documentation for the rule.
///
/// `blockSize` is in tokens, 16 by default.
#[napi]
pub fn block_hashes(
    tokens: Uint32Array,
    block_size: Option<u32>,
    options: Option<HashOptions>,
) -> Result<BlockHashes> {
    let block_size = match block_size {
        Some(tokens) => BlockSize::new(tokens).map_err(to_js)?,
        None => BlockSize::default(),
    };
    let options = options.unwrap_or_default();
    let context = SaltContext {
        lora: options.lora.as_deref(),
        salt: options.salt.as_deref(),
        media: &[],
    };
    let hashes = kvlane::block_hashes(&tokens, block_size, &context);
    let local: Vec<u64> = hashes.local.into_iter().map(|hash| hash.0).collect();
    let sequence: Vec<u64> = hashes.sequence.into_iter().map(|hash| hash.0).collect();
    Ok(BlockHashes {
        local: local.into(),
        sequence: sequence.into(),
    })
}
