//! The client's end of a handoff.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame};
use hyper::header::CONTENT_LENGTH;
use hyper::http::response::Parts;
use hyper::{Response, StatusCode};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::leg::LegError;
use crate::forward::{ClientBody, Problem, error_body, full, towards_client};

/// Where the answer goes.
#[derive(Debug)]
pub(super) struct Client {
    state: State,
    close: CancellationToken,
}

#[derive(Debug)]
enum State {
    Waiting(oneshot::Sender<Response<ClientBody>>),
    Streaming(mpsc::Sender<Bytes>),
    Answered,
}

/// Pieces on their way to a slow client.
const QUEUED_PIECES: usize = 16;

impl Client {
    pub(super) const fn new(
        answer: oneshot::Sender<Response<ClientBody>>,
        close: CancellationToken,
    ) -> Self {
        Self {
            state: State::Waiting(answer),
            close,
        }
    }

    /// Returns when the client has left; never once it has its answer.
    pub(super) async fn left(&mut self) {
        match &mut self.state {
            State::Waiting(answer) => answer.closed().await,
            State::Streaming(pieces) => pieces.closed().await,
            State::Answered => std::future::pending().await,
        }
    }

    /// Answers with a complete body.
    pub(super) fn answer(&mut self, response: Response<ClientBody>) {
        if let State::Waiting(answer) = std::mem::replace(&mut self.state, State::Answered) {
            // A client that left meanwhile misses nothing.
            let _ = answer.send(response);
        }
    }

    /// Answers with a worker's head and a complete body.
    pub(super) fn answer_whole(&mut self, mut parts: Parts, body: Vec<u8>) {
        towards_client(&mut parts.headers);
        parts.headers.remove(CONTENT_LENGTH);
        self.answer(Response::from_parts(parts, full(body)));
    }

    /// Answers with a worker's own refusal, or with 502 where it gave none.
    pub(super) fn refuse(&mut self, refusal: Option<LegError>) {
        match refusal.and_then(LegError::into_response) {
            Some(response) => self.answer(response),
            None => self.bad_gateway("a worker refused the request"),
        }
    }

    /// Answers 502.
    pub(super) fn bad_gateway(&mut self, why: &str) {
        self.answer(Problem::new(StatusCode::BAD_GATEWAY, why).response());
    }

    /// Begins a stream with a worker's head.
    pub(super) fn begin_stream(&mut self, mut parts: Parts) {
        towards_client(&mut parts.headers);
        parts.headers.remove(CONTENT_LENGTH);
        let (sender, pieces) = mpsc::channel(QUEUED_PIECES);
        let stream = State::Streaming(sender);
        if let State::Waiting(answer) = std::mem::replace(&mut self.state, stream) {
            let body = Pieces(pieces).boxed_unsync();
            let _ = answer.send(Response::from_parts(parts, body));
        }
    }

    /// Sends a piece of a stream, waiting for a slow client.
    pub(super) async fn send(&self, piece: Vec<u8>) {
        if let State::Streaming(pieces) = &self.state
            && !piece.is_empty()
        {
            // Whoever left is noticed by `left`.
            let _ = pieces.send(piece.into()).await;
        }
    }

    /// Ends a stream.
    pub(super) fn end(&mut self) {
        self.state = State::Answered;
    }

    /// Tells a client that its answer ends here: by an error event where a stream has begun, else by 502.
    pub(super) async fn break_off(&mut self, why: &str) {
        if matches!(self.state, State::Streaming(_)) {
            self.close.cancel();
            // The blank line ends an event of which only a part was sent.
            let event = format!("\n\ndata: {}\n\n", error_body(StatusCode::BAD_GATEWAY, why));
            self.send(event.into_bytes()).await;
            self.end();
        } else {
            self.bad_gateway(why);
        }
    }
}

/// A stream's body.
struct Pieces(mpsc::Receiver<Bytes>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0
            .poll_recv(cx)
            .map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}
