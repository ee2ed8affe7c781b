//! The side that measures.

#[cfg(feature = "nixl")]
pub(super) mod nixl;
mod tcp;

use std::time::Duration;

use kvlane::Result;
use tokio::net::TcpStream;

use super::args::{LinkArgs, LinkTransport, Piece};
use super::failed;
use super::fit::median;
use super::report::{Cell, Measured};
use super::wire::{self, Hello, STEP_LIMIT, Welcome};

/// What is measured in one go.
#[derive(Clone, Copy, Debug)]
struct Plan {
    bytes: usize,
    piece: Piece,
    streams: usize,
}

/// Something that moves bytes here.
enum Mover {
    Tcp(tcp::Puller),
    #[cfg(feature = "nixl")]
    Nixl(Box<nixl::Reader>),
}

/// Streams share a link in transfers of this size at most.
const SHARED_BYTES: usize = 64 << 20;

/// Measures every cell.
pub(super) async fn measure(args: &LinkArgs) -> Result<Measured> {
    let plans = plans(args);
    let room = plans.iter().map(|plan| plan.bytes * plan.streams).max();
    let (mut mover, transport, memory) = connect(args, room.unwrap_or(0)).await?;
    let mut seconds: Vec<Vec<f64>> = vec![Vec::new(); plans.len()];
    // The first of each brings connections up and touches memory.
    for round in 0..=args.rounds {
        for (plan, seconds) in plans.iter().zip(&mut seconds) {
            let elapsed = mover.run(plan).await?;
            if round > 0 {
                seconds.push(elapsed.as_secs_f64());
            }
        }
    }
    let cells = plans
        .iter()
        .zip(seconds)
        .map(|(plan, seconds)| Cell {
            bytes: plan.bytes,
            piece: plan.piece,
            streams: plan.streams,
            seconds: median(seconds).unwrap_or(0.0),
        })
        .collect();
    Ok(Measured {
        peer: args.peer.clone(),
        transport,
        memory,
        cells,
    })
}

fn plans(args: &LinkArgs) -> Vec<Plan> {
    let mut plans = Vec::new();
    for piece in &args.pieces {
        for size in &args.sizes {
            let blocks = matches!(piece, Piece::Blocks(block) if block.bytes() >= size.bytes());
            // One block is a whole.
            if !blocks || args.pieces.len() == 1 {
                plans.push(Plan {
                    bytes: size.bytes(),
                    piece: *piece,
                    streams: 1,
                });
            }
        }
    }
    let sizes = args.sizes.iter().map(|size| size.bytes());
    let shared = sizes.clone().filter(|bytes| *bytes <= SHARED_BYTES).max();
    let shared = shared.or_else(|| sizes.min()).unwrap_or(SHARED_BYTES);
    if let Some(piece) = args.pieces.last() {
        for streams in args.streams.iter().filter(|streams| **streams > 1) {
            plans.push(Plan {
                bytes: shared,
                piece: *piece,
                streams: *streams as usize,
            });
        }
    }
    plans
}

/// Agrees with the listener on how bytes move.
async fn connect(args: &LinkArgs, room: usize) -> Result<(Mover, &'static str, String)> {
    let nixl = match args.transport {
        LinkTransport::Tcp => Err("--transport tcp".to_owned()),
        LinkTransport::Nixl | LinkTransport::Auto => load(args),
    };
    let (stream, welcome) = greet(&args.peer, room, nixl.is_ok()).await?;
    let reason = match nixl {
        Err(reason) => reason,
        Ok(nixl) => match welcome.nixl {
            #[cfg(feature = "nixl")]
            Some(offered) => {
                let reader = nixl::Reader::start(&nixl, stream, offered, args.gpu, room).await?;
                let memory = reader.memories();
                return Ok((Mover::Nixl(Box::new(reader)), "nixl", memory));
            }
            #[cfg(not(feature = "nixl"))]
            Some(_) => match nixl {},
            None => {
                let why: String = welcome.without.unwrap_or_default();
                let why: String = why.chars().take(500).collect();
                format!("{} has no NIXL: {why}", args.peer)
            }
        },
    };
    if args.transport == LinkTransport::Nixl || args.gpu.is_some() {
        return Err(failed(reason));
    }
    tracing::info!(reason, "bytes move over TCP: NIXL is not used");
    let puller = tcp::Puller::new(&args.peer, room, stream);
    Ok((Mover::Tcp(puller), "tcp", "host".to_owned()))
}

#[cfg(feature = "nixl")]
fn load(args: &LinkArgs) -> std::result::Result<crate::nixl::Nixl, String> {
    crate::nixl::Nixl::load(args.nixl_lib.as_deref()).map_err(|error| error.to_string())
}

#[cfg(not(feature = "nixl"))]
fn load(_args: &LinkArgs) -> std::result::Result<std::convert::Infallible, String> {
    Err("this program was built without the feature `nixl`".to_owned())
}

impl Mover {
    /// Moves what a plan says; returns how long its slowest stream took.
    async fn run(&mut self, plan: &Plan) -> Result<Duration> {
        match self {
            Self::Tcp(puller) => puller.run(plan).await,
            #[cfg(feature = "nixl")]
            Self::Nixl(reader) => reader.run(plan).await,
        }
    }
}

/// Opens a connection and says hello.
async fn greet(peer: &str, room: usize, nixl: bool) -> Result<(TcpStream, Welcome)> {
    let connecting = tokio::time::timeout(STEP_LIMIT, TcpStream::connect(peer)).await;
    let stream = connecting.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
    let mut stream = stream.map_err(|error| {
        failed(format!(
            "cannot connect to {peer:?}; the address of a `kvlane link listen` is accepted, as HOST:PORT"
        ))
        .with_source(error)
    })?;
    let _ = stream.set_nodelay(true);
    wire::say(&mut stream, &Hello::new(room, nixl)).await?;
    let welcome: Welcome = wire::hear(&mut stream, STEP_LIMIT).await?;
    wire::check(&welcome.protocol, welcome.version)?;
    match welcome.refused {
        Some(reason) => {
            let reason: String = reason.chars().take(500).collect();
            Err(failed(format!("{peer} refuses: {reason}")))
        }
        None => Ok((stream, welcome)),
    }
}
