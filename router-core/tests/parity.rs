//! Drives the cases that every language must answer alike, see `tests/parity/README.md`.

#![expect(clippy::unwrap_used, reason = "what fails to unwrap fails the test")]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvlane::{
    BlockHashes, BlockSize, Candidate, Error, ErrorKind, LeaseId, LoadReport, LocalBlockHash,
    MediaSpan, Outcome, Overrides, Prompt, PromptHasher, Role, Router, RouterConfig, SaltContext,
    SelectRequest, WorkerId, WorkerSpec, block_hashes,
};
use rmp::encode;
use serde_json::{Map, Value, json};

/// What one step came to: the value that it returned, or the kind and message of its error.
type Answer = Result<Value, Failure>;
type Failure = (ErrorKind, String);

#[test]
fn hash_cases() {
    let mut ran = 0;
    for case in cases("hashes") {
        let name = case["name"].as_str().unwrap();
        let answer = hashes_of(&case);
        check(name, &case, &answer, |actual| {
            assert_eq!(actual["local"], case["local"], "{name}: local");
            assert_eq!(actual["sequence"], case["sequence"], "{name}: sequence");
        });
        ran += 1;
    }
    assert!(ran >= 20, "only {ran} cases ran");
}

#[test]
fn scenario_cases() {
    let mut ran = 0;
    for case in cases("scenarios") {
        let name = case["name"].as_str().unwrap();
        let config = RouterConfig::from_json(&case["config"].to_string());
        match config.and_then(Router::new).map_err(failure) {
            Ok(router) => {
                assert_eq!(
                    case["error"],
                    Value::Null,
                    "{name}: the configuration was taken"
                );
                Play::new(router).run(name, case["steps"].as_array().unwrap());
            }
            Err(error) => check(name, &case, &Err(error), |_| unreachable!()),
        }
        ran += 1;
    }
    assert!(ran >= 40, "only {ran} cases ran");
}

/// One scenario under way.
struct Play {
    router: Router,
    start: Instant,
    now: Instant,
    leases: HashMap<String, (LeaseId, Value)>,
}

impl Play {
    #[expect(clippy::disallowed_methods, reason = "a test has a clock")]
    fn new(router: Router) -> Self {
        let start = Instant::now();
        Self {
            router,
            start,
            now: start,
            leases: HashMap::new(),
        }
    }

    fn run(&mut self, scenario: &str, steps: &[Value]) {
        for (number, step) in steps.iter().enumerate() {
            let call = step["do"].as_str().unwrap();
            let at = format!("{scenario}, step {number} ({call})");
            let empty = Map::new();
            let with = Arguments(step["with"].as_object().unwrap_or(&empty));
            let answer = match step["lease"].as_str() {
                Some(lease) if !matches!(call, "select" | "book") => {
                    Ok(self.of_lease(call, lease, &with))
                }
                lease => self.of_router(call, lease, &with),
            };
            check(&at, step, &answer, |actual| {
                if let Some(expected) = step.get("expect") {
                    matches(&at, expected, actual);
                }
            });
        }
    }

    fn of_router(&mut self, call: &str, lease: Option<&str>, with: &Arguments<'_>) -> Answer {
        let (router, now) = (&self.router, self.now);
        let rank = with.number("dp_rank");
        match call {
            "advance" => self.now += Duration::from_secs_f64(with.0["seconds"].as_f64().unwrap()),
            "close" => router.close(),
            "add_worker" => router
                .add_worker(with.worker_spec()?, now)
                .map_err(failure)?,
            "remove_worker" => router.remove_worker(with.text("id")).map_err(failure)?,
            "drain_worker" => router.drain_worker(with.text("id")).map_err(failure)?,
            "undrain_worker" => router.undrain_worker(with.text("id")).map_err(failure)?,
            "set_role" => {
                let role = with.role()?.unwrap();
                router.set_role(with.text("id"), role).map_err(failure)?;
            }
            "set_labels" => {
                let labels = serde_json::from_value(with.0["labels"].clone()).unwrap();
                router
                    .set_labels(with.text("id"), labels)
                    .map_err(failure)?;
            }
            "clear" => router.clear(with.text("worker"), rank).map_err(failure)?,
            "record" => {
                let ttl = with.seconds("ttl")?;
                let prompt = with.prompt(router.config().block_size);
                router
                    .record(with.text("worker"), rank, &prompt, ttl, now)
                    .map_err(failure)?;
            }
            "report_load" => {
                let report = LoadReport {
                    running: with.number("running").unwrap_or(0),
                    waiting: with.number("waiting").unwrap_or(0),
                    kv_usage: with.0.get("kv_usage").map_or(0.0, |v| v.as_f64().unwrap()),
                };
                router
                    .report_load(with.text("worker"), rank, report, now)
                    .map_err(failure)?;
            }
            "select" | "book" => return self.placed(call, lease, with),
            _ => return self.told(call, with),
        }
        Ok(Value::Null)
    }

