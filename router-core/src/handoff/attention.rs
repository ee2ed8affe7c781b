//! From which prompt length on attention is what a prefill does.

use crate::error::Result;

use super::layers::{Layer, layers};
use super::model_config::{ATTENTION_HEADS, Config, HIDDEN_SIZE, head_dim, kv_heads};

/// Returns the prompt tokens at which a model spends as much on attention as on everything else, from its `config.json`
/// (feature `json`); `None` where the configuration does not say enough (latent attention, unusual layers) or the model has
/// no full attention.
///
/// For [`PrefillSeed::attention_tokens`](super::PrefillSeed::attention_tokens). Multiplications are counted, so it is as good
/// as the engine's attention is as efficient as its matrix products: 47,104 for the 8B model of the NVLink pair, where the two
/// measured prompts (220 ms and 496 ms) give 54,900.
///
/// # Errors
/// [`ErrorKind::InvalidRequest`](crate::ErrorKind::InvalidRequest), naming a field that is out of range.
///
/// # Examples
/// ```
/// let config = r#"{"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
///                  "hidden_size": 4096, "intermediate_size": 12288}"#;
/// // (2 × 4096 × 4096 + 2 × 4096 × 1024 + 3 × 4096 × 12288) ÷ 4096
/// assert_eq!(kvlane::handoff::attention_tokens(config)?, Some(47_104.0));
/// # Ok::<(), kvlane::Error>(())
/// ```
pub fn attention_tokens(config: &str) -> Result<Option<f64>> {
    let root = Config::parse(config)?;
    let config = Config::new(&root)?;
    if config.value(&["kv_lora_rank"]).is_some() {
        return Ok(None);
    }
    let Some(feed_forward) = feed_forward(&config)? else {
        return Ok(None);
    };
    let hidden = config.required(&HIDDEN_SIZE)? as f64;
    let dim = head_dim(&config)? as f64;
    let queries = config.required(&ATTENTION_HEADS)? as f64 * dim;
    let keys = kv_heads(&config)? as f64 * dim;
    let matrices = 2.0 * hidden * queries + 2.0 * hidden * keys + 3.0 * hidden * feed_forward;
    let layers = layers(&config)?;
    let is_full = |layer: &&Layer| matches!(layer, Layer::Full | Layer::FullAndState);
    let full = layers.iter().filter(is_full).count();
    // Each token attends to half the prompt on average, once for keys and once for values.
    Ok((full > 0).then(|| matrices / queries * layers.len() as f64 / full as f64))
}

/// Returns the width of the feed-forward layer that one token passes, if it is said.
fn feed_forward(config: &Config<'_>) -> Result<Option<f64>> {
    let experts = config.integer(&["num_experts_per_tok", "num_experts_per_token"], 1)?;
    let width = config.integer(&["intermediate_size", "n_inner", "ffn_dim"], 1)?;
    let Some(experts) = experts else {
        return Ok(width.map(|width| width as f64));
    };
    let expert = config.integer(&["moe_intermediate_size"], 1)?.or(width);
    let shared = config.integer(&["shared_expert_intermediate_size"], 0)?;
    Ok(expert.map(|expert| (experts * expert + shared.unwrap_or(0)) as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_models_attend_sooner_and_hybrids_later() {
        let small = r#"{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                        "hidden_size": 1024, "intermediate_size": 3072}"#;
        // (2 × 1024 × 2048 + 2 × 1024 × 1024 + 3 × 1024 × 3072) ÷ 2048
        assert_eq!(attention_tokens(small).unwrap(), Some(7_680.0));
        let hybrid = small.replace('}', r#", "full_attention_interval": 4}"#);
        assert_eq!(attention_tokens(&hybrid).unwrap(), Some(30_720.0));
        // Eight of many experts of 768, none shared: (6,291,456 + 3 × 1024 × 6144) ÷ 2048.
        let experts = small.replace(
            '}',
            r#", "num_experts_per_tok": 8, "moe_intermediate_size": 768}"#,
        );
        assert_eq!(attention_tokens(&experts).unwrap(), Some(12_288.0));
    }

    #[test]
    fn what_is_not_said_is_not_guessed() {
        let latent = r#"{"kv_lora_rank": 512, "num_hidden_layers": 5}"#;
        assert_eq!(attention_tokens(latent).unwrap(), None);
        let plain = r#"{"num_hidden_layers": 5, "num_attention_heads": 4, "hidden_size": 64}"#;
        assert_eq!(attention_tokens(plain).unwrap(), None);
        assert!(attention_tokens(r#"{"intermediate_size": -1}"#).is_err());
    }
}
