"""An engine without KV events is noticed, named with a cause, and routed approximately."""

from __future__ import annotations

from collections.abc import Callable

from conftest import Fleet
from harness import BLOCK_TOKENS
from prompts import Prompts
from router import Router

PREFIX_BLOCKS = 6
PREFIX_TOKENS = PREFIX_BLOCKS * BLOCK_TOKENS
FRESH_TOKENS = 10
GRACE_REQUESTS = 5


def test_a_silent_engine_is_reported_and_still_hits(
    fleet: Fleet, prompts: Prompts, start_router: Callable[..., Router]
) -> None:
    # The router is told of an event endpoint for both, as an operator would who forgot the engine's own setting.
    pair = [fleet.w1, fleet.silent]
    router = start_router(pair, settings={"silent_worker_requests": GRACE_REQUESTS, "silent_worker_seconds": 600})
    router.wait_trust(fleet.w1, "exact")
    assert router.worker(fleet.silent).trust.state == "unproven", router.workers()

    prefixes = [prompts.prefix(PREFIX_BLOCKS) for _ in range(6)]
    seen: set[int] = set()
    repeats = hits = silent_stores = 0
    for number, key in enumerate(prompts.shuffled(keys=len(prefixes), sends=5)):
        routed = router.complete(prefixes[key] + prompts.tokens(FRESH_TOKENS), stream=number % 2 == 1)
        assert routed.status == 200, routed
        if key in seen:
            repeats += 1
            hits += routed.cached_tokens == PREFIX_TOKENS
        seen.add(key)
        silent_stores += routed.worker == fleet.silent.name and routed.cached_tokens == 0
    assert hits >= 0.9 * repeats, f"{hits} of {repeats} repeats hit"

    # A repeat gives an engine nothing to announce, so only prompts that were new to it speak for its silence.
    for _ in range(8 * GRACE_REQUESTS):
        if silent_stores >= GRACE_REQUESTS:
            break
        routed = router.complete(prompts.prefix(2) + prompts.tokens(FRESH_TOKENS))
        silent_stores += routed.worker == fleet.silent.name
    assert silent_stores >= GRACE_REQUESTS, silent_stores
    trust = router.wait_trust(fleet.silent, "approximate", seconds=5)
    assert trust.cause, trust
    print(f"cause given for the silent engine: {trust.cause}")
    assert router.exported_states(fleet.silent) == {"approximate"}, router.metrics()
    again = [router.complete(prefix + prompts.tokens(FRESH_TOKENS)) for prefix in prefixes]
    assert sum(r.cached_tokens == PREFIX_TOKENS for r in again) >= 5, again
    assert {r.worker: r.trust for r in again} == {fleet.silent.name: "approximate", fleet.w1.name: "exact"}, again
    # The other worker is not drawn into it.
    assert router.worker(fleet.w1).trust.state == "exact", router.workers()
    assert router.exported_states(fleet.w1) == {"exact"}, router.metrics()


def test_the_grace_period_may_end_by_time(
    fleet: Fleet, prompts: Prompts, start_router: Callable[..., Router]
) -> None:
    pair = [fleet.silent]
    router = start_router(pair, settings={"silent_worker_requests": 1000, "silent_worker_seconds": 2})
    assert router.complete(prompts.tokens(3 * BLOCK_TOKENS)).status == 200
    trust = router.wait_trust(fleet.silent, "approximate", seconds=10)
    assert trust.cause, trust
