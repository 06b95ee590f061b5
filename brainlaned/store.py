"""Every statement that changes a job. Each function takes a transaction first and never begins or commits one.

Every move is a compare-and-set on what the caller knew (id, attempt number, status); where no row matches, Superseded
is raised and nothing has changed. What only reads is in queries.py, what people decide in decisions.py.

Why no call is made twice: `claim_next` numbers a new attempt in the same transaction that makes the job running, `arm`
commits the leave to send exactly once, and only `finish` of that very attempt can move the job on.
"""

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from . import config, errors, states, systemd, wire
from .db import Transaction
from .wire import Priority, Reason, Status


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as the kernel tells it."""

    uid: int
    user: str | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """A checked request for a job."""

    request: str = field(repr=False)
    """Canonical JSON, without a model."""
    digest: str
    route: str
    model: str
    names_model: bool
    """The submitter named the model; else it is whatever the route asks for at the time."""
    max_attempts: int
    key: str | None = None
    priority: Priority = Priority.NORMAL
    not_before: datetime | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    may_run_twice: bool = False
    require_complete: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """One job in the hands of the worker: what is asked, and which attempt it is."""

    job_id: int
    attempt: int
    route: str
    model: str
    names_model: bool
    may_run_twice: bool
    require_complete: bool
    attempts_left: int
    """How many attempts may still be used, this one included."""
    attempts_used: int
    request: str = field(repr=False)


def accept(
    tx: Transaction,
    submission: Submission,
    caller: Caller,
    head_start_s: float,
    max_queued: int,
    *,
    disk_is_low: bool = False,
) -> tuple[int, bool]:
    """Store a job and return its id, and whether it was there already under the same key.

    Raises Refused (key-conflict, disk-reserve, queue-full), having stored nothing.
    """
    if submission.key is not None:
        known = tx.execute(
            "select id, digest from jobs where submitter_uid = :uid and key = :key",
            {"uid": caller.uid, "key": submission.key},
        ).fetchone()
        if known is not None and known["digest"] != submission.digest:
            raise errors.Refused(
                wire.ErrorKind.KEY_CONFLICT,
                f"cannot submit with key '{submission.key}': job {known['id']} has it for another request",
                field="key",
                next_action=f"brainctl show {known['id']}",
            )
        if known is not None:
            return known["id"], True
    if disk_is_low:
        raise errors.Refused(
            wire.ErrorKind.DISK_RESERVE,
            "cannot submit: less disk space is free than disk_reserve_mib",
            next_action="df",
            retry_safe=True,
        )
    queued = tx.execute("select coalesce(sum(jobs), 0) from job_counts where status = 'queued'").fetchone()[0]
    if queued >= max_queued:
        raise errors.Refused(
            wire.ErrorKind.QUEUE_FULL,
            f"cannot submit: {queued} jobs are queued, and max_queued is {max_queued}",
            retry_safe=True,
        )
    accepted = _acceptance_moment(tx)
    due = submission.not_before if submission.not_before and submission.not_before > tx.moment else None
    place = max(accepted, submission.not_before or accepted) - timedelta(seconds=head_start_s)
    job_id = tx.execute(
        """
        insert into jobs (key, digest, submitter_uid, submitter_name, submitter_pid, route, model, names_model, status,
            reason, moved_at, priority, max_attempts, may_run_twice, require_complete, request_bytes, created_at,
            not_before, place_at, due_at)
        values (:key, :digest, :uid, :user, :pid, :route, :model, :names_model, 'queued', 'submitted', :now, :priority,
            :max_attempts, :may_run_twice, :require_complete, :request_bytes, :created_at, :not_before, :place_at,
            :due_at)
        returning id
        """,
        {
            "key": submission.key,
            "digest": submission.digest,
            "uid": caller.uid,
            "user": caller.user,
            "pid": caller.pid,
            "route": submission.route,
            "model": submission.model,
            "names_model": submission.names_model,
            "now": tx.now,
            "priority": submission.priority,
            "max_attempts": submission.max_attempts,
            "may_run_twice": submission.may_run_twice,
            "require_complete": submission.require_complete,
            "request_bytes": len(submission.request.encode()),
            "created_at": wire.format_time(accepted),
            "not_before": _time_or_none(submission.not_before),
            "place_at": wire.format_time(place),
            "due_at": _time_or_none(due),
        },
    ).fetchone()[0]
    tx.execute(
        "insert into job_requests (job_id, request) values (:id, :request)",
        {"id": job_id, "request": submission.request},
    )
    for key, value in submission.labels.items():
        tx.execute(
            "insert into job_labels (job_id, key, value) values (:id, :key, :value)",
            {"id": job_id, "key": key, "value": value},
        )
    return job_id, False


def claim_next(tx: Transaction, routes: Sequence[config.OpenRoute], run: str) -> Claim | None:
    """Take the first job in line over all routes that may be asked, and begin an attempt. None: nothing to do."""
    tx.execute(
        "update jobs indexed by due set due_at = null where status = 'queued' and due_at <= :now", {"now": tx.now}
    )
    if tx.execute("select paused_at from lane").fetchone()[0] is not None:
        return None
    heads = []
    for candidate in routes:
        head = _head_of_line(tx, candidate)
        if head is not None:
            heads.append((head["place_at"], head["id"], candidate.route))
    if not heads:
        return None
    _, job_id, route = min(heads, key=lambda head: head[:2])
    job = tx.execute(
        """
        update jobs set status = 'running', reason = 'claimed', detail = '', moved_at = :now,
            model = case when names_model then model else :model end,
            attempt_count = attempt_count + 1,
            unclean_deaths = unclean_deaths + 1,
            started_at = coalesce(started_at, :now)
        where id = :id and status = 'queued'
        returning *
        """,
        {"id": job_id, "now": tx.now, "model": route.model},
    ).fetchone()
    if job is None:
        raise errors.Superseded(f"cannot claim job {job_id}: it is not queued any more")
    may_run_twice = bool(job["may_run_twice"]) or route.may_run_twice
    tx.execute(
        """
        insert into job_attempts (job_id, attempt, run, status, route, model, endpoint, may_run_twice, started_at)
        values (:id, :attempt, :run, 'running', :route, :model, :endpoint, :may_run_twice, :now)
        """,
        {
            "id": job_id,
            "attempt": job["attempt_count"],
            "run": run,
            "route": route.name,
            "model": job["model"],
            "endpoint": route.endpoint,
            "may_run_twice": may_run_twice,
            "now": tx.now,
        },
    )
    request = tx.execute("select request from job_requests where job_id = :id", {"id": job_id}).fetchone()[0]
    return Claim(
        job_id=job_id,
        attempt=job["attempt_count"],
        route=route.name,
        model=job["model"],
        names_model=bool(job["names_model"]),
        may_run_twice=may_run_twice,
        require_complete=bool(job["require_complete"]),
        attempts_left=attempts_left(job),
        attempts_used=job["attempts_used"],
        request=request,
    )


def _head_of_line(tx: Transaction, candidate: config.OpenRoute) -> sqlite3.Row | None:
    # A probe is made with a job that is no suspect, so that one job which its brain will not have cannot
    # wedge the lane.
    for suspects in (False, True) if candidate.is_probe else (True,):
        head: sqlite3.Row | None = tx.execute(
            """
            select id, place_at from jobs
            where status = 'queued' and due_at is null and route = :route and (:suspects or strikes < 3)
            order by place_at, id limit 1
            """,
            {"route": candidate.route.name, "suspects": suspects},
        ).fetchone()
        if head is not None:
            return head
    return None


def attempts_left(job: sqlite3.Row) -> int:
    """Return how many attempts a job may still use."""
    left: int = job["max_attempts"] + job["extra_attempts"] - job["attempts_used"]
    return left


def arm(tx: Transaction, job_id: int, attempt: int) -> None:
    """Record that from now on a byte may leave. Must be committed before one does.

    Raises CancelAsked when a cancel was recorded first, Superseded when the attempt is not the running one any more.
    """
    job = tx.execute(
        """
        select status, cancel_requested_at from jobs
        where id = :id and attempt_count = :attempt and status in ('running', 'cancelled')
        """,
        {"id": job_id, "attempt": attempt},
    ).fetchone()
    if job is None:
        raise errors.Superseded(f"cannot arm attempt {attempt} of job {job_id}: the job has moved on")
    if job["status"] == Status.CANCELLED or job["cancel_requested_at"] is not None:
        raise errors.CancelAsked(f"cannot arm attempt {attempt} of job {job_id}: a cancel came first")
    _changed(
        tx.execute(
            """
            update job_attempts set armed_at = :now
            where job_id = :id and attempt = :attempt and status = 'running' and armed_at is null
            """,
            {"id": job_id, "attempt": attempt, "now": tx.now},
        ),
        f"cannot arm attempt {attempt} of job {job_id}: it is armed or ended already",
    )


def record_evidence(tx: Transaction, job_id: int, attempt: int, evidence: states.Evidence) -> None:
    """Write what has been seen of a running attempt so far. A mark once written is never taken back."""
    _changed(
        tx.execute(
            """
            update job_attempts set
                armed_at = coalesce(armed_at, :armed_at),
                sent_at = coalesce(sent_at, :sent_at),
                send_failed_at = coalesce(send_failed_at, :send_failed_at),
                headers_at = coalesce(headers_at, :headers_at),
                http_status = coalesce(http_status, :http_status),
                exit_status = coalesce(exit_status, :exit_status),
                upstream_id = coalesce(upstream_id, :upstream_id),
                first_byte_at = coalesce(first_byte_at, :first_byte_at)
            where job_id = :id and attempt = :attempt and status = 'running'
            """,
            {
                "id": job_id,
                "attempt": attempt,
                "armed_at": evidence.armed_at,
                "sent_at": evidence.sent_at,
                "send_failed_at": evidence.send_failed_at,
                "headers_at": evidence.headers_at,
                "http_status": evidence.http_status,
                "exit_status": evidence.command.exit_status if evidence.command else None,
                "upstream_id": evidence.upstream_id,
                "first_byte_at": evidence.first_byte_at,
            },
        ),
        f"cannot record evidence of attempt {attempt} of job {job_id}: the attempt has ended",
    )


def finish(
    tx: Transaction,
    job_id: int,
    attempt: int,
    evidence: states.Evidence,
    verdict: states.Verdict,
    *,
    unclean: bool = False,
) -> None:
    """Apply a verdict to the running attempt and its job. `unclean`: the process that made the attempt died.

    Raises Superseded when the attempt is not the running one any more; the caller must then let go of the answer.
    """
    record_evidence(tx, job_id, attempt, evidence)
    _changed(
        tx.execute(
            """
            update job_attempts set status = :status, reason = :reason, detail = :detail, ended_at = :ended_at,
                uses_attempt = :uses_attempt, finish_reason = :finish_reason, flags = :flags, usage = :usage
            where job_id = :id and attempt = :attempt and status = 'running'
            """,
            {
                "id": job_id,
                "attempt": attempt,
                "status": verdict.attempt,
                "reason": verdict.attempt_reason or verdict.reason,
                "detail": verdict.detail,
                "ended_at": evidence.ended_at or tx.now,
                "uses_attempt": verdict.uses_attempt,
                "finish_reason": verdict.finish_reason,
                "flags": to_json(sorted(verdict.flags)),
                "usage": _json_or_none(verdict.usage),
            },
        ),
        f"cannot finish attempt {attempt} of job {job_id}: it has ended",
    )
    due = None if verdict.wait_s is None else tx.moment + timedelta(seconds=verdict.wait_s)
    move(
        tx,
        job_id,
        attempt,
        Status.RUNNING,
        verdict.job,
        verdict.reason,
        verdict.detail,
        due_at=_time_or_none(due),
    )
    tx.execute(
        """
        update jobs set attempts_used = attempts_used + :used, unclean_deaths = unclean_deaths - :clean,
            strikes = case when :answered then 0 else strikes end,
            finish_reason = :finish_reason, flags = :flags, usage = :usage
        where id = :id
        """,
        {
            "id": job_id,
            "used": verdict.uses_attempt,
            "clean": not unclean,
            "answered": verdict.opens,
            "finish_reason": verdict.finish_reason,
            "flags": to_json(sorted(verdict.flags)),
            "usage": _json_or_none(verdict.usage),
        },
    )
    if verdict.job is Status.DONE:
        put_output(tx, job_id, verdict.text, verdict.response)
    if verdict.raw is not None or (verdict.text and verdict.job is not Status.DONE):
        tx.execute(
            """
            insert into attempt_parts (job_id, attempt, text, response, raw)
            values (:id, :attempt, :text, :response, :raw)
            """,
            {
                "id": job_id,
                "attempt": attempt,
                "text": verdict.text,
                "response": verdict.response if verdict.job is not Status.DONE else None,
                "raw": verdict.raw,
            },
        )


def settle_contradiction(tx: Transaction, job_id: int, attempt: int) -> str:
    """Settle a running job without its running attempt, or the reverse, and return what contradicts what.

    Never happens by our own hand; a row mended with another tool must not stop a start.
    """
    job = tx.execute("select * from jobs where id = :id", {"id": job_id}).fetchone()
    if job is not None and job["status"] == Status.RUNNING:
        detail = f"the job is running at attempt {job['attempt_count']}, and no such attempt is running"
        move(
            tx,
            job_id,
            job["attempt_count"],
            Status.RUNNING,
            Status.HELD,
            Reason.EVIDENCE_CONTRADICTS,
            detail,
        )
    else:
        detail = f"attempt {attempt} is running, and the job is {job['status'] if job else 'gone'}"
    tx.execute(
        """
        update job_attempts set status = 'unknown', reason = 'evidence-contradicts', detail = :detail, ended_at = :now
        where job_id = :id and status = 'running'
        """,
        {"id": job_id, "detail": detail, "now": tx.now},
    )
    return detail


def strike(tx: Transaction, job_id: int, route: str) -> None:
    """Count that the brain put off this very job. Three times in a row make it a suspect.

    Another job that is put off as well clears an earlier suspect. The number stands in the statements, since a bound
    parameter would keep SQLite from the partial index.
    """
    tx.execute(
        """
        update jobs indexed by suspects set strikes = 0
        where status = 'queued' and route = :route and strikes >= 3 and id <> :id
        """,
        {"route": route, "id": job_id},
    )
    tx.execute("update jobs set strikes = strikes + 1 where id = :id", {"id": job_id})


def hold_suspects(tx: Transaction, route: str, served_job_id: int) -> list[int]:
    """Hold each job that the brain kept putting off, now that it has served another. Return their ids."""
    suspects = tx.execute(
        """
        select id, attempt_count, strikes from jobs indexed by suspects
        where status = 'queued' and route = :route and strikes >= 3 and id <> :id
        """,
        {"route": route, "id": served_job_id},
    ).fetchall()
    for job in suspects:
        detail = f"put off {job['strikes']} times in a row, while job {served_job_id} was served at {tx.now}"
        move(tx, job["id"], job["attempt_count"], Status.QUEUED, Status.HELD, Reason.REFUSED_REPEATEDLY, detail)
        tx.execute("update jobs set strikes = 0 where id = :id", {"id": job["id"]})
    return [job["id"] for job in suspects]


def is_cancel_requested(tx: Transaction, job_id: int) -> bool:
    """Say whether somebody asked to cancel a running job."""
    row = tx.execute("select cancel_requested_at from jobs where id = :id", {"id": job_id}).fetchone()
    return row is not None and row[0] is not None


def pause(tx: Transaction, reason: str | None, caller: Caller) -> None:
    """Let nothing be claimed any more, durably. Pausing a paused lane changes who did it and why."""
    tx.execute(
        "update lane set paused_at = coalesce(paused_at, :now), paused_by = :by, paused_reason = :reason",
        {"now": tx.now, "by": name_of(caller), "reason": reason},
    )


def resume(tx: Transaction) -> None:
    """Let jobs be claimed again."""
    tx.execute("update lane set paused_at = null, paused_by = null, paused_reason = null")


def mark_disk(tx: Transaction, *, is_low: bool) -> None:
    """Write down whether nothing is claimed for want of disk space, for whoever reads operator_view."""
    tx.execute(
        """
        update lane set disk_low_since = case when :low then :now end where (disk_low_since is not null) <> :low
        """,
        {"low": is_low, "now": tx.now},
    )


def begin_run(
    tx: Transaction, run: str, pid: int, client: str, routes: Iterable[str], invocation: str | None = None
) -> None:
    """Record a start of the daemon and the routes that its configuration names; `invocation`: systemd's id of it."""
    tx.execute(
        """
        insert into runs (run, invocation, pid, version, started_at)
        values (:run, :invocation, :pid, :version, :now)
        """,
        {"run": run, "invocation": invocation, "pid": pid, "version": wire.VERSION, "now": tx.now},
    )
    tx.execute("update lane set client = :client", {"client": client})
    tx.execute("update gates set configured = 0")
    for route in routes:
        tx.execute(
            "insert into gates (route, configured) values (:route, 1) on conflict (route) do update set configured = 1",
            {"route": route},
        )


