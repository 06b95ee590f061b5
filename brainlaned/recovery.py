"""After a crash: what is known of every attempt that was running, what that means, and applying it.

| evidence on the disk                                   | verdict                                                    |
|--------------------------------------------------------|------------------------------------------------------------|
| a cancel was recorded                                  | cancelled                                                  |
| an answer without leave to send                        | held evidence-contradicts                                  |
| no leave to send (`armed_at`)                          | queued not-sent, its place kept                            |
| headers without a spool: 2xx; anything else            | held answer-incomplete; held evidence-contradicts          |
| spool with a complete answer                           | as for a live answer (done, failed, ...)                   |
| an answered 4xx or 5xx                                 | by its status, as for a live answer                        |
| 2xx, the answer not whole                              | held answer-incomplete, the part kept                      |
| upload known to have failed                            | queued not-executed                                        |
| a command whose exit status is written down            | by its exit status, as for a live command                  |
| a command without an identity, so never started        | queued not-executed                                        |
| a command that may have run                            | ended, then held answer-incomplete or sent-outcome-unknown |
| armed, no answer                                       | held sent-outcome-unknown                                  |
| one of the held two, with leave to run twice           | queued asked-again                                         |
| queued again, and died so `crash_limit` times          | held crashed-worker                                        |
| a running job without its attempt                      | held evidence-contradicts                                  |
| a running attempt whose job is elsewhere               | the attempt ends unknown, the job stays where it is        |
| a spool file of an ended attempt                       | removed: its answer is stored                              |
| a spool file of no attempt we know                     | set aside                                                  |

`decide` is pure and never looks at a clock: a verdict follows from evidence, never from age. `recover` applies it,
row by row, before READY. Running it twice changes nothing, since it only looks at what is running.
"""

import dataclasses
import functools
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import config, errors, events, queries, record, states, store, wire
from .brains import command, reply, verdicts
from .brains.http import upstream_id_of
from .db import Database, Transaction
from .gate import Gates
from .spool import Part, Spool
from .wire import AttemptStatus, Reason, Status

_PAUSES_S = (0.5, 1.0, 2.0)
_BODY_START = 500


@dataclass(frozen=True, slots=True)
class Case:
    """One attempt that was running when its process vanished, with all that is known of it."""

    evidence: states.Evidence
    answer: reply.Reply | None
    terms: verdicts.Terms
    unclean_deaths: int
    """How often a process died in this job, this time included."""
    crash_limit: int
    run: str
    """The start of the daemon that made the attempt, and what is known of its end."""


def decide(case: Case) -> states.Verdict:
    """Say what became of an attempt whose process died."""
    verdict = verdicts.judge(case.evidence, case.answer, case.terms)
    sent_again = verdict.reason in {Reason.NOT_SENT, Reason.NOT_EXECUTED, Reason.ASKED_AGAIN}
    if sent_again and case.unclean_deaths >= case.crash_limit:
        return dataclasses.replace(
            verdict,
            job=Status.HELD,
            reason=Reason.CRASHED_WORKER,
            attempt_reason=verdict.reason,
            detail=f"the daemon died {case.unclean_deaths} times in this job (crash_limit {case.crash_limit}); "
            f"the last time, in run {case.run}: {verdict.detail}",
            wait_s=None,
            closes=None,
        )
    return dataclasses.replace(verdict, detail=f"the daemon died in run {case.run}: {verdict.detail}")


def recover(
    database: Database,
    spool: Spool,
    gates: Gates,
    routes: Mapping[str, config.Route],
    crash_limit: int,
    run: str,
    step: Callable[[], None] = lambda: None,
) -> None:
    """Decide every running attempt, then tidy the spool. `step` is told of each step, and may raise to give it up.

    A passing database error is tried again; raises StartRefused naming the row when it lasts.
    """
    with database.read() as connection:
        left = queries.left_running(connection)
    for row in left:
        step()
        for pause_s in (*_PAUSES_S, None):
            try:
                _settle(database, spool, gates, routes, crash_limit, row)
                break
            except (errors.Busy, errors.CommitUnknown, sqlite3.Error, OSError) as error:
                if pause_s is None:
                    raise errors.StartRefused(
                        wire.DaemonExit.DATABASE,
                        f"cannot recover job {row['job_id']} attempt {row['attempt']}: {error}",
                        f"sqlite3 {database.path} 'pragma integrity_check'",
                    ) from error
                events.recovery_delayed(row["job_id"], row["attempt"], str(error))
                time.sleep(pause_s)  # for the foreign process that holds the database, or the disk, to let go
    _tidy(database, spool, run, step)


