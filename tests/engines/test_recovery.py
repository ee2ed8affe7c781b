"""What the router knows after it starts late, after a cache reset and after an engine restart."""

from __future__ import annotations

import threading
from collections.abc import Callable

from conftest import Fleet
from harness import BLOCK_TOKENS, wait_until
from prompts import Prompts
from router import Routed, Router, pause_past_predictions

PREFIX_BLOCKS = 6
PREFIX_TOKENS = PREFIX_BLOCKS * BLOCK_TOKENS
FRESH_TOKENS = 10


def test_a_late_router_recovers_the_index_by_replay(
    fleet: Fleet, prompts: Prompts, start_router: Callable[..., Router]
) -> None:
    warm = {engine.name: [prompts.prefix(PREFIX_BLOCKS) for _ in range(2)] for engine in fleet.pair}
    for engine in fleet.pair:
        for prefix in warm[engine.name]:
            assert engine.complete(prefix + prompts.tokens(FRESH_TOKENS)).status == 200
    # The engines say nothing more from here on: whatever the router learns comes from the replay sockets.
    router = start_router(fleet.pair)
    for engine in fleet.pair:
        router.wait_trust(engine, "exact", seconds=10)
        router.wait_blocks(engine, 2 * PREFIX_BLOCKS)

    for engine in fleet.pair:
        for prefix in warm[engine.name]:
            routed = router.complete(prefix + prompts.tokens(FRESH_TOKENS))
            assert routed.worker == engine.name, routed
            assert routed.overlap_blocks == PREFIX_BLOCKS, routed
            assert routed.cached_tokens == PREFIX_TOKENS, routed
            assert routed.trust == "exact", routed


def test_a_cache_reset_ends_the_credit(router: Router, fleet: Fleet, prompts: Prompts) -> None:
    prefix = prompts.prefix(PREFIX_BLOCKS)
    first = router.complete(prefix + prompts.tokens(FRESH_TOKENS))
    engine = next(e for e in fleet.pair if e.name == first.worker)
    assert router.complete(prefix + prompts.tokens(FRESH_TOKENS)).cached_tokens == PREFIX_TOKENS

    engine.reset()  # the clear is published with the engine's next step, which this makes
    router.wait_blocks(engine, 0)
    pause_past_predictions()
    stale = router.complete(prefix + prompts.tokens(FRESH_TOKENS))
    assert stale.status == 200, stale
    assert (stale.overlap_blocks, stale.cached_tokens) == (0, 0), stale

    again = router.complete(prefix + prompts.tokens(FRESH_TOKENS))
    assert again.worker == stale.worker, again
    assert (again.overlap_blocks, again.cached_tokens) == (PREFIX_BLOCKS, PREFIX_TOKENS), again


def test_an_unannounced_reset_costs_one_request(router: Router, fleet: Fleet, prompts: Prompts) -> None:
    """No router can foresee the first request after the reset of an idle engine; the second must be right."""
    prefix = prompts.prefix(PREFIX_BLOCKS)
    first = router.complete(prefix + prompts.tokens(FRESH_TOKENS))
    engine = next(e for e in fleet.pair if e.name == first.worker)
    assert engine.http.post("/reset_prefix_cache", None).status == 200

    surprised = router.complete(prefix + prompts.tokens(FRESH_TOKENS))
    assert surprised.status == 200, surprised
    assert surprised.cached_tokens == 0, surprised
    wait_until(
        "the index holds the prefix once",
        lambda: sum(view.device_blocks for view in router.workers().values()) == PREFIX_BLOCKS,
        seconds=5,
    )
    repeat = router.complete(prefix + prompts.tokens(FRESH_TOKENS))
    assert (repeat.worker, repeat.overlap_blocks) == (surprised.worker, PREFIX_BLOCKS), repeat
    assert repeat.cached_tokens == PREFIX_TOKENS, repeat


def test_blocks_of_an_engine_before_its_restart_are_not_credited(
    router: Router, fleet: Fleet, prompts: Prompts
) -> None:
    engine, other = fleet.pair
    old = [prompts.prefix(PREFIX_BLOCKS) for _ in range(2)]
    for prefix in old:
        assert engine.complete(prefix + prompts.tokens(FRESH_TOKENS)).status == 200
    router.wait_blocks(engine, 2 * PREFIX_BLOCKS)
    assert router.complete(old[0] + prompts.tokens(FRESH_TOKENS)).worker == engine.name

    # Requests go on through the whole outage and must all succeed. None is like another: 2 complete blocks each.
    answers: list[Routed] = []
    over = threading.Event()

    def keep_asking() -> None:
        while not over.wait(1):
            answers.append(router.complete(prompts.tokens(2 * BLOCK_TOKENS + 6)))

    engine.stop()
    orphan = router.complete(old[0] + prompts.tokens(FRESH_TOKENS))
    assert (orphan.status, orphan.worker) == (200, other.name), orphan
    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        engine.launch()
        engine.wait_ready()
    finally:
        over.set()
        asking.join()
    assert len(answers) > 3
    assert [a for a in answers if a.status != 200] == []

    def served_again() -> bool:
        answers.append(router.complete(prompts.tokens(2 * BLOCK_TOKENS + 6)))
        return answers[-1].worker == engine.name

    wait_until(f"{engine.name} serves again", served_again, seconds=30, every=0.5)
    # What is left in the index is what the new process has served, and nothing of the old one.
    held = 2 * sum(a.worker == engine.name for a in answers)
    router.wait_blocks(engine, held, seconds=15)
    pause_past_predictions()
    cold = router.complete(old[1] + prompts.tokens(FRESH_TOKENS))
    assert cold.status == 200, cold
    assert (cold.overlap_blocks, cold.cached_tokens) == (0, 0), cold
    again = router.complete(old[1] + prompts.tokens(FRESH_TOKENS))
    assert (again.worker, again.overlap_blocks) == (cold.worker, PREFIX_BLOCKS), again
    assert again.cached_tokens == PREFIX_TOKENS, again

    # The event stream of the new process is followed.
    held += PREFIX_BLOCKS if cold.worker == engine.name else 0
    router.wait_trust(engine, "exact")
    for _ in range(2):
        prefix = prompts.prefix(PREFIX_BLOCKS)
        assert engine.complete(prefix + prompts.tokens(FRESH_TOKENS)).status == 200
        held += PREFIX_BLOCKS
        router.wait_blocks(engine, held)
        routed = router.complete(prefix + prompts.tokens(FRESH_TOKENS))
        assert (routed.worker, routed.overlap_blocks) == (engine.name, PREFIX_BLOCKS), routed
        assert routed.cached_tokens == PREFIX_TOKENS, routed
