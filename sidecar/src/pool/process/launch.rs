//! What one start of one replica takes: its command, its environment, its ports, and the worker it will be.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::placeholders;
use super::ports::Ports;
use super::run::{PROCESS, RUN, RunId};
use crate::config::{ProcessTemplate, WorkerConfig, mask};

/// One of the workers that a template asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Replica {
    /// The worker's name.
    pub(super) name: String,
    /// Its number within the template.
    pub(super) index: usize,
    /// The GPUs that it sees; empty when nothing is said about them.
    pub(super) gpus: Vec<String>,
}

/// Everything about one start.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    pub(super) command: Vec<String>,
    pub(super) environment: Vec<(String, String)>,
    pub(super) cwd: Option<PathBuf>,
    pub(super) worker: WorkerConfig,
    /// The ports by placeholder.
    pub(super) ports: BTreeMap<&'static str, u16>,
}

impl Launch {
    /// Lists what the engine was given and nobody should read in what it writes: many print their arguments.
    pub(super) fn secrets(&self) -> impl Iterator<Item = String> {
        let named = self.environment.iter();
        let named = named.filter(|(name, _)| mask::is_secret_name(name));
        let named = named.map(|(_, value)| value.clone());
        mask::hidden(&self.command).into_iter().chain(named)
    }
}

/// Prepares one start, on fresh ports.
///
/// # Errors
/// Ports are not to be had, or the folder is not there.
pub(super) fn prepare(
    template: &ProcessTemplate,
    replica: &Replica,
    ports: &Ports,
    run: &RunId,
) -> Result<Launch, String> {
    if let Some(folder) = template.cwd.as_ref().filter(|folder| !folder.is_dir()) {
        return Err(format!("cwd {}: is no folder", folder.display()));
    }
    let mentioned = template.mentioned()?;
    let ranks = u16::try_from(template.dp_ranks).unwrap_or(u16::MAX);
    let mut given = BTreeMap::new();
    for (name, count) in [
        ("port", 1),
        ("events_port", ranks),
        ("replay_port", ranks),
        ("side_channel_port", ranks),
    ] {
        if mentioned.contains(name) {
            let first = ports.reserve(count);
            given.insert(name, first.map_err(|error| format!("{{{name}}}: {error}"))?);
        }
    }
    let gpus = replica.gpus.join(",");
    let value = |name: &str| match name {
        "gpus" => Some(gpus.clone()),
        "model" => template.model.clone(),
        "name" => Some(replica.name.clone()),
        "index" => Some(replica.index.to_string()),
        port => given.get(port).map(u16::to_string),
    };
    let fill = |text: &str| placeholders::replace(text, value);
    let mut environment: Vec<_> = template
        .environment
        .iter()
        .map(|(name, text)| (name.clone(), fill(text.reveal())))
        .collect();
    if !replica.gpus.is_empty() {
        environment.push(("CUDA_VISIBLE_DEVICES".to_owned(), gpus.clone()));
        // CUDA's own order puts the fastest card first; ours, and the driver's, is that of the bus.
        environment.push(("CUDA_DEVICE_ORDER".to_owned(), "PCI_BUS_ID".to_owned()));
    }
    environment.push((RUN.to_owned(), run.to_string()));
    environment.push((PROCESS.to_owned(), replica.name.clone()));
    Ok(Launch {
        command: template.command.iter().map(|word| fill(word)).collect(),
        environment,
        cwd: template.cwd.clone(),
        worker: worker(template, replica, &given)?,
        ports: given,
    })
}

fn worker(
    template: &ProcessTemplate,
    replica: &Replica,
    ports: &BTreeMap<&'static str, u16>,
) -> Result<WorkerConfig, String> {
    let tcp = |name: &str| {
        ports
            .get(name)
            .map(|port| format!("tcp://127.0.0.1:{port}"))
    };
    let port = ports.get("port").ok_or("command: {port} is missing")?;
    let mut worker = WorkerConfig::new(&replica.name, &format!("http://127.0.0.1:{port}"))?;
    worker.events = tcp("events_port");
    worker.replay = tcp("replay_port");
    worker.give(template.role, None);
    worker.dp_ranks = template.dp_ranks;
    worker.labels = template.labels.clone();
    Ok(worker)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn a_start_gets_its_ports_its_gpus_and_its_marks() {
        let text = "processes: [{name: w, role: decode, dp_ranks: 2, gpus: [[2, 3]], model: m/x, labels: {zone: a}, cwd: /tmp,
            environment: {SIDE: '{side_channel_port}', NAME: 'a{name}b{index}'},
            command: [run, '{model}', '--port={port}', '{\"endpoint\":\"tcp://*:{events_port}\"}', '{gpus}']}]";
        let template = Config::from_yaml(text, "test").unwrap().processes.remove(0);
        let replica = Replica {
            name: "w-0".to_owned(),
            index: 0,
            gpus: vec!["2".to_owned(), "3".to_owned()],
        };
        let run = RunId::new().unwrap();
        let launch = prepare(&template, &replica, &Ports::new(), &run).unwrap();
        let port = |name| launch.ports[name];
        let events = port("events_port");
        assert_eq!(
            launch.command,
            [
                "run".to_owned(),
                "m/x".to_owned(),
                format!("--port={}", port("port")),
                format!("{{\"endpoint\":\"tcp://*:{events}\"}}"),
                "2,3".to_owned()
            ]
        );
        let environment: BTreeMap<_, _> = launch.environment.iter().cloned().collect();
        assert_eq!(environment["SIDE"], port("side_channel_port").to_string());
        assert_eq!(environment["NAME"], "aw-0b0");
        assert_eq!(environment["CUDA_VISIBLE_DEVICES"], "2,3");
        assert_eq!(environment["CUDA_DEVICE_ORDER"], "PCI_BUS_ID");
        assert_eq!(environment[RUN], run.to_string());
        assert_eq!(environment[PROCESS], "w-0");
        let worker = &launch.worker;
        assert_eq!(worker.events, Some(format!("tcp://127.0.0.1:{events}")));
        assert_eq!((worker.replay.as_ref(), worker.dp_ranks), (None, 2));
        assert_eq!(worker.labels["zone"], "a");
        // Two ranks: the port after the first belongs to it, too.
        let again = prepare(&template, &replica, &Ports::new(), &run).unwrap();
        assert_eq!(again.ports.len(), 3);

        let said = Config::from_yaml(&text.replace("role: decode", "role: both"), "test").unwrap();
        let launch = prepare(&said.processes[0], &replica, &Ports::new(), &run).unwrap();
        assert!(launch.worker.says_role(), "what is written is not learned");

        let missing = Config::from_yaml(&text.replace("/tmp", "/nonexistent"), "test").unwrap();
        let error = prepare(&missing.processes[0], &replica, &Ports::new(), &run).unwrap_err();
        assert!(error.contains("cwd /nonexistent"), "{error}");
    }
}
