//! The section `processes`: engines that are started and kept on this machine.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

use kvlane::{Role, WorkerSpec};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::{Config, Secret, WorkerConfig, file, mask};
use crate::pool::process::placeholders;

/// How engines of one kind are started. Unknown keys are refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ProcessTemplate {
    /// The name, 1 to 64 letters, digits, `.`, `_` and `-`; the workers are called `NAME-0`, `NAME-1` and so on.
    pub name: String,
    /// Program and arguments; no shell reads them. `{port}`, `{events_port}`, `{replay_port}`, `{side_channel_port}`, `{gpus}`,
    /// `{model}`, `{name}` and `{index}` are replaced. Values of flags and variables that look like keys are not shown.
    #[serde(deserialize_with = "words", serialize_with = "masked")]
    pub command: Vec<String>,
    /// How many are started, 1 to 256 (default: one for each entry of `gpus`, otherwise 1).
    #[serde(default)]
    pub replicas: Option<usize>,
    /// How many of them run from the beginning, 0 to `replicas` (default: all). The others are parked until the pool's planner
    /// starts them.
    #[serde(default)]
    pub initial_replicas: Option<usize>,
    /// Which GPUs each one sees (default: whatever the sidecar sees).
    #[serde(default)]
    pub gpus: Gpus,
    /// GPUs of each replica where `gpus` is `auto` (default 1).
    #[serde(default = "one")]
    pub gpus_per_replica: usize,
    /// The CUDA version that the engine was built for, as in `"12.8"`; an older driver is refused before anything starts.
    #[serde(default)]
    pub cuda: Option<CudaVersion>,
    /// Variables added to the sidecar's own; placeholders are replaced. Values are never shown.
    #[serde(default, deserialize_with = "environment")]
    pub environment: BTreeMap<String, Secret>,
    /// Folder to start in (default: the sidecar's).
    #[serde(default)]
    pub cwd: Option<PathBuf>,
    /// The model's name. Engines of one model start one after the other until one of them is ready, so that they do not
    /// all download it.
    #[serde(default)]
    pub model: Option<String>,
    /// What the workers do; asked of the engines where it is not given, and else both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// Labels of the workers.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Data-parallel ranks behind one port (default 1); as many event and replay ports in a row are given.
    #[serde(default = "one_rank")]
    pub dp_ranks: u32,
    /// Seconds from the start until the model answers and its KV capacity is known (default 900); an engine that takes longer
    /// is ended and counts as failed.
    #[serde(default = "ready_seconds")]
    pub ready_seconds: f64,
    /// Seconds between asking an engine to end and killing it (default 30).
    #[serde(default = "stop_seconds")]
    pub stop_seconds: f64,
    /// When an engine that ended is started again.
    #[serde(default)]
    pub restart: RestartSettings,
    /// What is done with engine processes that an earlier run left behind (default report).
    #[serde(default)]
    pub strays: StrayPolicy,
    /// Output kept in memory for each engine, in KiB (default 64).
    #[serde(default = "log_kib")]
    pub log_kib: usize,
    /// Folder for log files, one for each worker and one set aside when it is full (default: none are written).
    #[serde(default)]
    pub log_dir: Option<PathBuf>,
    /// Size of a log file in MiB at which it is set aside (default 16).
    #[serde(default = "log_file_mib")]
    pub log_file_mib: u64,
}

const fn one() -> usize {
    1
}
const fn one_rank() -> u32 {
    1
}
const fn ready_seconds() -> f64 {
    900.0
}
const fn stop_seconds() -> f64 {
    30.0
}
const fn log_kib() -> usize {
    64
}
const fn log_file_mib() -> u64 {
    16
}

/// When an engine that ended is started again.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct RestartSettings {
    /// Seconds before the first restart (default 1); each further one waits twice as long.
    pub initial_seconds: f64,
    /// Longest pause in seconds (default 60). An engine that served for as long begins anew with the first pause.
    pub max_seconds: f64,
    /// Failures within the window after which nothing is tried any more (default 5).
    pub give_up_failures: usize,
    /// The window in seconds (default 600).
    pub window_seconds: f64,
}

impl Default for RestartSettings {
    fn default() -> Self {
        Self {
            initial_seconds: 1.0,
            max_seconds: 60.0,
            give_up_failures: 5,
            window_seconds: 600.0,
        }
    }
}

/// What is done with engine processes that an earlier run left behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StrayPolicy {
    /// They are told of, and workers of their name or on their GPUs wait until they are gone.
    #[default]
    Report,
    /// They are ended first.
    Stop,
}

