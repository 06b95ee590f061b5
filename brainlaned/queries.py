"""Every statement that only reads: jobs as the wire shows them, the lane at a glance, what is left to recover.

A function takes a read connection of `db.read()`, or the transaction in which the answer must hold. Lists never touch
the tables of prompts and answers. Why a job waits and what may be done next comes from operator_view, nowhere else.
"""

import heapq
import json
import sqlite3
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol

from . import errors, states, wire
from .wire import AttemptStatus, Status, Waiting

POSITION_BOUND = 1000
"""A place further back than this in line is not told."""


TYPICAL_OF = 20
"""So many answers of a route say how long the next one may take."""

_LOOKED_AT = 1000
"""Among so many of the last finished jobs they are looked for."""

_MOST_PIECES = 64

Stored = Literal["request", "text", "part"]
"""The prompt; what the submitter gets; what an attempt brought besides."""

_PLACES: dict[Stored, str] = {
    "request": "select 'job_requests', job_id from job_requests where job_id = :id",
    "text": "select 'job_outputs', job_id from job_outputs where job_id = :id",
    "part": "select 'attempt_parts', rowid from attempt_parts where job_id = :id and attempt = :attempt",
}
"""Where each of them stands: the table and the rowid."""


class Executes(Protocol):
    """A read connection or a transaction."""

    def execute(self, sql: str, params: Mapping[str, Any] = ..., /) -> sqlite3.Cursor: ...


@dataclass(frozen=True, slots=True)
class Found:
    """The two rows of a running attempt; None for the one that does not say so."""

    job: sqlite3.Row | None
    attempt: sqlite3.Row | None


def left_running(source: Executes) -> list[sqlite3.Row]:
    """Return (job_id, attempt, route) of all that says it is running."""
    return source.execute(
        """
        select job_id, attempt, route from job_attempts where status = 'running'
        union
        select id, attempt_count, route from jobs where status = 'running'
        order by job_id, attempt
        """,
        {},
    ).fetchall()


def running_attempt(source: Executes, job_id: int, attempt: int) -> Found:
    """Return the rows of an attempt, as far as they still say that it is running."""
    job = source.execute(
        "select * from jobs where id = :id and status = 'running' and attempt_count = :attempt",
        {"id": job_id, "attempt": attempt},
    ).fetchone()
    row = source.execute(
        "select * from job_attempts where job_id = :id and attempt = :attempt and status = 'running'",
        {"id": job_id, "attempt": attempt},
    ).fetchone()
    return Found(job, row)


def attempt_states(
    source: Executes, attempts: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], AttemptStatus | None]:
    """Return the status of each (job id, attempt); None for one that the database does not know."""
    known: dict[tuple[int, int], AttemptStatus | None] = {}
    for job_id, attempt in attempts:
        row = source.execute(
            "select status from job_attempts where job_id = :id and attempt = :attempt",
            {"id": job_id, "attempt": attempt},
        ).fetchone()
        known[job_id, attempt] = AttemptStatus(row[0]) if row else None
    return known


def ending_of(source: Executes, run: str) -> str | None:
    """Return how a run of the daemon ended, in words; None where nobody knows."""
    row = source.execute("select ending from runs where run = :run", {"run": run}).fetchone()
    return row["ending"] if row is not None else None


def next_wake(source: Executes, now: str) -> str | None:
    """Return the next time after `now` at which something may become due, or None."""
    row = source.execute(
        """
        select min(due) from (
            select min(due_at) as due from jobs indexed by due where status = 'queued' and due_at > :now
            union all
            select min(next_probe_at) from gates where next_probe_at > :now
        )
        """,
        {"now": now},
    ).fetchone()
    next_time: str | None = row[0]
    return next_time


def oldest_finished(source: Executes) -> tuple[str | None, str | None]:
    """Return when the oldest finished job ended that still has prompt and answer, and the oldest of all."""
    with_payload = source.execute(
        "select min(finished_at) from jobs indexed by with_payload where finished_at is not null and erased_at is null",
        {},
    ).fetchone()[0]
    oldest = source.execute(
        "select min(finished_at) from jobs indexed by finished where finished_at is not null", {}
    ).fetchone()[0]
    return with_payload, oldest


