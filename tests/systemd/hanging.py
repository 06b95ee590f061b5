"""Start brainlaned so that it can be made slow, or to hang for good: ExecStart= of a lane in a machine, by a drop-in.

It hangs, once, at the cut that the file `hang-at` in the state directory names: one of the worker's, `migrating` (a
statement of a migration that says so) or `recovering` (the look at what an attempt left). At SIGUSR1 the main thread
hangs, and the event loop with it. A statement that says how long it takes takes so long, and so does that look where
the environment says it. The silence that the worker and a start declare before a step is shorter than the shipped one,
so that a test need not wait for it. Production code has no such door.
"""

import functools
import os
import re
import signal
import threading
import time
from pathlib import Path

from brainlaned import __main__ as program
from brainlaned import config, daemon, db, spool, worker
from brainlaned.brains import http
from brainlaned.wire import DaemonExit

SILENCE_S = 2.0
START_SILENCE_S = 10.0
"""The same for a step of a start."""

MAY_HANG = "/* may hang */"
TAKES = "/* takes {} s */"
LOOK_S = "LOOK_S"


def hang(*_: object) -> None:
    threading.Event().wait()


def hanging_at(wanted: Path) -> worker.Observer:
    """Return an observer that hangs at the cut that a file names, and removes the file, so that it happens once."""

    def observe(name: str) -> None:
        if wanted.exists() and wanted.read_text() == name:
            wanted.unlink()
            hang()

    return observe


def of_statements(cut: worker.Observer, statement: str) -> None:
    """Take as long over a statement as it says."""
    if MAY_HANG in statement:
        cut("migrating")
    if takes := re.search(re.escape(TAKES).replace(r"\{\}", "([0-9.]+)"), statement):
        time.sleep(float(takes[1]))  # for as long as the work would take on a large table


def main() -> None:
    worker.STEP_S = http.RESOLVE_S = SILENCE_S
    daemon.STEP_S = START_SILENCE_S
    signal.signal(signal.SIGUSR1, hang)
    cut = hanging_at(Path(os.environ["STATE_DIRECTORY"], "hang-at"))
    run, find = daemon.run, spool.Spool.find

    def observed(configuration: config.Config, place: daemon.Place) -> DaemonExit:
        return run(configuration, place, cut)

    def looking(self: spool.Spool, job_id: int, attempt: int) -> spool.Part | None:
        cut("recovering")
        time.sleep(float(os.environ.get(LOOK_S, "0")))  # for as long as a slow disk would take
        return find(self, job_id, attempt)

    daemon.run = observed  # type: ignore[assignment]
    daemon.Database = functools.partial(db.Database, observe=functools.partial(of_statements, cut))  # type: ignore[assignment,misc]
    spool.Spool.find = looking  # type: ignore[method-assign]
    program.main()


if __name__ == "__main__":
    main()
