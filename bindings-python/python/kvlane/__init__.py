"""Routes LLM requests to the worker that already holds their KV cache."""

from ._native import (
    Candidate,
    Closed,
    ConfigError,
    CostBreakdown,
    Error,
    IngestReport,
    InvalidRequest,
    Lease,
    Overlap,
    Overloaded,
    Router,
    Trust,
    UnknownWorker,
    WorkerInfo,
    __version__,
    block_hashes,
)

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
