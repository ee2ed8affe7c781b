//! A worker that follows a script, byte by byte.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

/// What a worker does after it has read a request.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Send(Vec<u8>),
    Wait(Duration),
    /// Waits until a test lets it go on.
    Until(Hold),
    /// Stays silent until the other side closes.
    Hang,
    /// Ends the connection with a reset.
    Reset,
    /// Ends the connection in an orderly way.
    Close,
}

/// Where workers wait until a test lets them go on.
#[derive(Clone, Debug)]
pub(crate) struct Hold(Arc<Semaphore>);

impl Hold {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(0)))
    }

    /// Lets so many of the steps that wait, or will, go on.
    pub(crate) fn release(&self, steps: usize) {
        self.0.add_permits(steps);
    }

    async fn wait(&self) {
        self.0.acquire().await.unwrap().forget();
    }
}

/// A request as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Recorded {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    /// The connection that it came on, by its number.
    pub(crate) connection: usize,
}

impl Recorded {
    /// Returns the value of a header, by its lower-case name.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }
}

type Script = Arc<dyn Fn(&Recorded) -> Vec<Step> + Send + Sync>;

struct State {
    script: Mutex<Script>,
    health: Mutex<u16>,
    metrics: Mutex<String>,
    models: Mutex<String>,
    seen: Mutex<Vec<Recorded>>,
    /// Requests whose connection the other side ended while the worker was silent.
    abandoned: AtomicUsize,
    connections: AtomicUsize,
}

/// A worker; stops listening when dropped.
pub(crate) struct Mock {
    pub(crate) address: SocketAddr,
    state: Arc<State>,
    task: tokio::task::JoinHandle<()>,
}

impl Mock {
    pub(crate) async fn start(
        script: impl Fn(&Recorded) -> Vec<Step> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State {
            script: Mutex::new(Arc::new(script)),
            health: Mutex::new(200),
            metrics: Mutex::new(String::new()),
            models: Mutex::new(r#"{"object":"list","data":[]}"#.to_owned()),
            seen: Mutex::new(Vec::new()),
            abandoned: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
        });
        let shared = Arc::clone(&state);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, Arc::clone(&shared)));
            }
        });
        Self {
            address,
            state,
            task,
        }
    }

    /// A worker that answers everything with a small JSON body.
    pub(crate) async fn ok() -> Self {
        Self::start(|_| vec![Step::Send(json(200, "{\"ok\":true}"))]).await
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn set_script(
        &self,
        script: impl Fn(&Recorded) -> Vec<Step> + Send + Sync + 'static,
    ) {
        *self.state.script.lock() = Arc::new(script);
    }

    pub(crate) fn set_health(&self, status: u16) {
        *self.state.health.lock() = status;
    }

    pub(crate) fn set_metrics(&self, text: &str) {
        text.clone_into(&mut self.state.metrics.lock());
    }

    pub(crate) fn set_models(&self, text: &str) {
        text.clone_into(&mut self.state.models.lock());
    }

    /// Requests seen, without the sidecar's own questions.
    pub(crate) fn seen(&self) -> Vec<Recorded> {
        self.state.seen.lock().clone()
    }

    pub(crate) fn count(&self) -> usize {
        self.state.seen.lock().len()
    }

    pub(crate) fn abandoned(&self) -> usize {
        self.state.abandoned.load(Ordering::SeqCst)
    }

    /// Connections that requests came on, without those of the sidecar's own questions alone.
    pub(crate) fn connections(&self) -> usize {
        let numbers: BTreeSet<_> = self.seen().iter().map(|seen| seen.connection).collect();
        numbers.len()
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut stream: TcpStream, state: Arc<State>) {
    stream.set_nodelay(true).unwrap();
    let connection = state.connections.fetch_add(1, Ordering::SeqCst);
    let mut buffer = Vec::new();
    while let Some(request) = read_request(&mut stream, &mut buffer).await {
        let own = request.method == "GET" && matches!(&*request.path, "/health" | "/metrics");
        let models = request.method == "GET" && request.path == "/v1/models";
        let steps = if own {
            let (status, body) = if request.path == "/health" {
                (*state.health.lock(), String::new())
            } else {
                (200, state.metrics.lock().clone())
            };
            vec![Step::Send(json(status, &body))]
        } else if models {
            vec![Step::Send(json(200, &state.models.lock()))]
        } else if request.method == "GET" && DESCRIPTION.contains(&&*request.path) {
            vec![Step::Send(json(404, "{}"))]
        } else {
            state.seen.lock().push(Recorded {
                connection,
                ..request.clone()
            });
            let script = Arc::clone(&state.script.lock());
            script(&request)
        };
        if !run(&mut stream, steps, &state).await {
            return;
        }
    }
}

/// Where an engine is asked what it is.
const DESCRIPTION: [&str; 4] = [
    "/version",
    "/kv_event_sources",
    "/server_info?config_format=json",
    "/get_server_info",
];

/// Runs the steps; false when the connection is over.
async fn run(stream: &mut TcpStream, steps: Vec<Step>, state: &State) -> bool {
    for step in steps {
        match step {
            Step::Send(bytes) => {
                if stream.write_all(&bytes).await.is_err() {
                    state.abandoned.fetch_add(1, Ordering::SeqCst);
                    return false;
                }
            }
            Step::Wait(time) => tokio::time::sleep(time).await,
            Step::Until(hold) => hold.wait().await,
            Step::Hang => {
                let mut byte = [0];
                let _ = stream.read(&mut byte).await;
                state.abandoned.fetch_add(1, Ordering::SeqCst);
                return false;
            }
            Step::Reset => {
                // What was sent must arrive before the reset overtakes it.
                tokio::time::sleep(Duration::from_millis(20)).await;
                let _ = socket2_linger(stream);
                return false;
            }
            Step::Close => return false,
        }
    }
    true
}

#[expect(
    deprecated,
    reason = "a zero linger is wanted: it makes the close a reset, and it does not block"
)]
fn socket2_linger(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_linger(Some(Duration::ZERO))
}

async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Recorded> {
    let end = loop {
        if let Some(at) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        fill(stream, buffer).await?;
    };
    let head = String::from_utf8(buffer[..end].to_vec()).unwrap();
    buffer.drain(..end);
    let mut words = head.split(' ');
    let mut request = Recorded {
        method: words.next()?.to_owned(),
        path: words.next()?.to_owned(),
        body: Vec::new(),
        connection: 0,
        head,
    };
    assert!(
        request.header("transfer-encoding").is_none(),
        "the proxy announces lengths"
    );
    let length: usize = request
        .header("content-length")
        .map_or(0, |length| length.parse().unwrap());
    while buffer.len() < length {
        fill(stream, buffer).await?;
    }
    request.body = buffer.drain(..length).collect();
    Some(request)
}

async fn fill(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<()> {
    buffer.reserve(1 << 16);
    let count = stream.read_buf(buffer).await.ok()?;
    (count > 0).then_some(())
}

/// Writes a whole response with a length.
pub(crate) fn json(status: u16, body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Writes the head of an event stream.
pub(crate) fn events_head() -> Vec<u8> {
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n".to_vec()
}

/// Writes one chunk of a chunked body.
pub(crate) fn chunk(data: &[u8]) -> Vec<u8> {
    let mut bytes = format!("{:x}\r\n", data.len()).into_bytes();
    bytes.extend_from_slice(data);
    bytes.extend_from_slice(b"\r\n");
    bytes
}

/// Writes the end of a chunked body.
pub(crate) fn last_chunk() -> Vec<u8> {
    b"0\r\n\r\n".to_vec()
}
