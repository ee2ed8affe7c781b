//! Processes of this machine, as `/proc` shows them, and how they are ended.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use crate::config::mask;

/// A process, by its id and the moment it began (in clock ticks since the machine did), so that another one that has its
/// id later is not taken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Identity {
    /// Its id.
    pub(super) pid: u32,
    /// When it began.
    pub(super) start: u64,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.pid, self.start)
    }
}

/// What the kernel says of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) id: Identity,
    pub(super) parent: u32,
    pub(super) session: u32,
    /// It has ended, and its parent has not asked how.
    pub(super) is_over: bool,
}

impl Stat {
    /// Reads the text of `/proc/PID/stat`.
    fn parse(text: &str) -> Option<Self> {
        // The name stands in parentheses and may hold anything, parentheses too.
        let (head, rest) = text.rsplit_once(')')?;
        let pid = head.split_once(' ')?.0.parse().ok()?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        Some(Self {
            id: Identity {
                pid,
                start: fields.get(19)?.parse().ok()?,
            },
            parent: fields.get(1)?.parse().ok()?,
            session: fields.get(3)?.parse().ok()?,
            is_over: matches!(*fields.first()?, "Z" | "X"),
        })
    }
}

/// Asks for one process.
pub(super) fn stat(pid: u32) -> Option<Stat> {
    Stat::parse(&read(pid, "stat")?)
}

/// Returns a process's identity, if there is one of that id.
pub(super) fn identity(pid: u32) -> Option<Identity> {
    stat(pid).map(|stat| stat.id)
}

/// Returns the identity of this process.
///
/// # Errors
/// `/proc` cannot be read.
pub(super) fn own_identity() -> io::Result<Identity> {
    identity(std::process::id())
        .ok_or_else(|| io::Error::other("/proc/self/stat cannot be read: is /proc mounted?"))
}

/// Tells whether a process is there and has not ended.
pub(super) fn is_alive(id: Identity) -> bool {
    stat(id.pid).is_some_and(|stat| stat.id == id && !stat.is_over)
}

/// Lists all processes that this one may see.
pub(super) fn all() -> Vec<Stat> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(stat)
        .collect()
}

/// Selects the live descendants of a process.
pub(super) fn descendants(all: &[Stat], root: u32) -> Vec<Stat> {
    let mut family = HashSet::from([root]);
    // A child may stand before its parent in the list.
    loop {
        let before = family.len();
        family.extend(
            all.iter()
                .filter(|stat| family.contains(&stat.parent))
                .map(|stat| stat.id.pid)
                .collect::<Vec<_>>(),
        );
        if family.len() == before {
            break;
        }
    }
    family.remove(&root);
    all.iter()
        .filter(|stat| family.contains(&stat.id.pid) && !stat.is_over)
        .copied()
        .collect()
}

/// Reads a variable out of the environment that a process was started with. `None` too where the process belongs to another
/// user, or has written its title over it.
pub(super) fn variable(pid: u32, name: &str) -> Option<String> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    environment
        .split(|byte| *byte == 0)
        .find_map(|pair| pair.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
        .map(|value| String::from_utf8_lossy(value).into_owned())
}

/// Returns what a process's program is called.
pub(super) fn name(pid: u32) -> String {
    read(pid, "comm").unwrap_or_default().trim().to_owned()
}

/// Returns a process's command line as it may be shown, at most some 300 bytes of it.
pub(super) fn command_line(pid: u32) -> String {
    const MOST: usize = 300;
    let line = read(pid, "cmdline").unwrap_or_default();
    let words: Vec<String> = line.split('\0').map(str::to_owned).collect();
    let line = mask::command(&words).join(" ");
    let line = line.trim();
    if line.is_empty() {
        // A kernel thread, or one that has ended.
        return format!("[{}]", name(pid));
    }
    match line.char_indices().find(|(at, _)| *at >= MOST) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line.to_owned(),
    }
}

/// Sends a signal to exactly this process, never to one that has its id since.
pub(super) fn signal(id: Identity, signal: Signal) -> io::Result<()> {
    let gone = || io::Error::from(io::ErrorKind::NotFound);
    let pid = i32::try_from(id.pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(gone)?;
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(handle) => {
            // The handle stays with one process; whether it is the right one must be asked after it was opened.
            if identity(id.pid) != Some(id) {
                return Err(gone());
            }
            Ok(pidfd_send_signal(handle, signal)?)
        }
        // Kernels before 5.3.
        Err(rustix::io::Errno::NOSYS) if identity(id.pid) == Some(id) => {
            Ok(kill_process(pid, signal)?)
        }
        Err(rustix::io::Errno::NOSYS) => Err(gone()),
        Err(error) => Err(error.into()),
    }
}

