"""Measures what calls cost, beside Dynamo's `SelectionService` in the same run, for the table of docs/python.md: 64 workers
that hold 2,048,000 blocks between them, prompts of 4,096 tokens that one of them holds whole.

    pip install kvlane msgpack numpy pyzmq ai-dynamo-runtime==1.6.1      (the wheel of `make wheel`)
    python bindings-python/benches/calls.py --json calls.json [--docs docs/python.md]

Without Dynamo installed its rows are absent, and the script says so. Both see the same events: ours as bytes, Dynamo's
through the sockets of 64 publishers, since it has no other way in.
"""

import argparse
import array
import asyncio
import hashlib
import json
import logging
import os
import platform
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy

import kvlane

os.environ.setdefault("DYN_LOG", "error")  # it logs a line for each selection otherwise
try:
    from dynamo._core import SelectionService
    from uvloop import run  # which Dynamo asks for
except ImportError:
    SelectionService = None
    from asyncio import run

WORKERS, PROMPTS, BLOCKS = 64, 125, 256  # prompts of 4,096 tokens each
ROUNDS, CALLS = 7, 400
MARKS = "<!-- calls: made by bindings-python/benches/calls.py -->", "<!-- calls end -->"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", type=Path, required=True, help="where the measurements go")
    arguments.add_argument("--docs", type=Path, help="a page whose table is written anew")
    options = arguments.parse_args()
    logging.disable()
    if SelectionService is None:
        print("Dynamo is not installed: it is not measured", file=sys.stderr)
    results = {"machine": machine(), "rows": run(measure()), "threads": threads()}
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    table = markdown(results)
    print(table)
    if options.docs is not None:
        page = options.docs.read_text()
        found = re.compile(re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1]), re.DOTALL)
        assert found.search(page), f"{options.docs} has no place for the table: {MARKS[0]}"
        options.docs.write_text(found.sub(lambda _: f"{MARKS[0]}\n{table}\n{MARKS[1]}", page))


