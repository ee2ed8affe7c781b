//! Lets engines of one model start one after the other until one of them is ready.
//!
//! Engines download a model that is not on the disk, each of them all of it. Once one is ready the model is there. The turn
//! is a file that is locked while an engine starts: the kernel gives it back whatever becomes of the sidecar, and sidecars on
//! the same machine wait for each other.

use std::collections::{HashMap, HashSet};
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;
use tracing::{info, warn};
use xxhash_rust::xxh3::xxh3_64;

/// The turns of all models.
#[derive(Debug)]
pub(super) struct Gate {
    folder: Option<PathBuf>,
    present: Mutex<HashSet<String>>,
    turns: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
}

/// The right to start an engine, for as long as it is held.
#[derive(Debug)]
pub(super) struct Turn {
    _within: OwnedMutexGuard<()>,
    _between: Option<File>,
}

impl Gate {
    /// Creates a gate whose files lie in `folder`; without one, only engines of this sidecar wait for each other.
    pub(super) fn new(folder: Option<PathBuf>) -> Self {
        Self {
            folder,
            present: Mutex::new(HashSet::new()),
            turns: Mutex::new(HashMap::new()),
        }
    }

    /// Waits until an engine of this model may start; `None` when nothing has to be held meanwhile, because the model is
    /// known to be there, is a folder, or is not told. `waits` is called when there is something to wait for.
    pub(super) async fn enter(&self, model: Option<&str>, waits: impl Fn()) -> Option<Turn> {
        let model = model.filter(|model| !Path::new(model).is_dir())?;
        if self.is_present(model) {
            return None;
        }
        let turn = Arc::clone(self.turns.lock().entry(model.to_owned()).or_default());
        let within = if let Ok(turn) = Arc::clone(&turn).try_lock_owned() {
            turn
        } else {
            waits();
            turn.lock_owned().await
        };
        if self.is_present(model) {
            return None;
        }
        Some(Turn {
            _between: self.lock_file(model, waits).await,
            _within: within,
        })
    }

    /// Takes note that an engine of this model was ready: the others need not wait for each other.
    pub(super) fn opened(&self, model: Option<&str>) {
        if let Some(model) = model {
            self.present.lock().insert(model.to_owned());
        }
    }

    fn is_present(&self, model: &str) -> bool {
        self.present.lock().contains(model)
    }

    async fn lock_file(&self, model: &str, waits: impl Fn()) -> Option<File> {
        let name = format!("model-{:016x}.lock", xxh3_64(model.as_bytes()));
        let path = self.folder.as_ref()?.join(name);
        let open = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path);
        let file = match open {
            Ok(file) => file,
            Err(error) => {
                warn!(file = %path.display(), cause = %error, "no lock file: other sidecars are not waited for");
                return None;
            }
        };
        let mut has_waited = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Some(file),
                Err(TryLockError::WouldBlock) => {
                    if !std::mem::replace(&mut has_waited, true) {
                        waits();
                        info!(
                            model,
                            "waiting for another sidecar that starts an engine of this model"
                        );
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Err(TryLockError::Error(error)) => {
                    warn!(file = %path.display(), cause = %error, "cannot be locked: other sidecars are not waited for");
                    return None;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn is_taken(gate: &Gate, model: &str) -> bool {
        let entering = gate.enter(Some(model), || ());
        let entered = tokio::time::timeout(Duration::from_millis(300), entering);
        entered.await.is_err()
    }

    /// Takes a turn; where a lock was just given up a process that is about to start may have it for a moment.
    async fn turn(gate: &Gate, model: &str) -> Turn {
        let entering = gate.enter(Some(model), || ());
        let entered = tokio::time::timeout(Duration::from_secs(30), entering);
        entered.await.unwrap().unwrap()
    }

    #[tokio::test]
    async fn engines_of_a_model_wait_until_one_was_ready() {
        let folder = tempfile::tempdir().unwrap();
        let gate = Gate::new(Some(folder.path().to_owned()));
        let first = gate.enter(Some("m"), || ()).await.unwrap();
        assert!(is_taken(&gate, "m").await);
        turn(&gate, "other").await;
        assert!(gate.enter(None, || ()).await.is_none());
        // It failed: the next one tries.
        drop(first);
        let second = turn(&gate, "m").await;
        let third = gate.enter(Some("m"), || ());
        gate.opened(Some("m"));
        drop(second);
        assert!(third.await.is_none(), "nothing to be held");
        assert!(gate.enter(Some("m"), || ()).await.is_none());
        let local = folder.path().display().to_string();
        assert!(gate.enter(Some(&local), || ()).await.is_none());
    }

    #[tokio::test]
    async fn another_sidecar_waits_too() {
        let folder = tempfile::tempdir().unwrap();
        let [one, two] = [(); 2].map(|()| Gate::new(Some(folder.path().to_owned())));
        let first = one.enter(Some("m"), || ()).await.unwrap();
        assert!(is_taken(&two, "m").await);
        drop(first);
        turn(&two, "m").await;
    }
}
