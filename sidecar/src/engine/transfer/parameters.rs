//! `kv_transfer_params` as vLLM 0.32 writes and reads them.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::Refusal;
use super::ledger::Description;
use super::rooms::{KvProtocol, Meeting, transfer_id};

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Asked {
    /// Nothing of a handoff.
    Nothing,
    /// To hold the prompt's KV for another engine.
    HandOver,
    /// To fetch it.
    Fetch(Source),
    /// To hold it in a room until it is taken.
    Open(String),
    /// To take it from a room.
    Join(Meeting),
}

/// Where a prompt's KV lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::engine) struct Source {
    pub(super) engine_id: String,
    pub(super) request_id: String,
    pub(super) host: String,
    pub(super) port: u16,
}

impl Asked {
    /// Reads the field as vLLM with this connector does; unknown keys in it are ignored.
    pub(in crate::engine) fn read(
        protocol: KvProtocol,
        parameters: &Value,
    ) -> Result<Self, Refusal> {
        let set = |name: &str| parameters.get(name) == Some(&Value::Bool(true));
        let rooms = protocol == KvProtocol::Mooncake;
        let asked = match (set("do_remote_prefill"), set("do_remote_decode")) {
            (true, _) if rooms => Meeting::of_mooncake(parameters).map(Self::Join),
            (true, _) => Source::read(parameters).map(Self::Fetch),
            (false, true) if rooms => transfer_id(parameters).map(Self::Open),
            (false, true) => Some(Self::HandOver),
            (false, false) => Some(Self::Nothing),
        };
        asked.ok_or(Refusal::Incomplete)
    }
}

impl Source {
    pub(super) fn read(parameters: &Value) -> Option<Self> {
        let text = |name: &str| {
            let text = parameters.get(name)?.as_str()?;
            (!text.is_empty() && text.len() <= MAX_TEXT).then(|| text.to_owned())
        };
        let port = parameters.get("remote_port")?.as_u64()?;
        Some(Self {
            engine_id: text("remote_engine_id")?,
            request_id: text("remote_request_id")?,
            host: text("remote_host")?,
            port: u16::try_from(port).ok().filter(|port| *port != 0)?,
        })
    }
}

/// Bound of a name on the wire; ids of requests have a few dozen bytes.
pub(super) const MAX_TEXT: usize = 512;

/// Writes the reply of a prefill leg.
pub(super) fn filled(
    held: &Description,
    engine_id: &str,
    address: SocketAddr,
    cached_tokens: usize,
) -> Value {
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [held.blocks],
        "remote_engine_id": engine_id, "remote_request_id": held.name,
        "remote_host": address.ip().to_string(), "remote_port": address.port(),
        "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": held.tokens,
        "remote_blocks_expiry_time": held.expires_unix_seconds, "transfer_mode": "pull",
        "remote_prefill_cached_tokens": cached_tokens,
    })
}

/// Turns a reply into that of an engine that pushes: where the blocks lie is its own business.
pub(super) fn pushed(mut reply: Value) -> Value {
    reply["transfer_mode"] = json!("push");
    reply["remote_block_ids"] = json!([]);
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_filled_in_reads_back_and_parts_of_it_do_not() {
        let held = Description {
            name: "cmpl-x-0-1".into(),
            blocks: vec![1, 2],
            tokens: 30,
            expires_unix_seconds: 5.0,
        };
        let address = SocketAddr::from(([127, 0, 0, 1], 5600));
        let whole = filled(&held, "engine", address, 16);
        assert_eq!(whole["remote_block_ids"], json!([[1, 2]]));
        let read = |value: &Value| Asked::read(KvProtocol::Nixl, value);
        let Ok(Asked::Fetch(source)) = read(&whole) else {
            panic!("{whole}");
        };
        assert_eq!(
            (source.host.as_str(), source.port, source.engine_id.as_str()),
            ("127.0.0.1", 5600, "engine")
        );
        for name in [
            "remote_engine_id",
            "remote_request_id",
            "remote_host",
            "remote_port",
        ] {
            let mut part = whole.clone();
            part[name] = Value::Null;
            assert_eq!(read(&part), Err(Refusal::Incomplete), "{name}");
        }
        let asks = json!({"do_remote_decode": true, "do_remote_prefill": false});
        assert_eq!(read(&asks), Ok(Asked::HandOver));
        for nothing in [json!({}), json!(null), json!("text")] {
            assert_eq!(read(&nothing), Ok(Asked::Nothing));
        }
    }
}
