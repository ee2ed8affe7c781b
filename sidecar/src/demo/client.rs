//! A client on one kept connection that times the first byte of a body.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use kvlane::Result;
use serde_json::Value;
use tokio::net::TcpStream;

use super::unexpected;

/// What one request gave.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// From sending the request to the first byte of the response's body.
    pub(super) ttft: Duration,
    /// Prompt tokens that the engine reports as cached.
    pub(super) cached_tokens: u32,
}

/// Sends one request after the other.
#[derive(Debug)]
pub(super) struct Client {
    address: SocketAddr,
    connection: Option<SendRequest<Full<Bytes>>>,
}

impl Client {
    pub(super) const fn new(address: SocketAddr) -> Self {
        Self {
            address,
            connection: None,
        }
    }

    /// Sends a streamed completion and reads it to its end.
    pub(super) async fn stream(&mut self, body: &[u8]) -> Result<Answer> {
        let started = Instant::now();
        let mut response = self.send(Method::POST, "/v1/completions", body).await?;
        let status = response.status();
        let mut ttft = None;
        let mut text = Vec::new();
        while let Some(frame) = response.frame().await {
            ttft.get_or_insert_with(|| started.elapsed());
            if let Some(data) = frame.map_err(unexpected)?.data_ref() {
                text.extend_from_slice(data);
            }
        }
        let text = String::from_utf8_lossy(&text);
        let cached_tokens = cached_tokens(&text)
            .filter(|_| status == 200)
            .ok_or_else(|| {
                unexpected(format!(
                    "a completion was answered {status} without usage: {text}"
                ))
            })?;
        Ok(Answer {
            ttft: ttft.unwrap_or_else(|| started.elapsed()),
            cached_tokens,
        })
    }

    /// Sends a request and returns the time until the whole answer was there.
    pub(super) async fn post(&mut self, path: &str, body: &[u8]) -> Result<Duration> {
        let started = Instant::now();
        let response = self.send(Method::POST, path, body).await?;
        let status = response.status();
        response.into_body().collect().await.map_err(unexpected)?;
        if status != 200 {
            return Err(unexpected(format!("{path} was answered {status}")));
        }
        Ok(started.elapsed())
    }

    /// Returns the status of a GET.
    pub(super) async fn get_status(&mut self, path: &str) -> Result<u16> {
        let response = self.send(Method::GET, path, b"").await?;
        let status = response.status().as_u16();
        response.into_body().collect().await.map_err(unexpected)?;
        Ok(status)
    }

    async fn send(
        &mut self,
        method: Method,
        path: &str,
        body: &[u8],
    ) -> Result<Response<Incoming>> {
        let usable = self
            .connection
            .as_ref()
            .is_some_and(|connection| !connection.is_closed());
        if !usable {
            self.connection = Some(connect(self.address).await?);
        }
        let Some(connection) = &mut self.connection else {
            return Err(unexpected("no connection"));
        };
        connection.ready().await.map_err(unexpected)?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", self.address.to_string())
            .header("content-type", "application/json")
            .body(Full::new(Bytes::copy_from_slice(body)))
            .map_err(unexpected)?;
        connection.send_request(request).await.map_err(unexpected)
    }
}

async fn connect(address: SocketAddr) -> Result<SendRequest<Full<Bytes>>> {
    let stream = TcpStream::connect(address)
        .await
        .map_err(|error| unexpected(format!("{address}: {error}")))?;
    stream.set_nodelay(true).map_err(unexpected)?;
    let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(unexpected)?;
    #[expect(
        clippy::disallowed_methods,
        reason = "it ends by itself when the sender is dropped"
    )]
    tokio::spawn(connection);
    Ok(sender)
}

/// Reads the usage of the last chunk that has one.
fn cached_tokens(text: &str) -> Option<u32> {
    let usage = text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .filter_map(|data| serde_json::from_str::<Value>(data).ok())
        .rfind(|chunk| chunk["usage"].is_object())?;
    let cached = usage["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()?;
    u32::try_from(cached).ok()
}