def settle_runs(tx: Transaction, stops: Sequence[systemd.Stop]) -> list[tuple[str, str]]:
    """Write down how earlier starts ended that could not do so themselves. Return (run, ending) of each.

    A start that was ended before its run began has no row yet, and gets one, unless it has told by its exit status.
    """
    settled = []
    for stop in stops:
        known = tx.execute(
            "select run, ended_at, ending from runs where invocation = :invocation order by started_at desc",
            {"invocation": stop.invocation},
        ).fetchone()
        if known is None and not stop.invocation:
            known = _open_run(tx)
        if known is not None:
            if known["ending"] is None:
                _end_run(tx, known["run"], stop.ending, stop.at)
                settled.append((known["run"], stop.ending))
        elif stop.result not in {"success", "exit-code"}:
            ending = f"before it was ready: {stop.ending}"
            run = f"{stop.invocation or 'start'}-{stop.at}"
            tx.execute(
                """
                insert into runs (run, invocation, version, started_at, ended_at, ending)
                values (:run, :invocation, :version, :at, :at, :ending)
                """,
                {
                    "run": run,
                    "invocation": stop.invocation,
                    "version": wire.VERSION,
                    "at": stop.at or tx.now,
                    "ending": ending,
                },
            )
            settled.append((run, ending))
    while (left := _open_run(tx)) is not None:
        ending = "it vanished without a word: it was killed, or the power went"
        _end_run(tx, left["run"], ending, None)
        settled.append((left["run"], ending))
    return settled


