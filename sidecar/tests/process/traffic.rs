//! Requests through the proxy while engines are killed and while the sidecar ends.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::world::{
    KVLANE, Machine, QUICK, Sidecar, answer_without_capacity, exchange, kill, unique, within,
    without_capacity,
};

const COMPLETIONS: &str = "/v1/completions";

/// A template whose engines take 20 ms for a token.
fn slow(name: &str, replicas: usize) -> String {
    format!(
        "name: {name}, replicas: {replicas}, command: [{KVLANE}, engine, --listen, '127.0.0.1:{{port}}', --events, 'tcp://127.0.0.1:{{events_port}}', --replay, 'tcp://127.0.0.1:{{replay_port}}', --model-name, sim, --decode-ms, 20], {QUICK}"
    )
}

fn completion(number: u32, tokens: u32, stream: bool) -> String {
    let prompt: Vec<u32> = (number * 1000..number * 1000 + 64).collect();
    json!({"model": "sim", "prompt": prompt, "max_tokens": tokens, "ignore_eos": true, "stream": stream}).to_string()
}

/// Waits until the proxy has so many workers to choose from.
pub(crate) fn until_ready(sidecar: &Sidecar, workers: usize) {
    let are_there = within(Duration::from_secs(60), || {
        let (_, list) = sidecar.get("/v1/workers");
        let list = list["workers"].as_array().unwrap().clone();
        list.iter()
            .filter(|worker| worker["state"] == "ready")
            .count()
            == workers
    });
    assert!(
        are_there,
        "{} {:#?}",
        sidecar.get("/v1/workers").1,
        sidecar.log()
    );
}

fn pid(process: &Value) -> u32 {
    u32::try_from(process["pid"].as_u64().unwrap()).unwrap()
}

#[test]
fn requests_on_a_killed_engine_are_served_by_another_and_it_comes_back() {
    let (machine, name) = (Machine::new(), unique());
    let sidecar = machine.serve(&[slow(&name, 2)]);
    until_ready(&sidecar, 2);
    let proxy = sidecar.proxy;
    // 40 tokens take 0.8 s; the engine is killed while some of them run, on a machine that stalls those of another try.
    let ask = || {
        let ask =
            move |number| exchange(proxy, "POST", COMPLETIONS, &completion(number, 40, false));
        let clients = (0..8).map(|number| std::thread::spawn(move || ask(number)));
        clients.collect::<Vec<_>>()
    };
    let mut clients = ask();
    let are_busy = within(Duration::from_secs(60), || {
        if clients.iter().all(std::thread::JoinHandle::is_finished) {
            clients = ask();
        }
        let (_, list) = sidecar.get("/v1/workers");
        list["workers"]
            .as_array()
            .unwrap()
            .iter()
            .all(|worker| worker["in_flight"].as_u64() > Some(0))
    });
    assert!(are_busy, "both have work");
    let first = format!("{name}-0");
    let old = pid(&sidecar.process(&first));
    kill("KILL", &[old]);
    for client in clients {
        let (status, answer) = client.join().unwrap();
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["usage"]["completion_tokens"], 40, "{answer}");
    }
    sidecar.until_back(&first, old);
    until_ready(&sidecar, 2);
    for number in 10..30 {
        let (status, _) = exchange(proxy, "POST", COMPLETIONS, &completion(number, 1, false));
        assert_eq!(status, 200);
    }
    let (_, workers) = sidecar.get("/v1/workers");
    for worker in workers["workers"].as_array().unwrap() {
        assert_eq!(worker["in_flight"], 0, "{worker}");
        assert_eq!(
            worker["active_requests"].as_u64().unwrap_or(0),
            0,
            "{worker}"
        );
    }
}

#[test]
fn a_stream_whose_engine_is_killed_ends_at_once_and_says_why() {
    let (machine, name) = (Machine::new(), unique());
    let sidecar = machine.serve(&[slow(&name, 1)]);
    until_ready(&sidecar, 1);
    let mut stream = open(sidecar.proxy, &completion(1, 500, true));
    let begun = read_until(&mut stream, |text| text.matches("data: ").count() >= 3);
    let name = format!("{name}-0");
    let old = pid(&sidecar.process(&name));
    kill("KILL", &[old]);
    let killed = Instant::now();
    let rest = read_until(&mut stream, |_| false);
    assert!(
        killed.elapsed() < Duration::from_secs(5),
        "{:?}",
        killed.elapsed()
    );
    assert!(begun.starts_with("HTTP/1.1 200"), "{begun}");
    assert!(
        !rest.contains("[DONE]") && rest.contains("\"error\""),
        "{rest}"
    );
    // Nobody serves: that is said, too.
    let (status, answer) = exchange(sidecar.proxy, "POST", COMPLETIONS, &completion(2, 1, false));
    assert!([200, 502, 503].contains(&status), "{status} {answer}");
    assert!(
        status == 200 || answer["error"]["message"].is_string(),
        "{answer}"
    );
    sidecar.until_back(&name, old);
    until_ready(&sidecar, 1);
    assert_eq!(
        exchange(sidecar.proxy, "POST", COMPLETIONS, &completion(3, 1, false)).0,
        200
    );
}

#[test]
fn a_terminated_sidecar_finishes_its_requests_before_it_ends_its_engines() {
    let (machine, name) = (Machine::new(), unique());
    let mut sidecar = machine.serve(&[slow(&name, 1)]);
    until_ready(&sidecar, 1);
    let mut stream = open(sidecar.proxy, &completion(1, 60, true));
    let begun = read_until(&mut stream, |text| text.contains("data: "));
    kill("TERM", &[sidecar.child.id()]);
    let rest = read_until(&mut stream, |_| false);
    assert!(
        rest.contains("[DONE]"),
        "{begun} {rest}\n{:#?}",
        sidecar.log()
    );
    assert_eq!(sidecar.exit_within(Duration::from_secs(30)), 0);
    sidecar.nothing_is_left(&[]);
    let log = sidecar.log();
    assert!(
        log.iter().all(|line| !line.contains("engine failed")),
        "{log:#?}"
    );
}

#[test]
fn an_engine_that_starts_gets_no_requests_before_it_is_ready() {
    let (machine, name) = (Machine::new(), unique());
    let half = format!(
        "name: {name}half, command: {}, {QUICK}",
        without_capacity(&machine)
    );
    let sidecar = machine.serve(&[slow(&name, 1), half]);
    answer_without_capacity(&machine);
    until_ready(&sidecar, 1);
    let are_healthy = within(Duration::from_secs(60), || {
        let (_, list) = sidecar.get("/v1/workers");
        let list = list["workers"].as_array().unwrap().clone();
        list.iter()
            .filter(|worker| worker["healthy"] == true)
            .count()
            == 2
    });
    assert!(are_healthy, "{:#?}", sidecar.log());
    for number in 0..10 {
        let (status, answer) = exchange(
            sidecar.proxy,
            "POST",
            COMPLETIONS,
            &completion(number, 1, false),
        );
        assert_eq!(status, 200, "{answer}");
    }
    assert_eq!(
        sidecar.process(&format!("{name}half-0"))["state"],
        "starting"
    );
}

fn open(address: SocketAddr, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    stream
}

/// Reads until what came is enough, or the other side ends.
fn read_until(stream: &mut TcpStream, is_enough: impl Fn(&str) -> bool) -> String {
    let mut text = String::new();
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece) {
            Ok(count @ 1..) => text.push_str(&String::from_utf8_lossy(&piece[..count])),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => return text,
        }
        if is_enough(&text) {
            return text;
        }
    }
}
