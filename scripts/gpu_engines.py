"""Plays the shared-prefix workload and handoffs over two engines on one GPU, through `kvlane serve`; prints Markdown.

    gpu_engines.py --kvlane PATH --out FOLDER --card TEXT [--link FILE] [--commit TEXT] [--simulated]

Run by scripts/gpu-engines.sh. The engines are vLLM of this Python, or `kvlane engine` with --simulated. They stay up for the whole run;
each play gets empty prefix caches and a router of its own. A repeat is a hit when the engine itself reports every complete block
of the shared prefix as cached. Times to the first token are the client's, streamed, one request at a time.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import threading
import time

root = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root / "tests" / "engines"))
from client import Answer, Http  # noqa: E402

MODEL = "qwen3-0.6b-shape"
BLOCK_TOKENS, KV_BLOCKS = 16, 926
PREFIXES, SENDS, PROMPT_TOKENS, FRESH_TOKENS = 12, 6, 1_500, 24
SHARED_TOKENS = (PROMPT_TOKENS - FRESH_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
SEEDS = 1, 2, 3
VOCABULARY = 151_936
# Keys and values of 28 layers, 8 heads of 128, two bytes each.
KV_BYTES_PER_TOKEN = 2 * 28 * 8 * 128 * 2
# Of one H200 to itself over NIXL, blocks of 16 KiB; used where no link was measured.
LINK = {"link_bytes_per_second": 340_468_712, "link_fixed_seconds": 0.000873}

# How vLLM runs the model. Compiling it would take minutes of the card; graphs alone spare steps of up to 512 tokens the launches.
MODES = {
    "graphs": ["--compilation-config", json.dumps({"mode": 0, "cudagraph_mode": "FULL"})],
    "eager": ["--enforce-eager"],
}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCABULARY,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu",
    "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write_model(folder):
    """Writes a model folder without weights: the shape, and a tokenizer with a word for each id."""
    folder.mkdir(parents=True, exist_ok=True)
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = {word: number for number, word in enumerate(special)} | {f"w{i}": i for i in range(len(special), VOCABULARY)}
    added = [
        {"id": number, "content": word, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for number, word in enumerate(special)
    ]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    for name, document in (("config", CONFIG), ("tokenizer", tokenizer), ("tokenizer_config", names)):
        (folder / f"{name}.json").write_text(json.dumps(document))


class Process:
    """A child with a group of its own and its output in a log file."""

    def __init__(self, name, command, out, env=None):
        self.name = name
        self.log = out / f"{name}.log"
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, start_new_session=True
            )

    def wait(self, what, check, seconds):
        """Waits until `check` is true; says how long that took, and fails with the log's end when the process does."""
        began = time.monotonic()
        while True:
            try:
                if check():
                    return time.monotonic() - began
            except (OSError, LookupError, ValueError):
                pass
            if self.child.poll() is not None or time.monotonic() - began > seconds:
                tail = self.log.read_text(errors="replace").splitlines()[-30:]
                ended = "ended" if self.child.poll() is not None else f"is not there after {seconds} s"
                raise RuntimeError("\n".join([f"{self.name}: {what}: {ended}", *tail]))
            time.sleep(0.1)

    def stop(self):
        for signal, seconds in ((15, 10), (9, 10)):
            try:
                os.killpg(self.child.pid, signal)
                self.child.wait(seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        # What a leader that ended has left behind.
        try:
            os.killpg(self.child.pid, 9)
        except ProcessLookupError:
            pass


class Engine:
    """One engine: `number` gives it its name and its ports."""

    def __init__(self, number):
        self.name = f"w{number + 1}"
        base = 21_000 + 10 * number
        self.port, self.events, self.replay, self.transfer, self.nothing = range(base, base + 5)
        self.http = Http("127.0.0.1", self.port)
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, args, model, connector):
        command, env = self.simulated(args) if args.simulated else self.vllm(model, connector, args.mode)
        self.process = Process(self.name, command, args.out, env)

    def simulated(self, args):
        local = "127.0.0.1"
        return [
            args.kvlane, "engine", "--listen", f"{local}:{self.port}", "--events", f"tcp://{local}:{self.events}",
            "--replay", f"tcp://{local}:{self.replay}", "--kv-transfer", f"{local}:{self.transfer}", "--kv-transport", "tcp",
            "--kv-blocks", str(KV_BLOCKS), "--model-name", MODEL,
        ], {}  # fmt: skip

    def vllm(self, model, connector, mode):
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": f"kv@{self.name}@{MODEL}",
            "endpoint": f"tcp://*:{self.events}", "replay_endpoint": f"tcp://*:{self.replay}",
        }  # fmt: skip
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1", "--port", str(self.port),
            "--served-model-name", MODEL, "--load-format", "dummy", "--gpu-memory-utilization", "0.12",
            "--num-gpu-blocks-override", str(KV_BLOCKS), "--block-size", str(BLOCK_TOKENS), "--max-model-len", "8192",
            "--max-num-seqs", "32", "--enable-prefix-caching", "--enable-prompt-tokens-details", "--api-server-count", "1",
            "--attention-backend", "FLASH_ATTN", "--kv-events-config", json.dumps(events), *MODES[mode],
        ]  # fmt: skip
        if connector:
            command += ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})]
        env = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache, and the connector in /server_info
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # by default it is imported, and it is not brought along
            "VLLM_USE_DEEP_GEMM": "0",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.transfer),
        }
        if not pathlib.Path("/sys/class/infiniband").exists():
            env["UCX_MODULES"] = "^ib"  # else UCX of the wheel crashes a process at its end
        return command, env

    def wait_ready(self):
        return self.process.wait("/health", lambda: self.http.get("/health", timeout=2).status == 200, 200)

    def reset(self):
        """Empties the prefix cache. vLLM says so with its next step only, so a tiny request follows."""
        assert self.http.post("/reset_prefix_cache", None).status == 200
        assert self.http.post("/v1/completions", body([40, 41, 42], max_tokens=1)).status == 200


