//! `kvlane engine`: the simulated engine as a process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use kvlane::{Result, Role};

use crate::signals::Ending;

use super::{Engine, EngineConfig, EventConfig, KvProtocol, KvTransport, TransferConfig};

/// Flags of `kvlane engine`: a simulated vLLM with finite KV, KV events, metrics and vLLM's HTTP fields.
#[derive(Args, Clone, Debug)]
pub struct EngineArgs {
    /// Address of the HTTP server; port 0 lets the system choose
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,
    /// ZMQ endpoint that publishes KV events, such as tcp://127.0.0.1:5557 (without it there are none)
    #[arg(long, value_name = "ENDPOINT")]
    pub events: Option<String>,
    /// ZMQ endpoint that answers replay requests, such as tcp://127.0.0.1:5558
    #[arg(long, value_name = "ENDPOINT", requires = "events")]
    pub replay: Option<String>,
    /// Binds the event sockets but publishes nothing: the silent worker
    #[arg(long)]
    pub no_events: bool,
    /// Topic of the event messages
    #[arg(long, default_value = "")]
    pub topic: String,
    /// Size of the KV pool in blocks, one of them reserved
    #[arg(long, value_name = "N", default_value_t = 926)]
    pub kv_blocks: u32,
    /// Tokens per block
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub block_size: u32,
    /// What the engine says it is for
    #[arg(long, value_enum, default_value_t = RoleArg::Both)]
    pub role: RoleArg,
    /// Address that other engines fetch KV from [default: a free port beside --listen in the roles prefill and decode; none
    /// in the role both]
    #[arg(long, value_name = "ADDR")]
    pub kv_transfer: Option<SocketAddr>,
    /// Whose fields tell it of handoffs
    #[arg(long, value_enum, default_value_t = ProtocolArg::Nixl)]
    pub kv_protocol: ProtocolArg,
    /// Announces that it pushes what it hands over, as vLLM's NixlPushConnector
    #[arg(long)]
    pub kv_push: bool,
    /// Port of the bootstrap service of a prefill engine that takes part as SGLang's or Mooncake's
    #[arg(long, value_name = "N", default_value_t = 8998)]
    pub kv_bootstrap_port: u16,
    /// Milliseconds for which a prefill is held that nobody fetches
    #[arg(long, value_name = "N", default_value_t = 30_000)]
    pub kv_lease_ms: u64,
    /// Bytes that stand for one token's KV
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub kv_bytes_per_token: u32,
    /// How KV moves between engines
    #[arg(long, value_enum, default_value_t = TransportArg::Auto)]
    pub kv_transport: TransportArg,
    /// The file libnixl_capi.so [default: NIXL_CAPI_LIB, else that of an installed wheel]
    #[arg(long, value_name = "FILE")]
    pub nixl_lib: Option<PathBuf>,
    /// Prompt tokens computed per second (the default is that of a 0.6B model)
    #[arg(long, value_name = "N", default_value_t = EngineConfig::default().prefill_tokens_per_second)]
    pub prefill_tokens_per_second: f64,
    /// Fixed milliseconds of a step that computes prompt tokens
    #[arg(long, value_name = "N", default_value_t = EngineConfig::default().prefill_overhead_ms)]
    pub prefill_overhead_ms: f64,
    /// Milliseconds of a step that produces one token for every running request
    #[arg(long, value_name = "N", default_value_t = EngineConfig::default().decode_ms)]
    pub decode_ms: f64,
    /// Divides every time
    #[arg(long, value_name = "N", default_value_t = 1.0)]
    pub speed: f64,
    /// Name that requests must ask for
    #[arg(long, value_name = "NAME", default_value = "sim")]
    pub model_name: String,
    /// Longest prompt plus output in tokens [default: what the KV pool holds]
    #[arg(long, value_name = "N")]
    pub max_model_len: Option<u32>,
    /// Requests in one step at most
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_num_seqs: usize,
    /// Tokens in one step at most
    #[arg(long, value_name = "N", default_value_t = 8192)]
    pub max_num_batched_tokens: usize,
    /// Chooses the generated words
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

/// Values of `--kv-protocol`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProtocolArg {
    /// vLLM's NIXL connector.
    Nixl,
    /// SGLang's bootstrap.
    Sglang,
    /// vLLM's Mooncake connector.
    Mooncake,
}

