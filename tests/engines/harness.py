"""Starts and stops the real processes of these tests: vLLM engines and the router.

Every process gets its own process group, recorded as a file in `$KVLANE_ENGINES_RUN/groups`, so that `run.sh` can end
what a killed pytest left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

from client import Answer, Http

BLOCK_TOKENS = 32  # the CPU attention backend of vLLM takes multiples of 32 only
KV_BLOCKS = 64  # vLLM keeps one of them for itself
MAX_MODEL_TOKENS = 512
MODEL = "tiny"
LEASE_SECONDS = 30  # vLLM's default
ENGINE_START_SECONDS = float(os.environ.get("KVLANE_ENGINE_START_SECONDS", "300"))

RUN_DIR = pathlib.Path(os.environ["KVLANE_ENGINES_RUN"])
VENV_PYTHON = os.environ["KVLANE_VLLM_PYTHON"]
MODEL_DIR = os.environ["KVLANE_VLLM_MODEL"]
KVLANE_BIN = os.environ["KVLANE_BIN"]


def free_ports(count: int) -> list[int]:
    """Returns TCP ports that were free a moment ago, all different.

    They are taken below the range that the kernel hands to outgoing connections, so that a port stays free while an
    engine is restarted on it.
    """
    ports: list[int] = []
    low = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidate = 18000 + (os.getpid() * 37) % 6000
    while len(ports) < count:
        candidate += 1
        if candidate >= low or candidate >= 32000:
            candidate = 15000
        if candidate in _handed_out:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
        _handed_out.add(candidate)
        ports.append(candidate)
    return ports


_handed_out: set[int] = set()


def wait_until(what: str, check: Callable[[], object], seconds: float, every: float = 0.1) -> object:
    """Polls `check` until it returns something true; fails by name with its last answer after `seconds`."""
    deadline = time.monotonic() + seconds
    last: object = None
    while True:
        try:
            last = check()
            if last:
                return last
        except (OSError, LookupError, ValueError) as error:
            last = error
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {seconds:g} s: {what} (last seen: {last!r})")
        time.sleep(every)


class Process:
    """A child in its own process group with its output in a log file."""

    def __init__(self, name: str, command: list[str], env: dict[str, str] | None = None) -> None:
        self.name = name
        (RUN_DIR / "groups").mkdir(parents=True, exist_ok=True)
        (RUN_DIR / "logs").mkdir(exist_ok=True)
        self.log = RUN_DIR / "logs" / f"{name}-{time.strftime('%H%M%S')}-{next(_serial)}.log"
        with self.log.open("wb") as out:
            out.write((" ".join(command) + "\n").encode())
            out.flush()
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self._group_file = RUN_DIR / "groups" / str(self._child.pid)
        self._group_file.write_text(name)

    def alive(self) -> bool:
        return self._child.poll() is None

    def log_tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- last lines of {self.log}", *text[-lines:]])

    def kill(self) -> None:
        """Kills the whole group at once, first the one that answers: it would tell of the others' end."""
        self._child.kill()
        os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(10)
        self._group_file.unlink(missing_ok=True)

    def members(self, title: str) -> list[int]:
        """Returns the processes of the group that have this title."""
        found = []
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                group = int(stat.read_text().rpartition(")")[2].split()[2])
                if group == self._child.pid and title in (stat.parent / "cmdline").read_text():
                    found.append(int(stat.parent.name))
        assert found, f"{self.name} has no process {title}"
        return found

    def stop(self, signum: int = signal.SIGTERM, seconds: float = 20) -> int | None:
        """Signals the leader, waits for it, then kills whatever is left of the group."""
        if self.alive():
            self._child.send_signal(signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        code = self._child.wait(10)
        self._group_file.unlink(missing_ok=True)
        return code


def _count() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


_serial = _count()


@dataclasses.dataclass
class Connector:
    """How an engine takes part in handoffs over NIXL."""

    role: str  # prefill or decode
    load_failure_policy: str = "fail"  # or recompute

    def flags(self) -> list[str]:
        config = {
            "kv_connector": "NixlConnector",
            "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[self.role],
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": self.load_failure_policy,
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
        }
        return ["--kv-transfer-config", json.dumps(config)]


class Engine:
    """One vLLM server on the CPU. `events=False` starts it without any KV event configuration."""

    def __init__(self, name: str, events: bool = True, connector: Connector | None = None) -> None:
        self.name = name
        self.publishes = events
        self.connector = connector
        self.port, self.events_port, self.replay_port, self.side_channel_port = free_ports(4)
        self.http = Http("127.0.0.1", self.port)
        self.process: Process | None = None
        self._workers: list[int] = []
        self.frozen = False
        self.started_seconds = 0.0
        self._start_began = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> None:
        """Starts the server and returns at once; `wait_ready` follows."""
        command = [
            VENV_PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", MODEL_DIR,
            "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL,
            "--enforce-eager", "--max-model-len", str(MAX_MODEL_TOKENS), "--max-num-seqs", "8",
            "--max-num-batched-tokens", "512", "--block-size", str(BLOCK_TOKENS),
            "--num-gpu-blocks-override", str(KV_BLOCKS), "--api-server-count", "1",
            "--enable-prefix-caching", "--enable-prompt-tokens-details",
        ]  # fmt: skip
        if self.publishes:
            kv_events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{self.events_port}",
                "replay_endpoint": f"tcp://*:{self.replay_port}",
                "topic": f"kv@{self.name}@{MODEL}",
            }
            command += ["--kv-events-config", json.dumps(kv_events)]
        if self.connector is not None:
            command += self.connector.flags()
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
            "UCX_TLS": "tcp,cma,sm,self",  # the machine's own; a single core can make TCP alone very slow
            "UCX_MODULES": "^ib",  # without InfiniBand its module crashes the process at its end
        }
        self._start_began = time.monotonic()
        self._workers = []
        self.process = Process(f"vllm-{self.name}", command, env)

    def wait_ready(self) -> None:
        assert self.process is not None

        def healthy() -> bool:
            assert self.process is not None
            if not self.process.alive():
                # Not an OSError, so the wait ends here and now.
                raise RuntimeError(f"{self.name} ended while starting\n{self.process.log_tail()}")
            return self.http.get("/health", timeout=2).status == 200

        try:
            wait_until(f"vLLM {self.name} answers /health", healthy, ENGINE_START_SECONDS, every=0.5)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.process.log_tail()}") from None
        self.started_seconds = time.monotonic() - self._start_began
        print(f"vLLM {self.name} ready after {self.started_seconds:.0f} s")

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
            self.process = None

    def alive(self) -> bool:
        return self.process is not None and self.process.alive()

    def kill(self) -> None:
        """Ends all of its processes at once, as a crash of the machine would."""
        if self.process is not None:
            self.process.kill()
            self.process = None
        self.frozen = False

    def freeze(self) -> None:
        """Stops the process that computes; the one that takes requests goes on."""
        self.frozen = True
        self._signal_worker(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets it go on."""
        self._signal_worker(signal.SIGCONT)
        self.frozen = False

    def slow_motion(self, over: threading.Event) -> None:
        """Lets it compute now and then until `over` is set, and leaves it frozen.

        So little that no stream ends meanwhile: the process that takes requests may be busy for a second with its first
        event, and 400 tokens take 0.1 s.
        """
        while not over.is_set():
            self.thaw()
            time.sleep(0.002)
            self.freeze()
            over.wait(0.2)

    def _signal_worker(self, signum: int) -> None:
        assert self.process is not None
        # Looked for once: on a busy machine the look takes longer than a whole stream does.
        self._workers = self._workers or self.process.members("VLLM::Worker")
        for process in self._workers:
            os.kill(process, signum)

    def reset(self) -> None:
        """Empties the prefix cache and makes the engine say so: vLLM publishes the clear with its next step only."""
        wait_until(
            f"{self.name} resets its prefix cache",
            lambda: self.http.post("/reset_prefix_cache", None).status == 200,
            seconds=10,
        )
        self.nudge()

    def nudge(self) -> None:
        """One tiny request (no complete block), so that pending events are published."""
        answer = self.complete([40, 41, 42], max_tokens=1)
        assert answer.status == 200, answer

    def complete(self, prompt: list[int] | str, max_tokens: int = 2) -> Answer:
        """Sends a completion to the engine itself, past the router."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return self.http.post("/v1/completions", body)

    def counters(self) -> Counters:
        return Counters(self.http.get("/metrics").text)


class Counters:
    """The counters of an engine's /metrics that judge routing."""

    def __init__(self, text: str) -> None:
        self.prompt_tokens = sum_samples(text, "vllm:prompt_tokens_total")
        self.cache_queries = sum_samples(text, "vllm:prefix_cache_queries_total")
        self.cache_hits = sum_samples(text, "vllm:prefix_cache_hits_total")
        self.generated_tokens = sum_samples(text, "vllm:generation_tokens_total")
        self.running = sum_samples(text, "vllm:num_requests_running")

    def since(self, before: Counters) -> Counters:
        difference = object.__new__(Counters)
        difference.__dict__ = {k: v - before.__dict__[k] for k, v in self.__dict__.items()}
        return difference

    def __repr__(self) -> str:
        return f"Counters({self.__dict__})"


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Returns (labels, value) of every sample of one metric family member in Prometheus text."""
    found = []
    for line in text.splitlines():
        match = re.match(rf"{re.escape(name)}(?:\{{(.*)\}})?\s+(\S+)", line)
        if match:
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[1] or ""))
            found.append((labels, float(match[2])))
    return found


def sum_samples(text: str, name: str) -> int:
    found = samples(text, name)
    assert found, f"metric {name} is missing"
    return int(sum(value for _, value in found))