def job_status(source: Executes, job_id: int) -> Status:
    """Return where a job stands. Raises Refused (no-such-job)."""
    row = source.execute("select status from jobs where id = :id", {"id": job_id}).fetchone()
    if row is None:
        raise _no_such_job(job_id)
    return Status(row[0])


def submitter_uid(source: Executes, job_id: int) -> int:
    """Return whose job it is. Raises Refused (no-such-job)."""
    row = source.execute("select submitter_uid from jobs where id = :id", {"id": job_id}).fetchone()
    if row is None:
        raise _no_such_job(job_id)
    uid: int = row[0]
    return uid


def job(source: Executes, job_id: int, *, stuck: Waiting | None = None, with_place: bool = False) -> dict[str, Any]:
    """Return one job as the wire shows it. Raises Refused (no-such-job).

    Its place in line has to be counted, so it is left out unless somebody looks.
    """
    row = source.execute(_JOBS + " where jobs.id = :id", {"id": job_id}).fetchone()
    if row is None:
        raise _no_such_job(job_id)
    return _job_object(row, stuck, _line(source) if with_place and row["status"] == Status.QUEUED else {})


def job_with_attempts(source: Executes, job_id: int, *, stuck: Waiting | None = None) -> dict[str, Any]:
    """Return one job with every attempt's evidence and every decision about it. Raises Refused (no-such-job)."""
    shown = job(source, job_id, stuck=stuck, with_place=True)
    attempts = source.execute(
        """
        select job_attempts.*,
            (
                select length(cast(text as blob)) from attempt_parts
                where attempt_parts.job_id = job_attempts.job_id and attempt_parts.attempt = job_attempts.attempt
            ) as part_bytes
        from job_attempts
        where job_id = :id order by attempt
        """,
        {"id": job_id},
    )
    shown["attempts"] = [_attempt_object(row) for row in attempts]
    decisions = source.execute(
        """
        select action, attempt, reason, at, uid, user_name as user, pid from decisions where job_id = :id order by id
        """,
        {"id": job_id},
    )
    shown["decisions"] = [dict(row) for row in decisions]
    return shown


@dataclass(frozen=True, slots=True)
class Selection:
    """What a list is to hold."""

    status: Status | None = None
    route: str | None = None
    label: tuple[str, str] | None = None
    submitter_uid: int | None = None
    since: str | None = None
    until: str | None = None
    """Accepted at or after, and before, these times."""
    after: int | None = None
    limit: int = 50


def jobs(source: Executes, selection: Selection, *, stuck: Waiting | None = None) -> dict[str, Any]:
    """Return jobs, newest first, and the cursor of those that follow (None: no more)."""
    label_key, label_value = selection.label or (None, None)
    wanted = {
        "status": selection.status,
        "submitter_uid": selection.submitter_uid,
        "route": selection.route,
    }
    given = [name for name, value in wanted.items() if value is not None]
    # One index leads, in the order of ids, and the others only look (a plus keeps SQLite from an index of theirs): of
    # what is not over there is little, of what is over the most.
    if selection.status in states.FINAL and len(given) > 1:
        given = [*given[1:], "status"]
    conditions = [f"{'+' if number else ''}jobs.{name} = :{name}" for number, name in enumerate(given)]
    conditions += ["jobs.id >= :first", "jobs.id < :after"]
    if selection.since is not None:
        conditions.append("+jobs.created_at >= :since")
    if selection.until is not None:
        conditions.append("+jobs.created_at < :until")
    if selection.label is not None:
        conditions.append("jobs.id in (select job_id from job_labels where key = :label_key and value = :label_value)")
    first, end = _ids_between(source, selection.since, selection.until)
    rows = source.execute(
        f"{_JOBS} where {' and '.join(conditions)} order by jobs.id desc limit :limit",
        {
            **wanted,
            "first": first,
            "after": end if selection.after is None else min(selection.after, end),
            "since": selection.since,
            "until": selection.until,
            "label_key": label_key,
            "label_value": label_value,
            "limit": selection.limit + 1,
        },
    ).fetchall()
    shown = rows[: selection.limit]
    line = _line(source) if any(row["status"] == Status.QUEUED for row in shown) else {}
    return {
        "jobs": [_job_object(row, stuck, line) for row in shown],
        "next": shown[-1]["id"] if len(rows) > len(shown) else None,
    }


