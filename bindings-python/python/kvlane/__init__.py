"""Routes LLM requests to the worker that already holds their KV cache."""

from ._native import (
    Closed,
    ConfigError,
    Error,
    InvalidRequest,
    Overloaded,
    UnknownWorker,
    __version__,
    block_hashes,
)

__all__ = [
    "Closed",
    "ConfigError",
    "Error",
    "InvalidRequest",
    "Overloaded",
    "UnknownWorker",
    "__version__",
    "block_hashes",
]
