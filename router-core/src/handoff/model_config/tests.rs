use super::*;
use crate::error::ErrorKind;

fn shape(config: &Value) -> KvShape {
    KvShape::from_config(&config.to_string(), &KvOptions::default()).unwrap()
}

fn shape_as(config: &Value, options: &KvOptions) -> KvShape {
    KvShape::from_config(&config.to_string(), options).unwrap()
}

fn refusal(config: &Value) -> String {
    let error = KvShape::from_config(&config.to_string(), &KvOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidRequest);
    error.to_string()
}

fn qwen3_small() -> Value {
    serde_json::json!({
        "model_type": "qwen3", "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "hidden_size": 1024, "torch_dtype": "bfloat16", "sliding_window": null,
        "use_sliding_window": false, "max_window_layers": 28
    })
}

fn deepseek() -> Value {
    serde_json::json!({
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "torch_dtype": "bfloat16"
    })
}

#[test]
fn grouped_query_models_have_their_known_sizes() {
    assert_eq!(shape(&qwen3_small()).bytes_per_token(), 114_688.0);
    // Without head_dim: 4096 ÷ 32 = 128; 32 × 8 × 128 × 2 × 2.
    let llama = serde_json::json!({
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096
    });
    assert_eq!(shape(&llama).bytes_per_token(), 131_072.0);
    // 36 × 8 × 128 × 2 × 2.
    let qwen = serde_json::json!({
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
        "head_dim": null, "dtype": "bfloat16"
    });
    assert_eq!(shape(&qwen).bytes_per_token(), 147_456.0);
    // 80 × 8 × 128 × 2 × 2.
    let large = serde_json::json!({
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192
    });
    assert_eq!(shape(&large).bytes_per_token(), 327_680.0);
}

#[test]
fn models_without_key_value_heads_have_one_for_each_query_head() {
    // 48 × 25 × 64 × 2 × 2.
    let gpt2 = serde_json::json!({"n_layer": 48, "n_head": 25, "n_embd": 1600});
    assert_eq!(shape(&gpt2).bytes_per_token(), 307_200.0);
    // One head: 32 × 1 × 64 × 2 × 2.
    let falcon = serde_json::json!({
        "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": true
    });
    assert_eq!(shape(&falcon).bytes_per_token(), 8_192.0);
}

#[test]
fn a_latent_is_stored_once_a_rank() {
    assert_eq!(shape(&deepseek()).bytes_per_token(), 70_272.0); // 61 × 576 × 2
    let eight = KvOptions::default().tensor_parallel(8);
    assert_eq!(shape_as(&deepseek(), &eight).bytes_per_token(), 562_176.0);
    let packed = KvOptions::default().cache_dtype("fp8_ds_mla");
    assert_eq!(shape_as(&deepseek(), &packed).bytes_per_token(), 40_016.0); // 61 × 656
    let mut sparse = deepseek();
    sparse["index_head_dim"] = 128.into();
    assert_eq!(shape_as(&sparse, &packed).bytes_per_token(), 48_068.0); // 61 × (656 + 128 + 4)
}

#[test]
fn heads_are_repeated_where_ranks_outnumber_them() {
    let sixteen = KvOptions::default().tensor_parallel(16);
    assert_eq!(
        shape_as(&qwen3_small(), &sixteen).bytes_per_token(),
        229_376.0
    );
    let four = KvOptions::default().tensor_parallel(4);
    assert_eq!(shape_as(&qwen3_small(), &four).bytes_per_token(), 114_688.0);
}

#[test]
fn the_cache_may_be_quantised_by_engine_or_checkpoint() {
    for dtype in ["fp8", "fp8_e4m3", "fp8_e5m2", "int8"] {
        let options = KvOptions::default().cache_dtype(dtype);
        assert_eq!(
            shape_as(&qwen3_small(), &options).bytes_per_token(),
            57_344.0
        );
    }
    let mut compressed = qwen3_small();
    compressed["quantization_config"] =
        serde_json::json!({"kv_cache_scheme": {"num_bits": 8, "type": "float"}});
    assert_eq!(shape(&compressed).bytes_per_token(), 57_344.0);
    compressed["quantization_config"] = serde_json::json!({"kv_cache_quant_algo": "FP8"});
    assert_eq!(shape(&compressed).bytes_per_token(), 57_344.0);
    compressed["quantization_config"] =
        serde_json::json!({"quant_method": "awq", "kv_cache_scheme": null});
    assert_eq!(shape(&compressed).bytes_per_token(), 114_688.0);
    // The engine's own setting stands above the checkpoint's.
    let plain = KvOptions::default().cache_dtype("bfloat16");
    assert_eq!(shape_as(&compressed, &plain).bytes_per_token(), 114_688.0);
}

