//! The binary as users run it: simulated engines and the proxy as processes, judged by the engines' own reports.

#![expect(clippy::unwrap_used, reason = "what fails to unwrap fails the test")]

use kvlane_tests::{Answer, Process, eventually, free_port, request, run};
use serde_json::{Value, json};

/// Where one simulated engine listens.
#[derive(Clone, Copy)]
struct Ports {
    http: u16,
    events: u16,
    replay: u16,
}

impl Ports {
    fn free() -> Self {
        Self {
            http: free_port(),
            events: free_port(),
            replay: free_port(),
        }
    }

    fn start(self, extra: &[&str]) -> Process {
        let listen = format!("127.0.0.1:{}", self.http);
        let events = format!("tcp://127.0.0.1:{}", self.events);
        let replay = format!("tcp://127.0.0.1:{}", self.replay);
        let mut arguments = vec![
            "engine", "--listen", &listen, "--events", &events, "--replay", &replay, "--speed",
            "50",
        ];
        arguments.extend_from_slice(extra);
        let engine = Process::start(&arguments);
        eventually("the engine is healthy", || {
            request(self.http, "GET", "/health", "").filter(|answer| answer.status == 200)
        });
        engine
    }

    fn worker(self, id: &str) -> String {
        format!(
            "id={id},url=http://127.0.0.1:{},events=tcp://127.0.0.1:{},replay=tcp://127.0.0.1:{}",
            self.http, self.events, self.replay
        )
    }
}

/// A proxy before two engines.
struct Pair {
    ports: [Ports; 2],
    engines: Vec<Process>,
    proxy: Process,
    listen: u16,
    admin: u16,
}

impl Pair {
    fn start(extra: [&[&str]; 2]) -> Self {
        let ports = [Ports::free(), Ports::free()];
        let engines = vec![ports[0].start(extra[0]), ports[1].start(extra[1])];
        let (proxy, listen, admin) = serve(ports, &[]);
        Self {
            ports,
            engines,
            proxy,
            listen,
            admin,
        }
    }

    fn complete(&self, prompt: &[u32]) -> Answer {
        complete(self.listen, prompt)
    }

    fn trust(&self, worker: &str) -> Value {
        let listed = request(self.admin, "GET", "/v1/workers", "")
            .unwrap()
            .json();
        let worker = listed["workers"]
            .as_array()
            .unwrap()
            .iter()
            .find(|info| info["id"] == worker)
            .unwrap();
        worker["trust"][0].clone()
    }
}

fn serve(ports: [Ports; 2], extra: &[&str]) -> (Process, u16, u16) {
    serve_workers(&[ports[0].worker("w1"), ports[1].worker("w2")], extra)
}

fn serve_workers(workers: &[String; 2], extra: &[&str]) -> (Process, u16, u16) {
    let (listen, admin) = (free_port(), free_port());
    let (listen_at, admin_at) = (format!("127.0.0.1:{listen}"), format!("127.0.0.1:{admin}"));
    let mut arguments = vec![
        "serve",
        "--listen",
        &listen_at,
        "--admin",
        &admin_at,
        "--debug-headers",
        "--worker",
        &workers[0],
        "--worker",
        &workers[1],
    ];
    arguments.extend_from_slice(extra);
    let proxy = Process::start(&arguments);
    ready(admin);
    (proxy, listen, admin)
}

fn ready(admin: u16) {
    eventually("both workers are ready", || {
        let listed = request(admin, "GET", "/v1/workers", "")?.json();
        let is_ready = |worker: &Value| worker["state"] == "ready";
        let workers = listed["workers"].as_array()?;
        workers.iter().all(is_ready).then_some(())
    });
}

fn complete(port: u16, prompt: &[u32]) -> Answer {
    let body = json!({"model": "sim", "prompt": prompt, "max_tokens": 2}).to_string();
    request(port, "POST", "/v1/completions", &body).unwrap()
}

fn cached(answer: &Answer) -> u64 {
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap()
}

fn worker(answer: &Answer) -> String {
    answer.header("x-kvlane-worker").unwrap().to_owned()
}

