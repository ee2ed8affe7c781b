//! Errors in the shape of vLLM's OpenAI server.

use hyper::StatusCode;
use serde_json::json;

/// A refused request.
#[derive(Debug)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    message: String,
    kind: &'static str,
    param: Option<&'static str>,
}

impl ApiError {
    /// The request itself is wrong.
    pub(super) fn bad_request(message: impl Into<String>, param: Option<&'static str>) -> Self {
        Self {
            param,
            ..Self::new(StatusCode::BAD_REQUEST, "BadRequestError", message)
        }
    }

    /// No such model.
    pub(super) fn unknown_model(model: &str) -> Self {
        Self {
            param: Some("model"),
            ..Self::new(
                StatusCode::NOT_FOUND,
                "NotFoundError",
                format!("The model `{model}` does not exist."),
            )
        }
    }

    /// Any other refusal.
    pub(super) fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            kind,
            param: None,
        }
    }

    /// Returns the body.
    pub(super) fn body(&self) -> serde_json::Value {
        json!({"error": {
            "message": self.message, "type": self.kind, "param": self.param, "code": self.status.as_u16(),
        }})
    }
}
