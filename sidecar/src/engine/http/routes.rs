//! What each path does.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc::unbounded_channel;

use super::Service;
use super::answer::{Answer, EngineStopped, EventStream, ResponseBody, Shape};
use super::error::ApiError;
use super::request::{self, ChatBody, CompletionBody, Job, Prompt, Sampling};
use super::transfer;
use crate::engine::sequence::NewSequence;
use crate::engine::stats;

type Reply = Response<ResponseBody>;

/// Answers one request. The error cuts the connection: the engine stopped.
pub(super) async fn handle(
    service: Arc<Service>,
    request: Request<Incoming>,
) -> Result<Reply, EngineStopped> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    let Some(allowed) = method_of(path) else {
        return Ok(refusal(&ApiError::new(
            StatusCode::NOT_FOUND,
            "Not Found",
            "Not Found",
        )));
    };
    if parts.method != allowed && !(allowed == Method::GET && parts.method == Method::HEAD) {
        return Ok(refusal(&ApiError::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "Method Not Allowed",
            "Method Not Allowed",
        )));
    }
    let generated = match path {
        "/v1/completions" => Some(Shape::Completion),
        "/v1/chat/completions" => Some(Shape::Chat),
        _ => None,
    };
    let body = match read(&parts.headers, body).await {
        Ok(body) => body,
        Err(error) => return Ok(refusal(&error)),
    };
    if let Some(shape) = generated {
        return match prepare(&service, shape, &parts.headers, &body) {
            Ok(job) => generate(service, shape, request_id(&parts.headers), job).await,
            Err(error) => Ok(refusal(&error)),
        };
    }
    Ok(inspect(&service, path, &body)
        .await
        .unwrap_or_else(|error| refusal(&error)))
}

fn method_of(path: &str) -> Option<Method> {
    match path {
        "/v1/completions"
        | "/v1/chat/completions"
        | "/tokenize"
        | "/detokenize"
        | "/reset_prefix_cache" => Some(Method::POST),
        "/health" | "/ping" | "/version" | "/v1/models" | "/metrics" | "/kv_event_sources"
        | "/server_info" => Some(Method::GET),
        _ => None,
    }
}

/// Everything but generation.
async fn inspect(service: &Service, path: &str, body: &[u8]) -> Result<Reply, ApiError> {
    Ok(match path {
        "/health" | "/ping" => reply(StatusCode::OK, "text/plain", Bytes::new()),
        "/version" => json_reply(StatusCode::OK, &json!({"version": VERSION})),
        "/v1/models" => json_reply(StatusCode::OK, &models(service)),
        "/metrics" => {
            let page = stats::render(
                &service.inbox.stats(),
                &service.model_name,
                service.block_size,
                service.kv_blocks,
                service.born,
            ) + &transfer::metrics(service);
            reply(
                StatusCode::OK,
                "text/plain; version=0.0.4; charset=utf-8",
                Bytes::from(page),
            )
        }
        "/kv_event_sources" => json_reply(StatusCode::OK, &service.event_sources),
        "/server_info" => json_reply(StatusCode::OK, &server_info(service)),
        "/tokenize" => tokenize(service, body)?,
        "/detokenize" => detokenize(service, body)?,
        // As vLLM, which answers 200 whether or not requests hold blocks.
        _ => {
            let done = service.inbox.reset().await;
            tracing::info!(reset = done.unwrap_or(false), "cache reset was asked for");
            reply(StatusCode::OK, "text/plain", Bytes::new())
        }
    })
}

fn prepare(
    service: &Service,
    shape: Shape,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Job, ApiError> {
    check_rank(headers)?;
    let sampling: Sampling = request::parse(body)?;
    let prompts = match shape {
        Shape::Completion => {
            let body: CompletionBody = request::parse(body)?;
            sampling.check_model(service)?;
            body.prompt
                .ok_or_else(|| ApiError::bad_request("prompt is required.", Some("prompt")))?
                .tokenize(service)?
        }
        Shape::Chat => {
            let body: ChatBody<'_> = request::parse(body)?;
            sampling.check_model(service)?;
            vec![body.tokenize(service)?]
        }
    };
    if prompts.is_empty() {
        return Err(ApiError::bad_request(
            "prompt must not be an empty list.",
            Some("prompt"),
        ));
    }
    sampling.check(service, prompts)
}

async fn generate(
    service: Arc<Service>,
    shape: Shape,
    id: String,
    mut job: Job,
) -> Result<Reply, EngineStopped> {
    let prefix = if shape == Shape::Chat {
        "chatcmpl"
    } else {
        "cmpl"
    };
    let id = format!("{prefix}-{id}");
    let handoff = match transfer::prepare(&service, &id, &job).await {
        Ok(handoff) => handoff,
        Err(error) => return Ok(refusal(&error)),
    };
    let answer = Answer::new(service.clone(), shape, id, unix_seconds(), &job);
    let (output, outputs) = unbounded_channel();
    let mut sequences = Vec::with_capacity(job.prompts.len() * job.samples);
    for prompt in std::mem::take(&mut job.prompts) {
        for sample in 0..job.samples {
            sequences.push(NewSequence {
                index: u32::try_from(sequences.len()).unwrap_or(u32::MAX),
                sample: u32::try_from(sample).unwrap_or(u32::MAX),
                prompt: prompt.clone(),
                max_tokens: job.max_tokens,
                salt: job.salt.clone(),
                handoff: handoff.part(),
                output: output.clone(),
            });
        }
    }
    drop(output);
    if !service.inbox.submit(sequences) {
        let message = "The engine's queue is full, or it is shutting down.";
        return Ok(refusal(&ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "ServiceUnavailableError",
            message,
        )));
    }
    if job.stream {
        let stream = EventStream::new(answer, outputs, &job);
        let mut response = Response::new(ResponseBody::Stream(Box::new(stream)));
        response.headers_mut().insert(
            CONTENT_TYPE,
            HeaderValue::from_static("text/event-stream; charset=utf-8"),
        );
        return Ok(response);
    }
    let mut whole = answer.whole(outputs).await.ok_or(EngineStopped)?;
    if let Err(error) = handoff.settle().await {
        return Ok(refusal(&error));
    }
    handoff.fill(&service, &mut whole).await;
    Ok(json_reply(StatusCode::OK, &whole))
}