    /// Calls that return something.
    fn told(&self, call: &str, with: &Arguments<'_>) -> Answer {
        let (router, now) = (&self.router, self.now);
        let rank = with.number("dp_rank");
        Ok(match call {
            "ingest" => {
                let seq = with.0.get("seq").and_then(Value::as_u64);
                let report = router
                    .ingest(
                        with.text("worker"),
                        rank.unwrap_or(0),
                        seq,
                        &with.payload(),
                        now,
                    )
                    .map_err(failure)?;
                serde_json::to_value(report).unwrap()
            }
            "overlap" => router
                .overlap(&with.prompt(router.config().block_size), now)
                .into_iter()
                .map(|(target, overlap)| {
                    let mut value = serde_json::to_value(overlap).unwrap();
                    value["worker"] = json!(target.worker);
                    value["dp_rank"] = json!(target.dp_rank);
                    value
                })
                .collect(),
            "rank" => {
                let prompt = with.prompt(router.config().block_size);
                let allowed = with.allowed();
                let request = with.request(&prompt, allowed.as_deref())?;
                candidates(&router.rank(&request, now).map_err(failure)?)
            }
            "trust" => {
                let trust = router
                    .trust(with.text("worker"), rank.unwrap_or(0), now)
                    .map_err(failure)?;
                let since = trust.since.saturating_duration_since(self.start);
                json!({
                    "state": trust.state, "fidelity": trust.fidelity, "cause": trust.cause,
                    "since": since.as_secs_f64(),
                })
            }
            "workers" => serde_json::to_value(router.workers(now)).unwrap(),
            "stats" => {
                router.tick(now);
                serde_json::to_value(router.stats()).unwrap()
            }
            call => panic!("no call is named {call}"),
        })
    }

    fn placed(&mut self, call: &str, lease: Option<&str>, with: &Arguments<'_>) -> Answer {
        let prompt = with.prompt(self.router.config().block_size);
        let allowed = with.allowed();
        let mut request = with.request(&prompt, allowed.as_deref())?;
        let guard = if call == "select" {
            self.router.select(&request, self.now).map_err(failure)?
        } else {
            let rank = request.dp_rank.take();
            let worker = with.text("worker");
            Some(
                self.router
                    .book(worker, rank, &request, self.now)
                    .map_err(failure)?,
            )
        };
        let Some(guard) = guard else {
            return Ok(Value::Null);
        };
        let view = json!({
            "worker": guard.worker(), "dp_rank": guard.dp_rank(),
            "overlap_blocks": guard.decision().overlap_blocks(),
            "predicted_cached_tokens": guard.decision().predicted_cached_tokens,
        });
        let explained = candidates(&guard.decision().candidates());
        let id = guard.detach(self.now);
        if let Some(lease) = lease {
            self.leases.insert(lease.to_owned(), (id, explained));
        }
        Ok(view)
    }

    fn of_lease(&self, call: &str, lease: &str, with: &Arguments<'_>) -> Value {
        let (id, explained) = &self.leases[lease];
        match call {
            "explain" => return explained.clone(),
            "prefill_done" => drop(self.router.prefill_done(*id, self.now)),
            "output_tokens" => {
                self.router
                    .output_tokens(*id, with.number("n").unwrap(), self.now);
            }
            "release" | "finish" => {
                let ok = with.0.get("ok").and_then(Value::as_bool).unwrap_or(true);
                let outcome = if ok { Outcome::ok() } else { Outcome::failed() };
                let outcome = outcome.reported(with.number("cached_tokens"), None);
                let live = self.router.finish(*id, &outcome, self.now);
                if call == "finish" {
                    return json!(live);
                }
            }
            call => panic!("no call of a lease is named {call}"),
        }
        Value::Null
    }
}

/// The arguments of a step.
struct Arguments<'a>(&'a Map<String, Value>);

