//! A thousand lives of a cluster, each seen through a watch that breaks, repeats itself and expires at any moment.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::assemble::assemble;
use super::cluster::{Query, Store, pod};
use super::pods;
use super::reflect::{Input, Key, Reflection, Seen, Step, Version};
use super::rules::{Reading, Rules};
use crate::config::KubernetesSettings;
use crate::pool::roster::{Phase, Roster, RosterReader, Sighting};

const LIVES: u64 = 1_000;
const CHANGES: usize = 60;

#[test]
fn a_thousand_random_orders_lose_no_member_and_keep_no_ghost() {
    let mut seen = Counts::default();
    for seed in 0..LIVES {
        let mut life = Life::new(seed);
        for _ in 0..CHANGES {
            life.change();
            for _ in 0..life.rng.usize(0..3) {
                life.hear();
            }
        }
        life.settle();
        let expected = life.expected();
        assert_eq!(life.members(), expected, "seed {seed}");
        seen.add(&life.counts);
        seen.members += expected.len();
    }
    // The test would prove nothing if what it is about did not happen.
    let Counts {
        lists,
        expired,
        late,
        deleted,
        members,
    } = seen;
    assert!(lists > 3_000, "{lists}");
    assert!(expired > 1_000, "{expired}");
    assert!(late > 5_000, "{late}");
    assert!(deleted > 5_000, "{deleted}");
    assert!(members > 2_000, "{members}");
}

#[derive(Debug, Default)]
struct Counts {
    lists: usize,
    expired: usize,
    late: usize,
    deleted: usize,
    members: usize,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.lists += other.lists;
        self.expired += other.expired;
        self.late += other.late;
        self.deleted += other.deleted;
        self.members += other.members;
    }
}

/// A member in short: name, where, which life, how far.
type Member = (String, String, String, Phase);

struct Life {
    rng: Rng,
    store: Store,
    query: Query,
    rules: Rules,
    reflection: Reflection<Reading>,
    roster: Roster,
    reader: RosterReader,
    /// The rest of a list that is being read in pages, and its version.
    pages: Option<(Vec<Value>, u64)>,
    /// Everything that a watch has ever sent, to be sent again.
    heard: Vec<Value>,
    /// The versions at which lives ended.
    deaths: BTreeMap<String, u64>,
    /// Lives that a list or an event has said to be over.
    over: BTreeSet<String>,
    counts: Counts,
}

impl Life {
    fn new(seed: u64) -> Self {
        let (roster, reader) = Roster::new();
        Self {
            rng: Rng::with_seed(seed),
            store: Store::default(),
            query: pods_with("app=vllm"),
            rules: Rules::new(&KubernetesSettings::default(), false),
            reflection: Reflection::default(),
            roster,
            reader,
            pages: None,
            heard: Vec::new(),
            deaths: BTreeMap::new(),
            over: BTreeSet::new(),
            counts: Counts::default(),
        }
    }

    /// Something happens in the cluster.
    fn change(&mut self) {
        let name = format!("vllm-{}", self.rng.usize(0..6));
        let there = self.store.get("pods", "inference", &name).is_some();
        let choice = self.rng.usize(0..12);
        match (there, choice) {
            (false, _) => self.create(&name, None),
            (true, 0) => {
                self.delete(&name);
            }
            // The same name, and with it the address, in another life.
            (true, 1) => {
                let old = self.store.get("pods", "inference", &name);
                let ip = old.and_then(|pod| pod["status"]["podIP"].as_str().map(str::to_owned));
                self.delete(&name);
                self.create(&name, ip.as_deref());
            }
            // The same address under another name.
            (true, 2) => self.rename(&name),
            (true, 3) => self.edit(&name, |pod| {
                pod["metadata"]["deletionTimestamp"] = json!("2026-11-01T11:00:00Z");
            }),
            (true, 4) => self.edit(&name, |pod| {
                pod["metadata"]["labels"]["app"] = json!("other")
            }),
            (true, 5) => self.edit(&name, |pod| {
                pod["metadata"]["labels"]["app"] = json!("vllm")
            }),
            (true, 6) => self.edit(&name, |pod| {
                let restarts = &mut pod["status"]["containerStatuses"][0]["restartCount"];
                *restarts = json!(restarts.as_u64().unwrap() + 1);
            }),
            (true, 7) => self.edit(&name, |pod| pod["status"]["phase"] = json!("Failed")),
            (true, 8) => self.store.compact(),
            (true, ready) => self.edit(&name, |pod| {
                let status = if ready % 2 == 0 { "True" } else { "False" };
                pod["status"]["conditions"][0]["status"] = json!(status);
            }),
        }
    }

