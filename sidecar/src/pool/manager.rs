//! Keeps the fleet as the sources say: compares what each lists with what there is, and makes the difference come about.
//!
//! Every source publishes whole lists, so an answer depends on the last list of each alone. Where two list one name, who was
//! first keeps it for as long as it lists it, and the other is reported; then the other goes on with the same life, where it means
//! the same process. A worker that is about to go finishes what it has; one whose life ended gives way at once to the next life
//! of its name.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane::{Role, WorkerId};
use parking_lot::Mutex;
use serde::Serialize;
use tracing::{info, warn};

use super::member::Fact;
use super::roster::{Phase, Sighting};
use super::sources::{Absence, Report};
use crate::config::WorkerConfig;
use crate::sparing::warn_sparingly;

/// What the manager does to the fleet.
pub trait Hands {
    /// Adds a worker.
    ///
    /// # Errors
    /// It cannot be added.
    fn add(&self, sighting: &Sighting, source: &Arc<str>) -> kvlane::Result<()>;
    /// Removes a worker; nothing of it is left when this returns.
    fn remove(&self, id: &WorkerId, why: &str);
    /// Tells a worker what is known of it.
    fn learn(&self, id: &WorkerId, fact: Fact);
    /// Changes what a worker does.
    fn set_role(&self, id: &WorkerId, role: Role);
    /// Changes a worker's labels.
    fn set_labels(&self, id: &WorkerId, labels: BTreeMap<String, String>);
    /// Tells whether a worker that is there is what another source describes, as far as it is known.
    fn is_described_by(&self, id: &WorkerId, other: &WorkerConfig) -> bool;
    /// Tells of another source that speaks for a worker from now on, and what it calls this life.
    fn hand_over(&self, id: &WorkerId, source: &Arc<str>, instance: &str);
    /// Tells whether a worker has nothing left to finish, or is not there to finish it.
    fn is_done(&self, id: &WorkerId) -> bool;
}

/// Number of a source, in the order in which they were attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceId(usize);

/// The admin calls, which are a source like any other.
const ADMIN: SourceId = SourceId(0);

/// The members and the sources that tell of them.
pub struct Manager {
    desk: Mutex<Desk>,
}

struct Desk {
    drain: Duration,
    sources: Vec<Source>,
    members: BTreeMap<WorkerId, Entry>,
    conflicts: BTreeSet<Conflict>,
}

struct Source {
    name: Arc<str>,
    absence: Absence,
    report: Report,
    sightings: BTreeMap<WorkerId, Sighting>,
    /// Those that an operator removed, until the source tells of another life of them.
    dismissed: BTreeMap<WorkerId, Sighting>,
    /// Those that could not be added, and why.
    refused: BTreeMap<WorkerId, String>,
    /// Those of the list before.
    refused_before: BTreeMap<WorkerId, String>,
}

struct Entry {
    source: SourceId,
    /// As it was last acted on.
    sighting: Sighting,
    /// What each source that lists the name called this life when it first told of it.
    words: BTreeMap<SourceId, String>,
    /// Whose it is, and whose it was before it was handed over.
    owners: BTreeSet<SourceId>,
    is_unlisted: bool,
    leaving: Option<Leaving>,
}

#[derive(Clone, Copy)]
struct Leaving {
    since: Instant,
    until: Instant,
}

/// Two sources list one name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Conflict {
    /// The name.
    #[serde(serialize_with = "crate::config::display")]
    pub id: WorkerId,
    /// The source whose worker is not used.
    #[serde(serialize_with = "crate::config::display")]
    pub source: Arc<str>,
    /// The source whose worker has the name.
    #[serde(serialize_with = "crate::config::display")]
    pub owner: Arc<str>,
}

/// What is known of the sources.
#[derive(Clone, Debug, Serialize)]
pub struct PoolReport {
    /// The sources, in the order in which they were attached.
    pub sources: Vec<SourceReport>,
    /// Names that several sources list.
    pub conflicts: Vec<Conflict>,
}

