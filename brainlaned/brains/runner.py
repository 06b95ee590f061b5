"""Runs one command and writes down how it ended: a script of its own, started by command.py for every attempt.

    python -I -S runner.py PREFIX PARENT READY COMMAND...

It leads a session of its own. It writes who it is (PREFIX.identity: pid, start time, boot id) and syncs that before it
starts anything, so that whoever comes after a crash can tell this process from a stranger with the same number. Then,
only if PARENT still is its parent, it writes a byte to the descriptor READY and starts the command, with PREFIX.stdin,
PREFIX.stdout and PREFIX.stderr as its files. An identity that is not there therefore proves that the command was never
started. How the command ended stands in PREFIX.status ("exit N", negative for a signal, "spawn ERRNO", "blind" where it
cannot tell who it is, "alone" where its parent has gone), which appears whole or not at all, and only when the output
before it is on the disk.

It imports nothing that is slow to load, since every call to a command waits for it.
"""

import os
import signal
import sys


def main() -> None:
    prefix, parent, ready = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    command = sys.argv[4:]
    # The whole group is told to end; we stay to write down how the command did. A handler, unlike SIG_IGN, is not
    # inherited by it.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    os.set_inheritable(ready, False)
    identity = identity_of(os.getpid())
    if identity is None:
        # Nobody could find us again after a crash, so nothing is started.
        _write(f"{prefix}.status", "blind")
        return
    _write(f"{prefix}.identity", identity)
    try:
        if os.getppid() != parent:
            raise BrokenPipeError
        os.write(ready, b"1")
    except BrokenPipeError:
        _write(f"{prefix}.status", "alone")
        return
    os.close(ready)
    try:
        pid = os.posix_spawnp(
            command[0],
            command,
            _given_environment(),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, f"{prefix}.stdin", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, f"{prefix}.stdout", os.O_WRONLY | os.O_APPEND, 0),
                (os.POSIX_SPAWN_OPEN, 2, f"{prefix}.stderr", os.O_WRONLY | os.O_APPEND, 0),
            ],
            # What Python or the daemon ignores the command must not.
            setsigdef=[signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ],
        )
    except OSError as error:
        _write(f"{prefix}.status", f"spawn {error.errno}")
        return
    _, status = os.waitpid(pid, 0)
    _sync(f"{prefix}.stdout", os.O_RDONLY)
    _write(f"{prefix}.status", f"exit {os.waitstatus_to_exitcode(status)}")
    # What the command has left behind ends with it, and we with that: all is written down.
    os.killpg(0, signal.SIGKILL)


def _given_environment() -> dict[bytes, bytes]:
    """Return the environment as it was handed to us: Python adds LC_CTYPE where it does not know the language."""
    with open("/proc/self/environ", "rb") as file:
        pairs = (pair.partition(b"=") for pair in file.read().split(b"\0") if pair)
        return {name: value for name, _, value in pairs}


def identity_of(pid: int) -> str | None:
    """Return what tells a process from any other that ever had or will have its number; None: there is no such one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # Field 22, counted behind the name, which may hold anything, even brackets (proc_pid_stat(5)).
            started = file.read().rpartition(b")")[2].split()[19].decode()
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{pid} {started} {file.read().strip()}"
    except OSError:
        return None


def _write(path: str, text: str) -> None:
    """Write a small file so that it is there whole or not at all, also after a power cut."""
    with open(f"{path}.new", "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{path}.new", path)
    _sync(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: str, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
