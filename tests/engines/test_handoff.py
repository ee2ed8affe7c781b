"""Requests split over a prefill and a decode engine that hand over by NIXL, and what is left when either is killed."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
from client import Answer
from gate import Passage
from harness import BLOCK_TOKENS, wait_until
from pair import (
    CHAT,
    COMPLETIONS,
    KV_BYTES_PER_TOKEN,
    MESSAGES,
    RESPONSES,
    Fetched,
    Lane,
    Pair,
    request,
    text_of,
)
from prompts import Prompts

# Log-probabilities through the pair and of the decode engine alone. On the machines seen they are equal bit for bit; the
# logits are computed in 16 bits, in steps of 2 ** -6. With another prompt's cache they differ by 1 to 2.
TOLERANCE = 0.05

PROMPT_TOKENS = 100  # three blocks and a part of one


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
def test_every_api_is_split_and_answers_as_one_engine_does(
    lane: Lane, prompts: Prompts, path: str, stream: bool
) -> None:
    body = request(path, prompts.words(PROMPT_TOKENS), **({"stream": True} if stream else {}))
    fetched = Fetched(lane.decode)
    answer = lane.post(path, body)
    assert_split(lane, fetched, prompt_tokens=PROMPT_TOKENS)
    assert "remote_host" not in answer.text
    alone = lane.alone(path, body)
    assert text_of(path, answer) == text_of(path, alone)
    assert kinds(answer) == kinds(alone)
    plan = lane.router.handoff_report()["plans"][0]["plan"]
    assert plan["options"][0]["route"] == "pair", plan


def kinds(answer: Answer) -> list[str]:
    """The kinds of events of a stream, in their order. How many tokens come in one event depends on the moment."""
    every = (json.loads(e).get("type", "") if e != "[DONE]" else e for e in answer.events)
    return [kind for kind, _ in itertools.groupby(every)]


def assert_split(lane: Lane, before: Fetched, prompt_tokens: int, splits: int = 1) -> None:
    """The router and the decode engine say that requests were split, and that their whole prompts were fetched."""
    assert lane.handoffs().ended.get("split") == splits, (lane.handoffs(), lane.router.log_tail())
    assert lane.handoffs().fallbacks == {}

    def counted() -> bool:
        nonlocal now
        now = Fetched(lane.decode).since(before)
        return now.transfers == splits

    now = before
    wait_until(f"{splits} transfers are counted", counted, seconds=10)
    # Templates add some tokens.
    assert prompt_tokens <= now.tokens <= prompt_tokens + 10 * splits, now
    assert now.bytes % (BLOCK_TOKENS * KV_BYTES_PER_TOKEN) == 0, now
    assert now.bytes >= prompt_tokens * KV_BYTES_PER_TOKEN, now


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_log_probabilities_are_those_of_plain_decoding(lane: Lane, prompts: Prompts, path: str) -> None:
    fields: dict = {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 1}
    lengths = [7, BLOCK_TOKENS, 100, 8 * BLOCK_TOKENS, 450]
    fetched = Fetched(lane.decode)
    for number, length in enumerate(lengths, start=1):
        body = request(path, prompts.words(length), tokens=16, **fields)
        split, alone = lane.post(path, body), lane.alone(path, body)
        (tokens, values), (expected, reference) = log_probabilities(split), log_probabilities(alone)
        assert tokens == expected, length
        assert values == pytest.approx(reference, abs=TOLERANCE), length
        assert len(values) == 16
        assert_split(lane, fetched, prompt_tokens=sum(lengths[:number]), splits=number)


def log_probabilities(answer: Answer) -> tuple[list[str], list[float]]:
    assert answer.status == 200, answer
    found = answer.json["choices"][0]["logprobs"]
    if "token_logprobs" in found:
        return found["tokens"], found["token_logprobs"]
    return [entry["token"] for entry in found["content"]], [entry["logprob"] for entry in found["content"]]


def test_cached_tokens_are_those_of_the_prefill_engine(lane: Lane, pair: Pair, prompts: Prompts) -> None:
    warm, cold = prompts.tokens(PROMPT_TOKENS), prompts.tokens(PROMPT_TOKENS)
    assert pair.prefill.complete(warm).status == 200
    # To the decode engine what it holds itself was cached too, and it does hold the other.
    assert pair.decode.complete(cold).status == 200
    for stream in (False, True):
        for prompt, cached in ((warm, 3 * BLOCK_TOKENS), (cold, 0)):
            fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = lane.post(COMPLETIONS, request(COMPLETIONS, prompt, **fields))
            assert (answer.status, answer.prompt_tokens) == (200, PROMPT_TOKENS), answer
            assert answer.usage["completion_tokens"] == 6
            assert answer.cached_tokens == cached, (answer.usage, stream)
        cold = prompts.tokens(PROMPT_TOKENS)
        assert pair.decode.complete(cold).status == 200
    assert lane.handoffs().ended == {"split": 4}


def is_leg(passage: Passage) -> bool:
    return bool(passage.parameters)


def test_a_client_that_leaves_between_the_legs_or_within_its_stream_leaves_nothing(
    lane: Lane, pair: Pair, prompts: Prompts
) -> None:
    body = request(COMPLETIONS, prompts.tokens(PROMPT_TOKENS))
    with lane.gate.holding(is_leg):
        client = lane.send(COMPLETIONS, body)
        lane.gate.wait_for("the second leg is held", is_leg)
        client.close()
        wait_until("the router knows", lambda: lane.router.worker(pair.decode).active_requests == 1, seconds=30)
    # The prefill engine holds the cache until its lease ends, and the handoff is open for as long.
    assert lane.handoffs().open == 1
    lane.wait_clean()
    assert lane.handoffs().ended == {"left": 1}

    before = pair.decode.counters().generated_tokens
    limit = 400
    body = request(COMPLETIONS, prompts.tokens(PROMPT_TOKENS), tokens=limit, stream=True)
    lane.gate.stop_at_the_first_event()
    with contextlib.closing(lane.router.http.stream(COMPLETIONS, body)) as pieces:
        next(pieces)
    lane.wait_clean()
    pair.decode.thaw()
    wait_until("the engine is idle", lambda: pair.decode.counters().running == 0, seconds=30)
    assert pair.decode.counters().generated_tokens - before < limit, "the engine ran to the end"
    assert lane.handoffs().ended == {"left": 2}
    assert lane.post(COMPLETIONS, request(COMPLETIONS, prompts.tokens(PROMPT_TOKENS))).status == 200
    assert lane.handoffs().ended == {"left": 2, "split": 1}


def test_a_killed_prefill_engine_costs_nobody_an_answer(lane: Lane, pair: Pair, prompts: Prompts) -> None:
    """One kill meets requests before, during and after their prefill; the pair is used again after a restart."""

    def ask(path: str, stream: bool = False) -> tuple[str, dict]:
        return path, request(path, prompts.words(PROMPT_TOKENS), **({"stream": True} if stream else {}))

    after = [ask(path, stream) for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES) for stream in (False, True)]
    recomputed, during, before, later = ask(CHAT, True), ask(CHAT), ask(COMPLETIONS, True), ask(COMPLETIONS)
    with Lane(pair.prefill, pair.recomputing) as other:
        with lane.gate.holding(is_leg), other.gate.holding(is_leg):
            waiting = [lane.later(*each) for each in after]
            waiting_recomputed = other.later(*recomputed)
            wait_until("the second legs are held", lambda: len(lane.split_legs()) == len(after), seconds=120)
            wait_until("the second leg is held", lambda: len(other.split_legs()) == 1, seconds=120)
            # From here on prompts take for ever.
            pair.prefill.freeze()
            interrupted = lane.later(*during)
            wait_until("its prefill is sent", lambda: lane.handoffs().open == len(after) + 1, seconds=30)
            pair.prefill.kill()
            # Neither needs what is held at the doors.
            answers = [(during, interrupted()), (before, lane.post(*before))]
        answers += [(each, answer()) for each, answer in zip(after, waiting, strict=True)]
        # It is no fault of the decode engine's, which is asked as before.
        answers.append((later, lane.post(*later)))
        answer = waiting_recomputed()
        assert other.handoffs().ended == {"split": 1}
        assert text_of(recomputed[0], answer) == text_of(recomputed[0], other.alone(*recomputed))
        other.wait_clean()
    lane.wait_clean()
    ended = lane.handoffs()
    assert set(ended.ended) == {"local"}, (ended, [answer for _, answer in answers])
    # What it could not fetch the decode engine then computed itself.
    assert ended.fallbacks["decode_failed"] == len(after), ended
    assert ended.fallbacks["prefill_failed"] >= 1, ended
    for each, answer in answers:
        alone = lane.alone(*each)
        assert text_of(each[0], answer) == text_of(each[0], alone), each
        assert kinds(answer) == kinds(alone), each
    old = lane.split_legs()[-1]

    assert_split_again(lane, pair, prompts, old)


def assert_split_again(lane: Lane, pair: Pair, prompts: Prompts, old: Passage) -> None:
    """Restarts the prefill engine: requests are split again, with what the new one hands over and nothing else."""
    pair.make_whole()
    begin = len(lane.split_legs())

    def split() -> bool:
        nonlocal body, answer
        body = request(COMPLETIONS, prompts.tokens(PROMPT_TOKENS))
        answer = lane.post(COMPLETIONS, body)
        assert answer.status == 200, answer
        return lane.handoffs().ended.get("split", 0) == 1

    body, answer = {}, None
    wait_until("a request is split again", split, seconds=60)
    assert answer is not None
    assert text_of(COMPLETIONS, answer) == text_of(COMPLETIONS, lane.alone(COMPLETIONS, body))
    engines = {leg.parameters["remote_engine_id"] for leg in lane.split_legs()[begin:] if leg.parameters}
    assert old.parameters is not None
    assert len(engines) == 1
    assert old.parameters["remote_engine_id"] not in engines
    requests = [leg.parameters["remote_request_id"] for leg in lane.split_legs() if leg.parameters]
    assert len(set(requests)) == len(requests), "parameters were used twice"


def test_a_decode_engine_killed_within_a_stream_ends_it_with_one_error(
    lane: Lane, pair: Pair, prompts: Prompts
) -> None:
    body = request(COMPLETIONS, prompts.tokens(PROMPT_TOKENS), tokens=400, stream=True)
    lane.gate.stop_at_the_first_event()
    with contextlib.closing(lane.router.http.stream(COMPLETIONS, body, timeout=120)) as pieces:
        received = next(pieces)
        pair.decode.kill()
        received += b"".join(pieces)
    events = [line[6:] for line in received.decode().split("\n") if line.startswith("data: ")]
    assert "[DONE]" not in events, events[-3:]
    errors = [json.loads(event) for event in events if "error" in json.loads(event)]
    assert len(errors) == 1, events[-3:]
    assert "error" in json.loads(events[-1])
    assert all(json.loads(event)["choices"] for event in events[:-1])
    wait_until("it is counted", lambda: lane.handoffs().ended == {"broken_stream": 1}, seconds=30)
    lane.wait_clean()
