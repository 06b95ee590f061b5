"""Clients who wait for a job to move: futures on the event loop, without a thread, a connection or a transaction."""

import asyncio
import contextlib
from collections.abc import Iterator

from . import errors
from .wire import ErrorKind

MOST = 2000
"""So many may wait at a time."""


class Waiters:
    """Futures of those who wait for a job to move. Lives on the event loop; only `moved` is for other threads."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        self.count = 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def moved(self, job_ids: list[int]) -> None:
        """Wake whoever waits for one of these jobs. For any thread."""
        loop = self._loop
        if loop is not None and any(job_id in self._waiting for job_id in job_ids):
            loop.call_soon_threadsafe(self._wake, job_ids)

    def stop(self) -> None:
        """Wake all, for the end."""
        self._wake(list(self._waiting))
        self._loop = None

    def _wake(self, job_ids: list[int]) -> None:
        for job_id in job_ids:
            for future in self._waiting.pop(job_id, set()):
                if not future.done():
                    future.set_result(None)

    def make_room(self) -> None:
        """Raise Refused (too-many-waiters) when as many wait as may."""
        if self.count >= MOST:
            raise errors.Refused(
                ErrorKind.TOO_MANY_WAITERS, f"cannot wait: {self.count} clients wait already", retry_safe=True
            )

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count one who waits, or raise Refused (too-many-waiters)."""
        self.make_room()
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1

    @contextlib.contextmanager
    def watching(self, job_id: int) -> Iterator[asyncio.Future[None]]:
        """Lend a future that is done at the job's next move. Register first, then look, then wait."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job_id, set()).add(future)
        try:
            yield future
        finally:
            others = self._waiting.get(job_id, set())
            others.discard(future)
            if not others:
                self._waiting.pop(job_id, None)
