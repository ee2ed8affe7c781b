//! Vectors made by the engine's own code (`tests/fixtures/templates/generate.py`), the toy template, and bad folders.

use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;

use super::*;

/// 2026-03-09 14:05:06, the moment at which the vectors were rendered.
fn fixed_time(format: &str) -> Result<String, String> {
    let then = jiff::civil::date(2026, 3, 9).at(14, 5, 6, 0);
    jiff::fmt::strtime::format(format, then).map_err(|error| error.to_string())
}

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn read_json(path: PathBuf) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A copy of the test model with the given files added.
fn model_with(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(
            fixtures().join("model").join(name),
            folder.path().join(name),
        )
        .unwrap();
    }
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    folder
}

fn load(files: &[(&str, &str)]) -> ModelTokenizer {
    ModelTokenizer::load_with_clock(model_with(files).path(), fixed_time).unwrap()
}

fn toy() -> ModelTokenizer {
    let template = fs::read_to_string(fixtures().join("templates/toy.jinja")).unwrap();
    load(&[("chat_template.jinja", &template)])
}

/// Compares one template's vectors; returns how many there were.
fn check_vectors(name: &str) -> usize {
    let template = fs::read_to_string(fixtures().join(format!("templates/{name}.jinja"))).unwrap();
    let vectors = read_json(fixtures().join(format!("templates/{name}.json")));
    let model = load(&[("chat_template.jinja", &template)]);
    let expected_format = match model.templates["default"].content_format() {
        scan::ContentFormat::Text => "string",
        scan::ContentFormat::Parts => "openai",
    };
    assert_eq!(vectors["content_format"], expected_format, "{name}");
    let cases = vectors["cases"].as_array().unwrap();
    for case in cases {
        let label = format!("{name}: {}", case["case"]);
        if case.get("error").is_some() {
            let error = model.render_chat(&case["body"]).unwrap_err();
            assert_eq!(error.code(), "render", "{label}");
            let engine_says = case["error"].as_str().unwrap();
            assert!(error.to_string().contains(engine_says), "{label}: {error}");
            continue;
        }
        let rendered = model
            .render_chat(&case["body"])
            .unwrap_or_else(|error| panic!("{label}: {error}"));
        assert_eq!(rendered, case["rendered"].as_str().unwrap(), "{label}");
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(model.encode_chat(&case["body"]).unwrap(), ids, "{label}");
    }
    cases.len()
}

#[test]
fn the_toy_template_renders_as_in_the_engine() {
    assert_eq!(check_vectors("toy"), 15);
}

#[test]
fn a_template_with_thoughts_and_calls_renders_as_in_the_engine() {
    assert_eq!(check_vectors("turns"), 22);
}

#[test]
fn a_template_with_head_and_date_renders_as_in_the_engine() {
    assert_eq!(check_vectors("headers"), 21);
}

#[test]
fn a_template_over_parts_renders_as_in_the_engine() {
    assert_eq!(check_vectors("parts"), 20);
}

#[test]
fn values_print_as_in_python() {
    assert_eq!(check_vectors("python"), 2);
}

#[test]
fn text_and_parts_of_the_same_chat_have_equal_tokens() {
    let model = toy();
    let text = json!({"messages": [{"role": "user", "content": "What is the weather?"}]});
    let parts = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "What is the weather?"}]}]});
    let tokens = model.encode_chat(&text).unwrap();
    assert_eq!(tokens, model.encode_chat(&parts).unwrap());
    assert_eq!(
        model.render_chat(&text).unwrap(),
        "<s>[user]What is the weather?[/user][assistant]"
    );
}

#[test]
fn completions_get_the_special_tokens_and_chats_do_not() {
    let model = toy();
    let text = model.encode_text("Hello").unwrap();
    let bare = model.encode("Hello", false).unwrap();
    assert_eq!(text[1..], bare[..]); // one <s> in front
    let chat = json!({"messages": []});
    // The template's own <s>, and no second one by the post-processor.
    assert_eq!(
        model
            .encode_chat(&chat)
            .unwrap()
            .iter()
            .filter(|id| **id == text[0])
            .count(),
        1
    );
}

#[test]
fn truncation_keeps_the_end_or_the_front() {
    let model = toy();
    let body = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Say hello"}]});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        body
    };
    let whole = model.encode_chat(&body(json!({}))).unwrap();
    let cut = |more| model.encode_chat(&body(more)).unwrap();
    assert_eq!(
        cut(json!({"truncate_prompt_tokens": 3})),
        whole[whole.len() - 3..]
    );
    assert_eq!(
        cut(json!({"truncate_prompt_tokens": 3, "truncation_side": "right"})),
        whole[..3]
    );
    assert_eq!(cut(json!({"truncate_prompt_tokens": 10_000})), whole);
    let prompt = json!({"truncate_prompt_tokens": 1, "truncation_side": "right"});
    assert_eq!(model.encode_prompt(&prompt, "hello").unwrap(), [0]); // the post-processor's <s>
    let plain = json!({"add_special_tokens": false});
    assert_eq!(
        model.encode_prompt(&plain, "hello").unwrap(),
        model.encode("hello", false).unwrap()
    );
}

