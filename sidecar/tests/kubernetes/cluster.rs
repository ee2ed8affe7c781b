//! What an API server keeps: objects, their versions, and what changed when. Its answers are those that the API documents.
//!
//! Shared by the tests of this folder, which ask it over HTTP, and by those beside the code, which ask it directly.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// The objects of a cluster, and everything that became of them.
#[derive(Debug, Default)]
pub(crate) struct Store {
    version: u64,
    next_uid: u64,
    objects: BTreeMap<Place, Value>,
    log: Vec<Change>,
    /// What came before this is forgotten: a watch from there is answered 410.
    compacted: u64,
}

/// Where an object is: resource (as in `pods`), namespace, name.
type Place = (String, String, String);

#[derive(Debug)]
struct Change {
    version: u64,
    resource: String,
    before: Option<Value>,
    after: Option<Value>,
}

/// Which objects are asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Query {
    pub(crate) resource: String,
    /// Empty for every namespace.
    pub(crate) namespace: String,
    pub(crate) labels: String,
    pub(crate) fields: String,
}

impl Query {
    fn matches(&self, object: &Value) -> bool {
        let metadata = &object["metadata"];
        if !self.namespace.is_empty() && metadata["namespace"] != self.namespace.as_str() {
            return false;
        }
        let labels = terms(&self.labels).all(|term| {
            if let Some((key, value)) = term.split_once("!=") {
                return metadata["labels"][key] != value;
            }
            match term.split_once('=') {
                Some((key, value)) => metadata["labels"][key] == value.trim_start_matches('='),
                None => !metadata["labels"][term].is_null(),
            }
        });
        let fields = terms(&self.fields).all(|term| {
            term.split_once('=')
                .is_some_and(|(key, value)| key == "metadata.name" && metadata["name"] == value)
        });
        labels && fields
    }
}

impl Store {
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Creates or replaces an object; an object keeps its uid for as long as it lives.
    pub(crate) fn put(&mut self, resource: &str, mut object: Value) -> Value {
        let place = place(resource, &object);
        self.version += 1;
        let before = self.objects.get(&place).cloned();
        let uid = match &before {
            Some(before) => before["metadata"]["uid"].clone(),
            None => {
                self.next_uid += 1;
                json!(format!("uid-{}", self.next_uid))
            }
        };
        object["metadata"]["uid"] = uid;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.objects.insert(place, object.clone());
        self.log.push(Change {
            version: self.version,
            resource: resource.to_owned(),
            before,
            after: Some(object.clone()),
        });
        object
    }

    /// Changes an object in place; tells whether it was there.
    pub(crate) fn edit(
        &mut self,
        resource: &str,
        namespace: &str,
        name: &str,
        edit: impl FnOnce(&mut Value),
    ) -> bool {
        let place = (resource.to_owned(), namespace.to_owned(), name.to_owned());
        let Some(mut object) = self.objects.get(&place).cloned() else {
            return false;
        };
        edit(&mut object);
        self.put(resource, object);
        true
    }

    pub(crate) fn delete(&mut self, resource: &str, namespace: &str, name: &str) -> bool {
        let place = (resource.to_owned(), namespace.to_owned(), name.to_owned());
        let Some(before) = self.objects.remove(&place) else {
            return false;
        };
        self.version += 1;
        self.log.push(Change {
            version: self.version,
            resource: resource.to_owned(),
            before: Some(before),
            after: None,
        });
        true
    }

    pub(crate) fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<&Value> {
        let place = (resource.to_owned(), namespace.to_owned(), name.to_owned());
        self.objects.get(&place)
    }

    /// Forgets what changed so far.
    pub(crate) fn compact(&mut self) {
        self.compacted = self.version;
        self.log.clear();
    }

    pub(crate) fn select(&self, query: &Query) -> Vec<Value> {
        let of_resource = self.objects.iter().filter(|((resource, ..), object)| {
            *resource == query.resource && query.matches(object)
        });
        of_resource.map(|(_, object)| object.clone()).collect()
    }

    /// Returns the watch events after a version; `None` when it is too old.
    pub(crate) fn since(&self, version: u64, query: &Query) -> Option<Vec<Value>> {
        if version < self.compacted {
            return None;
        }
        let later = self
            .log
            .iter()
            .filter(|change| change.version > version && change.resource == query.resource);
        Some(later.filter_map(|change| change.event(query)).collect())
    }
}

impl Change {
    /// What a watch with this selection sees: an object that no longer matches is deleted, for whoever watches.
    fn event(&self, query: &Query) -> Option<Value> {
        let matching =
            |object: &Option<Value>| object.clone().filter(|object| query.matches(object));
        let (kind, mut object) = match (matching(&self.before), matching(&self.after)) {
            (None, None) => return None,
            (None, Some(after)) => ("ADDED", after),
            (Some(_), Some(after)) => ("MODIFIED", after),
            (Some(before), None) => ("DELETED", before),
        };
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        Some(json!({"type": kind, "object": object}))
    }
}

fn terms(all: &str) -> impl Iterator<Item = &str> {
    all.split(',').filter(|term| !term.is_empty())
}

fn place(resource: &str, object: &Value) -> Place {
    let text = |key: &str| {
        object["metadata"][key]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    (resource.to_owned(), text("namespace"), text("name"))
}

/// A pod as a kubelet leaves it once it runs.
pub(crate) fn pod(name: &str, ip: &str, ready: bool) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "inference",
            "labels": {"app": "vllm"},
            "creationTimestamp": "2026-11-01T10:00:00Z",
        },
        "spec": {"containers": [{
            "name": "engine",
            "ports": [
                {"name": "http", "containerPort": 8000, "protocol": "TCP"},
                {"name": "events", "containerPort": 5557, "protocol": "TCP"},
            ],
        }]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}],
            "containerStatuses": [{
                "name": "engine", "image": "vllm", "imageID": "", "ready": ready, "restartCount": 0,
            }],
        },
    })
}
