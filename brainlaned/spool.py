"""The durable answer file: one per attempt, in which an answer's raw bytes are kept until they are stored.

A file is created, and its directory synced, before the attempt is armed. Its first line is JSON (status, headers worth
keeping, secrets removed), on the disk before the database tells of it; then come the body's bytes as they arrive,
synced at least every second and at the end. A file whose body ended as its own framing said is renamed from .part to
.whole. A torn tail is normal. Only `remove` deletes, and only after the storing transaction has committed.

A local command has files of its own beside it (brains/command.py); its stdout is the answer.
"""

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from . import wire
from .later import Later

SYNC_S = 1.0
"""No byte of an answer stays unsynced for longer, in seconds."""

_OUTPUT = "stdout"
_SUFFIXES = ("part", "whole", "stdin", _OUTPUT, "stderr", "identity", "identity.new", "status", "status.new")
_CHUNK = 64 * 1024
_MAX_FIRST_LINE = 64 * 1024
_LOWEST_STATUS, _HIGHEST_STATUS = 100, 999


@dataclass(frozen=True, slots=True)
class Part:
    """What is on the disk of one attempt's answer."""

    path: Path
    status: int | None
    """None: the first line is not there, or torn."""
    headers: Mapping[str, str]
    headers_at: str | None
    whole: bool
    body_offset: int
    is_command: bool = False
    """The output of a local command, which begins without a first line."""

    def body(self, start: int = 0) -> Iterator[bytes]:
        """Read the body from byte `start` of it on, as far as it goes now."""
        if self.status is None and not self.is_command:
            return
        with self.path.open("rb") as file:
            file.seek(self.body_offset + start)
            while chunk := file.read(_CHUNK):
                yield chunk

    def kept(self) -> Iterator[bytes]:
        """Read what of the body a crash has left, up to the first NUL: the rest of it may stand behind a hole.

        Bytes that were never synced may reach the disk in any order, and a page that did not get there reads as zeros.
        No answer in JSON or as a stream of events holds a NUL of its own.
        """
        for chunk in self.body():
            before, hole, _ = chunk.partition(b"\0")
            yield before
            if hole:
                return


class Spool:
    """The spool directory of one lane."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._later = Later("brainlane-spool")

    def open(self) -> None:
        """Make the directory, durably, where it is not there yet. Raises OSError."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        sync_directory(self._directory.parent)

    def create(self, job_id: int, attempt: int) -> "Writer":
        """Create the file of an attempt, durably. Raises OSError, also when it is there already."""
        path = self._directory / f"{job_id}-{attempt}.part"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            sync_directory(self._directory)
        except OSError:
            os.close(descriptor)
            raise
        return Writer(path, descriptor, self._later)

    def find(self, job_id: int, attempt: int) -> Part | None:
        """Return what is on the disk of an attempt, or None when there is no file. Raises OSError."""
        output = self._directory / f"{job_id}-{attempt}.{_OUTPUT}"
        if output.exists():
            return Part(output, status=None, headers={}, headers_at=None, whole=False, body_offset=0, is_command=True)
        for suffix in ("whole", "part"):
            path = self._directory / f"{job_id}-{attempt}.{suffix}"
            with contextlib.suppress(FileNotFoundError):
                return _read_part(path, whole=suffix == "whole")
        return None

    def files(self, job_id: int, attempt: int) -> Path:
        """Return the path that the names of an attempt's files begin with."""
        return self._directory / f"{job_id}-{attempt}"

    def attempts(self) -> set[tuple[int, int]]:
        """Return the (job id, attempt) of every file in the spool."""
        found = set()
        for path in self._directory.iterdir() if self._directory.exists() else ():
            name, _, suffix = path.name.partition(".")
            job_id, _, attempt = name.partition("-")
            if suffix in _SUFFIXES and job_id.isdecimal() and attempt.isdecimal():
                found.add((int(job_id), int(attempt)))
        return found

    def remove(self, job_id: int, attempt: int) -> None:
        """Delete the files of an attempt whose answer is stored. Raises OSError."""
        for path in self._directory.iterdir():
            stem, _, suffix = path.name.partition(".")
            if stem == f"{job_id}-{attempt}" and suffix in _SUFFIXES:
                path.unlink(missing_ok=True)

    def set_aside(self, job_id: int, attempt: int, run: str) -> list[Path]:
        """Rename a file that belongs to no attempt we know, so that it is kept and can meet no later one."""
        kept = []
        for suffix in _SUFFIXES:
            path = self._directory / f"{job_id}-{attempt}.{suffix}"
            if path.exists():
                kept.append(path.rename(path.with_suffix(f".{suffix}-orphan-{run}")))
        return kept


class Writer:
    """The open file of the attempt in flight. Used by one thread; another one syncs behind it.

    No method raises: an answer that cannot be spooled is still in memory and will be stored from there. What went wrong
    first is in `failure`.
    """

    def __init__(self, path: Path, descriptor: int, later: Later) -> None:
        self._path = path
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._later = later
        self._sync_is_due = False
        self._closed = False
        self.failure: OSError | None = None

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(whole=False)

    def head(self, status: int, headers: Mapping[str, str], headers_at: str) -> None:
        """Write the first line. Whoever tells of it elsewhere syncs first."""
        line = json.dumps({"status": status, "headers": dict(headers), "headers_at": headers_at}) + "\n"
        with self._lock:
            self._write(line.encode())

    def sync(self) -> None:
        """Bring what has been written so far to the disk."""
        with self._lock:
            if not self._closed:
                self._sync()

    def body(self, chunk: bytes) -> None:
        """Append bytes of the answer; they are synced within a second."""
        with self._lock:
            self._write(chunk)
            if not self._sync_is_due and not self._closed:
                self._sync_is_due = True
                self._later.call(SYNC_S, self._sync_in_time)

    def close(self, *, whole: bool) -> None:
        """Sync and close; `whole` says that the body ended as its own framing said. Closing twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._sync()
            try:
                os.close(self._descriptor)
            except OSError as error:
                self.failure = self.failure or error
            # The name follows the synced bytes. A name lost in a power cut leaves the bytes to speak for themselves.
            if whole and self.failure is None:
                try:
                    self._path.rename(self._path.with_suffix(".whole"))
                except OSError as error:
                    self.failure = error

    def _write(self, data: bytes) -> None:
        if self.failure is not None:
            return  # a hole in the middle would be worse than an end
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            self.failure = error

    def _sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self.failure = self.failure or error

    def _sync_in_time(self) -> None:
        with self._lock:
            self._sync_is_due = False
            if not self._closed:
                self._sync()


def _read_part(path: Path, *, whole: bool) -> Part:
    with path.open("rb") as file:
        line = file.readline(_MAX_FIRST_LINE)
    try:
        head: Any = json.loads(line) if line.endswith(b"\n") else None
        status, headers_at = head["status"], head["headers_at"]
        # What somebody else wrote here must not stop a start: it counts as no first line.
        wire.parse_time(headers_at)
        if type(status) is not int or not _LOWEST_STATUS <= status <= _HIGHEST_STATUS:
            raise ValueError(f"{status!r} is no HTTP status")
        return Part(
            path=path,
            status=status,
            headers={str(name): str(value) for name, value in head["headers"].items()},
            headers_at=headers_at,
            whole=whole,
            body_offset=len(line),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return Part(path=path, status=None, headers={}, headers_at=None, whole=False, body_offset=0)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
