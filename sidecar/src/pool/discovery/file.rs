//! Workers from a file that is looked at again and again.
//!
//! What counts is the content: a file that was rewritten, replaced by a rename, or reached through a symbolic link that now
//! leads elsewhere (as in a mounted `ConfigMap`) has changed when its bytes have. A list is taken once two readings agree, and one
//! that lacks workers once the file has rested for a second, so that a file which is being written is not taken for a short one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane::WorkerId;

use crate::bounded;
use crate::config::parse_workers;
use crate::pool::roster::{Phase, Sighting};
use crate::pool::sources::Feed;

/// Largest file that is read.
const MAX_BYTES: u64 = 8 << 20;
/// After a change the file is read again this soon.
const CONFIRM_AFTER: Duration = Duration::from_millis(50);
/// How often a file that changes is read before that is a failure: five seconds.
const MOST_LOOKS: usize = 100;

/// A list without some of the workers of the one before is taken when the file has been as it is for this long: whoever writes it may
/// be slow.
const SHORTER_AFTER: Duration = Duration::from_secs(1);

/// Publishes what the file lists, until it is dropped.
pub async fn follow(path: PathBuf, interval: Duration, feed: Feed) {
    let mut watch = Watch::new(path, SHORTER_AFTER);
    loop {
        let mut looked = watch.look().await;
        for _ in 0..MOST_LOOKS {
            if !matches!(looked, Looked::Changing) {
                break;
            }
            tokio::time::sleep(CONFIRM_AFTER).await;
            looked = watch.look().await;
        }
        match looked {
            Looked::Same => {}
            Looked::Changing => feed.report.failed(watch.restless()),
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

type Content = Arc<Result<Vec<u8>, String>>;

/// The file and what was read of it.
#[derive(Debug)]
struct Watch {
    path: PathBuf,
    shorter_after: Duration,
    /// What was last read, since when, and what it says once two readings agree.
    read: Option<(Content, Instant)>,
    found: Option<Looked>,
    /// What was last acted on.
    taken: Option<Content>,
    /// Whom the last list had.
    listed: BTreeSet<WorkerId>,
}

impl Watch {
    const fn new(path: PathBuf, shorter_after: Duration) -> Self {
        Self {
            path,
            shorter_after,
            read: None,
            found: None,
            taken: None,
            listed: BTreeSet::new(),
        }
    }

    async fn look(&mut self) -> Looked {
        let path = self.path.clone();
        // A file on a network may take its time, and a long list is not read in a moment.
        let read = tokio::task::spawn_blocking(move || read(&path)).await;
        let read = read.unwrap_or_else(|error| Err(error.to_string()));
        let (content, since) = match &self.read {
            Some((before, since)) if **before == read => (Arc::clone(before), *since),
            _ => {
                self.read = Some((Arc::new(read), Instant::now()));
                self.found = None;
                return self.unconfirmed();
            }
        };
        if self.taken.as_ref() == Some(&content) {
            return Looked::Same;
        }
        let found = match self.found.take() {
            Some(found) => found,
            None => {
                let (path, content) = (self.path.clone(), Arc::clone(&content));
                let parsed = tokio::task::spawn_blocking(move || parse(&content, &path)).await;
                parsed.unwrap_or_else(|error| Looked::Failed(error.to_string()))
            }
        };
        if let Looked::List(list) = &found {
            let ids: BTreeSet<_> = list.iter().map(|of| of.worker.id.clone()).collect();
            if !self.listed.is_subset(&ids) && since.elapsed() < self.shorter_after {
                self.found = Some(found);
                return Looked::Changing;
            }
            self.listed = ids;
        }
        self.taken = Some(content);
        found
    }

    /// Tells whether what was read for the first time just now is what was last acted on.
    fn unconfirmed(&self) -> Looked {
        let read = self.read.as_ref().map(|(content, _)| content);
        if self.taken.as_ref() == read {
            Looked::Same
        } else {
            Looked::Changing
        }
    }

    /// Says that the file is never the same twice; once it is, that is acted on, be it what was there before.
    fn restless(&mut self) -> String {
        self.taken = None;
        format!("{}: it changes all the time", self.path.display())
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
        let mut watch = Watch::new(path.clone(), Duration::ZERO);
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
    async fn a_shorter_list_is_taken_later_and_a_longer_one_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w");
        let mut watch = Watch::new(path.clone(), Duration::from_secs(3_600));
        let line = |id: &str| format!("- {{id: {id}, url: 'http://h:1'}}\n");
        std::fs::write(&path, line("a")).unwrap();
        assert_eq!(names(&look(&mut watch).await), ["a"]);
        std::fs::write(&path, line("a") + &line("b")).unwrap();
        assert_eq!(names(&look(&mut watch).await), ["a", "b"]);
        // Its writer is at work: the rest follows.
        std::fs::write(&path, line("b")).unwrap();
        for _ in 0..3 {
            assert_eq!(watch.look().await, Looked::Changing);
        }
        std::fs::write(&path, line("b") + &line("a")).unwrap();
        assert_eq!(names(&look(&mut watch).await), ["b", "a"]);
        std::fs::write(&path, line("b")).unwrap();
        assert_eq!(look(&mut watch).await, Looked::Changing);
        watch.shorter_after = Duration::ZERO;
        assert_eq!(names(&watch.look().await), ["b"]);
    }

    #[tokio::test]
    async fn one_that_was_restless_is_acted_on_when_it_rests() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w");
        let mut watch = Watch::new(path.clone(), Duration::ZERO);
        std::fs::write(&path, "[]").unwrap();
        assert_eq!(look(&mut watch).await, Looked::List(Vec::new()));
        assert_eq!(watch.look().await, Looked::Same);
        assert!(watch.restless().contains("changes all the time"));
        assert_eq!(look(&mut watch).await, Looked::List(Vec::new()));
    }

    #[tokio::test]
    async fn what_is_no_list_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w");
        let mut watch = Watch::new(path.clone(), Duration::ZERO);
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
        let mut folder = Watch::new(folder.path().to_owned(), Duration::ZERO);
        assert!(problem(look(&mut folder).await).contains("not a file"));
    }
}
