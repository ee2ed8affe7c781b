//! What each layer of a model keeps, read from the many ways in which configurations say it.

use serde_json::Value;

use crate::error::{Error, Result};

use super::model_config::{ATTENTION_HEADS, Config, HIDDEN_SIZE, integer};

/// What a layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layer {
    /// Keys and values of every token.
    Full,
    /// Keys and values of the latest tokens.
    Window(u64),
    /// A state of constant size.
    State,
    /// Attention and a state side by side.
    FullAndState,
    /// Nothing (a feed-forward layer that is counted as one).
    Nothing,
}

/// Most layers of a model; also bounds what is allocated for them.
const MAX_LAYERS: u64 = 10_000;

/// Returns the kind of every layer.
pub(super) fn layers(config: &Config<'_>) -> Result<Vec<Layer>> {
    if let Some(pattern) = config.text("hybrid_override_pattern") {
        return pattern
            .chars()
            .take(to_index(MAX_LAYERS))
            .map(of_letter)
            .collect();
    }
    let count = layer_count(config)?;
    for name in ["layer_types", "layers_block_type"] {
        if let Some(names) = config.list(name)? {
            let names = first(name, names, count)?;
            return names
                .iter()
                .map(|kind| of_name(config, name, kind))
                .collect();
        }
    }
    if let Some(kinds) = config.list("attn_type_list")? {
        let kinds = first("attn_type_list", kinds, count)?;
        return kinds
            .iter()
            .map(|kind| Ok(attention_if(integer("attn_type_list", kind, 0)? == 1)))
            .collect();
    }
    if let Some(attention) = attention_layers(config)? {
        return Ok((0..count).map(|at| attention_if(attention(at))).collect());
    }
    if config.text("model_type") == Some("falcon_h1") {
        return Ok(vec![Layer::FullAndState; to_index(count)]);
    }
    windowed(config, count)
}

fn layer_count(config: &Config<'_>) -> Result<u64> {
    let names = ["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
    let count = config.required(&names)?;
    if count > MAX_LAYERS {
        return Err(Error::invalid(format!(
            "model config: num_hidden_layers {count} is out of range: 1 to {MAX_LAYERS} are accepted"
        )));
    }
    Ok(count)
}

/// Returns the first `count` entries of a list with one for each layer.
fn first<'a>(name: &str, list: &'a [Value], count: u64) -> Result<&'a [Value]> {
    list.get(..to_index(count)).ok_or_else(|| {
        Error::invalid(format!(
            "model config: {name} has {} entries for {count} layers",
            list.len()
        ))
    })
}

fn of_name(config: &Config<'_>, field: &str, kind: &Value) -> Result<Layer> {
    match kind.as_str() {
        Some("full_attention" | "attention" | "full" | "global_attention") => Ok(Layer::Full),
        Some("sliding_attention" | "local_attention" | "sliding_window") => {
            let names = ["sliding_window", "attention_window_size", "window_size"];
            Ok(Layer::Window(config.required(&names)?))
        }
        Some("chunked_attention") => Ok(Layer::Window(config.required(&["attention_chunk_size"])?)),
        Some("linear_attention" | "mamba" | "mamba2" | "recurrent" | "conv") => Ok(Layer::State),
        Some("hybrid") => Ok(Layer::FullAndState),
        Some("mlp" | "moe") => Ok(Layer::Nothing),
        _ => Err(Error::invalid(format!(
            "model config: {field} has a layer of kind {kind}, which is not known"
        ))),
    }
}

/// Nemotron-H: `M` Mamba, `*` attention, `-` feed-forward, `E` experts.
fn of_letter(letter: char) -> Result<Layer> {
    match letter {
        '*' => Ok(Layer::Full),
        'M' => Ok(Layer::State),
        '-' | 'E' => Ok(Layer::Nothing),
        _ => Err(Error::invalid(format!(
            "model config: hybrid_override_pattern has a layer {letter:?}, which is not known"
        ))),
    }
}

const fn attention_if(attention: bool) -> Layer {
    if attention { Layer::Full } else { Layer::State }
}

type IsAttention = Box<dyn Fn(u64) -> bool>;

/// Returns which layers are attention in a hybrid that names them by number or by period.
fn attention_layers(config: &Config<'_>) -> Result<Option<IsAttention>> {
    if let Some(list) = config.list("attn_layer_indices")? {
        let numbers = numbers("attn_layer_indices", list)?;
        return Ok(Some(Box::new(move |at| numbers.contains(&at))));
    }
    if let Some(period) = config.integer(&["attn_layer_period"], 1)? {
        let offset = config.integer(&["attn_layer_offset"], 0)?.unwrap_or(0);
        return Ok(Some(Box::new(move |at| at % period == offset)));
    }
    if let Some(interval) = config.integer(&["full_attention_interval"], 1)? {
        return Ok(Some(Box::new(move |at| (at + 1).is_multiple_of(interval))));
    }
    if let Some((_, linear)) = config.value(&["linear_attn_config"]) {
        let name = "linear_attn_config.full_attn_layers";
        let list = linear.get("full_attn_layers").and_then(Value::as_array);
        let list =
            list.ok_or_else(|| Error::invalid(format!("model config: {name} is missing")))?;
        let numbers = numbers(name, list)?;
        // Counted from 1 there.
        return Ok(Some(Box::new(move |at| numbers.contains(&(at + 1)))));
    }
    Ok(None)
}

fn numbers(name: &str, list: &[Value]) -> Result<Vec<u64>> {
    list.iter().map(|number| integer(name, number, 0)).collect()
}

