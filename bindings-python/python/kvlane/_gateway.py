"""What the gateway modules share: settings of workers, the prompt of a body, and what an engine reports of it."""

import json
import logging
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from inspect import isawaitable
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

from ._native import InvalidRequest, Lease, Router

__all__ = ["Tokenize", "Usage", "WorkerOptions"]

log = logging.getLogger("kvlane")

Body: TypeAlias = Mapping[str, Any]
"""A request as its JSON body has it: `messages` and `tools`, `prompt`, or `input`."""

Tokenize: TypeAlias = Callable[[Body], Any | Awaitable[Any]]
"""Returns the token ids of a request, exactly those that the engine will see, or None to have it matched as text. May be
a coroutine function."""


class WorkerOptions(TypedDict, total=False):
    """What may be said of a worker beside its name: the arguments of `Router.add_worker`."""

    dp_ranks: int
    role: Literal["prefill", "decode", "both"]
    kv_capacity_blocks: int | None
    events: str | None
    replay: str | None
    block_size: int | None
    labels: Mapping[str, str] | None


class Usage(NamedTuple):
    """Token counts that an engine reported; None where it did not."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class Fleet:
    """Keeps the workers of a router equal to those that a gateway tells of."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._known: dict[str, WorkerOptions] = {}
        # Those that were there before are their owner's to describe.
        self._given = {worker.id for worker in router.workers()}

    def meet(self, worker: str, options: WorkerOptions) -> None:
        """Registers a worker when it is new or its settings changed. Settings that the router refuses are logged, once, and
        it does without them: the worker is to have its share of requests."""
        if worker in self._given or self._known.get(worker) == options:
            return
        self.forget(worker)
        try:
            self.router.add_worker(worker, **options)
        except (TypeError, ValueError) as error:
            log.warning("worker %s is registered without its settings: %s", worker, error)
            self.router.add_worker(worker)
        self._known[worker] = options

    def forget(self, worker: str) -> None:
        """Removes a worker with everything known of it."""
        if self._known.pop(worker, None) is not None:
            self.router.remove_worker(worker)

    def retain(self, workers: Container[str]) -> None:
        """Removes all others."""
        for worker in [known for known in self._known if known not in workers]:
            self.forget(worker)


def text_prompt(body: Body) -> dict[str, Any]:
    """Returns a request's prompt as arguments of `Router.select`, without a tokenizer. A batch is known by its first
    prompt, and a request without one goes by load."""
    content = body.get("messages")
    if content is None:
        content = body.get("prompt")
    if content is None:
        content = body.get("input")
    while isinstance(content, Sequence) and not isinstance(content, str) and content:
        first = content[0]
        if isinstance(first, Mapping):
            return {"messages": content, "tools": body.get("tools") or None}
        if isinstance(first, int):
            return {"tokens": content}
        content = first
    if isinstance(content, str):
        return {"text": content}
    return {"tokens": ()}


async def prompt_of(body: Body, tokenize: Tokenize | None) -> dict[str, Any]:
    """Returns a request's prompt as arguments of `Router.select`: token ids where `tokenize` gives them, else the text."""
    tokens = None
    if tokenize is not None:
        try:
            tokens = tokenize(body)
            if isawaitable(tokens):
                tokens = await tokens
        except Exception as error:  # the caller's code; a request must not fail for it
            log.warning("tokenize failed, the request is matched as text: %r", error)
            tokens = None
    prompt = text_prompt(body) if tokens is None else {"tokens": tokens}
    salt = body.get("cache_salt")
    if isinstance(salt, str) and salt:
        prompt["salt"] = salt
    prompt["expected_output_tokens"] = _expected_output(body)
    return prompt


def select(router: Router, prompt: Mapping[str, Any], allowed: Sequence[str], lease_seconds: float | None) -> Lease | None:
    """Selects a worker. A prompt that the router refuses is placed by load, and the engine judges it."""
    try:
        return router.select(**prompt, allowed=allowed, ttl=lease_seconds)
    except (InvalidRequest, UnicodeEncodeError) as error:  # the second: a salt with half a character, which JSON can hold
        log.warning("a prompt cannot be matched, its request goes by load: %s", error)
    return router.select((), allowed=allowed, ttl=lease_seconds)


def usage_of(answer: Any) -> Usage:
    """Reads the usage of an answer or of a streamed chunk, as JSON or as an object with attributes; of the APIs for chats,
    completions and responses."""
    usage = _field(answer, "usage")
    if usage is None:
        return Usage()
    details = _field(usage, "prompt_tokens_details")
    if details is None:
        details = _field(usage, "input_tokens_details")
    return Usage(
        _count(usage, "prompt_tokens", "input_tokens"),
        _count(details, "cached_tokens"),
        _count(usage, "completion_tokens", "output_tokens"),
    )


def usage_in(text: str | bytes) -> Usage:
    """Reads the usage of an answer, or of an event of a stream, as its JSON text."""
    try:
        return usage_of(json.loads(text))
    except (ValueError, RecursionError):
        return Usage()


_USUAL_ANSWER_TOKENS = 256
"""A limit above it says little of what an answer will be."""


def _expected_output(body: Body) -> int | None:
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
    counts = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min([*counts, _USUAL_ANSWER_TOKENS]) if counts else None


def _count(holder: Any, *names: str) -> int | None:
    for name in names:
        count = _field(holder, name)
        if isinstance(count, int) and 0 <= count < 1 << 32:
            return count
    return None


def _field(holder: Any, name: str) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name)
    return getattr(holder, name, None)
