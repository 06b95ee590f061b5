"""What is promised is on the disk before anybody can be told: shown in the system calls of a real daemon.

SQLite's log holds a transaction from its commit frame on, so "synced" means here: a sync of the log that began when
that frame was written, and succeeded, before the byte in question could leave. Then the disk fails on purpose.
"""

import http.client
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.brainserver import BrainServer, answer
from tests.lane import Lane, config_for
from tests.powercut import Call, Said, TracedLane, messages, read_traces, reason_not_to_trace

REASON = reason_not_to_trace()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

FRAME_HEAD = 24
"""The length of a frame's head in SQLite's log: page number, then the size of the database if the frame commits."""


@dataclass
class Traced:
    """A lane that was traced for a few jobs, and what its database said at the end."""

    lane: TracedLane
    calls: list[Call]
    attempts: list[dict[str, Any]]
    answers: list[Said]
    requests: list[Said]

    @property
    def log(self) -> str:
        return f"{self.lane.database}-wal"

    def spool(self, attempt: dict[str, Any]) -> str:
        return f"{self.lane.state_dir}/spool/{attempt['job_id']}-{attempt['attempt']}.part"

    def first_in_log(self, text: str) -> Call:
        """Return the first write into SQLite's log that holds a text."""
        return next(call for call in self.writes(self.log) if text.encode() in call.text(0))

    def writes(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.name in {"write", "pwrite64"} and call.where == path]

    def committed(self, text: str) -> int:
        """Return the place at which the transaction that brought a text was on the disk."""
        first = self.first_in_log(text)
        writes = self.writes(self.log)
        rest = writes[writes.index(first) - 1 :]  # from the head of its frame on
        commit = next(
            page
            for head, page in itertools.pairwise(rest)
            if len(head.text(0)) == FRAME_HEAD and any(head.text(0)[4:8])
        )
        return self.synced(self.log, after=commit.ended)

    def synced(self, path: str, *, after: int) -> int:
        """Return where the first sync of a file or directory ended that began after a place."""
        syncs = [call for call in self.calls if call.name in {"fsync", "fdatasync"} and call.where == path]
        ended = [call.ended for call in syncs if call.began > after]
        assert ended, f"{path} is not synced after line {after} of the trace"
        return ended[0]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    with BrainServer() as server:
        server.by_prompt(lambda prompt: answer(tokens=["said to ", str(prompt)]))
        lane = TracedLane(tmp_path_factory.mktemp("traced"), config_for(server.base_url))
        lane.start()
        try:
            jobs = [lane.submit(f"prompt-{number}")["id"] for number in range(1, 4)]
            for number in jobs:
                assert lane.wait(number)["status"] == "done"
            attempts = lane.rows("select * from job_attempts order by job_id")
        finally:
            lane.stop()
    calls = read_traces(lane.traces)
    answers = messages(calls, "UNIX", b"HTTP/")
    return Traced(lane, calls, attempts, answers, messages(calls, "TCP", b"POST "))


def test_a_submit_is_synced_before_its_201_can_leave(traced: Traced) -> None:
    accepted = [json.loads(said.body)["id"] for said in traced.answers if said.head.startswith("HTTP/1.1 201")]
    assert accepted == [1, 2, 3]
    for said in traced.answers:
        if said.head.startswith("HTTP/1.1 201"):
            assert traced.committed(f"prompt-{json.loads(said.body)['id']}") < said.at


def test_the_leave_to_send_is_synced_before_a_first_byte_can_leave(traced: Traced) -> None:
    assert len(traced.requests) == len(traced.attempts) == 3
    for attempt, request in zip(traced.attempts, traced.requests, strict=True):
        assert request.head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
        assert f"x-request-id: {attempt['job_id']}-{attempt['attempt']}" in request.head.lower()
        assert traced.committed(attempt["armed_at"]) < request.at
    # Nothing else was said to the brain: every connection began with such a request.
    first: dict[str, int] = {}
    for call in sorted(traced.calls, key=lambda call: call.began):
        if call.where.startswith("TCP"):
            first.setdefault(call.where, call.began)
    assert sorted(first.values()) == [request.at for request in traced.requests]


def test_the_spool_is_durably_there_before_the_attempt_is_armed(traced: Traced) -> None:
    for attempt in traced.attempts:
        made = next(call for call in traced.calls if call.name == "openat" and call.path() == traced.spool(attempt))
        assert "O_CREAT" in made.arguments[1]
        synced = traced.synced(str(Path(traced.spool(attempt)).parent), after=made.ended)
        assert synced < traced.first_in_log(attempt["armed_at"]).began


