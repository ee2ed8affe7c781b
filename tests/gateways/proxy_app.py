"""LiteLLM's proxy in a process of its own, with one route more that tells of the bookings: `proxy_app.py CONFIG PORT`."""

import os
import sys

import litellm
import uvicorn
from litellm.proxy import proxy_server


@proxy_server.app.get("/bookings")
async def bookings() -> dict:
    import kvlane.litellm

    callbacks = [one for one in litellm.callbacks if isinstance(one, kvlane.litellm.KvRouting)]
    routers = [one.router for one in callbacks]
    return {
        "active": sum(worker.active_requests for router in routers for worker in router.workers()),
        "decisions": sum(router.stats()["decisions"] for router in routers),
        "callbacks": len(routers),
    }


if __name__ == "__main__":
    os.environ["CONFIG_FILE_PATH"] = sys.argv[1]  # read when the application starts
    uvicorn.run(proxy_server.app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
