"""What a large table costs: claim, status, list and show, and a start, with few and with very many finished jobs."""

import sqlite3
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

from brainlaned import config, db, store
from tests.bench.clients import ask, opened
from tests.bench.results import Latencies
from tests.bench.stand import Bench, BenchLane

FEW = 1000
WAITING = 100
LOOKS = 300
STARTS = 7
PATHS = {
    "status": "/v1/status",
    "list": "/v1/jobs?limit=50",
    "show": "/v1/jobs/{middle}",
    "list_of_status": "/v1/jobs?limit=50&status=failed",
    "list_of_nothing": "/v1/jobs?limit=50&status=held&route=local",
}

# Of the last day, so that none is old enough to be pruned. Every fifth failed; requests and answers have the length of
# a sentence or two.
_FILL = """
with recursive n(i) as (select 1 union all select i + 1 from n where i < :rows)
insert into jobs (id, digest, submitter_uid, route, model, names_model, status, reason, moved_at, priority,
    max_attempts, attempts_used, attempt_count, may_run_twice, require_complete, request_bytes, created_at, place_at,
    started_at, finished_at)
select i, 'digest', 0, 'local', 'test-model', 0, case when i % 5 then 'done' else 'failed' end,
    case when i % 5 then 'answered' else 'bad-request' end, at, 'normal', 3, 1, 1, 0, 0, 200, at, at, at, at
from (select i, strftime('%Y-%m-%dT%H:%M:%fZ', julianday('now') - 1 + i / (:rows * 1.0)) as at from n)
"""
_ATTEMPTS = """
insert into job_attempts (job_id, attempt, run, status, reason, route, model, may_run_twice, started_at, armed_at,
    sent_at, headers_at, http_status, ended_at)
select id, 1, 'run', case status when 'done' then 'succeeded' else 'failed' end, reason, route, model, 0, started_at,
    started_at, started_at, started_at, 200, finished_at
from jobs
"""
_TEXTS = (
    "insert into job_requests (job_id, request) select id, printf('%.200c', 'x') from jobs",
    "insert into job_outputs (job_id, text) select id, printf('%.200c', 'y') from jobs where status = 'done'",
)


class _Undo(Exception):
    """Ends a transaction without keeping what it did."""


def large_table(bench: Bench) -> None:
    """Measure everything in turns, so that what else the machine does meets the small table and the large one alike."""
    lanes = {"few": bench.stopped_lane("few"), "many": bench.stopped_lane("many")}
    rows = {"few": FEW, "many": bench.rows}
    for size, lane in lanes.items():
        lane.start()  # which migrates
        lane.stop()
        _fill(lane.database, rows[size])
    found = {f"boot_s_{size}": seconds for size, seconds in _boots(lanes).items()}
    claims = {size: _claims(lane.database) for size, lane in lanes.items()}
    found |= {f"claim_ms_{size}": median for size, median in _in_turns(claims).items()}
    with bench.lane("few") as few, bench.lane("many") as many:
        for name, path in PATHS.items():
            looks = {
                size: _looks(lane, path.format(middle=rows[size] // 2)) for size, lane in (("few", few), ("many", many))
            }
            found |= {f"{name}_ms_{size}": median for size, median in _in_turns(looks).items()}
    bench.note(**found, rows=bench.rows)
    for lane in lanes.values():
        for leftover in lane.directory.glob("state/brainlane.db*"):
            leftover.unlink()


def _in_turns(sources: dict[str, Iterator[float]]) -> dict[str, float]:
    """Take one measurement of each in turns, and return the medians in milliseconds."""
    taken: dict[str, list[float]] = {size: [] for size in sources}
    for _ in range(LOOKS):
        for size, source in sources.items():
            taken[size].append(next(source))
    for source in sources.values():
        next(source, None)  # lets it clean up after itself
    return {size: Latencies(seconds).p50_ms for size, seconds in taken.items()}


def _looks(lane: BenchLane, path: str) -> Iterator[float]:
    connection = opened(lane.socket)
    ask(connection, "GET", path)
    for _ in range(LOOKS):
        since = time.perf_counter()
        ask(connection, "GET", path)
        yield time.perf_counter() - since
    connection.close()


def _fill(path: Path, rows: int) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma synchronous = off")
        connection.execute("pragma cache_size = -200000")
        # Counted by a trigger for each row, as always, would take half a minute.
        trigger = connection.execute("select sql from sqlite_master where name = 'count_inserted'").fetchone()[0]
        connection.execute("begin immediate")
        connection.execute("drop trigger count_inserted")
        connection.execute(_FILL, {"rows": rows})
        connection.execute(trigger)
        connection.execute(
            "insert into job_counts (route, status, jobs) select route, status, count(*) from jobs group by 1, 2"
        )
        for statement in (_ATTEMPTS, *_TEXTS):
            connection.execute(statement)
        connection.execute("commit")
        connection.execute("pragma wal_checkpoint(truncate)")


def _claims(path: Path) -> Iterator[float]:
    """Time the claim's own transaction, with some jobs waiting, and take everything back."""
    route = config.Route(name="local", base_url="http://127.0.0.1:9/v1", model="test-model")
    database = db.Database(path)
    submission = store.Submission(
        request='{"messages":[]}', digest="d", route="local", model="m", names_model=False, max_attempts=3
    )
    with database.write() as tx:
        waiting = [store.accept(tx, submission, store.Caller(0), 0, 10**9)[0] for _ in range(WAITING)]
    for _ in range(LOOKS):
        with suppress(_Undo), database.write() as tx:
            since = time.perf_counter()
            claim = store.claim_next(tx, [config.OpenRoute(route, is_probe=False)], "run")
            elapsed = time.perf_counter() - since
            assert claim is not None
            raise _Undo
        yield elapsed
    with database.write() as tx:
        for job_id in waiting:
            tx.execute("delete from jobs where id = :id", {"id": job_id})
    database.close()


def _boots(lanes: Mapping[str, BenchLane]) -> dict[str, float]:
    """Return how long a start takes until the lane answers, in the middle of a few, in seconds."""
    taken: dict[str, list[float]] = {size: [] for size in lanes}
    for _ in range(STARTS):
        for size, lane in lanes.items():
            since = time.perf_counter()
            lane.start(wait=False)
            _until_it_answers(lane)
            taken[size].append(time.perf_counter() - since)
            lane.stop()
    return {size: statistics.median(seconds) for size, seconds in taken.items()}


def _until_it_answers(lane: BenchLane) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            connection = opened(lane.socket)
            ask(connection, "GET", "/v1/healthz")
            return connection.close()
        except OSError:
            time.sleep(0.002)  # for the daemon to listen
    raise TimeoutError("the daemon did not start")