/// Which GPUs the replicas see.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Value")]
pub enum Gpus {
    /// What the sidecar itself sees; nothing is set.
    #[default]
    Inherited,
    /// As many as each needs, out of those of this machine that no template names.
    Auto,
    /// One set for each replica.
    Sets(Vec<Vec<String>>),
}

impl TryFrom<Value> for Gpus {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        const ACCEPTED: &str = "auto, or a list with an index, an identifier (GPU-… or MIG-…) or a list of them for each replica, as in [0, 1] or [[0, 1], [2, 3]]";
        let bad = || format!("gpus: {value} is not accepted; accepted: {ACCEPTED}");
        let one = |gpu: &Value| match gpu {
            Value::Number(index) => index
                .as_u64()
                .filter(|index| *index < 1_024)
                .map(|index| index.to_string()),
            Value::String(name) => {
                let is_index = name.parse::<u16>().is_ok_and(|index| index < 1_024);
                let is_name = ["GPU-", "MIG-"].iter().any(|begin| name.starts_with(begin))
                    && name
                        .bytes()
                        .all(|byte| byte.is_ascii_graphic() && byte != b',');
                (is_index || is_name).then(|| name.clone())
            }
            _ => None,
        };
        let set = |entry: &Value| match entry {
            Value::Array(gpus) if gpus.is_empty() => None,
            Value::Array(gpus) => gpus.iter().map(one).collect(),
            gpu => one(gpu).map(|gpu| vec![gpu]),
        };
        match &value {
            Value::String(word) if word == "auto" => Ok(Self::Auto),
            Value::Array(entries) if !entries.is_empty() => {
                let sets: Option<Vec<_>> = entries.iter().map(set).collect();
                sets.map(Self::Sets).ok_or_else(bad)
            }
            _ => Err(bad()),
        }
    }
}

impl Serialize for Gpus {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Inherited => serializer.serialize_none(),
            Self::Auto => serializer.serialize_str("auto"),
            Self::Sets(sets) => sets.serialize(serializer),
        }
    }
}

/// A version of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "Value")]
pub struct CudaVersion {
    /// As the 12 of 12.8.
    pub major: u32,
    /// As the 8 of 12.8.
    pub minor: u32,
}

impl TryFrom<Value> for CudaVersion {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        // A number would make 12.10 of 12.1.
        let parse = |text: &str| {
            let (major, minor) = text.split_once('.')?;
            Some(Self {
                major: major.parse().ok()?,
                minor: minor.parse().ok()?,
            })
        };
        value.as_str().and_then(parse).ok_or_else(|| {
            format!("cuda: {value} is not accepted; accepted: a version in quotes, as in \"12.8\"")
        })
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Serialize for CudaVersion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Most replicas of a template.
const MOST_REPLICAS: usize = 256;

impl ProcessTemplate {
    /// Returns the name of a replica, which is its worker's.
    #[must_use]
    pub fn worker_name(&self, index: usize) -> String {
        format!("{}-{index}", self.name)
    }

    /// Returns the number of replicas; `None` when all GPUs of the machine decide.
    #[must_use]
    pub fn fixed_replicas(&self) -> Option<usize> {
        self.replicas.or(match &self.gpus {
            Gpus::Inherited => Some(1),
            Gpus::Sets(sets) => Some(sets.len()),
            Gpus::Auto => None,
        })
    }

    /// Lists the placeholders that the command and the environment mention.
    pub(crate) fn mentioned(&self) -> Result<BTreeSet<&'static str>, String> {
        let mut found = BTreeSet::new();
        for word in &self.command {
            found.extend(placeholders::find(word).map_err(|error| format!("command: {error}"))?);
        }
        for (name, value) in &self.environment {
            let names = placeholders::find(value.reveal());
            found.extend(names.map_err(|error| format!("environment.{name}: {error}"))?);
        }
        Ok(found)
    }

    fn validate(&self) -> Result<(), String> {
        let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if self.name.is_empty() || self.name.len() > 64 || !self.name.bytes().all(is_letter) {
            return Err(format!(
                "name: {:?} is not accepted; accepted: 1 to 64 letters, digits, dots, underscores and hyphens",
                self.name
            ));
        }
        self.validate_command()?;
        self.validate_environment()?;
        self.validate_texts()?;
        self.validate_numbers()?;
        let most = self.fixed_replicas().unwrap_or(MOST_REPLICAS);
        if let Some(initial) = self.initial_replicas.filter(|initial| *initial > most) {
            return Err(format!(
                "initial_replicas: {initial} is not accepted; accepted: 0 to {most}, the number of replicas"
            ));
        }
        if let (Gpus::Sets(sets), Some(replicas)) = (&self.gpus, self.replicas)
            && sets.len() != replicas
        {
            return Err(format!(
                "gpus: {} entries for {replicas} replicas; give one entry for each",
                sets.len()
            ));
        }
        Ok(())
    }

