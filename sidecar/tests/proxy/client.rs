//! A client that sees the bytes.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    /// The body ended where its framing says it ends.
    pub(crate) complete: bool,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }
}

/// One connection to the proxy.
pub(crate) struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self {
            stream,
            buffer: Vec::new(),
        }
    }

    pub(crate) async fn send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) {
        let mut bytes = format!("{method} {path} HTTP/1.1\r\nhost: test\r\n").into_bytes();
        for (name, value) in headers {
            bytes.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
        }
        let framed = headers
            .iter()
            .any(|(name, _)| *name == "transfer-encoding" || *name == "content-length");
        if !framed && (!body.is_empty() || method == "POST") {
            bytes.extend_from_slice(format!("content-length: {}\r\n", body.len()).as_bytes());
        }
        bytes.extend_from_slice(b"\r\n");
        bytes.extend_from_slice(body);
        self.raw(&bytes).await;
    }

    /// Sends bytes as they are; the other side may have closed already.
    pub(crate) async fn raw(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes).await;
    }

    /// Reads an answer to its end.
    pub(crate) async fn answer(&mut self) -> Answer {
        self.answer_to("GET").await
    }

    pub(crate) async fn answer_to(&mut self, method: &str) -> Answer {
        let head = self.head().await;
        let mut answer = Answer {
            status: head[9..12].parse().unwrap(),
            head,
            body: Vec::new(),
            complete: false,
        };
        if method == "HEAD" || answer.status == 204 {
            answer.complete = true;
            return answer;
        }
        if answer.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk().await {
                if chunk.is_empty() {
                    answer.complete = true;
                    break;
                }
                answer.body.extend_from_slice(&chunk);
            }
        } else {
            let length: usize = answer
                .header("content-length")
                .map_or(0, |length| length.parse().unwrap());
            while self.buffer.len() < length && self.fill().await {}
            let length = length.min(self.buffer.len());
            answer.complete = answer.header("content-length") == Some(length.to_string().as_str());
            answer.body = self.buffer.drain(..length).collect();
        }
        answer
    }

    /// Reads the head of an answer.
    pub(crate) async fn head(&mut self) -> String {
        loop {
            if let Some(at) = self
                .buffer
                .windows(4)
                .position(|window| window == b"\r\n\r\n")
            {
                let head = self.buffer.drain(..at + 4).collect();
                return String::from_utf8(head).unwrap();
            }
            assert!(
                self.fill().await,
                "no answer: {:?}",
                String::from_utf8_lossy(&self.buffer)
            );
        }
    }

    /// Reads one chunk of a chunked body; `None` when the connection ends within the body.
    pub(crate) async fn chunk(&mut self) -> Option<Vec<u8>> {
        let line = loop {
            if let Some(at) = self.buffer.windows(2).position(|window| window == b"\r\n") {
                break at;
            }
            if !self.fill().await {
                return None;
            }
        };
        let size = std::str::from_utf8(&self.buffer[..line]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        while self.buffer.len() < line + 4 + size {
            if !self.fill().await {
                return None;
            }
        }
        let chunk = self.buffer[line + 2..line + 2 + size].to_vec();
        self.buffer.drain(..line + 4 + size);
        Some(chunk)
    }

    /// Reads so many bytes of a body and forgets them; false when the connection ends before.
    pub(crate) async fn skip(&mut self, bytes: usize) -> bool {
        let mut left = bytes;
        loop {
            let count = left.min(self.buffer.len());
            self.buffer.drain(..count);
            left -= count;
            if left == 0 {
                return true;
            }
            if !self.fill().await {
                return false;
            }
        }
    }

    /// Tells whether the other side closes, for which it has ten seconds.
    pub(crate) async fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        let read = self.stream.read(&mut byte);
        let read = tokio::time::timeout(Duration::from_secs(10), read).await;
        matches!(read, Ok(Ok(0) | Err(_)))
    }

    async fn fill(&mut self) -> bool {
        self.buffer.reserve(1 << 16);
        let read = tokio::time::timeout(
            Duration::from_secs(10),
            self.stream.read_buf(&mut self.buffer),
        )
        .await;
        read.expect("an answer within 10 seconds")
            .is_ok_and(|count| count > 0)
    }
}

pub(crate) async fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Answer {
    let mut client = Client::connect(address).await;
    client.send(method, path, headers, body).await;
    client.answer_to(method).await
}

pub(crate) async fn post(address: SocketAddr, path: &str, body: &str) -> Answer {
    request(
        address,
        "POST",
        path,
        &[("content-type", "application/json")],
        body.as_bytes(),
    )
    .await
}

/// A chat body of some 100 words that no other number shares.
pub(crate) fn chat(number: usize, stream: bool) -> String {
    let text = format!("question {number} ").repeat(50);
    format!(
        r#"{{"model":"m","stream":{stream},"messages":[{{"role":"user","content":"{text}"}}]}}"#
    )
}

pub(crate) const CHAT: &str = "/v1/chat/completions";

/// The median of how long something takes. The machine may be busy: it is measured anew until it is below a limit, ten times.
pub(crate) async fn median<F: Future<Output = ()>>(
    rounds: usize,
    limit: Duration,
    run: impl Fn() -> F,
) -> Duration {
    let mut best = Duration::MAX;
    for _ in 0..10 {
        let mut times = Vec::new();
        for _ in 0..rounds {
            let start = Instant::now();
            run().await;
            times.push(start.elapsed());
        }
        times.sort();
        best = best.min(times[times.len() / 2]);
        if best < limit {
            break;
        }
    }
    best
}
