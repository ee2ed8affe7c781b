"""The quickstarts of docs/python.md that need a gateway, and the programs of examples/python, run as they are written."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from engines import chat_body, engines

ROOT = pathlib.Path(__file__).parents[2]
NEEDS = {"asgi": ("fastapi", "httpx", "uvicorn"), "litellm": ("litellm",), "ray": ("ray",)}
HERE = [name for name, packages in NEEDS.items() if all(map(importlib.util.find_spec, packages))]
EXAMPLES = {"asgi": "asgi_gateway.py", "litellm": "litellm_gateway.py", "ray": "ray_serve.py"}


def quickstarts(name: str) -> list[str]:
    page = (ROOT / "docs" / "python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return [block for block in blocks if f"kvlane.{name} import" in block]


def test_this_environment_has_a_gateway():
    assert HERE


@pytest.mark.parametrize("name", HERE)
def test_the_quickstart_runs(name, tmp_path):
    (quickstart,) = quickstarts(name)
    with engines(2, events=False) as pair:
        for number, engine in enumerate(pair, 1):
            quickstart = quickstart.replace(f"http://w{number}:8000", engine.url)
        if name == "asgi":
            quickstart += (
                "\nfrom fastapi.testclient import TestClient"
                f"\nwith TestClient(app) as client: answer = client.post('/llm/v1/chat/completions', json={chat_body('Hello')!r})"
                "\nassert answer.status_code == 200 and answer.json()['choices'], answer.text\n"
            )
        if name == "ray":  # small, where a reader would have a cluster
            quickstart = (
                "import ray; ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)\n"
                "from ray import serve; serve.start(proxy_location='Disabled')\n"
            ) + quickstart
        script = tmp_path / "quickstart.py"
        script.write_text(quickstart)
        result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=90)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


@pytest.mark.parametrize("name", HERE)
def test_the_example_runs(name):
    with engines(2) as pair:
        workers = [f"{engine.url},{engine.events},{engine.replay}" for engine in pair]
        command = [sys.executable, ROOT / "examples" / "python" / EXAMPLES[name], "--once", *workers]
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        result = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    # Twelve requests with four beginnings: every one but the first of each finds its beginning cached.
    assert "8 of 8 repeats found their beginning cached" in result.stdout, result.stdout + result.stderr