def _open_run(tx: Transaction) -> sqlite3.Row | None:
    row: sqlite3.Row | None = tx.execute(
        "select run, ending from runs where ending is null order by started_at desc limit 1"
    ).fetchone()
    return row


def _end_run(tx: Transaction, run: str, ending: str, at: str | None) -> None:
    tx.execute(
        "update runs set ending = :ending, ended_at = :at where run = :run and ending is null",
        {"run": run, "ending": ending, "at": at},
    )


def forgive_death(tx: Transaction) -> None:
    """Record that the death which follows is our own doing, so that it does not count against the running job."""
    tx.execute("update jobs set unclean_deaths = unclean_deaths - 1 where status = 'running'")


def end_run(tx: Transaction, run: str, ending: str) -> None:
    """Record that this run ended in an orderly way; a run without an end died."""
    _end_run(tx, run, ending, tx.now)


def _acceptance_moment(tx: Transaction) -> datetime:
    # A clock that was set back must not let a later submit overtake those that still wait.
    latest = tx.execute("select max(created_at) from jobs indexed by acceptance where status = 'queued'").fetchone()[0]
    return tx.moment if latest is None else max(tx.moment, wire.parse_time(latest))


def move(
    tx: Transaction,
    job_id: int,
    attempt: int,
    old: Status,
    new: Status,
    reason: Reason,
    detail: str,
    *,
    due_at: str | None = None,
) -> None:
    """Move a job that is at `attempt` and `old` to another status. Raises Superseded when it is elsewhere by now."""
    if new not in states.MOVES[old]:
        raise ValueError(f"no move from {old} to {new}")
    _changed(
        tx.execute(
            """
            update jobs set status = :new, reason = :reason, detail = :detail, moved_at = :now, due_at = :due_at,
                finished_at = :finished_at,
                cancel_requested_at = case when :new = 'queued' then null else cancel_requested_at end
            where id = :id and attempt_count = :attempt and status = :old
            """,
            {
                "id": job_id,
                "attempt": attempt,
                "old": old,
                "new": new,
                "reason": reason,
                "detail": detail,
                "now": tx.now,
                "due_at": due_at,
                "finished_at": tx.now if new in states.FINAL else None,
            },
        ),
        f"cannot move job {job_id} from {old} to {new}: it is not at attempt {attempt} and {old} any more",
    )


def put_output(tx: Transaction, job_id: int, text: str, response: str | None) -> None:
    """Store what the submitter gets."""
    tx.execute(
        "insert into job_outputs (job_id, text, response) values (:id, :text, :response)",
        {"id": job_id, "text": text, "response": response},
    )


def job_row(tx: Transaction, job_id: int) -> sqlite3.Row:
    """Return the row of a job. Raises Refused (no-such-job)."""
    job: sqlite3.Row | None = tx.execute("select * from jobs where id = :id", {"id": job_id}).fetchone()
    if job is None:
        raise errors.Refused(
            wire.ErrorKind.NO_SUCH_JOB, f"cannot find job {job_id}: no such job", next_action="brainctl list"
        )
    return job


def _changed(cursor: sqlite3.Cursor, message: str) -> None:
    if cursor.rowcount != 1:
        raise errors.Superseded(message)


def name_of(caller: Caller) -> str:
    """Return how a caller is called in a sentence."""
    return caller.user or f"uid {caller.uid}"


def _time_or_none(moment: datetime | None) -> str | None:
    return None if moment is None else wire.format_time(moment)


def to_json(value: Any) -> str:
    """Write a value as the database keeps it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _json_or_none(value: Any) -> str | None:
    return None if value is None else to_json(value)
