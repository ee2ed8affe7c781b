"""Measures what calls cost, for the table of docs/python.md: 64 workers that hold 2,048,000 blocks between them.

    pip install kvlane msgpack numpy      (the wheel of `make wheel`)
    python bindings-python/benches/calls.py
"""

import array
import logging
import statistics
import threading
import time

import msgpack
import numpy

import kvlane

WORKERS, PROMPTS, BLOCKS = 64, 125, 256  # prompts of 4,096 tokens each


def main():
    logging.disable()
    router = kvlane.Router()
    for worker in range(WORKERS):
        router.add_worker(f"w{worker}")
        for prompt in range(PROMPTS):
            first = (worker * PROMPTS + prompt) * BLOCKS
            hashes = list(range(first + 1, first + 1 + BLOCKS))
            batch = [1.5, [["BlockStored", hashes, None, tokens(worker, prompt).tolist(), 16, None, "GPU"]], 0]
            router.ingest(f"w{worker}", msgpack.packb(batch), seq=prompt)
    assert router.stats()["index"]["blocks"] == WORKERS * PROMPTS * BLOCKS

    some = [tokens(number % WORKERS, number % PROMPTS) for number in range(500)]
    long = [numpy.arange(start, start + 100_000, dtype="uint32") for start in range(8)]
    print("| call, 4,096 tokens unless said otherwise | p50 µs | p99 µs |\n|---|---|---|")
    report("`select` + `release`, u32 buffer", [array.array("I", prompt) for prompt in some], router)
    report("the same, numpy i64", [prompt.astype("int64") for prompt in some], router)
    report("the same, list", [prompt.tolist() for prompt in some[:50]], router)
    report("the same, 100,000 tokens, u32 buffer", long, router)
    text = ["word " * 3_000 + str(number) for number in range(50)]
    report("the same, text of 15 KB", text, router, lambda prompt: router.select(text=prompt).release())
    report("`overlap`, u32 buffer", [array.array("I", prompt) for prompt in some], router, router.overlap)
    print()
    for threads in (1, 8):
        print(f"{threads} threads, 100,000 tokens: {decisions(router, long, threads):,.0f} decisions a second")


def tokens(worker, prompt):
    first = (worker * PROMPTS + prompt) * 10_000
    return numpy.arange(first, first + BLOCKS * 16, dtype="uint32")


def report(name, prompts, router, call=None):
    call = call or (lambda prompt: router.select(prompt).release())
    seconds = []
    for _ in range(max(1, 3_000 // len(prompts))):
        for prompt in prompts:
            started = time.perf_counter()
            call(prompt)
            seconds.append(time.perf_counter() - started)
    seconds = seconds[len(seconds) // 10 :]
    print(f"| {name} | {statistics.median(seconds) * 1e6:.1f} | {statistics.quantiles(seconds, n=100)[98] * 1e6:.1f} |")


def decisions(router, prompts, threads):
    counts, end = [0] * threads, time.perf_counter() + 2

    def work(number):
        while time.perf_counter() < end:
            router.select(prompts[number]).release()
            counts[number] += 1

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return sum(counts) / 2


if __name__ == "__main__":
    main()
