from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Literal, NoReturn, Protocol, TypeAlias, final, type_check_only

from typing_extensions import Buffer, Self

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

__version__: str

class Error(Exception):
    code: ClassVar[str]

class ConfigError(Error, ValueError): ...
class InvalidRequest(Error, ValueError): ...
class UnknownWorker(Error, KeyError): ...

class Overloaded(Error):
    retry_after: float | None

class Closed(Error): ...

@type_check_only
class _Array(Protocol):
    def __array__(self) -> Any: ...

_Tokens: TypeAlias = Buffer | Sequence[int] | _Array
_Media: TypeAlias = Sequence[tuple[int, int, bytes]]
_Messages: TypeAlias = Sequence[Mapping[str, Any]] | str
_Role: TypeAlias = Literal["prefill", "decode", "both"]
_State: TypeAlias = Literal["unproven", "exact", "converging", "approximate", "unreachable"]

@final
class Overlap:
    def __new__(cls, device: int = 0, host: int = 0, disk: int = 0, external: int = 0) -> Self: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def host(self) -> int: ...
    @property
    def disk(self) -> int: ...
    @property
    def external(self) -> int: ...
    @property
    def blocks(self) -> int: ...

@final
class CostBreakdown:
    @property
    def total(self) -> float: ...
    @property
    def uncached_prefill_blocks(self) -> float: ...
    @property
    def booked_prefill_blocks(self) -> float: ...
    @property
    def decode_blocks(self) -> float: ...
    @property
    def active_requests(self) -> float: ...
    @property
    def prefill_weight(self) -> float: ...
    @property
    def request_weight(self) -> float: ...
    @property
    def preference(self) -> float: ...

@final
class Candidate:
    @property
    def worker(self) -> str: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def overlap(self) -> Overlap: ...
    @property
    def predicted_blocks(self) -> int: ...
    @property
    def fidelity(self) -> float: ...
    @property
    def trust(self) -> _State: ...
    @property
    def cost(self) -> CostBreakdown: ...

@final
class IngestReport:
    def __eq__(self, other: object, /) -> bool: ...
    @property
    def applied(self) -> int: ...
    @property
    def skipped(self) -> dict[str, int]: ...
    @property
    def gap(self) -> bool: ...
    @property
    def restarted(self) -> bool: ...

@final
class Trust:
    @property
    def dp_rank(self) -> int: ...
    @property
    def state(self) -> _State: ...
    @property
    def fidelity(self) -> float: ...
    @property
    def cause(self) -> str | None: ...
    @property
    def since(self) -> float: ...

@final
class WorkerInfo:
    @property
    def id(self) -> str: ...
    @property
    def dp_ranks(self) -> int: ...
    @property
    def role(self) -> _Role: ...
    @property
    def draining(self) -> bool: ...
    @property
    def available(self) -> bool: ...
    @property
    def active_requests(self) -> int: ...
    @property
    def active_blocks(self) -> int: ...
    @property
    def prefill_blocks(self) -> float: ...
    @property
    def index_blocks(self) -> dict[str, int]: ...
    @property
    def predicted_blocks(self) -> int: ...
    @property
    def kv_capacity_blocks(self) -> int | None: ...
    @property
    def labels(self) -> dict[str, str]: ...
    @property
    def trust(self) -> list[Trust]: ...

@final
class Lease:
    @property
    def worker(self) -> str: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def overlap_blocks(self) -> int: ...
    @property
    def predicted_cached_tokens(self) -> int: ...
    @property
    def id(self) -> str: ...
    def explain(self) -> list[Candidate]: ...
    def prefill_done(self) -> None: ...
    def output_tokens(self, n: int) -> None: ...
    def release(
        self,
        cached_tokens: int | None = None,
        ok: bool = True,
        *,
        prompt_tokens: int | None = None,
        dispatched: bool = True,
    ) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...

@final
class Router:
    def __new__(
        cls,
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> Self: ...
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
    ) -> None: ...
    def remove_worker(self, id: str) -> None: ...
    def drain_worker(self, id: str) -> None: ...
    def set_available(self, id: str, available: bool) -> None: ...
    def set_kv_capacity(self, id: str, blocks: int | None) -> None: ...
    def workers(self) -> list[WorkerInfo]: ...
    def ingest(self, worker: str, payload: Buffer, seq: int | None = None, dp_rank: int = 0) -> IngestReport: ...
    def clear(self, worker: str, dp_rank: int | None = None) -> None: ...
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
    ) -> None: ...
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
    ) -> dict[tuple[str, int], Overlap]: ...
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
    ) -> list[Candidate]: ...
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
    ) -> Lease | None: ...
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
    ) -> Lease: ...
    def finish(
        self,
        lease_id: str,
        ok: bool = True,
        cached_tokens: int | None = None,
        *,
        prompt_tokens: int | None = None,
        dispatched: bool = True,
    ) -> bool: ...
    def report_load(
        self,
        worker: str,
        running: int = 0,
        waiting: int = 0,
        kv_usage: float = 0.0,
        dp_rank: int | None = None,
    ) -> None: ...
    def trust(self, worker: str, dp_rank: int = 0) -> Trust: ...
    def stats(self) -> dict[str, Any]: ...
    def ready_workers(self) -> int: ...
    def wait_ready(self, timeout: float | None = None, workers: int = 1) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def __reduce__(self) -> NoReturn: ...

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
) -> tuple[list[int], list[int]]: ...