/// A prompt of 320 tokens whose first 304 are those of its family.
fn prompt(family: u32, tail: u32) -> Vec<u32> {
    let mut tokens: Vec<u32> = (0..304)
        .map(|token| 1_000 + family * 1_000 + token)
        .collect();
    tokens.extend((0..16).map(|token| 50_000 + tail * 16 + token));
    tokens
}

#[test]
fn repeats_reach_the_warm_worker() {
    let pair = Pair::start([&[], &[]]);
    let first: Vec<String> = (0..6)
        .map(|family| {
            let answer = pair.complete(&prompt(family, family));
            assert_eq!(cached(&answer), 0);
            worker(&answer)
        })
        .collect();
    assert!(
        first.contains(&"w1".to_owned()) && first.contains(&"w2".to_owned()),
        "{first:?}"
    );
    for tail in 10..16 {
        for family in 0..6u32 {
            let answer = pair.complete(&prompt(family, tail * 10 + family));
            assert_eq!(cached(&answer), 304);
            assert_eq!(worker(&answer), first[family as usize]);
        }
    }
    for name in ["w1", "w2"] {
        eventually("the streams are exact", || {
            (pair.trust(name)["state"] == "exact").then_some(())
        });
    }
}

#[test]
fn a_restarted_engine_is_not_credited_with_its_old_blocks() {
    let mut pair = Pair::start([&[], &[]]);
    let warm = worker(&pair.complete(&prompt(1, 1)));
    let index = usize::from(warm == "w2");
    eventually("the events arrived", || {
        let answer = pair.complete(&prompt(1, 2));
        (answer.header("x-kvlane-overlap-blocks") == Some("19")).then_some(())
    });
    pair.engines[index].kill();
    pair.engines[index] = pair.ports[index].start(&[]);
    eventually("the restart was noticed", || {
        let body = json!({"tokens": prompt(1, 3)}).to_string();
        let overlap = request(pair.admin, "POST", "/v1/overlap", &body)?;
        (overlap.status == 200 && !overlap.body.contains(&format!("\"{warm}\""))).then_some(())
    });
    let answer = pair.complete(&prompt(1, 4));
    assert_eq!(cached(&answer), 0);
    let again = pair.complete(&prompt(1, 5));
    assert_eq!((cached(&again), worker(&again)), (304, worker(&answer)));
}

#[test]
fn a_restarted_engine_without_events_is_not_credited_either() {
    restart_is_noticed(&["--index", "approximate"], |id, ports| {
        format!("id={id},url=http://127.0.0.1:{}", ports.http)
    });
}

#[test]
fn a_restarted_engine_without_replay_is_not_credited_either() {
    restart_is_noticed(&[], |id, ports| {
        format!(
            "id={id},url=http://127.0.0.1:{},events=tcp://127.0.0.1:{}",
            ports.http, ports.events
        )
    });
}

/// Restarts the warm engine while nobody asks it for anything: no event tells.
fn restart_is_noticed(extra: &[&str], describe: impl Fn(&str, Ports) -> String) {
    let ports = [Ports::free(), Ports::free()];
    let mut engines = [ports[0].start(&[]), ports[1].start(&[])];
    let workers = [describe("w1", ports[0]), describe("w2", ports[1])];
    let (_proxy, listen, admin) = serve_workers(&workers, extra);
    let warm = worker(&complete(listen, &prompt(1, 1)));
    let index = usize::from(warm == "w2");
    let credited = || {
        let body = json!({"tokens": prompt(1, 3)}).to_string();
        let overlap = request(admin, "POST", "/v1/overlap", &body)?;
        Some(overlap.body.contains(&format!("\"{warm}\"")))
    };
    assert_eq!(credited(), Some(true));
    // Its birth must have been read once to be seen to change.
    eventually("the capacity was read", || {
        let listed = request(admin, "GET", "/v1/workers", "")?.json();
        let read = |worker: &Value| worker["kv_capacity_blocks"] == 926;
        listed["workers"].as_array()?.iter().all(read).then_some(())
    });
    engines[index].kill();
    engines[index] = ports[index].start(&[]);
    eventually("the restart was noticed", || (!credited()?).then_some(()));
}