/// Returns the layers of a model of attention alone.
fn windowed(config: &Config<'_>, count: u64) -> Result<Vec<Layer>> {
    let window = config.integer(&["sliding_window"], 1)?;
    let (Some(window), true) = (window, config.flag("use_sliding_window") != Some(false)) else {
        return Ok(vec![Layer::Full; to_index(count)]);
    };
    let pattern = config.integer(&["sliding_window_pattern", "_sliding_window_pattern"], 1)?;
    let pattern = pattern.or_else(|| match config.text("model_type") {
        Some("gemma2") => Some(2),
        Some("gemma3_text") => Some(6),
        _ => None,
    });
    // Qwen2's windows begin above this layer.
    let from = match config.flag("use_sliding_window") {
        Some(true) => config.integer(&["max_window_layers"], 0)?.unwrap_or(0),
        _ => 0,
    };
    let is_full =
        |at: u64| at < from || pattern.is_some_and(|every| (at + 1).is_multiple_of(every));
    let kind = |at| {
        if is_full(at) {
            Layer::Full
        } else {
            Layer::Window(window)
        }
    };
    Ok((0..count).map(kind).collect())
}

/// Returns the bytes of one layer's state.
///
/// # Source
/// State shapes as in vLLM 0.22, `model_executor/layers/mamba/mamba_utils.py`; all ranks together.
pub(super) fn state_bytes(config: &Config<'_>) -> Result<f64> {
    let element = config.model_element_bytes()?;
    let recurrent = match config.text("mamba_ssm_dtype") {
        Some("float32") => 4.0,
        _ => element,
    };
    let state = state_elements(config)?;
    Ok(state.convolution * element + state.recurrent * recurrent)
}

struct StateElements {
    convolution: f64,
    recurrent: f64,
}

fn state_elements(config: &Config<'_>) -> Result<StateElements> {
    if config.value(&["linear_num_value_heads"]).is_some() {
        return gated_delta(config);
    }
    if let Some((_, linear)) = config.value(&["linear_attn_config"]) {
        return delta_attention(linear);
    }
    if config
        .value(&["mamba_n_heads", "mamba_num_heads"])
        .is_some()
    {
        return mamba2(config);
    }
    if config.value(&["mamba_d_state"]).is_some() {
        let inner = inner_size(config)?;
        let kernel = config.required(&["mamba_d_conv"])? as f64;
        return Ok(StateElements {
            convolution: inner * (kernel - 1.0),
            recurrent: inner * config.required(&["mamba_d_state"])? as f64,
        });
    }
    if let Some(kernel) = config.integer(&["conv_L_cache"], 1)? {
        return Ok(StateElements {
            convolution: config.required(&HIDDEN_SIZE)? as f64 * (kernel as f64 - 1.0),
            recurrent: 0.0,
        });
    }
    if config.value(&["attn_type_list"]).is_some() {
        let heads = config.required(&ATTENTION_HEADS)? as f64;
        let dim = config.required(&["head_dim"])? as f64;
        return Ok(StateElements {
            convolution: 0.0,
            recurrent: heads * dim * dim,
        });
    }
    Err(Error::invalid(
        "model config: linear_num_value_heads, mamba_d_state or conv_L_cache is missing, one of which sizes the layers that keep a state",
    ))
}

/// Qwen3-Next and its like.
fn gated_delta(config: &Config<'_>) -> Result<StateElements> {
    let size = |name| config.required(&[name]).map(|size| size as f64);
    let value_heads = size("linear_num_value_heads")?;
    let value_dim = size("linear_value_head_dim")?;
    let key_dim = size("linear_key_head_dim")?;
    let keys = size("linear_num_key_heads")? * key_dim;
    let kernel = size("linear_conv_kernel_dim")?;
    Ok(StateElements {
        convolution: (2.0 * keys + value_heads * value_dim) * (kernel - 1.0),
        recurrent: value_heads * value_dim * key_dim,
    })
}

/// Kimi Linear.
fn delta_attention(linear: &Value) -> Result<StateElements> {
    let size = |name: &str| {
        let full_name = format!("linear_attn_config.{name}");
        integer(&full_name, linear.get(name).unwrap_or(&Value::Null), 1).map(|size| size as f64)
    };
    let (heads, dim) = (size("num_heads")?, size("head_dim")?);
    Ok(StateElements {
        convolution: 3.0 * heads * dim * (size("short_conv_kernel_size")? - 1.0),
        recurrent: heads * dim * dim,
    })
}

fn mamba2(config: &Config<'_>) -> Result<StateElements> {
    let heads = config.required(&["mamba_n_heads", "mamba_num_heads"])? as f64;
    let head_names = ["mamba_d_head", "mamba_head_dim"];
    let inner = match config.value(&head_names) {
        // Some say "auto".
        Some((_, Value::String(_))) | None => inner_size(config)?,
        Some(_) => heads * config.required(&head_names)? as f64,
    };
    let state = config.required(&["mamba_d_state", "ssm_state_size"])? as f64;
    let groups = config.required(&["mamba_n_groups", "n_groups"])? as f64;
    let kernel = config.required(&["mamba_d_conv", "conv_kernel", "conv_kernel_size"])? as f64;
    Ok(StateElements {
        convolution: (inner + 2.0 * groups * state) * (kernel - 1.0),
        recurrent: inner * state,
    })
}

fn inner_size(config: &Config<'_>) -> Result<f64> {
    let hidden = config.required(&HIDDEN_SIZE)? as f64;
    Ok(hidden * config.required(&["mamba_expand"])? as f64)
}

/// Counts here are bounded far below what an index holds.
fn to_index(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}
