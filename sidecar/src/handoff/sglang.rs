//! SGLang: both legs run at once and meet in a room of the prefill worker's bootstrap service.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::request::Endpoint;

use super::leg::{Dialect, Leg, LegContext, local_body, prefill_body, set};
use super::ticket::{Expired, Ticket};
use super::{LegOrder, Protocol};

/// SGLang's `--disaggregation-mode prefill` and `decode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sglang;

/// Nothing is held before both legs are there, so a room may wait for admission as long as either leg would wait for the
/// other (300 s), less a margin.
const VALID: Duration = Duration::from_secs(240);

const FIELDS: [&str; 3] = ["bootstrap_host", "bootstrap_port", "bootstrap_room"];

impl Sglang {
    /// Returns a room that no other request has, below 2^53: whatever reads it as a floating-point number reads it right.
    ///
    /// A decode worker takes `room mod ranks` for the prefill's rank.
    fn room(random: u128, (rank, ranks): (u32, u32)) -> u64 {
        // The upper 52 bits of the lower half.
        let random = u64::try_from(random & u128::from(u64::MAX)).unwrap_or(0) >> 12;
        let ranks = u64::from(ranks.max(1));
        random - random % ranks + u64::from(rank) % ranks
    }
}

impl Protocol for Sglang {
    fn order(&self) -> LegOrder {
        LegOrder::Concurrent
    }

    fn introduce(&self, context: &LegContext<'_>, now: Instant) -> Option<Ticket> {
        let room = Self::room(context.random, context.prefill_rank);
        let parameters = json!({
            "bootstrap_host": context.prefill_host,
            "bootstrap_port": context.bootstrap_port,
            "bootstrap_room": room,
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
        let mut body = prefill_body(Dialect::Sglang, endpoint, body);
        for name in FIELDS {
            if let Some(value) = ticket.and_then(|ticket| ticket.parameter(name)) {
                set(&mut body, name, value.clone());
            }
        }
        set_rank(&mut body, "routed_dp_rank", context.prefill_rank);
        Leg {
            body,
            headers: Vec::new(),
        }
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
        let mut body = local_body(body);
        if let Value::Object(parameters) = ticket.redeem(now)? {
            for (name, value) in parameters {
                set(&mut body, &name, value);
            }
        }
        set_rank(&mut body, "routed_dp_rank", context.decode_rank);
        set_rank(&mut body, "disagg_prefill_dp_rank", context.prefill_rank);
        Ok(Leg {
            body,
            headers: Vec::new(),
        })
    }
}

/// Names a rank where there are several.
fn set_rank(body: &mut Value, name: &str, (rank, ranks): (u32, u32)) {
    if ranks > 1 {
        set(body, name, json!(rank));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> LegContext<'static> {
        LegContext {
            request_id: "rid",
            prefill_host: "10.0.0.7",
            bootstrap_port: 8_998,
            prefill_engine: None,
            prefill_rank: (2, 4),
            decode_rank: (0, 1),
            random: u128::MAX,
        }
    }

    #[test]
    fn both_legs_meet_in_one_room() {
        let body = json!({"messages": [], "max_tokens": 50, "stream": true, "bootstrap_room": 666});
        let now = Instant::now();
        let ticket = Sglang.introduce(&context(), now).unwrap();
        let prefill = Sglang.prefill(Endpoint::Chat, &body, Some(&ticket), &context());
        let decode = Sglang.decode(body, ticket, &context(), now).unwrap();
        // 2^52 − 1 is 3 mod 4; the rank is 2.
        let room = (1_u64 << 52) - 2;
        let expected = json!({"messages": [], "max_tokens": 1, "stream": false, "ignore_eos": true,
            "bootstrap_host": "10.0.0.7", "bootstrap_port": 8998, "bootstrap_room": room, "routed_dp_rank": 2});
        assert_eq!(prefill.body, expected);
        let expected = json!({"messages": [], "max_tokens": 50, "stream": true, "bootstrap_host": "10.0.0.7",
            "bootstrap_port": 8998, "bootstrap_room": room, "disagg_prefill_dp_rank": 2});
        assert_eq!(decode.body, expected);
    }

    #[test]
    fn one_rank_is_not_named() {
        let context = LegContext {
            prefill_rank: (0, 1),
            ..context()
        };
        let now = Instant::now();
        let ticket = Sglang.introduce(&context, now).unwrap();
        let decode = Sglang.decode(json!({}), ticket, &context, now).unwrap();
        let names: Vec<_> = decode.body.as_object().unwrap().keys().collect();
        assert_eq!(names, FIELDS);
    }

    #[test]
    fn rooms_name_the_rank_and_stay_exact_as_floating_point() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..1_000 {
            let ranks = rng.u32(1..100);
            let rank = rng.u32(0..ranks);
            let room = Sglang::room(rng.u128(..), (rank, ranks));
            assert_eq!(room % u64::from(ranks), u64::from(rank));
            assert!(room < 1 << 53);
        }
        assert_eq!(Sglang::room(5, (0, 0)), 0);
    }
}
