"""What the tests of installing share: a copy of the checkout to build from, and the package built from it, each once.

The copy is so that nobody's editing in the middle of a test changes what is built. The libraries are fetched from the
package index once for all test processes.
"""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.brainserver import BrainServer

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("brainlaned", "brainctl", "man", "packaging", "systemd")
DOCUMENTS = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
EPOCH = 1_700_000_000
BUILD_S = 300.0
INTERPRETER = Path("/usr/bin/python3")

Shared = Callable[[str, Callable[[Path], None]], Path]


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


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Have a directory made once for all the test processes of this run."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def make_once(name: str, make: Callable[[Path], None]) -> Path:
        directory, unfinished = base / name, base / f"{name}-unfinished"
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.exists():
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                make(unfinished)
                unfinished.rename(directory)
        return directory

    return make_once


@pytest.fixture(scope="session")
def checkout(shared: Shared) -> Checkout:
    """The sources as they were when the first test asked, with the libraries already fetched."""

    def make(directory: Path) -> None:
        sources = directory / "sources"
        for name in SOURCES:
            shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in DOCUMENTS:
            shutil.copy(ROOT / name, sources / name)
        done = Checkout(sources, directory / "build").run(
            "tree", "--build", directory / "build", directory / "first-tree"
        )
        assert done.returncode == 0, done.stderr

    directory = shared("packaging-checkout", make)
    return Checkout(directory / "sources", directory / "build")


@pytest.fixture(scope="session")
def package(shared: Shared, checkout: Checkout) -> Path:
    """The Debian package of these sources."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is not installed")

    def make(directory: Path) -> None:
        done = checkout.run("deb", "--build", checkout.build, "--dist", directory)
        assert done.returncode == 0, done.stderr

    (package,) = shared("packaging-deb", make).glob("*.deb")
    return package


@pytest.fixture
def server() -> Iterator[BrainServer]:
    """The brain that an installed lane asks."""
    with BrainServer() as server:
        yield server


@pytest.fixture(scope="session")
def interpreter() -> Path:
    """The Python that installed programs run under; a test that runs them is skipped where it cannot."""
    if not INTERPRETER.exists():
        pytest.skip(f"there is no {INTERPRETER}")
    asked = subprocess.run([INTERPRETER, "-IS", "-c", "import sys, sqlite3, ssl; sys.exit(sys.version_info < (3, 11))"])
    if asked.returncode != 0:
        pytest.skip(f"{INTERPRETER} is older than 3.11, or lacks sqlite3 or ssl")
    return INTERPRETER
