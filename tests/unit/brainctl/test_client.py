"""Which requests are made, when one is made again, and what is known of one that stays unanswered."""

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brainctl.client import Event, Lane, _events
from brainctl.errors import Problem
from brainlaned.wire import ErrorKind, Exit
from tests.unit.brainctl.scripted import ScriptedLane, answered, hang_up, http, read_request, refused, sse, stream

SUBMISSION = {"request": {"messages": []}, "key": "k"}


def problem_of(lane: Lane, verb: str = "status") -> Problem:
    with pytest.raises(Problem) as raised:
        lane.submit(SUBMISSION) if verb == "submit" else lane.cancel(1) if verb == "cancel" else lane.status()
    return raised.value


def test_each_verb_asks_for_its_path(scripted: ScriptedLane) -> None:
    scripted.script(answered({}))
    lane = Lane(scripted.path)
    lane.submit(SUBMISSION)
    lane.list(status="held", label="a=b c", route=None, limit=5, after="9")
    lane.list()
    lane.show(1)
    lane.wait(1, 2.5)
    lane.output(1)
    lane.output(1, partial=True)
    lane.response(1)
    lane.cancel(1)
    lane.retry(1, 2)
    lane.recover(1, {"action": "fail", "attempt": 2})
    lane.status()
    lane.pause(None)
    lane.pause("why")
    lane.resume(None)
    lane.resume("r")
    assert scripted.targets == [
        "POST /v1/jobs",
        "GET /v1/jobs?status=held&label=a%3Db+c&limit=5&after=9",
        "GET /v1/jobs",
        "GET /v1/jobs/1",
        "GET /v1/jobs/1?wait=2.5",
        "GET /v1/jobs/1/output",
        "GET /v1/jobs/1/output?partial=1",
        "GET /v1/jobs/1/response",
        "POST /v1/jobs/1/cancel",
        "POST /v1/jobs/1/retry",
        "POST /v1/jobs/1/recover",
        "GET /v1/status",
        "POST /v1/lane/pause",
        "POST /v1/lane/pause",
        "POST /v1/lane/resume",
        "POST /v1/lane/resume",
    ]
    sent = [json.loads(body) for _, _, body in (r.partition(b"\r\n\r\n") for r in scripted.requests) if body]
    assert sent == [
        SUBMISSION,
        {},
        {"attempt": 2},
        {"action": "fail", "attempt": 2},
        {},
        {"reason": "why"},
        {},
        {"route": "r"},
    ]


def test_a_lost_answer_to_a_submit_is_asked_for_again_once_with_the_same_key(scripted: ScriptedLane) -> None:
    seen: list[bytes] = []

    def lose(connection: socket.socket) -> None:
        seen.append(read_request(connection))

    scripted.script(lose, answered({"id": 7, "replayed": True}, 201))
    assert Lane(scripted.path).submit(SUBMISSION).object()["id"] == 7
    assert seen == scripted.requests


def test_a_submit_that_is_lost_twice_may_have_been_stored(scripted: ScriptedLane) -> None:
    scripted.script(hang_up)
    problem = problem_of(Lane(scripted.path), "submit")
    assert (problem.kind, problem.maybe_done, problem.retry_safe) == (ErrorKind.NO_ANSWER, True, True)
    assert scripted.connections == 2


def test_what_a_first_try_may_have_done_no_later_refusal_takes_back(scripted: ScriptedLane) -> None:
    scripted.script(hang_up, refused("queue-full", 429))
    problem = problem_of(Lane(scripted.path), "submit")
    assert (problem.kind, problem.maybe_done) == ("queue-full", True)


def test_a_request_that_was_not_taken_whole_has_stored_nothing(scripted: ScriptedLane) -> None:
    scripted.script(lambda connection: connection.shutdown(socket.SHUT_RD))
    with pytest.raises(Problem) as raised:
        Lane(scripted.path).submit({"request": "x" * 5_000_000})  # more than the kernel takes for somebody who is gone
    problem = raised.value
    assert (problem.kind, problem.maybe_done) == (ErrorKind.NO_ANSWER, False)


@pytest.mark.parametrize("kind", ["busy", "outcome-unknown"])
def test_a_refusal_that_may_be_over_in_a_moment_is_asked_about_once_more(scripted: ScriptedLane, kind: str) -> None:
    scripted.script(refused(kind, 503, retry_safe=True), answered({"id": 1}, 201))
    assert Lane(scripted.path).submit(SUBMISSION).object()["id"] == 1
    scripted.script(refused(kind, 503, retry_safe=False), answered({"id": 1}, 201))
    problem = problem_of(Lane(scripted.path), "submit")
    assert (problem.kind, problem.maybe_done) == (kind, kind == "outcome-unknown")


