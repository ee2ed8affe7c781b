"""The cases that every language answers alike; tests/parity/README.md says how they are written."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest

import kvlane

CASES = json.loads((Path(__file__).parents[2] / "tests/parity/cases.json").read_text())


def name(case):
    return case["name"]


@pytest.mark.parametrize("case", CASES["hashes"], ids=name)
def test_hashes(case):
    arguments = prompt(case["prompt"])
    if "block_size" in case:
        arguments["block_size"] = case["block_size"]
    if "error" in case:
        with pytest.raises(kvlane.Error) as caught:
            kvlane.block_hashes(**arguments)
        assert caught.value.code == case["error"]
        return
    local, sequence = kvlane.block_hashes(**arguments)
    assert [f"{value:016x}" for value in local] == case["local"]
    assert [f"{value:016x}" for value in sequence] == case["sequence"]


@pytest.mark.parametrize("case", CASES["scenarios"], ids=name)
def test_scenarios(case):
    time = SimpleNamespace(now=0.0)

    def make():
        return kvlane.Router(case["config"], clock=lambda: time.now)

    if "error" in case:
        with pytest.raises(kvlane.Error) as caught:
            make()
        assert_error(caught.value, case)
        return
    router, leases = make(), {}
    for number, step in enumerate(case["steps"]):
        at = f"step {number} ({step['do']})"
        try:
            answer = do(router, leases, time, step)
        except kvlane.Error as error:
            assert "error" in step, f"{at}: {error!r}"
            assert_error(error, step)
            continue
        assert "error" not in step, f"{at}: {step['error']} was expected, and it returned {answer}"
        if "expect" in step:
            matches(at, step["expect"], answer)


def do(router, leases, time, step):
    call, arguments, lease = step["do"], with_arguments(step), step.get("lease")
    if call == "advance":
        time.now += arguments["seconds"]
        return None
    if call == "finish":
        return router.finish(leases[lease][1], **arguments)
    if call in ("select", "book"):
        booked = getattr(router, call)(**{"request_id": None, **arguments})
        if booked is not None and lease is not None:
            leases[lease] = booked, booked.id
        elif booked is not None:
            booked.id  # it is left to its TTL
        return booked and plain(booked, "worker", "dp_rank", "overlap_blocks", "predicted_cached_tokens")
    if lease is not None:
        answer = getattr(leases[lease][0], call)(**arguments)
        return [candidate(one) for one in answer] if call == "explain" else answer
    answer = getattr(router, call)(**arguments)
    match call:
        case "overlap":
            return [
                {"worker": worker, "dp_rank": rank, **plain(overlap, "device", "host", "disk", "external")}
                for (worker, rank), overlap in sorted(answer.items())
            ]
        case "rank":
            return [candidate(one) for one in answer]
        case "ingest":
            return plain(answer, "applied", "skipped", "gap", "restarted")
        case "trust":
            return plain(answer, "state", "fidelity", "cause", "since")
        case "workers":
            fields = "id role draining available active_requests active_blocks index_blocks labels".split()
            return [plain(worker, *fields) for worker in answer]
    return answer


def with_arguments(step):
    arguments = dict(step.get("with", {}))
    if "prompt" in arguments:
        arguments |= prompt(arguments.pop("prompt"))
    if "batch" in arguments:
        arguments["payload"] = msgpack.packb(unfold(arguments.pop("batch")))
    elif "payload" in arguments:
        arguments["payload"] = bytes.fromhex(arguments["payload"])
    return arguments


def prompt(arguments):
    arguments = dict(arguments)
    match arguments:
        case {"tokens": {"start": start, "count": count}}:
            arguments["tokens"] = list(range(start, start + count))
        case {"text": {"repeat": piece, "times": times}}:
            arguments["text"] = piece * times
    if "media" in arguments:
        arguments["media"] = [(offset, length, bytes.fromhex(digest)) for offset, length, digest in arguments["media"]]
    return arguments


def unfold(value):
    match value:
        case {"$hex": digits}:
            return bytes.fromhex(digits)
        case {"$tokens": [start, count]}:
            return list(range(start, start + count))
        case dict():
            return {key: unfold(item) for key, item in value.items()}
        case list():
            return [unfold(item) for item in value]
    return value


def plain(answer, *fields):
    return {field: getattr(answer, field) for field in fields}


def candidate(one):
    answer = plain(one, "worker", "dp_rank", "predicted_blocks", "fidelity", "trust")
    terms = [term for term in dir(one.cost) if not term.startswith("_")]
    answer["cost"] = plain(one.cost, *terms)
    answer["overlap"] = plain(one.overlap, "device", "host", "disk", "external")
    return answer


def matches(at, expected, actual):
    match expected:
        case dict():
            for key, value in expected.items():
                matches(f"{at}.{key}", value, actual.get(key))
        case list():
            assert len(expected) == len(actual), f"{at}: {actual}"
            for index, pair in enumerate(zip(expected, actual, strict=True)):
                matches(f"{at}[{index}]", *pair)
        case bool() | None:
            assert actual is expected, at
        case int() | float():
            assert math.isclose(expected, actual, abs_tol=1e-9), f"{at}: {expected} is expected of {actual}"
        case str() if len(expected) >= 2 and expected.startswith("*") and expected.endswith("*"):
            assert expected[1:-1] in actual, at
        case _:
            assert actual == expected, at


def assert_error(error, step):
    assert error.code == step["error"], repr(error)
    assert step.get("naming", "") in str(error)
