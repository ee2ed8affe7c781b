"""Simulated engines as processes, and the requests of the measured story: twelve prefixes that one engine cannot hold."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

KV_BLOCKS = 926
PREFIXES, SENDS = 12, 6
PREFIX_WORDS, FRESH_WORDS = 1476, 24  # a word is a token to the engine
SHARED_TOKENS = 1472  # in the complete blocks of a prefix
REPEATS = PREFIXES * (SENDS - 1)
MODEL = "sim"


class Engine:
    """One `kvlane engine` on ports of its own choice."""

    def __init__(self, *, events: bool = True, decode_ms: float = 2.0, speed: float = 10.0) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", prefix="kvlane-engine-")
        anywhere = "tcp://127.0.0.1:*"
        sockets = ["--events", anywhere, "--replay", anywhere] if events else []
        self._process = subprocess.Popen(
            [os.environ["KVLANE_BIN"], "engine", "--listen", "127.0.0.1:0", "--kv-blocks", str(KV_BLOCKS),
             "--decode-ms", str(decode_ms * speed), "--speed", str(speed), *sockets],
            stdout=self._log, stderr=self._log,
        )  # fmt: skip
        line = wait_until("the engine serves", self._started, 30)
        self.url = re.search(r'url="([^"]+)"', line).group(1)
        self.api = self.url + "/v1"
        self.events = self.replay = None
        if events:
            source = self.get("/kv_event_sources")["0"]
            self.events, self.replay = source["endpoint"], source["replay_endpoint"]

    def _started(self) -> str | None:
        assert self._process.poll() is None, self._text()
        return next((line for line in self._text().splitlines() if "simulated engine serves" in line), None)

    def _text(self) -> str:
        with open(self._log.name) as log:
            return re.sub(r"\x1b\[[0-9;]*m", "", log.read())

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)

    def tokenize(self, body: dict) -> list[int]:
        """Asks the engine for the tokens of a request."""
        wanted = {"model": MODEL, **{name: body[name] for name in ("messages", "tools", "prompt") if body.get(name)}}
        request = urllib.request.Request(
            self.url + "/tokenize", json.dumps(wanted).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)["tokens"]

    def reset(self) -> None:
        """Empties the cache, without an event when there are none."""
        urllib.request.urlopen(urllib.request.Request(self.url + "/reset_prefix_cache", b""), timeout=10).close()

    def running(self) -> int:
        """Requests in the engine, by its own metrics."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            page = answer.read().decode()
        counts = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([0-9.]+)$", page, re.MULTILINE)
        assert len(counts) == 2, page
        return round(sum(map(float, counts)))

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


@contextlib.contextmanager
def engines(count: int = 2, **options) -> Iterator[list[Engine]]:
    started: list[Engine] = []
    try:
        for _ in range(count):
            started.append(Engine(**options))
        yield started
    finally:
        for engine in started:
            engine.stop()


@dataclass(frozen=True)
class Prompt:
    text: str
    is_repeat: bool


def workload(seed: int) -> list[Prompt]:
    """Twelve prefixes, six times each, shuffled, the last words always fresh."""
    rng = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(f"w{rng.randrange(1_000, 100_000)}" for _ in range(count))

    prefixes = [words(PREFIX_WORDS) for _ in range(PREFIXES)]
    order = [number % PREFIXES for number in range(PREFIXES * SENDS)]
    rng.shuffle(order)
    seen: set[int] = set()
    prompts = []
    for prefix in order:
        prompts.append(Prompt(f"{prefixes[prefix]} {words(FRESH_WORDS)}", prefix in seen))
        seen.add(prefix)
    assert sum(prompt.is_repeat for prompt in prompts) == REPEATS
    return prompts


def is_hit(prompt: Prompt, cached_tokens: int | None) -> bool:
    """The engine itself says that it had all complete blocks of the prefix."""
    return prompt.is_repeat and (cached_tokens or 0) >= SHARED_TOKENS


def free_port() -> int:
    """A port that is free, and not one of those that the system gives to whoever asks for any, which others would take first."""
    for port in random.sample(range(10_000, 32_000), 1_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def post_and_leave(url: str, body: dict, is_time: Callable[[], object], **headers: str) -> None:
    """Sends a request and leaves without an answer when something is true."""
    address = urllib.parse.urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as client:
        text = json.dumps(body)
        lines = [f"POST {address.path} HTTP/1.1", f"host: {address.netloc}", "content-type: application/json"]
        lines += [f"content-length: {len(text)}", *(f"{name}: {value}" for name, value in headers.items())]
        client.sendall("\r\n".join([*lines, "", text]).encode())
        wait_until("the request is there", is_time)


def wait_until(what: str, check: Callable[[], object], seconds: float = 10):
    """Polls until `check` returns something true, which is returned; fails by name with the last answer."""
    deadline = time.monotonic() + seconds
    while not (last := check()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what} (last: {last!r})"
        time.sleep(0.02)
    return last


def active(router) -> int:
    """Bookings that a router counts, after those whose time is over were let go."""
    return sum(worker.active_requests for worker in router.workers())


LONG = workload(9)[0].text


def fidelity(router) -> float:
    """How far the predictions for the one worker are believed: 1 until an engine reports otherwise."""
    (worker,) = router.workers()
    return worker.trust[0].fidelity


def chat_body(text: str, **options) -> dict:
    """A request for a chat of one message."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 2, **options}
