"""The socket as its clients see it: waiting, lists, one job and its output, streams, and what is said to a mistake."""

import http.client
import json
import os
import pwd
import re
import resource
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from brainlaned import api, waiters
from brainlaned.wire import PROTOCOL, PROTOCOL_HEADER
from tests.brainserver import BrainServer, Step, answer, cut, head, raw, status, stream_then_error
from tests.lane import Answer, Lane, wait_until

ATTEMPT_FIELDS = {
    *("attempt", "status", "reason", "detail", "route", "model", "endpoint", "run", "may_run_twice"),
    *("started_at", "armed_at", "sent_at", "send_failed_at", "headers_at", "http_status", "exit_status", "upstream_id"),
    *("first_byte_at", "ended_at", "finish_reason", "flags", "usage", "part_bytes", "billed"),
}
PATIENCE_S = 25
"""Less than any wait in these tests, so that who is not woken is not answered in time."""

STREAM_PATIENCE_S = 12
"""Less than the time after which a silent stream says that it is still there, and looks again."""

MIB = 2**20

NO_JOBS = ["0", "-1", "abc", str(10**30), "999999", "1.0", "%EF%BC%91", "1%00"]


def done(lane: Lane, prompt: str = "hello", **fields: Any) -> dict[str, Any]:
    """Submit a job and return it done."""
    job = lane.wait(lane.submit(prompt, **fields)["id"])
    assert job["status"] == "done", job
    return job


def is_error(answered: Answer, status: int, kind: str, field: str | None = None) -> bool:
    """Check an answer that says no: its status, kind and field, and the shape that all of them have."""
    assert answered.status == status, answered.body
    assert set(answered.json) == {"error"}
    error = answered.error
    assert set(error) == {"kind", "message", "next_action", "retry_safe"} | ({"field"} if field else set())
    assert isinstance(error["retry_safe"], bool)
    assert error["next_action"]
    assert error["message"].startswith("cannot ")
    assert answered.headers[PROTOCOL_HEADER] == PROTOCOL
    return (error["kind"], error.get("field")) == (kind, field)


# Waiting


def test_a_wait_ends_when_the_job_is_final(shared_lane: Lane, shared_server: BrainServer) -> None:
    held = shared_server.hold()
    shared_server.script(held)
    job = shared_lane.submit()
    with asked(shared_lane, f"/v1/jobs/{job['id']}?wait=60") as client:
        assert held.arrived.wait(20)
        held.release()
        shown = answer_on(client).json
    assert (shown["status"], shown["final"]) == ("done", True)
    assert shown["attempts"][0]["status"] == "succeeded"


def test_a_wait_ends_when_the_job_is_held(shared_lane: Lane, shared_server: BrainServer) -> None:
    shared_server.script(cut(300))
    shown = shared_lane.get(f"/v1/jobs/{shared_lane.submit()['id']}?wait=60", timeout_s=PATIENCE_S).json
    assert (shown["status"], shown["reason"], shown["final"]) == ("held", "answer-incomplete", False)


def test_a_wait_that_has_lasted_long_enough_answers_with_what_is(shared_lane: Lane, shared_server: BrainServer) -> None:
    held = shared_server.hold()
    shared_server.script(held)
    job = shared_lane.submit()
    assert held.arrived.wait(20)
    began = time.monotonic()
    shown = shared_lane.get(f"/v1/jobs/{job['id']}?wait=0.5").json
    assert time.monotonic() - began >= 0.5
    assert shown["status"] == "running"
    assert shared_lane.get(f"/v1/jobs/{job['id']}?wait=0").json["status"] == "running"


@pytest.mark.parametrize("wait", ["61", "nan", "-1", "inf", "", "ten", "60.001"])
def test_a_wait_out_of_bounds_is_refused(shared_lane: Lane, wait: str) -> None:
    job = shared_lane.submit()
    assert is_error(shared_lane.get(f"/v1/jobs/{job['id']}?wait={wait}"), 422, "invalid", "wait")


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for thousands of connections, in this process and in the daemons that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"only {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_waiting_clients_hold_no_thread_and_all_are_answered(
    many_files: None, make_lane: Any, server: BrainServer
) -> None:
    lane = make_lane()
    held = server.hold()
    server.script(held)
    job = lane.submit()
    assert held.arrived.wait(20)
    threads = count_of_threads(lane)
    with ExitStack() as stack:
        clients = [stack.enter_context(asked(lane, f"/v1/jobs/{job['id']}?wait=30")) for _ in range(1000)]
        # Connections are taken in order, so all thousand wait once this one, the last, has had its answer.
        assert lane.get(f"/v1/jobs/{job['id']}?wait=0.1").json["status"] == "running"
        assert count_of_threads(lane) <= threads + api.READERS
        held.release()
        assert {answer_on(client).json["status"] for client in clients} == {"done"}


