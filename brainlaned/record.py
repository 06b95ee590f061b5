"""The second transaction: a verdict is applied to job, attempt and gate at once.

A live worker and recovery after a crash both record through here, so that the same verdict always has the same effect.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from . import states, store
from .brains.scrub import Scrubber
from .db import Transaction
from .gate import Gates
from .spool import Spool
from .wire import AttemptStatus, Flag


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a verdict has changed."""

    moved: list[int]
    """Every job that moved, the one of the attempt first."""
    next_probe_at: str | None = None
    """When a gate that was closed is knocked at again; None: only the operator opens it, or none was closed."""
    opened: bool = False
    """A closed gate was opened."""


def record(
    tx: Transaction,
    gates: Gates,
    job_id: int,
    attempt: int,
    route: str,
    evidence: states.Evidence,
    verdict: states.Verdict,
    *,
    raw: Callable[[], bytes | None] = lambda: None,
    unclean: bool = False,
) -> Recorded:
    """Apply a verdict, and return what has changed. Raises Superseded, having changed nothing.

    `raw` is asked for the answer's own bytes where its text could not hold them.
    """
    if Flag.INVALID_BYTES in verdict.flags:
        verdict = dataclasses.replace(verdict, raw=raw())
    store.finish(tx, job_id, attempt, evidence, verdict, unclean=unclean)
    if verdict.closes is not None:
        next_probe_at = gates.close(tx, route, verdict.closes)
        if verdict.closes.strike:
            store.strike(tx, job_id, route)
        return Recorded([job_id], next_probe_at)
    if not verdict.opens:
        return Recorded([job_id])
    opened = gates.open(tx, route)
    # Only a job that was served makes the ones put off before it suspect; a refused one proves nothing.
    suspects = store.hold_suspects(tx, route, job_id) if verdict.attempt is AttemptStatus.SUCCEEDED else []
    return Recorded([job_id, *suspects], opened=opened)


def raw_of(spool: Spool, job_id: int, attempt: int, secrets: tuple[str, ...]) -> bytes | None:
    """Return the bytes of an attempt's answer as they came, secrets removed; None where the spool has none."""
    with contextlib.suppress(OSError):
        part = spool.find(job_id, attempt)
        if part is not None:
            scrubber = Scrubber(secrets)
            return b"".join([*(scrubber.feed(chunk) for chunk in part.body()), scrubber.flush()])
    return None
