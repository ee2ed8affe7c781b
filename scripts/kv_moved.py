"""Compares KV that simulated engines move with NIXL with NIXL's own loop over the same descriptors.

    kv_moved.py KVLANE [--rounds N] [--json FILE] [--results benches/RESULTS.md] [--commit TEXT]

Two prefill and two decode engines run as processes. In each round, for each length, a fresh prompt goes over each of the four pairs,
and NIXL's own loop, in Python and in two processes of its own, reads as many blocks of the same size: whichever of the two is first
alternates. Engines count the time from asking for a prompt's blocks to the last byte, agreement over TCP and lists of descriptors
included, without checking what arrived; the loop counts listing descriptors, posting and polling. Medians are compared.
"""

import argparse
import ctypes
import itertools
import json
import multiprocessing
import os
import pathlib
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request

KV_BYTES = 114_688
BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * KV_BYTES
LENGTHS = [500, 1_500, 3_000]
KV_BLOCKS = 600
BEGIN, END = "<!-- kv moved -->", "<!-- kv moved: end -->"


def api():
    # Imported late: the environment of this process decides which of UCX's modules load.
    from nixl_cu12 import _api

    return _api


def buffer(size):
    memory = (ctypes.c_char * size)()
    ctypes.memset(memory, 1, size)
    return memory, ctypes.addressof(memory)


def hold(pipe, size):
    """The other process of NIXL's own loop: registers memory and waits."""
    agent = api().nixl_agent("loop-holder")
    memory, address = buffer(size)
    agent.register_memory(agent.get_reg_descs([(address, size, 0, "")], "DRAM"))
    pipe.send((agent.get_agent_metadata(), address))
    pipe.recv()
    del memory


