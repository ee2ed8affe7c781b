//! A worker's door, where requests can come to harm.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

/// What becomes of a request.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    Pass,
    /// Answered here.
    Status(u16, &'static str),
    /// Answered here, with 200 and a stream of events.
    Events(&'static str),
    /// The connection ends.
    Cut,
    /// It ends after so many pieces of the answer.
    CutAfter(usize),
    /// It ends before the first piece of the answer, when it is told to.
    CutOn(Arc<Notify>),
    /// No answer ever comes.
    Hang,
}

/// Decides on a request by its number and body.
pub(crate) type Hook =
    Arc<dyn Fn(usize, Value) -> Pin<Box<dyn Future<Output = Act> + Send>> + Send + Sync>;

pub(crate) fn always(act: Act) -> Hook {
    Arc::new(move |_, _| {
        let act = act.clone();
        Box::pin(async move { act })
    })
}

/// Harms the first request.
pub(crate) fn first(act: Act) -> Hook {
    Arc::new(move |number, _| {
        let act = if number == 0 { act.clone() } else { Act::Pass };
        Box::pin(async move { act })
    })
}

/// A listener in front of an engine, or of one for each rank.
#[derive(Debug)]
pub(crate) struct Gate {
    pub(crate) address: SocketAddr,
    requests: Arc<AtomicUsize>,
    listening: AbortHandle,
}

impl Gate {
    /// Begins to listen; requests go to the engine of the rank that they name.
    pub(crate) async fn start(engines: Vec<SocketAddr>, hook: Hook) -> Self {
        let engines: Arc<[SocketAddr]> = engines.into();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(AtomicUsize::new(0));
        let count = requests.clone();
        let listening = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (engines, hook, count) = (engines.clone(), hook.clone(), count.clone());
                let service = service_fn(move |request| {
                    handle(request, engines.clone(), hook.clone(), count.clone())
                });
                let builder = hyper::server::conn::http1::Builder::new();
                tokio::spawn(builder.serve_connection(TokioIo::new(stream), service));
            }
        });
        Self {
            address,
            requests,
            listening: listening.abort_handle(),
        }
    }

    /// Lets nobody connect any more.
    pub(crate) async fn close(&self) {
        self.listening.abort();
        while TcpStream::connect(self.address).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    pub(crate) fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

type AnyBody = UnsyncBoxBody<Bytes, Cut>;

#[derive(Debug)]
struct Cut;

impl std::fmt::Display for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("cut")
    }
}

impl std::error::Error for Cut {}

async fn handle(
    request: Request<Incoming>,
    engines: Arc<[SocketAddr]>,
    hook: Hook,
    count: Arc<AtomicUsize>,
) -> Result<Response<AnyBody>, Cut> {
    let (mut parts, body) = request.into_parts();
    let body = body.collect().await.map_err(|_| Cut)?.to_bytes();
    let number = count.fetch_add(1, Ordering::SeqCst);
    let read = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let engine = match *engines {
        [engine] => engine,
        _ => engines[take_rank(&mut parts.headers, &read)],
    };
    let act = hook(number, read).await;
    let (pieces, told) = match act {
        Act::Pass => (usize::MAX, None),
        Act::CutAfter(pieces) => (pieces, None),
        Act::CutOn(told) => (0, Some(told)),
        Act::Cut => return Err(Cut),
        Act::Hang => std::future::pending().await,
        Act::Status(status, text) => {
            let mut response = answer(text);
            *response.status_mut() = status.try_into().unwrap();
            return Ok(response);
        }
        Act::Events(text) => {
            let mut response = answer(text);
            let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
            response.headers_mut().insert(CONTENT_TYPE, kind);
            return Ok(response);
        }
    };
    let stream = TcpStream::connect(engine).await.map_err(|_| Cut)?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|_| Cut)?;
    tokio::spawn(connection);
    let request = Request::from_parts(parts, Full::new(body));
    let response = sender.send_request(request).await.map_err(|_| Cut)?;
    Ok(response.map(|incoming| {
        Cutting {
            incoming,
            left: pieces,
            cut: Box::pin(async move {
                match told {
                    Some(told) => told.notified().await,
                    // What was sent before the cut has left by then.
                    None => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }),
        }
        .boxed_unsync()
    }))
}

/// Returns the rank that a request names in vLLM's header, which each engine takes for its own, or in SGLang's field.
fn take_rank(headers: &mut HeaderMap, body: &Value) -> usize {
    let named = headers.remove("x-data-parallel-rank");
    let named = named.map(|value| value.to_str().unwrap().parse().unwrap());
    let field = || body["routed_dp_rank"].as_u64().unwrap_or(0);
    usize::try_from(named.unwrap_or_else(field)).unwrap()
}

fn answer(text: &'static str) -> Response<AnyBody> {
    let body = Full::new(Bytes::from_static(text.as_bytes()));
    let body = body.map_err(|never: Infallible| match never {});
    Response::new(body.boxed_unsync())
}

struct Cutting {
    incoming: Incoming,
    left: usize,
    /// When the connection ends, if nothing is left.
    cut: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Body for Cutting {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        if self.left == 0 {
            return self.cut.as_mut().poll(cx).map(|()| Some(Err(Cut)));
        }
        let polled = Pin::new(&mut self.incoming).poll_frame(cx);
        if polled.is_ready() {
            self.left -= 1;
        }
        polled.map(|frame| frame.map(|frame| frame.map_err(|_| Cut)))
    }
}