class Router:
    """A running `kvlane serve` over the engines."""

    ports = iter(range(22_000, 23_000, 2))

    def __init__(self, args, name, settings, workers):
        port = next(self.ports)
        self.http, self.admin = Http("127.0.0.1", port), Http("127.0.0.1", port + 1)
        settings = {"listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{port + 1}", "block_size": BLOCK_TOKENS, "debug_headers": True, **settings}
        path = args.out / "kvlane.yaml"
        path.write_text(json.dumps({**settings, "workers": workers}))  # JSON is YAML
        self.process = Process("kvlane", [args.kvlane, "serve", "--config", str(path)], args.out)
        self.process.wait(f"{name}: /readyz", lambda: self.admin.get("/readyz", timeout=2).status == 200, 30)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stop()

    def workers(self):
        return self.admin.get("/v1/workers").json["workers"]

    def wait_exact(self, blocks=None):
        """Waits until both event streams are followed, and, if told, until they have led to this many blocks."""

        def followed():
            return all(w["trust"][0]["state"] == "exact" and blocks in (None, w["index_blocks"]["device"]) for w in self.workers())

        self.process.wait("event streams are followed", followed, 30)

    def decisions(self, limit):
        return self.admin.get(f"/v1/decisions?limit={limit}").json["decisions"]

    def handoff(self):
        return self.admin.get("/v1/handoff").json["handoff"]


def body(prompt, max_tokens=2, **fields):
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


def stream(http, request, on_first=None):
    """Sends a streamed completion; returns seconds to the first token, and the answer."""
    began = time.monotonic()
    first, data = None, b""
    for piece in http.stream("/v1/completions", {**request, "stream": True, "stream_options": {"include_usage": True}}, timeout=120):
        data += piece
        if first is None and b'"choices":[{' in data.replace(b" ", b""):
            first = time.monotonic() - began
            if on_first:
                on_first()
    events = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
    answer = Answer(200, {}, data, events)
    if first is None or "error" in events[0]:
        raise RuntimeError(f"no token came: {data[:500]!r}")
    return first, answer