def test_a_waiter_too_many_is_turned_away_until_others_have_left(
    many_files: None, make_lane: Any, server: BrainServer
) -> None:
    lane = make_lane()
    held = server.hold()
    server.script(held)
    job = lane.submit()
    with ExitStack() as stack:
        for _ in range(waiters.MOST):
            stack.enter_context(asked(lane, f"/v1/jobs/{job['id']}?wait=60"))
        turned_away = lane.get(f"/v1/jobs/{job['id']}?wait=1")
        assert is_error(turned_away, 429, "too-many-waiters")
        assert turned_away.error["retry_safe"]
        follower = stack.enter_context(asked(lane, f"/v1/jobs/{job['id']}/stream"))
        assert stack.enter_context(begun(follower)).status == 429
        assert lane.get(f"/v1/jobs/{job['id']}").json["status"] == "running"
    deadline = time.monotonic() + 10
    while lane.get(f"/v1/jobs/{job['id']}?wait=0.01").status != 200:
        assert time.monotonic() < deadline, "clients that hung up are still counted"
        time.sleep(0.1)  # for the daemon to notice that they left


@contextmanager
def asked(lane: Lane, path: str) -> Iterator[socket.socket]:
    """A connection on which somebody has asked for something, and has not read the answer yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(PATIENCE_S)
        client.connect(os.fspath(lane.socket))
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: lane\r\nConnection: close\r\n\r\n".encode())
        yield client


def begun(client: socket.socket) -> http.client.HTTPResponse:
    """The answer on such a connection, as far as its head."""
    response = http.client.HTTPResponse(client)
    response.begin()
    return response


def answer_on(client: socket.socket) -> Answer:
    with begun(client) as response:
        return Answer(response.status, response.headers, response.read())


def count_of_threads(lane: Lane) -> int:
    assert lane.process is not None
    return len(list(Path(f"/proc/{lane.process.pid}/task").iterdir()))


# Lists


@pytest.fixture
def seven(shared_lane: Lane, request: pytest.FixtureRequest) -> list[int]:
    """The ids of seven queued jobs, newest first, labelled with this test; every other one is of the route `other`."""
    shared_lane.post("/v1/lane/pause")
    ids = []
    for number in range(7):
        labels = {"test": request.node.name, "number": str(number)}
        job = shared_lane.submit(f"{number}", labels=labels, route="local" if number % 2 else "other")
        ids.insert(0, job["id"])
    return ids


def listed(lane: Lane, query: str) -> list[int]:
    answered = lane.get(f"/v1/jobs?{query}")
    assert answered.status == 200, answered.body
    return [job["id"] for job in answered.json["jobs"]]


def test_a_list_is_newest_first_and_can_be_filtered(
    shared_lane: Lane, seven: list[int], request: pytest.FixtureRequest
) -> None:
    mine = f"label=test={request.node.name}"
    assert listed(shared_lane, mine) == seven
    assert listed(shared_lane, f"{mine}&route=other") == seven[::2]
    assert listed(shared_lane, f"{mine}&route=local") == seven[1::2]
    assert listed(shared_lane, f"{mine}&route=nowhere") == []
    assert listed(shared_lane, "label=number=3&limit=1") == [seven[3]]
    assert listed(shared_lane, f"{mine}&status=done") == []
    shared_lane.post(f"/v1/jobs/{seven[2]}/cancel")
    assert listed(shared_lane, f"{mine}&status=cancelled") == [seven[2]]
    assert listed(shared_lane, f"{mine}&status=queued") == [job for job in seven if job != seven[2]]
    assert listed(shared_lane, "limit=3") == seven[:3]


def test_a_listed_job_is_the_job_object_without_attempts_and_output(shared_lane: Lane) -> None:
    job = done(shared_lane)
    entry = shared_lane.get("/v1/jobs?limit=1").json["jobs"][0]
    assert entry == {name: value for name, value in job.items() if name not in {"attempts", "decisions"}}
    assert entry["attempt_count"] == 1


def test_a_walk_through_the_list_neither_misses_nor_repeats_a_job(
    shared_lane: Lane, seven: list[int], request: pytest.FixtureRequest
) -> None:
    query = f"label=test={request.node.name}&limit=2"
    walked: list[int] = []
    cursor: int | None = 2**53
    while cursor is not None:
        page = shared_lane.get(f"/v1/jobs?{query}&after={cursor}").json
        assert len(page["jobs"]) <= 2
        walked += [job["id"] for job in page["jobs"]]
        cursor = page["next"]
        shared_lane.submit("in the middle of the walk", labels={"test": request.node.name})
    assert walked == seven


def test_the_last_page_says_that_nothing_follows(shared_lane: Lane, seven: list[int]) -> None:
    assert shared_lane.get("/v1/jobs?limit=500").json["next"] is None
    assert shared_lane.get(f"/v1/jobs?limit=1&after={seven[5]}").json["next"] == seven[6]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        *[(f"limit={limit}", "limit") for limit in ("0", "501", "-1", "1.5", "x", "", "%EF%BC%91")],
        *[(f"after={after}", "after") for after in ("0", "-1", "x", "", "9" * 30)],
        *[(f"status={status}", "status") for status in ("bogus", "DONE", "")],
        *[(f"label={label}", "label") for label in ("", "number")],
        ("bogus=1", "bogus"),
        ("Limit=1", "Limit"),
        ("limit=1&wait=3", "wait"),
    ],
)
def test_a_list_with_a_bad_parameter_is_refused(shared_lane: Lane, query: str, field: str) -> None:
    refused = shared_lane.get(f"/v1/jobs?{query}")
    assert is_error(refused, 422, "invalid", field)
    assert f"'{field}'" in refused.error["message"]


# One job


def test_a_job_shows_the_evidence_of_its_attempt(shared_lane: Lane, shared_server: BrainServer) -> None:
    shared_server.script(answer("the answer", headers={"x-request-id": "upstream-1"}))
    job = done(shared_lane, "evidence", labels={"a": "b"}, key="evidence")
    (attempt,) = job["attempts"]
    assert set(attempt) == ATTEMPT_FIELDS
    marks = [attempt[name] for name in ("started_at", "armed_at", "sent_at", "headers_at", "first_byte_at", "ended_at")]
    assert marks == sorted(marks)
    assert attempt["send_failed_at"] is None
    assert (attempt["attempt"], attempt["status"], attempt["reason"]) == (1, "succeeded", "answered")
    assert (attempt["http_status"], attempt["upstream_id"], attempt["billed"]) == (200, "upstream-1", "yes")
    assert (attempt["route"], attempt["model"], attempt["endpoint"]) == ("local", "test-model", shared_server.base_url)
    assert shared_server.requests[0].headers["x-request-id"] == f"{job['id']}-1"
    assert (job["labels"], job["key"], job["usage"]["completion_tokens"]) == ({"a": "b"}, "evidence", 2)
    assert (job["waiting"], job["next_action"]) == (None, f"brainctl output {job['id']}")


@pytest.mark.parametrize("text", ["né 好 🌍", "\x00", "a\x00b\x1b[1mc\uffff", "two\nlines", "kept\n", "\ufeffmark"])
def test_an_output_is_the_answer_byte_for_byte(shared_lane: Lane, shared_server: BrainServer, text: str) -> None:
    shared_server.script(answer(tokens=list(text)))
    job = done(shared_lane, text)
    output = shared_lane.get(f"/v1/jobs/{job['id']}/output")
    assert output.headers["content-type"] == "text/plain; charset=utf-8"
    assert output.body == text.encode()
    assert shared_lane.get(f"/v1/jobs/{job['id']}/output?partial=1").body == text.encode()
    assert shared_server.requests[0].prompt == text


def test_a_response_is_a_completion_object(shared_lane: Lane, shared_server: BrainServer) -> None:
    shared_server.script(answer("né 好 🌍"))
    document = shared_lane.get(f"/v1/jobs/{done(shared_lane)['id']}/response").json
    assert document["object"] == "chat.completion"
    (choice,) = document["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "né 好 🌍"
    assert document["usage"]["total_tokens"] == 4


@pytest.mark.parametrize("what", ["output", "output?partial=1", "response"])
def test_what_is_not_there_yet_is_refused(shared_lane: Lane, what: str) -> None:
    shared_lane.post("/v1/lane/pause")
    job = shared_lane.submit()
    refused = shared_lane.get(f"/v1/jobs/{job['id']}/{what}")
    assert is_error(refused, 409, "no-output")
    assert refused.error["next_action"] == f"brainctl show {job['id']}"
    assert refused.error["retry_safe"]


@pytest.mark.parametrize("job_id", NO_JOBS)
@pytest.mark.parametrize(
    ("method", "rest"),
    [
        ("GET", ""),
        ("GET", "?wait=1"),
        ("GET", "/output"),
        ("GET", "/response"),
        ("GET", "/stream"),
        ("POST", "/cancel"),
    ],
)
def test_there_is_no_such_job(shared_lane: Lane, method: str, rest: str, job_id: str) -> None:
    body = {} if method == "POST" else None
    assert is_error(shared_lane.ask(method, f"/v1/jobs/{job_id}{rest}", body), 404, "no-such-job")


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/bogus", "/v1/jobs/", "/v1/jobs/1/bogus", "/v2/jobs", "//v1/jobs"])
def test_there_is_no_such_path(shared_lane: Lane, path: str) -> None:
    assert is_error(shared_lane.get(path), 404, "no-such-path")
    assert is_error(shared_lane.post(path), 404, "no-such-path")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *[("DELETE", path) for path in ("/v1/jobs", "/v1/jobs/1", "/v1/status")],
        *[("PUT", path) for path in ("/v1/jobs", "/v1/jobs/1")],
        *[("POST", path) for path in ("/v1/jobs/1", "/v1/status", "/v1/jobs/1/output")],
        *[("GET", path) for path in ("/v1/lane/pause", "/v1/lane/resume", "/v1/jobs/1/cancel")],
    ],
)
def test_a_wrong_method_is_refused(shared_lane: Lane, method: str, path: str) -> None:
    assert is_error(shared_lane.ask(method, path), 405, "wrong-method")
    assert shared_lane.ask(method, path).headers["Allow"]


def test_every_answer_carries_the_protocol(shared_lane: Lane) -> None:
    job = done(shared_lane)
    for method, path, _, _ in api.TABLE:
        answered = shared_lane.ask(method, path.replace("{id}", str(job["id"])), {} if method == "POST" else None)
        assert answered.headers[PROTOCOL_HEADER] == PROTOCOL, path


def test_the_status_tells_the_lane_at_a_glance(shared_lane: Lane, shared_server: BrainServer) -> None:
    before = shared_lane.get("/v1/status").json["counts"]
    held = shared_server.hold()
    shared_server.script(held)
    running, queued = shared_lane.submit("first"), shared_lane.submit("second", route="other")
    assert held.arrived.wait(20)
    shown = shared_lane.get("/v1/status").json
    assert shown["running"]["id"] == running["id"]
    assert shown["oldest_queued"]["id"] == queued["id"]
    assert [(route["route"], route["open"], route["queued"]) for route in shown["routes"]] == [
        ("local", True, 0),
        ("other", True, 1),
    ]
    assert {name: count - before[name] for name, count in shown["counts"].items() if count != before[name]} == {
        "running": 1,
        "queued": 1,
    }
    assert (shown["lane"]["state"], shown["lane"]["answer_waiting"], shown["last_run"]) == ("open", False, None)


# Streams


class Stream:
    """Server-sent events of a job, read as they arrive."""

    def __init__(self, lane: Lane, job_id: int, query: str = "") -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(STREAM_PATIENCE_S)
        self._socket.connect(os.fspath(lane.socket))
        self._socket.sendall(f"GET /v1/jobs/{job_id}/stream{query} HTTP/1.1\r\nHost: lane\r\n\r\n".encode())
        self._response = http.client.HTTPResponse(self._socket)

    def __enter__(self) -> "Stream":
        self._response.begin()
        assert self._response.status == 200
        assert (self._response.headers["content-type"] or "").startswith("text/event-stream")
        assert self._response.headers[PROTOCOL_HEADER] == PROTOCOL
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()
        self._socket.close()

    def __iter__(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (event, id, data)."""
        fields: dict[str, str] = {}
        while line := self._response.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if line != b"\n":
                fields[name] = value
            elif "event" in fields:
                yield fields["event"], fields.get("id", ""), json.loads(fields["data"])
                fields = {}

    def rest(self) -> tuple[str, list[tuple[str, Any]]]:
        """Return all text that is left, joined, and the events that are not text."""
        events = list(self)
        texts = [data["text"] for name, _, data in events if name == "text"]
        return "".join(texts), [(name, data) for name, _, data in events if name != "text"]


