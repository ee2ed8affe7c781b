"""Checked by `mypy --strict`, and run by test_docs.py."""

from array import array
from collections.abc import Sequence

import kvlane
import kvlane.aio


def place(router: kvlane.Router, tokens: Sequence[int]) -> str | None:
    lease = router.select(tokens, request_id="r1", expected_output_tokens=64, ttl=30.0)
    if lease is None:
        return None
    with lease:
        costs: list[float] = [candidate.cost.total for candidate in lease.explain()]
        assert min(costs) >= 0
        lease.prefill_done()
        lease.output_tokens(10)
        lease.release(cached_tokens=0, ok=True)
    return lease.worker


async def start(router: kvlane.Router) -> bool:
    return await kvlane.aio.wait_ready(router, timeout=0.05, workers=1)


def main() -> None:
    with kvlane.Router({"index": "approximate"}, seed=7) as router:
        router.add_worker("w1", labels={"zone": "a"}, role="both")
        router.drain_worker("w1")
        router.undrain_worker("w1")
        router.set_role("w1", "both")
        router.set_labels("w1", {"zone": "b"})
        worker = place(router, array("I", range(64)))
        assert worker == "w1"
        overlaps: dict[tuple[str, int], kvlane.Overlap] = router.overlap(list(range(64)))
        assert overlaps["w1", 0].device == 4
        try:
            router.trust("w9")
        except kvlane.UnknownWorker as error:
            code: str = error.code
            assert code == "unknown_worker"
        for info in router.workers():
            state: str = info.trust[0].state
            assert state == "approximate" and info.index_blocks["device"] == 0


if __name__ == "__main__":
    main()