/// Values of `--role`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RoleArg {
    /// Processes prompts only.
    Prefill,
    /// Produces tokens after the first only.
    Decode,
    /// Does both.
    Both,
}

/// Values of `--kv-transport`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportArg {
    /// Over TCP.
    Tcp,
    /// With NIXL; without it the engine does not start.
    Nixl,
    /// With NIXL where it can be loaded, else over TCP.
    Auto,
}

impl EngineArgs {
    /// Tells whether NIXL may be loaded.
    #[must_use]
    pub fn may_load_nixl(&self) -> bool {
        let connects = self.role != RoleArg::Both || self.kv_transfer.is_some();
        connects && self.kv_transport != TransportArg::Tcp
    }

    /// Returns the configuration that the flags describe.
    #[must_use]
    pub fn to_config(&self) -> EngineConfig {
        let events = self.events.as_ref().map(|endpoint| EventConfig {
            replay_endpoint: self.replay.clone(),
            topic: self.topic.clone(),
            silent: self.no_events,
            ..EventConfig::new(endpoint)
        });
        let beside = SocketAddr::new(self.listen.ip(), 0);
        let connects = self.role != RoleArg::Both;
        let transfer = self.kv_transfer.or_else(|| connects.then_some(beside));
        EngineConfig {
            transfer: transfer.map(|listen| TransferConfig {
                lease: Duration::from_millis(self.kv_lease_ms),
                kv_bytes_per_token: self.kv_bytes_per_token,
                protocol: match self.kv_protocol {
                    ProtocolArg::Nixl => KvProtocol::Nixl,
                    ProtocolArg::Sglang => KvProtocol::Sglang,
                    ProtocolArg::Mooncake => KvProtocol::Mooncake,
                },
                push: self.kv_push,
                bootstrap: SocketAddr::new(listen.ip(), self.kv_bootstrap_port),
                transport: match self.kv_transport {
                    TransportArg::Tcp => KvTransport::Tcp,
                    TransportArg::Nixl => KvTransport::Nixl,
                    TransportArg::Auto => KvTransport::Auto,
                },
                nixl_library: self.nixl_lib.clone(),
                ..TransferConfig::new(listen)
            }),
            listen: self.listen,
            model_name: self.model_name.clone(),
            events,
            kv_blocks: self.kv_blocks,
            block_size: self.block_size,
            max_model_len: self.max_model_len,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            role: match self.role {
                RoleArg::Prefill => Role::Prefill,
                RoleArg::Decode => Role::Decode,
                RoleArg::Both => Role::Both,
            },
            prefill_tokens_per_second: self.prefill_tokens_per_second,
            prefill_overhead_ms: self.prefill_overhead_ms,
            decode_ms: self.decode_ms,
            speed: self.speed,
            seed: self.seed,
            ..EngineConfig::default()
        }
    }
}

/// Runs an engine until SIGINT or SIGTERM.
///
/// # Errors
/// Those of [`Engine::start`], or [`kvlane::ErrorKind::Config`] when signals cannot be watched.
pub async fn run(args: EngineArgs) -> Result<()> {
    let mut ending = Ending::watch()?;
    let engine = Engine::start(args.to_config()).await?;
    tracing::info!(
        url = engine.url(),
        model = engine.model_name(),
        role = ?args.role,
        events = engine.events_endpoint().unwrap_or("off"),
        replay = engine.replay_endpoint().unwrap_or("off"),
        silent = args.no_events,
        kv_blocks = args.kv_blocks,
        block_size = args.block_size,
        "simulated engine serves"
    );
    ending.asked().await;
    engine.shutdown().await;
    Ok(())
}
