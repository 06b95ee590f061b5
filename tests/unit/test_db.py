import contextlib
import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import freezegun
import pytest

from brainlaned import db, errors, wire
from brainlaned.db import Database

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 30.0
"""How long anything may take that is expected to happen at once."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "brainlane.db"


@pytest.fixture
def said() -> list[str]:
    """Every statement that the database was given."""
    return []


@pytest.fixture
def database(path: Path, said: list[str]) -> Iterator[Database]:
    opened = Database(path, observe=said.append)
    opened.open()
    with opened.write() as tx:
        tx.execute("create table notes (text text not null unique) strict")
    said.clear()
    yield opened
    opened.close()


def note(tx: db.Transaction, text: str) -> None:
    tx.execute("insert into notes (text) values (:text)", {"text": text})


def notes(database: Database) -> list[str]:
    with database.read() as connection:
        return [row[0] for row in connection.execute("select text from notes order by rowid")]


def hashes(directory: Path) -> dict[str, str]:
    files = [file for file in directory.iterdir() if file.is_file()]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def wait_until_blocked(thread: threading.Thread) -> None:
    """Wait until a thread waits for a condition, as the interpreter itself tells."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is not None and traceback.extract_stack(frame)[-1].name == "wait":
            return
        assert time.monotonic() < deadline
        time.sleep(0.002)  # for the thread to come to its wait


def in_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


