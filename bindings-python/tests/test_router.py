"""Bad input, lives of leases, threads, waits and forks."""

import array
import copy
import gc
import hashlib
import logging
import math
import os
import pickle
import signal
import statistics
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy
import pytest

import kvlane

TOKENS = array.array("I", range(64))


@pytest.fixture
def router():
    with kvlane.Router() as router:
        router.add_worker("w1")
        router.add_worker("w2")
        yield router


def active(router):
    return sum(worker.active_requests for worker in router.workers())


class Tensor:
    """What a torch tensor on the CPU looks like to us."""

    def __init__(self, values):
        self.values = values

    def __array__(self):
        return numpy.array(self.values, dtype=numpy.int64)


@pytest.mark.parametrize(
    "tokens",
    [numpy.arange(64, dtype=kind) for kind in ("uint32", "int32", "int64")]
    + [list(range(64)), tuple(range(64)), range(64), memoryview(TOKENS), Tensor(range(64)), numpy.arange(128, dtype="uint32")[:64]],
    ids=lambda tokens: type(tokens).__name__,
)
def test_every_kind_of_tokens_is_the_same_prompt(router, tokens):
    router.record("w1", TOKENS)
    assert router.overlap(tokens) == {("w1", 0): kvlane.Overlap(device=4)}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (numpy.arange(64, dtype="float32"), 'format "f"'),
        (numpy.arange(64, dtype="uint64"), "format"),
        (numpy.arange(64, dtype=">u4"), "format"),
        (numpy.arange(64, dtype="uint32")[::2], "strides"),
        (numpy.zeros((4, 4), dtype="uint32"), "2 dimensions"),
        (numpy.array(5, dtype="uint32"), "tokens must be"),
        (numpy.array([5, 6, -7], dtype="int64"), r"tokens\[2\] is -7: 0 to 4294967295"),
        (numpy.array([5, 2**32], dtype="int64"), r"tokens\[1\] is 4294967296"),
        (numpy.array([-1], dtype="int32"), r"tokens\[0\] is -1"),
        ([1, 2**70], r"tokens\[1\] is 1180591620717411303424"),
        ([1, "2"], r"tokens\[1\] is '2'"),
        ("a prompt", "text="),
        (None, "exactly one"),
    ],
)
def test_bad_tokens_are_named(router, tokens, message):
    for call in (router.select, router.rank, router.overlap, lambda tokens: router.record("w1", tokens), kvlane.block_hashes):
        with pytest.raises(kvlane.InvalidRequest, match=message):
            call(tokens)
    assert active(router) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": "a", "messages": []}, "exactly one"),
        ({"tokens": [1], "text": "a"}, "exactly one"),
        ({"tokens": [1], "tools": []}, "tools"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": [object()]}, "messages"),
        ({"messages": [{"role": "user", "content": float("nan")}]}, "messages"),
        ({"text": "\ud800"}, "text is not valid Unicode"),
        ({"tokens": [1], "media": [(0, 1)]}, "media"),
        ({"tokens": [1], "media": [(0, 1, "text")]}, "media"),
        ({"tokens": [1], "media": [(-1, 1, b"d")]}, "media"),
        ({"tokens": [1], "dp_rank": -1}, "-1 is out of range"),
        ({"tokens": [1], "dp_rank": 2**32}, "out of range"),
        ({"tokens": [1], "expected_output_tokens": -5}, "-5 is out of range"),
        ({"tokens": [1], "ttl": float("nan")}, "ttl"),
        ({"tokens": [1], "ttl": 1e300}, "ttl"),
        ({"tokens": [1], "allowed": [""]}, "worker id"),
        ({"tokens": [1], "overrides": {"temperature": float("nan")}}, "overrides"),
        ({"tokens": [1], "overrides": []}, "overrid"),
    ],
)
def test_bad_arguments_are_named(router, arguments, message):
    with pytest.raises(kvlane.InvalidRequest, match=message):
        router.select(**arguments)
    assert active(router) == 0


@pytest.mark.parametrize(
    "config", [{"block_size": float("nan")}, {"block_size": object()}, {"block_size": -1}, {1: 2}, [], "text", {"seed": -1}]
)
def test_bad_configurations_are_config_errors(config):
    with pytest.raises(kvlane.ConfigError):
        kvlane.Router(config)


def test_empty_prompts_are_for_the_engine_to_judge(router):
    with router.select([]) as lease:
        assert lease.overlap_blocks == lease.predicted_cached_tokens == 0


