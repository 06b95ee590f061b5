"""What "alive" means, and telling systemd so: a sign of life, and one line about what the lane does.

The sign is given from the main loop, so it runs; and only while the worker has not outlived the silence that it
declared before its present step, no work waits beside a worker that waits for work, and a read of the database, made
off the loop, answers. Nothing here asks whether a thread exists: a hung one does.
"""

import asyncio
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

from . import errors, events, queries
from .db import Database
from .systemd import Notifier
from .worker import Worker

IDLE_BESIDE_WORK_S = 5.0
"""How long a claimable job may wait beside a worker that waits for work, in seconds."""

STATUS_S = 1.0
"""How long the status line may lag behind, in seconds."""


class Watchdog:
    """Watches one lane for systemd; without systemd it does nothing."""

    def __init__(self, notifier: Notifier, worker: Worker, database: Database) -> None:
        self._notifier = notifier
        self._worker = worker
        self._database = database
        self._idle_since: tuple[float, int] | None = None
        # One thread of its own: the pool of the API may be full of slow readers, who prove nothing.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="brainlane-watchdog")
        self._moved = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin, on the running loop."""
        if self._notifier.watchdog_s is not None:
            self._tasks.append(asyncio.create_task(self._feed(self._notifier.watchdog_s / 3)))
        if self._notifier.is_heard:
            self._tasks.append(asyncio.create_task(self._tell()))

    def stop(self) -> None:
        """End."""
        for task in self._tasks:
            task.cancel()
        self._reader.shutdown(wait=False)

    def moved(self) -> None:
        """A job has moved, so the status line is old. To be called on the loop."""
        self._moved.set()

    async def _feed(self, period_s: float) -> None:
        starved = False
        while True:
            due = time.monotonic() + period_s
            trouble = await self._trouble(period_s)
            if trouble is None:
                self._notifier.alive()
            elif not starved:
                events.watchdog_starved(trouble)
            starved = trouble is not None
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _trouble(self, limit_s: float) -> str | None:
        """Return what is wrong, or None. Takes `limit_s` at the most."""
        try:
            reading = asyncio.get_running_loop().run_in_executor(self._reader, self._is_work_waiting)
            is_work_waiting = await asyncio.wait_for(reading, limit_s)
        except TimeoutError:
            return "the database does not answer"
        except (sqlite3.Error, errors.BrainlaneError) as error:
            return f"the database does not answer: {error}"
        now = time.monotonic()
        worker = self._worker
        if not worker.is_waiting and now > worker.silent_until:
            return f"the worker has been silent for {now - worker.silent_until:.1f} s longer than it declared"
        if not (worker.is_waiting and is_work_waiting):
            self._idle_since = None
        elif self._idle_since is None or self._idle_since[1] != worker.turns:
            self._idle_since = (now, worker.turns)
        elif now - self._idle_since[0] > IDLE_BESIDE_WORK_S:
            return f"a job has been waiting for {now - self._idle_since[0]:.1f} s beside a worker that waits for work"
        return None

    def _is_work_waiting(self) -> bool:
        with self._database.read() as connection:
            return queries.is_work_waiting(connection)

    async def _tell(self) -> None:
        while True:
            self._moved.clear()
            try:
                self._notifier.status(await asyncio.get_running_loop().run_in_executor(self._reader, self._line))
            except (sqlite3.Error, errors.BrainlaneError) as error:
                self._notifier.status(f"The database does not answer: {error}")
            await asyncio.sleep(STATUS_S)
            await self._moved.wait()

    def _line(self) -> str:
        with self._database.read() as connection:
            running, queued, held = queries.at_a_glance(connection)
        doing = "Waiting for work" if running is None else f"Running job {running}"
        waiting = " An answer waits to be stored." if self._worker.answer_waiting else ""
        return f"{doing}, {queued} waiting, {held} held.{waiting}"
