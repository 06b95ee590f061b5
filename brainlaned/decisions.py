"""What people decide about a job: cancel it, try it again, settle it when it is held. Each takes a transaction first.

Every decision is recorded with who, when and why, and on which attempt it was based; where the job has moved on since,
Superseded is raised and nothing has changed.
"""

import json
import sqlite3
from typing import assert_never

from . import errors, retention, states, store, wire
from .db import Transaction
from .wire import Decision, Flag, Reason, Status


def cancel(tx: Transaction, job_id: int, attempt: int | None, reason: str | None, caller: store.Caller) -> Status:
    """Cancel a job, or record the wish for one whose request may have left, and return where the job stands now.

    A running attempt that is not armed is ended here and now: whoever wants to arm it later is refused.

    Raises Refused (no-such-job, too-late) or Superseded when the job is not at `attempt` any more.
    """
    job = store.job_row(tx, job_id)
    _must_be_at(job, attempt)
    status = Status(job["status"])
    if status in states.FINAL:
        raise errors.Refused(
            wire.ErrorKind.TOO_LATE,
            f"cannot cancel job {job_id}: it is {status} already, since {job['finished_at']}",
            next_action=f"brainctl show {job_id}",
        )
    _record_decision(tx, job, Decision.CANCEL, reason, caller)
    detail = _decided("cancelled", reason, caller, tx)
    if status is Status.RUNNING:
        tx.execute(
            "update jobs set cancel_requested_at = coalesce(cancel_requested_at, :now) where id = :id",
            {"id": job_id, "now": tx.now},
        )
        unarmed = tx.execute(
            """
            update job_attempts set status = 'cancelled', reason = 'cancel-requested', detail = :detail,
                ended_at = :now, uses_attempt = 0
            where job_id = :id and attempt = :attempt and status = 'running' and armed_at is null
            """,
            {"id": job_id, "attempt": job["attempt_count"], "detail": detail, "now": tx.now},
        )
        if unarmed.rowcount == 0:
            return status
        detail = f"{detail}, before anything was sent"
        tx.execute("update jobs set unclean_deaths = unclean_deaths - 1 where id = :id", {"id": job_id})
    was_held = status is Status.HELD
    store.move(
        tx,
        job_id,
        job["attempt_count"],
        status,
        Status.CANCELLED,
        Reason.OPERATOR_CANCELLED if was_held else Reason.CANCEL_REQUESTED,
        detail,
    )
    return Status.CANCELLED


def retry(tx: Transaction, job_id: int, attempt: int | None, reason: str | None, caller: store.Caller) -> None:
    """Queue a failed job again, its place kept and one more attempt allowed. Raises Refused or Superseded."""
    job = store.job_row(tx, job_id)
    _must_be_at(job, attempt)
    if job["status"] != Status.FAILED:
        raise errors.Superseded(f"cannot retry job {job_id}: it is {job['status']}, and only a failed job is retried")
    if job["erased_at"] is not None:
        raise errors.Refused(
            wire.ErrorKind.TOO_LATE,
            f"cannot retry job {job_id}: its prompt was erased at {job['erased_at']}",
            next_action=f"brainctl show {job_id}",
        )
    _record_decision(tx, job, "retry", reason, caller)
    _queue_again(tx, job, Reason.OPERATOR_RETRIED, _decided("retried", reason, caller, tx))


def forget(tx: Transaction, job_id: int, attempt: int | None, reason: str | None, caller: store.Caller) -> None:
    """Erase the prompt and the answer of a job that is over; its record stays. Raises Refused or Superseded."""
    job = store.job_row(tx, job_id)
    _must_be_at(job, attempt)
    if job["status"] not in states.FINAL:
        raise errors.Superseded(
            f"cannot forget job {job_id}: it is {job['status']}, and only what is over is forgotten"
        )
    if job["erased_at"] is not None:
        return
    _record_decision(tx, job, "forget", reason, caller)
    retention.erase(tx, job_id)


