"""The process vanishes at every cut of a job's way, and is started again: what the lane then says, and what it asks.

The brain lives in the test, so it survives and counts. Two more jobs wait behind the first; they must keep their place
and be asked once, whatever became of it. Each cut is passed many times in the life of one lane, since what follows a
crash must not depend on luck. Nobody acts between the crash and what is asserted.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.brainserver import BrainServer, Exchange, Step, answer, chunk, delta, head, status, step, stop_reading
from tests.lane import Lane

ROUNDS = 20
TEXT = "one two three"
LARGE = "word " * 1_000_000
"""More than the kernel's buffers take, so that its upload can break in the middle."""


@dataclass(frozen=True)
class Row:
    """A cut, what the database must know when the process has vanished there, and what must follow."""

    cut: str
    knows: tuple[str, ...]
    """Status of the job, then the marks on its attempt."""
    status: str
    reason: str
    requests: frozenset[int]
    """How many whole requests the brain may have seen."""
    part: str = ""
    """What must be readable of the answer at least."""


MATRIX = [
    Row("claiming", ("queued",), "done", "answered", frozenset({1})),
    Row("claimed", ("running",), "done", "answered", frozenset({1})),
    Row("arming", ("running",), "done", "answered", frozenset({1})),
    Row("armed", ("running", "armed_at"), "held", "sent-outcome-unknown", frozenset({0, 1})),
    # The brain reads the body after the kernel took it, so it may not have got it all when the process is gone.
    Row("sent", ("running", "armed_at"), "held", "sent-outcome-unknown", frozenset({0, 1})),
    Row("send-failed", ("running", "armed_at", "send_failed_at"), "done", "answered", frozenset({1})),
    Row("headers", ("running", "armed_at"), "held", "answer-incomplete", frozenset({1})),
    Row("body", ("running", "armed_at"), "held", "answer-incomplete", frozenset({1}), "one "),
    Row("answered", ("running", "armed_at"), "done", "answered", frozenset({1}), TEXT),
    Row("stored", ("done", "armed_at"), "done", "answered", frozenset({1}), TEXT),
]


BILLED = {"armed": "possibly", "sent": "possibly", "headers": "yes", "body": "yes"}


@step
def begins_and_waits(x: Exchange) -> None:
    """Stream the first word, and no more while the client is there."""
    x.send(head(chunked=True) + chunk(delta("one ")))
    x.pause()


