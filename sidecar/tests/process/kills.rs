//! What is killed with -9, and what must be left: nothing of an old life, and a pool that recovers.

use std::time::Duration;

use crate::world::{
    Machine, QUICK, Sidecar, engine, is_alive, kill, kill_at_once, nothing_is_left, pid_in, shell,
    unique, within,
};

/// An engine with two grandchildren that went their own way: without a parent, in a session of their own, and one of them
/// without the mark of the run.
struct Family {
    machine: Machine,
    sidecar: Sidecar,
    name: String,
    pid: u32,
}

impl Family {
    fn start() -> Self {
        let (machine, template) = (Machine::new(), unique());
        let folder = machine.folder.path().display();
        let child = format!("sh -c 'echo $$ > {folder}/FILE; exec sleep 1000'");
        let script = format!(
            "(setsid {} &) ; (env -i setsid {} &) ; exec $ENGINE",
            child.replace("FILE", "marked"),
            child.replace("FILE", "unmarked")
        );
        let sidecar = machine.serve(&[format!(
            "name: {template}, command: {}, {QUICK}",
            shell(&script)
        )]);
        let name = format!("{template}-0");
        let serving = sidecar.until(&name, "serving");
        let pid = u32::try_from(serving["pid"].as_u64().unwrap()).unwrap();
        Self {
            machine,
            sidecar,
            name,
            pid,
        }
    }

    /// The ids of the two grandchildren; forgets them, so that the next life writes its own.
    fn children(&self) -> [u32; 2] {
        ["marked", "unmarked"].map(|file| {
            let path = self.machine.path(file);
            let pid = pid_in(&path);
            assert!(is_alive(pid));
            std::fs::remove_file(path).unwrap();
            pid
        })
    }

    fn recovers_without(&self, old: &[u32]) {
        let serving = self.sidecar.until_back(&self.name, self.pid);
        assert_eq!(serving["restarts"], 1, "{serving}");
        let name = &self.name;
        let metric = |series: String| self.sidecar.metric(&series);
        assert_eq!(
            metric(format!(
                "kvlane_process_restarts_total{{process=\"{name}\"}}"
            )),
            1.0
        );
        for (state, value) in [("serving", 1.0), ("pausing", 0.0), ("waiting", 0.0)] {
            let labels = format!("process=\"{name}\",state=\"{state}\"");
            assert_eq!(
                metric(format!("kvlane_process_state{{{labels}}}")),
                value,
                "{state}"
            );
        }
        assert_eq!(metric("kvlane_process_ready_seconds_count".to_owned()), 2.0);
        assert!(
            old.iter().all(|pid| !is_alive(*pid)),
            "of the old life {old:?} is left"
        );
        // The new life has its own, and one outer guard, inner guard, engine and marked child are all there is.
        let new = self.children();
        assert!(new.iter().all(|pid| is_alive(*pid)));
        let are_four = within(Duration::from_secs(30), || self.sidecar.marked().len() == 4);
        assert!(are_four, "{:?}", self.sidecar.marked());
    }
}

#[test]
fn a_killed_engine_takes_its_children_along_and_comes_back() {
    let family = Family::start();
    let [marked, unmarked] = family.children();
    kill("KILL", &[family.pid]);
    family.recovers_without(&[family.pid, marked, unmarked]);
    let process = family.sidecar.process(&family.name);
    assert_eq!(
        process["last_exit"], "was ended by signal 9 (SIGKILL)",
        "{process}"
    );
}

