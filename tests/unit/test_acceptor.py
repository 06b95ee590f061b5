import sqlite3
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from brainlaned import db, errors
from brainlaned.acceptor import BATCH, Acceptor
from brainlaned.db import Database, Transaction
from brainlaned.wire import ErrorKind

LIMIT_S = 30.0


class Lane:
    """A database with one table, and an acceptor before it. `said` is every statement, `batches` every after_commit."""

    def __init__(self, path: Path) -> None:
        self.said: list[str] = []
        self.batches: list[list[bool]] = []
        self.futures: list[Future[Any]] = []
        self.database = Database(path, observe=self.said.append)
        self.database.open()
        with self.database.write() as tx:
            tx.execute("create table notes (text text not null unique) strict")
            tx.execute("create table replies (text text references notes (text) deferrable initially deferred) strict")
        self.acceptor = Acceptor(self.database, after_commit=self.committed)
        self.thread = self.acceptor._thread

    def committed(self) -> None:
        self.batches.append([future.done() for future in self.futures])

    def ask(self, request: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def answer(result: Any, error: Exception | None) -> None:
            future.set_result(result) if error is None else future.set_exception(error)

        self.acceptor.ask(request, answer)
        self.futures.append(future)
        return future

    def note(self, text: str) -> Future[str]:
        return self.ask(lambda tx: note(tx, text))

    def notes(self) -> list[str]:
        with self.database.read() as connection:
            return [row[0] for row in connection.execute("select text from notes order by rowid")]

    @property
    def commits(self) -> int:
        return self.said.count("commit")

    @contextmanager
    def one_batch(self) -> Iterator[None]:
        """Let all that is asked for in the body end up in the same batch, behind one that holds nothing else."""
        with self.database.write(first=True):
            first = self.ask(lambda tx: None)
            self.wait_until_blocked()
            self.said.clear()
            self.batches.clear()
            yield
        first.result(LIMIT_S)

    def wait_until_blocked(self) -> None:
        """Wait until the acceptor waits for its turn at the database, as the interpreter itself tells."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            frame = sys._current_frames().get(self.thread.ident or 0)
            if frame is not None and traceback.extract_stack(frame)[-1].name == "wait":
                return
            assert time.monotonic() < deadline
            time.sleep(0.002)  # for the thread to come to its wait


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    made = Lane(tmp_path / "brainlane.db")
    made.acceptor.start()
    yield made
    made.acceptor.stop()
    assert not made.thread.is_alive()
    made.database.close()


def note(tx: Transaction, text: str) -> str:
    tx.execute("insert into notes (text) values (:text)", {"text": text})
    return f"noted {text}"


def refuse(tx: Transaction) -> str:
    note(tx, "never")
    raise errors.Refused(ErrorKind.QUEUE_FULL, "cannot submit: full")


def test_a_request_is_answered_with_its_own_result(lane: Lane) -> None:
    assert [lane.note(text).result(LIMIT_S) for text in "abc"] == ["noted a", "noted b", "noted c"]
    assert lane.notes() == ["a", "b", "c"]


def test_what_has_queued_up_is_stored_in_one_transaction(lane: Lane) -> None:
    with lane.one_batch():
        futures = [lane.note(str(number)) for number in range(BATCH)]
    assert [future.result(LIMIT_S) for future in futures] == [f"noted {number}" for number in range(BATCH)]
    # One commit each of the body above, of the batch before, and of this one.
    assert lane.commits == 3
    assert lane.notes() == [str(number) for number in range(BATCH)]


def test_a_batch_has_a_bound(lane: Lane) -> None:
    with lane.one_batch():
        futures = [lane.note(str(number)) for number in range(BATCH + 1)]
    assert all(future.result(LIMIT_S) for future in futures)
    assert lane.commits == 4


def test_nobody_is_answered_before_the_commit(lane: Lane) -> None:
    with lane.one_batch():
        futures = [lane.note(text) for text in "ab"]
        assert not any(future.done() for future in futures)
    for future in futures:
        future.result(LIMIT_S)
    # after_commit came first: what it was told then is that nobody of the batch was answered yet.
    assert lane.batches[-1][-2:] == [False, False]


def test_the_worker_is_told_of_a_batch_once_it_is_there_to_be_claimed(lane: Lane) -> None:
    seen: list[list[str]] = []
    lane.acceptor._after_commit = lambda: seen.append(lane.notes())
    lane.note("a").result(LIMIT_S)
    assert seen == [["a"]]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (refuse, errors.Refused),
        (lambda tx: note(tx, "first"), sqlite3.IntegrityError),
        (lambda tx: [note(tx, "never"), 1 / 0], ZeroDivisionError),
        (lambda tx: tx.execute("insert into notes (text) values (:text)", {"text": None}), sqlite3.IntegrityError),
    ],
    ids=["refused", "conflict", "fault", "constraint"],
)
def test_one_refused_request_does_not_undo_its_neighbours(lane: Lane, bad: Any, error: type[Exception]) -> None:
    with lane.one_batch():
        first, refused, last = lane.note("first"), lane.ask(bad), lane.note("last")
    with pytest.raises(error):
        refused.result(LIMIT_S)
    assert (first.result(LIMIT_S), last.result(LIMIT_S)) == ("noted first", "noted last")
    assert lane.notes() == ["first", "last"]


def test_a_batch_of_refusals_alone_is_answered_as_well(lane: Lane) -> None:
    with lane.one_batch():
        futures = [lane.ask(refuse) for _ in range(3)]
    for future in futures:
        with pytest.raises(errors.Refused):
            future.result(LIMIT_S)
    assert lane.notes() == []


def test_a_failed_commit_is_unknown_to_all_of_the_batch_and_to_no_other(lane: Lane) -> None:
    def break_the_commit(tx: Transaction) -> None:
        tx.execute("insert into replies (text) values ('of nothing')")

    with lane.one_batch():
        futures = [lane.note("a"), lane.ask(break_the_commit), lane.ask(refuse), lane.note("b")]
    for future in futures:
        with pytest.raises(errors.CommitUnknown):
            future.result(LIMIT_S)
    assert lane.notes() == []
    assert len(lane.batches) == 1, "the worker was told of a batch that is not there"
    assert lane.note("later").result(LIMIT_S) == "noted later"
    assert lane.notes() == ["later"]


def test_when_the_disk_is_full_no_part_of_the_batch_is_trusted(lane: Lane) -> None:
    def fill_the_disk(tx: Transaction) -> None:
        pages = tx.execute("pragma page_count").fetchone()[0]
        tx.execute(f"pragma max_page_count = {pages}")
        note(tx, "x" * 1_000_000)

    with lane.one_batch():
        futures = [lane.note("a"), lane.ask(fill_the_disk), lane.note("b")]
    for future in futures:
        with pytest.raises(sqlite3.OperationalError, match="full"):
            future.result(LIMIT_S)
    assert lane.notes() == []
    lane.ask(lambda tx: tx.execute("pragma max_page_count = 1000000")).result(LIMIT_S)
    assert lane.note("later").result(LIMIT_S) == "noted later"


def test_while_a_foreign_process_holds_the_database_nothing_is_stored_and_everybody_is_told(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "BUSY_S", 0.1)
    foreign = sqlite3.connect(lane.database.path, isolation_level=None)
    foreign.execute("begin immediate")
    future = lane.note("a")
    with pytest.raises(errors.Busy):
        future.result(LIMIT_S)
    foreign.execute("rollback")
    foreign.close()
    assert lane.notes() == []
    assert lane.note("b").result(LIMIT_S) == "noted b"


def test_the_worker_goes_before_a_batch_that_waits(lane: Lane) -> None:
    order: list[str] = []
    with lane.one_batch():
        worker = threading.Thread(target=lambda: work(lane, order))
        worker.start()
        deadline = time.monotonic() + LIMIT_S
        while traceback.extract_stack(sys._current_frames()[worker.ident or 0])[-1].name != "wait":
            assert time.monotonic() < deadline
            time.sleep(0.002)  # for the thread to come to its wait
        submitted = lane.ask(lambda tx: order.append("submit"))
    worker.join(LIMIT_S)
    submitted.result(LIMIT_S)
    assert order == ["answer", "submit"]


def work(lane: Lane, order: list[str]) -> None:
    with lane.database.write(first=True):
        order.append("answer")


def test_many_threads_at_once_each_get_their_own_answer(lane: Lane) -> None:
    answers: dict[int, str] = {}

    def submit(number: int) -> None:
        answers[number] = lane.note(str(number)).result(LIMIT_S)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert answers == {number: f"noted {number}" for number in range(100)}
    assert len(lane.notes()) == 100


def test_a_batch_is_delivered_as_a_whole_to_where_those_who_asked_live(tmp_path: Path) -> None:
    database = Database(tmp_path / "brainlane.db")
    database.open()
    delivered: list[Any] = []
    answers: list[Any] = []
    acceptor = Acceptor(database, lambda: None, deliver=delivered.append)
    for number in range(3):
        acceptor.ask(lambda tx, number=number: number, lambda result, error: answers.append(result))
    acceptor.start()
    acceptor.stop()
    assert (len(delivered), answers) == (1, [])
    delivered[0]()
    assert answers == [0, 1, 2]
    database.close()


def test_stopping_answers_what_was_asked_before(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "brainlane.db")
    lane.acceptor.start()
    with lane.database.write(first=True):
        futures = [lane.note(str(number)) for number in range(BATCH + 10)]
        stopping = threading.Thread(target=lane.acceptor.stop)
        stopping.start()
    stopping.join(LIMIT_S)
    assert all(future.done() for future in futures)
    assert len(lane.notes()) == BATCH + 10
    lane.database.close()
