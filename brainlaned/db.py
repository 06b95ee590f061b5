"""Connections to the lane's database: how they are opened, and who may write when.

Owns the one write connection with the lock around it, the few read connections, the pragmas and the migrations.
`write()` is the only place that says BEGIN IMMEDIATE and COMMIT; every writer goes through it and holds the lock for
one short transaction. Nothing may wait, sleep, await or call a brain inside it.

Why a transaction never fails half-way with "locked": it begins as a writer, so it waits for its turn at the start,
where nothing has been read yet. Why the worker is not kept from storing an answer by a flood of submits: it says
`first`, and whoever has not said so stands back while it waits.
"""

import contextlib
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import errors, wire

BUSY_S = 5.0
"""How long a transaction waits for a foreign process that holds the write lock, in seconds."""

MARK_PATIENCE_S = 0.2
"""The same for a mark that is written again with the result, so that a paid answer is not kept waiting for it."""

LONG_LOG_BYTES = 16 * 1024 * 1024
"""A write-ahead log over this size is worth cutting."""

_PIN_PATIENCE_S = 0.1
_COPY_PAGES = 256

_MIGRATIONS = Path(__file__).parent / "migrations"
_SCHEMA_COOKIE_OFFSET = 40
_USER_VERSION_OFFSET = 60  # https://www.sqlite.org/fileformat2.html#the_database_header
_SYNCHRONOUS_FULL = 2

Params = Mapping[str, Any]


class Transaction:
    """One write transaction. Its time is fixed, so that everything in it happened at the same moment."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.moment = datetime.now(UTC)
        self.now = wire.format_time(self.moment)

    def execute(self, sql: str, params: Params | None = None) -> sqlite3.Cursor:
        return self._connection.execute(sql, params or {})

    @contextlib.contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo what the body did when it raises, and leave the rest of the transaction alone."""
        self._connection.execute("savepoint part")
        try:
            yield
        except BaseException:
            # Some errors (a full disk) have rolled back the whole transaction already, and its savepoints with it.
            if self._connection.in_transaction:
                self._connection.execute("rollback to part")
                self._connection.execute("release part")
            raise
        self._connection.execute("release part")