/// What is known of one source.
#[derive(Clone, Debug, Serialize)]
pub struct SourceReport {
    /// Its name.
    #[serde(serialize_with = "crate::config::display")]
    pub name: Arc<str>,
    /// Workers that it lists.
    pub listed: usize,
    /// Members that it told of.
    pub members: usize,
    /// Why it cannot tell what there is.
    pub error: Option<String>,
    /// Workers that it lists and that cannot be added, and why.
    pub refused: BTreeMap<String, String>,
    /// What it sees and does not list, or not as it could, and why.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub skipped: BTreeMap<String, String>,
    /// Workers that it lists and an operator removed.
    pub dismissed: Vec<String>,
}

/// Why an operator's change is refused.
#[derive(Debug)]
pub enum ChangeError {
    /// The name is taken.
    Taken {
        /// By a worker of this source.
        source: Arc<str>,
    },
    /// The router or the fleet refuses.
    Refused(kvlane::Error),
}

impl Manager {
    /// Creates a manager that knows of no source but the admin calls; workers that leave have `drain` to finish what they have.
    #[must_use]
    pub fn new(drain: Duration) -> Self {
        let manager = Self {
            desk: Mutex::new(Desk {
                drain,
                sources: Vec::new(),
                members: BTreeMap::new(),
                conflicts: BTreeSet::new(),
            }),
        };
        manager.attach("admin", Absence::Left);
        manager
    }

    /// Adds a source, which lists nothing yet.
    pub fn attach(&self, name: &str, absence: Absence) -> (SourceId, Report) {
        let mut desk = self.desk.lock();
        let name: Arc<str> = Arc::from(name);
        let report = Report::new(Arc::clone(&name));
        desk.sources.push(Source {
            name,
            absence,
            report: report.clone(),
            sightings: BTreeMap::new(),
            dismissed: BTreeMap::new(),
            refused: BTreeMap::new(),
            refused_before: BTreeMap::new(),
        });
        (SourceId(desk.sources.len() - 1), report)
    }

    /// Takes in the whole list of a source.
    pub fn listed(&self, source: SourceId, list: Vec<Sighting>, hands: &impl Hands, now: Instant) {
        let mut desk = self.desk.lock();
        let by_id = list
            .into_iter()
            .map(|sighting| (sighting.worker.id.clone(), sighting));
        let source = &mut desk.sources[source.0];
        let before = source.sightings.len();
        source.sightings = by_id.collect();
        if source.sightings.is_empty() && before > 0 && source.absence == Absence::Left {
            // Meant, or the mistake of whoever keeps the list.
            warn!(
                source = &*source.name,
                workers = before,
                "a source lists nobody any more; its workers finish what they have"
            );
        }
        // What was refused may be accepted now; until it is said again, it is not.
        source.refused_before = std::mem::take(&mut source.refused);
        desk.reconcile(hands, now);
    }

    /// Removes the workers that have finished, or whose time is up.
    pub fn tick(&self, hands: &impl Hands, now: Instant) {
        let mut desk = self.desk.lock();
        if desk.members.values().any(|entry| entry.leaving.is_some()) {
            desk.reconcile(hands, now);
        }
    }

    /// Adds a worker, as an operator asks.
    ///
    /// # Errors
    /// The name is taken, or the worker is refused.
    pub fn add(
        &self,
        worker: WorkerConfig,
        hands: &impl Hands,
        now: Instant,
    ) -> Result<(), ChangeError> {
        let mut desk = self.desk.lock();
        let id = worker.id.clone();
        if let Some(entry) = desk.members.get(&id) {
            let source = Arc::clone(&desk.sources[entry.source.0].name);
            return Err(ChangeError::Taken { source });
        }
        let sighting = Sighting {
            worker,
            instance: String::new(),
            phase: Phase::Serving,
        };
        let admin = &mut desk.sources[ADMIN.0];
        hands
            .add(&sighting, &admin.name)
            .map_err(ChangeError::Refused)?;
        admin.sightings.insert(id.clone(), sighting.clone());
        desk.members.insert(id, Entry::new(ADMIN, sighting));
        desk.reconcile(hands, now);
        Ok(())
    }