def workload(seed):
    """Returns (prefix number, prompt, whether it is a repeat) of each request."""
    rng = random.Random(seed)
    tokens = lambda count: [rng.randrange(1_000, 100_000) for _ in range(count)]
    prefixes = [tokens(PROMPT_TOKENS - FRESH_TOKENS) for _ in range(PREFIXES)]
    order = [send % PREFIXES for send in range(PREFIXES * SENDS)]
    rng.shuffle(order)
    seen = set()
    for number in order:
        yield number, prefixes[number] + tokens(FRESH_TOKENS), number in seen
        seen.add(number)


POLICIES = [
    ("round robin", {"policy": "round-robin"}, None),
    ("random", {"policy": "random"}, None),
    ("least loaded", {"policy": "least-loaded"}, None),
    ("kvlane, from its own placements (`index: approximate`)", {"index": "approximate"}, None),
    ("kvlane, told of events where none are", {}, "nothing"),
    ("kvlane, following events", {}, "events"),
    ("pinned by the client, half of the prefixes each, no router", None, None),
]


def play_policy(args, engines, policy, seed):
    """Plays the workload once; returns the times of first sends and of repeats, and the hits."""
    name, settings, events = policy
    for engine in engines:
        engine.reset()
    times, hits = {False: [], True: []}, 0
    router = None
    if settings is not None:
        workers = [{"id": engine.name, "url": engine.url} for engine in engines]
        for worker, engine in zip(workers, engines):
            if events:
                worker["events"] = f"tcp://127.0.0.1:{getattr(engine, events)}"
            if events == "events":
                worker["replay"] = f"tcp://127.0.0.1:{engine.replay}"
        router = Router(args, name, {"seed": seed, **settings}, workers)
    try:
        if events == "events":
            router.wait_exact(blocks=0)
        for number, prompt, repeat in workload(seed):
            http = router.http if router else engines[number % len(engines)].http
            seconds, answer = stream(http, body(prompt))
            times[repeat].append(seconds)
            hits += repeat and answer.cached_tokens >= SHARED_TOKENS
        trust = [worker["trust"][0]["state"] for worker in router.workers()] if events else None
    finally:
        if router:
            router.process.stop()
    return times, hits, trust


def hit_table(args, engines, report):
    rows = report["hits"] = []
    print(
        f"\nHits of {PREFIXES * (SENDS - 1)} repeats, for the seeds {', '.join(map(str, SEEDS))}; {PREFIXES} prefixes of {PROMPT_TOKENS:,} tokens sent {SENDS} "
        f"times each, shuffled, the last {FRESH_TOKENS} tokens fresh; engines of {KV_BLOCKS * BLOCK_TOKENS:,} tokens; times are medians.\n"
    )
    print("| policy | hits | time to first token, repeats | first sends |\n|---|---|---:|---:|")
    plays = {policy[0]: [] for policy in POLICIES}
    # In turns, so that what drifts is the same for all.
    for seed in SEEDS:
        for policy in POLICIES:
            plays[policy[0]].append(play_policy(args, engines, policy, seed))
    for name, of in plays.items():
        cold, warm = ([t for times, _, _ in of for t in times[repeat]] for repeat in (False, True))
        row = {"policy": name, "hits": [hits for _, hits, _ in of], "cold": cold, "warm": warm, "trust": [trust for *_, trust in of]}
        rows.append(row)
        print(f"| {name} | {', '.join(map(str, row['hits']))} | {ms(warm)} | {ms(cold)} |", flush=True)


def ms(seconds):
    return f"{statistics.median(seconds) * 1e3:.1f} ms"


def fresh(rng):
    return [rng.randrange(1_000, 100_000) for _ in range(PROMPT_TOKENS)]


