//! Flags of `kvlane link`.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};

/// Flags of `kvlane link`: measures how fast KV moves between two hosts.
#[derive(Args, Clone, Debug)]
pub struct LinkArgs {
    /// `listen`, or the address of a listening kvlane as HOST:PORT
    #[arg(value_name = "listen|HOST:PORT")]
    pub peer: String,
    /// Address to listen on; port 0 lets the system choose
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:7711")]
    pub bind: SocketAddr,
    /// How bytes move
    #[arg(long, value_enum, default_value_t = LinkTransport::Auto)]
    pub transport: LinkTransport,
    /// The file libnixl_capi.so [default: NIXL_CAPI_LIB, else that of an installed wheel]
    #[arg(long, value_name = "FILE")]
    pub nixl_lib: Option<PathBuf>,
    /// Measures from or into memory of this GPU instead of the host's (NIXL only)
    #[arg(long, value_name = "N")]
    pub gpu: Option<u32>,
    /// Bytes of one transfer
    #[arg(
        long,
        value_name = "SIZE,…",
        value_delimiter = ',',
        default_value = "4K,1M,16M,64M,256M"
    )]
    pub sizes: Vec<Size>,
    /// Layouts: `whole`, or the size of the blocks that a transfer is scattered over
    #[arg(
        long,
        value_name = "PIECE,…",
        value_delimiter = ',',
        default_value = "whole,64K"
    )]
    pub pieces: Vec<Piece>,
    /// Transfers at once, of the largest size up to 64M
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,2,4", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub streams: Vec<u32>,
    /// Rounds over all cells; medians are reported
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub rounds: u32,
    /// Memory that a listener offers to one peer at most
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub max_size: Size,
    /// A listener ends when its first measurement is over
    #[arg(long)]
    pub once: bool,
    /// Prints one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
    /// Writes what `kvlane serve` reads as `handoff.link_file`
    #[arg(long, value_name = "FILE")]
    pub write: Option<PathBuf>,
}

impl LinkArgs {
    /// Tells whether NIXL may be loaded.
    #[must_use]
    pub fn may_load_nixl(&self) -> bool {
        self.transport != LinkTransport::Tcp
    }
}

/// Values of `--transport`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LinkTransport {
    /// Over TCP.
    Tcp,
    /// With NIXL or not at all.
    Nixl,
    /// With NIXL where both sides have it, else over TCP.
    Auto,
}

/// A number of bytes, such as `64K`, `16M` or `1G`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(usize);

/// Units of sizes, the largest first.
const UNITS: [(char, usize); 3] = [('G', 1 << 30), ('M', 1 << 20), ('K', 1 << 10)];
/// The largest size; what a GPU has.
const MOST: usize = 1 << 37;

impl Size {
    /// Returns the bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        self.0
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unit = UNITS
            .iter()
            .find_map(|(unit, bytes)| Some((text.strip_suffix(*unit)?, *bytes)));
        let (number, unit) = unit.unwrap_or((text, 1));
        let number = number.parse::<usize>().ok();
        number
            .and_then(|number| number.checked_mul(unit))
            .filter(|bytes| (1..=MOST).contains(bytes))
            .map(Self)
            .ok_or_else(|| format!("{text:?} is not a size from 1 to 128G, such as 64K or 16M"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS
            .iter()
            .find(|(_, bytes)| self.0.is_multiple_of(*bytes));
        match unit {
            Some((unit, bytes)) => write!(f, "{}{unit}", self.0 / bytes),
            None => write!(f, "{}", self.0),
        }
    }
}

/// How a transfer lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// In one piece.
    Whole,
    /// In blocks of this size, none beside the one before it.
    Blocks(Size),
}

impl Piece {
    /// Returns the bytes of one piece of a transfer.
    #[must_use]
    pub fn of(self, bytes: usize) -> usize {
        match self {
            Self::Whole => bytes,
            Self::Blocks(size) => size.bytes().min(bytes),
        }
    }
}

impl FromStr for Piece {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "whole" {
            return Ok(Self::Whole);
        }
        let size: Size = text
            .parse()
            .map_err(|error| format!("{error}, and not `whole`"))?;
        if size.bytes() < 512 {
            return Err(format!(
                "{text:?} is too small for a block: 512 bytes at least"
            ));
        }
        Ok(Self::Blocks(size))
    }
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("whole"),
            Self::Blocks(size) => size.fmt(f),
        }
    }
}
