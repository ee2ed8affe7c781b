//! The admin listener: health, metrics, and the workers.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, ORIGIN};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use kvlane::{ErrorKind, Role};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::config::WorkerConfig;
use crate::net::HostPort;
use crate::pool::manager::ChangeError;
use crate::proxy::{Problem, ProxyBody, full};
use crate::request::{Endpoint, Trusted};

/// Largest body of an admin call.
const MAX_BODY: usize = 64 << 20;

const BEARER: &[u8] = b"Bearer ";

type Answer = Result<Response<ProxyBody>, Problem>;

/// Answers one admin call.
///
/// # Errors
/// Never; the type is what a connection wants.
pub async fn handle(
    app: Arc<App>,
    request: Request<Incoming>,
) -> Result<Response<ProxyBody>, Infallible> {
    Ok(answer(&app, request)
        .await
        .unwrap_or_else(|problem| problem.response()))
}

async fn answer(app: &App, request: Request<Incoming>) -> Answer {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().trim_end_matches('/').to_owned();
    if !matches!(parts.method, Method::GET | Method::HEAD) {
        // Before anything else, the body included: an unauthorised call has no effect at all.
        authorise(app, &parts.headers)?;
    }
    let query = parts.uri.query().unwrap_or_default();
    match (&parts.method, path.as_str()) {
        (&Method::GET | &Method::HEAD, path) => get(app, path, query),
        (&Method::POST, "/v1/workers") => add_worker(app, &read(body).await?),
        (&Method::POST, "/v1/overlap") => overlap(app, &read(body).await?).await,
        (&Method::POST, path) => match worker_call(path) {
            Some((id, "drain")) => done(
                app.drain_worker(&id, true),
                &json!({"id": id, "draining": true}),
            ),
            Some((id, "undrain")) => done(
                app.drain_worker(&id, false),
                &json!({"id": id, "draining": false}),
            ),
            Some((id, "role")) => set_role(app, &id, &read(body).await?),
            Some((id, "clear")) => done(
                app.router.clear(&id, None),
                &json!({"id": id, "cleared": true}),
            ),
            _ => Err(not_found(path)),
        },
        (&Method::DELETE, path) => match worker_call(path) {
            Some((id, "")) => done(app.remove_worker(&id), &json!({"id": id, "removed": true})),
            _ => Err(not_found(path)),
        },
        (method, path) => Err(Problem::new(
            StatusCode::METHOD_NOT_ALLOWED,
            &format!("{method} {path} is not an admin call"),
        )),
    }
}

fn get(app: &App, path: &str, query: &str) -> Answer {
    match path {
        "" => Ok(json_response(
            StatusCode::OK,
            &json!({
                "name": "kvlane",
                "version": env!("CARGO_PKG_VERSION"),
                "get": ["/livez", "/readyz", "/metrics", "/v1/workers", "/v1/pool", "/v1/decisions?limit=N", "/v1/config", "/v1/handoff", "/v1/processes", "/v1/processes/{name}/log"],
                "post": ["/v1/workers", "/v1/workers/{id}/drain", "/v1/workers/{id}/undrain", "/v1/workers/{id}/role", "/v1/workers/{id}/clear", "/v1/overlap"],
                "delete": ["/v1/workers/{id}"],
            }),
        )),
        "/livez" => Ok(json_response(StatusCode::OK, &json!({"live": true}))),
        "/readyz" if app.is_ready() => Ok(json_response(StatusCode::OK, &json!({"ready": true}))),
        "/readyz" => Ok(json_response(
            StatusCode::SERVICE_UNAVAILABLE,
            &json!({"ready": false}),
        )),
        "/metrics" => metrics(app),
        "/v1/workers" => Ok(json_response(
            StatusCode::OK,
            &json!({"workers": list_workers(app)}),
        )),
        "/v1/pool" => Ok(json_response(StatusCode::OK, &pool(app))),
        "/v1/decisions" => decisions(app, query),
        "/v1/config" => Ok(json_response(StatusCode::OK, &json!(*app.config))),
        "/v1/handoff" => Ok(json_response(
            StatusCode::OK,
            &json!({"handoff": app.proxy.handoff_report()}),
        )),
        _ => processes(app, path),
    }
}

