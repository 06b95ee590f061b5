"""`brainlaned --verify`: is what a stopped lane has kept whole? No row is changed.

It asks SQLite whether the file is sound, and then whether the rows keep the promises of the lane: what is running has
its attempt, what is done has its answer, what is counted is there, and every file of the spool belongs to an attempt.
"""

import sqlite3
from collections.abc import Iterator

from . import queries
from .db import Database
from .spool import Spool

_PROMISES = {
    "a running job has its running attempt": """
        select jobs.id from jobs left join job_attempts
            on job_attempts.job_id = jobs.id and job_attempts.attempt = jobs.attempt_count
                and job_attempts.status = 'running'
        where jobs.status = 'running' and job_attempts.job_id is null
        union select job_id from job_attempts join jobs on jobs.id = job_id
        where job_attempts.status = 'running' and (jobs.status <> 'running' or jobs.attempt_count <> attempt)
    """,
    "what is done has its answer": """
        select id from jobs left join job_outputs on job_id = id
        where status = 'done' and erased_at is null and job_id is null
    """,
    "what is not erased has its prompt": """
        select id from jobs left join job_requests on job_id = id where erased_at is null and job_id is null
    """,
    "what is counted is there": """
        with
            counted as (select route, status, jobs from job_counts where jobs <> 0),
            there as (select route, status, count(*) as jobs from jobs group by route, status)
        select route || ' ' || status from (select * from counted except select * from there)
        union select route || ' ' || status from (select * from there except select * from counted)
    """,
}
_SHOWN = 5


def look(database: Database, spool: Spool) -> Iterator[tuple[bool, str]]:
    """Yield for each thing looked at whether all is well, and one line about it."""
    try:
        with database.read() as connection:
            for pragma in ("integrity_check", "foreign_key_check"):
                wrong = [str(row[0]) for row in connection.execute(f"pragma {pragma}") if row[0] != "ok"]
                yield _line(pragma.replace("_", " "), wrong)
            for promise, sql in _PROMISES.items():
                yield _line(promise, [str(row[0]) for row in connection.execute(sql)])
            known = queries.attempt_states(connection, spool.attempts())
            strays = [f"{job_id}-{attempt}" for (job_id, attempt), status in known.items() if status is None]
            yield _line("every file of the spool belongs to an attempt", strays)
            counts = connection.execute("select count(*), (select count(*) from job_attempts) from jobs").fetchone()
            yield True, f"{counts[0]} jobs, {counts[1]} attempts"
    except (sqlite3.DatabaseError, OSError) as error:
        yield False, f"cannot be read: WRONG: {error}"


def _line(what: str, wrong: list[str]) -> tuple[bool, str]:
    if not wrong:
        return True, f"{what}: ok"
    return False, f"{what}: WRONG: {', '.join(wrong[:_SHOWN])}{', ...' if len(wrong) > _SHOWN else ''}"
