"""What the tests of installing share: a copy of the checkout to build from, and the package built from it, each once.

The libraries are fetched from the package index once for all test processes.
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import sources
from tests.brainserver import BrainServer
from tests.sources import Checkout

INTERPRETER = Path("/usr/bin/python3")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for what is made once for all the test processes of a run."""
    return sources.directory_of_the_run(tmp_path_factory)


@pytest.fixture(scope="session")
def checkout(shared: Path) -> Checkout:
    """The sources as they were when the first test asked, with the libraries already fetched."""

    def make(directory: Path) -> None:
        copy = sources.copy_of_the_tree(directory / "sources", directory / "build")
        done = copy.run("tree", "--build", copy.build, directory / "first-tree")
        assert done.returncode == 0, done.stderr

    directory = sources.made_once(shared / "packaging-checkout", make)
    return Checkout(directory / "sources", directory / "build")


@pytest.fixture(scope="session")
def package(shared: Path, checkout: Checkout) -> Path:
    """The Debian package of these sources."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is not installed")
    (package,) = sources.made_once(shared / "packaging-deb", checkout.make_package).glob("*.deb")
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