#[test]
fn an_engine_that_ended_is_no_worker_while_what_it_left_behind_ends() {
    let (machine, template) = (Machine::new(), unique());
    let left = machine.path("left");
    let script = format!(
        "sh -c 'trap \"\" TERM; echo $$ > {}; while :; do sleep 0.1; done' & exec $ENGINE",
        left.display()
    );
    // What it leaves behind has a minute, and does not listen.
    let sidecar = machine.serve(&[format!(
        "name: {template}, command: {}, stop_seconds: 60, restart: {{initial_seconds: 0.1}}",
        shell(&script)
    )]);
    let name = format!("{template}-0");
    let serving = sidecar.until(&name, "serving");
    let pid = u32::try_from(serving["pid"].as_u64().unwrap()).unwrap();
    let left = pid_in(&left);
    kill("KILL", &[pid]);
    let process = sidecar.until(&name, "stopping");
    assert_eq!(process["pid"], pid);
    let workers = sidecar.get("/v1/workers").1;
    assert_eq!(workers["workers"].as_array().unwrap().len(), 0, "{workers}");
    assert_eq!(sidecar.process(&name)["state"], "stopping");
    assert!(is_alive(left));
    kill("KILL", &[left]);
    sidecar.until_back(&name, pid);
}

#[test]
fn a_killed_outer_guard_costs_a_restart_and_leaves_nothing() {
    let family = Family::start();
    let [marked, unmarked] = family.children();
    let [outer, inner] = family.sidecar.guards(&family.name);
    kill("KILL", &[outer]);
    family.recovers_without(&[family.pid, marked, unmarked, outer, inner]);
}

#[test]
fn a_killed_inner_guard_costs_a_restart_and_leaves_nothing() {
    let family = Family::start();
    let [marked, unmarked] = family.children();
    let [outer, inner] = family.sidecar.guards(&family.name);
    kill("KILL", &[inner]);
    family.recovers_without(&[family.pid, marked, unmarked, outer, inner]);
    let process = family.sidecar.process(&family.name);
    assert_eq!(process["last_exit"], "its guard was killed", "{process}");
}

#[test]
fn both_guards_killed_at_once_end_the_engine_and_what_carries_the_mark() {
    let family = Family::start();
    let [marked, unmarked] = family.children();
    let [outer, inner] = family.sidecar.guards(&family.name);
    kill_at_once(&[inner, outer]);
    family.recovers_without(&[family.pid, marked, outer, inner]);
    // In a session of its own, without the mark, and nobody left who knew it: the one thing that is not found.
    kill("KILL", &[unmarked]);
}

#[test]
fn a_killed_child_of_an_engine_is_the_engines_own_affair() {
    let family = Family::start();
    let [marked, unmarked] = family.children();
    kill("KILL", &[marked, unmarked]);
    // Nobody but the guard could have asked how they ended.
    for pid in [marked, unmarked] {
        let is_gone = within(Duration::from_secs(30), || {
            !std::path::Path::new(&format!("/proc/{pid}")).exists()
        });
        assert!(is_gone, "a zombie is left");
    }
    std::thread::sleep(Duration::from_millis(500));
    let process = family.sidecar.process(&family.name);
    assert_eq!(
        (&process["state"], &process["restarts"]),
        (&"serving".into(), &0.into())
    );
}

#[test]
fn a_killed_sidecar_leaves_nothing() {
    let mut family = Family::start();
    let [marked, unmarked] = family.children();
    let guards = family.sidecar.guards(&family.name);
    family.sidecar.child.kill().unwrap();
    family.sidecar.child.wait().unwrap();
    family
        .sidecar
        .nothing_is_left(&[family.pid, marked, unmarked, guards[0], guards[1]]);
    // Whatever was written down of this run is no news to the next.
    let next = family
        .machine
        .serve(&[format!("name: {}, command: {}", unique(), engine())]);
    let log = next.log();
    let own =
        |line: &&String| line.contains("left this process behind") && line.contains(&family.name);
    assert!(log.iter().find(own).is_none(), "{log:#?}");
}

#[test]
fn a_sidecar_killed_by_name_leaves_its_guards_to_clean_up() {
    let family = Family::start();
    let [marked, unmarked] = family.children();
    let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
    for guard in family.sidecar.guards(&family.name) {
        assert_eq!(name(guard).trim(), "engine-guard");
    }
    let run = family.sidecar.run.clone();
    drop(family.sidecar);
    nothing_is_left(&run, &[family.pid, marked, unmarked]);
}