def _settle(
    database: Database,
    spool: Spool,
    gates: Gates,
    routes: Mapping[str, config.Route],
    crash_limit: int,
    row: sqlite3.Row,
) -> None:
    job_id, attempt = row["job_id"], row["attempt"]
    part = spool.find(job_id, attempt)
    route = routes.get(row["route"])
    # Whatever still runs of it is ended first, outside of any transaction.
    end = command.take_over(spool.files(job_id, attempt), route) if part is not None and part.is_command else None
    try:
        with database.write(first=True) as tx:
            found = queries.running_attempt(tx, job_id, attempt)
            if found.job is None or found.attempt is None:
                reason, detail = Reason.EVIDENCE_CONTRADICTS, store.settle_contradiction(tx, job_id, attempt)
            else:
                case = _case(tx, found.job, found.attempt, part, end, route, crash_limit)
                verdict = decide(case)
                record.record(
                    tx,
                    gates,
                    job_id,
                    attempt,
                    row["route"],
                    case.evidence,
                    verdict,
                    raw=functools.partial(record.raw_of, spool, job_id, attempt, case.terms.secrets),
                    unclean=True,
                )
                reason, detail = verdict.reason, verdict.said
    except errors.Superseded:
        return  # settled already
    events.recovered(job_id, attempt, row["route"], reason, detail)


def _case(
    tx: Transaction,
    job: sqlite3.Row,
    attempt: sqlite3.Row,
    part: Part | None,
    end: states.CommandEnd | None,
    route: config.Route | None,
    crash_limit: int,
) -> Case:
    evidence = states.Evidence(
        armed_at=attempt["armed_at"],
        sent_at=attempt["sent_at"],
        send_failed_at=attempt["send_failed_at"],
        headers_at=attempt["headers_at"],
        http_status=attempt["http_status"],
        upstream_id=attempt["upstream_id"],
        first_byte_at=attempt["first_byte_at"],
    )
    answer = None
    if part is not None and end is not None:
        # The runner syncs what was printed before it writes down the end.
        printed = part.kept() if end.exit_status is None else part.body()
        answer = reply.read(printed, reply.TextReader(route.secrets() if route else ()))
        not_started_at = evidence.send_failed_at if end.was_started else evidence.send_failed_at or tx.now
        evidence = dataclasses.replace(evidence, command=end, send_failed_at=not_started_at)
    elif part is not None and part.status is not None:
        body = part.body if part.whole else part.kept
        answer = reply.read(body())
        # The spool's first line was on the disk before the database was told, so it outranks the row.
        evidence = dataclasses.replace(
            evidence,
            headers_at=part.headers_at,
            http_status=part.status,
            upstream_id=evidence.upstream_id or upstream_id_of(part.headers),
            headers=part.headers,
            whole=part.whole,
            spooled=True,
            body_start=next(iter(body()), b"")[:_BODY_START],
        )
    return Case(
        evidence=evidence,
        answer=answer,
        terms=verdicts.Terms(
            may_run_twice=bool(attempt["may_run_twice"]),
            attempts_left=store.attempts_left(job),
            attempts_used=job["attempts_used"],
            names_model=bool(job["names_model"]),
            require_complete=bool(job["require_complete"]),
            retry_first_s=route.retry_first_s if route else config.Route("", "", "").retry_first_s,
            retry_cap_s=route.retry_cap_s if route else config.Route("", "", "").retry_cap_s,
            cancel_requested=job["cancel_requested_at"] is not None,
            secrets=route.secrets() if route else (),
        ),
        unclean_deaths=job["unclean_deaths"],
        crash_limit=crash_limit,
        run=attempt["run"] + (f" ({ending})" if (ending := queries.ending_of(tx, attempt["run"])) else ""),
    )


def _tidy(database: Database, spool: Spool, run: str, step: Callable[[], None]) -> None:
    with database.read() as connection:
        known = queries.attempt_states(connection, spool.attempts())
    for (job_id, attempt), status in known.items():
        step()
        if status is None:
            for path in spool.set_aside(job_id, attempt, run):
                events.spool_set_aside(job_id, attempt, path.name)
        elif status is not AttemptStatus.RUNNING:
            spool.remove(job_id, attempt)
