//! Handing a prompt's KV cache from one simulated engine to another, in the request and reply fields of vLLM's NIXL
//! connector.
//!
//! A prefill leg's blocks stay in use until they are fetched or their lease ends. A decode leg fetches them from the
//! engine that its parameters name. Where a real engine answers with text from somebody else's cache, this one refuses
//! and counts: parameters that were used, that expired, that nobody gave out, or that belong to another prompt.
//!
//! Bytes really move between processes, checksummed block by block. They are no model's: each block's are drawn from a
//! digest of its tokens and its prefix, so that the fetching engine knows what must arrive. NIXL moves them where both engines
//! have it, from one engine's KV pool into the other's memory; else they go over the TCP connection on which the fetch is
//! agreed on.

mod bootstrap;
mod content;
mod ledger;
#[cfg(feature = "nixl")]
mod nixl;
mod parameters;
#[cfg(feature = "nixl")]
mod peers;
#[cfg(feature = "nixl")]
mod pool;
mod rooms;
mod serve;
mod tcp;
mod wire;

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kvlane::{Error, ErrorKind, Result};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::runner::Inbox;

pub use self::ledger::TransferStats;
pub use self::rooms::KvProtocol;

use self::bootstrap::Bootstrap;
pub(super) use self::content::Content;
use self::ledger::Moving;
pub(super) use self::ledger::{Ledger, Preparing};
pub(super) use self::parameters::{Asked, Source};
use self::rooms::Rooms;
pub(super) use self::rooms::{Meeting, OpenRoom, RoomFields};
use self::serve::Holder;
use self::tcp::Tcp;
use self::wire::Placement;

/// How an engine takes part in handoffs.
#[derive(Clone, Debug, PartialEq)]
pub struct TransferConfig {
    /// Listener that other engines fetch from; port 0 lets the system choose.
    pub listen: SocketAddr,
    /// For how long blocks are held that nobody fetches (default 30 s, vLLM's `kv_lease_duration`), and for how long the
    /// legs of a concurrent protocol wait for each other (SGLang's are 300 s).
    pub lease: Duration,
    /// By which fields it is asked (default NIXL's).
    pub protocol: KvProtocol,
    /// Announces that it pushes, as vLLM's `NixlPushConnector` (default false): its replies name no blocks. Bytes move the same
    /// way, and begin to when the other engine asks.
    pub push: bool,
    /// Listener of the bootstrap service, which concurrent protocols have beside a prefill engine; port 0 lets the system
    /// choose (default: so, beside `listen`).
    pub bootstrap: SocketAddr,
    /// Bytes that stand for one token's KV (default 64; a 0.6B model has 114,688). More moves more.
    pub kv_bytes_per_token: u32,
    /// How bytes move (default TCP).
    pub transport: KvTransport,
    /// The file `libnixl_capi.so`; `None` looks for it.
    pub nixl_library: Option<PathBuf>,
}

/// How bytes move between engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvTransport {
    /// Over TCP, always there.
    #[default]
    Tcp,
    /// With NIXL; an engine without it does not start.
    Nixl,
    /// With NIXL where it can be loaded, else over TCP.
    Auto,
}

/// How a prompt's bytes moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Means {
    /// Over TCP.
    Tcp,
    /// With NIXL.
    Nixl,
}

impl Means {
    /// Every one.
    pub const ALL: [Self; 2] = [Self::Tcp, Self::Nixl];

    /// Returns the name used in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Nixl => "nixl",
        }
    }
}

/// What one fetch moved.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moved {
    bytes: u64,
    /// From asking until the last byte was there, without checking them.
    elapsed: Duration,
    means: Means,
}

impl TransferConfig {
    /// Returns the defaults for a listener.
    #[must_use]
    pub const fn new(listen: SocketAddr) -> Self {
        Self {
            listen,
            protocol: KvProtocol::Nixl,
            push: false,
            bootstrap: SocketAddr::new(listen.ip(), 0),
            lease: Duration::from_secs(30),
            kv_bytes_per_token: 64,
            transport: KvTransport::Tcp,
            nixl_library: None,
        }
    }
}