#[test]
fn prompts_of_a_running_engine_have_its_tokens() {
    let captures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/vllm-0.32.0");
    let model = ModelTokenizer::load(&captures.join("model")).unwrap();
    let vectors = read_json(captures.join("prompt-tokens.json"));
    let vectors = vectors.as_array().unwrap();
    for vector in vectors {
        let request = &vector["request"];
        let ids = match request["prompt"].as_str() {
            Some(prompt) => model.encode_prompt(request, prompt),
            None => model.encode_chat(request),
        };
        let expected: Vec<u32> = serde_json::from_value(vector["tokens"].clone()).unwrap();
        assert_eq!(ids.unwrap(), expected, "{}", vector["name"]);
    }
    assert!(vectors.len() >= 12);
}

#[test]
fn a_failing_template_is_a_render_error_with_its_reason() {
    let model = load(&[(
        "chat_template.jinja",
        "a\n{{ raise_exception('no ' ~ messages[0].role) }}",
    )]);
    let error = model
        .render_chat(&json!({"messages": [{"role": "user", "content": ""}]}))
        .unwrap_err();
    assert_eq!(error, TokenizeError::Render("no user (line 2)".to_owned()));
}

#[test]
fn a_broken_template_fails_chats_and_leaves_text_alone() {
    let model = load(&[("chat_template.jinja", "{% for %}")]);
    let error = model.encode_chat(&json!({"messages": []})).unwrap_err();
    assert_eq!(error.code(), "render");
    assert!(model.template_error().unwrap().contains("does not compile"));
    assert!(!model.encode_text("Hello").unwrap().is_empty());
}

#[test]
fn an_endless_template_is_stopped() {
    let nested =
        "{% for a in range(9000) %}{% for b in range(9000) %}{{ a }}{% endfor %}{% endfor %}";
    let model = load(&[("chat_template.jinja", nested)]);
    let error = model.render_chat(&json!({"messages": []})).unwrap_err();
    assert_eq!(error.code(), "render");
}

#[test]
fn what_only_the_engine_can_render_is_unsupported() {
    let model = toy();
    let user = json!([{"role": "user", "content": "a"}]);
    let bodies = [
        json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}),
        json!({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}),
        json!({"messages": user, "chat_template": "{{ messages }}"}),
        json!({"messages": user, "chat_template_kwargs": {"chat_template": "x"}}),
        json!({"messages": user, "truncate_prompt_tokens": -1}),
        json!({"messages": user, "truncate_prompt_tokens": 3, "add_special_tokens": true}),
    ];
    for body in bodies {
        assert_eq!(
            model.encode_chat(&body).unwrap_err().code(),
            "unsupported",
            "{body}"
        );
    }
    let harmony = load(&[
        ("config.json", r#"{"model_type": "gpt_oss"}"#),
        ("chat_template.jinja", "x"),
    ]);
    assert_eq!(
        harmony
            .encode_chat(&json!({"messages": user}))
            .unwrap_err()
            .code(),
        "unsupported"
    );
    let bare = load(&[]);
    assert_eq!(
        bare.encode_chat(&json!({"messages": user}))
            .unwrap_err()
            .code(),
        "unsupported"
    );
}

#[test]
fn malformed_bodies_are_invalid_and_say_where() {
    let model = toy();
    let user = json!({"role": "user", "content": "a"});
    let bodies = [
        json!([]),
        json!({}),
        json!({"messages": "hi"}),
        json!({"messages": [user, 3]}),
        json!({"messages": [{"content": "a"}]}),
        json!({"messages": [{"role": "user", "content": 5}]}),
        json!({"messages": [{"role": "user", "content": [5]}]}),
        json!({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}),
        json!({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}),
        json!({"messages": [user], "tools": []}),
        json!({"messages": [user], "tools": [{"type": "function"}]}),
        json!({"messages": [user], "add_generation_prompt": "yes"}),
        json!({"messages": [user], "chat_template_kwargs": []}),
        json!({"messages": [user], "chat_template_kwargs": {"messages": []}}),
        json!({"messages": [user], "continue_final_message": true}),
    ];
    for body in bodies {
        assert_eq!(
            model.encode_chat(&body).unwrap_err().code(),
            "invalid",
            "{body}"
        );
    }
    let error = model
        .encode_chat(&json!({"messages": [user, 3]}))
        .unwrap_err();
    assert!(error.to_string().contains("messages[1]"), "{error}");
}