#[test]
fn a_silent_worker_is_named_and_still_hit() {
    let pair = Pair::start([&["--no-events"], &["--no-events"]]);
    let first: Vec<String> = (0..4)
        .map(|family| worker(&pair.complete(&prompt(family, family))))
        .collect();
    for tail in 1..12 {
        for family in 0..4u32 {
            let answer = pair.complete(&prompt(family, tail * 10 + family));
            assert_eq!(
                (cached(&answer), &worker(&answer)),
                (304, &first[family as usize])
            );
        }
        // New prompts are what a publishing engine would have announced.
        for fresh in 0..4 {
            pair.complete(&prompt(100 + tail * 4 + fresh, 900));
        }
    }
    for name in ["w1", "w2"] {
        let trust = eventually("the silence is named", || {
            Some(pair.trust(name)).filter(|trust| trust["state"] == "approximate")
        });
        assert!(
            trust["cause"].as_str().unwrap().contains("no KV event"),
            "{trust}"
        );
    }
    let metrics = request(pair.admin, "GET", "/metrics", "").unwrap().body;
    assert!(metrics.contains("approximate"), "{metrics}");
}

#[test]
fn a_late_router_recovers_the_index_through_replay() {
    let mut pair = Pair::start([&[], &[]]);
    let homes: Vec<String> = (0..6)
        .map(|family| worker(&pair.complete(&prompt(family, family))))
        .collect();
    pair.proxy.kill();
    let (proxy, listen, admin) = serve(pair.ports, &[]);
    (pair.proxy, pair.listen, pair.admin) = (proxy, listen, admin);
    for name in ["w1", "w2"] {
        eventually("the replay is through", || {
            (pair.trust(name)["state"] == "exact").then_some(())
        });
    }
    for family in 0..6u32 {
        let answer = pair.complete(&prompt(family, 700 + family));
        assert_eq!(
            (cached(&answer), &worker(&answer)),
            (304, &homes[family as usize])
        );
    }
}

#[test]
fn a_dead_worker_costs_no_request_and_a_removed_one_comes_back_empty() {
    let mut pair = Pair::start([&[], &[]]);
    pair.engines[0].kill();
    for family in 0..8 {
        let answer = pair.complete(&prompt(family, family));
        assert_eq!((answer.status, worker(&answer)), (200, "w2".to_owned()));
    }
    let removed = request(pair.admin, "DELETE", "/v1/workers/w2", "").unwrap();
    assert!(
        (200..300).contains(&removed.status),
        "{} {}",
        removed.status,
        removed.body
    );
    let none = pair.complete(&prompt(1, 1));
    assert!((502..=503).contains(&none.status), "{}", none.status);
    assert!(none.json()["error"]["message"].is_string());
}

#[test]
fn what_is_not_understood_stops_the_start_and_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvlane.yaml");
    std::fs::write(&file, "blok_size: 16\n").unwrap();
    let file = file.to_str().unwrap();
    let cases: [(&[&str], &str); 5] = [
        (&["serve", "--config", file], "blok_size"),
        (&["serve", "--worker", "id=w1,url=https://x:1"], "http"),
        (&["serve", "--worker", "id=w1,ulr=http://x:1"], "ulr"),
        (
            &["serve", "--worker", "id=w1,url=http://fd00::5:8000"],
            "fd00::5:8000",
        ),
        (&["serve", "--block-size", "0"], "block_size"),
    ];
    for (arguments, named) in cases {
        let output = run(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(
            said.contains(named) || said.contains(&named.replace('_', "-")),
            "{arguments:?}: {said}"
        );
    }
}

#[test]
fn a_termination_signal_ends_the_proxy_in_order() {
    let mut pair = Pair::start([&[], &[]]);
    assert_eq!(cached(&pair.complete(&prompt(1, 1))), 0);
    assert_eq!(pair.proxy.terminate(), Some(0));
}
