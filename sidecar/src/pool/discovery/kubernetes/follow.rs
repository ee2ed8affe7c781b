//! Carries out what [`Reflection`] asks for: lists and watches of one kind of object, for ever.
//!
//! Why not the library's own watcher: it waits without end for the answer to a watch, asks again and again with a version to
//! which the server answers 410 outright, and keeps the list's version to itself, without which a late event of an object that
//! the list lacked cannot be told from a new one.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use kube::{Resource as KubeResource, ResourceExt};
use serde::de::DeserializeOwned;

use super::failure::{Failure, Kind, Question, Resource};
use super::reflect::{Input, Key, Reflection, Seen, Step, Version};

/// What to follow.
#[derive(Clone, Debug)]
pub(super) struct Followed {
    pub(super) resource: Resource,
    pub(super) labels: Option<String>,
    pub(super) fields: Option<String>,
    pub(super) watch_seconds: u32,
}

/// Is told of what became of it.
pub(super) trait Listener<T> {
    /// The objects may have changed; at first, they are complete now.
    fn changed(&self, reflection: &Reflection<T>);
    /// The API server cannot be asked; the last objects stay.
    fn failed(&self, failure: &Failure);
    /// The API server answers again.
    fn succeeded(&self);
    /// Everything is listed from the beginning.
    fn listing(&self) {}
}

/// Objects in one page of a list.
const PAGE: u32 = 500;
/// Most objects; each pod costs some kilobytes.
const MAX_OBJECTS: usize = 20_000;
/// How long the server may take to begin an answer, or to give a page.
const ANSWER: Duration = Duration::from_secs(15);
/// How much longer than it was asked for a watch may be silent.
const GRACE: Duration = Duration::from_secs(10);
/// A watch that lasted this long worked, whatever it brought.
const STEADY: Duration = Duration::from_secs(5);

/// Follows until dropped.
pub(super) async fn follow<K, T>(
    api: Api<K>,
    followed: Followed,
    read: impl Fn(&K, &Key) -> T,
    listener: &impl Listener<T>,
) where
    K: KubeResource + Clone + DeserializeOwned + Debug,
{
    let mut follower = Follower {
        api,
        followed,
        read,
        listener,
        reflection: Reflection::default(),
        delay: Delay::default(),
    };
    loop {
        let result = match follower.reflection.step() {
            Step::List { next, paged } => follower.list(next, paged).await,
            Step::Watch(version) => follower.watch(&version).await,
        };
        if let Err(failure) = result {
            follower.fail(&failure).await;
        }
    }
}

struct Follower<'a, K, T, R, L> {
    api: Api<K>,
    followed: Followed,
    read: R,
    listener: &'a L,
    reflection: Reflection<T>,
    delay: Delay,
}

