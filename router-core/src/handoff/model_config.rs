//! Reads the size of a KV cache from a model's `config.json`.

use serde_json::{Map, Value};

use crate::error::{Error, Result};

use super::kv_shape::KvShape;
use super::layers::{Layer, layers, state_bytes};

/// How an engine stores what the model's configuration describes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvOptions {
    /// The engine's `--kv-cache-dtype` (default `auto`: the checkpoint's own, which is that of its weights unless it says
    /// otherwise).
    pub cache_dtype: String,
    /// Tensor-parallel ranks (default 1): fewer KV heads than ranks are stored several times, and the latent of
    /// multi-head latent attention once a rank.
    pub tensor_parallel: u32,
    /// Layers with a sliding window keep the window alone (default true). Engines without a hybrid cache manager, vLLM's
    /// with a connector before 0.18 among them, keep every token: set false.
    pub windowed: bool,
}

impl Default for KvOptions {
    fn default() -> Self {
        Self {
            cache_dtype: "auto".to_owned(),
            tensor_parallel: 1,
            windowed: true,
        }
    }
}

impl KvOptions {
    /// Sets the engine's `--kv-cache-dtype`.
    #[must_use]
    pub fn cache_dtype(mut self, dtype: &str) -> Self {
        dtype.clone_into(&mut self.cache_dtype);
        self
    }

    /// Sets the tensor-parallel ranks.
    #[must_use]
    pub const fn tensor_parallel(mut self, ranks: u32) -> Self {
        self.tensor_parallel = ranks;
        self
    }

    /// Sets whether layers with a sliding window keep the window alone.
    #[must_use]
    pub const fn windowed(mut self, windowed: bool) -> Self {
        self.windowed = windowed;
        self
    }
}

impl KvShape {
    /// Reads a model's `config.json` (feature `json`).
    ///
    /// Handles multi-head, grouped-query and multi-query attention, multi-head latent attention (with an indexer's keys),
    /// quantised caches, sliding and chunked windows, hybrids of attention with Mamba, linear attention or convolutions,
    /// layers that share another's cache, and configurations nested in that of a multimodal model. Speculative layers are
    /// not counted.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`](crate::ErrorKind::InvalidRequest), naming the field that is missing, unknown or out of
    /// range.
    ///
    /// # Examples
    /// ```
    /// use kvlane::handoff::{KvOptions, KvShape};
    ///
    /// let config = r#"{"num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168,
    ///                  "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}"#;
    /// let shape = KvShape::from_config(config, &KvOptions::default())?;
    /// assert_eq!(shape.bytes_per_token(), 70_272.0); // 61 × (512 + 64) × 2
    /// # Ok::<(), kvlane::Error>(())
    /// ```
    pub fn from_config(config: &str, options: &KvOptions) -> Result<Self> {
        if options.tensor_parallel == 0 || options.tensor_parallel > MAX_RANKS {
            return Err(Error::invalid(format!(
                "tensor_parallel {} is out of range: 1 to {MAX_RANKS} are accepted",
                options.tensor_parallel
            )));
        }
        let root = Config::parse(config)?;
        let config = Config::new(&root)?;
        let attention = AttentionBytes::read(&config, options)?;
        let layers = layers(&config)?;
        let sharing = config.integer(&["num_kv_shared_layers"], 0)?.unwrap_or(0);
        let own = layers
            .len()
            .saturating_sub(sharing.try_into().unwrap_or(usize::MAX));
        let mut shape = Self::empty();
        for (at, layer) in layers.iter().take(own).enumerate() {
            match *layer {
                Layer::Full => shape.add_layer(attention.of_layer(at)?, None),
                Layer::Window(tokens) => {
                    let window = options.windowed.then_some(tokens);
                    shape.add_layer(attention.of_layer(at)?, window);
                }
                Layer::State => shape.add_state(state_bytes(&config)?),
                Layer::FullAndState => {
                    shape.add_layer(attention.of_layer(at)?, None);
                    shape.add_state(state_bytes(&config)?);
                }
                Layer::Nothing => {}
            }
        }
        shape.checked()
    }
}

/// Most ranks; also keeps the sums finite.
const MAX_RANKS: u32 = 4_096;
/// Largest number that any size in a configuration may have: above every real one, below what overflows.
const MAX_SIZE: u64 = 10_000_000;

/// A configuration with that of its text part, if it is nested.
#[derive(Debug)]
pub(super) struct Config<'a> {
    outer: &'a Map<String, Value>,
    text: Option<&'a Map<String, Value>>,
}

impl<'a> Config<'a> {
    pub(super) fn parse(config: &str) -> Result<Value> {
        serde_json::from_str(config)
            .map_err(|error| Error::invalid("model config is not JSON").with_source(error))
    }

