//! What the proxy adds to a request: `cargo bench -p kvlane-sidecar --bench proxy_overhead`.
//!
//! Two workers that answer at once, and `kvlane serve` before them as a process of its own, choosing by prefix in text mode.
//! One client sends the same chats alternately to a worker and through the proxy, one at a time. Printed are the medians,
//! their difference, and the proxy's CPU time. `--test` (as `cargo test` passes it) sends a few and checks the bytes.

#![expect(clippy::print_stdout, reason = "a bench prints its result")]
#![expect(clippy::unwrap_used, reason = "what fails to unwrap fails the bench")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Sizes of the chat bodies, in bytes.
const BODIES: [usize; 2] = [7_500, 158_000];

fn main() {
    let quick = std::env::args().any(|argument| argument == "--test");
    let pairs = if quick { 20 } else { 3_000 };
    let workers = [start_worker(), start_worker()];
    let proxy = Proxy::start(&workers);
    println!(
        "{:<26} {:>12} {:>12} {:>12} {:>22}",
        "chat", "direct p50", "routed p50", "added p50", "proxy CPU / 1,000"
    );
    for bytes in BODIES {
        for streamed in [false, true] {
            let pairs = if bytes > 100_000 { pairs / 5 } else { pairs };
            let row = Row::measure(&proxy, workers[0], bytes, streamed, pairs);
            row.print(bytes, streamed);
        }
    }
}

struct Row {
    direct: Duration,
    routed: Duration,
    cpu_per_request: f64,
}

impl Row {
    fn measure(
        proxy: &Proxy,
        worker: SocketAddr,
        bytes: usize,
        streamed: bool,
        pairs: usize,
    ) -> Self {
        let (mut direct, mut routed) = (Client::connect(worker), Client::connect(proxy.listen));
        let (mut direct_times, mut routed_times) = (Vec::new(), Vec::new());
        let warm_up = pairs / 10;
        let mut cpu = 0.0;
        for pair in 0..warm_up + pairs {
            if pair == warm_up {
                cpu = proxy.cpu_seconds();
            }
            let body = chat(bytes, streamed, pair);
            let (without, plain) = direct.send(&body);
            let (with, proxied) = routed.send(&body);
            assert_eq!(plain, proxied, "the answer's bytes changed on the way");
            if pair >= warm_up {
                direct_times.push(without);
                routed_times.push(with);
            }
        }
        Self {
            direct: median(direct_times),
            routed: median(routed_times),
            cpu_per_request: (proxy.cpu_seconds() - cpu) / pairs as f64,
        }
    }

    fn print(&self, bytes: usize, streamed: bool) {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1_000.0;
        let kind = if streamed {
            "first byte streamed"
        } else {
            "whole answer"
        };
        println!(
            "{:<26} {:>9.3} ms {:>9.3} ms {:>9.3} ms {:>20.3} s",
            format!("{:.1} KB, {kind}", bytes as f64 / 1_000.0),
            milliseconds(self.direct),
            milliseconds(self.routed),
            milliseconds(self.routed) - milliseconds(self.direct),
            self.cpu_per_request * 1_000.0,
        );
    }
}

/// `kvlane serve` as a process; killed when dropped.
struct Proxy {
    child: Child,
    listen: SocketAddr,
}

