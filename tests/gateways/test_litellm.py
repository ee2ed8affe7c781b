"""LiteLLM's own Router with the callback, against simulated engines."""

import asyncio
import gc
import random

import litellm
import pytest
from engines import LONG, MODEL, REPEATS, Engine, active, engines, fidelity, is_hit, wait_until, workload

from kvlane.litellm import KvRouting


LOOP = asyncio.Runner()
"""One loop for all: LiteLLM hands its events to a worker of the first loop it sees."""


def deployment(engine: Engine, name: str, **info) -> dict:
    return {
        "model_name": "chat",
        "litellm_params": {"model": f"hosted_vllm/{MODEL}", "api_base": engine.api, "api_key": "none"},
        "model_info": {"id": name, **info},
    }


def with_events(engine: Engine, name: str) -> dict:
    return deployment(engine, name, kvlane={"events": engine.events, "replay": engine.replay, "kv_capacity_blocks": 925})


@pytest.fixture
def routing():
    """Callbacks are LiteLLM's globals, in several lists; each test has its own."""
    made: list[KvRouting] = []

    def make(**options) -> KvRouting:
        made.append(KvRouting(**options))
        litellm.callbacks = [made[-1]]
        return made[-1]

    litellm.logging_callback_manager._reset_all_callbacks()
    yield make
    litellm.logging_callback_manager._reset_all_callbacks()
    for one in made:
        one.router.close()


def chat(router: litellm.Router, text: str, **options):
    return router.acompletion(model="chat", messages=[{"role": "user", "content": text}], **{"max_tokens": 2, **options})


async def play(router: litellm.Router, seed: int) -> int:
    hits = 0
    for prompt in workload(seed):
        answer = await chat(router, prompt.text)
        hits += is_hit(prompt, answer.usage.prompt_tokens_details.cached_tokens)
    return hits


def test_without_kvlane_hits_are_a_matter_of_chance():
    random.seed(1)
    with engines() as pair:
        router = litellm.Router(model_list=[deployment(engine, f"e{n}") for n, engine in enumerate(pair)])
        hits = LOOP.run(play(router, seed=1))
    print(f"\nLiteLLM alone: {hits} of {REPEATS} repeats hit")
    assert hits <= 50


def test_text_is_enough_to_keep_prefixes_where_they_are(routing):
    with engines(events=False) as pair:
        kv = routing(config={"seed": 1})
        known = {"kv_capacity_blocks": 925}
        router = litellm.Router(model_list=[deployment(engine, f"e{n}", kvlane=known) for n, engine in enumerate(pair)])
        hits = LOOP.run(play(router, seed=1))
        wait_until("no booking is left", lambda: active(kv.router) == 0)
    print(f"\nLiteLLM with kvlane, text: {hits} of {REPEATS} repeats hit")
    assert hits >= 58


def test_events_and_a_tokenizer_find_every_prefix(routing):
    with engines() as pair:

        async def tokenize(body):
            return await asyncio.to_thread(pair[0].tokenize, body)

        kv = routing(config={"seed": 1}, tokenize=tokenize)
        router = litellm.Router(model_list=[with_events(engine, f"e{n}") for n, engine in enumerate(pair)])
        hits = LOOP.run(play(router, seed=1))
        wait_until("no booking is left", lambda: active(kv.router) == 0)
        workers = kv.router.workers()
    print(f"\nLiteLLM with kvlane, events: {hits} of {REPEATS} repeats hit")
    assert hits >= 58
    assert [worker.trust[0].state for worker in workers] == ["exact", "exact"]
    assert all(worker.index_blocks["device"] > 400 for worker in workers)
    # The engines' own counts came back and agree with what was predicted.
    assert all(worker.trust[0].fidelity > 0.95 for worker in workers)


class Story:
    """A slow engine, and one test's way through it: what is booked is looked at while a request runs."""

    def __init__(self, routing, engine: Engine, **options) -> None:
        self.engine = engine
        self.kv: KvRouting = routing(**options)
        self.router = litellm.Router(model_list=[deployment(engine, "e0")], num_retries=0)

    @property
    def active(self) -> int:
        return active(self.kv.router)

    async def until(self, bookings: int, seconds: float = 10) -> None:
        for _ in range(int(seconds * 50)):
            if self.active == bookings:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{self.active} bookings are open, not {bookings}")

    async def ended(self) -> None:
        await self.until(0)


@pytest.fixture(scope="module")
def slow():
    with engines(1, events=False, decode_ms=50.0, speed=1.0) as (engine,):
        yield engine


