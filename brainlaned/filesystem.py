"""Whether a lane can live in a directory: is it on this machine, may we write what is there, is there room left?

A write-ahead log needs shared memory that no network file system keeps coherent, and a file that somebody else left
behind unwritable would make every later write fail. Both are found out before anything is created.
"""

import os
import pwd
import re
import stat
from pathlib import Path

from . import errors
from .wire import DaemonExit

NETWORK_TYPES = frozenset(
    {
        *(
            "nfs",
            "nfs4",
            "cifs",
            "smb3",
            "smbfs",
            "fuse.sshfs",
            "fuse.glusterfs",
            "fuse.ceph",
            "fuse.s3fs",
            "fuse.rclone",
        ),
        *(
            "9p",
            "acfs",
            "afs",
            "beegfs",
            "ceph",
            "coda",
            "davfs",
            "gfs2",
            "glusterfs",
            "gpfs",
            "lustre",
            "ncpfs",
            "ocfs2",
        ),
        *("orangefs", "panfs", "pvfs2"),
    }
)
"""File systems that other machines write too, as /proc/self/mountinfo calls them."""

MIB = 1024 * 1024

FILES = ("brainlane.db", "brainlane.db-wal", "brainlane.db-shm", "spool")


def check_local(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> None:
    """Refuse a directory, there or not, on a network file system. Raises StartRefused (78), having created nothing."""
    kind = type_of(directory, mounts)
    if kind in NETWORK_TYPES:
        raise errors.StartRefused(
            DaemonExit.CONFIGURATION,
            f"cannot keep state in '{directory}': it is on a network file system ({kind}), where a write-ahead log is "
            "not safe",
            "brainlaned --state-dir DIR, with a directory on a disk of this machine",
        )


def type_of(path: Path, mounts: Path) -> str | None:
    """Return the type of the file system that holds a path, or would (proc_pid_mountinfo(5)); None: nobody says."""
    wanted = path.resolve()
    best, kind = -1, None
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        place = Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), before.split(" ")[4]))
        # Of two mounts on one place the later one is seen.
        if wanted.is_relative_to(place) and len(place.parts) >= best:
            best, kind = len(place.parts), after.split(" ")[0]
    return kind


def check_writable(directory: Path) -> None:
    """Refuse a state directory of which we may not write a part. Raises StartRefused (77) naming it and its owner."""
    for path in (directory, *(directory / name for name in FILES)):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        if os.access(path, os.W_OK | (os.X_OK if stat.S_ISDIR(status.st_mode) else 0)):
            continue
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            raise errors.StartRefused(
                DaemonExit.PERMISSION,
                f"cannot write '{path}': its file system is mounted read-only",
                f"findmnt --target {path}",
            )
        raise errors.StartRefused(
            DaemonExit.PERMISSION,
            f"cannot write '{path}': it belongs to {_name(status.st_uid)} with mode "
            f"{stat.S_IMODE(status.st_mode):04o}, and must belong to {_name(os.geteuid())}",
            f"chown {_name(os.geteuid())} {path}",
        )


class Reserve:
    """The space that must stay free beside the state, so that what is paid for can always be stored."""

    def __init__(self, directory: Path, reserve_mib: int) -> None:
        self.directory = str(directory)
        self.size = reserve_mib * MIB

    def free(self) -> int:
        """Return how many bytes we may still write there (statvfs(3)); 0: it cannot be asked, so none."""
        try:
            found = os.statvfs(self.directory)
        except OSError:
            return 0
        return found.f_bavail * found.f_frsize

    def is_low(self) -> bool:
        """Say whether less is free than the reserve."""
        return self.free() < self.size


def check_not_emptied(directory: Path, *, has_database: bool) -> None:
    """Refuse a place in which a lane has lived and whose database is gone or empty. Raises StartRefused (65).

    The spool is made after the database, so it proves that there was one; a new one in its place would forget every
    job without a word.
    """
    if (directory / "spool").exists() and not has_database:
        raise errors.StartRefused(
            DaemonExit.DATABASE,
            f"cannot open database '{directory / 'brainlane.db'}': it is missing or empty, and a lane has lived here",
            f"put a backup there, or rmdir {directory / 'spool'} to begin anew",
        )


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
