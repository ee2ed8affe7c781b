//! Handoffs in requests and replies.

use std::fmt::Write;

use hyper::StatusCode;
use kvlane::Role;
use serde_json::{Map, Value, json};

use super::Service;
use super::error::ApiError;
use super::request::Job;
use crate::engine::sequence::Handoff;
use crate::engine::transfer::{
    Asked, Connector, KvProtocol, Means, OpenRoom, Preparing, Refusal, RoomFields, TransferStats,
};

/// What is done about a handoff while a request is served.
#[derive(Debug)]
pub(super) enum Handing {
    Nothing,
    Over(Preparing),
    /// Into a room, which is closed before the claim is dropped.
    InRoom(OpenRoom, Preparing),
    Fetched,
}

/// Reads what is asked of a handoff. Only a request for one whole answer can hand over: a stream has no place for the
/// reply's parameters.
pub(super) fn read(
    parameters: Option<&Value>,
    rooms: RoomFields<'_>,
    service: &Service,
    whole: bool,
) -> Result<Asked, ApiError> {
    if let Some(connector) = &service.connector
        && connector.protocol == KvProtocol::Sglang
    {
        return sglang(rooms, service.role);
    }
    let Some(parameters) = parameters.filter(|parameters| !parameters.is_null()) else {
        return Ok(Asked::Nothing);
    };
    let Some(connector) = &service.connector else {
        tracing::warn!("kv_transfer_params ignored: this engine has no KV connector");
        return Ok(Asked::Nothing);
    };
    match Asked::read(connector.protocol, parameters) {
        Ok(Asked::HandOver | Asked::Open(_)) if !whole => {
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

/// SGLang is told by its own start what it does with a room. It refuses a request without one, as real servers in these
/// modes do: neither kind can serve a request alone.
fn sglang(rooms: RoomFields<'_>, role: Role) -> Result<Asked, ApiError> {
    if role == Role::Both {
        return Ok(Asked::Nothing);
    }
    let Some(meeting) = rooms.meeting() else {
        let message = "Disaggregated request received without a bootstrap room.";
        return Err(ApiError::bad_request(message, Some("bootstrap_room")));
    };
    Ok(match role {
        Role::Prefill => Asked::Open(meeting.into_room()),
        _ => Asked::Join(meeting),
    })
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
        Asked::Open(room) => {
            let content = connector.content(prompt, job.salt.as_deref());
            let preparing = connector.ledger.prepare(id, content);
            let opened = connector
                .rooms
                .open(room, &connector.ledger, preparing.name());
            match opened {
                Ok(room) => Ok(Handing::InRoom(room, preparing)),
                Err(reason) => {
                    connector.ledger.count_fetch(Err(reason));
                    Err(refused(reason))
                }
            }
        }
        Asked::Fetch(_) | Asked::Join(_) if job.prompts.len() > 1 => {
            // They lead to one prompt's KV.
            connector.ledger.count_fetch(Err(Refusal::Foreign));
            Err(refused(Refusal::Foreign))
        }
        Asked::Fetch(source) => {
            let content = connector.content(prompt, job.salt.as_deref());
            let fetched = connector.fetch(source, &content).await;
            fetched.map(|()| Handing::Fetched).map_err(refused)
        }
        Asked::Join(meeting) => {
            let content = connector.content(prompt, job.salt.as_deref());
            let taken = connector.join(meeting, &content).await;
            taken.map(|()| Handing::Fetched).map_err(refused)
        }
    }
}

impl Handing {
    /// Returns what the step loop must know.
    pub(super) fn part(&self) -> Handoff {
        match self {
            Self::Nothing => Handoff::Whole,
            Self::Over(preparing) | Self::InRoom(_, preparing) => {
                Handoff::HandOver(preparing.name().clone())
            }
            Self::Fetched => Handoff::Fetched,
        }
    }

    /// Waits until what lies in a room was taken: only then the prefill leg is answered.
    pub(super) async fn settle(&self) -> Result<(), ApiError> {
        match self {
            Self::InRoom(room, _) => room.taken().await.map_err(refused),
            Self::Nothing | Self::Over(_) | Self::Fetched => Ok(()),
        }
    }

    /// Writes into the answer where the prompt's KV is held.
    pub(super) async fn fill(&self, service: &Service, answer: &mut Value) {
        if let (Self::Over(preparing), Some(connector)) = (self, &service.connector) {
            connector.fill(preparing.name()).await;
            let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
            let cached = usize::try_from(cached.unwrap_or(0)).unwrap_or(usize::MAX);
            answer["kv_transfer_params"] = connector.parameters(preparing.name(), cached);
        }
    }
}

/// Returns what the two kinds of engines tell of their connectors, where they tell anything.
pub(super) fn server_info(connector: &Connector, role: Role) -> Map<String, Value> {
    let kv_role = match role {
        Role::Prefill => "kv_producer",
        Role::Decode => "kv_consumer",
        Role::Both => "kv_both",
    };
    let vllm =
        |name: &str| json!({"kv_transfer_config": {"kv_connector": name, "kv_role": kv_role}});
    let info = match connector.protocol {
        KvProtocol::Nixl => vllm("NixlConnector"),
        KvProtocol::Mooncake => vllm("MooncakeConnector"),
        KvProtocol::Sglang => {
            let mode = if role == Role::Both {
                json!("null")
            } else {
                json!(role)
            };
            let port = connector.bootstrap.map(|address| address.port());
            json!({"disaggregation_mode": mode, "disaggregation_bootstrap_port": port})
        }
    };
    match info {
        Value::Object(fields) => fields,
        _ => Map::new(),
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
            "kvlane_engine_moving_prefills",
            "gauge",
            "Of those, being read by another engine.",
            stats.moving as u64,
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
    moved(&stats, &mut page);
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

fn moved(stats: &TransferStats, page: &mut String) {
    for (name, help, is_time) in [
        (
            "kvlane_engine_moved_bytes_total",
            "KV bytes fetched from other engines, by how they moved.",
            false,
        ),
        (
            "kvlane_engine_moving_seconds_total",
            "Time of fetches from asking to the last byte, without checking it.",
            true,
        ),
    ] {
        let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} counter");
        for means in Means::ALL {
            let (bytes, elapsed) = stats.moved(means);
            let value = if is_time {
                elapsed.as_secs_f64().to_string()
            } else {
                bytes.to_string()
            };
            let _ = writeln!(page, "{name}{{transport=\"{}\"}} {value}", means.as_str());
        }
    }
}
