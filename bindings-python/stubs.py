"""Writes python/kvlane/_native.pyi from the built module: names, signatures, defaults and texts are read from it, types are
given below by the names of arguments and results. Something that has no type here is an error, so nothing is forgotten.

    python bindings-python/stubs.py            write it, with a Python where the wheel is installed
    python bindings-python/stubs.py --check    exit 1 when the file differs from what would be written
"""

import difflib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlane import _native

STUB = Path(__file__).parent / "python" / "kvlane" / "_native.pyi"

HEADER = '''\
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
'''

# Types of arguments by their names; `| None` is added to those that are None by default.
ARGUMENTS = {
    "allowed": "Sequence[str]", "available": "bool", "block_size": "int", "blocks": "int | None", "cached_tokens": "int",
    "clock": "Callable[[], float]", "config": "Mapping[str, Any]", "device": "int", "dispatched": "bool", "disk": "int",
    "dp_rank": "int", "dp_ranks": "int", "events": "str", "exc_type": "type[BaseException] | None",
    "exc_value": "BaseException | None", "expected_output_tokens": "int", "external": "int", "host": "int", "id": "str",
    "kv_capacity_blocks": "int", "kv_usage": "float", "labels": "Mapping[str, str]", "lease_id": "str", "lora": "str",
    "media": "_Media", "messages": "_Messages", "n": "int", "ok": "bool", "overrides": "Mapping[str, float]",
    "payload": "Buffer", "priority": "int", "prompt_tokens": "int", "replay": "str", "request_id": "str | None",
    "role": "_Role", "running": "int", "salt": "str", "seed": "int", "seq": "int", "session": "str", "text": "str",
    "timeout": "float", "tokens": "_Tokens", "tools": "Sequence[Any]", "traceback": "TracebackType | None", "ttl": "float",
    "waiting": "int", "worker": "str", "workers": "int",
}  # fmt: skip

# Types of what functions and methods return; those that are not here return None.
RESULTS = {
    "__enter__": "Self", "__new__": "Self", "__reduce__": "NoReturn", "block_hashes": "tuple[list[int], list[int]]",
    "Lease.explain": "list[Candidate]", "Router.book": "Lease", "Router.finish": "bool", "Router.ingest": "IngestReport",
    "Router.overlap": "dict[tuple[str, int], Overlap]", "Router.rank": "list[Candidate]", "Router.ready_workers": "int",
    "Router.select": "Lease | None", "Router.stats": "dict[str, Any]", "Router.trust": "Trust", "Router.wait_ready": "bool",
    "Router.workers": "list[WorkerInfo]",
}  # fmt: skip
NOTHING = (
    "__exit__", "Lease.output_tokens", "Lease.prefill_done", "Lease.release", "Router.add_worker", "Router.clear",
    "Router.close", "Router.drain_worker", "Router.record", "Router.remove_worker", "Router.report_load",
    "Router.set_available", "Router.set_kv_capacity", "Router.set_labels", "Router.set_role", "Router.undrain_worker",
)  # fmt: skip

# Types of properties, by class where the name alone does not tell.
PROPERTIES = {
    "active_blocks": "int", "active_requests": "int", "applied": "int", "available": "bool", "blocks": "int",
    "booked_prefill_blocks": "float", "cause": "str | None", "cost": "CostBreakdown", "decode_blocks": "float",
    "device": "int", "disk": "int", "dp_rank": "int", "dp_ranks": "int", "draining": "bool", "external": "int",
    "fidelity": "float", "gap": "bool", "host": "int", "id": "str", "index_blocks": "dict[str, int]",
    "kv_capacity_blocks": "int | None", "labels": "dict[str, str]", "overlap": "Overlap", "overlap_blocks": "int",
    "predicted_blocks": "int", "predicted_cached_tokens": "int", "prefill_blocks": "float", "prefill_weight": "float",
    "preference": "float", "request_weight": "float", "restarted": "bool", "role": "_Role", "since": "float",
    "skipped": "dict[str, int]", "state": "_State", "total": "float", "trust": "_State",
    "uncached_prefill_blocks": "float", "worker": "str",
    "CostBreakdown.active_requests": "float", "WorkerInfo.trust": "list[Trust]",
}  # fmt: skip

LINE = 120

# Not in the stub: what every object has, and comparisons of order, which PyO3 defines for any comparison and which refuse.
LEFT_OUT = {"__repr__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__module__", "__doc__"}


