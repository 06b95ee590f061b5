"""Waiting bears a lane that restarts, follows a stream across breaks, and ends when it should."""

import time
from typing import Any

import pytest

from brainctl import wait
from brainctl.client import Lane
from brainctl.errors import Problem
from brainlaned.wire import Exit
from tests.unit.brainctl.scripted import ScriptedLane, answered, hang_up, http, refused, sse, stream

FOREVER = float("inf")


def job_of(status: str, **more: Any) -> dict[str, Any]:
    final = status in {"done", "failed", "cancelled"}
    return {"id": 1, "status": status, "final": final, "waiting": None, "position": None, **more}


QUEUED, DONE = answered(job_of("queued")), answered(job_of("done"))


@pytest.mark.parametrize(
    ("status", "exit_status"),
    [("done", Exit.OK), ("failed", Exit.FAILED), ("held", Exit.HELD), ("cancelled", Exit.CANCELLED)],
)
def test_a_settled_job_is_not_waited_for(scripted: ScriptedLane, status: str, exit_status: Exit) -> None:
    scripted.script(answered(job_of(status)))
    waited = wait.until_settled(Lane(scripted.path), 1, FOREVER)
    assert (waited.exit_status, scripted.targets) == (exit_status, ["GET /v1/jobs/1"])


def test_a_lane_that_goes_away_while_one_waits_is_asked_again(scripted: ScriptedLane) -> None:
    scripted.script(QUEUED, hang_up, hang_up, refused("busy", 503), DONE)
    assert wait.until_settled(Lane(scripted.path), 1, FOREVER).exit_status is Exit.OK
    assert scripted.targets[-1] == "GET /v1/jobs/1?wait=30"


def test_a_lane_that_is_away_at_the_first_question_is_told_of_at_once(scripted: ScriptedLane) -> None:
    scripted.script(hang_up)
    with pytest.raises(Problem):
        wait.until_settled(Lane(scripted.path), 1, FOREVER)


def test_an_outage_is_borne_only_so_long(scripted: ScriptedLane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "OUTAGE_S", 1.0)
    scripted.script(QUEUED, hang_up)
    started = time.monotonic()
    with pytest.raises(Problem):
        wait.until_settled(Lane(scripted.path), 1, FOREVER)
    assert 1 <= time.monotonic() - started < 10


def test_a_refusal_is_not_borne_at_all(scripted: ScriptedLane) -> None:
    scripted.script(QUEUED, refused("forbidden", 403))
    with pytest.raises(Problem):
        wait.until_settled(Lane(scripted.path), 1, FOREVER)
    assert scripted.connections == 2


def test_the_deadline_ends_the_waiting_and_says_where_the_job_stands(scripted: ScriptedLane) -> None:
    scripted.script(QUEUED)
    waited = wait.until_settled(Lane(scripted.path), 1, time.monotonic() + 0.2)
    assert (waited.exit_status, waited.job["status"]) == (Exit.WAITED_LONG_ENOUGH, "queued")
    assert all(0 < float(target.partition("wait=")[2] or 0.1) <= 0.2 for target in scripted.targets)


def test_a_lane_that_lets_its_waiters_go_is_not_asked_in_a_rush(scripted: ScriptedLane) -> None:
    scripted.script(QUEUED)
    wait.until_settled(Lane(scripted.path), 1, time.monotonic() + 1.2)
    assert scripted.connections <= 5


def follow(lane: ScriptedLane, deadline: float = FOREVER) -> tuple[str, wait.Waited]:
    heard: list[str] = []
    waited = wait.follow(Lane(lane.path), 1, deadline, heard.append)
    return "".join(heard), waited


def text(words: str, end: int) -> bytes:
    return sse("text", {"text": words}, end)


def test_text_is_passed_on_as_it_comes_and_the_end_is_the_job(scripted: ScriptedLane) -> None:
    end = sse("end", job_of("held"))
    scripted.script(QUEUED, stream(b": hello\n\n", text("né ", 3), text("好", 4), sse("news", {}), end))
    heard, waited = follow(scripted)
    assert (heard, waited.exit_status) == ("né 好", Exit.HELD)


def test_a_broken_stream_is_taken_up_where_it_broke(scripted: ScriptedLane) -> None:
    broken = stream(text("ab", 2)).removesuffix(b"0\r\n\r\n")
    ended_early = stream(text("c", 3))
    scripted.script(QUEUED, broken, hang_up, ended_early, stream(text("d", 4), sse("end", job_of("done"))))
    assert follow(scripted)[0] == "abcd"
    assert [target.partition("?")[2] for target in scripted.targets[1:]] == ["from=0", "from=2", "from=3"]


def test_a_new_attempt_is_followed_from_its_beginning(
    scripted: ScriptedLane, capsys: pytest.CaptureFixture[str]
) -> None:
    restart = sse("restart", {"attempt": 2})
    scripted.script(QUEUED, stream(text("ab", 2), restart), stream(text("xyz", 3), sse("end", job_of("done"))))
    assert follow(scripted)[0] == "abxyz"
    assert scripted.targets[-1].endswith("from=0")
    assert capsys.readouterr().err == "brainctl: attempt 2 begins: the text starts again\n"


def test_without_a_stream_the_whole_text_comes_at_the_end(scripted: ScriptedLane) -> None:
    scripted.script(QUEUED, refused("no-such-path", 404), QUEUED, DONE, http(200, "né".encode()))
    heard, waited = follow(scripted)
    assert (heard, waited.exit_status) == ("né", Exit.OK)


def test_following_ends_at_its_deadline_though_the_stream_is_silent(scripted: ScriptedLane) -> None:
    def silent(connection: Any) -> None:
        connection.sendall(stream().removesuffix(b"0\r\n\r\n"))
        time.sleep(3)

    scripted.script(QUEUED, silent, QUEUED)
    started = time.monotonic()
    assert follow(scripted, started + 0.5)[1].exit_status is Exit.WAITED_LONG_ENOUGH
    assert time.monotonic() - started < 6
