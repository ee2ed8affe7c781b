//! A running `kvlane serve`, what it says, and the processes that carry its mark.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const KVLANE: &str = env!("CARGO_BIN_EXE_kvlane");

/// The command of a simulated engine, as YAML.
pub(crate) fn engine() -> String {
    format!("[{KVLANE}, engine, --listen, '127.0.0.1:{{port}}', --model-name, sim]")
}

/// The command of a shell that ends as an engine, or does not; `$PORT` and `$INDEX` are set, and `$ENGINE` becomes one.
pub(crate) fn shell(script: &str) -> String {
    let script = script.replace(
        "$ENGINE",
        &format!("{KVLANE} engine --listen 127.0.0.1:$PORT --model-name sim"),
    );
    let script = serde_json::to_string(&script).unwrap();
    format!("[sh, -c, {script}], environment: {{PORT: '{{port}}', INDEX: '{{index}}'}}")
}

/// The command of a process that only writes its port down; [`answer_without_capacity`] answers in its place.
pub(crate) fn without_capacity(machine: &Machine) -> String {
    let file = machine.path("port");
    shell(&format!("echo $PORT > {}; exec sleep 1000", file.display()))
}

/// Answers everything on the port of such a process as if it were ready, but tells no KV capacity.
pub(crate) fn answer_without_capacity(machine: &Machine) {
    let port = u16::try_from(pid_in(&machine.path("port"))).unwrap();
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let answer = |mut stream: TcpStream| {
        let _ = stream.read(&mut [0; 4096]);
        let body = r#"{"data":[{"id":"sim"}]}"#;
        let length = body.len();
        let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}");
        let _ = stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes());
    };
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || answer(stream));
        }
    });
}

/// Quick to give up and to start again.
pub(crate) const QUICK: &str =
    "stop_seconds: 2, restart: {initial_seconds: 0.1, max_seconds: 1, give_up_failures: 4}";

/// A name that no other test uses: strays are in the way of workers of their name.
pub(crate) fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("t{}n{number}", std::process::id())
}

/// A folder where runs are written down, kept apart from those of other tests.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) folder: TempDir,
    /// Further sections of the configuration.
    pub(crate) sections: String,
}

impl Machine {
    pub(crate) fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            sections: String::new(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Prepares `kvlane serve` with these templates.
    pub(crate) fn command(&self, templates: &[String]) -> Command {
        let config = self.path("kvlane.yaml");
        let text = format!(
            "listen: '127.0.0.1:0'\nadmin: '127.0.0.1:0'\nshutdown_seconds: 5\nhealth_interval_seconds: 0.1\nscrape_interval_seconds: 0.1\n{}\nprocesses:\n{}",
            self.sections,
            templates
                .iter()
                .map(|text| format!("- {{{text}}}\n"))
                .collect::<String>()
        );
        std::fs::write(&config, text).unwrap();
        let mut command = Command::new(KVLANE);
        command
            .args(["serve", "--config"])
            .arg(config)
            .env("RUST_LOG", "info")
            .env("XDG_RUNTIME_DIR", self.folder.path())
            .env_remove("CUDA_VISIBLE_DEVICES")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command
    }

    /// Starts `kvlane serve` and waits until it listens.
    pub(crate) fn serve(&self, templates: &[String]) -> Sidecar {
        let mut child = self.command(templates).spawn().unwrap();
        let (sender, addresses) = channel();
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let kept = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if line.contains("listening") {
                    let _ = sender.send(line.clone());
                }
                kept.lock().push(line);
            }
        });
        let line = first(&addresses, &log);
        let address = |name: &str| {
            let (_, rest) = line.split_once(name).unwrap();
            rest.split_whitespace().next().unwrap().parse().unwrap()
        };
        let mut sidecar = Sidecar {
            proxy: address("proxy="),
            admin: address("admin="),
            run: String::new(),
            child,
            log,
        };
        sidecar.run = sidecar.report()["run"].as_str().unwrap().to_owned();
        sidecar
    }

    /// Runs `kvlane serve` that is expected to refuse.
    pub(crate) fn refusal(&self, templates: &[String]) -> Output {
        self.command(templates).output().unwrap()
    }
}

fn first(addresses: &Receiver<String>, log: &Mutex<Vec<String>>) -> String {
    let line = addresses.recv_timeout(Duration::from_secs(60));
    line.unwrap_or_else(|_| panic!("it does not listen: {:#?}", log.lock()))
}