#[test]
fn templates_are_chosen_as_in_transformers() {
    let user = json!([{"role": "user", "content": "a"}]);
    let plain = json!({"messages": user});
    let with_tools =
        json!({"messages": user, "tools": [{"type": "function", "function": {"name": "f"}}]});
    let listed = load(&[(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]}"#,
    )]);
    assert_eq!(listed.render_chat(&plain).unwrap(), "plain");
    assert_eq!(listed.render_chat(&with_tools).unwrap(), "tools");
    let file_wins = load(&[
        (
            "tokenizer_config.json",
            r#"{"chat_template": "of the configuration"}"#,
        ),
        ("chat_template.jinja", "of the file"),
        ("additional_chat_templates/tool_use.jinja", "of the folder"),
    ]);
    assert_eq!(file_wins.render_chat(&plain).unwrap(), "of the file");
    assert_eq!(file_wins.render_chat(&with_tools).unwrap(), "of the folder");
    let processor = load(&[
        (
            "tokenizer_config.json",
            r#"{"chat_template": "of the tokenizer"}"#,
        ),
        (
            "chat_template.json",
            r#"{"chat_template": "of the processor"}"#,
        ),
        ("preprocessor_config.json", "{}"),
    ]);
    assert_eq!(processor.render_chat(&plain).unwrap(), "of the processor");
    assert_eq!(
        processor.render_chat(&with_tools).unwrap(),
        "of the tokenizer"
    );
}

#[test]
fn special_tokens_come_from_both_files_and_unset_ones_are_undefined() {
    let model = load(&[
        (
            "tokenizer_config.json",
            r#"{"bos_token": {"content": "<s>"}, "eos_token": null}"#,
        ),
        (
            "special_tokens_map.json",
            r#"{"bos_token": "<x>", "pad_token": "</s>"}"#,
        ),
        (
            "chat_template.jinja",
            "{{ bos_token }} {{ eos_token is defined }} {{ pad_token }}",
        ),
    ]);
    assert_eq!(
        model.render_chat(&json!({"messages": []})).unwrap(),
        "<s> False </s>"
    );
}

#[test]
fn declared_tokens_that_the_tokenizer_lacks_are_added() {
    let model = load(&[(
        "tokenizer_config.json",
        r#"{"added_tokens_decoder": {"512": {"content": "<|new|>", "special": true}}}"#,
    )]);
    assert_eq!(model.encode("<|new|>", false).unwrap().len(), 1);
    assert!(toy().encode("<|new|>", false).unwrap().len() > 1);
}

#[test]
fn load_errors_name_the_file() {
    let cases = [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", r#"{"chat_template": 5}"#),
        (
            "tokenizer_config.json",
            r#"{"added_tokens_decoder": {"x": {}}}"#,
        ),
        ("special_tokens_map.json", "nonsense"),
        ("chat_template.json", "{}"),
        ("config.json", "nonsense"),
    ];
    for (name, text) in cases {
        let folder = model_with(&[(name, text)]);
        let error = ModelTokenizer::load(folder.path()).unwrap_err();
        assert_eq!(error.code(), "load");
        assert!(error.to_string().contains(name), "{name}: {error}");
    }
    let error = ModelTokenizer::load(&fixtures().join("nowhere")).unwrap_err();
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
}

#[test]
fn threads_share_one_tokenizer() {
    let model = toy();
    let body = json!({"messages": [{"role": "user", "content": "Say hello to the world"}]});
    let expected = model.encode_chat(&body).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    assert_eq!(model.encode_chat(&body).unwrap(), expected);
                }
            });
        }
    });
}

/// Against tokenizers that are not ours to keep: `KVLANE_REAL_TOKENIZERS` names folders, separated by colons, each with
/// `tokenizer.json`, `tokenizer_config.json` and `vectors.json`, a list of `{body, rendered, ids}` and `{text, ids}` that
/// the engine's own code made.
#[test]
#[ignore = "needs tokenizers from a package registry"]
fn real_tokenizers_give_the_engines_ids() {
    let folders =
        std::env::var("KVLANE_REAL_TOKENIZERS").expect("KVLANE_REAL_TOKENIZERS is not set");
    for folder in folders.split(':').map(PathBuf::from) {
        let started = std::time::Instant::now();
        let model = ModelTokenizer::load(&folder).unwrap();
        println!("{}: loaded in {:.2?}", folder.display(), started.elapsed());
        for (index, vector) in read_json(folder.join("vectors.json"))
            .as_array()
            .unwrap()
            .iter()
            .enumerate()
        {
            let expected: Vec<u32> = serde_json::from_value(vector["ids"].clone()).unwrap();
            let encode = || match vector["text"].as_str() {
                Some(text) => model.encode_text(text).unwrap(),
                None => model.encode_chat(&vector["body"]).unwrap(),
            };
            if let Some(rendered) = vector["rendered"].as_str() {
                assert_eq!(
                    model.render_chat(&vector["body"]).unwrap(),
                    rendered,
                    "{index}"
                );
            }
            let started = std::time::Instant::now();
            let ids = encode();
            let first = started.elapsed();
            assert_eq!(ids, expected, "{} {index}", folder.display());
            let mut times: Vec<_> = (0..20)
                .map(|_| {
                    let started = std::time::Instant::now();
                    assert_eq!(encode().len(), expected.len());
                    started.elapsed()
                })
                .collect();
            times.sort();
            println!(
                "  vector {index}: {} tokens, first {first:.2?}, median again {:.2?}",
                ids.len(),
                times[10]
            );
        }
    }
}
