use super::*;

fn yaml(text: &str) -> Result<Config, ConfigError> {
    Config::from_yaml(text, "kvlane.yaml")
}

fn args(flags: &[&str]) -> ServeArgs {
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        serve: ServeArgs,
    }
    let line = std::iter::once("serve").chain(flags.iter().copied());
    <Cli as clap::Parser>::try_parse_from(line).unwrap().serve
}

fn refused(text: &str, words: &[&str]) {
    let error = yaml(text).unwrap_err().to_string();
    for word in words {
        assert!(error.contains(word), "{error:?} does not say {word:?}");
    }
}

#[test]
fn defaults_are_the_documented_ones() {
    let config = yaml("").unwrap();
    assert_eq!(config.listen.to_string(), "0.0.0.0:8080");
    assert_eq!(config.admin.to_string(), "127.0.0.1:9091");
    assert_eq!(config.max_body_bytes, 67_108_864);
    assert!(!config.trusted_headers && !config.debug_headers && config.admin_key.is_none());
}

#[test]
fn every_key_of_a_full_file_is_read() {
    let config = yaml(
        "listen: '[::1]:1'\nadmin: localhost:2\npolicy: least-loaded\nindex: approximate\nblock_size: 32\nttl_seconds: 7\n\
         breaker_threshold: 5\nadmin_key: abcdefgh1\nworkers:\n\
         - {id: w1, url: 'http://[FD00::5]:8000', events: 'tcp://h:5557', replay: 'tcp://h:5558', role: decode, dp_ranks: 2, labels: {zone: a}}\n",
    )
    .unwrap();
    assert_eq!(config.listen.to_string(), "[::1]:1");
    assert_eq!(config.policy, PolicyKind::LeastLoaded);
    assert_eq!(
        (config.router.block_size.tokens(), config.router.ttl_seconds),
        (32, 7.0)
    );
    assert_eq!(config.breaker_threshold, 5);
    let worker = &config.workers[0];
    assert_eq!(worker.url.to_string(), "http://[fd00::5]:8000");
    assert_eq!((worker.dp_ranks, worker.role), (2, Role::Decode));
    assert_eq!(worker.labels["zone"], "a");
    assert_eq!(
        yaml("router: {block_size: 64}")
            .unwrap()
            .router
            .block_size
            .tokens(),
        64
    );
}

#[test]
fn wrong_keys_are_refused_by_name_and_line() {
    refused(
        "listen: 0.0.0.0:1\npolcy: kv\n",
        &["line 2", "polcy", "did you mean policy"],
    );
    refused(
        "router: {blok_size: 1}",
        &["router.blok_size", "block_size"],
    );
    refused("block_size: 0", &["block_size", "65536"]);
    refused("block_size: many", &["block_size"]);
    refused("temperature: -1", &["temperature", "out of range"]);
    refused("policy: fastest", &["policy", "least-loaded"]);
    refused("breaker_threshold: 0", &["breaker_threshold", "1 to"]);
    refused("max_body_bytes: big", &["max_body_bytes", "1 to"]);
    refused("listen: 8080", &["listen", "host:port"]);
    refused("listen: fd00::5:8000", &["listen"]);
    refused("debug_headers: maybe", &["debug_headers", "true or false"]);
    refused("workers: [{id: w1}]", &["workers[0].url", "missing"]);
    refused(
        "workers: [{id: w1, url: 'http://h:1', evnts: x}]",
        &["workers[0]", "evnts", "events"],
    );
    refused(
        "workers: [{id: w1, url: 'https://h:1'}]",
        &["workers[0].url", "https is not supported"],
    );
    refused(
        "workers: [{id: w1, url: 'http://fd00::5:8000'}]",
        &["workers[0].url", "without brackets"],
    );
    refused(
        "workers: [{id: w1, url: 'http://h:1', role: boss}]",
        &["workers[0].role", "prefill"],
    );
    refused(
        "workers: [{id: w1, url: 'http://h:1', events: 'tcp://*:1'}]",
        &["events", "wildcard"],
    );
    refused("listen: [", &["kvlane.yaml"]);
    refused("discovery: {fil: x}", &["discovery", "fil", "file"]);
    refused("discovery: {file: ''}", &["discovery.file", "empty"]);
    refused(
        "discovery: {file: w, file_interval_seconds: 0}",
        &["discovery.file_interval_seconds", "0.05 to 3600"],
    );
    for (dns, words) in [
        ("name: x", "either name and port are accepted, or srv alone"),
        ("name: x, port: 1, srv: s", "either name and port"),
        ("srv: s, prot: 1", "prot"),
        ("srv: s, interval_seconds: 0", "dns[0].interval_seconds"),
        ("srv: s, servers: [localhost]", "dns[0].servers"),
        ("srv: s, dp_ranks: 0", "dns[0].dp_ranks"),
        ("srv: s, replay_port: 1", "dns[0].replay_port"),
        ("srv: s, role: boss", "boss"),
    ] {
        refused(
            &format!("discovery: {{dns: [{{{dns}}}]}}"),
            &["discovery", words],
        );
    }
    refused(
        "discovery: {dns: [{srv: s}, {srv: s}]}",
        &["dns:s is given twice"],
    );
}

