"""Runs `kvlane serve` in front of engines, and reads what it says about itself.

Everything that depends on the spelling of flags, configuration keys, response headers, admin JSON or metrics of the
router is in this file.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence

from client import Answer, Http
from gate import Gate
from harness import BLOCK_TOKENS, KVLANE_BIN, MODEL, MODEL_DIR, RUN_DIR, Engine, Process, free_ports, samples, sum_samples, wait_until


@dataclasses.dataclass
class Trust:
    """What the router believes about the event stream of one (worker, dp rank)."""

    state: str
    fidelity: float
    cause: str | None


@dataclasses.dataclass
class WorkerView:
    """One entry of `GET /v1/workers`."""

    id: str
    draining: bool
    active_requests: int
    device_blocks: int
    indexed_blocks: int  # over all tiers
    trust: Trust

    @classmethod
    def parse(cls, entry: dict) -> WorkerView:
        trust = entry["trust"]
        trust = trust[0] if isinstance(trust, list) else trust
        blocks = entry["index_blocks"]
        return cls(
            id=entry["id"],
            draining=entry["draining"],
            active_requests=entry["active_requests"],
            device_blocks=blocks["device"],
            indexed_blocks=sum(blocks.values()),
            trust=Trust(trust["state"], float(trust["fidelity"]), trust.get("cause")),
        )


@dataclasses.dataclass
class Handoffs:
    """What the router counts of handoffs."""

    open: int
    ended: dict[str, int]  # by outcome
    fallbacks: dict[str, int]  # by reason

    @classmethod
    def parse(cls, text: str) -> Handoffs:
        def by(label: str, name: str) -> dict[str, int]:
            return {labels[label]: int(value) for labels, value in samples(text, name) if value}

        return cls(
            open=sum_samples(text, "kvlane_handoffs_open"),
            ended=by("outcome", "kvlane_handoffs_total"),
            fallbacks=by("reason", "kvlane_handoff_fallbacks_total"),
        )


def splitting(kv_bytes_per_token: int, lease_seconds: float) -> dict:
    """The settings of a router that splits whatever would keep another request of the decode worker waiting."""
    planner = {
        "ttft_objective_seconds": 1e6,
        "itl_objective_seconds": 1e-6,
        "assumed_prefill_tokens_per_second": 10_000,
        "transfer_stall_seconds_per_token": 0,
    }
    return {
        "handoff": {
            "kv_bytes_per_token": kv_bytes_per_token,
            "link_bytes_per_second": 1e9,
            "lease_seconds": lease_seconds,
            "planner": planner,
        }
    }


class Routed:
    """An answer that came through the router, with the router's own account of it."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.status = answer.status
        self.worker = answer.headers.get("x-kvlane-worker")
        self.trust = answer.headers.get("x-kvlane-trust")
        overlap = answer.headers.get("x-kvlane-overlap-blocks")
        self.overlap_blocks = None if overlap is None else int(overlap)

    @property
    def cached_tokens(self) -> int:
        return self.answer.cached_tokens

    @property
    def cached_blocks(self) -> int:
        assert self.cached_tokens % BLOCK_TOKENS == 0, self.cached_tokens
        return self.cached_tokens // BLOCK_TOKENS

    def __repr__(self) -> str:
        told = {k: v for k, v in self.answer.headers.items() if k.startswith("x-kvlane")}
        return f"Routed({self.status}, {told}, {self.answer.body[:600]!r})"


