"""The second transaction: a verdict is applied to job, attempt and gate at once.

A live worker and recovery after a crash both record through here, so that the same verdict always has the same effect.
"""

from . import states, store
from .db import Transaction
from .gate import Gates
from .wire import AttemptStatus


def record(
    tx: Transaction,
    gates: Gates,
    job_id: int,
    attempt: int,
    route: str,
    evidence: states.Evidence,
    verdict: states.Verdict,
    *,
    unclean: bool = False,
) -> list[int]:
    """Apply a verdict. Return the ids of every job that moved. Raises Superseded, having changed nothing."""
    store.finish(tx, job_id, attempt, evidence, verdict, unclean=unclean)
    moved = [job_id]
    if verdict.closes is not None:
        gates.close(tx, route, verdict.closes)
        if verdict.closes.strike:
            store.strike(tx, job_id, route)
    elif verdict.opens:
        gates.open(tx, route)
        # Only a job that was served makes the ones put off before it suspect; a refused one proves nothing.
        if verdict.attempt is AttemptStatus.SUCCEEDED:
            moved += store.hold_suspects(tx, route, job_id)
    return moved
