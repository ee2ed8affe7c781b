//! Reading the YAML file, with the line of whatever is wrong.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use serde_path_to_error::Segment;
use serde_saphyr::Spanned;

use super::keys::{self, ROUTER_KEYS};
use super::strict::Strict;
use super::{Config, ConfigError, WorkerConfig};
use super::{discovery, handoff, planner, processes, worker};

/// Applies the file's keys to `config`.
pub(super) fn apply(config: &mut Config, text: &str, name: &str) -> Result<(), ConfigError> {
    if text.trim().is_empty() {
        return Ok(());
    }
    let document: Option<BTreeMap<String, Spanned<Value>>> =
        parse(text).map_err(|error| ConfigError(format!("{name}: {error}")))?;
    for (key, value) in document.unwrap_or_default() {
        let line = value.referenced.line();
        apply_key(config, &key, &value.value)
            .map_err(|message| ConfigError(format!("{name}, line {line}: {message}")))?;
        if key == "router"
            && let Some(both) = contradiction(text, &value.value)
        {
            return Err(ConfigError(format!("{name}, line {line}: {both}")));
        }
    }
    Ok(())
}

/// Parses without showing lines of the file in messages: one of them may hold the key of the admin listener.
fn parse<T: DeserializeOwned>(text: &str) -> Result<T, serde_saphyr::Error> {
    serde_saphyr::from_str_with_options(text, serde_saphyr::options! { with_snippet: false })
}

/// Sets one of the top-level keys.
pub(super) fn apply_key(config: &mut Config, key: &str, value: &Value) -> Result<(), String> {
    if key == "workers" {
        let workers = read_workers(value).map_err(|error| format!("workers{error}"))?;
        config.workers.extend(workers);
        return Ok(());
    }
    if key == "discovery" {
        return discovery::set(config, value);
    }
    if key == "handoff" {
        return handoff::set(config, value);
    }
    if key == "processes" {
        return processes::set(config, value);
    }
    if key == "planner" {
        return planner::set(config, value);
    }
    if key == "router" {
        let section = value
            .as_object()
            .ok_or("router: a mapping of the router's keys is accepted")?;
        for (key, value) in section {
            if !ROUTER_KEYS.contains(&key.as_str()) {
                return Err(unknown(&format!("router.{key}"), ROUTER_KEYS.into_iter()));
            }
            keys::set_router(config, key, value).map_err(|error| format!("router.{error}"))?;
        }
        return Ok(());
    }
    if ROUTER_KEYS.contains(&key) {
        return keys::set_router(config, key, value);
    }
    match keys::find(key) {
        Some(key) => key.set(config, value),
        None => Err(unknown(key, keys::all_names())),
    }
}

/// Reads a file that lists workers and nothing else: a list, or a mapping with the list under `workers`.
///
/// # Errors
/// Says what is wrong, and where.
pub(crate) fn parse_workers(text: &str) -> Result<Vec<WorkerConfig>, String> {
    let document: Option<Value> = parse(text).map_err(|error| error.to_string())?;
    let list = match document {
        None | Some(Value::Null) => {
            return Err("the file is empty; [] is a list without workers".to_owned());
        }
        Some(Value::Object(mut fields)) => {
            let list = fields.remove("workers");
            if let Some(key) = fields.keys().next() {
                return Err(unknown(key, std::iter::once("workers")));
            }
            list.ok_or("workers: missing")?
        }
        Some(list) => list,
    };
    let workers = read_workers(&list)?;
    worker::check_all(&workers, &mut Vec::new())?;
    Ok(workers)
}

/// Reads a list of workers; messages begin with the place in the list.
fn read_workers(value: &Value) -> Result<Vec<WorkerConfig>, String> {
    let list = value.as_array().ok_or(": a list of workers is accepted")?;
    let read = |(index, worker): (usize, &Value)| {
        let fields = worker
            .as_object()
            .ok_or_else(|| format!("[{index}]: a mapping with id and url is accepted"))?;
        WorkerConfig::from_fields(fields).map_err(|error| format!("[{index}].{error}"))
    };
    list.iter().enumerate().map(read).collect()
}

/// Reads a section; what is not accepted is named by its path from `place` on.
pub(super) fn section<T: DeserializeOwned>(place: &str, value: Value) -> Result<T, String> {
    serde_path_to_error::deserialize(Strict(value)).map_err(|error| {
        let mut named = place.to_owned();
        for step in error.path().iter() {
            let step = match step {
                Segment::Map { key } => format!(".{key}"),
                Segment::Seq { index } => format!("[{index}]"),
                Segment::Enum { .. } | Segment::Unknown => continue,
            };
            named.push_str(&step);
        }
        format!("{named}: not accepted: {}", plain(error.inner()))
    })
}

/// Says what a type accepts in the words of a configuration file.
fn plain(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let Some((before, accepted)) = message.rsplit_once(", expected ") else {
        return message;
    };
    let accepted = match accepted {
        "a sequence" => "a list",
        "a map" => "a mapping",
        "path string" => "a path",
        "f64" => "a number",
        "u16" => "0 to 65,535",
        "u32" | "u64" | "usize" => "a whole number from 0 on",
        accepted => accepted,
    };
    format!("{before}, expected {accepted}")
}

/// Names a router key that stands both at the top level and under `router`.
fn contradiction(text: &str, section: &Value) -> Option<String> {
    let top: Map<String, Value> = parse(text).ok()?;
    let twice = section
        .as_object()?
        .keys()
        .find(|key| top.contains_key(*key))?;
    Some(format!(
        "{twice} and router.{twice} are both given; keep one of them"
    ))
}

/// Says that a key is unknown, which one may have been meant, and which there are.
pub(super) fn unknown(key: &str, known: impl Iterator<Item = &'static str>) -> String {
    let known: Vec<_> = known.collect();
    let last = key.rsplit('.').next().unwrap_or(key);
    let close = known
        .iter()
        .map(|name| (distance(last, name), *name))
        .filter(|(distance, _)| *distance <= 3)
        .min();
    let hint = close.map_or_else(String::new, |(_, name)| format!("; did you mean {name}?"));
    format!("unknown key {key}{hint} (accepted: {})", known.join(", "))
}

/// Levenshtein distance in bytes, enough to find a typing slip.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
