"""Copies of the database: whole, marked, one at a time, and never at the cost of the reserve."""

import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from brainlaned import errors
from brainlaned.backup import Backups
from brainlaned.db import Database
from brainlaned.filesystem import Reserve
from brainlaned.wire import ErrorKind

LIMIT_S = 60.0


@pytest.fixture
def state(tmp_path: Path) -> Path:
    place = tmp_path / "state"
    place.mkdir()
    return place


@pytest.fixture
def database(state: Path) -> Iterator[Database]:
    opened = Database(state / "brainlane.db")
    opened.open()
    yield opened
    opened.close()


def backups(database: Database, reserve_mib: int = 1) -> Backups:
    return Backups(database, Reserve(database.path.parent, reserve_mib))


def names(state: Path) -> set[str]:
    return {path.name for path in state.iterdir()}


def opened(copy: BinaryIO, tmp_path: Path) -> sqlite3.Connection:
    place = tmp_path / "restored.db"
    with copy, place.open("wb") as file:
        shutil.copyfileobj(copy, file)
    connection = sqlite3.connect(place)
    connection.row_factory = sqlite3.Row
    return connection


def test_a_copy_has_no_name_and_says_of_itself_that_the_lane_is_paused_and_why(
    database: Database, state: Path, tmp_path: Path
) -> None:
    before = names(state)
    copy = backups(database).make()
    assert names(state) == before
    connection = opened(copy, tmp_path)
    assert connection.execute("pragma integrity_check").fetchone()[0] == "ok"
    lane = connection.execute("select * from lane").fetchone()
    connection.close()
    assert lane["paused_by"] == "brainlaned"
    assert lane["paused_at"] in lane["paused_reason"]
    assert "may have been asked since" in lane["paused_reason"]
    with database.read() as reader:
        assert reader.execute("select paused_at from lane").fetchone()[0] is None


def test_the_pause_of_a_paused_lane_gives_way_to_the_reason_of_the_copy(database: Database, tmp_path: Path) -> None:
    with database.write() as tx:
        tx.execute("update lane set paused_at = :now, paused_by = 'alice', paused_reason = 'night'", {"now": tx.now})
    connection = opened(backups(database).make(), tmp_path)
    assert connection.execute("select paused_reason from lane").fetchone()[0].startswith("restored from the backup")
    connection.close()


def test_what_a_vanished_run_left_is_deleted_and_nothing_else(database: Database, state: Path) -> None:
    (state / "spool").mkdir()
    (state / "backup-monday.db").write_bytes(b"the operator's own")
    before = names(state)
    for name in (
        ".brainlane-copy-2026-03-01T12:00:00.000000Z.db",
        ".brainlane-copy-2026-03-01T12:00:00.000000Z.db-journal",
    ):
        (state / name).write_bytes(b"half")
    backups(database).clear()
    assert names(state) == before


def test_a_copy_that_would_eat_into_the_reserve_is_refused_and_nothing_is_written(
    database: Database, state: Path
) -> None:
    before = names(state)
    free_mib = shutil.disk_usage(state).free // 2**20
    for reserve_mib in (2**40, free_mib + 1024):
        with pytest.raises(errors.Refused) as refused:
            backups(database, reserve_mib).make()
        assert (refused.value.kind, refused.value.retry_safe) == (ErrorKind.DISK_RESERVE, True)
    assert names(state) == before


def test_two_copies_are_not_made_at_once(database: Database, tmp_path: Path) -> None:
    with database.write() as tx:
        tx.execute("create table ballast as select randomblob(4 * 1024 * 1024) as data")
    one = backups(database)
    made: list[BinaryIO] = []
    with database.write():
        # The lock is ours, so the first cannot come to its end.
        first = threading.Thread(target=lambda: made.append(one.make()))
        first.start()
        while True:
            try:
                one.make().close()
            except errors.Refused as refusal:
                assert (refusal.kind, refusal.retry_safe) == (ErrorKind.BUSY, True)
                break
    first.join(LIMIT_S)
    assert len(made) == 1
    opened(made[0], tmp_path).close()
    one.make().close()


def test_a_copy_that_cannot_be_made_leaves_nothing_and_lets_the_next_one_be_tried(
    database: Database, state: Path, tmp_path: Path
) -> None:
    before = names(state)
    one = backups(database)
    with database.write() as tx:
        tx.execute("alter table lane rename column paused_reason to gone")  # so that no copy can be marked
    with pytest.raises(errors.Refused) as refused:
        one.make()
    assert refused.value.kind is ErrorKind.INTERNAL
    assert "no such column" in str(refused.value)
    assert names(state) == before
    with database.write() as tx:
        tx.execute("alter table lane rename column gone to paused_reason")
    opened(one.make(), tmp_path).close()
