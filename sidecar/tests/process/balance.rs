//! Engines of this machine that the pool's planner starts and stops.

use std::time::Duration;

use serde_json::{Value, json};

use crate::traffic::until_ready;
use crate::world::{KVLANE, Machine, QUICK, Sidecar, exchange, nothing_is_left, unique, within};

/// Two engines of which one runs, and a planner that wants another when more than one stream is open.
fn serve(machine: &mut Machine, name: &str) -> Sidecar {
    machine.sections = "drain_seconds: 10\nplanner: {mode: act, interval_seconds: 0.1, decode_streams: 1, target_utilisation: 1, up_window_seconds: 0.3, down_window_seconds: 1, cool_down_seconds: 0.2, both: {min: 1}}".to_owned();
    machine.serve(&[format!(
        "name: {name}, replicas: 2, initial_replicas: 1, command: [{KVLANE}, engine, --listen, '127.0.0.1:{{port}}', --model-name, sim, --decode-ms, 20], {QUICK}"
    )])
}

fn completion(number: u32) -> String {
    let prompt: Vec<u32> = (number * 1000..number * 1000 + 64).collect();
    json!({"model": "sim", "prompt": prompt, "max_tokens": 250, "ignore_eos": true}).to_string()
}

fn actions(sidecar: &Sidecar) -> Vec<Value> {
    let (_, pool) = sidecar.get("/v1/pool");
    pool["planner"]["actions"].as_array().unwrap().clone()
}

#[test]
fn a_parked_engine_is_started_for_a_load_and_parked_again_after_it() {
    let (mut machine, name) = (Machine::new(), unique());
    let sidecar = serve(&mut machine, &name);
    let [first, second] = [0, 1].map(|index| format!("{name}-{index}"));
    sidecar.until(&first, "serving");
    assert_eq!(sidecar.process(&second)["state"], "parked");
    until_ready(&sidecar, 1);
    let proxy = sidecar.proxy;
    let clients: Vec<_> = (0..4)
        .map(|number| {
            std::thread::spawn(move || {
                exchange(proxy, "POST", "/v1/completions", &completion(number))
            })
        })
        .collect();
    sidecar.until(&second, "serving");
    for client in clients {
        let (status, answer) = client.join().unwrap();
        assert_eq!(status, 200, "{answer}");
    }
    // Which of the two is stopped is the planner's to say; the one that stays is the minimum.
    let one_is_parked = within(Duration::from_secs(60), || {
        let states = [&first, &second].map(|name| sidecar.process(name)["state"].clone());
        states.contains(&json!("parked")) && states.contains(&json!("serving"))
    });
    assert!(
        one_is_parked,
        "{:#?} {:#?}",
        actions(&sidecar),
        sidecar.log()
    );
    let kinds: Vec<Value> = actions(&sidecar)
        .iter()
        .map(|action| action["proposal"]["action"].clone())
        .collect();
    assert!(
        kinds.contains(&json!("start")) && kinds.contains(&json!("stop")),
        "{kinds:?}"
    );
    let run = sidecar.run.clone();
    drop(sidecar);
    nothing_is_left(&run, &[]);
}

#[test]
fn more_initial_replicas_than_replicas_are_refused() {
    let (machine, name) = (Machine::new(), unique());
    let output = machine.refusal(&[format!(
        "name: {name}, replicas: 2, initial_replicas: 3, command: [{KVLANE}, '{{port}}']"
    )]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.contains("initial_replicas: 3") && text.contains("0 to 2"),
        "{text}"
    );
}
