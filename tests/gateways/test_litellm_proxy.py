"""LiteLLM's proxy, configured by a file that names the callback, against simulated engines."""

import contextlib
import json
import pathlib
import subprocess
import sys

import httpx
import pytest
from engines import REPEATS, chat_body, engines, free_port, is_hit, post_and_leave, wait_until, workload

KEY = "sk-a-key-of-these-tests-0123456789"
CONFIG = """
general_settings: {{master_key: "{key}"}}
model_list:{deployments}
litellm_settings: {{callbacks: {callbacks}, num_retries: 0}}
"""
DEPLOYMENT = """
  - model_name: sim
    litellm_params: {{model: hosted_vllm/sim, api_base: "{api}", api_key: none}}
    model_info: {{id: e{number}, kvlane: {{kv_capacity_blocks: 925}}}}"""


class Proxy:
    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def chat(self, text: str, **options) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=chat_body(text, **options))

    def stream(self, text: str, **options):
        return self.client.stream("POST", "/v1/chat/completions", json=chat_body(text, stream=True, **options))

    def bookings(self) -> dict:
        return self.client.get("/bookings").json()

    def ended(self) -> bool:
        return self.bookings()["active"] == 0

    def play(self, seed: int) -> int:
        hits = 0
        for prompt in workload(seed):
            answer = self.chat(prompt.text)
            assert answer.status_code == 200, answer.text
            hits += is_hit(prompt, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        return hits


@pytest.fixture
def proxy(tmp_path):
    with contextlib.ExitStack() as ending:

        def serve(pair, *, callbacks: str) -> Proxy:
            deployments = "".join(DEPLOYMENT.format(api=engine.api, number=number) for number, engine in enumerate(pair))
            config = tmp_path / "config.yaml"
            config.write_text(CONFIG.format(key=KEY, deployments=deployments, callbacks=callbacks))
            port = free_port()
            log = ending.enter_context(open(tmp_path / "proxy.log", "w+"))
            script = pathlib.Path(__file__).with_name("proxy_app.py")
            process = subprocess.Popen([sys.executable, script, config, str(port)], stdout=log, stderr=log)
            ending.callback(process.wait)
            ending.callback(process.kill)
            headers = {"authorization": f"Bearer {KEY}"}
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30)
            proxy = Proxy(ending.enter_context(client))

            def answers() -> bool:
                assert process.poll() is None, (tmp_path / "proxy.log").read_text()[-3000:]
                with contextlib.suppress(httpx.TransportError):
                    return client.get("/bookings").status_code == 200
                return False

            wait_until("the proxy serves", answers, 90)
            return proxy

        yield serve


def test_without_kvlane_hits_are_a_matter_of_chance(proxy):
    with engines(events=False) as pair:
        hits = proxy(pair, callbacks="[]").play(seed=2)
    print(f"\nLiteLLM's proxy alone: {hits} of {REPEATS} repeats hit")
    assert hits <= 50


def test_one_line_of_configuration_keeps_prefixes_where_they_are(proxy):
    with engines(events=False) as pair:
        gateway = proxy(pair, callbacks="kvlane.litellm.callback")
        hits = gateway.play(seed=2)
        wait_until("no booking is left", gateway.ended)
        assert gateway.bookings() == {"active": 0, "decisions": 72, "callbacks": 1}
    print(f"\nLiteLLM's proxy with kvlane: {hits} of {REPEATS} repeats hit")
    assert hits >= 58


def test_every_ending_ends_the_booking(proxy):
    with engines(1, events=False, decode_ms=50.0, speed=1.0) as (engine,):
        gateway = proxy([engine], callbacks="kvlane.litellm.callback")
        assert gateway.chat("a").status_code == 200
        wait_until("an answer ends", gateway.ended)

        assert gateway.chat("b", max_tokens=-3).status_code == 400
        wait_until("a refusal ends", gateway.ended)

        with gateway.stream("c", max_tokens=6) as answer:
            lines = [line for line in answer.iter_lines() if line]
            assert json.loads(lines[0].removeprefix("data: "))["choices"] and lines[-1] == "data: [DONE]"
        wait_until("a stream ends", gateway.ended)

        with gateway.stream("d", max_tokens=400) as answer:
            lines = answer.iter_lines()  # which closes the connection when it is dropped
            next(lines)
            assert gateway.bookings()["active"] == 1
        wait_until("a stream that its client leaves ends", gateway.ended)

        url = str(gateway.client.base_url.join("/v1/chat/completions"))
        post_and_leave(url, chat_body("e", max_tokens=60), lambda: engine.running() == 1, authorization=f"Bearer {KEY}")
        wait_until("a call that its client leaves ends", gateway.ended)
        wait_until("the engine is idle", lambda: engine.running() == 0)
        assert gateway.bookings()["decisions"] == 5