def test_bad_endpoints_leave_no_worker(router):
    with pytest.raises(kvlane.ConfigError):
        router.add_worker("w3", events="nonsense")
    with pytest.raises(kvlane.InvalidRequest, match="replay"):
        router.add_worker("w3", replay="tcp://127.0.0.1:1")
    assert [worker.id for worker in router.workers()] == ["w1", "w2"]


def test_payloads_must_be_bytes(router):
    for payload in ("text", [1], None, array.array("I", [1])):
        with pytest.raises(kvlane.InvalidRequest, match="payload"):
            router.ingest("w1", payload)
    assert router.ingest("w1", bytearray(b"\xc1")).skipped == {"undecodable": 1}
    assert router.ingest("w1", memoryview(b"")).applied == 0


def test_a_with_block_releases_once(router):
    with router.select(TOKENS) as lease:
        assert active(router) == 1
        lease.release(cached_tokens=0)
        assert active(router) == 0
    with pytest.raises(RuntimeError, match="theirs"), router.select(TOKENS):
        raise RuntimeError("theirs")
    lease.release()
    assert active(router) == 0


def test_a_dropped_lease_releases_unless_its_id_was_taken(router):
    lease = router.select(TOKENS)
    assert active(router) == 1
    del lease
    gc.collect()
    assert active(router) == 0

    lease_id = router.select(TOKENS).id
    gc.collect()
    assert active(router) == 1
    assert isinstance(lease_id, str)
    assert router.finish(lease_id, cached_tokens=0) is True
    assert router.finish(lease_id) is False
    assert router.finish("no number") is False
    assert active(router) == 0


def test_a_lease_outlives_its_closed_router(router):
    lease = router.select(TOKENS)
    router.close()
    lease.prefill_done()
    lease.release()


def test_a_worker_is_changed_without_a_new_life(router):
    router.select(TOKENS, allowed=["w1"]).release()
    router.drain_worker("w1")
    assert router.select(TOKENS, allowed=["w1"]) is None
    router.undrain_worker("w1")
    router.set_role("w1", "prefill")
    assert router.select(TOKENS, allowed=["w1"], role="decode") is None
    router.set_labels(id="w1", labels={"zone": "b"})
    changed = next(worker for worker in router.workers() if worker.id == "w1")
    assert (changed.draining, changed.role, changed.labels) == (False, "prefill", {"zone": "b"})
    assert router.select(TOKENS, allowed=["w1"], role="prefill").overlap_blocks > 0  # its cache is still believed
    router.set_labels("w1", {})
    with pytest.raises(kvlane.InvalidRequest, match="role"):
        router.set_role("w1", "chef")
    with pytest.raises(TypeError):
        router.set_labels("w1", {"zone": 1})
    changed = next(worker for worker in router.workers() if worker.id == "w1")
    assert (changed.role, changed.labels) == ("prefill", {})


def test_leases_and_routers_are_not_pickled(router):
    lease = router.select(TOKENS)
    for act in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="lease.id"):
            act(lease)
        with pytest.raises(TypeError, match="configuration"):
            act(router)
    assert pickle.loads(pickle.dumps(kvlane.UnknownWorker("w9"))).code == "unknown_worker"


