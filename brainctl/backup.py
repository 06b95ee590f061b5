"""A backup: the lane's copy of its database, written beside its place, looked through, then put there whole.

Until the last step nothing stands under the name that was asked for but what stood there before, and whatever ends the
command, Ctrl-C and SIGTERM included, takes the unfinished file away. The copy is never in memory as a whole. It is
opened as a file that nobody changes, so that SQLite makes nothing beside it.
"""

import contextlib
import errno
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self

from brainlaned.wire import ErrorKind, Exit

from . import out, render, text
from .client import Lane
from .errors import Interrupted, Problem, say, usage
from .session import Session
from .wait import ProgressLine

LOOK_EVERY = 100_000
"""SQLite's steps between two looks at whether a person has pressed Ctrl-C."""
BESIDE = ("-wal", "-shm", "-journal")


@dataclass(frozen=True, slots=True)
class Contents:
    """What the check of a copy found."""

    schema: int
    jobs: int


def run(session: Session, file: str) -> int:
    """Make a backup, print what it holds, and return the exit status."""
    place = _place(file)
    lane = session.lane()
    with _Signals() as signals:
        try:
            size, found = _make(lane, place)
        except KeyboardInterrupt:
            if signals.stopped_by is not None:
                say(f"stopped by {signals.stopped_by.name}, nothing is kept of the backup")
                sys.exit(128 + signals.stopped_by)
            raise Interrupted("stopped, nothing is kept of the backup", "brainctl backup FILE") from None
    if session.json:
        told = {"file": file, "bytes": size, "jobs": found.jobs, "schema": found.schema}
        out.document(json.dumps(told, ensure_ascii=False).encode(errors="backslashreplace"))
    else:
        out.lines([f"{found.jobs} jobs, {size} bytes, {text.one_line(file)}"])
    return Exit.OK


def _place(file: str) -> Path:
    """Return where the backup goes, unless what stands there is something else than a file at rest."""
    place = Path(file)
    try:
        if not stat.S_ISREG(place.lstat().st_mode):
            usage(f"cannot write the backup '{file}': something that is no file is there")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _refuse(file, error)
    for ending in BESIDE:
        if os.path.lexists(f"{file}{ending}"):
            # The database of a running lane looks so; and what is left of one would spoil the copy at its first use.
            usage(f"cannot write the backup '{file}': a database is in use there, '{file}{ending}' belongs to it")
    return place


def _make(lane: Lane, place: Path) -> tuple[int, Contents]:
    with _unfinished(place) as (file, name), _progress(lane) as tell:
        with lane.backup() as (size, pieces):
            written = 0
            for piece in pieces:
                with _writing(place):
                    _write(file, piece)
                written += len(piece)
                tell(f"{render.amount(written)} of {render.amount(size)}")
        tell("checking the copy")
        with _writing(place):
            os.fsync(file.fileno())
        found = _look_through(name, size)
        with _writing(place):
            name.rename(place)
            _sync_directory(place.parent)
    return size, found


@contextlib.contextmanager
def _unfinished(place: Path) -> Iterator[tuple[FileIO, Path]]:
    """Lend a new file beside the place that is for its owner alone, and take it away if it is not put there."""
    name = place.with_name(f".brainlane-{os.urandom(8).hex()}.unfinished")
    try:
        try:
            # Without a buffer: what a full disk did not take must not be tried again when the file is closed.
            file = open(name, "xb", buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600))  # noqa: SIM115
        except OSError as error:
            _refuse(str(place), error)
        with file:
            os.fchmod(file.fileno(), 0o600)
            yield file, name
    finally:
        # After the rename nothing has this name.
        name.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _not_written(place, error) from error


def _write(file: FileIO, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[file.write(rest) :]


def _not_written(place: Path, error: OSError) -> Problem:
    why = error.strerror or type(error).__name__
    return Problem(ErrorKind.INTERNAL, f"cannot write the backup '{place}': {why}", f"df {place.parent}")


def _look_through(name: Path, size: int) -> Contents:
    """Check a copy: all of it, sound by SQLite's own account, and a lane's."""
    import sqlite3

    if name.stat().st_size != size:
        raise _unsound(f"it is {name.stat().st_size} bytes long, and was to be {size}")
    try:
        with contextlib.closing(sqlite3.connect(f"{name.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as copy:
            # What a signal raises in here ends the statement, and SQLite tells of that as an interruption.
            copy.set_progress_handler(lambda: 0, LOOK_EVERY)
            verdict: str = copy.execute("pragma integrity_check(1)").fetchone()[0]
            if verdict != "ok":
                raise _unsound(verdict)
            schema: int = copy.execute("pragma user_version").fetchone()[0]
            if schema <= 0:
                raise _unsound("it has no schema version")
            jobs: int = copy.execute("select count(*) from jobs").fetchone()[0]
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise KeyboardInterrupt from None
        raise _unsound(str(error)) from error
    return Contents(schema, jobs)


def _unsound(why: str) -> Problem:
    return Problem(
        ErrorKind.INTERNAL, f"cannot keep the backup: the copy is not sound: {why}", "brainctl status", retry_safe=True
    )


def _refuse(file: str, error: Exception) -> NoReturn:
    directory = Path(file).parent
    match error:
        case FileNotFoundError() | NotADirectoryError():
            usage(f"cannot write the backup '{file}': there is no directory '{directory}'")
        case PermissionError():
            usage(f"cannot write the backup '{file}': no permission to write in '{directory}'")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT | errno.EIO):
            raise _not_written(Path(file), error) from error
        case _:
            usage(f"cannot write the backup '{file}': {getattr(error, 'strerror', None) or error}")


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _progress(lane: Lane) -> Iterator[Callable[[str], None]]:
    """Lend a function that shows a person how far it is; while the lane makes the copy it shows for how long."""
    line, started = ProgressLine(), time.monotonic()
    shown = "the lane makes the copy"

    def tell(words: str) -> None:
        nonlocal shown
        shown = words
        line.show(f"backup: {shown}, {render.clock(time.monotonic() - started)}")

    lane.tick = lambda: tell(shown)
    try:
        yield tell
    finally:
        lane.tick = None
        line.clear()


class _Signals:
    """SIGTERM and SIGHUP, where nobody has set them aside, unwind the stack as SIGINT does."""

    def __init__(self) -> None:
        self.stopped_by: signal.Signals | None = None
        self._ours: list[signal.Signals] = []

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._stop)
                self._ours.append(number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._ours:
            signal.signal(number, signal.SIG_DFL)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = signal.Signals(number)
        raise KeyboardInterrupt
