"""The ASGI gateway under uvicorn and FastAPI, against simulated engines."""

import concurrent.futures
import contextlib
import http.server
import json
import random
import socket
import threading

import httpx
import pytest
from engines import (
    KV_BLOCKS,
    LONG,
    MODEL,
    REPEATS,
    active,
    chat_body,
    engines,
    fidelity,
    free_port,
    is_hit,
    post_and_leave,
    wait_until,
    workload,
)
from fastapi import FastAPI
from serving import served

import kvlane
from kvlane.asgi import Gateway

CHAT = "/v1/chat/completions"


def play(url: str, seed: int, stream: bool = False) -> int:
    hits = 0
    with httpx.Client(base_url=url, timeout=30) as client:
        for prompt in workload(seed):
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = client.post(CHAT, json=chat_body(prompt.text, **options))
            assert answer.status_code == 200, answer.text
            hits += is_hit(prompt, usage(answer.text if stream else answer.json())["prompt_tokens_details"]["cached_tokens"])
    return hits


def usage(answer) -> dict:
    if isinstance(answer, dict):
        return answer["usage"]
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    assert events[-1] == "[DONE]"
    return json.loads(events[-2])["usage"]


def test_at_random_hits_are_a_matter_of_chance():
    """The same gateway, with a router that knows nothing of caches: what the other tests are held against."""
    rng = random.Random(3)
    with engines(events=False) as pair:
        gateway = Gateway({f"e{n}": engine.url for n, engine in enumerate(pair)})
        real = gateway.router.select

        class Blind:
            def __getattr__(self, name):
                return getattr(real.__self__, name)

            def select(self, *, allowed, ttl, **prompt):
                return real((), allowed=[rng.choice(allowed)], ttl=ttl)

        gateway.router = Blind()
        with served(gateway) as url:
            hits = play(url, seed=3)
    print(f"\nASGI gateway at random: {hits} of {REPEATS} repeats hit")
    assert hits <= 50


@pytest.mark.parametrize("stream", [False, True])
def test_text_is_enough_to_keep_prefixes_where_they_are(stream):
    with engines(events=False) as pair:
        workers = {f"e{n}": {"url": engine.url, "kv_capacity_blocks": KV_BLOCKS - 1} for n, engine in enumerate(pair)}
        gateway = Gateway(workers, config={"seed": 3})
        with served(gateway) as url:
            hits = play(url, seed=3, stream=stream)
            assert active(gateway.router) == 0
    print(f"\nASGI gateway, text{', streams' if stream else ''}: {hits} of {REPEATS} repeats hit")
    assert hits >= 58


def test_events_and_a_tokenizer_find_every_prefix_under_fastapi():
    with engines() as pair:
        workers = {f"e{n}": {"url": e.url, "events": e.events, "replay": e.replay} for n, e in enumerate(pair)}
        gateway = Gateway(workers, config={"seed": 3}, tokenize=pair[0].tokenize)
        app = FastAPI()
        app.mount("/llm", gateway)
        with served(app) as url:
            assert httpx.get(url + "/llm/v1/models").json()["data"][0]["id"] == MODEL
            hits = play(url + "/llm", seed=3)
            assert active(gateway.router) == 0
            trust = [worker.trust[0] for worker in gateway.router.workers()]
        gateway.router.close()
    print(f"\nASGI gateway, events: {hits} of {REPEATS} repeats hit")
    assert hits >= 58
    assert [one.state for one in trust] == ["exact", "exact"]
    assert all(one.fidelity > 0.95 for one in trust)


@contextlib.contextmanager
def slow_gateway(**options):
    with engines(1, events=False, decode_ms=50.0, speed=1.0) as (engine,):
        gateway = Gateway({"e0": engine.url}, **options)
        with served(gateway) as url, httpx.Client(base_url=url, timeout=30) as client:
            yield engine, gateway, client


