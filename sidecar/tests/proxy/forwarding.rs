//! What passes, what does not, and how fast.

use std::time::Duration;

use crate::client::{CHAT, Client, chat, median, post, request};
use crate::mock::{Mock, Step, chunk, events_head, json, last_chunk};
use crate::setup::{admin, eventually, sidecar, sidecar_with};

/// Bytes that no encoder would leave alone.
fn noise(length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(length as u64);
    (0..length).map(|_| random.u8(..)).collect()
}

#[tokio::test]
async fn bodies_pass_byte_by_byte_in_both_directions() {
    let worker = Mock::start(|request| {
        let mut answer = format!(
            "HTTP/1.1 200 OK\r\nx-own: 1\r\ncontent-length: {}\r\n\r\n",
            request.body.len()
        )
        .into_bytes();
        answer.extend_from_slice(&request.body);
        vec![Step::Send(answer)]
    })
    .await;
    let handle = sidecar(&[&worker]).await;
    for size in [1, 1000, (32 << 10) + 1, (128 << 10) + 1, 1 << 20, 8 << 20] {
        let body = noise(size);
        let answer = request(handle.proxy_addr, "POST", "/v1/completions", &[], &body).await;
        assert_eq!((answer.status, answer.header("x-own")), (200, Some("1")));
        assert!(
            answer.complete && answer.body == body,
            "{size} bytes came back changed"
        );
        assert!(
            worker.seen().last().unwrap().body == body,
            "{size} bytes arrived changed"
        );
    }
    // JSON with everything that re-serialising would lose: spaces, order, escapes, doubled keys, number forms.
    let json = r#" { "b" : 1.0e+2 , "a":"\u00e9\/" , "a":2,"messages":[ {"role":"user","content":"x"} ]}  "#;
    let answer = post(handle.proxy_addr, CHAT, json).await;
    assert_eq!(answer.text(), json);
}

#[tokio::test]
async fn a_chunked_request_arrives_whole() {
    let worker = Mock::ok().await;
    let handle = sidecar(&[&worker]).await;
    let body = chat(1, false);
    let mut client = Client::connect(handle.proxy_addr).await;
    client
        .send(
            "POST",
            CHAT,
            &[("transfer-encoding", "chunked"), ("expect", "100-continue")],
            b"",
        )
        .await;
    let head = client.head().await;
    assert!(head.starts_with("HTTP/1.1 100"), "{head}");
    for byte in body.as_bytes() {
        client.raw(&chunk(&[*byte])).await;
    }
    client.raw(&last_chunk()).await;
    assert_eq!(client.answer().await.status, 200);
    let seen = &worker.seen()[0];
    assert_eq!(seen.body, body.as_bytes());
    assert_eq!(seen.header("expect"), None);
}

#[tokio::test]
async fn status_headers_and_body_of_errors_pass() {
    let worker =
        Mock::start(|_| vec![Step::Send(json(400, "{\"error\":{\"message\":\"no\"}}"))]).await;
    let handle = sidecar(&[&worker]).await;
    for body in [
        "{\"model\":",
        "{}",
        "",
        "not json",
        "{\"prompt\":\"\"}",
        "{\"messages\":[]}",
    ] {
        let answer = post(handle.proxy_addr, CHAT, body).await;
        assert_eq!(
            (answer.status, answer.text().as_str()),
            (400, "{\"error\":{\"message\":\"no\"}}")
        );
        assert_eq!(worker.seen().last().unwrap().body, body.as_bytes());
    }
    let answer = post(handle.proxy_addr, CHAT, &chat(1, false)).await;
    assert_eq!(answer.status, 400);
    eventually("a refused prompt is in no cache", || async {
        let workers = admin(&handle, "GET", "/v1/workers", "").await.json();
        let worker = &workers["workers"][0];
        worker["active_requests"] == 0 && worker["predicted_blocks"] == 0
    })
    .await;
}

