"""A Ray Serve deployment whose replicas each stand before one engine; answers the lines of standard input.

    kvlane engine --listen 127.0.0.1:8001 --events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558   (and another one)
    python examples/python/ray_serve.py http://127.0.0.1:8001,tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 ...
"""

import asyncio
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import ray
from common import MODEL, Worker, arguments, demonstrate, post, tokenizer
from ray import serve
from ray.serve.config import RequestRouterConfig

from kvlane.ray import routing_stats


class Engine:
    """Passes a request on to the engine of this replica."""

    def __init__(self, workers: list[Worker]) -> None:
        self.worker = workers[serve.get_replica_context().rank.rank]

    def record_routing_stats(self) -> dict[str, Any]:
        return routing_stats({"events": self.worker.events, "replay": self.worker.replay})

    async def __call__(self, body: dict[str, Any]) -> Any:
        return await asyncio.to_thread(post, self.worker.url + "/v1/chat/completions", body)


async def tokenize(body: Mapping[str, Any]) -> list[int]:
    """Has the first engine tokenize; named in the settings, and called where the handle is."""
    return await tokenizer(os.environ["TOKENIZER_URL"])(body)


def deploy(workers: list[Worker]) -> Any:
    os.environ["TOKENIZER_URL"] = workers[0].url
    folder = str(pathlib.Path(__file__).parent)  # replicas import `common` from there
    ray.init(
        num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])}},
    )  # fmt: skip
    serve.start(proxy_location="Disabled")
    routing: dict[str, Any] = {
        "request_router_class": "kvlane.ray.KvRequestRouter",
        "request_router_kwargs": {"tokenize": "ray_serve:tokenize"},
        "request_routing_stats_period_s": 0.5,
    }
    deployment = serve.deployment(
        num_replicas=len(workers), ray_actor_options={"num_cpus": 0}, request_router_config=RequestRouterConfig(**routing)
    )(Engine)
    return serve.run(deployment.bind(workers), name="chat", route_prefix=None)


async def main() -> None:
    workers, once = arguments("A Ray Serve deployment with KV-aware routing")
    handle = deploy(workers)

    async def answer(text: str) -> Any:
        return await handle.remote({"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8})

    async def ask(text: str) -> int:
        cached: int = (await answer(text))["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    if once:
        time.sleep(2)  # for the replicas' first reports
        await demonstrate(ask)
    else:
        while line := await asyncio.to_thread(sys.stdin.readline):
            print((await answer(line))["choices"][0]["message"]["content"])
    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
