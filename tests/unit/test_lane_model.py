"""The lane against a plain model of it: anything that may happen, in any order, as the contract says.

The model knows no SQL: it is a list of jobs with a place each, a pause, and a time for each closed door. After every
step all rows must be as the model says; at the end whatever may still run is run, in the order that the model gives.
"""

import copy
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import freezegun
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from brainlaned import config, decisions, errors, queries, record, states, store, wire
from brainlaned.db import Database, Transaction
from brainlaned.gate import Gates
from brainlaned.states import Closing, Evidence, Verdict
from brainlaned.wire import AttemptStatus, GateReason, Priority, Reason, Status

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
ROUTES = {name: config.Route(name, f"http://127.0.0.1:1/{name}", "small") for name in ("near", "far")}
HEAD_START = {priority: timedelta(seconds=seconds) for priority, seconds in config.parse({}).head_start_s.items()}
ALICE = store.Caller(uid=1000, user="alice")
MARK = "2026-03-01T12:00:01.000000Z"
FAR_FUTURE = timedelta(days=400)

Answer = TypeVar("Answer")

ENDS: dict[Status, tuple[AttemptStatus, Reason]] = {
    Status.DONE: (AttemptStatus.SUCCEEDED, Reason.ANSWERED),
    Status.FAILED: (AttemptStatus.FAILED, Reason.BAD_REQUEST),
    Status.HELD: (AttemptStatus.UNKNOWN, Reason.SENT_OUTCOME_UNKNOWN),
    Status.QUEUED: (AttemptStatus.FAILED, Reason.UPSTREAM_ERROR),
    Status.CANCELLED: (AttemptStatus.CANCELLED, Reason.CANCEL_REQUESTED),
}


submissions = st.tuples(
    st.sampled_from(sorted(ROUTES)),
    st.sampled_from(Priority),
    st.sampled_from([None, None, None, -3600, -1, 0, 1, 30, 3600, 7200]),
)
"""Route, priority, and the seconds from now to not_before."""

ends = st.tuples(
    st.sampled_from([Status.QUEUED, Status.QUEUED, Status.DONE, Status.FAILED, Status.HELD]),
    st.sampled_from([None, 0, 2, 600, 5000]),
)
"""How an attempt ends, and after how many seconds a job that is queued again may run."""


@dataclass
class Job:
    """What the model knows of a job."""

    id: int
    route: str
    created: datetime
    place: datetime
    due: datetime | None
    status: Status = Status.QUEUED
    attempts: int = 0
    is_armed: bool = False
    cancel_wished: bool = False


@dataclass
class Door:
    """What the model knows of a gate. `probe`: when it may be knocked at; None while closed: never."""

    is_closed: bool = False
    probe: datetime | None = None


@dataclass
class Model:
    jobs: dict[int, Job] = field(default_factory=dict)
    is_paused: bool = False
    doors: dict[str, Door] = field(default_factory=lambda: {name: Door() for name in ROUTES})

    def with_status(self, *statuses: Status) -> list[Job]:
        return [job for job in self.jobs.values() if job.status in statuses]

    @property
    def running(self) -> Job | None:
        return next(iter(self.with_status(Status.RUNNING)), None)

    def may_be_asked(self, route: str, now: datetime) -> bool:
        door = self.doors[route]
        return not door.is_closed or (door.probe is not None and door.probe <= now)

    def clear_what_is_due(self, now: datetime) -> None:
        for job in self.with_status(Status.QUEUED):
            if job.due is not None and job.due <= now:
                job.due = None

    def next_in_line(self, now: datetime) -> Job | None:
        line = [job for job in self.with_status(Status.QUEUED) if job.due is None and self.may_be_asked(job.route, now)]
        return None if self.is_paused else min(line, key=lambda job: (job.place, job.id), default=None)


