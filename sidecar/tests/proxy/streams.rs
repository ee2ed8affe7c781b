//! Event streams, cut in every way.

use std::time::Duration;

use crate::client::{CHAT, Client, chat, post};
use crate::mock::{Hold, Mock, Step, chunk, events_head, last_chunk};
use crate::setup::{metric, sidecar, sidecar_with};

const STREAM: &str = "data: {\"t\":\"日本\"}\n\ndata:{\"t\":\"🎉\"}\n\ndata: {\"usage\":{\"prompt_tokens\":160,\"prompt_tokens_details\":{\"cached_tokens\":64}}}\n\ndata: [DONE]\n\n";

fn script(pieces: &[&[u8]]) -> Vec<Step> {
    let mut steps = vec![Step::Send(events_head())];
    for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
        // Each piece is a packet of its own; time between them lets the proxy see them apart.
        steps.push(Step::Send(chunk(piece)));
        steps.push(Step::Wait(Duration::from_micros(200)));
    }
    steps.push(Step::Send(last_chunk()));
    steps
}

#[tokio::test]
async fn bytes_and_usage_survive_every_cut() {
    let worker = Mock::ok().await;
    let handle = sidecar(&[&worker]).await;
    let mut rounds = 0.0;
    for stream in [STREAM.to_owned(), STREAM.replace('\n', "\r\n")] {
        let mut cuts: Vec<Vec<Vec<u8>>> = Vec::new();
        for at in 0..=stream.len() {
            let (head, tail) = stream.as_bytes().split_at(at);
            cuts.push(vec![head.to_vec(), tail.to_vec()]);
        }
        cuts.push(stream.bytes().map(|byte| vec![byte]).collect());
        for pieces in cuts {
            let sent = pieces.clone();
            worker.set_script(move |_| script(&sent.iter().map(Vec::as_slice).collect::<Vec<_>>()));
            let answer = post(handle.proxy_addr, CHAT, &chat(1, true)).await;
            assert!(
                answer.complete && answer.body == stream.as_bytes(),
                "{pieces:?}"
            );
            rounds += 1.0;
        }
    }
    let reported = metric(&handle, "kvlane_reported_cached_tokens_sum{worker=\"w1\"}").await;
    assert_eq!(reported, 64.0 * rounds, "usage was not found in every run");
    assert_eq!(
        metric(&handle, "kvlane_incomplete_streams_total{worker=\"w1\"}").await,
        0.0
    );
}

#[tokio::test]
async fn each_piece_is_forwarded_when_it_arrives() {
    // The worker sends a piece when the client has the one before.
    let hold = Hold::new();
    let worker = {
        let hold = hold.clone();
        Mock::start(move |_| {
            let mut steps = vec![Step::Send(events_head())];
            for _ in 0..5 {
                steps.push(Step::Send(chunk(b"data: {}\n\n")));
                steps.push(Step::Until(hold.clone()));
            }
            steps.push(Step::Send(last_chunk()));
            steps
        })
        .await
    };
    let handle = sidecar(&[&worker]).await;
    let mut client = Client::connect(handle.proxy_addr).await;
    client
        .send("POST", CHAT, &[], chat(1, true).as_bytes())
        .await;
    client.head().await;
    for _ in 0..5 {
        assert_eq!(client.chunk().await.unwrap(), b"data: {}\n\n", "re-framed");
        hold.release(1);
    }
    assert_eq!(client.chunk().await.unwrap(), b"", "the end");
}

#[tokio::test]
async fn five_megabytes_without_a_line_end_pass() {
    let worker = Mock::start(|_| {
        let mut steps = vec![Step::Send(events_head()), Step::Send(chunk(b"data: "))];
        for _ in 0..80 {
            steps.push(Step::Send(chunk(&[b'x'; 65_536])));
        }
        steps.push(Step::Send(last_chunk()));
        steps
    })
    .await;
    let handle = sidecar(&[&worker]).await;
    let answer = post(handle.proxy_addr, CHAT, &chat(1, true)).await;
    assert_eq!(answer.body.len(), 6 + 80 * 65_536);
}

#[tokio::test]
async fn a_response_with_trailers_is_complete_and_keeps_its_connection() {
    let worker = Mock::start(|_| {
        let mut steps = vec![Step::Send(
            b"HTTP/1.1 200 OK\r\ntrailer: x-t\r\ntransfer-encoding: chunked\r\n\r\n".to_vec(),
        )];
        steps.push(Step::Send(chunk(b"{}")));
        steps.push(Step::Send(b"0\r\nx-t: 1\r\n\r\n".to_vec()));
        steps
    })
    .await;
    let handle = sidecar_with(&[&worker], |config| {
        config.health_interval_seconds = 100.0;
        config.scrape_interval_seconds = 100.0;
    })
    .await;
    for number in 0..5 {
        let answer = post(handle.proxy_addr, CHAT, &chat(number, false)).await;
        assert_eq!(answer.text(), "{}");
    }
    let series = "kvlane_cancelled_requests_total{worker=\"w1\"}";
    assert_eq!(metric(&handle, series).await, 0.0);
    // One may be taken by a question of the sidecar's own meanwhile.
    assert!(worker.connections() <= 2);
}