    /// Removes a worker at once, as an operator asks, and keeps it away until its source tells of another life of it; tells
    /// whether it was there.
    pub fn dismiss(&self, id: &WorkerId, hands: &impl Hands, now: Instant) -> bool {
        let mut desk = self.desk.lock();
        if desk.members.remove(id).is_none() {
            return false;
        }
        desk.sources[ADMIN.0].sightings.remove(id);
        for source in &mut desk.sources {
            if let Some(sighting) = source.sightings.get(id) {
                source.dismissed.insert(id.clone(), sighting.clone());
            }
        }
        hands.remove(id, "an operator removed it");
        desk.reconcile(hands, now);
        true
    }

    /// Does something while no source changes any member.
    pub fn hold<T>(&self, act: impl FnOnce() -> T) -> T {
        let _desk = self.desk.lock();
        act()
    }

    /// Returns what is known of the sources.
    #[must_use]
    pub fn report(&self) -> PoolReport {
        let desk = self.desk.lock();
        let describe = |(index, source): (usize, &Source)| {
            let members = desk.members.values();
            let refused = source.refused.iter();
            SourceReport {
                name: Arc::clone(&source.name),
                listed: source.sightings.len(),
                members: members.filter(|entry| entry.source.0 == index).count(),
                error: source.report.problem(),
                skipped: source.report.all_skipped(),
                refused: refused
                    .map(|(id, why)| (id.to_string(), why.clone()))
                    .collect(),
                dismissed: source.dismissed.keys().map(WorkerId::to_string).collect(),
            }
        };
        PoolReport {
            sources: desk.sources.iter().enumerate().map(describe).collect(),
            conflicts: desk.conflicts.iter().cloned().collect(),
        }
    }
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Manager").field(&self.report()).finish()
    }
}

impl Entry {
    fn new(source: SourceId, sighting: Sighting) -> Self {
        Self {
            source,
            words: BTreeMap::from([(source, sighting.instance.clone())]),
            owners: BTreeSet::from([source]),
            sighting,
            is_unlisted: false,
            leaving: None,
        }
    }
}

impl Source {
    /// Returns what the source says of a worker, unless an operator does not want to hear of it.
    fn sees(&self, id: &WorkerId) -> Option<&Sighting> {
        self.sightings
            .get(id)
            .filter(|_| !self.dismissed.contains_key(id))
    }

    /// Ends the dismissal of workers that are no longer listed, or live anew.
    fn recall(&mut self) {
        let sightings = &self.sightings;
        self.dismissed
            .retain(|id, then| sightings.get(id).is_some_and(|now| is_same_life(then, now)));
    }
}

impl Desk {
    fn reconcile(&mut self, hands: &impl Hands, now: Instant) {
        self.sources.iter_mut().for_each(Source::recall);
        self.follow_members(hands, now);
        self.end_leaving(hands, now);
        self.add_missing(hands);
        self.note_conflicts();
    }

