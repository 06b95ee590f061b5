"""The sources of this tree as builders get them: a copy, made once for all the processes of a test run.

A copy, so that nobody's editing in the middle of a run changes what is built, and so that a test may spoil its own.
Once, because copying, fetching and building are costly: `made_once` has one process fill a directory of the run while
the others wait. The tests of packaging and those on a booted system both build through here, so that what is installed
in a machine is what the former have looked into.
"""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DIRECTORIES = ("brainlaned", "brainctl", "man", "packaging", "systemd")
DOCUMENTS = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
EPOCH = 1_700_000_000
BUILD_S = 300.0


@dataclass(frozen=True)
class Checkout:
    """A copy of the sources, and the directory where their builds keep what they fetch."""

    path: Path
    build: Path

    def run(self, script: str, *words: object, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
        """Run one of the scripts of packaging/ with a clean environment."""
        kept = {name: os.environ[name] for name in os.environ if name.startswith(("UV_", "PIP_", "SSL_", "HOME"))}
        path = f"{ROOT / '.venv/bin'}:{os.environ.get('PATH', os.defpath)}"
        return subprocess.run(
            [self.path / "packaging" / script, *map(str, words)],
            env={**kept, "PATH": path, "SOURCE_DATE_EPOCH": str(EPOCH)},
            umask=umask,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUILD_S,
        )

    def make_package(self, directory: Path) -> None:
        """Build the Debian package into a directory."""
        done = self.run("deb", "--build", self.build, "--dist", directory)
        assert done.returncode == 0, done.stderr

    def install(self, destdir: Path, prefix: str) -> Path:
        """Install below DESTDIR and return the prefix there."""
        done = self.run("install", "--destdir", destdir, "--prefix", prefix, "--build", self.build)
        assert done.returncode == 0, done.stderr
        return Path(f"{destdir}{prefix}")

    def uninstall(self, destdir: Path, prefix: str) -> None:
        done = self.run("uninstall", "--destdir", destdir, "--prefix", prefix)
        assert done.returncode == 0, done.stderr

    def copy(self, path: Path) -> "Checkout":
        """Return a copy that a test may change; it shares what was fetched."""
        return Checkout(shutil.copytree(self.path, path), self.build)


def copy_of_the_tree(path: Path, build: Path) -> Checkout:
    """Copy what is packaged of this tree to `path`, which is not there yet."""
    for name in DIRECTORIES:
        shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in DOCUMENTS:
        shutil.copy(ROOT / name, path / name)
    return Checkout(path, build)


def directory_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that all the test processes of this run have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Return a directory that the first process to ask has filled by `make`; it is there only when it is whole."""
    unfinished = directory.with_name(f"{directory.name}-unfinished")
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(directory)
    return directory
