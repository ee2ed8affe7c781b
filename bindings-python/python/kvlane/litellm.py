"""Cache-aware routing inside LiteLLM: a callback that chooses the deployment (`pip install 'kvlane[litellm]'`).

    import litellm
    from kvlane.litellm import KvRouting

    litellm.callbacks = [KvRouting()]
    router = litellm.Router(model_list=[...])
    await router.acompletion(model="llama", messages=[...])

In the proxy's configuration, `litellm_settings: {callbacks: kvlane.litellm.callback}` does the same without code.

Health, cooldowns, retries and fallbacks stay LiteLLM's: it offers the deployments that it would use, one of them is chosen.
Only its asynchronous calls ask (`acompletion`, `aresponses`, the proxy); the synchronous ones never do.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ._gateway import Fleet, Tokenize, WorkerOptions, log, prompt_of, select, usage_of
from ._native import Error, Lease, Router

try:
    from litellm.integrations.custom_logger import CustomLogger
except ImportError as error:
    raise ImportError("kvlane.litellm needs LiteLLM: pip install 'kvlane[litellm]'") from error

if TYPE_CHECKING:
    callback: KvRouting

__all__ = ["KvRouting", "callback"]


class KvRouting(CustomLogger):
    """Chooses, among the deployments that LiteLLM offers, the one whose KV cache is warm.

    A worker is a deployment, by its `model_info.id`. What is known of it (event endpoints, KV capacity) is given in
    `model_info.kvlane` of the deployment, or in `workers` by that id or by `api_base`:

        {"model_name": "llama", "litellm_params": {"model": "hosted_vllm/llama", "api_base": "http://w1:8000/v1"},
         "model_info": {"id": "w1", "kvlane": {"events": "tcp://w1:5557", "replay": "tcp://w1:5558"}}}

    Events speak of tokens, and LiteLLM has none: with events give `tokenize`, a function (or coroutine function) of the
    request (`model`, `messages`, `tools`, ...) that returns token ids as the engine will see them. Without it prompts are
    matched as text with the router's own placements.

    The booking of a request ends with LiteLLM's success or failure event; when the call is cancelled, or its stream is
    closed or thrown away, as soon as Python has forgotten it; and at the latest after `lease_seconds`.
    """

    def __init__(
        self,
        router: Router | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        workers: Mapping[str, WorkerOptions] | None = None,
        tokenize: Tokenize | None = None,
        lease_seconds: float = 600.0,
    ) -> None:
        super().__init__()
        self.router = router if router is not None else Router(config)
        self._fleet = Fleet(self.router)
        self._options = dict(workers or {})
        self._tokenize = tokenize
        self._lease_seconds = lease_seconds
        self._calls: dict[str, _Call] = {}

    def forget(self, deployment_id: str) -> None:
        """Removes a deployment that LiteLLM no longer has, with what is known of its cache."""
        self._fleet.forget(deployment_id)

    async def async_filter_deployments(
        self,
        model: str,
        healthy_deployments: list[Any],
        messages: list[Any] | None,
        request_kwargs: dict[str, Any] | None = None,
        parent_otel_span: Any = None,
    ) -> list[dict[str, Any]]:
        """Returns the chosen deployment alone, or all of them when the router has no opinion."""
        _CHOSEN.set(None)  # one that LiteLLM did not use after all is released with it
        body = {**(request_kwargs or {}), "model": model}
        if messages is not None:
            body["messages"] = messages
        prompt = await prompt_of(body, self._tokenize)
        try:
            by_worker = self._workers_of(healthy_deployments)
            lease = select(self.router, prompt, list(by_worker), self._lease_seconds)
        except Error as error:  # closed or forked: a request is not to fail for its placement
            log.warning("LiteLLM chooses by itself: %s", error)
            return healthy_deployments
        if lease is None:
            return healthy_deployments
        _CHOSEN.set(lease)
        return [by_worker[lease.worker]]

    def _workers_of(self, deployments: list[Any]) -> dict[str, dict[str, Any]]:
        by_worker: dict[str, dict[str, Any]] = {}
        for deployment in deployments:
            info = deployment.get("model_info") or {}
            worker = str(info.get("id"))
            api_base = (deployment.get("litellm_params") or {}).get("api_base")
            options = info.get("kvlane") or self._options.get(worker) or self._options.get(str(api_base)) or {}
            self._fleet.meet(worker, options)
            by_worker[worker] = deployment
        return by_worker

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> None:
        """Ties the booking to LiteLLM's record of the call, which dies with it."""
        lease, record = _CHOSEN.get(), kwargs.get("litellm_logging_obj")
        _CHOSEN.set(None)
        if lease is None or record is None or (kwargs.get("model_info") or {}).get("id") != lease.worker:
            return
        call_id = str(record.litellm_call_id)
        self._calls[call_id] = _Call(lease)  # a retry under the same id replaces, and so releases, the earlier try
        weakref.finalize(record, self._abandoned, call_id, lease).atexit = False

    async def async_post_call_success_deployment_hook(
        self, request_data: dict[str, Any], response: Any, call_type: Any
    ) -> None:
        """Ends the booking of a whole answer, before the caller has it: LiteLLM's event comes when it has the time."""
        self._succeeded(_call_id(request_data), response)

    async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        """Ends the booking of a stream that was read to its end."""
        self._succeeded(_call_id(kwargs), response_obj)

    async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        """Ends the booking, unless it belongs to a retry that began since."""
        call = self._calls.get(_call_id(kwargs))
        if call is not None and not (isinstance(end_time, datetime) and call.is_after(end_time)):
            self._failed(_call_id(kwargs))

    async def async_post_call_failure_deployment_hook(
        self, request_data: Mapping[str, Any], exception: Exception, call_type: Any, fallback_depth: int | None = None
    ) -> None:
        """Ends the booking of a try, before the next one is placed."""
        self._failed(_call_id(request_data))

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """In the proxy: follows a stream, and ends the booking when the client leaves it."""
        call = self._calls.get(_call_id(request_data))
        chunks = 0
        try:
            async for chunk in response:
                if call is not None:
                    chunks += 1
                    if chunks == 1:
                        call.lease.prefill_done()
                    call.lease.output_tokens(chunks)
                yield chunk
        except BaseException:
            if call is not None:
                call.lease.release(ok=False)
            raise

    def _succeeded(self, call_id: str, answer: Any) -> None:
        if (call := self._calls.pop(call_id, None)) is not None:
            usage = usage_of(answer)
            call.lease.release(usage.cached_tokens, prompt_tokens=usage.prompt_tokens)

    def _failed(self, call_id: str) -> None:
        if (call := self._calls.pop(call_id, None)) is not None:
            call.lease.release(ok=False)

    def _abandoned(self, call_id: str, lease: Lease) -> None:
        call = self._calls.get(call_id)
        if call is not None and call.lease is lease:
            self._calls.pop(call_id, None)
        lease.release(ok=False)


class _Call:
    """One try of a request, and when it began by LiteLLM's clock."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self._began = datetime.now()

    def is_after(self, then: datetime) -> bool:
        return self._began.timestamp() > then.timestamp()


_CHOSEN: ContextVar[Lease | None] = ContextVar("kvlane_litellm_chosen", default=None)
"""What was booked and is not yet tied to a call. Dropping a lease releases it."""


def _call_id(holder: Mapping[str, Any]) -> str:
    record = holder.get("litellm_logging_obj")
    return str(holder.get("litellm_call_id") if record is None else record.litellm_call_id)


def __getattr__(name: str) -> Any:
    if name == "callback":
        globals()["callback"] = made = KvRouting()
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
