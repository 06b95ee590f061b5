"""The queue as its users see it: one call at a time, one job for a key, no lock during a call, cancel, and restart."""

import json
import os
import pwd
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from brainlaned import api
from brainlaned.wire import format_time
from tests.brainserver import BrainServer, answer
from tests.lane import Answer, Lane, begin_call, config_for, write_lock_held


def count_of_jobs(lane: Lane) -> int:
    return int(lane.rows("select count(*) as jobs from jobs")[0]["jobs"])


def body_of(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"request": {"messages": [{"role": "user", "content": prompt}]}, **fields}


@contextmanager
def call_in_flight(lane: Lane, server: BrainServer) -> Iterator[dict[str, Any]]:
    """A job whose request has been sent and recorded as sent, and is answered when the body ends."""
    job, held = begin_call(lane, server)
    try:
        yield job
    finally:
        held.release()


# One at a time


def test_forty_jobs_from_eight_submitters_reach_the_brain_one_at_a_time_in_the_order_of_acceptance(
    shared_lane: Lane, shared_server: BrainServer
) -> None:
    shared_server.default = answer(delay_s=0.01)
    with ThreadPoolExecutor(8) as submitters:
        jobs = list(submitters.map(lambda number: shared_lane.submit(f"prompt {number}"), range(40)))
    ended = [shared_lane.wait(job["id"]) for job in jobs]
    assert {job["status"] for job in ended} == {"done"}
    prompts = {job["id"]: f"prompt {number}" for number, job in enumerate(jobs)}
    accepted = [prompts[job["id"]] for job in sorted(jobs, key=lambda job: (job["created_at"], job["id"]))]
    assert [record.prompt for record in shared_server.requests] == accepted
    assert shared_server.max_concurrent == 1


def test_a_higher_priority_overtakes_and_a_lower_one_stands_back(shared_lane: Lane, shared_server: BrainServer) -> None:
    shared_lane.post("/v1/lane/pause")
    jobs = [shared_lane.submit(priority, priority=priority) for priority in ("low", "normal", "high")]
    assert [shared_lane.get(f"/v1/jobs/{job['id']}").json["position"] for job in jobs] == [3, 2, 1]
    shared_lane.post("/v1/lane/resume")
    for job in jobs:
        shared_lane.wait(job["id"])
    assert [record.prompt for record in shared_server.requests] == ["high", "normal", "low"]


# One job for a key


def test_the_same_key_is_the_same_job(shared_lane: Lane, shared_server: BrainServer) -> None:
    first = shared_lane.post("/v1/jobs", body_of("once", key="same"))
    again = shared_lane.post("/v1/jobs", body_of("once", key="same", priority="high", labels={"a": "b"}))
    assert (first.status, first.json["replayed"]) == (201, False)
    assert (again.status, again.json["replayed"]) == (200, True)
    assert first.json["id"] == again.json["id"]
    shared_lane.wait(first.json["id"])
    assert shared_server.count("once") == 1


@pytest.mark.parametrize(
    "other",
    [
        body_of("another prompt", key="mine"),
        body_of("mine", key="mine", route="other"),
        {"request": {"messages": [{"role": "user", "content": "mine"}], "model": "named"}, "key": "mine"},
        {"request": {"messages": [{"role": "user", "content": "mine"}], "temperature": 0}, "key": "mine"},
    ],
    ids=["prompt", "route", "model", "parameter"],
)
def test_a_key_with_another_request_is_a_conflict_and_stores_nothing(shared_lane: Lane, other: dict[str, Any]) -> None:
    first = shared_lane.submit("mine", key="mine")
    before = count_of_jobs(shared_lane)
    refused = shared_lane.post("/v1/jobs", other)
    assert (refused.status, refused.error["kind"]) == (409, "key-conflict")
    assert refused.error["field"] == "key"
    assert str(first["id"]) in refused.error["message"]
    assert count_of_jobs(shared_lane) == before