/// A running `kvlane serve`, killed when dropped.
#[derive(Debug)]
pub(crate) struct Sidecar {
    pub(crate) child: Child,
    pub(crate) proxy: SocketAddr,
    admin: SocketAddr,
    /// The name of its run.
    pub(crate) run: String,
    log: Arc<Mutex<Vec<String>>>,
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Sidecar {
    pub(crate) fn get(&self, path: &str) -> (u16, Value) {
        exchange(self.admin, "GET", path, "")
    }

    pub(crate) fn report(&self) -> Value {
        let (status, report) = self.get("/v1/processes");
        assert_eq!(status, 200, "{report}");
        report
    }

    /// The value of a series of the metrics.
    pub(crate) fn metric(&self, series: &str) -> f64 {
        let text = text(self.admin, "GET", "/metrics", "").1;
        let value = text.lines().find_map(|line| line.strip_prefix(series));
        value.map_or(0.0, |value| value.trim().parse().unwrap())
    }

    /// What is said of one replica.
    pub(crate) fn process(&self, name: &str) -> Value {
        let report = self.report();
        let list = report["processes"].as_array().unwrap();
        let found = list.iter().find(|process| process["name"] == name);
        found
            .unwrap_or_else(|| panic!("no {name}: {report}"))
            .clone()
    }

    /// Waits until a replica is in a state.
    pub(crate) fn until(&self, name: &str, state: &str) -> Value {
        let mut seen = Value::Null;
        let is_there = within(Duration::from_secs(60), || {
            seen = self.process(name);
            seen["state"] == state
        });
        assert!(is_there, "{name} is not {state}: {seen}\n{:#?}", self.log());
        seen
    }

    /// Waits until a replica serves in another process than this one, after so many restarts.
    pub(crate) fn until_back(&self, name: &str, old: u32) -> Value {
        let mut seen = Value::Null;
        let is_back = within(Duration::from_secs(60), || {
            seen = self.process(name);
            seen["state"] == "serving" && seen["pid"] != old
        });
        assert!(is_back, "{seen}\n{:#?}", self.log());
        seen
    }

    pub(crate) fn log(&self) -> Vec<String> {
        self.log.lock().clone()
    }

    /// Waits for a line of the log that holds all of these words.
    pub(crate) fn says(&self, words: &[&str]) -> String {
        let mut found = None;
        let is_said = within(Duration::from_secs(60), || {
            let log = self.log.lock();
            let line = log
                .iter()
                .find(|line| words.iter().all(|word| line.contains(word)));
            found = line.cloned();
            found.is_some()
        });
        assert!(is_said, "{words:?} is not said: {:#?}", self.log());
        found.unwrap()
    }

    pub(crate) fn marked(&self) -> Vec<Marked> {
        marked(&self.run)
    }

    /// The guards of a replica: the outer and the inner one.
    pub(crate) fn guards(&self, name: &str) -> [u32; 2] {
        let all = self.marked();
        let guard = |stage: &str| {
            let found = all
                .iter()
                .find(|one| one.process == name && one.command.contains(stage));
            found.unwrap_or_else(|| panic!("no {stage}: {all:?}")).pid
        };
        [guard("--stage=outer"), guard("--stage=inner")]
    }

    pub(crate) fn exit_within(&mut self, limit: Duration) -> i32 {
        let mut code = None;
        let ended = within(limit, || {
            code = self.child.try_wait().unwrap().map(|status| status.code());
            code.is_some()
        });
        assert!(ended, "still running after {limit:?}: {:#?}", self.log());
        code.unwrap().unwrap()
    }

    /// Asserts that every process of the run, and those of these ids, end soon.
    pub(crate) fn nothing_is_left(&self, others: &[u32]) {
        nothing_is_left(&self.run, others);
    }
}

pub(crate) fn nothing_is_left(run: &str, others: &[u32]) {
    let is_over = within(Duration::from_secs(30), || {
        marked(run).is_empty() && others.iter().all(|pid| !is_alive(*pid))
    });
    let alive: Vec<_> = others.iter().filter(|pid| is_alive(**pid)).collect();
    assert!(is_over, "left: {:?} and {alive:?}", marked(run));
}

/// A process that carries the mark of a run.
#[derive(Debug)]
pub(crate) struct Marked {
    pub(crate) pid: u32,
    pub(crate) process: String,
    pub(crate) command: String,
}

/// Lists the live processes of a run by what stands in their environment.
pub(crate) fn marked(run: &str) -> Vec<Marked> {
    let entries = std::fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let read = |pid: u32, file: &str| {
        let bytes = std::fs::read(format!("/proc/{pid}/{file}")).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    };
    pids.filter_map(|pid| {
        let environment = read(pid, "environ")?;
        let mut pairs = environment.split('\0');
        pairs
            .clone()
            .find(|pair| *pair == format!("KVLANE_RUN={run}"))?;
        let process = pairs.find_map(|pair| pair.strip_prefix("KVLANE_PROCESS="));
        is_alive(pid).then(|| Marked {
            pid,
            process: process.unwrap_or_default().to_owned(),
            command: read(pid, "cmdline").unwrap_or_default().replace('\0', " "),
        })
    })
    .collect()
}

/// Tells whether a process is there and has not ended.
pub(crate) fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(')')
        .map(|(_, rest)| rest.trim_start().to_owned());
    state.is_some_and(|state| !state.starts_with(['Z', 'X']))
}

pub(crate) fn kill(signal: &str, pids: &[u32]) {
    let pids = pids.iter().map(u32::to_string);
    let killed = Command::new("kill")
        .args(["-s", signal])
        .args(pids)
        .status();
    assert!(killed.unwrap().success());
}

/// Kills processes of which none may see another one die: they are stopped first. Children come before their parents, since the
/// system lets stopped children of a parent that dies go on.
pub(crate) fn kill_at_once(pids: &[u32]) {
    kill("STOP", pids);
    kill("KILL", pids);
}

/// Waits until a file holds a process id.
pub(crate) fn pid_in(path: &Path) -> u32 {
    let mut pid = None;
    let is_there = within(Duration::from_secs(60), || {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        pid = text.trim().parse().ok();
        pid.is_some()
    });
    assert!(is_there, "no process id in {}", path.display());
    pid.unwrap()
}

pub(crate) fn within(limit: Duration, mut is_true: impl FnMut() -> bool) -> bool {
    let begin = Instant::now();
    loop {
        if is_true() {
            return true;
        }
        if begin.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// One HTTP exchange; status 0 when the connection ended without an answer.
pub(crate) fn exchange(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, Value) {
    let (status, body) = text(address, method, path, body);
    let begin = body.find('{').unwrap_or(0);
    let end = body.rfind('}').map_or(0, |end| end + 1);
    let body = body.get(begin..end).unwrap_or_default();
    (status, serde_json::from_str(body).unwrap_or_default())
}

fn text(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    let Some((head, body)) = answer.split_once("\r\n\r\n") else {
        return (0, String::new());
    };
    (head[9..12].parse().unwrap(), body.to_owned())
}
