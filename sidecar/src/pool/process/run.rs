//! Which run of which sidecar a process belongs to, and where that is written down.
//!
//! Every process that a run starts carries the run's name in its environment, and the run's name says which process the
//! sidecar was: whoever finds it can tell whether that one still lives. Programs that write a title over their environment
//! lose the mark, so engines are also written down in a file of the run, by process and session.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use parking_lot::Mutex;
use rustix::process::getuid;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::proc::{self, Identity};

/// The variable that holds the run's name.
pub(super) const RUN: &str = "KVLANE_RUN";
/// The variable that holds the worker's name.
pub(super) const PROCESS: &str = "KVLANE_PROCESS";

/// The name of one run of a sidecar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RunId {
    /// Process ids mean something within one namespace of them alone.
    namespace: u64,
    sidecar: Identity,
    /// Several runs within one process differ.
    number: u32,
}

impl RunId {
    /// Makes a name for a run of this process.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            namespace: namespace()?,
            sidecar: proc::own_identity()?,
            number: fastrand::u32(..),
        })
    }

    /// Tells whether the sidecar is gone; `false` too where that cannot be seen from here.
    pub(super) fn is_over(&self) -> bool {
        namespace().is_ok_and(|own| own == self.namespace) && !proc::is_alive(self.sidecar)
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{:08x}", self.namespace, self.sidecar, self.number)
    }
}

impl FromStr for RunId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split('-');
        let mut next = || parts.next().ok_or(());
        let run = Self {
            namespace: next()?.parse().map_err(drop)?,
            sidecar: Identity {
                pid: next()?.parse().map_err(drop)?,
                start: next()?.parse().map_err(drop)?,
            },
            number: u32::from_str_radix(next()?, 16).map_err(drop)?,
        };
        parts.next().is_none().then_some(run).ok_or(())
    }
}

fn namespace() -> io::Result<u64> {
    std::fs::metadata("/proc/self/ns/pid").map(|namespace| namespace.ino())
}

/// Says where process ids of a file mean what they do here: the boot, the namespace, and the namespace's own life.
fn scope() -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let first = proc::identity(1).map_or(0, |first| first.start);
    Some(format!("{} {} {first}", boot.trim(), namespace().ok()?))
}

/// An engine as a run wrote it down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    pid: u32,
    start: u64,
    /// The GPUs that it was given.
    pub(super) gpus: Vec<String>,
}

impl Entry {
    /// Returns the engine's process.
    pub(super) const fn id(&self) -> Identity {
        Identity {
            pid: self.pid,
            start: self.start,
        }
    }
}

/// What a run's file holds.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Content {
    scope: String,
    engines: BTreeMap<String, Entry>,
}

/// The file of a run.
#[derive(Debug)]
pub(super) struct RunFile {
    path: Option<PathBuf>,
    content: Mutex<Content>,
}

impl RunFile {
    /// Prepares the file of a run; without a folder nothing is written.
    pub(super) fn new(folder: Option<&Path>, run: &RunId) -> Self {
        let scope = scope();
        Self {
            path: folder
                .filter(|_| scope.is_some())
                .map(|folder| folder.join(format!("run-{run}.json"))),
            content: Mutex::new(Content {
                scope: scope.unwrap_or_default(),
                engines: BTreeMap::new(),
            }),
        }
    }

    /// Writes an engine down.
    pub(super) fn note(&self, name: &str, id: Identity, gpus: &[String]) {
        let entry = Entry {
            pid: id.pid,
            start: id.start,
            gpus: gpus.to_vec(),
        };
        let mut content = self.content.lock();
        content.engines.insert(name.to_owned(), entry);
        self.write(&content);
    }

    /// Forgets an engine of which nothing is left; the file goes with the last one.
    pub(super) fn forget(&self, name: &str) {
        let mut content = self.content.lock();
        if content.engines.remove(name).is_some() {
            self.write(&content);
        }
    }

    fn write(&self, content: &Content) {
        let Some(path) = &self.path else { return };
        let written = if content.engines.is_empty() {
            std::fs::remove_file(path)
        } else {
            // Under another name first: half a file would be none.
            let draft = path.with_extension("draft");
            serde_json::to_vec(content)
                .map_err(io::Error::from)
                .and_then(|text| std::fs::write(&draft, text))
                .and_then(|()| std::fs::rename(&draft, path))
        };
        if let Err(error) = written {
            warn!(file = %path.display(), cause = %error, "engines cannot be written down; after a crash, some may not be found");
        }
    }
}

