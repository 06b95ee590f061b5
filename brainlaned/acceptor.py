"""The one thread through which the API writes: group commit.

It takes what has queued up (at most 256 requests), opens one transaction, runs each request in a savepoint of its own,
commits once, then answers all: a slow disk costs one sync for many, and a refused request undoes nobody else's. The
worker's own transactions go first. Nobody is told that something is stored before the commit has returned.
"""

import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .db import Database, Transaction

BATCH = 256
Answer = TypeVar("Answer")


class Acceptor:
    """`after_commit` is called when a batch is stored, before its requests are answered."""

    def __init__(self, database: Database, after_commit: Callable[[], None]) -> None:
        self._database = database
        self._after_commit = after_commit
        self._requests: queue.SimpleQueue[tuple[Callable[[Transaction], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="brainlane-acceptor")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Answer what has been asked so far, then end."""
        self._requests.put(None)
        self._thread.join()

    def ask(self, request: Callable[[Transaction], Answer]) -> "Future[Answer]":
        """Queue a request. Its future gets the result after the commit, or what it or the commit raised."""
        future: Future[Answer] = Future()
        self._requests.put((request, future))
        return future

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
            self._commit([item for item in batch if item[1].set_running_or_notify_cancel()])
            if last:
                return

    def _commit(self, batch: list[tuple[Callable[[Transaction], Any], Future[Any]]]) -> None:
        results: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            with self._database.write() as tx:
                for request, future in batch:
                    try:
                        with tx.savepoint():
                            results.append((future, request(tx), None))
                    except Exception as error:
                        if isinstance(error, sqlite3.Error) and not isinstance(error, sqlite3.IntegrityError):
                            raise  # the disk or the file is at fault, not this request: no part can be trusted
                        results.append((future, None, error))
        except Exception as error:
            for _, future in batch:
                future.set_exception(error)
            return
        self._after_commit()
        for future, result, refusal in results:
            if refusal is None:
                future.set_result(result)
            else:
                future.set_exception(refusal)