    fn validate_command(&self) -> Result<(), String> {
        if self.command.first().is_none_or(String::is_empty) {
            return Err("command: a program and its arguments are accepted, as in [vllm, serve, MODEL, --port, '{port}']".to_owned());
        }
        if self.command.iter().any(|word| word.contains('\0')) {
            return Err("command: a NUL character cannot stand in an argument".to_owned());
        }
        let mentioned = self.mentioned()?;
        if !mentioned.contains("port") {
            return Err("command: {port} is mentioned neither here nor in environment; the engine must listen on the port that it is given".to_owned());
        }
        if mentioned.contains("replay_port") && !mentioned.contains("events_port") {
            return Err("command: {replay_port} is mentioned and {events_port} is not".to_owned());
        }
        if mentioned.contains("model") && self.model.is_none() {
            return Err("command: {model} is mentioned and model is not given".to_owned());
        }
        if mentioned.contains("gpus") && self.gpus == Gpus::Inherited {
            return Err("command: {gpus} is mentioned and gpus is not given".to_owned());
        }
        Ok(())
    }

    fn validate_environment(&self) -> Result<(), String> {
        for (name, value) in &self.environment {
            if name.is_empty() || name.contains(['=', '\0']) || value.reveal().contains('\0') {
                return Err(format!("environment.{name}: not a variable"));
            }
            let is_set_by_gpus = name.starts_with("CUDA_VISIBLE") && self.gpus != Gpus::Inherited;
            if is_set_by_gpus || name.starts_with("KVLANE_") {
                return Err(format!(
                    "environment.{name}: is set by kvlane; leave it out"
                ));
            }
        }
        Ok(())
    }

    /// Refuses keys that are there and empty, as a variable that was not set leaves them.
    fn validate_texts(&self) -> Result<(), String> {
        let is_empty = |path: &Option<PathBuf>| {
            let path = path.as_ref();
            path.is_some_and(|path| path.as_os_str().is_empty())
        };
        for (key, is_empty, accepted) in [
            ("cwd", is_empty(&self.cwd), "a folder"),
            ("log_dir", is_empty(&self.log_dir), "a folder"),
            (
                "model",
                self.model.as_ref().is_some_and(String::is_empty),
                "a model's name or folder",
            ),
        ] {
            if is_empty {
                return Err(format!(
                    "{key}: is empty; accepted: {accepted}, or no such key"
                ));
            }
        }
        Ok(())
    }

    fn validate_numbers(&self) -> Result<(), String> {
        let restart = &self.restart;
        for (key, value, low, high) in [
            ("ready_seconds", self.ready_seconds, 0.1, 86_400.0),
            ("stop_seconds", self.stop_seconds, 0.0, 3_600.0),
            (
                "restart.initial_seconds",
                restart.initial_seconds,
                0.0,
                3_600.0,
            ),
            ("restart.max_seconds", restart.max_seconds, 0.0, 86_400.0),
            (
                "restart.window_seconds",
                restart.window_seconds,
                1.0,
                604_800.0,
            ),
        ] {
            if !(low..=high).contains(&value) {
                return Err(format!(
                    "{key}: {value} is not accepted; accepted: {low} to {high} seconds"
                ));
            }
        }
        let ranks = usize::try_from(self.dp_ranks).unwrap_or(usize::MAX);
        let most_ranks = usize::try_from(WorkerSpec::MAX_DP_RANKS).unwrap_or(usize::MAX);
        for (key, value, high) in [
            ("replicas", self.replicas.unwrap_or(1), MOST_REPLICAS),
            ("gpus_per_replica", self.gpus_per_replica, 64),
            ("dp_ranks", ranks, most_ranks),
            ("restart.give_up_failures", restart.give_up_failures, 1_000),
            ("log_kib", self.log_kib, 65_536),
            (
                "log_file_mib",
                usize::try_from(self.log_file_mib).unwrap_or(usize::MAX),
                65_536,
            ),
        ] {
            if !(1..=high).contains(&value) {
                return Err(format!(
                    "{key}: {value} is not accepted; accepted: 1 to {high}"
                ));
            }
        }
        if restart.max_seconds < restart.initial_seconds {
            return Err(format!(
                "restart.max_seconds: {} is less than restart.initial_seconds {}",
                restart.max_seconds, restart.initial_seconds
            ));
        }
        Ok(())
    }
}