impl Arguments<'_> {
    fn text(&self, name: &str) -> &str {
        self.0[name].as_str().unwrap()
    }

    fn number(&self, name: &str) -> Option<u32> {
        Some(self.0.get(name)?.as_u64()?.try_into().unwrap())
    }

    fn seconds(&self, name: &str) -> Result<Option<Duration>, Failure> {
        let Some(seconds) = self.0.get(name).and_then(Value::as_f64) else {
            return Ok(None);
        };
        let duration = Duration::try_from_secs_f64(seconds);
        duration
            .map(Some)
            .map_err(|error| (ErrorKind::InvalidRequest, format!("{name}: {error}")))
    }

    fn allowed(&self) -> Option<Vec<WorkerId>> {
        let ids = self.0.get("allowed")?.as_array()?;
        Some(
            ids.iter()
                .map(|id| WorkerId::new(id.as_str().unwrap()).unwrap())
                .collect(),
        )
    }

    fn role(&self) -> Result<Option<Role>, Failure> {
        let role = self
            .0
            .get("role")
            .map(|role| role.as_str().unwrap().parse());
        role.transpose().map_err(failure)
    }

    fn worker_spec(&self) -> Result<WorkerSpec, Failure> {
        let mut spec = WorkerSpec::new(self.text("id")).map_err(failure)?;
        spec.dp_ranks = self.number("dp_ranks").unwrap_or(1);
        spec.role = self.role()?.unwrap_or_default();
        spec.kv_capacity_blocks = self.number("kv_capacity_blocks").map(|n| n as usize);
        let block_size = self.number("block_size").map(BlockSize::new);
        spec.block_size = block_size.transpose().map_err(failure)?;
        Ok(spec)
    }

    fn request<'a>(
        &'a self,
        prompt: &'a Prompt,
        allowed: Option<&'a [WorkerId]>,
    ) -> Result<SelectRequest<'a>, Failure> {
        let mut request = SelectRequest::new(prompt);
        let text = |name: &str| self.0.get(name).map(|text| text.as_str().unwrap());
        request.request_id = text("request_id");
        request.session = text("session");
        request.allowed = allowed;
        request.role = self.role()?;
        request.dp_rank = self.number("dp_rank");
        request.expected_output_tokens = self.number("expected_output_tokens");
        request.ttl = self.seconds("ttl")?;
        if let Some(overrides) = self.0.get("overrides") {
            request.overrides = Overrides::from_json(&overrides.to_string()).map_err(failure)?;
        }
        Ok(request)
    }

    fn payload(&self) -> Vec<u8> {
        if let Some(batch) = self.0.get("batch") {
            let mut out = Vec::new();
            pack(batch, &mut out);
            return out;
        }
        unhex(self.text("payload"))
    }

    fn prompt(&self, block_size: BlockSize) -> Prompt {
        let prompt = &self.0["prompt"];
        if let Some(list) = prompt.get("tokens") {
            with_salt(prompt, |salt| {
                Prompt::from_tokens(&tokens(list), block_size, salt)
            })
        } else {
            Prompt::from_text(text_hashes(prompt))
        }
    }
}

fn hashes_of(case: &Value) -> Answer {
    let prompt = &case["prompt"];
    let hashes = if let Some(list) = prompt.get("tokens") {
        let size = case["block_size"].as_u64().unwrap_or(16);
        match BlockSize::new(size.try_into().unwrap()) {
            Ok(size) => with_salt(prompt, |salt| {
                let hashes = block_hashes(&tokens(list), size, salt);
                assert_eq!(
                    in_pieces(&tokens(list), size, salt),
                    hashes.local,
                    "{prompt}"
                );
                hashes
            }),
            Err(error) => return Err(failure(error)),
        }
    } else {
        text_hashes(prompt)
    };
    let hex = |hash: u64| format!("{hash:016x}");
    let local: Vec<String> = hashes.local.iter().map(|hash| hex(hash.0)).collect();
    let sequence: Vec<String> = hashes.sequence.iter().map(|hash| hex(hash.0)).collect();
    Ok(json!({"local": local, "sequence": sequence}))
}

/// Hashes a prompt as a conversation that grows by 7 tokens a turn.
fn in_pieces(tokens: &[u32], size: BlockSize, salt: &SaltContext<'_>) -> Vec<LocalBlockHash> {
    let mut hasher = PromptHasher::new(size, salt);
    for turn in tokens.chunks(7) {
        hasher.append(turn);
    }
    hasher.prompt().local_hashes().to_vec()
}

fn text_hashes(prompt: &Value) -> BlockHashes {
    with_salt(prompt, |salt| match prompt.get("text") {
        Some(Value::String(text)) => kvlane::text::text_hashes(text, salt),
        Some(long) => {
            let times = long["times"].as_u64().unwrap().try_into().unwrap();
            let text = long["repeat"].as_str().unwrap().repeat(times);
            kvlane::text::text_hashes(&text, salt)
        }
        None => {
            let list = prompt["messages"].to_string();
            let tools = prompt.get("tools").map(Value::to_string);
            kvlane::chat::hashes(&[], &list, tools.as_deref(), salt).unwrap()
        }
    })
}

