//! Workers that fail, before and after the first byte.

use std::time::{Duration, Instant};

use crate::client::{CHAT, Client, chat, post};
use crate::mock::{Hold, Mock, Step, chunk, events_head, json, last_chunk};
use crate::setup::{admin, eventually, metric, sidecar, sidecar_to, sidecar_with, sum};

/// An address where nothing listens.
fn nowhere() -> String {
    format!("http://{}", kvlane_tests::free_address())
}

fn deltas(count: usize) -> Vec<Step> {
    let mut steps = vec![Step::Send(events_head())];
    for number in 0..count {
        steps.push(Step::Send(chunk(
            format!("data: {{\"n\":{number}}}\n\n").as_bytes(),
        )));
    }
    steps
}

#[tokio::test]
async fn an_unreachable_worker_is_passed_over() {
    let worker = Mock::ok().await;
    let handle = sidecar_to(&[nowhere(), worker.url()], |config| {
        config.health_interval_seconds = 100.0
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
    assert_eq!(worker.count(), 20);
    assert_eq!(sum(&handle, "active_requests").await, 0.0);
}

#[tokio::test]
async fn a_reset_before_the_first_byte_is_retried_elsewhere() {
    let bad = Mock::start(|_| vec![Step::Reset]).await;
    let good = Mock::start(|_| vec![Step::Send(json(200, "{\"from\":\"good\"}"))]).await;
    let handle = sidecar_with(&[&bad, &good], |config| config.breaker_threshold = 1000).await;
    for number in 0..20 {
        let answer = post(handle.proxy_addr, CHAT, &chat(number, true)).await;
        assert_eq!(answer.text(), "{\"from\":\"good\"}");
    }
    assert!(bad.count() > 0, "the bad worker was never tried");
    assert_eq!(good.count(), 20);
    assert_eq!(sum(&handle, "active_requests").await, 0.0);
}

#[tokio::test]
async fn a_break_after_the_first_byte_is_one_error_event_and_no_retry() {
    for ending in [Step::Reset, Step::Close] {
        let script = move |_: &_| {
            let mut steps = deltas(3);
            steps.push(ending.clone());
            steps
        };
        let (one, two) = (Mock::start(script.clone()).await, Mock::start(script).await);
        let handle = sidecar(&[&one, &two]).await;
        let mut client = Client::connect(handle.proxy_addr).await;
        client
            .send("POST", CHAT, &[], chat(1, true).as_bytes())
            .await;
        let answer = client.answer().await;
        let text = answer.text();
        assert!(
            text.starts_with("data: {\"n\":0}\n\ndata: {\"n\":1}\n\ndata: {\"n\":2}\n\n"),
            "{text}"
        );
        let events: Vec<&str> = text.split_terminator("\n\n").collect();
        assert_eq!(events.len(), 4, "{text}");
        let error: serde_json::Value =
            serde_json::from_str(events[3].strip_prefix("data: ").unwrap()).unwrap();
        assert!(
            error["error"]["message"]
                .as_str()
                .unwrap()
                .contains("before it was complete")
        );
        assert!(!text.contains("[DONE]"));
        assert!(client.is_closed().await, "the connection goes on");
        assert_eq!(one.count() + two.count(), 1);
        assert_eq!(sum(&handle, "active_requests").await, 0.0);
    }
}

#[tokio::test]
async fn a_break_of_anything_else_cuts_the_body_off() {
    let worker = Mock::start(|_| {
        vec![
            Step::Send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"a\":".to_vec()),
            Step::Reset,
        ]
    })
    .await;
    let handle = sidecar(&[&worker]).await;
    let answer = post(handle.proxy_addr, CHAT, &chat(1, false)).await;
    assert!(!answer.complete);
    assert_eq!(answer.text(), "{\"a\":");
    assert_eq!(worker.count(), 1);
}

#[tokio::test]
async fn a_clean_end_without_the_marker_passes_and_is_counted() {
    let worker = Mock::start(|_| {
        let mut steps = deltas(2);
        steps.push(Step::Send(last_chunk()));
        steps
    })
    .await;
    let handle = sidecar(&[&worker]).await;
    let answer = post(handle.proxy_addr, CHAT, &chat(1, true)).await;
    assert!(answer.complete);
    assert_eq!(answer.text(), "data: {\"n\":0}\n\ndata: {\"n\":1}\n\n");
    assert_eq!(
        metric(&handle, "kvlane_incomplete_streams_total{worker=\"w1\"}").await,
        1.0
    );
}

#[tokio::test]
async fn a_kept_connection_that_the_worker_closed_is_replaced() {
    // Each answer is followed by a close without notice, so every kept connection is stale.
    let worker = Mock::start(|_| vec![Step::Send(json(200, "{}")), Step::Close]).await;
    let handle = sidecar_with(&[&worker], |config| config.breaker_threshold = 1).await;
    for number in 0..20 {
        assert_eq!(
            post(handle.proxy_addr, CHAT, &chat(number, false))
                .await
                .status,
            200,
            "request {number}"
        );
    }
    assert_eq!(worker.count(), 20);
}

#[tokio::test]
async fn without_any_worker_the_answer_says_so() {
    let handle = sidecar_to(&[], |_| {}).await;
    let answer = post(handle.proxy_addr, CHAT, &chat(1, false)).await;
    assert_eq!(
        (answer.status, answer.header("retry-after")),
        (503, Some("1"))
    );
    assert_eq!(answer.json()["error"]["code"], "no_eligible_worker");
    let message = answer.json()["error"]["message"].to_string();
    assert!(message.contains("there is none in the pool"), "{message}");
    let handle = sidecar_to(&[nowhere(), nowhere()], |config| {
        config.health_interval_seconds = 100.0
    })
    .await;
    handle
        .app()
        .fleet
        .members()
        .list()
        .iter()
        .for_each(|worker| assert!(worker.is_eligible() || worker.healthy() == Some(false)));
    let answer = post(handle.proxy_addr, CHAT, &chat(1, false)).await;
    // 502 when they were tried, 503 when the probe was faster.
    assert!(matches!(answer.status, 502 | 503), "{}", answer.status);
    assert!(answer.json()["error"]["message"].is_string());
    eventually("unready", || async {
        admin(&handle, "GET", "/readyz", "").await.status == 503
    })
    .await;
}

#[tokio::test]
async fn all_workers_failing_before_the_first_byte_is_a_502() {
    let (one, two) = (
        Mock::start(|_| vec![Step::Reset]).await,
        Mock::start(|_| vec![Step::Reset]).await,
    );
    // A kept connection that ends is taken for a stale one and replaced; without kept ones each worker sees it once.
    let handle = sidecar_with(&[&one, &two], |config| config.max_idle_connections = 0).await;
    let answer = post(handle.proxy_addr, CHAT, &chat(1, false)).await;
    assert_eq!(
        (answer.status, answer.json()["error"]["code"].as_str()),
        (502, Some("bad_gateway"))
    );
    assert_eq!((one.count(), two.count()), (1, 1), "each worker once");
}

#[tokio::test]
async fn removing_a_silent_worker_moves_the_request_within_a_second() {
    let mut quickest = Duration::MAX;
    // The machine may be busy: tried until it is quick.
    for _ in 0..10 {
        quickest = quickest.min(moves_after().await);
        if quickest < Duration::from_secs(1) {
            return;
        }
    }
    panic!("it moves after {quickest:?}");
}

/// How long after its silent worker was removed a request has its answer from another.
async fn moves_after() -> Duration {
    let silent = Mock::start(|_| vec![Step::Hang]).await;
    let handle = sidecar(&[&silent]).await;
    let address = handle.proxy_addr;
    let waiting = tokio::spawn(async move { post(address, CHAT, &chat(1, false)).await });
    eventually("sent", || async { silent.count() == 1 }).await;
    let other = Mock::ok().await;
    let body = format!(r#"{{"id":"w2","url":"{}"}}"#, other.url());
    assert_eq!(
        admin(&handle, "POST", "/v1/workers", &body).await.status,
        200
    );
    let start = Instant::now();
    assert_eq!(
        admin(&handle, "DELETE", "/v1/workers/w1", "").await.status,
        200
    );
    assert_eq!(waiting.await.unwrap().status, 200);
    let took = start.elapsed();
    eventually("upstream closed", || async { silent.abandoned() == 1 }).await;
    assert_eq!(other.count(), 1);
    took
}

#[tokio::test]
async fn a_draining_worker_finishes_its_stream_and_gets_nothing_new() {
    let worker = Mock::start(|_| {
        let mut steps = deltas(1);
        steps.push(Step::Wait(Duration::from_millis(300)));
        steps.push(Step::Send(chunk(b"data: [DONE]\n\n")));
        steps.push(Step::Send(last_chunk()));
        steps
    })
    .await;
    let other = Mock::ok().await;
    let handle = sidecar(&[&worker]).await;
    let mut client = Client::connect(handle.proxy_addr).await;
    client
        .send("POST", CHAT, &[], chat(1, true).as_bytes())
        .await;
    client.head().await;
    let body = format!(r#"{{"id":"w2","url":"{}"}}"#, other.url());
    admin(&handle, "POST", "/v1/workers", &body).await;
    assert_eq!(
        admin(&handle, "POST", "/v1/workers/w1/drain", "")
            .await
            .status,
        200
    );
    for number in 0..8 {
        assert_eq!(
            post(handle.proxy_addr, CHAT, &chat(number, false))
                .await
                .status,
            200
        );
    }
    assert_eq!((worker.count(), other.count()), (1, 8));
    let mut text = Vec::new();
    while let Some(piece) = client.chunk().await.filter(|piece| !piece.is_empty()) {
        text.extend(piece);
    }
    assert!(text.ends_with(b"data: [DONE]\n\n"));
}

#[tokio::test]
async fn the_breaker_opens_on_faults_alone() {
    let worker = Mock::ok().await;
    let handle = sidecar_with(&[&worker], |config| {
        // Longer than a busy machine stalls.
        config.breaker_cooldown_seconds = 1.5;
        config.health_interval_seconds = 100.0;
    })
    .await;
    let answer_with =
        |status: u16| worker.set_script(move |_| vec![Step::Send(json(status, "{}"))]);
    let state = || async {
        let list = admin(&handle, "GET", "/v1/workers", "").await.json();
        list["workers"][0]["breaker"].as_str().unwrap().to_owned()
    };
    let send = async |status: u16, times: usize| {
        answer_with(status);
        for _ in 0..times {
            assert_eq!(post(handle.proxy_addr, CHAT, "{}").await.status, status);
        }
    };
    send(400, 10).await;
    assert_eq!(state().await, "closed");
    send(503, 10).await;
    assert_eq!(state().await, "closed");
    send(500, 2).await;
    send(400, 1).await;
    send(500, 1).await;
    assert_eq!(state().await, "open");
    assert_eq!(
        post(handle.proxy_addr, CHAT, "{}").await.status,
        503,
        "an open breaker passes nothing"
    );
    eventually("half open", || async { state().await == "half_open" }).await;
    send(400, 1).await;
    assert_eq!(state().await, "half_open");
    send(200, 1).await;
    assert_eq!(state().await, "closed");
}

#[tokio::test]
async fn a_half_open_breaker_passes_one_request_at_a_time() {
    let worker = Mock::start(|_| vec![Step::Send(json(500, "{}"))]).await;
    let handle = sidecar_with(&[&worker], |config| {
        config.breaker_cooldown_seconds = 0.2;
        config.health_interval_seconds = 100.0;
    })
    .await;
    for _ in 0..3 {
        post(handle.proxy_addr, CHAT, "{}").await;
    }
    let hold = Hold::new();
    let held = hold.clone();
    worker.set_script(move |_| vec![Step::Until(held.clone()), Step::Send(json(200, "{}"))]);
    eventually("half open", || async {
        let list = admin(&handle, "GET", "/v1/workers", "").await.json();
        list["workers"][0]["breaker"] == "half_open"
    })
    .await;
    let address = handle.proxy_addr;
    let mut requests = tokio::task::JoinSet::new();
    for _ in 0..5 {
        requests.spawn(async move { post(address, CHAT, "{}").await.status });
    }
    // The one that is passed is answered after the others.
    let mut statuses = Vec::new();
    while let Some(status) = requests.join_next().await {
        statuses.push(status.unwrap());
        if statuses.len() == 4 {
            hold.release(2);
        }
    }
    assert_eq!(statuses, [503, 503, 503, 503, 200]);
    assert_eq!(post(address, CHAT, "{}").await.status, 200, "closed again");
}

#[tokio::test]
async fn silence_is_bounded_before_and_after_the_first_byte() {
    let worker = Mock::start(|_| vec![Step::Hang]).await;
    let handle = sidecar_with(&[&worker], |config| config.first_byte_timeout_seconds = 0.3).await;
    let answer = post(handle.proxy_addr, CHAT, &chat(1, false)).await;
    assert_eq!(
        (answer.status, answer.json()["error"]["code"].as_str()),
        (504, Some("upstream_timeout"))
    );
    worker.set_script(|_| {
        let mut steps = deltas(1);
        steps.push(Step::Hang);
        steps
    });
    let handle = sidecar_with(&[&worker], |config| {
        config.response_idle_timeout_seconds = 0.3
    })
    .await;
    let answer = post(handle.proxy_addr, CHAT, &chat(1, true)).await;
    assert!(
        answer.text().contains("nothing came for 0.3 seconds"),
        "{}",
        answer.text()
    );
    eventually("both upstream connections end", || async {
        worker.abandoned() == 2
    })
    .await;
}

#[tokio::test]
async fn an_unhealthy_worker_is_not_chosen_and_comes_back() {
    let (one, two) = (Mock::ok().await, Mock::ok().await);
    let handle = sidecar(&[&one, &two]).await;
    one.set_health(503);
    let healthy = || async {
        let list = admin(&handle, "GET", "/v1/workers", "").await.json();
        list["workers"][0]["healthy"] == true
    };
    eventually("down", || async { !healthy().await }).await;
    for number in 0..10 {
        post(handle.proxy_addr, CHAT, &chat(number, false)).await;
    }
    assert_eq!(one.count(), 0);
    one.set_health(200);
    eventually("up", healthy).await;
    for number in 10..30 {
        post(handle.proxy_addr, CHAT, &chat(number, false)).await;
    }
    assert!(one.count() > 0);
}

#[tokio::test]
async fn what_becomes_of_a_removed_worker_says_nothing_about_its_successor() {
    let script = |_: &_| {
        let mut steps = deltas(1);
        steps.push(Step::Wait(Duration::from_millis(400)));
        steps.push(Step::Reset);
        steps
    };
    let old = Mock::start(script).await;
    let handle = sidecar(&[&old]).await;
    let address = handle.proxy_addr;
    let streams: Vec<_> = (0..4)
        .map(|number| tokio::spawn(async move { post(address, CHAT, &chat(number, true)).await }))
        .collect();
    eventually("sent", || async { old.count() == 4 }).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(
        admin(&handle, "DELETE", "/v1/workers/w1", "").await.status,
        200
    );
    let new = Mock::ok().await;
    let body = format!(r#"{{"id":"w1","url":"{}"}}"#, new.url());
    assert_eq!(
        admin(&handle, "POST", "/v1/workers", &body).await.status,
        200
    );
    for stream in streams {
        // More of them break than open a breaker.
        assert!(stream.await.unwrap().text().contains("\"error\""));
    }
    for number in 0..5 {
        assert_eq!(post(address, CHAT, &chat(number, false)).await.status, 200);
    }
    assert_eq!(new.count(), 5);
    assert_eq!(sum(&handle, "active_requests").await, 0.0);
}

#[tokio::test]
async fn an_event_stream_that_cannot_take_an_error_event_is_cut_off() {
    for header in [
        "content-length: 400",
        "content-encoding: gzip\r\ntransfer-encoding: chunked",
    ] {
        let head =
            format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{header}\r\n\r\n");
        let worker = Mock::start(move |_| {
            let piece = b"data: 1\n\n";
            let piece = if head.contains("chunked") {
                chunk(piece)
            } else {
                piece.to_vec()
            };
            vec![
                Step::Send(head.clone().into_bytes()),
                Step::Send(piece),
                Step::Wait(Duration::from_millis(50)),
                Step::Reset,
            ]
        })
        .await;
        let handle = sidecar(&[&worker]).await;
        let mut client = Client::connect(handle.proxy_addr).await;
        client
            .send("POST", CHAT, &[], chat(1, true).as_bytes())
            .await;
        let answer = client.answer().await;
        assert_eq!(
            (answer.text().as_str(), answer.complete),
            ("data: 1\n\n", false)
        );
        assert_eq!(sum(&handle, "active_requests").await, 0.0);
    }
}

#[tokio::test]
async fn a_switch_of_protocols_that_nobody_asked_for_is_a_failure() {
    let worker = Mock::start(|_| {
        vec![Step::Send(
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"
                .to_vec(),
        )]
    })
    .await;
    let handle = sidecar(&[&worker]).await;
    let answer = post(handle.proxy_addr, CHAT, &chat(1, false)).await;
    assert_eq!(answer.status, 502);
    assert!(answer.text().contains("101"), "{}", answer.text());
}
