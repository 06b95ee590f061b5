"""A copy of the database while the lane runs: made beside it with SQLite's own backup, then read by whoever asked.

A lane that is set up from a copy must not ask again what the lane has asked since the copy was made, and cannot
know it. So the copy says of itself that the lane is paused, and why.
"""

import contextlib
import sqlite3
import threading
from datetime import UTC, datetime
from typing import BinaryIO

from . import errors, wire
from .db import Database
from .filesystem import Reserve
from .wire import ErrorKind

_PATTERN = ".brainlane-copy-{}.db"
"""A name that nobody else gives."""


class Backups:
    """Makes copies of one lane's database, one at a time."""

    def __init__(self, database: Database, reserve: Reserve) -> None:
        self._database = database
        self._reserve = reserve
        self._busy = threading.Lock()
        self._stopping = False

    def clear(self) -> None:
        """Delete what a run left that vanished while it made one."""
        for path in self._database.path.parent.glob(f"{_PATTERN.format('*')}*"):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def stop(self) -> None:
        """Give up the one that is being made, if any: a stop waits for nothing that can be asked for again."""
        self._stopping = True

    def make(self) -> BinaryIO:
        """Return a new copy, open for reading and without a name. Raises Refused (busy, disk-reserve)."""
        if not self._busy.acquire(blocking=False):
            raise errors.Refused(ErrorKind.BUSY, "cannot make a backup: another one is being made", retry_safe=True)
        try:
            return self._make()
        finally:
            self._busy.release()

    def _make(self) -> BinaryIO:
        now = wire.format_time(datetime.now(UTC))
        size = self._database.path.stat().st_size + self._database.log_size()
        if self._reserve.free() - size < self._reserve.size:
            raise errors.Refused(
                ErrorKind.DISK_RESERVE,
                f"cannot make a backup: it takes {size} bytes beside the database, and less than that is free over "
                "disk_reserve_mib",
                next_action="df",
                retry_safe=True,
            )
        path = self._database.path.with_name(_PATTERN.format(now))
        try:
            self._database.copy_to(path, lambda copy: _pause(copy, now), is_wanted=lambda: not self._stopping)
            return path.open("rb")
        except sqlite3.Error as error:
            raise errors.Refused(
                ErrorKind.INTERNAL, f"cannot make a backup: {error}", next_action=f"ls -l {path.parent}"
            ) from error
        finally:
            path.unlink(missing_ok=True)


def _pause(copy: sqlite3.Connection, now: str) -> None:
    copy.execute(
        "update lane set paused_at = :now, paused_by = 'brainlaned', paused_reason = :reason",
        {"now": now, "reason": f"restored from the backup of {now}: what was queued then may have been asked since"},
    )