def test_every_ending_ends_the_booking():
    with slow_gateway(debug_headers=True) as (engine, gateway, client):
        ended = lambda: active(gateway.router) == 0  # noqa: E731
        answer = client.post(CHAT, json=chat_body("a"))
        assert (answer.status_code, answer.headers["x-kvlane-worker"]) == (200, "e0")
        assert ended()

        refusal = client.post(CHAT, json=chat_body("b", max_tokens=-3))
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "max_tokens")
        assert ended()

        with client.stream("POST", CHAT, json=chat_body("c", max_tokens=6, stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert active(gateway.router) == 1
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert ended()

        with client.stream("POST", CHAT, json=chat_body("d", max_tokens=400, stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert active(gateway.router) == 1
        # Their 400 tokens take 20 seconds.
        wait_until("a stream that its client leaves ends", ended)
        wait_until("the engine stops as well", lambda: engine.running() == 0)

        post_and_leave(str(client.base_url.join(CHAT)), chat_body("e", max_tokens=400), lambda: engine.running() == 1)
        wait_until("a call that its client leaves ends", ended)
        wait_until("the engine stops as well", lambda: engine.running() == 0)

        with concurrent.futures.ThreadPoolExecutor(16) as many:
            answers = list(many.map(lambda n: client.post(CHAT, json=chat_body(f"f {n}")).status_code, range(32)))
        assert answers == [200] * 32 and ended()


def test_a_stream_that_nobody_reads_runs_out():
    """A client that stays and does not read: its booking goes when nothing was heard for the time of its lease."""
    with slow_gateway(lease_seconds=2) as (engine, gateway, client):
        with client.stream("POST", CHAT, json=chat_body("a", max_tokens=2, stream=True)) as answer:
            assert answer.status_code == 200
        stalled = threading.Event()

        class Silent(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                self.wfile.write(b'data: {"choices":[]}\n\n')
                self.wfile.flush()
                stalled.wait(20)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        gateway.remove_worker("e0")
        gateway.add_worker("silent", f"http://127.0.0.1:{server.server_port}")
        with client.stream("POST", CHAT, json=chat_body("b", stream=True)) as answer:
            next(lines := answer.iter_lines())
            assert active(gateway.router) == 1
            wait_until("it runs out", lambda: active(gateway.router) == 0)
            assert gateway.router.stats()["expired_leases"] == 1
            stalled.set()
            del lines
        server.shutdown()


@pytest.mark.parametrize("options", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_what_the_engine_reports_is_heard(options):
    with engines(1, events=False) as (engine,):
        gateway = Gateway({"e0": engine.url})
        with served(gateway) as url:
            for _ in range(4):
                assert httpx.post(url + CHAT, json=chat_body(LONG, **options)).status_code == 200
                engine.reset()  # so that the next prediction is wrong
            assert fidelity(gateway.router) < 0.9


def test_an_engine_that_is_not_there_is_passed_by():
    with engines(1, events=False) as (engine,):
        gateway = Gateway({"gone": f"http://127.0.0.1:{free_port()}", "here": engine.url}, config={"seed": 1})
        with served(gateway) as url:
            for number in range(4):
                assert httpx.post(url + CHAT, json=chat_body(f"a {number}")).status_code == 200
            assert active(gateway.router) == 0
            gateway.remove_worker("here")
            answer = httpx.post(url + CHAT, json=chat_body("b"))
            assert (answer.status_code, answer.json()["error"]["type"]) == (502, "server_error")
            gateway.remove_worker("gone")
            assert httpx.post(url + CHAT, json=chat_body("c")).status_code == 503


def test_a_request_that_engines_die_of_is_given_to_two():
    with contextlib.ExitStack() as stack:
        asked = []

        def dying() -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def run() -> None:
                with contextlib.suppress(OSError):  # the end of the test
                    while True:
                        with listener.accept()[0] as client:
                            client.recv(65_536)
                            asked.append(listener)

            threading.Thread(target=run, daemon=True).start()
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        gateway = Gateway({f"e{n}": dying() for n in range(4)})
        with served(gateway) as url:
            answer = httpx.post(url + CHAT, json=chat_body("a"))
            assert (answer.status_code, answer.json()["error"]["type"]) == (502, "server_error")
            assert len(asked) == 2
            assert gateway.router.stats()["active_leases"] == 0


def test_an_engine_that_dies_in_the_middle_is_told_of():
    with engines(1, events=False, decode_ms=50.0, speed=1.0) as (engine,):
        gateway = Gateway({"e0": engine.url})
        with served(gateway) as url, httpx.stream("POST", url + CHAT, json=chat_body("a", max_tokens=400, stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine.stop()
            left = [line for line in lines if line]
            assert json.loads(left[-1].removeprefix("data: "))["error"]["code"] == 502
            assert "data: [DONE]" not in left
            wait_until("its booking ends", lambda: active(gateway.router) == 0)


@pytest.mark.parametrize("worker", ["10.0.0.1:8000", "", {"events": "tcp://10.0.0.1:5557"}, {"url": None}])
def test_a_worker_without_a_url_is_named(worker):
    with pytest.raises(kvlane.ConfigError, match="url of worker 'w1' is .*: http://… and https://… are accepted"):
        Gateway({"w1": worker})


def test_odd_bodies_are_for_the_engine_to_judge():
    with engines(1, events=False) as (engine,):
        gateway = Gateway({"e0": engine.url}, max_body_bytes=100_000)
        with served(gateway) as url:
            for body in (b"", b"{", b"[]", b'{"messages": 7}', b'{"messages": [1, 2]}', b"\xff" * 100, b"[" * 5_000, b"{" * 5_000):
                answer = httpx.post(url + CHAT, content=body, headers={"content-type": "application/json"})
                assert answer.status_code in (400, 422) and answer.json()["error"], (body[:20], answer.text)
            assert httpx.post(url + CHAT, content=b" " * 100_001).status_code == 413
            assert httpx.get(url + "/nothing").status_code == 404
            assert httpx.get(url + "/v1/models?x=1").status_code == 200
            assert active(gateway.router) == 0


@pytest.mark.parametrize("target", ["@127.0.0.1:{}/v1/models", "http://127.0.0.1:{}/v1/models", "*"])
def test_a_client_cannot_name_another_host(target):
    with engines(1, events=False) as (engine,), socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.2)
        gateway = Gateway({"e0": engine.url})
        with served(gateway) as url:
            address = httpx.URL(url)
            with socket.create_connection((address.host, address.port), timeout=10) as client:
                head = f"GET {target.format(elsewhere.getsockname()[1])} HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n"
                client.sendall(head.encode())
                assert client.makefile("rb").readline().startswith(b"HTTP/1.1 400 ")
            with pytest.raises(TimeoutError):
                elsewhere.accept()
            assert gateway.router.stats()["decisions"] == 0
