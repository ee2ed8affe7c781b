# Written by bindings-python/stubs.py; change that, or the Rust source.
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Literal, NoReturn, Protocol, TypeAlias, final, type_check_only

from typing_extensions import Buffer, Self

__version__: str

@type_check_only
class _Array(Protocol):
    def __array__(self) -> Any: ...

_Tokens: TypeAlias = Buffer | Sequence[int] | _Array
_Media: TypeAlias = Sequence[tuple[int, int, bytes]]
_Messages: TypeAlias = Sequence[Mapping[str, Any]] | str
_Role: TypeAlias = Literal["prefill", "decode", "both"]
_State: TypeAlias = Literal["unproven", "exact", "converging", "approximate", "unreachable"]

__all__ = [
    "Candidate",
    "Closed",
    "ConfigError",
    "CostBreakdown",
    "Error",
    "IngestReport",
    "InvalidRequest",
    "Lease",
    "Overlap",
    "Overloaded",
    "Router",
    "Trust",
    "UnknownWorker",
    "WorkerInfo",
    "__version__",
    "block_hashes",
]

class Error(Exception):
    code: ClassVar[str]

class Closed(Error): ...

class ConfigError(Error, ValueError): ...

class InvalidRequest(Error, ValueError): ...

class Overloaded(Error):
    retry_after: float | None

class UnknownWorker(Error, KeyError): ...

@final
class Candidate:
    """One target and what placing a request there would cost."""
    @property
    def cost(self) -> CostBreakdown: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def fidelity(self) -> float: ...
    @property
    def overlap(self) -> Overlap: ...
    @property
    def predicted_blocks(self) -> int: ...
    @property
    def trust(self) -> _State: ...
    @property
    def worker(self) -> str: ...

@final
class CostBreakdown:
    """A cost with its terms, all in blocks; lower is better."""
    @property
    def active_requests(self) -> float: ...
    @property
    def booked_prefill_blocks(self) -> float: ...
    @property
    def decode_blocks(self) -> float: ...
    @property
    def preference(self) -> float: ...
    @property
    def prefill_weight(self) -> float: ...
    @property
    def request_weight(self) -> float: ...
    @property
    def total(self) -> float: ...
    @property
    def uncached_prefill_blocks(self) -> float: ...

@final
class IngestReport:
    """What was done with one batch of events."""
    @property
    def applied(self) -> int: ...
    @property
    def gap(self) -> bool: ...
    @property
    def restarted(self) -> bool: ...
    @property
    def skipped(self) -> dict[str, int]: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class Lease:
    """A booked request. Release it when the request ends; a `with` block does, and an abandoned one runs out after its TTL.

    As a last resort, dropping the object releases the booking, unless `id` was read: then whoever has the id finishes it.
    """
    @property
    def dp_rank(self) -> int:
        """The chosen data-parallel rank."""
    @property
    def id(self) -> str:
        """Name of the booking for `Router.finish`. Reading it leaves the booking to `release`, `finish` and its TTL: dropping
        this object no longer ends it.
        """
    @property
    def overlap_blocks(self) -> int:
        """Leading blocks that the decision counts on, confirmed by events or predicted from placements."""
    @property
    def predicted_cached_tokens(self) -> int:
        """Prompt tokens that the engine is expected to report as cached."""
    @property
    def worker(self) -> str:
        """The chosen worker."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Releases the booking; an exception means that it did not go well."""
    def __reduce__(self) -> NoReturn: ...
    def explain(self) -> list[Candidate]:
        """Returns every eligible target with every cost term, by worker and rank."""
    def output_tokens(self, n: int) -> None:
        """Says how many tokens were produced so far; extends the lease."""
    def prefill_done(self) -> None:
        """Says that the first token came: the prompt no longer waits for prefill."""
    def release(
        self,
        cached_tokens: int | None = None,
        ok: bool = True,
        *,
        prompt_tokens: int | None = None,
        dispatched: bool = True,
    ) -> None:
        """Ends the booking; a second time does nothing.

        `cached_tokens` and `prompt_tokens` are what the engine reported; `ok` is false when it did not answer properly, and
        `dispatched` when the request never reached it.
        """