/// Sets the section.
pub(super) fn set(config: &mut Config, value: &Value) -> Result<(), String> {
    let list = value
        .as_array()
        .ok_or("processes: a list of templates is accepted")?;
    let read = |(index, value): (usize, &Value)| {
        let template: ProcessTemplate =
            file::section(&format!("processes[{index}]"), value.clone())?;
        let checked = template.validate();
        checked.map_err(|error| format!("processes[{index}].{error}"))?;
        Ok::<_, String>(template)
    };
    config.processes = list
        .iter()
        .enumerate()
        .map(read)
        .collect::<Result<_, _>>()?;
    Ok(())
}

/// Checks the templates against each other and against the workers.
pub(super) fn check_all(
    templates: &[ProcessTemplate],
    workers: &[WorkerConfig],
) -> Result<(), String> {
    let mut names = BTreeMap::new();
    for (index, template) in templates.iter().enumerate() {
        template
            .validate()
            .map_err(|error| format!("processes[{index}].{error}"))?;
        if let Some(first) = names.insert(&template.name, index) {
            return Err(format!(
                "processes[{first}].name and processes[{index}].name are both {:?}; names must differ",
                template.name
            ));
        }
        let most = template.fixed_replicas().unwrap_or(MOST_REPLICAS);
        let own: BTreeSet<_> = (0..most).map(|index| template.worker_name(index)).collect();
        if let Some(worker) = workers
            .iter()
            .find(|worker| own.contains(worker.id.as_str()))
        {
            return Err(format!(
                "workers: id {:?} is also the name of a replica of processes[{index}]; names must differ",
                worker.id
            ));
        }
    }
    Ok(())
}

/// Reads a list of words; numbers are words, too.
fn words<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let list = Vec::<Value>::deserialize(deserializer)?;
    let word = |value: &Value| {
        scalar(value).ok_or_else(|| {
            D::Error::custom(format!(
                "command: {value} is not accepted; accepted: texts and numbers (in YAML a placeholder needs quotes, as in '{{port}}')"
            ))
        })
    };
    list.iter().map(word).collect()
}

fn masked<S: Serializer>(command: &[String], serializer: S) -> Result<S::Ok, S::Error> {
    mask::command(command).serialize(serializer)
}

