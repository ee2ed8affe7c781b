//! Addresses: the one place that joins and splits hosts and ports.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// A host and a port, with IPv6 hosts in canonical form and written in brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPort {
    host: String,
    port: u16,
}

impl HostPort {
    /// Joins a host (a name, an IPv4 address, or an IPv6 address without brackets) and a port.
    #[must_use]
    pub fn new(host: &str, port: u16) -> Self {
        let host = host
            .parse::<Ipv6Addr>()
            .map_or_else(|_| host.to_ascii_lowercase(), |address| address.to_string());
        Self { host, port }
    }

    /// Splits `host:port`, taking `default_port` when no port is written.
    ///
    /// # Errors
    /// Says what is wrong and what is accepted; an IPv6 address without brackets is refused, because where it ends and
    /// the port begins cannot be told.
    pub fn parse(text: &str, default_port: Option<u16>) -> Result<Self, String> {
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (host, after) = rest
                .split_once(']')
                .ok_or_else(|| format!("address {text:?} has no closing bracket"))?;
            if host.parse::<Ipv6Addr>().is_err() {
                return Err(format!("address {text:?}: {host:?} is not an IPv6 address"));
            }
            let port = match after.strip_prefix(':') {
                Some(port) => Some(port),
                None if after.is_empty() => None,
                None => {
                    return Err(format!(
                        "address {text:?} has something other than a port after the bracket"
                    ));
                }
            };
            (host, port)
        } else if text.matches(':').count() > 1 {
            return Err(format!(
                "address {text:?} looks like IPv6 without brackets; write it as [address]:port, as in [fd00::5]:8000"
            ));
        } else {
            match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            }
        };
        if host.is_empty() || host.contains(|c: char| c.is_whitespace() || "/@?#".contains(c)) {
            return Err(format!("address {text:?} has no valid host"));
        }
        let port = match (port, default_port) {
            (Some(port), _) => port.parse::<u16>().map_err(|_| {
                format!("address {text:?}: port {port:?} is not a number from 0 to 65535")
            })?,
            (None, Some(port)) => port,
            (None, None) => {
                return Err(format!(
                    "address {text:?} has no port; write it as host:port"
                ));
            }
        };
        Ok(Self::new(host, port))
    }

    /// Returns the host, an IPv6 address without brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the port.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Tells whether the host can only be reached from this machine.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        self.host.trim_end_matches('.') == "localhost"
            || self
                .host
                .parse::<IpAddr>()
                .is_ok_and(|address| address.to_canonical().is_loopback())
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Longest path of a worker's URL.
const MAX_PREFIX: usize = 1_024;

/// Where a worker's HTTP server is: `http://host:port`, optionally with a path before the API's own.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WorkerUrl {
    address: HostPort,
    prefix: String,
}

impl WorkerUrl {
    /// Parses a worker's URL; the port defaults to 80.
    ///
    /// # Errors
    /// Says what is wrong: only plain `http://` is supported, without credentials, query or fragment.
    pub fn parse(text: &str) -> Result<Self, String> {
        let Some(rest) = strip_scheme(text, "http://") else {
            if strip_scheme(text, "https://").is_some() {
                return Err(format!(
                    "url {text:?}: https is not supported towards workers; use http:// inside a trusted network"
                ));
            }
            return Err(format!("url {text:?} must begin with http://"));
        };
        let (authority, path) = rest
            .find('/')
            .map_or((rest, ""), |slash| rest.split_at(slash));
        if path.contains(['?', '#']) || path.contains(char::is_whitespace) {
            return Err(format!("url {text:?} must not have a query or fragment"));
        }
        if authority.contains('@') {
            return Err("url must not have credentials".to_owned());
        }
        // What is no path in a request line would be found out with the first request only.
        if path.len() > MAX_PREFIX
            || !path.is_ascii()
            || (!path.is_empty() && path.parse::<hyper::Uri>().is_err())
        {
            return Err(format!(
                "url {text:?} has a path that cannot stand in a request; accepted: up to {MAX_PREFIX} ASCII characters, others percent-encoded"
            ));
        }
        let address = HostPort::parse(authority, Some(80)).map_err(|e| format!("url: {e}"))?;
        Ok(Self {
            address,
            prefix: path.trim_end_matches('/').to_owned(),
        })
    }

    /// Returns the address to connect to.
    #[must_use]
    pub const fn address(&self) -> &HostPort {
        &self.address
    }

    /// Returns the path that comes before every request's own; empty, or beginning with `/` and not ending with it.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }
}

impl fmt::Display for WorkerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.address, self.prefix)
    }
}

fn strip_scheme<'a>(text: &'a str, scheme: &str) -> Option<&'a str> {
    text.get(..scheme.len())
        .filter(|head| head.eq_ignore_ascii_case(scheme))
        .map(|_| &text[scheme.len()..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv6_is_bracketed_and_canonical() {
        for text in ["[fd00::5]:8000", "[FD00:0:0::5]:8000"] {
            assert_eq!(
                HostPort::parse(text, None).unwrap().to_string(),
                "[fd00::5]:8000"
            );
        }
        assert_eq!(HostPort::new("fd00::6", 80).to_string(), "[fd00::6]:80");
        assert_eq!(
            WorkerUrl::parse("http://[FD00:0:0::6]:8000/")
                .unwrap()
                .to_string(),
            "http://[fd00::6]:8000"
        );
    }

    #[test]
    fn bare_ipv6_is_refused_with_a_clear_text() {
        let error = HostPort::parse("fd00::5:8000", None).unwrap_err();
        assert!(
            error.contains("without brackets") && error.contains("[fd00::5]:8000"),
            "{error}"
        );
        assert!(
            WorkerUrl::parse("http://fd00::5:8000")
                .unwrap_err()
                .contains("without brackets")
        );
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            ":80",
            "host",
            "host:99999",
            "host:x",
            "[fd00::5",
            "[x]:1",
            "[::1]x",
            "a b:1",
        ] {
            assert!(HostPort::parse(text, None).is_err(), "{text}");
        }
        for text in [
            "w1:8000",
            "https://w1",
            "http://",
            "http://u@h:1",
            "http://u:p@h:1",
            "http://h:1/a<b",
            "http://h:1/a`b",
            "http://h:1/ä",
            "http://h:1/?q",
            "ftp://h",
        ] {
            assert!(WorkerUrl::parse(text).is_err(), "{text}");
        }
        assert!(
            WorkerUrl::parse("https://w1")
                .unwrap_err()
                .contains("https is not supported")
        );
    }

    #[test]
    fn url_keeps_a_path_prefix() {
        let url = WorkerUrl::parse("http://Host/a/b/").unwrap();
        assert_eq!((url.prefix(), url.address().port()), ("/a/b", 80));
        assert_eq!(url.to_string(), "http://host:80/a/b");
    }
}
