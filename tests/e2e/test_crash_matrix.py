"""The process vanishes at every cut of a job's way, and is started again: what the lane then says, and what it asks.

The brain lives in the test, so it survives and counts. A second job waits behind the first; it must keep its place and
be asked once, whatever became of the first.
"""

import contextlib
import http.client
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.brainserver import BrainServer, answer, status
from tests.lane import Lane

ROUNDS = 2
PASSINGS = {"body": 3}
"""A cut that is passed many times in a call: the process vanishes when some text has come."""


@dataclass(frozen=True)
class Row:
    """A cut, and what must be true after the next start before any person acts."""

    cut: str
    status: str
    reason: str
    requests: tuple[int, ...]
    part: str | None = None
    """What must be readable of the answer at least; None: there is nothing."""


MATRIX = [
    Row("claimed", "done", "answered", (1,)),
    Row("arming", "done", "answered", (1,)),
    Row("armed", "held", "sent-outcome-unknown", (0, 1)),
    Row("sent", "held", "sent-outcome-unknown", (1,)),
    Row("headers", "held", "answer-incomplete", (1,)),
    Row("body", "held", "answer-incomplete", (1,), part="one "),
    Row("answered", "done", "answered", (1,)),
    Row("stored", "done", "answered", (1,)),
]


def crashed_lane(lane: Lane, cut: str, **fields: Any) -> tuple[Lane, dict[str, Any], dict[str, Any]]:
    """Run two jobs on a lane that vanishes at a cut of the first; then start it again."""
    lane.start()
    lane.post("/v1/lane/pause")
    first = lane.submit("first", **fields)
    second = lane.submit("second")
    lane.stop()
    lane.start(cut=cut, times=PASSINGS.get(cut, 1))
    with contextlib.suppress(OSError, http.client.HTTPException):  # it may vanish before it has answered
        lane.post("/v1/lane/resume")
    assert lane.process is not None
    assert lane.process.wait(20) == -9
    lane.start()
    return lane, first, second


@pytest.mark.parametrize("turn", range(ROUNDS))
@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row.cut)
def test_after_vanishing_at_a_cut_the_lane_says_what_the_evidence_allows(
    row: Row, turn: int, server: BrainServer, make_lane: Callable[..., Lane]
) -> None:
    server.default = answer(tokens=["one ", "two ", "three"], gap_s=0.05)
    lane, first, second = crashed_lane(make_lane(start=False), row.cut)
    assert lane.wait(second["id"])["status"] == "done"
    job = lane.wait(first["id"])
    assert (job["status"], job["reason"]) == (row.status, row.reason)
    assert server.count("first", whole=True) in row.requests
    assert server.count("second") == 1
    assert server.max_concurrent == 1
    assert job["next_action"]
    partial = lane.get(f"/v1/jobs/{first['id']}/output?partial=1")
    if row.part is not None:
        assert partial.status == 200 and partial.body.decode().startswith(row.part)
    elif row.status == "done":
        assert lane.get(f"/v1/jobs/{first['id']}/output").body == b"one two three"
    if row.status == "held":
        assert job["attempts"][-1]["armed_at"] is not None
        assert "armed at" in job["detail"] or "HTTP 200" in job["detail"]
    else:
        # A job that is asked again after a crash has kept its place before the one behind it.
        ends = [lane.get(f"/v1/jobs/{number}").json["finished_at"] for number in (first["id"], second["id"])]
        assert ends == sorted(ends)


@pytest.mark.parametrize("cut", ["armed", "sent", "headers"])
def test_leave_to_run_twice_given_beforehand_asks_again(
    cut: str, server: BrainServer, make_lane: Callable[..., Lane]
) -> None:
    lane, first, _ = crashed_lane(make_lane(start=False), cut, may_run_twice=True)
    job = lane.wait(first["id"])
    assert job["status"] == "done" and job["attempt_count"] == 2
    assert job["attempts"][0]["status"] == "unknown"
    assert server.count("first", whole=True) in (1, 2)


