"""The machine and its limits: what it is, how often it can sync, how often bare SQLite can commit.

Also the slow disk: a small library, built on the spot, that makes every sync of a process take longer.
"""

import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

SLOW_SYNC_US = 2500
SECONDS = 1.5

_SYNC = """
import os, sys, time
descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o600)
count, since = 0, time.perf_counter()
while time.perf_counter() - since < float(sys.argv[2]):
    os.write(descriptor, b"x" * 4096)
    os.fdatasync(descriptor)
    count += 1
print(count / (time.perf_counter() - since))
"""


def description(directory: Path) -> dict[str, str]:
    """Say what this machine is, in words for a reader of the table."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.lower().startswith(("model name", "hardware"))
    ]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "file_system": _file_system(directory),
    }


def _file_system(directory: Path) -> str:
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return "unknown"


def syncs_per_s(directory: Path, environment: dict[str, str] | None = None) -> float:
    """Return how often per second 4 KiB can be appended and synced (fdatasync)."""
    file = directory / "sync"
    command = [sys.executable, "-S", "-c", _SYNC, str(file), str(SECONDS)]
    found = subprocess.run(
        command, env={**os.environ, **(environment or {})}, check=True, capture_output=True, text=True
    )
    file.unlink()
    return float(found.stdout)


def python_mib() -> float:
    """Return what an interpreter that does nothing takes of memory."""
    program = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmRSS')))"
    return int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout) / 1024


def commits_per_s(directory: Path, seconds: float = SECONDS) -> float:
    """Return how often per second SQLite can insert one row and commit, as durably as the lane does."""
    path = directory / "commits.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")
        connection.execute("create table t (id integer primary key, body text)")
        count, since = 0, time.perf_counter()
        while time.perf_counter() - since < seconds:
            connection.execute("begin immediate")
            connection.execute("insert into t (body) values (?)", ("x" * 400,))
            connection.execute("commit")
            count += 1
        elapsed = time.perf_counter() - since
    for leftover in directory.glob("commits.db*"):
        leftover.unlink()
    return count / elapsed


def slow_disk(directory: Path) -> dict[str, str] | None:
    """Return the environment in which a process has a slow disk; None where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = directory / "slowsync.so"
    source = Path(__file__).with_name("slowsync.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "SLOWSYNC_US": str(SLOW_SYNC_US)}
