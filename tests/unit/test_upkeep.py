"""The upkeep of a lane as a thread beside others: it lets go with age and cuts the log, and says what it cannot do."""

import contextlib
import io
import logging
import sqlite3
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from brainlaned import config, db, events, retention, upkeep, wire
from brainlaned.db import Database
from brainlaned.upkeep import Upkeep
from tests.lane import wait_until

MIB = 1024 * 1024
ROUTES = {"near": config.Route("near", "http://127.0.0.1:1", "small")}


class Journal:
    """What is written from now on."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        events.start(self._stream)

    def count(self, words: str) -> int:
        return self._stream.getvalue().count(words)

    @property
    def text(self) -> str:
        return self._stream.getvalue()


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    logger = logging.getLogger("brainlaned")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))  # so that it is put back
    monkeypatch.setattr(events, "_seldom", type(events._seldom)())  # what other tests said does not count here
    yield Journal()
    events.stop()


@pytest.fixture
def said() -> list[str]:
    """Every statement that the database was given."""
    return []


@pytest.fixture
def database(tmp_path: Path, said: list[str]) -> Iterator[Database]:
    opened = Database(tmp_path / "brainlane.db", observe=said.append)
    opened.open()
    yield opened
    opened.close()


@contextlib.contextmanager
def kept_up(database: Database, keep_days: float = 30, keep_payload_days: float = 30) -> Iterator[Upkeep]:
    configuration = config.Config(ROUTES, "near", keep_days=keep_days, keep_payload_days=keep_payload_days)
    one = Upkeep(database, configuration)
    database.log_is_long = one.cut_log
    one.start()
    try:
        yield one
    finally:
        one.stop()


def put(database: Database, count: int, status: str, finished_days_ago: float | None) -> None:
    finished = None
    if finished_days_ago is not None:
        finished = wire.format_time(datetime.now(UTC) - timedelta(days=finished_days_ago))
    with database.write() as tx:
        for _ in range(count):
            tx.execute(
                """
                insert into jobs (digest, submitter_uid, route, names_model, status, reason, moved_at, priority,
                    max_attempts, may_run_twice, require_complete, request_bytes, created_at, place_at, finished_at)
                values ('d', 1000, 'near', 0, :status, 'submitted', :now, 'normal', 3, 0, 0, 2,
                    '2020-01-01T00:00:00.000000Z', :now, :finished)
                """,
                {"status": status, "now": tx.now, "finished": finished},
            )
            tx.execute("insert into job_requests values (last_insert_rowid(), 'asked')")


def rows(database: Database, sql: str) -> list[Any]:
    with database.read() as connection:
        return [tuple(row) for row in connection.execute(sql)]


def write_past_the_limit(database: Database) -> None:
    """Write more than may stand in the log, a few transactions of a mebibyte each."""
    with database.write() as tx:
        tx.execute("create table if not exists ballast (data blob)")
    for _ in range(2 + db.LONG_LOG_BYTES // MIB):
        with database.write() as tx:
            tx.execute("delete from ballast")
            tx.execute("insert into ballast values (randomblob(:size))", {"size": MIB})


# What is old


def test_a_start_lets_go_of_what_is_old_and_of_nothing_else(database: Database, journal: Journal) -> None:
    put(database, 3, "done", 40)
    put(database, 2, "failed", 10)
    put(database, 1, "cancelled", 0.001)
    for status in ("queued", "held"):
        put(database, 1, status, None)
    with kept_up(database, keep_days=30, keep_payload_days=7):
        wait_until(lambda: journal.count("let go with age") == 1)
    assert "prompt and answer of 2 jobs, the record of 3" in journal.text
    left = rows(database, "select status, erased_at is not null from jobs order by id")
    assert left == [("failed", 1), ("failed", 1), ("cancelled", 0), ("queued", 0), ("held", 0)]
    assert rows(database, "select count(*) from job_requests") == [(3,)]


def test_where_nothing_is_old_nothing_is_said(database: Database, journal: Journal, said: list[str]) -> None:
    put(database, 1, "done", 1)
    said.clear()
    with kept_up(database) as one:
        wait_until(lambda: any("wal_checkpoint" in each for each in said))
        one.cut_log()
    assert journal.text == ""


def test_much_that_is_old_goes_in_many_transactions_and_others_come_in_between(
    database: Database, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BUDGET_S", 0.0)
    put(database, 60, "done", 40)
    came_in_at: list[int] = []
    with kept_up(database):
        while not journal.count("let go with age"):
            with database.write() as tx:
                came_in_at.append(tx.execute("select count(*) from jobs").fetchone()[0])
    assert "prompt and answer of 0 jobs, the record of 60" in journal.text
    assert len({count for count in came_in_at if 0 < count < 60}) > 3


def test_a_stop_does_not_wait_for_all_that_is_old(
    database: Database, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BUDGET_S", 0.0)
    monkeypatch.setattr(upkeep, "BETWEEN_S", 3600.0)
    put(database, 60, "done", 40)
    with kept_up(database):
        wait_until(lambda: rows(database, "select count(*) from job_requests") != [(60,)])
    assert rows(database, "select count(*) from job_requests") == [(59,)]


def test_what_becomes_old_later_is_let_go_then(
    database: Database, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SOONEST_S", 0.05)
    put(database, 1, "done", 1 - 2 / 86400)
    with kept_up(database, keep_days=1, keep_payload_days=1):
        wait_until(lambda: rows(database, "select count(*) from jobs") == [(0,)])


def test_what_cannot_be_let_go_for_now_is_said_and_tried_again(
    database: Database, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SOONEST_S", 0.05)
    monkeypatch.setattr(db, "BUSY_S", 0.05)
    put(database, 1, "done", 40)
    with contextlib.closing(sqlite3.connect(database.path, isolation_level=None)) as foreign:
        foreign.execute("begin immediate")
        with kept_up(database):
            wait_until(lambda: journal.count("cannot let go of what is old") == 1)
            foreign.execute("rollback")
            wait_until(lambda: journal.count("let go with age") == 1)
    assert journal.count("cannot let go") == 1


# The log


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "LONG_LOG_BYTES", 4 * MIB)
    monkeypatch.setattr(upkeep, "PIN_AGAIN_S", 0.1)


def test_what_an_earlier_run_left_in_the_log_is_cut_at_once(database: Database, journal: Journal) -> None:
    put(database, 1, "done", 1)
    assert database.log_size() > 0
    with kept_up(database):
        wait_until(lambda: database.log_size() == 0)
    assert journal.text == ""


def test_a_log_that_grows_is_cut_again_and_again_without_a_word(
    database: Database, journal: Journal, short_limits: None
) -> None:
    with kept_up(database):
        for _ in range(5):
            write_past_the_limit(database)
            wait_until(lambda: database.log_size() <= db.LONG_LOG_BYTES)
    assert journal.text == ""


def test_a_foreign_reader_who_holds_the_log_is_one_warning_and_the_log_is_cut_when_he_leaves(
    database: Database, journal: Journal, short_limits: None, said: list[str]
) -> None:
    with kept_up(database):
        with contextlib.closing(sqlite3.connect(database.path, isolation_level=None)) as reader:
            reader.execute("begin")
            reader.execute("select count(*) from jobs").fetchone()
            write_past_the_limit(database)
            wait_until(lambda: journal.count("cannot be cut") == 1)
            write_past_the_limit(database)
            said.clear()
            wait_until(lambda: sum("wal_checkpoint" in each for each in said) >= 3)
            assert database.log_size() > 2 * db.LONG_LOG_BYTES
            reader.execute("rollback")
        wait_until(lambda: database.log_size() <= db.LONG_LOG_BYTES)
        wait_until(lambda: journal.count("is cut") == 1)
    (warning, relief) = journal.text.splitlines()
    assert warning.startswith(f"<4>{database.log_path} has ") and " MiB and cannot be cut" in warning
    mebibytes = int(warning.split(" has ")[1].split()[0])
    assert mebibytes >= db.LONG_LOG_BYTES // MIB
    assert warning.endswith(f"fuser -v {database.path}-shm")
    assert relief == f"<6>{database.log_path} is cut: its reader has let go"


def test_a_log_that_somebody_holds_is_not_looked_at_after_every_commit(
    database: Database, journal: Journal, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(db, "LONG_LOG_BYTES", 2 * MIB)
    monkeypatch.setattr(upkeep, "PIN_AGAIN_S", 3600.0)
    with kept_up(database), contextlib.closing(sqlite3.connect(database.path, isolation_level=None)) as reader:
        wait_until(lambda: any("wal_checkpoint" in each for each in said))
        reader.execute("begin")
        reader.execute("select count(*) from jobs").fetchone()
        for _ in range(10):
            write_past_the_limit(database)
        reader.execute("rollback")
    # The one of the start, that of the first commit over the limit, and one that was asked for meanwhile.
    assert sum("wal_checkpoint" in each for each in said) <= 3


def test_what_is_to_be_erased_from_the_log_is_cut_however_short_it_is(database: Database, journal: Journal) -> None:
    with kept_up(database) as one:
        wait_until(lambda: database.log_size() == 0)
        put(database, 1, "done", 1)
        assert 0 < database.log_size() < db.LONG_LOG_BYTES
        one.cut_log()
        wait_until(lambda: database.log_size() == 0)


def test_what_is_to_be_erased_from_the_log_is_tried_again_where_a_reader_was_in_the_way(
    database: Database, journal: Journal, short_limits: None
) -> None:
    with kept_up(database) as one:
        with contextlib.closing(sqlite3.connect(database.path, isolation_level=None)) as foreign:
            foreign.execute("begin")
            foreign.execute("select count(*) from jobs").fetchone()
            put(database, 1, "queued", None)
            one.cut_log()
            wait_until(lambda: one._pins > 0)
            assert database.log_size() > 0
        wait_until(lambda: database.log_size() == 0)
    # So short a log is nothing to warn of.
    assert "cut" not in journal.text


def test_no_reader_of_ours_keeps_a_snapshot_while_it_waits(database: Database) -> None:
    """Whoever reads in a loop, as a list or a stream does, lets go each time, so the log can be cut in between."""
    stop = threading.Event()
    looks: list[int] = []

    def keep_reading() -> None:
        while not stop.is_set():
            looks.append(rows(database, "select count(*) from jobs")[0][0])

    readers = [threading.Thread(target=keep_reading) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            put(database, 1, "done", 1)
        wait_until(database.cut_log)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert looks[-1] == 20
