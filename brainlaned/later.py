"""Something to be done when its time has come, by a thread that sleeps until then.

One thread for all that an owner puts off: a thread for each would cost more than most of what is put off. What is done
must be short, since what is due next waits for it.
"""

import heapq
import threading
import time
from collections.abc import Callable


class Later:
    """Things that are put off. The thread begins with the first of them and ends with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._thread: threading.Thread | None = None

    def call(self, delay_s: float, action: Callable[[], None]) -> None:
        """Let `action` be called in so many seconds. It decides then whether it is still wanted, and raises nothing."""
        with self._changed:
            self._count += 1
            entry = (time.monotonic() + delay_s, self._count, action)
            heapq.heappush(self._waiting, entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            elif self._waiting[0] is entry:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting or self._waiting[0][0] > time.monotonic():
                    self._changed.wait(self._waiting[0][0] - time.monotonic() if self._waiting else None)
                action = heapq.heappop(self._waiting)[2]
            action()
            del action  # whatever it holds is not kept until the next one
