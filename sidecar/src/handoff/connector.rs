//! Which protocol two workers speak, and what follows from it.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Mooncake, Nixl, Protocol, Sglang};

/// How an engine hands KV caches over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Connector {
    /// vLLM's `NixlConnector` and `NixlPushConnector`.
    Nixl,
    /// SGLang's disaggregation modes.
    Sglang,
    /// vLLM's `MooncakeConnector`.
    Mooncake,
}

impl Connector {
    /// Every connector.
    pub const ALL: [Self; 3] = [Self::Nixl, Self::Sglang, Self::Mooncake];

    /// Returns its name in configurations and labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Nixl => "nixl",
            Self::Sglang => "sglang",
            Self::Mooncake => "mooncake",
        }
    }

    /// Reads a name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|connector| connector.as_str() == name)
    }

    /// Returns what is written to two workers that hand over so; the prefill worker holds what nobody fetches for `lease`.
    #[must_use]
    pub fn protocol(self, lease: Duration) -> Arc<dyn Protocol> {
        match self {
            Self::Nixl => Arc::new(Nixl::new(lease)),
            Self::Sglang => Arc::new(Sglang),
            Self::Mooncake => Arc::new(Mooncake),
        }
    }

    /// Tells whether a decode worker can process a prompt itself. SGLang's refuses whatever comes without a room.
    #[must_use]
    pub const fn decoder_serves_alone(self) -> bool {
        !matches!(self, Self::Sglang)
    }

    /// Finds the connector that an engine's `/server_info` tells of: SGLang's mode, or vLLM's connector anywhere in it (its
    /// shape depends on the version and on the query).
    pub(crate) fn told(info: &serde_json::Value) -> Option<Self> {
        let mode = info
            .get("disaggregation_mode")
            .and_then(|mode| mode.as_str());
        if matches!(mode, Some("prefill" | "decode")) {
            return Some(Self::Sglang);
        }
        let text = info.to_string();
        let names = [
            ("MooncakeConnector", Self::Mooncake),
            ("NixlConnector", Self::Nixl),
            ("NixlPushConnector", Self::Nixl),
        ];
        let told = names.into_iter().find(|(name, _)| text.contains(name));
        told.map(|(_, connector)| connector)
    }
}

/// The configured choice of connectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProtocolChoice {
    /// What a worker's label `connector` or its engine says; NIXL where neither does.
    #[default]
    Auto,
    /// NIXL for every pair.
    Nixl,
    /// SGLang's rooms for every pair.
    Sglang,
    /// Mooncake for every pair.
    Mooncake,
}

impl ProtocolChoice {
    /// Returns the connector of every worker; `None` when each is asked.
    #[must_use]
    pub const fn fixed(self) -> Option<Connector> {
        match self {
            Self::Auto => None,
            Self::Nixl => Some(Connector::Nixl),
            Self::Sglang => Some(Connector::Sglang),
            Self::Mooncake => Some(Connector::Mooncake),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn engines_tell_of_their_connector_in_several_shapes() {
        for (info, told) in [
            (
                json!({"disaggregation_mode": "decode", "version": "0.5.10"}),
                Some(Connector::Sglang),
            ),
            (json!({"disaggregation_mode": "null"}), None),
            (
                json!({"vllm_config": "..., kv_transfer_config=KVTransferConfig(kv_connector='NixlConnector')"}),
                Some(Connector::Nixl),
            ),
            (
                json!({"kv_transfer_config": {"kv_connector": "MooncakeConnector"}}),
                Some(Connector::Mooncake),
            ),
            (json!({"kv_transfer_config": null}), None),
            (json!("text"), None),
        ] {
            assert_eq!(Connector::told(&info), told, "{info}");
        }
        for connector in Connector::ALL {
            assert_eq!(Connector::parse(connector.as_str()), Some(connector));
        }
    }
}