def test_what_the_brain_answered_is_in_the_spool_before_the_database_is_told(traced: Traced) -> None:
    for attempt in traced.attempts:
        writes = traced.writes(traced.spool(attempt))
        first_line, last = writes[0], writes[-1]
        assert json.loads(first_line.text(0))["status"] == 200
        told_of_headers = traced.first_in_log(attempt["headers_at"])
        assert traced.synced(first_line.where, after=first_line.ended) < told_of_headers.began
        told_of_the_end = traced.first_in_log(f"said to prompt-{attempt['job_id']}")
        assert traced.synced(last.where, after=last.ended) < told_of_the_end.began
        removed = next(call for call in traced.calls if call.name == "unlink" and call.path() == last.where)
        assert traced.committed(f"said to prompt-{attempt['job_id']}") < removed.began


def test_nobody_is_told_that_a_job_is_done_before_its_answer_is_synced(traced: Traced) -> None:
    told = {}
    for said in traced.answers:
        job = json.loads(said.body)
        if job.get("status") == "done":
            told.setdefault(job["id"], said.at)
    assert sorted(told) == [1, 2, 3]
    for number, at in told.items():
        assert traced.committed(f"said to prompt-{number}") < at


def test_a_state_directory_that_the_daemon_makes_outlives_a_power_cut(traced: Traced) -> None:
    state_dir = traced.lane.state_dir
    made = next(call for call in traced.calls if call.name == "mkdir" and call.path() == str(state_dir))
    assert traced.synced(str(state_dir.parent), after=made.ended) < traced.answers[0].at


# A disk that fails: strace makes the chosen calls on SQLite's log fail. It counts them for each thread on its own, so
# one number strikes the acceptor in one submit and the worker in one of its commits (claim, armed, sent, headers, end).

LOG_SYNCS = ["3", "4", "5", "7", "3+"]
LOG_WRITES = ["16", "20", "45", "61", "30+"]
MANY = 4


@pytest.mark.parametrize(
    ("call", "when"),
    [*(("fdatasync", when) for when in LOG_SYNCS), *(("pwrite64", when) for when in LOG_WRITES)],
)
def test_a_submit_that_the_disk_failed_is_refused_and_any_other_survives(
    call: str, when: str, server: BrainServer, tmp_path: Path
) -> None:
    config = config_for(server.base_url)
    plain = Lane(tmp_path / "lane", config)
    plain.start().stop()  # makes the database, so that only jobs are written below
    failing = TracedLane(plain.directory, config)
    inject = f"inject={call}:error=EIO:when={when}"
    failing.options = ["-P", f"{plain.database}-wal", "-e", f"trace={call}", "-e", inject]
    lasts = when.endswith("+")
    try:
        failing.start()
        told = [_submit(failing, number) for number in range(MANY)]
        if not lasts:
            for number in filter(None, told):
                assert failing.wait(number)["status"] == "done"
        told += [_submit(failing, number) for number in range(MANY, MANY + 3)]
        failing.kill()
        failing.wait_for_the_log()
        assert "(INJECTED)" in failing.traces[0].read_text()
        if lasts:
            # The disk stays broken, so after the first refusal nothing is accepted any more.
            assert told[-1] is None and not any(told[told.index(None) :]), told
        else:
            assert any(told[-3:]), f"the lane did not go on: {told}"
        plain.start()
        for prompt, number in enumerate(told):
            if number is not None:
                assert plain.get(f"/v1/jobs/{number}").status == 200, f"job {number} was accepted and is gone: {told}"
                job = plain.wait(number)
                assert job["status"] == "done" or "armed at" in job["detail"] or "HTTP 200" in job["detail"], job
                requests = plain.rows("select request from job_requests where job_id = ?", number)
                assert f'"prompt-{prompt}"' in requests[0]["request"]
        for job in plain.get("/v1/jobs").json["jobs"]:
            plain.wait(job["id"])  # those of unknown outcome, too
        assert all(server.count(f"prompt-{prompt}") <= 1 for prompt in range(MANY + 3))
        assert plain.rows("pragma integrity_check") == [{"integrity_check": "ok"}]
        assert plain.stop() == 0
    finally:
        for lane in (failing, plain):
            if lane.process is not None and lane.process.poll() is None:
                lane.kill()
    assert "Traceback" not in plain.log.read_text()


def _submit(lane: Lane, number: int) -> int | None:
    """Submit a prompt, and return its job; None when the client was told or could see that it was not accepted."""
    body = {"request": {"messages": [{"role": "user", "content": f"prompt-{number}"}]}}
    try:
        said = lane.post("/v1/jobs", body)
    except (OSError, http.client.HTTPException):
        return None
    if said.status == 503:
        assert said.error["kind"] in {"outcome-unknown", "busy"}
        # Without a key to ask again with, a submit whose outcome is unknown must not be repeated blindly.
        assert said.error["retry_safe"] == (said.error["kind"] == "busy")
        return None
    assert said.status == 201, said.body
    accepted: int = said.json["id"]
    return accepted