/// Why a fetch was refused or failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Refusal {
    /// Parameters lack what is needed to fetch.
    Incomplete,
    /// They were used before.
    Used,
    /// Their lease has ended.
    Expired,
    /// The engine never gave them out.
    Unknown,
    /// They belong to another prompt.
    Foreign,
    /// Another engine, or another life of it, is where they point to.
    OtherEngine,
    /// Nobody answers there, or the connection broke.
    Unreachable,
    /// Bytes arrived damaged.
    Damaged,
}

impl Refusal {
    /// Every reason.
    pub const ALL: [Self; 8] = [
        Self::Incomplete,
        Self::Used,
        Self::Expired,
        Self::Unknown,
        Self::Foreign,
        Self::OtherEngine,
        Self::Unreachable,
        Self::Damaged,
    ];

    /// Returns the name used in metrics and on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Incomplete => "incomplete",
            Self::Used => "used",
            Self::Expired => "expired",
            Self::Unknown => "unknown",
            Self::Foreign => "foreign",
            Self::OtherEngine => "other_engine",
            Self::Unreachable => "unreachable",
            Self::Damaged => "damaged",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Moves a prompt's blocks here; frees them at the source once all have arrived.
trait Transport: fmt::Debug + Send + Sync {
    /// Fetches what `source` names, which must be the KV of `content`.
    fn fetch<'a>(&'a self, source: &'a Source, content: &'a Content) -> Fetching<'a>;
}

type Fetching<'a> = Pin<Box<dyn Future<Output = std::result::Result<Moved, Refusal>> + Send + 'a>>;

/// Memory that others read blocks from.
trait Place: fmt::Debug + Send + Sync {
    /// Returns where the blocks are.
    fn placement(&self) -> Placement;

    /// Returns what others need to reach them.
    fn metadata(&self) -> &[u8];

    /// Writes a prompt's bytes to its blocks.
    fn fill(&self, moving: &Moving) -> std::result::Result<(), String>;

    /// Returns numbers and checksums of a prompt's blocks; none when they were not all written.
    fn list(&self, moving: &Moving) -> Option<Vec<u8>>;
}

/// How one engine moves bytes.
struct Way {
    transport: Box<dyn Transport>,
    pool: Option<Arc<dyn Place>>,
}

/// An engine's side of handoffs.
#[derive(Debug)]
pub(super) struct Connector {
    pub(super) ledger: Arc<Ledger>,
    pub(super) protocol: KvProtocol,
    pub(super) rooms: Arc<Rooms>,
    /// Where its bootstrap service listens, if it has one.
    pub(super) bootstrap: Option<SocketAddr>,
    transport: Box<dyn Transport>,
    pool: Option<Arc<dyn Place>>,
    address: SocketAddr,
    block_size: usize,
    lease: Duration,
    push: bool,
}

impl Connector {
    /// Binds the listener and starts to serve fetches and to end leases.
    pub(super) async fn start(
        config: &TransferConfig,
        serves_rooms: bool,
        kv_blocks: usize,
        block_size: usize,
        inbox: Arc<Inbox>,
        cancel: &CancellationToken,
        tasks: &TaskTracker,
    ) -> Result<Self> {
        let (listener, address) = bind("fetches", config.listen).await?;
        let ledger = Arc::new(Ledger::new(config.lease, inbox));
        let way = config
            .way(ledger.engine_id(), kv_blocks, block_size)
            .await?;
        let holder = Holder {
            ledger: Arc::clone(&ledger),
            bytes_per_token: config.kv_bytes_per_token as usize,
            pool: way.pool.clone(),
        };
        tasks.spawn(holder.serve(listener, cancel.clone(), tasks.clone()));
        tasks.spawn(Arc::clone(&ledger).end_leases(cancel.clone()));
        let rooms = Arc::new(Rooms::new());
        let mut bootstrap = None;
        if serves_rooms && config.protocol != KvProtocol::Nixl {
            let (listener, at) = bind("decode engines", config.bootstrap).await?;
            bootstrap = Some(at);
            let service = Arc::new(Bootstrap {
                protocol: config.protocol,
                rooms: Arc::clone(&rooms),
                engine_id: ledger.engine_id().to_owned(),
                transfer: address,
                block_size,
            });
            tasks.spawn(service.serve(listener, cancel.clone(), tasks.clone()));
        }
        Ok(Self {
            protocol: config.protocol,
            rooms,
            bootstrap,
            lease: config.lease,
            push: config.push,
            ledger,
            transport: way.transport,
            pool: way.pool,
            address,
            block_size,
        })
    }

