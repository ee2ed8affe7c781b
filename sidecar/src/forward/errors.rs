//! Answers of the sidecar's own, in the error shape of the OpenAI API.

use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use serde_json::json;

use super::{ClientBody, full};

/// An error to answer with.
#[derive(Debug)]
pub(crate) struct Problem {
    status: StatusCode,
    message: String,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, message: &str) -> Self {
        Self {
            status,
            message: message.to_owned(),
        }
    }

    /// Builds the answer.
    pub(crate) fn response(&self) -> Response<ClientBody> {
        let mut response = Response::new(full(error_body(self.status, &self.message)));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// Writes an error object.
pub(crate) fn error_body(status: StatusCode, message: &str) -> String {
    let (kind, code) = names(status);
    json!({"error": {"message": message, "type": kind, "param": null, "code": code}}).to_string()
}

const fn names(status: StatusCode) -> (&'static str, &'static str) {
    match status.as_u16() {
        400 => ("invalid_request_error", "invalid_request"),
        401 => ("authentication_error", "unauthorized"),
        404 => ("not_found_error", "not_found"),
        405 => ("invalid_request_error", "method_not_allowed"),
        408 => ("invalid_request_error", "request_timeout"),
        409 => ("invalid_request_error", "conflict"),
        413 => ("invalid_request_error", "request_too_large"),
        414 => ("invalid_request_error", "uri_too_long"),
        502 => ("upstream_error", "bad_gateway"),
        503 => ("service_unavailable_error", "no_eligible_worker"),
        504 => ("upstream_error", "upstream_timeout"),
        _ => ("internal_error", "internal_error"),
    }
}
