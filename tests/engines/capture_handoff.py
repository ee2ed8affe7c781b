"""Records what a real pair of engines answers to the two legs of a handoff, and to one whose prefill engine is gone."""

from __future__ import annotations

import http.client
import json

from client import Http
from harness import Connector, Engine
from pair import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Pair, request, text_of
from prompts import Prompts

PROMPT_TOKENS = 40


def capture_handoff() -> str:
    """One case an API: the client's request, both legs, and their answers."""
    prefill, decode = (Engine(role, connector=Connector(role)) for role in ("prefill", "decode"))
    try:
        for engine in (prefill, decode):
            engine.launch()
        for engine in (prefill, decode):
            engine.wait_ready()
        pair = Pair(prefill, decode, decode)
        pair.make_whole()
        cases = [Case(pair, path) for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES)]
        prefill.kill()
        for case in cases:
            case.fail()
        return "[\n" + ",\n".join(json.dumps(case.recorded, ensure_ascii=False) for case in cases) + "\n]\n"
    finally:
        for engine in (prefill, decode):
            engine.kill()


class Case:
    """A request in the words of one API."""

    def __init__(self, pair: Pair, path: str) -> None:
        self.pair, self.path = pair, path
        body = request(path, Prompts(path).words(PROMPT_TOKENS), tokens=4)
        if path in (COMPLETIONS, CHAT):
            body["stop"] = ["w1"]
        self.body, self.streamed = {**body, "stream": False}, {**body, "stream": True}
        prefill_leg, prefill_answer, decode_leg = self.legs(self.body)
        answer = pair.decode.http.post(path, decode_leg)
        _, _, streamed_leg = self.legs(self.streamed)
        stream = pair.decode.http.post(path, streamed_leg)
        assert text_of(path, answer) == text_of(path, stream)
        self.recorded: dict = {
            "path": path,
            "request": self.body,
            "prefill_leg": prefill_leg,
            "prefill_answer": prefill_answer,
            "decode_leg": decode_leg,
            "decode_answer": answer.json,
            "decode_stream": stream.text,
        }
        self._failing = [self.legs(body)[2] for body in (self.body, self.streamed)]

    def legs(self, body: dict) -> tuple[dict, dict, dict]:
        limits = ("max_tokens", "max_output_tokens")
        leg = {**body, "stream": False, **{name: 1 for name in limits if name in body}}
        leg.pop("stop", None)
        leg["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = self.pair.prefill.http.post(self.path, leg)
        assert answer.status == 200, answer
        return leg, answer.json, {**body, "kv_transfer_params": answer.json["kv_transfer_params"]}

    def fail(self) -> None:
        """Records what the decode engine answers when there is nothing to fetch from."""
        whole, streamed = self._failing
        answer = self.pair.decode.http.post(self.path, whole)
        self.recorded["failed_answer"] = {"status": answer.status, "body": answer.json}
        self.recorded["failed_stream"] = as_far_as_it_comes(self.pair.decode.http, self.path, streamed)


def as_far_as_it_comes(engine: Http, path: str, body: dict) -> str:
    """The text of a stream that may break off."""
    received = b""
    try:
        for piece in engine.stream(path, body):
            received += piece
    except (http.client.IncompleteRead, ConnectionError) as error:
        received += getattr(error, "partial", b"")
    return received.decode()
