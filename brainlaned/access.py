"""Who is calling, as the kernel says it, and what they may do.

SO_PEERCRED names uid and pid of whoever connected (unix(7)); it carries no supplementary groups, so those are looked up
by user, off the event loop, and kept for a short time. root and the user that the daemon runs as may always operate.
"""

import grp
import os
import pwd
import socket
import struct
import threading
import time
from dataclasses import dataclass
from enum import IntEnum

from . import config, events

GROUPS_KEPT_S = 10.0
_UCRED = struct.Struct("3i")


class Role(IntEnum):
    """Each role may do what the ones before it may."""

    OBSERVE = 1
    SUBMIT = 2
    OPERATE = 3


@dataclass(frozen=True, slots=True)
class Person:
    """A user, as the configuration and the system's lists of users know him."""

    name: str | None
    """None: the system does not know him."""
    role: Role | None
    """The highest; None: none at all."""
    reads_others: bool
    """He may read the prompts and answers of others."""


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return (uid, pid) of the other side of a connected Unix socket."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return uid, pid


def uid_of(text: str) -> int | None:
    """Return the uid that a user's name or number means; None where the system knows no such user."""
    if text.isascii() and text.isdecimal() and len(text) <= 10:
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except (KeyError, ValueError):
        return None


class AccessList:
    """The configuration's users and groups, asked by uid. Looks up names, so it is for the thread pool."""

    def __init__(self, access: config.Access) -> None:
        self._named = {Role.OBSERVE: access.observe, Role.SUBMIT: access.submit, Role.OPERATE: access.operate}
        self._readers = access.read
        self._kept: dict[int, tuple[float, Person]] = {}
        self._lock = threading.Lock()

    def warn_of_unknown_groups(self) -> None:
        every = (*self._named.values(), self._readers)
        for name in sorted({name[1:] for names in every for name in names if name.startswith("@")}):
            try:
                grp.getgrnam(name)
            except KeyError:
                events.unknown_group(name)

    def look_up(self, uid: int) -> Person:
        """Return who a user is and what he may do."""
        person = self._decide(uid)
        now = time.monotonic()
        with self._lock:
            self._kept = {other: entry for other, entry in self._kept.items() if now - entry[0] < GROUPS_KEPT_S}
            self._kept[uid] = (now, person)
        return person

    def known(self, uid: int) -> Person | None:
        """Return what a recent look-up found, at once; None where there was none."""
        with self._lock:
            kept = self._kept.get(uid)
        return kept[1] if kept is not None and time.monotonic() - kept[0] < GROUPS_KEPT_S else None

    def _decide(self, uid: int) -> Person:
        is_ours = uid in {0, os.geteuid()}
        try:
            user = pwd.getpwuid(uid)
        except KeyError:
            return Person(None, Role.OPERATE if is_ours else None, reads_others=is_ours)
        if is_ours:
            return Person(user.pw_name, Role.OPERATE, reads_others=True)
        mine = {user.pw_name}
        for gid in os.getgrouplist(user.pw_name, user.pw_gid):
            try:
                mine.add(f"@{grp.getgrgid(gid).gr_name}")
            except KeyError:
                continue
        role = max((role for role, names in self._named.items() if mine & set(names)), default=None)
        return Person(user.pw_name, role, reads_others=role is Role.OPERATE or bool(mine & set(self._readers)))
