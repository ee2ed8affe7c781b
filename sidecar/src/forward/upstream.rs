//! Kept-alive HTTP/1.1 connections to one worker, driven by the request that uses them.
//!
//! A connection has no task of its own: whoever sends a request polls it, and so does whoever reads the response body.
//! That saves a wake-up of another thread on each message, and dropping the request or its body closes the connection
//! at once, which is how an engine learns that nobody waits any more.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;

use crate::net::HostPort;

type Driver = Connection<TokioIo<TcpStream>, Full<Bytes>>;

/// Connections to one worker.
#[derive(Debug)]
pub struct Pool {
    address: HostPort,
    connect_timeout: Duration,
    idle_for: Duration,
    max_idle: usize,
    idle: Mutex<Vec<Idle>>,
    /// Connections in use, so that a test and the metrics can see that none is left behind.
    open: AtomicUsize,
}

/// Why an exchange failed before a response head arrived.
#[derive(Debug)]
pub enum UpstreamError {
    /// No connection could be made: the worker never saw the request.
    Connect(String),
    /// Nor was it refused in time: the worker may be there and busy, or its machine gone.
    Slow(String),
    /// The connection ended before the response head.
    Broken(String),
    /// So did a kept one, which the worker may have read the request from, and then a fresh one was refused: nothing listens there
    /// any more.
    Ended(String),
}

impl fmt::Display for UpstreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect(why) | Self::Slow(why) => write!(f, "could not connect: {why}"),
            Self::Broken(why) | Self::Ended(why) => {
                write!(f, "connection ended before the response: {why}")
            }
        }
    }
}

impl UpstreamError {
    /// Makes it the error of a request that a kept connection was lost with before, for `why`.
    fn after_broken(self, why: &str) -> Self {
        match self {
            Self::Connect(then) => Self::Ended(format!("{why}; another was refused: {then}")),
            Self::Slow(then) => Self::Broken(format!("{why}; another was not accepted: {then}")),
            Self::Broken(_) | Self::Ended(_) => self,
        }
    }
}

struct Idle {
    link: Link,
    since: Instant,
}

impl fmt::Debug for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idle")
            .field("since", &self.since)
            .finish_non_exhaustive()
    }
}

/// One connection: the side that takes requests and the side that does the I/O.
struct Link {
    sender: SendRequest<Full<Bytes>>,
    driver: Driver,
    /// The driver has finished: the connection is closed.
    finished: bool,
}

impl Link {
    fn drive(&mut self, cx: &mut Context<'_>) {
        if !self.finished && Pin::new(&mut self.driver).poll(cx).is_ready() {
            self.finished = true;
        }
    }

    /// Tells whether another request can be sent.
    fn is_usable(&mut self, cx: &mut Context<'_>) -> bool {
        self.drive(cx);
        !self.finished && matches!(self.sender.poll_ready(cx), Poll::Ready(Ok(())))
    }
}

impl Pool {
    /// Creates an empty pool.
    #[must_use]
    pub const fn new(
        address: HostPort,
        connect_timeout: Duration,
        idle_for: Duration,
        max_idle: usize,
    ) -> Self {
        Self {
            address,
            connect_timeout,
            idle_for,
            max_idle,
            idle: Mutex::new(Vec::new()),
            open: AtomicUsize::new(0),
        }
    }

    /// Returns the worker's address.
    #[must_use]
    pub const fn address(&self) -> &HostPort {
        &self.address
    }

    /// Returns the number of connections in use.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Sends a request and returns when the response head has arrived.
    ///
    /// A kept connection that the worker closed in the meantime is replaced by a fresh one, once.
    ///
    /// # Errors
    /// [`UpstreamError`]; the request may be sent to another worker. [`Connect`](UpstreamError::Connect) and
    /// [`Slow`](UpstreamError::Slow) say that nothing of it was sent, over a kept connection either.
    pub async fn send(
        self: &Arc<Self>,
        request: impl Fn() -> Request<Full<Bytes>>,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        if let Some(link) = self.take_idle() {
            let mut lease = Lease::new(Arc::clone(self), link);
            let kept = match lease.exchange(request()).await {
                Ok(response) => return Ok(lease.into_response(response)),
                Err(error) => error,
            };
            drop(lease);
            let sent = self.send_once(request()).await;
            // A request that the connection took and did not begin to send is given back as canceled.
            return sent.map_err(|error| {
                if kept.is_canceled() {
                    error
                } else {
                    error.after_broken(&describe(&kept))
                }
            });
        }
        self.send_once(request()).await
    }