@final
class Overlap:
    """Leading blocks of a prompt that a target holds, each counted once at its best tier."""
    def __new__(cls, device: int = 0, host: int = 0, disk: int = 0, external: int = 0) -> Self: ...
    @property
    def blocks(self) -> int:
        """Blocks in any tier."""
    @property
    def device(self) -> int: ...
    @property
    def disk(self) -> int: ...
    @property
    def external(self) -> int: ...
    @property
    def host(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class Router:
    """Decides which worker serves a request. Safe to use from many threads.

    `config` is a dict of settings; `seed` replaces its seed; `clock` returns seconds and replaces this machine's clock, for
    tests and simulation. See `kvlane::Router` in the Rust documentation for what each call does.
    """
    def __new__(
        cls,
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...
    def add_worker(
        self,
        id: str,
        dp_ranks: int = 1,
        role: _Role = "both",
        kv_capacity_blocks: int | None = None,
        events: str | None = None,
        replay: str | None = None,
        block_size: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Registers a worker. With `events` (and `replay`) its ZMQ event streams are followed by a thread of the router."""
    def book(
        self,
        request_id: str | None,
        worker: str,
        tokens: _Tokens | None = None,
        dp_rank: int | None = None,
        lora: str | None = None,
        salt: str | None = None,
        media: _Media | None = None,
        session: str | None = None,
        expected_output_tokens: int | None = None,
        ttl: float | None = None,
        *,
        text: str | None = None,
        messages: _Messages | None = None,
        tools: Sequence[Any] | None = None,
    ) -> Lease:
        """Books a request on a target that was chosen before, without asking whether it is eligible."""
    def clear(self, worker: str, dp_rank: int | None = None) -> None:
        """Forgets what a worker's cache is known or believed to hold: one rank, or all of them."""
    def close(self) -> None:
        """Stops following events and refuses every further call; leases can still be released."""
    def drain_worker(self, id: str) -> None:
        """Gives a worker nothing new; what it has goes on."""
    def finish(
        self,
        lease_id: str,
        ok: bool = True,
        cached_tokens: int | None = None,
        *,
        prompt_tokens: int | None = None,
        dispatched: bool = True,
    ) -> bool:
        """Ends a booking by its id, from another callback or process boundary. Returns whether it was live; an id that is not
        known (any more) is no error.
        """
    def ingest(self, worker: str, payload: Buffer, seq: int | None = None, dp_rank: int = 0) -> IngestReport:
        """Applies one batch of events, bytes as the engine published them. Without `seq` it is applied without order checks."""
    def overlap(
        self,
        tokens: _Tokens | None = None,
        lora: str | None = None,
        salt: str | None = None,
        media: _Media | None = None,
        *,
        text: str | None = None,
        messages: _Messages | None = None,
        tools: Sequence[Any] | None = None,
    ) -> dict[tuple[str, int], Overlap]:
        """Returns the leading blocks that each target holds, by (worker, rank); targets with none are absent."""
    def rank(
        self,
        tokens: _Tokens | None = None,
        allowed: Sequence[str] | None = None,
        lora: str | None = None,
        salt: str | None = None,
        media: _Media | None = None,
        session: str | None = None,
        role: _Role | None = None,
        dp_rank: int | None = None,
        priority: int = 0,
        expected_output_tokens: int | None = None,
        overrides: Mapping[str, float] | None = None,
        *,
        text: str | None = None,
        messages: _Messages | None = None,
        tools: Sequence[Any] | None = None,
    ) -> list[Candidate]:
        """Returns every eligible target, cheapest first. Nothing is booked."""
    def ready_workers(self) -> int:
        """Returns how many workers may be chosen and need no more waiting: on every rank, events are heard, or it is settled
        that none will be.
        """
    def record(
        self,
        worker: str,
        tokens: _Tokens | None = None,
        dp_rank: int | None = None,
        ttl: float | None = None,
        lora: str | None = None,
        salt: str | None = None,
        media: _Media | None = None,
        *,
        text: str | None = None,
        messages: _Messages | None = None,
        tools: Sequence[Any] | None = None,
    ) -> None:
        """Records a placement that was decided elsewhere; it is believed for `ttl` seconds."""
    def remove_worker(self, id: str) -> None:
        """Removes a worker: when it returns, nothing of its life is left and nothing queued for it will be applied."""
    def report_load(
        self,
        worker: str,
        running: int = 0,
        waiting: int = 0,
        kv_usage: float = 0.0,
        dp_rank: int | None = None,
    ) -> None:
        """Takes in what an engine reports of its load; without `dp_rank`, of all ranks together."""
    def select(
        self,
        tokens: _Tokens | None = None,
        request_id: str | None = None,
        allowed: Sequence[str] | None = None,
        lora: str | None = None,
        salt: str | None = None,
        media: _Media | None = None,
        session: str | None = None,
        role: _Role | None = None,
        dp_rank: int | None = None,
        priority: int = 0,
        expected_output_tokens: int | None = None,
        ttl: float | None = None,
        overrides: Mapping[str, float] | None = None,
        *,
        text: str | None = None,
        messages: _Messages | None = None,
        tools: Sequence[Any] | None = None,
    ) -> Lease | None:
        """Chooses a target and books the request on it; None when no worker is eligible."""
    def set_available(self, id: str, available: bool) -> None:
        """Says whether a worker may be chosen, as far as its health is known."""
    def set_kv_capacity(self, id: str, blocks: int | None) -> None:
        """Sets the KV capacity of one rank in blocks of the router's block size; None is unknown."""
    def set_labels(self, id: str, labels: Mapping[str, str]) -> None:
        """Replaces the labels that `workers` reports of a worker."""
    def set_role(self, id: str, role: _Role) -> None:
        """Changes what a worker does; it keeps its cache, and finishes what it has."""
    def stats(self) -> dict[str, Any]:
        """Returns sizes and counts, with those of the followed event streams under `subscriptions`."""
    def trust(self, worker: str, dp_rank: int = 0) -> Trust:
        """Returns how far the events of one rank are believed."""
    def undrain_worker(self, id: str) -> None:
        """Takes back `drain_worker`: the worker is given requests again, and has kept its cache."""
    def wait_ready(self, timeout: float | None = None, workers: int = 1) -> bool:
        """Waits until `workers` of them are ready, and returns whether they are; at most `timeout` seconds. Other threads run
        meanwhile, and an interrupt ends it. For asyncio see `kvlane.aio.wait_ready`.
        """
    def workers(self) -> list[WorkerInfo]:
        """Lists the workers by id."""

@final
class Trust:
    """How far the events of one rank of a worker are believed."""
    @property
    def cause(self) -> str | None: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def fidelity(self) -> float: ...
    @property
    def since(self) -> float: ...
    @property
    def state(self) -> _State: ...

@final
class WorkerInfo:
    """What a router knows of one worker; counts are sums over its ranks."""
    @property
    def active_blocks(self) -> int: ...
    @property
    def active_requests(self) -> int: ...
    @property
    def available(self) -> bool: ...
    @property
    def dp_ranks(self) -> int: ...
    @property
    def draining(self) -> bool: ...
    @property
    def id(self) -> str: ...
    @property
    def index_blocks(self) -> dict[str, int]: ...
    @property
    def kv_capacity_blocks(self) -> int | None: ...
    @property
    def labels(self) -> dict[str, str]: ...
    @property
    def predicted_blocks(self) -> int: ...
    @property
    def prefill_blocks(self) -> float: ...
    @property
    def role(self) -> _Role: ...
    @property
    def trust(self) -> list[Trust]: ...

def block_hashes(
    tokens: _Tokens | None = None,
    block_size: int = 16,
    lora: str | None = None,
    salt: str | None = None,
    media: _Media | None = None,
    *,
    text: str | None = None,
    messages: _Messages | None = None,
    tools: Sequence[Any] | None = None,
) -> tuple[list[int], list[int]]:
    """Hashes the complete blocks of a prompt.

    `tokens` is a contiguous u32, i32 or i64 buffer or a sequence of integers; `text` or `messages` (with `tools`) may be given
    instead, which are cut into chunks of text. Returns the local hashes and the sequence hashes, one of each per block. See
    `kvlane::block_hashes` in the Rust documentation for the rule.
    """
