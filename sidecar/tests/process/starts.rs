//! Starts that succeed, starts that do not, and what is told of them.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value;

use crate::world::{
    Machine, QUICK, answer_without_capacity, engine, exchange, kill, shell, unique, within,
    without_capacity,
};

#[test]
fn engines_start_on_their_own_ports_and_gpus_and_are_shown() {
    let machine = Machine::new();
    let name = unique();
    let script = "echo gpus=$CUDA_VISIBLE_DEVICES order=$CUDA_DEVICE_ORDER index=$INDEX; pwd; exec $ENGINE --events tcp://127.0.0.1:$EVENTS";
    let command = shell(script).replace("PORT:", "EVENTS: '{events_port}', PORT:");
    let template = format!(
        "name: {name}, command: {command}, gpus: [[MIG-a, MIG-b], MIG-c], role: decode, labels: {{zone: a}}, cwd: /proc, {QUICK}"
    );
    let sidecar = machine.serve(&[template]);
    let mut ports = BTreeSet::new();
    for (index, gpus) in [(0, "MIG-a,MIG-b"), (1, "MIG-c")] {
        let name = format!("{name}-{index}");
        let process = sidecar.until(&name, "serving");
        let own = process["ports"].as_object().unwrap();
        ports.extend(own.values().map(|port| port.as_u64().unwrap()));
        assert_eq!(
            process["gpus"].as_array().unwrap().len(),
            gpus.split(',').count()
        );
        assert_eq!(process["url"], format!("http://127.0.0.1:{}", own["port"]));
        let address = process["url"].as_str().unwrap()["http://".len()..]
            .parse()
            .unwrap();
        assert_eq!(exchange(address, "GET", "/v1/models", "").0, 200);
        let (status, log) = sidecar.get(&format!("/v1/processes/{name}/log"));
        assert_eq!(status, 200);
        let expected = format!("gpus={gpus} order=PCI_BUS_ID index={index}");
        let lines: Vec<&str> = log["lines"]
            .as_array()
            .unwrap()
            .iter()
            .map(|line| line.as_str().unwrap())
            .collect();
        assert!(
            lines.contains(&expected.as_str()) && lines.contains(&"/proc"),
            "{lines:#?}"
        );
        assert!(
            lines
                .iter()
                .any(|line| line.contains("simulated engine serves")),
            "{lines:#?}"
        );
    }
    assert_eq!(ports.len(), 4, "two engines with two ports each");
    let log = sidecar.log();
    assert!(
        log.iter().all(|line| !line.contains("is not healthy")),
        "one that starts has not failed: {log:#?}"
    );
    sidecar.says(&["all engines are ready", "engines=2"]);
    let (status, nobody) = sidecar.get(&format!("/v1/processes/{name}-7/log"));
    assert_eq!(status, 404);
    assert!(
        nobody.to_string().contains("GET /v1/processes lists"),
        "{nobody}"
    );
    assert_eq!(sidecar.get("/v1/processes/log").0, 404);
    // Parts of a card are not in NVML's list of cards, so this holds with a driver and without.
    if let Some(why) = sidecar.report()["gpus"]["error"].as_str() {
        let log = sidecar.log();
        let said = log.iter().filter(|line| line.contains("libnvidia-ml"));
        assert!(
            why.contains("libnvidia-ml.so.1") && said.count() == 1,
            "{log:#?}"
        );
    }
}

#[test]
fn a_worker_that_does_not_get_ready_is_named_and_the_others_serve() {
    let machine = Machine::new();
    let name = unique();
    let script = "if [ $INDEX = 1 ]; then echo loading shard 7 of 9; sleep 1000; fi; exec $ENGINE";
    let template = format!(
        "name: {name}, replicas: 3, ready_seconds: 4, command: {}, stop_seconds: 2, restart: {{initial_seconds: 60}}",
        shell(script)
    );
    let sidecar = machine.serve(&[template]);
    for index in [0, 2] {
        sidecar.until(&format!("{name}-{index}"), "serving");
    }
    let missing = format!("{name}-1");
    let line = sidecar.says(&["engines are missing", "ready=2", "of=3", &missing]);
    assert!(line.contains("was not ready within 4 seconds"), "{line}");
    assert!(line.contains("last lines: loading shard 7 of 9"), "{line}");
    assert!(line.contains("/health"), "{line}");
    let process = sidecar.until(&missing, "pausing");
    assert!(
        process["last_error"]
            .as_str()
            .unwrap()
            .contains("loading shard 7"),
        "{process}"
    );
    for index in [0, 2] {
        let process = sidecar.process(&format!("{name}-{index}"));
        assert_eq!(
            (&process["state"], &process["restarts"]),
            (&"serving".into(), &0.into())
        );
    }
}