impl<K, T, R, L> Follower<'_, K, T, R, L>
where
    K: KubeResource + Clone + DeserializeOwned + Debug,
    R: Fn(&K, &Key) -> T,
    L: Listener<T>,
{
    async fn list(&mut self, next: Option<String>, paged: bool) -> Result<(), Failure> {
        let question = self.question("list");
        if next.is_none() {
            self.listener.listing();
        }
        let params = ListParams {
            label_selector: self.followed.labels.clone(),
            field_selector: self.followed.fields.clone(),
            limit: paged.then_some(PAGE),
            continue_token: next,
            ..ListParams::default()
        };
        let list = within(ANSWER, &question, self.api.list(&params)).await?;
        if list.items.len() + self.reflection.pending() > MAX_OBJECTS {
            return Err(Failure::too_many(&question, MAX_OBJECTS));
        }
        let items = list.items.iter().map(|object| self.seen(object)).collect();
        let next = list.metadata.continue_.filter(|token| !token.is_empty());
        let is_last = next.is_none();
        let changed = self.reflection.apply(Input::Page {
            items,
            version: Version(list.metadata.resource_version.unwrap_or_default()),
            next,
        });
        if is_last {
            self.listener.succeeded();
        }
        if changed {
            self.listener.changed(&self.reflection);
        }
        Ok(())
    }

    async fn watch(&mut self, version: &Version) -> Result<(), Failure> {
        let question = self.question("watch");
        let seconds = self.followed.watch_seconds;
        let params = WatchParams {
            label_selector: self.followed.labels.clone(),
            field_selector: self.followed.fields.clone(),
            timeout: Some(seconds),
            bookmarks: true,
            ..WatchParams::default()
        };
        let silence = Duration::from_secs(seconds.into()) + GRACE;
        let begun = Instant::now();
        let watching = self.api.watch(&params, &version.0);
        let stream = within(ANSWER, &question, watching).await?;
        self.listener.succeeded();
        let mut stream = std::pin::pin!(stream);
        let mut is_idle = true;
        while let Some(event) = within(silence, &question, stream.try_next()).await? {
            self.event(event, &question)?;
            is_idle = false;
            self.delay = Delay::default();
        }
        if begun.elapsed() >= STEADY {
            self.delay = Delay::default();
        } else if is_idle {
            // A server that ends watches at once must not be asked at once.
            tokio::time::sleep(self.delay.next()).await;
        }
        Ok(())
    }

    fn event(&mut self, event: WatchEvent<K>, question: &Question) -> Result<(), Failure> {
        let input = match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                if self.reflection.objects().len() >= MAX_OBJECTS {
                    return Err(Failure::too_many(question, MAX_OBJECTS));
                }
                Input::Applied(self.seen(&object))
            }
            WatchEvent::Deleted(object) => Input::Deleted(self.seen(&object)),
            WatchEvent::Bookmark(bookmark) => {
                Input::Bookmark(Version(bookmark.metadata.resource_version))
            }
            WatchEvent::Error(status) => {
                let mut failure = Failure::of_status(&status, question);
                // Whatever it was: what the server wanted to send is lost.
                if failure.kind != Kind::Gone {
                    failure.kind = Kind::Unreadable;
                }
                return Err(failure);
            }
        };
        if self.reflection.apply(input) {
            self.listener.changed(&self.reflection);
        }
        Ok(())
    }

    async fn fail(&mut self, failure: &Failure) {
        let input = match failure.kind {
            Kind::Gone | Kind::Unreadable => Input::Expired,
            Kind::NotFound | Kind::Conflict | Kind::Other => Input::Failed,
        };
        self.reflection.apply(input);
        // A version that has expired is the API's ordinary way to ask for a list.
        if failure.kind != Kind::Gone {
            self.listener.failed(failure);
        }
        tokio::time::sleep(self.delay.next().max(failure.retry_after)).await;
    }

    fn seen(&self, object: &K) -> Seen<T> {
        let key = Key {
            namespace: object.namespace().unwrap_or_default(),
            name: object.name_any(),
        };
        Seen {
            value: (self.read)(object, &key),
            uid: object.uid().unwrap_or_default(),
            version: Version(object.resource_version().unwrap_or_default()),
            key,
        }
    }

    fn question(&self, verb: &'static str) -> Question {
        Question {
            verb,
            resource: self.followed.resource.clone(),
        }
    }
}

/// Waits for an answer, but not for ever.
pub(super) async fn within<T>(
    limit: Duration,
    question: &Question,
    answer: impl Future<Output = kube::Result<T>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(limit, answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(Failure::of(&error, question)),
        Err(_) => Err(Failure::silence(question, limit)),
    }
}

/// How long to wait before the next try: twice as long each time, up to half a minute, never quite the same.
#[derive(Debug)]
pub(super) struct Delay(Duration);

impl Default for Delay {
    fn default() -> Self {
        Self(Duration::from_millis(100))
    }
}

impl Delay {
    pub(super) fn next(&mut self) -> Duration {
        let now = self.0;
        self.0 = (now * 2).min(Duration::from_secs(30));
        now.mul_f64(0.75 + fastrand::f64() / 2.0)
    }
}