/// Shows the engines that this sidecar keeps: `/v1/processes` and `/v1/processes/{name}/log`.
fn processes(app: &App, path: &str) -> Answer {
    let all = app.processes.get();
    let Some(rest) = path.strip_prefix("/v1/processes") else {
        return Err(not_found(path));
    };
    if rest.is_empty() {
        let report = all.map_or_else(|| json!({"processes": []}), |all| all.report());
        return Ok(json_response(StatusCode::OK, &report));
    }
    let name = rest
        .strip_prefix('/')
        .and_then(|rest| rest.strip_suffix("/log"))
        .and_then(percent_decoded)
        .ok_or_else(|| not_found(path))?;
    let log = all.and_then(|all| all.log(&name)).ok_or_else(|| {
        let message = format!("process {name:?} is not kept here; GET /v1/processes lists them");
        Problem::new(StatusCode::NOT_FOUND, &message)
    })?;
    Ok(json_response(StatusCode::OK, &log))
}

/// Lets a changing call pass only with the key, when there is one, and never from another site's page in a browser.
fn authorise(app: &App, headers: &HeaderMap) -> Result<(), Problem> {
    if let Some(key) = &app.config.admin_key {
        let given = headers
            .get(AUTHORIZATION)
            .map(HeaderValue::as_bytes)
            .and_then(|value| value.split_at_checked(BEARER.len()))
            .and_then(|(scheme, key)| scheme.eq_ignore_ascii_case(BEARER).then_some(key));
        if !given.is_some_and(|given| key.matches(given)) {
            return Err(Problem::new(
                StatusCode::UNAUTHORIZED,
                "this call needs the admin key: send it as Authorization: Bearer KEY",
            ));
        }
        return Ok(());
    }
    let Some(origin) = headers.get(ORIGIN) else {
        return Ok(());
    };
    let host = headers
        .get(HOST)
        .and_then(|host| host.to_str().ok())
        .unwrap_or_default();
    // A name that a page's owner lets point here makes both the same; a listener that only this machine reaches has none.
    let is_own_name = !app.config.admin.is_loopback()
        || HostPort::parse(host, Some(80)).is_ok_and(|host| host.is_loopback());
    let is_same = origin
        .to_str()
        .is_ok_and(|origin| origin.strip_prefix("http://") == Some(host));
    if is_same && is_own_name {
        return Ok(());
    }
    Err(Problem::new(
        StatusCode::FORBIDDEN,
        "changing calls from another site's page are refused",
    ))
}

fn metrics(app: &App) -> Answer {
    let balance = app.rebalancer.get();
    let balance = balance.map(|rebalancer| rebalancer.balance());
    let encoded = app.metrics.encode(
        &app.router,
        &app.fleet,
        app.pool.report(),
        balance.unwrap_or_default(),
    );
    let text = encoded.map_err(|_| {
        Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the metrics could not be written",
        )
    })?;
    let mut response = Response::new(full(text));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}

fn list_workers(app: &App) -> Vec<Value> {
    let members = app.fleet.members();
    let workers = members.list().iter().map(|worker| worker.id());
    let mismatches: HashMap<_, _> = workers.zip(members.mismatches()).collect();
    let describe = |info: kvlane::WorkerInfo| {
        let mut value = serde_json::to_value(&info).unwrap_or_default();
        if let (Some(worker), Some(object)) =
            (members.find(info.id.as_str()), value.as_object_mut())
        {
            object.insert("url".to_owned(), Value::from(worker.config.url.to_string()));
            let streams = worker.streams();
            let events = streams.as_ref().map(|streams| &streams.events);
            let events = events.or(worker.config.events.as_ref());
            let replay = streams.as_ref().and_then(|streams| streams.replay.as_ref());
            let replay = replay.or(worker.config.replay.as_ref());
            object.insert("events".to_owned(), json!(events));
            object.insert("replay".to_owned(), json!(replay));
            object.insert("engine".to_owned(), json!(worker.described()));
            object.insert("mismatches".to_owned(), json!(mismatches.get(worker.id())));
            object.insert("healthy".to_owned(), json!(worker.healthy()));
            object.insert(
                "breaker".to_owned(),
                Value::from(worker.breaker_state().as_str()),
            );
            object.insert("in_flight".to_owned(), json!(worker.in_flight()));
            let (state, cause) = worker.state();
            object.insert("state".to_owned(), json!(state));
            object.insert("cause".to_owned(), json!(cause));
            object.insert("epoch".to_owned(), json!(worker.epoch()));
            object.insert("source".to_owned(), json!(*worker.source()));
            object.insert("instance".to_owned(), json!(worker.instance()));
            let models: Vec<_> = worker
                .models()
                .iter()
                .map(|model| model.id.clone())
                .collect();
            object.insert("models".to_owned(), json!(models));
        }
        value
    };
    app.router
        .workers(Instant::now())
        .into_iter()
        .map(describe)
        .collect()
}

