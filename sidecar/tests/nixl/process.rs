//! Processes of the `kvlane` command, and a client for them.

use std::fmt::Debug;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;

/// A running command and what it has said. Dropped, it is killed.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    said: Arc<Mutex<String>>,
    readers: Vec<std::thread::JoinHandle<()>>,
}

impl Running {
    pub(crate) fn start(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvlane"))
            .args(arguments)
            .env("RUST_LOG", "info")
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said = Arc::new(Mutex::new(String::new()));
        let streams: [Box<dyn Read + Send>; 2] = [
            Box::new(child.stderr.take().unwrap()),
            Box::new(child.stdout.take().unwrap()),
        ];
        let readers = streams.map(|stream| {
            let said = Arc::clone(&said);
            std::thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let mut said = said.lock();
                    said.push_str(&line);
                    said.push('\n');
                }
            })
        });
        Self {
            child,
            said,
            readers: readers.into(),
        }
    }

    pub(crate) fn said(&self) -> String {
        self.said.lock().clone()
    }

    /// Waits until it has said something; returns what follows it, up to the next quote or space.
    pub(crate) fn after(&self, words: &str) -> String {
        let find = || {
            let said = self.said();
            let (_, rest) = said.split_once(words)?;
            let end = rest.find(['"', ' ', '\n'])?;
            Some(rest[..end].to_owned())
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(found) = find() {
                return found;
            }
            assert!(Instant::now() < deadline, "no {words:?} in {}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Asks it to end; returns its exit code.
    pub(crate) fn stop(mut self) -> Option<i32> {
        let id = self.child.id().to_string();
        Command::new("kill").args(["-TERM", &id]).status().unwrap();
        self.wait()
    }

    /// Waits for its end and for all that it said; returns its exit code, none when a signal ended it.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                for reader in self.readers.drain(..) {
                    reader.join().unwrap();
                }
                return status.code();
            }
            assert!(
                Instant::now() < deadline,
                "it does not end: {}",
                self.said()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Tells whether it ended within the second that UCX may take to notice what became of a peer.
    pub(crate) fn has_ended(&mut self) -> bool {
        std::thread::sleep(Duration::from_secs(1));
        self.child.try_wait().unwrap().is_some()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends one request; returns the status and the body.
pub(crate) fn send(address: &str, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (status, plain(head, body))
}

pub(crate) fn post(address: &str, body: &Value) -> (u16, String) {
    send(address, "POST", "/v1/completions", &body.to_string())
}

/// Returns the value of a line of a metrics page.
pub(crate) fn metric<T: std::str::FromStr<Err: Debug>>(address: &str, name: &str) -> T {
    let page = send(address, "GET", "/metrics", "").1;
    let line = page.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("no {name} in {page}"))
        .trim()
        .parse()
        .unwrap()
}

/// Takes the chunks out of a body.
fn plain(head: &str, body: &str) -> String {
    if !head
        .to_ascii_lowercase()
        .contains("transfer-encoding: chunked")
    {
        return body.to_owned();
    }
    let (mut text, mut rest) = (String::new(), body);
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        text.push_str(&after[..size]);
        rest = &after[size..].trim_start_matches("\r\n");
    }
    text
}
