"""LiteLLM with KV-aware routing: answers the lines of standard input.

    kvlane engine --listen 127.0.0.1:8001 --events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558   (and another one)
    python examples/python/litellm_gateway.py http://127.0.0.1:8001,tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 ...
"""

import asyncio
import sys
from typing import Any

import litellm
from common import MODEL, Worker, arguments, demonstrate, tokenizer
from litellm.router import Router

from kvlane.litellm import KvRouting


def deployment(worker: Worker) -> dict[str, Any]:
    return {
        "model_name": "chat",
        "litellm_params": {"model": f"hosted_vllm/{MODEL}", "api_base": worker.url + "/v1", "api_key": "none"},
        "model_info": {"id": worker.name, "kvlane": {"events": worker.events, "replay": worker.replay}},
    }


async def main() -> None:
    workers, once = arguments("LiteLLM with KV-aware routing")
    routing = KvRouting(tokenize=tokenizer(workers[0].url))
    litellm.callbacks = [routing]
    router = Router(model_list=[deployment(worker) for worker in workers])

    async def answer(text: str) -> Any:
        return await router.acompletion(model="chat", messages=[{"role": "user", "content": text}], max_tokens=8)

    async def ask(text: str) -> int:
        cached: int = (await answer(text)).usage.prompt_tokens_details.cached_tokens
        return cached

    if once:
        await demonstrate(ask)
    else:
        while line := await asyncio.to_thread(sys.stdin.readline):
            print((await answer(line)).choices[0].message.content)
    for worker in routing.router.workers():
        print(worker.id, worker.trust[0].state, worker.index_blocks["device"], "blocks known")


if __name__ == "__main__":
    asyncio.run(main())
