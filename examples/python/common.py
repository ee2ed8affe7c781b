"""What the examples share: engines from the command line, tokens from an engine, and a few requests that show the effect."""

import argparse
import asyncio
import json
import random
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

MODEL = "sim"


@dataclass(frozen=True)
class Worker:
    """An engine: its HTTP server, and where it publishes KV events."""

    name: str
    url: str
    events: str
    replay: str


def arguments(about: str) -> tuple[list[Worker], bool]:
    """Reads the command line: the engines, and whether to show the effect and end."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--once", action="store_true", help="send a few requests, say what was cached, and end")
    parser.add_argument("workers", nargs="+", metavar="URL,EVENTS,REPLAY", help="http://h:8000,tcp://h:5557,tcp://h:5558")
    given = parser.parse_args()
    workers = []
    for number, worker in enumerate(given.workers, 1):
        parts = worker.split(",")
        if len(parts) != 3:
            parser.error(f"{worker!r}: an engine is URL,EVENTS,REPLAY")
        workers.append(Worker(f"w{number}", *parts))
    return workers, given.once


def post(url: str, body: Mapping[str, Any]) -> Any:
    """Posts JSON and returns the answer's."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def tokenizer(url: str) -> Callable[[Mapping[str, Any]], Awaitable[list[int]]]:
    """Returns a function that has the engine at `url` tokenize a request."""

    async def tokenize(body: Mapping[str, Any]) -> list[int]:
        wanted = {"model": MODEL, **{name: body[name] for name in ("messages", "tools", "prompt") if body.get(name)}}
        tokens: list[int] = (await asyncio.to_thread(post, url + "/tokenize", wanted))["tokens"]
        return tokens

    return tokenize


async def demonstrate(ask: Callable[[str], Awaitable[int]]) -> None:
    """Sends four beginnings three times each; `ask` returns how many prompt tokens the engine had cached."""
    rng = random.Random(1)
    beginnings = [" ".join(f"w{rng.randrange(1_000, 100_000)}" for _ in range(320)) for _ in range(4)]
    found = 0
    for turn in range(3):
        for number, beginning in enumerate(beginnings):
            cached = await ask(f"{beginning} question w{turn}{number}")
            found += turn > 0 and cached >= 304  # 19 complete blocks of 16
    print(f"{found} of 8 repeats found their beginning cached")
