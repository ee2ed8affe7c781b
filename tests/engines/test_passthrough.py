"""What is not about routing passes through: models, errors of the engine, and a client that leaves."""

from __future__ import annotations

import contextlib

import pytest
from conftest import Fleet
from harness import MAX_MODEL_TOKENS, MODEL, wait_until
from prompts import Prompts
from router import Routed, Router


def test_models_come_from_an_engine(router: Router, fleet: Fleet) -> None:
    direct = fleet.w1.http.get("/v1/models")
    routed = router.http.get("/v1/models")
    assert (routed.status, routed.headers["content-type"]) == (200, direct.headers["content-type"])

    def stable(document: dict) -> list[tuple]:
        return [(m["id"], m["root"], m["max_model_len"], m["owned_by"]) for m in document["data"]]

    assert stable(routed.json) == stable(direct.json)


TOO_LONG = {"model": MODEL, "prompt": [40] * (MAX_MODEL_TOKENS + 40), "max_tokens": 1}
ERRORS = {
    "too long": ("/v1/completions", TOO_LONG, 400),
    "too long, streamed": ("/v1/completions", {**TOO_LONG, "stream": True}, 400),
    "bad temperature": ("/v1/completions", {"model": MODEL, "prompt": [40, 41], "temperature": -1}, 400),
    "unknown model": ("/v1/completions", {"model": "other", "prompt": [40, 41]}, 404),
    "unknown model, chat": (
        "/v1/chat/completions",
        {"model": "other", "messages": [{"role": "user", "content": "w40"}]},
        404,
    ),
    "unknown path": ("/v1/nothing", {}, 404),
}


@pytest.mark.parametrize("path,body,status", ERRORS.values(), ids=ERRORS.keys())
def test_errors_of_the_engine_are_passed_on_unchanged(
    router: Router, fleet: Fleet, path: str, body: dict, status: int
) -> None:
    direct = fleet.w1.http.post(path, body)
    assert direct.status == status, direct
    routed = router.http.post(path, body)
    assert (routed.status, routed.body) == (direct.status, direct.body)
    assert routed.headers["content-type"] == direct.headers["content-type"]
    # An error of the client says nothing against the worker, and leaves nothing booked.
    router.wait_idle()
    assert Routed(router.http.post("/v1/completions", {"model": MODEL, "prompt": [40, 41], "max_tokens": 1})).status == 200


def test_other_paths_pass(router: Router) -> None:
    answer = router.http.post("/tokenize", {"model": MODEL, "prompt": "w40 w41", "add_special_tokens": False})
    assert (answer.status, answer.json["tokens"]) == (200, [40, 41])


def test_a_client_that_leaves_frees_the_engine(router: Router, fleet: Fleet, prompts: Prompts) -> None:
    # vLLM does not count aborted requests in request_success_total: what it generated tells.
    before = generated_tokens(fleet)
    limit = MAX_MODEL_TOKENS - 8
    body = {"model": MODEL, "prompt": prompts.tokens(4), "max_tokens": limit, "ignore_eos": True, "stream": True}
    with contextlib.closing(router.http.stream("/v1/completions", body)) as pieces:
        next(pieces)
        wait_until("a request is booked", lambda: booked(router) == 1, seconds=2, every=0.01)
    wait_until("the booking is released", lambda: booked(router) == 0, seconds=2, every=0.02)
    wait_until(
        "the engine is idle",
        lambda: sum(engine.counters().running for engine in fleet.pair) == 0,
        seconds=5,
    )
    assert 0 < generated_tokens(fleet) - before < limit, "the engine ran to the end instead of being told to stop"


def booked(router: Router) -> int:
    return sum(view.active_requests for view in router.workers().values())


def generated_tokens(fleet: Fleet) -> int:
    return sum(engine.counters().generated_tokens for engine in fleet.pair)
