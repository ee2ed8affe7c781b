//! The HTTP side: shapes, errors, metrics, timing and clients that leave.

use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use kvlane::ErrorKind;
use kvlane_sidecar::engine::{Engine, EngineConfig};
use serde_json::{Value, json};

use crate::client::{cached_tokens, complete, get, post, read, send};
use crate::{eventually, fast, start};

#[tokio::test]
async fn completions_have_the_shape_of_vllm() {
    let engine = start(fast()).await;
    let body = json!({"model": "sim", "prompt": "w1 w2 w3", "max_tokens": 3});
    let answer = post(&engine, "/v1/completions", &body).await.json();
    assert_eq!(answer["object"], "text_completion");
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(
        answer["usage"],
        json!({"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}})
    );
    let text = answer["choices"][0]["text"].as_str().unwrap();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    // Prompt and answer read back as the tokens that were cached.
    let tokens = post(
        &engine,
        "/tokenize",
        &json!({"prompt": format!("w1 w2 w3{text}")}),
    )
    .await
    .json();
    assert_eq!(tokens["count"], 6);
    assert_eq!(tokens["max_model_len"], 14_800);
    let again = post(&engine, "/v1/completions", &body).await.json();
    assert_eq!(
        again["choices"][0]["text"], text,
        "generation is deterministic"
    );
    engine.shutdown().await;
}

#[tokio::test]
async fn a_stream_says_the_same_as_a_whole_answer() {
    let engine = start(fast()).await;
    let chat = json!({"messages": [{"role": "user", "content": "hello there"}], "max_completion_tokens": 4});
    let completion = json!({"prompt": [5, 6, 7], "max_tokens": 4});
    for (path, body, text) in [
        ("/v1/chat/completions", chat, "/message/content"),
        ("/v1/completions", completion, "/text"),
    ] {
        let whole = post(&engine, path, &body).await.json();
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        streamed["stream_options"] = json!({"include_usage": true});
        let answer = post(&engine, path, &streamed).await;
        let events = answer.events();
        let [chunks @ .., usage, done] = events.as_slice() else {
            panic!("too few events in {}", answer.text);
        };
        assert_eq!(done, "[DONE]");
        assert_eq!(usage["choices"], json!([]));
        assert_eq!(usage["usage"]["completion_tokens"], 4);
        let pieces: String = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0])
            .filter_map(|choice| {
                choice["text"]
                    .as_str()
                    .or_else(|| choice["delta"]["content"].as_str())
            })
            .collect();
        assert_eq!(whole["choices"][0].pointer(text).unwrap(), &json!(pieces));
        let reasons: Vec<&Value> = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0]["finish_reason"])
            .collect();
        assert_eq!(*reasons.last().unwrap(), "length");
        assert_eq!(
            reasons.iter().filter(|reason| reason.is_null()).count(),
            chunks.len() - 1
        );
        assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
    }
    engine.shutdown().await;
}

#[tokio::test]
async fn a_batch_is_answered_by_prompt_and_sample() {
    let engine = start(fast()).await;
    let body = json!({"prompt": ["w1 w2", [3, 4, 5]], "n": 2, "max_tokens": 2});
    let answer = post(&engine, "/v1/completions", &body).await.json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(
        choices
            .iter()
            .map(|choice| choice["index"].as_u64().unwrap())
            .collect::<Vec<_>>(),
        [0, 1, 2, 3]
    );
    assert_ne!(choices[0]["text"], choices[1]["text"], "samples differ");
    assert_eq!(answer["usage"]["prompt_tokens"], 5);
    assert_eq!(answer["usage"]["completion_tokens"], 8);
    engine.shutdown().await;
}

