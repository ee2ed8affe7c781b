//! How many files may be open.
//!
//! Systems let a program have 1,024 until it asks for more, which 400 requests use up. A connection that cannot be opened for
//! that would be taken for a fault of its worker.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::warn;

/// Those of one client: its own connection, and one to each of two workers.
const OF_A_CLIENT: u64 = 3;
/// Event streams, probes, logs and listeners.
const OF_OURS: u64 = 1_024;

/// Asks the system for as many open files as so many clients take, and says when it allows fewer.
pub(crate) fn allow(clients: usize) {
    let wanted = wanted(clients);
    let now = getrlimit(Resource::Nofile);
    let raised = raised(now, wanted);
    // What is refused stays as it was.
    let allowed = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => raised.current,
        Err(_) => now.current,
    };
    if let Some(allowed) = allowed.filter(|allowed| *allowed < wanted) {
        warn!(
            allowed,
            wanted,
            "few files may be open at once: raise the limit (ulimit -Hn, LimitNOFILE) or lower max_connections"
        );
    }
}

/// Returns how many files so many clients take.
const fn wanted(clients: usize) -> u64 {
    OF_OURS.saturating_add(OF_A_CLIENT.saturating_mul(clients as u64))
}

/// Returns the limit to ask for: what is wanted, as far as the system's own goes, and never less than there is. `None` is no
/// limit.
fn raised(now: Rlimit, wanted: u64) -> Rlimit {
    let most = now.maximum.map_or(wanted, |maximum| wanted.min(maximum));
    Rlimit {
        current: now.current.map(|current| current.max(most)),
        maximum: now.maximum,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_raised_as_far_as_it_may_be_and_never_lowered() {
        let limit = |current, maximum| Rlimit { current, maximum };
        for (now, expected) in [
            (limit(Some(1_024), Some(524_288)), Some(50_000)),
            (limit(Some(1_024), Some(4_096)), Some(4_096)),
            (limit(Some(1_024), None), Some(50_000)),
            (limit(Some(65_536), Some(524_288)), Some(65_536)),
            (limit(None, None), None),
        ] {
            let raised = raised(now, 50_000);
            assert_eq!(raised.current, expected);
            assert_eq!(raised.maximum, now.maximum);
        }
    }

    #[test]
    fn a_client_takes_three_files_beside_what_we_keep_open() {
        for (clients, files) in [(0, 1_024), (16, 1_072), (16_384, 50_176)] {
            assert_eq!(wanted(clients), files);
        }
        assert_eq!(wanted(usize::MAX), u64::MAX);
    }

    #[test]
    fn this_process_may_open_as_many_as_are_asked_for() {
        let before = getrlimit(Resource::Nofile);
        // Lower than the system allows, so that there is something to raise.
        let lower = Rlimit {
            current: before.current.map(|current| current - OF_A_CLIENT),
            maximum: before.maximum,
        };
        setrlimit(Resource::Nofile, lower).unwrap();
        let more = before.current.unwrap_or(0) / OF_A_CLIENT;
        let clients = usize::try_from(more).unwrap();
        allow(clients);
        let expected = raised(lower, wanted(clients));
        let after = getrlimit(Resource::Nofile);
        assert_eq!(
            (after.current, after.maximum),
            (expected.current, expected.maximum)
        );
        assert!(before.current.is_none() || after.current > lower.current);
    }
}
