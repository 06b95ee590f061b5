"""What is let go with age: exactly that, in the right order, and in short transactions."""

import random
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from brainlaned import config, db, decisions, gate, retention, store, wire
from brainlaned.db import Database
from brainlaned.states import Evidence, Verdict
from brainlaned.wire import AttemptStatus, Decision, Reason, Status

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
FINAL = ("done", "failed", "cancelled")
PAYLOAD = ("job_requests", "job_outputs", "attempt_parts")


def days_ago(days: float) -> str:
    return wire.format_time(NOW - timedelta(days=days))


class Rows:
    """A database whose jobs are written as rows, since no age can be waited for."""

    def __init__(self, path: Path) -> None:
        self.database = Database(path)
        self.database.open()

    def put(self, status: str, finished: float | None = None, created: float = 400) -> int:
        """Put a job that was created, and finished, so many days ago, with all that can belong to one."""
        with self.database.write() as tx:
            job_id: int = tx.execute(
                """
                insert into jobs (digest, submitter_uid, route, names_model, status, reason, detail, moved_at, priority,
                    max_attempts, may_run_twice, require_complete, request_bytes, created_at, place_at, started_at,
                    attempt_count, finished_at)
                values ('d', 1000, 'near', 0, :status, 'submitted', 'quotes it', :created, 'normal', 3, 0, 0, 2,
                    :created, :created, :created, 1, :finished)
                returning id
                """,
                {
                    "status": status,
                    "created": days_ago(created),
                    "finished": None if finished is None else days_ago(finished),
                },
            ).fetchone()[0]
            for statement in (
                "insert into job_requests values (:id, 'asked')",
                "insert into job_outputs values (:id, 'got', '{}')",
                """
                insert into job_attempts (job_id, attempt, run, status, detail, route, may_run_twice, started_at,
                    ended_at)
                values (:id, 1, 'run', iif(:status = 'running', 'running', 'failed'), 'quotes it', 'near', 0, :at,
                    iif(:status = 'running', null, :at))
                """,
                "insert into attempt_parts values (:id, 1, 'a part', null, x'00')",
                "insert into job_labels values (:id, 'team', 'blue')",
                "insert into decisions (job_id, attempt, action, at, uid) values (:id, 1, 'retry', :at, 1000)",
            ):
                tx.execute(statement, {"id": job_id, "status": status, "at": days_ago(created)})
        return job_id

    def step(self, act: Callable[[db.Transaction, str], int], days: float) -> int:
        with self.database.write() as tx:
            return act(tx, days_ago(days))

    def all(self, sql: str) -> list[Any]:
        with self.database.read() as connection:
            return [row[0] if len(row) == 1 else tuple(row) for row in connection.execute(sql)]

    def ids(self, table: str) -> list[int]:
        column = "id" if table == "jobs" else "job_id"
        return self.all(f"select {column} from {table} order by 1")  # noqa: S608 - names of our own tables


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Rows]:
    made = Rows(tmp_path / "brainlane.db")
    yield made
    made.database.close()


@pytest.mark.parametrize("act", [retention.erase_old, retention.delete_old])
def test_what_is_not_over_is_never_touched_however_old_it_is(
    rows: Rows, act: Callable[[db.Transaction, str], int]
) -> None:
    alive = [rows.put(status) for status in ("queued", "running", "held", "held")]
    over = [rows.put(status, finished=31) for status in FINAL]
    before = rows.all("select * from jobs where finished_at is null order by id")
    assert rows.step(act, 30) == len(over)
    assert rows.step(act, 30) == 0
    assert rows.all("select * from jobs where finished_at is null order by id") == before
    for table in PAYLOAD:
        assert rows.ids(table) == alive


def test_the_age_of_a_job_counts_from_its_end(rows: Rows) -> None:
    rows.put("done", finished=31)
    exactly = rows.put("done", finished=30)
    young = rows.put("done", finished=0.001)
    assert rows.step(retention.delete_old, 30) == 2
    assert rows.ids("jobs") == [young]
    assert exactly not in rows.ids("job_requests")