class Foreign:
    """Another process's connection that holds the write lock."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("begin immediate")

    def let_go(self) -> None:
        self._connection.execute("rollback")
        self._connection.close()


# A write transaction.


def test_a_transaction_is_a_writer_from_its_first_statement_on(database: Database, said: list[str]) -> None:
    with database.write() as tx:
        tx.execute("select count(*) from notes")
        note(tx, "a")
    ours = [statement for statement in said if not statement.startswith("pragma busy_timeout")]
    assert ours[0] == "begin immediate"
    assert ours[-1] == "commit"
    assert len(ours) == 4


def test_no_connection_ever_begins_a_transaction_that_becomes_a_writer_later(
    database: Database, said: list[str]
) -> None:
    with database.write() as tx:
        note(tx, "a")
    with pytest.raises(KeyboardInterrupt), database.write() as tx:
        note(tx, "b")
        raise KeyboardInterrupt
    notes(database)
    began = [statement for statement in said if statement.startswith("begin")]
    assert began == ["begin immediate", "begin immediate", "begin"]  # the last one is the read's, which cannot write


def test_what_was_committed_is_there_for_everybody(database: Database, path: Path) -> None:
    with database.write() as tx:
        note(tx, "a")
    other = sqlite3.connect(path)
    assert other.execute("select text from notes").fetchall() == [("a",)]
    other.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_whatever_leaves_the_body_undoes_all_of_it(database: Database, error: type[BaseException]) -> None:
    with pytest.raises(error), database.write() as tx:
        note(tx, "a")
        raise error
    assert notes(database) == []
    with database.write() as tx:
        note(tx, "b")
    assert notes(database) == ["b"]


def test_the_time_of_a_transaction_stands_still(database: Database) -> None:
    with freezegun.freeze_time("2026-03-01T12:00:00.000001Z") as clock, database.write() as tx:
        clock.tick(5)
        assert tx.now == "2026-03-01T12:00:00.000001Z"
        assert tx.moment == datetime(2026, 3, 1, 12, 0, 0, 1, tzinfo=UTC)


def test_a_savepoint_undoes_its_own_part_and_no_other(database: Database) -> None:
    with database.write() as tx:
        with tx.savepoint():
            note(tx, "a")
        with pytest.raises(ValueError), tx.savepoint():
            note(tx, "b")
            raise ValueError
        with pytest.raises(sqlite3.IntegrityError), tx.savepoint():
            note(tx, "c")
            note(tx, "a")
        with tx.savepoint():
            note(tx, "d")
    assert notes(database) == ["a", "d"]


def test_a_savepoint_whose_transaction_is_gone_says_what_went_wrong_first(database: Database) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"), database.write() as tx:
        note(tx, "a")
        with tx.savepoint():
            tx.execute("insert or rollback into notes (text) values ('a')")
    assert notes(database) == []


# Durability.


def pragmas(tx: db.Transaction) -> tuple[object, ...]:
    names = ("journal_mode", "synchronous", "foreign_keys")
    return tuple(tx.execute(f"pragma {name}").fetchone()[0] for name in names)


def test_a_writing_connection_syncs_every_commit(database: Database) -> None:
    with database.write() as tx:
        assert pragmas(tx) == ("wal", 2, 1)


def test_a_place_without_a_durable_log_is_refused() -> None:
    memory = Database(Path(":memory:"))
    with pytest.raises(errors.StartRefused, match=r"journal_mode memory") as refused:
        memory.open()
    assert refused.value.status is wire.DaemonExit.CONFIGURATION
    memory.close()


def break_the_commit(database: Database) -> None:
    """Let COMMIT itself fail, by a foreign key that is not checked before it."""
    with database.write() as tx:
        tx.execute(
            """
            create table if not exists replies (
                text text references notes (text) deferrable initially deferred
            ) strict
            """
        )
    with pytest.raises(errors.CommitUnknown, match=r"cannot commit to .*FOREIGN KEY"), database.write() as tx:
        note(tx, "doubtful")
        tx.execute("insert into replies (text) values ('of nothing')")


def test_a_failed_commit_is_unknown_and_the_next_transaction_works(database: Database) -> None:
    break_the_commit(database)
    with database.write() as tx:
        note(tx, "later")
    assert notes(database) == ["later"]


def test_after_a_failed_commit_the_connection_is_another_one_and_as_durable(
    database: Database, said: list[str]
) -> None:
    break_the_commit(database)
    said.clear()
    with database.write() as tx:
        assert pragmas(tx) == ("wal", 2, 1)
    assert "pragma journal_mode = wal" in said
    assert "pragma synchronous = full" in said


def run_child(script: str, *arguments: object, root: Path = ROOT) -> str:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_commit_that_the_disk_does_not_take_is_unknown_and_the_lane_goes_on_when_there_is_room(path: Path) -> None:
    script = """
        import pathlib, resource, sys
        from brainlaned import db, errors
        database = db.Database(pathlib.Path(sys.argv[1]))
        database.open()
        with database.write() as tx:
            tx.execute("create table notes (text text) strict")
        size = pathlib.Path(sys.argv[1] + "-wal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        try:
            with database.write() as tx:
                tx.execute("insert into notes values ('lost')")
                print("inserted")
        except errors.CommitUnknown as error:
            print("unknown", str(error).startswith("cannot commit to"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        with database.write() as tx:
            tx.execute("insert into notes values ('kept')")
        with database.read() as connection:
            print([row[0] for row in connection.execute("select text from notes")])
        database.close()
    """
    assert run_child(script, path).splitlines() == ["inserted", "unknown True", "['kept']"]


# Whose turn it is.


def test_a_foreign_holder_is_waited_for(database: Database, path: Path) -> None:
    foreign = Foreign(path)
    timer = threading.Timer(0.2, foreign.let_go)
    timer.start()
    with database.write() as tx:
        note(tx, "a")
    timer.join()
    assert notes(database) == ["a"]


def test_a_foreign_holder_who_does_not_let_go_is_told_as_busy_and_nothing_is_stored(
    database: Database, path: Path, said: list[str]
) -> None:
    foreign = Foreign(path)
    with pytest.raises(errors.Busy, match="another process holds it"), database.write(patience_s=0.05) as tx:
        note(tx, "a")
    assert "pragma busy_timeout = 50" in said
    foreign.let_go()
    assert notes(database) == []
    with database.write() as tx:
        note(tx, "b")
    assert notes(database) == ["b"]


def test_without_a_word_on_patience_a_foreign_holder_has_five_seconds(database: Database, said: list[str]) -> None:
    with database.write(patience_s=0.05):
        pass
    with database.write():
        pass
    assert [line for line in said if "busy_timeout" in line] == [
        "pragma busy_timeout = 50",
        "pragma busy_timeout = 5000",
    ]


def test_a_writer_without_patience_does_not_wait_for_another_of_ours(database: Database) -> None:
    outcome: list[BaseException] = []

    def impatient() -> None:
        try:
            with database.write(first=True, patience_s=0.05):
                pass
        except errors.BrainlaneError as error:
            outcome.append(error)

    with database.write() as tx:
        in_thread(impatient).join(LIMIT_S)
        note(tx, "a")
    assert [type(error) for error in outcome] == [errors.Busy]
    # Whoever gave up stands in nobody's way: a writer that is not `first` gets its turn.
    patient = in_thread(lambda: write_note(database, "b"))
    patient.join(LIMIT_S)
    assert notes(database) == ["a", "b"]


def write_note(database: Database, text: str, *, first: bool = False) -> None:
    with database.write(first=first) as tx:
        note(tx, text)


def test_the_worker_goes_first_though_others_have_waited_longer(database: Database) -> None:
    with database.write():
        others = []
        for number in range(3):
            others.append(in_thread(lambda number=number: write_note(database, f"submit {number}")))  # type: ignore[misc]
            wait_until_blocked(others[-1])
        worker = in_thread(lambda: write_note(database, "answer", first=True))
        wait_until_blocked(worker)
    for thread in (worker, *others):
        thread.join(LIMIT_S)
    assert notes(database)[0] == "answer"
    assert len(notes(database)) == 4


def test_two_writers_are_never_in_a_transaction_at_once(database: Database) -> None:
    inside: list[int] = []
    most: list[int] = []

    def write(number: int) -> None:
        for turn in range(10):
            with database.write(first=number % 2 == 0) as tx:
                inside.append(number)
                most.append(len(inside))
                note(tx, f"{number}-{turn}")
                inside.remove(number)

    threads = [in_thread(lambda number=number: write(number)) for number in range(4)]  # type: ignore[misc]
    for thread in threads:
        thread.join(LIMIT_S)
    assert (max(most), len(notes(database))) == (1, 40)


# Reading.


def test_a_read_connection_cannot_write(database: Database) -> None:
    with database.read() as connection, pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("insert into notes (text) values ('x')")
    assert notes(database) == []


def test_a_read_sees_one_moment_and_holds_nobody_up(database: Database) -> None:
    with database.read() as connection:
        assert connection.execute("select count(*) from notes").fetchone()[0] == 0
        write_note(database, "a")
        assert connection.execute("select count(*) from notes").fetchone()[0] == 0
    assert notes(database) == ["a"]


@pytest.mark.parametrize("error", [None, ValueError])
def test_no_read_outlives_its_block(database: Database, error: type[Exception] | None) -> None:
    try:
        with database.read() as connection:
            connection.execute("select count(*) from notes").fetchone()
            if error is not None:
                raise error
    except ValueError:
        pass
    assert not connection.in_transaction


def test_readers_at_the_same_time_have_connections_of_their_own(database: Database) -> None:
    with database.read() as one, database.read() as other:
        assert one is not other
    with database.read() as again:
        assert again in (one, other)


# The log, and copies


MIB = 1024 * 1024


def write_much(database: Database, mebibytes: int) -> None:
    """Write so much to the log, a mebibyte a transaction; what is written is thrown away again by the next."""
    with database.write() as tx:
        tx.execute("create table if not exists ballast (data blob)")
    for _ in range(mebibytes):
        with database.write() as tx:
            tx.execute("delete from ballast")
            tx.execute("insert into ballast values (randomblob(:size))", {"size": MIB})


def test_a_log_that_nobody_reads_is_cut_to_nothing(database: Database) -> None:
    write_much(database, 3)
    assert database.log_size() > 0
    assert database.cut_log()
    assert database.log_size() == 0
    with database.write() as tx:
        note(tx, "after")
    assert notes(database) == ["after"]


def test_a_log_that_a_reader_holds_is_left_as_it_is_and_cut_when_he_has_left(database: Database, path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("begin")
        reader.execute("select count(*) from notes").fetchone()
        write_much(database, 3)
        assert not database.cut_log()
        with database.write() as tx:
            note(tx, "beside the reader")
        reader.execute("rollback")
    assert database.cut_log()
    assert database.log_size() == 0
    assert notes(database) == ["beside the reader"]


def test_whoever_cuts_the_log_does_not_wait_long_for_a_reader_while_writers_wait_for_him(
    database: Database, path: Path
) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("begin")
        reader.execute("select count(*) from notes").fetchone()
        write_much(database, 1)
        began = time.monotonic()
        database.cut_log()
        # Were it the usual patience, there would be no coming back before that.
        assert time.monotonic() - began < db.BUSY_S
    # The usual patience is back for the transactions that follow.
    with database.write() as tx:
        assert tx.execute("pragma busy_timeout").fetchone()[0] == db.BUSY_S * 1000


def test_a_log_over_its_limit_is_told_after_the_commit_that_made_it_so(
    database: Database, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "LONG_LOG_BYTES", 2 * MIB)
    told: list[int] = []
    database.log_is_long = lambda: told.append(database.log_size())
    with database.write() as tx:
        note(tx, "short")
    assert told == []
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("begin")
        reader.execute("select count(*) from notes").fetchone()
        write_much(database, 4)
        reader.execute("rollback")
    assert told and all(size > 2 * MIB for size in told)


def ignore(copy: sqlite3.Connection) -> None:
    pass


def test_a_copy_is_one_sound_file_with_all_that_was_committed(database: Database, tmp_path: Path) -> None:
    write_much(database, 2)
    with database.write() as tx:
        note(tx, "kept")
    place = tmp_path / "copies"
    place.mkdir()
    database.copy_to(place / "copy.db", lambda copy: note_on(copy, "marked"))
    assert [file.name for file in place.iterdir()] == ["copy.db"]
    copied = Database(place / "copy.db")
    assert notes(copied) == ["kept", "marked"]
    copied.close()
    assert notes(database) == ["kept"]
    with contextlib.closing(sqlite3.connect(place / "copy.db")) as copy:
        assert copy.execute("pragma integrity_check").fetchall() == [("ok",)]


def note_on(copy: sqlite3.Connection, text: str) -> None:
    copy.execute("insert into notes (text) values (?)", [text])


def test_others_write_while_a_copy_is_made_and_it_holds_whole_transactions_only(
    database: Database, tmp_path: Path
) -> None:
    write_much(database, 8)
    with database.write() as tx:
        tx.execute("create table pairs (a integer, b integer)")
        tx.execute("insert into pairs values (0, 0)")
    stop = threading.Event()
    written: list[int] = []

    def keep_writing() -> None:
        while not stop.is_set():
            with database.write() as tx:
                tx.execute("update pairs set a = a + 1")
                tx.execute("insert into notes (text) values ('x' || (select a from pairs))")
                tx.execute("update pairs set b = b + 1")
            written.append(1)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        deadline = time.monotonic() + LIMIT_S
        while not written:
            assert time.monotonic() < deadline
            time.sleep(0.001)  # for the first transaction
        before = len(written)
        database.copy_to(tmp_path / "copy.db", ignore)
        during = len(written) - before
    finally:
        stop.set()
        writer.join()
    assert during > 0
    with contextlib.closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        assert copy.execute("pragma integrity_check").fetchall() == [("ok",)]
        ((a, b),) = copy.execute("select a, b from pairs").fetchall()
        assert a == b == copy.execute("select count(*) from notes").fetchone()[0] >= before
    with database.read() as connection:
        assert tuple(connection.execute("select a, b from pairs").fetchone()) == (len(written), len(written))


def test_a_copy_whose_connection_broke_is_given_up_and_the_database_goes_on(database: Database, tmp_path: Path) -> None:
    write_much(database, 1)
    with database.write() as tx:
        tx.execute("insert into ballast values (randomblob(:size))", {"size": 32 * MIB})
    with database.write() as tx:
        tx.execute("create table parent (id integer primary key)")
        tx.execute("create table child (id integer references parent (id) deferrable initially deferred)")
    outcome: list[Exception | None] = []

    def attempt() -> None:
        try:
            database.copy_to(tmp_path / "copy.db", ignore)
        except Exception as error:
            outcome.append(error)
        else:
            outcome.append(None)

    copy = threading.Thread(target=attempt)
    copy.start()
    while copy.is_alive():
        # A commit that fails closes the connection, under a copy that is being made.
        with contextlib.suppress(errors.CommitUnknown), database.write() as tx:
            tx.execute("insert into child values (99)")
    copy.join()
    (error,) = outcome
    assert error is None or isinstance(error, errors.Busy)
    with database.write() as tx:
        note(tx, "goes on")
    assert notes(database) == ["goes on"]


# Opening.


def test_a_new_database_has_the_newest_schema(path: Path) -> None:
    database = Database(path)
    database.open()
    with database.read() as connection:
        version = connection.execute("pragma user_version").fetchone()[0]
        tables = {row[0] for row in connection.execute("select name from sqlite_master where type = 'table'")}
    database.close()
    assert version == max(int(file.name[:4]) for file in (ROOT / "brainlaned" / "migrations").glob("*.sql"))
    assert {"jobs", "job_attempts", "lane", "gates", "runs"} <= tables


def test_opening_again_changes_nothing(path: Path) -> None:
    assert whole_file(path) == whole_file(path)


def make_newer(path: Path) -> int:
    database = Database(path)
    database.open()
    with database.write() as tx:
        newer: int = tx.execute("pragma user_version").fetchone()[0] + 1
        tx.execute("alter table jobs add column of_the_future text")
        tx.execute(f"pragma user_version = {newer}")
    database.close()
    return newer


def refused_as_database(path: Path) -> str:
    """Return what is said about a database that is refused, having seen that nothing beside or in it has changed."""
    before = hashes(path.parent)
    database = Database(path)
    with pytest.raises(errors.StartRefused) as refused:
        database.open()
    assert hashes(path.parent) == before
    database.close()
    assert hashes(path.parent) == before
    assert refused.value.status is wire.DaemonExit.DATABASE
    assert os.fspath(path) in str(refused.value)
    return str(refused.value)


def test_a_newer_database_is_refused_naming_both_versions_and_stays_as_it_is(path: Path) -> None:
    newer = make_newer(path)
    assert f"version {newer}, this program knows {newer - 1}" in refused_as_database(path)


def test_a_newer_database_whose_last_words_are_still_in_its_log_stays_as_it_is(path: Path, tmp_path: Path) -> None:
    whole_file(path)
    living = sqlite3.connect(path, isolation_level=None)
    living.execute("pragma wal_autocheckpoint = 0")
    newer = living.execute("pragma user_version").fetchone()[0] + 1
    living.execute(f"pragma user_version = {newer}")
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for file in (path, Path(f"{path}-wal")):  # what a process leaves that is killed here
        shutil.copy(file, crashed)
    living.close()
    assert (crashed / "brainlane.db-wal").stat().st_size > 0
    assert f"version {newer}" in refused_as_database(crashed / path.name)


def whole_file(path: Path) -> bytes:
    database = Database(path)
    database.open()
    database.close()
    return path.read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"this is no database at all, and it is longer than a header has to be, " * 20,
        lambda whole: b"no database, and short",
        lambda whole: b"\0" * 8192,
        lambda whole: b"sqlite" + whole[6:],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:5000],
        lambda whole: whole[:100] + b"\xff" * (len(whole) - 100),
    ],
    ids=["text", "short", "zeros", "magic", "half", "torn-page", "overwritten"],
)
def test_a_damaged_database_is_refused_and_stays_as_it_is(path: Path, damage: Callable[[bytes], bytes]) -> None:
    path.write_bytes(damage(whole_file(path)))
    refused_as_database(path)


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_the_database_of_another_program_is_refused_and_stays_as_it_is(path: Path, mode: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"pragma journal_mode = {mode}")
        connection.execute("create table things (id integer)")
    assert "another program" in refused_as_database(path)


def test_an_empty_file_is_a_new_database(path: Path) -> None:
    path.touch()
    whole_file(path)
    assert path.read_bytes().startswith(b"SQLite format 3\0")


# Migrations, with the program copied so that one can be added.

OPEN = """
    import pathlib, sqlite3, sys
    from brainlaned import db
    database = db.Database(pathlib.Path(sys.argv[1]))
    try:
        database.open()
        print("opened")
    except sqlite3.Error as error:
        print("failed:", error)
    database.close()
"""


@pytest.fixture
def program(tmp_path: Path, path: Path) -> Path:
    """A copy of the program, and a database that it has not seen yet, of the version before."""
    whole_file(path)
    copy = tmp_path / "program"
    shutil.copytree(ROOT / "brainlaned", copy / "brainlaned", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def add_migration(program: Path, sql: str) -> None:
    (program / "brainlaned" / "migrations" / "9000_next.sql").write_text(sql)


def schema(path: Path) -> tuple[int, set[str]]:
    connection = sqlite3.connect(path)
    version = connection.execute("pragma user_version").fetchone()[0]
    names = {row[0] for row in connection.execute("select name from sqlite_master")}
    connection.close()
    return version, names


def test_a_migration_is_applied_once_and_raises_the_version(program: Path, path: Path) -> None:
    add_migration(program, "-- words; and more\ncreate table a (x);\ninsert into a values (1); -- end\n")
    for _ in range(2):
        assert run_child(OPEN, path, root=program) == "opened\n"
    version, names = schema(path)
    assert version == 9000
    assert "a" in names


def test_a_migration_that_fails_half_way_leaves_nothing_behind(program: Path, path: Path) -> None:
    before = schema(path)
    add_migration(program, "create table a (x);\ninsert into a values (1);\ninsert into none values (2);\n")
    assert run_child(OPEN, path, root=program).startswith("failed: no such table")
    assert schema(path) == before
    add_migration(program, "create table a (x);\ninsert into a values (1);\n")
    assert run_child(OPEN, path, root=program) == "opened\n"
    assert schema(path)[0] == 9000


def test_a_process_that_is_killed_in_a_migration_leaves_nothing_behind(program: Path, path: Path) -> None:
    before = schema(path)
    add_migration(program, "create table a (x);\ninsert into a values (1);\ncreate table b (x);\n")
    script = """
        import os, pathlib, signal, sys
        from brainlaned import db
        def observe(statement):
            if statement.startswith("create table b"):
                os.kill(os.getpid(), signal.SIGKILL)
        db.Database(pathlib.Path(sys.argv[1]), observe).open()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), os.fspath(path)]
    assert subprocess.run(command, cwd=program, timeout=60, check=False).returncode == -9
    assert schema(path) == before
    assert run_child(OPEN, path, root=program) == "opened\n"
    assert {"a", "b"} <= schema(path)[1]


def test_a_trigger_in_a_migration_is_one_statement(program: Path, path: Path) -> None:
    add_migration(
        program,
        "create table a (x);\ncreate trigger t after insert on a begin\n  delete from a;\n  select 1;\nend;\n",
    )
    assert run_child(OPEN, path, root=program) == "opened\n"
    assert {"a", "t"} <= schema(path)[1]


def test_the_last_statement_of_a_migration_is_never_left_out(program: Path, path: Path) -> None:
    before = schema(path)
    add_migration(program, "create table a (x);\ncreate table b (x)\n")
    run_child(OPEN, path, root=program)
    assert schema(path) == before or {"a", "b"} <= schema(path)[1]