impl Proxy {
    fn start(workers: &[SocketAddr; 2]) -> Self {
        let (listen, admin) = (free_address(), free_address());
        let worker = |id: usize| format!("id=w{id},url=http://{}", workers[id]);
        let child = Command::new(env!("CARGO_BIN_EXE_kvlane"))
            .args([
                "serve",
                "--listen",
                &listen.to_string(),
                "--admin",
                &admin.to_string(),
            ])
            .args(["--worker", &worker(0), "--worker", &worker(1)])
            .env("RUST_LOG", "error")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let proxy = Self { child, listen };
        let started = Instant::now();
        while !is_ready(admin) {
            assert!(
                started.elapsed() < Duration::from_secs(30),
                "the proxy is not ready"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        proxy
    }

    /// User and system time of the process so far (fields 14 and 15 of `/proc/PID/stat`, in hundredths of a second).
    fn cpu_seconds(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let after_name = stat.rsplit_once(')').unwrap().1;
        let ticks = after_name.split_whitespace().skip(11).take(2);
        ticks
            .map(|ticks| ticks.parse::<f64>().unwrap())
            .sum::<f64>()
            / 100.0
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn is_ready(admin: SocketAddr) -> bool {
    let Ok(mut stream) = TcpStream::connect(admin) else {
        return false;
    };
    stream
        .write_all(b"GET /readyz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).is_ok() && answer.starts_with("HTTP/1.1 200")
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
}

/// A kept connection on which one request follows the other.
struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        Self {
            stream,
            buffer: vec![0; 64 << 10],
        }
    }

    /// Returns the time until the first byte of the body, and the body without its framing.
    fn send(&mut self, body: &[u8]) -> (Duration, Vec<u8>) {
        let mut request = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        request.extend_from_slice(body);
        let started = Instant::now();
        self.stream.write_all(&request).unwrap();
        let mut answer = Vec::new();
        let mut first = None;
        loop {
            let read = self.stream.read(&mut self.buffer).unwrap();
            assert!(read > 0, "the connection ended early");
            answer.extend_from_slice(&self.buffer[..read]);
            let Some(head) = find(&answer, b"\r\n\r\n").map(|at| at + 4) else {
                continue;
            };
            if answer.len() > head {
                first.get_or_insert_with(|| started.elapsed());
            }
            if let Some(body) = whole_body(&answer, head) {
                return (first.unwrap(), body);
            }
        }
    }
}

/// Returns the body when it is complete.
fn whole_body(answer: &[u8], head: usize) -> Option<Vec<u8>> {
    let headers = String::from_utf8_lossy(&answer[..head]).to_lowercase();
    assert!(headers.starts_with("http/1.1 200"), "{headers}");
    if let Some(length) = headers.split("content-length: ").nth(1) {
        let length: usize = length.split("\r\n").next().unwrap().parse().unwrap();
        return (answer.len() >= head + length).then(|| answer[head..head + length].to_vec());
    }
    let mut rest = &answer[head..];
    let mut body = Vec::new();
    loop {
        let line = find(rest, b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap(), 16).unwrap();
        rest = rest.get(line + 2..)?;
        if size == 0 {
            return Some(body);
        }
        body.extend_from_slice(rest.get(..size)?);
        rest = rest.get(size + 2..)?;
    }
}

fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len())
        .position(|window| window == wanted)
}

/// A chat of about `bytes` bytes whose last message is new each time.
fn chat(bytes: usize, streamed: bool, number: usize) -> Vec<u8> {
    let system = "You are a helpful assistant that answers in short and clear sentences. "
        .repeat(bytes / 72);
    format!(
        r#"{{"model":"m","stream":{streamed},"messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":"Question number {number}."}}]}}"#
    )
    .into_bytes()
}

/// Starts a worker that answers every request at once, a thread for each connection.
fn start_worker() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            std::thread::spawn(move || serve(stream.unwrap()));
        }
    });
    address
}

fn serve(mut stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    let mut buffer = vec![0; 256 << 10];
    let mut request = Vec::new();
    while let Ok(read) = stream.read(&mut buffer) {
        if read == 0 {
            return;
        }
        request.extend_from_slice(&buffer[..read]);
        let Some(head) = find(&request, b"\r\n\r\n").map(|at| at + 4) else {
            continue;
        };
        let headers = String::from_utf8_lossy(&request[..head]).to_lowercase();
        let length = headers.split("content-length: ").nth(1);
        let length = length.map_or(0, |text| {
            text.split("\r\n").next().unwrap().parse().unwrap()
        });
        if request.len() < head + length {
            continue;
        }
        let streamed = find(
            &request[head..(head + 64).min(head + length)],
            b"\"stream\":true",
        )
        .is_some();
        if stream.write_all(&answer(streamed)).is_err() {
            return;
        }
        request.clear();
    }
}

fn answer(streamed: bool) -> Vec<u8> {
    let usage = r#""usage":{"prompt_tokens":1500,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":0}}"#;
    if !streamed {
        let body = format!(
            r#"{{"id":"c","object":"chat.completion","choices":[{{"message":{{"content":"yes"}}}}],{usage}}}"#
        );
        return format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .into_bytes();
    }
    let mut text =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            .to_owned();
    let events = [
        r#"data: {"choices":[{"delta":{"content":"y"}}]}"#.to_owned(),
        r#"data: {"choices":[{"delta":{"content":"es"}}]}"#.to_owned(),
        format!(r#"data: {{"choices":[],{usage}}}"#),
        "data: [DONE]".to_owned(),
    ];
    for event in events {
        text.push_str(&format!("{:x}\r\n{event}\n\n\r\n", event.len() + 2));
    }
    text.push_str("0\r\n\r\n");
    text.into_bytes()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