/// Ends every process that `select` finds, and those that it finds later: politely at first, and not once `grace` has passed,
/// which is told how long that goes on already. Returns what is still there `PATIENCE` after that: processes that hang in the
/// kernel, as in a driver, take no signal.
pub(super) async fn end(
    select: impl Fn(&[Stat]) -> Vec<Stat>,
    mut grace: impl FnMut(Duration) -> Duration,
) -> Vec<Identity> {
    let begin = Instant::now();
    let mut asked = HashSet::new();
    let mut pause = Duration::from_millis(5);
    loop {
        let found = select(&snapshot().await);
        let elapsed = begin.elapsed();
        let grace = grace(elapsed);
        if found.is_empty() || elapsed > grace + PATIENCE {
            return found.into_iter().map(|stat| stat.id).collect();
        }
        for stat in found {
            if elapsed >= grace {
                let _ = signal(stat.id, Signal::KILL);
            } else if asked.insert(stat.id) {
                let _ = signal(stat.id, Signal::TERM);
                // One that was stopped by hand would not hear it.
                let _ = signal(stat.id, Signal::CONT);
            }
        }
        let left = grace.saturating_sub(elapsed);
        tokio::time::sleep(if left.is_zero() {
            pause
        } else {
            pause.min(left)
        })
        .await;
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}

/// How long a process may take to end after it was killed.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Lists all processes without stopping the event loop.
pub(super) async fn snapshot() -> Vec<Stat> {
    tokio::task::spawn_blocking(all).await.unwrap_or_default()
}

fn read(pid: u32, file: &str) -> Option<String> {
    let bytes = std::fs::read(format!("/proc/{pid}/{file}")).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let text = "42 (a) b (c)) S 7 40 41 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 9876 1 2 3";
        let stat = Stat::parse(text).unwrap();
        assert_eq!(
            stat,
            Stat {
                id: Identity {
                    pid: 42,
                    start: 9876
                },
                parent: 7,
                session: 41,
                is_over: false
            }
        );
        assert_eq!(Stat::parse("42 (a) S 7"), None);
        assert_eq!(Stat::parse(""), None);
    }

    #[test]
    fn descendants_are_found_in_any_order_and_without_the_dead() {
        let stat = |pid, parent, is_over| Stat {
            id: Identity { pid, start: 1 },
            parent,
            session: 1,
            is_over,
        };
        let all = [
            stat(5, 4, false),
            stat(4, 3, true),
            stat(3, 2, false),
            stat(9, 1, false),
        ];
        let found: Vec<_> = descendants(&all, 2)
            .iter()
            .map(|stat| stat.id.pid)
            .collect();
        assert_eq!(found, [5, 3]);
    }

    #[test]
    fn a_process_that_has_the_id_since_gets_no_signal() {
        let mut child = Command::new("sh")
            .args(["-c", "read line", "--api-key", "s3cret"])
            .stdin(Stdio::piped())
            .env("KVLANE_TEST", "here")
            .spawn()
            .unwrap();
        let id = identity(child.id()).unwrap();
        let other = Identity {
            start: id.start + 1,
            ..id
        };
        assert_eq!(
            signal(other, Signal::KILL).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        assert!(is_alive(id) && !is_alive(other));
        while command_line(id.pid) != "sh -c read line --api-key ***" {
            std::thread::yield_now();
        }
        assert_eq!(name(id.pid), "sh");
        assert_eq!(variable(id.pid, "KVLANE_TEST").unwrap(), "here");
        assert_eq!(variable(id.pid, "KVLANE_TES"), None);
        signal(id, Signal::KILL).unwrap();
        child.wait().unwrap();
        assert!(!is_alive(id));
    }

    #[tokio::test]
    async fn what_does_not_end_politely_is_killed() {
        let mut child = Command::new("sh")
            .args([
                "-c",
                "trap '' TERM; echo deaf; while :; do sleep 0.05; done",
            ])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let root = child.id();
        let mut said = [0; 4];
        child.stdout.take().unwrap().read_exact(&mut said).unwrap();
        let reaper = std::thread::spawn(move || child.wait());
        let select = move |all: &[Stat]| {
            all.iter()
                .filter(|stat| stat.id.pid == root && !stat.is_over)
                .copied()
                .collect()
        };
        let begin = Instant::now();
        let left = end(select, |_| Duration::from_millis(200)).await;
        assert!(left.is_empty());
        assert!(begin.elapsed() >= Duration::from_millis(200));
        assert!(!reaper.join().unwrap().unwrap().success());
    }
}
