//! Engine processes that an earlier run left behind.
//!
//! That takes the sidecar and both guards of an engine to be killed at once. What then still runs holds its GPU's memory.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::cards::{self, Match};
use super::gpu::Inventory;
use super::launch::Replica;
use super::proc::{self, Identity, Stat};
use super::run::{self, Entry, PROCESS, RUN, RunId};

/// A process that was left behind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Stray {
    #[serde(skip)]
    pub(super) id: Identity,
    pub(super) pid: u32,
    /// The worker that it was, or was a part of.
    pub(super) process: String,
    /// The run that started it.
    pub(super) run: String,
    /// The GPUs that it was given.
    pub(super) gpus: Vec<String>,
    pub(super) command: String,
}

impl Stray {
    /// Tells whether a replica must not start beside it: it is a life of the same worker, or on one of its GPUs.
    pub(super) fn obstructs(&self, replica: &Replica, inventory: Option<&Inventory>) -> Match {
        if self.process == replica.name {
            return Match::Yes;
        }
        cards::compare(&self.gpus, &replica.gpus, inventory)
    }
}

/// Finds what runs that are over left behind, by the marks of processes and by the files of runs.
pub(super) fn find(folder: Option<&Path>) -> Vec<Stray> {
    let all = proc::all();
    let mut found = BTreeMap::new();
    for stat in all.iter().filter(|stat| !stat.is_over) {
        if let Some(stray) = by_mark(stat) {
            found.insert(stat.id, stray);
        }
    }
    let left =
        folder.map(|folder| run::left_by_others(folder, |entry| !members(&all, entry).is_empty()));
    for (run, name, entry) in left.unwrap_or_default() {
        for id in members(&all, &entry) {
            found
                .entry(id)
                .or_insert_with(|| stray(id, name.clone(), run.to_string(), entry.gpus.clone()));
        }
    }
    found.into_values().collect()
}

fn by_mark(stat: &Stat) -> Option<Stray> {
    let pid = stat.id.pid;
    let run = proc::variable(pid, RUN)?;
    if !run.parse::<RunId>().is_ok_and(|run| run.is_over()) {
        return None;
    }
    let name = proc::variable(pid, PROCESS).unwrap_or_default();
    let gpus = proc::variable(pid, "CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let gpus = gpus.split(',').filter(|gpu| !gpu.is_empty());
    Some(stray(stat.id, name, run, gpus.map(str::to_owned).collect()))
}

fn stray(id: Identity, process: String, run: String, gpus: Vec<String>) -> Stray {
    Stray {
        id,
        pid: id.pid,
        process,
        run,
        gpus,
        command: proc::command_line(id.pid),
    }
}

/// Lists what lives of an engine that was written down: its process, its session, and what those started.
///
/// The number of a session is not given to a process while anyone is in that session, so a process in it is the engine's
/// unless that number's process is another one by now.
fn members(all: &[Stat], entry: &Entry) -> HashSet<Identity> {
    let engine = entry.id();
    let is_taken = all
        .iter()
        .any(|stat| stat.id.pid == engine.pid && stat.id != engine);
    if is_taken {
        return HashSet::new();
    }
    let own: Vec<&Stat> = all
        .iter()
        .filter(|stat| stat.session == engine.pid && stat.id.start >= engine.start)
        .filter(|stat| !stat.is_over)
        .collect();
    let below = own
        .iter()
        .flat_map(|stat| proc::descendants(all, stat.id.pid));
    below
        .map(|stat| stat.id)
        .chain(own.iter().map(|stat| stat.id))
        .collect()
}

/// Lists what is left of an engine of this run: its session, its marks, and what those started.
pub(super) fn of_engine(all: &[Stat], engine: Identity, name: &str, run: &str) -> Vec<Stat> {
    let is_marked = |stat: &Stat| {
        let has = |variable, value: &str| {
            proc::variable(stat.id.pid, variable).is_some_and(|found| found == value)
        };
        // Nothing older than the engine was started by it.
        stat.id.start >= engine.start && has(RUN, run) && has(PROCESS, name)
    };
    let is_in_session = |stat: &Stat| stat.session == engine.pid && stat.id.start >= engine.start;
    let own: HashSet<_> = all
        .iter()
        .filter(|stat| is_in_session(stat) || is_marked(stat))
        .flat_map(|stat| {
            let below = proc::descendants(all, stat.id.pid).into_iter();
            below.map(|stat| stat.id).chain([stat.id])
        })
        .collect();
    all.iter()
        .filter(|stat| own.contains(&stat.id) && !stat.is_over)
        .copied()
        .collect()
}

/// As [`find`], without stopping the event loop.
pub(super) async fn search(folder: Option<PathBuf>) -> Vec<Stray> {
    let found = tokio::task::spawn_blocking(move || find(folder.as_deref()));
    found.await.unwrap_or_default()
}

/// Ends these processes. Returns what is still there.
pub(super) async fn stop(strays: &[Stray], grace: Duration) -> Vec<Identity> {
    let ids: HashSet<_> = strays.iter().map(|stray| stray.id).collect();
    let select = |all: &[Stat]| {
        let own = all
            .iter()
            .filter(|stat| ids.contains(&stat.id) && !stat.is_over);
        own.copied().collect()
    };
    proc::end(select, |_| grace).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_tell_an_engines_processes_after_its_own_has_ended() {
        let stat = |pid, parent, session, start| Stat {
            id: Identity { pid, start },
            parent,
            session,
            is_over: false,
        };
        let entry: Entry =
            serde_json::from_str(r#"{"pid": 10, "start": 100, "gpus": []}"#).unwrap();
        let alive = stat(10, 2, 10, 100);
        let worker = stat(11, 1, 10, 150);
        let own_session = stat(12, 11, 12, 160);
        let older = stat(9, 1, 10, 50);
        let other = stat(20, 1, 20, 500);
        let pids = |all: &[Stat]| {
            let mut pids: Vec<_> = members(all, &entry).iter().map(|id| id.pid).collect();
            pids.sort_unstable();
            pids
        };
        assert_eq!(
            pids(&[alive, worker, own_session, older, other]),
            [10, 11, 12]
        );
        assert_eq!(pids(&[worker, own_session, other]), [11, 12]);
        // Its id was given to another process: the session of that number is that one's.
        let successor = stat(10, 1, 10, 900);
        assert_eq!(pids(&[successor, stat(13, 10, 10, 950)]), [0_u32; 0]);
    }

    #[test]
    fn strays_are_in_the_way_by_name_and_by_gpu() {
        let stray = |process: &str, gpus: &[&str]| {
            let gpus = gpus.iter().map(|gpu| (*gpu).to_owned()).collect();
            let id = Identity { pid: 1, start: 1 };
            stray(id, process.to_owned(), String::new(), gpus)
        };
        let replica = Replica {
            name: "w-0".to_owned(),
            index: 0,
            gpus: vec!["0".to_owned(), "1".to_owned()],
        };
        let obstructs = |stray: Stray| stray.obstructs(&replica, None);
        assert_eq!(obstructs(stray("w-0", &[])), Match::Yes);
        assert_eq!(obstructs(stray("x-0", &["1"])), Match::Yes);
        assert_eq!(obstructs(stray("x-0", &["2"])), Match::No);
        assert_eq!(obstructs(stray("x-0", &["GPU-2"])), Match::Unknown);
        assert_eq!(obstructs(stray("w-1", &[])), Match::No);
    }
}
