import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import freezegun
import pytest

from brainlaned import config, decisions, errors, store, wire
from brainlaned.db import Database, Transaction
from brainlaned.states import FINAL, Evidence, Verdict
from brainlaned.store import Caller, Submission
from brainlaned.wire import AttemptStatus, ErrorKind, Priority, Reason, Status

NEAR = config.Route("near", "http://127.0.0.1:1/v1", "small")
FAR = config.Route("far", "http://me:CANARY@brain.example/v1?key=CANARY", "large", may_run_twice=True)
HEAD_START_S = config.parse({}).head_start_s
ALICE = Caller(uid=1000, user="alice", pid=77)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SEEN = Evidence(armed_at="2026-03-01T12:00:01.000000Z", ended_at="2026-03-01T12:00:02.000000Z")

DONE = Verdict(Status.DONE, AttemptStatus.SUCCEEDED, Reason.ANSWERED, "HTTP 200", text="hi", response="{}", opens=True)
FAILED = Verdict(Status.FAILED, AttemptStatus.FAILED, Reason.BAD_REQUEST, "HTTP 400", opens=True)
HELD = Verdict(Status.HELD, AttemptStatus.UNKNOWN, Reason.SENT_OUTCOME_UNKNOWN, "no answer came")
AGAIN = Verdict(Status.QUEUED, AttemptStatus.INTERRUPTED, Reason.NOT_SENT, "refused", uses_attempt=False)
CANCELLED = Verdict(Status.CANCELLED, AttemptStatus.CANCELLED, Reason.CANCEL_REQUESTED, "cancelled")
EVERY_VERDICT = [DONE, FAILED, HELD, replace(AGAIN, attempt=AttemptStatus.FAILED), CANCELLED]


class Lane:
    """A database, and the store's functions with a transaction for each call."""

    def __init__(self, path: Path) -> None:
        self.database = Database(path)
        self.database.open()
        self.routes = [config.OpenRoute(NEAR, is_probe=False), config.OpenRoute(FAR, is_probe=False)]
        with self.database.write() as tx:
            store.begin_run(tx, "run", 1, "brainctl", ["near", "far"])

    def submit(self, prompt: str = "hello", *, caller: Caller = ALICE, **fields: Any) -> int:
        with self.database.write() as tx:
            return accept(tx, prompt, caller=caller, **fields)

    def claim(self) -> store.Claim | None:
        with self.database.write() as tx:
            return store.claim_next(tx, self.routes, "run")

    def claimed(self) -> store.Claim:
        claim = self.claim()
        assert claim is not None
        return claim

    def finish(self, claim: store.Claim, verdict: Verdict, *, unclean: bool = False) -> None:
        # An attempt that was interrupted cannot have been armed; every other one was.
        evidence = Evidence() if verdict.attempt is AttemptStatus.INTERRUPTED else SEEN
        with self.database.write() as tx:
            store.finish(tx, claim.job_id, claim.attempt, evidence, verdict, unclean=unclean)

    def cancel(self, job_id: int, attempt: int | None = None, reason: str | None = None) -> Status:
        with self.database.write() as tx:
            return decisions.cancel(tx, job_id, attempt, reason, ALICE)

    def arm(self, claim: store.Claim) -> None:
        with self.database.write() as tx:
            store.arm(tx, claim.job_id, claim.attempt)

    def rows(self, sql: str, **params: Any) -> list[dict[str, Any]]:
        with self.database.read() as connection:
            return [dict(row) for row in connection.execute(sql, params)]

    def job(self, job_id: int) -> dict[str, Any]:
        return self.rows("select * from jobs where id = :id", id=job_id)[0]

    def attempt(self, job_id: int, attempt: int = 1) -> dict[str, Any]:
        return self.rows("select * from job_attempts where job_id = :id and attempt = :n", id=job_id, n=attempt)[0]

    def everything(self) -> dict[str, list[dict[str, Any]]]:
        tables = self.rows("select name from sqlite_master where type = 'table' order by name")
        return {table["name"]: self.rows(f"select * from {table['name']}") for table in tables}  # noqa: S608

    def drain(self) -> list[int]:
        """Run everything that may run now, and return the ids in the order in which they began."""
        order = []
        while claim := self.claim():
            order.append(claim.job_id)
            self.finish(claim, DONE)
        return order


def submission(prompt: str = "hello", **fields: Any) -> Submission:
    route = fields.get("route", "near")
    request = json.dumps({"messages": [{"role": "user", "content": prompt}]})
    usual = {"digest": f"digest of {prompt}", "route": route, "model": "small", "names_model": False}
    return Submission(**{"request": request, "max_attempts": 3, **usual, **fields})


def accept(tx: Transaction, prompt: str = "hello", *, caller: Caller = ALICE, **fields: Any) -> int:
    asked = submission(prompt, **fields)
    return store.accept(tx, asked, caller, HEAD_START_S[asked.priority], 1_000_000)[0]


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    made = Lane(tmp_path / "brainlane.db")
    yield made
    assert_counts_are_right(made)
    made.database.close()


def assert_counts_are_right(lane: Lane) -> None:
    counted = lane.rows("select route, status, count(*) as jobs from jobs group by route, status order by 1, 2")
    assert lane.rows("select * from job_counts where jobs <> 0 order by 1, 2") == counted


