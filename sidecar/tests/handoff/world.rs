//! Two engines, their doors, a router and a driver.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::{HeaderMap, Response, StatusCode};
use kvlane::handoff::{HandoffConfig, HandoffPlanner, PrefillWork, TransferGuard};
use kvlane::{BlockSize, Prompt, Role, Router, RouterConfig, SaltContext, SelectRequest};
use kvlane_sidecar::config::{Config, WorkerConfig};
use kvlane_sidecar::engine::{
    Engine, EngineConfig, EngineHandle, KvProtocol, Refusal, TransferConfig,
};
use kvlane_sidecar::fleet::Fleet;
use kvlane_sidecar::handoff::{
    Connector, DriveLimits, DriveRequest, Driver, HandoffMetrics, Pair, PairTerms, Side,
};
use kvlane_sidecar::metrics::Metrics;
use kvlane_sidecar::proxy::ProxyBody;
use kvlane_sidecar::request::Endpoint;
use kvlane_tests::free_address;
use parking_lot::Mutex;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::eventually;
use crate::gate::{Act, Gate, Hook, always};

/// How a world differs from two healthy, fast engines.
pub(crate) struct Plan {
    pub(crate) prefill: EngineConfig,
    pub(crate) decode: EngineConfig,
    pub(crate) prefill_hook: Hook,
    pub(crate) decode_hook: Hook,
    /// The lease that the driver believes in when it decides whether what was handed over is still there.
    pub(crate) believed: Duration,
    /// What the connector allows when absent.
    pub(crate) may_fall_back: Option<bool>,
    /// How both engines, and the driver, hand over.
    pub(crate) connector: Connector,
    /// Which rank of how many each engine is; a third engine stands for all others.
    pub(crate) prefill_rank: (u32, u32),
    pub(crate) decode_rank: (u32, u32),
}

/// For how long the prefill engine holds what nobody fetches: no stall of a busy machine ends it. Checks end it themselves.
const LEASE: Duration = Duration::from_secs(120);
/// For how long the driver keeps a handoff open whose cache nobody fetched.
const PINNED: Duration = Duration::from_millis(200);

impl Default for Plan {
    fn default() -> Self {
        Self {
            prefill: engine(Role::Prefill),
            decode: engine(Role::Decode),
            prefill_hook: always(Act::Pass),
            decode_hook: always(Act::Pass),
            believed: LEASE,
            may_fall_back: None,
            connector: Connector::Nixl,
            prefill_rank: (0, 1),
            decode_rank: (0, 1),
        }
    }
}

/// An engine that is a thousand times as fast as a real one.
pub(crate) fn engine(role: Role) -> EngineConfig {
    let listen = SocketAddr::from(([127, 0, 0, 1], 0));
    EngineConfig {
        role,
        speed: 1000.0,
        transfer: Some(TransferConfig::new(listen)),
        ..EngineConfig::ephemeral()
    }
}