fn with_salt<T>(prompt: &Value, hash: impl FnOnce(&SaltContext<'_>) -> T) -> T {
    let number = |value: &Value| value.as_u64().unwrap().try_into().unwrap();
    let media: Vec<MediaSpan> = prompt["media"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|item| MediaSpan {
            offset_tokens: number(&item[0]),
            length_tokens: number(&item[1]),
            digest: unhex(item[2].as_str().unwrap()),
        })
        .collect();
    hash(&SaltContext {
        lora: prompt["lora"].as_str(),
        salt: prompt["salt"].as_str(),
        media: &media,
    })
}

fn candidates(candidates: &[Candidate]) -> Value {
    candidates
        .iter()
        .map(|candidate| {
            let mut value = serde_json::to_value(candidate).unwrap();
            value["worker"] = json!(candidate.target.worker);
            value["dp_rank"] = json!(candidate.target.dp_rank);
            value
        })
        .collect()
}

fn tokens(list: &Value) -> Vec<u32> {
    let number = |value: &Value| u32::try_from(value.as_u64().unwrap()).unwrap();
    match list.as_array() {
        Some(tokens) => tokens.iter().map(number).collect(),
        None => (number(&list["start"])..)
            .take(number(&list["count"]) as usize)
            .collect(),
    }
}

/// Encodes JSON as msgpack.
fn pack(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Null => encode::write_nil(out).unwrap(),
        Value::Bool(value) => encode::write_bool(out, *value).unwrap(),
        Value::Number(number) => match number.as_u64() {
            Some(number) => drop(encode::write_uint(out, number).unwrap()),
            None => match number.as_i64() {
                Some(number) => drop(encode::write_sint(out, number).unwrap()),
                None => encode::write_f64(out, number.as_f64().unwrap()).unwrap(),
            },
        },
        Value::String(text) => encode::write_str(out, text).unwrap(),
        Value::Array(items) => {
            encode::write_array_len(out, items.len().try_into().unwrap()).unwrap();
            items.iter().for_each(|item| pack(item, out));
        }
        Value::Object(object) => {
            if let Some(hex) = object.get("$hex") {
                encode::write_bin(out, &unhex(hex.as_str().unwrap())).unwrap();
            } else if let Some(range) = object.get("$tokens") {
                let (start, count) = (range[0].as_u64().unwrap(), range[1].as_u64().unwrap());
                pack(&(start..start + count).collect(), out);
            } else {
                encode::write_map_len(out, object.len().try_into().unwrap()).unwrap();
                for (key, value) in object {
                    encode::write_str(out, key).unwrap();
                    pack(value, out);
                }
            }
        }
    }
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
        .collect()
}

#[expect(clippy::needless_pass_by_value, reason = "it is handed to map_err")]
fn failure(error: Error) -> Failure {
    (error.kind(), error.to_string())
}

/// Holds an answer against the error that a step or case expects, or hands the value on.
fn check(at: &str, case: &Value, answer: &Answer, value: impl FnOnce(&Value)) {
    match (answer, case["error"].as_str()) {
        (Ok(actual), None) => value(actual),
        (Ok(actual), Some(code)) => panic!("{at}: {code} was expected, and it returned {actual}"),
        (Err((kind, message)), None) => panic!("{at}: {}: {message}", kind.code()),
        (Err((kind, message)), Some(code)) => {
            assert_eq!(kind.code(), code, "{at}: {message}");
            let naming = case["naming"].as_str().unwrap_or_default();
            assert!(
                message.contains(naming),
                "{at}: {naming:?} is not in {message:?}"
            );
        }
    }
}

fn matches(at: &str, expected: &Value, actual: &Value) {
    match (expected, actual) {
        (Value::Object(expected), Value::Object(actual)) => {
            for (key, expected) in expected {
                let actual = actual.get(key).unwrap_or(&Value::Null);
                matches(&format!("{at}.{key}"), expected, actual);
            }
        }
        (Value::Array(expected), Value::Array(actual)) => {
            assert_eq!(
                expected.len(),
                actual.len(),
                "{at}: {expected:?} is expected of {actual:?}"
            );
            for (index, (expected, actual)) in expected.iter().zip(actual).enumerate() {
                matches(&format!("{at}[{index}]"), expected, actual);
            }
        }
        (Value::Number(expected), Value::Number(actual)) => {
            let (expected, actual) = (expected.as_f64().unwrap(), actual.as_f64().unwrap());
            assert!(
                (expected - actual).abs() < 1e-9,
                "{at}: {expected} is expected of {actual}"
            );
        }
        (Value::String(expected), Value::String(actual))
            if expected.len() >= 2 && expected.starts_with('*') && expected.ends_with('*') =>
        {
            let part = &expected[1..expected.len() - 1];
            assert!(actual.contains(part), "{at}: {part:?} is not in {actual:?}");
        }
        _ => assert_eq!(expected, actual, "{at}"),
    }
}

fn cases(part: &str) -> Vec<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/parity/cases.json");
    let text = std::fs::read_to_string(path).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    all[part].as_array().unwrap().clone()
}