def test_a_change_is_never_sent_twice(scripted: ScriptedLane) -> None:
    scripted.script(hang_up)
    assert problem_of(Lane(scripted.path), "cancel").maybe_done
    assert scripted.connections == 1


def test_a_lane_that_accepts_and_says_nothing_is_given_up_in_time(scripted: ScriptedLane) -> None:
    done = threading.Event()
    scripted.script(lambda connection: done.wait(20) and None)
    started = time.monotonic()
    problem = problem_of(Lane(scripted.path, answer_within_s=0.5), "submit")
    assert time.monotonic() - started < 3
    assert (problem.kind, problem.maybe_done, problem.exit_status) == (ErrorKind.NO_ANSWER, True, Exit.NO_LANE)
    done.set()


def test_a_missing_socket_a_dead_one_and_a_file_are_told_apart(tmp_path: Path) -> None:
    missing = problem_of(Lane(str(tmp_path / "missing")))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    refused_ = problem_of(Lane(str(tmp_path / "dead")))
    (tmp_path / "file").touch()
    file = problem_of(Lane(str(tmp_path / "file")))
    below = problem_of(Lane(str(tmp_path / "file" / "s")))
    found = [(each.kind, each.exit_status) for each in (missing, refused_, file, below)]
    assert found == [("no-socket", 9), ("dead-socket", 9), ("not-a-lane", 9), ("no-socket", 9)]
    assert len({each.line for each in (missing, refused_, file)}) == 3


@pytest.mark.parametrize(
    "answer", [http(200, b"{}", protocol=None), b"SSH-2.0-OpenSSH\r\n", http(200, b"{}", protocol="2")]
)
def test_what_speaks_another_protocol_is_not_a_lane(scripted: ScriptedLane, answer: bytes) -> None:
    scripted.script(answer)
    assert problem_of(Lane(scripted.path)).kind == ErrorKind.NOT_A_LANE


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": 1}', b'{"error": {"kind": "x"}}', b"[" * 100_000])
def test_an_error_without_an_error_object_is_the_lanes_fault(scripted: ScriptedLane, body: bytes) -> None:
    scripted.script(http(500, body))
    assert problem_of(Lane(scripted.path)).kind == ErrorKind.INTERNAL


def test_a_kind_of_a_newer_lane_still_has_a_line_and_an_exit_status(scripted: ScriptedLane) -> None:
    scripted.script(refused("no-such-thing-yet", 418))
    problem = problem_of(Lane(scripted.path))
    assert (problem.kind, problem.exit_status) == ("no-such-thing-yet", Exit.INTERNAL)


def test_a_socket_path_of_107_bytes_works_and_one_of_108_is_refused_by_name(tmp_path: Path) -> None:
    room = 107 - len(os.fsencode(tmp_path)) - 1
    for length, kind in ((room, ErrorKind.NO_SOCKET), (room + 1, ErrorKind.USAGE)):
        with pytest.raises(Problem) as raised:
            Lane(str(tmp_path / ("x" * length))).status()
        assert raised.value.kind == kind
    assert "108 bytes" in raised.value.line and "107" in raised.value.line and str(tmp_path) in raised.value.line
    with pytest.raises(Problem, match="125 bytes"):
        Lane("/run/" + "é" * 60)


EVENTS = [Event("text", "5", '{"text": "a\u2028b"}'), Event("restart", "5", "{}"), Event("end", "5", '{"id": 1}')]
SPOKEN = ': hello\nid: 5\nevent: text\ndata: {"text": "a\u2028b"}\n\n: still here\n\nevent: restart\r\ndata: {}\r\n\r\n'
SPOKEN += 'event:end\ndata:{"id": 1}\n\ndata: unfinished\n'


@given(st.sets(st.integers(1, 150)))
def test_events_are_the_same_however_the_stream_is_cut(cuts: set[int]) -> None:
    data = SPOKEN.encode()
    places = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    assert list(_events(data[a:b] for a, b in zip(places, places[1:], strict=False))) == EVENTS  # noqa: RUF007


def test_a_stream_that_breaks_off_is_a_problem_and_not_an_end(scripted: ScriptedLane) -> None:
    scripted.script(stream(sse("text", {"text": "a"}, 1)).removesuffix(b"0\r\n\r\n"))
    events = Lane(scripted.path).stream(1, "0")
    assert next(events).name == "text"
    with pytest.raises(Problem) as raised:
        next(events)
    assert raised.value.kind == ErrorKind.NO_ANSWER
