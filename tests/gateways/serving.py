"""An ASGI application served by uvicorn on a port of its own, in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from engines import wait_until


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Serves `app` while the block runs; yields its URL."""
    # With the protocol named, or asyncio leaves Nagle's algorithm on, and answers wait 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            wait_until("the gateway serves", lambda: server.started or not thread.is_alive(), 30)
            assert server.started
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