fn decisions(app: &App, query: &str) -> Answer {
    let limit = query
        .split('&')
        .find_map(|pair| pair.strip_prefix("limit="));
    let limit = match limit.map(str::parse::<usize>) {
        None => 50,
        Some(Ok(limit)) if (1..=1000).contains(&limit) => limit,
        Some(_) => {
            return Err(Problem::new(
                StatusCode::BAD_REQUEST,
                "limit: 1 to 1,000 is accepted",
            ));
        }
    };
    Ok(json_response(
        StatusCode::OK,
        &json!({"decisions": with_plans(app, limit)}),
    ))
}

/// Returns the last decisions, each with what a handoff plan said of it, where there was one.
fn with_plans(app: &App, limit: usize) -> Vec<Value> {
    let mut plans = app.proxy.handoff_summaries();
    let decisions = app.router.decisions(limit).into_iter();
    let with_plan = |decision: kvlane::DecisionRecord| {
        let mut value = serde_json::to_value(&decision).unwrap_or_default();
        if let (Some(plan), Some(fields)) = (plans.remove(&decision.lease), value.as_object_mut()) {
            fields.insert("handoff".to_owned(), (*plan).clone());
        }
        value
    };
    decisions.map(with_plan).collect()
}

fn add_worker(app: &App, body: &[u8]) -> Answer {
    let fields: Map<String, Value> = serde_json::from_slice(body).map_err(|error| {
        Problem::new(
            StatusCode::BAD_REQUEST,
            &format!("a JSON object with id and url is accepted: {error}"),
        )
    })?;
    let worker = WorkerConfig::from_fields(&fields)
        .map_err(|error| Problem::new(StatusCode::BAD_REQUEST, &error))?;
    let (id, added) = (worker.id.clone(), json!(worker));
    match app.add_worker(worker) {
        Err(ChangeError::Taken { source }) => {
            let message =
                format!("worker {id:?} is registered already, by source {source}; remove it first");
            Err(Problem::new(StatusCode::CONFLICT, &message))
        }
        Err(ChangeError::Refused(error)) => done(Err(error), &added),
        Ok(()) => done(Ok(()), &added),
    }
}

/// Changes what a worker does.
fn set_role(app: &App, id: &str, body: &[u8]) -> Answer {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Wanted {
        role: Role,
    }
    // A list would be read as the values of the keys in their order.
    let fields = serde_json::from_slice(body).map(Value::Object);
    let wanted: Wanted = fields.and_then(serde_json::from_value).map_err(|error| {
        let message = format!(
            "a JSON object with role is accepted, which is prefill, decode or both: {error}"
        );
        Problem::new(StatusCode::BAD_REQUEST, &message)
    })?;
    done(
        app.set_role(id, wanted.role),
        &json!({"id": id, "role": wanted.role}),
    )
}

/// Tells of the members, of the sources that told of them, and of what these disagree about.
fn pool(app: &App) -> Value {
    let members = app.fleet.members();
    let members = members.list().iter().map(|worker| {
        let (state, cause) = worker.state();
        json!({
            "id": worker.id(),
            "source": *worker.source(),
            "instance": worker.instance(),
            "epoch": worker.epoch(),
            "role": worker.role(),
            "state": state,
            "cause": cause,
            "in_flight": worker.in_flight(),
        })
    });
    let members: Vec<Value> = members.collect();
    let mut pool = json!(app.pool.report());
    pool["members"] = Value::from(members);
    if let Some(rebalancer) = app.rebalancer.get() {
        pool["planner"] = rebalancer.report();
    }
    pool
}