#[test]
fn a_process_that_listens_and_tells_no_capacity_is_not_ready() {
    let machine = Machine::new();
    let name = unique();
    let template = format!(
        "name: {name}, ready_seconds: 4, command: {}, {QUICK}",
        without_capacity(&machine)
    );
    let sidecar = machine.serve(&[template]);
    answer_without_capacity(&machine);
    let line = sidecar.says(&["engine failed", &name]);
    assert!(
        line.contains("/metrics does not tell the KV capacity"),
        "{line}"
    );
}

#[test]
fn failures_are_tried_again_with_pauses_and_given_up_with_the_reason() {
    let machine = Machine::new();
    let name = unique();
    let count = machine.path("count");
    let script = format!(
        "echo x >> {}; echo out of memory on card 3; exit 1",
        count.display()
    );
    let template = format!("name: {name}, command: {}, {QUICK}", shell(&script));
    let sidecar = machine.serve(&[template]);
    let process = sidecar.until(&format!("{name}-0"), "gave-up");
    let why = process["last_error"].as_str().unwrap();
    for word in [
        "failed 4 times within 600 seconds",
        "exited with code 1 before it was ready",
        "out of memory on card 3",
    ] {
        assert!(why.contains(word), "{why}");
    }
    assert_eq!(process["restarts"], 3);
    assert_eq!(std::fs::read_to_string(&count).unwrap().lines().count(), 4);
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(
        std::fs::read_to_string(&count).unwrap().lines().count(),
        4,
        "given up means it"
    );
    assert!(sidecar.marked().is_empty());
}

#[test]
fn a_wrong_command_is_not_tried_again() {
    let machine = Machine::new();
    let names = [(); 4].map(|()| unique());
    let count = machine.path("count");
    let usage = shell(&format!(
        "echo x >> {}; echo unknown flag --foo; exit 2",
        count.display()
    ));
    let sidecar = machine.serve(&[
        format!("name: {}, command: [/nonexistent/vllm, serve, '{{port}}'], {QUICK}", names[0]),
        format!("name: {}, command: {usage}, {QUICK}", names[1]),
        format!("name: {}, command: [/proc/version, '{{port}}'], {QUICK}", names[2]),
        format!("name: {}, command: [{}, engine, --listen, '127.0.0.1:{{port}}', --kv-blocks, many], {QUICK}", names[3], crate::world::KVLANE),
    ]);
    for (name, word) in names.iter().zip([
        "No such file",
        "unknown flag --foo",
        "Permission denied",
        "--kv-blocks",
    ]) {
        let process = sidecar.until(&format!("{name}-0"), "gave-up");
        let why = process["last_error"].as_str().unwrap();
        assert!(
            why.contains("its command is wrong") && why.contains(word),
            "{why}"
        );
        assert_eq!(process["restarts"], 0);
    }
    assert_eq!(std::fs::read_to_string(&count).unwrap().lines().count(), 1);
}

#[test]
fn an_engine_that_served_and_ended_is_tried_again_whatever_its_code() {
    let machine = Machine::new();
    let name = unique();
    // Ends with 2, but not because of its command: it had served.
    let script =
        "$ENGINE & engine=$!; trap 'kill $engine; exit 2' USR1; while :; do sleep 0.05; done";
    let sidecar = machine.serve(&[format!("name: {name}, command: {}, {QUICK}", shell(script))]);
    let name = format!("{name}-0");
    let pid = sidecar.until(&name, "serving")["pid"].as_u64().unwrap();
    let pid = u32::try_from(pid).unwrap();
    kill("USR1", &[pid]);
    let process = sidecar.until_back(&name, pid);
    assert_eq!(process["last_exit"], "exited with code 2", "{process}");
}

