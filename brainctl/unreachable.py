"""The ways in which no lane answers, told apart, each with what to try.

Owns the sentences for a missing, dead, forbidden, silent or foreign socket and for a service that has failed behind a
socket that systemd keeps open. Looks at the socket file and asks systemctl, and only after something went wrong.
"""

import os
import re
import stat
from pathlib import Path

from brainlaned.wire import ErrorKind, system_socket

from .errors import Problem

SYSTEMCTL_S = 0.5
"""systemctl answers in milliseconds or is itself in trouble; a command must end in time."""


def not_connected(path: str, error: OSError, within_s: float) -> Problem:
    """Say why no connection to the socket could be made."""
    match error:
        case TimeoutError():
            return silent(path, within_s, maybe_done=False)
        case FileNotFoundError() | NotADirectoryError():
            return Problem(
                ErrorKind.NO_SOCKET, f"cannot reach a lane: there is no socket '{path}'", _how_to_start(path)
            )
        case ConnectionRefusedError() if not _is_socket(path):
            return not_a_lane(path)
        case ConnectionRefusedError():
            return Problem(
                ErrorKind.DEAD_SOCKET,
                f"cannot reach the lane: nobody listens on '{path}' any more",
                _how_to_start(path),
            )
        case PermissionError():
            return Problem(
                ErrorKind.NO_PERMISSION,
                f"cannot reach the lane: no permission to use '{path}'",
                _how_to_be_allowed(path),
            )
        case _:
            return Problem(
                ErrorKind.NO_SOCKET,
                f"cannot reach a lane at '{path}': {error.strerror or type(error).__name__}",
                _how_to_start(path),
            )


def silent(path: str, within_s: float, *, maybe_done: bool) -> Problem:
    """Say that a lane, or only systemd in its place, accepted and did not answer in time."""
    unit = _unit(path)
    failure = _failure(unit) if unit else None
    if failure:
        return Problem(
            ErrorKind.LANE_FAILED,
            f"cannot get an answer: the service {unit} behind '{path}' does not run ({failure})",
            f"systemctl status {unit}",
            maybe_done=maybe_done,
        )
    return Problem(
        ErrorKind.NO_ANSWER,
        f"cannot get an answer: '{path}' accepts, but nothing came within {within_s:g} s",
        f"{_how_to_look(path)}, or brainctl --answer-within 60 ... to wait longer",
        maybe_done=maybe_done,
    )


def hung_up(path: str, *, maybe_done: bool) -> Problem:
    """Say that the connection ended before the answer did."""
    return Problem(
        ErrorKind.NO_ANSWER,
        f"cannot get an answer: '{path}' closed the connection before it had answered",
        _how_to_look(path),
        maybe_done=maybe_done,
    )


def not_a_lane(path: str) -> Problem:
    """Say that something else lives at the path."""
    return Problem(
        ErrorKind.NOT_A_LANE,
        f"cannot talk to '{path}': it is not the socket of a lane",
        "brainctl --socket PATH, or unset BRAINLANE_SOCKET",
    )


def _unit(path: str) -> str | None:
    """Return the service whose socket systemd puts there, if it is such a place."""
    found = re.fullmatch(r"brainlane(?:-(.+))?", Path(path).parent.name)
    if found is None or Path(path) != system_socket(found[1]):
        return None
    return f"brainlaned@{found[1]}" if found[1] else "brainlaned"


def _how_to_start(path: str) -> str:
    unit = _unit(path)
    if unit:
        return f"systemctl start {unit}.socket (systemctl status {unit}.socket says why it is down)"
    return f"systemctl start brainlaned.socket for the system's lane, or run: brainlaned --socket {path}"


def _how_to_look(path: str) -> str:
    unit = _unit(path)
    return f"systemctl status {unit}" if unit else "look at the brainlaned that was started there"


def _failure(unit: str) -> str | None:
    """Return what systemd says of a service that is not running; None where it runs or systemd cannot be asked."""
    import subprocess

    try:
        shown = subprocess.run(
            ["systemctl", "show", "--property=ActiveState,SubState,Result", f"{unit}.service"],  # noqa: S607 - by PATH
            capture_output=True,
            text=True,
            timeout=SYSTEMCTL_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    facts = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    if facts.get("ActiveState") == "failed" or facts.get("SubState") in ("auto-restart", "auto-restart-queued"):
        return f"{facts.get('SubState')}, result {facts.get('Result')}"
    return None


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)  # noqa: PTH116 - a Path adds nothing to a system call
    except OSError:
        return True


def _how_to_be_allowed(path: str) -> str:
    import grp

    try:
        found = os.stat(path)  # noqa: PTH116
        group = grp.getgrgid(found.st_gid).gr_name if found.st_mode & stat.S_IWGRP else None
    except (OSError, KeyError):
        # The directory may not be searched; only the system's lanes have a group that is known beforehand.
        group = "brainlane" if _unit(path) else None
    if group is None:
        return f"run brainctl as the user who runs the lane (ls -ld '{Path(path).parent}' shows him)"
    return f"ask for membership in the group '{group}' and log in again (id shows yours)"
