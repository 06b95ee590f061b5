"""What systemd and the daemon tell each other: passed descriptors, the notify socket, how a run ended.

Owns LISTEN_FDS, NOTIFY_SOCKET and WATCHDOG_USEC; all are removed from the environment, so that no child inherits them.
Without systemd every function here does nothing, which is no error. Protocols: sd_listen_fds(3), sd_notify(3),
sd_watchdog_enabled(3), and the variables of ExecStopPost= in systemd.exec(5).
"""

import contextlib
import functools
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import sdnotify

_FIRST_DESCRIPTOR = 3
_STOPS = "stops.jsonl"
_MOST_STOPS_BYTES = 64 * 1024


@functools.cache
def take_descriptors() -> Mapping[str, list[int]]:
    """Return the descriptors passed to this very process by their names, and forget the variables.

    Descriptors that were passed to another process (a foreign LISTEN_PID) are not ours and are left alone.
    """
    pid = os.environ.pop("LISTEN_PID", None)
    count = os.environ.pop("LISTEN_FDS", None)
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or count is None or not count.isdigit():
        return {}
    passed: dict[str, list[int]] = {}
    for index in range(int(count)):
        descriptor = _FIRST_DESCRIPTOR + index
        os.set_inheritable(descriptor, False)
        name = names[index] if index < len(names) else "unknown"
        passed.setdefault(name, []).append(descriptor)
    return passed


def passed_listener() -> socket.socket | None:
    """Return the control socket that systemd passed, as an object of its own; None where none was that fits."""
    for descriptor in take_descriptors().get("control", []):
        with contextlib.suppress(OSError):
            candidate = socket.socket(fileno=os.dup(descriptor))
            if (
                candidate.family == socket.AF_UNIX
                and candidate.type == socket.SOCK_STREAM
                and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            ):
                return candidate
            candidate.close()
    return None


class Notifier:
    """The notify socket of this process. Texts are kept in plain ASCII, since sdnotify encodes Latin-1."""

    def __init__(self) -> None:
        self._socket = sdnotify.SystemdNotifier()
        self.is_heard = "NOTIFY_SOCKET" in os.environ
        """Whether somebody listens."""
        self.invocation = os.environ.get("INVOCATION_ID") if self.is_heard else None
        """systemd's id of this start of the service; a shell may have one that is not ours."""
        self.watchdog_s = _watchdog_s() if self.is_heard else None
        """Within how many seconds a sign of life is expected; None: nobody expects one of us."""
        for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
            os.environ.pop(name, None)

    def ready(self, status: str) -> None:
        self._socket.notify(f"READY=1\nSTATUS={_plain(status)}")

    def stopping(self, status: str) -> None:
        self._socket.notify(f"STOPPING=1\nSTATUS={_plain(status)}")

    def status(self, status: str) -> None:
        self._socket.notify(f"STATUS={_plain(status)}")

    def alive(self) -> None:
        self._socket.notify("WATCHDOG=1")

    def extend(self, seconds: float) -> None:
        """Ask for so many seconds from now on, to start or to stop in; said anew with each real step."""
        self._socket.notify(f"EXTEND_TIMEOUT_USEC={int(seconds * 1_000_000)}")


@dataclass(frozen=True, slots=True)
class Stop:
    """How one start of the service ended, as systemd told ExecStopPost=."""

    invocation: str
    """systemd's id of that start; empty where it gave none."""
    result: str
    ending: str
    """The same in words."""
    at: str | None


def record_stop(state_dir: Path, environment: Mapping[str, str], at: str) -> None:
    """Write down how a start ended, behind what no later start has read yet. Raises OSError."""
    if "SERVICE_RESULT" not in environment or not state_dir.is_dir():
        return
    names = {"invocation": "INVOCATION_ID", "result": "SERVICE_RESULT", "status": "EXIT_STATUS"}
    found = {name: environment.get(variable, "") for name, variable in names.items()} | {"at": at}
    with (state_dir / _STOPS).open("a", encoding="utf-8") as file:
        # Starts that are refused again and again have said so themselves.
        if file.tell() < _MOST_STOPS_BYTES:
            file.write(json.dumps(found) + "\n")


def read_stops(state_dir: Path) -> list[Stop]:
    """Return what was written down of earlier starts, the oldest first."""
    try:
        lines = (state_dir / _STOPS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    return [stop for line in lines if (stop := _read_stop(line)) is not None]


def forget_stops(state_dir: Path) -> None:
    """Forget what was written down, now that it stands elsewhere."""
    with contextlib.suppress(OSError):
        (state_dir / _STOPS).unlink()


def _read_stop(line: str) -> Stop | None:
    try:
        found = {name: str(value) for name, value in json.loads(line).items()}
    except (ValueError, AttributeError):
        return None
    result, status = found.get("result", ""), found.get("status", "")
    words = {
        "watchdog": "the watchdog killed it, since it gave no sign of life",
        "timeout": "systemd killed it, since it took too long to start or to stop",
        "oom-kill": "the kernel killed it for want of memory",
        "signal": f"signal {status} ended it",
        "core-dump": f"signal {status} ended it",
        "exit-code": f"it ended with exit status {status}",
    }
    return Stop(found.get("invocation", ""), result, words.get(result, f"systemd says {result}"), found.get("at"))


def _watchdog_s() -> float | None:
    period, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID")
    if not period.isdigit() or int(period) == 0 or pid not in {None, str(os.getpid())}:
        return None
    return int(period) / 1_000_000


def _plain(text: str) -> str:
    return text.encode("ascii", "replace").decode().replace("\n", " ")