    pub(super) fn new(root: &'a Value) -> Result<Self> {
        let Value::Object(outer) = root else {
            return Err(Error::invalid("model config is not a JSON object"));
        };
        let nested = |of: &'a Map<String, Value>| {
            ["text_config", "llm_config", "language_config"]
                .iter()
                .find_map(|name| of.get(*name)?.as_object())
        };
        let thinker = outer.get("thinker_config").and_then(Value::as_object);
        Ok(Self {
            outer,
            text: nested(outer).or_else(|| thinker.and_then(nested)),
        })
    }

    /// Returns the first of `names` that is there and not null, from the text part before the whole.
    pub(super) fn value(&self, names: &[&'static str]) -> Option<(&'static str, &'a Value)> {
        let parts = self.text.into_iter().chain([self.outer]);
        parts
            .flat_map(|part| names.iter().map(move |name| (*name, part.get(*name))))
            .find_map(|(name, value)| Some((name, value.filter(|value| !value.is_null())?)))
    }

    /// Returns the first of `names` as a number of at least `min`.
    pub(super) fn integer(&self, names: &[&'static str], min: u64) -> Result<Option<u64>> {
        self.value(names)
            .map(|(name, value)| integer(name, value, min))
            .transpose()
    }

    /// Returns a number that must be there.
    pub(super) fn required(&self, names: &[&'static str]) -> Result<u64> {
        self.integer(names, 1)?
            .ok_or_else(|| Error::invalid(format!("model config: {} is missing", names[0])))
    }

    pub(super) fn text(&self, name: &'static str) -> Option<&'a str> {
        self.value(&[name])?.1.as_str()
    }

    pub(super) fn list(&self, name: &'static str) -> Result<Option<&'a Vec<Value>>> {
        let Some((_, value)) = self.value(&[name]) else {
            return Ok(None);
        };
        value
            .as_array()
            .map(Some)
            .ok_or_else(|| Error::invalid(format!("model config: {name} is not a list")))
    }

    pub(super) fn flag(&self, name: &'static str) -> Option<bool> {
        self.value(&[name])?.1.as_bool()
    }

    /// Returns the bytes of an element of the model's own type. Engines serve 32-bit checkpoints in 16 bits.
    pub(super) fn model_element_bytes(&self) -> Result<f64> {
        let Some((name, value)) = self.value(&["torch_dtype", "dtype"]) else {
            return Ok(2.0);
        };
        match value.as_str().map(|text| text.trim_start_matches("torch.")) {
            Some("bfloat16" | "float16" | "half" | "float32" | "float") => Ok(2.0),
            Some("float8_e4m3fn" | "float8_e5m2") => Ok(1.0),
            _ => Err(Error::invalid(format!(
                "model config: {name} {value} is not known: bfloat16, float16, float32 and float8 are"
            ))),
        }
    }
}

/// Reads a size between `min` and the largest accepted.
pub(super) fn integer(name: &str, value: &Value, min: u64) -> Result<u64> {
    value
        .as_u64()
        .filter(|size| (min..=MAX_SIZE).contains(size))
        .ok_or_else(|| {
            Error::invalid(format!(
                "model config: {name} {value} is out of range: a whole number from {min} to {MAX_SIZE} is accepted"
            ))
        })
}

/// Bytes that a token occupies in one attention layer.
#[derive(Debug)]
enum AttentionBytes {
    Same(f64),
    EachLayer(Vec<f64>),
}

impl AttentionBytes {
    fn read(config: &Config<'_>, options: &KvOptions) -> Result<Self> {
        let ranks = f64::from(options.tensor_parallel);
        let element = cache_element(config, &options.cache_dtype)?;
        if let Some(rank) = config.integer(&["kv_lora_rank"], 1)? {
            let rope = config.required(&["qk_rope_head_dim"])?;
            let latent = match element {
                CacheElement::Bytes(bytes) => (rank + rope) as f64 * bytes,
                CacheElement::PackedLatent => PACKED_LATENT_BYTES,
            };
            let indexer = config
                .integer(&["index_head_dim"], 1)?
                .map_or(0, |dim| dim + dim.div_ceil(128) * 4);
            return Ok(Self::Same((latent + indexer as f64) * ranks));
        }
        let CacheElement::Bytes(bytes) = element else {
            return Err(Error::invalid(
                "cache dtype fp8_ds_mla needs a model with kv_lora_rank; this one has none",
            ));
        };
        if config.value(&["block_configs"]).is_some() {
            return Err(Error::invalid(
                "model config: block_configs (a layout of its own for each layer) is not handled",
            ));
        }
        let key = head_dim(config)?;
        let value = config.integer(&["v_head_dim"], 1)?.unwrap_or(key);
        let of_heads = |heads: u64| (heads as f64).max(ranks) * (key + value) as f64 * bytes;
        if let Some((name, Value::Array(heads))) = config.value(&["num_key_value_heads"]) {
            let each = heads
                .iter()
                .map(|heads| Ok(of_heads(integer(name, heads, 1)?)));
            return Ok(Self::EachLayer(each.collect::<Result<_>>()?));
        }
        Ok(Self::Same(of_heads(kv_heads(config)?)))
    }

    fn of_layer(&self, at: usize) -> Result<f64> {
        match self {
            Self::Same(bytes) => Ok(*bytes),
            Self::EachLayer(bytes) => bytes.get(at).copied().ok_or_else(|| {
                Error::invalid(format!(
                    "model config: num_key_value_heads has {} entries, none for layer {at}",
                    bytes.len()
                ))
            }),
        }
    }
}

pub(super) fn kv_heads(config: &Config<'_>) -> Result<u64> {
    let names = [
        "num_key_value_heads",
        "num_kv_heads",
        "multi_query_group_num",
        "n_head_kv",
    ];
    let own_architecture = config.flag("new_decoder_architecture") == Some(true);
    if config.flag("multi_query") == Some(true) && !own_architecture {
        return Ok(1);
    }
    if let Some(heads) = config.integer(&names, 1)? {
        return Ok(heads);
    }
    let nested = config.value(&["attn_config"]);
    if let Some(heads) = nested.and_then(|(_, attention)| attention.get("kv_n_heads")) {
        return integer("attn_config.kv_n_heads", heads, 1);
    }
    config.required(&ATTENTION_HEADS)
}

pub(super) fn head_dim(config: &Config<'_>) -> Result<u64> {
    if let Some(dim) = config.integer(&["head_dim", "kv_channels", "attention_head_dim"], 1)? {
        return Ok(dim);
    }
    let hidden = config.required(&HIDDEN_SIZE)?;
    let heads = config.required(&ATTENTION_HEADS)?;
    if heads > hidden {
        return Err(Error::invalid(format!(
            "model config: num_attention_heads {heads} is over hidden_size {hidden}, and head_dim is missing"
        )));
    }
    Ok(hidden / heads)
}

pub(super) const ATTENTION_HEADS: [&str; 4] =
    ["num_attention_heads", "n_head", "n_heads", "num_heads"];
pub(super) const HIDDEN_SIZE: [&str; 3] = ["hidden_size", "n_embd", "d_model"];

/// What one number of the cache occupies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CacheElement {
    Bytes(f64),
    /// DeepSeek's layout of 8-bit latents: 512 numbers, 4 scales of 4 bytes, 64 rotary numbers of 2 bytes.
    PackedLatent,
}

/// # Source
/// vLLM 0.22, `fp8_ds_mla`: 512 + 16 + 128 bytes a token and layer.
const PACKED_LATENT_BYTES: f64 = 656.0;

fn cache_element(config: &Config<'_>, dtype: &str) -> Result<CacheElement> {
    let bytes = match dtype {
        "auto" => {
            checkpoint_cache_bytes(config)?.map_or_else(|| config.model_element_bytes(), Ok)?
        }
        "bfloat16" | "float16" | "half" => 2.0,
        "float32" | "float" => 4.0,
        "int8" => 1.0,
        "fp8_ds_mla" => return Ok(CacheElement::PackedLatent),
        _ if dtype.starts_with("fp8") => 1.0,
        _ => {
            return Err(Error::invalid(format!(
                "cache dtype {dtype:?} is not known: auto, bfloat16, float16, float32, int8, fp8, fp8_e4m3, fp8_e5m2 and fp8_ds_mla are"
            )));
        }
    };
    Ok(CacheElement::Bytes(bytes))
}

/// Returns what a quantised checkpoint says of its cache (compressed-tensors and ModelOpt), if it says anything.
fn checkpoint_cache_bytes(config: &Config<'_>) -> Result<Option<f64>> {
    let Some((_, quantization)) = config.value(&["quantization_config", "compression_config"])
    else {
        return Ok(None);
    };
    let scheme = quantization
        .get("kv_cache_scheme")
        .filter(|scheme| !scheme.is_null());
    if let Some(scheme) = scheme {
        let bits = scheme.get("num_bits").unwrap_or(&Value::Null);
        let bits = integer("quantization_config.kv_cache_scheme.num_bits", bits, 1)?;
        return Ok(Some(bits as f64 / 8.0));
    }
    let algorithm = quantization
        .get("kv_cache_quant_algo")
        .and_then(Value::as_str);
    match algorithm {
        None => Ok(None),
        Some(name) if name.eq_ignore_ascii_case("FP8") => Ok(Some(1.0)),
        Some(name) => Err(Error::invalid(format!(
            "model config: quantization_config.kv_cache_quant_algo {name:?} is not known: FP8 is"
        ))),
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "whole numbers of bytes are exact")]
mod tests;
