"""Start brainlaned so that it can be made to hang for good: the ExecStart= of a lane in a machine, by a drop-in.

Its worker hangs, once, at the cut that the file `hang-at` in the state directory names. At SIGUSR1 the main thread
hangs, and the event loop with it. The silence that the worker declares before a step is shorter than the shipped one,
so that a test need not wait for it. Production code has no such door.
"""

import os
import signal
import threading
from pathlib import Path

from brainlaned import __main__ as program
from brainlaned import config, daemon, worker
from brainlaned.brains import http
from brainlaned.wire import DaemonExit

SILENCE_S = 2.0


def hang(*_: object) -> None:
    threading.Event().wait()


def hanging_at(wanted: Path) -> worker.Observer:
    """Return an observer that hangs at the cut that a file names, and removes the file, so that it happens once."""

    def observe(name: str) -> None:
        if wanted.exists() and wanted.read_text() == name:
            wanted.unlink()
            hang()

    return observe


def main() -> None:
    worker.STEP_S = http.RESOLVE_S = SILENCE_S
    signal.signal(signal.SIGUSR1, hang)
    run = daemon.run

    def observed(configuration: config.Config, place: daemon.Place) -> DaemonExit:
        return run(configuration, place, hanging_at(place.state_dir / "hang-at"))

    daemon.run = observed  # type: ignore[assignment]
    program.main()


if __name__ == "__main__":
    assert os.environ["STATE_DIRECTORY"], "this is for a unit"
    main()