#[test]
fn engines_of_one_model_start_one_by_one_until_it_is_there() {
    let machine = Machine::new();
    let name = unique();
    // Until it was seen that one starts and the other waits.
    let go = machine.path("go");
    let script = format!(
        "while [ ! -e {} ]; do sleep 0.05; done; exec $ENGINE",
        go.display()
    );
    let sidecar = machine.serve(&[format!(
        "name: {name}, replicas: 2, model: {name}/m, command: {}, {QUICK}",
        shell(&script)
    )]);
    let mut seen_waiting = false;
    let all_serve = within(Duration::from_secs(60), || {
        let report = sidecar.report();
        let states: Vec<&Value> = report["processes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|process| &process["state"])
            .collect();
        let count = |state: &str| states.iter().filter(|found| **found == state).count();
        if count("serving") == 0 {
            assert!(count("starting") <= 1, "{states:?}");
            if count("waiting") == 1 && count("starting") == 1 {
                seen_waiting = true;
                std::fs::write(&go, "").unwrap();
            }
        }
        count("serving") == 2
    });
    assert!(all_serve && seen_waiting, "{:#?}", sidecar.log());
}

#[test]
fn a_first_engine_that_fails_lets_the_next_one_try() {
    let machine = Machine::new();
    let name = unique();
    let script = "if [ $INDEX = 0 ]; then exit 2; fi; exec $ENGINE";
    let template = format!(
        "name: {name}, replicas: 2, model: {name}/m, command: {}, {QUICK}",
        shell(script)
    );
    let sidecar = machine.serve(&[template]);
    sidecar.until(&format!("{name}-1"), "serving");
    sidecar.until(&format!("{name}-0"), "gave-up");
}

#[test]
fn keys_that_an_engine_was_given_are_shown_nowhere() {
    let machine = Machine::new();
    let name = unique();
    // As engines do, it writes down what it was given.
    let script = "echo args: $0 $@ token=$HF_TOKEN; exit 1";
    let template = format!(
        "name: {name}, command: [sh, -c, '{script}', --api-key, s3cret-1, '{{port}}', --db=redis://u:s3cret-2@h/], environment: {{HF_TOKEN: s3cret-3}}, {QUICK}"
    );
    let sidecar = machine.serve(&[template]);
    let process = sidecar.until(&format!("{name}-0"), "gave-up");
    let why = process["last_error"].as_str().unwrap();
    assert!(
        why.contains("args: --api-key *** ***") && why.contains("token=***"),
        "{why}"
    );
    let (_, log) = sidecar.get(&format!("/v1/processes/{name}-0/log"));
    let lines = log["lines"].as_array().unwrap();
    let starts = |line: &Value| {
        let line = line.as_str().unwrap();
        line.contains("starting [") && line.contains(r#""--api-key", "***""#)
    };
    assert!(lines.iter().any(starts), "{lines:#?}");
    let (_, config) = sidecar.get("/v1/config");
    let shown = [sidecar.report(), log, config].map(|of| of.to_string());
    let said = sidecar.log().join("\n");
    for text in shown.iter().chain([&said]) {
        assert!(text.contains("***") && !text.contains("s3cret"), "{text}");
    }
}

#[test]
fn logs_go_to_a_file_within_its_bounds() {
    let machine = Machine::new();
    let name = unique();
    let folder = machine.path("logs");
    let script = "yes 0123456789abcdef | head -c 5000000; echo the end; exec $ENGINE";
    let template = format!(
        "name: {name}, command: {}, log_dir: {}, log_kib: 4, log_file_mib: 1, {QUICK}",
        shell(script),
        folder.display()
    );
    let sidecar = machine.serve(&[template]);
    sidecar.until(&format!("{name}-0"), "serving");
    let size = |file: &str| {
        std::fs::metadata(folder.join(format!("{name}-0.{file}")))
            .unwrap()
            .len()
    };
    assert!(size("log") <= 1 << 20 && size("log.1") <= 1 << 20);
    let (_, log) = sidecar.get(&format!("/v1/processes/{name}-0/log"));
    let kept: usize = log["lines"]
        .as_array()
        .unwrap()
        .iter()
        .map(|line| line.as_str().unwrap().len() + 1)
        .sum();
    assert!((3_000..=4_096 + 1).contains(&kept), "{kept}");
    assert!(log.to_string().contains("the end"));
}

#[test]
fn what_cannot_be_is_refused_before_anything_starts() {
    let machine = Machine::new();
    let template = |more: &str| format!("name: {}, command: {}, {more}", unique(), engine());
    let mut cases = vec![
        (template("replcas: 2"), vec!["processes[0]", "replcas"]),
        (
            template("restart: {tries: 1}"),
            vec!["processes[0]", "tries"],
        ),
        (
            template("log_dir: /proc/nothing"),
            vec!["log_dir", "/proc/nothing"],
        ),
        (
            "name: x, command: [vllm]".to_owned(),
            vec!["processes[0].command", "{port}"],
        ),
    ];
    if !std::path::Path::new("/proc/driver/nvidia").exists() {
        cases.push((
            template("gpus: auto"),
            vec!["gpus: auto", "libnvidia-ml.so.1"],
        ));
    }
    for (template, words) in cases {
        let output = machine.refusal(std::slice::from_ref(&template));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{template}: {text}");
        for word in words {
            assert!(text.contains(word), "{template}: {text}");
        }
    }
}

#[test]
fn secrets_of_the_environment_are_not_shown() {
    let machine = Machine::new();
    let name = unique();
    let command = shell("exec $ENGINE").replace("PORT:", "HF_TOKEN: hf_secret, PORT:");
    let sidecar = machine.serve(&[format!("name: {name}, command: {command}, {QUICK}")]);
    sidecar.until(&format!("{name}-0"), "serving");
    let shown = format!(
        "{} {} {:?}",
        sidecar.get("/v1/config").1,
        sidecar.report(),
        sidecar.log()
    );
    assert!(
        shown.contains("HF_TOKEN") && !shown.contains("hf_secret"),
        "{shown}"
    );
}
