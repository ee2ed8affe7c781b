//! Addresses of engines' sockets, parsed once.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Where an engine publishes events or answers replay requests, as an address to connect to.
///
/// Accepted forms: `tcp://HOST:PORT` (a name or an IPv4 address), `tcp://[IPV6]:PORT`, `ipc://PATH` and `inproc://NAME`.
/// `inproc` reaches publishers that share the subscriber's ZeroMQ context, so it is of use inside one process only.
/// Wildcard hosts (`*`, `0.0.0.0`, `[::]`) say where an engine listens, not where it can be reached, and are refused.
///
/// # Examples
/// ```
/// use kvlane::subscribe::Endpoint;
///
/// let base: Endpoint = "tcp://10.0.0.7:5557".parse()?;
/// assert_eq!(base.for_rank(3)?.to_string(), "tcp://10.0.0.7:5560");
/// assert!("tcp://*:5557".parse::<Endpoint>().is_err());
/// # Ok::<(), kvlane::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint(Address);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Address {
    Tcp { host: Host, port: u16 },
    Ipc(String),
    Inproc(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Host {
    /// A name: may resolve to either family.
    Name(String),
    V4(std::net::Ipv4Addr),
    /// An address, possibly with a zone.
    V6(String),
}

impl Endpoint {
    /// Returns the endpoint of a data-parallel rank when this one is that of rank 0.
    ///
    /// Engines add the rank to the port (`tcp`) or the suffix `_dp<rank>` (`inproc`). Rank 0 returns the same endpoint.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) when the port would exceed 65,535, and for `ipc` with a rank above 0,
    /// which engines refuse too.
    pub fn for_rank(&self, dp_rank: u32) -> Result<Self> {
        if dp_rank == 0 {
            return Ok(self.clone());
        }
        match &self.0 {
            Address::Tcp { host, port } => {
                let port = u32::from(*port)
                    .checked_add(dp_rank)
                    .and_then(|port| u16::try_from(port).ok())
                    .ok_or_else(|| {
                        Error::config(format!(
                            "endpoint {self} has no port for dp rank {dp_rank}: port + rank must be at most 65535"
                        ))
                    })?;
                Ok(Self(Address::Tcp {
                    host: host.clone(),
                    port,
                }))
            }
            Address::Inproc(name) => Ok(Self(Address::Inproc(format!("{name}_dp{dp_rank}")))),
            Address::Ipc(_) => Err(Error::config(format!(
                "endpoint {self} serves dp rank 0 only; use tcp://HOST:PORT for dp rank {dp_rank}"
            ))),
        }
    }

    /// Tells whether connections can be observed; an `inproc` one exists from the start.
    pub(super) fn is_inproc(&self) -> bool {
        matches!(self.0, Address::Inproc(_))
    }

    /// Tells whether an attempt to connect should look for an IPv6 address. A name is tried in turn, IPv4 first, because
    /// engines listen on IPv4 alone by default even where `localhost` is `::1`.
    pub(super) fn uses_ipv6(&self, attempt: u32) -> bool {
        match &self.0 {
            Address::Tcp { host, .. } => match host {
                Host::Name(_) => attempt % 2 == 1,
                Host::V4(_) => false,
                Host::V6(_) => true,
            },
            Address::Ipc(_) | Address::Inproc(_) => false,
        }
    }
}

impl FromStr for Endpoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse(text).map(Self).map_err(|why| {
            Error::config(format!(
                "endpoint {text:?} is not valid: {why}; accepted: tcp://HOST:PORT, tcp://[IPV6]:PORT, ipc://PATH, inproc://NAME"
            ))
        })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Address::Tcp { host, port } => match host {
                Host::Name(name) => write!(f, "tcp://{name}:{port}"),
                Host::V4(address) => write!(f, "tcp://{address}:{port}"),
                Host::V6(address) => write!(f, "tcp://[{address}]:{port}"),
            },
            Address::Ipc(path) => write!(f, "ipc://{path}"),
            Address::Inproc(name) => write!(f, "inproc://{name}"),
        }
    }
}

fn parse(text: &str) -> Result<Address, String> {
    if text.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err("it holds spaces or control characters".into());
    }
    let (scheme, rest) = text
        .split_once("://")
        .ok_or_else(|| String::from("it has no scheme"))?;
    match scheme {
        "tcp" => parse_tcp(rest),
        "ipc" => bounded(rest, MAX_IPC_PATH_BYTES, "path").map(Address::Ipc),
        "inproc" => bounded(rest, MAX_INPROC_NAME_BYTES, "name").map(Address::Inproc),
        _ => Err(format!("scheme {scheme:?} is unknown")),
    }
}

fn parse_tcp(rest: &str) -> Result<Address, String> {
    let (host, port) = if let Some(rest) = rest.strip_prefix('[') {
        let (host, port) = rest
            .split_once("]:")
            .ok_or("an IPv6 address is written [ADDRESS]:PORT")?;
        (parse_ipv6(host)?, port)
    } else {
        let (host, port) = rest.rsplit_once(':').ok_or("the port is missing")?;
        if host.contains(':') {
            return Err("an IPv6 address is written [ADDRESS]:PORT".into());
        }
        (parse_host(host)?, port)
    };
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    match port.parse::<u16>() {
        Ok(port) if port > 0 && digits => Ok(Address::Tcp { host, port }),
        _ => Err(format!("port {port:?} is not a number from 1 to 65535")),
    }
}

