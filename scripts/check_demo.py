#!/usr/bin/env python3
"""Holds `kvlane demo --json` to what the README promises.

    check_demo.py -- COMMAND ...     runs the command, and holds its time to the promise as well
    check_demo.py < demo.json

Prints one line a check and `N passed, N failed, N skipped`.
"""

import json
import math
import subprocess
import sys
import time

REPEATS = 60
SEEDS = 3
# Least (or, for the policies that know nothing of caches, most) hits that every seed must give.
LEAST_HITS = {"kv-events": 60, "kv-events-missing": 58, "kv-approximate": 56}
MOST_HITS = {"round-robin": 50, "random": 50}
MOST_SECONDS = 90
# The promise, 0.2 ms on a quiet machine, is held by the benches; here it is a guard against stalls of milliseconds.
MOST_OVERHEAD_MS = 2.0


def checks(report):
    """Yields (claim, holds) for a report."""
    policies = {policy["name"]: policy for policy in report["policies"]}
    for name in [*LEAST_HITS, *MOST_HITS]:
        policy = policies.get(name)
        yield f"{name} was measured", policy is not None
        if policy is None:
            continue
        hits = policy["hits"]
        whole = all(isinstance(count, int) and 0 <= count <= REPEATS for count in hits)
        yield f"{name}: {SEEDS} seeds of {REPEATS} repeats: {hits}", (
            whole and len(hits) == SEEDS and policy["repeats"] == REPEATS
        )
        if name in LEAST_HITS:
            least = LEAST_HITS[name]
            yield f"{name}: at least {least} hits with every seed: {hits}", bool(hits) and min(hits) >= least
        else:
            most = MOST_HITS[name]
            yield f"{name}: at most {most} hits with every seed: {hits}", bool(hits) and max(hits) <= most
        first, repeat = policy["ttft_ms_first_mean"], policy["ttft_ms_repeat_mean"]
        yield f"{name}: times to first token are positive: {first}, {repeat}", first > 0 and repeat > 0
    if "kv-events" in policies and "round-robin" in policies:
        warm = policies["kv-events"]["ttft_ms_repeat_mean"]
        blind = policies["round-robin"]["ttft_ms_repeat_mean"]
        cold = policies["kv-events"]["ttft_ms_first_mean"]
        yield f"repeats with events start sooner than first sends: {warm} < {cold} ms", warm < cold
        yield f"and sooner than by round robin: {warm} < {blind} ms", warm < blind
    overhead = report["router_overhead_ms_p50"]
    yield f"the router adds at most {MOST_OVERHEAD_MS} ms: {overhead}", (
        math.isfinite(overhead) and overhead <= MOST_OVERHEAD_MS
    )


def main(arguments):
    results = []
    if arguments[:1] == ["--"] and len(arguments) > 1:
        started = time.monotonic()
        run = subprocess.run(arguments[1:], stdout=subprocess.PIPE, timeout=4 * MOST_SECONDS, check=False)
        seconds = time.monotonic() - started
        if run.returncode != 0:
            print(f"{' '.join(arguments[1:])} ended with status {run.returncode}", file=sys.stderr)
            return 1
        text = run.stdout
        results.append((f"the demo takes less than {MOST_SECONDS} s: {seconds:.1f}", seconds < MOST_SECONDS))
    elif arguments:
        print(__doc__, file=sys.stderr)
        return 2
    else:
        text = sys.stdin.buffer.read()
    results.extend(checks(json.loads(text)))
    for claim, holds in results:
        print("ok    " if holds else "NOT OK", claim)
    failed = sum(not holds for _, holds in results)
    print(f"{len(results) - failed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
