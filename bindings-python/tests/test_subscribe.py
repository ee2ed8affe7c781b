"""A worker with `events=` is followed by the router itself."""

import threading
import time

import msgpack
import pytest
import zmq

import kvlane


class Engine:
    """The event side of an engine: publishes batches and replays them."""

    def __init__(self):
        self.context = zmq.Context()
        self.publisher, self.events = self.bound(zmq.PUB)
        self.router, self.replay = self.bound(zmq.ROUTER)
        self.batches = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def bound(self, kind):
        bound = self.context.socket(kind)
        bound.bind("tcp://127.0.0.1:*")
        return bound, bound.last_endpoint.rstrip(b"\0").decode()

    def publish(self, *events):
        self.batches.append(msgpack.packb([1.5, list(events), 0]))
        number = len(self.batches) - 1
        self.publisher.send_multipart([b"", number.to_bytes(8, "big"), self.batches[number]])

    def serve(self):
        router = self.router
        while not self.ended.is_set():
            if router.poll(20):
                client, empty, start = router.recv_multipart()
                for number in range(int.from_bytes(start, "big"), len(self.batches)):
                    router.send_multipart([client, empty, number.to_bytes(8, "big"), self.batches[number]])
                router.send_multipart([client, empty, (-1).to_bytes(8, "big", signed=True), b""])
        router.close(0)

    def stop(self):
        self.ended.set()
        self.thread.join()
        self.publisher.close(0)
        self.context.term()


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.stop()


def stored(hashes, parent, start):
    tokens = list(range(start, start + 16 * len(hashes)))
    return ["BlockStored", hashes, parent, tokens, 16, None, "GPU", None]


def until(holds):
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_router_subscribes_by_itself(engine):
    engine.publish(stored([11, 12], None, 0))  # before anybody listens: the replay brings it
    with kvlane.Router() as router:
        router.add_worker("w1", events=engine.events, replay=engine.replay)
        assert router.wait_ready(20)
        until(lambda: router.overlap(range(64)) == {("w1", 0): kvlane.Overlap(device=2)})
        assert router.trust("w1").state == "exact"

        engine.publish(stored([13], 12, 32))
        until(lambda: router.overlap(range(64)) == {("w1", 0): kvlane.Overlap(device=3)})
        lease = router.select(range(64))
        assert (lease.worker, lease.overlap_blocks) == ("w1", 3)
        (stream,) = router.stats()["subscriptions"]
        assert stream["worker"] == "w1" and stream["connected"] is True and stream["batches"] == 2

        router.remove_worker("w1")
        engine.publish(stored([14], 13, 48))
        time.sleep(0.1)
        assert router.overlap(range(64)) == {}
        assert router.stats()["subscriptions"] == []
        lease.release()
    started = time.monotonic()
    router.close()
    assert time.monotonic() - started < 10


def test_an_engine_that_is_not_there_is_no_hindrance():
    with kvlane.Router() as router:
        router.add_worker("w1", events="tcp://127.0.0.1:1")
        assert router.select(range(64)).worker == "w1"
        until(lambda: router.trust("w1").state == "unreachable")
        assert router.ready_workers() == 0
