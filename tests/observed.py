"""Start brainlaned so that it vanishes at a cut: `python -m tests.observed CUT:TIMES FILE [brainlaned's options]`.

From when FILE is there the process kills itself, as the kernel would, when it passes the named cut for the given time;
with CUT:TIMES:hang the thread that passes it hangs there for good. Production code has no such door: the observer is
given here, to daemon.run, by this entry point alone.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from brainlaned import __main__ as program
from brainlaned import config, daemon
from brainlaned.wire import DaemonExit


def acting_at(cut: str, times: int, armed: Path, act: Callable[[], None]) -> Callable[[str], None]:
    """Return an observer that acts at the `times`th passing of a cut since `armed` was there."""
    passed = 0
    lock = threading.Lock()

    def observe(name: str) -> None:
        nonlocal passed
        if name != cut or not armed.exists():
            return
        with lock:
            passed += 1
            is_time = passed == times
        if is_time:
            act()

    return observe


def vanish() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    threading.Event().wait()


def main() -> None:
    cut, times, *action = sys.argv.pop(1).split(":")
    armed = Path(sys.argv.pop(1))
    run = daemon.run

    def observed(configuration: config.Config, place: daemon.Place) -> DaemonExit:
        return run(configuration, place, acting_at(cut, int(times), armed, hang if action else vanish))

    daemon.run = observed  # type: ignore[assignment]
    program.main()


if __name__ == "__main__":
    main()