pub(crate) struct World {
    prefill: Mutex<Option<EngineHandle>>,
    /// As it was started, on fixed ports, to be started again.
    prefill_config: EngineConfig,
    pub(crate) decode: EngineHandle,
    /// It is every other rank.
    pub(crate) other: Option<EngineHandle>,
    pub(crate) prefill_gate: Gate,
    pub(crate) decode_gate: Gate,
    router: Arc<Router>,
    fleet: Fleet,
    pub(crate) driver: Driver,
    pub(crate) metrics: HandoffMetrics,
    pub(crate) planner: Arc<HandoffPlanner>,
    /// That of the next request's plan.
    pub(crate) transfer: Mutex<Option<TransferGuard>>,
    ranks: [(&'static str, u32); 2],
    believed: Duration,
    may_fall_back: bool,
    connector: Connector,
    bootstrap_port: u16,
    prefill_engine: Option<String>,
}

/// A response that was read to its end.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) text: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }
}

impl World {
    pub(crate) async fn start(mut plan: Plan) -> Self {
        let protocol = match plan.connector {
            Connector::Nixl => KvProtocol::Nixl,
            Connector::Sglang => KvProtocol::Sglang,
            Connector::Mooncake => KvProtocol::Mooncake,
        };
        if let Some(transfer) = &mut plan.prefill.transfer {
            transfer.lease = LEASE;
            transfer.protocol = protocol;
        }
        if let Some(transfer) = &mut plan.decode.transfer {
            transfer.protocol = protocol;
        }
        let (prefill, prefill_config) = start_at_free_addresses(plan.prefill).await;
        let bootstrap = prefill.bootstrap_address();
        let prefill_engine = match (plan.connector, bootstrap) {
            (Connector::Mooncake, Some(address)) => Some(engine_at(address).await),
            _ => None,
        };
        let decode = Engine::start(plan.decode).await.unwrap();
        let mut other = None;
        if plan.prefill_rank.1.max(plan.decode_rank.1) > 1 {
            other = Some(Engine::start(engine(Role::Both)).await.unwrap());
        }
        let behind = |own: SocketAddr, (rank, ranks): (u32, u32)| {
            let address = |at| match &other {
                Some(other) if at != rank => other.address(),
                _ => own,
            };
            (0..ranks).map(address).collect()
        };
        let behind_p = behind(prefill.address(), plan.prefill_rank);
        let prefill_gate = Gate::start(behind_p, plan.prefill_hook).await;
        let behind_d = behind(decode.address(), plan.decode_rank);
        let decode_gate = Gate::start(behind_d, plan.decode_hook).await;
        let router = Arc::new(Router::new(RouterConfig::default()).unwrap());
        let settings = Arc::new(Config::default());
        let metrics = Arc::new(Metrics::new());
        let fleet = Fleet::new(settings, router.clone(), metrics.clone());
        for (id, role, gate, (_, ranks)) in [
            ("p", Role::Prefill, &prefill_gate, plan.prefill_rank),
            ("d", Role::Decode, &decode_gate, plan.decode_rank),
        ] {
            let mut config = WorkerConfig::new(id, &format!("http://{}", gate.address)).unwrap();
            config.role = role;
            config.dp_ranks = ranks;
            fleet.add(config, Instant::now()).unwrap();
        }
        let planner = Arc::new(HandoffPlanner::new(HandoffConfig::default()).unwrap());
        let limits = DriveLimits::default();
        Self {
            prefill: Mutex::new(Some(prefill)),
            prefill_config,
            decode,
            other,
            prefill_gate,
            decode_gate,
            router,
            fleet,
            driver: Driver::new(limits, metrics.handoff.clone(), Some(planner.clone())),
            metrics: metrics.handoff.clone(),
            planner,
            transfer: Mutex::default(),
            ranks: [("p", plan.prefill_rank.0), ("d", plan.decode_rank.0)],
            connector: plan.connector,
            bootstrap_port: bootstrap.map_or(0, |address| address.port()),
            prefill_engine,
            believed: plan.believed,
            may_fall_back: plan
                .may_fall_back
                .unwrap_or_else(|| plan.connector.decoder_serves_alone()),
        }
    }

    /// Looks at the prefill engine, if it still runs.
    pub(crate) fn prefill<T>(&self, look: impl FnOnce(&EngineHandle) -> T) -> Option<T> {
        self.prefill.lock().as_ref().map(look)
    }

    /// Takes the prefill engine away, to kill it.
    pub(crate) fn take_prefill(&self) -> Option<EngineHandle> {
        self.prefill.lock().take()
    }

    /// Kills the prefill engine and starts it again where it was; what it held is gone.
    pub(crate) async fn restart_prefill(&self) {
        if let Some(engine) = self.take_prefill() {
            engine.shutdown().await;
        }
        let again = Engine::start(self.prefill_config.clone()).await.unwrap();
        *self.prefill.lock() = Some(again);
    }

    /// Returns how many blocks of the prompt are noted to be on their way to a worker.
    pub(crate) fn noted_blocks(&self, id: &str) -> u32 {
        let prompt = booked_prompt();
        let request = SelectRequest::new(&prompt);
        let candidates = self.router.rank(&request, Instant::now()).unwrap();
        let mut of = candidates.iter();
        let of = of.find(|candidate| candidate.target.worker.as_str() == id);
        of.unwrap().predicted_blocks
    }

    /// Returns the requests that a worker has in flight, and those that are booked there.
    pub(crate) fn occupied(&self, id: &str) -> (usize, usize) {
        let workers = self.router.workers(Instant::now());
        let booked = workers.iter().find(|worker| worker.id.as_str() == id);
        let in_flight = self.fleet.members().find(id).unwrap().in_flight();
        (in_flight, booked.unwrap().active_requests)
    }

    /// Returns the blocks that are booked on a worker.
    pub(crate) fn booked_blocks(&self, id: &str) -> usize {
        let workers = self.router.workers(Instant::now());
        let booked = workers.iter().find(|worker| worker.id.as_str() == id);
        booked.unwrap().active_blocks
    }

    /// Returns the streams of a worker that ended without their end marker.
    pub(crate) fn incomplete(&self, id: &str) -> u64 {
        let members = self.fleet.members();
        members.find(id).unwrap().metrics.incomplete.get()
    }

