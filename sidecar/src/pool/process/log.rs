//! What an engine writes, kept within bounds.

use std::cmp::Reverse;
use std::collections::{BTreeSet, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, PipeReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tracing::warn;

use crate::config::MASK;

/// The last output of one engine, over its restarts.
#[derive(Debug)]
pub(super) struct Log {
    kept: Mutex<VecDeque<u8>>,
    most_bytes: usize,
    file: Option<Mutex<Rotating>>,
    /// What is not shown, though it was written.
    hidden: Mutex<BTreeSet<String>>,
}

impl Log {
    /// Keeps `most_bytes` in memory, and twice `file_bytes` at most in files of the folder.
    pub(super) fn new(
        name: &str,
        most_bytes: usize,
        folder: Option<&Path>,
        file_bytes: u64,
    ) -> Self {
        let file = folder.map(|folder| {
            Mutex::new(Rotating {
                path: folder.join(format!("{name}.log")),
                most_bytes: file_bytes,
                open: None,
                is_broken: false,
            })
        });
        Self {
            kept: Mutex::new(VecDeque::new()),
            most_bytes,
            file,
            hidden: Mutex::default(),
        }
    }

    /// Shows none of this from now on; files hold what was written. What is shorter than four bytes stands in too much else.
    pub(super) fn hide(&self, secrets: impl Iterator<Item = String>) {
        let long = secrets.filter(|secret| secret.len() >= 4);
        self.hidden.lock().extend(long);
    }

    /// Reads a pipe to its end, on a thread of its own: an engine whose output is not read stands still, so reading must not
    /// wait for anything but the disk. What is returned ends with the pipe.
    pub(super) fn follow(
        self: &Arc<Self>,
        name: &str,
        mut pipe: PipeReader,
    ) -> io::Result<oneshot::Receiver<()>> {
        let log = Arc::clone(self);
        let (open, closed) = oneshot::channel();
        let reader = move || {
            let _open = open;
            let mut piece = vec![0; 16 << 10];
            loop {
                match pipe.read(&mut piece) {
                    Ok(0) => return,
                    Ok(count) => log.append(&piece[..count]),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => return,
                }
            }
        };
        let thread = std::thread::Builder::new().name(format!("log {name}"));
        thread.spawn(reader)?;
        Ok(closed)
    }

    pub(super) fn append(&self, bytes: &[u8]) {
        {
            let mut kept = self.kept.lock();
            let bytes = &bytes[bytes.len().saturating_sub(self.most_bytes)..];
            let surplus = (kept.len() + bytes.len()).saturating_sub(self.most_bytes);
            kept.drain(..surplus);
            kept.extend(bytes);
        }
        if let Some(file) = &self.file {
            file.lock().append(bytes);
        }
    }

    /// Returns what is kept as lines, oldest first.
    pub(super) fn lines(&self) -> Vec<String> {
        let bytes: Vec<u8> = self.kept.lock().iter().copied().collect();
        let mut text = String::from_utf8_lossy(&bytes).into_owned();
        let hidden = self.hidden.lock();
        let mut secrets: Vec<&String> = hidden.iter().collect();
        // One may begin another.
        secrets.sort_by_key(|secret| Reverse(secret.len()));
        for secret in secrets {
            if text.contains(secret) {
                text = text.replace(secret, MASK);
            }
        }
        text.lines()
            .map(|line| line.trim_end().to_owned())
            .collect()
    }

    /// Returns the last lines that are not empty, in one line of bounded length, for messages.
    pub(super) fn tail(&self) -> String {
        const LINES: usize = 8;
        const WIDTH: usize = 300;
        let lines = self.lines();
        let mut last: Vec<String> = lines
            .iter()
            .rev()
            .filter(|line| !line.is_empty() && !line.starts_with(OWN))
            .take(LINES)
            .map(|line| line.chars().take(WIDTH).collect())
            .collect();
        last.reverse();
        if last.is_empty() {
            return "it wrote nothing".to_owned();
        }
        format!("last lines: {}", last.join(" | "))
    }

    /// Writes a line of the sidecar's own between the engine's.
    pub(super) fn note(&self, text: &str) {
        self.append(format!("{OWN}{text}\n").as_bytes());
    }
}

/// Begins the sidecar's own lines.
const OWN: &str = "--- kvlane: ";

/// A file that is set aside when it is full, over the one set aside before.
#[derive(Debug)]
struct Rotating {
    path: PathBuf,
    most_bytes: u64,
    open: Option<(File, u64)>,
    /// It was complained about.
    is_broken: bool,
}

impl Rotating {
    fn append(&mut self, bytes: &[u8]) {
        match self.try_append(bytes) {
            Ok(()) => self.is_broken = false,
            Err(error) => {
                self.open = None;
                if !std::mem::replace(&mut self.is_broken, true) {
                    warn!(file = %self.path.display(), cause = %error, "an engine's log cannot be written; it is kept in memory alone");
                }
            }
        }
    }

    fn try_append(&mut self, bytes: &[u8]) -> io::Result<()> {
        // A piece larger than a file is cut.
        let room = usize::try_from(self.most_bytes).unwrap_or(usize::MAX);
        let bytes = &bytes[bytes.len().saturating_sub(room)..];
        let more = bytes.len() as u64;
        if let Some((_, size)) = &self.open
            && size + more > self.most_bytes
        {
            self.open = None;
            std::fs::rename(&self.path, self.path.with_extension("log.1"))?;
        }
        let (mut file, size) = match self.open.take() {
            Some(open) => open,
            None => {
                let file = OpenOptions::new()
                    .create(true)
                    .append(true)
                    .open(&self.path)?;
                let size = file.metadata()?.len();
                (file, size)
            }
        };
        file.write_all(bytes)?;
        self.open = Some((file, size + more));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_files_stay_within_their_bounds_and_hold_the_newest() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new("w-0", 100, Some(folder.path()), 200);
        for number in 0..100 {
            log.append(format!("line {number:04}\n").as_bytes());
        }
        // 10 bytes a line.
        let lines = log.lines();
        assert_eq!(lines.len(), 10);
        assert_eq!(
            (lines[0].as_str(), lines[9].as_str()),
            ("line 0090", "line 0099")
        );
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        let (old, new) = (read("w-0.log.1"), read("w-0.log"));
        assert!(old.len() <= 200 && new.len() <= 200);
        assert!(new.ends_with("line 0099\n") && old.ends_with(&format!("{}\n", "line 0079")));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
        log.append(&[b'x'; 1000]);
        assert_eq!(log.lines(), ["x".repeat(100)]);
        assert_eq!(read("w-0.log").len(), 200);
    }

    #[test]
    fn a_file_of_an_earlier_run_is_continued_within_its_bound() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("w.log"), [b'o'; 95]).unwrap();
        let log = Log::new("w", 100, Some(folder.path()), 100);
        log.append(b"12345");
        log.append(b"6");
        let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
        assert_eq!(read("w.log"), b"6");
        assert_eq!(read("w.log.1").len(), 100);
    }

    #[test]
    fn what_is_hidden_is_shown_nowhere() {
        let log = Log::new("w", 1000, None, 0);
        log.hide(["s3cret".to_owned(), "a".to_owned()].into_iter());
        log.append(b"args: ['s3cret'] and s3crets of a\n");
        assert_eq!(log.lines(), ["args: ['***'] and ***s of a"]);
        assert_eq!(log.tail(), "last lines: args: ['***'] and ***s of a");
    }

    #[test]
    fn a_secret_that_begins_another_leaves_none_of_it() {
        let log = Log::new("w", 1000, None, 0);
        let secrets = ["abcd", "abcd-efgh", "efgh"].map(str::to_owned);
        log.hide(secrets.into_iter());
        log.append(b"a: abcd-efgh, abcd\n");
        assert_eq!(log.lines(), ["a: ***, ***"]);
    }

    #[test]
    fn the_tail_is_one_line_without_our_own() {
        let log = Log::new("w", 1 << 16, None, 0);
        assert_eq!(log.tail(), "it wrote nothing");
        log.note("started");
        log.append(b"one\n\ntwo\r\nbad \xff byte");
        assert_eq!(log.tail(), "last lines: one | two | bad \u{fffd} byte");
        log.append("w".repeat(1000).as_bytes());
        assert!(log.tail().len() < 400);
    }
}