Clock = Any
"""What freezegun lends; it has `tick` and `move_to`."""


@pytest.fixture
def clock() -> Iterator[Clock]:
    with freezegun.freeze_time(NOON, ignore=["_pytest"]) as frozen:
        yield frozen


# The order in which jobs begin.


@pytest.mark.usefixtures("clock")
def test_jobs_submitted_one_by_one_under_a_frozen_clock_begin_as_they_were_accepted(lane: Lane) -> None:
    accepted = [lane.submit(f"job {number}") for number in range(200)]
    assert lane.drain() == accepted == sorted(accepted)


@pytest.mark.usefixtures("clock")
def test_jobs_submitted_in_one_batch_begin_as_they_were_accepted(lane: Lane) -> None:
    with lane.database.write() as tx:
        accepted = [accept(tx, f"job {number}", route=("near", "far")[number % 2]) for number in range(200)]
    assert lane.drain() == accepted


def test_a_clock_that_was_set_back_lets_nobody_overtake_those_who_still_wait(lane: Lane, clock: Clock) -> None:
    first = lane.submit()
    clock.move_to(NOON - timedelta(hours=3))
    second = lane.submit()
    clock.move_to(NOON - timedelta(hours=1))
    third = lane.submit()
    assert lane.drain() == [first, second, third]
    created = [row["created_at"] for row in lane.rows("select created_at from jobs order by id")]
    assert created == [wire.format_time(NOON)] * 3


def test_once_nobody_waits_the_clock_is_believed_again(lane: Lane, clock: Clock) -> None:
    lane.submit()
    lane.drain()
    clock.move_to(NOON - timedelta(hours=3))
    assert lane.job(lane.submit())["created_at"] == wire.format_time(NOON - timedelta(hours=3))


@pytest.mark.parametrize(
    ("earlier", "later", "gap", "overtakes"),
    [
        (Priority.NORMAL, Priority.HIGH, timedelta(minutes=59), True),
        (Priority.NORMAL, Priority.HIGH, timedelta(minutes=61), False),
        (Priority.LOW, Priority.NORMAL, timedelta(minutes=59), True),
        (Priority.LOW, Priority.NORMAL, timedelta(minutes=61), False),
        (Priority.LOW, Priority.HIGH, timedelta(minutes=119), True),
        (Priority.LOW, Priority.HIGH, timedelta(minutes=121), False),
        (Priority.HIGH, Priority.NORMAL, timedelta(0), False),
        (Priority.HIGH, Priority.HIGH, timedelta(0), False),
    ],
)
def test_a_priority_is_a_head_start_and_a_bounded_one(
    lane: Lane, clock: Clock, earlier: Priority, later: Priority, gap: timedelta, overtakes: bool
) -> None:
    one = lane.submit(priority=earlier)
    clock.tick(gap)
    other = lane.submit(priority=later)
    assert lane.drain() == ([other, one] if overtakes else [one, other])


def test_a_job_does_not_begin_before_its_time(lane: Lane, clock: Clock) -> None:
    late = lane.submit(not_before=NOON + timedelta(minutes=10))
    clock.tick(timedelta(minutes=9, seconds=59))
    assert lane.claim() is None
    clock.tick(1)
    assert lane.claimed().job_id == late


def test_the_place_of_a_job_for_later_is_the_time_it_named(lane: Lane, clock: Clock) -> None:
    late = lane.submit(not_before=NOON + timedelta(minutes=10))
    before = [lane.submit(), lane.submit()]
    clock.tick(timedelta(minutes=20))
    after = lane.submit()
    assert lane.drain() == [*before, late, after]


def test_a_time_that_is_past_already_buys_no_better_place(lane: Lane, clock: Clock) -> None:
    first = lane.submit()
    second = lane.submit(not_before=NOON - timedelta(days=1))
    assert lane.drain() == [first, second]


def test_a_job_that_is_queued_again_keeps_its_place(lane: Lane, clock: Clock) -> None:
    first = lane.submit()
    clock.tick(1)
    second = lane.submit()
    place = lane.job(first)["place_at"]
    lane.finish(lane.claimed(), AGAIN)
    assert (lane.job(first)["status"], lane.job(first)["place_at"]) == (Status.QUEUED, place)
    assert lane.drain() == [first, second]


def test_a_job_that_waits_for_its_retry_lets_others_pass_and_then_has_its_old_place(lane: Lane, clock: Clock) -> None:
    first, second = lane.submit(), lane.submit()
    lane.finish(lane.claimed(), replace(AGAIN, wait_s=30))
    assert lane.job(first)["due_at"] == wire.format_time(NOON + timedelta(seconds=30))
    assert lane.drain() == [second]
    clock.tick(30)
    third = lane.submit()
    assert lane.drain() == [first, third]


def test_over_several_routes_the_first_in_line_begins(lane: Lane, clock: Clock) -> None:
    order = []
    for route in ("far", "near", "near", "far"):
        order.append(lane.submit(route=route))
        clock.tick(1)
    assert lane.drain() == order


def test_a_job_of_one_route_never_waits_for_another_route(lane: Lane) -> None:
    lane.submit(route="near")
    other = lane.submit(route="far")
    lane.routes = lane.routes[1:]
    assert lane.drain() == [other]