#[test]
fn windows_stop_growing() {
    // GPT-OSS: 18 of 36 layers keep 128 tokens; 8 × 64 × 2 × 2 = 2,048 bytes a layer.
    let kinds: Vec<_> = (0..36)
        .map(|at| {
            if at % 2 == 0 {
                "sliding_attention"
            } else {
                "full_attention"
            }
        })
        .collect();
    let mut model = serde_json::json!({
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "sliding_window": 128, "layer_types": kinds
    });
    let gpt_oss = shape(&model);
    assert_eq!(gpt_oss.bytes_per_token(), 73_728.0);
    assert_eq!(gpt_oss.bytes(100), 7_372_800.0);
    assert_eq!(gpt_oss.bytes(1_000), 36_864_000.0 + 18.0 * 2_048.0 * 128.0);
    // A window is moved whole, what lies before it never.
    assert_eq!(gpt_oss.bytes_after(1_000, 900), 100.0 * 73_728.0);
    let whole = KvOptions::default().windowed(false);
    assert_eq!(shape_as(&model, &whole).bytes(1_000), 73_728_000.0);
    // Chunks: 3 of 4 layers.
    model["attention_chunk_size"] = 8_192.into();
    model["layer_types"] = serde_json::json!(vec!["chunked_attention"; 36]);
    assert_eq!(shape(&model).bytes(10_000), 8_192.0 * 73_728.0);
}

#[test]
fn windows_without_a_list_follow_the_models_habits() {
    // Mistral: all layers.
    let mistral = serde_json::json!({
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
        "sliding_window": 4096
    });
    assert_eq!(shape(&mistral).bytes(10_000), 4_096.0 * 131_072.0);
    // Gemma 3, nested: 5 of 6 layers keep 1,024 tokens; 4 × 256 × 2 × 2 = 4,096 bytes a layer, 34 layers, 5 of them full.
    let gemma = serde_json::json!({
        "model_type": "gemma3", "text_config": {
            "model_type": "gemma3_text", "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "hidden_size": 2560, "sliding_window": 1024
        }, "vision_config": {"num_hidden_layers": 27}, "torch_dtype": "bfloat16"
    });
    assert_eq!(
        shape(&gemma).bytes(10_000),
        4_096.0 * (5.0 * 10_000.0 + 29.0 * 1_024.0)
    );
    // Qwen2: windows above layer 20 only, when switched on.
    let mut qwen2 = qwen3_small();
    qwen2["sliding_window"] = 1_024.into();
    qwen2["max_window_layers"] = 20.into();
    assert_eq!(shape(&qwen2).bytes(10_000), 1_146_880_000.0);
    qwen2["use_sliding_window"] = true.into();
    assert_eq!(
        shape(&qwen2).bytes(10_000),
        4_096.0 * (20.0 * 10_000.0 + 8.0 * 1_024.0)
    );
}

#[test]
fn hybrids_keep_a_state_beside_their_attention() {
    // Qwen3-Next: 12 of 48 layers are attention: 2 × 256 × 2 × 2 = 2,048 bytes each.
    let next = serde_json::json!({
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "hidden_size": 2048, "full_attention_interval": 4, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4
    });
    let shape_next = shape(&next);
    assert_eq!(shape_next.bytes_per_token(), 24_576.0);
    // 36 × (32 × 128 × 128 + (2 × 16 × 128 + 32 × 128) × 3) × 2 bytes.
    let state = 36.0 * (524_288.0 + 24_576.0) * 2.0;
    assert_eq!(shape_next.bytes(100), 2_457_600.0 + state);
    assert_eq!(shape_next.bytes_after(100, 99), 24_576.0 + state);

    // Jamba: layers 4 and 12 of 16; inner size 8192.
    let jamba = serde_json::json!({
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
        "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2
    });
    let state = 14.0 * (8_192.0 * 16.0 + 8_192.0 * 3.0) * 2.0;
    assert_eq!(shape(&jamba).bytes(10), 2.0 * 4_096.0 * 10.0 + state);

    // Nemotron-H: M Mamba-2, - feed-forward, * attention; state in 32 bits.
    let nemotron = serde_json::json!({
        "hybrid_override_pattern": "M-*-M", "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "mamba_ssm_dtype": "float32"
    });
    let state = 2.0 * ((8_192.0 + 2.0 * 8.0 * 128.0) * 3.0 * 2.0 + 8_192.0 * 128.0 * 4.0);
    assert_eq!(shape(&nemotron).bytes(10), 4_096.0 * 10.0 + state);
}

