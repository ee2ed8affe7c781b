//! What scenarios across processes share: the binary, ports, a plain HTTP client, and waiting with a deadline.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Longest wait for anything: generous, since the tests share two cores with each other.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// A running `kvlane` process, killed when dropped.
#[derive(Debug)]
pub struct Process(Child);

impl Process {
    /// Starts `kvlane` with the given arguments.
    ///
    /// # Panics
    /// When the binary has not been built beside the test.
    #[must_use]
    pub fn start(arguments: &[&str]) -> Self {
        let child = command(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn();
        Self(child.expect("the kvlane binary starts"))
    }

    /// Kills the process as a crash would.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    /// Asks the process to end, and returns its exit code.
    ///
    /// # Panics
    /// When it does not end before the deadline.
    pub fn terminate(&mut self) -> Option<i32> {
        let _ = Command::new("kill").arg(self.0.id().to_string()).status();
        let started = Instant::now();
        while started.elapsed() < DEADLINE {
            if let Ok(Some(status)) = self.0.try_wait() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("kvlane did not end after SIGTERM");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs `kvlane` to its end and returns what it printed.
///
/// # Panics
/// When the binary has not been built beside the test.
#[must_use]
pub fn run(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the kvlane binary runs")
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.args(arguments).env("RUST_LOG", "warn");
    command
}

/// The binary under test: `KVLANE_BIN`, or the one built beside this test (`cargo build -p kvlane-sidecar`).
fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("KVLANE_BIN") {
        return path.into();
    }
    let test = std::env::current_exe().expect("a test knows its path");
    let folder = test
        .ancestors()
        .nth(2)
        .expect("tests lie in target/PROFILE/deps");
    let path = folder.join("kvlane");
    assert!(
        path.exists(),
        "{} is missing: build it with `cargo build -p kvlane-sidecar`, or set KVLANE_BIN",
        path.display()
    );
    path
}

/// Returns a loopback address of a [`free_port`].
#[must_use]
pub fn free_address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], free_port()))
}

/// Returns a port that nothing listens on, and that this process has not been given before.
///
/// Below the range that Linux takes for outgoing connections, or one of those could take it first.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn free_port() -> u16 {
    const FIRST: u32 = 10_000;
    const PORTS: u32 = 22_000;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Test programs that run at the same time begin at different places.
    let begin = std::process::id().wrapping_mul(61);
    for _ in 0..PORTS {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = FIRST + begin.wrapping_add(step) % PORTS;
        let port = u16::try_from(port).expect("below 32,768");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no port is free");
}

/// One HTTP answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Header block, names in lower case.
    pub headers: String,
    /// Body as text.
    pub body: String,
}

impl Answer {
    /// Parses the body.
    ///
    /// # Panics
    /// When it is not JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body)
            .unwrap_or_else(|error| panic!("{error} in {} {}", self.status, self.body))
    }

    /// Returns a header's value.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key == name).then(|| value.trim())
        })
    }
}

/// Sends one request on a connection of its own; `None` when nobody answers.
#[must_use]
pub fn request(port: u16, method: &str, path: &str, body: &str) -> Option<Answer> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(2)).ok()?;
    stream.set_read_timeout(Some(DEADLINE)).ok()?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(body.as_bytes()).ok()?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let headers: String = head
        .lines()
        .skip(1)
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| format!("{}:{value}\n", name.to_lowercase()))
        .collect();
    let chunked = headers.contains("transfer-encoding: chunked");
    let body = if chunked {
        unchunk(body)
    } else {
        body.to_owned()
    };
    Some(Answer {
        status,
        headers,
        body,
    })
}

/// Joins the chunks of a chunked body.
fn unchunk(mut rest: &str) -> String {
    let mut body = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap_or(0);
        let Some(chunk) = after.get(..size).filter(|chunk| !chunk.is_empty()) else {
            break;
        };
        body.push_str(chunk);
        rest = after.get(size + 2..).unwrap_or_default();
    }
    body
}

/// Waits until `probe` gives something.
///
/// # Panics
/// With `what` when it does not before the deadline.
pub fn eventually<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    while started.elapsed() < DEADLINE {
        if let Some(found) = probe() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(25));
    }
    panic!("never happened: {what}");
}