def test_a_paused_lane_claims_nothing_and_says_who_paused_it(lane: Lane) -> None:
    job_id = lane.submit()
    with lane.database.write() as tx:
        store.pause(tx, "night", ALICE)
    assert lane.claim() is None
    reopened = Database(lane.database.path)
    lane.database.close()
    lane.database = reopened
    assert lane.claim() is None
    paused = lane.rows("select * from lane")[0]
    assert (paused["paused_by"], paused["paused_reason"]) == ("alice", "night")
    with lane.database.write() as tx:
        store.resume(tx)
    assert lane.claimed().job_id == job_id


def test_pausing_a_paused_lane_changes_who_and_why_but_not_since_when(lane: Lane, clock: Clock) -> None:
    with lane.database.write() as tx:
        store.pause(tx, "night", ALICE)
    clock.tick(60)
    with lane.database.write() as tx:
        store.pause(tx, None, Caller(uid=0))
    assert lane.rows("select paused_at, paused_by, paused_reason from lane") == [
        {"paused_at": wire.format_time(NOON), "paused_by": "uid 0", "paused_reason": None}
    ]


# What a claim costs, counted in steps of SQLite's machine, which no busy computer can change.


def steps_of(path: Path, act: Callable[[Transaction], object]) -> int:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.execute("begin immediate")
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    connection.set_progress_handler(count, 1)
    act(Transaction(connection))
    connection.set_progress_handler(None, 1)
    connection.execute("rollback")
    connection.close()
    return steps


def claim_steps(lane: Lane, *, among: list[config.OpenRoute] | None = None) -> int:
    routes = lane.routes if among is None else among
    return steps_of(lane.database.path, lambda tx: store.claim_next(tx, routes, "run"))


def fill(lane: Lane, count: int, **fields: Any) -> None:
    with lane.database.write() as tx:
        for _ in range(count):
            accept(tx, **fields)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    "fields",
    [
        {"not_before": NOON + timedelta(days=1)},
        {"route": "far"},
        {},
    ],
    ids=["for a later time", "behind a closed gate", "in the same line"],
)
def test_a_thousand_more_jobs_that_wait_cost_a_claim_nothing(lane: Lane, fields: dict[str, Any]) -> None:
    lane.submit()
    open_routes = lane.routes[:1]
    fill(lane, 10, **fields)
    few = claim_steps(lane, among=open_routes)
    fill(lane, 1000, **fields)
    assert claim_steps(lane, among=open_routes) <= few + 20  # a deeper tree costs a step here and there


@pytest.mark.usefixtures("clock")
def test_a_thousand_more_jobs_behind_a_paused_lane_cost_a_claim_nothing(lane: Lane) -> None:
    with lane.database.write() as tx:
        store.pause(tx, None, ALICE)
    fill(lane, 10)
    few = claim_steps(lane)
    fill(lane, 1000)
    assert claim_steps(lane) <= few + 20


@pytest.mark.usefixtures("clock")
def test_a_thousand_jobs_that_have_ended_cost_neither_a_claim_nor_a_submit_anything(lane: Lane) -> None:
    def measured() -> tuple[int, int]:
        submit = steps_of(lane.database.path, lambda tx: accept(tx, key="k"))
        return claim_steps(lane), submit

    fill(lane, 10)
    lane.drain()
    lane.submit()
    few = measured()
    lane.drain()
    fill(lane, 300)
    lane.drain()
    lane.submit()
    many = measured()
    assert many[0] <= few[0] + 20
    assert many[1] <= few[1] + 20


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    "act",
    [
        lambda tx: store.strike(tx, 1, "near"),
        lambda tx: store.hold_suspects(tx, "near", 1),
        lambda tx: decisions.cancel(tx, 1, None, None, ALICE),
        lambda tx: accept(tx, "more"),
    ],
    ids=["strike", "hold_suspects", "cancel", "accept"],
)
def test_a_thousand_more_jobs_in_line_cost_no_other_change_anything(
    lane: Lane, act: Callable[[Transaction], object]
) -> None:
    fill(lane, 10)
    few = steps_of(lane.database.path, act)
    fill(lane, 1000)
    assert steps_of(lane.database.path, act) <= few + 30


