"""Upkeep: finished jobs are let go when their time is over, and the write-ahead log is kept short.

One thread that sleeps until the next job's time is over, or until it is told that the log is long. It lets go in short
transactions (retention.py), a moment apart, so that everybody else's come in between.
"""

import sqlite3
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from . import config, db, errors, events, queries, retention, wire
from .db import Database, Transaction

BETWEEN_S = 0.01
"""A pause between two transactions, in which others get their turn, in seconds."""

SOONEST_S = 60.0
"""How far apart two passes are at least, so that many jobs that finished together are let go together."""

LATEST_S = 24 * 3600.0
"""How far apart they are at most: the clock may have been set meanwhile."""

PIN_AGAIN_S = 10.0
"""How soon a log is looked at again that a reader keeps from being cut, in seconds."""


class Upkeep:
    """The upkeep of one lane."""

    def __init__(self, database: Database, configuration: config.Config) -> None:
        self._database = database
        self._keep = timedelta(days=configuration.keep_days)
        self._keep_payload = timedelta(days=configuration.keep_payload_days)
        self._changed = threading.Condition()
        self._stopping = False
        self._log_is_long = True  # what an earlier run left is looked at once
        self._pins = 0
        """How often in a row a reader has kept the log from being cut."""
        self._is_pin_told = False
        self._thread = threading.Thread(target=self._run, name="brainlane-upkeep")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the transaction in hand."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def cut_log(self) -> None:
        """The log is long, or holds what was to be erased: cut it as soon as may be. For any thread."""
        with self._changed:
            if not self._log_is_long:
                self._log_is_long = True
                self._changed.notify_all()

    def _run(self) -> None:
        next_pass = time.monotonic()
        while not self._stopping:
            try:
                if time.monotonic() >= next_pass:
                    self._let_go()
                    next_pass = time.monotonic() + self._until_next()
                self._cut()
            except (errors.BrainlaneError, sqlite3.Error, OSError) as error:
                events.upkeep_failed(str(error))
                next_pass = time.monotonic() + SOONEST_S
                self._pins = 0
            # A log that a reader holds gets longer with every commit, which is no reason to look at each.
            wake = min(next_pass, time.monotonic() + PIN_AGAIN_S) if self._pins else next_pass
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopping or (self._log_is_long and not self._pins), max(0.0, wake - time.monotonic())
                )

    def _let_go(self) -> None:
        now = datetime.now(UTC)
        deleted = self._in_parts(retention.delete_old, now - self._keep)
        erased = self._in_parts(retention.erase_old, now - self._keep_payload)
        self._in_parts(retention.delete_old_runs, now - self._keep)
        if erased or deleted:
            events.let_go(erased, deleted)

    def _in_parts(self, step: Callable[[Transaction, str], int], before: datetime) -> int:
        total = 0
        while not self._stopping:
            with self._database.write() as tx:
                count = step(tx, wire.format_time(before))
            if count == 0:
                break
            total += count
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, BETWEEN_S)
        return total

    def _until_next(self) -> float:
        with self._database.read() as connection:
            with_payload, oldest = queries.oldest_finished(connection)
        dues = [
            wire.parse_time(finished) + keep
            for finished, keep in ((with_payload, self._keep_payload), (oldest, self._keep))
            if finished is not None
        ]
        left_s = (min(dues) - datetime.now(UTC)).total_seconds() if dues else LATEST_S
        return min(max(left_s, SOONEST_S), LATEST_S)

    def _cut(self) -> None:
        with self._changed:
            self._log_is_long = False
        if self._database.cut_log():
            if self._is_pin_told:
                events.log_cut(str(self._database.log_path))
            self._pins, self._is_pin_told = 0, False
            return
        # Our own readers let go within a second, so one that is there twice is somebody else's.
        self._pins += 1
        size = self._database.log_size()
        if self._pins > 1 and size > db.LONG_LOG_BYTES and not self._is_pin_told:
            self._is_pin_told = True
            events.log_pinned(str(self._database.log_path), size)
