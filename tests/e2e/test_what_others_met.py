"""Failures that other queues have met, each tried on a real lane: what it must do instead.

A database that is away while a paid answer waits for it, a second daemon, decisions on an outdated picture, a cancel at
the worst moment, a line that goes dead, an order that hangs on clocks, a key without its job.
"""

import json
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from brainlaned.db import Database
from brainlaned.wire import format_time
from tests.brainserver import (
    BrainServer,
    Exchange,
    Step,
    answer,
    chunk,
    close_before_answer,
    cut,
    delta,
    head,
    raw_events,
    reset_before_answer,
    sse,
    status,
    stop_reading,
)
from tests.lane import Answer, Lane, begin_call, wait_until, write_lock_held

PATIENCE_S = 60
"""More than anything here takes on a busy machine."""


def body_of(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"request": {"messages": [{"role": "user", "content": prompt}]}, **fields}


def count_of_jobs(lane: Lane) -> int:
    return int(lane.rows("select count(*) as jobs from jobs")[0]["jobs"])


def all_rows(lane: Lane) -> dict[str, list[dict[str, Any]]]:
    tables = [row["name"] for row in lane.rows("select name from sqlite_schema where type = 'table' order by name")]
    return {table: lane.rows(f"select * from {table}") for table in tables}  # noqa: S608 - names from the schema itself