#[test]
fn contradictions_name_both_sides() {
    refused("listen: 127.0.0.1:9091", &["listen", "admin"]);
    refused(
        "admin: 0.0.0.0:9091",
        &["admin", "admin_key", "allow_public_admin"],
    );
    refused(
        "block_size: 16\nrouter: {block_size: 32}",
        &["block_size", "router.block_size"],
    );
    refused(
        "workers: [{id: w, url: 'http://h:1'}, {id: w, url: 'http://h:2'}]",
        &["workers[0].id", "workers[1].id", "\"w\""],
    );
    refused(
        "workers: [{id: w, url: 'http://h:1', replay: 'tcp://h:2'}]",
        &["replay", "events"],
    );
    let both =
        Config::from_args(&args(&["--block-size", "16", "--set", "block_size=32"])).unwrap_err();
    assert!(
        both.to_string()
            .contains("--block-size and --set block_size"),
        "{both}"
    );
}

#[test]
fn flags_override_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kvlane.yaml");
    std::fs::write(
        &path,
        "block_size: 32\nworkers: [{id: w1, url: 'http://a:1'}, {id: w2, url: 'http://b:1'}]",
    )
    .unwrap();
    let mut serve = args(&[
        "--block-size",
        "64",
        "--index",
        "approximate",
        "--seed",
        "7",
        "--set",
        "breaker_threshold=9",
        "--worker",
        "id=w1,url=http://c:2,dp_ranks=2,label.zone=x",
    ]);
    serve.config = Some(path);
    let config = Config::from_args(&serve).unwrap();
    assert_eq!(config.router.block_size.tokens(), 64);
    assert_eq!(config.router.seed, Some(7));
    assert_eq!(config.breaker_threshold, 9);
    let urls: Vec<_> = config
        .workers
        .iter()
        .map(|worker| worker.url.to_string())
        .collect();
    assert_eq!(urls, ["http://b:1", "http://c:2"]);
    assert_eq!(config.workers[1].labels["zone"], "x");
}

#[test]
fn wrong_flags_name_the_flag_and_the_field() {
    for (flags, words) in [
        (vec!["--worker", "id=w1"], vec!["--worker", "url"]),
        (
            vec!["--worker", "id=w1,url=http://h:1,dp_ranks=many"],
            vec!["dp_ranks", "1 to 1,024"],
        ),
        (vec!["--worker", "w1"], vec!["--worker", "field=value"]),
        (
            vec![
                "--worker",
                "id=a,url=http://h:1",
                "--worker",
                "id=a,url=http://h:2",
            ],
            vec!["id", "twice"],
        ),
        (vec!["--policy", "best"], vec!["--policy", "round-robin"]),
        (vec!["--block-size", "x"], vec!["--block-size"]),
        (vec!["--set", "nonsense=1"], vec!["nonsense"]),
        (
            vec!["--config", "/nonexistent/kvlane.yaml"],
            vec!["--config", "/nonexistent/kvlane.yaml"],
        ),
    ] {
        let error = Config::from_args(&args(&flags)).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{error:?} does not say {word:?}");
        }
    }
}

#[test]
fn two_ranks_on_one_event_port_are_warned_of() {
    let config = yaml(
        "workers: [{id: a, url: 'http://h:1', events: 'tcp://h:5557', dp_ranks: 2}, {id: b, url: 'http://h:2', events: 'tcp://H:5558'}]",
    )
    .unwrap();
    assert!(
        config
            .warnings
            .iter()
            .any(|warning| warning.contains("\"a\" rank 1") && warning.contains("\"b\" rank 0")),
        "{:?}",
        config.warnings
    );
}

