"""What the tests of the whole program share: a brain that can misbehave, and lanes as real processes that ask it.

`server`, `lane` and `make_lane` are a test's own. `shared_server` and `shared_lane` are one process for all tests of a
module, brought to rest and forgotten by the server after each of them. Every lane is stopped by SIGTERM after every
held answer has been let go, and must then exit cleanly; whatever happened, its log may hold no traceback.
"""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.brainserver import LAST_CHUNK, BrainServer, Exchange, Held, Step, chunk, delta, event, head
from tests.lane import Lane, config_for

MakeLane = Callable[..., Lane]
Halting = Callable[[BrainServer, str, str], tuple[Step, Held]]


@pytest.fixture
def server() -> Iterator[BrainServer]:
    """The brain that every lane of this test asks."""
    with BrainServer() as server:
        yield server


@pytest.fixture
def make_lane(tmp_path: Path, server: BrainServer) -> Iterator[MakeLane]:
    """Make lanes that ask `server`.

    `lane`, `route` and `more` are lines of their configuration (`config_for`); with `start=False` it is not started.
    """
    made: list[Lane] = []

    def make(*, start: bool = True, lane: str = "", route: str = "", more: str = "") -> Lane:
        one = Lane(tmp_path / f"lane{len(made)}", config_for(server.base_url, lane=lane, route=route, more=more))
        made.append(one)
        return one.start() if start else one

    yield make
    _end(server, made)


@pytest.fixture
def lane(make_lane: MakeLane) -> Lane:
    """A running lane with one route, `local`, to `server`."""
    return make_lane()


@pytest.fixture(scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrainServer, Lane]]:
    with BrainServer() as server:
        other = f'[routes.other]\nbase_url = "{server.base_url}"\nmodel = "other-model"'
        lane = Lane(tmp_path_factory.mktemp("shared"), config_for(server.base_url, more=other))
        yield server, lane.start()
        _end(server, [lane])


@pytest.fixture
def shared_server(_shared: tuple[BrainServer, Lane]) -> Iterator[BrainServer]:
    """The brain of `shared_lane`; what was scripted and recorded is forgotten after each test."""
    server, lane = _shared
    yield server
    lane.post("/v1/lane/resume")
    server.release()
    for status in ("queued", "running", "held"):
        for job in lane.get(f"/v1/jobs?status={status}&limit=500").json["jobs"]:
            lane.post(f"/v1/jobs/{job['id']}/cancel")
            lane.wait(job["id"])
    server.control({"reset": True, "default": "answer", "by_prompt": {}})


@pytest.fixture
def shared_lane(_shared: tuple[BrainServer, Lane], shared_server: BrainServer) -> Lane:
    """A running lane that asks `shared_server`, with the routes `local` and `other`."""
    return _shared[1]


@pytest.fixture
def halting() -> Halting:
    """Make a step that streams `first`, then waits for the `release` of what comes with it, then streams `rest`."""

    def make(server: BrainServer, first: str, rest: str) -> tuple[Step, Held]:
        def finish(x: Exchange) -> None:
            x.end()
            x.send(b"".join(chunk(each) for each in (delta(rest), delta({}, "stop"), event("[DONE]"))) + LAST_CHUNK)

        held = server.hold(finish)

        def step(x: Exchange) -> None:
            x.read_body()
            x.send(head(chunked=True) + chunk(delta(first)))
            held(x)

        return step, held

    return make


def _end(server: BrainServer, lanes: list[Lane]) -> None:
    server.release()
    ended = {}
    for lane in lanes:
        if lane.process is not None and lane.process.poll() is None:
            try:
                ended[lane.directory.name] = lane.stop()
            except subprocess.TimeoutExpired:
                lane.kill()
                ended[lane.directory.name] = lane.process.returncode
    for lane in lanes:
        log = lane.log.read_text(errors="replace") if lane.log.exists() else ""
        assert "Traceback" not in log, log
    assert not any(ended.values()), f"exit statuses at the end of the test: {ended}"
