//! Bytes over TCP, one connection for each stream.

use std::time::{Duration, Instant};

use kvlane::Result;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::Plan;
use crate::link::failed;
use crate::link::wire::{self, Ask, MOVE_LIMIT};

/// The open connections.
pub(super) struct Puller {
    peer: String,
    room: usize,
    /// Keeps the listener there; nothing is asked for on it.
    _first: TcpStream,
    streams: Vec<TcpStream>,
}

/// Room for what one read brings.
const BUFFER: usize = 1 << 20;

impl Puller {
    pub(super) fn new(peer: &str, room: usize, first: TcpStream) -> Self {
        Self {
            peer: peer.to_owned(),
            room,
            _first: first,
            streams: Vec::new(),
        }
    }

    pub(super) async fn run(&mut self, plan: &Plan) -> Result<Duration> {
        while self.streams.len() < plan.streams {
            let (stream, _) = super::greet(&self.peer, self.room, false).await?;
            self.streams.push(stream);
        }
        let ask = Ask {
            bytes: plan.bytes,
            piece: plan.piece.of(plan.bytes),
        };
        let began = Instant::now();
        let mut pulls = JoinSet::new();
        for stream in self.streams.drain(..plan.streams) {
            pulls.spawn(pull(stream, ask));
        }
        while let Some(pulled) = pulls.join_next().await {
            let stream = pulled
                .map_err(|error| failed("a stream ended early".to_owned()).with_source(error))?;
            self.streams.push(stream?);
        }
        Ok(began.elapsed())
    }
}

async fn pull(mut stream: TcpStream, ask: Ask) -> Result<TcpStream> {
    wire::say(&mut stream, &ask).await?;
    let mut buffer = vec![0; BUFFER.min(ask.bytes)];
    let reading = async {
        let mut left = ask.bytes;
        while left > 0 {
            let most = buffer.len().min(left);
            let read = stream.read(&mut buffer[..most]).await?;
            if read == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            left -= read;
        }
        std::io::Result::Ok(())
    };
    match tokio::time::timeout(MOVE_LIMIT, reading).await {
        Ok(Ok(())) => Ok(stream),
        Ok(Err(error)) => Err(failed("the peer went away".to_owned()).with_source(error)),
        Err(_) => Err(failed(format!(
            "{} bytes did not come within {MOVE_LIMIT:?}",
            ask.bytes
        ))),
    }
}
