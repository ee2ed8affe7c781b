from collections.abc import Sequence
from typing import Any, ClassVar

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

__version__: str

class Error(Exception):
    code: ClassVar[str]

class ConfigError(Error, ValueError): ...
class InvalidRequest(Error, ValueError): ...
class UnknownWorker(Error, KeyError): ...
class Overloaded(Error): ...
class Closed(Error): ...

def block_hashes(
    tokens: Sequence[int] | Any,
    block_size: int = 16,
    lora: str | None = None,
    salt: str | None = None,
) -> tuple[list[int], list[int]]: ...