#[tokio::test]
async fn cached_tokens_count_whole_blocks_short_of_the_last_token() {
    let engine = start(fast()).await;
    assert_eq!(complete(&engine, 0..1500, 1).await, 0);
    // floor(1499 / 16) × 16 = 1488
    assert_eq!(complete(&engine, 0..1500, 1).await, 1488);
    // 1,476 shared tokens are 92 blocks.
    assert_eq!(
        complete(&engine, (0..1476).chain(5000..5024), 1).await,
        1472
    );
    let stats = engine.stats();
    assert_eq!(
        (stats.prefix_query_tokens, stats.prefix_hit_tokens),
        (4500, 2960)
    );
    let page = get(&engine, "/metrics").await.text;
    assert!(
        page.contains("vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"sim\"} 2960\n"),
        "{page}"
    );
    let salted =
        json!({"prompt": (0..1500).collect::<Vec<u32>>(), "max_tokens": 1, "cache_salt": "a"});
    assert_eq!(
        cached_tokens(&post(&engine, "/v1/completions", &salted).await.json()),
        0
    );
    engine.shutdown().await;
}

#[tokio::test]
async fn a_conversation_hits_what_was_generated() {
    let engine = start(fast()).await;
    let mut messages = vec![json!({"role": "user", "content": "w1 ".repeat(100)})];
    let body = |messages: &[Value]| json!({"messages": messages, "max_tokens": 40});
    let first = post(&engine, "/v1/chat/completions", &body(&messages))
        .await
        .json();
    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({"role": "user", "content": [{"type": "text", "text": "and w2?"}]}));
    let second = post(&engine, "/v1/chat/completions", &body(&messages))
        .await
        .json();
    // 103 prompt tokens and 39 computed ones of the answer are 8 full blocks.
    assert_eq!(cached_tokens(&second), 128);
    engine.shutdown().await;
}

#[tokio::test]
async fn bad_requests_get_errors_in_the_shape_of_openai() {
    let engine = start(EngineConfig {
        max_model_len: Some(100),
        ..fast()
    })
    .await;
    let long: Vec<u32> = (0..100).collect();
    let cases = [
        (
            "/v1/completions",
            json!({"model": "other", "prompt": "a"}),
            404,
            "`other` does not exist",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": []}),
            400,
            "messages must not be empty",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": "no"}),
            400,
            "Invalid request body",
        ),
        ("/v1/completions", json!({}), 400, "prompt is required"),
        ("/v1/completions", json!({"prompt": []}), 400, "empty"),
        ("/v1/completions", json!({"prompt": " "}), 400, "empty"),
        (
            "/v1/completions",
            json!({"prompt": [[1], []]}),
            400,
            "empty",
        ),
        (
            "/v1/completions",
            json!({"prompt": [-1]}),
            400,
            "out of vocabulary",
        ),
        (
            "/v1/completions",
            json!({"prompt": [151_936]}),
            400,
            "out of vocabulary",
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "max_tokens": 0}),
            400,
            "max_tokens must be at least 1",
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "n": 0}),
            400,
            "n must be at least 1",
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "n": 1_000_000_000}),
            400,
            "at most 1024",
        ),
        (
            "/v1/completions",
            json!({"prompt": long, "max_tokens": 1}),
            400,
            "maximum context length is 100 tokens",
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "max_tokens": i64::MAX}),
            400,
            "maximum context length",
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "cache_salt": ""}),
            400,
            "cache_salt",
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "stream_options": {}}),
            400,
            "stream=True",
        ),
        ("/tokenize", json!({}), 400, "prompt or messages"),
        ("/nowhere", json!({}), 404, "Not Found"),
        ("/health", json!({}), 405, "Method Not Allowed"),
    ];
    for (path, body, status, message) in cases {
        let answer = post(&engine, path, &body).await;
        assert_eq!(
            answer.status.as_u16(),
            status,
            "{path} {body}: {}",
            answer.text
        );
        let error = &answer.json()["error"];
        assert!(
            error["message"].as_str().unwrap().contains(message),
            "{path} {body}: {error}"
        );
        assert_eq!(error["code"], status);
    }
    for (headers, body, status) in [
        (
            vec![("content-type", "application/json")],
            "{\"prompt\": ",
            400,
        ),
        (
            vec![("content-type", "text/plain")],
            "{\"prompt\": \"a\"}",
            415,
        ),
        (
            vec![("x-data-parallel-rank", "3")],
            "{\"prompt\": \"a\"}",
            400,
        ),
        (
            vec![("x-data-parallel-rank", "-1")],
            "{\"prompt\": \"a\"}",
            400,
        ),
        (
            vec![("x-data-parallel-rank", "0")],
            "{\"prompt\": \"a\"}",
            200,
        ),
        (
            vec![("x-data-parallel-rank", "first")],
            "{\"prompt\": \"a\"}",
            200,
        ),
    ] {
        let answer = read(send(&engine, "POST", "/v1/completions", &headers, body).await).await;
        assert_eq!(
            answer.status.as_u16(),
            status,
            "{headers:?} {body}: {}",
            answer.text
        );
    }
    assert_eq!(engine.stats().used_blocks, 0);
    engine.shutdown().await;
}