    fn create(&mut self, name: &str, ip: Option<&str>) {
        let taken: BTreeSet<String> = self
            .store
            .select(&pods_with(""))
            .iter()
            .map(|pod| pod["status"]["podIP"].as_str().unwrap().to_owned())
            .collect();
        let next = || {
            let mut all = (1..30).map(|n| {
                if n % 3 == 0 {
                    format!("fd00::{n:x}")
                } else {
                    format!("10.0.0.{n}")
                }
            });
            all.find(|ip| !taken.contains(ip)).unwrap()
        };
        let ip = ip.map_or_else(next, str::to_owned);
        let ready = self.rng.bool();
        self.store.put("pods", pod(name, &ip, ready));
    }

    fn rename(&mut self, name: &str) {
        let Some(next) = (0..6)
            .map(|n| format!("vllm-{n}"))
            .find(|next| self.store.get("pods", "inference", next).is_none())
        else {
            return;
        };
        let old = self.store.get("pods", "inference", name).unwrap();
        let ip = old["status"]["podIP"].as_str().unwrap().to_owned();
        self.delete(name);
        self.create(&next, Some(&ip));
    }

    fn delete(&mut self, name: &str) {
        let pod = self.store.get("pods", "inference", name).unwrap();
        let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
        self.store.delete("pods", "inference", name);
        self.deaths.insert(uid, self.store.version());
        self.counts.deleted += 1;
    }

    fn edit(&mut self, name: &str, edit: impl FnOnce(&mut Value)) {
        self.store.edit("pods", "inference", name, edit);
    }

    /// The follower hears something of it.
    fn hear(&mut self) {
        match self.rng.usize(0..14) {
            0 => self.apply(Input::Failed),
            1 => {
                self.counts.expired += 1;
                self.pages = None;
                self.apply(Input::Expired);
            }
            2 | 3 => self.late(),
            _ => self.answer(),
        }
    }

    /// The server answers what is asked for.
    fn answer(&mut self) {
        match self.reflection.step() {
            Step::List { next, .. } => self.page(next.is_none()),
            Step::Watch(version) => {
                let version = version.0.parse().unwrap();
                match self.store.since(version, &self.query) {
                    Some(events) => self.events(events),
                    None => {
                        self.counts.expired += 1;
                        self.apply(Input::Expired);
                    }
                }
            }
        }
    }

    fn page(&mut self, is_first: bool) {
        if is_first || self.pages.is_none() {
            self.pages = Some((self.store.select(&self.query), self.store.version()));
        }
        let (rest, version) = self.pages.as_mut().unwrap();
        let size = self.rng.usize(1..4).min(rest.len());
        let items: Vec<Value> = rest.drain(..size).collect();
        let (is_last, version) = (rest.is_empty(), *version);
        let items = items.iter().map(|item| self.seen(item)).collect();
        self.apply(Input::Page {
            items,
            version: Version(version.to_string()),
            next: (!is_last).then(|| "more".to_owned()),
        });
        if is_last {
            self.pages = None;
            self.counts.lists += 1;
            let ended = self.deaths.iter().filter(|(_, died)| **died <= version);
            self.over.extend(ended.map(|(uid, _)| uid.clone()));
            self.check();
        }
    }

    /// Sends some of what is due: in any order, and some of it twice.
    fn events(&mut self, mut events: Vec<Value>) {
        events.truncate(self.rng.usize(1..6));
        let twice: Vec<Value> = events
            .iter()
            .filter(|_| self.rng.usize(0..4) == 0)
            .cloned()
            .collect();
        self.heard.extend(events.iter().cloned());
        events.extend(twice);
        if self.rng.bool() {
            self.rng.shuffle(&mut events);
        }
        for event in &events {
            self.event(event);
        }
        if self.rng.usize(0..4) == 0 {
            let last = events.iter().map(version_of).max();
            if let Some(last) = last {
                self.apply(Input::Bookmark(Version(last.to_string())));
            }
        }
    }

