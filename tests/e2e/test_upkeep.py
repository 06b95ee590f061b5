"""What a lane does for itself while it runs: the write-ahead log stays short, and what is old is let go."""

import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from brainlaned import upkeep
from brainlaned.wire import format_time
from tests.brainserver import BrainServer, answer
from tests.lane import Lane, config_for, living, wait_until

MIB = 2**20
PATIENCE_S = 60.0

IMPATIENT = """
import sys
from brainlaned import __main__ as program, upkeep

upkeep.PIN_AGAIN_S = float(sys.argv.pop(1))
program.main()
"""


class ImpatientLane(Lane):
    """A lane whose daemon looks soon again at a log that somebody holds."""

    def command(self, *, cut: str | None = None, times: int = 1) -> list[str]:
        _, _, _, *options = super().command(cut=cut, times=times)
        return [sys.executable, "-c", IMPATIENT, "0.2", *options]


@pytest.fixture
def impatient_lane(tmp_path: Path, server: BrainServer) -> Iterator[Lane]:
    with living(ImpatientLane(tmp_path / "lane", config_for(server.base_url))) as lane:
        yield lane


def log_of(lane: Lane) -> Path:
    return lane.database.with_name("brainlane.db-wal")


def lines_of(lane: Lane, words: str) -> list[str]:
    return [line for line in lane.log.read_text().splitlines() if words in line]


def large_jobs(lane: Lane, server: BrainServer, count: int) -> None:
    """Run jobs whose answers of a mebibyte are quick, and write several times as much to the log."""
    server.script(*[answer(tokens=["x" * MIB]) for _ in range(count)])
    jobs = [lane.submit("much")["id"] for _ in range(count)]
    for job_id in jobs:
        assert lane.wait(job_id, 120)["status"] == "done"


# The log


class Followers:
    """Clients that list, show, wait and follow for as long as they are let, and a look at the log now and then."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._stop = threading.Event()
        self.longest_log = 0
        self.looks = 0
        self._threads = [threading.Thread(target=each) for each in (self._list, self._follow, self._measure)]

    def __enter__(self) -> "Followers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _list(self) -> None:
        while not self._stop.is_set():
            jobs = self._lane.get("/v1/jobs?limit=50").json["jobs"]
            self._lane.get("/v1/status")
            if jobs:
                self._lane.get(f"/v1/jobs/{jobs[0]['id']}?wait=0.2")
            self.looks += 1

    def _follow(self) -> None:
        while not self._stop.is_set():
            jobs = self._lane.get("/v1/jobs?status=running").json["jobs"]
            if jobs:
                self._lane.get(f"/v1/jobs/{jobs[0]['id']}/stream")
            self._stop.wait(0.05)  # for a job to run

    def _measure(self) -> None:
        while not self._stop.wait(0.02):  # for the log to grow
            self.longest_log = max(self.longest_log, log_of(self._lane).stat().st_size)


def test_clients_that_follow_for_the_whole_time_do_not_make_the_log_grow(lane: Lane, server: BrainServer) -> None:
    with Followers(lane) as followers:
        large_jobs(lane, server, 80)
        jobs = [lane.submit(f"small {number}")["id"] for number in range(200)]
        assert lane.wait(jobs[-1], 120)["status"] == "done"
    assert followers.looks > 3
    # Far more than that has been written.
    assert sum(row["bytes"] for row in lane.rows("select length(text) as bytes from job_outputs")) > 64 * MIB
    assert 0 < followers.longest_log < 64 * MIB
    wait_until(lambda: log_of(lane).stat().st_size < 64 * MIB)
    assert lines_of(lane, "cannot be cut") == []


def test_during_a_call_nobody_keeps_a_snapshot_however_many_wait_and_follow(lane: Lane, server: BrainServer) -> None:
    held = server.hold()
    server.script(held)
    job = lane.submit()
    assert held.arrived.wait(PATIENCE_S)
    waiting = [
        threading.Thread(target=lane.get, args=(f"/v1/jobs/{job['id']}{what}",))
        for what in ("?wait=60", "/stream", "?wait=50", "/stream")
    ]
    for each in waiting:
        each.start()
    # Whoever held a snapshot of an earlier moment would keep this from being done: nothing is in the log afterwards.
    with closing(sqlite3.connect(lane.database, timeout=PATIENCE_S, isolation_level=None)) as foreign:
        for number in range(5):
            lane.submit(f"beside {number}")
            assert foreign.execute("pragma wal_checkpoint(truncate)").fetchone() == (0, 0, 0)
    assert lane.get(f"/v1/jobs/{job['id']}").json["status"] == "running"
    held.release()
    for each in waiting:
        each.join()


def test_a_foreign_reader_is_one_warning_with_the_size_and_the_log_shrinks_when_he_has_left(
    impatient_lane: Lane, server: BrainServer
) -> None:
    lane = impatient_lane
    with closing(sqlite3.connect(lane.database, isolation_level=None)) as reader:
        reader.execute("begin")
        reader.execute("select count(*) from jobs").fetchone()
        large_jobs(lane, server, 20)
        wait_until(lambda: bool(lines_of(lane, "cannot be cut")))
        large_jobs(lane, server, 5)
        assert log_of(lane).stat().st_size > 25 * MIB
        reader.execute("rollback")
    wait_until(lambda: log_of(lane).stat().st_size <= 16 * MIB)
    wait_until(lambda: bool(lines_of(lane, "is cut")))
    (warning,) = lines_of(lane, "cannot be cut")
    assert warning.startswith(f"<4>{log_of(lane)} has ")
    assert 16 <= int(warning.split(" has ")[1].split()[0]) <= 200
    assert len(lines_of(lane, "is cut: its reader has let go")) == 1


def test_a_log_that_somebody_holds_is_looked_at_soon_enough() -> None:
    assert upkeep.PIN_AGAIN_S < 60 / 3


# What is old

OLD_ROWS = 20_000

FILL = """
with recursive numbers (n) as (select 1 union all select n + 1 from numbers where n < :count)
insert into jobs (digest, submitter_uid, route, names_model, status, reason, moved_at, priority, max_attempts,
    may_run_twice, require_complete, request_bytes, created_at, place_at, started_at, attempt_count, finished_at)
