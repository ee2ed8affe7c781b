//! Workers from a file that is looked at again and again.
//!
//! What counts is the content: a file that was rewritten, replaced by a rename, or reached through a symbolic link that now
//! leads elsewhere (as in a mounted `ConfigMap`) has changed when its bytes have. A list is taken once two readings agree, so
//! that a file which is being written is not taken for a short one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::bounded;
use crate::config::parse_workers;
use crate::pool::roster::{Phase, Sighting};
use crate::pool::sources::Feed;

/// Largest file that is read.
const MAX_BYTES: u64 = 8 << 20;
/// After a change the file is read again this soon.
const CONFIRM_AFTER: Duration = Duration::from_millis(50);

/// Publishes what the file lists, until it is dropped.
pub async fn follow(path: PathBuf, interval: Duration, feed: Feed) {
    let mut watch = Watch::new(path);
    loop {
        let mut looked = watch.look().await;
        while matches!(looked, Looked::Changing) {
            tokio::time::sleep(CONFIRM_AFTER).await;
            looked = watch.look().await;
        }
        match looked {
            Looked::Same | Looked::Changing => {}
            Looked::List(list) => {
                feed.roster.publish(list);
                feed.report.succeeded();
            }
            Looked::Failed(problem) => feed.report.failed(problem),
        }
        tokio::time::sleep(interval).await;
    }
}

/// What a look at the file found.
#[derive(Debug, PartialEq)]
enum Looked {
    /// What was there before.
    Same,
    /// Something new, to be looked at once more.
    Changing,
    /// A new list.
    List(Vec<Sighting>),
    /// No list.
    Failed(String),
}

/// The file and what was read of it.
#[derive(Debug)]
struct Watch {
    path: PathBuf,
    /// What was last read.
    read: Option<Result<Vec<u8>, String>>,
    /// What was last acted on.
    taken: Option<Result<Vec<u8>, String>>,
}

impl Watch {
    const fn new(path: PathBuf) -> Self {
        Self {
            path,
            read: None,
            taken: None,
        }
    }

    async fn look(&mut self) -> Looked {
        let path = self.path.clone();
        // A file on a network may take its time.
        let read = tokio::task::spawn_blocking(move || read(&path)).await;
        let read = read.unwrap_or_else(|error| Err(error.to_string()));
        let is_confirmed = self.read.as_ref() == Some(&read);
        let read = self.read.insert(read).clone();
        if self.taken.as_ref() == Some(&read) {
            return Looked::Same;
        }
        if !is_confirmed {
            return Looked::Changing;
        }
        let found = parse(&read, &self.path);
        self.taken = Some(read);
        found
    }
}

fn parse(read: &Result<Vec<u8>, String>, path: &Path) -> Looked {
    let name = path.display();
    let failed = |problem: &dyn std::fmt::Display| Looked::Failed(format!("{name}: {problem}"));
    let bytes = match read {
        Ok(bytes) => bytes,
        Err(problem) => return failed(problem),
    };
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => return failed(&error),
    };
    match parse_workers(text) {
        Ok(workers) => {
            let list = workers.into_iter().map(|worker| Sighting {
                worker,
                instance: String::new(),
                phase: Phase::Serving,
            });
            Looked::List(list.collect())
        }
        Err(problem) => failed(&problem),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let text = |error: std::io::Error| error.to_string();
    // Opening a pipe would wait for a writer.
    if !std::fs::metadata(path).map_err(text)?.is_file() {
        return Err("this is not a file".to_owned());
    }
    bounded::read(path, MAX_BYTES).map_err(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(looked: &Looked) -> Vec<String> {
        let Looked::List(list) = looked else {
            panic!("{looked:?} is no list");
        };
        list.iter().map(|of| of.worker.id.to_string()).collect()
    }

    fn problem(looked: Looked) -> String {
        let Looked::Failed(problem) = looked else {
            panic!("{looked:?} is no failure");
        };
        problem
    }

    /// Looks twice, as the loop does.
    async fn look(watch: &mut Watch) -> Looked {
        match watch.look().await {
            Looked::Changing => watch.look().await,
            looked => looked,
        }
    }

    #[tokio::test]
    async fn a_list_is_taken_when_two_readings_agree() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("workers.yaml");
        let mut watch = Watch::new(path.clone());
        assert!(problem(look(&mut watch).await).contains("workers.yaml: No such file"));
        std::fs::write(&path, "- {id: a, url: 'http://h:1'}\n").unwrap();
        assert_eq!(watch.look().await, Looked::Changing);
        std::fs::write(
            &path,
            "- {id: a, url: 'http://h:1'}\n- {id: b, url: 'http://h:2', role: decode}\n",
        )
        .unwrap();
        assert_eq!(watch.look().await, Looked::Changing);
        assert_eq!(names(&watch.look().await), ["a", "b"]);
        assert_eq!(watch.look().await, Looked::Same);
        std::fs::write(&path, r#"{"workers": [{"id": "c", "url": "http://h:3"}]}"#).unwrap();
        assert_eq!(names(&look(&mut watch).await), ["c"]);
        std::fs::write(&path, "[]").unwrap();
        assert_eq!(look(&mut watch).await, Looked::List(Vec::new()));
    }

    #[tokio::test]
    async fn what_is_no_list_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w");
        let mut watch = Watch::new(path.clone());
        for (text, words) in [
            ("", "empty"),
            ("# nothing\n", "empty"),
            (
                "- {id: a, url: 'http://h:1', evnts: x}",
                "[0].unknown key evnts",
            ),
            ("- {id: a}", "[0].url: missing"),
            ("workers: 7", "a list of workers"),
            ("listen: 0.0.0.0:1", "unknown key listen"),
            (
                "- {id: a, url: 'http://h:1'}\n- {id: a, url: 'http://h:2'}",
                "both \"a\"",
            ),
            ("- [", "line"),
        ] {
            std::fs::write(&path, text).unwrap();
            let problem = problem(look(&mut watch).await);
            assert!(problem.contains(words), "{text}: {problem}");
        }
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        assert!(problem(look(&mut watch).await).contains("utf-8"));
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(MAX_BYTES + 1).unwrap();
        assert!(problem(look(&mut watch).await).contains("8388608 bytes"));
        let mut folder = Watch::new(folder.path().to_owned());
        assert!(problem(look(&mut folder).await).contains("not a file"));
    }
}
