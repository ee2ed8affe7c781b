"""A gateway under uvicorn, with a page of its own beside it: http://127.0.0.1:8080/workers.

    kvlane engine --listen 127.0.0.1:8001 --events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558   (and another one)
    python examples/python/asgi_gateway.py http://127.0.0.1:8001,tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 ...
    curl http://127.0.0.1:8080/llm/v1/models
"""

import asyncio
from typing import Any

import httpx
import uvicorn
from common import MODEL, arguments, demonstrate, tokenizer
from fastapi import FastAPI

from kvlane.asgi import Gateway


def application(gateway: Gateway) -> FastAPI:
    app = FastAPI()
    app.mount("/llm", gateway)

    @app.get("/workers")
    def workers() -> list[dict[str, Any]]:
        return [
            {"id": worker.id, "trust": worker.trust[0].state, "active_requests": worker.active_requests}
            for worker in gateway.router.workers()
        ]

    return app


async def show(app: FastAPI) -> None:
    """Uses the application without a server."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as client:

        async def ask(text: str) -> int:
            body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
            answer = await client.post("/llm/v1/chat/completions", json=body)
            cached: int = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return cached

        await demonstrate(ask)
        print((await client.get("/workers")).json())


def main() -> None:
    workers, once = arguments("A gateway under uvicorn")
    gateway = Gateway(
        {worker.name: {"url": worker.url, "events": worker.events, "replay": worker.replay} for worker in workers},
        tokenize=tokenizer(workers[0].url),
        debug_headers=True,
    )
    app = application(gateway)
    if once:
        asyncio.run(show(app))
    else:
        uvicorn.run(app, host="127.0.0.1", port=8080)


if __name__ == "__main__":
    main()
