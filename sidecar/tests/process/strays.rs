//! What is left when the sidecar and the guards of an engine are killed at once, and what the next run does about it.

use std::time::Duration;

use crate::world::{
    Machine, QUICK, Sidecar, is_alive, kill, kill_at_once, pid_in, shell, unique, within,
};

/// Kills a sidecar and its guards at once, so that nobody is left to clean up. Returns the engine's children: one in a
/// session of its own that carries the run's mark, and one in the engine's session that does not.
fn abandon(machine: &Machine, template: &str) -> [u32; 2] {
    let folder = machine.folder.path().display();
    let child = format!("sh -c 'echo $$ > {folder}/FILE; exec sleep 1000'");
    let script = format!(
        "setsid {} & env -i {} & exec $ENGINE",
        child.replace("FILE", "marked"),
        child.replace("FILE", "unmarked")
    );
    let mut sidecar = machine.serve(&[format!(
        "name: {template}, command: {}, gpus: [MIG-{template}], {QUICK}",
        shell(&script)
    )]);
    let name = format!("{template}-0");
    let engine = sidecar.until(&name, "serving")["pid"].as_u64().unwrap();
    let children = ["marked", "unmarked"].map(|file| pid_in(&machine.path(file)));
    let [outer, inner] = sidecar.guards(&name);
    kill_at_once(&[inner, outer, sidecar.child.id()]);
    sidecar.child.wait().unwrap();
    let engine = u32::try_from(engine).unwrap();
    assert!(
        within(Duration::from_secs(30), || !is_alive(engine)),
        "the engine hears of its guard's death"
    );
    assert!(children.iter().all(|pid| is_alive(*pid)));
    children
}

/// The strays of a template; other tests leave some of their own for a moment.
fn strays(sidecar: &Sidecar, template: &str) -> Vec<u32> {
    let report = sidecar.report();
    let strays = report["strays"].as_array().unwrap().iter();
    let own = strays.filter(|stray| stray["process"] == format!("{template}-0"));
    let pids = own.map(|stray| stray["pid"].as_u64().unwrap());
    let mut pids: Vec<_> = pids.map(|pid| u32::try_from(pid).unwrap()).collect();
    pids.sort_unstable();
    pids
}

#[test]
fn a_second_start_tells_of_strays_and_waits_only_where_they_are_in_the_way() {
    let machine = Machine::new();
    let (template, other, on_gpu, doubtful) = (unique(), unique(), unique(), unique());
    let children = abandon(&machine, &template);
    let engine = shell("exec $ENGINE");
    let sidecar = machine.serve(&[
        format!("name: {template}, command: {engine}, {QUICK}"),
        format!("name: {other}, command: {engine}, {QUICK}"),
        format!("name: {on_gpu}, command: {engine}, gpus: [[MIG-y, MIG-{template}]], {QUICK}"),
        // Of a part of a card nobody knows here whose part it is.
        format!("name: {doubtful}, command: {engine}, gpus: [0], {QUICK}"),
    ]);
    let mut expected = children.to_vec();
    expected.sort_unstable();
    assert_eq!(strays(&sidecar, &template), expected);
    for pid in children {
        let line = sidecar.says(&["left this process behind", &format!("pid={pid} ")]);
        assert!(
            line.contains("sleep 1000") && line.contains(&format!("{template}-0")),
            "{line}"
        );
    }
    sidecar.until(&format!("{other}-0"), "serving");
    sidecar.until(&format!("{doubtful}-0"), "serving");
    sidecar.says(&[
        "cannot be told",
        &format!("process=\"{doubtful}-0\""),
        &format!("its_gpus=\"MIG-{template}\""),
    ]);
    for name in [&template, &on_gpu] {
        let process = sidecar.until(&format!("{name}-0"), "blocked");
        let why = process["last_error"].as_str().unwrap();
        assert!(
            children.iter().all(|pid| why.contains(&pid.to_string())),
            "{why}"
        );
        assert!(why.contains("strays: stop"), "{why}");
    }
    assert!(
        children.iter().all(|pid| is_alive(*pid)),
        "telling is not ending"
    );
    kill("KILL", &children);
    for name in [&template, &on_gpu] {
        sidecar.until(&format!("{name}-0"), "serving");
    }
    assert!(strays(&sidecar, &template).is_empty());
}

#[test]
fn strays_are_ended_first_where_that_is_asked_for() {
    let machine = Machine::new();
    let template = unique();
    let children = abandon(&machine, &template);
    let sidecar = machine.serve(&[format!(
        "name: {template}, command: {}, strays: stop, {QUICK}",
        shell("exec $ENGINE")
    )]);
    sidecar.until(&format!("{template}-0"), "serving");
    assert!(children.iter().all(|pid| !is_alive(*pid)));
    sidecar.says(&[
        "ending what an earlier run left behind",
        &children[0].to_string(),
    ]);
}

#[test]
fn a_sidecar_that_lives_has_no_strays() {
    let machine = Machine::new();
    let template = unique();
    let text = [format!(
        "name: {template}, command: {}, strays: stop, {QUICK}",
        shell("exec $ENGINE")
    )];
    let first = machine.serve(&text);
    let name = format!("{template}-0");
    let pid = first.until(&name, "serving")["pid"].clone();
    // The same configuration beside it, as by mistake: ports differ, and nothing of the first one is touched.
    let second = machine.serve(&text);
    second.until(&name, "serving");
    assert!(strays(&second, &template).is_empty());
    assert_eq!(first.process(&name)["pid"], pid);
}