select 'd', 0, 'local', 0, :status, 'answered', :created, 'normal', 3, 0, 0, 2, :created, :created, :created, 1,
    :finished
from numbers
"""


def days_ago(days: float) -> str:
    return format_time(datetime.now(UTC) - timedelta(days=days))


def fill(lane: Lane, count: int, status: str, *, created: float, finished: float | None) -> list[int]:
    """Put rows of the past into a stopped lane, and return their ids."""
    with closing(sqlite3.connect(lane.database)) as foreign, foreign:
        highest = foreign.execute("select coalesce(max(id), 0) from jobs").fetchone()[0]
        times = {"created": days_ago(created), "finished": None if finished is None else days_ago(finished)}
        foreign.execute(FILL, {"count": count, "status": status, **times})
        for statement in (
            "insert into job_requests select id, '{}' from jobs where id > ?",
            "insert into job_outputs (job_id, text) select id, 'said' from jobs where id > ? and status = 'done'",
            """
            insert into job_attempts (job_id, attempt, run, status, route, may_run_twice, started_at, ended_at)
            select id, 1, 'run', 'succeeded', 'local', 0, created_at, created_at from jobs where id > ?
            """,
        ):
            foreign.execute(statement, [highest])
        return [row[0] for row in foreign.execute("select id from jobs where id > ? order by id", [highest])]


def counted(lane: Lane) -> dict[str, int]:
    shown = lane.get("/v1/status").json["counts"]
    rows = {
        row["status"]: row["jobs"] for row in lane.rows("select status, count(*) as jobs from jobs group by status")
    }
    assert {status: jobs for status, jobs in shown.items() if jobs} == rows
    return rows


def test_after_a_start_exactly_what_is_too_old_is_let_go_and_the_lane_answers_meanwhile(
    make_lane: Any, server: BrainServer
) -> None:
    lane = make_lane(lane="keep_days = 30\nkeep_payload_days = 7")
    assert lane.wait(lane.submit("before")["id"])["status"] == "done"
    lane.post("/v1/lane/pause")
    queued = lane.submit("queued")["id"]
    assert lane.stop() == 0
    old = fill(lane, OLD_ROWS, "done", created=400, finished=31)
    (held,) = fill(lane, 1, "held", created=400, finished=None)
    middle = fill(lane, 10, "failed", created=400, finished=10)
    (young,) = fill(lane, 1, "done", created=400, finished=1 / 1440)
    with closing(sqlite3.connect(lane.database)) as foreign, foreign:
        foreign.execute("update jobs set created_at = ?, moved_at = ? where id = ?", [days_ago(400)] * 2 + [queued])
    lane.start()
    wait_until(lambda: lane.get("/v1/jobs?limit=5").status == 200 and bool(lines_of(lane, "let go with age")), 120)
    (line,) = lines_of(lane, "let go with age")
    assert line == f"<6>let go with age: prompt and answer of {len(middle)} jobs, the record of {len(old)}"

    assert counted(lane) == {"done": 2, "queued": 1, "held": 1, "failed": 10}
    assert lane.get(f"/v1/jobs/{old[0]}").status == 404
    for table in ("job_requests", "job_outputs", "job_attempts"):
        assert lane.rows(f"select count(*) as old from {table} where job_id between ? and ?", old[0], old[-1]) == [  # noqa: S608
            {"old": 0}
        ]
    for job_id in (held, queued, young):
        assert lane.get(f"/v1/jobs/{job_id}").json["erased_at"] is None
        assert lane.get(f"/v1/jobs/{job_id}/request").status == 200
    assert lane.get(f"/v1/jobs/{young}/output").body == b"said"
    shown = lane.get(f"/v1/jobs/{middle[0]}").json
    assert (shown["status"], shown["erased_at"] is not None, len(shown["attempts"])) == ("failed", True, 1)
    assert lane.get(f"/v1/jobs/{middle[0]}/request").error["kind"] == "no-output"

    # Nothing waits for any of this.
    lane.post("/v1/lane/resume")
    assert lane.wait(queued)["status"] == "done"
    assert lane.stop() == 0
    lane.start()
    wait_until(lambda: len(lines_of(lane, "is ready")) == 3)
    assert lane.get(f"/v1/jobs/{held}").json["status"] == "held"
    assert len(lines_of(lane, "let go with age")) == 1


def test_a_file_from_which_much_was_let_go_is_used_again(make_lane: Any) -> None:
    lane = make_lane(lane="keep_days = 30")
    assert lane.stop() == 0
    fill(lane, 3000, "done", created=400, finished=31)
    size = lane.database.stat().st_size
    lane.start()
    wait_until(lambda: bool(lines_of(lane, "let go with age")))
    assert lane.stop() == 0
    fill(lane, 2000, "done", created=10, finished=10)
    assert lane.database.stat().st_size <= size * 1.1
    lane.start()
