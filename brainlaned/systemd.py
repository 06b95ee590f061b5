"""What systemd and the daemon tell each other: passed descriptors and the notify socket.

Owns LISTEN_FDS and NOTIFY_SOCKET; both are removed from the environment, so that no child inherits them. Without
systemd every function here does nothing, which is no error. Protocols: sd_listen_fds(3), sd_notify(3).
"""

import os
import socket

import sdnotify

_FIRST_DESCRIPTOR = 3


def take_descriptors() -> dict[str, list[int]]:
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


def is_listening_unix_stream(descriptor: int) -> bool:
    """Say whether a descriptor is what a control socket must be."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as candidate:
            return (
                candidate.family == socket.AF_UNIX
                and candidate.type == socket.SOCK_STREAM
                and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            )
    except OSError:
        return False


class Notifier:
    """The notify socket of this process. Texts are kept in plain ASCII, since sdnotify encodes Latin-1."""

    def __init__(self) -> None:
        self._socket = sdnotify.SystemdNotifier()
        os.environ.pop("NOTIFY_SOCKET", None)

    def ready(self, status: str) -> None:
        self._socket.notify(f"READY=1\nSTATUS={_plain(status)}")

    def stopping(self, status: str) -> None:
        self._socket.notify(f"STOPPING=1\nSTATUS={_plain(status)}")


def _plain(text: str) -> str:
    return text.encode("ascii", "replace").decode().replace("\n", " ")
