//! vLLM with NIXL: the prefill leg answers where its cache lies, the decode leg fetches it (pull) or is sent it (push).

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::request::Endpoint;

use super::leg::{Dialect, Leg, LegContext, local_body, prefill_body, vllm_leg};
use super::ticket::{Expired, Ticket};
use super::{LegOrder, Protocol};

/// vLLM's `NixlConnector` and `NixlPushConnector`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nixl {
    lease: Duration,
}

impl Nixl {
    /// Creates the protocol for a prefill worker that holds its cache for `lease`.
    #[must_use]
    pub const fn new(lease: Duration) -> Self {
        Self { lease }
    }

    /// Returns for how long what a prefill worker hands over is used: two thirds of its lease. The decode worker renews it
    /// only once it knows of the request, and the way there takes its time.
    #[must_use]
    pub fn valid(&self) -> Duration {
        self.lease * 2 / 3
    }
}

/// Returns for how long a vLLM of this version holds a prefill that nobody fetches, unless configured otherwise; the
/// shortest of all where the version is not understood.
///
/// # Source
/// vLLM wheels: `VLLM_NIXL_ABORT_REQUEST_TIMEOUT` 120 s up to 0.11.0, 480 s up to 0.21; `kv_lease_duration` 30 s since 0.22.
pub(super) fn lease_of(version: &str) -> Duration {
    let mut numbers = version
        .trim_start_matches('v')
        .split(['.', '+', '-', 'r'])
        .map(str::parse::<u32>);
    let seconds = match (numbers.next(), numbers.next(), numbers.next()) {
        (Some(Ok(0)), Some(Ok(11)), Some(Ok(0))) => 120,
        (Some(Ok(0)), Some(Ok(9..=10)), _) => 120,
        (Some(Ok(0)), Some(Ok(11..=21)), _) => 480,
        _ => 30,
    };
    Duration::from_secs(seconds)
}

impl Protocol for Nixl {
    fn order(&self) -> LegOrder {
        LegOrder::Sequential
    }

    fn introduce(&self, _context: &LegContext<'_>, _now: Instant) -> Option<Ticket> {
        None
    }

    fn prefill(
        &self,
        endpoint: Endpoint,
        body: &Value,
        _ticket: Option<&Ticket>,
        context: &LegContext<'_>,
    ) -> Leg {
        let body = prefill_body(Dialect::Vllm, endpoint, body);
        let asked = json!({"do_remote_decode": true, "do_remote_prefill": false});
        vllm_leg(body, asked, context.prefill_rank)
    }

