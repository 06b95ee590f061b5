"""THE LOOP: one synchronous thread that claims a job, asks its brain, and records the answer.

    claim    one short transaction: queued → running, and an attempt row       lock held: < 1 ms
    ──────────────────── lock released here, before the brain ────────────────────
    call     seconds to minutes; SQLite is idle
    record   one short transaction, guarded by job, attempt and 'running'      lock held: < 1 ms

The release is a dedent: `with db.write()` ends before the call begins. From the claim on a crash leaves evidence, not a
lock. An answer that cannot be stored stays in its spool and in memory, nothing else is claimed, and the store is tried
again until it succeeds. The worker waits on a condition (a submit, a resume, a due time); it does not poll.
"""

import dataclasses
import functools
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from . import config, db, errors, events, filesystem, queries, record, spool, states, store, wire
from .brains import Brain, Call, Ended, verdicts
from .brains.http import upstream_id_of
from .brains.scrub import scrub
from .gate import Gates
from .later import Later
from .wire import Reason, Waiting

STORE_AGAIN_S = 1.0
"""How long after a failed store it is tried again, in seconds."""

STEP_S = 30.0
"""How long a step that only uses the database and the disk may be silent, in seconds."""

DISK_AGAIN_S = 2.0
"""How soon the disk is looked at again when there is too little space on it, in seconds: nobody announces more."""

VAIN_S = 0.01
"""How far apart two looks are when the first found nothing to do, in seconds."""

MARK_S = 0.05
"""How soon a mark is written that decides nothing, in seconds; what is over sooner needs none."""

_BODY_START = 500

Observer = Callable[[str], None]
"""Told the name of each cut as it is passed. In production it does nothing; tests make the process vanish in it."""