class Router:
    """A running `kvlane serve`. `settings` are configuration keys; with any, a configuration file is used.

    Engines with a gate in `doors` are reached through it. With `roles` the router is told which engines hand over.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        model: bool = False,
        settings: dict | None = None,
        doors: Mapping[str, Gate] | None = None,
        roles: bool = False,
    ) -> None:
        self.port, self.admin_port = free_ports(2)
        self.http = Http("127.0.0.1", self.port)
        self.admin = Http("127.0.0.1", self.admin_port)
        self._engines = list(engines)
        self._model = model
        self._settings = settings
        self._doors = doors or {}
        self._roles = roles
        self._process: Process | None = None

    def start(self) -> Router:
        command = [KVLANE_BIN, "serve", *(self._flags() if self._settings is None else self._config_flags())]
        self._process = Process("kvlane", command)
        try:
            wait_until("kvlane is ready", self._ready, seconds=30)
        except AssertionError as error:
            tail = self._process.log_tail()
            self.stop()
            raise AssertionError(f"{error}\n{tail}") from None
        return self

    def _ready(self) -> bool:
        assert self._process is not None
        if not self._process.alive():
            raise RuntimeError(f"kvlane ended while starting\n{self._process.log_tail()}")
        return self.admin.get("/readyz", timeout=2).status == 200

    def _flags(self) -> list[str]:
        flags = [
            "--listen", f"127.0.0.1:{self.port}", "--admin", f"127.0.0.1:{self.admin_port}",
            "--block-size", str(BLOCK_TOKENS), "--debug-headers",
        ]  # fmt: skip
        if self._model:
            flags += ["--model", MODEL_DIR]
        for engine in self._engines:
            fields = ",".join(f"{k}={v}" for k, v in self._worker(engine).items())
            flags += ["--worker", fields]
        return flags

    def _config_flags(self) -> list[str]:
        document = {
            "listen": f"127.0.0.1:{self.port}",
            "admin": f"127.0.0.1:{self.admin_port}",
            "debug_headers": True,
            "block_size": BLOCK_TOKENS,
            **({"model": MODEL_DIR} if self._model else {}),
            **(self._settings or {}),
            "workers": [self._worker(engine) for engine in self._engines],
        }
        path = RUN_DIR / f"kvlane-{self.port}.yaml"
        path.write_text(json.dumps(document, indent=1))  # JSON is YAML
        return ["--config", str(path)]

    def _worker(self, engine: Engine) -> dict[str, str]:
        door = self._doors.get(engine.name)
        return {
            "id": engine.name,
            "url": door.url if door else engine.url,
            "events": f"tcp://127.0.0.1:{engine.events_port}",
            "replay": f"tcp://127.0.0.1:{engine.replay_port}",
            **({"role": engine.connector.role} if self._roles and engine.connector else {}),
        }

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop(seconds=10)
            self._process = None

    def __enter__(self) -> Router:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def complete(self, prompt: list[int] | str, stream: bool = False, max_tokens: int = 2, **fields: object) -> Routed:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return self._post("/v1/completions", {**body, **fields}, stream)

    def chat(self, body: dict, stream: bool = False) -> Routed:
        return self._post("/v1/chat/completions", body, stream)

    def _post(self, path: str, body: dict, stream: bool) -> Routed:
        if stream:
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        return Routed(self.http.post(path, body))

    def workers(self) -> dict[str, WorkerView]:
        answer = self.admin.get("/v1/workers")
        assert answer.status == 200, answer
        document = json.loads(answer.body)
        entries = document if isinstance(document, list) else document["workers"]
        return {view.id: view for view in map(WorkerView.parse, entries)}

    def worker(self, engine: Engine) -> WorkerView:
        return self.workers()[engine.name]

    def handoffs(self) -> Handoffs:
        return Handoffs.parse(self.metrics())

    def handoff_report(self) -> dict:
        """What `GET /v1/handoff` says."""
        answer = self.admin.get("/v1/handoff")
        assert answer.status == 200, answer
        return answer.json["handoff"]

    def wait_introduced(self) -> None:
        """Waits until all engines have said what they hand over with: before, nothing is split."""

        def introduced() -> bool:
            told = [worker["told"]["connector"] for worker in self.handoff_report()["workers"]]
            return told == ["nixl"] * len(self._engines)

        wait_until("every engine has told its connector", introduced, seconds=60)

    def metrics(self) -> str:
        answer = self.admin.get("/metrics")
        assert answer.status == 200, answer
        return answer.text

    def exported_states(self, engine: Engine) -> set[str]:
        """The trust states that are 1 for a worker in /metrics."""
        return {
            labels["state"]
            for labels, value in samples(self.metrics(), "kvlane_trust_state")
            if labels.get("worker") == engine.name and value == 1
        }

    def wait_trust(self, engine: Engine, state: str, seconds: float = 20) -> Trust:
        def reached() -> Trust | None:
            self._seen = trust = self.worker(engine).trust
            return trust if trust.state == state else None

        try:
            return wait_until(f"trust of {engine.name} is {state}", reached, seconds)  # type: ignore[return-value]
        except AssertionError as error:
            raise AssertionError(f"{error}; the router says {self._seen}\n{self.log_tail()}") from None

    def wait_blocks(self, engine: Engine, device_blocks: int, seconds: float = 10) -> None:
        """Waits until the index holds exactly this many blocks of a worker, on the device tier."""

        def reached() -> bool:
            self._seen = view = self.worker(engine)
            return view.device_blocks == device_blocks

        try:
            wait_until(f"index of {engine.name} holds {device_blocks} blocks", reached, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; the router says {self._seen}\n{self.log_tail()}") from None

    def wait_idle(self) -> None:
        """Waits until nothing is booked: a booking may outlive the last byte of its answer by a moment."""
        wait_until(
            "nothing is booked",
            lambda: all(view.active_requests == 0 for view in self.workers().values()),
            seconds=5,
        )

    def settle(self, quiet_seconds: float = 0.3) -> None:
        """Waits until the index has not changed for a while: what the engines announced has arrived."""
        last, since = None, time.monotonic()
        deadline = since + 15
        while (now := time.monotonic()) - since < quiet_seconds:
            assert now < deadline, f"the index does not come to rest: {last}"
            blocks = {name: view.device_blocks for name, view in self.workers().items()}
            if blocks != last:
                last, since = blocks, now
            time.sleep(0.05)

    def log_tail(self) -> str:
        return self._process.log_tail() if self._process else ""


def pause_past_predictions() -> None:
    """Waits until what the router itself predicted has expired (2 s by default), so that only events speak."""
    time.sleep(2.3)


