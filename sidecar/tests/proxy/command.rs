//! The command itself: exit codes, signals, log lines.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::client::{CHAT, chat, post, request};
use crate::mock::{Hold, Mock, Step, json};
use crate::setup::eventually;

fn kvlane(flags: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
    command
        .arg("serve")
        .args(flags)
        .env("RUST_LOG", "info")
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

/// A running `kvlane serve`, killed when dropped.
struct Running {
    child: Child,
    proxy: SocketAddr,
    admin: SocketAddr,
    log: std::thread::JoinHandle<Vec<String>>,
}

impl Running {
    fn start(flags: &[&str]) -> Self {
        let mut all = vec!["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"];
        all.extend(flags);
        let mut child = kvlane(&all).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, addresses) = std::sync::mpsc::channel();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let log = std::thread::spawn(move || {
            let mut log = Vec::new();
            for line in lines.map_while(Result::ok) {
                if line.contains("listening") {
                    let _ = sender.send(line.clone());
                }
                log.push(line);
            }
            log
        });
        let line = addresses
            .recv_timeout(Duration::from_secs(60))
            .expect("it listens");
        let after = |name: &str| {
            let (_, rest) = line.split_once(name).unwrap();
            rest.split_whitespace().next().unwrap().parse().unwrap()
        };
        Self {
            proxy: after("proxy="),
            admin: after("admin="),
            child,
            log,
        }
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        assert!(
            Command::new("kill")
                .args(["-s", name, &id])
                .status()
                .unwrap()
                .success()
        );
    }

    async fn exit_within(&mut self, limit: Duration) -> i32 {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap();
            }
            assert!(start.elapsed() < limit, "still running after {limit:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whoever is told that a program is there may end it at once.
#[test]
fn what_has_said_that_it_is_there_ends_in_order() {
    for (flags, says) in [
        (&["engine", "--listen", "127.0.0.1:0"][..], "serves"),
        (&["link", "listen", "--bind", "127.0.0.1:0"], "waiting"),
        (
            &[
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--admin",
                "127.0.0.1:0",
                "--worker",
                "id=w1,url=http://127.0.0.1:9",
            ],
            "listening",
        ),
    ] {
        for name in ["TERM", "INT"] {
            let mut child = Command::new(env!("CARGO_BIN_EXE_kvlane"))
                .args(flags)
                .env("RUST_LOG", "info")
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
            let said = lines.find(|line| line.as_ref().unwrap().contains(says));
            assert!(said.is_some(), "{flags:?} ends by itself");
            let id = child.id().to_string();
            let sent = Command::new("kill").args(["-s", name, &id]).status();
            assert!(sent.unwrap().success());
            // What it still says has to go somewhere.
            let rest: Vec<String> = lines.map_while(Result::ok).collect();
            let status = child.wait().unwrap();
            assert_eq!(
                status.code(),
                Some(0),
                "{flags:?} {name}: {status} {rest:?}"
            );
        }
    }
}

#[test]
fn refused_configuration_exits_with_2_and_names_the_key() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvlane.yaml");
    std::fs::write(&file, "listen: 127.0.0.1:0\nblok_size: 16\n").unwrap();
    for (flags, word) in [
        (vec!["--config", file.to_str().unwrap()], "blok_size"),
        (vec!["--policy", "fastest"], "--policy"),
        (vec!["--block-size", "0"], "block_size"),
        (
            vec!["--worker", "id=w1,url=http://fd00::5:8000"],
            "without brackets",
        ),
        (vec!["--admin", "0.0.0.0:0"], "admin_key"),
        (vec!["--nonsense"], "--nonsense"),
    ] {
        let output = kvlane(&flags).stderr(Stdio::piped()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {text}");
        assert!(text.contains(word), "{flags:?}: {text}");
    }
}

#[tokio::test]
async fn a_signal_ends_it_after_its_requests_and_a_second_at_once() {
    let hold = Hold::new();
    let held = hold.clone();
    let worker =
        Mock::start(move |_| vec![Step::Until(held.clone()), Step::Send(json(200, "{}"))]).await;
    let flag = format!("id=w1,url={}", worker.url());
    let mut running = Running::start(&["--worker", &flag]);
    let proxy = running.proxy;
    let open = tokio::spawn(async move { post(proxy, CHAT, "{}").await.status });
    eventually("sent", || async { worker.count() == 1 }).await;
    running.signal("TERM");
    until_unready(&running).await;
    hold.release(1);
    assert_eq!(open.await.unwrap(), 200);
    assert_eq!(running.exit_within(Duration::from_secs(20)).await, 0);

    worker.set_script(|_| vec![Step::Hang]);
    let mut running = Running::start(&["--worker", &flag]);
    let proxy = running.proxy;
    tokio::spawn(async move { post(proxy, CHAT, "{}").await.status });
    eventually("sent", || async { worker.count() == 2 }).await;
    running.signal("INT");
    // It has the first one: two that come together may be one.
    until_unready(&running).await;
    assert!(
        running.child.try_wait().unwrap().is_none(),
        "it waits for the open request"
    );
    running.signal("INT");
    running.exit_within(Duration::from_secs(20)).await;
}

/// Waits until it drains.
async fn until_unready(running: &Running) {
    let admin = running.admin;
    eventually("unready while it drains", || async {
        request(admin, "GET", "/readyz", &[], b"").await.status == 503
    })
    .await;
}

#[tokio::test]
async fn a_missing_tokenizer_is_said_in_exactly_one_line() {
    let worker = Mock::ok().await;
    let flag = format!("id=w1,url={}", worker.url());
    let mut running = Running::start(&["--worker", &flag, "--model", "/nonexistent/model"]);
    for number in 0..100 {
        assert_eq!(
            post(running.proxy, CHAT, &chat(number, false)).await.status,
            200
        );
    }
    let metrics = request(running.admin, "GET", "/metrics", &[], b"")
        .await
        .text();
    assert!(metrics.contains("kvlane_tokenizer_degraded 1"));
    running.signal("TERM");
    running.exit_within(Duration::from_secs(20)).await;
    let log = std::mem::replace(&mut running.log, std::thread::spawn(Vec::new))
        .join()
        .unwrap();
    let said: Vec<_> = log
        .iter()
        .filter(|line| line.contains("/nonexistent/model"))
        .collect();
    assert_eq!(said.len(), 1, "{log:#?}");
}