def test_a_stream_brings_text_before_the_answer_is_complete_and_then_the_end(
    shared_lane: Lane, shared_server: BrainServer, halting: Any
) -> None:
    step, held = halting(shared_server, "né 好 ", "🌍 done")
    shared_server.script(step)
    job = shared_lane.submit()
    with Stream(shared_lane, job["id"]) as stream:
        assert next(iter(stream)) == ("text", "1-5", {"text": "né 好 "})
        assert shared_lane.get(f"/v1/jobs/{job['id']}").json["status"] == "running"
        held.release()
        text, others = stream.rest()
    assert text == "🌍 done"
    ((name, ended),) = others
    assert name == "end"
    assert (ended["id"], ended["status"], ended["final"]) == (job["id"], "done", True)


def test_a_stream_taken_up_again_misses_nothing_and_repeats_nothing(
    shared_lane: Lane, shared_server: BrainServer, halting: Any
) -> None:
    step, held = halting(shared_server, "né 好 🌍 ", "and the rest")
    shared_server.script(step)
    job = shared_lane.submit()
    with Stream(shared_lane, job["id"]) as stream:
        _, position, first = next(iter(stream))
    attempt, _, character = position.partition("-")
    for start in (f"{attempt}-{int(character) - 2}", int(character) - 2):
        with Stream(shared_lane, job["id"], f"?from={start}") as stream:
            assert next(iter(stream)) == ("text", position, {"text": first["text"][-2:]})
    with Stream(shared_lane, job["id"], f"?from={position}") as running:
        held.release()
        assert running.rest()[0] == "and the rest"
    with Stream(shared_lane, job["id"], f"?from={position}") as afterwards:
        assert afterwards.rest()[0] == "and the rest"
    with Stream(shared_lane, job["id"], "?from=1000") as beyond:
        text, others = beyond.rest()
    assert (text, [name for name, _ in others]) == ("", ["end"])


