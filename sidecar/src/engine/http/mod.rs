//! The engine's HTTP side: the paths, shapes and errors of vLLM's OpenAI server.

mod answer;
mod error;
mod request;
mod routes;
mod transfer;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use kvlane::{Error, ErrorKind, Result, Role};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::config::EngineConfig;
use super::runner::Inbox;
use super::tokenizer::Tokenizer;
use super::transfer::Connector;

/// What every request needs.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) inbox: Arc<Inbox>,
    pub(super) tokenizer: Tokenizer,
    pub(super) model_name: String,
    pub(super) max_model_len: usize,
    pub(super) block_size: u32,
    pub(super) kv_blocks: u32,
    pub(super) role: Role,
    /// Body of `/kv_event_sources`.
    pub(super) event_sources: serde_json::Value,
    /// Its part in handoffs.
    pub(super) connector: Option<Connector>,
    /// Start of the engine, Unix seconds.
    pub(super) born: f64,
}

/// A listener that serves until cancelled.
#[derive(Debug)]
pub(super) struct Server {
    listener: TcpListener,
    address: SocketAddr,
}

impl Server {
    /// Binds the listener.
    pub(super) async fn bind(config: &EngineConfig) -> Result<Self> {
        let failed = |error: std::io::Error| {
            let message = format!(
                "cannot listen on {}; a free address such as 127.0.0.1:8000 is accepted",
                config.listen
            );
            Error::new(ErrorKind::Config, message).with_source(error)
        };
        let listener = TcpListener::bind(config.listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address })
    }

    /// Returns the bound address.
    pub(super) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `cancel`, then drops every connection at once.
    pub(super) async fn serve(
        self,
        service: Arc<Service>,
        cancel: CancellationToken,
        tasks: TaskTracker,
    ) {
        loop {
            let accepted = tokio::select! {
                () = cancel.cancelled() => return,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => {
                    let (service, cancel) = (service.clone(), cancel.clone());
                    tasks.spawn(async move {
                        tokio::select! {
                            () = cancel.cancelled() => {}
                            () = connection(stream, service) => {}
                        }
                    });
                }
                Err(error) => {
                    // Out of file descriptors, most likely: others must close first.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }
}

async fn connection(stream: TcpStream, service: Arc<Service>) {
    // Without it a short chunk waits for the client's delayed acknowledgement of the one before.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "connection without nodelay");
    }
    let handler = service_fn(|request| routes::handle(service.clone(), request));
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .serve_connection(TokioIo::new(stream), handler)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "connection ended");
    }
}