    /// Brings every member to what its source says of it.
    fn follow_members(&mut self, hands: &impl Hands, now: Instant) {
        let (sources, drain) = (&self.sources, self.drain);
        self.members.retain(|id, entry| {
            entry.hear(id, sources);
            if entry.has_begun_anew(id, sources) {
                hands.remove(id, "another process has its name");
                return false;
            }
            let source = &sources[entry.source.0];
            let Some(sighting) = source.sees(id) else {
                if source.absence == Absence::Ended {
                    hands.remove(id, "its source says that it ended");
                    return false;
                }
                if let Some((heir, sighting)) = entry.heir(id, sources, hands) {
                    let source = &sources[heir.0].name;
                    info!(worker = %id, source = &**source, "another source lists the worker and goes on with it");
                    hands.hand_over(id, source, &sighting.instance);
                    entry.become_of(heir, sighting);
                    entry.follow(sighting, hands, now, drain);
                    return true;
                }
                if !std::mem::replace(&mut entry.is_unlisted, true) {
                    hands.learn(id, Fact::Listed(false));
                }
                entry.leave(now, drain);
                return true;
            };
            if !is_same_life(&entry.sighting, sighting) {
                hands.remove(id, "another process has its name");
                return false;
            }
            entry.follow(sighting, hands, now, drain);
            true
        });
    }

    /// Removes members that were to go and have nothing left to finish, or no time left.
    fn end_leaving(&mut self, hands: &impl Hands, now: Instant) {
        self.members.retain(|id, entry| {
            let Some(leaving) = entry.leaving else {
                return true;
            };
            // Requests that were booked just before the drain began have been sent by then.
            let has_settled = now.saturating_duration_since(leaving.since) >= SETTLING;
            let why = match () {
                () if has_settled && hands.is_done(id) => "it has finished what it had",
                () if now >= leaving.until => "its time to finish is up",
                () => return true,
            };
            hands.remove(id, why);
            false
        });
    }

    /// Adds every worker that some source lists and that is not there.
    fn add_missing(&mut self, hands: &impl Hands) {
        for index in 0..self.sources.len() {
            let source = &self.sources[index];
            let missing: Vec<Sighting> = source
                .sightings
                .iter()
                .filter(|(id, sighting)| {
                    sighting.phase != Phase::Leaving
                        && source.sees(id).is_some()
                        && !source.refused.contains_key(*id)
                        && !self.members.contains_key(*id)
                })
                .map(|(_, sighting)| sighting.clone())
                .collect();
            let source = &mut self.sources[index];
            for sighting in missing {
                let id = sighting.worker.id.clone();
                match hands.add(&sighting, &source.name) {
                    Ok(()) => {
                        let entry = Entry::new(SourceId(index), sighting);
                        self.members.insert(id, entry);
                    }
                    Err(error) => {
                        let cause = error.to_string();
                        if source.refused_before.get(&id) != Some(&cause) {
                            warn_sparingly!(source = &*source.name, worker = %id, cause, "a worker cannot be added");
                        }
                        source.refused.insert(id, cause);
                    }
                }
            }
        }
    }

    /// Finds the names that several sources list, and says so once for each.
    fn note_conflicts(&mut self) {
        let mut conflicts = BTreeSet::new();
        for (index, source) in self.sources.iter().enumerate() {
            for id in source.sightings.keys() {
                let Some(entry) = self.members.get(id) else {
                    continue;
                };
                if entry.source.0 != index && source.sees(id).is_some() {
                    conflicts.insert(Conflict {
                        id: id.clone(),
                        source: Arc::clone(&source.name),
                        owner: Arc::clone(&self.sources[entry.source.0].name),
                    });
                }
            }
        }
        for Conflict { id, source, owner } in conflicts.difference(&self.conflicts) {
            warn_sparingly!(worker = %id, source = &**source, owner = &**owner, "two sources list a worker of this name; the first keeps it");
        }
        for Conflict { id, source, .. } in self.conflicts.difference(&conflicts) {
            info!(worker = %id, source = &**source, "the name is no longer claimed twice");
        }
        self.conflicts = conflicts;
    }
}

/// For how long a worker that leaves is kept at least: a request may have been booked and not sent yet.
const SETTLING: Duration = Duration::from_millis(200);

impl Entry {
    /// Remembers what sources call this life, of those that had not told of it yet.
    fn hear(&mut self, id: &WorkerId, sources: &[Source]) {
        for (index, source) in sources.iter().enumerate() {
            if let Some(sighting) = source.sees(id) {
                let word = self.words.entry(SourceId(index));
                word.or_insert_with(|| sighting.instance.clone());
            }
        }
    }

