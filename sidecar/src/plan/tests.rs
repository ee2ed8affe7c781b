use clap::Parser;

use super::*;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    plan: PlanArgs,
}

fn parse(text: &str) -> std::result::Result<PlanArgs, String> {
    let words = std::iter::once("plan").chain(text.split_whitespace());
    let command = Command::try_parse_from(words).map_err(|error| error.to_string())?;
    Ok(command.plan)
}

fn args(text: &str) -> PlanArgs {
    parse(text).unwrap()
}

fn study(text: &str) -> (Study, PlanArgs) {
    let args = args(text);
    (Study::new(&args).unwrap(), args)
}

const NVLINK: &str = "--kv-bytes-per-token 147456 --prefill 8000:220 --attention-tokens 47104 --link 5.93GB/s --gap-ms 31";

#[test]
fn the_page_shows_what_the_command_prints() {
    let page = include_str!("../../../docs/handoff.md");
    let (_, example) = page.split_once("```sh\nkvlane plan").unwrap();
    let (command, rest) = example.split_once("```\n").unwrap();
    let words = command.replace("\\\n", " ");
    let (study, args) = study(&words);
    let (_, shown) = rest
        .split_once("<!-- printed by the command -->\n")
        .unwrap();
    let (shown, _) = shown.split_once("<!-- end -->").unwrap();
    assert_eq!(shown.trim(), table::tables(&study, &args).unwrap().trim());
    // `UPDATE_DOCS=1 cargo test` draws it again.
    let picture = plot::plot(&study, &args).unwrap();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/handoff-crossover.svg");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &picture).unwrap();
    }
    assert!(
        picture == std::fs::read_to_string(path).unwrap(),
        "the picture is out of date"
    );
}

#[test]
fn a_model_alone_tells_its_kv_bytes() {
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/vllm-0.32.0/model"
    );
    let text = study::model_alone(&args(&format!("--model {folder}"))).unwrap();
    assert!(text.contains("kv_bytes_per_token: 1024\n"), "{text}");
    let json = study::model_alone(&args(&format!("--model {folder} --json"))).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["kv_bytes_per_token"], 1024.0);
    for (flags, missing) in [
        ("--kv-bytes-per-token 1", "--prefill"),
        ("--model m --prefill 1:1", "--link"),
        ("--model m --link 1GB/s", "--prefill"),
        ("--model m --svg f", "--link"),
    ] {
        let error = parse(flags).unwrap_err();
        assert!(error.contains(missing), "{error}");
    }
}

#[test]
fn the_measured_pair_is_reproduced() {
    let (study, args) = study(NVLINK);
    let links = study.links(&args).unwrap();
    let point = |tokens| {
        let is = |point: &&study::Point| point.tokens == tokens;
        *links[0].points.iter().find(is).unwrap()
    };
    let near = |predicted: f64, measured: f64| {
        assert!(
            (predicted / measured - 1.0).abs() < 0.2,
            "{predicted} for {measured}"
        );
    };
    for (tokens, one, two) in [(8_000, 0.220, 0.419), (16_000, 0.496, 0.875)] {
        near(point(tokens).one_worker.ttft_seconds, one);
        near(point(tokens).two_workers.ttft_seconds, two);
    }
    near(point(16_000).one_worker.gap_seconds, 0.265);
    near(point(16_000).two_workers.gap_seconds, 0.172);
}

#[test]
fn the_choice_changes_exactly_where_it_is_said_to() {
    let (_, base) = study(NVLINK);
    let (study, mut args) = study(NVLINK);
    let links = study.links(&base).unwrap();
    let changes = &links[0].changes_at_tokens;
    assert_eq!(changes.len(), 1, "{changes:?}");
    for at in changes {
        args.tokens = vec![at - 1, *at];
        let points = &study.links(&args).unwrap()[0].points;
        assert_ne!(points[0].split, points[1].split);
    }
    // Just below the speed that is said to pay it does not, just above it does.
    let pays = study.pays_from(8_000).unwrap().unwrap();
    args.tokens = vec![8_000];
    for (factor, split) in [(0.999, false), (1.001, true)] {
        args.link = vec![format!("{}MB/s", pays * factor / 1e6).parse().unwrap()];
        assert_eq!(study.links(&args).unwrap()[0].points[0].split, split);
    }
}