def test_a_stream_taken_up_again_after_another_attempt_has_begun_says_so_and_starts_anew(
    shared_lane: Lane, shared_server: BrainServer
) -> None:
    shared_server.script(stream_then_error(["first ", "try"]), answer("second try"))
    job = shared_lane.submit()
    assert shared_lane.wait(job["id"])["status"] == "held"
    with Stream(shared_lane, job["id"]) as stream:
        _, position, _ = next(iter(stream))
    shared_lane.post(f"/v1/jobs/{job['id']}/recover", {"action": "resend"})
    shared_lane.wait(job["id"])
    with Stream(shared_lane, job["id"], f"?from={position}") as stream:
        assert next(iter(stream))[0::2] == ("restart", {"attempt": 2})
        assert stream.rest()[0] == "second try"


def test_a_stream_of_a_finished_job_is_its_text_and_the_end(shared_lane: Lane, shared_server: BrainServer) -> None:
    shared_server.script(answer("all\nof it"))
    job = done(shared_lane)
    with Stream(shared_lane, job["id"]) as stream:
        text, others = stream.rest()
    assert text == "all\nof it"
    assert [name for name, _ in others] == ["end"]


def test_a_stream_of_a_job_that_never_ran_ends_with_it(shared_lane: Lane) -> None:
    shared_lane.post("/v1/lane/pause")
    job = shared_lane.submit()
    with Stream(shared_lane, job["id"]) as stream:
        shared_lane.post(f"/v1/jobs/{job['id']}/cancel")
        text, ((name, ended),) = stream.rest()
    assert (text, name, ended["status"]) == ("", "end", "cancelled")


