"""What is let go with age: the prompt and answer of a finished job first, its record later.

Nothing that still waits, runs or is held is ever touched, whatever its age. Each function takes a transaction first and
stops when its time is up, so that a million old jobs are let go in many short transactions, and nobody waits for one.
"""

import time
from collections.abc import Callable

from .db import Transaction

BUDGET_S = 0.02
"""How long one transaction goes on taking one more job, in seconds."""

_BATCH = 200


def erase(tx: Transaction, job_id: int) -> None:
    """Erase the prompt and the answer of a finished job, and what quotes them. Its record stays."""
    for statement in (
        "delete from job_requests where job_id = :id",
        "delete from job_outputs where job_id = :id",
        "delete from attempt_parts where job_id = :id",
        # The sentences about a refused answer quote its beginning.
        "update job_attempts set detail = '' where job_id = :id",
        "update jobs set detail = '', erased_at = :now where id = :id and erased_at is null",
    ):
        tx.execute(statement, {"id": job_id, "now": tx.now})


def erase_old(tx: Transaction, before: str) -> int:
    """Erase what finished jobs asked and got, for those that finished before a time. Return how many."""
    return _each(tx, "with_payload", "erased_at is null", before, erase)


def delete_old(tx: Transaction, before: str) -> int:
    """Delete finished jobs with all that belongs to them, for those that finished before a time. Return how many."""
    return _each(tx, "finished", "true", before, _delete)


def delete_old_runs(tx: Transaction, before: str) -> int:
    """Delete what is known of runs that began before a time, but the last. Return how many."""
    return tx.execute(
        """
        delete from runs where rowid in (
            select rowid from runs
            where started_at <= :before and ending is not null and rowid < (select max(rowid) from runs)
            limit :batch
        )
        """,
        {"before": before, "batch": _BATCH},
    ).rowcount


def _delete(tx: Transaction, job_id: int) -> None:
    tx.execute("delete from jobs where id = :id", {"id": job_id})


def _each(tx: Transaction, index: str, condition: str, before: str, let_go: Callable[[Transaction, int], None]) -> int:
    found = tx.execute(
        f"""
        select id from jobs indexed by {index}
        where finished_at is not null and {condition} and finished_at <= :before
        order by finished_at limit {_BATCH}
        """,  # noqa: S608 - what is put in stands in this module
        {"before": before},
    ).fetchall()
    over = time.monotonic() + BUDGET_S
    for number, row in enumerate(found):
        if number and time.monotonic() > over:
            return number
        let_go(tx, row["id"])
    return len(found)
