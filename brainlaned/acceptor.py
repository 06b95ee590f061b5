"""The one thread through which the API writes: group commit.

It takes what has queued up (at most 256 requests), opens one transaction, runs each request in a savepoint of its own,
commits once, then answers all: a slow disk costs one sync for many, and a refused request undoes nobody else's. The
worker's own transactions go first. Nobody is told that something is stored before the commit has returned.
"""

import queue
import sqlite3
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .db import Database, Transaction

BATCH = 256
Result = TypeVar("Result")

Answer = Callable[[Any, Exception | None], None]
"""Told what a request returned, or what it or the commit raised."""

_Asked = tuple[Callable[[Transaction], Any], Answer]


class Acceptor:
    """`after_commit` is called when a batch is stored, before its requests are answered.

    `deliver` is given what answers a whole batch, to be called where those who asked live; at once where none is given.
    """

    def __init__(
        self,
        database: Database,
        after_commit: Callable[[], None],
        deliver: Callable[[Callable[[], None]], object] = lambda answer: answer(),
    ) -> None:
        self._database = database
        self._after_commit = after_commit
        self._deliver = deliver
        self._requests: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="brainlane-acceptor")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Answer what has been asked so far, then end."""
        self._requests.put(None)
        self._thread.join()

    def ask(
        self, request: Callable[[Transaction], Result], answer: Callable[[Result | None, Exception | None], None]
    ) -> None:
        """Queue a request. `answer` is called after the commit, and must not raise."""
        self._requests.put((request, answer))

    def _run(self) -> None:
        while (first := self._requests.get()) is not None:
            batch = [first]
            last = False
            while len(batch) < BATCH and not self._requests.empty():
                item = self._requests.get()
                if item is None:
                    last = True
                    break
                batch.append(item)
            self._commit(batch)
            if last:
                return

    def _commit(self, batch: list[_Asked]) -> None:
        results: list[tuple[Answer, Any, Exception | None]] = []
        try:
            with self._database.write() as tx:
                for request, answer in batch:
                    try:
                        with tx.savepoint():
                            results.append((answer, request(tx), None))
                    except Exception as error:
                        if isinstance(error, sqlite3.Error) and not isinstance(error, sqlite3.IntegrityError):
                            raise  # the disk or the file is at fault, not this request: no part can be trusted
                        results.append((answer, None, error))
        except Exception as error:
            results = [(answer, None, error) for _, answer in batch]
        else:
            self._after_commit()

        def answer_all() -> None:
            for answer, result, error in results:
                answer(result, error)

        self._deliver(answer_all)