def test_a_reader_that_does_not_read_holds_up_nobody(shared_lane: Lane, shared_server: BrainServer) -> None:
    words = [f"{number:07d} " * 1000 for number in range(500)]  # 4 MB, more than any buffer between us holds
    shared_server.script(answer(tokens=words, gap_s=0.001))
    job = shared_lane.submit()
    with Stream(shared_lane, job["id"]) as stream:
        _, _, first = next(iter(stream))
        assert shared_lane.wait(job["id"])["status"] == "done"
        done(shared_lane, "the next one")
        text, others = stream.rest()
    assert first["text"] + text == "".join(words)
    assert [name for name, _ in others] == ["end"]


@pytest.mark.parametrize(
    ("query", "field"), [*((f"from={start}", "from") for start in ("-1", "x", "1-", "1-2-3")), ("form=1", "form")]
)
def test_a_stream_with_a_bad_parameter_is_refused(shared_lane: Lane, query: str, field: str) -> None:
    job = done(shared_lane)
    assert is_error(shared_lane.get(f"/v1/jobs/{job['id']}/stream?{query}"), 422, "invalid", field)


# What is long


@pytest.fixture
def long_output(shared_lane: Lane) -> Any:
    """Write an output by hand, as long as no brain would answer in the time of a test, beside fifty other jobs."""
    shared_lane.post("/v1/lane/pause")
    ids = [shared_lane.submit(f"{number}")["id"] for number in range(50)]
    for job_id in ids:
        shared_lane.post(f"/v1/jobs/{job_id}/cancel")

    def write(mebibytes: int) -> int:
        with closing(sqlite3.connect(shared_lane.database, timeout=60)) as foreign, foreign:
            foreign.execute("delete from job_outputs where job_id = ?", [ids[0]])
            foreign.execute(
                "insert into job_outputs values (?, cast(zeroblob(?) as text), null)", [ids[0], mebibytes * MIB]
            )
        return ids[0]

    yield write
    with closing(sqlite3.connect(shared_lane.database, timeout=60)) as foreign, foreign:
        foreign.execute("delete from job_outputs where job_id = ?", [ids[0]])


