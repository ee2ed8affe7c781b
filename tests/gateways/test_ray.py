"""Ray Serve with the request router, two replicas and a simulated engine behind each."""

import itertools
import random

import pytest
import ray
import ray_app
from engines import KV_BLOCKS, LONG, REPEATS, active, engines, fidelity, is_hit, wait_until, workload
from ray import serve
from ray.serve.config import RequestRouterConfig

KV = "kvlane.ray.KvRequestRouter"


APPLICATIONS = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(
        num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False, configure_logging=False
    )
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()
    ray.shutdown()


class Deployed:
    """The deployment with given engines, and the handle that the test calls it by."""

    def __init__(self, pair, *, router: str | None, events: bool = False, ongoing: int = 16, **settings) -> None:
        known = [
            {"url": engine.url, "kv_capacity_blocks": KV_BLOCKS - 1}
            | ({"events": engine.events, "replay": engine.replay} if events else {})
            for engine in pair
        ]
        options = {"max_ongoing_requests": ongoing}
        if router is not None:
            options["request_router_config"] = RequestRouterConfig(
                request_router_class=router, request_router_kwargs=settings, request_routing_stats_period_s=0.2
            )
        application = ray_app.Replica.options(num_replicas=len(pair), **options).bind(known)
        for before in serve.status().applications:
            serve.delete(before)
        # A new name: Serve keeps the router of an application that is deployed again.
        self.handle = serve.run(application, name=f"chat-{next(APPLICATIONS)}", route_prefix=None)
        self.chat("hello").result(timeout_s=30)
        if router is not None:
            # Until then workers are registered anew, with what their replicas report.
            wait_until("replicas have reported", lambda: all(worker.kv_capacity_blocks for worker in self.kv.workers()))

    def chat(self, text: str, **options):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **options}
        return self.handle.chat.remote(body)

    def stream(self, text: str, **options):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **options}
        return self.handle.options(stream=True).stream.remote(body)

    @property
    def kv(self):
        """The router inside the handle."""
        return self.handle.chat._router._asyncio_router.request_router.kv

    def play(self, seed: int) -> int:
        hits = 0
        for prompt in workload(seed):
            answer = self.chat(prompt.text).result(timeout_s=30)
            hits += is_hit(prompt, answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        return hits


def test_without_kvlane_hits_are_a_matter_of_chance():
    random.seed(4)
    with engines(events=False) as pair:
        hits = Deployed(pair, router=None).play(seed=4)
    print(f"\nRay Serve alone: {hits} of {REPEATS} repeats hit")
    assert hits <= 50


def test_text_is_enough_to_keep_prefixes_where_they_are():
    with engines(events=False) as pair:
        deployed = Deployed(pair, router=KV, config={"seed": 4})
        hits = deployed.play(seed=4)
        wait_until("no booking is left", lambda: active(deployed.kv) == 0)
    print(f"\nRay Serve with kvlane, text: {hits} of {REPEATS} repeats hit")
    assert hits >= 58


def test_events_and_a_tokenizer_find_every_prefix(monkeypatch):
    with engines() as pair:
        monkeypatch.setattr(ray_app, "TOKENIZER", pair[0])
        deployed = Deployed(pair, router=KV, events=True, config={"seed": 4}, tokenize="ray_app:tokenize")
        wait_until("events are followed", lambda: [s["connected"] for s in deployed.kv.stats()["subscriptions"]] == [True] * 2)
        hits = deployed.play(seed=4)
        wait_until("no booking is left", lambda: active(deployed.kv) == 0)
        trust = [worker.trust[0] for worker in deployed.kv.workers()]
    print(f"\nRay Serve with kvlane, events: {hits} of {REPEATS} repeats hit")
    assert hits >= 58
    assert [one.state for one in trust] == ["exact", "exact"]
    assert all(one.fidelity > 0.95 for one in trust)


def test_every_ending_ends_the_booking():
    with engines(2, events=False, decode_ms=50.0, speed=1.0) as pair:
        deployed = Deployed(pair, router=KV)
        ended = lambda: active(deployed.kv) == 0  # noqa: E731
        wait_until("the first ends", ended)

        answering = deployed.chat("a", max_tokens=10)
        wait_until("it is booked", lambda: active(deployed.kv) == 1)
        answering.result(timeout_s=30)
        wait_until("an answer ends", ended)

        with pytest.raises(Exception, match="max_tokens"):
            deployed.chat("b", max_tokens=-3).result(timeout_s=30)
        wait_until("a failure ends", ended)

        stream = deployed.stream("c", max_tokens=4)
        assert list(stream)[-1] == "data: [DONE]"
        wait_until("a stream ends", ended)

        cancelled = deployed.chat("d", max_tokens=40)
        wait_until("it is booked", lambda: active(deployed.kv) == 1)
        cancelled.cancel()
        wait_until("a cancelled call ends", ended)

        stream = deployed.stream("e", max_tokens=400)
        next(stream)
        assert active(deployed.kv) == 1
        stream.cancel()
        wait_until("a cancelled stream ends", ended)

        together = [deployed.chat(f"f {number}", max_tokens=6) for number in range(24)]
        wait_until("they are booked", lambda: active(deployed.kv) >= 12)
        shares = sorted(worker.active_requests for worker in deployed.kv.workers())
        for one in together:
            one.result(timeout_s=30)
        wait_until("all end", ended)
        assert shares[0] >= 4, shares


def test_a_request_that_waits_for_a_replica_is_booked_once():
    with engines(1, events=False, decode_ms=50.0, speed=1.0) as pair:
        deployed = Deployed(pair, router=KV, ongoing=1)
        wait_until("the first ends", lambda: active(deployed.kv) == 0)
        together = [deployed.chat(f"a {number}", max_tokens=16) for number in range(3)]
        seen = set()

        def asked_again() -> bool:
            seen.add(active(deployed.kv))
            return deployed.kv.stats()["decisions"] > 10

        wait_until("Serve asks again and again", asked_again)
        for one in together:
            one.result(timeout_s=30)
        wait_until("all end", lambda: active(deployed.kv) == 0)
    assert max(seen) <= len(together), seen


def test_what_the_engine_reports_is_heard():
    with engines(1, events=False) as (engine,):
        for options in ({}, {"stream_options": {"include_usage": True}}):
            deployed = Deployed([engine], router=KV)
            for _ in range(4):
                if options:
                    list(deployed.stream(LONG, **options))
                else:
                    deployed.chat(LONG).result(timeout_s=30)
                wait_until("it ends", lambda: active(deployed.kv) == 0)
                engine.reset()  # so that the next prediction is wrong
            assert fidelity(deployed.kv) < 0.9, options


def test_an_abandoned_stream_runs_out():
    with engines(1, events=False, decode_ms=50.0, speed=1.0) as (engine,):
        deployed = Deployed([engine], router=KV, lease_seconds=2)
        wait_until("the first ends", lambda: active(deployed.kv) == 0)
        stream = deployed.stream("a", max_tokens=400)
        next(stream)
        assert active(deployed.kv) == 1
        wait_until("it runs out", lambda: active(deployed.kv) == 0)
        assert deployed.kv.stats()["expired_leases"] == 1
        stream.cancel()
