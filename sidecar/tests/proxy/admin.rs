//! The admin listener.

use kvlane_sidecar::config::{Config, Secret};
use serde_json::json;

use crate::client::{CHAT, chat, post, request};
use crate::mock::Mock;
use crate::setup::{admin, eventually, sidecar, sidecar_to, sidecar_with};

#[tokio::test]
async fn workers_come_and_go() {
    let (one, two) = (Mock::ok().await, Mock::ok().await);
    let handle = sidecar(&[&one]).await;
    post(handle.proxy_addr, CHAT, &chat(0, false)).await;
    let metrics = admin(&handle, "GET", "/metrics", "").await.text();
    assert!(metrics.contains("worker=\"w1\""));
    let add = json!({"id": "w2", "url": two.url(), "labels": {"zone": "a"}}).to_string();
    assert_eq!(
        admin(&handle, "POST", "/v1/workers", &add).await.status,
        200
    );
    assert_eq!(
        admin(&handle, "POST", "/v1/workers", &add).await.status,
        409
    );
    let list = admin(&handle, "GET", "/v1/workers", "").await.json();
    let ids: Vec<_> = list["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|worker| worker["id"].as_str().unwrap())
        .collect();
    assert_eq!(ids, ["w1", "w2"]);
    assert_eq!(list["workers"][1]["url"], two.url());
    assert_eq!(list["workers"][1]["labels"]["zone"], "a");
    assert_eq!(list["workers"][0]["trust"][0]["state"], "unproven");
    assert_eq!(
        admin(&handle, "DELETE", "/v1/workers/w1", "").await.status,
        200
    );
    assert_eq!(
        admin(&handle, "DELETE", "/v1/workers/w1", "").await.status,
        404
    );
    assert_eq!(
        admin(&handle, "POST", "/v1/workers/w1/clear", "")
            .await
            .status,
        404
    );
    for number in 0..4 {
        post(handle.proxy_addr, CHAT, &chat(number, false)).await;
    }
    assert_eq!((one.count(), two.count()), (1, 4));
    let metrics = admin(&handle, "GET", "/metrics", "").await.text();
    assert!(
        !metrics.contains("worker=\"w1\""),
        "series of a removed worker stay"
    );
    for (body, word) in [
        ("{}", "id"),
        (r#"{"id":"x"}"#, "url"),
        (r#"{"id":"x","url":"https://h:1"}"#, "https"),
        (r#"{"id":"x","url":"http://h:1","evnts":1}"#, "evnts"),
        ("[", "JSON"),
    ] {
        let answer = admin(&handle, "POST", "/v1/workers", body).await;
        assert_eq!(answer.status, 400);
        let message = answer.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned();
        assert!(message.contains(word), "{message}");
    }
}

#[tokio::test]
async fn overlap_and_clear_answer_from_the_index() {
    let worker = Mock::ok().await;
    let handle = sidecar(&[&worker]).await;
    let tokens: Vec<u32> = (0..64).collect();
    let body = json!({"prompt": tokens}).to_string();
    post(handle.proxy_addr, "/v1/completions", &body).await;
    let ask = json!({"tokens": tokens}).to_string();
    let answer = admin(&handle, "POST", "/v1/overlap", &ask).await.json();
    assert_eq!(answer["request_blocks"], 4);
    assert_eq!(answer["overlap"][0]["worker"], "w1");
    let other = json!({"tokens": tokens, "cache_salt": "s"}).to_string();
    assert_eq!(
        admin(&handle, "POST", "/v1/overlap", &other).await.json()["overlap"],
        json!([])
    );
    assert_eq!(
        admin(&handle, "POST", "/v1/workers/w1/clear", "")
            .await
            .status,
        200
    );
    assert_eq!(
        admin(&handle, "POST", "/v1/overlap", &ask).await.json()["overlap"],
        json!([])
    );
    for bad in [
        "{}",
        r#"{"tokens":[1],"prompt":"x"}"#,
        r#"{"tokens":[-1]}"#,
        r#"{"tokens":[4294967296]}"#,
        r#"{"tokens":"x"}"#,
    ] {
        let answer = admin(&handle, "POST", "/v1/overlap", bad).await;
        assert_eq!(answer.status, 400, "{bad}");
    }
    let decisions = admin(&handle, "GET", "/v1/decisions?limit=1", "")
        .await
        .json();
    assert_eq!(decisions["decisions"].as_array().unwrap().len(), 1);
    assert_eq!(
        admin(&handle, "GET", "/v1/decisions?limit=x", "")
            .await
            .status,
        400
    );
}

#[tokio::test]
async fn with_a_key_changing_calls_need_it() {
    let worker = Mock::ok().await;
    let handle = sidecar_with(&[&worker], |config| {
        config.admin_key = Some(Secret::new("a-long-secret".to_owned()));
    })
    .await;
    let calls = [
        ("POST", "/v1/workers", r#"{"id":"x","url":"http://h:1"}"#),
        ("DELETE", "/v1/workers/w1", ""),
        ("POST", "/v1/workers/w1/clear", ""),
        ("POST", "/v1/workers/w1/drain", ""),
    ];
    for (method, path, body) in calls {
        for headers in [
            &[][..],
            &[("authorization", "Bearer wrong")],
            &[("authorization", "a-long-secret")],
        ] {
            let answer = request(handle.admin_addr, method, path, headers, body.as_bytes()).await;
            assert_eq!(answer.status, 401, "{method} {path}");
        }
    }
    let list = admin(&handle, "GET", "/v1/workers", "").await.json();
    assert_eq!(list["workers"].as_array().unwrap().len(), 1);
    assert_eq!(list["workers"][0]["draining"], false);
    assert_eq!(worker.count(), 0, "a refused call reached a worker");
    let config = admin(&handle, "GET", "/v1/config", "").await.text();
    assert!(!config.contains("a-long-secret") && config.contains("admin_key"));
    let right = [("authorization", "bearer a-long-secret")];
    assert_eq!(
        request(
            handle.admin_addr,
            "POST",
            "/v1/workers/w1/drain",
            &right,
            b""
        )
        .await
        .status,
        200
    );
}

#[tokio::test]
async fn a_page_of_another_site_cannot_change_anything() {
    let worker = Mock::ok().await;
    let handle = sidecar(&[&worker]).await;
    let headers = [("origin", "http://evil.example")];
    // The client's own host is "test": a name that the page's owner lets point at this machine.
    for origin in ["http://evil.example", "http://test"] {
        let headers = [("origin", origin)];
        assert_eq!(
            request(handle.admin_addr, "DELETE", "/v1/workers/w1", &headers, b"")
                .await
                .status,
            403
        );
    }
    assert_eq!(
        request(handle.admin_addr, "GET", "/livez", &headers, b"")
            .await
            .status,
        200
    );
}

#[tokio::test]
async fn it_is_live_at_once_and_ready_when_a_worker_is() {
    let address = kvlane_tests::free_address();
    let handle = sidecar_to(&[format!("http://{address}")], |_| {}).await;
    assert_eq!(admin(&handle, "GET", "/livez", "").await.status, 200);
    assert_eq!(admin(&handle, "GET", "/readyz", "").await.status, 503);
    assert!(handle.admin_addr.ip().is_loopback());
    let worker = Mock::ok().await;
    let add = json!({"id": "w2", "url": worker.url()}).to_string();
    admin(&handle, "POST", "/v1/workers", &add).await;
    eventually("ready", || async {
        admin(&handle, "GET", "/readyz", "").await.status == 200
    })
    .await;
    assert_eq!(admin(&handle, "GET", "/nonsense", "").await.status, 404);
    assert_eq!(admin(&handle, "PUT", "/v1/workers", "").await.status, 405);
    let proxy = request(
        handle.proxy_addr,
        "POST",
        "/v1/workers",
        &[],
        add.as_bytes(),
    )
    .await;
    assert_eq!(
        proxy.json()["ok"],
        true,
        "the proxy has no admin calls; the worker answered"
    );
}

#[tokio::test]
async fn metrics_tell_every_state() {
    let worker = Mock::ok().await;
    let handle = sidecar(&[&worker]).await;
    post(handle.proxy_addr, CHAT, &chat(1, false)).await;
    let text = admin(&handle, "GET", "/metrics", "").await.text();
    for series in [
        "kvlane_ready 1",
        "kvlane_trust_state{worker=\"w1\",dp_rank=\"0\",state=\"unproven\"} 1",
        "kvlane_trust_state{worker=\"w1\",dp_rank=\"0\",state=\"exact\"} 0",
        "kvlane_breaker_state{worker=\"w1\",state=\"closed\"} 1",
        "kvlane_fidelity{worker=\"w1\",dp_rank=\"0\"} 1",
        "kvlane_index_blocks{worker=\"w1\",tier=\"device\"} 0",
        "kvlane_active_requests{worker=\"w1\"} 0",
        "kvlane_requests_total{endpoint=\"chat_completions\",worker=\"w1\",status=\"2xx\"} 1",
        "kvlane_decision_seconds_count 1",
        "kvlane_ttft_seconds_count{worker=\"w1\"} 1",
        "kvlane_tokenizer_degraded 0",
        "kvlane_prompts_total{mode=\"text\"} 1",
    ] {
        assert!(text.contains(series), "{series} is missing from\n{text}");
    }
    for line in text.lines() {
        assert!(
            line.starts_with("kvlane_") || line.starts_with("# "),
            "{line}"
        );
    }
}

#[tokio::test]
async fn a_missing_tokenizer_degrades_and_serves() {
    let worker = Mock::ok().await;
    let handle = sidecar_with(&[&worker], |config| {
        config.model = Some("/nonexistent/model".into())
    })
    .await;
    for number in 0..5 {
        assert_eq!(
            post(handle.proxy_addr, CHAT, &chat(number, false))
                .await
                .status,
            200
        );
    }
    let text = admin(&handle, "GET", "/metrics", "").await.text();
    assert!(
        text.contains("kvlane_tokenizer_degraded 1")
            && text.contains("kvlane_prompts_total{mode=\"text\"} 5")
    );
}

#[tokio::test]
async fn shutdown_finishes_open_requests() {
    use crate::mock::{Step, json};
    let worker = Mock::start(|_| {
        vec![
            Step::Wait(std::time::Duration::from_millis(300)),
            Step::Send(json(200, "{\"late\":true}")),
        ]
    })
    .await;
    let handle = sidecar_with(&[&worker], |config| config.shutdown_seconds = 30.0).await;
    let address = handle.proxy_addr;
    let open = tokio::spawn(async move { post(address, CHAT, "{}").await });
    eventually("sent", || async { worker.count() == 1 }).await;
    handle.shutdown().await;
    assert_eq!(open.await.unwrap().text(), "{\"late\":true}");
    assert!(
        tokio::net::TcpStream::connect(address).await.is_err(),
        "still accepting"
    );
}

#[tokio::test]
async fn an_address_in_use_is_named() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut config = Config::default();
    config.listen =
        kvlane_sidecar::net::HostPort::new("127.0.0.1", taken.local_addr().unwrap().port());
    let error = kvlane_sidecar::serve::start(config)
        .await
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("listen 127.0.0.1:"), "{error}");
}
