//! A small HTTP client and a small event subscriber.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper::{Request, Response, StatusCode, body::Incoming};
use hyper_util::rt::TokioIo;
use kvlane::event::KvEvent;
use kvlane::event::wire::decode_batch;
use kvlane_sidecar::engine::EngineHandle;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::eventually;

/// An answer whose body has been read.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text)
            .unwrap_or_else(|error| panic!("{error} in {:?}", self.text))
    }

    /// Returns the payloads of the server-sent events, the end marker as a string.
    pub(crate) fn events(&self) -> Vec<Value> {
        assert!(self.text.ends_with("\n\n"), "{:?}", self.text);
        let events = self.text.trim_end().split("\n\n");
        events
            .map(|event| match event.strip_prefix("data: ").unwrap() {
                "[DONE]" => json!("[DONE]"),
                data => serde_json::from_str(data).unwrap(),
            })
            .collect()
    }
}

/// Sends one request on a connection of its own and returns the head of the answer.
pub(crate) async fn send(
    engine: &EngineHandle,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Response<Incoming> {
    let stream = TcpStream::connect(engine.address()).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "engine");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request
        .body(Full::new(Bytes::from(body.to_owned())))
        .unwrap();
    sender.send_request(request).await.unwrap()
}

pub(crate) async fn read(response: Response<Incoming>) -> Answer {
    let status = response.status();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    Answer {
        status,
        text: String::from_utf8(bytes.to_vec()).unwrap(),
    }
}

pub(crate) async fn get(engine: &EngineHandle, path: &str) -> Answer {
    read(send(engine, "GET", path, &[], "").await).await
}

pub(crate) async fn post(engine: &EngineHandle, path: &str, body: &Value) -> Answer {
    let headers = [("content-type", "application/json")];
    read(send(engine, "POST", path, &headers, &body.to_string()).await).await
}

/// Completes a prompt of token ids and returns how many of them were cached.
pub(crate) async fn complete(
    engine: &EngineHandle,
    prompt: impl IntoIterator<Item = u32>,
    max_tokens: u32,
) -> u64 {
    let prompt: Vec<u32> = prompt.into_iter().collect();
    let answer = post(
        engine,
        "/v1/completions",
        &json!({"prompt": prompt, "max_tokens": max_tokens}),
    )
    .await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    cached_tokens(&answer.json())
}

pub(crate) fn cached_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap()
}

/// One message of the event stream.
#[derive(Debug, PartialEq)]
pub(crate) struct Batch {
    pub(crate) topic: Vec<u8>,
    pub(crate) seq: u64,
    pub(crate) events: Vec<KvEvent>,
}

/// Subscribes to all topics.
pub(crate) fn subscribe(engine: &EngineHandle) -> zmq::Socket {
    let socket = zmq::Context::new().socket(zmq::SUB).unwrap();
    socket.set_rcvtimeo(20_000).unwrap();
    socket.set_linger(0).unwrap();
    socket.set_subscribe(b"").unwrap();
    socket.connect(engine.events_endpoint().unwrap()).unwrap();
    socket
}

/// Takes the next live batch; `None` after the socket's time limit.
pub(crate) fn next_batch(socket: &zmq::Socket) -> Option<Batch> {
    let parts = socket.recv_multipart(0).ok()?;
    let [topic, seq, payload] = parts.as_slice() else {
        panic!("{} parts", parts.len());
    };
    Some(batch(topic, seq, payload))
}

pub(crate) fn batch(topic: &[u8], seq: &[u8], payload: &[u8]) -> Batch {
    let decoded = decode_batch(payload).unwrap();
    assert!(decoded.skipped.is_empty(), "{decoded:?}");
    assert_eq!(decoded.dp_rank, Some(0));
    assert!(decoded.ts > 1.7e9);
    Batch {
        topic: topic.to_vec(),
        seq: u64::from_be_bytes(seq.try_into().unwrap()),
        events: decoded.events,
    }
}

/// Asks for everything from `start` on and returns the answer's messages, delimiter and end marker included.
pub(crate) fn replay(engine: &EngineHandle, start: u64) -> Vec<Vec<Vec<u8>>> {
    let socket = zmq::Context::new().socket(zmq::DEALER).unwrap();
    socket.set_rcvtimeo(20_000).unwrap();
    socket.set_linger(0).unwrap();
    socket.connect(engine.replay_endpoint().unwrap()).unwrap();
    socket
        .send_multipart([&[][..], &start.to_be_bytes()], 0)
        .unwrap();
    let mut messages = Vec::new();
    loop {
        let message = socket.recv_multipart(0).unwrap();
        let ends = message[message.len() - 2] == [0xff; 8];
        messages.push(message);
        if ends {
            return messages;
        }
    }
}

/// Waits until the engine's publisher knows a subscriber.
pub(crate) async fn subscription_arrives(engine: &EngineHandle) {
    eventually("the subscription arrives", || engine.subscriptions() == 1).await;
}
