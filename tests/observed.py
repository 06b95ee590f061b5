"""Start brainlaned so that it vanishes at a cut: `python -m tests.observed CUT:TIMES [brainlaned's options]`.

The process kills itself, as the kernel would, when it passes the named cut for the given time. Production code has no
such door: the observer is given here, to daemon.run, by this entry point alone.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable

from brainlaned import __main__ as program
from brainlaned import config, daemon
from brainlaned.wire import DaemonExit


def killing_at(cut: str, times: int) -> Callable[[str], None]:
    """Return an observer that ends the process at the `times`th passing of a cut."""
    passed = 0
    lock = threading.Lock()

    def observe(name: str) -> None:
        nonlocal passed
        with lock:
            passed += name == cut
            if passed == times and name == cut:
                os.kill(os.getpid(), signal.SIGKILL)

    return observe


def main() -> None:
    cut, _, times = sys.argv.pop(1).partition(":")
    run = daemon.run

    def observed(configuration: config.Config, place: daemon.Place) -> DaemonExit:
        return run(configuration, place, killing_at(cut, int(times)))

    daemon.run = observed  # type: ignore[assignment]
    program.main()


if __name__ == "__main__":
    main()