#[test]
fn layers_that_share_a_cache_are_counted_once() {
    let mut model = qwen3_small();
    model["num_kv_shared_layers"] = 8.into();
    assert_eq!(shape(&model).bytes_per_token(), 20.0 * 4_096.0);
    model["num_key_value_heads"] =
        serde_json::json!([[8; 20].as_slice(), [4; 8].as_slice()].concat());
    assert_eq!(shape(&model).bytes_per_token(), 20.0 * 4_096.0);
    model["num_kv_shared_layers"] = 0.into();
    assert_eq!(
        shape(&model).bytes_per_token(),
        20.0 * 4_096.0 + 8.0 * 2_048.0
    );
}

#[test]
fn what_is_missing_or_wrong_is_named() {
    let mut mla = deepseek();
    mla["qk_rope_head_dim"] = Value::Null;
    assert!(refusal(&mla).contains("qk_rope_head_dim is missing"));
    for (field, value) in [
        ("num_hidden_layers", 0.into()),
        ("num_hidden_layers", 10_001.into()),
        ("num_hidden_layers", (1_u64 << 60).into()),
        ("num_key_value_heads", "8".into()),
        ("num_key_value_heads", serde_json::json!([8, 8])),
        ("head_dim", (-1).into()),
        ("torch_dtype", "int3".into()),
        ("layer_types", serde_json::json!(["full_attention"])),
        ("layer_types", serde_json::json!(vec!["astral"; 28])),
        ("layer_types", 5.into()),
        ("layer_types", serde_json::json!(vec!["mamba"; 28])),
        ("block_configs", serde_json::json!([])),
        ("hybrid_override_pattern", "M?".into()),
    ] {
        let mut model = qwen3_small();
        model[field] = value;
        let error = refusal(&model);
        let named = error.contains(field) || error.contains("mamba_d_state");
        assert!(named, "{field}: {error}");
    }
    for config in ["", "[]", "{", "null", "{}", "{\"num_hidden_layers\": 5}"] {
        assert!(
            KvShape::from_config(config, &KvOptions::default()).is_err(),
            "{config}"
        );
    }
    let odd = KvOptions::default().cache_dtype("fp3");
    let error = KvShape::from_config(&qwen3_small().to_string(), &odd).unwrap_err();
    assert!(error.to_string().contains("fp3"), "{error}");
    let none = KvOptions::default().tensor_parallel(0);
    assert!(KvShape::from_config(&qwen3_small().to_string(), &none).is_err());
}

/// Fields that are read, with values that a broken or hostile configuration may have.
fn any_config() -> impl proptest::strategy::Strategy<Value = Value> {
    use proptest::prelude::*;
    let name = prop::sample::select(vec![
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_size",
        "intermediate_size",
        "head_dim",
        "v_head_dim",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "index_head_dim",
        "layer_types",
        "attn_type_list",
        "attn_layer_indices",
        "attn_layer_period",
        "attn_layer_offset",
        "full_attention_interval",
        "linear_attn_config",
        "hybrid_override_pattern",
        "sliding_window",
        "sliding_window_pattern",
        "use_sliding_window",
        "max_window_layers",
        "num_kv_shared_layers",
        "mamba_d_state",
        "mamba_d_conv",
        "mamba_expand",
        "mamba_n_heads",
        "conv_L_cache",
        "quantization_config",
        "torch_dtype",
        "text_config",
    ]);
    let value = prop_oneof![
        4 => (1_u64..200).prop_map(Value::from),
        1 => any::<i64>().prop_map(Value::from),
        1 => any::<f64>().prop_map(Value::from),
        1 => prop::sample::select(vec![
            Value::Null,
            true.into(),
            "M*-".into(),
            "full_attention".into(),
            serde_json::json!(["full_attention", "sliding_attention", "mamba"]),
            serde_json::json!([0, 1, 5]),
            serde_json::json!({"full_attn_layers": [1, 2], "num_heads": 3, "kv_cache_scheme": {"num_bits": 8}}),
            serde_json::json!({"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 64}),
        ]),
    ];
    prop::collection::vec((name, value), 0..20).prop_map(|fields| {
        fields
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    })
}

proptest::proptest! {
    #[test]
    fn no_configuration_panics_or_gives_a_size_that_is_none(config in any_config()) {
        let text = config.to_string();
        if let Ok(shape) = KvShape::from_config(&text, &KvOptions::default()) {
            let bytes = shape.bytes(1_000);
            proptest::prop_assert!(bytes.is_finite() && bytes > 0.0, "{text}");
        }
        if let Ok(Some(tokens)) = crate::handoff::attention_tokens(&text) {
            proptest::prop_assert!(tokens.is_finite() && tokens > 0.0, "{text}");
        }
    }
}
