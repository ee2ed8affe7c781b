//! A client that leaves in the moment in which its prefill has answered.

use std::net::SocketAddr;

use kvlane::{BlockSize, Prompt, Role, Router, RouterConfig, SaltContext, SelectRequest};
use serde_json::json;

use super::leg::Sending;
use super::*;
use crate::config::{Config, WorkerConfig};
use crate::engine::{Engine, EngineConfig, EngineHandle, TransferConfig};
use crate::fleet::Fleet;
use crate::forward::breaker::State;
use crate::handoff::{Connector, LegContext};
use crate::metrics::Metrics;

/// No stall of a busy machine lasts so long.
const LEASE: Duration = Duration::from_secs(120);

struct Bench {
    prefill: EngineHandle,
    decode: EngineHandle,
    router: Arc<Router>,
    fleet: Fleet,
    metrics: HandoffMetrics,
}

async fn engine(role: Role) -> EngineHandle {
    let listen = SocketAddr::from(([127, 0, 0, 1], 0));
    let transfer = TransferConfig {
        lease: LEASE,
        ..TransferConfig::new(listen)
    };
    let config = EngineConfig {
        role,
        speed: 1_000.0,
        transfer: Some(transfer),
        ..EngineConfig::ephemeral()
    };
    Engine::start(config).await.unwrap()
}

impl Bench {
    async fn start() -> Self {
        let (prefill, decode) = (engine(Role::Prefill).await, engine(Role::Decode).await);
        let router = Arc::new(Router::new(RouterConfig::default()).unwrap());
        let metrics = Arc::new(Metrics::new());
        let fleet = Fleet::new(
            Arc::new(Config::default()),
            Arc::clone(&router),
            Arc::clone(&metrics),
        );
        for (id, role, engine) in [("p", Role::Prefill, &prefill), ("d", Role::Decode, &decode)] {
            let mut config = WorkerConfig::new(id, &engine.url()).unwrap();
            config.role = role;
            fleet.add(config, Instant::now()).unwrap();
        }
        Self {
            prefill,
            decode,
            router,
            fleet,
            metrics: metrics.handoff.clone(),
        }
    }

    fn side(&self, id: &str) -> Side {
        let prompt = Prompt::from_tokens(&[1; 64], BlockSize::default(), &SaltContext::default());
        let request = SelectRequest::new(&prompt);
        let guard = self.router.book(id, None, &request, Instant::now());
        Side::new(
            Arc::clone(self.fleet.members().find(id).unwrap()),
            guard.unwrap(),
        )
    }

    /// Runs a handoff whose client has left when its prefill leg's answer is there and not looked at yet. What nobody fetches
    /// counts as held for a time, `pinned`.
    async fn leave_behind(&self, busy_requests: usize, pinned: Duration) {
        let limits = DriveLimits {
            busy_requests,
            ..DriveLimits::default()
        };
        let shared = Arc::new(Shared {
            limits,
            metrics: self.metrics.clone(),
            planner: None,
            gaps: None,
        });
        let terms = PairTerms {
            protocol: Connector::Nixl.protocol(LEASE),
            lease: pinned,
            may_fall_back: true,
            bootstrap_port: 0,
            prefill_engine: None,
            peer: None,
        };
        let pair = Pair {
            prefill: self.side("p"),
            decode: self.side("d"),
            terms,
            transfer: None,
            work: PrefillWork::default(),
        };
        let request = DriveRequest {
            endpoint: Endpoint::Completions,
            path: Bytes::from_static(b"/v1/completions"),
            headers: HeaderMap::new(),
            request_id: "left".to_owned(),
            body: Arc::new(json!({"prompt": [1, 2, 3, 4, 5], "max_tokens": 9})),
            started: Instant::now(),
            audited: false,
        };
        let leg = pair.terms.protocol.prefill(
            request.endpoint,
            &request.body,
            None,
            &LegContext {
                request_id: "left",
                prefill_host: "p",
                bootstrap_port: 0,
                prefill_engine: None,
                prefill_rank: (0, 1),
                decode_rank: (0, 1),
                random: 0,
            },
        );
        let sending = Sending::new(&request, &pair.prefill, &leg, limits);
        let (answer, answered) = oneshot::channel();
        drop(answered);
        let client = Client::new(answer, CancellationToken::new());
        let run = Run::new(shared, request, pair, client);
        sending.prefill(run.events()).await;
        assert_eq!(self.prefill.transfers().held, 1);
        run.finish().await;
        assert_eq!(self.metrics.ended("left"), 1);
        assert_eq!(
            (self.metrics.open(), self.router.stats().active_leases),
            (0, 0)
        );
    }
}

#[tokio::test]
async fn what_was_handed_over_for_nobody_is_fetched() {
    let bench = Bench::start().await;
    let begun = Instant::now();
    bench.leave_behind(1, LEASE).await;
    // The prefill worker hears of the end a moment after the decode worker.
    while bench.prefill.transfers().held > 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let transfers = bench.prefill.transfers();
    assert_eq!((transfers.collected, transfers.expired), (1, 0));
    assert_eq!(
        (bench.metrics.collected(), bench.metrics.left_to_lease()),
        (1, 0)
    );
    // One token, which nobody reads.
    assert_eq!(bench.decode.stats().generated_tokens, 1);
    assert!(begun.elapsed() < LEASE, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_busy_decode_worker_fetches_nothing_for_nobody() {
    let bench = Bench::start().await;
    let pinned = Duration::from_millis(500);
    let begun = Instant::now();
    bench.leave_behind(0, pinned).await;
    // The handoff was open for as long as the prefill worker is believed to hold it.
    assert!(begun.elapsed() >= pinned, "{:?}", begun.elapsed());
    let transfers = bench.prefill.transfers();
    assert_eq!((transfers.held, transfers.collected), (1, 0));
    assert_eq!(
        (bench.metrics.collected(), bench.metrics.left_to_lease()),
        (0, 1)
    );
    assert_eq!(bench.decode.stats().generated_tokens, 0);
}

#[tokio::test]
async fn a_side_without_a_leg_gives_the_breakers_place_back() {
    let bench = Bench::start().await;
    let members = bench.fleet.members();
    let worker = members.find("d").unwrap();
    let now = Instant::now();
    while worker.breaker_state() == State::Closed {
        worker.failed(now);
    }
    worker.tick(now + Duration::from_secs(3_600));
    // One request may try.
    assert!(worker.admit());
    let side = bench.side("d");
    assert!(!worker.admit());
    drop(side);
    assert!(worker.admit());
    // A leg has a place of its own to give back.
    let mut side = bench.side("d");
    side.leg_begins();
    drop(side);
    assert!(!worker.admit());
    assert_eq!(bench.router.stats().active_leases, 0);
}