    /// Sends what was sent before, once more.
    fn late(&mut self) {
        if let Some(event) = self.rng.choice(&self.heard).cloned() {
            self.counts.late += 1;
            self.event(&event);
        }
    }

    fn event(&mut self, event: &Value) {
        let seen = self.seen(&event["object"]);
        let is_heard = matches!(self.reflection.step(), Step::Watch(_));
        let died = self.deaths.get(&seen.uid) == Some(&version_of(event));
        let ended = (is_heard && died).then(|| seen.uid.clone());
        self.apply(match event["type"].as_str().unwrap() {
            "DELETED" => Input::Deleted(seen),
            _ => Input::Applied(seen),
        });
        self.over.extend(ended);
        self.check();
    }

    fn apply(&mut self, input: Input<Reading>) {
        if self.reflection.apply(input) {
            assert!(self.reflection.is_synced());
            let listing = assemble(self.reflection.objects());
            self.roster.publish(listing.workers);
        }
        self.check();
    }

    /// What must be so at every moment.
    fn check(&self) {
        let sightings = self.reader.borrow();
        let unique = |text: fn(&Sighting) -> String| {
            let all: BTreeSet<String> = sightings.iter().map(text).collect();
            assert_eq!(all.len(), sightings.len(), "{sightings:?}");
        };
        unique(|sighting| sighting.worker.id.to_string());
        unique(|sighting| sighting.worker.url.to_string());
        for sighting in sightings.iter() {
            let uid = sighting.instance.split('/').next().unwrap();
            assert!(!self.over.contains(uid), "{uid} is back from the dead");
        }
    }

    /// Lets the follower hear all there is, without further trouble.
    fn settle(&mut self) {
        for _ in 0..1_000 {
            if let Step::Watch(version) = self.reflection.step() {
                let since = self.store.since(version.0.parse().unwrap(), &self.query);
                if since.is_some_and(|events| events.is_empty()) {
                    return;
                }
            }
            self.answer();
        }
        panic!("never quiet");
    }

    fn seen(&self, object: &Value) -> Seen<Reading> {
        let text = |key: &str| object["metadata"][key].as_str().unwrap().to_owned();
        let key = Key {
            namespace: text("namespace"),
            name: text("name"),
        };
        let pod: Pod = serde_json::from_value(object.clone()).unwrap();
        Seen {
            value: pods::read(&pod, &key, &self.rules),
            uid: text("uid"),
            version: Version(text("resourceVersion")),
            key,
        }
    }

    fn members(&self) -> Vec<Member> {
        let describe = |sighting: &Sighting| {
            (
                sighting.worker.id.to_string(),
                sighting.worker.url.to_string(),
                sighting.instance.clone(),
                sighting.phase,
            )
        };
        self.reader.borrow().iter().map(describe).collect()
    }

    /// What the cluster's objects say, read without any of the code under test.
    fn expected(&self) -> Vec<Member> {
        let mut members = BTreeMap::new();
        for pod in self.store.select(&pods_with("")) {
            let (metadata, status) = (&pod["metadata"], &pod["status"]);
            if metadata["labels"]["app"] != "vllm" || status["phase"] == "Failed" {
                continue;
            }
            let ip = status["podIP"].as_str().unwrap();
            let host = if ip.contains(':') {
                format!("[{ip}]")
            } else {
                ip.to_owned()
            };
            let restarts = &status["containerStatuses"][0]["restartCount"];
            let phase = if !metadata["deletionTimestamp"].is_null() {
                Phase::Leaving
            } else if status["conditions"][0]["status"] == "True" {
                Phase::Serving
            } else {
                Phase::Starting
            };
            let name = metadata["name"].as_str().unwrap().to_owned();
            let instance = format!("{}/{restarts}", metadata["uid"].as_str().unwrap());
            let url = format!("http://{host}:8000");
            members.insert(name.clone(), (name, url, instance, phase));
        }
        members.into_values().collect()
    }
}

fn version_of(event: &Value) -> u64 {
    let version = &event["object"]["metadata"]["resourceVersion"];
    version.as_str().unwrap().parse().unwrap()
}

fn pods_with(labels: &str) -> Query {
    Query {
        resource: "pods".to_owned(),
        namespace: "inference".to_owned(),
        labels: labels.to_owned(),
        fields: String::new(),
    }
}
