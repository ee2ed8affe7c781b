//! Ports for engines: free when they are given, and not given twice.

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;

use parking_lot::Mutex;

/// The ports that were given.
#[derive(Debug)]
pub(super) struct Ports {
    range: Range<u16>,
    /// The last ones, oldest first: what still arrives for an engine that is gone must not reach another one.
    given: Mutex<VecDeque<u16>>,
}

/// Ports that are not given again.
const REMEMBERED: usize = 4_096;

impl Ports {
    /// Draws from beside those that the system gives to outgoing connections: an engine opens some of its ports minutes after
    /// they were chosen, and a connection may have taken them by then.
    pub(super) fn new() -> Self {
        let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
        Self {
            range: beside(&text.unwrap_or_default()),
            given: Mutex::new(VecDeque::new()),
        }
    }

    /// Reserves `count` ports that follow each other and returns the first.
    ///
    /// # Errors
    /// So many ports in a row are not free.
    pub(super) fn reserve(&self, count: u16) -> io::Result<u16> {
        let mut given = self.given.lock();
        let last = self.range.end.saturating_sub(count);
        for _ in 0..ATTEMPTS {
            let first = fastrand::u16(self.range.start..=last.max(self.range.start));
            let Some(end) = first.checked_add(count) else {
                continue;
            };
            let ports = first..end;
            if ports.clone().any(|port| given.contains(&port)) || !ports.clone().all(is_free) {
                continue;
            }
            given.extend(ports);
            while given.len() > REMEMBERED {
                given.pop_front();
            }
            return Ok(first);
        }
        Err(io::Error::other(format!(
            "no {count} free ports in a row were found from {} to {}",
            self.range.start, self.range.end
        )))
    }
}

const ATTEMPTS: u32 = 1_000;

/// Returns ports that are not in the range of outgoing connections, which is given as the kernel writes it.
fn beside(text: &str) -> Range<u16> {
    const ENOUGH: u16 = 2_048;
    const LOWEST: u16 = 10_240;
    let mut numbers = text.split_ascii_whitespace().map(str::parse::<u16>);
    let (low, high) = match (numbers.next(), numbers.next()) {
        (Some(Ok(low)), Some(Ok(high))) => (low, high),
        _ => (32_768, 60_999),
    };
    if low.saturating_sub(LOWEST) >= ENOUGH {
        LOWEST..low
    } else if u16::MAX - high >= ENOUGH {
        high + 1..u16::MAX
    } else {
        LOWEST..u16::MAX
    }
}

/// Tells whether nothing listens on a port, on any address.
fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ports_are_free_in_a_row_and_not_given_twice() {
        let ports = Ports::new();
        let mut seen = HashSet::new();
        let mut free = 0;
        for _ in 0..50 {
            let first = ports.reserve(4).unwrap();
            for port in first..first + 4 {
                assert!(seen.insert(port), "{port} was given twice");
                free += usize::from(TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok());
            }
        }
        // Other processes may take one in between.
        assert!(free >= 190, "{free} of 200 were free");
    }

    #[test]
    fn a_port_that_is_listened_on_is_not_given() {
        let port = kvlane_tests::free_port();
        let holder = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        let ports = Ports {
            range: port..port + 1,
            given: Mutex::new(VecDeque::new()),
        };
        assert!(ports.reserve(1).is_err());
        drop(holder);
        assert_eq!(ports.reserve(1).unwrap(), port);
        assert!(ports.reserve(1).is_err(), "it is remembered");
    }

    #[test]
    fn ports_of_outgoing_connections_are_left_alone() {
        assert_eq!(beside("32768\t60999\n"), 10_240..32_768);
        assert_eq!(beside("1024 60999"), 61_000..65_535);
        assert_eq!(beside("1024 65535"), 10_240..65_535);
        assert_eq!(beside("nonsense"), 10_240..32_768);
    }
}
