"""Chats: the router's own template and tokenizer give the tokens that the engine computed.

Prompts go to an engine first, past the router. Only the engine's events can then tell the router about them, so the
overlap it announces for the same request is right only when its tokens are.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chats import KINDS
from conftest import Fleet
from harness import BLOCK_TOKENS, MODEL
from prompts import Prompts, chat_body
from router import Router


@pytest.fixture
def chat_router(fleet: Fleet, start_router: Callable[..., Router]) -> Router:
    router = start_router(fleet.pair, model=True)
    for engine in fleet.pair:
        router.wait_trust(engine, "exact")
        router.wait_blocks(engine, 0)
    return router


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_router_foresees_what_the_engine_takes_from_its_cache(
    chat_router: Router, fleet: Fleet, prompts: Prompts, kind: Callable[[Prompts], dict]
) -> None:
    body = kind(prompts)
    warm = fleet.w2.http.post("/v1/chat/completions", body)
    assert warm.status == 200, warm
    blocks = warm.prompt_tokens // BLOCK_TOKENS
    assert blocks >= 3, warm.usage
    chat_router.wait_blocks(fleet.w2, blocks)

    for stream in (False, True):
        routed = chat_router.chat(body, stream=stream)
        assert routed.status == 200, routed
        assert routed.worker == fleet.w2.name, routed
        assert routed.cached_blocks == (warm.prompt_tokens - 1) // BLOCK_TOKENS, routed
        assert routed.overlap_blocks == routed.cached_blocks, routed


def test_every_length_around_a_block_border_agrees(chat_router: Router, fleet: Fleet, prompts: Prompts) -> None:
    """One token too many or too few in front or behind shows at some length."""
    held = 0
    for words in range(60, 60 + BLOCK_TOKENS, 3):
        body = chat_body([{"role": "user", "content": prompts.words(words)}])
        held += fleet.w1.http.post("/v1/chat/completions", body).prompt_tokens // BLOCK_TOKENS
        chat_router.wait_blocks(fleet.w1, held)
        routed = chat_router.chat(body)
        assert routed.cached_tokens > 0, routed
        if routed.answer.prompt_tokens % BLOCK_TOKENS:
            assert routed.overlap_blocks == routed.cached_blocks, (words, routed)


def test_text_completions_get_the_beginning_token(chat_router: Router, fleet: Fleet, prompts: Prompts) -> None:
    """Plain text is tokenized with special tokens unless the request says otherwise; a chat is not."""
    for fields in ({}, {"add_special_tokens": False}):
        text = prompts.words(100)
        body = {"model": MODEL, "prompt": text, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **fields}
        held = chat_router.worker(fleet.w2).device_blocks
        assert fleet.w2.http.post("/v1/completions", body).status == 200
        chat_router.wait_blocks(fleet.w2, held + 3)
        routed = chat_router.complete(text, **fields)
        assert (routed.worker, routed.overlap_blocks, routed.cached_blocks) == (fleet.w2.name, 3, 3), routed


def test_a_growing_conversation_stays_on_its_worker(chat_router: Router, fleet: Fleet, prompts: Prompts) -> None:
    """Each turn repeats the whole conversation with the answers; generated blocks count as well."""
    conversations = [[{"role": "system", "content": prompts.words(40)}] for _ in range(3)]
    home: dict[int, str] = {}
    reached: dict[int, int] = {}
    for turn in range(4):
        for key, messages in enumerate(conversations):
            messages.append({"role": "user", "content": prompts.words(25)})
            routed = chat_router.chat(chat_body(messages, max_tokens=20), stream=turn % 2 == 1)
            assert routed.status == 200, routed
            if turn:
                assert routed.worker == home[key], (turn, key, home, routed)
                assert routed.cached_tokens >= reached[key], (turn, key, routed)
                assert routed.overlap_blocks == routed.cached_blocks, (turn, key, routed)
            home[key] = routed.worker
            reached[key] = routed.answer.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
            messages.append({"role": "assistant", "content": routed.answer.content})
            chat_router.settle()  # a person takes longer to reply
    assert len(set(home.values())) == 2, home
    for engine in fleet.pair:
        assert chat_router.worker(engine).trust.fidelity > 0.99, chat_router.workers()
