"""Engines live for the whole run and start side by side; every test gets clean caches and its own router."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from harness import Connector, Engine
from pair import Lane, Pair
from prompts import Prompts
from router import Router


class Fleet:
    """The engines of a run: two that publish events, and one that was started without them.

    With them a pair that hands over, for which the silent one decodes as well. Only those are started that a test of the
    run asks for.
    """

    def __init__(self, asked: set[str]) -> None:
        self.w1 = Engine("w1")
        self.w2 = Engine("w2")
        self.silent = Engine("w3", events=False, connector=Connector("decode", load_failure_policy="recompute"))
        prefill, decode = (Engine(role, connector=Connector(role)) for role in ("prefill", "decode"))
        self.handing_over = Pair(prefill, decode, self.silent)
        both = self.all if "fleet" in asked else []
        self.started = list(dict.fromkeys([*both, *(self.handing_over.all if "pair" in asked else [])]))

    @property
    def all(self) -> list[Engine]:
        return [self.w1, self.w2, self.silent]

    @property
    def pair(self) -> list[Engine]:
        return [self.w1, self.w2]


@pytest.fixture(scope="session")
def started_fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    fleet = Fleet({name for item in request.session.items for name in getattr(item, "fixturenames", ())})
    try:
        for engine in fleet.started:
            engine.launch()
        for engine in fleet.started:
            engine.wait_ready()
        yield fleet
    finally:
        for engine in fleet.started:
            engine.stop()


@pytest.fixture
def fleet(started_fleet: Fleet) -> Fleet:
    """The engines with empty prefix caches."""
    for engine in started_fleet.all:
        engine.reset()
    return started_fleet


@pytest.fixture
def pair(started_fleet: Fleet) -> Pair:
    """The engines that hand over, all of them alive."""
    started_fleet.handing_over.make_whole()
    return started_fleet.handing_over


@pytest.fixture
def lane(pair: Pair) -> Iterator[Lane]:
    """A router that splits, and has nothing open when the test ends."""
    with Lane(pair.prefill, pair.decode) as lane:
        yield lane
        lane.wait_clean()


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> Prompts:
    return Prompts(request.node.nodeid)


@pytest.fixture
def start_router() -> Iterator[Callable[..., Router]]:
    """Starts routers that are stopped when the test ends."""
    routers: list[Router] = []

    def start(*args: object, **kwargs: object) -> Router:
        router = Router(*args, **kwargs)  # type: ignore[arg-type]
        routers.append(router)
        return router.start()

    yield start
    for router in routers:
        router.stop()


@pytest.fixture
def router(fleet: Fleet, start_router: Callable[..., Router]) -> Router:
    """A router over w1 and w2 that has read both event streams to their ends."""
    router = start_router(fleet.pair)
    for engine in fleet.pair:
        router.wait_trust(engine, "exact")
        router.wait_blocks(engine, 0)
    return router


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run that skipped anything proves nothing about it, so it fails (no test at all fails in pytest itself)."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == 0 and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
