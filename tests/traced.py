"""Start brainlaned so that it writes down its statements: `python -m tests.traced FILE [brainlaned's options]`.

Every statement of every connection becomes a line of FILE before SQLite executes it: `[name of the thread, statement]`
in JSON. MainThread is the event loop's. As with tests.observed, the door is opened by this entry point alone.
"""

import json
import sys
import threading
from pathlib import Path

from brainlaned import __main__ as program
from brainlaned import daemon, db


def main() -> None:
    file = Path(sys.argv.pop(1)).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open for as long as we live
    lock = threading.Lock()

    def observe(statement: str) -> None:
        with lock:
            file.write(json.dumps([threading.current_thread().name, statement.strip()]) + "\n")

    def traced(path: Path) -> db.Database:
        return db.Database(path, observe)

    daemon.Database = traced  # type: ignore[assignment,misc]
    program.main()


if __name__ == "__main__":
    main()