#[test]
fn what_serves_nobody_is_warned_of() {
    let worker = |role: &str| format!("workers: [{{id: w, url: 'http://h:1', role: {role}}}]\n");
    let handoff = "handoff: {kv_bytes_per_token: 1, link_bytes_per_second: 2";
    for (text, words) in [
        (String::new(), vec!["no workers", "POST /v1/workers"]),
        (worker("prefill"), vec!["\"w\"", "section handoff"]),
        (
            "processes: [{name: p, command: [e, '{port}'], role: prefill}]".to_owned(),
            vec!["\"p\"", "section handoff"],
        ),
        (
            format!("{}{handoff}}}", worker("prefill")),
            vec!["without model", "assumed_prefill_tokens_per_second"],
        ),
    ] {
        let warnings = yaml(&text).unwrap().warnings;
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        for word in words {
            assert!(warnings[0].contains(word), "{warnings:?}");
        }
    }
    let planner = ", planner: {assumed_prefill_tokens_per_second: 1000}}";
    for text in [
        worker("decode"),
        "discovery: {file: w.yaml}".to_owned(),
        "processes: [{name: p, command: [e, '{port}']}]".to_owned(),
        format!("{}{handoff}{planner}", worker("prefill")),
        format!("{}model: m\n{handoff}}}", worker("prefill")),
    ] {
        let warnings = yaml(&text).unwrap().warnings;
        assert!(warnings.is_empty(), "{text}: {warnings:?}");
    }
}

#[test]
fn what_a_section_does_not_accept_is_named_by_its_path() {
    let handoff = |more: &str| {
        format!("handoff: {{kv_bytes_per_token: 1, link_bytes_per_second: 2, {more}}}")
    };
    let process =
        |more: &str| format!("processes: [{{name: p, command: [e, '{{port}}'], {more}}}]");
    for (text, place) in [
        (
            "discovery: {dns: [{srv: s}, {name: a, port: 70000}]}".to_owned(),
            "discovery.dns[1].port: ",
        ),
        ("discovery: {dns: {srv: s}}".to_owned(), "discovery.dns: "),
        (
            "discovery: {kubernetes: [{pods: a, port: 0}]}".to_owned(),
            "discovery.kubernetes[0].port: ",
        ),
        (handoff("bootstrap_port: 99999"), "handoff.bootstrap_port: "),
        (handoff("links: [{from: a}]"), "handoff.links[0]: "),
        (handoff("planner: {itl: 1}"), "handoff.planner"),
        ("planner: {mode: acts}".to_owned(), "planner.mode: "),
        ("planner: {prefill: 3}".to_owned(), "planner.prefill: "),
        (process("replicas: many"), "processes[0].replicas: "),
        (
            process("restart: {max_seconds: x}"),
            "processes[0].restart.max_seconds: ",
        ),
    ] {
        refused(&text, &[place, "not accepted"]);
    }
    for (text, words) in [
        ("discovery: {dns: [{port: 70000}]}", "expected 0 to 65,535"),
        ("discovery: {dns: {srv: s}}", "expected a list"),
        ("planner: {prefill: 3}", "expected a mapping"),
        ("planner: {tolerance: x}", "expected a number"),
    ] {
        refused(text, &[words]);
    }
    refused(
        "planner: {intervall: 3}",
        &["intervall", "interval_seconds", "tolerance"],
    );
}

#[test]
fn a_list_for_a_mapping_is_refused_in_every_section() {
    let handoff = |more: &str| {
        format!("handoff: {{kv_bytes_per_token: 1, link_bytes_per_second: 2, {more}}}")
    };
    let process = "{name: p, command: [e, '{port}'], restart: [1, 60, 5, 600]}";
    let mut cases = vec![
        ("handoff: [64, 1e9]".to_owned(), "handoff: "),
        (handoff("planner: [0.5, 0.05]"), "handoff.planner: "),
        (handoff("links: [[a, b, 6e9]]"), "handoff.links[0]: "),
        ("discovery: [w.yaml, 2]".to_owned(), "discovery: "),
        (
            "discovery: {dns: [[n, 1]]}".to_owned(),
            "discovery.dns[0]: ",
        ),
        (
            "discovery: {kubernetes: [[app=vllm]]}".to_owned(),
            "discovery.kubernetes[0]: ",
        ),
        (
            "processes: [[p, [e, '{port}']]]".to_owned(),
            "processes[0]: ",
        ),
        (format!("processes: [{process}]"), "processes[0].restart: "),
        ("planner: [act, 1]".to_owned(), "planner: "),
        ("planner: {prefill: [1, 2]}".to_owned(), "planner.prefill: "),
        ("router: [16, events]".to_owned(), "router: "),
        ("workers: [[w, 'http://h:1']]".to_owned(), "workers[0]: "),
    ];
    if cfg!(feature = "kubernetes") {
        let rule = "planner: {scale: [[decode, StatefulSet, d]]}".to_owned();
        cases.push((rule, "planner.scale[0]: "));
    }
    for (text, place) in cases {
        refused(&text, &[place, "a mapping"]);
    }
    // What is no mapping is no mapping of something either.
    for text in [
        "discovery: {file: [w.yaml]}",
        "workers: [{id: w, url: 'http://h:1', labels: [a, b]}]",
        "processes: [{name: p, command: [e, '{port}'], labels: [a, b]}]",
    ] {
        refused(text, &["accepted"]);
    }
}

