"""The calls that wait, for asyncio. Everything else is synchronous: a decision takes microseconds."""

import asyncio
import time

from ._native import Router

__all__ = ["wait_ready"]

_POLL_SECONDS = 0.02


async def wait_ready(router: Router, timeout: float | None = None, workers: int = 1) -> bool:
    """Waits until `workers` of the router's workers are ready, and returns whether they are; see `Router.wait_ready`."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while router.ready_workers() < workers:
        left = _POLL_SECONDS if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return False
        await asyncio.sleep(min(left, _POLL_SECONDS))
    return True
