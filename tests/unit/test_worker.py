"""The marks of an attempt: which are written when, and what is on the disk before they are."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from brainlaned import config, store, worker
from brainlaned.db import Database
from brainlaned.later import Later
from brainlaned.spool import Spool

LIMIT_S = 30.0


class Attempt:
    """An attempt that has been claimed, and all that is done for it, in order: statements, and syncs of files."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.database = Database(directory / "brainlane.db", observe=self.done.append)
        self.database.open()
        self.spool = Spool(directory / "spool")
        self.spool.open()
        route = config.Route("near", "http://127.0.0.1:1/v1", "small")
        with self.database.write() as tx:
            store.begin_run(tx, "run", 1, "brainctl", ["near"])
            store.accept(tx, store.Submission("{}", "d", "near", "small", False, 3), store.Caller(uid=1000), 0, 100)
        with self.database.write() as tx:
            claim = store.claim_next(tx, [config.OpenRoute(route, is_probe=False)], "run")
        assert claim is not None
        self.marks = worker._Marks(self.database, claim, (), lambda ids: None, lambda cut: None, Later("test"))
        sync = os.fdatasync

        def note(descriptor: int) -> None:
            sync(descriptor)
            self.done.append(f"synced {Path(f'/proc/self/fd/{descriptor}').readlink().name}")

        monkeypatch.setattr(os, "fdatasync", note)

    def marks_written(self) -> list[str]:
        """The marks that the database has."""
        with self.database.read() as connection:
            (row,) = connection.execute("select armed_at, sent_at, headers_at from job_attempts")
        return [name for name in ("armed_at", "sent_at", "headers_at") if row[name] is not None]


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    made = Attempt(tmp_path, monkeypatch)
    with made.spool.create(1, 1) as writer:
        made.marks.writer = writer
        yield made
    made.database.close()


def wait_for(attempt: Attempt, *marks: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while attempt.marks_written() != list(marks):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # for the marks that may come later


def test_the_leave_to_send_is_written_at_once_and_what_decides_nothing_a_moment_later(attempt: Attempt) -> None:
    attempt.marks.armed()
    assert attempt.marks_written() == ["armed_at"]
    attempt.marks.sent()
    wait_for(attempt, "armed_at", "sent_at")


def test_the_first_line_of_the_answer_is_on_the_disk_before_the_database_tells_of_it(attempt: Attempt) -> None:
    attempt.marks.armed()
    attempt.done.clear()
    attempt.marks.headers(200, {})
    wait_for(attempt, "armed_at", "headers_at")
    told = next(number for number, did in enumerate(attempt.done) if "update job_attempts" in did)
    assert "synced 1-1.part" in attempt.done[:told]


def test_a_mark_of_what_is_over_is_left_to_the_result(attempt: Attempt) -> None:
    attempt.marks.armed()
    attempt.marks.sent()
    attempt.marks.evidence_of(worker.Ended())
    time.sleep(3 * worker.MARK_S)  # for the mark that must not be written any more
    assert attempt.marks_written() == ["armed_at"]