def test_a_record_outlives_its_prompt_and_answer_and_then_goes_with_all_that_belongs_to_it(rows: Rows) -> None:
    ids = [rows.put(status, finished=days) for days in (40, 10, 1) for status in FINAL]
    old, middle, young = ids[:3], ids[3:6], ids[6:]
    assert rows.step(retention.erase_old, 7) == 6
    assert rows.ids("jobs") == ids
    for table in PAYLOAD:
        assert rows.ids(table) == young
    assert rows.all("select id from jobs where erased_at is not null") == old + middle
    for table in ("jobs", "job_attempts"):
        column = "id" if table == "jobs" else "job_id"
        details = rows.all(f"select {column}, detail from {table} order by 1")  # noqa: S608 - as above
        assert details == [(one, "quotes it" if one in young else "") for one in ids]
    for table in ("job_attempts", "job_labels", "decisions"):
        assert rows.ids(table) == ids
    assert rows.step(retention.erase_old, 7) == 0

    assert rows.step(retention.delete_old, 30) == 3
    for table in ("jobs", "job_attempts", "job_labels", "decisions"):
        assert rows.ids(table) == middle + young
    assert rows.all("pragma foreign_key_check") == []


def test_what_is_erased_was_erased_at_one_time_and_stays_so(rows: Rows) -> None:
    rows.put("done", finished=40)
    rows.step(retention.erase_old, 30)
    (erased_at,) = rows.all("select erased_at from jobs")
    assert wire.parse_time(erased_at) <= datetime.now(UTC)
    with rows.database.write() as tx:
        retention.erase(tx, 1)
    assert rows.all("select erased_at from jobs") == [erased_at]


def test_the_counts_follow(rows: Rows) -> None:
    for status in FINAL:
        for days in (40, 40, 1):
            rows.put(status, finished=days)
    rows.put("held")
    rows.step(retention.erase_old, 30)
    rows.step(retention.delete_old, 30)
    counted = dict(rows.all("select status, jobs from job_counts where jobs <> 0"))
    assert counted == {"done": 1, "failed": 1, "cancelled": 1, "held": 1}
    assert counted == dict(rows.all("select status, count(*) from jobs group by status"))