async def measure() -> list[dict]:
    """Times every call in turn, round after round, so that what else the machine does meets all of them."""
    router = filled_router()
    calls = our_calls(router)
    service = None
    if SelectionService is not None:
        service, close = await filled_service()
        calls |= their_calls(service)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(ROUNDS):
        for name, call in calls.items():
            seconds = await call(round_)
            samples[name] += seconds[len(seconds) // 10 :]  # the first warm caches up
    if service is not None:
        close()
    return [{"call": name, **figures(seconds)} for name, seconds in samples.items()]


def figures(seconds: list[float]) -> dict:
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_us": statistics.median(seconds) * 1e6, "p99_us": cuts[98] * 1e6, "samples": len(seconds)}


def our_calls(router: kvlane.Router) -> dict[str, Callable]:
    some = [tokens(number % WORKERS, number % PROMPTS) for number in range(CALLS)]
    arrays = [array.array("I", prompt) for prompt in some]
    long = [numpy.arange(start, start + 100_000, dtype="uint32") for start in range(8)]
    texts = ["word " * 3_000 + str(number) for number in range(50)]
    chats = [[{"role": "system", "content": text}, {"role": "user", "content": "a question"}] for text in texts]
    fresh = iter(range(WORKERS * PROMPTS * BLOCKS, 1 << 40, BLOCKS))
    batches = [batch(next(fresh)) for _ in range(ROUNDS * CALLS)]

    def place(prompt) -> None:
        router.select(prompt).release()

    def timed(prompts, call=place):
        async def run(round_: int) -> list[float]:
            return [clock(call, prompts[number % len(prompts)]) for number in range(CALLS)]

        return run

    async def release(_: int) -> list[float]:
        leases = (router.select(arrays[number % CALLS]) for number in range(CALLS))
        return [clock(lease.release) for lease in leases]

    async def ingest(round_: int) -> list[float]:
        part = batches[round_ * CALLS : (round_ + 1) * CALLS]
        seconds = [clock(router.ingest, f"w{number % WORKERS}", payload) for number, (payload, _) in enumerate(part)]
        for number, (_, hashes) in enumerate(part):  # the index keeps its size
            router.ingest(f"w{number % WORKERS}", msgpack.packb([1.5, [["BlockRemoved", hashes, "GPU"]], 0]))
        return seconds

    return {
        "`select` + `release`, `array.array`": timed(arrays),
        "the same, numpy u32": timed(some),
        "the same, `memoryview`": timed([memoryview(prompt) for prompt in arrays]),
        "the same, numpy i64": timed([prompt.astype("int64") for prompt in some]),
        "the same, list": timed([prompt.tolist() for prompt in some[:50]]),
        "the same, 100,000 tokens, numpy u32": timed(long),
        "the same, text of 15 KB": timed(texts, lambda text: router.select(text=text).release()),
        "the same, chat of 15 KB": timed(chats, lambda chat: router.select(messages=chat).release()),
        "`release` alone": release,
        "`overlap`, `array.array`": timed(arrays, router.overlap),
        "`ingest`, a batch of 256 blocks": ingest,
    }


def their_calls(service) -> dict[str, Callable]:
    some = [tokens(number % WORKERS, number % PROMPTS).tolist() for number in range(CALLS)]

    def request(number: int) -> dict:
        return {"model_name": "m", "token_ids": some[number % len(some)], "selection_id": f"r{number}"}

    async def reserve(_: int) -> list[float]:
        seconds = []
        for number in range(CALLS):
            asked = request(number)
            started = time.perf_counter()
            await service.select_and_reserve(asked)
            await service.free_reservation(asked["selection_id"])
            seconds.append(time.perf_counter() - started)
        return seconds

    async def overlap(_: int) -> list[float]:
        seconds = []
        for number in range(CALLS):
            asked = request(number)
            started = time.perf_counter()
            await service.overlap_scores(asked)
            seconds.append(time.perf_counter() - started)
        return seconds

    return {
        "Dynamo 1.6.1: `select_and_reserve` + `free_reservation`, list": reserve,
        "Dynamo 1.6.1: `overlap_scores`, list": overlap,
    }


def clock(call, *arguments) -> float:
    started = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started


def tokens(worker: int, prompt: int) -> numpy.ndarray:
    first = (worker * PROMPTS + prompt) * 10_000
    return numpy.arange(first, first + BLOCKS * 16, dtype="uint32")


def batch(first: int, prompt: numpy.ndarray | None = None) -> tuple[bytes, list[int]]:
    """One event as vLLM publishes it, of blocks with the hashes from `first` on."""
    hashes = list(range(first + 1, first + 1 + BLOCKS))
    if prompt is None:
        prompt = numpy.arange(first, first + BLOCKS * 16, dtype="uint32")
    return msgpack.packb([1.5, [["BlockStored", hashes, None, prompt.tolist(), 16, None, "GPU"]], 0]), hashes


def held() -> list[tuple[int, int, bytes]]:
    """The batches of all that the workers hold: worker, number, payload."""
    return [
        (worker, prompt, batch((worker * PROMPTS + prompt) * BLOCKS, tokens(worker, prompt))[0])
        for worker in range(WORKERS)
        for prompt in range(PROMPTS)
    ]


def filled_router() -> kvlane.Router:
    router = kvlane.Router()
    for worker in range(WORKERS):
        router.add_worker(f"w{worker}")
    for worker, prompt, payload in held():
        router.ingest(f"w{worker}", payload, seq=prompt)
    assert router.stats()["index"]["blocks"] == WORKERS * PROMPTS * BLOCKS
    with router.select(tokens(5, 7)) as lease:
        assert (lease.worker, lease.overlap_blocks) == ("w5", BLOCKS)
    return router


async def filled_service():
    """Dynamo's service with the same blocks, which come to it by ZMQ."""
    import zmq

    service = SelectionService(indexer_threads=1)
    context = zmq.Context()
    publishers = []
    for worker in range(WORKERS):
        publishers.append(socket := context.socket(zmq.PUB))
        socket.set(zmq.SNDHWM, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        await service.upsert_worker({
            "worker_id": worker, "model_name": "m", "block_size": 16, "endpoint": f"http://127.0.0.1:{8000 + worker}",
            "kv_events_endpoint": f"tcp://127.0.0.1:{port}", "total_kv_blocks": 100_000,
        })  # fmt: skip
    await asyncio.sleep(2)  # for the subscriptions: what is published before they stand is lost
    for worker, prompt, payload in held():
        publishers[worker].send_multipart([b"", prompt.to_bytes(8, "big"), payload])
    for worker in range(WORKERS):
        for prompt in (0, PROMPTS - 1):
            await has(service, worker, prompt)

    def close() -> None:
        service.shutdown()
        context.destroy(0)

    return service, close


async def has(service, worker: int, prompt: int) -> None:
    """Waits until a worker is chosen for a prompt of its own."""
    deadline = time.monotonic() + 60
    asked = {"model_name": "m", "token_ids": tokens(worker, prompt).tolist()}
    while (chosen := await service.select(asked))["worker_id"] != worker:
        assert time.monotonic() < deadline, f"Dynamo does not see prompt {prompt} of worker {worker}: {chosen}"
        await asyncio.sleep(0.05)


def threads() -> dict[str, float]:
    """Decisions a second, of prompts of 100,000 tokens, and what eight threads gain for them and for hashing in the standard
    library, which tells how much of a second core there was to have."""
    router = filled_router()
    prompts = [numpy.arange(start, start + 100_000, dtype="uint32") for start in range(8)]
    block = bytes(1 << 20)

    def decide(number: int) -> None:
        router.select(prompts[number]).release()

    def digest(_: int) -> None:
        hashlib.sha256(block).digest()

    turns = [[per_second(call, count) for call in (decide, digest) for count in (1, 8)] for _ in range(9)]
    one, eight = (statistics.median(turn[place] for turn in turns) for place in (0, 1))
    gain, possible = (statistics.median(turn[place + 1] / turn[place] for turn in turns) for place in (0, 2))
    return {"one": one, "eight": eight, "gain": gain, "gain_of_standard_library": possible}


def per_second(call: Callable[[int], None], count: int) -> float:
    seconds = 0.5
    counts, end = [0] * count, time.perf_counter() + seconds

    def work(number: int) -> None:
        while time.perf_counter() < end:
            call(number)
            counts[number] += 1

    running = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return sum(counts) / seconds


def machine() -> dict:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    return {
        "cpu": cpu.group(1) if cpu else platform.processor(), "cores": os.cpu_count(), "python": platform.python_version(),
        "kvlane": kvlane.__version__,
    }  # fmt: skip


def markdown(results: dict) -> str:
    lines = ["| call, 4,096 tokens unless said otherwise | p50 µs | p99 µs |", "|---|---|---|"]
    lines += [f"| {row['call']} | {row['p50_us']:.1f} | {row['p99_us']:.1f} |" for row in results["rows"]]
    by_name = {row["call"]: row["p50_us"] for row in results["rows"]}
    theirs = [row["p50_us"] for row in results["rows"] if "select_and_reserve" in row["call"]]
    lines += ["", f"Python {results['machine']['python']}, {results['machine']['cores']} cores, {results['machine']['cpu']}."]
    if theirs:
        buffer, listed = (theirs[0] / by_name[name] for name in ("`select` + `release`, `array.array`", "the same, list"))
        lines.append(
            f"Dynamo's `SelectionService`, which takes lists only and is awaited, needs {buffer:.0f} times as long as ours with a "
            f"buffer for a decision and its release, and {listed:.1f} times as long as ours with a list."
        )
    many = results["threads"]
    lines.append(
        f"Prompts of 100,000 tokens: {many['one']:,.0f} decisions a second in one thread, {many['eight']:,.0f} in eight, "
        f"{many['gain']:.2f} times as many; hashing in the standard library, which releases the interpreter, gained "
        f"{many['gain_of_standard_library']:.2f} in the same turns."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