class Loop:
    """NIXL's own loop: lists of descriptors, one READ, polled until it is over."""

    def __init__(self):
        size = (max(LENGTHS) // BLOCK_TOKENS + 1) * BLOCK_BYTES
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=hold, args=(there, size), daemon=True)
        self.process.start()
        metadata, self.remote = self.pipe.recv()
        self.agent = api().nixl_agent("loop-reader")
        self.memory, self.local = buffer(size)
        self.agent.register_memory(self.agent.get_reg_descs([(self.local, size, 0, "")], "DRAM"))
        self.peer = self.agent.add_remote_agent(metadata)

    def read(self, tokens):
        """Returns bytes and seconds of one prompt's blocks."""
        began = time.perf_counter()
        blocks = [(at * BLOCK_BYTES, min(BLOCK_TOKENS, tokens - at * BLOCK_TOKENS) * KV_BYTES) for at in range(-(-tokens // BLOCK_TOKENS))]
        # None beside its neighbour, as in a pool that was used for a while: neighbours would be read as one.
        blocks = blocks[1::2] + blocks[0::2]
        local = self.agent.get_xfer_descs([(self.local + at, size, 0) for at, size in blocks], "DRAM")
        remote = self.agent.get_xfer_descs([(self.remote + at, size, 0) for at, size in blocks], "DRAM")
        handle = self.agent.initialize_xfer("READ", local, remote, self.peer)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        seconds = time.perf_counter() - began
        assert state == "DONE", state
        self.agent.release_xfer_handle(handle)
        return sum(size for _, size in blocks), seconds

    def close(self):
        self.pipe.send("done")
        self.process.join(10)


class Engine:
    """A simulated engine as a process."""

    def __init__(self, binary, role):
        flags = f"engine --listen 127.0.0.1:0 --role {role} --kv-transport nixl --speed 1000 --kv-blocks {KV_BLOCKS} --kv-bytes-per-token {KV_BYTES}"
        self.process = subprocess.Popen([binary, *flags.split()], stderr=subprocess.PIPE, text=True)
        said = []
        for line in self.process.stderr:
            said.append(line)
            if found := re.search(r'url="(http://[^"]+)"', line):
                self.url = found[1]
                return
        sys.exit(f"an engine does not start: {''.join(said)}")

    def ask(self, body):
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def moved(self):
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as page:
            text = page.read().decode()
        number = lambda name: float(re.search(rf'^kvlane_engine_{name}{{transport="nixl"}} (.*)$', text, re.M)[1])
        return number("moved_bytes_total"), number("moving_seconds_total")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(20)
        assert code == 0, f"an engine ended with {code}"


class Pairs:
    """Two prefill and two decode engines."""

    def __init__(self, binary):
        self.prefill = [Engine(binary, "prefill") for _ in range(2)]
        self.decode = [Engine(binary, "decode") for _ in range(2)]
        self.turn = itertools.cycle(itertools.product(self.prefill, self.decode))
        self.fresh = itertools.count(1)

    def read(self, tokens):
        """Hands one fresh prompt over; returns bytes and seconds that the decode engine counted."""
        prefill, decode = next(self.turn)
        first = next(self.fresh)
        prompt = [(first * 7_919 + at) % 50_000 for at in range(tokens)]
        leg = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        parameters = prefill.ask(leg)["kv_transfer_params"]
        before = decode.moved()
        decode.ask({"prompt": prompt, "max_tokens": 2, "kv_transfer_params": parameters})
        after = decode.moved()
        moved, seconds = after[0] - before[0], after[1] - before[1]
        assert moved == tokens * KV_BYTES, f"{moved} bytes of {tokens} tokens"
        return moved, seconds

    def stop(self):
        for engine in self.prefill + self.decode:
            engine.stop()


def measure(binary, rounds):
    loop, pairs = Loop(), Pairs(binary)
    sides = {"loop": loop.read, "engines": pairs.read}
    seconds = {(name, tokens): [] for name in sides for tokens in LENGTHS}
    for round_ in range(-1, rounds):
        for tokens in LENGTHS:
            # Each pair has had its first fetch, which is when its connection comes up, before anything counts.
            for turn in range(4):
                order = list(sides) if (round_ + turn) % 2 else list(reversed(sides))
                for name in order:
                    _, elapsed = sides[name](tokens)
                    if round_ >= 0:
                        seconds[name, tokens].append(elapsed)
    pairs.stop()
    loop.close()
    rows = []
    for tokens in LENGTHS:
        row = {"tokens": tokens, "bytes": tokens * KV_BYTES, "blocks": -(-tokens // BLOCK_TOKENS)}
        for name in sides:
            middle = statistics.median(seconds[name, tokens])
            row[name] = {"median_seconds": middle, "bytes_per_second": row["bytes"] / middle, "best_seconds": min(seconds[name, tokens])}
        row["ratio"] = row["engines"]["bytes_per_second"] / row["loop"]["bytes_per_second"]
        rows.append(row)
    return rows


def table(rows, rounds, load, commit):
    machine = f"{os.cpu_count()} × {processor()}, Linux {platform.release()}, load average {load:.2f} at the start"
    lines = [
        "## KV moved with NIXL between simulated engines",
        "",
        f"Written by `scripts/kv-moved.sh`, which says how it is measured. {machine}; commit {commit}; NIXL 1.5.1, UCX with CMA over loopback; "
        f"blocks of {BLOCK_BYTES:,} bytes ({BLOCK_TOKENS} tokens of a 0.6B model); medians of {4 * rounds} prompts, over four pairs in turn.",
        "",
        "| prompt tokens | KV | blocks | NIXL's own loop | engines | engines ÷ loop | goal | |",
        "|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for row in rows:
        speed = lambda name: f"{row[name]['bytes_per_second'] / 1e9:.2f} GB/s"
        verdict = "reached" if row["ratio"] >= 0.8 else "**missed**"
        lines.append(
            f"| {row['tokens']:,} | {row['bytes'] / 1e6:.0f} MB | {row['blocks']} | {speed('loop')} | {speed('engines')} | {row['ratio']:.2f} | ≥ 0.8 | {verdict} |"
        )
    return "\n".join(lines) + "\n"


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def put(path, text):
    """Replaces the section in the results, or appends it; what follows it is kept."""
    results = path.read_text() if path.exists() else "# Results\n"
    before, _, rest = results.partition(BEGIN)
    after = rest.partition(END)[2]
    before = before.rstrip("\n")
    path.write_text(f"{before}\n\n{BEGIN}\n\n{text}\n{END}" + (after or "\n"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kvlane")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    rows = measure(args.kvlane, args.rounds)
    text = table(rows, args.rounds, load, args.commit)
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"commit": args.commit, "load_average": load, "rounds": args.rounds, "rows": rows}, indent=2) + "\n")
    if args.results:
        put(args.results, text)
    sys.exit(0 if all(row["ratio"] >= 0.8 for row in rows) else 1)


if __name__ == "__main__":
    main()