def _ids_between(source: Executes, since: str | None, until: str | None) -> tuple[int, int]:
    """Return the lowest id that can have been accepted then, and the one after the highest.

    Ids grow with time but for a clock that was set back, so some neighbours are looked at too.
    """
    first, end = 0, 2**63 - 1
    if since is not None:
        row = source.execute(
            "select min(id) from (select id from jobs where created_at >= :since order by created_at limit :some)",
            {"since": since, "some": _LOOKED_AT},
        ).fetchone()
        first = end if row[0] is None else row[0]
    if until is not None:
        row = source.execute(
            "select max(id) from (select id from jobs where created_at < :until order by created_at desc limit :some)",
            {"until": until, "some": _LOOKED_AT},
        ).fetchone()
        end = 0 if row[0] is None else row[0] + 1
    return first, end


def stored_piece(
    source: sqlite3.Connection, job_id: int, what: Stored, offset: int, size: int, attempt: int = 0
) -> tuple[bytes, int]:
    """Return about so many bytes, from an offset on, of what was asked or answered, and how many there are in all.

    They are read where they stand, so that a long text is nowhere as a whole. Raises Refused (no-such-job, no-output).
    """
    row = source.execute(_PLACES[what], {"id": job_id, "attempt": attempt}).fetchone()
    if row is None:
        raise _no_output(source, job_id, what)
    table, rowid = row
    with source.blobopen(table, "request" if what == "request" else "text", rowid, readonly=True) as blob:
        blob.seek(min(offset, len(blob)))
        # To come to a place SQLite walks all pages before it, so a long text is read in larger pieces, not in more.
        return blob.read(max(size, len(blob) // _MOST_PIECES)), len(blob)


def response_frame(source: Executes, job_id: int) -> tuple[str, str | None]:
    """Return the completion object as JSON in two pieces, between which the text belongs; None: it has none.

    Raises Refused (no-such-job, no-output).
    """
    row = source.execute("select response from job_outputs where job_id = :id", {"id": job_id}).fetchone()
    if row is None or row[0] is None:
        raise _no_output(source, job_id, "response")
    # No string before it can hold this, since a quote in one is escaped.
    before, text, after = row[0].partition('"content": ""')
    return (before + '"content": ', after) if text else (before, None)


def latest(source: Executes, job_id: int) -> tuple[int, Status, Stored | None]:
    """Return a job's latest attempt, where the job stands, and what text of it is in the database.

    Raises Refused (no-such-job).
    """
    row = source.execute(
        """
        select jobs.attempt_count, jobs.status, case
            when exists (select 1 from job_outputs where job_id = jobs.id) then 'text'
            when exists (
                select 1 from attempt_parts where job_id = jobs.id and attempt = jobs.attempt_count
            ) then 'part'
        end
        from jobs where jobs.id = :id
        """,
        {"id": job_id},
    ).fetchone()
    if row is None:
        raise _no_such_job(job_id)
    return row[0], Status(row[1]), row[2]


def is_work_waiting(source: Executes) -> bool:
    """Say whether a claim at this moment would find something to do: a job, or one that has become due.

    Whose route is closed is not asked of those that are due: the claim clears them all, and they are not due again.
    """
    now = "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')"
    row = source.execute(
        f"""
        select lane.paused_at is null and lane.disk_low_since is null and (
            exists (
                select 1 from jobs indexed by due
                where status = 'queued' and due_at is not null and due_at <= {now}
            )
            or exists (
                select 1 from gates
                where gates.configured = 1 and (gates.closed_at is null or gates.next_probe_at <= {now}) and exists (
                    select 1 from jobs indexed by line
                    where status = 'queued' and due_at is null and route = gates.route
                )
            )
        )
        from lane
        """,  # noqa: S608 - the only thing put in is the constant above
        {},
    ).fetchone()
    return bool(row[0])


def at_a_glance(source: Executes) -> tuple[int | None, int, int]:
    """Return the running job's id, and how many jobs are queued and held."""
    running = source.execute("select id from jobs where status = 'running'", {}).fetchone()
    counted = source.execute("select status, sum(jobs) as jobs from job_counts group by status", {})
    counts = {row["status"]: row["jobs"] for row in counted}
    return running["id"] if running else None, counts.get(Status.QUEUED, 0), counts.get(Status.HELD, 0)


def lane(source: Executes) -> dict[str, Any]:
    """Return the lane at a glance: gates, counts, the running job, the oldest wait, what needs a person."""
    paused = source.execute("select paused_at, paused_by, paused_reason, disk_low_since from lane", {}).fetchone()
    counts = {status.value: 0 for status in Status}
    queued: dict[str, int] = {}
    for row in source.execute("select route, status, jobs from job_counts", {}):
        counts[row["status"]] += row["jobs"]
        if row["status"] == Status.QUEUED and row["jobs"]:
            queued[row["route"]] = row["jobs"]
    gates = source.execute("select * from gates where configured = 1 order by route", {})
    typical = {route: _typical_s(source, route) for route in queued}
    known = [(jobs, typical_s) for route, jobs in queued.items() if (typical_s := typical[route]) is not None]
    routes = [
        {
            "route": row["route"],
            "open": row["closed_at"] is None,
            "reason": row["reason"],
            "detail": row["detail"],
            "since": row["closed_at"],
            "next_probe_at": row["next_probe_at"],
            "queued": queued.get(row["route"], 0),
            "typical_s": typical.get(row["route"]),
        }
        for row in gates
    ]
    running = source.execute(
        """
        select jobs.id, job_attempts.attempt, jobs.route, jobs.model, job_attempts.started_at as since,
            job_attempts.armed_at, jobs.cancel_requested_at,
            round((julianday('now') - julianday(job_attempts.started_at)) * 86400, 3) as elapsed_s
        from jobs join job_attempts on job_attempts.job_id = jobs.id and job_attempts.attempt = jobs.attempt_count
        where jobs.status = 'running'
        """,
        {},
    ).fetchone()
    oldest = source.execute(
        """
        select id, created_at, round((julianday('now') - julianday(created_at)) * 86400, 3) as age_s
        from jobs indexed by acceptance where status = 'queued' order by created_at limit 1
        """,
        {},
    ).fetchone()
    held = source.execute(
        """
        select jobs.id, jobs.status, jobs.reason, jobs.detail, operator_view.next_action
        from jobs join operator_view using (id) where jobs.status = 'held' order by jobs.id desc limit 20
        """,
        {},
    )
    last_run = source.execute("select * from runs order by started_at desc, rowid desc limit 1 offset 1", {}).fetchone()
    return {
        "lane": {
            "state": "open" if paused["paused_at"] is None else "paused",
            "paused_at": paused["paused_at"],
            "paused_by": paused["paused_by"],
            "paused_reason": paused["paused_reason"],
            "disk_reserve": paused["disk_low_since"] is not None,
        },
        "routes": routes,
        "counts": counts,
        "estimate_s": round(sum(jobs * typical_s for jobs, typical_s in known), 3)
        if len(known) == len(queued)
        else None,
        "running": dict(running) if running else None,
        "oldest_queued": dict(oldest) if oldest else None,
        "needs_person": [dict(row) for row in held],
        "last_run": dict(last_run) if last_run else None,
    }


def _typical_s(source: Executes, route: str) -> float | None:
    """Return the median time that the last answers of a route took, in seconds; None: there are none to go by."""
    rows = source.execute(
        """
        select (julianday(job_attempts.ended_at) - julianday(job_attempts.started_at)) * 86400 as took_s
        from (
            select id, route, status, attempt_count from jobs indexed by finished
            where finished_at is not null order by finished_at desc limit :looked_at
        ) as ended
        join job_attempts on job_attempts.job_id = ended.id and job_attempts.attempt = ended.attempt_count
        where ended.route = :route and ended.status = 'done' and job_attempts.status = 'succeeded'
        limit :typical_of
        """,
        {"route": route, "looked_at": _LOOKED_AT, "typical_of": TYPICAL_OF},
    ).fetchall()
    return round(statistics.median(row["took_s"] for row in rows), 3) if rows else None


_JOBS = """
select jobs.*, operator_view.waiting, operator_view.next_action,
    (select json_group_object(key, value) from job_labels where job_id = jobs.id) as labels
from jobs join operator_view using (id)
"""


def _job_object(row: sqlite3.Row, stuck: Waiting | None, line: Mapping[int, int]) -> dict[str, Any]:
    status = Status(row["status"])
    waiting = row["waiting"]
    if waiting is not None and stuck is not None:
        # A cause that may not stand in the database, since it is that the database cannot be written.
        waiting = stuck
    return {
        "id": row["id"],
        "key": row["key"],
        "status": status,
        "reason": row["reason"],
        "detail": row["detail"],
        "waiting": waiting,
        "next_action": row["next_action"],
        "final": status in states.FINAL,
        "route": row["route"],
        "model": row["model"],
        "priority": row["priority"],
        "labels": json.loads(row["labels"]),
        "flags": json.loads(row["flags"]),
        "usage": json.loads(row["usage"]) if row["usage"] else None,
        "finish_reason": row["finish_reason"],
        "max_attempts": row["max_attempts"] + row["extra_attempts"],
        "may_run_twice": bool(row["may_run_twice"]),
        "require_complete": bool(row["require_complete"]),
        "attempt_count": row["attempt_count"],
        "attempts_used": row["attempts_used"],
        "position": line.get(row["id"]),
        "request_bytes": row["request_bytes"],
        "created_at": row["created_at"],
        "not_before": row["not_before"],
        "due_at": row["due_at"],
        "moved_at": row["moved_at"],
        "started_at": row["started_at"],
        "finished_at": row["finished_at"],
        "erased_at": row["erased_at"],
        "cancel_requested_at": row["cancel_requested_at"],
        "submitter": {"uid": row["submitter_uid"], "user": row["submitter_name"], "pid": row["submitter_pid"]},
    }


def _line(source: Executes) -> dict[int, int]:
    """Return the places of those who are first in line, by their ids."""
    routes = source.execute("select route from gates", {}).fetchall()
    # Route by route the index alone has it all, in order.
    lines = [
        source.execute(
            """
            select place_at, id from jobs indexed by line
            where status = 'queued' and due_at is null and route = :route
            order by place_at, id limit :bound
            """,
            {"route": row["route"], "bound": POSITION_BOUND},
        ).fetchall()
        for row in routes
    ]
    first = islice(heapq.merge(*lines, key=tuple), POSITION_BOUND)
    return {row["id"]: place for place, row in enumerate(first, 1)}


def _attempt_object(row: sqlite3.Row) -> dict[str, Any]:
    shown = {
        name: row[name]
        for name in (
            "attempt",
            "status",
            "reason",
            "detail",
            "route",
            "model",
            "endpoint",
            "started_at",
            "armed_at",
            "sent_at",
            "send_failed_at",
            "headers_at",
            "http_status",
            "exit_status",
            "upstream_id",
            "first_byte_at",
            "ended_at",
            "finish_reason",
            "part_bytes",
            "run",
        )
    }
    shown["may_run_twice"] = bool(row["may_run_twice"])
    shown["flags"] = json.loads(row["flags"])
    shown["usage"] = json.loads(row["usage"]) if row["usage"] else None
    shown["billed"] = _billed(row)
    return shown


def _billed(row: sqlite3.Row) -> str:
    if row["armed_at"] is None or (row["send_failed_at"] is not None and row["headers_at"] is None):
        return "no"
    if row["exit_status"] == 0 or (row["http_status"] is not None and 200 <= row["http_status"] < 300):
        return "yes"
    if row["http_status"] is not None and 300 <= row["http_status"] < 500:
        return "no"
    return "possibly"


def _no_such_job(job_id: int) -> errors.Refused:
    return errors.Refused(
        wire.ErrorKind.NO_SUCH_JOB, f"cannot find job {job_id}: no such job", next_action="brainctl list"
    )


def _no_output(source: Executes, job_id: int, what: Stored | Literal["response"]) -> errors.Refused:
    row = source.execute("select status, erased_at from jobs where id = :id", {"id": job_id}).fetchone()
    if row is None:
        return _no_such_job(job_id)
    called = {"request": "prompt", "response": "completion object"}.get(what, "output")
    why = f"was erased at {row['erased_at']}" if row["erased_at"] else f"is not there: the job is {row['status']}"
    return errors.Refused(
        wire.ErrorKind.NO_OUTPUT,
        f"cannot read the {called} of job {job_id}: it {why}",
        next_action=f"brainctl show {job_id}",
        retry_safe=True,
    )