/// Reads at most [`MAX_BODY_BYTES`] of a JSON body.
async fn read(headers: &HeaderMap, body: Incoming) -> Result<Bytes, ApiError> {
    if let Some(kind) = headers.get(CONTENT_TYPE) {
        let json = kind.to_str().is_ok_and(|kind| {
            kind.trim_start()
                .to_ascii_lowercase()
                .starts_with("application/json")
        });
        if !json && !hyper::body::Body::is_end_stream(&body) {
            let message = "Unsupported Media Type: Only 'application/json' is allowed";
            return Err(ApiError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "Unsupported Media Type",
                message,
            ));
        }
    }
    match Limited::new(body, MAX_BODY_BYTES).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => {
            let message = format!("The body is over {MAX_BODY_BYTES} bytes.");
            Err(ApiError::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "Payload Too Large",
                message,
            ))
        }
        Err(error) => Err(ApiError::bad_request(
            format!("The body could not be read: {error}"),
            None,
        )),
    }
}

/// One rank is served; another one is refused, and what is no number is ignored, as by vLLM.
fn check_rank(headers: &HeaderMap) -> Result<(), ApiError> {
    let value = headers
        .get("x-data-parallel-rank")
        .and_then(|value| value.to_str().ok());
    match value.and_then(|value| value.trim().parse::<i64>().ok()) {
        None | Some(0) => Ok(()),
        Some(rank) => Err(ApiError::bad_request(
            format!("data_parallel_rank {rank} is out of range [0, 1)."),
            None,
        )),
    }
}

#[derive(Deserialize)]
struct TokenizeBody {
    prompt: Option<Prompt>,
    messages: Option<Value>,
}

fn tokenize(service: &Service, body: &[u8]) -> Result<Reply, ApiError> {
    let wanted: TokenizeBody = request::parse(body)?;
    let tokens = if wanted.messages.is_some() {
        request::parse::<ChatBody<'_>>(body)?.tokenize(service)?
    } else {
        let prompt = wanted.prompt.ok_or_else(|| {
            ApiError::bad_request("prompt or messages is required.", Some("prompt"))
        })?;
        prompt
            .tokenize(service)?
            .into_iter()
            .next()
            .unwrap_or_default()
    };
    let answer = json!({
        "count": tokens.len(), "max_model_len": service.max_model_len, "tokens": tokens, "token_strs": null,
    });
    Ok(json_reply(StatusCode::OK, &answer))
}

#[derive(Deserialize)]
struct DetokenizeBody {
    tokens: Vec<u32>,
}

fn detokenize(service: &Service, body: &[u8]) -> Result<Reply, ApiError> {
    let wanted: DetokenizeBody = request::parse(body)?;
    let words: Vec<String> = wanted
        .tokens
        .into_iter()
        .map(|token| service.tokenizer.decode(token))
        .collect();
    Ok(json_reply(
        StatusCode::OK,
        &json!({"prompt": words.join(" ")}),
    ))
}

fn models(service: &Service) -> Value {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "whole seconds are asked for"
    )]
    let created = service.born as i64;
    json!({"object": "list", "data": [{
        "id": service.model_name, "object": "model", "created": created, "owned_by": "vllm",
        "root": service.model_name, "parent": null, "max_model_len": service.max_model_len, "permission": [],
    }]})
}

fn server_info(service: &Service) -> Value {
    let mut info = json!({
        "simulated": true, "role": service.role, "model": service.model_name, "max_model_len": service.max_model_len,
        "block_size": service.block_size, "num_gpu_blocks": service.kv_blocks,
    });
    if let (Some(connector), Some(fields)) = (&service.connector, info.as_object_mut()) {
        fields.extend(transfer::server_info(connector, service.role));
    }
    info
}

fn request_id(headers: &HeaderMap) -> String {
    let given = headers
        .get("x-request-id")
        .and_then(|value| value.to_str().ok());
    given.map_or_else(|| format!("{:032x}", fastrand::u128(..)), str::to_owned)
}

fn refusal(error: &ApiError) -> Reply {
    json_reply(error.status, &error.body())
}

fn json_reply(status: StatusCode, value: &Value) -> Reply {
    reply(status, "application/json", Bytes::from(value.to_string()))
}

fn reply(status: StatusCode, kind: &'static str, body: Bytes) -> Reply {
    let mut response = Response::new(ResponseBody::Whole(Some(body)));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

/// The vLLM whose shapes are imitated, with a local version label that says who does it.
const VERSION: &str = concat!("0.32.0+kvlane.", env!("CARGO_PKG_VERSION"));

/// Bound of one request body.
const MAX_BODY_BYTES: usize = 64 << 20;
