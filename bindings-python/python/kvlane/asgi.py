"""A gateway as an ASGI application: each request goes to the engine whose KV cache is warm (`pip install 'kvlane[asgi]'`).

    from kvlane.asgi import Gateway

    app = Gateway({"w1": "http://10.0.0.1:8000", "w2": "http://10.0.0.2:8000"})

`uvicorn module:app` serves it, and FastAPI or Starlette mount it: `fastapi_app.mount("/llm", app)`. Every path is passed
through; bytes of bodies and streams are not changed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Required, TypeAlias
from urllib.parse import quote

from ._gateway import Tokenize, Usage, WorkerOptions, log, prompt_of, select, usage_in
from ._native import ConfigError, Lease, Router

try:
    import httpx
except ImportError as error:
    raise ImportError("kvlane.asgi needs httpx: pip install 'kvlane[asgi]'") from error

__all__ = ["Gateway", "Worker"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


class Worker(WorkerOptions, total=False):
    """An engine: where its HTTP server is, and what may be said of it to the router."""

    url: Required[str]


class Gateway:
    """Passes requests on to engines, each to the one that `router` selects.

    `workers` gives each engine a name, and its URL or a `Worker` with event endpoints and the like. `tokenize` returns a
    request's token ids as the engine will see them, which events need; without it prompts are matched as text.

    Before the first byte of an answer another engine is tried when one cannot be reached, and one more when one had the
    request and failed; after it, a stream ends with one error event. When a client leaves, the engine's request is
    cancelled, and its booking ends, at once. `debug_headers` tells clients where they were sent.
    """

    def __init__(
        self,
        workers: Mapping[str, str | Worker],
        *,
        router: Router | None = None,
        config: Mapping[str, Any] | None = None,
        tokenize: Tokenize | None = None,
        client: httpx.AsyncClient | None = None,
        lease_seconds: float | None = None,
        max_body_bytes: int = 64 << 20,
        debug_headers: bool = False,
    ) -> None:
        self.router = router if router is not None else Router(config)
        self._urls: dict[str, str] = {}
        self._ranked: set[str] = set()
        self._down_until: dict[str, float] = {}
        self._tokenize = tokenize
        self._client = client
        self._lease_seconds = lease_seconds
        self._max_body_bytes = max_body_bytes
        self._debug_headers = debug_headers
        for name, worker in workers.items():
            self.add_worker(name, worker)

    def add_worker(self, name: str, worker: str | Worker) -> None:
        """Adds an engine. `ConfigError` for a URL that is none of http or https."""
        options: dict[str, Any] = {"url": worker} if isinstance(worker, str) else dict(worker)
        url = options.pop("url", None)
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(f"url of worker {name!r} is {url!r}: http://… and https://… are accepted")
        self.router.add_worker(name, **options)
        self._urls[name] = url.rstrip("/")
        if options.get("dp_ranks", 1) > 1:
            self._ranked.add(name)

    def remove_worker(self, name: str) -> None:
        """Removes an engine; what it is answering goes on."""
        self._urls.pop(name, None)
        self._ranked.discard(name)
        self._down_until.pop(name, None)
        self.router.remove_worker(name)

    async def aclose(self) -> None:
        """Closes the connections and the router. A server that runs the gateway by itself does so at its end."""
        if self._client is not None:
            await self._client.aclose()
        self.router.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _path(scope).startswith("/"):
            # Behind the address of an engine anything else may name another host: "@10.0.0.1:80/".
            await _refuse(send, 400, "The request's target does not begin with '/'.")
            return
        try:
            content = await _read(receive, self._max_body_bytes)
        except _ClientLeft:
            return
        if content is None:
            await _refuse(send, 413, f"The body is over {self._max_body_bytes} bytes.")
            return
        serving = asyncio.ensure_future(self._serve(scope, content, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            # Also when this very task is cancelled: the booking and the engine's request end in `_serve`.
            for task in (serving, leaving):
                task.cancel()
            await asyncio.gather(serving, leaving, return_exceptions=True)

    async def _serve(self, scope: Scope, content: bytes, send: Send) -> None:
        prompt = await self._prompt(scope, content)
        tried: set[str] = set()
        sent = 0
        while sent < _MAX_SENT:
            lease = self._select(prompt, tried)
            if lease is None:
                why = "No engine could be reached." if tried else "No engine may be chosen."
                await _refuse(send, 502 if tried else 503, why)
                return
            try:
                answer = await self._ask(lease, scope, content)
            except httpx.TransportError as error:
                reached = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                lease.release(ok=False, dispatched=reached)
                log.warning("worker %s failed before it answered: %r", lease.worker, error)
                tried.add(lease.worker)
                sent += reached
                if not reached:
                    self._down_until[lease.worker] = time.monotonic() + _REST_SECONDS
                continue
            except BaseException:
                lease.release(ok=False)
                raise
            await self._answer(lease, answer, send)
            return
        await _refuse(send, 502, f"{sent} engines failed before they answered.")

    async def _prompt(self, scope: Scope, content: bytes) -> dict[str, Any]:
        body: Any = None
        if scope["method"] == "POST" and content.lstrip()[:1] == b"{":
            try:
                body = json.loads(content)
            except (ValueError, RecursionError):
                pass  # the engine says what it thinks of it
        return await prompt_of(body if isinstance(body, dict) else {}, self._tokenize if body else None)

    def _select(self, prompt: Mapping[str, Any], tried: set[str]) -> Lease | None:
        now = time.monotonic()
        left = [worker for worker in self._urls if worker not in tried]
        rested = [worker for worker in left if self._down_until.get(worker, now) <= now]
        return select(self.router, prompt, rested or left, self._lease_seconds)

    async def _ask(self, lease: Lease, scope: Scope, content: bytes) -> httpx.Response:
        if self._client is None:
            # An engine takes as long as it takes; idle connections are left before engines close them.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
            self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), limits=limits)
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _NOT_PASSED]
        headers.append((b"accept-encoding", b"identity"))  # so that usage can be read on its way
        if lease.worker in self._ranked:
            headers.append((b"x-data-parallel-rank", str(lease.dp_rank).encode()))
        url = self._urls[lease.worker] + quote(_path(scope), safe="/:@!$&'()*+,;=~")
        if query := scope.get("query_string"):
            url += "?" + query.decode("latin-1")
        request = self._client.build_request(scope["method"], url, headers=headers, content=content)
        return await self._client.send(request, stream=True)

    async def _answer(self, lease: Lease, answer: httpx.Response, send: Send) -> None:
        reading = _Reading(lease, answer)
        # The end of a whole answer waits until the booking ended: its client may ask again as soon as it has that.
        held = b""
        ok = False
        try:
            headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in _NOT_PASSED_BACK]
            if self._debug_headers:
                headers += [
                    (b"x-kvlane-worker", lease.worker.encode()),
                    (b"x-kvlane-overlap-blocks", str(lease.overlap_blocks).encode()),
                ]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
            try:
                async for piece in answer.aiter_raw():
                    reading.feed(piece)
                    if not reading.is_stream:
                        held, piece = piece, held
                    if piece:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                ok = answer.is_success
            except httpx.TransportError as error:
                log.warning("worker %s failed in the middle of its answer: %r", lease.worker, error)
                if not reading.is_stream:
                    raise  # the server cuts the connection: what was sent must not look whole
                failure = b"data: " + _error(502, "The engine failed in the middle of its answer.") + b"\n\n"
                await send({"type": "http.response.body", "body": failure, "more_body": True})
            lease.release(reading.usage.cached_tokens, ok, prompt_tokens=reading.usage.prompt_tokens)
            await send({"type": "http.response.body", "body": held})
        finally:
            lease.release(ok=False)  # does nothing to one that has ended
            await answer.aclose()


class _Reading:
    """Reads along: the first token, the number of events, the usage at the end."""

    def __init__(self, lease: Lease, answer: httpx.Response) -> None:
        kind = answer.headers.get("content-type", "")
        self.is_stream = kind.startswith("text/event-stream")
        self._is_json = kind.startswith("application/json")
        self._lease = lease
        self._events = 0
        self._kept = b""
        self._usage = Usage()

    def feed(self, piece: bytes) -> None:
        if self.is_stream:
            before = self._events
            *lines, self._kept = (self._kept + piece).split(b"\n")
            for line in lines:
                self._line(line)
            if before == 0 < self._events:
                self._lease.prefill_done()
            if self._events > before:
                self._lease.output_tokens(self._events)
        elif self._is_json:
            self._kept += piece
        if len(self._kept) > _MAX_KEPT_BYTES:
            self._kept, self._is_json = b"", False

    @property
    def usage(self) -> Usage:
        if self._is_json and not self.is_stream:
            return usage_in(self._kept)
        return self._usage

    def _line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._events += 1
            if b'"usage"' in line:
                found = usage_in(line[len(b"data:") :])
                if found != Usage():
                    self._usage = found


_NOT_PASSED = frozenset(
    b"host content-length transfer-encoding connection keep-alive te trailer upgrade accept-encoding expect "
    b"proxy-authorization proxy-connection x-data-parallel-rank".split()
)
"""Headers between the client and us."""

_NOT_PASSED_BACK = frozenset(b"transfer-encoding connection keep-alive trailer upgrade date server".split())
"""Headers between the engine and us; our server writes its own."""

_MAX_SENT = 2
"""How many engines may have a request and fail: it may be the request that they fail of, and others are not to follow."""

_REST_SECONDS = 2.0
"""How long an engine that refused a connection is asked last."""

_MAX_KEPT_BYTES = 8 << 20
"""The largest answer, or line of a stream, whose usage is looked for."""


def _path(scope: Scope) -> str:
    """Returns the path below the one that this application is mounted at."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


class _ClientLeft(Exception):
    """Before its request was whole."""


async def _read(receive: Receive, limit: int) -> bytes | None:
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeft
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            return None
        pieces.append(piece)
        if not message.get("more_body"):
            return b"".join(pieces)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(send: Send, status: int, message: str) -> None:
    body = _error(status, message)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _error(status: int, message: str) -> bytes:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return json.dumps({"error": error}, separators=(",", ":")).encode()
