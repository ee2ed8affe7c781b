"""Repeats reach the worker that holds their prefix, judged by what the engines say they took from their caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from conftest import Fleet
from harness import BLOCK_TOKENS, KV_BLOCKS, MODEL, wait_until
from prompts import Prompts
from router import Routed, Router

PREFIX_BLOCKS = 6
PREFIX_TOKENS = PREFIX_BLOCKS * BLOCK_TOKENS
FRESH_TOKENS = 10  # with the answer still less than a block, so each prefix keeps exactly 6 blocks resident


def test_token_prompts_reach_the_warm_worker(router: Router, fleet: Fleet, prompts: Prompts) -> None:
    prefixes = [prompts.prefix(PREFIX_BLOCKS) for _ in range(6)]
    before = {engine.name: engine.counters() for engine in fleet.pair}
    home: dict[int, str] = {}
    prompt_tokens: Counter[str] = Counter()
    cached_tokens: Counter[str] = Counter()

    for number, key in enumerate(prompts.shuffled(keys=len(prefixes), sends=5)):
        routed = router.complete(prefixes[key] + prompts.tokens(FRESH_TOKENS), stream=number % 2 == 1)
        assert routed.status == 200, routed
        prompt_tokens[routed.worker] += routed.answer.prompt_tokens
        cached_tokens[routed.worker] += routed.cached_tokens
        if key not in home:
            home[key] = routed.worker
            assert (routed.overlap_blocks, routed.cached_tokens) == (0, 0), routed
        else:
            assert routed.worker == home[key], f"repeat of prefix {key} left {home[key]}: {routed}"
            assert routed.cached_tokens == PREFIX_TOKENS, routed
            assert routed.overlap_blocks == PREFIX_BLOCKS, routed

    # 6 prefixes do not pile up on one worker while the other is empty.
    assert set(Counter(home.values()).values()) == {3}, home

    # The header names the worker that really served: each engine counted the same tokens itself.
    for engine in fleet.pair:

        def counted() -> bool:
            seen = engine.counters().since(before[engine.name])  # noqa: B023
            told = (prompt_tokens[engine.name], cached_tokens[engine.name])  # noqa: B023
            return (seen.prompt_tokens, seen.cache_hits) == told

        wait_until(f"{engine.name} counted what the router sent it", counted, seconds=5)

    router.wait_idle()
    for engine in fleet.pair:
        router.wait_blocks(engine, 3 * PREFIX_BLOCKS)
        trust = router.worker(engine).trust
        assert trust.state == "exact", trust
        assert trust.fidelity > 0.99, trust


def test_events_alone_find_the_warm_worker(router: Router, fleet: Fleet, prompts: Prompts) -> None:
    """The prompts went to the engines past the router, so nothing but their events can have told it."""
    for engine in fleet.pair:
        prefix = prompts.prefix(PREFIX_BLOCKS)
        assert engine.complete(prefix + prompts.tokens(FRESH_TOKENS)).status == 200
        router.wait_blocks(engine, PREFIX_BLOCKS)

        routed = router.complete(prefix + prompts.tokens(FRESH_TOKENS))

        assert routed.worker == engine.name, routed
        assert routed.overlap_blocks == PREFIX_BLOCKS, routed
        assert routed.cached_tokens == PREFIX_TOKENS, routed
        assert routed.trust == "exact", routed


def test_evicted_blocks_are_not_credited(router: Router, fleet: Fleet, prompts: Prompts) -> None:
    old = prompts.prefix(PREFIX_BLOCKS)
    assert fleet.w1.complete(old + prompts.tokens(FRESH_TOKENS)).status == 200
    router.wait_blocks(fleet.w1, PREFIX_BLOCKS)
    # 63 blocks of capacity: 10 other prompts of 6 full blocks and a partial one push the first out, tail first.
    for _ in range(10):
        assert fleet.w1.complete(prompts.prefix(PREFIX_BLOCKS) + prompts.tokens(FRESH_TOKENS)).status == 200
    router.settle()
    held = router.worker(fleet.w1).device_blocks
    assert 0 < held < min(KV_BLOCKS, 11 * PREFIX_BLOCKS), held
    routed = router.complete(old + prompts.tokens(FRESH_TOKENS))
    assert routed.status == 200, routed
    assert routed.overlap_blocks == routed.cached_blocks < PREFIX_BLOCKS, routed


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_repeat_at_a_block_border_is_no_mismatch(router: Router, fleet: Fleet, prompts: Prompts, extra: int) -> None:
    """An engine recomputes the last token, so a prompt of exactly 4 blocks takes 3 from the cache."""
    prompt = prompts.tokens(4 * BLOCK_TOKENS + extra)
    first = router.complete(prompt)
    repeats = [router.complete(prompt) for _ in range(6)]
    for routed in repeats:
        assert routed.worker == first.worker, routed
        assert routed.cached_blocks == (4 * BLOCK_TOKENS + extra - 1) // BLOCK_TOKENS, routed
        full_blocks = (4 * BLOCK_TOKENS + extra) // BLOCK_TOKENS
        assert routed.cached_blocks <= routed.overlap_blocks <= full_blocks, routed
    for engine in fleet.pair:
        assert router.worker(engine).trust.fidelity > 0.99, router.workers()


NOT_COMPARABLE = {
    "prompt_logprobs": lambda warm, p: {"prompt": warm, "prompt_logprobs": 1},
    "echoed logprobs": lambda warm, p: {"prompt": warm, "echo": True, "logprobs": 1},
    "several prompts": lambda warm, p: {"prompt": [warm, p.tokens(len(warm))]},
    "truncated": lambda warm, p: {"prompt": p.tokens(BLOCK_TOKENS) + warm, "truncate_prompt_tokens": len(warm)},
    "truncated to its end": lambda warm, p: {"prompt": warm, "truncate_prompt_tokens": len(warm) - BLOCK_TOKENS - 1},
}


@pytest.mark.parametrize("request_of", NOT_COMPARABLE.values(), ids=NOT_COMPARABLE.keys())
def test_what_cannot_be_compared_is_no_mismatch(
    router: Router, fleet: Fleet, prompts: Prompts, request_of: Callable[[list[int], Prompts], dict]
) -> None:
    """For logprobs of the prompt an engine computes all of it again; of several prompts it reports the last one's
    cached tokens; a truncated prompt is another prompt. None of that says that the index is wrong."""
    warm = prompts.tokens(4 * BLOCK_TOKENS + 4)
    assert router.complete(warm).status == 200
    for _ in range(6):
        fields = request_of(warm, prompts)
        routed = router.complete(fields.pop("prompt"), **fields)
        assert routed.status == 200, routed
    router.wait_idle()
    for engine in fleet.pair:
        assert router.worker(engine).trust.fidelity > 0.9, router.workers()
    routed = router.complete(warm)
    assert (routed.overlap_blocks, routed.cached_blocks) == (4, 4), routed


def test_a_cache_salt_separates_equal_prompts(router: Router, fleet: Fleet, prompts: Prompts) -> None:
    prompt = prompts.tokens(4 * BLOCK_TOKENS + 4)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "cache_salt": "tenant-a"}
    assert fleet.w2.http.post("/v1/completions", body).status == 200
    router.wait_blocks(fleet.w2, 4)

    salted = router.complete(prompt, cache_salt="tenant-a")
    assert (salted.worker, salted.overlap_blocks, salted.cached_blocks) == (fleet.w2.name, 4, 4), salted
    for fields in ({}, {"cache_salt": "tenant-b"}):
        other = router.complete(prompt, **fields)
        assert (other.overlap_blocks, other.cached_blocks) == (0, 0), other


def test_a_stream_is_what_the_engine_sends(router: Router, fleet: Fleet, prompts: Prompts) -> None:
    """Without `include_usage` the client gets no usage, also when the router reads usage for itself."""
    body = {"model": MODEL, "prompt": prompts.tokens(50), "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    direct = fleet.w1.http.post("/v1/completions", {**body, "stream": True})
    routed = Routed(router.http.post("/v1/completions", {**body, "stream": True}))
    assert routed.status == 200, routed
    # An engine may put two tokens into one event when its reader was late, so their number can differ.
    assert (routed.answer.events[-1], direct.events[-1]) == ("[DONE]", "[DONE]"), routed.answer.events
    assert len(routed.answer.events) > 2, routed.answer.events
    assert routed.answer.content == direct.content
    assert '"usage"' not in routed.answer.text
    assert routed.answer.headers["content-type"] == direct.headers["content-type"]
