use super::*;

const BLOCK: usize = 16;

fn reader() -> Reader {
    Reader::new(BlockSize::default(), None, Arc::new(Metrics::new()))
}

fn read(endpoint: Endpoint, body: &str) -> Reading {
    let body = Bytes::copy_from_slice(body.as_bytes());
    reader().read(endpoint, body, &Trusted::default(), &Members::default())
}

/// Two prompts meet in the index when the shorter one's hashes begin the longer one's; here: when they are the same.
fn same(a: &Reading, b: &Reading) -> bool {
    let router = kvlane::Router::new(kvlane::RouterConfig::default()).unwrap();
    let now = std::time::Instant::now();
    router
        .add_worker(kvlane::WorkerSpec::new("w").unwrap(), now)
        .unwrap();
    router.record("w", None, &a.prompt, None, now).unwrap();
    let found = router.overlap(&b.prompt, now);
    let blocks = u32::try_from(a.prompt.blocks()).unwrap();
    a.prompt.blocks() == b.prompt.blocks()
        && found
            .first()
            .is_some_and(|(_, overlap)| overlap.blocks() == blocks)
}

fn words(count: usize) -> String {
    "word ".repeat(count)
}

#[test]
fn token_ids_are_taken_as_they_are() {
    let tokens: Vec<u32> = (0..40).collect();
    let reading = read(
        Endpoint::Completions,
        &format!(r#"{{"model":"m","prompt":{tokens:?},"max_tokens":7}}"#),
    );
    assert_eq!(reading.mode, Mode::Tokens);
    assert_eq!((reading.prompt.blocks(), reading.prompt.tokens()), (2, 40)); // 40 = 2 × 16 + 8
    assert_eq!(reading.expected_output_tokens, Some(7));
    let generate = read(
        Endpoint::Generate,
        &format!(r#"{{"token_ids":{tokens:?}}}"#),
    );
    assert!(same(&reading, &generate));
}

#[test]
fn a_limit_beyond_a_usual_answer_is_not_expected_to_be_used() {
    for limit in ["300", "4294967295", "18446744073709551615"] {
        let body = format!(r#"{{"prompt":"x","max_tokens":{limit}}}"#);
        let reading = read(Endpoint::Completions, &body);
        assert_eq!(reading.expected_output_tokens, Some(256), "{limit}");
    }
}

#[test]
fn a_batch_is_keyed_by_its_first_and_booked_for_all() {
    let a: Vec<u32> = (0..32).collect();
    let b: Vec<u32> = (100..148).collect();
    let lists = read(
        Endpoint::Completions,
        &format!(r#"{{"prompt":[{a:?},{b:?}]}}"#),
    );
    assert!(same(
        &lists,
        &read(Endpoint::Completions, &format!(r#"{{"prompt":{a:?}}}"#))
    ));
    assert_eq!(lists.extra_blocks, 3); // 48 / 16
    let (x, y) = (words(40), "y".repeat(128));
    let texts = read(
        Endpoint::Completions,
        &format!(r#"{{"prompt":["{x}","{y}"]}}"#),
    );
    assert!(same(
        &texts,
        &read(Endpoint::Completions, &format!(r#"{{"prompt":"{x}"}}"#))
    ));
    assert_eq!(texts.extra_blocks, 2); // (128 + 2 quotes) / 4 = 32 tokens, to the nearest below
}

#[test]
fn string_and_list_content_are_one_prompt() {
    let text = words(60);
    let string = read(
        Endpoint::Chat,
        &format!(r#"{{"messages":[{{"role":"user","content":"{text}"}}]}}"#),
    );
    let parts = read(
        Endpoint::Chat,
        &format!(
            r#"{{"messages":[{{"content":[{{"type":"text","text":"{text}"}}],"role":"user"}}]}}"#
        ),
    );
    assert_eq!(string.mode, Mode::Text);
    assert!(same(&string, &parts));
    let escaped = text.replace('w', "\\u0077");
    assert!(same(
        &string,
        &read(
            Endpoint::Chat,
            &format!(r#"{{"messages":[{{"role":"user","content":"{escaped}"}}]}}"#)
        )
    ));
}

#[test]
fn role_tools_media_salt_and_calls_tell_prompts_apart() {
    let text = words(60);
    let plain = format!(r#"{{"messages":[{{"role":"user","content":"{text}"}}]}}"#);
    let base = read(Endpoint::Chat, &plain);
    for other in [
        plain.replace("user", "system"),
        plain.replacen('{', r#"{"tools":[{"type":"function"}],"#, 1),
        plain.replacen('{', r#"{"cache_salt":"s","#, 1),
        format!(
            r#"{{"messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"data:a"}}}},{{"type":"text","text":"{text}"}}]}}]}}"#
        ),
        format!(r#"{{"messages":[{{"role":"user","name":"n","content":"{text}"}}]}}"#),
    ] {
        assert!(!same(&base, &read(Endpoint::Chat, &other)), "{other}");
    }
    let nulls = plain.replacen('{', r#"{"tools":null,"cache_salt":null,"#, 1);
    assert!(same(&base, &read(Endpoint::Chat, &nulls)));
}

#[test]
fn every_api_is_understood() {
    let text = words(60);
    for (endpoint, body) in [
        (Endpoint::Responses, format!(r#"{{"input":"{text}"}}"#)),
        (
            Endpoint::Responses,
            format!(
                r#"{{"instructions":"be brief","input":[{{"role":"user","content":"{text}"}}]}}"#
            ),
        ),
        (
            Endpoint::Messages,
            format!(r#"{{"system":"s","messages":[{{"role":"user","content":"{text}"}}]}}"#),
        ),
        (Endpoint::Embeddings, format!(r#"{{"input":["{text}"]}}"#)),
        (Endpoint::Generate, format!(r#"{{"text":"{text}"}}"#)),
    ] {
        let reading = read(endpoint, &body);
        assert_eq!(reading.mode, Mode::Text, "{body}");
        assert!(reading.prompt.blocks() >= 4, "{body}");
    }
}

#[test]
fn what_cannot_be_read_is_placed_by_load_and_kept_as_it_is() {
    for body in [
        "",
        "{",
        "[]",
        "null",
        "{\"prompt\":{}}",
        "{\"prompt\":[]}",
        "{\"prompt\":[[]]}",
        "{\"prompt\":-1}",
        "{\"prompt\":[1.5]}",
        "{\"prompt\":[4294967296]}",
        "{\"messages\":7}",
        "\u{feff}{}",
        "{\"a\":1}x",
    ] {
        for endpoint in [Endpoint::Chat, Endpoint::Completions] {
            let reading = read(endpoint, body);
            assert_eq!(reading.prompt.blocks(), 0, "{body}");
            assert_eq!(&reading.body[..], body.as_bytes());
        }
    }
    let nested = format!("{{\"messages\":{}{}}}", "[".repeat(5000), "]".repeat(5000));
    assert_eq!(&read(Endpoint::Chat, &nested).body[..], nested.as_bytes());
    for body in [r#"{"prompt":""}"#, r#"{"prompt":"  "}"#] {
        assert_eq!(read(Endpoint::Completions, body).prompt.blocks(), 0);
    }
    for body in [
        r#"{"messages":[]}"#,
        r#"{"messages":[{"role":"user","content":""}]}"#,
        r#"{"messages":[null,1,"x"]}"#,
    ] {
        let _ = read(Endpoint::Chat, body);
    }
}

#[test]
fn handoff_fields_are_found_wherever_engines_take_them() {
    for body in [
        r#"{"kv_transfer_params":{}}"#,
        r#"{"kv_transfer\u005fparams":null}"#,
        r#"{"bootstrap_host":"h"}"#,
        r#"{"bootstrap_room":1}"#,
        r#"{"vllm_xargs":{"kv_transfer_params":{}}}"#,
        r#"{"sampling_params":{"extra_args":{"kv_transfer_params":{}}}}"#,
        r#"{"kv_transfer_params":NaN}"#,
    ] {
        assert!(read(Endpoint::Chat, body).handoff_field.is_some(), "{body}");
    }
    let talk = r#"{"messages":[{"role":"user","content":"what are kv_transfer_params and bootstrap_host?"}]}"#;
    assert_eq!(read(Endpoint::Chat, talk).handoff_field, None);
}

#[test]
fn a_trusted_salt_beats_the_bodys_on_every_api() {
    let trusted = Trusted {
        tenant_salt: Some("s1".to_owned()),
    };
    let text = words(60);
    for (endpoint, body) in [
        (
            Endpoint::Chat,
            format!(r#"{{"messages":[{{"role":"user","content":"{text}"}}],"cache_salt":"S"}}"#),
        ),
        (
            Endpoint::Completions,
            format!(r#"{{"prompt":"{text}","cache_salt":"S"}}"#),
        ),
        (
            Endpoint::Responses,
            format!(r#"{{"input":"{text}","cache_salt":"S"}}"#),
        ),
        (
            Endpoint::Generate,
            format!(
                r#"{{"token_ids":{:?},"cache_salt":"S"}}"#,
                (0..64).collect::<Vec<u32>>()
            ),
        ),
    ] {
        let own = read(endpoint, &body.replace("\"S\"", "\"s1\""));
        let other = Bytes::from(body.replace("\"S\"", "\"s2\""));
        let by_header = reader().read(endpoint, other.clone(), &trusted, &Members::default());
        assert!(same(&own, &by_header), "{body}");
        assert_eq!(
            by_header.body, own.body,
            "the engine must see the same salt"
        );
        let untrusted = reader().read(
            endpoint,
            other.clone(),
            &Trusted::default(),
            &Members::default(),
        );
        assert!(!same(&own, &untrusted));
        assert_eq!(untrusted.body, other);
    }
}

struct Toy {
    fails: bool,
}

impl Tokenize for Toy {
    fn encode_text(&self, text: &str, _: bool) -> Result<Vec<u32>, TokenizeError> {
        if self.fails {
            Err(TokenizeError::Render("toy".to_owned()))
        } else {
            Ok(text.bytes().map(u32::from).collect())
        }
    }

    fn encode_chat(&self, body: &Value) -> Result<Vec<u32>, TokenizeError> {
        if body["tools"].is_string() {
            return Err(TokenizeError::Invalid("tools must be a list".to_owned()));
        }
        if body["chat_template"].is_string() {
            return Err(TokenizeError::Unsupported("own templates".to_owned()));
        }
        self.encode_text(&body["messages"].to_string(), false)
    }
}

#[test]
fn a_tokenizer_is_used_and_its_failure_is_survived() {
    let body = Bytes::from(format!(
        r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#,
        words(60)
    ));
    let metrics = Arc::new(Metrics::new());
    for (fails, mode) in [(false, Mode::Tokens), (true, Mode::Text)] {
        let reader = Reader::new(
            BlockSize::default(),
            Some(Arc::new(Toy { fails })),
            Arc::clone(&metrics),
        );
        for _ in 0..3 {
            let reading = reader.read(
                Endpoint::Chat,
                body.clone(),
                &Trusted::default(),
                &Members::default(),
            );
            assert_eq!(reading.mode, mode);
            assert!(reading.prompt.blocks() >= BLOCK / 4);
        }
        assert_eq!(reader.complained.load(Ordering::Relaxed), fails);
    }
    let media = Bytes::from_static(br#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}}]}]}"#);
    let reader = Reader::new(
        BlockSize::default(),
        Some(Arc::new(Toy { fails: false })),
        metrics,
    );
    assert_eq!(
        reader
            .read(
                Endpoint::Chat,
                media,
                &Trusted::default(),
                &Members::default()
            )
            .mode,
        Mode::Text
    );
}

#[test]
fn what_an_engine_counts_otherwise_is_not_audited() {
    let tokens: Vec<u32> = (0..40).collect();
    let audited = |fields: &str| {
        read(
            Endpoint::Completions,
            &format!(r#"{{"prompt":{tokens:?}{fields}}}"#),
        )
        .audited
    };
    for fields in [
        "",
        r#","n":1"#,
        r#","echo":false"#,
        r#","prompt_logprobs":null"#,
    ] {
        assert!(audited(fields), "{fields}");
    }
    for fields in [
        r#","n":2"#,
        r#","best_of":3"#,
        r#","echo":true"#,
        r#","prompt_logprobs":0"#,
        r#","truncate_prompt_tokens":8"#,
        r#","use_beam_search":true"#,
    ] {
        assert!(!audited(fields), "{fields}");
    }
    let batch = format!(r#"{{"prompt":[{tokens:?},{tokens:?}]}}"#);
    assert!(!read(Endpoint::Completions, &batch).audited);
}

#[test]
fn an_odd_request_is_not_the_tokenizers_failure() {
    let tokenizer: Arc<dyn Tokenize> = Arc::new(Toy { fails: false });
    let reader = Reader::new(
        BlockSize::default(),
        Some(tokenizer),
        Arc::new(Metrics::new()),
    );
    let many = format!(r#""x":[{}1]"#, "1,".repeat(1_200_000));
    for field in [
        r#""tools":"x""#,
        r#""chat_template":"{{ x }}""#,
        many.as_str(),
    ] {
        let body = format!(
            r#"{{"messages":[{{"role":"user","content":"{}"}}],{field}}}"#,
            words(60)
        );
        let reading = reader.read(
            Endpoint::Chat,
            Bytes::from(body),
            &Trusted::default(),
            &Members::default(),
        );
        assert_eq!(reading.mode, Mode::Text);
    }
    assert!(!reader.complained.load(Ordering::Relaxed));
}