    fn handed_over(&self, reply: &mut Value, now: Instant) -> Option<Ticket> {
        let parameters = reply.get_mut("kv_transfer_params")?.take();
        is_complete(&parameters).then(|| Ticket::new(parameters, now, self.valid()))
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

/// Tells whether a decode worker can fetch by these parameters. One that gets incomplete ones may hang, and die when the
/// client gives up. Everything else in them is the engines' own business: fields come with versions.
fn is_complete(parameters: &Value) -> bool {
    let text = |name: &str| {
        let value = parameters.get(name).and_then(Value::as_str);
        value.is_some_and(|text| !text.is_empty())
    };
    let port = parameters.get("remote_port").and_then(Value::as_u64);
    let blocks = parameters.get("remote_block_ids").and_then(Value::as_array);
    let pushes = parameters.get("transfer_mode").and_then(Value::as_str) == Some("push");
    // Before 0.14 there is no request id; where there is one it is needed.
    let request = parameters.get("remote_request_id").is_none() || text("remote_request_id");
    parameters.get("do_remote_prefill") == Some(&Value::Bool(true))
        && text("remote_engine_id")
        && text("remote_host")
        && port.is_some_and(|port| (1..=65_535).contains(&port))
        && (pushes || blocks.is_some_and(|blocks| !blocks.is_empty()))
        && request
}

#[cfg(test)]
mod tests {
    use super::super::recorded;
    use super::*;

    fn context() -> LegContext<'static> {
        LegContext {
            request_id: "rid-123",
            prefill_host: "p",
            bootstrap_port: 0,
            prefill_engine: None,
            prefill_rank: (1, 2),
            decode_rank: (0, 1),
            random: 1,
        }
    }

    fn nixl() -> Nixl {
        Nixl::new(Duration::from_secs(30))
    }

    /// What vLLM 0.32.0 answered to a prefill leg.
    fn answer() -> Value {
        json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2, 3, 4]],
               "remote_engine_id": "f7ecb5e2", "remote_request_id": "cmpl-rid-123-0-947b7751",
               "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1,
               "remote_num_tokens": 100, "remote_blocks_expiry_time": null, "transfer_mode": "pull",
               "remote_prefill_cached_tokens": 0})
    }

    fn handed_over(parameters: &Value) -> Option<Ticket> {
        let mut reply = json!({"id": "cmpl-rid-123", "kv_transfer_params": parameters});
        nixl().handed_over(&mut reply, Instant::now())
    }

    #[test]
    fn the_prefill_leg_asks_for_a_handoff_and_one_token() {
        let body = json!({"model": "tiny", "prompt": "w10 w11", "max_tokens": 5, "stream": true});
        let leg = nixl().prefill(Endpoint::Completions, &body, None, &context());
        let expected = json!({"model": "tiny", "prompt": "w10 w11", "max_tokens": 1, "stream": false, "ignore_eos": true,
            "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false}});
        assert_eq!(leg.body, expected);
        assert_eq!(leg.headers, [("x-data-parallel-rank", "1".to_owned())]);
    }

    #[test]
    fn the_decode_leg_is_the_clients_body_with_the_answer_unchanged() {
        let body = json!({"model": "tiny", "prompt": "w10", "max_tokens": 5, "stream": true,
                          "stream_options": {"include_usage": true}, "stop": ["x"],
                          "kv_transfer_params": {"remote_host": "from the client"}});
        let mut parameters = answer();
        parameters["field_of_a_later_version"] = json!({"any": [1.5, null]});
        let ticket = handed_over(&parameters).unwrap();
        let leg = nixl()
            .decode(body.clone(), ticket, &context(), Instant::now())
            .unwrap();
        let mut expected = body;
        expected["kv_transfer_params"] = parameters;
        assert_eq!(leg.body, expected);
        assert_eq!(leg.headers, []);
    }

    #[test]
    fn both_legs_are_those_that_a_real_pair_served() {
        let context = LegContext {
            prefill_rank: (0, 1),
            ..context()
        };
        for mut case in recorded() {
            let endpoint = Endpoint::of(case["path"].as_str().unwrap());
            let leg = nixl().prefill(endpoint, &case["request"], None, &context);
            assert_eq!(leg.body, case["prefill_leg"]);
            let ticket = nixl().handed_over(&mut case["prefill_answer"], Instant::now());
            let request = case["request"].clone();
            let leg = nixl().decode(request, ticket.unwrap(), &context, Instant::now());
            assert_eq!(leg.unwrap().body, case["decode_leg"]);
        }
    }

    #[test]
    fn a_ticket_older_than_two_thirds_of_the_lease_is_not_sent() {
        let ticket = handed_over(&answer()).unwrap();
        let late = Instant::now() + Duration::from_secs(20);
        let leg = nixl().decode(json!({}), ticket, &context(), late);
        assert_eq!(leg, Err(Expired));
    }

    /// Fields by the version that brought them; all are passed on.
    const FIELDS: [(&str, &[&str]); 8] = [
        (
            "0.9.2",
            &[
                "do_remote_prefill",
                "do_remote_decode",
                "remote_block_ids",
                "remote_engine_id",
                "remote_host",
                "remote_port",
                "tp_size",
            ],
        ),
        ("0.14.1", &["remote_request_id"]),
        ("0.22.1", &["remote_num_tokens"]),
        ("0.26.0", &["remote_blocks_expiry_time"]),
        ("0.28.0", &["transfer_mode"]),
        ("0.30.0", &["dcp_size", "pp_size"]),
        ("0.31.0", &["remote_prefill_cached_tokens"]),
        ("0.33.0", &["remote_registration_generation"]),
    ];

    #[test]
    fn answers_of_every_version_are_passed_on_whole() {
        let mut whole = answer();
        whole["remote_registration_generation"] = json!(3);
        let mut parameters = serde_json::Map::new();
        for (version, names) in FIELDS {
            for name in names {
                parameters.insert((*name).to_owned(), whole[*name].clone());
            }
            // A flat list of blocks up to 0.17.1, one for each cache group since.
            let blocks = match version {
                "0.9.2" | "0.14.1" => json!([1, 2]),
                _ => json!([[1, 2], [7]]),
            };
            parameters.insert("remote_block_ids".to_owned(), blocks);
            let parameters = Value::Object(parameters.clone());
            let ticket = handed_over(&parameters).expect(version);
            let leg = nixl().decode(json!({}), ticket, &context(), Instant::now());
            assert_eq!(
                leg.unwrap().body["kv_transfer_params"],
                parameters,
                "{version}"
            );
        }
        assert_eq!(parameters.len(), 15);
    }

    #[test]
    fn a_pushing_worker_names_no_blocks() {
        let mut push = answer();
        push["transfer_mode"] = json!("push");
        push["remote_block_ids"] = json!([]);
        assert!(handed_over(&push).is_some());
    }

    #[test]
    fn incomplete_answers_hand_nothing_over() {
        assert!(handed_over(&Value::Null).is_none());
        assert!(handed_over(&json!("text")).is_none());
        let changes = [
            ("do_remote_prefill", json!(false)),
            ("remote_host", Value::Null),
            ("remote_host", json!("")),
            ("remote_port", json!(0)),
            ("remote_port", json!(70_000)),
            ("remote_port", json!("5600")),
            ("remote_engine_id", Value::Null),
            ("remote_request_id", Value::Null),
            ("remote_block_ids", json!([])),
            ("remote_block_ids", Value::Null),
        ];
        for (name, value) in changes {
            let mut parameters = answer();
            parameters[name] = value;
            assert!(handed_over(&parameters).is_none(), "{parameters}");
        }
        assert!(nixl().handed_over(&mut json!({}), Instant::now()).is_none());
        assert!(nixl().handed_over(&mut json!([]), Instant::now()).is_none());
    }

    #[test]
    fn an_answer_can_be_taken_once() {
        let mut reply = json!({"kv_transfer_params": answer()});
        assert!(nixl().handed_over(&mut reply, Instant::now()).is_some());
        assert!(nixl().handed_over(&mut reply, Instant::now()).is_none());
    }

    #[test]
    fn leases_follow_the_version() {
        for (version, seconds) in [
            ("0.10.2", 120),
            ("0.11.0", 120),
            ("0.11.2", 480),
            ("0.21.0", 480),
            ("0.22.0rc1", 30),
            ("0.32.0+cpu", 30),
            ("v0.33.0", 30),
            ("1.0.0", 30),
            ("dev", 30),
        ] {
            assert_eq!(lease_of(version), Duration::from_secs(seconds), "{version}");
        }
    }
}
