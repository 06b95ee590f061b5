"""SIGTERM while a paid call is running: what is still answered, what is kept, and what the next start makes of it.

What a lane at rest does, and a call that finishes or is abandoned, stands in test_start.py. Here are the worse ends: a
death within the grace, an answer that cannot be stored, a line that never came about; and what systemd is told.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.brainserver import BrainServer
from tests.lane import Lane, begin_call, wait_until, write_lock_held

PATIENCE_S = 60
"""More than anything here takes on a busy machine."""


def terminate(lane: Lane) -> None:
    """Send SIGTERM once, and return when the lane says that it is stopping."""
    assert lane.process is not None
    lane.process.send_signal(signal.SIGTERM)
    wait_until(lambda: lane.get("/v1/status").json["lane"]["state"] == "stopping")


def exit_status(lane: Lane) -> int:
    assert lane.process is not None
    return lane.process.wait(PATIENCE_S)


# What systemd is told


class Notified:
    """A notify socket, and what has arrived at it: the fields of each datagram with the pid of its sender."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(os.fspath(path))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._seen: list[tuple[int, list[str]]] = []

    def close(self) -> None:
        self._socket.close()

    def read(self) -> list[tuple[int, list[str]]]:
        """Return all that has arrived so far, oldest first."""
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(65536, socket.CMSG_SPACE(12))
            except BlockingIOError:
                return self._seen
            (credentials,) = (content for _, kind, content in ancillary if kind == socket.SCM_CREDENTIALS)
            self._seen.append((int.from_bytes(credentials[:4], "little", signed=True), data.decode().splitlines()))

    def said(self, field: str) -> list[int]:
        """Return the senders of a field, once for each time it was said."""
        return [pid for pid, fields in self.read() if field in fields]


@pytest.fixture
def notified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notified]:
    """The notify socket of every lane that is started by this test."""
    path = tmp_path / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", os.fspath(path))
    with closing(Notified(path)) as notified:
        yield notified


def test_ready_is_said_when_the_lane_answers_and_stopping_once_whatever_follows(
    make_lane: Any, server: BrainServer, notified: Notified
) -> None:
    lane = make_lane(start=False)
    lane.start(wait=False)
    wait_until(lambda: notified.said("READY=1") != [])
    assert lane.get("/v1/healthz").status == 200  # no second chance: who is ordered after the unit has none either
    assert notified.said("READY=1") == [lane.process.pid]
    begin_call(lane, server, "first")
    assert notified.said("STOPPING=1") == []
    terminate(lane)
    assert notified.said("STOPPING=1") == [lane.process.pid]
    lane.process.send_signal(signal.SIGTERM)
    assert exit_status(lane) == 0
    assert notified.said("READY=1") == notified.said("STOPPING=1") == [lane.process.pid]
    assert {pid for pid, _ in notified.read()} == {lane.process.pid}


def test_a_start_that_is_refused_says_neither(lane: Lane, notified: Notified, make_lane: Any) -> None:
    second = make_lane(start=False)
    second.state_dir = lane.state_dir
    second.start(wait=False)
    assert exit_status(second) == 69
    assert notified.read() == []


# What is accepted while it stops


def test_every_job_that_was_accepted_while_the_lane_stopped_is_there_at_the_next_start(
    lane: Lane, server: BrainServer
) -> None:
    accepted: list[int] = []
    ended = threading.Event()

    def submit(number: int) -> None:
        """Submit one job after another until nobody answers any more."""
        while not ended.is_set():
            try:
                accepted.append(lane.submit(f"from {number}")["id"])
            except OSError:
                return

    running, held = begin_call(lane, server, "first")
    with ThreadPoolExecutor(4) as clients:
        terminate(lane)
        before = len(accepted)
        submits = [clients.submit(submit, number) for number in range(4)]
        wait_until(lambda: len(accepted) >= before + 20)
        assert lane.get(f"/v1/jobs/{running['id']}").json["status"] == "running"
        held.release()
        assert exit_status(lane) == 0
        ended.set()
    for each in submits:
        each.result()
    assert server.count() == 1
    rows = lane.rows("select id, status, attempt_count from jobs order by id")
    assert [tuple(row.values()) for row in rows if row["id"] == running["id"]] == [(running["id"], "done", 1)]
    waiting = {row["id"] for row in rows if (row["status"], row["attempt_count"]) == ("queued", 0)}
    assert set(accepted) <= waiting
    # A job whose answer was lost with the lane is there as well: at most one for each who submitted.
    assert len(waiting) <= len(accepted) + 4
    lane.start()
    for job_id in accepted:
        assert lane.wait(job_id, PATIENCE_S)["status"] == "done"