def test_everything_after_close_is_closed(router):
    router.close()
    calls = [
        lambda: router.select(TOKENS), lambda: router.rank(TOKENS), lambda: router.overlap(TOKENS), router.workers, router.stats,
        lambda: router.book("r", "w1", TOKENS), lambda: router.record("w1", TOKENS), lambda: router.ingest("w1", b""),
        lambda: router.add_worker("w3"), lambda: router.remove_worker("w1"), lambda: router.drain_worker("w1"),
        lambda: router.clear("w1"), lambda: router.trust("w1"), lambda: router.report_load("w1"), router.wait_ready,
        router.ready_workers, lambda: router.set_available("w1", True), lambda: router.set_kv_capacity("w1", 1),
        lambda: router.undrain_worker("w1"), lambda: router.set_role("w1", "both"), lambda: router.set_labels("w1", {}),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(kvlane.Closed) as caught:
            call()
        assert caught.value.code == "closed"


def test_a_broken_clock_is_an_error_and_no_crash():
    clock = SimpleNamespace(now=5.0)
    router = kvlane.Router(clock=lambda: clock.now)
    router.add_worker("w1")
    assert router.trust("w1").since == 5.0
    for broken in (float("nan"), float("inf"), 1e300):
        clock.now = broken
        with pytest.raises(kvlane.InvalidRequest, match="clock"):
            router.select(TOKENS)
    clock.now = "text"
    with pytest.raises(TypeError):
        router.select(TOKENS)
    clock.now = -1.0  # it stands at its first value
    assert router.select(TOKENS)
    with pytest.raises(ZeroDivisionError):
        kvlane.Router(clock=lambda: 1 / 0)


def test_since_is_wall_time_without_a_clock(router):
    assert abs(router.trust("w1").since - time.time()) < 5
    assert router.workers()[0].trust[0].since == pytest.approx(router.trust("w1").since, abs=0.1)


def test_trust_changes_are_logged_once(caplog):
    router = kvlane.Router({"silent_worker_requests": 1})
    router.add_worker("w1")
    with caplog.at_level(logging.INFO, "kvlane"):
        router.select(TOKENS).release()
        for _ in range(3):
            router.trust("w1")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("worker w1 rank 0: unproven -> approximate: no KV event")


def test_seeds_make_decisions_repeatable():
    def picks(seed):
        router = kvlane.Router({"temperature": 100.0, "prediction_ttl_seconds": 0}, seed=seed)
        for number in range(8):
            router.add_worker(f"w{number}")
        return [router.select([number]).worker for number in range(32)]

    assert picks(7) == picks(7)
    assert picks(7) != picks(8)


def test_eight_threads_select_and_release(router):
    failures = []

    def work(number):
        try:
            prompts = [array.array("I", range(number * 1000 + start, number * 1000 + start + 160)) for start in range(10)]
            for turn in range(300):
                with router.select(prompts[turn % 10], request_id=f"{number}-{turn}") as lease:
                    lease.prefill_done()
                    lease.output_tokens(turn)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert active(router) == 0
    assert router.stats()["decisions"] == 8 * 300


def shortest_gap(work, limit):
    """What `longest_gap` says at best. Whatever holds the interpreter shows in every attempt; what else the machine does need not."""
    shortest = math.inf
    for _ in range(40):
        shortest = min(shortest, longest_gap(work))
        if shortest < limit:
            break
    return shortest


def longest_gap(work):
    """Runs `work` while another thread ticks every millisecond; returns that thread's longest gap in seconds."""
    gaps, done = [0.0], threading.Event()

    def tick():
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    work()
    done.set()
    thread.join()
    return max(gaps)


def test_a_long_prompt_does_not_stop_other_threads(router):
    tokens = numpy.arange(10_000_000, dtype="uint32")
    # Copying 40 MB is done with the interpreter held; hashing them and looking them up is not.
    assert shortest_gap(lambda: router.select(tokens).release(), 0.5) < 0.5


def test_long_prompts_in_eight_threads_never_hold_a_timer_up_for_50_ms(router):
    prompts = [numpy.arange(start, start + 100_000, dtype="uint32") for start in range(8)]

    def decide_in_threads():
        end = time.perf_counter() + 0.3

        def work(number):
            while time.perf_counter() < end:
                router.select(prompts[number]).release()

        in_threads(8, work)

    assert shortest_gap(decide_in_threads, 0.05) < 0.05


def test_eight_threads_decide_more_than_one(router):
    """Beside hashing in the standard library, which releases the interpreter: what it gains is what the machine has to give
    at the time."""
    prompts = [numpy.arange(start, start + 100_000, dtype="uint32") for start in range(8)]
    block = bytes(1 << 20)

    def per_second(count, call):
        counts, end = [0] * count, time.perf_counter() + 0.15

        def work(number):
            while time.perf_counter() < end:
                call(number)
                counts[number] += 1

        in_threads(count, work)
        return sum(counts)

    def gain(call):
        return per_second(8, call) / per_second(1, call)

    def turn():
        return gain(lambda number: router.select(prompts[number]).release()), gain(lambda _: hashlib.sha256(block).digest())

    # As long as the machine is busy with something else it says nothing.
    for _ in range(6):
        turns = [turn() for _ in range(9)]
        got, possible = (statistics.median(gains) for gains in zip(*turns, strict=True))
        if got > 0.6 * possible and (got > 1 or possible < 1.5):
            return
    raise AssertionError(turns)


def in_threads(count, work):
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_waiting_lets_other_threads_run_and_ends_in_time(router):
    started = time.monotonic()
    assert router.wait_ready(0.3) is False
    assert 0.25 < time.monotonic() - started < 20
    assert shortest_gap(lambda: router.wait_ready(0.3), 0.2) < 0.2
    assert router.wait_ready(0) is False
    threading.Timer(0.1, lambda: router.ingest("w1", b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x91\x91\xb0AllBlocksCleared\0", seq=0)).start()
    assert router.wait_ready(30) is True
    assert router.ready_workers() == 1
    assert router.wait_ready(0.05, workers=2) is False
    threading.Timer(0.1, router.close).start()
    with pytest.raises(kvlane.Closed):
        router.wait_ready(30, workers=2)


def test_an_interrupt_ends_a_wait(router):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            router.wait_ready()
        assert time.monotonic() - started < 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_waiting_in_asyncio():
    import asyncio

    import kvlane.aio

    async def wait():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.ensure_future(tick())
        ready = await kvlane.aio.wait_ready(router, 0.2)
        ticking.cancel()
        return ready, ticks

    router = kvlane.Router()
    router.add_worker("w1")
    for _ in range(20):
        ready, ticks = asyncio.run(wait())
        assert ready is False
        if ticks > 3:
            break
    assert ticks > 3
    router = kvlane.Router({"index": "approximate"})
    router.add_worker("w1")
    assert asyncio.run(wait())[0] is True


FORK = """
import os, sys, kvlane
router = kvlane.Router()
router.add_worker("w1", events="tcp://127.0.0.1:9")  # its thread will not be in the child
lease = router.select([1])
pid = os.fork()
if pid == 0:
    for call in (lambda: router.select([1]), lease.release, router.workers, lambda: router.finish(lease.id)):
        try:
            call()
        except kvlane.Closed as error:
            assert "fork" in str(error)
        else:
            os._exit(3)
    with lease:
        pass
    router.close()
    again = kvlane.Router()
    again.add_worker("w1")
    assert again.select([1]).worker == "w1"
    del router, lease
    sys.exit(7)  # through the interpreter's end
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
lease.release()
assert router.workers()[0].active_requests == 0
router.close()
print("parent is well")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_must_make_its_own_router():
    result = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert result.stdout == "parent is well\n", result.stderr


def test_an_interpreter_that_ends_with_open_leases_does_not_crash():
    program = "import kvlane; r = kvlane.Router(); r.add_worker('w1', events='tcp://127.0.0.1:9'); l = r.select([1]); import sys; sys.keep = l"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_threads_that_go_on_at_the_end_do_not_crash():
    program = """
import threading, kvlane
router = kvlane.Router({"index": "approximate"})
router.add_worker("w1")
def work():
    while True:
        router.select(range(100000)).release()
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
import time; time.sleep(0.3)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


ENDINGS = {
    "a clock": "router = kvlane.Router(clock=slow(time.monotonic))",
    "a list of integers of its own": "prompt = [Integer(number) for number in range(20)]",
    "an array of its own": "prompt = type('Tensor', (), {'__array__': slow(lambda self: array.array('I', range(64)))})()",
    "a chat": "prompt = None; chat = [{'role': 'user', 'content': 'words'}]",
    "a tick that logs": "logging.getLogger('kvlane').addHandler(Handler())",
}


@pytest.mark.parametrize("kind", ENDINGS)
def test_threads_that_are_in_python_code_at_the_end_do_not_crash(kind):
    """Such a thread is unwound by the interpreter, which nothing in Rust survives."""
    program = f"""
import array, logging, sys, threading, time, kvlane
sys.setswitchinterval(1e-5)
logging.getLogger("kvlane").addHandler(logging.NullHandler())
def slow(function):
    def wrapper(*arguments):
        for _ in range(200):
            pass
        return function(*arguments)
    return wrapper
class Integer:
    def __init__(self, value):
        self.value = value
    def __index__(self):
        for _ in range(20):
            pass
        return self.value
class Handler(logging.Handler):
    emit = slow(lambda self, record: None)
router, prompt, chat = kvlane.Router(dict(silent_worker_requests=1)), range(64), None
{ENDINGS[kind]}
def work(number):
    while True:
        name = f"w{{number}}"
        router.add_worker(name)
        for _ in range(5):
            router.select(prompt, messages=chat, allowed=[name]).release()
        router.workers()
        router.remove_worker(name)
for number in range(4):
    threading.Thread(target=work, args=(number,), daemon=True).start()
time.sleep(0.1)
"""
    for _ in range(6):
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (result.returncode, result.stderr) == (0, "")


def test_functions_that_run_at_the_end_can_still_call():
    program = "import atexit; atexit.register(lambda: print(r.select([1]).worker)); import kvlane; r = kvlane.Router(); r.add_worker('w1')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "w1\n", "")
