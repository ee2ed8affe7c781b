//! How many bytes of KV cache a prompt leaves behind.

use serde::Serialize;

use crate::error::{Error, Result};

/// The size of a model's KV cache as a function of the prompt's length.
///
/// A model's layers fall into three kinds: those that keep every token, those that keep a window of the latest tokens, and
/// those that keep a state of constant size (Mamba, linear attention). Read from a model's `config.json` by
/// [`from_config`](Self::from_config) (feature `json`), or put together by hand.
///
/// # Examples
/// ```
/// use kvlane::handoff::KvShape;
///
/// // Qwen3-0.6B: 28 layers × 8 KV heads × 128 × 2 (keys and values) × 2 bytes.
/// let shape = KvShape::dense(28, 8, 128, 2.0)?;
/// assert_eq!(shape.bytes_per_token(), 114_688.0);
/// assert_eq!(shape.bytes(3_067), 351_748_096.0);
/// # Ok::<(), kvlane::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KvShape {
    bytes_per_token: f64,
    windows: Vec<Window>,
    state_bytes: f64,
}

/// Layers that keep the latest tokens alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Window {
    tokens: u64,
    bytes_per_token: f64,
}

impl KvShape {
    /// Bytes that one token may occupy; real models are four orders of magnitude below.
    pub const MAX_BYTES_PER_TOKEN: f64 = 1e10;

    /// Creates the shape of a model that keeps `bytes_per_token` of every token.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`](crate::ErrorKind::InvalidRequest) unless the bytes are above 0 and at most 10^10.
    pub fn per_token(bytes_per_token: f64) -> Result<Self> {
        if !(bytes_per_token > 0.0 && bytes_per_token <= Self::MAX_BYTES_PER_TOKEN) {
            return Err(Error::invalid(format!(
                "{bytes_per_token} KV bytes per token are out of range: above 0 to {:e} are accepted",
                Self::MAX_BYTES_PER_TOKEN
            )));
        }
        Ok(Self {
            bytes_per_token,
            windows: Vec::new(),
            state_bytes: 0.0,
        })
    }

    /// Creates the shape of a model whose layers all keep keys and values of every token.
    ///
    /// # Errors
    /// As [`per_token`](Self::per_token), for `layers × kv_heads × head_dim × 2 × element_bytes`.
    pub fn dense(layers: u32, kv_heads: u32, head_dim: u32, element_bytes: f64) -> Result<Self> {
        let elements = f64::from(layers) * f64::from(kv_heads) * f64::from(head_dim) * 2.0;
        Self::per_token(elements * element_bytes)
    }

    /// Returns the bytes that one more token adds while every window still grows.
    #[must_use]
    pub fn bytes_per_token(&self) -> f64 {
        let windows = self.windows.iter().map(|window| window.bytes_per_token);
        self.bytes_per_token + windows.sum::<f64>()
    }

    /// Returns the bytes that a prompt of `tokens` occupies.
    #[must_use]
    pub fn bytes(&self, tokens: u64) -> f64 {
        self.bytes_after(tokens, 0)
    }

    /// Returns the bytes that a worker lacks which already holds the first `held` of `tokens`.
    ///
    /// A window is moved whole unless its tokens are held; a state of constant size is moved always, since it belongs to
    /// the last token.
    #[must_use]
    pub fn bytes_after(&self, tokens: u64, held: u64) -> f64 {
        let lacking = tokens.saturating_sub(held);
        if lacking == 0 {
            return 0.0;
        }
        let windows = self
            .windows
            .iter()
            .map(|window| window.bytes_per_token * window.tokens.min(lacking) as f64);
        self.bytes_per_token * lacking as f64 + windows.sum::<f64>() + self.state_bytes
    }

    /// Creates an empty shape, to which layers are added.
    #[cfg(feature = "json")]
    pub(super) const fn empty() -> Self {
        Self {
            bytes_per_token: 0.0,
            windows: Vec::new(),
            state_bytes: 0.0,
        }
    }

    /// Adds a layer that keeps every token, or a window of them.
    #[cfg(feature = "json")]
    pub(super) fn add_layer(&mut self, bytes_per_token: f64, window: Option<u64>) {
        let Some(tokens) = window else {
            self.bytes_per_token += bytes_per_token;
            return;
        };
        let known = self.windows.iter_mut().find(|known| known.tokens == tokens);
        match known {
            Some(known) => known.bytes_per_token += bytes_per_token,
            None => self.windows.push(Window {
                tokens,
                bytes_per_token,
            }),
        }
    }

    /// Adds a layer that keeps a state.
    #[cfg(feature = "json")]
    pub(super) fn add_state(&mut self, bytes: f64) {
        self.state_bytes += bytes;
    }

    /// Checks the sum of what was added.
    #[cfg(feature = "json")]
    pub(super) fn checked(self) -> Result<Self> {
        let total = self.bytes_per_token() + self.state_bytes;
        if total > 0.0 && total <= Self::MAX_BYTES_PER_TOKEN {
            return Ok(self);
        }
        Err(Error::invalid(format!(
            "model config: the layers keep {total} bytes; above 0 to {:e} are accepted",
            Self::MAX_BYTES_PER_TOKEN
        )))
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "whole numbers of bytes are exact")]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn the_measured_models_have_their_measured_sizes() {
        let bytes = |layers| {
            KvShape::dense(layers, 8, 128, 2.0)
                .unwrap()
                .bytes_per_token()
        };
        assert_eq!(bytes(28), 114_688.0); // 0.6B
        assert_eq!(bytes(36), 147_456.0); // 8B of the NVLink pair
        assert_eq!(bytes(32), 131_072.0); // Llama-3-8B
        assert_eq!(bytes(80), 327_680.0); // 70B
        // 3,067 tokens: 351.75 MB.
        assert_eq!(
            KvShape::dense(28, 8, 128, 2.0).unwrap().bytes(3_067),
            351_748_096.0
        );
    }

    #[test]
    fn what_the_receiver_holds_is_not_moved() {
        let shape = KvShape::per_token(100.0).unwrap();
        assert_eq!(shape.bytes_after(1_000, 400), 60_000.0);
        assert_eq!(shape.bytes_after(1_000, 1_000), 0.0);
        assert_eq!(shape.bytes_after(1_000, 2_000), 0.0);
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        for bytes in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e11] {
            let error = KvShape::per_token(bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidRequest, "{bytes}");
        }
        assert!(KvShape::dense(0, 8, 128, 2.0).is_err());
    }
}
