"""What the gateway modules share. The gateways themselves are in tests/gateways."""

import asyncio
import importlib
import logging
from types import SimpleNamespace

import pytest

import kvlane
from kvlane._gateway import Fleet, Usage, prompt_of, select, text_prompt, usage_of

CHAT = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("module", ["asgi", "litellm", "ray"])
def test_a_module_without_its_gateway_names_the_extra(module):
    with pytest.raises(ImportError, match=rf"pip install 'kvlane\[{module}\]'"):
        importlib.import_module(f"kvlane.{module}")


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"messages": CHAT}, {"messages": CHAT, "tools": None}),
        ({"messages": CHAT, "tools": [{"type": "function"}]}, {"messages": CHAT, "tools": [{"type": "function"}]}),
        ({"prompt": "text"}, {"text": "text"}),
        ({"prompt": [5, 6]}, {"tokens": [5, 6]}),
        ({"prompt": ["first", "second"]}, {"text": "first"}),
        ({"prompt": [[5, 6], [7]]}, {"tokens": [5, 6]}),
        ({"input": "text"}, {"text": "text"}),
        ({"input": CHAT}, {"messages": CHAT, "tools": None}),
        ({"messages": []}, {"tokens": ()}),
        ({"messages": 7}, {"tokens": ()}),
        ({"prompt": [[]]}, {"tokens": ()}),
        ({}, {"tokens": ()}),
    ],
)
def test_a_body_is_known_by_its_first_prompt(body, prompt):
    assert text_prompt(body) == prompt


def test_a_tokenizer_may_wait_decline_and_fail(caplog):
    async def waits(body):
        return [len(body)]

    def fails(body):
        raise RuntimeError("no model")

    body = {"prompt": "text", "max_tokens": 8, "max_completion_tokens": 4, "cache_salt": "a"}
    rest = {"salt": "a", "expected_output_tokens": 4}
    assert asyncio.run(prompt_of(body, waits)) == {"tokens": [4], **rest}
    assert asyncio.run(prompt_of(body, lambda body: None)) == {"text": "text", **rest}
    with caplog.at_level(logging.WARNING, "kvlane"):
        assert asyncio.run(prompt_of(body, fails)) == {"text": "text", **rest}
    assert "no model" in caplog.text
    assert asyncio.run(prompt_of({"prompt": "text", "max_tokens": 9_999}, None))["expected_output_tokens"] == 256


@pytest.mark.parametrize(
    "odd",
    [
        {"messages": [object()], "tools": None},
        {"text": "\ud800"},
        {"text": "text", "salt": "\ud800"},
        {"tokens": [-1]},
        {"tokens": "text"},
    ],
)
def test_a_prompt_that_is_refused_goes_by_load(odd, caplog):
    with kvlane.Router() as router:
        router.add_worker("w1")
        assert select(router, {**odd, "expected_output_tokens": 1}, ["w1"], 5.0).worker == "w1"
    assert "goes by load" in caplog.text


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        ({"usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}}, Usage(9, 8, 2)),
        ({"usage": {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 8}}}, Usage(9, 8, 2)),
        ({"usage": {"prompt_tokens": 9, "prompt_tokens_details": None}}, Usage(9, None, None)),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": 1 << 40, "prompt_tokens_details": []}}, Usage()),
        ({"usage": "text"}, Usage()),
        ({"usage": None}, Usage()),
        (SimpleNamespace(usage=SimpleNamespace(prompt_tokens=9, prompt_tokens_details=SimpleNamespace(cached_tokens=0))), Usage(9, 0, None)),
        ("text", Usage()),
        (None, Usage()),
    ],
)
def test_usage_is_read_and_never_trusted_to_be_there(answer, usage):
    assert usage_of(answer) == usage


def test_a_fleet_follows_what_it_is_told(caplog):
    with kvlane.Router() as router:
        router.add_worker("given", kv_capacity_blocks=5)
        fleet = Fleet(router)

        def capacities():
            return {worker.id: worker.kv_capacity_blocks for worker in router.workers()}

        fleet.meet("given", {"kv_capacity_blocks": 9})
        fleet.meet("a", {"kv_capacity_blocks": 9})
        fleet.meet("b", {})
        assert capacities() == {"given": 5, "a": 9, "b": None}
        with router.select([1], allowed=["a"]) as lease:
            fleet.meet("a", {"kv_capacity_blocks": 9})  # nothing new: its booking stays
            assert [worker.active_requests for worker in router.workers()] == [1, 0, 0]
            lease.release()
        fleet.meet("a", {"kv_capacity_blocks": 7})
        fleet.meet("c", {"events": "nonsense"})
        fleet.meet("d", {"colour": "red"})
        assert capacities() == {"given": 5, "a": 7, "b": None, "c": None, "d": None}
        assert caplog.text.count("without its settings") == 2
        fleet.retain(["b"])
        fleet.forget("unknown")
        assert capacities() == {"given": 5, "b": None}
