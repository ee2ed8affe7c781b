//! What passing a request to a worker takes, whoever passes it: connections, breakers, headers, and answers of our own.

pub mod breaker;
pub mod upstream;

mod errors;
mod headers;
mod lines;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::Uri;

pub(crate) use errors::{Problem, error_body};
pub(crate) use headers::{
    add_debug, for_worker, is_event_stream, request_id, towards_client, towards_worker,
};

pub(crate) use lines::EventLines;

/// A response body towards the client.
pub type ClientBody = UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;

/// Wraps a complete body.
pub(crate) fn full(body: impl Into<Bytes>) -> ClientBody {
    Full::new(body.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// Joins a worker's path prefix and the request's own path and query.
pub(crate) fn uri(prefix: &str, path: &Bytes) -> Uri {
    if prefix.is_empty() {
        return Uri::from_maybe_shared(path.clone()).unwrap_or_default();
    }
    let mut joined = Vec::with_capacity(prefix.len() + path.len());
    joined.extend_from_slice(prefix.as_bytes());
    joined.extend_from_slice(path);
    Uri::from_maybe_shared(Bytes::from(joined)).unwrap_or_default()
}
