//! A worker that answers questions as it is told, and remembers when it was asked.

#![expect(
    clippy::disallowed_methods,
    reason = "a test's tasks end with its runtime"
)]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The path whose answer is a stream of pieces, ten a second.
pub(crate) const STREAM: &str = "/stream";

/// A worker; stops listening when dropped.
pub(crate) struct Stub {
    pub(crate) url: String,
    said: Arc<Mutex<Said>>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Said {
    answers: HashMap<&'static str, String>,
    /// Paths whose questions are never answered.
    silent: Vec<&'static str>,
    /// Pieces of a stream.
    pieces: usize,
    /// A stream does not end.
    is_endless: bool,
    asked: Vec<(String, Instant)>,
}

impl Drop for Stub {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Stub {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let said = Arc::<Mutex<Said>>::default();
        let shared = Arc::clone(&said);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(answer_all(stream, Arc::clone(&shared)));
            }
        });
        let stub = Self { url, said, task };
        stub.said.lock().answers.insert("/health", String::new());
        stub
    }

    pub(crate) fn say(&self, path: &'static str, body: &Value) {
        self.said.lock().answers.insert(path, body.to_string());
    }

    pub(crate) fn say_metrics(&self, text: &str) {
        self.said.lock().answers.insert("/metrics", text.to_owned());
    }

    pub(crate) fn fall_silent(&self, path: &'static str) {
        self.said.lock().silent.push(path);
    }

    /// Answers a path again; with 404 where it has no body.
    pub(crate) fn answer(&self, path: &'static str, body: Option<&Value>) {
        let mut said = self.said.lock();
        said.silent.retain(|silent| *silent != path);
        said.answers.remove(path);
        if let Some(body) = body {
            said.answers.insert(path, body.to_string());
        }
    }

    pub(crate) fn stream(&self, pieces: usize) {
        self.said.lock().pieces = pieces;
    }

    /// Streams go on after their pieces, until they need not.
    pub(crate) fn go_on(&self, is_endless: bool) {
        self.said.lock().is_endless = is_endless;
    }

    /// When a path was asked for.
    pub(crate) fn asked(&self, path: &str) -> Vec<Instant> {
        let said = self.said.lock();
        let asked = said.asked.iter().filter(|(of, _)| of == path);
        asked.map(|(_, at)| *at).collect()
    }
}

async fn answer_all(mut stream: TcpStream, said: Arc<Mutex<Said>>) {
    let mut head = Vec::new();
    loop {
        while !head.ends_with(b"\r\n\r\n") {
            let Ok(byte) = stream.read_u8().await else {
                return;
            };
            head.push(byte);
        }
        let text = String::from_utf8(std::mem::take(&mut head)).unwrap();
        let target = text.split(' ').nth(1).unwrap();
        let path = target.split('?').next().unwrap().to_owned();
        let (found, is_silent, pieces) = {
            let mut said = said.lock();
            said.asked.push((path.clone(), Instant::now()));
            let is_silent = said.silent.iter().any(|silent| *silent == path);
            (said.answers.get(&*path).cloned(), is_silent, said.pieces)
        };
        if is_silent {
            // Until the other side gives up.
            let _ = stream.read_u8().await;
            return;
        }
        let sent = if path == STREAM {
            send_pieces(&mut stream, pieces, &said).await
        } else {
            let status = if found.is_some() { 200 } else { 404 };
            let body = found.unwrap_or_default();
            let length = body.len();
            let answer = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n{body}");
            stream.write_all(answer.as_bytes()).await
        };
        if sent.is_err() {
            return;
        }
    }
}

async fn send_pieces(
    stream: &mut TcpStream,
    pieces: usize,
    said: &Mutex<Said>,
) -> std::io::Result<()> {
    let head = b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head).await?;
    for _ in 0..pieces {
        stream.write_all(b"1\r\n.\r\n").await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    while said.lock().is_endless {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stream.write_all(b"0\r\n\r\n").await
}