@pytest.mark.parametrize("cut", ["headers", "answered"])
def test_an_answered_refusal_is_judged_by_its_status_after_a_crash_as_before(
    cut: str, server: BrainServer, make_lane: Callable[..., Lane]
) -> None:
    server.script(status(422, body={"error": {"message": "no"}}))
    lane, first, _ = crashed_lane(make_lane(start=False), cut)
    job = lane.wait(first["id"])
    assert (job["status"], job["reason"]) == ("failed", "bad-request")
    assert server.count("first") == 1


def test_a_job_that_kills_the_daemon_each_time_is_held_and_the_others_run(
    server: BrainServer, make_lane: Callable[..., Lane]
) -> None:
    lane, first, second = _poisoned(make_lane(start=False))
    job = lane.wait(first["id"])
    assert (job["status"], job["reason"]) == ("held", "crashed-worker")
    assert "2 times" in job["detail"]
    assert lane.wait(second["id"])["status"] == "done"
    assert server.count("first") == 0


def _poisoned(lane: Lane) -> tuple[Lane, dict[str, Any], dict[str, Any]]:
    lane.start()
    lane.post("/v1/lane/pause")
    jobs = lane.submit("first"), lane.submit("second")
    lane.stop()
    for _ in range(2):
        lane.start(cut="arming", wait=False)
        # It vanishes at its first claim, perhaps before it has answered.
        with contextlib.suppress(OSError, http.client.HTTPException, AssertionError):
            lane.wait_until_ready()
            lane.post("/v1/lane/resume")
        assert lane.process is not None
        assert lane.process.wait(20) == -9
    lane.start()
    return lane, *jobs


@pytest.mark.parametrize(
    ("decision", "status_after", "requests"),
    [
        ({"action": "resend"}, "done", 2),
        ({"action": "accept"}, "done", 1),
        ({"action": "complete", "text": "by hand"}, "done", 1),
        ({"action": "fail"}, "failed", 1),
        ({"action": "cancel"}, "cancelled", 1),
    ],
    ids=lambda value: value["action"] if isinstance(value, dict) else None,
)
def test_a_person_decides_about_a_held_job_once(
    decision: dict[str, str], status_after: str, requests: int, server: BrainServer, make_lane: Callable[..., Lane]
) -> None:
    server.script(answer(tokens=["one ", "two ", "three"], gap_s=0.05))
    lane, first, second = crashed_lane(make_lane(start=False), "body")
    lane.wait(second["id"])
    path = f"/v1/jobs/{first['id']}/recover"
    assert lane.post(path, {**decision, "attempt": 9}).status == 409
    assert lane.post(path, {**decision, "attempt": 1, "reason": "why not"}).status == 200
    again = lane.post(path, {**decision, "attempt": 1})
    assert (again.status, again.error["kind"]) == (409, "moved-on")
    job = lane.wait(first["id"])
    assert job["status"] == status_after
    assert server.count("first") == requests
    assert [(entry["action"], entry["reason"], entry["attempt"]) for entry in job["decisions"]] == [
        (decision["action"], "why not", 1)
    ]
    output = lane.get(f"/v1/jobs/{first['id']}/output")
    if decision["action"] == "accept":
        assert output.body.startswith(b"one ") and "partial" in job["flags"]
    elif decision["action"] == "complete":
        assert output.body == b"by hand" and "operator-text" in job["flags"]


def test_a_failed_job_is_tried_again_when_somebody_says_so(server: BrainServer, make_lane: Callable[..., Lane]) -> None:
    server.script(status(400))
    lane = make_lane()
    number = lane.submit("first")["id"]
    assert lane.wait(number)["status"] == "failed"
    assert lane.post(f"/v1/jobs/{number}/retry").status == 200
    assert lane.wait(number)["status"] == "done"
    assert lane.post(f"/v1/jobs/{number}/retry").error["kind"] == "moved-on"
    assert server.count("first") == 2