#[tokio::test]
async fn any_method_and_path_passes() {
    let worker = Mock::start(|request| match &*request.method {
        "HEAD" => vec![Step::Send(
            b"HTTP/1.1 200 OK\r\ncontent-length: 77\r\n\r\n".to_vec(),
        )],
        "DELETE" => vec![Step::Send(b"HTTP/1.1 204 No Content\r\n\r\n".to_vec())],
        _ => vec![Step::Send(json(200, &request.path))],
    })
    .await;
    let handle = sidecar(&[&worker]).await;
    let mut client = Client::connect(handle.proxy_addr).await;
    for _ in 0..3 {
        client.send("GET", "/any/path?x=%20y", &[], b"").await;
        assert_eq!(client.answer().await.text(), "/any/path?x=%20y");
        client.send("HEAD", "/x", &[], b"").await;
        let answer = client.answer_to("HEAD").await;
        assert_eq!(
            (answer.status, answer.header("content-length")),
            (200, Some("77"))
        );
        client.send("DELETE", "/x", &[], b"").await;
        assert_eq!(client.answer_to("DELETE").await.status, 204);
    }
    let get = &worker.seen()[0];
    assert_eq!(
        (get.header("content-length"), get.header("host")),
        (None, Some(worker.address.to_string().as_str()))
    );
    let models = request(handle.proxy_addr, "GET", "/v1/models", &[], b"").await;
    assert_eq!(models.json()["object"], "list");
    assert_eq!(crate::setup::sum(&handle, "active_requests").await, 0.0);
    let cancelled =
        crate::setup::metric(&handle, "kvlane_cancelled_requests_total{worker=\"w1\"}").await;
    assert_eq!(
        cancelled, 0.0,
        "an answer without a body is no cancelled request"
    );
}

#[tokio::test]
async fn connections_to_the_worker_are_kept() {
    let worker = Mock::ok().await;
    let handle = sidecar_with(&[&worker], |config| {
        config.health_interval_seconds = 100.0;
        config.scrape_interval_seconds = 100.0;
    })
    .await;
    for number in 0..20 {
        assert_eq!(
            post(handle.proxy_addr, CHAT, &chat(number, false))
                .await
                .status,
            200
        );
    }
    // One may be taken by a question of the sidecar's own meanwhile.
    assert!(
        worker.connections() <= 2,
        "{} connections",
        worker.connections()
    );
}

#[tokio::test]
async fn a_client_cannot_choose_the_destination() {
    let trap = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = trap.local_addr().unwrap().to_string();
    let url = format!("http://{address}");
    let worker = Mock::ok().await;
    let handle = sidecar(&[&worker]).await;
    let headers = [
        ("x-prefiller-host-port", address.as_str()),
        ("x-prefiller-url", url.as_str()),
        ("x-gateway-destination-endpoint", address.as_str()),
        ("x-data-parallel-host-port", address.as_str()),
        ("x-kv-cache-source-host-port", address.as_str()),
        ("x-encoder-hosts-ports", address.as_str()),
        ("x-kept", "yes"),
    ];
    let body = chat(1, false);
    let answer = request(handle.proxy_addr, "POST", CHAT, &headers, body.as_bytes()).await;
    assert_eq!(answer.status, 200);
    // The absolute form names another host; only its path counts.
    let absolute = format!("{url}/v1/models");
    assert_eq!(
        request(handle.proxy_addr, "GET", &absolute, &[], b"")
            .await
            .status,
        200
    );
    let seen = &worker.seen()[0];
    assert_eq!(seen.header("x-kept"), Some("yes"));
    for (name, _) in &headers[..6] {
        assert_eq!(seen.header(name), None, "{name}");
    }
    let touched = tokio::time::timeout(Duration::from_millis(100), trap.accept()).await;
    assert!(
        touched.is_err(),
        "something connected to the address that the client named"
    );
    assert_eq!(
        request(handle.proxy_addr, "CONNECT", &address, &[], b"")
            .await
            .status,
        405
    );
}