fn environment<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, Secret>, D::Error> {
    let map = BTreeMap::<String, Value>::deserialize(deserializer)?;
    // The value is not for a message: it may be a key.
    let one = |(name, value): (String, Value)| match scalar(&value) {
        Some(text) => Ok((name, Secret::new(text))),
        None => Err(D::Error::custom(format!(
            "environment.{name}: a text or a number is accepted"
        ))),
    };
    map.into_iter().map(one).collect()
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(value) => Some(value.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yaml(text: &str) -> Result<Config, String> {
        Config::from_yaml(text, "kvlane.yaml").map_err(|error| error.to_string())
    }

    fn template(more: &str) -> Result<ProcessTemplate, String> {
        let text = format!("processes: [{{name: w, command: [run, '{{port}}']{more}}}]");
        yaml(&text).map(|mut config| config.processes.remove(0))
    }

    fn refused(more: &str, words: &[&str]) {
        let error = template(more).unwrap_err();
        for word in words {
            assert!(error.contains(word), "{error:?} does not say {word:?}");
        }
    }

    #[test]
    fn defaults_are_the_documented_ones() {
        let template = template("").unwrap();
        assert_eq!(template.fixed_replicas(), Some(1));
        assert_eq!(
            (template.ready_seconds, template.stop_seconds),
            (900.0, 30.0)
        );
        assert_eq!(template.strays, StrayPolicy::Report);
        assert_eq!(template.role, None);
        assert_eq!(template.restart.give_up_failures, 5);
        assert_eq!(template.worker_name(3), "w-3");
    }

    #[test]
    fn every_key_is_read() {
        let template = template(
            ", replicas: 2, gpus: [[0, 1], [GPU-ab, 3]], cuda: '12.8', environment: {HF_TOKEN: hf_secret, N: 5}, cwd: /tmp,
             model: m, role: prefill, labels: {a: b}, dp_ranks: 2, ready_seconds: 5, stop_seconds: 1, strays: stop, log_dir: /tmp,
             log_kib: 8, log_file_mib: 1, restart: {initial_seconds: 0.5, max_seconds: 4, give_up_failures: 2, window_seconds: 60}",
        )
        .unwrap();
        let sets = [["0", "1"], ["GPU-ab", "3"]].map(|set| set.map(str::to_owned).to_vec());
        assert_eq!(template.gpus, Gpus::Sets(sets.to_vec()));
        assert!(
            template.cuda
                < Some(CudaVersion {
                    major: 12,
                    minor: 10
                })
        );
        assert_eq!(template.environment["N"].reveal(), "5");
        let shown = format!("{template:?} {}", serde_json::to_string(&template).unwrap());
        assert!(!shown.contains("hf_secret"), "{shown}");
        assert!(
            shown.contains("HF_TOKEN") && shown.contains("12.8"),
            "{shown}"
        );
    }

    #[test]
    fn unknown_and_wrong_keys_are_refused_by_name() {
        refused(", replcas: 2", &["processes[0]", "replcas", "replicas"]);
        refused(", restart: {tries: 2}", &["tries", "give_up_failures"]);
        refused(", replicas: 0", &["processes[0].replicas", "1 to 256"]);
        refused(", ready_seconds: 0", &["ready_seconds", "0.1 to 86400"]);
        refused(
            ", restart: {max_seconds: 0.5}",
            &["restart.max_seconds", "initial_seconds"],
        );
        refused(", gpus: 0", &["gpus", "auto"]);
        refused(", gpus: [[]]", &["gpus", "auto"]);
        refused(", gpus: [tesla]", &["gpus", "GPU-"]);
        refused(
            ", gpus: [0, 1], replicas: 3",
            &["gpus", "2 entries for 3 replicas"],
        );
        refused(", cuda: 12.8", &["cuda", "in quotes"]);
        refused(", strays: ignore", &["strays", "ignore", "report"]);
        refused(", dp_ranks: 0", &["dp_ranks"]);
        refused(", environment: {TOKEN: [hidden]}", &["environment.TOKEN"]);
        refused(
            ", environment: {KVLANE_RUN: x}",
            &["environment.KVLANE_RUN", "set by kvlane"],
        );
        refused(
            ", gpus: [0], environment: {CUDA_VISIBLE_DEVICES: 1}",
            &["CUDA_VISIBLE_DEVICES"],
        );
        for (text, words) in [
            ("processes: {}", vec!["processes", "a list"]),
            (
                "processes: [[w, [x, '{port}']]]",
                vec!["processes[0]", "a mapping"],
            ),
            (
                "processes: [{name: w, command: [x, '{port}'], log_dir: ''}]",
                vec!["processes[0].log_dir", "a folder"],
            ),
            (
                "processes: [{name: true, command: [x]}]",
                vec!["processes[0].name", "true"],
            ),
            ("processes: [{name: w}]", vec!["processes[0]", "command"]),
            (
                "processes: [{name: 'a b', command: [x, '{port}']}]",
                vec!["name", "a b"],
            ),
            (
                "processes: [{name: w, command: []}]",
                vec!["command", "a program"],
            ),
            (
                "processes: [{name: w, command: [x]}]",
                vec!["command", "{port}"],
            ),
            (
                "processes: [{name: w, command: [x, '{port}', '{prot}']}]",
                vec!["{prot}", "{side_channel_port}"],
            ),
            (
                "processes: [{name: w, command: [x, {port}]}]",
                vec!["command", "quotes"],
            ),
            (
                "processes: [{name: w, command: [x, '{port}', '{replay_port}']}]",
                vec!["{events_port}"],
            ),
            (
                "processes: [{name: w, command: [x, '{port}', '{model}']}]",
                vec!["model"],
            ),
            (
                "processes: [{name: w, command: [x, '{port}', '{gpus}']}]",
                vec!["gpus"],
            ),
        ] {
            let error = yaml(text).unwrap_err();
            for word in words {
                assert!(error.contains(word), "{error:?} does not say {word:?}");
            }
        }
    }

    #[test]
    fn names_differ_from_each_other_and_from_workers() {
        let both =
            "processes: [{name: w, command: [x, '{port}']}, {name: w, command: [x, '{port}']}]";
        assert!(yaml(both).unwrap_err().contains("processes[1].name"));
        let worker = "workers: [{id: w-1, url: 'http://h:1'}]\nprocesses: [{name: w, replicas: 2, command: [x, '{port}']}]";
        assert!(yaml(worker).unwrap_err().contains("w-1"));
        assert!(yaml(&worker.replace("replicas: 2", "replicas: 1")).is_ok());
    }
}
