"""Cache-aware routing inside Ray Serve: a request router for deployments (`pip install 'kvlane[ray]'`).

    from ray import serve
    from ray.serve.config import RequestRouterConfig

    @serve.deployment(
        num_replicas=2,
        request_router_config=RequestRouterConfig(request_router_class="kvlane.ray.KvRequestRouter"),
    )
    class Engine: ...

Each handle to the deployment has a router of its own, in its own process, which knows the placements it made itself. What
engines publish is the same for all: a replica tells where in `record_routing_stats`, with `routing_stats`.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from pkgutil import resolve_name
from typing import Any, cast

from ._gateway import Fleet, Tokenize, Usage, WorkerOptions, log, prompt_of, select, usage_in, usage_of
from ._native import Error, Lease, Router

try:
    import ray
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as error:
    raise ImportError("kvlane.ray needs Ray Serve: pip install 'kvlane[ray]'") from error

__all__ = ["KvRequestRouter", "routing_stats"]


def routing_stats(options: WorkerOptions) -> dict[str, Any]:
    """Returns what a replica's `record_routing_stats` reports so that its events are followed:

        def record_routing_stats(self):
            return kvlane.ray.routing_stats({"events": "tcp://10.0.0.1:5557", "kv_capacity_blocks": 40_000})
    """
    return {_KEY: dict(options)}


class KvRequestRouter(RequestRouter):
    """Ranks replicas by what their KV caches save of a request, and by their load.

    A request is the first argument of the call: a dict or an object with `messages` (and `tools`) or `prompt`, as in its
    JSON body. Token ids are taken from the argument `request_token_ids`, when the call has it, or from `tokenize`. Calls
    without any of these go by load.

    Settings are `request_router_kwargs`: `config` of the router, `tokenize` (the name of a function, "module:function", of
    the request), and `lease_seconds`. A booking ends when Serve tells that the request is over: answered, failed or cancelled. What the engine
    reported is read from the answer, or from the chunks of a stream: objects, or text of events.
    """

    def initialize_state(
        self,
        config: Mapping[str, Any] | None = None,
        tokenize: str | None = None,
        lease_seconds: float = 600.0,
        **kwargs: Any,
    ) -> None:
        """Takes the settings; Serve calls it once."""
        if kwargs:
            raise TypeError(f"unknown settings of KvRequestRouter: {', '.join(sorted(kwargs))}")
        self.kv = Router(config)
        self._fleet = Fleet(self.kv)
        self._tokenize: Tokenize | None = None if tokenize is None else resolve_name(tokenize)
        self._lease_seconds = lease_seconds
        self._bookings: OrderedDict[str, _Booking] = OrderedDict()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follows the replicas that Serve has."""
        super().update_replicas(replicas)
        here = {replica.replica_id.to_full_id_str(): replica for replica in replicas}
        self._fleet.retain(here)
        for worker, replica in here.items():
            self._fleet.meet(worker, cast(WorkerOptions, replica.routing_stats.get(_KEY) or {}))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replicas one by one, the cheapest first, and books the request on that one."""
        if pending_request is None:
            return [candidate_replicas]
        candidates = self.select_available_replicas(candidate_replicas) or candidate_replicas
        by_worker = {replica.replica_id.to_full_id_str(): replica for replica in candidates}
        request_id = pending_request.metadata.internal_request_id
        asked_before = self._bookings.get(request_id)
        prompt = await self._prompt(pending_request) if asked_before is None else asked_before.prompt
        await self._settle()
        if pending_request.future.done():  # another of Serve's tasks has placed it, and it may be under way
            return [candidates]
        # While all replicas are full Serve asks about once a millisecond: a request is not to be counted more than once, nor to
        # stand in its own way.
        if (earlier := self._bookings.pop(request_id, None)) is not None:
            earlier.lease.release(ok=False, dispatched=False)
        try:
            lease = select(self.kv, prompt, list(by_worker), self._lease_seconds)
        except Error as error:  # a request is not to fail for its placement
            log.warning("Ray Serve takes any replica: %s", error)
            lease = None
        if lease is None:
            return [candidates]
        if earlier is not None and earlier.future is pending_request.future:
            earlier.lease = lease
            self._bookings[request_id] = earlier
        else:
            self._keep(pending_request, _Booking(lease, prompt, pending_request.future))
        costs = sorted(lease.explain(), key=lambda candidate: candidate.cost.total)
        ranked = [lease.worker, *(one.worker for one in costs if one.worker != lease.worker)]
        return [[by_worker.pop(worker)] for worker in ranked if worker in by_worker]

    async def _settle(self) -> None:
        """Lets the bookings end whose answers are here. A caller that goes on at once is otherwise a millisecond ahead of the
        news of its last request, and finds the warm replica busy. With many requests under way one matters little."""
        if len(self._bookings) > _MAX_SETTLED:
            return
        answers = {booking.ref: booking.answer for booking in self._bookings.values() if booking.ref is not None}
        if answers:
            ready, _ = ray.wait(list(answers), num_returns=len(answers), timeout=0, fetch_local=False)
            if ready:
                await asyncio.wait([asyncio.wrap_future(answers[ref]) for ref in ready], timeout=0.05)

    async def _prompt(self, request: PendingRequest) -> dict[str, Any]:
        tokens = request.kwargs.get("request_token_ids")
        if tokens is not None:
            return {"tokens": tokens}
        return await prompt_of(_body(request), self._tokenize)

    def _keep(self, request: PendingRequest, booking: _Booking) -> None:
        request_id = request.metadata.internal_request_id
        self._bookings[request_id] = booking
        # Serve tells of the end of requests that were sent. One that was given up before leaves its object behind.
        weakref.finalize(request, self._given_up, request_id, booking).atexit = False
        oldest = time.monotonic() - 2 * self._lease_seconds
        while self._bookings and next(iter(self._bookings.values())).booked_at < oldest:
            self._bookings.popitem(last=False)

    def _given_up(self, request_id: str, booking: _Booking) -> None:
        was_sent = booking.future.done() and not booking.future.cancelled()
        if not was_sent and self._bookings.get(request_id) is booking:
            del self._bookings[request_id]
            booking.lease.release(ok=False, dispatched=False)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Moves the booking when another replica took the request, and looks for the answer."""
        request_id = pending_request.metadata.internal_request_id
        booking = self._bookings.get(request_id)
        if booking is None:
            return
        worker = replica_id.to_full_id_str()
        try:
            if booking.lease.worker != worker:
                booking.lease.release(ok=False, dispatched=False)
                booking.lease = self.kv.book(None, worker, **booking.prompt, ttl=self._lease_seconds)
            if pending_request.metadata.is_streaming:
                _watch(result, booking)
            else:
                booking.await_answer(result.to_object_ref())
        except Exception as error:  # in Serve's routing loop
            log.warning("a request on replica %s is not accounted for: %r", worker, error)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ends the booking."""
        booking = self._bookings.get(internal_request_id)
        # A replica that was too busy after all ends its try, which may be told after the next one was booked.
        if booking is None or booking.lease.worker != replica_id.to_full_id_str():
            return
        del self._bookings[internal_request_id]
        if booking.answer is None:
            booking.end()


class _Booking:
    """A request on its way."""

    def __init__(self, lease: Lease, prompt: dict[str, Any], future: Any) -> None:
        self.lease = lease
        self.prompt = prompt
        self.future = future  # of the replica; a new one when Serve tries once more
        self.ref: Any = None
        self.answer: Any = None
        self.booked_at = time.monotonic()
        self._chunks = 0
        self._usage = Usage()

    def await_answer(self, ref: Any) -> None:
        self.ref, self.answer = ref, ref.future()
        self.answer.add_done_callback(self._end)

    def _end(self, answer: Future[Any]) -> None:
        ok = not answer.cancelled() and answer.exception() is None
        usage = usage_of(answer.result()) if ok else Usage()
        self._release(usage, ok)

    def chunk(self, chunk: Any) -> None:
        """Takes note of a piece of a stream: text or bytes of events, or an object."""
        self._chunks += 1
        if self._chunks == 1:
            self.lease.prefill_done()
        self.lease.output_tokens(self._chunks)
        if isinstance(chunk, str | bytes):
            marked = '"usage"' if isinstance(chunk, str) else b'"usage"'
            if marked in chunk:  # type: ignore[operator]
                for line in chunk.splitlines():
                    self._note(usage_in(line.removeprefix("data:" if isinstance(line, str) else b"data:")))  # type: ignore[arg-type]
        else:
            self._note(usage_of(chunk))

    def _note(self, usage: Usage) -> None:
        if usage != Usage():
            self._usage = usage

    def end(self) -> None:
        """Ends it as well as it went, with what the stream told."""
        self._release(self._usage, ok=True)

    def _release(self, usage: Usage, ok: bool) -> None:
        self.lease.release(usage.cached_tokens, ok, prompt_tokens=usage.prompt_tokens)


def _watch(result: Any, booking: _Booking) -> None:
    """Has the chunks of a stream seen on their way to the caller, which Serve tells nobody of."""
    kind = type(result)
    if kind not in _WATCHED:
        _WATCHED[kind] = _watching(kind)
    try:
        result.__class__ = _WATCHED[kind]
    except TypeError as error:  # a class that Serve made otherwise: said once
        _WATCHED[kind] = kind
        log.warning("the streams of this Ray Serve are not seen: %s", error)
    result._kvlane = booking


_WATCHED: dict[type, type] = {}


def _watching(kind: Any) -> type:
    """Makes a class that objects of `kind` can become: it adds nothing to what they hold."""

    def next_(self: Any) -> Any:
        try:
            chunk = kind.__next__(self)
        except StopIteration:
            self._kvlane.end()
            raise
        self._kvlane.chunk(chunk)
        return chunk

    async def anext_(self: Any) -> Any:
        try:
            chunk = await kind.__anext__(self)
        except StopAsyncIteration:
            self._kvlane.end()
            raise
        self._kvlane.chunk(chunk)
        return chunk

    return type(f"Watched{kind.__name__}", (kind,), {"__slots__": (), "__next__": next_, "__anext__": anext_})


_KEY = "kvlane"

_MAX_SETTLED = 16


def _body(request: PendingRequest) -> Mapping[str, Any]:
    for argument in (*request.args, *request.kwargs.values()):
        if isinstance(argument, Mapping):
            return argument
        found = {name: getattr(argument, name, None) for name in ("messages", "prompt")}
        if any(isinstance(value, str | list | tuple) for value in found.values()):
            names = ("model", "tools", "cache_salt", "max_tokens", "max_completion_tokens")
            return {**found, **{name: getattr(argument, name, None) for name in names}}
    return {}