#[test]
fn every_section_can_be_given_as_a_flag() {
    let config = Config::from_args(&args(&[
        "--set",
        r#"discovery={"file": "w.yaml"}"#,
        "--set",
        r#"planner={"mode": "act"}"#,
        "--set",
        r#"workers=[{"id": "w", "url": "http://h:1"}]"#,
        "--set",
        r#"router={"seed": 3}"#,
    ]))
    .unwrap();
    assert!(config.discovery.file.is_some() && config.planner.is_some());
    assert_eq!((config.workers.len(), config.router.seed), (1, Some(3)));
    let wrong = Config::from_args(&args(&["--set", "discovery=x"])).unwrap_err();
    assert!(
        wrong.to_string().contains("--set discovery: not accepted")
            && wrong.to_string().contains("a mapping of its keys"),
        "{wrong}"
    );
}

#[test]
fn secrets_are_never_shown() {
    let config = yaml("admin_key: super-secret-key").unwrap();
    let shown = format!("{config:?} {}", serde_json::to_string(&config).unwrap());
    assert!(!shown.contains("super-secret-key"));
    let error = yaml("admin_key: short").unwrap_err().to_string();
    assert!(
        !error.contains("short") && error.contains("admin_key"),
        "{error}"
    );
    for after in ["  bad: [", "admin_key: super-secret-two", "\tx"] {
        let text = format!("admin_key: super-secret-key\n{after}\n");
        let error = yaml(&text).unwrap_err().to_string();
        assert!(!error.contains("super"), "{error}");
        assert!(error.contains("line"), "{error}");
    }
    let key = config.admin_key.unwrap();
    assert!(
        key.matches(b"super-secret-key")
            && !key.matches(b"super-secret-keY")
            && !key.matches(b"super")
    );
}

#[test]
fn a_handoff_needs_what_only_a_measurement_can_tell() {
    let config = yaml(
        "handoff: {kv_bytes_per_token: 114688, link_bytes_per_second: 104e6, planner: {ttft_objective_seconds: 2}}",
    )
    .unwrap();
    let handoff = config.handoff.unwrap();
    assert_eq!(
        (handoff.lease_seconds, handoff.link_fixed_seconds),
        (None, 0.0)
    );
    let planner = kvlane::handoff::HandoffConfig::default().objectives(2.0, Some(0.1));
    assert_eq!(handoff.planner, planner);
    assert!(yaml("").unwrap().handoff.is_none());
    refused("handoff: {}", &["handoff", "kv_bytes_per_token"]);
    refused("handoff: [64, 1e9]", &["handoff", "a mapping"]);
    refused("discovery: []", &["discovery", "a mapping"]);
    refused(
        "handoff: {kv_bytes_per_token: 1, link_file: /dev/zero}",
        &["link_file", "more than 65536 bytes"],
    );
    refused(
        "handoff: {kv_bytes_per_token: 1}",
        &["link_bytes_per_second"],
    );
    let with =
        |more: &str| format!("handoff: {{kv_bytes_per_token: 1, link_bytes_per_second: 1{more}}}");
    refused(&with(", lease: 3"), &["lease", "lease_seconds"]);
    refused(
        &with(", planner: {itl: 1}"),
        &["itl", "itl_objective_seconds"],
    );
    refused(
        &with(", planner: {ttft_objective_seconds: 0}"),
        &["ttft_objective_seconds"],
    );
    refused(
        &with(", lease_seconds: 0"),
        &["handoff.lease_seconds", "1 to 3600"],
    );
    refused(
        "handoff: {kv_bytes_per_token: 0, link_bytes_per_second: 1}",
        &["KV bytes"],
    );
    refused(
        "handoff: {kv_bytes_per_token: 1, link_bytes_per_second: 0}",
        &["bytes_per_second"],
    );
    let set = r#"handoff={"kv_bytes_per_token": 1, "link_bytes_per_second": 2}"#;
    let config = Config::from_args(&args(&["--set", set])).unwrap();
    let handoff = config.handoff.unwrap();
    assert_eq!(
        (handoff.kv_bytes_per_token, handoff.link_bytes_per_second),
        (1.0, 2.0)
    );
}