def split_by_hand(prefill, decode, prompt):
    """Sends both legs as a router does; returns seconds from the first leg's start to the first token, and of the first leg."""
    began = time.monotonic()
    leg = body(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
    answer = prefill.http.post("/v1/completions", leg, timeout=120).json
    first_leg = time.monotonic() - began
    seconds, _ = stream(decode.http, body(prompt, kv_transfer_params=answer["kv_transfer_params"]))
    return first_leg + seconds, first_leg


def at_once(count, call):
    """Runs `call` in threads; returns what each returned, and fails as the first that fails."""
    results, errors = [], []

    def run():
        try:
            results.append(call())
        except Exception as error:  # whatever it was, the caller must know
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def compare_by_hand(engines, report):
    """First tokens of fresh prompts: on one engine, and prefilled on the other."""
    prefill, decode = engines
    rng = random.Random(7)
    split_by_hand(prefill, decode, fresh(rng))  # the two get to know each other
    alone = [stream(decode.http, body(fresh(rng)))[0] for _ in range(8)]
    split = [split_by_hand(prefill, decode, fresh(rng)) for _ in range(8)]
    prompts = [[fresh(rng) for _ in range(4)] for _ in range(2)]
    alone_4 = at_once(4, lambda: stream(decode.http, body(prompts[0].pop()))[0])
    split_4 = at_once(4, lambda: split_by_hand(prefill, decode, prompts[1].pop())[0])
    report["by_hand"] = {"alone": alone, "split": split, "alone_4": alone_4, "split_4": split_4}
    moved = KV_BYTES_PER_TOKEN * PROMPT_TOKENS
    print(f"\nFirst tokens of fresh prompts of {PROMPT_TOKENS:,} tokens ({moved / 1e6:.0f} MB of KV), both legs sent by the client:\n")
    print("| | one worker | prefill on the other | of it the first leg |\n|---|---:|---:|---:|")
    print(f"| one at a time, median of 8 | {ms(alone)} | {ms([s for s, _ in split])} | {ms([f for _, f in split])} |")
    print(f"| four at once, the last | {max(alone_4) * 1e3:.1f} ms | {max(split_4) * 1e3:.1f} ms | |", flush=True)


def handoff_workers(engines, labels):
    return [
        {
            "id": engine.name, "url": engine.url, "role": role, "labels": labels,
            "events": f"tcp://127.0.0.1:{engine.events}", "replay": f"tcp://127.0.0.1:{engine.replay}",
        }
        for engine, role in zip(engines, ("prefill", "decode"))
    ]  # fmt: skip


def planned(args, engines, report, run, count=8):
    """Sends fresh prompts through a router that may split them, and prints what it chose and what came of it."""
    rng = random.Random(run["name"])
    settings = {"handoff": {"kv_bytes_per_token": KV_BYTES_PER_TOKEN, **run["handoff"]}}
    with Router(args, run["name"], settings, handoff_workers(engines, run["labels"])) as router:
        router.wait_exact()
        beside = []
        for _ in range(run["beside"]):
            begun = threading.Event()
            request = body(fresh(rng), max_tokens=1_500)
            beside.append(threading.Thread(target=stream, args=(router.http, request, begun.set), daemon=True))
            beside[-1].start()
            begun.wait(60)
        times = [stream(router.http, body(fresh(rng)))[0] for _ in range(count)]
        decoding = sum(thread.is_alive() for thread in beside)
        state, decisions = router.handoff(), router.decisions(count)
        metrics = [line for line in router.admin.get("/metrics").text.splitlines() if line.startswith("kvlane_handoff") and "_bucket" not in line]
        for thread in beside:
            thread.join(120)
    report[run["name"]] = {"times": times, "still_decoding": decoding, "decisions": decisions, "handoff": state, "metrics": metrics}
    # Plans, not decisions, of which a split has two. The newest comes first.
    made = [plan["plan"] for plan in state["plans"][:count]][::-1]
    routes = [plan["options"][0]["route"] for plan in made]
    reasons = ", ".join(sorted({plan["decided_by"] for plan in made}))
    first = {kind: [seconds for seconds, route in zip(times, routes) if route == kind] for kind in ("single", "pair")}
    first = {kind: ms(seconds) if seconds else "-" for kind, seconds in first.items()}
    # Of the last plan, when what this run can teach is learned.
    predicted = {option["route"]: f"{option['ttft']['total_seconds'] * 1e3:.0f} ms" for option in made[-1]["options"]}
    print(
        f"| {run['says']} | {routes.count('pair')} of {len(made)} | {reasons} | {predicted.get('single', '-')} | {first['single']} "
        f"| {predicted.get('pair', '-')} | {first['pair']} |", flush=True,
    )  # fmt: skip


def plans(args, engines, report, link):
    speed = f"{link['link_bytes_per_second'] / 1e6:.0f} MB/s, {link['link_fixed_seconds'] * 1e3:.2f} ms"
    card = {"device": "gpu0"}
    # Neither true nor wise: with these the planner must split, so that a handoff through the router is seen and timed.
    forced = {
        "link_bytes_per_second": 1e15,
        "planner": {
            "ttft_objective_seconds": 1_000, "itl_objective_seconds": 1e-6, "transfer_stall_seconds_per_token": 1e-12,
            "assumed_prefill_tokens_per_second": 10_000,
        },
    }
    runs = [
        {"name": "planner", "says": f"link as measured ({speed}), one card", "handoff": link, "labels": card, "beside": 0},
        {"name": "planner_busy", "says": "the same, two streams decode beside", "handoff": link, "labels": card, "beside": 2},
        {"name": "forced", "says": "made to split: endless link, only gaps count, two streams beside", "handoff": forced, "labels": {}, "beside": 2},
    ]
    print(f"\n`kvlane serve` with roles prefill and decode, 8 fresh prompts of {PROMPT_TOKENS:,} tokens each, one at a time:\n")
    print("| `handoff:` | split | decided by | one worker, predicted last | first token | two, predicted last | first token |\n|---|---:|---|---:|---:|---:|---:|")
    for run in runs:
        planned(args, engines, report, run)


def read_link(path):
    if path is None:
        return LINK
    lines = [line.split(":") for line in path.read_text().splitlines() if line.startswith("link_")]
    return {key: float(value) for key, value in lines}


def start(args, engines, model):
    """Starts the engines, without NIXL where they do not start with it; tells whether they can hand over."""
    for connector in (True, False):
        for engine in engines:
            engine.start(args, model, connector)
        try:
            seconds = [engine.wait_ready() for engine in engines]
            print(f"ready after {max(seconds):.0f} s", file=sys.stderr, flush=True)
            return connector
        except RuntimeError as error:
            print(f"with NIXL: {connector}\n{error}", file=sys.stderr, flush=True)
            for engine in engines:
                engine.process.stop()
    raise SystemExit("the engines do not start")


def warm_up(engines):
    """Lets kernels be compiled and connections be made before anything is timed."""
    rng = random.Random(0)
    for engine in engines:
        for length in (PROMPT_TOKENS, PROMPT_TOKENS, 100, PROMPT_TOKENS) * 3:
            prompt = fresh(rng)[:length]
            for _ in range(2):
                stream(engine.http, body(prompt, max_tokens=4))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvlane", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--card", required=True)
    parser.add_argument("--link", type=pathlib.Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--mode", choices=MODES, default="graphs")
    parser.add_argument("--simulated", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_model(args.out / "model")
    engines = [Engine(0), Engine(1)]
    report = {"card": args.card, "commit": args.commit}
    failed = False
    try:
        connector = start(args, engines, args.out / "model")
        version = engines[0].http.get("/version").json["version"]
        what = "`kvlane engine`" if args.simulated else f"vLLM {version}, Qwen3-0.6B's shape with random weights, `{' '.join(MODES[args.mode])}`"
        print(f"## Two engines on one card\n\n{args.card}; {what}; commit {args.commit}.", flush=True)
        warm_up(engines)
        hit_table(args, engines, report)
        if connector:
            for part in (lambda: compare_by_hand(engines, report), lambda: plans(args, engines, report, read_link(args.link))):
                try:
                    part()
                except (OSError, LookupError, ValueError, RuntimeError) as error:
                    failed = True
                    print(f"\nLeft out: {error!r}", flush=True)
        else:
            failed = True
            print("\nLeft out: handoffs. The engines do not start with NIXL.")
        report["metrics"] = [line for e in engines for line in e.http.get("/metrics").text.splitlines() if "nixl" in line and "bucket" not in line]
    finally:
        (args.out / "engines.json").write_text(json.dumps(report, indent=1))
        for engine in engines:
            engine.process.stop()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
