//! The side that listens.

use std::net::SocketAddr;
use std::sync::Arc;

use kvlane::Result;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::args::{LinkArgs, LinkTransport};
use super::failed;
use super::region::pattern;
use super::wire::{
    self, Ask, Hello, MOVE_LIMIT, PROTOCOL, SESSION_LIMIT, STEP_LIMIT, VERSION, Welcome,
};
use crate::sparing::warn_sparingly;

/// A bound listener.
#[derive(Debug)]
pub(super) struct Listener {
    socket: TcpListener,
    address: SocketAddr,
    side: Arc<Side>,
    once: bool,
}

#[derive(Debug)]
struct Side {
    max_bytes: usize,
    /// Why bytes move over TCP, or what moves them.
    #[cfg(feature = "nixl")]
    nixl: std::result::Result<super::measure::nixl::Holder, String>,
    #[cfg(not(feature = "nixl"))]
    nixl: std::result::Result<std::convert::Infallible, String>,
}

/// Connections at once: the streams of one measurement.
const MAX_CONNECTIONS: usize = 80;
/// Bytes of one write at most, which every connection has room for.
const MAX_WRITE: usize = 1 << 20;
/// Pause after a failed accept.
const PAUSE: std::time::Duration = std::time::Duration::from_millis(50);

impl Listener {
    pub(super) async fn bind(args: &LinkArgs) -> Result<Self> {
        let failed_bind = |error: std::io::Error| {
            failed(format!(
                "cannot listen on {}; a free address such as 0.0.0.0:7711 is accepted (--bind)",
                args.bind
            ))
            .with_source(error)
        };
        let socket = TcpListener::bind(args.bind).await.map_err(failed_bind)?;
        let address = socket.local_addr().map_err(failed_bind)?;
        let nixl = if args.transport == LinkTransport::Tcp {
            Err("--transport tcp".to_owned())
        } else {
            Self::nixl(args).await
        };
        if let Err(reason) = &nixl {
            if args.transport == LinkTransport::Nixl || args.gpu.is_some() {
                return Err(failed(reason.clone()));
            }
            tracing::info!(reason, "bytes move over TCP: NIXL is not used");
        }
        let side = Arc::new(Side {
            max_bytes: args.max_size.bytes(),
            nixl,
        });
        Ok(Self {
            socket,
            address,
            side,
            once: args.once,
        })
    }

    #[cfg(feature = "nixl")]
    async fn nixl(args: &LinkArgs) -> std::result::Result<super::measure::nixl::Holder, String> {
        super::measure::nixl::Holder::load(args).await
    }

    #[cfg(not(feature = "nixl"))]
    #[expect(clippy::unused_async, reason = "the other one waits")]
    async fn nixl(_args: &LinkArgs) -> std::result::Result<std::convert::Infallible, String> {
        Err("this program was built without the feature `nixl`".to_owned())
    }

    pub(super) const fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn transport(&self) -> &'static str {
        if self.side.nixl.is_ok() {
            "nixl"
        } else {
            "tcp"
        }
    }

    /// Serves until cancelled, or until the first measurement is over where that was asked for.
    pub(super) async fn serve(self, cancel: CancellationToken) -> Result<()> {
        let (tasks, room) = (
            TaskTracker::new(),
            Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        );
        loop {
            let accepted = tokio::select! {
                () = cancel.cancelled() => break,
                accepted = self.socket.accept() => accepted,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    warn_sparingly!(%error, "cannot accept a connection");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
                warn_sparingly!(%peer, "refused: {MAX_CONNECTIONS} connections are open");
                continue;
            };
            let (side, cancel) = (Arc::clone(&self.side), cancel.clone());
            let once = self.once;
            tasks.spawn(async move {
                let served = tokio::select! {
                    () = cancel.cancelled() => return,
                    served = side.serve_one(stream) => served,
                };
                drop(permit);
                match served {
                    // The measuring side's first connection lasts as long as the measurement.
                    Ok(true) if once => cancel.cancel(),
                    Ok(_) => {}
                    Err(error) => warn_sparingly!(%peer, %error, "a connection ended early"),
                }
            });
        }
        tasks.close();
        cancel.cancel();
        tasks.wait().await;
        Ok(())
    }
}

impl Side {
    /// Serves one connection; true when it was a measurement's first.
    async fn serve_one(&self, mut stream: TcpStream) -> Result<bool> {
        let _ = stream.set_nodelay(true);
        let hello: Hello = wire::hear(&mut stream, STEP_LIMIT).await?;
        let mut welcome = Welcome {
            protocol: PROTOCOL.to_owned(),
            version: VERSION,
            refused: None,
            nixl: None,
            without: self.nixl.as_ref().err().cloned(),
        };
        let checked = wire::check(&hello.protocol, hello.version);
        if let Err(error) = checked {
            welcome.refused = Some(error.to_string());
            wire::say(&mut stream, &welcome).await?;
            return Err(error);
        }
        if hello.bytes > self.max_bytes {
            let message = format!(
                "{} bytes are asked for; up to {} are accepted (--max-size of the listener)",
                hello.bytes, self.max_bytes
            );
            welcome.refused = Some(message.clone());
            wire::say(&mut stream, &welcome).await?;
            return Err(failed(message));
        }
        #[cfg(feature = "nixl")]
        if let (true, Ok(holder)) = (hello.nixl, &self.nixl) {
            return holder.give(&mut stream, welcome, hello.bytes).await;
        }
        wire::say(&mut stream, &welcome).await?;
        self.send(&mut stream, hello.bytes).await
    }

    /// Sends what is asked for until the peer leaves; true when it never asked.
    async fn send(&self, stream: &mut TcpStream, most: usize) -> Result<bool> {
        let mut bytes = Vec::new();
        let mut asked = false;
        loop {
            let mut first = [0];
            // A peer is silent while other cells are measured.
            let waiting = tokio::time::timeout(SESSION_LIMIT, stream.peek(&mut first)).await;
            match waiting {
                Ok(Ok(0)) => return Ok(!asked),
                Ok(Ok(_)) => {}
                Ok(Err(error)) => {
                    return Err(failed("the peer went away".to_owned()).with_source(error));
                }
                Err(_) => return Err(failed("the peer asks for nothing".to_owned())),
            }
            let ask: Ask = wire::hear(stream, STEP_LIMIT).await?;
            if ask.bytes > most || ask.piece == 0 {
                return Err(failed(format!(
                    "{} bytes in pieces of {} are asked for; up to {most} were announced",
                    ask.bytes, ask.piece
                )));
            }
            asked = true;
            let piece = ask.piece.min(ask.bytes).min(MAX_WRITE);
            if bytes.len() < piece {
                bytes = pattern(0, piece);
            }
            let writing = async {
                let mut left = ask.bytes;
                while left > 0 {
                    let piece = piece.min(left);
                    stream.write_all(&bytes[..piece]).await?;
                    left -= piece;
                }
                std::io::Result::Ok(())
            };
            match tokio::time::timeout(MOVE_LIMIT, writing).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    return Err(failed("the peer went away".to_owned()).with_source(error));
                }
                Err(_) => return Err(failed("the peer does not read".to_owned())),
            }
        }
    }
}