/// Tells what the index knows of a prompt, given as `tokens`, `prompt` or `messages`.
async fn overlap(app: &App, body: &[u8]) -> Answer {
    let bad = |message: &str| Problem::new(StatusCode::BAD_REQUEST, message);
    let mut fields: Map<String, Value> = serde_json::from_slice(body).map_err(|error| {
        bad(&format!(
            "a JSON object with tokens, prompt or messages is accepted: {error}"
        ))
    })?;
    let given = ["tokens", "prompt", "messages"].map(|name| fields.contains_key(name));
    let endpoint = match given {
        [true, false, false] | [false, true, false] => Endpoint::Completions,
        [false, false, true] => Endpoint::Chat,
        _ => {
            return Err(bad(
                "exactly one of tokens, prompt and messages is accepted",
            ));
        }
    };
    if let Some(tokens) = fields.remove("tokens") {
        let is_token = |token: &Value| token.as_u64().is_some_and(|id| u32::try_from(id).is_ok());
        if !tokens
            .as_array()
            .is_some_and(|list| list.iter().all(is_token))
        {
            return Err(bad(
                "tokens: a list of numbers from 0 to 4,294,967,295 is accepted",
            ));
        }
        fields.insert("prompt".to_owned(), tokens);
    }
    let body = Bytes::from(Value::Object(fields).to_string());
    let (reader, members) = (Arc::clone(&app.reader), app.fleet.members());
    // Tokenizing a long prompt is no work for the event loop.
    let reading = tokio::task::spawn_blocking(move || {
        reader.read(endpoint, body, &Trusted::default(), &members)
    });
    let reading = reading.await.map_err(|_| {
        Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the prompt could not be read because of a fault in the router",
        )
    })?;
    let overlaps = app.router.overlap(&reading.prompt, Instant::now());
    let list: Vec<Value> = overlaps
        .into_iter()
        .map(|(target, overlap)| json!({"worker": target.worker, "dp_rank": target.dp_rank, "blocks": overlap}))
        .collect();
    Ok(json_response(
        StatusCode::OK,
        &json!({
            "mode": reading.mode.as_str(),
            "request_blocks": reading.prompt.blocks(),
            "tokens": reading.prompt.tokens(),
            "overlap": list,
        }),
    ))
}

/// Splits `/v1/workers/{id}` and `/v1/workers/{id}/{call}`.
fn worker_call(path: &str) -> Option<(String, &str)> {
    let rest = path.strip_prefix("/v1/workers/")?;
    let (id, call) = rest.split_once('/').unwrap_or((rest, ""));
    Some((percent_decoded(id)?, call))
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        if byte == b'%' {
            let code = std::str::from_utf8(tail.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(code, 16).ok()?);
            rest = &tail[2..];
        } else {
            bytes.push(byte);
            rest = tail;
        }
    }
    String::from_utf8(bytes).ok()
}

async fn read(body: Incoming) -> Result<Bytes, Problem> {
    let collected = tokio::time::timeout(
        Duration::from_secs(30),
        Limited::new(body, MAX_BODY).collect(),
    )
    .await;
    match collected {
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => Err(Problem::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            &format!("the body of an admin call is larger than {MAX_BODY} bytes"),
        )),
        Ok(Err(_)) => Err(Problem::new(
            StatusCode::BAD_REQUEST,
            "the body ended before it was complete",
        )),
        Err(_) => Err(Problem::new(
            StatusCode::REQUEST_TIMEOUT,
            "the body stopped arriving",
        )),
    }
}

fn done(result: kvlane::Result<()>, answer: &Value) -> Answer {
    result
        .map(|()| json_response(StatusCode::OK, answer))
        .map_err(|error| Problem::new(status_of(error.kind()), &error.to_string()))
}

/// The HTTP status of each kind of error.
const fn status_of(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::Config | ErrorKind::InvalidRequest => StatusCode::BAD_REQUEST,
        ErrorKind::UnknownWorker => StatusCode::NOT_FOUND,
        ErrorKind::Overloaded | ErrorKind::Closed => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

fn not_found(path: &str) -> Problem {
    Problem::new(
        StatusCode::NOT_FOUND,
        &format!("{path} is not an admin path; GET / lists them"),
    )
}

fn json_response(status: StatusCode, value: &Value) -> Response<ProxyBody> {
    let mut response = Response::new(full(value.to_string()));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_error_has_a_status_of_its_own_choice() {
        for kind in ErrorKind::ALL {
            assert_ne!(
                status_of(kind),
                StatusCode::INTERNAL_SERVER_ERROR,
                "{kind:?}"
            );
        }
    }

    #[test]
    fn worker_paths_are_split_and_decoded() {
        assert_eq!(
            worker_call("/v1/workers/w1/drain"),
            Some(("w1".to_owned(), "drain"))
        );
        assert_eq!(
            worker_call("/v1/workers/a%2Fb%20c"),
            Some(("a/b c".to_owned(), ""))
        );
        assert_eq!(worker_call("/v1/workers/%zz"), None);
        assert_eq!(worker_call("/v1/other"), None);
    }
}
