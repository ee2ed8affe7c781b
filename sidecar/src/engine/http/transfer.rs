//! Handoffs in requests and replies.

use std::fmt::Write;

use hyper::StatusCode;
use serde_json::Value;

use super::Service;
use super::error::ApiError;
use super::request::Job;
use crate::engine::sequence::Handoff;
use crate::engine::transfer::{Asked, Preparing, Refusal};

/// What is done about a handoff while a request is served.
#[derive(Debug)]
pub(super) enum Handing {
    Nothing,
    Over(Preparing),
    Fetched,
}

/// Reads `kv_transfer_params`. Only a request for one whole answer can hand over: a stream has no place for the reply's
/// parameters.
pub(super) fn read(
    parameters: Option<&Value>,
    service: &Service,
    whole: bool,
) -> Result<Asked, ApiError> {
    let Some(parameters) = parameters.filter(|parameters| !parameters.is_null()) else {
        return Ok(Asked::Nothing);
    };
    let Some(connector) = &service.connector else {
        tracing::warn!("kv_transfer_params ignored: this engine has no KV connector");
        return Ok(Asked::Nothing);
    };
    match Asked::read(parameters) {
        Ok(Asked::HandOver) if !whole => {
            tracing::warn!("nothing is handed over by a stream or by several sequences");
            Ok(Asked::Nothing)
        }
        Ok(asked) => Ok(asked),
        Err(reason) => {
            connector.ledger.count_fetch(Err(reason));
            Err(refused(reason))
        }
    }
}

/// Prepares what the request asks for: fetches the prompt's KV, or announces that it will be held.
pub(super) async fn prepare(service: &Service, id: &str, job: &Job) -> Result<Handing, ApiError> {
    let (Some(connector), Some(prompt)) = (&service.connector, job.prompts.first()) else {
        return Ok(Handing::Nothing);
    };
    match &job.asked {
        Asked::Nothing => Ok(Handing::Nothing),
        Asked::HandOver => {
            let content = connector.content(prompt, job.salt.as_deref());
            Ok(Handing::Over(connector.ledger.prepare(id, content)))
        }
        Asked::Fetch(source) => {
            if job.prompts.len() > 1 {
                // They lead to one prompt's KV.
                connector.ledger.count_fetch(Err(Refusal::Foreign));
                return Err(refused(Refusal::Foreign));
            }
            let content = connector.content(prompt, job.salt.as_deref());
            let fetched = connector.fetch(source, &content).await;
            fetched.map(|()| Handing::Fetched).map_err(refused)
        }
    }
}

impl Handing {
    /// Returns what the step loop must know.
    pub(super) fn part(&self) -> Handoff {
        match self {
            Self::Nothing => Handoff::Whole,
            Self::Over(preparing) => Handoff::HandOver(preparing.name().clone()),
            Self::Fetched => Handoff::Fetched,
        }
    }

    /// Writes into the answer where the prompt's KV is held.
    pub(super) fn fill(&self, service: &Service, answer: &mut Value) {
        if let (Self::Over(preparing), Some(connector)) = (self, &service.connector) {
            let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
            let cached = usize::try_from(cached.unwrap_or(0)).unwrap_or(usize::MAX);
            answer["kv_transfer_params"] = connector.parameters(preparing.name(), cached);
        }
    }
}

/// vLLM answers 500 when KV cannot be loaded and its policy is to fail, the default.
fn refused(reason: Refusal) -> ApiError {
    ApiError::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        "InternalServerError",
        format!("The KV cache could not be fetched: {reason}."),
    )
}

/// Returns what the engine counts of handoffs, as lines of its metrics page.
pub(super) fn metrics(service: &Service) -> String {
    let Some(connector) = &service.connector else {
        return String::new();
    };
    let stats = connector.ledger.stats();
    let mut page = String::new();
    for (name, kind, help, value) in [
        (
            "vllm:nixl_num_kv_expired_reqs_total",
            "counter",
            "Prefills whose lease ended.",
            stats.expired,
        ),
        (
            "kvlane_engine_held_prefills",
            "gauge",
            "Prefills held for other engines.",
            stats.held as u64,
        ),
        (
            "kvlane_engine_handed_over_total",
            "counter",
            "Prefills that were ever held.",
            stats.handed_over,
        ),
        (
            "kvlane_engine_collected_total",
            "counter",
            "Of those, fetched by another engine.",
            stats.collected,
        ),
        (
            "kvlane_engine_fetched_total",
            "counter",
            "Prompts fetched from other engines.",
            stats.fetched,
        ),
    ] {
        // Writing to a string cannot fail.
        let _ = writeln!(
            page,
            "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}"
        );
    }
    let name = "kvlane_engine_refused_fetches_total";
    let _ = writeln!(
        page,
        "# HELP {name} Fetches that were refused or failed, by reason.\n# TYPE {name} counter"
    );
    for reason in Refusal::ALL {
        let _ = writeln!(
            page,
            "{name}{{reason=\"{reason}\"}} {}",
            stats.refused(reason)
        );
    }
    page
}