    /// Tells whether a source that it belongs to, or did before it was handed over, calls the life by another name now.
    fn has_begun_anew(&self, id: &WorkerId, sources: &[Source]) -> bool {
        self.owners.iter().any(|owner| {
            let sighting = sources[owner.0].sees(id);
            sighting.is_some_and(|sighting| self.words.get(owner) != Some(&sighting.instance))
        })
    }

    /// Finds another source that lists this life, now that its own does not. What it calls the life must not have changed since
    /// it first told of it, nor contradict those that the life belonged to. One that was about to go does not stay for a source
    /// that has not heard of that yet.
    fn heir<'a>(
        &self,
        id: &WorkerId,
        sources: &'a [Source],
        hands: &impl Hands,
    ) -> Option<(SourceId, &'a Sighting)> {
        if self.sighting.phase == Phase::Leaving {
            return None;
        }
        let may_be_this = |instance: &str| {
            let mut owners = self.owners.iter().filter_map(|owner| self.words.get(owner));
            owners.all(|word| may_be_one_instance(word, instance))
        };
        let numbered = (0..).map(SourceId).zip(sources);
        let others = numbered.filter(|(number, _)| *number != self.source);
        let mut seen = others.filter_map(|(number, source)| Some((number, source.sees(id)?)));
        seen.find(|(number, sighting)| {
            sighting.phase != Phase::Leaving
                && self.words.get(number) == Some(&sighting.instance)
                && may_be_this(&sighting.instance)
                && hands.is_described_by(id, &sighting.worker)
        })
    }

    /// Takes another source for its own.
    fn become_of(&mut self, source: SourceId, sighting: &Sighting) {
        self.source = source;
        self.owners.insert(source);
        self.sighting.instance.clone_from(&sighting.instance);
        if !sighting.worker.says_role() {
            // What says nothing of the role takes back nothing that another source said.
            self.sighting.worker.role = sighting.worker.role;
        }
        if sighting.worker.labels.is_empty() {
            // Nor what another source said of labels.
            self.sighting.worker.labels.clear();
        }
    }

    fn follow(&mut self, next: &Sighting, hands: &impl Hands, now: Instant, drain: Duration) {
        let id = &next.worker.id;
        let last = &self.sighting;
        if std::mem::take(&mut self.is_unlisted) {
            hands.learn(id, Fact::Listed(true));
        }
        if last.phase != next.phase {
            hands.learn(id, Fact::Phase(next.phase));
        }
        // Compared with what the source said before, not with what is: an operator may have changed it since.
        if last.worker.role != next.worker.role {
            hands.set_role(id, next.worker.role);
        }
        if last.worker.labels != next.worker.labels {
            hands.set_labels(id, next.worker.labels.clone());
        }
        self.sighting = next.clone();
        if next.phase == Phase::Leaving {
            self.leave(now, drain);
        } else {
            self.leaving = None;
        }
    }

    fn leave(&mut self, now: Instant, drain: Duration) {
        self.leaving.get_or_insert_with(|| Leaving {
            since: now,
            until: now.checked_add(drain).unwrap_or(now),
        });
    }
}

/// Tells whether what two sources call a life may be the same one. Some say more than others: a pod's uid, or that and the number of
/// its restarts behind a slash; or nothing.
fn may_be_one_instance(one: &str, other: &str) -> bool {
    let (less, more) = if one.len() < other.len() {
        (one, other)
    } else {
        (other, one)
    };
    let rest = more.strip_prefix(less);
    less.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Tells whether two sightings are of one life: what would change where it is, or what is known of its cache, is the same.
fn is_same_life(one: &Sighting, other: &Sighting) -> bool {
    one.instance == other.instance && one.worker.is_same_place(&other.worker)
}

#[cfg(test)]
mod tests;
