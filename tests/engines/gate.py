"""A door in front of an engine that keeps what is asked of it and holds a request for as long as a test wants."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator

from harness import Engine, free_ports, wait_until


class Passage:
    """One request at the door."""

    def __init__(self, head: bytes, body: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.path, _ = first.split(" ", 2)
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.body: dict = json.loads(body) if body else {}
        self.passes = threading.Event()
        self._bytes = head, body

    @property
    def parameters(self) -> dict | None:
        """What a prefill engine handed over, when this is the second leg of a handoff."""
        return self.body.get("kv_transfer_params")

    def towards_engine(self) -> bytes:
        head, body = self._bytes
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        return b"\r\n".join([*lines, b"connection: close", b"", b""]) + body


class Gate:
    """Relays one request a connection, so that each is seen whole."""

    def __init__(self, engine: Engine) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.passed: list[Passage] = []
        self._engine = engine
        self._holds: list[Callable[[Passage], bool]] = []
        self._stops = False
        self._server = socket.create_server(("127.0.0.1", self.port))
        self._over = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._over = True
        self._server.close()
        for passage in self.passed:
            passage.passes.set()

    def hold(self, holds: Callable[[Passage], bool]) -> None:
        """Lets such requests wait here for as long as the gate is there."""
        self._holds.append(holds)

    @contextlib.contextmanager
    def holding(self, holds: Callable[[Passage], bool]) -> Iterator[None]:
        """Lets such requests wait here; they pass at the end."""
        self._holds.append(holds)
        try:
            yield
        finally:
            self._holds.remove(holds)
            for passage in self.passed:
                if holds(passage):
                    passage.passes.set()

    def stop_at_the_first_event(self) -> None:
        """Freezes the engine at the first event of the next stream that is a second leg.

        Until then it is slowed down: on a busy machine the whole stream may be there before its first event is sent.
        """
        self._stops = True

    def wait_for(self, what: str, wanted: Callable[[Passage], bool]) -> Passage:
        """Waits until such a request is there."""
        found = wait_until(what, lambda: [p for p in self.passed if wanted(p)], seconds=120, every=0.01)
        assert isinstance(found, list)
        return found[-1]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._over:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        # Whoever breaks off, the other side is to see it. Closing alone does not tell it while a thread listens there.
        with client, contextlib.suppress(OSError, ValueError):
            try:
                self._pass(client)
            finally:
                client.shutdown(socket.SHUT_RDWR)

    def _pass(self, client: socket.socket) -> None:
        passage = read_request(client)
        held = any(holds(passage) for holds in self._holds)
        self.passed.append(passage)
        if held:
            wait_for_passage(passage, client)
        if self._over:
            return
        with socket.create_connection(("127.0.0.1", self._engine.port), timeout=10) as engine:
            engine.settimeout(None)
            stops, self._stops = self._stops and bool(passage.parameters), self._stops and not passage.parameters
            if stops:
                self._engine.freeze()
            engine.sendall(passage.towards_engine())
            threading.Thread(target=notice_leaving, args=(client, engine), daemon=True).start()
            spoken = threading.Event()
            slow = threading.Thread(target=self._engine.slow_motion, args=(spoken,), daemon=True)
            if stops:
                slow.start()
            while piece := engine.recv(65536):
                if stops and b"data: " in piece and not spoken.is_set():
                    spoken.set()
                    slow.join()
                client.sendall(piece)


def read_request(client: socket.socket) -> Passage:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(65536)
        if not piece:
            raise ConnectionError("ended before its request")
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(x[15:]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")), 0)
    while len(body) < length:
        piece = client.recv(65536)
        if not piece:
            raise ConnectionError("ended within its request")
        body += piece
    return Passage(head, body)


def wait_for_passage(passage: Passage, client: socket.socket) -> None:
    """Returns when the request may pass; fails when its client leaves before."""
    client.settimeout(0.02)
    while not passage.passes.is_set():
        with contextlib.suppress(TimeoutError):
            if not client.recv(1):
                raise ConnectionError("left at the door")
    client.settimeout(None)


def notice_leaving(client: socket.socket, engine: socket.socket) -> None:
    """Closes the engine's side when the client leaves: nothing more comes from it."""
    with contextlib.suppress(OSError):
        while client.recv(65536):
            pass
        engine.shutdown(socket.SHUT_RDWR)