def memory_of(lane: Lane) -> int:
    """Return the bytes that the daemon has in memory, at the most it ever had (VmHWM in proc_pid_status(5))."""
    assert lane.process is not None
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{lane.process.pid}/status").read_text())
    return int(line) * 1024


def forget_the_most(lane: Lane) -> None:
    assert lane.process is not None
    Path(f"/proc/{lane.process.pid}/clear_refs").write_text("5")  # VmHWM begins anew


def test_a_list_beside_a_very_long_output_takes_no_memory_for_it(shared_lane: Lane, long_output: Any) -> None:
    long_output(300)
    shared_lane.get("/v1/jobs?limit=50")
    forget_the_most(shared_lane)
    before = memory_of(shared_lane)
    assert len(shared_lane.get("/v1/jobs?limit=50").json["jobs"]) == 50
    assert shared_lane.get("/v1/status").status == 200
    assert memory_of(shared_lane) - before < 20 * MIB


def test_a_long_output_is_sent_piece_by_piece_and_takes_no_memory_either(shared_lane: Lane, long_output: Any) -> None:
    job_id = long_output(32)
    shared_lane.get("/v1/jobs?limit=50")
    forget_the_most(shared_lane)
    before = memory_of(shared_lane)
    answered = shared_lane.get(f"/v1/jobs/{job_id}/output")
    assert (answered.headers["content-length"], len(answered.body)) == (str(32 * MIB), 32 * MIB)
    assert memory_of(shared_lane) - before < 16 * MIB


# Who may do what


ASKING = """
import os, socket, sys
sent = sys.stdin.buffer.read()
os.setgroups([]), os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
with socket.socket(socket.AF_UNIX) as client:
    client.connect("s")
    print(os.getpid(), flush=True)
    client.sendall(sent)
    while part := client.recv(65536):
        sys.stdout.buffer.write(part)
"""


class People:
    """A lane, and users of this machine who ask it as themselves, in a process that gives up root."""

    ROLES = ("stranger", "observer", "submitter", "other", "reader", "operator")

    def __init__(self, make_lane: Any) -> None:
        taken = {0, os.geteuid()}
        users = [user for user in pwd.getpwall() if user.pw_uid not in taken and user.pw_gid != 0]
        if os.geteuid() != 0 or len(users) < len(self.ROLES):
            pytest.skip("only root can be somebody else, and there must be somebody to be")
        self.named = dict(zip(self.ROLES, users, strict=False))
        named = {
            "observe": ("observer", "reader"),
            "submit": ("submitter", "other"),
            "operate": ("operator",),
            "read": ("reader",),
        }
        lists = "\n".join(
            f"{key} = {json.dumps([self.named[one].pw_name for one in each])}" for key, each in named.items()
        )
        self.lane: Lane = make_lane(more=f"[access]\n{lists}")
        self.lane.directory.chmod(0o711)
        self.lane.socket.chmod(0o666)

    def uid(self, who: str) -> int:
        return self.named[who].pw_uid

    def ask(self, who: str, method: str, path: str, document: Any = None, *, length: int | None = None) -> Answer:
        """Ask as somebody; with `length` so much of a body is promised, and nothing of it sent."""
        body = b"" if document is None or length is not None else json.dumps(document).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: lane\r\nConnection: close\r\nContent-Length: {length or len(body)}"
        done = subprocess.run(
            [sys.executable, "-c", ASKING, str(self.uid(who))],
            input=f"{head}\r\n\r\n".encode() + body,
            cwd=self.lane.directory,
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        )
        pid, _, said = done.stdout.partition(b"\n")
        self.pid = int(pid)
        answer_head, _, answered = said.partition(b"\r\n\r\n")
        first, *fields = answer_head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
        return Answer(int(first.split()[1]), headers, answered)

    def submit(self, who: str) -> dict[str, Any]:
        answered = self.ask(who, "POST", "/v1/jobs", {"request": {"messages": [{"role": "user", "content": "mine"}]}})
        assert answered.status == 201, answered.body
        return answered.json


@pytest.fixture
def people(make_lane: Any) -> People:
    return People(make_lane)


def test_a_stranger_is_refused_before_his_body_is_read_and_the_log_names_him(people: People) -> None:
    for method, path, _, _ in api.TABLE:
        length = 8 * MIB if method == "POST" else None
        refused = people.ask("stranger", method, path.replace("{id}", "1"), length=length)
        assert (refused.status, refused.error["kind"]) == (403, "forbidden"), path
        assert (refused.headers["connection"], people.lane.rows("select * from jobs")) == ("close", [])
    wait_until(lambda: "may not operate" in people.lane.log.read_text())
    first, *others = re.findall(r"refused uid (\d+) pid (\d+), who may not (\w+)", people.lane.log.read_text())
    assert (int(first[0]), first[2]) == (people.uid("stranger"), "submit")
    assert {(int(uid), role) for uid, _, role in others} == {
        (people.uid("stranger"), role) for role in ("observe", "operate")
    }
    people.ask("observer", "POST", "/v1/lane/pause", {})
    line = f"refused uid {people.uid('observer')} pid {people.pid}, who may not operate"
    wait_until(lambda: line in people.lane.log.read_text())


