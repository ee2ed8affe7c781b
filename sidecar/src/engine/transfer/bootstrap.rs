//! The bootstrap service of a prefill engine: what SGLang's and Mooncake's answer to routers and to decode engines.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Refusal;
use super::parameters::Source;
use super::rooms::{KvProtocol, Meeting, Rooms};

/// A prefill engine's service.
#[derive(Debug)]
pub(super) struct Bootstrap {
    pub(super) protocol: KvProtocol,
    pub(super) rooms: Arc<Rooms>,
    pub(super) engine_id: String,
    /// Where KV is fetched from.
    pub(super) transfer: std::net::SocketAddr,
    pub(super) block_size: usize,
}

impl Bootstrap {
    /// Serves until cancelled.
    pub(super) async fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        cancel: CancellationToken,
        tasks: TaskTracker,
    ) {
        loop {
            let accepted = tokio::select! {
                () = cancel.cancelled() => return,
                accepted = listener.accept() => accepted,
            };
            let Ok((stream, _)) = accepted else {
                tokio::time::sleep(RETRY).await;
                continue;
            };
            let (service, cancel) = (Arc::clone(&self), cancel.clone());
            tasks.spawn(async move {
                let answer = service_fn(move |request| {
                    let service = Arc::clone(&service);
                    async move { Ok::<_, io::Error>(service.answer(&request).await) }
                });
                let builder = hyper::server::conn::http1::Builder::new();
                tokio::select! {
                    () = cancel.cancelled() => {}
                    _ = builder.serve_connection(TokioIo::new(stream), answer) => {}
                }
            });
        }
    }

    async fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let sglang = self.protocol == KvProtocol::Sglang;
        match request.uri().path() {
            "/health" => reply(StatusCode::OK, &json!({})),
            "/route" if sglang => reply(
                StatusCode::OK,
                &json!({"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": self.block_size,
                    "kv_cache_dtype": "auto", "follow_bootstrap_room": true}),
            ),
            "/query" if !sglang => {
                let address = format!("tcp://{}", self.transfer);
                let rank =
                    json!({"engine_id": self.engine_id, "worker_addr": {"0": {"0": address}}});
                reply(StatusCode::OK, &json!({"0": rank}))
            }
            path => match path.strip_prefix("/rooms/") {
                Some(room) => self.room(room, request.uri().query()).await,
                None => reply(StatusCode::NOT_FOUND, &json!({})),
            },
        }
    }

    /// Tells where a room's KV lies, once it is ready. The engines' own way of doing this is no HTTP.
    async fn room(&self, room: &str, query: Option<&str>) -> Response<Full<Bytes>> {
        let engine = query.and_then(|query| query.strip_prefix("engine="));
        if engine.is_some_and(|engine| engine != self.engine_id) {
            return reply(StatusCode::CONFLICT, &json!({}));
        }
        match self.rooms.ready(room).await {
            Some(name) => reply(
                StatusCode::OK,
                &json!({"remote_engine_id": self.engine_id, "remote_request_id": name,
                    "remote_host": self.transfer.ip().to_string(), "remote_port": self.transfer.port()}),
            ),
            None => reply(StatusCode::NOT_FOUND, &json!({})),
        }
    }
}

fn reply(status: StatusCode, value: &Value) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(value.to_string()));
    *response.status_mut() = status;
    response
}

/// Waits for a room for at most `wait`; nobody there is waited for as well, as a decode engine does.
pub(super) async fn join(meeting: &Meeting, wait: Duration) -> Result<Source, Refusal> {
    let joining = async {
        loop {
            match ask(meeting).await {
                Ok((StatusCode::OK, body)) => {
                    let value = serde_json::from_slice(&body).unwrap_or(Value::Null);
                    return Source::read(&value).ok_or(Refusal::Incomplete);
                }
                Ok((StatusCode::CONFLICT, _)) => return Err(Refusal::OtherEngine),
                Ok(_) | Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
    };
    let joined = tokio::time::timeout(wait, joining).await;
    joined.unwrap_or(Err(Refusal::Unreachable))
}

const RETRY: Duration = Duration::from_millis(20);
const MAX_ANSWER: usize = 64 << 10;

async fn ask(
    meeting: &Meeting,
) -> Result<(StatusCode, Bytes), Box<dyn std::error::Error + Send + Sync>> {
    let stream = TcpStream::connect((meeting.host.as_str(), meeting.port)).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let query = meeting
        .engine
        .as_ref()
        .map(|engine| format!("?engine={engine}"));
    let path = format!("/rooms/{}{}", meeting.room, query.unwrap_or_default());
    let request = Request::get(path)
        .header("host", "bootstrap")
        .body(Full::<Bytes>::default())?;
    let exchange = async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ANSWER)
            .collect()
            .await?;
        Ok((status, body.to_bytes()))
    };
    // Dropping the connection is how one that waits no longer says so.
    tokio::select! {
        answer = exchange => answer,
        ended = connection => Err(ended.err().map_or_else(|| "closed".into(), Into::into)),
    }
}