#[test]
fn a_sidecar_killed_while_engines_start_leaves_nothing() {
    let machine = Machine::new();
    let never = shell("sleep 1000 & sleep 1000");
    for pause in [0, 5, 20, 60, 150] {
        let sidecar = machine.serve(&[format!(
            "name: {}, replicas: 3, command: {never}, {QUICK}",
            unique()
        )]);
        std::thread::sleep(Duration::from_millis(pause));
        let run = sidecar.run.clone();
        drop(sidecar);
        nothing_is_left(&run, &[]);
    }
}

#[test]
fn a_terminated_sidecar_ends_its_engines_politely_and_in_the_end_not() {
    let machine = Machine::new();
    let (polite, stubborn) = (unique(), unique());
    let deaf = shell(
        "trap '' TERM INT; echo $$ > DEAF; (trap '' TERM; exec setsid sleep 1000) & while :; do sleep 0.1; done",
    );
    let deaf = deaf.replace("DEAF", &machine.path("deaf").display().to_string());
    let mut sidecar = machine.serve(&[
        format!("name: {polite}, command: {}, stop_seconds: 1", engine()),
        format!("name: {stubborn}, command: {deaf}, stop_seconds: 4"),
    ]);
    sidecar.until(&format!("{polite}-0"), "serving");
    let deaf = pid_in(&machine.path("deaf"));
    let begin = std::time::Instant::now();
    kill("TERM", &[sidecar.child.id()]);
    let ended = within(Duration::from_secs(4), || {
        sidecar.process(&format!("{polite}-0"))["state"] == "stopped"
    });
    assert!(ended, "the polite one waits for the stubborn one");
    assert!(is_alive(deaf));
    let last = sidecar.process(&format!("{polite}-0"))["last_exit"].clone();
    assert_eq!(last, "exited with code 0");
    assert_eq!(sidecar.exit_within(Duration::from_secs(30)), 0);
    assert!(
        begin.elapsed() >= Duration::from_secs(1),
        "it had its second"
    );
    sidecar.nothing_is_left(&[deaf]);
    let runs = std::fs::read_dir(machine.path("kvlane")).unwrap();
    let runs = runs.filter(|file| {
        file.as_ref()
            .unwrap()
            .file_name()
            .to_string_lossy()
            .starts_with("run-")
    });
    assert_eq!(
        runs.count(),
        0,
        "nothing is written down of a run that ended well"
    );
}

#[test]
fn what_an_engine_leaves_behind_is_not_waited_for_as_long_as_the_engine() {
    let (machine, template) = (Machine::new(), unique());
    let script = "(trap '' TERM; while :; do sleep 0.1; done) & exec $ENGINE";
    let mut sidecar = machine.serve(&[format!(
        "name: {template}, command: {}, stop_seconds: 600",
        shell(script)
    )]);
    sidecar.until(&format!("{template}-0"), "serving");
    kill("TERM", &[sidecar.child.id()]);
    assert_eq!(sidecar.exit_within(Duration::from_secs(60)), 0);
    sidecar.nothing_is_left(&[]);
}

#[test]
fn a_second_signal_does_not_wait_and_still_leaves_nothing() {
    let machine = Machine::new();
    let name = unique();
    let deaf = shell("trap '' TERM; echo $$ > DEAF; while :; do sleep 0.1; done");
    let deaf = deaf.replace("DEAF", &machine.path("deaf").display().to_string());
    let mut sidecar = machine.serve(&[format!("name: {name}, command: {deaf}, stop_seconds: 4")]);
    sidecar.until(&format!("{name}-0"), "starting");
    let deaf = pid_in(&machine.path("deaf"));
    kill("INT", &[sidecar.child.id()]);
    // It has the first one: two that come together may be one.
    sidecar.says(&["stopping"]);
    kill("INT", &[sidecar.child.id()]);
    sidecar.exit_within(Duration::from_secs(30));
    sidecar.says(&["stopped at once"]);
    sidecar.nothing_is_left(&[deaf]);
}
