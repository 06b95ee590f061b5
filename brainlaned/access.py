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
from enum import IntEnum

from . import config, events

GROUPS_KEPT_S = 10.0
_UCRED = struct.Struct("3i")


class Role(IntEnum):
    """Each role may do what the ones before it may."""

    OBSERVE = 1
    SUBMIT = 2
    OPERATE = 3


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return (uid, pid) of the other side of a connected Unix socket."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return uid, pid


class AccessList:
    """The configuration's users and groups, asked by uid. Looks up names, so it is for the thread pool."""

    def __init__(self, access: config.Access) -> None:
        self._named = {Role.OBSERVE: access.observe, Role.SUBMIT: access.submit, Role.OPERATE: access.operate}
        self._kept: dict[int, tuple[float, Role | None, str | None]] = {}
        self._lock = threading.Lock()

    def warn_of_unknown_groups(self) -> None:
        for name in sorted({name[1:] for names in self._named.values() for name in names if name.startswith("@")}):
            try:
                grp.getgrnam(name)
            except KeyError:
                events.unknown_group(name)

    def look_up(self, uid: int) -> tuple[Role | None, str | None]:
        """Return the highest role of a user (None: none at all) and the user's name where there is one."""
        role, name = self._decide(uid)
        now = time.monotonic()
        with self._lock:
            self._kept = {other: entry for other, entry in self._kept.items() if now - entry[0] < GROUPS_KEPT_S}
            self._kept[uid] = (now, role, name)
        return role, name

    def known(self, uid: int) -> tuple[Role | None, str | None] | None:
        """Return what a recent look-up found, at once; None where there was none."""
        with self._lock:
            kept = self._kept.get(uid)
        return kept[1:] if kept is not None and time.monotonic() - kept[0] < GROUPS_KEPT_S else None

    def _decide(self, uid: int) -> tuple[Role | None, str | None]:
        try:
            user = pwd.getpwuid(uid)
        except KeyError:
            return (Role.OPERATE if uid in {0, os.geteuid()} else None), None
        if uid in {0, os.geteuid()}:
            return Role.OPERATE, user.pw_name
        mine = {user.pw_name}
        for gid in os.getgrouplist(user.pw_name, user.pw_gid):
            try:
                mine.add(f"@{grp.getgrgid(gid).gr_name}")
            except KeyError:
                continue
        return max((role for role, names in self._named.items() if mine & set(names)), default=None), user.pw_name
