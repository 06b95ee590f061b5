"""The Debian systems that the machines boot: built once by mmdebstrap, kept in a cache, never written to again.

The cache is `$XDG_CACHE_HOME/brainlane-tests`, else `/var/tmp/brainlane-tests`. A root's name carries a digest of the
recipe, so that another recipe makes another root. However many test processes ask at once, one builds and the others
wait for its lock; a root appears under its name only when it is whole.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

RELEASES = {12: "bookworm", 13: "trixie"}
PACKAGES = ("systemd", "systemd-sysv", "dbus", "python3", "ca-certificates", "iproute2", "procps", "sqlite3")
BUILD_S = 600.0


def cache() -> Path:
    """Return the directory that keeps what is costly to make, made by us and closed to others."""
    configured = os.environ.get("XDG_CACHE_HOME")
    path = Path(configured or "/var/tmp", "brainlane-tests")  # noqa: S108 - checked below
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    assert found.st_uid == os.getuid() and found.st_mode & 0o777 == 0o700, f"{path} is not ours alone"
    return path


def build(*debians: int) -> dict[int, Path]:
    """Return the root of each of these Debians; what is not in the cache is built, all at the same time."""
    with ThreadPoolExecutor(len(debians)) as pool:
        return dict(zip(debians, pool.map(_root, debians), strict=True))


def cached(kind: str, digest: str, make: Callable[[Path], None]) -> Path:
    """Return the directory `kind`-`digest` of the cache; `make` fills it if it is not there, and others wait.

    Earlier directories of the same kind are removed: their recipe is gone.
    """
    directory = cache() / f"{kind}-{digest}"
    with _locked(cache() / f"{kind}.lock"):
        if directory.is_dir():
            return directory
        for old in cache().glob(f"{kind}-*"):
            shutil.rmtree(old)
        unfinished = cache() / f"{kind}-unfinished"
        unfinished.mkdir()
        make(unfinished)
        unfinished.rename(directory)
    return directory


def _root(debian: int) -> Path:
    release = RELEASES[debian]
    recipe = ("mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}", "--format=directory")

    def make(directory: Path) -> None:
        done = subprocess.run(
            [*recipe, release, os.fspath(directory)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=BUILD_S,
        )
        assert done.returncode == 0, f"mmdebstrap {release} ended with {done.returncode}:\n{done.stderr}"

    return cached(f"root{debian}", hashlib.sha256(repr((recipe, release)).encode()).hexdigest()[:12], make)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back by the kernel however we end
        yield
