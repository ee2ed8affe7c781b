//! Whole watch streams, line by line as an API server writes them, from files.

use std::path::PathBuf;

use kvlane_sidecar::pool::discovery::kubernetes::reflect::{
    Input, Key, Reflection, Seen, Step, Version,
};
use serde_json::Value;

fn fixture(name: &str) -> Vec<Value> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/kubernetes")
        .join(name);
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn seen(object: &Value) -> Seen<String> {
    let text = |key: &str| {
        object["metadata"][key]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    let ready = object["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten();
    let ready = ready
        .filter(|condition| condition["type"] == "Ready")
        .any(|condition| condition["status"] == "True");
    Seen {
        key: Key {
            namespace: text("namespace"),
            name: text("name"),
        },
        uid: text("uid"),
        version: Version(text("resourceVersion")),
        value: if ready { "ready" } else { "not ready" }.to_owned(),
    }
}

/// Feeds one line: a list, or an event of a watch.
fn feed(reflection: &mut Reflection<String>, line: &Value) {
    let object = &line["object"];
    let input = match line["type"].as_str() {
        None => Input::Page {
            items: line["items"].as_array().unwrap().iter().map(seen).collect(),
            version: Version(
                line["metadata"]["resourceVersion"]
                    .as_str()
                    .unwrap()
                    .to_owned(),
            ),
            next: line["metadata"]["continue"].as_str().map(str::to_owned),
        },
        Some("ADDED" | "MODIFIED") => Input::Applied(seen(object)),
        Some("DELETED") => Input::Deleted(seen(object)),
        Some("BOOKMARK") => Input::Bookmark(seen(object).version),
        Some("ERROR") => {
            assert_eq!(object["code"], 410);
            Input::Expired
        }
        Some(other) => panic!("{other}"),
    };
    reflection.apply(input);
}

fn members(reflection: &Reflection<String>) -> String {
    let objects = reflection.objects().values();
    let all: Vec<_> = objects
        .map(|object| format!("{} {}", object.key.name, object.value))
        .collect();
    all.join(", ")
}

#[test]
fn a_rollout_replaces_every_pod() {
    let mut reflection = Reflection::default();
    let expected = [
        "vllm-0 ready, vllm-1 ready",
        "vllm-0 ready, vllm-1 ready",
        "vllm-0 ready, vllm-1 not ready",
        "vllm-0 ready",
        "vllm-0 ready, vllm-1 not ready",
        "vllm-0 ready, vllm-1 not ready",
        "vllm-0 ready, vllm-1 ready",
        "vllm-0 ready, vllm-1 ready",
    ];
    let lines = fixture("pods-rollout.jsonl");
    assert_eq!(lines.len(), expected.len());
    for (line, expected) in lines.iter().zip(expected) {
        feed(&mut reflection, line);
        assert_eq!(members(&reflection), expected);
    }
    let uid = &reflection.objects().values().nth(1).unwrap().uid;
    assert_eq!(uid, "5a0c2b1e-6c7d-4f4e-9d0b-2f6d6c0e8a11");
    assert_eq!(reflection.step(), Step::Watch(Version("184520".to_owned())));
}

#[test]
fn an_expired_stream_is_repaired_by_the_next_list() {
    let mut reflection = Reflection::default();
    let expected = [
        "",
        "vllm-0 ready, vllm-1 ready, vllm-2 ready",
        "vllm-0 ready, vllm-1 not ready, vllm-2 ready",
        "vllm-0 ready, vllm-1 not ready, vllm-2 ready",
        "vllm-0 ready, vllm-3 not ready",
        "vllm-0 ready, vllm-3 ready",
    ];
    let lines = fixture("pods-expired.jsonl");
    assert_eq!(lines.len(), expected.len());
    for (line, expected) in lines.iter().zip(expected) {
        feed(&mut reflection, line);
        assert_eq!(members(&reflection), expected);
    }
}