#[tokio::test]
async fn the_other_paths_tell_what_a_router_asks() {
    let engine = start(EngineConfig {
        model_name: "org/model".to_owned(),
        ..fast()
    })
    .await;
    assert_eq!(get(&engine, "/health").await.status, 200);
    assert!(
        get(&engine, "/version").await.json()["version"]
            .as_str()
            .unwrap()
            .starts_with("0.32.0")
    );
    let model = get(&engine, "/v1/models").await.json()["data"][0].clone();
    assert_eq!(
        (&model["id"], &model["max_model_len"]),
        (&json!("org/model"), &json!(14_800))
    );
    let sources = get(&engine, "/kv_event_sources").await.json();
    assert_eq!(sources["0"]["endpoint"], engine.events_endpoint().unwrap());
    assert_eq!(
        sources["0"]["replay_endpoint"],
        engine.replay_endpoint().unwrap()
    );
    assert_eq!(sources["0"]["enable_kv_cache_events"], true);
    let page = get(&engine, "/metrics").await.text;
    let info = page
        .lines()
        .find(|line| line.starts_with("vllm:cache_config_info{"))
        .unwrap();
    assert!(
        info.contains("block_size=\"16\"")
            && info.contains("num_gpu_blocks=\"926\"")
            && info.ends_with("} 1.0"),
        "{info}"
    );
    let text = post(&engine, "/detokenize", &json!({"tokens": [5, 9]}))
        .await
        .json();
    assert_eq!(text["prompt"], "w5 w9");
    engine.shutdown().await;
    let quiet = start(EngineConfig {
        events: None,
        ..fast()
    })
    .await;
    assert_eq!(get(&quiet, "/kv_event_sources").await.json(), json!({}));
    quiet.shutdown().await;
    let mut config = fast();
    config.events.as_mut().unwrap().endpoint = "tcp://*:0".to_owned();
    let open = start(config).await;
    let port = open
        .events_endpoint()
        .unwrap()
        .rsplit_once(':')
        .unwrap()
        .1
        .to_owned();
    let sources = get(&open, "/kv_event_sources").await.json();
    assert_eq!(sources["0"]["endpoint"], format!("tcp://*:{port}"));
    open.shutdown().await;
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_blocks() {
    let slow = EngineConfig {
        decode_ms: 20.0,
        speed: 1.0,
        ..EngineConfig::ephemeral()
    };
    let engine = start(slow).await;
    let headers = [("content-type", "application/json")];
    for stream in [true, false] {
        let aborted = engine.stats().aborted_requests;
        let body = json!({"prompt": [1, 2, 3], "max_tokens": 10_000, "stream": stream}).to_string();
        let request = send(&engine, "POST", "/v1/completions", &headers, &body);
        if stream {
            let mut response = request.await;
            response.frame().await.unwrap().unwrap();
            assert_eq!(engine.stats().running_requests, 1);
            drop(response);
        } else {
            // The request is dropped, and its connection with it, while the engine works on it.
            let runs = eventually("it runs", || engine.stats().running_requests == 1);
            tokio::select! {
                _ = request => panic!("it was answered"),
                () = runs => {}
            }
        }
        eventually("the abort", || {
            engine.stats().aborted_requests == aborted + 1
        })
        .await;
        assert_eq!(engine.stats().used_blocks, 0);
    }
    engine.shutdown().await;
}

#[tokio::test]
async fn waiting_requests_are_seen_and_served() {
    let engine = start(EngineConfig {
        max_num_seqs: 1,
        speed: 10.0,
        ..EngineConfig::ephemeral()
    })
    .await;
    let (first, second) = (
        complete(&engine, 0..16, 100),
        complete(&engine, 100..116, 1),
    );
    let watch = eventually("one waiting request", || {
        engine.stats().waiting_requests == 1
    });
    tokio::join!(first, second, watch);
    assert_eq!(engine.stats().finished_requests, 2);
    engine.shutdown().await;
}

#[tokio::test]
async fn first_tokens_take_the_measured_time() {
    // A tenth of 80 ms and of 15 ms; the slack is for a busy machine.
    let engine = start(EngineConfig {
        speed: 10.0,
        ..EngineConfig::ephemeral()
    })
    .await;
    // The shortest of some, since a busy machine only ever adds time.
    let mut shortest = [Duration::MAX; 2];
    for first in 0..40 {
        let [cold, warm] = shortest;
        if first >= 3 && cold < Duration::from_millis(40) && warm < cold {
            break;
        }
        let prompt: Vec<u32> = (first * 2000..first * 2000 + 1500).collect();
        let body = json!({"prompt": prompt, "max_tokens": 1, "stream": true}).to_string();
        for time in &mut shortest {
            let begin = Instant::now();
            let mut response = send(&engine, "POST", "/v1/completions", &[], &body).await;
            response.frame().await.unwrap().unwrap();
            *time = begin.elapsed().min(*time);
            response.collect().await.unwrap();
        }
    }
    let [cold, warm] = shortest;
    assert!(
        cold >= Duration::from_micros(7900) && cold < Duration::from_millis(40),
        "{cold:?}"
    );
    assert!(
        warm >= Duration::from_micros(1400) && warm < cold,
        "{warm:?}"
    );
    engine.shutdown().await;
}

#[tokio::test]
async fn short_steps_are_not_rounded_up() {
    // 1,000 decode steps of 5 ms / 50 = 0.1 ms each: 100 ms, where a timer of whole milliseconds would take 1,000.
    let engine = start(EngineConfig {
        speed: 50.0,
        ..EngineConfig::ephemeral()
    })
    .await;
    let mut shortest = Duration::MAX;
    // A busy machine only ever adds time.
    for _ in 0..20 {
        let begin = Instant::now();
        complete(&engine, 0..16, 1000).await;
        shortest = shortest.min(begin.elapsed());
        if shortest < Duration::from_millis(900) {
            break;
        }
    }
    assert!(
        shortest >= Duration::from_millis(99) && shortest < Duration::from_millis(900),
        "{shortest:?}"
    );
    engine.shutdown().await;
}

#[tokio::test]
async fn a_taken_address_stops_the_start_and_is_named() {
    let engine = start(fast()).await;
    let http = Engine::start(EngineConfig {
        listen: engine.address(),
        ..fast()
    })
    .await
    .unwrap_err();
    assert_eq!(http.kind(), ErrorKind::Config);
    assert!(
        http.to_string().contains(&engine.address().to_string()),
        "{http}"
    );
    let mut config = fast();
    config.events.as_mut().unwrap().endpoint = engine.events_endpoint().unwrap().to_owned();
    let events = Engine::start(config).await.unwrap_err();
    assert!(events.to_string().contains("events.endpoint"), "{events}");
    engine.shutdown().await;
}

#[tokio::test]
async fn shutdown_cuts_streams_without_an_end_marker() {
    let engine = start(EngineConfig {
        decode_ms: 20.0,
        ..EngineConfig::ephemeral()
    })
    .await;
    let body = json!({"prompt": [1], "max_tokens": 10_000, "stream": true}).to_string();
    let mut response = send(&engine, "POST", "/v1/completions", &[], &body).await;
    response.frame().await.unwrap().unwrap();
    let begin = Instant::now();
    engine.shutdown().await;
    // Its 10,000 tokens take minutes.
    assert!(begin.elapsed() < Duration::from_secs(20));
    response.collect().await.unwrap_err();
}