fn parse_ipv6(text: &str) -> Result<Host, String> {
    let address = text
        .split_once('%')
        .map_or(text, |(address, _zone)| address);
    match address.parse::<Ipv6Addr>() {
        Ok(parsed) if parsed.is_unspecified() => Err(WILDCARD.into()),
        Ok(_) => Ok(Host::V6(text.into())),
        Err(_) => Err(format!("{text:?} is no IPv6 address")),
    }
}

fn parse_host(host: &str) -> Result<Host, String> {
    if host == "*" {
        return Err(WILDCARD.into());
    }
    if let Ok(address) = host.parse::<std::net::Ipv4Addr>() {
        if address.is_unspecified() {
            return Err(WILDCARD.into());
        }
        return Ok(Host::V4(address));
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    let named = host.bytes().any(|byte| byte.is_ascii_alphabetic());
    if host.is_empty() || host.len() > 253 || !named || !host.chars().all(plain) {
        return Err(format!(
            "{host:?} is neither a host name nor an IPv4 address"
        ));
    }
    Ok(Host::Name(host.into()))
}

fn bounded(text: &str, max_bytes: usize, what: &str) -> Result<String, String> {
    if text.is_empty() || text == "*" || text.len() > max_bytes {
        return Err(format!(
            "the {what} must be 1 to {max_bytes} bytes and not a wildcard"
        ));
    }
    Ok(text.into())
}

const WILDCARD: &str =
    "a wildcard host says where an engine listens, not where it can be reached: name its host";

/// `sun_path` has 108 bytes on Linux and 104 on macOS, with a terminating zero.
const MAX_IPC_PATH_BYTES: usize = 103;

/// ZeroMQ's own limit on names.
const MAX_INPROC_NAME_BYTES: usize = 240;

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(text: &str) -> Endpoint {
        text.parse().unwrap()
    }

    fn refusal(text: &str) -> String {
        text.parse::<Endpoint>().unwrap_err().to_string()
    }

    #[test]
    fn accepted_forms_print_as_they_were_written() {
        for text in [
            "tcp://127.0.0.1:5557",
            "tcp://pod-1.engines.svc:5557",
            "tcp://localhost:1",
            "tcp://[::1]:65535",
            "tcp://[fe80::1%eth0]:5557",
            "ipc:///tmp/kv.sock",
            "ipc://@abstract",
            "inproc://kv",
        ] {
            assert_eq!(endpoint(text).to_string(), text);
        }
    }

    #[test]
    fn refusals_say_why_and_name_the_accepted_forms() {
        for (text, why) in [
            ("tcp://*:5557", "wildcard"),
            ("tcp://0.0.0.0:5557", "wildcard"),
            ("tcp://[::]:5557", "wildcard"),
            ("tcp://fe80::1:5557", "[ADDRESS]:PORT"),
            ("tcp://[::1]", "[ADDRESS]:PORT"),
            ("tcp://[nonsense]:5557", "no IPv6 address"),
            ("tcp://host", "port is missing"),
            ("tcp://host:", "port \"\""),
            ("tcp://host:0", "port \"0\""),
            ("tcp://host:65536", "port \"65536\""),
            ("tcp://host:+80", "port \"+80\""),
            ("tcp://:5557", "neither a host name"),
            ("tcp://300.1.1.1:5557", "neither a host name"),
            ("tcp://a/b:5557", "neither a host name"),
            ("http://host:80", "scheme \"http\" is unknown"),
            ("host:5557", "no scheme"),
            ("ipc://", "path must be"),
            ("ipc://*", "path must be"),
            ("inproc://", "name must be"),
            ("tcp://ho st:1", "spaces"),
            ("tcp://host:1\0", "control characters"),
        ] {
            let message = refusal(text);
            assert!(message.contains(why), "{text}: {message}");
            assert!(message.contains("tcp://HOST:PORT"), "{text}: {message}");
        }
        let long = format!("ipc:///{}", "x".repeat(200));
        assert!(refusal(&long).contains("1 to 103 bytes"));
    }

    #[test]
    fn a_rank_moves_the_port() {
        assert_eq!(
            endpoint("tcp://[::1]:5557").for_rank(2).unwrap(),
            endpoint("tcp://[::1]:5559")
        );
        assert_eq!(
            endpoint("inproc://kv").for_rank(1).unwrap(),
            endpoint("inproc://kv_dp1")
        );
        assert_eq!(
            endpoint("ipc:///tmp/x").for_rank(0).unwrap(),
            endpoint("ipc:///tmp/x")
        );
        assert!(endpoint("ipc:///tmp/x").for_rank(1).is_err());
        assert!(endpoint("tcp://h:65535").for_rank(1).is_err());
        assert!(endpoint("tcp://h:1").for_rank(u32::MAX).is_err());
    }

    #[test]
    fn names_alternate_between_families() {
        assert!(!endpoint("tcp://localhost:1").uses_ipv6(0));
        assert!(endpoint("tcp://localhost:1").uses_ipv6(1));
        assert!(!endpoint("tcp://127.0.0.1:1").uses_ipv6(1));
        assert!(endpoint("tcp://[::1]:1").uses_ipv6(0));
    }
}
