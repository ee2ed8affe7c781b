"""A deployment whose replicas each stand before one simulated engine, as vLLM's do before theirs."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

from engines import MODEL, Engine
from ray import serve

import kvlane.ray

TOKENIZER: Engine | None = None
"""The engine that is asked for tokens, in the process of the handle."""


async def tokenize(body: dict[str, Any]) -> list[int] | None:
    return await asyncio.to_thread(TOKENIZER.tokenize, body) if TOKENIZER is not None else None


@serve.deployment(num_replicas=2, max_ongoing_requests=16, ray_actor_options={"num_cpus": 0})
class Replica:
    def __init__(self, engines: list[dict[str, Any]]) -> None:
        rank = serve.get_replica_context().rank
        self.engine = engines[rank.rank]

    def record_routing_stats(self) -> dict[str, Any]:
        """What the router is to know of this replica's engine."""
        return kvlane.ray.routing_stats({key: value for key, value in self.engine.items() if key != "url"})

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(self._post, {"model": MODEL, **body})

    async def stream(self, body: dict[str, Any]):
        request = self._request({"model": MODEL, "stream": True, **body})
        with await asyncio.to_thread(urllib.request.urlopen, request, timeout=30) as answer:
            while line := await asyncio.to_thread(answer.readline):
                if line.strip():
                    yield line.decode().strip()

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(self._request(body), timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode()) from None

    def _request(self, body: dict[str, Any]) -> urllib.request.Request:
        return urllib.request.Request(
            self.engine["url"] + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
