//! Engines that move KV with NIXL, alone and behind the proxy.

use std::io::Write as _;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::process::{Running, metric, post, send};

/// KV bytes of a 0.6B model's token.
const KV_BYTES: usize = 114_688;

/// A simulated engine and its address.
struct Engine {
    process: Running,
    address: String,
}

impl Engine {
    fn start(role: &str, flags: &[&str], environment: &[(&str, &str)]) -> Self {
        let fixed = ["engine", "--listen", "127.0.0.1:0", "--role", role];
        let quick: &[&str] = if flags.contains(&"--speed") {
            &[]
        } else {
            &["--speed", "1000"]
        };
        let process = Running::start(&[&fixed[..], quick, flags].concat(), environment);
        let address = process.after("url=\"http://");
        Self { process, address }
    }

    fn moved(&self, means: &str) -> u64 {
        let name = format!("kvlane_engine_moved_bytes_total{{transport=\"{means}\"}}");
        metric(&self.address, &name)
    }

    fn refused(&self, reason: &str) -> u64 {
        let name = format!("kvlane_engine_refused_fetches_total{{reason=\"{reason}\"}}");
        metric(&self.address, &name)
    }

    /// Waits until another engine reads what this one holds; false when that is over before it was seen.
    fn is_read(&self, fetch: &std::thread::ScopedJoinHandle<'_, (u16, String)>) -> bool {
        loop {
            if metric::<u64>(&self.address, "kvlane_engine_moving_prefills") > 0 {
                return true;
            }
            if fetch.is_finished() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until it holds so many prompts: it hears of a fetch's end a moment after the client does.
    fn until_held(&self, prompts: u64) {
        until("held prompts", prompts, || {
            metric(&self.address, "kvlane_engine_held_prefills")
        });
    }
}

fn until(what: &str, wanted: u64, count: impl Fn() -> u64) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while count() != wanted {
        assert!(
            Instant::now() < deadline,
            "{} {what}, not {wanted}",
            count()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn prompt(first: u32, tokens: u32) -> Value {
    json!((first..first + tokens).collect::<Vec<u32>>())
}

fn prefill(engine: &Engine, prompt: &Value) -> Value {
    let body = json!({"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}});
    let (status, text) = post(&engine.address, &body);
    assert_eq!(status, 200, "{text}");
    let mut answer: Value = serde_json::from_str(&text).unwrap();
    answer["kv_transfer_params"].take()
}

fn decode(engine: &Engine, prompt: &Value, parameters: &Value) -> (u16, String) {
    let body = json!({"prompt": prompt, "max_tokens": 5, "kv_transfer_params": parameters});
    post(&engine.address, &body)
}

fn text(answer: &str) -> String {
    let answer: Value = serde_json::from_str(answer).unwrap();
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

#[test]
fn a_prompts_blocks_are_read_out_of_the_other_process() {
    let bytes = KV_BYTES.to_string();
    let flags = [
        "--kv-transport",
        "nixl",
        "--kv-bytes-per-token",
        bytes.as_str(),
    ];
    let p = Engine::start("prefill", &flags, &[]);
    let d = Engine::start("decode", &flags, &[]);
    let alone = Engine::start("both", &[], &[]);
    // The last has the first's blocks but one, which it finds in its cache: they lie where they were written.
    for (number, (first, tokens)) in [(0, 500), (10_000, 1_500), (0, 490)]
        .into_iter()
        .enumerate()
    {
        let prompt = prompt(first, tokens);
        let parameters = prefill(&p, &prompt);
        p.until_held(1);
        let (status, answer) = decode(&d, &prompt, &parameters);
        assert_eq!(status, 200, "{answer}");
        let body = json!({"prompt": prompt, "max_tokens": 5});
        assert_eq!(text(&answer), text(&post(&alone.address, &body).1));
        let fetched: u64 = metric(&d.address, "kvlane_engine_fetched_total");
        assert_eq!(fetched, number as u64 + 1);
    }
    // 500 + 1,500 + 490 tokens.
    assert_eq!(d.moved("nixl"), 2_490 * KV_BYTES as u64);
    assert_eq!((d.moved("tcp"), d.refused("damaged")), (0, 0));
    p.until_held(0);
    // UCX's exit handlers ran.
    assert_eq!((d.process.stop(), p.process.stop()), (Some(0), Some(0)));
}

#[test]
fn an_engine_with_nixl_and_one_without_understand_each_other() {
    for (first, second) in [("nixl", "tcp"), ("tcp", "nixl")] {
        let p = Engine::start("prefill", &["--kv-transport", first], &[]);
        let d = Engine::start("decode", &["--kv-transport", second], &[]);
        let prompt = prompt(7, 100);
        let (status, answer) = decode(&d, &prompt, &prefill(&p, &prompt));
        assert_eq!(status, 200, "{answer}");
        assert_eq!((d.moved("tcp"), d.moved("nixl")), (6_400, 0));
        assert_eq!((d.process.stop(), p.process.stop()), (Some(0), Some(0)));
    }
}

#[test]
fn without_the_library_kv_moves_over_tcp_and_a_line_says_so() {
    let missing = ["--nixl-lib", "/nowhere/libnixl_capi.so"];
    let p = Engine::start("prefill", &missing, &[]);
    let line = "KV moves over TCP: NIXL is not used";
    assert!(p.process.said().contains(line), "{}", p.process.said());
    assert!(p.process.said().contains("/nowhere/libnixl_capi.so"));
    let d = Engine::start("decode", &missing, &[]);
    let prompt = prompt(7, 100);
    let (status, answer) = decode(&d, &prompt, &prefill(&p, &prompt));
    assert_eq!((status, d.moved("tcp")), (200, 6_400), "{answer}");
    assert_eq!((d.process.stop(), p.process.stop()), (Some(0), Some(0)));

    let asked = [
        "engine",
        "--listen",
        "127.0.0.1:0",
        "--role",
        "decode",
        "--kv-transport",
        "nixl",
    ];
    let mut refused = Running::start(&[&asked[..], &missing].concat(), &[]);
    assert_eq!(refused.wait(), Some(1));
    refused.after("KV cannot move with NIXL: NIXL is not available: there is no file /nowhere/");
}

#[test]
fn a_library_that_lacks_a_symbol_is_named_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("part.c");
    let mut file = std::fs::File::create(&source).unwrap();
    writeln!(
        file,
        "int nixl_capi_create_agent(const char *name, void **agent) {{ return -2; }}"
    )
    .unwrap();
    let part = folder.path().join("libnixl_capi.so");
    let built = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&part, &source])
        .status();
    assert!(built.unwrap().success());
    let text = folder.path().join("text.so");
    std::fs::write(&text, "no library").unwrap();
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    for (library, says) in [
        (path(&part), "lacks the symbol nixl_capi_destroy_agent"),
        (
            "/lib/x86_64-linux-gnu/libm.so.6".to_owned(),
            "lacks the symbol nixl_capi_create_agent",
        ),
        (path(&text), "cannot load"),
    ] {
        let engine = Engine::start("decode", &["--nixl-lib", &library], &[]);
        assert!(
            engine.process.said().contains(says),
            "{}",
            engine.process.said()
        );
        assert!(engine.process.said().contains(&library));
        assert_eq!(engine.process.stop(), Some(0));
    }
}

/// A transport that is slow enough to be interrupted.
const SLOW: [(&str, &str); 1] = [("UCX_TLS", "tcp,self")];

#[test]
fn a_holder_that_dies_while_blocks_move_is_a_clean_failure() {
    // On a machine that stalls they may have moved before anyone looks.
    let was_interrupted = (0..10).any(|_| dies_while_blocks_move());
    assert!(
        was_interrupted,
        "it was over before it could be interrupted"
    );
}

/// Kills an engine while another reads its blocks; false when it had read them by then.
fn dies_while_blocks_move() -> bool {
    let bytes = KV_BYTES.to_string();
    let flags = ["--kv-bytes-per-token", bytes.as_str()];
    let mut p = Engine::start("prefill", &flags, &SLOW);
    let other = Engine::start("prefill", &flags, &SLOW);
    let d = Engine::start("decode", &flags, &SLOW);
    // 460 MB, half a second at least.
    let long = prompt(0, 4_000);
    let parameters = prefill(&p, &long);
    let (answer, waited) = std::thread::scope(|scope| {
        let fetch = scope.spawn(|| decode(&d, &long, &parameters));
        p.is_read(&fetch);
        p.process.kill();
        let killed = Instant::now();
        (fetch.join().unwrap(), killed.elapsed())
    });
    if answer.0 == 200 {
        return false;
    }
    assert_eq!(answer.0, 500, "{}", answer.1);
    assert!(answer.1.contains("unreachable"), "{}", answer.1);
    // At once, that is; the lease is three times as long.
    assert!(waited < Duration::from_secs(10), "{waited:?}");
    // The decoder serves on, with NIXL.
    let short = prompt(20_000, 100);
    let (status, answer) = decode(&d, &short, &prefill(&other, &short));
    assert_eq!(
        (status, d.moved("nixl")),
        (200, 100 * KV_BYTES as u64),
        "{answer}"
    );
    assert_eq!((d.process.stop(), other.process.stop()), (Some(0), Some(0)));
    true
}

#[test]
fn what_a_decoder_that_died_did_not_fetch_is_fetched_by_another() {
    // About one of twenty times UCX itself aborts the side that is read from, when its TCP transport finds the reader gone; and
    // on a machine that stalls all may be read before anyone looks.
    let was_fetched = (0..10).any(|_| fetched_by_another());
    assert!(was_fetched, "UCX aborted the prefill engine each time");
}

/// Kills a decoder that fetches and lets another fetch; false when it had fetched by then, or UCX aborted the prefill engine.
fn fetched_by_another() -> bool {
    let bytes = KV_BYTES.to_string();
    let flags = ["--kv-bytes-per-token", bytes.as_str()];
    let mut p = Engine::start("prefill", &flags, &SLOW);
    let mut dying = Engine::start("decode", &flags, &SLOW);
    let d = Engine::start("decode", &flags, &SLOW);
    let long = prompt(0, 3_000);
    let parameters = prefill(&p, &long);
    let was_interrupted = std::thread::scope(|scope| {
        let address = dying.address.clone();
        let body = json!({"prompt": long, "max_tokens": 5, "kv_transfer_params": parameters});
        let fetch = scope.spawn(move || {
            // Its answer breaks off.
            let sent = || send(&address, "POST", "/v1/completions", &body.to_string());
            std::panic::catch_unwind(sent).unwrap_or_default()
        });
        p.is_read(&fetch);
        dying.process.kill();
        fetch.join().unwrap().0 != 200
    });
    if !was_interrupted {
        return false;
    }
    let mut is_aborted = p.process.has_ended();
    let fetched = (!is_aborted).then(|| decode(&d, &long, &parameters));
    // UCX may have taken its time.
    is_aborted |=
        fetched.as_ref().is_some_and(|(status, _)| *status != 200) && p.process.has_ended();
    if is_aborted {
        let said = p.process.said();
        assert!(said.contains("Fatal: unexpected error: Endpoint"), "{said}");
        return false;
    }
    let (status, answer) = fetched.unwrap();
    assert_eq!(
        (status, d.moved("nixl")),
        (200, 3_000 * KV_BYTES as u64),
        "{answer}"
    );
    assert_eq!((d.process.stop(), p.process.stop()), (Some(0), Some(0)));
    true
}

/// Splits prompts while a stream runs.
const SPLITS: &str = "handoff: {kv_bytes_per_token: 4096, link_bytes_per_second: 1e12, planner: \
    {itl_objective_seconds: 1e-6, assumed_prefill_tokens_per_second: 1000, transfer_stall_seconds_per_token: 0}}";

#[test]
fn two_prefill_and_two_decode_workers_serve_behind_the_proxy() {
    let flags = ["--kv-transport", "nixl", "--kv-bytes-per-token", "4096"];
    let start = |role| Engine::start(role, &flags, &[]);
    let prefills = [start("prefill"), start("prefill")];
    // Slower, so that the streams that are to be spared last.
    let slow = [&flags[..], &["--speed", "1"]].concat();
    let decodes = [(); 2].map(|()| Engine::start("decode", &slow, &[]));
    let workers: Vec<String> = [("prefill", &prefills), ("decode", &decodes)]
        .into_iter()
        .flat_map(|(role, engines)| {
            engines.iter().enumerate().map(move |(number, engine)| {
                let url = format!("http://{}", engine.address);
                format!("- {{id: {role}{number}, url: '{url}', role: {role}}}\n")
            })
        })
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvlane.yaml");
    let yaml = format!(
        "listen: '127.0.0.1:0'\nadmin: '127.0.0.1:0'\n{SPLITS}\nworkers:\n{}",
        workers.concat()
    );
    std::fs::write(&file, yaml).unwrap();
    let proxy = Running::start(&["serve", "--config", file.to_str().unwrap()], &[]);
    let address = proxy.after(PROXY_LINE);
    let ask = |first: u32, tokens: u32, output: u32, stream: bool| {
        let body = json!({"prompt": prompt(first, tokens), "max_tokens": output, "stream": stream});
        let (status, answer) = post(&address, &body);
        assert_eq!(status, 200, "{answer}");
    };
    let ask = &ask;
    std::thread::scope(|scope| {
        for stream in 0..4 {
            scope.spawn(move || ask(100_000 + 1_000 * stream, 64, 1_500, true));
        }
        std::thread::sleep(Duration::from_millis(500));
        // Which worker is taken is a decision; both are sooner or later.
        let both = || {
            decodes
                .iter()
                .all(|engine| engine.moved("nixl") > 1_000 * 4_096)
        };
        for round in 0..10 {
            let requests: Vec<_> = (0..4)
                .map(|number| {
                    scope.spawn(move || ask(2_000 * (4 * round + number), 1_000, 3, false))
                })
                .collect();
            requests
                .into_iter()
                .for_each(|request| request.join().unwrap());
            if both() {
                return;
            }
        }
        panic!("some decode worker fetched nothing");
    });
    let sum = |engines: &[Engine], name: &str| -> u64 {
        engines
            .iter()
            .map(|engine| metric::<u64>(&engine.address, name))
            .sum()
    };
    let fetched = sum(&decodes, "kvlane_engine_fetched_total");
    until("collected prompts", fetched, || {
        sum(&prefills, "kvlane_engine_collected_total")
    });
    let moved = |means| {
        decodes
            .iter()
            .map(|engine| engine.moved(means))
            .sum::<u64>()
    };
    assert_eq!(moved("tcp"), 0);
    // Whole prompts, of 64 and 1,000 tokens.
    assert_eq!(moved("nixl") % (8 * 4_096), 0);
    for engine in prefills.iter().chain(&decodes) {
        for reason in ["damaged", "used", "foreign", "unreachable"] {
            assert_eq!(engine.refused(reason), 0, "{reason}");
        }
    }
    assert_eq!(proxy.stop(), Some(0));
    for engine in prefills.into_iter().chain(decodes) {
        assert_eq!(engine.process.stop(), Some(0));
    }
}

/// What the proxy says before its address.
const PROXY_LINE: &str = "proxy=";
