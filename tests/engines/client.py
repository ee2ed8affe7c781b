"""A small HTTP client on the standard library that keeps the bytes, the headers and the events of an answer."""

from __future__ import annotations

import dataclasses
import http.client
import json
from collections.abc import Iterator


@dataclasses.dataclass
class Answer:
    """One HTTP answer, read to its end."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes
    events: list[str] = dataclasses.field(default_factory=list)  # data of each SSE event, when it was a stream

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def usage(self) -> dict:
        """The usage object, from the body or from the last stream event that has one."""
        if not self.events:
            return self.json["usage"]
        assert self.events[-1] == "[DONE]", self.events[-3:]
        usages = [u for e in self.events[:-1] if (u := json.loads(e).get("usage"))]
        assert usages, f"no usage in the stream: {self.events[-3:]}"
        return usages[-1]

    @property
    def prompt_tokens(self) -> int:
        return self.usage["prompt_tokens"]

    @property
    def cached_tokens(self) -> int:
        """What the engine itself says it took from its cache; vLLM leaves the details out when it is nothing."""
        details = self.usage.get("prompt_tokens_details") or {}
        return details.get("cached_tokens") or 0

    @property
    def content(self) -> str:
        """The generated text."""
        if self.events:
            parts = [json.loads(e)["choices"] for e in self.events[:-1]]
            return "".join(_piece(choices[0]) for choices in parts if choices)
        return _piece(self.json["choices"][0])


def _piece(choice: dict) -> str:
    if "text" in choice:
        return choice["text"]
    return (choice.get("message") or choice["delta"]).get("content") or ""


class Http:
    """One host and port; a connection for each call."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    def get(self, path: str, timeout: float = 10) -> Answer:
        return self.request("GET", path, None, timeout=timeout)

    def post(self, path: str, body: object, timeout: float = 60, headers: dict[str, str] | None = None) -> Answer:
        return self.request("POST", path, body, timeout=timeout, headers=headers)

    def request(
        self, method: str, path: str, body: object, timeout: float = 60, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = self._send(method, path, body, timeout, headers)
        try:
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        names = {k.lower(): v for k, v in response.getheaders()}
        events = []
        if names.get("content-type", "").startswith("text/event-stream"):
            events = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
        return Answer(response.status, names, data, events)

    def stream(self, path: str, body: object, timeout: float = 60) -> Iterator[bytes]:
        """Yields pieces of a streamed answer; closing the generator closes the connection in the middle."""
        connection = self._send("POST", path, body, timeout, None)
        try:
            response = connection.getresponse()
            assert response.status == 200, response.read()
            while piece := response.read1(65536):
                yield piece
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: object, timeout: float, headers: dict[str, str] | None
    ) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        payload = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"content-type": "application/json"} if payload is not None else {}
        try:
            connection.request(method, path, payload, {**fields, **(headers or {})})
        except BaseException:
            connection.close()
            raise
        return connection