def test_twenty_submits_at_once_with_one_key_make_one_job(shared_lane: Lane, shared_server: BrainServer) -> None:
    before = count_of_jobs(shared_lane)
    with ThreadPoolExecutor(20) as submitters:
        answers = list(submitters.map(lambda _: shared_lane.post("/v1/jobs", body_of("rush", key="rush")), range(20)))
    assert sorted(each.status for each in answers) == [200] * 19 + [201]
    assert len({each.json["id"] for each in answers}) == 1
    assert count_of_jobs(shared_lane) == before + 1
    shared_lane.wait(answers[0].json["id"])
    assert shared_server.count("rush") == 1


@pytest.mark.parametrize("leaves", ["at once", "after it was stored"])
def test_a_submit_whose_answer_was_lost_is_found_again_by_its_key(
    shared_lane: Lane, shared_server: BrainServer, leaves: str
) -> None:
    before = count_of_jobs(shared_lane)
    prompt = f"lost, {leaves}"
    request = json_request("POST", "/v1/jobs", body_of(prompt, key=prompt))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(os.fspath(shared_lane.socket))
        client.sendall(request)
        deadline = time.monotonic() + 20
        while leaves != "at once" and count_of_jobs(shared_lane) == before:
            assert time.monotonic() < deadline
            time.sleep(0.02)  # for the job to be stored; its answer stays unread
    again = shared_lane.post("/v1/jobs", body_of(prompt, key=prompt))
    assert again.status == 200 or leaves == "at once"
    shared_lane.wait(again.json["id"])
    assert count_of_jobs(shared_lane) == before + 1
    assert shared_server.count(prompt) == 1


def test_a_key_outlives_its_job_and_a_restart(lane: Lane, server: BrainServer) -> None:
    job = lane.wait(lane.submit("once", key="kept")["id"])
    assert job["status"] == "done"
    lane.stop()
    lane.start()
    again = lane.post("/v1/jobs", body_of("once", key="kept"))
    assert (again.status, again.json["replayed"], again.json["id"]) == (200, True, job["id"])
    assert again.json["status"] == "done"
    assert server.count() == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_every_user_has_keys_of_their_own(make_lane: Any, server: BrainServer) -> None:
    nobody = pwd.getpwnam("nobody")
    lane = make_lane(more='[access]\nsubmit = ["nobody"]\n')
    lane.directory.chmod(0o711)
    lane.socket.chmod(0o666)
    ours = lane.submit("ours", key="k")
    theirs = ask_as(nobody.pw_uid, lane, body_of("theirs", key="k"))
    assert (theirs.status, theirs.json["replayed"]) == (201, False)
    assert theirs.json["id"] != ours["id"]
    assert theirs.json["submitter"] == {"uid": nobody.pw_uid, "user": "nobody", "pid": theirs.json["submitter"]["pid"]}
    assert ask_as(nobody.pw_uid, lane, body_of("theirs", key="k")).json["replayed"]
    lane.wait(theirs.json["id"])
    stranger = ask_as(nobody.pw_uid - 1, lane, body_of("strange"))
    assert (stranger.status, stranger.error["kind"]) == (403, "forbidden")
    assert count_of_jobs(lane) == 2