    /// Describes the KV of a prompt.
    pub(super) fn content(&self, prompt: &[u32], salt: Option<&str>) -> Content {
        Content::of(prompt, salt, self.block_size)
    }

    /// Fetches the KV of a prompt.
    pub(super) async fn fetch(
        &self,
        source: &Source,
        content: &Content,
    ) -> std::result::Result<(), Refusal> {
        let fetched = self.transport.fetch(source, content).await;
        self.ledger.count_fetch(fetched);
        fetched.map(|_| ())
    }

    /// Writes the bytes of what is held under `name` where others read them. They are sent over TCP where that fails.
    pub(super) async fn fill(&self, name: &Arc<str>) {
        let Some((pool, kept)) = self.pool.as_ref().zip(self.ledger.keep(name)) else {
            return;
        };
        let pool = Arc::clone(pool);
        let filled = tokio::task::spawn_blocking(move || pool.fill(&kept)).await;
        if let Ok(Err(error)) = filled {
            tracing::warn!(%error, "a prompt's KV is not in the pool");
        }
    }

    /// Waits for a room and takes its KV.
    pub(super) async fn join(
        &self,
        meeting: &Meeting,
        content: &Content,
    ) -> std::result::Result<(), Refusal> {
        match bootstrap::join(meeting, self.lease).await {
            Ok(source) => self.fetch(&source, content).await,
            Err(reason) => {
                self.ledger.count_fetch(Err(reason));
                Err(reason)
            }
        }
    }

    /// Returns the reply's fields for what is held under `name`; null when nothing is.
    pub(super) fn parameters(&self, name: &str, cached_tokens: usize) -> Value {
        let held = self.ledger.describe(name);
        held.map_or(Value::Null, |held| {
            let engine_id = self.ledger.engine_id();
            let filled = parameters::filled(&held, engine_id, self.address, cached_tokens);
            if self.push {
                parameters::pushed(filled)
            } else {
                filled
            }
        })
    }
}

impl TransferConfig {
    /// Sets up how bytes move.
    async fn way(&self, engine_id: &str, kv_blocks: usize, block_size: usize) -> Result<Way> {
        let bytes_per_token = self.kv_bytes_per_token as usize;
        let tcp = || Way {
            transport: Box::new(Tcp::new(bytes_per_token)),
            pool: None,
        };
        if self.transport == KvTransport::Tcp {
            return Ok(tcp());
        }
        match self.with_nixl(engine_id, kv_blocks, block_size).await {
            Ok(way) => Ok(way),
            Err(reason) if self.transport == KvTransport::Auto => {
                tracing::info!(reason, "KV moves over TCP: NIXL is not used");
                Ok(tcp())
            }
            Err(reason) => Err(Error::new(
                ErrorKind::Config,
                format!(
                    "KV cannot move with NIXL: {reason}; TCP works without (--kv-transport tcp or auto)"
                ),
            )),
        }
    }

    #[cfg(feature = "nixl")]
    async fn with_nixl(
        &self,
        engine_id: &str,
        kv_blocks: usize,
        block_size: usize,
    ) -> std::result::Result<Way, String> {
        let bytes_per_token = self.kv_bytes_per_token as usize;
        let library = self.nixl_library.as_deref();
        let (mover, pool) =
            nixl::start(library, engine_id, kv_blocks, block_size, bytes_per_token).await?;
        Ok(Way {
            transport: Box::new(mover),
            pool: Some(Arc::new(pool)),
        })
    }

    #[cfg(not(feature = "nixl"))]
    #[expect(clippy::unused_async, reason = "the other one waits")]
    async fn with_nixl(
        &self,
        _engine_id: &str,
        _kv_blocks: usize,
        _block_size: usize,
    ) -> std::result::Result<Way, String> {
        Err("this program was built without the feature `nixl`".to_owned())
    }
}

async fn bind(whom: &str, address: SocketAddr) -> Result<(TcpListener, SocketAddr)> {
    let failed = |error: std::io::Error| {
        let message = format!(
            "cannot listen for {whom} on {address}; a free address such as 127.0.0.1:5600 is accepted"
        );
        Error::new(ErrorKind::Config, message).with_source(error)
    };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}
