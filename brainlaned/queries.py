"""Every statement that only reads: jobs as the wire shows them, the lane at a glance, what is left to recover.

A function takes a read connection of `db.read()`, or the transaction in which the answer must hold. Lists never touch
the tables of prompts and answers. Why a job waits and what may be done next comes from operator_view, nowhere else.
"""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from . import errors, states, wire
from .wire import AttemptStatus, Status, Waiting

POSITION_BOUND = 1000
"""A place further back than this in the line of one route is not counted out."""


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


def job(source: Executes, job_id: int, *, answer_waiting: bool = False) -> dict[str, Any]:
    """Return one job as the wire shows it. Raises Refused (no-such-job)."""
    row = source.execute(_JOBS + " where jobs.id = :id", {"id": job_id}).fetchone()
    if row is None:
        raise _no_such_job(job_id)
    return _job_object(source, row, answer_waiting)


def job_with_attempts(source: Executes, job_id: int, *, answer_waiting: bool = False) -> dict[str, Any]:
    """Return one job with every attempt's evidence and every decision about it. Raises Refused (no-such-job)."""
    shown = job(source, job_id, answer_waiting=answer_waiting)
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
    after: int | None = None
    limit: int = 50
    submitter_uid: int | None = None


def jobs(source: Executes, selection: Selection, *, answer_waiting: bool = False) -> dict[str, Any]:
    """Return jobs, newest first, and the cursor of those that follow (None: no more)."""
    conditions = ["jobs.id < :after"]
    if selection.status is not None:
        conditions.append("jobs.status = :status")
    if selection.route is not None:
        conditions.append("jobs.route = :route")
    if selection.submitter_uid is not None:
        conditions.append("jobs.submitter_uid = :uid")
    if selection.label is not None:
        conditions.append("jobs.id in (select job_id from job_labels where key = :label_key and value = :label_value)")
    label_key, label_value = selection.label or (None, None)
    rows = source.execute(
        f"{_JOBS} where {' and '.join(conditions)} order by jobs.id desc limit :limit",
        {
            "after": selection.after if selection.after is not None else 2**63 - 1,
            "status": selection.status,
            "route": selection.route,
            "uid": selection.submitter_uid,
            "label_key": label_key,
            "label_value": label_value,
            "limit": selection.limit + 1,
        },
    ).fetchall()
    shown = rows[: selection.limit]
    return {
        "jobs": [_job_object(source, row, answer_waiting) for row in shown],
        "next": shown[-1]["id"] if len(rows) > len(shown) else None,
    }


def output(source: Executes, job_id: int) -> str:
    """Return the text that the submitter gets. Raises Refused (no-such-job, no-output)."""
    status = job_status(source, job_id)
    row = source.execute("select text from job_outputs where job_id = :id", {"id": job_id}).fetchone()
    if row is None:
        raise _no_output(job_id, status)
    text: str = row[0]
    return text


def response(source: Executes, job_id: int) -> str:
    """Return the assembled completion object as JSON. Raises Refused (no-such-job, no-output)."""
    status = job_status(source, job_id)
    row = source.execute("select response from job_outputs where job_id = :id", {"id": job_id}).fetchone()
    if row is None or row[0] is None:
        raise _no_output(job_id, status)
    document: str = row[0]
    return document


def part(source: Executes, job_id: int) -> tuple[str | None, int, Status]:
    """Return the text that the latest attempt brought, its number, and where the job stands. None: not in the database.

    Raises Refused (no-such-job).
    """
    status = job_status(source, job_id)
    row = source.execute(
        """
        select jobs.attempt_count as attempt, coalesce(job_outputs.text, attempt_parts.text) as text
        from jobs
        left join job_outputs on job_outputs.job_id = jobs.id
        left join attempt_parts on attempt_parts.job_id = jobs.id and attempt_parts.attempt = jobs.attempt_count
        where jobs.id = :id
        """,
        {"id": job_id},
    ).fetchone()
    return row["text"], row["attempt"], status


def is_work_waiting(source: Executes) -> bool:
    """Say whether a job could be claimed at this moment."""
    now = "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')"
    row = source.execute(
        f"""
        select exists (
            select 1 from gates cross join lane
            where gates.configured = 1 and lane.paused_at is null and lane.disk_low_since is null
                and (gates.closed_at is null or gates.next_probe_at <= {now})
                and (
                    exists (select 1 from jobs indexed by line
                        where status = 'queued' and due_at is null and route = gates.route)
                    or exists (select 1 from jobs indexed by due
                        where status = 'queued' and due_at is not null and due_at <= {now} and route = gates.route)
                )
        )
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
        if row["status"] == Status.QUEUED:
            queued[row["route"]] = row["jobs"]
    gates = source.execute("select * from gates where configured = 1 order by route", {})
    routes = [
        {
            "route": row["route"],
            "open": row["closed_at"] is None,
            "reason": row["reason"],
            "detail": row["detail"],
            "since": row["closed_at"],
            "next_probe_at": row["next_probe_at"],
            "queued": queued.get(row["route"], 0),
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
        "running": dict(running) if running else None,
        "oldest_queued": dict(oldest) if oldest else None,
        "needs_person": [dict(row) for row in held],
        "last_run": dict(last_run) if last_run else None,
    }


_JOBS = """
select jobs.*, operator_view.waiting, operator_view.next_action,
    (select json_group_object(key, value) from job_labels where job_id = jobs.id) as labels
from jobs join operator_view using (id)
"""


def _job_object(source: Executes, row: sqlite3.Row, answer_waiting: bool) -> dict[str, Any]:
    status = Status(row["status"])
    waiting = row["waiting"]
    if waiting is not None and answer_waiting:
        # The one cause that cannot stand in the database: it is that the database cannot be written.
        waiting = Waiting.ANSWER_WAITING
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
        "position": _position(source, row) if status is Status.QUEUED and row["due_at"] is None else None,
        "request_bytes": row["request_bytes"],
        "created_at": row["created_at"],
        "not_before": row["not_before"],
        "due_at": row["due_at"],
        "moved_at": row["moved_at"],
        "started_at": row["started_at"],
        "finished_at": row["finished_at"],
        "cancel_requested_at": row["cancel_requested_at"],
        "submitter": {"uid": row["submitter_uid"], "user": row["submitter_name"], "pid": row["submitter_pid"]},
    }


def _position(source: Executes, row: sqlite3.Row) -> int:
    ahead = source.execute(
        """
        select sum((
            select count(*) from (
                select 1 from jobs
                where status = 'queued' and due_at is null and route = gates.route
                    and (place_at, id) < (:place_at, :id)
                limit :bound
            )
        ))
        from gates
        """,
        {"place_at": row["place_at"], "id": row["id"], "bound": POSITION_BOUND},
    ).fetchone()[0]
    return 1 + int(ahead or 0)


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


def _no_output(job_id: int, status: Status) -> errors.Refused:
    return errors.Refused(
        wire.ErrorKind.NO_OUTPUT,
        f"cannot read the output of job {job_id}: it is {status} and has none",
        next_action=f"brainctl show {job_id}",
        retry_safe=True,
    )