@pytest.mark.parametrize("act", [retention.erase_old, retention.delete_old])
def test_a_transaction_whose_time_is_up_takes_no_more_and_the_next_goes_on(
    rows: Rows, act: Callable[[db.Transaction, str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        rows.put("done", finished=40)
    monkeypatch.setattr(retention, "BUDGET_S", 0.0)
    # One at least, or it would never come to an end.
    assert [rows.step(act, 30) for _ in range(6)] == [1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("act", [retention.erase_old, retention.delete_old])
def test_a_transaction_with_all_the_time_in_the_world_is_bounded_too(
    rows: Rows, act: Callable[[db.Transaction, str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows.put("done", finished=40)
    copies = 450
    with rows.database.write() as tx:
        for row in range(copies):
            tx.execute(
                """
                insert into jobs (digest, submitter_uid, route, names_model, status, reason, moved_at, priority,
                    max_attempts, may_run_twice, require_complete, request_bytes, created_at, place_at, finished_at)
                select digest, :uid, route, names_model, status, reason, moved_at, priority, max_attempts,
                    may_run_twice, require_complete, request_bytes, created_at, place_at, finished_at
                from jobs where id = 1
                """,
                {"uid": row},
            )
    monkeypatch.setattr(retention, "BUDGET_S", 3600.0)
    taken = []
    while count := rows.step(act, 30):
        taken.append(count)
    assert sum(taken) == copies + 1
    assert len(taken) > 1 and max(taken) < copies / 2


def test_the_oldest_are_let_go_first(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    by_age = {days: rows.put("done", finished=days) for days in (33, 60, 31, 45)}
    monkeypatch.setattr(retention, "BUDGET_S", 0.0)
    for days in sorted(by_age, reverse=True):
        assert rows.step(retention.delete_old, 30) == 1
        assert by_age[days] not in rows.ids("jobs")


def steps_of(rows: Rows, act: Callable[[db.Transaction, str], int]) -> int:
    """Count the steps of SQLite's machine, which no busy computer can change."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    connection = sqlite3.connect(rows.database.path, isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.execute("begin immediate")
    connection.set_progress_handler(count, 1)
    act(db.Transaction(connection), days_ago(30))
    connection.set_progress_handler(None, 1)
    connection.execute("rollback")
    connection.close()
    return steps


@pytest.mark.parametrize("act", [retention.erase_old, retention.delete_old])
def test_what_is_not_due_costs_a_look_nothing(rows: Rows, act: Callable[[db.Transaction, str], int]) -> None:
    for _ in range(5):
        rows.put("held")
        rows.put("done", finished=1)
    few = steps_of(rows, act)
    for _ in range(300):
        rows.put("held")
        rows.put("done", finished=1)
    assert steps_of(rows, act) <= few + 50


def test_what_is_erased_already_costs_the_next_look_for_prompts_nothing(rows: Rows) -> None:
    few = steps_of(rows, retention.erase_old)
    for _ in range(300):
        rows.put("done", finished=40)
    while rows.step(retention.erase_old, 30):
        pass
    assert set(rows.all("select status from jobs")) == {Status.DONE}
    assert steps_of(rows, retention.erase_old) <= few + 50


# What people want forgotten

HELD = Verdict(Status.HELD, AttemptStatus.UNKNOWN, Reason.ANSWER_UNREADABLE, "")
ALICE = store.Caller(uid=1000)


def end_in_any_order(database: Database, count: int, chance: random.Random) -> list[int]:
    """Run jobs of many lengths, so that their rows are moved about between pages; return them in the order they end."""
    routes = {"near": config.Route("near", "http://127.0.0.1:1", "small")}
    gates = gate.Gates(routes)
    with database.write() as tx:
        store.begin_run(tx, "run", 1, "brainctl", list(routes))
        for number in range(1, count + 1):
            prompt = f"PROMPT-{number:05d}-{'p' * chance.randint(1, 300)}"
            store.accept(tx, store.Submission(prompt, "d", "near", "small", False, 3), ALICE, 0, 1_000_000)
    ids = list(range(1, count + 1))
    for job_id in ids:
        with database.write() as tx:
            claim = store.claim_next(tx, gates.open_routes(tx), "run")
            assert claim is not None and claim.job_id == job_id
            said = f"ANSWER-{job_id:05d}-{'a' * chance.randint(1, 300)}"
            verdict = replace(HELD, detail=f"no answer: '{said}'", text=said)
            store.finish(tx, job_id, claim.attempt, Evidence(armed_at=days_ago(0)), verdict)
    chance.shuffle(ids)
    for job_id in ids:
        decision = chance.choice([Decision.ACCEPT, Decision.FAIL])
        with database.write() as tx:
            decisions.decide(tx, job_id, None, decision, None, None, ALICE)
    return ids


def test_of_what_is_forgotten_no_copy_is_left_between_the_rows_of_others(tmp_path: Path) -> None:
    database = Database(tmp_path / "brainlane.db")
    database.open()
    chance = random.Random(1)
    (first,) = end_in_any_order(database, 1, chance)
    with database.write() as tx:
        decisions.forget(tx, first, None, None, ALICE)  # by now a daemon is as it is for the rest of its life
        tx.execute("delete from jobs")
        tx.execute("update sqlite_sequence set seq = 0")
        tx.execute("delete from runs")
    ended = end_in_any_order(database, 120, chance)
    forgotten = chance.sample(ended, 20)
    for job_id in forgotten:
        with database.write() as tx:
            decisions.forget(tx, job_id, None, None, ALICE)
    assert database.cut_log()
    database.close()
    content = database.path.read_bytes()
    words = [f"{what}-{job_id:05d}".encode() for job_id in forgotten for what in ("PROMPT", "ANSWER")]
    assert [word for word in words if word in content] == []
    others = [f"PROMPT-{job_id:05d}".encode() for job_id in ended if job_id not in forgotten]
    assert all(word in content for word in others)