def test_an_answer_ends_its_booking(routing, slow):
    async def main():
        story = Story(routing, slow)
        answering = asyncio.ensure_future(chat(story.router, "one", max_tokens=30))
        await story.until(1)
        await answering
        await story.ended()

    LOOP.run(main())


def test_a_stream_that_is_read_ends_its_booking(routing, slow):
    async def main():
        story = Story(routing, slow)
        async for _ in await chat(story.router, "two", max_tokens=5, stream=True):
            assert story.active == 1
        await story.ended()

    LOOP.run(main())


@pytest.mark.parametrize("options", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_what_the_engine_reports_is_heard(routing, options):
    async def main():
        with engines(1, events=False) as (engine,):
            story = Story(routing, engine)
            for _ in range(4):
                answer = await chat(story.router, LONG, **options)
                if options:
                    async for _ in answer:
                        pass
                await story.ended()
                engine.reset()  # so that the next prediction is wrong
            assert fidelity(story.kv.router) < 0.9

    LOOP.run(main())


def test_a_refusal_ends_its_booking(routing, slow):
    async def main():
        story = Story(routing, slow)
        with pytest.raises(litellm.BadRequestError):
            await chat(story.router, "three", max_tokens=-3)
        await story.ended()

    LOOP.run(main())


def test_a_dead_engine_ends_its_booking_and_another_one_answers(routing, slow):
    async def main():
        kv = routing(config={"seed": 1})
        gone = deployment(slow, "gone")
        gone["litellm_params"]["api_base"] = "http://127.0.0.1:9/v1"
        router = litellm.Router(model_list=[gone, deployment(slow, "alive")], num_retries=4, retry_after=0, allowed_fails=0)
        for number in range(4):
            answer = await chat(router, f"four {number}")
            assert answer.choices
        for _ in range(150):
            if active(kv.router) == 0:
                break
            await asyncio.sleep(0.02)
        assert active(kv.router) == 0

    LOOP.run(main())


def test_an_engine_that_dies_in_the_middle_ends_its_booking(routing):
    async def main():
        with engines(1, events=False, decode_ms=50.0, speed=1.0) as (engine,):
            story = Story(routing, engine)
            stream = await chat(story.router, "five", max_tokens=200, stream=True)
            await anext(stream)
            assert story.active == 1
            engine.stop()
            with pytest.raises(Exception):  # whichever LiteLLM makes of it
                async for _ in stream:
                    pass
            del stream
            await story.ended()

    LOOP.run(main())


def test_a_cancelled_call_ends_its_booking(routing, slow):
    async def main():
        story = Story(routing, slow)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(chat(story.router, "six", max_tokens=400), 0.3)
        await story.ended()
        task = asyncio.ensure_future(chat(story.router, "seven", max_tokens=400))
        await story.until(1)
        task.cancel()
        del task
        await story.ended()

    LOOP.run(main())


def test_a_stream_that_is_thrown_away_ends_its_booking(routing, slow):
    async def main():
        story = Story(routing, slow)
        stream = await chat(story.router, "eight", max_tokens=100, stream=True)
        await anext(stream)
        assert story.active == 1
        del stream
        gc.collect()
        await story.ended()

    LOOP.run(main())


def test_a_stream_that_is_kept_and_not_read_runs_out(routing, slow):
    async def main():
        story = Story(routing, slow, lease_seconds=2)
        stream = await chat(story.router, "nine", max_tokens=100, stream=True)
        await anext(stream)
        assert story.active == 1
        await story.ended()
        assert story.kv.router.stats()["expired_leases"] == 1
        del stream

    LOOP.run(main())


def test_calls_that_share_a_metadata_dict_keep_their_own_bookings(routing, slow):
    async def main():
        story = Story(routing, slow)
        metadata = {"team": "a"}
        calls = [asyncio.ensure_future(chat(story.router, f"ten {n}", max_tokens=30 + n, metadata=metadata)) for n in range(8)]
        await story.until(8)
        await asyncio.gather(*calls)
        await story.ended()

    LOOP.run(main())


def test_a_closed_router_and_a_broken_tokenizer_fail_no_request(routing, slow):
    def broken(body):
        raise RuntimeError("no tokenizer here")

    async def main():
        story = Story(routing, slow, tokenize=broken)
        assert (await chat(story.router, "eleven")).choices
        await story.ended()
        story.kv.router.close()
        assert (await chat(story.router, "twelve")).choices

    LOOP.run(main())