def json_request(method: str, path: str, document: Any) -> bytes:
    body = json.dumps(document).encode()
    return (
        f"{method} {path} HTTP/1.1\r\nHost: lane\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def ask_as(uid: int, lane: Lane, document: dict[str, Any]) -> Answer:
    """Submit as another user, from a child that gives up root once it stands beside the socket."""
    child = """
import os, socket, sys
sent = sys.stdin.buffer.read()
os.setgroups([]), os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
with socket.socket(socket.AF_UNIX) as client:
    client.connect("s")
    client.sendall(sent)
    while part := client.recv(65536):
        sys.stdout.buffer.write(part)
"""
    done = subprocess.run(
        [sys.executable, "-c", child, str(uid)],
        input=json_request("POST", "/v1/jobs", document),
        cwd=lane.directory,
        stdout=subprocess.PIPE,
        check=True,
        timeout=30,
    )
    head, _, body = done.stdout.partition(b"\r\n\r\n")
    return Answer(int(head.split()[1]), {}, body)


# The database is free


def test_no_lock_is_held_while_the_brain_thinks(shared_lane: Lane, shared_server: BrainServer) -> None:
    with call_in_flight(shared_lane, shared_server) as running:
        with closing(sqlite3.connect(shared_lane.database, timeout=0, isolation_level=None)) as foreign:
            foreign.execute("begin immediate")  # with no patience at all
            foreign.execute("update lane set client = client")
            foreign.execute("commit")
        queued = shared_lane.submit("meanwhile")
        assert [job["id"] for job in shared_lane.get("/v1/jobs?limit=2").json["jobs"]] == [queued["id"], running["id"]]
        assert shared_lane.get(f"/v1/jobs/{running['id']}").json["status"] == "running"
        assert shared_lane.post(f"/v1/jobs/{queued['id']}/cancel").json["status"] == "cancelled"
        assert shared_lane.get("/v1/status").json["running"]["id"] == running["id"]
        assert shared_server.count() == 1
    assert shared_lane.wait(running["id"])["status"] == "done"


def test_a_foreign_lock_of_a_second_loses_no_submit_and_no_result(
    shared_lane: Lane, shared_server: BrainServer
) -> None:
    before = count_of_jobs(shared_lane)
    with ThreadPoolExecutor(50) as clients:
        with call_in_flight(shared_lane, shared_server) as running, write_lock_held(shared_lane):
            shared_server.release()  # so that the worker has a result to store
            answers = clients.map(lambda number: shared_lane.post("/v1/jobs", body_of(f"{number}")), range(50))
            time.sleep(1)  # for the lock to be in everybody's way
        statuses = [(each.status, each.status == 201 or each.error["kind"]) for each in answers]
    assert set(statuses) <= {(201, True), (503, "busy")}
    assert count_of_jobs(shared_lane) == before + 1 + statuses.count((201, True))
    assert shared_lane.wait(running["id"])["status"] == "done"
    assert shared_server.count("think") == 1


def test_a_lock_held_for_too_long_refuses_a_submit_and_keeps_the_answer(
    shared_lane: Lane, shared_server: BrainServer
) -> None:
    before = count_of_jobs(shared_lane)
    with (
        ThreadPoolExecutor(1) as client,
        call_in_flight(shared_lane, shared_server) as running,
        write_lock_held(shared_lane),
    ):
        refusal = client.submit(shared_lane.post, "/v1/jobs", body_of("too long"))
        shared_server.release()  # so that the worker has an answer that it cannot store
        deadline = time.monotonic() + 30
        while not shared_lane.get("/v1/status").json["lane"]["answer_waiting"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)  # for the worker to have waited for the lock in vain
        assert shared_lane.get(f"/v1/jobs/{running['id']}").json["status"] == "running"
        refused = refusal.result(30)
    assert (refused.status, refused.error["kind"], refused.error["retry_safe"]) == (503, "busy", True)
    ended = shared_lane.wait(running["id"])
    assert (ended["status"], ended["attempt_count"]) == ("done", 1)
    assert shared_lane.wait(shared_lane.submit("afterwards")["id"])["status"] == "done"
    assert count_of_jobs(shared_lane) == before + 2
    assert [record.prompt for record in shared_server.requests] == ["think", "afterwards"]
    assert "nothing was stored" in refused.error["message"]


class TracedLane(Lane):
    """A lane that writes down every statement with the thread that executes it."""

    @property
    def statements(self) -> Path:
        return self.directory / "statements"

    def command(self, *, cut: str | None = None, times: int = 1) -> list[str]:
        _, _, _, *options = super().command()
        return [sys.executable, "-m", "tests.traced", os.fspath(self.statements), *options]

    def traced(self) -> list[tuple[str, str]]:
        """Return (thread, statement) in order; the statements of triggers are left out."""
        lines = [json.loads(line) for line in self.statements.read_text().splitlines()]
        return [(thread, statement) for thread, statement in lines if not statement.startswith("--")]


@pytest.fixture
def traced_lane(tmp_path: Path, server: BrainServer) -> Iterator[TracedLane]:
    lane = TracedLane(tmp_path / "traced", config_for(server.base_url))
    yield lane.start()
    assert lane.stop() == 0
    assert "Traceback" not in lane.log.read_text()


def test_every_writing_transaction_begins_as_a_writer_and_the_event_loop_touches_no_database(
    traced_lane: TracedLane,
) -> None:
    started = len(traced_lane.traced())
    done = traced_lane.wait(traced_lane.submit("hello", key="k", labels={"a": "b"})["id"])
    assert traced_lane.get(f"/v1/jobs/{done['id']}/output?partial=1").status == 200
    for method, path, _, _ in api.TABLE:
        body = body_of("more", key="another") if path == "/v1/jobs" else {}
        answered = traced_lane.ask(method, path.replace("{id}", str(done["id"])), body if method == "POST" else None)
        assert answered.status < 500, (path, answered.body)
    assert traced_lane.get("/v1/jobs?label=a=b&status=done&wait=1").status == 422
    traced = traced_lane.traced()[started:]

    assert "MainThread" not in {thread for thread, _ in traced}
    assert {"brainlane-worker", "brainlane-acceptor"} <= {thread for thread, _ in traced}
    writes = 0
    begun: dict[str, str] = {}
    for thread, statement in traced:
        words = statement.lower().split()
        if words[0] in {"begin", "commit", "rollback"} and words[:2] != ["rollback", "to"]:
            begun[thread] = " ".join(words)
        elif words[0] in {"insert", "update", "delete", "replace"}:
            writes += 1
            assert begun.get(thread) == "begin immediate", (thread, begun.get(thread), statement)
    assert writes > 5


# Cancel


def test_a_queued_job_is_cancelled_at_once_and_never_sent(shared_lane: Lane, shared_server: BrainServer) -> None:
    with call_in_flight(shared_lane, shared_server):
        queued = shared_lane.submit("unwanted")
        cancelled = shared_lane.post(f"/v1/jobs/{queued['id']}/cancel", {"reason": "changed my mind"}).json
        assert (cancelled["status"], cancelled["reason"], cancelled["final"]) == ("cancelled", "cancel-requested", True)
    last = shared_lane.submit("last")
    shared_lane.wait(last["id"])
    assert shared_server.count("unwanted") == 0
    shown = shared_lane.get(f"/v1/jobs/{queued['id']}").json
    assert shown["attempts"] == []
    assert [(made["action"], made["reason"]) for made in shown["decisions"]] == [("cancel", "changed my mind")]


def test_a_cancel_of_a_done_job_comes_too_late(shared_lane: Lane) -> None:
    job = shared_lane.wait(shared_lane.submit("done")["id"])
    refused = shared_lane.post(f"/v1/jobs/{job['id']}/cancel")
    assert (refused.status, refused.error["kind"]) == (409, "too-late")
    assert shared_lane.get(f"/v1/jobs/{job['id']}").json == job


def test_a_cancel_based_on_another_attempt_changes_nothing(shared_lane: Lane, shared_server: BrainServer) -> None:
    with call_in_flight(shared_lane, shared_server) as running:
        refused = shared_lane.post(f"/v1/jobs/{running['id']}/cancel", {"attempt": 7})
        assert (refused.status, refused.error["kind"]) == (409, "moved-on")
        assert shared_lane.get(f"/v1/jobs/{running['id']}").json["cancel_requested_at"] is None
    assert shared_lane.wait(running["id"])["status"] == "done"


@pytest.mark.parametrize("when", ["before it answers", "in the middle of its answer"])
def test_a_cancel_hangs_up_on_the_brain_and_lets_the_next_job_run(
    shared_lane: Lane, shared_server: BrainServer, halting: Any, when: str
) -> None:
    streams = when == "in the middle of its answer"
    if streams:
        step, held = halting(shared_server, "a part ", "the rest")
    else:
        step = held = shared_server.hold()
    shared_server.script(step)
    job = shared_lane.submit("unwanted")
    following = shared_lane.submit("next")
    assert held.arrived.wait(20)
    if streams:
        partial_output(shared_lane, job["id"])
    asked_at = time.monotonic()
    asked = shared_lane.post(f"/v1/jobs/{job['id']}/cancel").json
    assert asked["status"] == "running"
    assert asked["cancel_requested_at"] is not None

    assert shared_server.wait_for(lambda server: server.requests[0].hung_up_at is not None, 20)
    hung_up_at = shared_server.requests[0].hung_up_at
    assert hung_up_at is not None
    assert hung_up_at - asked_at < 2
    ended = shared_lane.wait(job["id"])
    assert (ended["status"], ended["reason"]) == ("cancelled", "cancel-requested")
    assert ended["attempts"][0]["status"] == "cancelled"
    part = shared_lane.get(f"/v1/jobs/{job['id']}/output?partial=1")
    assert (part.status, part.body) == (200, b"a part ") if streams else part.status == 409
    assert shared_lane.wait(following["id"])["status"] == "done"
    assert shared_server.count("unwanted") == 1
    assert shared_server.max_concurrent == 1


def partial_output(lane: Lane, job_id: int) -> bytes:
    """Wait until a part of the answer is there, and return it."""
    deadline = time.monotonic() + 20
    while (part := lane.get(f"/v1/jobs/{job_id}/output?partial=1")).status != 200 or not part.body:
        assert time.monotonic() < deadline
        time.sleep(0.02)  # for the first bytes to arrive in the spool
    return part.body


# Waiting


def test_a_pause_outlives_a_restart_until_somebody_resumes(lane: Lane, server: BrainServer) -> None:
    assert lane.post("/v1/lane/pause", {"reason": "maintenance"}).json["lane"]["state"] == "paused"
    job = lane.submit("patience")
    lane.stop()
    lane.start()
    shown = lane.get("/v1/status").json["lane"]
    assert (shown["state"], shown["paused_reason"]) == ("paused", "maintenance")
    waiting = lane.get(f"/v1/jobs/{job['id']}?wait=0.3").json
    assert (waiting["status"], waiting["waiting"], waiting["next_action"]) == (
        "queued",
        "lane-paused",
        "brainctl resume",
    )
    assert server.count() == 0
    assert lane.post("/v1/lane/resume").json["lane"]["state"] == "open"
    assert lane.wait(job["id"])["status"] == "done"


def test_a_job_for_later_runs_when_its_time_has_come_and_holds_up_nobody(
    shared_lane: Lane, shared_server: BrainServer
) -> None:
    due = format_time(datetime.now(UTC) + timedelta(seconds=1.5))
    later = shared_lane.submit("later", not_before=due)
    assert (later["status"], later["waiting"], later["not_before"]) == ("queued", "not-before", due)
    sooner = shared_lane.submit("sooner")
    assert shared_lane.wait(sooner["id"])["status"] == "done"
    assert shared_lane.get(f"/v1/jobs/{later['id']}").json["status"] == "queued"
    ended = shared_lane.wait(later["id"])
    assert ended["status"] == "done"
    assert ended["started_at"] >= due
    assert [record.prompt for record in shared_server.requests] == ["sooner", "later"]


def test_a_lane_at_rest_sleeps(make_lane: Any) -> None:
    lane = make_lane()
    lane.submit("tomorrow", not_before=format_time(datetime.now(UTC) + timedelta(days=1)))
    time.sleep(1)  # for what the start and the submit set in motion to come to rest
    before = switches(lane)
    time.sleep(3)  # the rest that is looked at
    assert switches(lane) - before < 30


def switches(lane: Lane) -> int:
    """How often the daemon's threads have gone to sleep so far."""
    assert lane.process is not None
    lines = [
        line
        for status in Path(f"/proc/{lane.process.pid}/task").glob("*/status")
        for line in status.read_text().splitlines()
    ]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