    fn side(&self, id: &str) -> Side {
        let prompt = booked_prompt();
        let request = SelectRequest::new(&prompt);
        let rank = self.ranks.iter().find(|(name, _)| *name == id).unwrap().1;
        let guard = self
            .router
            .book(id, Some(rank), &request, Instant::now())
            .unwrap();
        Side::new(self.fleet.members().find(id).unwrap().clone(), guard)
    }

    pub(crate) async fn drive(&self, path: &'static str, body: &Value) -> Response<ProxyBody> {
        let request = DriveRequest {
            endpoint: Endpoint::of(path),
            path: Bytes::from_static(path.as_bytes()),
            headers: HeaderMap::new(),
            request_id: format!("rid-{}", fastrand::u32(..)),
            body: Arc::new(body.clone()),
            started: Instant::now(),
            audited: true,
        };
        let pair = Pair {
            prefill: self.side("p"),
            decode: self.side("d"),
            terms: PairTerms {
                protocol: self.connector.protocol(self.believed),
                lease: PINNED,
                may_fall_back: self.may_fall_back,
                bootstrap_port: self.bootstrap_port,
                prefill_engine: self.prefill_engine.clone(),
                peer: None,
            },
            transfer: self.transfer.lock().take(),
            work: PrefillWork {
                input_tokens: 64,
                ..PrefillWork::default()
            },
        };
        self.driver
            .drive(request, pair, CancellationToken::new())
            .await
    }

    pub(crate) async fn ask(&self, path: &'static str, body: &Value) -> Reply {
        let response = self.drive(path, body).await;
        let status = response.status();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        Reply {
            status,
            text: String::from_utf8(bytes.to_vec()).unwrap(),
        }
    }

    /// Asks, and leaves when something has come true.
    pub(crate) async fn leave(&self, body: &Value, is_time: impl Fn() -> bool) {
        let asking = self.ask(crate::served::COMPLETIONS, body);
        tokio::select! {
            reply = asking => panic!("it was answered: {reply:?}"),
            () = eventually("on its way", is_time) => {}
        }
    }

    /// Checks that nothing is left: no open handoff, booking or block, and that no engine was sent what was used, expired
    /// or another prompt's.
    pub(crate) async fn is_clean(&self) {
        self.is_clean_but(&[]).await;
    }

    /// The same, where some refusals are what is tested.
    pub(crate) async fn is_clean_but(&self, expected: &[Refusal]) {
        eventually("handoffs closed", || {
            self.driver.open() == 0 && self.metrics.open() == 0
        })
        .await;
        assert_eq!(self.router.stats().active_leases, 0);
        for worker in self.fleet.members().list() {
            assert_eq!(worker.in_flight(), 0);
            assert_eq!(worker.pool.in_use(), 0);
        }
        eventually("blocks freed", || {
            // What NIXL's prefills leave behind would wait for its lease; of the other protocols nothing may be left.
            if matches!(self.connector, Connector::Nixl) {
                self.prefill(EngineHandle::end_leases);
            }
            let held = self
                .prefill(|engine| engine.stats().used_blocks)
                .unwrap_or(0);
            held == 0 && self.decode.stats().used_blocks == 0
        })
        .await;
        for reason in Refusal::ALL {
            if reason != Refusal::Unreachable && !expected.contains(&reason) {
                assert_eq!(self.decode.transfers().refused(reason), 0, "{reason}");
                let used = self.prefill(|engine| engine.transfers().refused(reason));
                assert_eq!(used.unwrap_or(0), 0, "{reason}");
            }
        }
    }
}

/// The prompt that workers are booked for.
fn booked_prompt() -> Prompt {
    let tokens: Vec<u32> = (0..64).collect();
    Prompt::from_tokens(&tokens, BlockSize::default(), &SaltContext::default())
}

/// Starts an engine at addresses that it can be started at again. Another process may take one of them first: then others
/// are tried.
pub(crate) async fn start_at_free_addresses(
    mut config: EngineConfig,
) -> (EngineHandle, EngineConfig) {
    let mut problem = None;
    for _ in 0..20 {
        config.listen = free_address();
        if let Some(transfer) = &mut config.transfer {
            transfer.listen = free_address();
            transfer.bootstrap = free_address();
        }
        match Engine::start(config.clone()).await {
            Ok(engine) => return (engine, config),
            Err(error) => problem = Some(error),
        }
    }
    panic!("an engine cannot be started: {problem:?}");
}

/// Asks a Mooncake bootstrap service for its engine's id.
async fn engine_at(address: SocketAddr) -> String {
    let answer = crate::serve::get(address, "/query").await;
    let ranks: Value = serde_json::from_str(&answer).unwrap();
    ranks["0"]["engine_id"].as_str().unwrap().to_owned()
}