/// The engines that runs which are over wrote down, by worker. Files that say nothing any more are removed.
pub(super) fn left_by_others(
    folder: &Path,
    is_left: impl Fn(&Entry) -> bool,
) -> Vec<(RunId, String, Entry)> {
    let Ok(files) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut left = Vec::new();
    for path in files.filter_map(|file| Some(file.ok()?.path())) {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or("");
        let name = name
            .strip_prefix("run-")
            .and_then(|name| name.strip_suffix(".json"));
        let Some(run) = name.and_then(|name| name.parse::<RunId>().ok()) else {
            continue;
        };
        let content = std::fs::read(&path).unwrap_or_default();
        let Ok(content) = serde_json::from_slice::<Content>(&content) else {
            continue;
        };
        let is_here = scope().is_some_and(|scope| scope == content.scope);
        if is_here && !run.is_over() {
            continue;
        }
        let before = left.len();
        if is_here {
            let engines = content.engines.into_iter();
            let engines = engines.filter(|(_, entry)| is_left(entry));
            left.extend(engines.map(|(name, entry)| (run.clone(), name, entry)));
        }
        // Another scope may be another container's on the same folder; of another boot nothing is left.
        let is_stale = is_here || is_of_another_boot(&content.scope);
        if left.len() == before && is_stale {
            let _ = std::fs::remove_file(&path);
        }
    }
    left
}

fn is_of_another_boot(scope_text: &str) -> bool {
    let boot = |text: &str| text.split(' ').next().map(str::to_owned);
    scope().is_some_and(|own| boot(&own) != boot(scope_text))
}

/// Returns the folder for run files and locks, made if it is not there; `None`, with a line in the log, when there is none
/// that is this user's alone.
pub(super) fn state_folder() -> Option<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|folder| folder.is_dir());
    let own = getuid().as_raw();
    let folder = runtime.map_or_else(
        || std::env::temp_dir().join(format!("kvlane-{own}")),
        |runtime| runtime.join("kvlane"),
    );
    let made = std::fs::DirBuilder::new().mode(0o700).create(&folder);
    let checked = match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        // Anyone may have made it, in a folder that everyone may write to.
        _ => std::fs::symlink_metadata(&folder).and_then(|found| {
            let is_own = found.is_dir() && found.uid() == own && found.mode() & 0o022 == 0;
            is_own.then_some(()).ok_or_else(|| {
                io::Error::other("it is not a folder that only this user may write to")
            })
        }),
    };
    match checked {
        Ok(()) => Some(folder),
        Err(error) => {
            warn!(folder = %folder.display(), cause = %error, "cannot be used: engines are not written down, and other sidecars not waited for");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_the_dead() -> RunId {
        let mut run = RunId::new().unwrap();
        run.sidecar.start += 1;
        run
    }

    #[test]
    fn a_run_knows_whether_its_sidecar_lives() {
        let run = RunId::new().unwrap();
        assert_eq!(run.to_string().parse(), Ok(run.clone()));
        assert!(!run.is_over());
        assert!(of_the_dead().is_over());
        let elsewhere = RunId {
            namespace: run.namespace + 1,
            ..of_the_dead()
        };
        assert!(!elsewhere.is_over(), "it cannot be seen from here");
        for text in ["", "1-2-3", "1-2-3-x", "1-2-3-4-5", "a-2-3-4"] {
            assert_eq!(text.parse::<RunId>(), Err(()), "{text}");
        }
    }

    #[test]
    fn files_of_dead_runs_are_read_and_removed_when_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let id = Identity { pid: 5, start: 7 };
        let files = || std::fs::read_dir(folder.path()).unwrap().count();
        let alive = RunFile::new(Some(folder.path()), &RunId::new().unwrap());
        alive.note("a-0", id, &[]);
        let dead = of_the_dead();
        RunFile::new(Some(folder.path()), &dead).note("w-0", id, &["3".to_owned()]);
        std::fs::write(folder.path().join("run-1-2-3-4.json"), "nonsense").unwrap();
        assert_eq!(files(), 3);
        let left = left_by_others(folder.path(), |_| true);
        assert_eq!(left.len(), 1);
        let (run, name, entry) = &left[0];
        assert_eq!((run, name.as_str(), entry.id()), (&dead, "w-0", id));
        assert_eq!(entry.gpus, ["3"]);
        assert!(left_by_others(folder.path(), |_| false).is_empty());
        assert_eq!(files(), 2);
        alive.forget("a-0");
        assert_eq!(files(), 1);
    }

    #[test]
    fn files_of_another_boot_are_removed_and_of_another_container_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(format!("run-{}.json", of_the_dead()));
        let own = scope().unwrap();
        let boot = own.split(' ').next().unwrap();
        for (scope, is_kept) in [
            (format!("{boot} 1 1"), true),
            ("another-boot 1 1".to_owned(), false),
        ] {
            let content = Content {
                scope,
                engines: BTreeMap::new(),
            };
            std::fs::write(&path, serde_json::to_vec(&content).unwrap()).unwrap();
            assert!(left_by_others(folder.path(), |_| true).is_empty());
            assert_eq!(path.exists(), is_kept);
        }
    }
}