def main() -> None:
    stub = "\n".join(lines()) + "\n"
    if sys.argv[1:] == ["--check"]:
        kept = STUB.read_text()
        sys.stdout.writelines(difflib.unified_diff(kept.splitlines(True), stub.splitlines(True), str(STUB), "generated"))
        sys.exit(kept != stub)
    STUB.write_text(stub)


def lines() -> Iterator[str]:
    names = sorted(name for name in _native.__all__)
    yield HEADER
    yield "__all__ = ["
    yield from (f'    "{name}",' for name in names)
    yield "]"
    classes = [value for name in names if isinstance(value := getattr(_native, name), type)]
    for one in sorted(classes, key=lambda one: (not issubclass(one, Exception), one is not _native.Error)):
        yield ""
        yield from exception(one) if issubclass(one, Exception) else class_(one)
    for name in names:
        if inspect.isbuiltin(getattr(_native, name)):
            yield ""
            yield from function(name, getattr(_native, name), "")


def exception(one: type) -> Iterator[str]:
    head = f"class {one.__name__}({', '.join(base.__name__ for base in one.__bases__)}):"
    if one is _native.Error:
        yield from (head, "    code: ClassVar[str]")
    elif hasattr(one, "retry_after"):
        yield from (head, "    retry_after: float | None")
    else:
        yield head + " ..."


def class_(one: type) -> Iterator[str]:
    yield "@final"
    yield f"class {one.__name__}:"
    yield from text(one.__doc__, "    ")
    if "__new__" in one.__dict__ and one.__text_signature__:
        yield from function("__new__", one, one.__name__)
    # In an order of their own: that of the class changes from run to run.
    for name, member in sorted(one.__dict__.items(), key=lambda item: (not inspect.isgetsetdescriptor(item[1]), item[0])):
        if name in LEFT_OUT or name == "__new__":
            continue
        if name == "__eq__":
            yield "    def __eq__(self, other: object, /) -> bool: ..."
        elif name == "__hash__":
            if member is not None:
                yield "    def __hash__(self, /) -> int: ..."
        elif inspect.isgetsetdescriptor(member):
            yield "    @property"
            head = f"    def {name}(self) -> {typed(PROPERTIES, name, one.__name__)}:"
            yield from with_text(head, member.__doc__, "        ")
        elif inspect.isroutine(member):
            yield from function(name, member, one.__name__)


def function(name: str, member: Any, owner: str) -> Iterator[str]:
    indent = "    " if owner else ""
    given = ["cls"] if name == "__new__" else []
    for parameter in inspect.signature(member).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in given:
            given.append("*")
        given.append("self" if parameter.name == "self" else argument(parameter, owner))
    returned = "None" if name in NOTHING or f"{owner}.{name}" in NOTHING else typed(RESULTS, name, owner)
    head = f"{indent}def {name}({', '.join(given)}) -> {returned}:"
    if len(head) > LINE:
        *before, head = [f"{indent}def {name}(", *(f"{indent}    {one}," for one in given), f"{indent}) -> {returned}:"]
        yield from before
    yield from with_text(head, "" if name == "__new__" else member.__doc__, indent + "    ")


def with_text(head: str, documentation: str | None, indent: str) -> list[str]:
    if documentation and not documentation.startswith("Return self") and "__" not in head:
        return [head, *text(documentation, indent)]
    return [head + " ..."]


def argument(parameter: inspect.Parameter, owner: str) -> str:
    kind = typed(ARGUMENTS, parameter.name, owner)
    if parameter.default is parameter.empty:
        return f"{parameter.name}: {kind}"
    if parameter.default is None and "None" not in kind:
        kind += " | None"
    shown = f'"{parameter.default}"' if isinstance(parameter.default, str) else repr(parameter.default)
    return f"{parameter.name}: {kind} = {shown}"


def typed(table: dict[str, str], name: str, owner: str) -> str:
    found = table.get(f"{owner}.{name}") or table.get(name)
    if found is None:
        sys.exit(f"stubs.py: {owner}.{name} has no type: give it one there")
    return found


def text(documentation: str | None, indent: str) -> list[str]:
    if not documentation:
        return []
    first, *more = inspect.cleandoc(documentation).splitlines()
    if not more:
        return [f'{indent}"""{first}"""']
    return [f'{indent}"""{first}', *(f"{indent}{line}".rstrip() for line in more), f'{indent}"""']


if __name__ == "__main__":
    main()