def identity_of(path: Path) -> tuple[int, int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_ctime_ns


# The answer is there, and the database is not


def test_an_answer_outlasts_a_minute_without_the_database_and_nobody_is_misled_meanwhile(
    lane: Lane, server: BrainServer
) -> None:
    def submit(number: int) -> list[Answer]:
        """Ask with the same key until the lane accepts."""
        answers = [lane.post("/v1/jobs", body_of(f"meanwhile {number}", key=f"{number}"))]
        while answers[-1].status == 503:
            answers.append(lane.post("/v1/jobs", body_of(f"meanwhile {number}", key=f"{number}")))
        return answers

    running, held = begin_call(lane, server, then=answer("exactly this"))
    following = lane.submit("next")
    with ThreadPoolExecutor(3) as clients:
        with write_lock_held(lane):
            locked_at = time.monotonic()
            held.release()
            submits = [clients.submit(submit, number) for number in range(3)]
            wait_until(lambda: lane.get("/v1/status").json["lane"]["answer_waiting"])
            while time.monotonic() < locked_at + 60:
                shown = lane.get("/v1/status").json
                assert (shown["lane"]["answer_waiting"], shown["running"]["id"]) == (True, running["id"])
                listed = [(job["id"], job["status"], job["waiting"]) for job in lane.get("/v1/jobs").json["jobs"]]
                assert listed == [(following["id"], "queued", "answer-waiting"), (running["id"], "running", None)]
                assert lane.get(f"/v1/jobs/{following['id']}").json["waiting"] == "answer-waiting"
                assert server.count() == 1
                time.sleep(1)  # for the minute to pass
        answers = [each.result(PATIENCE_S) for each in submits]
    stored = lane.wait(running["id"])
    assert (stored["status"], stored["attempt_count"]) == ("done", 1)
    assert lane.get(f"/v1/jobs/{running['id']}/output").body == b"exactly this"
    for each in answers:
        assert {(one.status, one.error["kind"], one.error["retry_safe"]) for one in each[:-1]} == {(503, "busy", True)}
        assert each[-1].status == 201
        assert lane.wait(each[-1].json["id"])["status"] == "done"
    assert count_of_jobs(lane) == 5
    assert [record.prompt for record in server.requests][:2] == ["think", "next"]
    assert server.count() == 5
    assert not lane.get("/v1/status").json["lane"]["answer_waiting"]
    assert lane.log.read_text().count("waiting to be stored") == 1


# A second one


@pytest.mark.parametrize("place", ["the same socket", "a socket of its own"])
def test_a_second_daemon_leaves_the_call_of_the_first_alone(lane: Lane, server: BrainServer, place: str) -> None:
    running, held = begin_call(lane, server)
    rows, there = all_rows(lane), identity_of(lane.socket)
    own = lane.directory / "own"
    more = ["--socket", str(own)] if place == "a socket of its own" else []
    second = subprocess.run(
        [*lane.command(), *more],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert second.returncode == 69, second.stderr
    assert all_rows(lane) == rows
    assert identity_of(lane.socket) == there
    assert not own.exists()
    assert lane.get("/v1/status").json["running"]["id"] == running["id"]
    held.release()
    assert lane.wait(running["id"])["status"] == "done"
    assert server.count() == 1


def test_a_daemon_that_died_in_a_call_gives_its_lane_to_the_next_at_once(lane: Lane, server: BrainServer) -> None:
    running, _ = begin_call(lane, server)
    lane.kill()
    lane.start()
    status = lane.get("/v1/status").json
    assert (status["running"], [job["id"] for job in status["needs_person"]]) == (None, [running["id"]])
    assert server.count() == 1


def test_no_age_of_a_call_gives_its_job_to_anybody_else(lane: Lane, server: BrainServer) -> None:
    running, held = begin_call(lane, server)
    yesterday = format_time(datetime.now(UTC) - timedelta(days=1))
    with closing(sqlite3.connect(lane.database, timeout=PATIENCE_S)) as foreign, foreign:
        foreign.execute("update jobs set created_at = ?1, place_at = ?1, moved_at = ?1, started_at = ?1", [yesterday])
        foreign.execute("update job_attempts set started_at = ?1, armed_at = ?1, sent_at = ?1", [yesterday])
    lane.post("/v1/lane/pause")
    lane.post("/v1/lane/resume")
    following = lane.submit("next")
    shown = lane.get("/v1/status").json["running"]
    assert (shown["id"], shown["attempt"]) == (running["id"], 1)
    assert shown["elapsed_s"] > 80_000
    held.release()
    assert lane.wait(following["id"])["status"] == "done"
    assert [record.prompt for record in server.requests] == ["think", "next"]


CLAIMER = """
import json, sqlite3, sys
from pathlib import Path
from brainlaned import config, store
from brainlaned.db import Database
from brainlaned.states import Evidence, Verdict
from brainlaned.wire import AttemptStatus, Reason, Status

database = Database(Path(sys.argv[1]))
routes = [config.OpenRoute(config.Route("local", "http://127.0.0.1:1/v1", "small"), is_probe=False)]
done = Verdict(Status.DONE, AttemptStatus.SUCCEEDED, Reason.ANSWERED, "")
claims, calls, empty = [], 0, False
print("ready", flush=True)
sys.stdin.readline()
while calls < 1000 or not empty:
    calls += 1
    try:
        with database.write() as tx:
            claim = store.claim_next(tx, routes, "run")
    except sqlite3.IntegrityError:
        continue  # the other one has a job in its hands, and there is one at a time
    empty = claim is None
    if claim is not None:
        claims.append(claim.job_id)
        with database.write() as tx:
            store.finish(tx, claim.job_id, claim.attempt, Evidence(armed_at=tx.now, headers_at=tx.now), done)
print(json.dumps(claims))
"""


def test_two_processes_that_claim_from_one_queue_share_no_job(tmp_path: Path) -> None:
    database = Database(tmp_path / "brainlane.db")
    database.open()
    insert = """
        insert into jobs (digest, submitter_uid, route, names_model, status, reason, moved_at, priority, max_attempts,
            may_run_twice, require_complete, request_bytes, created_at, place_at)
        values ('', 0, 'local', 0, 'queued', 'submitted', :now, 'normal', 1, 0, 0, 2, :now, :now)
        """
    with database.write() as tx:
        for _ in range(500):
            tx.execute(insert, {"now": tx.now})
        tx.execute("insert into job_requests select id, '{}' from jobs")
    database.close()
    command = [sys.executable, "-c", CLAIMER, str(database.path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    claimers = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for claimer in claimers:
        assert claimer.stdout is not None
        claimer.stdout.readline()  # so that both begin together
    with ThreadPoolExecutor(2) as threads:
        ended = list(threads.map(lambda claimer: json.loads(claimer.communicate("go\n", timeout=300)[0]), claimers))
    assert sorted(job_id for claims in ended for job_id in claims) == list(range(1, 501))
    with database.read() as connection:
        assert connection.execute("select count(*) from job_attempts").fetchone()[0] == 500
        assert connection.execute("select distinct status, attempt_count from jobs").fetchall()[0][:] == ("done", 1)
    database.close()


# An outdated picture


def held_job(lane: Lane, server: BrainServer, prompt: str = "hello", **fields: Any) -> dict[str, Any]:
    server.script(close_before_answer())
    job = lane.wait(lane.submit(prompt, **fields)["id"])
    assert (job["status"], job["reason"]) == ("held", "sent-outcome-unknown")
    return job


@pytest.mark.parametrize("names_attempt", [True, False])
def test_of_two_who_send_a_job_again_at_the_same_moment_one_is_refused(
    shared_lane: Lane, shared_server: BrainServer, names_attempt: bool
) -> None:
    decision = {"action": "resend", "attempt": 1} if names_attempt else {"action": "resend"}
    with ThreadPoolExecutor(2) as people:
        for turn in range(10):
            job = held_job(shared_lane, shared_server, f"turn {turn}")
            # Held back, so that the one who comes second finds the job on its way, whatever their distance.
            held = shared_server.hold()
            shared_server.script(held)
            together = threading.Barrier(2)

            def resend(path: str, together: threading.Barrier = together) -> Answer:
                together.wait(PATIENCE_S)
                return shared_lane.post(path, decision)

            answers = list(people.map(resend, [f"/v1/jobs/{job['id']}/recover"] * 2))
            assert sorted(each.status for each in answers) == [200, 409]
            assert {each.error["kind"] for each in answers if each.status == 409} == {"moved-on"}
            held.release()
            ended = shared_lane.wait(job["id"])
            assert (ended["status"], ended["attempt_count"], len(ended["decisions"])) == ("done", 2, 1)
            assert shared_server.count(f"turn {turn}") == 2


def test_a_job_that_was_completed_meanwhile_is_not_sent_again(shared_lane: Lane, shared_server: BrainServer) -> None:
    job = held_job(shared_lane, shared_server)
    path = f"/v1/jobs/{job['id']}/recover"
    completed = shared_lane.post(path, {"action": "complete", "text": "by hand", "attempt": 1})
    assert (completed.status, completed.json["status"]) == (200, "done")
    before = shared_lane.get(f"/v1/jobs/{job['id']}").json
    for decision in ({"action": "resend", "attempt": 1}, {"action": "resend"}, {"action": "cancel", "attempt": 1}):
        refused = shared_lane.post(path, decision)
        assert (refused.status, refused.error["kind"]) == (409, "moved-on")
    assert shared_lane.get(f"/v1/jobs/{job['id']}").json == before
    assert shared_lane.get(f"/v1/jobs/{job['id']}/output").body == b"by hand"
    assert shared_server.count() == 1


@pytest.mark.parametrize("action", ["resend", "accept", "fail", "cancel"])
def test_a_decision_on_an_earlier_attempt_does_not_touch_a_later_one(
    shared_lane: Lane, shared_server: BrainServer, action: str
) -> None:
    job = held_job(shared_lane, shared_server)
    path = f"/v1/jobs/{job['id']}/recover"
    shared_server.script(close_before_answer())
    assert shared_lane.post(path, {"action": "resend", "attempt": 1}).status == 200
    before = shared_lane.wait(job["id"])
    assert (before["status"], before["attempt_count"]) == ("held", 2)
    refused = shared_lane.post(path, {"action": action, "attempt": 1})
    assert (refused.status, refused.error["kind"]) == (409, "moved-on")
    assert shared_lane.get(f"/v1/jobs/{job['id']}").json == before
    assert shared_server.count() == 2


# A cancel at the worst moment


@contextmanager
def full_house() -> Iterator[tuple[str, socket.socket]]:
    """Give a base URL whose listener takes no connection until somebody accepts: there is one guest in its queue."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        listener.settimeout(PATIENCE_S)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1", listener


@pytest.mark.parametrize("comes", [True, False], ids=["the line comes about", "the line never comes about"])
def test_a_cancel_after_the_claim_and_before_the_send_sends_nothing(
    make_lane: Any, server: BrainServer, comes: bool
) -> None:
    with full_house() as (base_url, listener):
        stuck = f'[routes.stuck]\nbase_url = "{base_url}"\nmodel = "m"\nconnect_s = {PATIENCE_S if comes else 1}'
        lane = make_lane(more=stuck)
        job = lane.submit("unwanted", route="stuck", max_attempts=1)
        following = lane.submit("next")
        lane.wait_for_status(job["id"], "running")
        asked = lane.post(f"/v1/jobs/{job['id']}/cancel")
        # Nothing can be sent any more, so it is cancelled at once, though the line is still being made.
        assert (asked.status, asked.json["status"], asked.json["reason"]) == (200, "cancelled", "cancel-requested")
        if comes:
            listener.accept()[0].close()  # the guest makes room
            connection = listener.accept()[0]
            with connection:
                connection.settimeout(PATIENCE_S)
                assert connection.recv(1) == b""
        ended = lane.get(f"/v1/jobs/{job['id']}").json
        assert ended["detail"].endswith("before anything was sent")
        (attempt,) = ended["attempts"]
        assert (attempt["status"], attempt["armed_at"], attempt["billed"]) == ("cancelled", None, "no")
        assert lane.wait(following["id"])["status"] == "done"
        assert [route["open"] for route in lane.get("/v1/status").json["routes"]] == [True, True]


def test_a_job_is_called_cancelled_only_when_its_line_is_closed_and_its_cost_is_called_unknown(
    shared_lane: Lane, shared_server: BrainServer
) -> None:
    lines: list[Exchange] = []

    def stream_for_ever(x: Exchange) -> None:
        x.read_body()
        lines.append(x)
        x.send(head(chunked=True) + chunk(delta("a part ")))
        while True:
            x.pause(0.05)  # the pace of the answer
            x.send(chunk(delta("and more ")))

    for _ in range(5):
        shared_server.script(stream_for_ever)
        job = shared_lane.submit("unwanted")
        wait_until(lambda path=f"/v1/jobs/{job['id']}/output?partial=1": shared_lane.get(path).body[:7] == b"a part ")
        asked = shared_lane.post(f"/v1/jobs/{job['id']}/cancel").json
        assert asked["status"] == "running" or lines[-1].gone()
        ended = shared_lane.wait(job["id"])
        assert lines[-1].gone()
        assert ended["status"] == "cancelled"
        assert "cost unknown" in ended["detail"]
        assert ended["attempts"][0]["armed_at"] in ended["detail"]
        part = shared_lane.get(f"/v1/jobs/{job['id']}/output?partial=1").body
        assert part.startswith(b"a part ")
        assert shared_lane.get(f"/v1/jobs/{job['id']}/output").error["kind"] == "no-output"
    assert shared_server.max_concurrent == 1
    assert shared_server.count("unwanted") == 5


# The line goes dead

AFTER_THE_UPLOAD = {
    "closed without a word": (close_before_answer(), None),
    "reset without a word": (reset_before_answer(), None),
    "bad gateway": (status(502, headers={"x-request-id": "upstream-502"}), "upstream-502"),
    "gateway timeout": (status(504, headers={"request-id": "upstream-504"}), "upstream-504"),
}


@pytest.mark.parametrize(("step", "upstream_id"), AFTER_THE_UPLOAD.values(), ids=AFTER_THE_UPLOAD)
def test_a_request_that_may_have_been_billed_is_held_with_all_that_a_person_needs(
    shared_lane: Lane, shared_server: BrainServer, step: Step, upstream_id: str | None
) -> None:
    shared_server.script(step)
    prompt = "x" * 12_345
    job = shared_lane.wait(shared_lane.submit(prompt, request={"model": "a-model"})["id"])
    assert (job["status"], job["reason"]) == ("held", "sent-outcome-unknown")
    (attempt,) = job["attempts"]
    assert (attempt["status"], attempt["billed"], attempt["upstream_id"]) == ("unknown", "possibly", upstream_id)
    assert (attempt["endpoint"], attempt["model"]) == (shared_server.base_url, "a-model")
    assert attempt["started_at"] <= attempt["armed_at"] <= attempt["sent_at"] <= attempt["ended_at"]
    assert attempt["armed_at"] in job["detail"] or attempt["headers_at"] in job["detail"]
    assert 12_345 < job["request_bytes"] < 13_000
    command = [sys.executable, "-m", "brainctl", "--socket", str(shared_lane.socket), "show", str(job["id"])]
    page = " ".join(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout.split()
    )
    for told in (shared_server.base_url, "a-model", f"{job['request_bytes']} bytes", upstream_id or ""):
        assert told in page
    assert shared_lane.wait(shared_lane.submit("next")["id"])["status"] == "done"
    assert [record.prompt for record in shared_server.requests] == [prompt, "next"]


@pytest.mark.parametrize(("step", "upstream_id"), AFTER_THE_UPLOAD.values(), ids=AFTER_THE_UPLOAD)
def test_with_leave_to_run_twice_it_is_asked_again_and_both_attempts_count_as_billed(
    shared_lane: Lane, shared_server: BrainServer, step: Step, upstream_id: str | None
) -> None:
    shared_server.script(step, step)
    job = shared_lane.wait(shared_lane.submit("twice", may_run_twice=True, max_attempts=2)["id"])
    # The leave ends with the attempts: the second unknown outcome is for a person.
    assert (job["status"], job["reason"], job["attempts_used"]) == ("held", "sent-outcome-unknown", 2)
    assert [(one["billed"], one["upstream_id"]) for one in job["attempts"]] == [("possibly", upstream_id)] * 2
    assert shared_server.count("twice") == 2


def test_a_refused_connection_is_tried_again_without_asking(lane: Lane, server: BrainServer) -> None:
    server.close()
    job = lane.submit("hello", max_attempts=1)
    wait_until(lambda: lane.get(f"/v1/jobs/{job['id']}").json["attempt_count"] >= 2)
    shown = lane.get("/v1/status").json["routes"][0]
    assert (shown["open"], shown["reason"]) == (False, "unreachable")
    server.start()
    ended = lane.wait(job["id"], PATIENCE_S)
    assert (ended["status"], ended["attempts_used"]) == ("done", 1)
    *before, last = ended["attempts"]
    assert {(one["status"], one["armed_at"], one["billed"]) for one in before} == {("interrupted", None, "no")}
    assert last["billed"] == "yes"
    assert server.count() == 1


def test_an_upload_that_was_cut_in_the_middle_is_tried_again_without_asking(lane: Lane, server: BrainServer) -> None:
    server.script(stop_reading(65536, "reset", buffer_bytes=4096))
    job = lane.wait(lane.submit("x" * (7 * 1024 * 1024), max_attempts=1)["id"], PATIENCE_S)
    assert (job["status"], job["attempts_used"]) == ("done", 1)
    first, second = job["attempts"]
    assert (first["status"], first["reason"], first["billed"]) == ("interrupted", "not-executed", "no")
    assert first["send_failed_at"] is not None
    assert second["billed"] == "yes"
    assert (server.count(whole=False), server.count(whole=True)) == (1, 1)


TWO_DELTAS = sse("one two", finish=None, done=False)
AND_NO_MORE = {"after_bytes": len(b"".join(TWO_DELTAS)), "body": b"".join(TWO_DELTAS) + b"data: "}


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(raw_events(TWO_DELTAS, framing="close"), id="the connection closes"),
        pytest.param(raw_events(TWO_DELTAS, framing="chunked"), id="the last chunk"),
        pytest.param(raw_events(TWO_DELTAS, framing="length"), id="the promised length"),
        pytest.param(cut(how="close", **AND_NO_MORE), id="a close between chunks"),
        pytest.param(cut(how="chunk", **AND_NO_MORE), id="a broken chunk"),
    ],
)
def test_a_stream_that_stops_after_two_deltas_is_held_with_its_part(
    shared_lane: Lane, shared_server: BrainServer, step: Step
) -> None:
    shared_server.script(step)
    job = shared_lane.wait(shared_lane.submit("hello")["id"])
    assert (job["status"], job["reason"]) == ("held", "answer-incomplete")
    (attempt,) = job["attempts"]
    assert (attempt["status"], attempt["part_bytes"]) == ("unknown", len("one two"))
    assert shared_lane.get(f"/v1/jobs/{job['id']}/output?partial=1").body == b"one two"
    assert shared_lane.get(f"/v1/jobs/{job['id']}/output").status == 409
    assert shared_server.count() == 1


# Order and clocks


def test_two_hundred_jobs_of_one_moment_run_in_the_order_of_their_acceptance(
    shared_lane: Lane, shared_server: BrainServer
) -> None:
    shared_lane.post("/v1/lane/pause")
    accepted = [shared_lane.submit(f"{number}")["id"] for number in range(100)]
    with ThreadPoolExecutor(20) as clients:
        together = list(clients.map(lambda number: shared_lane.submit(f"{number}")["id"], range(100, 200)))
    moment = format_time(datetime.now(UTC))
    with closing(sqlite3.connect(shared_lane.database, timeout=PATIENCE_S)) as foreign, foreign:
        # As under a clock that stood still.
        foreign.execute("update jobs set created_at = ?1, place_at = ?1 where status = 'queued'", [moment])
    shared_lane.post("/v1/lane/resume")
    assert shared_lane.wait(max(together), 120)["status"] == "done"
    prompts = [record.prompt for record in shared_server.requests]
    assert prompts[:100] == [f"{number}" for number in range(100)]
    by_id = sorted(zip(together, range(100, 200), strict=True))
    assert prompts[100:] == [f"{number}" for _, number in by_id]
    assert accepted + sorted(together) == [
        row["job_id"] for row in shared_lane.rows("select job_id from job_attempts order by started_at, job_id")[-200:]
    ]
    assert shared_server.max_concurrent == 1


def test_a_time_means_the_same_instant_to_daemons_in_different_zones(
    make_lane: Any, server: BrainServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = []
    for zone in ("UTC", "Europe/Berlin"):
        monkeypatch.setenv("TZ", zone)
        lanes.append(make_lane())
    # In Berlin's night of 25 October 2026 half past two comes twice.
    night = ["2026-10-25T02:30:00+02:00", "2026-10-25T02:30:00+01:00", "2026-10-25T02:30:00Z"]
    soon = datetime.now(UTC) + timedelta(seconds=2)
    due = soon.astimezone(timezone(timedelta(hours=2))).isoformat()
    for lane in lanes:
        lane.post("/v1/lane/pause")
        for text in night:
            lane.submit("night", not_before=text)
        refused = lane.post("/v1/jobs", body_of("night", not_before="2026-10-25T02:30:00"))
        assert (refused.status, refused.error["field"]) == (422, "not_before")
        assert [row["not_before"] for row in lane.rows("select not_before from jobs order by id")] == [
            "2026-10-25T00:30:00.000000Z",
            "2026-10-25T01:30:00.000000Z",
            "2026-10-25T02:30:00.000000Z",
        ]
        lane.post("/v1/lane/resume")
        job = lane.submit("soon", not_before=due)
        assert job["not_before"] == format_time(soon)
        assert lane.wait(job["id"], PATIENCE_S)["started_at"] >= format_time(soon)


# A key without its job

VANISHING = """
import os, signal, sys
from brainlaned import __main__ as program, daemon, db

statement = sys.argv.pop(1)

def observe(said):
    if said.strip().startswith(statement):
        os.kill(os.getpid(), signal.SIGKILL)

daemon.Database = lambda path: db.Database(path, observe)
program.main()
"""


class VanishingLane(Lane):
    """A lane whose daemon vanishes just before SQLite executes a certain statement; "": it does not."""

    statement = ""

    def command(self, *, cut: str | None = None, times: int = 1) -> list[str]:
        if not self.statement:
            return super().command(cut=cut, times=times)
        _, _, _, *options = super().command()
        return [sys.executable, "-c", VANISHING, self.statement, *options]


@pytest.mark.parametrize("statement", ["insert into job_requests", "insert into job_labels", "release part"])
def test_a_death_in_the_middle_of_an_acceptance_leaves_neither_key_nor_job(
    tmp_path: Path, server: BrainServer, make_lane: Any, statement: str
) -> None:
    config = make_lane(start=False).config.read_text()
    lane = VanishingLane(tmp_path / "vanishing", config)
    lane.statement = statement
    document = body_of("hello", key="mine", labels={"a": "b"})
    lane.start()
    try:
        with pytest.raises(OSError):
            lane.post("/v1/jobs", document)
        assert lane.process is not None
        assert lane.process.wait(PATIENCE_S) == -9
        lane.statement = ""
        lane.start()
        assert all(rows == [] for name, rows in all_rows(lane).items() if name.startswith("job"))
        again = lane.post("/v1/jobs", document)
        assert (again.status, again.json["replayed"], again.json["labels"]) == (201, False, {"a": "b"})
        assert lane.wait(again.json["id"])["status"] == "done"
        assert lane.stop() == 0
        assert server.count() == 1
    finally:
        if lane.process is not None and lane.process.poll() is None:
            lane.kill()