def decide(
    tx: Transaction,
    job_id: int,
    attempt: int | None,
    decision: Decision,
    text: str | None,
    reason: str | None,
    caller: store.Caller,
) -> None:
    """Apply a person's decision on a held job, and record who, when, why and on which attempt.

    Raises Superseded when the job is not held, or not at `attempt`, any more; Refused (no-output) when there is nothing
    to accept.
    """
    job = store.job_row(tx, job_id)
    _must_be_at(job, attempt)
    if job["status"] != Status.HELD:
        raise errors.Superseded(f"cannot {decision} job {job_id}: it is {job['status']}, and no longer held")
    _record_decision(tx, job, decision, reason, caller)
    match decision:
        case Decision.RESEND:
            _queue_again(tx, job, Reason.OPERATOR_RESENT, _decided("sent again", reason, caller, tx))
        case Decision.ACCEPT:
            part = tx.execute(
                "select text, response from attempt_parts where job_id = :id and attempt = :attempt",
                {"id": job_id, "attempt": job["attempt_count"]},
            ).fetchone()
            if part is None:
                raise errors.Refused(
                    wire.ErrorKind.NO_OUTPUT,
                    f"cannot accept job {job_id}: attempt {job['attempt_count']} brought no text",
                    next_action=f"brainctl recover {job_id}",
                )
            # A whole answer was held only because it had been asked to be complete; a part is marked as one.
            flags = {Flag.PARTIAL} if part["response"] is None else set()
            _close_held(tx, job, Status.DONE, Reason.OPERATOR_ACCEPTED, _decided("accepted", reason, caller, tx), flags)
            store.put_output(tx, job_id, part["text"], part["response"])
        case Decision.COMPLETE:
            detail = _decided("completed by hand", reason, caller, tx)
            _close_held(tx, job, Status.DONE, Reason.OPERATOR_COMPLETED, detail, {Flag.OPERATOR_TEXT})
            store.put_output(tx, job_id, text or "", None)
        case Decision.FAIL:
            _close_held(tx, job, Status.FAILED, Reason.OPERATOR_FAILED, _decided("failed", reason, caller, tx), set())
        case Decision.CANCEL:
            detail = _decided("cancelled", reason, caller, tx)
            _close_held(tx, job, Status.CANCELLED, Reason.OPERATOR_CANCELLED, detail, set())
        case _:
            assert_never(decision)


def _queue_again(tx: Transaction, job: sqlite3.Row, reason: Reason, detail: str) -> None:
    store.move(tx, job["id"], job["attempt_count"], Status(job["status"]), Status.QUEUED, reason, detail)
    tx.execute(
        """
        update jobs set extra_attempts = extra_attempts + :more, unclean_deaths = 0, strikes = 0, flags = '[]',
            usage = null, finish_reason = null
        where id = :id
        """,
        {"id": job["id"], "more": max(0, 1 - store.attempts_left(job))},
    )


def _close_held(tx: Transaction, job: sqlite3.Row, new: Status, reason: Reason, detail: str, flags: set[Flag]) -> None:
    store.move(tx, job["id"], job["attempt_count"], Status.HELD, new, reason, detail)
    tx.execute(
        "update jobs set flags = :flags where id = :id",
        {"id": job["id"], "flags": store.to_json(sorted({*json.loads(job["flags"]), *flags}))},
    )


def _decided(what: str, reason: str | None, caller: store.Caller, tx: Transaction) -> str:
    return f"{what} by {store.name_of(caller)} at {tx.now}" + (f": {reason}" if reason else "")


def _must_be_at(job: sqlite3.Row, attempt: int | None) -> None:
    if attempt is not None and attempt != job["attempt_count"]:
        raise errors.Superseded(
            f"cannot act on attempt {attempt} of job {job['id']}: it is at attempt {job['attempt_count']}"
        )


def _record_decision(tx: Transaction, job: sqlite3.Row, action: str, reason: str | None, caller: store.Caller) -> None:
    tx.execute(
        """
        insert into decisions (job_id, attempt, action, reason, at, uid, user_name, pid)
        values (:job_id, :attempt, :action, :reason, :now, :uid, :user, :pid)
        """,
        {
            "job_id": job["id"],
            "attempt": job["attempt_count"],
            "action": action,
            "reason": reason,
            "now": tx.now,
            "uid": caller.uid,
            "user": caller.user,
            "pid": caller.pid,
        },
    )