    /// Sends a request over a fresh connection, and never again: for one that must not arrive twice. A kept connection may
    /// end after the worker has read the request, which cannot be told from one that was closed before.
    ///
    /// # Errors
    /// [`UpstreamError`]; after [`UpstreamError::Broken`] the worker may have read the request.
    pub async fn send_once(
        self: &Arc<Self>,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        let mut lease = Lease::new(Arc::clone(self), self.connect().await?);
        match lease.exchange(request).await {
            Ok(response) => Ok(lease.into_response(response)),
            Err(error) => Err(UpstreamError::Broken(describe(&error))),
        }
    }

    /// Drops idle connections that are closed or too old.
    pub fn sweep(&self) {
        let mut cx = Context::from_waker(Waker::noop());
        self.idle.lock().retain_mut(|idle| {
            idle.since.elapsed() < self.idle_for && idle.link.is_usable(&mut cx)
        });
    }

    /// Drops every idle connection.
    pub fn close_idle(&self) {
        self.idle.lock().clear();
    }

    /// Takes the connection used last that is still usable.
    fn take_idle(&self) -> Option<Link> {
        // Nobody waits for an idle connection, so a waker that does nothing is enough to see whether it was closed.
        let mut cx = Context::from_waker(Waker::noop());
        loop {
            let mut idle = self.idle.lock().pop()?;
            if idle.since.elapsed() < self.idle_for && idle.link.is_usable(&mut cx) {
                return Some(idle.link);
            }
        }
    }

    fn put_back(&self, link: Link) {
        let mut idle = self.idle.lock();
        if idle.len() < self.max_idle {
            idle.push(Idle {
                link,
                since: Instant::now(),
            });
        }
    }

    async fn connect(&self) -> Result<Link, UpstreamError> {
        let connecting = TcpStream::connect((self.address.host(), self.address.port()));
        let stream = tokio::time::timeout(self.connect_timeout, connecting)
            .await
            .map_err(|_| {
                UpstreamError::Slow(format!("no answer within {:?}", self.connect_timeout))
            })?
            .map_err(|error| UpstreamError::Connect(error.to_string()))?;
        // Without this the last packet of a request may wait for the worker's delayed acknowledgement.
        stream
            .set_nodelay(true)
            .map_err(|error| UpstreamError::Connect(error.to_string()))?;
        let (sender, driver) = http1::Builder::new()
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| UpstreamError::Connect(error.to_string()))?;
        Ok(Link {
            sender,
            driver,
            finished: false,
        })
    }
}

/// A connection in use.
struct Lease {
    pool: Arc<Pool>,
    link: Option<Link>,
}

impl Lease {
    fn new(pool: Arc<Pool>, link: Link) -> Self {
        pool.open.fetch_add(1, Ordering::Relaxed);
        Self {
            pool,
            link: Some(link),
        }
    }