class Worker:
    """The lane's one worker. `moved` is told the ids of jobs that moved, once committed; `grew`, whose answer grew."""

    def __init__(
        self,
        *,
        database: db.Database,
        spool_directory: spool.Spool,
        reserve: filesystem.Reserve,
        gates: Gates,
        routes: Mapping[str, config.Route],
        brains: Mapping[str, Brain],
        run: str,
        moved: Callable[[list[int]], None],
        grew: Callable[[list[int]], None],
        cut: Observer,
    ) -> None:
        self._database = database
        self._spool = spool_directory
        self._reserve = reserve
        self._gates = gates
        self._routes = routes
        self._brains = brains
        self._secrets = {name: route.secrets() for name, route in routes.items()}
        self._run = run
        self._moved = moved
        self._grew = grew
        self._cut = cut
        self._changed = threading.Condition()
        self._wakes = 0
        self._next_wake: str | None = None
        self._stopping = False
        self._abandoned = False
        self._job_id: int | None = None
        self._call: Call | None = None
        self._marks: _Marks | None = None
        self._later = Later("brainlane-marks")
        self._failed: Callable[[], None] = lambda: None
        self.answer_waiting = False
        """An answer is complete and cannot be stored for now."""
        self.disk_is_low = False
        """Nothing is claimed for want of disk space."""
        self.silent_until = time.monotonic()
        """When the present step's declared silence ends, on the monotonic clock. Waiting for work has no end."""
        self.is_waiting = False
        self._was_idle = False
        self._looked_in_vain_at = -VAIN_S
        self.turns = 0
        """How often work has been looked for."""
        self._thread = threading.Thread(target=self._loop, name="brainlane-worker")

    @property
    def stuck(self) -> Waiting | None:
        """Why nothing is claimed for now, where the cause may be that the database cannot be written."""
        if self.answer_waiting:
            return Waiting.ANSWER_WAITING
        return Waiting.DISK_RESERVE if self.disk_is_low else None

    @property
    def tokens(self) -> int | None:
        """About how many tokens of the call in flight have arrived; None where nobody can tell."""
        marks = self._marks
        return marks.stream_events if marks is not None and marks.stream_events else None

    def start(self, failed: Callable[[], None]) -> None:
        """Begin. `failed` is called when the loop itself breaks, which ends the daemon."""
        self._failed = failed
        self._thread.start()

    def wake(self) -> None:
        """Something may have become claimable."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def cancel(self, job_id: int) -> None:
        """Close the call of a job whose cancel is recorded, if it is the one in flight."""
        with self._changed:
            call = self._call if self._job_id == job_id else None
        if call is not None:
            call.abort(Reason.CANCEL_REQUESTED)

    def stop(self) -> None:
        """Claim nothing any more; the call in flight goes on."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Close the call in flight, and give up storing an answer that cannot be stored: its spool keeps it."""
        with self._changed:
            self._abandoned = True
            call = self._call
            self._changed.notify_all()
        if call is not None:
            call.abort(Reason.DAEMON_STOPPED)

    def join(self, limit_s: float | None = None) -> bool:
        """Wait for the loop to end. Return whether it has."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def run_one(self) -> bool:
        """Claim one job, ask its brain, record what came. Return whether there was one."""
        self._declare(STEP_S)
        self.turns += 1
        self._look_at_disk()
        if self._was_idle and not self._is_work_waiting():
            return False
        with self._database.write(first=True) as tx:  # lock taken
            claim = store.claim_next(tx, self._open_routes(tx), self._run)
            if claim is None:
                self._next_wake = queries.next_wake(tx, tx.now)
            else:
                self._cut("claiming")
        # Lock released: COMMIT has returned. A crash from here on leaves evidence, not a lock.
        self._was_idle = claim is None
        if claim is None:
            return False
        self._cut("claimed")
        self._moved([claim.job_id])
        events.claimed(claim.job_id, claim.attempt, claim.route)
        evidence, ended = self._ask(claim)  # seconds to minutes; SQLite is idle
        self._store(claim, evidence, ended)  # lock taken again, for milliseconds
        return True  # only now may anyone be told

    def _loop(self) -> None:
        try:
            while not self._stopping:
                seen = self._wakes
                try:
                    worked = self.run_one()
                except (errors.Busy, errors.CommitUnknown, sqlite3.Error) as error:
                    events.claim_failed(str(error))
                    self._pause(STORE_AGAIN_S)
                    continue
                if not worked:
                    self._wait(seen)
        except BaseException:
            events.worker_failed()
            self._failed()

    def _look_at_disk(self) -> None:
        is_low = self._reserve.is_low()
        if is_low and not self.disk_is_low:
            events.disk_low(self._reserve.directory, self._reserve.free(), self._reserve.size)
        if self.disk_is_low and not is_low:
            events.disk_ok(self._reserve.directory, self._reserve.free())
        if is_low is not self.disk_is_low:
            self.disk_is_low, self._was_idle = is_low, False  # it is to be written down

    def _is_work_waiting(self) -> bool:
        """Look without the write lock, which submits to a lane that is paused or gated need more, and not at each."""
        too_soon_s = self._looked_in_vain_at + VAIN_S - time.monotonic()
        if too_soon_s > 0:
            self._pause(too_soon_s)
        with self._database.read() as connection:
            self._next_wake = queries.next_wake(connection, _now())
            is_waiting = queries.is_work_waiting(connection)
        if not is_waiting:
            self._looked_in_vain_at = time.monotonic()
        return is_waiting

    def _open_routes(self, tx: db.Transaction) -> list[config.OpenRoute]:
        """Return the routes that may be asked now: none where the answer might find no room."""
        store.mark_disk(tx, is_low=self.disk_is_low)
        return [] if self.disk_is_low else self._gates.open_routes(tx)

    def _wait(self, seen: int) -> None:
        due_s = None
        if self._next_wake is not None:
            due_s = max(0.0, (wire.parse_time(self._next_wake) - datetime.now(UTC)).total_seconds())
        if self.disk_is_low:
            due_s = DISK_AGAIN_S if due_s is None else min(due_s, DISK_AGAIN_S)
        with self._changed:
            self.is_waiting = True
            # For a submit, a resume, a stop, or the next due time.
            self._changed.wait_for(lambda: self._stopping or self._wakes != seen, due_s)
            self._declare(STEP_S)
            self.is_waiting = False

    def _pause(self, pause_s: float) -> None:
        with self._changed:
            # For the database to be free again, which nobody can announce; or only so as not to look too often.
            self._changed.wait_for(lambda: self._abandoned, pause_s)

    def _declare(self, silence_s: float) -> None:
        self.silent_until = time.monotonic() + silence_s

    def _ask(self, claim: store.Claim) -> tuple[states.Evidence, Ended]:
        marks = _Marks(self._database, claim, self._secrets[claim.route], self._grew, self._cut, self._later)
        self._marks = marks
        try:
            with self._spool.create(claim.job_id, claim.attempt) as writer:
                marks.writer = writer
                request_id = f"{claim.job_id}-{claim.attempt}"
                files = self._spool.files(claim.job_id, claim.attempt)
                call = self._brains[claim.route].begin(claim.request, claim.model, request_id, files)
                with self._changed:
                    self._job_id, self._call = claim.job_id, call
                    if self._abandoned:
                        call.abort(Reason.DAEMON_STOPPED)
                self._declare(call.longest_s + STEP_S)
                try:
                    ended = call.run(marks)
                finally:
                    with self._changed:
                        self._job_id, self._call = None, None
                writer.close(whole=ended.whole)
                if writer.failure is not None:
                    events.spool_failed(claim.job_id, claim.attempt, str(writer.failure))
        except errors.CancelAsked:
            ended = Ended(cut_by=Reason.CANCEL_REQUESTED if not self._abandoned else Reason.DAEMON_STOPPED)
        except Exception as error:  # whatever kept us from sending, nothing has left: the brain raises only before
            ended = Ended()
            marks.not_sent_because(error)
        self._cut("answered")
        return marks.evidence_of(ended), ended

    def _store(self, claim: store.Claim, evidence: states.Evidence, ended: Ended) -> None:
        since = time.monotonic()
        while True:
            self._declare(STEP_S)
            try:
                with self._database.write(first=True) as tx:
                    terms = self._terms(tx, claim)
                    verdict = verdicts.judge(evidence, ended.reply, terms)
                    recorded = record.record(
                        tx,
                        self._gates,
                        claim.job_id,
                        claim.attempt,
                        claim.route,
                        evidence,
                        verdict,
                        raw=functools.partial(record.raw_of, self._spool, claim.job_id, claim.attempt, terms.secrets),
                    )
                    if verdict.reason is Reason.EVIDENCE_CONTRADICTS:
                        store.pause(tx, verdict.detail, store.Caller(uid=0, user="brainlaned"))
                break
            except errors.Superseded as error:
                self.answer_waiting = False
                if evidence.armed_at is None and ended.cut_by is Reason.CANCEL_REQUESTED:
                    # A cancel ended the attempt while it could still be sure that nothing was sent.
                    self._forget(claim)
                else:
                    # After a commit whose outcome was unknown this is how we learn that it had succeeded.
                    events.superseded(claim.job_id, claim.attempt, str(error))
                return
            except (errors.Busy, errors.CommitUnknown, sqlite3.Error) as error:
                if not self.answer_waiting:
                    events.answer_waiting(claim.job_id, claim.attempt, str(error))
                self.answer_waiting = True
                if self._abandoned:
                    return
                self._pause(STORE_AGAIN_S)
        self._cut("stored")
        if self.answer_waiting:
            events.answer_stored(claim.job_id, claim.attempt, time.monotonic() - since)
        self.answer_waiting = False
        self._forget(claim)
        self._tell(claim, verdict, recorded)
        self._moved(recorded.moved)

    def _tell(self, claim: store.Claim, verdict: states.Verdict, recorded: record.Recorded) -> None:
        events.ended(claim.job_id, claim.attempt, claim.route, verdict.job, verdict.reason, verdict.said)
        if verdict.closes is not None:
            closes = verdict.closes
            events.gate_closed(claim.route, closes.reason, closes.detail, recorded.next_probe_at)
        if recorded.opened:
            events.gate_opened(claim.route)
        for job_id in recorded.moved[1:]:
            events.held(job_id, claim.route, Reason.REFUSED_REPEATEDLY, f"job {claim.job_id} was served meanwhile")
        if verdict.reason is Reason.EVIDENCE_CONTRADICTS:
            events.lane_stopped_by_contradiction(claim.job_id, verdict.detail)

    def _forget(self, claim: store.Claim) -> None:
        try:
            self._spool.remove(claim.job_id, claim.attempt)
        except OSError as error:
            events.spool_failed(claim.job_id, claim.attempt, str(error))

    def _terms(self, tx: db.Transaction, claim: store.Claim) -> verdicts.Terms:
        route = self._routes[claim.route]
        return verdicts.Terms(
            may_run_twice=claim.may_run_twice,
            attempts_left=claim.attempts_left,
            attempts_used=claim.attempts_used,
            names_model=claim.names_model,
            require_complete=claim.require_complete,
            retry_first_s=route.retry_first_s,
            retry_cap_s=route.retry_cap_s,
            cancel_requested=store.is_cancel_requested(tx, claim.job_id),
            secrets=self._secrets[claim.route],
        )


class _Marks:
    """The evidence of the attempt in flight: committed where it decides, remembered everywhere.

    Only `armed` may raise. The later marks are best effort with a short patience, and written again with the result.
    """

    def __init__(
        self,
        database: db.Database,
        claim: store.Claim,
        secrets: tuple[str, ...],
        grew: Callable[[list[int]], None],
        cut: Observer,
        later: Later,
    ) -> None:
        self._later = later
        self._database = database
        self._claim = claim
        self._secrets = secrets
        self._grew = grew
        self._cut = cut
        self._evidence = states.Evidence()
        self._body_start = b""
        self.writer: spool.Writer | None = None
        self._is_due = False
        self._is_over = False
        self.stream_events = 0
        """How many events of a stream came; servers send about one for each token."""

    def armed(self) -> None:
        self._cut("arming")
        try:
            with self._database.write(first=True) as tx:
                store.arm(tx, self._claim.job_id, self._claim.attempt)
        except errors.CommitUnknown:
            # The mark may be on the disk. That nothing was sent is known to us alone, so it is said in the other mark.
            self._see(send_failed_at=_now())
            raise
        self._see(armed_at=tx.now)
        self._cut("armed")

    def sent(self) -> None:
        self._see(sent_at=_now())
        self._write_soon()
        self._cut("sent")

    def send_failed(self) -> None:
        self._see(send_failed_at=_now())
        self._write()
        self._cut("send-failed")

    def headers(self, status: int, headers: Mapping[str, str]) -> None:
        now = _now()
        if self.writer is not None:
            self.writer.head(status, headers, now)
        self._see(
            headers_at=now, http_status=status, upstream_id=upstream_id_of(headers), headers=headers, spooled=True
        )
        self._write_soon()
        self._cut("headers")

    def body(self, chunk: bytes) -> None:
        if len(self._body_start) < _BODY_START:
            self._body_start = (self._body_start + chunk)[:_BODY_START]
        if self.writer is not None:
            self.writer.body(chunk)
        self.stream_events += chunk.count(b"data:")
        self.grew()

    def grew(self) -> None:
        if self._evidence.first_byte_at is None:
            self._see(first_byte_at=_now())
        self._grew([self._claim.job_id])
        self._cut("body")

    def not_sent_because(self, error: Exception) -> None:
        self._see(fault=scrub(f"{type(error).__name__}: {error}", self._secrets)[:_BODY_START])

    def evidence_of(self, ended: Ended) -> states.Evidence:
        self._is_over = True
        return dataclasses.replace(
            self._evidence,
            ended_at=_now(),
            whole=ended.whole,
            command=ended.command,
            cut_by=ended.cut_by,
            error=ended.error,
            body_start=self._body_start,
        )

    def _see(self, **seen: object) -> None:
        self._evidence = dataclasses.replace(self._evidence, **seen)  # type: ignore[arg-type]

    def _write_soon(self) -> None:
        # A quick answer is worth no commit of its own for what stands in the result a moment later.
        if not self._is_due:
            self._is_due = True
            self._later.call(MARK_S, self._write_if_wanted)

    def _write_if_wanted(self) -> None:
        self._is_due = False
        if not self._is_over:
            self._write()

    def _write(self) -> None:
        evidence = self._evidence
        # What the database tells of an answer is on the disk before.
        if self.writer is not None and evidence.headers_at is not None:
            self.writer.sync()
        try:
            with self._database.write(first=True, patience_s=db.MARK_PATIENCE_S) as tx:
                store.record_evidence(tx, self._claim.job_id, self._claim.attempt, evidence)
        except (errors.BrainlaneError, sqlite3.Error):
            return  # written again with the result


def _now() -> str:
    return wire.format_time(datetime.now(UTC))