class LaneMachine(RuleBasedStateMachine):
    """Does the same to a real database and to the model."""

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self.clock = clock
        clock.move_to(NOON)
        self.directory = tempfile.TemporaryDirectory()
        self.database = Database(Path(self.directory.name, "brainlane.db"))
        self.database.open()
        self.gates = Gates(ROUTES, jitter=lambda low, high: low)
        self.write(lambda tx: store.begin_run(tx, "run", 1, "brainctl", list(ROUTES)))
        self.model = Model()
        self.claims: list[store.Claim] = []
        self.before: dict[int, Status] = {}

    def teardown(self) -> None:
        try:
            self.run_all_that_is_left()
        finally:
            self.database.close()
            self.directory.cleanup()

    # Both sides.

    @property
    def now(self) -> datetime:
        return datetime.now(UTC)

    def write(self, change: Callable[[Transaction], Answer]) -> Answer:
        with self.database.write() as tx:
            return change(tx)

    def claim_next(self) -> store.Claim | None:
        return self.write(lambda tx: store.claim_next(tx, self.gates.open_routes(tx), "run"))

    def end(self, claim: store.Claim, status: Status, wait_s: float | None = None) -> None:
        attempt, reason = ENDS[status]
        verdict = Verdict(
            status, attempt, reason, "as told", wait_s=wait_s, text="x", opens=status in {Status.DONE, Status.FAILED}
        )
        place = (claim.job_id, claim.attempt, claim.route)
        self.write(lambda tx: record.record(tx, self.gates, *place, Evidence(armed_at=MARK), verdict))

    def everything(self) -> list[tuple[Any, ...]]:
        with self.database.read() as connection:
            return [
                tuple(row)
                for table in (
                    "jobs",
                    "job_attempts",
                    "job_outputs",
                    "attempt_parts",
                    "gates",
                    "decisions",
                    "job_counts",
                )
                for row in connection.execute(f"select * from {table}")  # noqa: S608
            ]

    # What may happen.

    @initialize(several=st.lists(submissions, min_size=2, max_size=6))
    def submit_several(self, several: list[tuple[str, Priority, int | None]]) -> None:
        for one in several:
            self.submit(one)

    @rule(one=submissions)
    def submit(self, one: tuple[str, Priority, int | None]) -> None:
        route, priority, not_before_s = one
        not_before = None if not_before_s is None else self.now + timedelta(seconds=not_before_s)
        asked = store.Submission("{}", "d", route, "small", False, 1_000_000, priority=priority, not_before=not_before)
        head_start_s = HEAD_START[priority].total_seconds()
        job_id, replayed = self.write(lambda tx: store.accept(tx, asked, ALICE, head_start_s, 1_000_000))
        assert not replayed and job_id not in self.model.jobs
        waiting = self.model.with_status(Status.QUEUED)
        created = max([self.now, *(job.created for job in waiting)])
        place = max(created, not_before or created) - HEAD_START[priority]
        due = not_before if not_before is not None and not_before > self.now else None
        self.model.jobs[job_id] = Job(job_id, route, created, place, due)

    @precondition(lambda self: self.model.running is None)
    @rule()
    def claim(self) -> None:
        claim = self.claim_next()
        self.model.clear_what_is_due(self.now)
        expected = self.model.next_in_line(self.now)
        assert (claim and claim.job_id) == (expected and expected.id)
        if claim is not None and expected is not None:
            expected.status = Status.RUNNING
            expected.attempts += 1
            expected.is_armed = False
            assert (claim.attempt, claim.route) == (expected.attempts, expected.route)
            self.claims.append(claim)

    @precondition(lambda self: self.model.running is not None)
    @rule()
    def claim_a_second_one(self) -> None:
        after = copy.deepcopy(self.model)
        after.clear_what_is_due(self.now)
        if after.next_in_line(self.now) is None:
            assert self.claim_next() is None
            self.model = after
        else:
            before = self.everything()
            with pytest.raises(sqlite3.IntegrityError):
                self.claim_next()
            assert self.everything() == before

    @precondition(lambda self: self.model.running is not None)
    @rule(end=ends)
    def finish(self, end: tuple[Status, float | None]) -> None:
        status, wait_s = end
        job = self.model.running
        assert job is not None
        if job.cancel_wished:
            status = Status.CANCELLED
        wait_s = wait_s if status is Status.QUEUED else None
        self.end(self.claims[-1], status, wait_s)
        job.status, job.cancel_wished = status, False
        job.due = None if wait_s is None else self.now + timedelta(seconds=wait_s)
        if status in {Status.DONE, Status.FAILED}:
            self.model.doors[job.route] = Door()

    @rule(turns=st.lists(ends, min_size=2, max_size=8))
    def work_for_a_while(self, turns: list[tuple[Status, float | None]]) -> None:
        for end in turns:
            if self.model.running is None:
                self.claim()
            else:
                self.finish(end)
            self.no_job_moves_but_as_the_machine_allows()
            self.every_row_is_as_the_model_says()

    @precondition(lambda self: self.claims)
    @rule(pick=st.integers(0, 1000), status=st.sampled_from(sorted(ENDS)))
    def finish_too_late(self, pick: int, status: Status) -> None:
        claim = self.claims[pick % len(self.claims)]
        job = self.model.running
        if job is not None and (job.id, job.attempts) == (claim.job_id, claim.attempt):
            return
        before = self.everything()
        for change in (lambda: self.end(claim, status), lambda: self.write(partial(self.arm_it, claim))):
            with pytest.raises((errors.Superseded, errors.CancelAsked)):
                change()
        assert self.everything() == before

    @staticmethod
    def arm_it(claim: store.Claim, tx: Transaction) -> None:
        store.arm(tx, claim.job_id, claim.attempt)

    @precondition(lambda self: self.model.jobs)
    @rule(pick=st.integers(0, 1000))
    def cancel(self, pick: int) -> None:
        job = list(self.model.jobs.values())[pick % len(self.model.jobs)]
        before = self.everything()
        if job.status in states.FINAL:
            with pytest.raises(errors.Refused):
                self.write(lambda tx: decisions.cancel(tx, job.id, None, None, ALICE))
            assert self.everything() == before
            return
        stands = self.write(lambda tx: decisions.cancel(tx, job.id, job.attempts, None, ALICE))
        if job.status is Status.RUNNING and job.is_armed:
            job.cancel_wished = True
        else:
            job.status, job.due = Status.CANCELLED, None
        assert stands is job.status

    @precondition(lambda self: self.model.running is not None)
    @rule()
    def arm(self) -> None:
        job, claim = self.model.running, self.claims[-1]
        assert job is not None
        if job.cancel_wished:
            with pytest.raises(errors.CancelAsked):
                self.write(partial(self.arm_it, claim))
        elif job.is_armed:
            with pytest.raises(errors.Superseded):
                self.write(partial(self.arm_it, claim))
        else:
            self.write(partial(self.arm_it, claim))
            job.is_armed = True

    @rule(is_paused=st.sampled_from([True, False, False]))
    def pause_or_resume(self, is_paused: bool) -> None:
        self.write((lambda tx: store.pause(tx, "because", ALICE)) if is_paused else store.resume)
        self.model.is_paused = is_paused

    @rule(route=st.sampled_from(sorted(ROUTES)), wait_s=st.sampled_from(["open", "open", None, 0, 5, 600]))
    def open_or_close_a_gate(self, route: str, wait_s: float | str | None) -> None:
        if isinstance(wait_s, str):
            was_closed = self.write(lambda tx: self.gates.open(tx, route))
            assert was_closed == self.model.doors[route].is_closed
            self.model.doors[route] = Door()
            return
        closing = Closing(GateReason.UNREACHABLE, "closed", operator_only=wait_s is None, wait_s=wait_s)
        probe = self.write(lambda tx: self.gates.close(tx, route, closing))
        assert (probe is None) == (wait_s is None)
        # That the wait is no shorter than was asked for is all that is promised here.
        assert probe is None or wire.parse_time(probe) >= self.now + timedelta(seconds=wait_s or 0)
        self.model.doors[route] = Door(True, None if probe is None else wire.parse_time(probe))

    @rule(seconds=st.sampled_from([0.000001, 1, 5, 600, 3600, 86400, -1, -3600]))
    def let_time_pass_or_set_the_clock_back(self, seconds: float) -> None:
        self.clock.move_to(self.now + timedelta(seconds=seconds))

    @rule()
    def restart(self) -> None:
        """Close and open the database, as a restart does while nothing is wrong."""
        self.database.close()
        self.database.open()

    # What must always hold.

    @invariant()
    def every_row_is_as_the_model_says(self) -> None:
        with self.database.read() as connection:
            rows = {row["id"]: row for row in connection.execute("select * from jobs")}
        assert rows.keys() == self.model.jobs.keys()
        for job_id, job in self.model.jobs.items():
            row = rows[job_id]
            due = None if row["due_at"] is None else wire.parse_time(row["due_at"])
            found = (row["status"], row["attempt_count"], wire.parse_time(row["place_at"]), due)
            assert found == (job.status, job.attempts, job.place, job.due)
            assert (row["cancel_requested_at"] is not None) == job.cancel_wished or job.status in states.FINAL
            assert (row["finished_at"] is not None) == (job.status in states.FINAL)
            assert (row["started_at"] is not None) == (job.attempts > 0)

    @invariant()
    def no_job_moves_but_as_the_machine_allows(self) -> None:
        with self.database.read() as connection:
            after = {row["id"]: Status(row["status"]) for row in connection.execute("select id, status from jobs")}
        for job_id, status in after.items():
            old = self.before.get(job_id)
            assert status is old or status in states.MOVES[old]
        self.before = after

    @invariant()
    def never_are_two_running(self) -> None:
        with self.database.read() as connection:
            jobs = connection.execute("select count(*) from jobs where status = 'running'").fetchone()[0]
            attempts = connection.execute("select count(*) from job_attempts where status = 'running'").fetchone()[0]
        assert jobs == attempts <= 1

    @invariant()
    def the_counts_are_those_of_the_rows(self) -> None:
        with self.database.read() as connection:
            counts = queries.lane(connection)["counts"]
        assert counts == {status: len(self.model.with_status(status)) for status in Status}

    @invariant()
    def nothing_is_silently_unknown(self) -> None:
        with self.database.read() as connection:
            view = connection.execute("select * from operator_view").fetchall()
        assert {row["id"] for row in view} == set(self.model.jobs)
        for row in view:
            assert row["next_action"]
            assert (row["waiting"] is not None) == (row["status"] == Status.QUEUED)

    # The end.

    def run_all_that_is_left(self) -> None:
        """Let every obstacle go, and see that all that is queued runs in the order of its places."""
        if self.model.running is not None:
            self.finish((Status.DONE, None))
        self.write(store.resume)
        for route in ROUTES:
            self.write(partial(self.gates.open, route=route))
        self.clock.tick(FAR_FUTURE)
        left = sorted(self.model.with_status(Status.QUEUED), key=lambda job: (job.place, job.id))
        order = []
        while (claim := self.claim_next()) is not None:
            order.append(claim.job_id)
            self.end(claim, Status.DONE)
        assert order == [job.id for job in left]


def test_in_whatever_order_things_happen_the_lane_does_as_its_model_does() -> None:
    with freezegun.freeze_time(NOON, ignore=["_pytest", "hypothesis"]) as clock:
        run_state_machine_as_test(
            partial(LaneMachine, clock), settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
        )