    async fn exchange(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> hyper::Result<Response<Incoming>> {
        let Some(link) = &mut self.link else {
            unreachable!("a lease gives its connection away only when it is consumed");
        };
        let mut response = std::pin::pin!(link.sender.send_request(request));
        let driver = &mut link.driver;
        let finished = &mut link.finished;
        std::future::poll_fn(move |cx| {
            if !*finished && Pin::new(&mut *driver).poll(cx).is_ready() {
                *finished = true;
            }
            response.as_mut().poll(cx)
        })
        .await
    }

    fn into_response(self, response: Response<Incoming>) -> Response<UpstreamBody> {
        response.map(|incoming| UpstreamBody {
            incoming,
            lease: self,
            done: false,
        })
    }

    fn drive(&mut self, cx: &mut Context<'_>) {
        if let Some(link) = &mut self.link {
            link.drive(cx);
        }
    }

    /// Puts the connection back once its response is complete.
    fn give_back(&mut self, cx: &mut Context<'_>) {
        if let Some(mut link) = self.link.take()
            && link.is_usable(cx)
        {
            self.pool.put_back(link);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A response body that drives its connection while it is read, and gives it back at its end.
pub struct UpstreamBody {
    incoming: Incoming,
    lease: Lease,
    done: bool,
}

impl fmt::Debug for UpstreamBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpstreamBody")
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

impl UpstreamBody {
    /// Tells whether everything was read; notices it for a response without a body.
    pub(crate) fn is_settled(&mut self) -> bool {
        if !self.done && self.incoming.is_end_stream() {
            self.settle(&mut Context::from_waker(Waker::noop()));
        }
        self.done
    }

    fn settle(&mut self, cx: &mut Context<'_>) {
        self.done = true;
        self.lease.give_back(cx);
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if self.done {
            return Poll::Ready(None);
        }
        let mut polled = Pin::new(&mut self.incoming).poll_frame(cx);
        if polled.is_pending() {
            self.lease.drive(cx);
            polled = Pin::new(&mut self.incoming).poll_frame(cx);
        }
        // A reader stops at the announced length, or at the trailers, without asking for the end, so the end is noticed
        // with the last piece.
        let ended = match &polled {
            Poll::Ready(None) => true,
            Poll::Ready(Some(Ok(frame))) => frame.is_trailers() || self.incoming.is_end_stream(),
            Poll::Ready(Some(Err(_))) | Poll::Pending => self.incoming.is_end_stream(),
        };
        if ended {
            self.settle(cx);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        // Saying so early would let the reader stop before the connection has been given back.
        self.done
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

fn describe(error: &hyper::Error) -> String {
    let source = std::error::Error::source(error);
    source.map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    fn ask() -> Request<Full<Bytes>> {
        Request::new(Full::from("prompt"))
    }

    /// Leaves a kept connection behind; returns the worker's end of it, and its listener.
    async fn kept() -> (Arc<Pool>, TcpStream, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = HostPort::new("127.0.0.1", listener.local_addr().unwrap().port());
        let minute = Duration::from_secs(60);
        let pool = Arc::new(Pool::new(address, minute, minute, 1));
        let answers = async {
            let (mut worker, _) = listener.accept().await.unwrap();
            read_request(&mut worker).await;
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
            worker.write_all(answer).await.unwrap();
            worker
        };
        let (response, worker) = tokio::join!(pool.send(ask), answers);
        response.unwrap().into_body().collect().await.unwrap();
        (pool, worker, listener)
    }

    async fn read_request(worker: &mut TcpStream) {
        let mut read = Vec::new();
        while !read.ends_with(b"prompt") {
            assert_ne!(worker.read_buf(&mut read).await.unwrap(), 0);
        }
    }

    #[tokio::test]
    async fn a_worker_that_dies_with_a_kept_connection_may_have_read_the_request() {
        let (pool, mut worker, listener) = kept().await;
        let dies = async move {
            read_request(&mut worker).await;
            drop((listener, worker));
        };
        let (error, ()) = tokio::join!(pool.send(ask), dies);
        let error = error.unwrap_err();
        assert!(matches!(error, UpstreamError::Ended(_)), "{error:?}");
        assert_eq!(pool.in_use(), 0);
    }

    #[tokio::test]
    async fn a_worker_that_was_dead_before_has_read_nothing() {
        let (pool, worker, listener) = kept().await;
        drop((listener, worker));
        // The runtime has to look at its sockets before it knows.
        tokio::time::sleep(Duration::from_millis(10)).await;
        let error = pool.send(ask).await.unwrap_err();
        assert!(matches!(error, UpstreamError::Connect(_)), "{error:?}");
    }

    #[tokio::test]
    async fn a_kept_connection_that_ends_is_replaced_once() {
        let (pool, mut worker, listener) = kept().await;
        let cuts_twice = async move {
            read_request(&mut worker).await;
            drop(worker);
            let (mut worker, _) = listener.accept().await.unwrap();
            read_request(&mut worker).await;
            drop(worker);
            listener
        };
        let (error, _listener) = tokio::join!(pool.send(ask), cuts_twice);
        let error = error.unwrap_err();
        assert!(matches!(error, UpstreamError::Broken(_)), "{error:?}");
    }
}