def test_a_claim_looks_through_no_table(lane: Lane) -> None:
    fill(lane, 10)
    statements: list[str] = []
    connection = sqlite3.connect(lane.database.path, isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.execute("begin immediate")
    connection.set_trace_callback(statements.append)
    store.claim_next(Transaction(connection), lane.routes, "run")
    connection.set_trace_callback(None)
    changes = [sql for sql in statements if sql.split()[0] in {"select", "update"}]
    plans = {sql: [row[3] for row in connection.execute(f"explain query plan {sql}")] for sql in changes}
    connection.close()
    scans = [step for plan in plans.values() for step in plan if step.startswith("SCAN") and step != "SCAN lane"]
    assert scans == []
    heads = [plan for sql, plan in plans.items() if "order by place_at, id" in sql]
    assert heads and all("INDEX line (route=?)" in plan[0] and len(plan) == 1 for plan in heads)
    due = next(plan for sql, plan in plans.items() if "due_at <=" in sql)
    assert "INDEX due (due_at<?)" in due[0]


# Acceptance.


def test_an_accepted_job_holds_everything_that_was_said(lane: Lane, clock: Clock) -> None:
    not_before = NOON + timedelta(hours=1)
    job_id = lane.submit(
        "a prompt \u0000 \U0001f30d",
        key="k",
        model="own",
        names_model=True,
        priority=Priority.HIGH,
        not_before=not_before,
        labels={"team": "blue", "b": ""},
        may_run_twice=True,
        require_complete=True,
    )
    job = lane.job(job_id)
    assert (job["status"], job["reason"], job["key"], job["route"]) == (Status.QUEUED, Reason.SUBMITTED, "k", "near")
    assert (job["model"], job["names_model"], job["priority"]) == ("own", 1, "high")
    assert (job["submitter_uid"], job["submitter_name"], job["submitter_pid"]) == (1000, "alice", 77)
    assert (job["max_attempts"], job["may_run_twice"], job["require_complete"]) == (3, 1, 1)
    assert job["created_at"] == job["moved_at"] == wire.format_time(NOON)
    assert job["not_before"] == job["due_at"] == wire.format_time(not_before)
    assert job["place_at"] == wire.format_time(not_before - timedelta(hours=1))
    assert (job["started_at"], job["finished_at"], job["attempt_count"], job["attempts_used"]) == (None, None, 0, 0)
    request = lane.rows("select request from job_requests where job_id = :id", id=job_id)[0]["request"]
    assert request == submission("a prompt \u0000 \U0001f30d").request
    assert job["request_bytes"] == len(request.encode())
    assert lane.rows("select key, value from job_labels order by key") == [
        {"key": "b", "value": ""},
        {"key": "team", "value": "blue"},
    ]


def ask(lane: Lane, *, prompt: str = "hello", caller: Caller = ALICE, max_queued: int = 100, **fields: Any) -> Any:
    with lane.database.write() as tx:
        return store.accept(tx, submission(prompt, **fields), caller, 0, max_queued)


def test_the_same_key_is_the_same_job(lane: Lane) -> None:
    first, replayed = ask(lane, key="k")
    assert not replayed
    for fields in ({}, {"priority": Priority.HIGH}, {"labels": {"a": "b"}}, {"max_attempts": 9}):
        assert ask(lane, key="k", **fields) == (first, True)
    assert len(lane.rows("select id from jobs")) == 1
    assert lane.rows("select * from job_labels") == []


@pytest.mark.parametrize("verdict", EVERY_VERDICT, ids=lambda verdict: verdict.job)
def test_a_key_leads_to_its_job_wherever_that_stands(lane: Lane, verdict: Verdict) -> None:
    first, _ = ask(lane, key="k")
    claim = lane.claimed()
    assert ask(lane, key="k") == (first, True)
    lane.finish(claim, verdict)
    before = lane.job(first)
    assert ask(lane, key="k") == (first, True)
    assert lane.job(first) == before


def test_the_same_key_with_another_request_is_a_conflict_and_stores_nothing(lane: Lane) -> None:
    first, _ = ask(lane, key="k")
    before = lane.everything()
    with pytest.raises(errors.Refused, match=f"job {first} has it for another request") as refused:
        ask(lane, prompt="another", key="k")
    assert (refused.value.kind, refused.value.field) == (ErrorKind.KEY_CONFLICT, "key")
    assert refused.value.next_action == f"brainctl show {first}"
    assert lane.everything() == before


def test_every_user_has_keys_of_their_own(lane: Lane) -> None:
    first, _ = ask(lane, key="k")
    second, replayed = ask(lane, prompt="another", key="k", caller=Caller(uid=1001))
    assert (second > first, replayed) == (True, False)


def test_without_a_key_the_same_words_are_two_jobs(lane: Lane) -> None:
    assert ask(lane)[0] != ask(lane)[0]


def test_a_full_queue_refuses_and_stores_nothing_but_still_knows_its_keys(lane: Lane) -> None:
    first, _ = ask(lane, key="k", max_queued=2)
    ask(lane, max_queued=2)
    before = lane.everything()
    with pytest.raises(errors.Refused, match="2 jobs are queued, and max_queued is 2") as refused:
        ask(lane, max_queued=2)
    assert (refused.value.kind, refused.value.retry_safe) == (ErrorKind.QUEUE_FULL, True)
    assert lane.everything() == before
    assert ask(lane, key="k", max_queued=2) == (first, True)


def test_only_queued_jobs_fill_the_queue(lane: Lane) -> None:
    ask(lane, max_queued=1)
    claim = lane.claimed()
    ask(lane, max_queued=1)
    lane.finish(claim, HELD)
    with pytest.raises(errors.Refused):
        ask(lane, max_queued=1)
    assert lane.drain()
    ask(lane, max_queued=1)


def test_the_number_of_a_job_is_never_used_again(lane: Lane) -> None:
    lane.submit()
    last = lane.submit()
    with lane.database.write() as tx:
        tx.execute("delete from jobs")
    assert lane.submit() > last
    for table in ("job_requests", "job_labels", "job_attempts"):
        assert {row["job_id"] for row in lane.rows(f"select job_id from {table}")} <= {last + 1}  # noqa: S608


# Claiming.


def test_a_claim_makes_the_job_running_and_begins_an_attempt_at_once(lane: Lane, clock: Clock) -> None:
    job_id = lane.submit("hello")
    claim = lane.claimed()
    assert (claim.job_id, claim.attempt, claim.route, claim.model) == (job_id, 1, "near", "small")
    assert claim.request == submission("hello").request
    assert (claim.attempts_left, claim.attempts_used) == (3, 0)
    job, attempt = lane.job(job_id), lane.attempt(job_id)
    assert (job["status"], job["reason"], job["attempt_count"]) == (Status.RUNNING, Reason.CLAIMED, 1)
    assert job["started_at"] == attempt["started_at"] == wire.format_time(NOON)
    assert (attempt["status"], attempt["run"], attempt["armed_at"]) == (AttemptStatus.RUNNING, "run", None)


def test_an_attempt_names_its_endpoint_without_what_is_secret(lane: Lane) -> None:
    job_id = lane.submit(route="far")
    lane.claimed()
    assert lane.attempt(job_id)["endpoint"] == "http://brain.example/v1"


def test_the_database_itself_forbids_a_second_running_job(lane: Lane) -> None:
    lane.submit()
    lane.submit()
    lane.claimed()
    before = lane.everything()
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        lane.claim()
    assert lane.everything() == before


def test_a_job_without_a_model_of_its_own_takes_its_routes_model_at_the_time(lane: Lane) -> None:
    mine, any_ = lane.submit(model="own", names_model=True), lane.submit()
    lane.routes = [config.OpenRoute(replace(NEAR, model="newer"), is_probe=False)]
    for job_id, model in ((mine, "own"), (any_, "newer")):
        claim = lane.claimed()
        assert (claim.job_id, claim.model, claim.names_model) == (job_id, model, job_id == mine)
        assert lane.job(job_id)["model"] == lane.attempt(job_id)["model"] == model
        lane.finish(claim, DONE)


@pytest.mark.parametrize(
    ("fields", "leave"),
    [
        ({}, False),
        ({"may_run_twice": True}, True),
        ({"route": "far"}, True),
    ],
)
def test_the_leave_to_run_twice_comes_from_job_or_route_and_is_recorded_before_the_call(
    lane: Lane, fields: dict[str, Any], leave: bool
) -> None:
    job_id = lane.submit(**fields)
    assert lane.claimed().may_run_twice is leave
    assert lane.attempt(job_id)["may_run_twice"] == leave


def test_attempts_are_numbered_in_order_and_the_first_start_is_kept(lane: Lane, clock: Clock) -> None:
    job_id = lane.submit()
    for number in (1, 2, 3):
        claim = lane.claimed()
        assert claim.attempt == number
        lane.finish(claim, AGAIN)
        clock.tick(1)
    assert lane.job(job_id)["started_at"] == wire.format_time(NOON)
    assert [row["attempt"] for row in lane.rows("select attempt from job_attempts")] == [1, 2, 3]


def test_only_attempts_that_cost_something_are_used_up(lane: Lane) -> None:
    job_id = lane.submit()
    costly = replace(AGAIN, attempt=AttemptStatus.FAILED, uses_attempt=True)
    for verdict, left in ((AGAIN, 3), (costly, 3), (AGAIN, 2), (costly, 2), (AGAIN, 1)):
        claim = lane.claimed()
        assert claim.attempts_left == left
        assert claim.attempts_used == 3 - left
        lane.finish(claim, verdict)
    assert (lane.job(job_id)["attempt_count"], lane.job(job_id)["attempts_used"]) == (5, 2)


def test_a_death_is_counted_before_it_happens_and_taken_back_when_an_end_is_recorded(lane: Lane) -> None:
    job_id = lane.submit()
    claim = lane.claimed()
    assert lane.job(job_id)["unclean_deaths"] == 1
    lane.finish(claim, AGAIN, unclean=True)
    claim = lane.claimed()
    assert lane.job(job_id)["unclean_deaths"] == 2
    lane.finish(claim, AGAIN)
    assert lane.job(job_id)["unclean_deaths"] == 1


# Arming.


def test_arming_records_the_leave_to_send(lane: Lane, clock: Clock) -> None:
    job_id = lane.submit()
    claim = lane.claimed()
    clock.tick(1)
    lane.arm(claim)
    assert lane.attempt(job_id)["armed_at"] == wire.format_time(NOON + timedelta(seconds=1))


def test_an_attempt_is_armed_once(lane: Lane) -> None:
    lane.submit()
    claim = lane.claimed()
    lane.arm(claim)
    with pytest.raises(errors.Superseded):
        lane.arm(claim)


def test_a_cancel_before_anything_is_armed_ends_the_job_at_once_and_nothing_is_armed(lane: Lane) -> None:
    job_id = lane.submit()
    claim = lane.claimed()
    assert lane.cancel(job_id) is Status.CANCELLED
    with pytest.raises(errors.CancelAsked):
        lane.arm(claim)
    with pytest.raises(errors.Superseded):
        lane.finish(claim, DONE)
    attempt = lane.attempt(job_id)
    assert (attempt["status"], attempt["armed_at"], attempt["uses_attempt"]) == ("cancelled", None, 0)
    assert (lane.job(job_id)["attempts_used"], lane.job(job_id)["unclean_deaths"]) == (0, 0)
    lane.submit()
    lane.claimed()


@pytest.mark.parametrize("verdict", EVERY_VERDICT, ids=lambda verdict: verdict.job)
def test_an_attempt_that_has_ended_is_not_armed(lane: Lane, verdict: Verdict) -> None:
    lane.submit()
    claim = lane.claimed()
    lane.finish(claim, verdict)
    with pytest.raises(errors.CancelAsked if verdict.job is Status.CANCELLED else errors.Superseded):
        lane.arm(claim)


def test_an_attempt_that_a_later_one_has_replaced_is_not_armed(lane: Lane) -> None:
    job_id = lane.submit()
    stale = lane.claimed()
    lane.finish(stale, AGAIN)
    lane.claimed()
    with pytest.raises(errors.Superseded):
        lane.arm(stale)
    assert [lane.attempt(job_id, number)["armed_at"] for number in (1, 2)] == [None, None]


def test_a_job_that_never_was_is_not_armed(lane: Lane) -> None:
    with pytest.raises(errors.Superseded), lane.database.write() as tx:
        store.arm(tx, 99, 1)


# Evidence.


def test_a_mark_once_written_is_never_taken_back(lane: Lane) -> None:
    job_id = lane.submit()
    claim = lane.claimed()
    first = Evidence(armed_at="1", sent_at="2", headers_at="3", http_status=200, upstream_id="u", first_byte_at="4")
    later = Evidence(
        armed_at="x",
        sent_at="x",
        headers_at="x",
        http_status=500,
        upstream_id="x",
        first_byte_at="x",
        send_failed_at="5",
    )
    for evidence in (first, Evidence(), later):
        with lane.database.write() as tx:
            store.record_evidence(tx, job_id, claim.attempt, evidence)
    row = lane.attempt(job_id)
    names = ("armed_at", "sent_at", "headers_at", "http_status", "upstream_id", "first_byte_at", "send_failed_at")
    assert [row[name] for name in names] == ["1", "2", "3", 200, "u", "4", "5"]


def test_no_evidence_is_written_to_an_attempt_that_has_ended(lane: Lane) -> None:
    job_id = lane.submit()
    claim = lane.claimed()
    lane.finish(claim, DONE)
    before = lane.everything()
    with pytest.raises(errors.Superseded), lane.database.write() as tx:
        store.record_evidence(tx, job_id, claim.attempt, SEEN)
    assert lane.everything() == before


# Finishing.


@pytest.mark.parametrize("verdict", EVERY_VERDICT, ids=lambda verdict: verdict.job)
def test_an_end_moves_job_and_attempt_together(lane: Lane, clock: Clock, verdict: Verdict) -> None:
    job_id = lane.submit()
    claim = lane.claimed()
    clock.tick(5)
    now = wire.format_time(NOON + timedelta(seconds=5))
    lane.finish(claim, verdict)
    job, attempt = lane.job(job_id), lane.attempt(job_id)
    assert (job["status"], job["reason"], job["detail"]) == (verdict.job, verdict.reason, verdict.detail)
    assert job["moved_at"] == now
    assert job["finished_at"] == (now if verdict.job in FINAL else None)
    assert (attempt["status"], attempt["reason"]) == (verdict.attempt, verdict.reason)
    assert (attempt["ended_at"], attempt["armed_at"]) == (SEEN.ended_at, SEEN.armed_at)
    assert attempt["uses_attempt"] == job["attempts_used"] == verdict.uses_attempt


def test_an_answer_is_stored_with_all_that_is_known_of_it(lane: Lane) -> None:
    job_id = lane.submit()
    verdict = replace(
        DONE,
        text="h\u00e9 \u0000 \U0001f30d",
        response='{"id":"x"}',
        finish_reason="length",
        usage={"total_tokens": 5},
        flags=frozenset({wire.Flag.TRUNCATED, wire.Flag.NO_END_MARKER}),
    )
    lane.finish(lane.claimed(), verdict)
    assert lane.rows("select * from job_outputs") == [
        {"job_id": job_id, "text": verdict.text, "response": verdict.response}
    ]
    for row in (lane.job(job_id), lane.attempt(job_id)):
        assert (row["finish_reason"], json.loads(row["usage"])) == ("length", {"total_tokens": 5})
        assert json.loads(row["flags"]) == ["no-end-marker", "truncated"]
    assert lane.rows("select * from attempt_parts") == []


@pytest.mark.parametrize("verdict", [FAILED, HELD, CANCELLED], ids=lambda verdict: verdict.job)
def test_what_arrived_of_an_answer_that_was_not_taken_is_kept_apart(lane: Lane, verdict: Verdict) -> None:
    job_id = lane.submit()
    lane.finish(lane.claimed(), replace(verdict, text="half an ans"))
    assert lane.rows("select * from job_outputs") == []
    assert lane.rows("select * from attempt_parts") == [
        {"job_id": job_id, "attempt": 1, "text": "half an ans", "response": None, "raw": None}
    ]


def test_the_raw_bytes_of_an_answer_with_invalid_ones_are_kept_beside_its_text(lane: Lane) -> None:
    job_id = lane.submit()
    lane.finish(lane.claimed(), replace(DONE, text="a\ufffd", raw=b"a\xff"))
    assert [(row["job_id"], row["raw"]) for row in lane.rows("select * from attempt_parts")] == [(job_id, b"a\xff")]
    assert lane.rows("select text from job_outputs") == [{"text": "a\ufffd"}]


def test_an_attempt_may_have_ended_for_a_nearer_reason_than_its_job_moved(lane: Lane) -> None:
    job_id = lane.submit()
    lane.finish(lane.claimed(), replace(HELD, attempt_reason=Reason.TOTAL_LIMIT))
    assert lane.job(job_id)["reason"] == Reason.SENT_OUTCOME_UNKNOWN
    assert lane.attempt(job_id)["reason"] == Reason.TOTAL_LIMIT


@pytest.mark.parametrize("first", EVERY_VERDICT, ids=lambda verdict: f"after {verdict.job}")
@pytest.mark.parametrize("late", [DONE, FAILED, HELD, AGAIN], ids=lambda verdict: f"late {verdict.job}")
def test_a_late_answer_cannot_finish_a_superseded_attempt(lane: Lane, first: Verdict, late: Verdict) -> None:
    lane.submit()
    claim = lane.claimed()
    lane.finish(claim, first)
    before = lane.everything()
    with pytest.raises(errors.Superseded):
        lane.finish(claim, late)
    assert lane.everything() == before


def test_a_late_answer_cannot_finish_the_attempt_that_came_after(lane: Lane) -> None:
    lane.submit()
    stale = lane.claimed()
    lane.finish(stale, AGAIN)
    lane.claimed()
    before = lane.everything()
    with pytest.raises(errors.Superseded):
        lane.finish(stale, DONE)
    assert lane.everything() == before


def test_a_move_that_the_machine_does_not_know_is_refused(lane: Lane) -> None:
    lane.submit()
    claim = lane.claimed()
    before = lane.everything()
    with pytest.raises(ValueError, match="no move from running to running"):
        lane.finish(claim, replace(HELD, job=Status.RUNNING))
    assert lane.everything() == before


def test_an_interrupted_attempt_that_was_armed_is_refused_by_the_database(lane: Lane) -> None:
    lane.submit()
    claim = lane.claimed()
    with pytest.raises(sqlite3.IntegrityError, match="CHECK"), lane.database.write() as tx:
        store.finish(tx, claim.job_id, claim.attempt, SEEN, AGAIN)


@pytest.mark.parametrize(
    "change",
    [
        "status = 'done'",
        "status = 'running'",
        "status = 'paused'",
        "reason = 'because'",
        "priority = 'urgent'",
        "finished_at = '2026-03-01T12:00:00.000000Z'",
        "max_attempts = 0",
        "flags = 'none'",
        "usage = '{'",
        "may_run_twice = 2",
        "attempt_count = 'many'",
    ],
)
def test_the_database_refuses_a_row_that_makes_no_sense(lane: Lane, change: str) -> None:
    lane.submit()
    with pytest.raises(sqlite3.IntegrityError), lane.database.write() as tx:
        tx.execute(f"update jobs set {change}")  # noqa: S608


def test_a_held_job_waits_for_no_time(lane: Lane) -> None:
    lane.submit()
    lane.finish(lane.claimed(), HELD)
    with pytest.raises(sqlite3.IntegrityError), lane.database.write() as tx:
        tx.execute("update jobs set due_at = '2026-03-01T12:00:00.000000Z'")


# Strikes: what a gate makes of them is tested there.


def test_put_offs_that_are_not_in_a_row_make_no_suspect(lane: Lane) -> None:
    job_id = lane.submit(max_attempts=9)
    put_off = replace(AGAIN, attempt=AttemptStatus.FAILED, reason=Reason.ASKED_TO_WAIT)
    answered = replace(AGAIN, attempt=AttemptStatus.FAILED, reason=Reason.UPSTREAM_ERROR, uses_attempt=True, opens=True)
    for verdict in (put_off, put_off, answered, put_off):
        claim = lane.claimed()
        lane.finish(claim, verdict)
        if verdict is put_off:
            with lane.database.write() as tx:
                store.strike(tx, job_id, "near")
    assert lane.job(job_id)["strikes"] < 3


# Cancelling.


def test_a_queued_job_is_cancelled_at_once(lane: Lane, clock: Clock) -> None:
    job_id = lane.submit()
    assert lane.cancel(job_id, reason="not needed") is Status.CANCELLED
    job = lane.job(job_id)
    assert (job["status"], job["reason"]) == (Status.CANCELLED, Reason.CANCEL_REQUESTED)
    assert job["finished_at"] == wire.format_time(NOON)
    assert "alice" in job["detail"] and "not needed" in job["detail"]
    assert lane.claim() is None


def test_a_job_that_waits_for_a_later_time_can_be_cancelled(lane: Lane) -> None:
    job_id = lane.submit(not_before=datetime.now(UTC) + timedelta(days=1))
    assert lane.cancel(job_id) is Status.CANCELLED
    assert lane.job(job_id)["due_at"] is None


def test_a_held_job_is_cancelled_by_decision(lane: Lane) -> None:
    job_id = lane.submit()
    lane.finish(lane.claimed(), HELD)
    assert lane.cancel(job_id, attempt=1) is Status.CANCELLED
    assert lane.job(job_id)["reason"] == Reason.OPERATOR_CANCELLED


def test_the_cancel_of_a_running_job_is_a_wish_that_is_durable(lane: Lane, clock: Clock) -> None:
    job_id = lane.submit()
    lane.arm(lane.claimed())
    assert lane.cancel(job_id) is Status.RUNNING
    clock.tick(5)
    assert lane.cancel(job_id) is Status.RUNNING
    assert lane.job(job_id)["cancel_requested_at"] == wire.format_time(NOON)
    with lane.database.write() as tx:
        assert store.is_cancel_requested(tx, job_id)


def test_a_wish_to_cancel_does_not_outlive_the_attempt_it_was_for(lane: Lane) -> None:
    job_id = lane.submit()
    claim = lane.claimed()
    lane.arm(claim)
    lane.cancel(job_id)
    lane.finish(claim, replace(AGAIN, attempt=AttemptStatus.FAILED))
    assert lane.job(job_id)["cancel_requested_at"] is None
    lane.arm(lane.claimed())


@pytest.mark.parametrize("verdict", [DONE, FAILED, CANCELLED], ids=lambda verdict: verdict.job)
def test_a_cancel_that_comes_too_late_is_refused_and_changes_nothing(lane: Lane, verdict: Verdict) -> None:
    job_id = lane.submit()
    lane.finish(lane.claimed(), verdict)
    before = lane.everything()
    with pytest.raises(errors.Refused, match=f"it is {verdict.job} already") as refused:
        lane.cancel(job_id)
    assert refused.value.kind is ErrorKind.TOO_LATE
    assert lane.everything() == before


@pytest.mark.parametrize("attempt", [0, 2, 10**30])
def test_a_cancel_that_is_based_on_another_attempt_changes_nothing(lane: Lane, attempt: int) -> None:
    job_id = lane.submit()
    lane.claimed()
    before = lane.everything()
    with pytest.raises(errors.Superseded):
        lane.cancel(job_id, attempt=attempt)
    assert lane.everything() == before


def test_a_job_that_never_was_cannot_be_cancelled(lane: Lane) -> None:
    with pytest.raises(errors.Refused) as refused:
        lane.cancel(99)
    assert refused.value.kind is ErrorKind.NO_SUCH_JOB


def test_who_cancelled_what_and_why_is_recorded(lane: Lane, clock: Clock) -> None:
    job_id = lane.submit()
    lane.claimed()
    lane.cancel(job_id, attempt=1, reason="costs too much")
    (decision,) = lane.rows("select * from decisions")
    assert (decision["job_id"], decision["attempt"], decision["action"]) == (job_id, 1, "cancel")
    assert (decision["reason"], decision["at"]) == ("costs too much", wire.format_time(NOON))
    assert (decision["uid"], decision["user_name"], decision["pid"]) == (1000, "alice", 77)


# Rows that contradict each other, which only another tool can have written.


def test_a_running_job_without_its_attempt_is_held(lane: Lane) -> None:
    job_id = lane.submit()
    lane.claimed()
    with lane.database.write() as tx:
        tx.execute("delete from job_attempts")
        store.settle_contradiction(tx, job_id, 1)
    job = lane.job(job_id)
    assert (job["status"], job["reason"]) == (Status.HELD, Reason.EVIDENCE_CONTRADICTS)


def test_a_running_attempt_of_a_job_that_is_elsewhere_ends_unknown(lane: Lane) -> None:
    job_id = lane.submit()
    lane.claimed()
    with lane.database.write() as tx:
        tx.execute("update jobs set status = 'failed', finished_at = moved_at")
        detail = store.settle_contradiction(tx, job_id, 1)
    assert "the job is failed" in detail
    assert lane.job(job_id)["status"] == Status.FAILED
    assert (lane.attempt(job_id)["status"], lane.attempt(job_id)["reason"]) == ("unknown", "evidence-contradicts")


# Runs, routes and counts.


def test_a_start_writes_down_which_routes_there_are(lane: Lane) -> None:
    with lane.database.write() as tx:
        store.begin_run(tx, "second", 2, "brainctl --lane gpu", ["far", "new"])
    configured = lane.rows("select route from gates where configured = 1 order by route")
    assert [row["route"] for row in configured] == ["far", "new"]
    assert lane.rows("select client from lane") == [{"client": "brainctl --lane gpu"}]


def test_the_end_of_a_run_is_recorded_once(lane: Lane, clock: Clock) -> None:
    for ending in ("stopped by SIGTERM", "again"):
        with lane.database.write() as tx:
            store.end_run(tx, "run", ending)
        clock.tick(1)
    (run,) = lane.rows("select * from runs")
    assert (run["ending"], run["ended_at"]) == ("stopped by SIGTERM", wire.format_time(NOON))


def test_the_counts_follow_every_move_and_every_deletion(lane: Lane) -> None:
    for verdict in (DONE, FAILED, HELD, AGAIN, CANCELLED):
        lane.submit(route="far")
        lane.submit(route="near")
        lane.finish(lane.claimed(), verdict)
        assert_counts_are_right(lane)
    lane.cancel(lane.submit())
    assert_counts_are_right(lane)
    with lane.database.write() as tx:
        tx.execute("delete from jobs where id % 2 = 0")
    assert_counts_are_right(lane)
    assert lane.rows("select * from job_counts where jobs < 0") == []