# Worse ends


def test_a_death_within_the_grace_holds_the_job_and_sends_it_no_second_time(lane: Lane, server: BrainServer) -> None:
    running, _ = begin_call(lane, server, "first")
    queued = lane.submit("second")
    terminate(lane)
    assert lane.get(f"/v1/jobs/{queued['id']}").json["status"] == "queued"
    lane.kill()
    lane.start()
    assert lane.wait(queued["id"])["status"] == "done"
    job = lane.get(f"/v1/jobs/{running['id']}").json
    assert (job["status"], job["reason"], job["attempt_count"]) == ("held", "sent-outcome-unknown", 1)
    assert [record.prompt for record in server.requests] == ["first", "second"]
    last_run = lane.get("/v1/status").json["last_run"]
    assert last_run["ended_at"] is None and "vanished without a word" in last_run["ending"]


def test_a_second_signal_before_any_answer_holds_the_job(lane: Lane, server: BrainServer) -> None:
    running, _ = begin_call(lane, server, "first")
    queued = lane.submit("second")
    terminate(lane)
    assert lane.process is not None
    lane.process.send_signal(signal.SIGINT)
    assert exit_status(lane) == 0
    assert "abandoning the call in flight: a second signal (SIGINT)" in lane.log.read_text()
    assert server.wait_for(lambda server: server.requests[0].hung_up_at is not None, PATIENCE_S)
    rows = lane.rows("select status, reason, attempt_count, unclean_deaths from jobs order by id")
    assert [tuple(row.values()) for row in rows] == [
        ("held", "sent-outcome-unknown", 1, 0),
        ("queued", "submitted", 0, 0),
    ]
    (attempt,) = lane.rows("select status, reason, armed_at is not null as armed from job_attempts")
    assert tuple(attempt.values()) == ("unknown", "daemon-stopped", 1)
    lane.start()
    assert lane.wait(queued["id"])["status"] == "done"
    assert lane.get(f"/v1/jobs/{running['id']}").json["status"] == "held"
    assert [record.prompt for record in server.requests] == ["first", "second"]


def test_with_leave_to_run_twice_an_abandoned_call_is_made_again_at_the_next_start(
    make_lane: Any, server: BrainServer
) -> None:
    lane = make_lane(route="may_run_twice = true")
    running, _ = begin_call(lane, server, "first")
    terminate(lane)
    lane.process.send_signal(signal.SIGTERM)
    assert exit_status(lane) == 0
    assert server.count() == 1
    lane.start()
    job = lane.wait(running["id"])
    assert (job["status"], [attempt["status"] for attempt in job["attempts"]]) == ("done", ["unknown", "succeeded"])
    assert server.count() == 2


def test_an_answer_that_cannot_be_stored_before_the_end_is_stored_at_the_next_start(
    make_lane: Any, server: BrainServer
) -> None:
    lane = make_lane(lane="stop_grace_s = 1")
    running, held = begin_call(lane, server, "first")
    with write_lock_held(lane):
        held.release()
        wait_until(lambda: lane.get("/v1/status").json["lane"]["answer_waiting"])
        lane.process.send_signal(signal.SIGTERM)
        exit_status(lane)
    lane.start()
    job = lane.get(f"/v1/jobs/{running['id']}").json
    assert (job["status"], job["reason"], job["attempt_count"]) == ("done", "answered", 1)
    assert lane.get(f"/v1/jobs/{running['id']}/output").body == b"hello world"
    assert server.count() == 1


@contextmanager
def full_house() -> Iterator[str]:
    """Give a base URL whose listener takes no connection: there is one guest in its queue, and nobody accepts."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


@pytest.mark.parametrize("stops", [1, 2])
def test_a_call_whose_line_never_came_about_is_made_at_the_next_start(
    make_lane: Any, server: BrainServer, stops: int
) -> None:
    with full_house() as base_url:
        # The line may take longer than this test would wait, so only the second signal can end the lane.
        lane = make_lane(start=False, route=f"connect_s = {5 * PATIENCE_S}")
        config = lane.config.read_text()
        lane.config.write_text(config.replace(server.base_url, base_url))
        lane.start()
        job = lane.submit("first")
        for stop in range(stops):
            if stop > 0:
                lane.start()
            lane.wait_for_status(job["id"], "running")
            terminate(lane)
            lane.process.send_signal(signal.SIGTERM)
            exit_status(lane)
    lane.config.write_text(config)
    lane.start()
    ended = lane.wait(job["id"], PATIENCE_S)
    assert (ended["status"], ended["attempts_used"]) == ("done", 1)
    assert ended["attempts"][0]["billed"] == "no"
    assert server.count() == 1
