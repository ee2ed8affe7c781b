//! vLLM with Mooncake: both legs run at once under one transfer id.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::request::Endpoint;

use super::leg::{Dialect, Leg, LegContext, local_body, prefill_body, vllm_leg};
use super::ticket::{Expired, Ticket};
use super::{LegOrder, Protocol};

/// vLLM's `MooncakeConnector`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mooncake;

/// Nothing is held before both legs are there; this bounds the wait for admission only.
const VALID: Duration = Duration::from_secs(240);

impl Protocol for Mooncake {
    fn order(&self) -> LegOrder {
        LegOrder::Concurrent
    }

    /// Needs the prefill rank's engine id, which its bootstrap service tells (`GET /query`) and a restart changes.
    fn introduce(&self, context: &LegContext<'_>, now: Instant) -> Option<Ticket> {
        let engine = context.prefill_engine?;
        let address = format!("http://{}:{}", context.prefill_host, context.bootstrap_port);
        let parameters = json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "transfer_id": transfer_id(context.random),
            "remote_engine_id": engine,
            "remote_bootstrap_addr": address,
        });
        Some(Ticket::new(parameters, now, VALID))
    }

    fn prefill(
        &self,
        endpoint: Endpoint,
        body: &Value,
        ticket: Option<&Ticket>,
        context: &LegContext<'_>,
    ) -> Leg {
        let body = prefill_body(Dialect::Vllm, endpoint, body);
        let transfer_id = ticket.and_then(|ticket| ticket.parameter("transfer_id"));
        let asked = json!({
            "do_remote_decode": true,
            "do_remote_prefill": false,
            "transfer_id": transfer_id,
        });
        vllm_leg(body, asked, context.prefill_rank)
    }

    fn handed_over(&self, _reply: &mut Value, _now: Instant) -> Option<Ticket> {
        None
    }

    fn decode(
        &self,
        body: Value,
        ticket: Ticket,
        context: &LegContext<'_>,
        now: Instant,
    ) -> Result<Leg, Expired> {
        let parameters = ticket.redeem(now)?;
        Ok(vllm_leg(local_body(body), parameters, context.decode_rank))
    }
}

/// Returns the id in the shape of a version-4 UUID.
fn transfer_id(random: u128) -> String {
    let hex = format!("{random:032x}");
    format!(
        "xfer-{}-{}-4{}-8{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[13..16],
        &hex[17..20],
        &hex[20..]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> LegContext<'static> {
        LegContext {
            request_id: "rid",
            prefill_host: "[fd00::7]",
            bootstrap_port: 8_998,
            prefill_engine: Some("engine-0"),
            prefill_rank: (1, 2),
            decode_rank: (3, 4),
            random: 0x0123_4567_89ab_cdef_0123_4567_89ab_cdef,
        }
    }

    #[test]
    fn both_legs_carry_one_transfer_id() {
        let body = json!({"prompt": "x", "max_tokens": 50, "stop": ["y"], "kv_transfer_params": 1});
        let now = Instant::now();
        let ticket = Mooncake.introduce(&context(), now).unwrap();
        let prefill = Mooncake.prefill(Endpoint::Completions, &body, Some(&ticket), &context());
        let decode = Mooncake.decode(body, ticket, &context(), now).unwrap();
        let id = "xfer-01234567-89ab-4def-8123-456789abcdef";
        // It must end by length, or it is not sent.
        let expected = json!({"prompt": "x", "max_tokens": 1, "stream": false, "ignore_eos": true,
            "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id}});
        assert_eq!(prefill.body, expected);
        assert_eq!(prefill.headers, [("x-data-parallel-rank", "1".to_owned())]);
        let expected = json!({"prompt": "x", "max_tokens": 50, "stop": ["y"],
            "kv_transfer_params": {"do_remote_prefill": true, "do_remote_decode": false, "transfer_id": id,
                "remote_engine_id": "engine-0", "remote_bootstrap_addr": "http://[fd00::7]:8998"}});
        assert_eq!(decode.body, expected);
        assert_eq!(decode.headers, [("x-data-parallel-rank", "3".to_owned())]);
    }

    #[test]
    fn without_the_engines_id_nothing_can_be_handed_over() {
        let context = LegContext {
            prefill_engine: None,
            ..context()
        };
        assert!(Mooncake.introduce(&context, Instant::now()).is_none());
    }
}