def rounds(
    server: BrainServer, lane: Lane, cut: str, first_time: Step | None = None, deaths: int = 1, **fields: Any
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Let the lane vanish at a cut of the first of three jobs, again and again.

    Yield, after each death, the first job's prompt and the jobs as they were accepted; then the lane is started again.
    The brain takes `first_time` when it is asked for the first job at first. `deaths` is how often the lane must die in
    the same job.
    """
    server.default = answer(TEXT, gap_s=0.01)
    asked = set()

    def choose(prompt: str | None) -> Step | None:
        if prompt is None or not prompt.startswith("first") or prompt in asked:
            return None
        asked.add(prompt)
        return first_time or (begins_and_waits() if cut == "body" else None)

    lane.start(cut=cut)
    for turn in range(ROUNDS):
        lane.post("/v1/lane/pause")
        server.by_prompt(choose)
        if cut == "send-failed":
            server.script(stop_reading())
        prompts = [f"first {turn} {LARGE if cut == 'send-failed' else ''}", f"second {turn}", f"third {turn}"]
        jobs = [lane.submit(prompt, **(fields if number == 0 else {})) for number, prompt in enumerate(prompts)]
        lane.vanish()
        for _ in range(deaths - 1):
            lane.vanish(lambda: lane.start(cut=cut, wait=False))
        yield prompts[0], jobs
        assert [lane.wait(job["id"])["status"] for job in jobs[1:]] == ["done", "done"]
        assert [server.count(prompt) for prompt in prompts[1:]] == [1, 1]
        assert server.max_concurrent == 1
        assert list((lane.state_dir / "spool").iterdir()) == []
        server.control({"reset": True})


def known(lane: Lane, job_id: int) -> tuple[str, ...]:
    """What the database knows of a job and its last attempt that decides; other marks may come a moment later."""
    job = lane.rows("select status from jobs where id = ?", job_id)[0]
    attempts = lane.rows("select * from job_attempts where job_id = ? order by attempt desc", job_id)
    marks = ("armed_at", "send_failed_at")
    return (job["status"], *(mark for mark in marks if attempts and attempts[0][mark] is not None))


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row.cut)
def test_after_vanishing_at_a_cut_the_lane_says_what_the_evidence_allows(
    row: Row, server: BrainServer, make_lane: Callable[..., Lane]
) -> None:
    lane = make_lane(start=False)
    for prompt, jobs in rounds(server, lane, row.cut):
        number = jobs[0]["id"]
        assert known(lane, number) == row.knows
        lane.start(cut=row.cut)
        job = lane.wait(number)
        assert (job["status"], job["reason"]) == (row.status, row.reason)
        assert server.count(prompt, whole=True) in row.requests
        lane.wait(jobs[2]["id"])
        # The first was asked before those behind it, be it before the crash or after it.
        asked = [each.prompt for each in server.requests if each.whole]
        assert asked == sorted(asked)
        partial = lane.get(f"/v1/jobs/{number}/output?partial=1")
        assert (
            partial.body.decode().startswith(row.part)
            if row.part
            else partial.body.decode() in {"", TEXT} or (partial.status == 409)
        )
        if row.status == "held":
            assert job["next_action"] == f"brainctl recover {number}"
            assert job["attempts"][-1]["billed"] == BILLED[row.cut]
            assert job["attempts"][-1]["armed_at"] in job["detail"] or "HTTP 200" in job["detail"]
            assert number in [one["id"] for one in lane.get("/v1/status").json["needs_person"]]
            assert job["attempt_count"] == 1
        else:
            assert lane.get(f"/v1/jobs/{number}/output").body.decode() == TEXT
            assert [attempt["billed"] for attempt in job["attempts"]] in (["yes"], ["no", "yes"])


def test_a_submit_that_was_stored_and_not_answered_is_found_again_by_its_key(
    server: BrainServer, make_lane: Callable[..., Lane]
) -> None:
    lane = make_lane(start=False).start(cut="accepted")
    for turn in range(ROUNDS):
        submit = {"request": {"messages": [{"role": "user", "content": f"first {turn}"}]}, "key": f"key {turn}"}
        lane.vanish(lambda submit=submit: lane.post("/v1/jobs", submit))  # type: ignore[misc]
        assert len(lane.rows("select 1 from jobs where key = ?", f"key {turn}")) == 1
        lane.start(cut="accepted")
        again = lane.post("/v1/jobs", submit)
        assert (again.status, again.json["replayed"]) == (200, True)
        assert lane.wait(again.json["id"])["status"] == "done"
        assert server.count(f"first {turn}") == 1


@pytest.mark.parametrize("cut", ["armed", "sent", "headers", "body"])
def test_leave_to_run_twice_given_beforehand_turns_what_would_be_held_into_one_more_request(
    cut: str, server: BrainServer, make_lane: Callable[..., Lane]
) -> None:
    lane = make_lane(start=False)
    for prompt, jobs in rounds(server, lane, cut, may_run_twice=True):
        lane.start(cut=cut)
        job = lane.wait(jobs[0]["id"])
        assert (job["status"], [one["status"] for one in job["attempts"]]) == ("done", ["unknown", "succeeded"])
        assert [(one["reason"], one["billed"]) for one in job["attempts"]] == [
            ("asked-again", BILLED[cut]),
            ("answered", "yes"),
        ]
        assert server.count(prompt, whole=True) in {1, 2}


@pytest.mark.parametrize("cut", ["headers", "answered"])
@pytest.mark.parametrize(
    ("said", "expected", "requests"),
    [
        (status(422, body={"error": {"message": "no"}}), ("failed", "bad-request"), 1),
        (status(429, headers={"Retry-After": "0"}), ("done", "answered"), 2),
    ],
    ids=["422", "429"],
)
def test_an_answered_refusal_is_judged_by_its_status_after_a_crash_as_before(
    said: Step,
    expected: tuple[str, str],
    requests: int,
    cut: str,
    server: BrainServer,
    make_lane: Callable[..., Lane],
) -> None:
    lane = make_lane(start=False)
    for prompt, jobs in rounds(server, lane, cut, said):
        lane.start(cut=cut)
        job = lane.wait(jobs[0]["id"])
        assert (job["status"], job["reason"]) == expected
        assert server.count(prompt) == requests


def test_a_job_that_kills_the_daemon_each_time_is_held_and_the_others_run(
    server: BrainServer, make_lane: Callable[..., Lane]
) -> None:
    lane = make_lane(start=False)
    for prompt, jobs in rounds(server, lane, "arming", deaths=2):
        lane.start(cut="arming")
        job = lane.wait(jobs[0]["id"])
        assert (job["status"], job["reason"]) == ("held", "crashed-worker")
        assert "died 2 times" in job["detail"]
        assert server.count(prompt) == 0


def crashed_lane(lane: Lane, cut: str) -> tuple[Lane, dict[str, Any], dict[str, Any]]:
    """Run two jobs on a lane that vanishes at a cut of the first; then start it again."""
    lane.start(cut=cut)
    lane.post("/v1/lane/pause")
    first, second = lane.submit("first"), lane.submit("second")
    lane.vanish()
    return lane.start(), first, second


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
    server.script(begins_and_waits())
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
