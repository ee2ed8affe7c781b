"""A prefill and a decode engine behind a router that splits every request it can."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable

from client import Answer
from gate import Gate, Passage
from harness import LEASE_SECONDS, MODEL, Engine, samples, wait_until
from prompts import Prompts
from router import Handoffs, Router, splitting

KV_BYTES_PER_TOKEN = 1024  # 2 layers, keys and values, 2 heads of 64, 2 bytes each
BELIEVED_LEASE_SECONDS = LEASE_SECONDS / 5  # by the router, so that a test sees its end

SLEEPER = "sleeper"

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def request(path: str, prompt: str | list[int], tokens: int = 6, **fields: object) -> dict:
    """The body of a request in the words of its API."""
    body: dict = {"model": MODEL, "temperature": 0}
    if path == RESPONSES:
        return {**body, "input": prompt, "max_output_tokens": tokens, **fields}
    body["max_tokens"] = tokens
    if path == COMPLETIONS:
        return {**body, "prompt": prompt, "ignore_eos": True, **fields}
    body["messages"] = [{"role": "user", "content": prompt}]
    return {**body, **({"ignore_eos": True} if path == CHAT else {}), **fields}


def text_of(path: str, answer: Answer) -> str:
    """The generated text, whichever shape an answer has."""
    assert answer.status == 200, answer
    if path in (COMPLETIONS, CHAT):
        return answer.content
    if not answer.events:
        document = answer.json
        parts = document["content"] if path == MESSAGES else document["output"][0]["content"]
        return "".join(part["text"] for part in parts)
    events = [json.loads(event) for event in answer.events if event != "[DONE]"]
    if path == RESPONSES:
        assert "response.completed" in answer.text or "response.incomplete" in answer.text, answer.events[-1]
        return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert events[-1]["type"] == "message_stop", events[-1]
    return "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")


class Lane:
    """A router with its own door to the decode engine.

    A request that never ends is held at that door: the router believes the decode worker busy, and splits what would
    keep it waiting. The engine itself knows nothing of it and is not slowed down.
    """

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.decode = decode
        self.gate = Gate(decode)
        self.gate.hold(lambda passage: passage.body.get("user") == SLEEPER)
        settings = {
            "health_interval_seconds": 0.5,
            **splitting(KV_BYTES_PER_TOKEN, BELIEVED_LEASE_SECONDS),
        }
        self.router = Router(
            [prefill, decode], model=True, settings=settings, doors={decode.name: self.gate}, roles=True
        )

    def __enter__(self) -> Lane:
        self.router.start()
        self.router.wait_introduced()
        # It cannot be split itself: its prompt lies within a list.
        self._sleeper = self.send(COMPLETIONS, request(COMPLETIONS, [[40, 41]], user=SLEEPER))  # type: ignore[list-item]
        self.gate.wait_for("the sleeper is held", lambda passage: passage.body.get("user") == SLEEPER)
        return self

    def __exit__(self, *_: object) -> None:
        self._sleeper.close()
        self.gate.close()
        self.router.stop()

    def send(self, path: str, body: dict) -> http.client.HTTPConnection:
        """Sends a request and does not wait for its answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.router.port, timeout=120)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return connection

    def post(self, path: str, body: dict) -> Answer:
        return self.router.http.post(path, body, timeout=120)

    def later(self, path: str, body: dict) -> Callable[[], Answer]:
        """Posts in the background; what is returned waits for the answer."""
        answers: list[Answer | BaseException] = []

        def run() -> None:
            try:
                answers.append(self.post(path, body))
            except BaseException as error:  # noqa: BLE001
                answers.append(error)

        thread = threading.Thread(target=run)
        thread.start()

        def wait() -> Answer:
            thread.join(150)
            assert answers, "no answer"
            if isinstance(answers[0], BaseException):
                raise answers[0]
            return answers[0]

        return wait

    def alone(self, path: str, body: dict) -> Answer:
        """What the decode engine answers when it computes everything itself."""
        self.decode.reset()
        return self.decode.http.post(path, body)

    def handoffs(self) -> Handoffs:
        return self.router.handoffs()

    def split_legs(self) -> list[Passage]:
        return [passage for passage in self.gate.passed if passage.parameters]

    def wait_clean(self, seconds: float = 60) -> None:
        """Waits until no handoff is open and only the sleeper is booked."""

        def clean() -> bool:
            self._seen = self.handoffs(), self.router.workers()
            booked = sum(view.active_requests for view in self._seen[1].values())
            return self._seen[0].open == 0 and booked <= 1

        try:
            wait_until("no handoff and no booking is left", clean, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; the router says {self._seen}\n{self.router.log_tail()}") from None


class Fetched:
    """What a decode engine itself says it has fetched."""

    def __init__(self, engine: Engine) -> None:
        text = engine.http.get("/metrics").text
        # Absent before the first of each.
        count = lambda name: int(sum(value for _, value in samples(text, name)))  # noqa: E731
        self.transfers = count("vllm:nixl_bytes_transferred_count")
        self.bytes = count("vllm:nixl_bytes_transferred_sum")
        self.tokens = count("vllm:external_prefix_cache_hits_total")

    def since(self, before: Fetched) -> Fetched:
        difference = object.__new__(Fetched)
        difference.__dict__ = {k: v - before.__dict__[k] for k, v in self.__dict__.items()}
        return difference

    def __repr__(self) -> str:
        return f"Fetched({self.__dict__})"


class Pair:
    """The engines: one that processes prompts, one that decodes, and one that decodes and computes what it cannot fetch."""

    def __init__(self, prefill: Engine, decode: Engine, recomputing: Engine) -> None:
        self.prefill, self.decode, self.recomputing = prefill, decode, recomputing
        self._met = False

    @property
    def all(self) -> list[Engine]:
        return [self.prefill, self.decode, self.recomputing]

    def make_whole(self) -> None:
        """Starts what a test has killed, and lets the engines meet: a first handshake may take longer than they wait."""
        gone = [engine for engine in self.all if engine.frozen or not engine.alive()]
        for engine in gone:
            engine.kill()
            engine.launch()
        for engine in gone:
            engine.wait_ready()
        if self._met and not gone:
            return
        prompts = Prompts(f"handshake {id(self)}")
        for decode in (self.decode, self.recomputing):
            wait_until(f"{decode.name} fetches from {self.prefill.name}", lambda: self._hand_over(decode, prompts), 180)
        self._met = True

    def _hand_over(self, decode: Engine, prompts: Prompts) -> bool:
        body = request(COMPLETIONS, prompts.tokens(40), tokens=1)
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = self.prefill.http.post(COMPLETIONS, {**body, "kv_transfer_params": asked})
        assert answer.status == 200, answer
        before = Fetched(decode)
        handed = {**body, "kv_transfer_params": answer.json["kv_transfer_params"]}
        if decode.http.post(COMPLETIONS, handed).status != 200:
            return False
        wait_until("the engine counts it", lambda: Fetched(decode).since(before).transfers == 1, seconds=10)
        return True