#[test]
fn an_idle_decoder_is_never_spared() {
    let (study, args) = study(&format!("{NVLINK} --streams 0"));
    let links = study.links(&args).unwrap();
    let never = |point: &study::Point| point.pays_from_bytes_per_second.is_none() && !point.split;
    assert!(links[0].points.iter().all(never));
    let text = table::tables(&study, &args).unwrap();
    assert!(
        text.contains("From 500 to 128,000 tokens: one worker."),
        "{text}"
    );
}

#[test]
fn a_model_is_read_from_its_folder_or_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.json");
    let config = r#"{"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                     "hidden_size": 4096, "intermediate_size": 12288}"#;
    std::fs::write(&file, config).unwrap();
    let rest = "--prefill 8000:220 --link 5.93GB/s --gap-ms 31";
    let (by_hand, by_hand_args) = study(NVLINK);
    for path in [folder.path(), &file] {
        let (study, args) = study(&format!("--model {} {rest}", path.display()));
        assert_eq!(
            study.links(&args).unwrap(),
            by_hand.links(&by_hand_args).unwrap()
        );
    }
    let quantised = format!("--model {} {rest} --kv-cache-dtype fp8", file.display());
    let (study, _) = study(&quantised);
    assert!((study.bytes_per_token() - 73_728.0).abs() < 1e-9);
    let missing = args("--model /nowhere/at/all --prefill 8000:220 --link 6GB/s");
    let error = Study::new(&missing).unwrap_err();
    assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
}

#[test]
fn flags_out_of_range_are_named() {
    for (text, part) in [
        (
            "--kv-bytes-per-token 1 --prefill 8000 --link 6GB/s",
            "tokens:milliseconds",
        ),
        (
            "--kv-bytes-per-token 1 --prefill 0:5 --link 6GB/s",
            "tokens:milliseconds",
        ),
        (
            "--kv-bytes-per-token 1 --prefill 5:0 --link 6GB/s",
            "tokens:milliseconds",
        ),
        (
            "--kv-bytes-per-token 1 --prefill 5:NaN --link 6GB/s",
            "tokens:milliseconds",
        ),
        ("--kv-bytes-per-token 1 --prefill 5:5 --link 6", "100Gbit/s"),
        (
            "--kv-bytes-per-token 1 --prefill 5:5 --link=-6GB/s",
            "100Gbit/s",
        ),
        (
            "--kv-bytes-per-token 1 --prefill 5:5 --link infGB/s",
            "100Gbit/s",
        ),
        ("--prefill 5:5 --link 6GB/s", "--model"),
        ("--kv-bytes-per-token 1 --link 6GB/s", "--prefill"),
        (
            "--kv-bytes-per-token 1 --prefill 5:5 --link 6GB/s --tokens 0",
            "0",
        ),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.contains(part), "{text}: {error}");
    }
    for (flags, part) in [
        ("--kv-bytes-per-token 0", "KV bytes"),
        ("--kv-bytes-per-token 1 --gap-ms=-1", "--gap-ms"),
        (
            "--kv-bytes-per-token 1 --link-fixed-ms NaN",
            "--link-fixed-ms",
        ),
        (
            "--kv-bytes-per-token 1 --ttft-objective-ms 0",
            "ttft_objective_seconds",
        ),
        (
            "--kv-bytes-per-token 1 --attention-tokens 0",
            "--attention-tokens",
        ),
    ] {
        let args = args(&format!("{flags} --prefill 5:5 --link 6GB/s"));
        let error = Study::new(&args).unwrap_err().to_string();
        assert!(error.contains(part), "{flags}: {error}");
    }
}

#[test]
fn speeds_are_read_in_bytes_and_in_bits() {
    for (text, bytes) in [
        ("104MB/s", 104e6),
        ("6 GB/s", 6e9),
        ("100Gbit/s", 12.5e9),
        ("2.5Gbit/s", 312.5e6),
    ] {
        let speed: LinkSpeed = text.parse().unwrap();
        assert!(
            (speed.bytes_per_second / bytes - 1.0).abs() < 1e-12,
            "{text}"
        );
        assert_eq!(speed.to_string(), text);
    }
    assert_eq!(table::speed(526.4e6), "526 MB/s");
    assert_eq!(table::speed(1.2e6), "1.20 MB/s");
    assert_eq!(table::speed(48e9), "48.0 GB/s");
    assert_eq!(table::grouped(1_234_567.0), "1,234,567");
    assert_eq!(table::grouped(12.0), "12");
}
