//! Which headers pass, in both directions.

use hyper::HeaderMap;
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderName, HeaderValue,
    PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};

use kvlane::Decision;

use crate::fleet::Worker;

/// Headers that concern one connection alone (RFC 9110, section 7.6.1).
const HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Headers by which other routers are told a destination. From a client they are an attempt to reach any address.
const ROUTING: [HeaderName; 7] = [
    DP_RANK,
    HeaderName::from_static("x-prefiller-host-port"),
    HeaderName::from_static("x-prefiller-url"),
    HeaderName::from_static("x-data-parallel-host-port"),
    HeaderName::from_static("x-kv-cache-source-host-port"),
    HeaderName::from_static("x-encoder-hosts-ports"),
    HeaderName::from_static("x-gateway-destination-endpoint"),
];

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const DP_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// Removes what must not reach a worker. The announced length stays until the request is sent.
pub(crate) fn towards_worker(mut headers: HeaderMap) -> HeaderMap {
    remove_hop_by_hop(&mut headers);
    for name in &ROUTING {
        headers.remove(name);
    }
    let dangerous: Vec<HeaderName> = headers
        .keys()
        .filter(|name| name.as_str().starts_with("x-gateway-destination-endpoint"))
        .cloned()
        .collect();
    for name in dangerous {
        headers.remove(name);
    }
    headers.remove(EXPECT);
    headers
}

/// Returns the headers of the request to one worker.
pub(crate) fn for_worker(
    headers: &HeaderMap,
    worker: &Worker,
    dp_rank: u32,
    request_id: &str,
    body: usize,
) -> HeaderMap {
    let mut headers = headers.clone();
    let announces = headers.remove(CONTENT_LENGTH).is_some();
    if announces || body > 0 {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(body));
    }
    headers.insert(HOST, worker.host_header().clone());
    if !headers.contains_key(REQUEST_ID)
        && let Ok(value) = HeaderValue::from_str(request_id)
    {
        headers.insert(REQUEST_ID, value);
    }
    if worker.config.dp_ranks > 1 {
        headers.insert(DP_RANK, HeaderValue::from(dp_rank));
    }
    headers
}

/// Removes what concerns the connection to the worker alone.
pub(crate) fn towards_client(headers: &mut HeaderMap) {
    remove_hop_by_hop(headers);
}

/// Adds what `debug_headers` promises.
pub(crate) fn add_debug(headers: &mut HeaderMap, decision: &Decision, policy: &'static str) {
    let cost = decision.cost.total;
    let summary = format!(
        "policy={policy}; cost={cost:.3}; request_blocks={}; predicted_cached_tokens={}; dp_rank={}; candidates={}",
        decision.request_blocks,
        decision.predicted_cached_tokens,
        decision.target.dp_rank,
        decision.eligible_targets(),
    );
    let texts = [
        ("x-kvlane-worker", decision.target.worker.to_string()),
        (
            "x-kvlane-overlap-blocks",
            decision.overlap_blocks().to_string(),
        ),
        ("x-kvlane-trust", decision.trust.to_string()),
        ("x-kvlane-decision", summary),
    ];
    for (name, text) in texts {
        if let Ok(value) = HeaderValue::from_bytes(text.as_bytes()) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
}

/// Returns the request's own id, or makes one.
pub(crate) fn request_id(headers: &HeaderMap) -> String {
    let given = headers
        .get(REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .filter(|id| !id.is_empty() && id.len() <= 256);
    given.map_or_else(
        || format!("kvlane-{:032x}", fastrand::u128(..)),
        str::to_owned,
    )
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .filter(|name| *name != CONTENT_LENGTH && *name != HOST)
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Tells whether an answer is a stream of events.
pub(crate) fn is_event_stream(headers: &HeaderMap) -> bool {
    headers
        .get(CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            );
        }
        headers
    }

    #[test]
    fn destinations_chosen_by_a_client_are_removed() {
        let left = towards_worker(headers(&[
            ("x-prefiller-host-port", "169.254.169.254:80"),
            ("x-prefiller-url", "http://169.254.169.254"),
            ("x-gateway-destination-endpoint", "10.9.9.9:1"),
            ("x-gateway-destination-endpoint-subset", "10.9.9.9:1"),
            ("x-data-parallel-host-port", "a:1"),
            ("x-kv-cache-source-host-port", "a:1"),
            ("x-encoder-hosts-ports", "a:1"),
            ("x-data-parallel-rank", "3"),
            ("authorization", "Bearer x"),
        ]));
        assert_eq!(left, headers(&[("authorization", "Bearer x")]));
    }

    #[test]
    fn hop_by_hop_headers_are_removed_with_those_they_name() {
        let left = towards_worker(headers(&[
            ("connection", "keep-alive, X-Mine"),
            ("keep-alive", "timeout=5"),
            ("x-mine", "1"),
            ("transfer-encoding", "chunked"),
            ("expect", "100-continue"),
            ("te", "trailers"),
            ("accept", "*/*"),
        ]));
        assert_eq!(left, headers(&[("accept", "*/*")]));
    }

    #[test]
    fn a_request_id_is_kept_or_made() {
        assert_eq!(request_id(&headers(&[("x-request-id", "mine")])), "mine");
        let made = [request_id(&HeaderMap::new()), request_id(&HeaderMap::new())];
        assert!(made[0].len() > 16 && made[0] != made[1]);
    }
}
