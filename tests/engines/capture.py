"""Writes what a real engine answers to `tests/fixtures/vllm-<version>/`, for tests that run without an engine.

usage: run.sh --capture

Token ids come from the answers themselves (`return_token_ids`), so they are what the engine really computed.
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil

from capture_handoff import capture_handoff
from chats import KINDS
from client import Answer
from harness import MODEL, MODEL_DIR, Engine
from prompts import Prompts, chat_body

METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:time_to_first_token_seconds",
    "vllm:cache_config_info",
)


def main() -> None:
    engine = Engine("w1")
    engine.launch()
    try:
        engine.wait_ready()
        version = engine.http.get("/version").json["version"]
        folder = pathlib.Path(__file__).resolve().parent.parent / "fixtures" / f"vllm-{version}"
        folder.mkdir(parents=True, exist_ok=True)
        capture(engine, folder)
    finally:
        engine.stop()
    (folder / "handoff.json").write_text(capture_handoff(), encoding="utf-8")
    print(f"wrote {folder}")


def capture(engine: Engine, folder: pathlib.Path) -> None:
    prompts = Prompts("capture")

    def write(name: str, answer: Answer) -> None:
        text = answer.text.replace(MODEL_DIR, "/models/tiny")
        (folder / name).write_text(text, encoding="utf-8")

    chat = chat_body([{"role": "user", "content": prompts.words(70)}], max_tokens=4)
    engine.http.post("/v1/chat/completions", chat)
    write("chat-completion.json", engine.http.post("/v1/chat/completions", chat))
    streamed = {**chat, "stream": True}
    write("chat-completion-no-usage.sse", engine.http.post("/v1/chat/completions", streamed))
    streamed["stream_options"] = {"include_usage": True}
    write("chat-completion.sse", engine.http.post("/v1/chat/completions", streamed))

    tokens = prompts.tokens(70)
    text = {"model": MODEL, "prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    engine.complete(tokens)
    write("completion.json", engine.http.post("/v1/completions", text))
    streamed = {**text, "stream": True, "stream_options": {"include_usage": True}}
    write("completion.sse", engine.http.post("/v1/completions", streamed))

    write("models.json", engine.http.get("/v1/models"))
    write("error-too-long.json", engine.http.post("/v1/completions", {**text, "prompt": [40] * 600}))
    write("error-unknown-model.json", engine.http.post("/v1/completions", {**text, "model": "other"}))
    write("kv-event-sources.json", engine.http.get("/kv_event_sources"))
    write("tokenize-chat.json", engine.http.post("/tokenize", {"model": MODEL, "messages": chat["messages"]}))
    (folder / "metrics.txt").write_text(trimmed(engine.http.get("/metrics").text), encoding="utf-8")
    (folder / "prompt-tokens.json").write_text(prompt_tokens(engine), encoding="utf-8")

    model = folder / "model"
    model.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copyfile(pathlib.Path(MODEL_DIR) / name, model / name)


def prompt_tokens(engine: Engine) -> str:
    """One case a line: path, request, and the token ids of the prompt that the engine computed."""
    cases = []
    for kind in KINDS:
        request = kind(Prompts(kind.__name__))
        answer = engine.http.post("/v1/chat/completions", {**request, "return_token_ids": True})
        assert answer.status == 200, answer
        cases.append((kind.__name__, "/v1/chat/completions", request, answer.json["prompt_token_ids"]))
    words = Prompts("text").words(20)
    for name, fields in (("text", {}), ("text_without_special_tokens", {"add_special_tokens": False})):
        request = {"model": MODEL, "prompt": words, "max_tokens": 1, **fields}
        answer = engine.http.post("/v1/completions", {**request, "return_token_ids": True})
        assert answer.status == 200, answer
        cases.append((name, "/v1/completions", request, answer.json["choices"][0]["prompt_token_ids"]))
    lines = [
        json.dumps({"name": name, "path": path, "request": request, "tokens": tokens}, ensure_ascii=False)
        for name, path, request, tokens in cases
    ]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def trimmed(metrics: str) -> str:
    """The families a router may read; of histograms the first and the last buckets."""
    kept = []
    for line in metrics.splitlines():
        name = re.match(r"(?:# (?:HELP|TYPE) )?([\w:]+)", line)
        if not name or not name[1].startswith(METRICS):
            continue
        bound = re.search(r'le="([^"]+)"', line)
        if bound and bound[1] not in ("0.001", "0.01", "0.1", "1.0", "+Inf"):
            continue
        kept.append(line)
    return "\n".join(kept) + "\n"


if __name__ == "__main__":
    main()