class Database:
    """The database of one lane.

    `observe`, where given, is told every statement of every connection (sqlite3's trace callback); tests use it.
    """

    def __init__(self, path: Path, observe: Callable[[str], None] | None = None) -> None:
        self.path = path
        self.log_path = path.with_name(f"{path.name}-wal")
        self._observe = observe
        self._writer: sqlite3.Connection | None = None
        self._waits_s: float | None = None
        self._turn = _Turn()
        self._readers: list[sqlite3.Connection] = []
        self._readers_lock = threading.Lock()
        self.log_is_long: Callable[[], None] = lambda: None
        """Told after a commit that left the log longer than it should be."""

    def is_there(self) -> bool:
        """Say whether a lane's database is there, be it only in its log."""
        return self._version_in_header() > 0 or self._version_in_log() > 0

    def refuse_newer(self) -> None:
        """Raise StartRefused (65) for a database that is newer than the program, without touching it."""
        newest = max(_numbered_migrations())
        self._refuse_newer(self._version_in_header(), newest)
        self._refuse_newer(self._version_in_log(), newest)

    def open(self, step: Callable[[], None] = lambda: None) -> None:
        """Open the database and bring its schema up to date; `step` is told of each statement of that.

        Raises StartRefused (65) for a file that is damaged, newer than the program or another program's; it is left as
        it is.
        """
        self.refuse_newer()
        newest = max(_numbered_migrations())
        try:
            with self.write() as tx:
                version = _user_version(tx)
                self._refuse_newer(version, newest)
                for number, script in sorted(_numbered_migrations().items()):
                    if number > version:
                        _apply(tx, number, script, step)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            raise errors.StartRefused(
                wire.DaemonExit.DATABASE,
                f"cannot open database '{self.path}': {error}",
                f"sqlite3 {self.path} 'pragma integrity_check'",
            ) from error

    def close(self) -> None:
        with self._readers_lock:
            while self._readers:
                self._readers.pop().close()
        with self._turn(first=True):
            self._drop_writer()

    @contextlib.contextmanager
    def write(self, *, first: bool = False, patience_s: float | None = None) -> Iterator[Transaction]:
        """Hold the write lock for the length of the body, which ends in one COMMIT.

        Raises Busy when the lock could not be had (within `patience_s` seconds where that is given), and CommitUnknown
        when COMMIT failed.
        """
        with self._turn(first, patience_s):
            connection = self._open_writer()
            try:
                self._wait_for_others(connection, patience_s or BUSY_S)
                connection.execute("begin immediate")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                    raise errors.Busy(
                        f"cannot write '{self.path}': another process holds it; nothing was stored"
                    ) from error
                raise
            try:
                yield Transaction(connection)
            except BaseException:
                if connection.in_transaction:
                    connection.execute("rollback")
                raise
            try:
                connection.execute("commit")
            except sqlite3.Error as error:
                # What the failed commit left in this connection's cache is not to be trusted.
                self._drop_writer()
                raise errors.CommitUnknown(f"cannot commit to '{self.path}': {error}") from error
        if self.log_size() > LONG_LOG_BYTES:
            self.log_is_long()

    def log_size(self) -> int:
        """Return the size of the write-ahead log, in bytes."""
        try:
            return self.log_path.stat().st_size
        except FileNotFoundError:
            return 0

    def cut_log(self) -> bool:
        """Copy the log back and cut it to nothing. Return whether it was done, which a reader who needs it prevents."""
        with self._turn(first=False):
            connection = self._open_writer()
            # Writers wait meanwhile, so a reader that does not let go is not waited for.
            self._wait_for_others(connection, _PIN_PATIENCE_S)
            busy, _, _ = connection.execute("pragma wal_checkpoint(truncate)").fetchone()
        return not busy

    def copy_to(
        self, path: Path, mark: Callable[[sqlite3.Connection], None], is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Copy the database, as it is when this returns, to a new file that `mark` may change. Others write meanwhile.

        SQLite carries what the same connection writes over into a copy that has begun, so no reader has to keep a
        snapshot for the time that the whole takes (https://www.sqlite.org/backup.html). Raises Busy.
        """
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as copy, contextlib.ExitStack() as turn:

            def let_others_pass(status: int, remaining: int, total: int) -> None:
                turn.close()
                time.sleep(0.001)  # a thread that only lets go and takes again would keep the lock from them
                turn.enter_context(self._turn(first=False))
                if self._writer is not connection or not is_wanted():
                    raise errors.Busy("cannot copy the database: the lane stops, or its connection broke meanwhile")

            # Whoever takes the copy brings it to his disk; here nobody must wait for that.
            copy.execute("pragma synchronous = off")
            turn.enter_context(self._turn(first=False))
            connection = self._open_writer()
            connection.backup(copy, pages=_COPY_PAGES, progress=let_others_pass, sleep=0)
            turn.close()
            # One file with nothing beside it.
            copy.execute("pragma journal_mode = delete")
            mark(copy)

    def _wait_for_others(self, connection: sqlite3.Connection, limit_s: float) -> None:
        if self._waits_s != limit_s:
            connection.execute(f"pragma busy_timeout = {int(limit_s * 1000)}")
            self._waits_s = limit_s

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection that sees one snapshot and cannot write. For the thread pool, never for the event loop."""
        with self._readers_lock:
            connection = self._readers.pop() if self._readers else None
        if connection is None:
            connection = self._connect()
            connection.execute("pragma query_only = on")
        try:
            connection.execute("begin")
            yield connection
        finally:
            if connection.in_transaction:
                connection.execute("rollback")
            with self._readers_lock:
                self._readers.append(connection)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        if self._observe is not None:
            connection.set_trace_callback(self._observe)
        return connection

    def _open_writer(self) -> sqlite3.Connection:
        if self._writer is None:
            connection = self._connect()
            try:
                mode = connection.execute("pragma journal_mode = wal").fetchone()[0]
                connection.execute("pragma synchronous = full")
                connection.execute("pragma foreign_keys = on")
                # What was erased must not stand on in what is free; it may lie there from any change before.
                connection.execute("pragma secure_delete = on")
                connection.execute(f"pragma journal_size_limit = {LONG_LOG_BYTES}")
                synchronous = connection.execute("pragma synchronous").fetchone()[0]
            except sqlite3.Error:
                connection.close()
                raise
            # Accepted means durable only with these two, and SQLite does not complain when it cannot give them.
            if mode != "wal" or synchronous != _SYNCHRONOUS_FULL:
                connection.close()
                raise errors.StartRefused(
                    wire.DaemonExit.CONFIGURATION,
                    f"cannot open database '{self.path}': no durable write-ahead log there (journal_mode {mode}, "
                    f"synchronous {synchronous})",
                )
            self._writer, self._waits_s = connection, None
        return self._writer

    def _drop_writer(self) -> None:
        if self._writer is not None:
            # A copy that is being made keeps a closed connection alive, and with it what it has begun.
            with contextlib.suppress(sqlite3.Error):
                self._writer.rollback()
            self._writer.close()
            self._writer = None

    def _version_in_header(self) -> int:
        # Read without SQLite, which would create side files beside a database that we must not touch.
        try:
            with self.path.open("rb") as file:
                header = file.read(100)
        except FileNotFoundError:
            return 0
        if len(header) < 100:
            return 0
        version: int = struct.unpack_from(">i", header, _USER_VERSION_OFFSET)[0]
        if not header.startswith(b"SQLite format 3\0"):
            return 0
        # Ours has its first table and its version from one transaction.
        if version == 0 and struct.unpack_from(">i", header, _SCHEMA_COOKIE_OFFSET)[0] > 0:
            raise errors.StartRefused(
                wire.DaemonExit.DATABASE,
                f"cannot open database '{self.path}': it is the database of another program",
                f"sqlite3 {self.path} .schema",
            )
        return version

    def _version_in_log(self) -> int:
        # A newer program may have died before its log was copied back. Any connection would leave side files behind or
        # copy the log, so its committed frames are read as they lie (https://www.sqlite.org/fileformat2.html#walformat).
        try:
            content = self.log_path.read_bytes()
        except FileNotFoundError:
            return 0
        version = seen = 0
        if len(content) < 32:
            return 0
        page_size, salts = struct.unpack_from(">I", content, 8)[0], content[16:24]
        for start in range(32, len(content) - page_size - 23, page_size + 24):
            page, size_at_commit = struct.unpack_from(">II", content, start)
            if content[start + 8 : start + 16] != salts:
                break
            if page == 1:
                seen = struct.unpack_from(">i", content, start + 24 + _USER_VERSION_OFFSET)[0]
            version = seen if size_at_commit else version
        return version

    def _refuse_newer(self, version: int, newest: int) -> None:
        if version > newest:
            raise errors.StartRefused(
                wire.DaemonExit.DATABASE,
                f"cannot open database '{self.path}': its schema has version {version}, this program knows {newest}",
                "install the newer brainlane again",
            )


class _Turn:
    """A lock that lets those who say `first` pass before those who do not."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held = False
        self._first_waiting = 0

    @contextlib.contextmanager
    def __call__(self, first: bool, patience_s: float | None = None) -> Iterator[None]:
        with self._changed:
            self._first_waiting += first
            free = self._changed.wait_for(lambda: not self._held and (first or not self._first_waiting), patience_s)
            self._first_waiting -= first
            if not free:
                self._changed.notify_all()
                raise errors.Busy("cannot write: the lane's own writers are busy; nothing was stored")
            self._held = True
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()


def _numbered_migrations() -> dict[int, Path]:
    return {int(script.name.split("_")[0]): script for script in _MIGRATIONS.glob("[0-9]*_*.sql")}


def _user_version(tx: Transaction) -> int:
    version: int = tx.execute("pragma user_version").fetchone()[0]
    return version


def _apply(tx: Transaction, number: int, script: Path, step: Callable[[], None]) -> None:
    # Statement by statement, because executescript() would end the transaction that makes a migration all or nothing.
    statement = ""
    for line in script.read_text(encoding="utf-8").splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            step()
            tx.execute(statement)
            statement = ""
    if statement.strip():
        tx.execute(statement)  # the last one needs no semicolon
    tx.execute(f"pragma user_version = {number}")