#[tokio::test]
async fn handoff_fields_of_a_client_are_refused_by_name() {
    let worker = Mock::ok().await;
    let handle = sidecar(&[&worker]).await;
    for field in ["kv_transfer_params", "bootstrap_host"] {
        let body = format!(r#"{{"prompt":"x","{field}":{{"do_remote_prefill":true}}}}"#);
        let answer = post(handle.proxy_addr, "/v1/completions", &body).await;
        assert_eq!(answer.status, 400);
        assert!(
            answer.json()["error"]["message"]
                .as_str()
                .unwrap()
                .contains(field)
        );
    }
    assert_eq!(worker.count(), 0);
    let open = sidecar_with(&[&worker], |config| {
        config.allow_client_handoff_fields = true
    })
    .await;
    assert_eq!(
        post(
            open.proxy_addr,
            "/v1/completions",
            r#"{"kv_transfer_params":{}}"#
        )
        .await
        .status,
        200
    );
}

#[tokio::test]
async fn request_ids_pass_or_are_made() {
    let worker = Mock::ok().await;
    let handle = sidecar(&[&worker]).await;
    request(
        handle.proxy_addr,
        "POST",
        CHAT,
        &[("x-request-id", "mine")],
        b"{}",
    )
    .await;
    request(handle.proxy_addr, "POST", CHAT, &[], b"{}").await;
    let seen = worker.seen();
    assert_eq!(seen[0].header("x-request-id"), Some("mine"));
    assert!(
        seen[1]
            .header("x-request-id")
            .unwrap()
            .starts_with("kvlane-")
    );
}

#[tokio::test]
async fn bodies_above_the_limit_get_413_and_reach_no_worker() {
    let worker = Mock::ok().await;
    let handle = sidecar_with(&[&worker], |config| config.max_body_bytes = 1000).await;
    assert_eq!(
        post(handle.proxy_addr, CHAT, &"x".repeat(1000))
            .await
            .status,
        200
    );
    // Announced: refused before the body is read.
    let mut client = Client::connect(handle.proxy_addr).await;
    client
        .send("POST", CHAT, &[("content-length", "1001")], b"")
        .await;
    let answer = client.answer().await;
    assert_eq!(
        (answer.status, answer.json()["error"]["code"].as_str()),
        (413, Some("request_too_large"))
    );
    assert!(client.is_closed().await);
    // Not announced: refused when it goes beyond.
    let mut client = Client::connect(handle.proxy_addr).await;
    client
        .send("POST", CHAT, &[("transfer-encoding", "chunked")], b"")
        .await;
    for _ in 0..1001 {
        client.raw(&chunk(b"x")).await;
    }
    assert_eq!(client.answer().await.status, 413);
    assert_eq!(worker.count(), 1);
}

#[tokio::test]
async fn nothing_waits_for_a_delayed_acknowledgement() {
    // Head and first event in two writes, and an end in a third: with Nagle's algorithm on either side, the second small
    // packet would wait some 40 ms for the acknowledgement of the first.
    let worker = Mock::start(|request| {
        if request.path == CHAT {
            vec![
                Step::Send(events_head()),
                Step::Send(chunk(b"data: {}\n\n")),
                Step::Wait(Duration::from_millis(2)),
                Step::Send(chunk(b"data: [DONE]\n\n")),
                Step::Send(last_chunk()),
            ]
        } else {
            vec![Step::Send(json(200, "{}"))]
        }
    })
    .await;
    let handle = sidecar(&[&worker]).await;
    let body = chat(1, true);
    let address = handle.proxy_addr;
    let limit = Duration::from_millis(25);
    let first_byte = median(21, limit, || async {
        let mut client = Client::connect(address).await;
        client.send("POST", CHAT, &[], body.as_bytes()).await;
        client.head().await;
        client.chunk().await.unwrap();
    })
    .await;
    let large = "x".repeat(7500);
    let plain = median(21, limit, || async {
        request(address, "POST", "/v1/completions", &[], large.as_bytes()).await;
    })
    .await;
    assert!(first_byte < limit, "first byte after {first_byte:?}");
    assert!(plain < limit, "whole answer after {plain:?}");
}

#[tokio::test]
async fn debug_headers_come_only_when_asked_for() {
    let worker = Mock::ok().await;
    let handle = sidecar(&[&worker]).await;
    let answer = post(handle.proxy_addr, CHAT, &chat(1, false)).await;
    assert!(!answer.head.contains("x-kvlane"), "{}", answer.head);
    let handle = sidecar_with(&[&worker], |config| config.debug_headers = true).await;
    for (round, overlap) in [(0, false), (1, true)] {
        let answer = post(handle.proxy_addr, CHAT, &chat(1, false)).await;
        assert_eq!(answer.header("x-kvlane-worker"), Some("w1"));
        let blocks: u32 = answer
            .header("x-kvlane-overlap-blocks")
            .unwrap()
            .parse()
            .unwrap();
        assert_eq!(blocks > 0, overlap, "round {round}");
        assert_eq!(answer.header("x-kvlane-trust"), Some("unproven"));
        assert!(
            answer
                .header("x-kvlane-decision")
                .unwrap()
                .contains("policy=kv")
        );
    }
}

#[tokio::test]
async fn the_tenant_header_decides_the_salt_only_when_trusted() {
    let worker = Mock::ok().await;
    let handle = sidecar_with(&[&worker], |config| config.trusted_headers = true).await;
    let body = r#"{"cache_salt":"s2","messages":[]}"#;
    request(
        handle.proxy_addr,
        "POST",
        CHAT,
        &[("x-kvlane-tenant-salt", "s1")],
        body.as_bytes(),
    )
    .await;
    assert_eq!(
        worker.seen()[0].body,
        br#"{"cache_salt":"s1","messages":[]}"#
    );
    let handle = sidecar(&[&worker]).await;
    request(
        handle.proxy_addr,
        "POST",
        CHAT,
        &[("x-kvlane-tenant-salt", "s1")],
        body.as_bytes(),
    )
    .await;
    assert_eq!(worker.seen()[1].body, body.as_bytes());
}

#[tokio::test]
async fn a_model_that_one_worker_serves_goes_there() {
    let (one, two) = (Mock::ok().await, Mock::ok().await);
    one.set_models(r#"{"data":[{"id":"base","parent":null}]}"#);
    two.set_models(r#"{"data":[{"id":"base"},{"id":7},{"id":"tuned","parent":"base"}]}"#);
    let handle = sidecar(&[&one, &two]).await;
    eventually("models known", || async {
        let list = admin(&handle, "GET", "/v1/workers", "").await.json();
        list["workers"]
            .as_array()
            .unwrap()
            .iter()
            .all(|worker| worker["models"][0] == "base")
    })
    .await;
    for number in 0..10 {
        let body = chat(number, false).replace("\"m\"", "\"tuned\"");
        assert_eq!(post(handle.proxy_addr, CHAT, &body).await.status, 200);
    }
    assert_eq!((one.count(), two.count()), (0, 10));
}

#[tokio::test]
async fn no_way_of_writing_a_body_lets_it_choose_another_tenant() {
    let worker = Mock::ok().await;
    let handle = sidecar_with(&[&worker], |config| config.trusted_headers = true).await;
    let text = r#"{"cache_salt":"victim","messages":[]}"#;
    let wide: Vec<u8> = text.encode_utf16().flat_map(u16::to_be_bytes).collect();
    let bodies: [Vec<u8>; 5] = [
        br#"{"cache_salt":"victim","messages":[],"top_p":NaN}"#.to_vec(),
        br#"{"\ud800":1,"cache_salt":"victim","messages":[]}"#.to_vec(),
        [b"\xef\xbb\xbf", text.as_bytes()].concat(),
        [&b"\xfe\xff"[..], &wide].concat(),
        wide,
    ];
    let salted = [("x-kvlane-tenant-salt", "s1")];
    for path in [CHAT, "/v1/chat%2Fcompletions"] {
        for body in &bodies {
            let answer = request(handle.proxy_addr, "POST", path, &salted, body).await;
            assert_eq!(answer.status, 400, "{}", String::from_utf8_lossy(body));
        }
    }
    let twice = [
        ("x-kvlane-tenant-salt", "victim"),
        ("x-kvlane-tenant-salt", "s1"),
    ];
    let answer = request(handle.proxy_addr, "POST", CHAT, &twice, text.as_bytes()).await;
    assert_eq!(answer.status, 400);
    assert_eq!(worker.count(), 0);
    // A salt beyond ASCII counts like any other, and what carries no salt passes.
    let foreign = [("x-kvlane-tenant-salt", "tenañt")];
    request(handle.proxy_addr, "POST", CHAT, &foreign, text.as_bytes()).await;
    assert_eq!(
        worker.seen()[0].body,
        r#"{"cache_salt":"tenañt","messages":[]}"#.as_bytes()
    );
    let upload = b"--b\r\n\r\n{\"custom_id\": NaN, bootstrap_host}\r\n--b--";
    let answer = request(handle.proxy_addr, "POST", "/v1/files", &salted, upload).await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn handoff_fields_are_refused_in_every_encoding() {
    let worker = Mock::ok().await;
    let handle = sidecar(&[&worker]).await;
    let text = r#"{"prompt":"x","kv_transfer_params":{}}"#;
    let wide: Vec<u8> = text.encode_utf16().flat_map(u16::to_be_bytes).collect();
    for body in [
        [b"\xef\xbb\xbf", text.as_bytes()].concat(),
        [&b"\xfe\xff"[..], &wide].concat(),
        wide,
    ] {
        let answer = request(handle.proxy_addr, "POST", "/v1/completions", &[], &body).await;
        assert_eq!(answer.status, 400);
    }
    assert_eq!(worker.count(), 0);
}

#[tokio::test]
async fn a_path_that_leaves_no_room_for_the_workers_own_is_refused() {
    let worker = Mock::ok().await;
    let handle = sidecar(&[&worker]).await;
    let path = format!("/{}", "a".repeat(61_000));
    let answer = request(handle.proxy_addr, "GET", &path, &[], b"").await;
    assert_eq!(answer.status, 414);
    assert_eq!(answer.json()["error"]["code"], "uri_too_long");
    assert_eq!(worker.count(), 0);
}