def test_each_user_may_what_his_role_says_and_what_he_changes_carries_his_name(people: People) -> None:
    lane = people.lane
    lane.post("/v1/lane/pause")
    job = people.submit("submitter")
    name = people.named["submitter"].pw_name
    assert job["submitter"] == {"uid": people.uid("submitter"), "user": name, "pid": people.pid}
    own = f"/v1/jobs/{job['id']}"

    for who in ("observer", "reader", "submitter", "other", "operator"):
        assert people.ask(who, "GET", own).status == 200
        assert [each["id"] for each in people.ask(who, "GET", "/v1/jobs").json["jobs"]] == [job["id"]]
    for verb in ("cancel", "retry", "recover", "forget"):
        for who in ("observer", "reader", "other"):
            body = {"action": "fail"} if verb == "recover" else {}
            refused = people.ask(who, "POST", f"{own}/{verb}", body)
            assert (refused.status, refused.error["kind"]) == (403, "forbidden"), (verb, who)
    for who in ("observer", "submitter", "other", "reader"):
        for method, path in (("POST", "/v1/lane/pause"), ("POST", "/v1/lane/resume"), ("GET", "/v1/backup")):
            assert people.ask(who, method, path, {} if method == "POST" else None).status == 403, (who, path)
    assert people.ask("observer", "POST", "/v1/jobs", {}).status == 403
    assert lane.rows("select * from decisions") == []

    assert people.ask("submitter", "POST", f"{own}/cancel", {"reason": "mine"}).json["status"] == "cancelled"
    (decision,) = lane.rows("select action, reason, uid, user_name, pid from decisions")
    assert decision == {
        **{"action": "cancel", "reason": "mine"},
        **{"uid": people.uid("submitter"), "user_name": name, "pid": people.pid},
    }
    second = people.submit("submitter")
    assert people.ask("operator", "POST", f"/v1/jobs/{second['id']}/cancel", {}).json["status"] == "cancelled"
    assert [row["uid"] for row in lane.rows("select uid from decisions order by id")] == [
        people.uid("submitter"),
        people.uid("operator"),
    ]
    assert people.ask("operator", "POST", "/v1/lane/resume", {}).status == 200
    wait_until(lambda: f"lane resumed by uid {people.uid('operator')} pid {people.pid}" in lane.log.read_text())


@pytest.mark.parametrize("what", ["request", "output", "output?partial=1", "response", "stream"])
def test_prompt_and_answer_are_shown_to_their_owner_to_who_operates_and_to_named_readers(
    people: People, what: str
) -> None:
    job = people.submit("submitter")
    people.lane.wait(job["id"])
    path = f"/v1/jobs/{job['id']}/{what}"
    shown = {who: people.ask(who, "GET", path) for who in People.ROLES}
    assert {who: answered.status for who, answered in shown.items()} == {
        **dict.fromkeys(("stranger", "observer", "other"), 403),
        **dict.fromkeys(("submitter", "reader", "operator"), 200),
    }
    word = "mine" if what == "request" else "hello world"
    assert {who for who, answered in shown.items() if word in answered.body.decode()} == {
        *("submitter", "reader", "operator")
    }
    assert people.ask("stranger", "GET", f"/v1/jobs/999/{what}").error["kind"] == "forbidden"


def test_the_prompt_is_shown_as_it_is_asked(shared_lane: Lane, shared_server: BrainServer) -> None:
    job = done(shared_lane, "né 好", request={"temperature": 0.5})
    answered = shared_lane.get(f"/v1/jobs/{job['id']}/request")
    assert answered.headers["content-type"] == "application/json"
    assert answered.json == {"messages": [{"role": "user", "content": "né 好"}], "temperature": 0.5}
    assert job["request_bytes"] == len(answered.body)


# What is forgotten


def files_with(lane: Lane, *words: str) -> set[str]:
    """Return the files of the state in which a word stands, whatever they are."""
    found = set()
    for path in lane.state_dir.rglob("*"):
        with suppress(FileNotFoundError):
            content = path.read_bytes() if path.is_file() else b""
            found |= {path.name for word in words if word.encode() in content}
    return found