#[test]
fn how_workers_hand_over_is_checked() {
    let with =
        |more: &str| format!("handoff: {{kv_bytes_per_token: 1, link_bytes_per_second: 1{more}}}");
    let config = yaml(&with(
        ", protocol: sglang, links: [{from: a, to: '*', bytes_per_second: 6e9}], bootstrap_port: 9000, busy_requests: 0",
    ));
    let handoff = config.unwrap().handoff.unwrap();
    assert_eq!(handoff.protocol, crate::handoff::ProtocolChoice::Sglang);
    assert_eq!((handoff.links.len(), handoff.bootstrap_port), (1, 9_000));
    for (more, named) in [
        (", protocol: http", "auto"),
        (", bootstrap_port: 0", "handoff.bootstrap_port"),
        (", links: [{from: a, to: b}]", "bytes_per_second"),
        (
            ", links: [{from: a, to: b, bytes_per_second: 0}]",
            "bytes_per_second",
        ),
        (
            ", links: [{from: a, to: b, bytes_per_second: 1, fixed_seconds: -1}]",
            "handoff.links[0].fixed_seconds",
        ),
        (
            ", links: [{from: '', to: b, bytes_per_second: 1}]",
            "handoff.links[0]",
        ),
    ] {
        refused(&with(more), &[named]);
    }
    let worker = WorkerConfig::from_flag("id=w,url=http://a:1,bootstrap_port=9001").unwrap();
    assert_eq!(worker.bootstrap_port, Some(9_001));
    let wrong = WorkerConfig::from_flag("id=w,url=http://a:1,bootstrap_port=0");
    assert!(wrong.unwrap_err().contains("bootstrap_port"));
}

#[test]
fn a_measured_link_is_read_from_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("link.yaml");
    let with = |more: &str| {
        let path = file.display();
        yaml(&format!(
            "handoff: {{kv_bytes_per_token: 1, link_file: '{path}'{more}}}"
        ))
    };
    let error = with("").unwrap_err().to_string();
    assert!(error.contains("link.yaml"), "{error}");
    let lines = "# over tcp\nlink_bytes_per_second: 5930000000\nlink_fixed_seconds: 0.000120\n";
    std::fs::write(&file, lines).unwrap();
    let handoff = with("").unwrap().handoff.unwrap();
    assert_eq!(
        (handoff.link_bytes_per_second, handoff.link_fixed_seconds),
        (5.93e9, 0.000_12)
    );
    let error = with(", link_fixed_seconds: 1").unwrap_err().to_string();
    assert!(error.contains("beside link_file"), "{error}");
    std::fs::write(&file, "lease_seconds: 3").unwrap();
    let error = with("").unwrap_err().to_string();
    assert!(error.contains("unknown key lease_seconds"), "{error}");
    std::fs::write(&file, "").unwrap();
    let error = with("").unwrap_err().to_string();
    assert!(error.contains("link_bytes_per_second"), "{error}");
}

#[test]
fn the_documented_handoff_is_accepted_and_shows_the_defaults() {
    let config = yaml(example(include_str!("../../../docs/handoff.md"))).unwrap();
    assert_eq!(config.workers.len(), 2);
    let short =
        yaml("handoff: {kv_bytes_per_token: 114688, link_bytes_per_second: 104e6}").unwrap();
    assert_eq!(config.handoff, short.handoff);
}

#[test]
fn the_documented_process_is_accepted() {
    let text = include_str!("../../../docs/pool.md");
    let (_, section) = text.split_once("## Engines on this machine").unwrap();
    let config = yaml(example(section)).unwrap();
    let template = &config.processes[0];
    assert_eq!(
        (template.fixed_replicas(), template.ready_seconds),
        (None, 1200.0)
    );
    let events = template
        .command
        .last()
        .unwrap()
        .replace("{events_port}", "1")
        .replace("{replay_port}", "2");
    let events: serde_json::Value = serde_json::from_str(&events).unwrap();
    assert_eq!(
        (&events["endpoint"], &events["replay_endpoint"]),
        (&"tcp://*:1".into(), &"tcp://*:2".into())
    );
}

/// The first YAML of a document.
fn example(text: &str) -> &str {
    let (_, rest) = text.split_once("```yaml\n").unwrap();
    rest.split_once("```").unwrap().0
}