ENDINGS: dict[str, tuple[list[Step], str | None]] = {
    "done": ([answer("the SECRET-ANSWER itself")], None),
    "failed, with what the brain said": ([status(400, {"error": {"message": "no SECRET-ANSWER"}})], None),
    "held with a part, then accepted": ([stream_then_error(["half of ", "SECRET-ANSWER "])], "accept"),
    "unreadable twice, then failed": ([raw(head(length=20) + b"<p>SECRET-ANSWER</p>")] * 2, "fail"),
    "unreadable twice, sent again, then done": ([raw(head(length=20) + b"<p>SECRET-ANSWER</p>")] * 2, "resend"),
}


@pytest.mark.parametrize(("steps", "decision"), ENDINGS.values(), ids=ENDINGS)
def test_what_is_forgotten_is_in_no_file_any_more(
    lane: Lane, server: BrainServer, steps: list[Step], decision: str | None
) -> None:
    for number in range(5):
        done(lane, f"before {number}")
    server.script(*steps)
    job_id = lane.wait(lane.submit("the SECRET-PROMPT", key="k")["id"])["id"]
    if decision is not None:
        assert lane.post(f"/v1/jobs/{job_id}/recover", {"action": decision}).status == 200
    ended = lane.wait(job_id)
    assert ended["final"], ended
    for number in range(5):
        done(lane, f"after {number}")
    assert files_with(lane, "SECRET-PROMPT") and files_with(lane, "SECRET-ANSWER")
    forgotten = lane.post(f"/v1/jobs/{job_id}/forget", {"reason": "asked to"})
    assert forgotten.status == 200
    assert (forgotten.json["status"], forgotten.json["erased_at"] is not None) == (ended["status"], True)
    deadline = time.monotonic() + PATIENCE_S
    while files_with(lane, "SECRET-PROMPT", "SECRET-ANSWER"):
        assert time.monotonic() < deadline, files_with(lane, "SECRET-PROMPT", "SECRET-ANSWER")
        time.sleep(0.1)  # for the log to be cut
    shown = lane.get(f"/v1/jobs/{job_id}").json
    assert "SECRET" not in json.dumps(shown)
    assert (shown["decisions"][-1]["action"], shown["decisions"][-1]["reason"]) == ("forget", "asked to")
    assert shown["next_action"] == f"brainctl show {job_id}"
    assert len(shown["attempts"]) == ended["attempt_count"]
    for what in ("request", "output", "response"):
        refused = lane.get(f"/v1/jobs/{job_id}/{what}")
        assert is_error(refused, 409, "no-output"), what
        assert "erased" in refused.error["message"]


def test_to_forget_twice_changes_nothing_more_and_the_key_still_leads_to_the_job(lane: Lane) -> None:
    job = done(lane, "once", key="k")
    first = lane.post(f"/v1/jobs/{job['id']}/forget").json
    again = lane.post(f"/v1/jobs/{job['id']}/forget")
    assert (again.status, again.json) == (200, first)
    assert [row["action"] for row in lane.rows("select action from decisions")] == ["forget"]
    assert lane.submit("once", key="k") == {**first, "replayed": True}
    conflict = lane.post("/v1/jobs", {"request": {"messages": [{"role": "user", "content": "twice"}]}, "key": "k"})
    assert is_error(conflict, 409, "key-conflict", "key")


def test_what_is_not_over_is_not_forgotten(lane: Lane, server: BrainServer) -> None:
    server.script(cut(300))
    held = lane.wait(lane.submit("held")["id"])["id"]
    running_step = server.hold()
    server.script(running_step)
    running, queued = lane.submit("running")["id"], lane.submit("queued")["id"]
    assert running_step.arrived.wait(PATIENCE_S)
    for job_id, where in ((held, "held"), (running, "running"), (queued, "queued")):
        refused = lane.post(f"/v1/jobs/{job_id}/forget")
        assert is_error(refused, 409, "moved-on")
        assert f"it is {where}" in refused.error["message"]
        assert lane.get(f"/v1/jobs/{job_id}").json["erased_at"] is None
    assert is_error(lane.post("/v1/jobs/999/forget"), 404, "no-such-job")
    assert is_error(lane.post(f"/v1/jobs/{held}/forget", {"attempt": 7}), 409, "moved-on")
    running_step.release()
    assert lane.wait(queued)["status"] == "done"


def test_what_was_forgotten_cannot_be_tried_again(lane: Lane, server: BrainServer) -> None:
    server.script(status(400))
    job_id = lane.wait(lane.submit()["id"])["id"]
    lane.post(f"/v1/jobs/{job_id}/forget")
    refused = lane.post(f"/v1/jobs/{job_id}/retry")
    assert is_error(refused, 409, "too-late")
    assert "erased" in refused.error["message"]
    assert lane.get(f"/v1/jobs/{job_id}").json["status"] == "failed"
    assert server.count() == 1
